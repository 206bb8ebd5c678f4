// Attention on CUDA, backward. The scores are computed anew from q and k, and the softmax from them and lse:
//
//   P = exp(scale q k^T - lse)     dP = dout v^T     dS = P (dP - D),  D = <dout, out> of the row
//   dq = scale dS k                dk = scale dS^T q                   dv = P^T dout
//
// dq is a sum over keys, dk and dv are sums over query rows. So there are two kernels that both compute P and
// dS: in the first a block owns query rows and walks over the keys, in the second it owns keys and walks over
// the query rows. That is 7 products instead of 5 for a pass in one kernel, whose blocks would add to each
// other's sums in an order that nobody knows.
#pragma once

#include <cstdint>
#include <type_traits>

#include "xmod/cuda_attention_forward.h"
#include "xmod/cuda_attention_rows.h"

namespace xmod::cuda_attention {

// What the second kernel needs of a query row: 16 bytes that cp.async copies at once.
struct alignas(16) RowRecord {
  float lse_log2;  // lse * log2(e)
  float delta;     // D
  int visible;     // keys
  int unused;
};

// The caller's buffers, as in cuda_attention_backward.
template <class Element>
struct BackwardBuffers {
  Element *dq, *dk, *dv;
  int64_t dv_stride;
  const Element *dout, *q, *k, *v;
  int64_t v_stride;
  const Element* out;
  const float* lse;
  RowRecord* records;  // (nq, H)
};

// Scores become P, and dP becomes dS. record_of(m, n, e) and key_of(m, n, e) tell the query row and the key
// (in its sequence) of a number; all_seen: every row sees every key.
template <int Rows, int Columns, class RecordOf, class KeyOf>
__device__ inline void softmax_backward(Strip<Rows, Columns>& probs, Strip<Rows, Columns>& dscores,
                                        float scale_log2, bool all_seen, RecordOf record_of, KeyOf key_of) {
  for_each_number<Rows, Columns>([&](int m, int n, int e) {
    const RowRecord row = record_of(m, n, e);
    float &p = probs.block[m][n][e], &ds = dscores.block[m][n][e];
    p = exp2_flushed(fmaf(p, scale_log2, -row.lse_log2));
    ds = p * (ds - row.delta);
  });
  if (all_seen) return;
  for_each_number<Rows, Columns>([&](int m, int n, int e) {
    const int visible = record_of(m, n, e).visible;
    const bool unseen = key_of(m, n, e) >= visible;
    if (unseen) probs.block[m][n][e] = 0;
    // The softmax over one key is constant. Its gradient must be exactly zero, since Muon normalises every
    // update: a sparse layer that selects one token of a sequence would train on rounding noise.
    if (unseen || visible == 1) dscores.block[m][n][e] = 0;
  });
}

// ---------------------------------------------------------------------------------------------------
// dq

// As ForwardTiling; the keys of a tile are worked on kStep at a time.
template <class Element, int Width>
struct QueryGradientTiling {
  static constexpr bool kTensorCores = std::is_same_v<Element, Bf16>;
  static constexpr int kStripRows = kTensorCores ? 32 : 16;
  static constexpr int kRows = kWarps * kStripRows;
  static constexpr int kKeys = !kTensorCores ? 16 : Width < 128 ? 64 : 32;
  static constexpr int kStep = kTensorCores ? 32 : 16;
  // queries and douts; keys and values twice; records
  static constexpr int kTileElements = (2 * kRows + 4 * kKeys) * Width;
  static constexpr size_t kSharedBytes = sizeof(Element) * kTileElements + kRows * sizeof(RowRecord);
};

// <a, b> of a row, of which each lane of the quad computes a part.
template <int Width, class Element, class HeadRows>
__device__ inline float quad_dot(const Element* a, const Element* b, const HeadRows& head) {
  constexpr int kPerChunk = 16 / static_cast<int>(sizeof(Element));
  float sum = 0;
#pragma unroll
  for (int i = 0; i < Width; i += 4 * kPerChunk) {
    const int channel = i + lane_index() % 4 * kPerChunk;
    Element x[kPerChunk], y[kPerChunk];
    if (head.aligned && channel < head.size) {
      const uint4 x_bits = *reinterpret_cast<const uint4*>(a + channel);
      const uint4 y_bits = *reinterpret_cast<const uint4*>(b + channel);
      memcpy(x, &x_bits, sizeof(x));
      memcpy(y, &y_bits, sizeof(y));
    } else {
      for (int e = 0; e < kPerChunk; ++e) {
        const bool exists = channel + e < head.size;
        x[e] = exists ? a[channel + e] : static_cast<Element>(0.0f);
        y[e] = exists ? b[channel + e] : static_cast<Element>(0.0f);
      }
    }
    for (int e = 0; e < kPerChunk; ++e) sum = fmaf(static_cast<float>(x[e]), static_cast<float>(y[e]), sum);
  }
  return quad_sum(sum);
}

// The records of a strip: written to shared memory, and for the other kernel.
template <int Rows, int Width, class Element, class HeadRows>
__device__ inline void make_records(const BackwardBuffers<Element>& at, const HeadSequence<HeadRows>& part,
                                    int first_row, RowRecord* records) {
#pragma unroll 1
  for (int i = lane_index() / 4; i < Rows; i += kWarpLanes / 4) {
    const int row = first_row + i;
    const bool exists = row < part.rows;
    const int64_t index = part.row_index(exists ? row : 0), first = index * part.heads.rows.size;
    const float delta = quad_dot<Width>(at.dout + first, at.out + first, part.heads.rows);
    if (lane_index() % 4 != 0) continue;
    records[i] = {at.lse[index] * kLog2E, delta, part.visible(row), 0};
    if (exists) at.records[index] = records[i];
  }
}

template <class Element, int Width, class HeadRows>
__global__ void __launch_bounds__(kThreads)
    query_gradient_kernel(BackwardBuffers<Element> at, Sequences sequences, Heads<HeadRows> heads) {
  using Tiling = QueryGradientTiling<Element, Width>;
  using Rows = Tile<Element, Width>;
  constexpr int kRows = Tiling::kRows, kStripRows = Tiling::kStripRows, kKeys = Tiling::kKeys,
                kStep = Tiling::kStep;
  const TilePlace place = find_tile(sequences.q_offsets, sequences.count, heads.KV, heads.group, kRows);
  if (place.sequence < 0) return;
  const HeadSequence<HeadRows> part(sequences, heads, place);

  dynamic_shared(Element, shared);
  const Rows queries{shared, 0}, douts{shared, kRows * Width};
  const auto keys = [&](int stage) { return Rows{shared, (2 * kRows + 2 * stage * kKeys) * Width}; };
  const auto values = [&](int stage) { return Rows{shared, (2 * kRows + (2 * stage + 1) * kKeys) * Width}; };

  const int64_t k_stride = int64_t{heads.KV} * heads.rows.size;
  const int tile_row = (place.count - 1 - place.index) * kRows;
  const int strip = warp_index() * kStripRows, strip_first = tile_row + strip;
  const int tile_keys = part.visible(tile_row + kRows - 1);
  const int fewest_keys = part.visible(strip_first), most_keys = part.visible(strip_first + kStripRows - 1);

  load_tile<kRows>(queries, heads.rows, [&](int i) { return part.query_row(at.q, tile_row + i); });
  load_tile<kRows>(douts, heads.rows, [&](int i) { return part.query_row(at.dout, tile_row + i); });
  RowRecord* const records = reinterpret_cast<RowRecord*>(shared + Tiling::kTileElements) + strip;
  make_records<kStripRows, Width>(at, part, strip_first, records);
  Strip<kStripRows, Width> dq;
  dq.clear();
  const auto load = [&](int tile, int stage) {
    const int first = tile * kKeys, count = tile_keys - first;
    load_strided_tile<kKeys>(keys(stage), heads.rows, part.key_row(at.k, k_stride, first), k_stride, count);
    load_strided_tile<kKeys>(values(stage), heads.rows, part.key_row(at.v, at.v_stride, first), at.v_stride,
                             count);
  };
  const auto work = [&](int tile, int stage) {
#pragma unroll 1
    for (int step = 0; step < kKeys; step += kStep) {
      const int first = tile * kKeys + step;
      if (first >= most_keys) return;
      Strip<kStripRows, kStep> probs, dscores;
      multiply_transposed(probs, queries, strip, keys(stage), step);
      multiply_transposed(dscores, douts, strip, values(stage), step);
      softmax_backward(
          probs, dscores, heads.scale_log2, first + kStep <= fewest_keys,
          [&](int m, int, int e) { return records[strip_row(m, e / 2)]; },
          [&](int, int n, int e) { return first + strip_column(n, e); });
      add_product(dq, dscores, keys(stage), step);
    }
  };
  stream_tiles((tile_keys + kKeys - 1) / kKeys, load, work);
  store_strip<Element>(
      dq, heads.rows, [&](int i) { return part.query_row(at.dq, strip_first + i); },
      [&](int, int) { return heads.scale; });
}

// ---------------------------------------------------------------------------------------------------
// dk and dv

// Each warp has a strip of the keys, with the sums of both gradients; the query rows of a tile are worked on
// kStep at a time.
template <class Element, int Width>
struct KeyGradientTiling {
  static constexpr bool kTensorCores = std::is_same_v<Element, Bf16>;
  static constexpr int kStripKeys = kTensorCores && Width < 128 ? 32 : 16;
  static constexpr int kKeys = kWarps * kStripKeys;
  static constexpr int kRows = kTensorCores ? 64 : 16;
  static constexpr int kStep = kTensorCores && Width == 128 ? 32 : 16;
  // keys and values; queries and douts twice; records twice
  static constexpr int kTileElements = (2 * kKeys + 4 * kRows) * Width;
  static constexpr size_t kSharedBytes = sizeof(Element) * kTileElements + 2 * kRows * sizeof(RowRecord);
};

// The products are those of the other kernel transposed: the strips have a row for each key and a column for
// each query row.
template <class Element, int Width, class HeadRows>
__global__ void __launch_bounds__(kThreads)
    key_gradient_kernel(BackwardBuffers<Element> at, Sequences sequences, Heads<HeadRows> heads) {
  using Tiling = KeyGradientTiling<Element, Width>;
  using Rows = Tile<Element, Width>;
  constexpr int kRows = Tiling::kRows, kStripKeys = Tiling::kStripKeys, kKeys = Tiling::kKeys,
                kStep = Tiling::kStep;
  const TilePlace place = find_tile(sequences.kv_offsets, sequences.count, heads.KV, 1, kKeys);
  if (place.sequence < 0) return;
  const HeadSequence<HeadRows> part(sequences, heads, place);

  dynamic_shared(Element, shared);
  const Rows keys{shared, 0}, values{shared, kKeys * Width};
  const auto queries = [&](int stage) { return Rows{shared, (2 * kKeys + 2 * stage * kRows) * Width}; };
  const auto douts = [&](int stage) { return Rows{shared, (2 * kKeys + (2 * stage + 1) * kRows) * Width}; };
  const auto records = [&](int stage) {
    return reinterpret_cast<RowRecord*>(shared + Tiling::kTileElements) + stage * kRows;
  };

  const int64_t k_stride = int64_t{heads.KV} * heads.rows.size;
  const int tile_key = place.index * kKeys;
  const int strip = warp_index() * kStripKeys, strip_first = tile_key + strip;
  const int seen_keys = part.queries == 0 ? 0 : part.visible(part.rows - 1);  // by any query
  const int first_row = part.first_query_that_sees(tile_key) * static_cast<int>(heads.group);

  load_strided_tile<kKeys>(keys, heads.rows, part.key_row(at.k, k_stride, tile_key), k_stride,
                           seen_keys - tile_key);
  load_strided_tile<kKeys>(values, heads.rows, part.key_row(at.v, at.v_stride, tile_key), at.v_stride,
                           seen_keys - tile_key);
  Strip<kStripKeys, Width> dk, dv;
  dk.clear();
  dv.clear();
  const auto load = [&](int tile, int stage) {
    const int first = first_row + tile * kRows, i = static_cast<int>(threadIdx.x);
    load_tile<kRows>(queries(stage), heads.rows, [&](int i) { return part.query_row(at.q, first + i); });
    load_tile<kRows>(douts(stage), heads.rows, [&](int i) { return part.query_row(at.dout, first + i); });
    if (i < kRows) {
      const bool exists = first + i < part.rows;
      cp_async_16(records(stage) + i, at.records + part.row_index(exists ? first + i : first), exists);
    }
  };
  const auto work = [&](int tile, int stage) {
    const int rows = part.rows - first_row - tile * kRows;  // left
#pragma unroll 1
    for (int step = 0; step < min(kRows, rows); step += kStep) {
      const RowRecord* row = records(stage) + step;
      if (row[min(kStep, rows - step) - 1].visible <= strip_first) continue;
      Strip<kStripKeys, kStep> probs, dscores;
      multiply_transposed(probs, keys, strip, queries(stage), step);
      multiply_transposed(dscores, values, strip, douts(stage), step);
      softmax_backward(
          probs, dscores, heads.scale_log2, strip_first + kStripKeys <= row[0].visible,
          [&](int, int n, int e) { return row[strip_column(n, e)]; },
          [&](int m, int, int e) { return strip_first + strip_row(m, e / 2); });
      add_product(dv, probs, douts(stage), step);
      add_product(dk, dscores, queries(stage), step);
    }
  };
  stream_tiles((part.rows - first_row + kRows - 1) / kRows, load, work);
  const auto key_rows = [&](Element* base, int64_t stride) {
    return [&part, strip_first, base, stride](int i) {
      const int key = strip_first + i;
      return RowPointer<Element>{part.key_row(base, stride, key), key < part.keys};
    };
  };
  store_strip<Element>(dk, heads.rows, key_rows(at.dk, k_stride), [&](int, int) { return heads.scale; });
  store_strip<Element>(dv, heads.rows, key_rows(at.dv, at.dv_stride), [](int, int) { return 1.0f; });
}

}  // namespace xmod::cuda_attention

// Attention on CUDA, forward: a block takes a tile of query rows, walks over the tiles of keys and values
// that they see, and keeps the softmax up to date as it goes. The picture is in cuda_attention.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "xmod/cuda_attention_rows.h"

namespace xmod::cuda_attention {

// The caller's buffers, as in cuda_attention_forward.
template <class Element>
struct ForwardBuffers {
  Element* out;
  float* lse;
  const Element *q, *k, *v;
  int64_t v_stride;
};

// A block's tile sizes: each warp has a strip of the rows, for which a lane keeps Rows / 16 * Width / 8 * 4
// sums of the output and as many scores for a tile of keys.
template <class Element, int Width>
struct ForwardTiling {
  static constexpr bool kTensorCores = std::is_same_v<Element, Bf16>;
  static constexpr int kStripRows = kTensorCores ? 32 : 16;
  static constexpr int kRows = kWarps * kStripRows;
  static constexpr int kKeys = kTensorCores ? 64 : 32;
  static constexpr int kStep = kTensorCores && Width < 128 ? 64 : 32;
  // queries; keys and values twice
  static constexpr int kSharedElements = (kRows + 4 * kKeys) * Width;
  static constexpr size_t kSharedBytes = kSharedElements * sizeof(Element);
};

// What the softmax of a row needs to go on: the largest score so far, and the sum of exp(score - largest),
// of which each lane of the quad has a part.
template <int Rows>
struct SoftmaxState {
  PerRow<float, Rows> largest, sum;

  __device__ void clear() {
    for_each_row<Rows>([&](int m, int half) {
      largest.at[m][half] = -kInfinity;
      sum.at[m][half] = 0;
    });
  }
};

// Scores of keys that a row does not see become -infinity.
template <int Rows, int Keys>
__device__ inline void hide_unseen_keys(Strip<Rows, Keys>& scores, const PerRow<int, Rows>& visible,
                                        int first_key) {
  for_each_number<Rows, Keys>([&](int m, int n, int e) {
    const bool unseen = first_key + strip_column(n, e) >= visible.at[m][e / 2];
    if (unseen) scores.block[m][n][e] = -kInfinity;
  });
}

// Scores become exp(score - largest). Where a new largest score turns up, what was added up before is too
// large by exp(new - old), and is scaled down. scale_log2 goes with the scores.
template <int Rows, int Keys, int Width>
__device__ inline void online_softmax(Strip<Rows, Keys>& scores, SoftmaxState<Rows>& state,
                                      Strip<Rows, Width>& out, float scale_log2) {
  PerRow<float, Rows> correction;
  bool larger = false;
  for_each_row<Rows>([&](int m, int half) {
    float &largest = state.largest.at[m][half], &sum = state.sum.at[m][half];
    float top = largest;
#pragma unroll
    for (int n = 0; n < Keys / 8; ++n)
      for (int e = 2 * half; e < 2 * half + 2; ++e) top = fmaxf(top, scores.block[m][n][e]);
    top = quad_max(top);
    larger = larger || top > largest;
    correction.at[m][half] = exp2_flushed((largest - top) * scale_log2);
    const float shift = top * scale_log2;
    largest = top;
    float tile_sum = 0;
#pragma unroll
    for (int n = 0; n < Keys / 8; ++n) {
      for (int e = 2 * half; e < 2 * half + 2; ++e) {
        float& x = scores.block[m][n][e];
        x = exp2_flushed(fmaf(x, scale_log2, -shift));
        tile_sum += x;
      }
    }
    sum = fmaf(sum, correction.at[m][half], tile_sum);
  });
  if (!__any_sync(kAllLanes, larger)) return;
  for_each_number<Rows, Width>([&](int m, int n, int e) { out.block[m][n][e] *= correction.at[m][e / 2]; });
}

// out and lse of a strip, behind the last key.
template <class Element, int Rows, int Width, class HeadRows>
__device__ inline void finish_rows(const ForwardBuffers<Element>& at, const HeadSequence<HeadRows>& part,
                                   int first_row, SoftmaxState<Rows>& state, const Strip<Rows, Width>& out) {
  for_each_row<Rows>([&](int m, int half) {
    float& sum = state.sum.at[m][half];
    sum = quad_sum(sum);
    const int row = first_row + strip_row(m, half);
    if (row < part.rows && lane_index() % 4 == 0) {
      at.lse[part.row_index(row)] = state.largest.at[m][half] * part.heads.scale + logf(sum);
    }
  });
  store_strip<Element>(
      out, part.heads.rows, [&](int i) { return part.query_row(at.out, first_row + i); },
      [&](int m, int half) { return 1.0f / state.sum.at[m][half]; });
}

template <class Element, int Width, class HeadRows>
__global__ void __launch_bounds__(kThreads)
    forward_kernel(ForwardBuffers<Element> at, Sequences sequences, Heads<HeadRows> heads) {
  using Tiling = ForwardTiling<Element, Width>;
  using Rows = Tile<Element, Width>;
  constexpr int kRows = Tiling::kRows, kStripRows = Tiling::kStripRows, kKeys = Tiling::kKeys,
                kStep = Tiling::kStep;
  const TilePlace place = find_tile(sequences.q_offsets, sequences.count, heads.KV, heads.group, kRows);
  if (place.sequence < 0) return;
  const HeadSequence<HeadRows> part(sequences, heads, place);

  dynamic_shared(Element, shared);
  const Rows queries{shared, 0};
  const auto keys = [&](int stage) { return Rows{shared, (kRows + 2 * stage * kKeys) * Width}; };
  const auto values = [&](int stage) { return Rows{shared, (kRows + (2 * stage + 1) * kKeys) * Width}; };
  const int64_t k_stride = int64_t{heads.KV} * heads.rows.size;

  // A sequence's last tile sees the most keys: it comes first, so that no block is left behind at the end.
  const int tile_row = (place.count - 1 - place.index) * kRows;
  const int strip = warp_index() * kStripRows, strip_first = tile_row + strip;
  const int tile_keys = part.visible(tile_row + kRows - 1);
  const int most_keys = part.visible(strip_first + kStripRows - 1);

  PerRow<int, kStripRows> visible;
  for_each_row<kStripRows>(
      [&](int m, int half) { visible.at[m][half] = part.visible(strip_first + strip_row(m, half)); });
  SoftmaxState<kStripRows> state;
  Strip<kStripRows, Width> out;
  state.clear();
  out.clear();
  load_tile<kRows>(queries, heads.rows, [&](int i) { return part.query_row(at.q, tile_row + i); });
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
      Strip<kStripRows, kStep> scores;
      multiply_transposed(scores, queries, strip, keys(stage), step);
      if (first + kStep > visible.at[0][0]) hide_unseen_keys(scores, visible, first);
      online_softmax(scores, state, out, heads.scale_log2);
      add_product(out, scores, values(stage), step);
    }
  };
  stream_tiles((tile_keys + kKeys - 1) / kKeys, load, work);
  finish_rows(at, part, strip_first, state, out);
}

}  // namespace xmod::cuda_attention

// Causal attention on the CPU with grouped key/value heads, fp32, forward and backward, in tiles: the
// T x T scores exist only as one small tile a thread. Rows of several sequences (of any lengths) lie one
// after the other; all heads that share a key/value head are worked on together, as the rows
// (position 0, head 0), (position 0, head 1), ..., (position 1, head 0), ... of a tile, so that every key
// and value is loaded once for all of them.
//
// Each row's sums run over the keys in ascending order, each key's sums over the rows in ascending order,
// whatever the number of threads and whatever else stands in the batch: results are equal bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "xmod/cpu_vector.h"

namespace xmod {

namespace detail {

// The register block of a tile product: 6 rows by 4 vectors (2 where there are only 16 registers).
inline constexpr int64_t kRowBlock = 6;
inline constexpr int64_t kVectorBlock = kLanes == 16 ? 4 : 2;
inline constexpr int64_t kKeyTile = 96;    // keys in a tile: whole row blocks and whole vectors
inline constexpr int64_t kQueryTile = 48;  // rows (position, head) in a query tile, where the heads allow it

inline int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

struct alignas(64) CacheLine {
  float values[16];
};

// Floats on a cache line's border; grows, never shrinks.
class AlignedFloats {
 public:
  float* reserve(int64_t count) {
    size_t lines = static_cast<size_t>(round_up(count, 16) / 16);
    if (lines_.size() < lines) lines_.resize(lines);
    return lines_.empty() ? nullptr : lines_.data()->values;
  }

 private:
  std::vector<CacheLine> lines_;
};

// Up to kKeyTile consecutive keys of one sequence and one key/value head.
struct KeyTile {
  int64_t row;  // of the first key
  int64_t count;
  int64_t kv_head;
};

// Consecutive positions of one sequence, with all heads of one key/value head.
struct QueryTile {
  int64_t row;        // of the first position
  int64_t positions;  // how many
  int64_t kv_head;
  int64_t first_position;  // of the first row, within the sequence
  int64_t index;           // of this tile within the sequence
  int64_t first_key_tile;  // of the sequence and key/value head, in the list of key tiles

  // How many of the sequence's keys the i-th position of this tile sees.
  int64_t visible_keys(int64_t i) const { return first_position + i + 1; }
  int64_t key_tiles() const { return round_up(visible_keys(positions - 1), kKeyTile) / kKeyTile; }
};

// The tiles of one sequence and key/value head: first .. last - 1.
struct HeadTiles {
  int64_t first_query, last_query;
  int64_t first_key, last_key;
};

// What one thread holds of a query tile. R rows (padded to whole row blocks), C = head size (padded to
// whole vectors).
struct TileBuffers {
  AlignedFloats query, out, dout, dquery;  // (R, C)
  AlignedFloats probs, dscores;            // (R, kKeyTile)
  AlignedFloats max, sum, delta;           // (R), (R, kLanes), (R)
  std::vector<int64_t> visible;            // (R), 0 for padding rows
  AlignedFloats panels;                    // the packed keys and values of one sequence and key/value head
};

}  // namespace detail

// Memory that the passes below reuse from call to call; it grows when a call needs more.
struct AttentionScratch {
  std::vector<detail::TileBuffers> threads;
  std::vector<detail::KeyTile> key_tiles;
  std::vector<detail::QueryTile> query_tiles;
  std::vector<detail::HeadTiles> heads;
  detail::AlignedFloats panels;  // the same for all sequences, where threads share them
};

namespace detail {

struct AttentionShape {
  int64_t heads, kv_heads, head_size;

  int64_t group() const { return heads / kv_heads; }
  int64_t width() const { return round_up(head_size, kLanes); }  // of a padded row
  int64_t panel() const { return kKeyTile * width(); }           // floats of a padded tile of keys
  int64_t tile_positions() const { return std::max<int64_t>(1, kQueryTile / group()); }
  int64_t tile_rows() const { return round_up(tile_positions() * group(), kRowBlock); }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_size)); }
};

inline int max_threads() {
#ifdef _OPENMP
  return omp_get_max_threads();
#else
  return 1;
#endif
}

inline int thread_index() {
#ifdef _OPENMP
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// ---------------------------------------------------------------------------------------------------
// Tile products

enum class Start { kZero, kAdd, kScale };  // c = ab, c = c + ab, c = scale c + ab

// c (kRowBlock, Columns vectors) from a (kRowBlock, depth) and b (depth, Columns vectors). Element (m, k) of
// a is a[m * a_row + k * a_column], so a may be transposed. scale (kRowBlock) is used by kScale only.
template <Start start, int Columns>
inline void multiply_block(float* c, int64_t c_stride, const float* a, int64_t a_row, int64_t a_column,
                           const float* b, int64_t b_stride, int64_t depth, const float* scale) {
  Vector sum[kRowBlock][Columns];
  for (int m = 0; m < kRowBlock; ++m) {
    for (int n = 0; n < Columns; ++n) {
      if constexpr (start == Start::kZero) sum[m][n] = Vector{};
      if constexpr (start == Start::kAdd) sum[m][n] = load(c + m * c_stride + n * kLanes);
      if constexpr (start == Start::kScale) sum[m][n] = load(c + m * c_stride + n * kLanes) * scale[m];
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector columns[Columns];
    for (int n = 0; n < Columns; ++n) columns[n] = load(b + k * b_stride + n * kLanes);
    for (int m = 0; m < kRowBlock; ++m) {
      Vector factor = splat(a[m * a_row + k * a_column]);
      for (int n = 0; n < Columns; ++n) sum[m][n] += factor * columns[n];
    }
  }
  for (int m = 0; m < kRowBlock; ++m) {
    for (int n = 0; n < Columns; ++n) store(c + m * c_stride + n * kLanes, sum[m][n]);
  }
}

// The same for any number of columns (a whole number of vectors).
template <Start start>
inline void multiply_rows(float* c, int64_t c_stride, const float* a, int64_t a_row, int64_t a_column,
                          const float* b, int64_t b_stride, int64_t columns, int64_t depth,
                          const float* scale = nullptr) {
  int64_t n = 0;
  for (; n + kVectorBlock * kLanes <= columns; n += kVectorBlock * kLanes) {
    multiply_block<start, kVectorBlock>(c + n, c_stride, a, a_row, a_column, b + n, b_stride, depth, scale);
  }
  switch ((columns - n) / kLanes) {
    case 3:
      multiply_block<start, 3>(c + n, c_stride, a, a_row, a_column, b + n, b_stride, depth, scale);
      break;
    case 2:
      multiply_block<start, 2>(c + n, c_stride, a, a_row, a_column, b + n, b_stride, depth, scale);
      break;
    case 1:
      multiply_block<start, 1>(c + n, c_stride, a, a_row, a_column, b + n, b_stride, depth, scale);
      break;
  }
}

// ---------------------------------------------------------------------------------------------------
// Moving rows between the caller's buffers and padded tiles

// target (padded to whole vectors with zeros) = source (count) * factor
inline void load_row(float* target, const float* source, int64_t count, float factor) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(target + i, load(source + i) * factor);
  if (i < count) store(target + i, load_part(source + i, count - i) * factor);
}

// target (count) = source (padded) * factor
inline void store_row(float* target, const float* source, int64_t count, float factor) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(target + i, load(source + i) * factor);
  if (i < count) store_part(target + i, load(source + i) * factor, count - i);
}

// One step of a transpose: swaps the off-diagonal quarters of every 2 Distance x 2 Distance square.
template <int64_t Distance, int64_t... I>
inline void swap_quarters(Vector (&rows)[kLanes], std::integer_sequence<int64_t, I...>) {
  for (int64_t i = 0; i < kLanes; ++i) {
    if (i & Distance) continue;
    Vector upper = rows[i], lower = rows[i + Distance];
    rows[i] = __builtin_shufflevector(upper, lower, ((I & Distance) ? kLanes + (I ^ Distance) : I)...);
    rows[i + Distance] =
        __builtin_shufflevector(upper, lower, ((I & Distance) ? kLanes + I : I ^ Distance)...);
  }
}

template <int64_t Distance = kLanes / 2>
inline void transpose(Vector (&rows)[kLanes]) {
  if constexpr (Distance > 0) {
    swap_quarters<Distance>(rows, std::make_integer_sequence<int64_t, kLanes>());
    transpose<Distance / 2>(rows);
  }
}

// panel (head_size, kKeyTile) = source (count, head_size) transposed, the last vector of keys filled with
// zeros
inline void pack_transposed(float* panel, const float* source, int64_t stride, int64_t count,
                            int64_t head_size) {
  for (int64_t key = 0; key < count; key += kLanes) {
    for (int64_t c = 0; c < head_size; c += kLanes) {
      int64_t channels = std::min(kLanes, head_size - c);
      Vector rows[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const float* row = source + (key + i) * stride + c;
        if (key + i >= count)
          rows[i] = Vector{};
        else
          rows[i] = channels == kLanes ? load(row) : load_part(row, channels);
      }
      transpose(rows);
      for (int64_t i = 0; i < channels; ++i) store(panel + (c + i) * kKeyTile + key, rows[i]);
    }
  }
}

// panel (kKeyTile, width) = source (count, head_size)
inline void pack_rows(float* panel, const float* source, int64_t stride, int64_t count, int64_t head_size,
                      int64_t width) {
  for (int64_t i = 0; i < count; ++i) load_row(panel + i * width, source + i * stride, head_size, 1.0f);
}

// tile (rows, width): the tile's positions and heads from source (n, heads * head_size), times factor
inline void load_query_rows(float* tile, const float* source, const QueryTile& q, const AttentionShape& shape,
                            float factor) {
  const int64_t hd = shape.head_size, group = shape.group();
  for (int64_t i = 0; i < q.positions; ++i) {
    const float* row = source + (q.row + i) * shape.heads * hd + q.kv_head * group * hd;
    for (int64_t h = 0; h < group; ++h) {
      load_row(tile, row + h * hd, hd, factor);
      tile += shape.width();
    }
  }
}

inline void store_query_rows(float* target, const float* tile, const QueryTile& q,
                             const AttentionShape& shape, float factor) {
  const int64_t hd = shape.head_size, group = shape.group();
  for (int64_t i = 0; i < q.positions; ++i) {
    float* row = target + (q.row + i) * shape.heads * hd + q.kv_head * group * hd;
    for (int64_t h = 0; h < group; ++h) {
      store_row(row + h * hd, tile, hd, factor);
      tile += shape.width();
    }
  }
}

// Sets visible (rows of the tile); rows that pad the tile see nothing.
inline void set_visible(std::vector<int64_t>& visible, const QueryTile& q, const AttentionShape& shape) {
  visible.assign(static_cast<size_t>(shape.tile_rows()), 0);
  auto row = visible.begin();
  for (int64_t i = 0; i < q.positions; ++i) row = std::fill_n(row, shape.group(), q.visible_keys(i));
}

// ---------------------------------------------------------------------------------------------------
// The list of tiles

inline void list_tiles(AttentionScratch& scratch, const int64_t* offsets, int64_t B,
                       const AttentionShape& shape) {
  scratch.key_tiles.clear();
  scratch.query_tiles.clear();
  scratch.heads.clear();
  for (int64_t b = 0; b < B; ++b) {
    const int64_t length = offsets[b + 1] - offsets[b];
    for (int64_t kv_head = 0; kv_head < shape.kv_heads && length > 0; ++kv_head) {
      const int64_t first_key_tile = static_cast<int64_t>(scratch.key_tiles.size());
      for (int64_t key = 0; key < length; key += kKeyTile) {
        scratch.key_tiles.push_back({offsets[b] + key, std::min(kKeyTile, length - key), kv_head});
      }
      const int64_t first_query_tile = static_cast<int64_t>(scratch.query_tiles.size());
      const int64_t step = shape.tile_positions();
      for (int64_t position = 0; position < length; position += step) {
        scratch.query_tiles.push_back({offsets[b] + position, std::min(step, length - position), kv_head,
                                       position, position / step, first_key_tile});
      }
      scratch.heads.push_back({first_query_tile, static_cast<int64_t>(scratch.query_tiles.size()),
                               first_key_tile, static_cast<int64_t>(scratch.key_tiles.size())});
    }
  }
  scratch.threads.resize(std::max(scratch.threads.size(), static_cast<size_t>(max_threads())));
}

// Whether every thread takes whole sequences and key/value heads and packs their keys for itself, which keeps
// them in its cache. Otherwise the threads share the packed keys and divide the query tiles.
inline bool enough_heads(int64_t heads) {
  const int64_t threads = max_threads();
  return heads % threads == 0 || heads >= 8 * threads;
}

// ---------------------------------------------------------------------------------------------------
// Forward

// One row block of scores (kRowBlock, kKeyTile) becomes exp(score - max), zero where a row does not see the
// key. max and sum run over the tiles; correction = exp(old max - new max).
inline void softmax_block(float* scores, const int64_t* visible, int64_t key, int64_t block_keys, float* max,
                          float* sum, float* correction) {
  constexpr int64_t kPadded = 16;
  alignas(64) float change[kPadded] = {};
  for (int64_t m = 0; m < kRowBlock; ++m) {
    float* row = scores + m * kKeyTile;
    const int64_t keys = std::clamp<int64_t>(visible[m] - key, 0, block_keys);
    const int64_t whole = keys / kLanes * kLanes;
    const Vector lowest = splat(-std::numeric_limits<float>::infinity());
    for (int64_t i = whole; i < block_keys; i += kLanes) {
      store(row + i, keep_first(load(row + i), std::max<int64_t>(keys - i, 0), lowest));
    }
    Vector top = lowest;
    for (int64_t i = 0; i < keys; i += kLanes) top = xmod::max(load(row + i), top);
    const float new_max = keys > 0 ? std::max(max[m], horizontal_max(top)) : max[m];
    change[m] = keys > 0 ? max[m] - new_max : 0.0f;
    max[m] = new_max;
  }
  for (int64_t i = 0; i < kPadded; i += kLanes) store(correction + i, exp(load(change + i)));
  for (int64_t m = 0; m < kRowBlock; ++m) {
    float* row = scores + m * kKeyTile;
    const bool sees_any = visible[m] > key;
    Vector total = load(sum + m * kLanes) * correction[m];
    for (int64_t i = 0; i < block_keys; i += kLanes) {
      Vector p = sees_any ? exp(load(row + i) - max[m]) : Vector{};
      total += p;
      store(row + i, p);
    }
    store(sum + m * kLanes, total);
  }
}

// panels: of the tile's sequence and key/value head, a pair (keys transposed, values) for each key tile
inline void attention_forward_tile(float* out, float* lse, const float* q, const QueryTile& tile,
                                   const float* panels, const AttentionShape& shape, TileBuffers& buffers) {
  const int64_t rows = shape.tile_rows(), width = shape.width();
  const int64_t used_rows = tile.positions * shape.group();
  float* query = buffers.query.reserve(rows * width);
  float* weighted = buffers.out.reserve(rows * width);
  float* probs = buffers.probs.reserve(rows * kKeyTile);
  float* max = buffers.max.reserve(rows);
  float* sum = buffers.sum.reserve(rows * kLanes);
  set_visible(buffers.visible, tile, shape);
  load_query_rows(query, q, tile, shape, shape.scale());
  std::fill(max, max + rows, -std::numeric_limits<float>::infinity());
  std::fill(sum, sum + rows * kLanes, 0.0f);

  for (int64_t j = 0; j < tile.key_tiles(); ++j) {
    const float* keys_transposed = panels + 2 * j * shape.panel();
    const float* values = keys_transposed + shape.panel();
    for (int64_t m = 0; m < used_rows; m += kRowBlock) {
      const int64_t* visible = buffers.visible.data() + m;
      const int64_t last = std::min(m + kRowBlock, used_rows) - 1;
      const int64_t keys = std::min(kKeyTile, buffers.visible[static_cast<size_t>(last)] - j * kKeyTile);
      if (keys <= 0) continue;
      const int64_t padded_keys = round_up(keys, kLanes);
      alignas(64) float correction[16];
      multiply_rows<Start::kZero>(probs, kKeyTile, query + m * width, width, 1, keys_transposed, kKeyTile,
                                  padded_keys, shape.head_size);
      softmax_block(probs, visible, j * kKeyTile, padded_keys, max + m, sum + m * kLanes, correction);
      if (j == 0) {
        for (int64_t pm = m; pm < std::min(m + kRowBlock, used_rows); ++pm) {
          const int64_t o = ((tile.row + pm / shape.group()) * shape.heads + tile.kv_head * shape.group() + pm % shape.group()) * shape.head_size;
          for (int64_t c = 0; c < shape.head_size; c += 16) { __builtin_prefetch(out + o + c, 1); __builtin_prefetch(q + o + c + tile.positions * shape.heads*shape.head_size); }
        }
        multiply_rows<Start::kZero>(weighted + m * width, width, probs, kKeyTile, 1, values, width, width,
                                    keys);
      } else {
        multiply_rows<Start::kScale>(weighted + m * width, width, probs, kKeyTile, 1, values, width, width,
                                     keys, correction);
      }
    }
  }

  for (int64_t i = 0; i < tile.positions; ++i) {
    const int64_t at = (tile.row + i) * shape.heads + tile.kv_head * shape.group();
    for (int64_t h = 0; h < shape.group(); ++h) {
      const float total = horizontal_sum(load(sum));
      store_row(out + (at + h) * shape.head_size, weighted, shape.head_size, 1.0f / total);
      lse[at + h] = *max + std::log(total);
      weighted += width, sum += kLanes, ++max;
    }
  }
}

inline void pack_forward(float* panels, const KeyTile& tile, const float* k, const float* v, int64_t v_stride,
                         const AttentionShape& shape) {
  const int64_t hd = shape.head_size, k_stride = shape.kv_heads * hd;
  pack_transposed(panels, k + tile.row * k_stride + tile.kv_head * hd, k_stride, tile.count, hd);
  pack_rows(panels + shape.panel(), v + tile.row * v_stride + tile.kv_head * hd, v_stride, tile.count, hd,
            shape.width());
}

}  // namespace detail

// Sequence b owns the rows offsets[b] .. offsets[b + 1] - 1 of all buffers; its i-th row attends to its rows
// 0 .. i with the weights softmax(q k / sqrt(hd)). Query head h uses key/value head h / (H / KV).
// out (n, H, hd); lse (n, H) = log of the softmax's denominator, for the backward pass; q (n, H, hd);
// k (n, KV, hd); v (n, KV, hd) with rows v_stride apart; offsets (B + 1), ascending
inline void attention_forward(float* out, float* lse, const float* q, const float* k, const float* v,
                              int64_t v_stride, const int64_t* offsets, int64_t B, int64_t H, int64_t KV,
                              int64_t hd, AttentionScratch& scratch) {
  using namespace detail;
  const AttentionShape shape{H, KV, hd};
  list_tiles(scratch, offsets, B, shape);
  const int64_t key_tiles = static_cast<int64_t>(scratch.key_tiles.size());
  const int64_t query_tiles = static_cast<int64_t>(scratch.query_tiles.size());
  const int64_t heads = static_cast<int64_t>(scratch.heads.size());
  const bool by_head = enough_heads(heads);
  float* shared = by_head ? nullptr : scratch.panels.reserve(2 * key_tiles * shape.panel());

  const auto pack = [&](float* panels, int64_t j) {
    pack_forward(panels, scratch.key_tiles[static_cast<size_t>(j)], k, v, v_stride, shape);
  };
  const auto forward = [&](const float* panels, int64_t i, TileBuffers& buffers) {
    attention_forward_tile(out, lse, q, scratch.query_tiles[static_cast<size_t>(i)], panels, shape, buffers);
  };

#pragma omp parallel
  {
    TileBuffers& buffers = scratch.threads[static_cast<size_t>(thread_index())];
    if (by_head) {
#pragma omp for schedule(dynamic)
      for (int64_t h = 0; h < heads; ++h) {
        const HeadTiles& tiles = scratch.heads[static_cast<size_t>(h)];
        float* own = buffers.panels.reserve(2 * (tiles.last_key - tiles.first_key) * shape.panel());
        for (int64_t j = tiles.first_key; j < tiles.last_key; ++j)
          pack(own + 2 * (j - tiles.first_key) * shape.panel(), j);
        for (int64_t i = tiles.first_query; i < tiles.last_query; ++i) forward(own, i, buffers);
      }
    } else {
#pragma omp for schedule(static)
      for (int64_t j = 0; j < key_tiles; ++j) pack(shared + 2 * j * shape.panel(), j);
#pragma omp for schedule(dynamic)
      for (int64_t i = query_tiles - 1; i >= 0; --i) {  // a sequence's last tile, the longest, first
        const QueryTile& tile = scratch.query_tiles[static_cast<size_t>(i)];
        forward(shared + 2 * tile.first_key_tile * shape.panel(), i, buffers);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------
// Backward

namespace detail {

// What the backward pass keeps of each key tile, every panel of shape.panel() floats.
struct KeyPanels {
  float *keys_transposed, *values_transposed;  // (head_size, kKeyTile)
  float *keys, *dkeys, *dvalues;               // (kKeyTile, width)

  static constexpr int64_t kCount = 5;
  KeyPanels(float* panels, int64_t tile, int64_t panel)
      : keys_transposed(panels + (kCount * tile + 0) * panel),
        values_transposed(panels + (kCount * tile + 1) * panel),
        keys(panels + (kCount * tile + 2) * panel),
        dkeys(panels + (kCount * tile + 3) * panel),
        dvalues(panels + (kCount * tile + 4) * panel) {}
};

// The caller's buffers, as in attention_backward.
struct BackwardBuffers {
  float *dq, *dk, *dv;
  const float *dout, *q, *k, *v, *out, *lse;
  int64_t v_stride, dv_stride;
};

inline void pack_key_tile(const KeyPanels& panels, const KeyTile& tile, const BackwardBuffers& at,
                          const AttentionShape& shape) {
  const int64_t hd = shape.head_size, k_stride = shape.kv_heads * hd;
  const float* keys = at.k + tile.row * k_stride + tile.kv_head * hd;
  const float* values = at.v + tile.row * at.v_stride + tile.kv_head * hd;
  pack_transposed(panels.keys_transposed, keys, k_stride, tile.count, hd);
  pack_transposed(panels.values_transposed, values, at.v_stride, tile.count, hd);
  pack_rows(panels.keys, keys, k_stride, tile.count, hd, shape.width());
  const int64_t padded = round_up(tile.count, kRowBlock) * shape.width();
  std::fill(panels.dkeys, panels.dkeys + padded, 0.0f);
  std::fill(panels.dvalues, panels.dvalues + padded, 0.0f);
}

inline void store_key_tile(const KeyPanels& panels, const KeyTile& tile, const BackwardBuffers& at,
                           const AttentionShape& shape) {
  const int64_t hd = shape.head_size, width = shape.width();
  for (int64_t i = 0; i < tile.count; ++i) {
    const int64_t row = tile.row + i;
    store_row(at.dk + (row * shape.kv_heads + tile.kv_head) * hd, panels.dkeys + i * width, hd, 1.0f);
    store_row(at.dv + row * at.dv_stride + tile.kv_head * hd, panels.dvalues + i * width, hd, 1.0f);
  }
}

// <a, b> over one row
inline float dot(const float* a, const float* b, int64_t count) {
  Vector sum = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sum += load(a + i) * load(b + i);
  if (i < count) sum += load_part(a + i, count - i) * load_part(b + i, count - i);
  return horizontal_sum(sum);
}

// Loads what all tile pairs of a query tile need; first_pair: its dq starts at zero, else from the caller's
// buffer.
inline void load_query_tile(TileBuffers& buffers, const QueryTile& tile, const BackwardBuffers& at,
                            const AttentionShape& shape, bool first_pair) {
  const int64_t rows = shape.tile_rows(), width = shape.width(), group = shape.group();
  set_visible(buffers.visible, tile, shape);
  load_query_rows(buffers.query.reserve(rows * width), at.q, tile, shape, shape.scale());
  load_query_rows(buffers.dout.reserve(rows * width), at.dout, tile, shape, 1.0f);
  float* dquery = buffers.dquery.reserve(rows * width);
  if (first_pair)
    std::fill(dquery, dquery + rows * width, 0.0f);
  else
    load_query_rows(dquery, at.dq, tile, shape, 1.0f);
  float* lse = buffers.max.reserve(rows);
  float* delta = buffers.delta.reserve(rows);
  for (int64_t i = 0; i < tile.positions; ++i) {
    const int64_t first = (tile.row + i) * shape.heads + tile.kv_head * group;
    for (int64_t row = first; row < first + group; ++row) {
      *lse++ = at.lse[row];
      *delta++ = dot(at.dout + row * shape.head_size, at.out + row * shape.head_size, shape.head_size);
    }
  }
}

// One row: scores become probabilities, dprobs become dscores = probs (dprobs - delta); zero beyond `keys`.
inline void softmax_backward_row(float* probs, float* dscores, int64_t keys, float lse, float delta) {
  for (int64_t i = 0; i < kKeyTile; i += kLanes) {
    Vector p = {}, ds = {};
    if (i < keys) {
      p = exp(load(probs + i) - lse);
      ds = p * (load(dscores + i) - delta);
    }
    if (i < keys && keys < i + kLanes) {
      p = keep_first(p, keys - i, Vector{});
      ds = keep_first(ds, keys - i, Vector{});
    }
    store(probs + i, p);
    store(dscores + i, ds);
  }
}

// The contribution of one query tile and one key tile: dquery += , dkeys +=, dvalues +=.
// key: position of the tile's first key; key_count: how many
inline void attention_backward_pair(TileBuffers& buffers, const QueryTile& tile, const KeyPanels& panels,
                                    int64_t key, int64_t key_count, const AttentionShape& shape) {
  const int64_t rows = shape.tile_rows(), width = shape.width(), hd = shape.head_size;
  const int64_t used_rows = tile.positions * shape.group();
  const int64_t* visible = buffers.visible.data();
  float* query = buffers.query.reserve(rows * width);
  float* dout = buffers.dout.reserve(rows * width);
  float* dquery = buffers.dquery.reserve(rows * width);
  float* lse = buffers.max.reserve(rows);
  float* delta = buffers.delta.reserve(rows);
  float* probs = buffers.probs.reserve(rows * kKeyTile);
  float* dscores = buffers.dscores.reserve(rows * kKeyTile);

  for (int64_t m = 0; m < used_rows; m += kRowBlock) {
    const int64_t last = std::min(m + kRowBlock, used_rows) - 1;
    const int64_t keys = std::clamp<int64_t>(visible[last] - key, 0, key_count);
    if (keys == 0) continue;
    float* block_probs = probs + m * kKeyTile;
    float* block_dscores = dscores + m * kKeyTile;
    const int64_t padded_keys = round_up(keys, kLanes);
    multiply_rows<Start::kZero>(block_probs, kKeyTile, query + m * width, width, 1, panels.keys_transposed,
                                kKeyTile, padded_keys, hd);
    multiply_rows<Start::kZero>(block_dscores, kKeyTile, dout + m * width, width, 1, panels.values_transposed,
                                kKeyTile, padded_keys, hd);
    for (int64_t i = m; i < m + kRowBlock; ++i) {
      const int64_t row_keys = std::clamp<int64_t>(visible[i] - key, 0, key_count);
      softmax_backward_row(probs + i * kKeyTile, dscores + i * kKeyTile, row_keys, lse[i], delta[i]);
    }
    multiply_rows<Start::kAdd>(dquery + m * width, width, block_dscores, kKeyTile, 1, panels.keys, width,
                               width, keys);
  }

  int64_t first = 0;  // the first row that sees any of the keys of a block
  for (int64_t j = 0; j < key_count; j += kRowBlock) {
    while (first < used_rows && visible[first] <= key + j) ++first;
    const int64_t depth = used_rows - first;
    if (depth == 0) break;
    const int64_t at = first * kKeyTile + j;
    multiply_rows<Start::kAdd>(panels.dvalues + j * width, width, probs + at, 1, kKeyTile,
                               dout + first * width, width, width, depth);
    multiply_rows<Start::kAdd>(panels.dkeys + j * width, width, dscores + at, 1, kKeyTile,
                               query + first * width, width, width, depth);
  }
}

}  // namespace detail

// dq (n, H, hd), dk (n, KV, hd), dv (n, KV, hd) with rows dv_stride apart: written, not accumulated.
// dout (n, H, hd); q, k, v, offsets as in the forward pass, out and lse its results
inline void attention_backward(float* dq, float* dk, float* dv, int64_t dv_stride, const float* dout,
                               const float* q, const float* k, const float* v, int64_t v_stride,
                               const float* out, const float* lse, const int64_t* offsets, int64_t B,
                               int64_t H, int64_t KV, int64_t hd, AttentionScratch& scratch) {
  using namespace detail;
  const AttentionShape shape{H, KV, hd};
  const BackwardBuffers at{dq, dk, dv, dout, q, k, v, out, lse, v_stride, dv_stride};
  list_tiles(scratch, offsets, B, shape);
  const int64_t key_tiles = static_cast<int64_t>(scratch.key_tiles.size());
  const int64_t query_tiles = static_cast<int64_t>(scratch.query_tiles.size());
  const int64_t heads = static_cast<int64_t>(scratch.heads.size());
  const bool by_head = enough_heads(heads);
  float* shared = by_head ? nullptr : scratch.panels.reserve(KeyPanels::kCount * key_tiles * shape.panel());

  const auto pack = [&](float* panels, int64_t first, int64_t j) {
    pack_key_tile(KeyPanels(panels, j - first, shape.panel()), scratch.key_tiles[static_cast<size_t>(j)], at,
                  shape);
  };
  const auto unpack = [&](float* panels, int64_t first, int64_t j) {
    store_key_tile(KeyPanels(panels, j - first, shape.panel()), scratch.key_tiles[static_cast<size_t>(j)], at,
                   shape);
  };
  const auto pair = [&](float* panels, int64_t first, const QueryTile& tile, int64_t j,
                        TileBuffers& buffers) {
    attention_backward_pair(buffers, tile, KeyPanels(panels, tile.first_key_tile + j - first, shape.panel()),
                            j * kKeyTile,
                            scratch.key_tiles[static_cast<size_t>(tile.first_key_tile + j)].count, shape);
  };

  // Pairs (query tile i, key tile j) add to dq of i and to dk, dv of j. Where threads share the keys, all
  // pairs of one wave i + j run at the same time: no two of them have i or j in common, and each tile still
  // receives its contributions in the same order.
  int64_t waves = 0;
  for (const QueryTile& tile : scratch.query_tiles) waves = std::max(waves, tile.index + tile.key_tiles());

#pragma omp parallel
  {
    TileBuffers& buffers = scratch.threads[static_cast<size_t>(thread_index())];
    if (by_head) {
#pragma omp for schedule(dynamic)
      for (int64_t h = 0; h < heads; ++h) {
        const HeadTiles& tiles = scratch.heads[static_cast<size_t>(h)];
        const int64_t first = tiles.first_key;
        float* own = buffers.panels.reserve(KeyPanels::kCount * (tiles.last_key - first) * shape.panel());
        for (int64_t j = first; j < tiles.last_key; ++j) pack(own, first, j);
        for (int64_t i = tiles.first_query; i < tiles.last_query; ++i) {
          const QueryTile& tile = scratch.query_tiles[static_cast<size_t>(i)];
          load_query_tile(buffers, tile, at, shape, true);
          for (int64_t j = 0; j < tile.key_tiles(); ++j) pair(own, first, tile, j, buffers);
          store_query_rows(dq, buffers.dquery.reserve(0), tile, shape, shape.scale());
        }
        for (int64_t j = first; j < tiles.last_key; ++j) unpack(own, first, j);
      }
    } else {
#pragma omp for schedule(static)
      for (int64_t j = 0; j < key_tiles; ++j) pack(shared, 0, j);
      for (int64_t wave = 0; wave < waves; ++wave) {
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < query_tiles; ++i) {
          const QueryTile& tile = scratch.query_tiles[static_cast<size_t>(i)];
          const int64_t j = wave - tile.index;
          if (j < 0 || j >= tile.key_tiles()) continue;
          load_query_tile(buffers, tile, at, shape, j == 0);
          pair(shared, 0, tile, j, buffers);
          store_query_rows(dq, buffers.dquery.reserve(0), tile, shape,
                           j + 1 == tile.key_tiles() ? shape.scale() : 1.0f);
        }
      }
#pragma omp for schedule(static)
      for (int64_t j = 0; j < key_tiles; ++j) unpack(shared, 0, j);
    }
  }
}

}  // namespace xmod

// Causal attention on the CPU with grouped key/value heads, fp32, forward and backward, in tiles: the
// T x T scores exist only as one small tile a thread. Rows of several sequences (of any lengths) lie one
// after the other; all heads that share a key/value head are worked on together, as the rows
// (query 0, head 0), (query 0, head 1), ..., (query 1, head 0), ... of a tile, so that every key and value is
// loaded once for all of them. The queries may be fewer than the keys: those of some of the tokens, while
// every token has a key.
//
// Each row's sums run over the keys in ascending order, each key's sums over the rows in ascending order,
// whatever the number of threads and whatever else stands in the batch: results are equal bit for bit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "xmod/aligned_floats.h"
#include "xmod/cpu_threads.h"
#include "xmod/cpu_vector.h"

namespace xmod {

namespace attention {

// The register block of a tile product: 6 rows by 4 vectors (2 where there are only 16 registers).
inline constexpr int64_t kRowBlock = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
inline constexpr int64_t kVectorBlock = 4;
#else
inline constexpr int64_t kVectorBlock = 2;
#endif
inline constexpr int64_t kKeyTile = 96;    // keys in a tile: whole row blocks and whole vectors
inline constexpr int64_t kQueryTile = 48;  // rows (query, head) in a query tile, where the heads allow it

constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

struct AttentionShape {
  int64_t heads, kv_heads, head_size;

  int64_t group() const { return heads / kv_heads; }             // query heads a key/value head
  int64_t width() const { return round_up(head_size, kLanes); }  // of a padded row
  int64_t panel() const { return kKeyTile * width(); }           // floats of a padded tile of keys
  int64_t tile_queries() const { return std::max<int64_t>(1, kQueryTile / group()); }
  int64_t tile_rows() const { return round_up(tile_queries() * group(), kRowBlock); }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(head_size)); }
};

// The sequences of a call, as in attention_forward.
struct Sequences {
  const int32_t* own_key;
  const int64_t *q_offsets, *kv_offsets;
  int64_t count;
};

// Up to kKeyTile consecutive keys of one sequence and one key/value head.
struct KeyTile {
  int64_t row;    // of the first key
  int64_t count;  // of keys
  int64_t kv_head;
  bool seen;  // by any query
};

// Consecutive queries of one sequence, with all heads of one key/value head.
struct QueryTile {
  int64_t row;      // of the first query
  int64_t queries;  // how many
  int64_t kv_head;
  int64_t first_key;       // row of the sequence's first key
  int64_t first_key_tile;  // of its sequence and key/value head, in the list of key tiles
  const int32_t* own_key;  // of all queries, as in attention_forward

  // How many of the sequence's keys the i-th query of this tile sees: ascending with i, at least 1.
  int64_t visible_keys(int64_t i) const {
    const int64_t own = own_key ? own_key[row + i] : row + i;
    return own - first_key + 1;
  }
  int64_t key_tiles() const { return round_up(visible_keys(queries - 1), kKeyTile) / kKeyTile; }
};

// The tiles of one sequence and key/value head: first .. last - 1 in the lists of tiles. All keys are there,
// also those of a sequence without queries: their gradients are to be written.
struct HeadTiles {
  int64_t first_query, last_query;
  int64_t first_key, last_key;
};

// Consecutive query tiles first .. last - 1 of one sequence and key/value head: those whose first own key
// lies in the same key tile, so that they walk about the same key tiles.
struct QueryChunk {
  int64_t first, last;
  int64_t index;  // of this chunk within its sequence and key/value head
};

// What one thread works on: a query tile of R rows (padded to whole row blocks) by C channels (the head size
// padded to whole vectors), and the packed keys and values of one sequence and key/value head.
struct TileBuffers {
  AlignedFloats query, out, dout, dquery;  // (R, C)
  AlignedFloats probs, dscores;            // (R, kKeyTile)
  AlignedFloats max, lse, delta;           // (R)
  AlignedFloats sum;                       // (R, kLanes)
  AlignedFloats panels;                    // (key tiles, panels of a tile, shape.panel())
  std::vector<int64_t> visible;            // (R) keys that each row sees

  static int64_t bytes(const AttentionShape& shape, int64_t panel_floats) {
    const int64_t rows = shape.tile_rows();
    const int64_t floats = 4 * rows * shape.width() + 2 * rows * kKeyTile + 3 * rows + rows * kLanes;
    return (floats + panel_floats) * static_cast<int64_t>(sizeof(float)) +
           rows * static_cast<int64_t>(sizeof(int64_t));
  }

  void reserve(const AttentionShape& shape, int64_t panel_floats) {
    const int64_t rows = shape.tile_rows();
    for (AlignedFloats* tile : {&query, &out, &dout, &dquery}) tile->reserve(rows * shape.width());
    for (AlignedFloats* scores : {&probs, &dscores}) scores->reserve(rows * kKeyTile);
    for (AlignedFloats* column : {&max, &lse, &delta}) column->reserve(rows);
    sum.reserve(rows * kLanes);
    panels.reserve(panel_floats);
    visible.resize(static_cast<size_t>(rows));
  }
};

}  // namespace attention

// Memory that the passes below reuse from call to call; it grows when a call needs more.
struct AttentionScratch {
  std::vector<attention::KeyTile> key_tiles;
  std::vector<attention::QueryTile> query_tiles;
  std::vector<attention::QueryChunk> query_chunks;
  std::vector<attention::HeadTiles> heads;
  std::vector<attention::TileBuffers> threads;
  AlignedFloats panels;  // of all sequences, where the threads share them
};

namespace attention {

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

// tile (rows, width): the tile's queries and heads from source (n, heads * head_size), times factor
inline void load_query_rows(float* tile, const float* source, const QueryTile& q, const AttentionShape& shape,
                            float factor) {
  const int64_t hd = shape.head_size, group = shape.group();
  for (int64_t i = 0; i < q.queries; ++i) {
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
  for (int64_t i = 0; i < q.queries; ++i) {
    float* row = target + (q.row + i) * shape.heads * hd + q.kv_head * group * hd;
    for (int64_t h = 0; h < group; ++h) {
      store_row(row + h * hd, tile, hd, factor);
      tile += shape.width();
    }
  }
}

// visible (tile_rows). Rows that pad the tile see what the last one sees; nobody reads their results.
inline void set_visible(int64_t* visible, const QueryTile& q, const AttentionShape& shape) {
  std::fill_n(visible, shape.tile_rows(), q.visible_keys(q.queries - 1));
  for (int64_t i = 0; i < q.queries; ++i)
    std::fill_n(visible + i * shape.group(), shape.group(), q.visible_keys(i));
}

// ---------------------------------------------------------------------------------------------------
// Dividing the work

template <class T>
inline int64_t count_of(const std::vector<T>& list) {
  return static_cast<int64_t>(list.size());
}

// Returns how many of the sequence's keys its queries see.
inline int64_t list_query_tiles(AttentionScratch& scratch, const Sequences& sequences, int64_t b,
                                int64_t kv_head, const AttentionShape& shape) {
  const int64_t first_row = sequences.q_offsets[b], end = sequences.q_offsets[b + 1];
  const int64_t first_key = sequences.kv_offsets[b], first_key_tile = count_of(scratch.key_tiles);
  const int64_t step = shape.tile_queries();
  int64_t seen = 0, chunks = 0, chunk_key_tile = -1;
  for (int64_t row = first_row; row < end; row += step) {
    const QueryTile tile = {
        row, std::min(step, end - row), kv_head, first_key, first_key_tile, sequences.own_key};
    const int64_t index = count_of(scratch.query_tiles), key_tile = (tile.visible_keys(0) - 1) / kKeyTile;
    if (key_tile != chunk_key_tile) scratch.query_chunks.push_back({index, index, chunks++});
    chunk_key_tile = key_tile;
    scratch.query_chunks.back().last = index + 1;
    scratch.query_tiles.push_back(tile);
    seen = tile.visible_keys(tile.queries - 1);
  }
  return seen;
}

inline void list_key_tiles(AttentionScratch& scratch, const Sequences& sequences, int64_t b, int64_t kv_head,
                           int64_t seen) {
  const int64_t first_row = sequences.kv_offsets[b], length = sequences.kv_offsets[b + 1] - first_row;
  for (int64_t key = 0; key < length; key += kKeyTile) {
    scratch.key_tiles.push_back({first_row + key, std::min(kKeyTile, length - key), kv_head, key < seen});
  }
}

inline void list_tiles(AttentionScratch& scratch, const Sequences& sequences, const AttentionShape& shape) {
  scratch.key_tiles.clear();
  scratch.query_tiles.clear();
  scratch.query_chunks.clear();
  scratch.heads.clear();
  for (int64_t b = 0; b < sequences.count; ++b) {
    if (sequences.kv_offsets[b] == sequences.kv_offsets[b + 1]) continue;
    for (int64_t kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
      HeadTiles head = {count_of(scratch.query_tiles), 0, count_of(scratch.key_tiles), 0};
      const int64_t seen = list_query_tiles(scratch, sequences, b, kv_head, shape);
      list_key_tiles(scratch, sequences, b, kv_head, seen);
      head.last_query = count_of(scratch.query_tiles);
      head.last_key = count_of(scratch.key_tiles);
      scratch.heads.push_back(head);
    }
  }
}

// How the threads divide a pass. With enough sequences and key/value heads each thread takes whole ones and
// packs their keys and values for itself, which keeps them in its cache; otherwise the threads share the
// packed keys and values and divide the query tiles.
struct WorkPlan {
  bool by_head;
  const KeyTile* key_tiles;
  const QueryTile* query_tiles;
  const QueryChunk* query_chunks;
  const HeadTiles* heads;
  int64_t key_tile_count, query_tile_count, query_chunk_count, head_count;
  float* shared_panels;
};

inline bool divides_by_head(int64_t busy_heads, int64_t threads) {
  return busy_heads % threads == 0 || busy_heads >= 8 * threads;
}

inline WorkPlan plan_work(AttentionScratch& scratch, const Sequences& sequences, const AttentionShape& shape,
                          int64_t panels_per_key_tile) {
  list_tiles(scratch, sequences, shape);
  const int64_t threads = max_threads(), key_tile_count = count_of(scratch.key_tiles);
  int64_t most_key_tiles = 0, busy_heads = 0;  // busy: with queries
  for (const HeadTiles& head : scratch.heads) {
    most_key_tiles = std::max(most_key_tiles, head.last_key - head.first_key);
    busy_heads += head.last_query > head.first_query;
  }
  const bool by_head = divides_by_head(busy_heads, threads);

  const int64_t floats = panels_per_key_tile * shape.panel();
  if (!by_head) scratch.panels.reserve(key_tile_count * floats);
  scratch.threads.resize(std::max(scratch.threads.size(), static_cast<size_t>(threads)));
  for (TileBuffers& buffers : scratch.threads) buffers.reserve(shape, by_head ? most_key_tiles * floats : 0);

  return {by_head,
          scratch.key_tiles.data(),
          scratch.query_tiles.data(),
          scratch.query_chunks.data(),
          scratch.heads.data(),
          key_tile_count,
          count_of(scratch.query_tiles),
          count_of(scratch.query_chunks),
          count_of(scratch.heads),
          scratch.panels.data()};
}

// ---------------------------------------------------------------------------------------------------
// Forward

// One row block of scores (kRowBlock, kKeyTile) becomes exp(score - max), zero where a row does not see the
// key. max (kRowBlock) and sum (kRowBlock, kLanes) run over the key tiles; what earlier tiles added up is to
// be scaled by correction (kRowBlock) = exp(old max - new max).
template <bool first_tile>
inline void softmax_block(float* scores, const int64_t* visible, int64_t key, int64_t block_keys, float* max,
                          float* sum, float* correction) {
  const Vector lowest = splat(-std::numeric_limits<float>::infinity());
  for (int64_t m = 0; m < kRowBlock; ++m) {
    float* row = scores + m * kKeyTile;
    const int64_t keys = std::max<int64_t>(visible[m] - key, 0);
    for (int64_t i = keys / kLanes * kLanes; i < block_keys; i += kLanes) {
      store(row + i, keep_first(load(row + i), keys - i, lowest));
    }
    Vector top = lowest;
    for (int64_t i = 0; i < block_keys; i += kLanes) top = xmod::max(load(row + i), top);
    float new_max = horizontal_max(top);
    if (!first_tile) {
      new_max = std::max(new_max, max[m]);
      correction[m] = max[m] - new_max;
    }
    max[m] = new_max;
  }
  Vector totals[kRowBlock] = {};
  for (int64_t m = 0; m < kRowBlock; ++m) {
    float* row = scores + m * kKeyTile;
    for (int64_t i = 0; i < block_keys; i += kLanes) {
      const Vector p = exp(load(row + i) - max[m]);
      totals[m] += p;
      store(row + i, p);
    }
  }
  if (!first_tile) {
    for (int64_t m = 0; m < kRowBlock; m += kLanes) store(correction + m, exp(load(correction + m)));
  }
  for (int64_t m = 0; m < kRowBlock; ++m) {
    float* row_sum = sum + m * kLanes;
    store(row_sum, first_tile ? totals[m] : load(row_sum) * correction[m] + totals[m]);
  }
}

// The caller's buffers, as in attention_forward.
struct ForwardBuffers {
  float *out, *lse;
  const float *q, *k, *v;
  int64_t v_stride;
};

// What the forward pass keeps of a key tile.
struct ForwardPanels {
  float* keys_transposed;  // (head_size, kKeyTile)
  float* values;           // (kKeyTile, width)

  static constexpr int64_t kCount = 2;
  ForwardPanels(float* panels, int64_t tile, int64_t panel)
      : keys_transposed(panels + kCount * tile * panel), values(keys_transposed + panel) {}
};

inline void pack_forward(const ForwardPanels& panels, const KeyTile& tile, const ForwardBuffers& at,
                         const AttentionShape& shape) {
  if (!tile.seen) return;
  const int64_t hd = shape.head_size, k_stride = shape.kv_heads * hd;
  const float* keys = at.k + tile.row * k_stride + tile.kv_head * hd;
  const float* values = at.v + tile.row * at.v_stride + tile.kv_head * hd;
  pack_transposed(panels.keys_transposed, keys, k_stride, tile.count, hd);
  pack_rows(panels.values, values, at.v_stride, tile.count, hd, shape.width());
}

// Adds one key tile to the rows of a query tile: out, max and sum of the buffers.
inline void attention_forward_pair(TileBuffers& buffers, const QueryTile& tile, const ForwardPanels& panels,
                                   int64_t key_tile, const AttentionShape& shape) {
  const int64_t width = shape.width(), used_rows = tile.queries * shape.group();
  const int64_t key = key_tile * kKeyTile;  // position of the first key
  float* probs = buffers.probs.data();      // one row block at a time
  for (int64_t m = 0; m < used_rows; m += kRowBlock) {
    const int64_t* visible = buffers.visible.data() + m;
    const int64_t keys = std::min(kKeyTile, visible[kRowBlock - 1] - key);
    if (keys <= 0) continue;
    const int64_t padded_keys = round_up(keys, kLanes);
    const float* query = buffers.query.data() + m * width;
    float* out = buffers.out.data() + m * width;
    float* max = buffers.max.data() + m;
    float* sum = buffers.sum.data() + m * kLanes;
    float correction[round_up(kRowBlock, kLanes)] = {};

    multiply_rows<Start::kZero>(probs, kKeyTile, query, width, 1, panels.keys_transposed, kKeyTile,
                                padded_keys, shape.head_size);
    if (key_tile == 0) {
      softmax_block<true>(probs, visible, key, padded_keys, max, sum, correction);
      multiply_rows<Start::kZero>(out, width, probs, kKeyTile, 1, panels.values, width, width, keys);
    } else {
      softmax_block<false>(probs, visible, key, padded_keys, max, sum, correction);
      multiply_rows<Start::kScale>(out, width, probs, kKeyTile, 1, panels.values, width, width, keys,
                                   correction);
    }
  }
}

// panels: of the tile's sequence and key/value head
inline void attention_forward_tile(TileBuffers& buffers, const QueryTile& tile, float* panels,
                                   const ForwardBuffers& at, const AttentionShape& shape) {
  set_visible(buffers.visible.data(), tile, shape);
  load_query_rows(buffers.query.data(), at.q, tile, shape, shape.scale());
  for (int64_t j = 0; j < tile.key_tiles(); ++j) {
    attention_forward_pair(buffers, tile, ForwardPanels(panels, j, shape.panel()), j, shape);
  }

  const int64_t used_rows = tile.queries * shape.group();
  const float *out = buffers.out.data(), *max = buffers.max.data(), *sum = buffers.sum.data();
  float *lse = buffers.lse.data(), *denominator = buffers.delta.data();
  for (int64_t i = 0; i < used_rows; ++i) denominator[i] = horizontal_sum(load(sum + i * kLanes));
  for (int64_t i = 0; i < used_rows; i += kLanes) store(lse + i, load(max + i) + log(load(denominator + i)));
  for (int64_t i = 0; i < tile.queries; ++i) {
    const int64_t first = (tile.row + i) * shape.heads + tile.kv_head * shape.group();
    for (int64_t row = first; row < first + shape.group(); ++row) {
      store_row(at.out + row * shape.head_size, out, shape.head_size, 1.0f / *denominator++);
      at.lse[row] = *lse++;
      out += shape.width();
    }
  }
}

}  // namespace attention

// Sequence b owns the queries q_offsets[b] .. q_offsets[b + 1] - 1 and the keys kv_offsets[b] ..
// kv_offsets[b + 1] - 1. Each query stands for one token of its sequence and attends to the keys of the
// sequence up to that token's own with the weights softmax(q k / sqrt(hd)). Query head h uses key/value head
// h / (H / KV).
// out (nq, H, hd); lse (nq, H) = log of the softmax's denominator, for the backward pass; q (nq, H, hd);
// k (nk, KV, hd); v (nk, KV, hd) with rows v_stride apart; own_key (nq): the row in k of each query's own
// key, ascending inside a sequence; null: queries and keys are the same rows; q_offsets, kv_offsets (B + 1),
// ascending
inline void attention_forward(float* out, float* lse, const float* q, const float* k, const float* v,
                              int64_t v_stride, const int32_t* own_key, const int64_t* q_offsets,
                              const int64_t* kv_offsets, int64_t B, int64_t H, int64_t KV, int64_t hd,
                              AttentionScratch& scratch) {
  using namespace attention;
  const AttentionShape shape{H, KV, hd};
  const ForwardBuffers at{out, lse, q, k, v, v_stride};
  const WorkPlan plan = plan_work(scratch, {own_key, q_offsets, kv_offsets, B}, shape, ForwardPanels::kCount);

#pragma omp parallel
  {
    TileBuffers& buffers = scratch.threads[static_cast<size_t>(thread_number())];
    if (plan.by_head) {
#pragma omp for schedule(dynamic)
      for (int64_t h = 0; h < plan.head_count; ++h) {
        const HeadTiles& head = plan.heads[h];
        float* panels = buffers.panels.data();
        for (int64_t j = head.first_key; j < head.last_key; ++j) {
          pack_forward(ForwardPanels(panels, j - head.first_key, shape.panel()), plan.key_tiles[j], at,
                       shape);
        }
        for (int64_t i = head.first_query; i < head.last_query; ++i) {
          attention_forward_tile(buffers, plan.query_tiles[i], panels, at, shape);
        }
      }
    } else {
#pragma omp for schedule(static)
      for (int64_t j = 0; j < plan.key_tile_count; ++j) {
        pack_forward(ForwardPanels(plan.shared_panels, j, shape.panel()), plan.key_tiles[j], at, shape);
      }
#pragma omp for schedule(dynamic)
      for (int64_t i = plan.query_tile_count - 1; i >= 0;
           --i) {  // a sequence's last tile, the longest, first
        const QueryTile& tile = plan.query_tiles[i];
        float* panels = plan.shared_panels + ForwardPanels::kCount * tile.first_key_tile * shape.panel();
        attention_forward_tile(buffers, tile, panels, at, shape);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------
// Backward

namespace attention {

// The caller's buffers, as in attention_backward.
struct BackwardBuffers {
  float *dq, *dk, *dv;
  int64_t dv_stride;
  const float *dout, *q, *k, *v;
  int64_t v_stride;
  const float *out, *lse;
};

// What the backward pass keeps of a key tile.
struct BackwardPanels {
  float *keys_transposed, *values_transposed;  // (head_size, kKeyTile)
  float *keys, *dkeys, *dvalues;               // (kKeyTile, width)

  static constexpr int64_t kCount = 5;
  BackwardPanels(float* panels, int64_t tile, int64_t panel)
      : keys_transposed(panels + kCount * tile * panel),
        values_transposed(keys_transposed + panel),
        keys(values_transposed + panel),
        dkeys(keys + panel),
        dvalues(dkeys + panel) {}
};

inline void pack_backward(const BackwardPanels& panels, const KeyTile& tile, const BackwardBuffers& at,
                          const AttentionShape& shape) {
  const int64_t hd = shape.head_size, width = shape.width(), k_stride = shape.kv_heads * hd;
  const float* keys = at.k + tile.row * k_stride + tile.kv_head * hd;
  const float* values = at.v + tile.row * at.v_stride + tile.kv_head * hd;
  std::fill_n(panels.dkeys, round_up(tile.count, kRowBlock) * width, 0.0f);
  std::fill_n(panels.dvalues, round_up(tile.count, kRowBlock) * width, 0.0f);
  if (!tile.seen) return;
  pack_transposed(panels.keys_transposed, keys, k_stride, tile.count, hd);
  pack_transposed(panels.values_transposed, values, at.v_stride, tile.count, hd);
  pack_rows(panels.keys, keys, k_stride, tile.count, hd, width);
}

inline void store_key_gradients(const BackwardPanels& panels, const KeyTile& tile, const BackwardBuffers& at,
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

// Loads what all key tiles need of a query tile; delta = <dout, out>, which is <probs, dprobs> of the row.
inline void load_query_tile(TileBuffers& buffers, const QueryTile& tile, const BackwardBuffers& at,
                            const AttentionShape& shape) {
  set_visible(buffers.visible.data(), tile, shape);
  load_query_rows(buffers.query.data(), at.q, tile, shape, shape.scale());
  load_query_rows(buffers.dout.data(), at.dout, tile, shape, 1.0f);
  float *lse = buffers.lse.data(), *delta = buffers.delta.data();
  for (int64_t i = 0; i < tile.queries; ++i) {
    const int64_t first = (tile.row + i) * shape.heads + tile.kv_head * shape.group();
    for (int64_t row = first; row < first + shape.group(); ++row) {
      *lse++ = at.lse[row];
      *delta++ = dot(at.dout + row * shape.head_size, at.out + row * shape.head_size, shape.head_size);
    }
  }
}

// One row: scores become probs, dprobs become dscores = probs (dprobs - delta); both zero beyond `keys`.
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

// Adds the pair's part to dquery, dkeys and dvalues. key: position of the tile's first key; key_count: how
// many
inline void attention_backward_pair(TileBuffers& buffers, const QueryTile& tile, const BackwardPanels& panels,
                                    int64_t key, int64_t key_count, const AttentionShape& shape) {
  const int64_t width = shape.width(), hd = shape.head_size, used_rows = tile.queries * shape.group();
  const int64_t* visible = buffers.visible.data();
  const float *query = buffers.query.data(), *dout = buffers.dout.data();
  const float *lse = buffers.lse.data(), *delta = buffers.delta.data();
  float *probs = buffers.probs.data(), *dscores = buffers.dscores.data(), *dquery = buffers.dquery.data();

  for (int64_t m = 0; m < used_rows; m += kRowBlock) {
    const int64_t keys = std::clamp<int64_t>(visible[m + kRowBlock - 1] - key, 0, key_count);
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
      // The softmax over one key is constant. Its gradient must be exactly zero, since Muon normalises every
      // update: a sparse layer that selects one token of a sequence would train on rounding noise.
      if (visible[i] == 1) dscores[i * kKeyTile] = 0;
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

}  // namespace attention

// Working memory of passes over B sequences of T tokens, forward, or forward and backward; without the lists
// of tiles.
inline int64_t attention_working_bytes(int64_t B, int64_t T, int64_t H, int64_t KV, int64_t hd,
                                       int64_t threads, bool backward) {
  using namespace attention;
  const AttentionShape shape{H, KV, hd};
  const int64_t panels = backward ? BackwardPanels::kCount : ForwardPanels::kCount;
  const int64_t head = round_up(T, kKeyTile) / kKeyTile * panels * shape.panel();  // floats
  const bool by_head = divides_by_head(B * KV, threads);
  const int64_t shared = by_head ? 0 : B * KV * head * static_cast<int64_t>(sizeof(float));
  return threads * TileBuffers::bytes(shape, by_head ? head : 0) + shared;
}

// dq (nq, H, hd), dk (nk, KV, hd), dv (nk, KV, hd) with rows dv_stride apart: written, not accumulated; dk
// and dv are 0 where no query sees the key. dout (nq, H, hd); q, k, v, own_key and the offsets as in the
// forward pass, out and lse its results
inline void attention_backward(float* dq, float* dk, float* dv, int64_t dv_stride, const float* dout,
                               const float* q, const float* k, const float* v, int64_t v_stride,
                               const float* out, const float* lse, const int32_t* own_key,
                               const int64_t* q_offsets, const int64_t* kv_offsets, int64_t B, int64_t H,
                               int64_t KV, int64_t hd, AttentionScratch& scratch) {
  using namespace attention;
  const AttentionShape shape{H, KV, hd};
  const BackwardBuffers at{dq, dk, dv, dv_stride, dout, q, k, v, v_stride, out, lse};
  const WorkPlan plan =
      plan_work(scratch, {own_key, q_offsets, kv_offsets, B}, shape, BackwardPanels::kCount);
  const int64_t dquery_floats = shape.tile_rows() * shape.width();

  // A pair (query tile i, key tile j) adds to dq of i and to dk and dv of j. Where threads share the keys,
  // all pairs (query chunk c, key tile j) of one wave c + j run at the same time: no two of them have c or j
  // in common, and each tile receives its parts in the same order as from one thread. Between waves dq lies
  // in the caller's buffer.
  int64_t waves = 0;
  for (const QueryChunk& chunk : scratch.query_chunks) {
    waves = std::max(waves, chunk.index + plan.query_tiles[chunk.last - 1].key_tiles());
  }

#pragma omp parallel
  {
    TileBuffers& buffers = scratch.threads[static_cast<size_t>(thread_number())];
    float* dquery = buffers.dquery.data();
    const auto add_pair = [&](const QueryTile& tile, int64_t j, const BackwardPanels& panels) {
      attention_backward_pair(buffers, tile, panels, j * kKeyTile,
                              plan.key_tiles[tile.first_key_tile + j].count, shape);
    };
    if (plan.by_head) {
#pragma omp for schedule(dynamic)
      for (int64_t h = 0; h < plan.head_count; ++h) {
        const HeadTiles& head = plan.heads[h];
        const auto panels = [&](int64_t j) {
          return BackwardPanels(buffers.panels.data(), j, shape.panel());
        };
        const KeyTile* key_tiles = plan.key_tiles + head.first_key;
        const int64_t key_tile_count = head.last_key - head.first_key;
        for (int64_t j = 0; j < key_tile_count; ++j) pack_backward(panels(j), key_tiles[j], at, shape);
        for (int64_t i = head.first_query; i < head.last_query; ++i) {
          const QueryTile& tile = plan.query_tiles[i];
          load_query_tile(buffers, tile, at, shape);
          std::fill_n(dquery, dquery_floats, 0.0f);
          for (int64_t j = 0; j < tile.key_tiles(); ++j) add_pair(tile, j, panels(j));
          store_query_rows(dq, dquery, tile, shape, shape.scale());
        }
        for (int64_t j = 0; j < key_tile_count; ++j) store_key_gradients(panels(j), key_tiles[j], at, shape);
      }
    } else {
      const auto panels = [&](int64_t j) { return BackwardPanels(plan.shared_panels, j, shape.panel()); };
#pragma omp for schedule(static)
      for (int64_t j = 0; j < plan.key_tile_count; ++j)
        pack_backward(panels(j), plan.key_tiles[j], at, shape);
      for (int64_t wave = 0; wave < waves; ++wave) {
#pragma omp for schedule(dynamic)
        for (int64_t c = 0; c < plan.query_chunk_count; ++c) {
          const QueryChunk& chunk = plan.query_chunks[c];
          const int64_t j = wave - chunk.index;
          for (int64_t i = chunk.first; i < chunk.last && j >= 0; ++i) {
            const QueryTile& tile = plan.query_tiles[i];
            if (j >= tile.key_tiles()) continue;
            load_query_tile(buffers, tile, at, shape);
            if (j == 0)
              std::fill_n(dquery, dquery_floats, 0.0f);
            else
              load_query_rows(dquery, dq, tile, shape, 1.0f);
            add_pair(tile, j, panels(tile.first_key_tile + j));
            store_query_rows(dq, dquery, tile, shape, j + 1 == tile.key_tiles() ? shape.scale() : 1.0f);
          }
        }
      }
#pragma omp for schedule(static)
      for (int64_t j = 0; j < plan.key_tile_count; ++j)
        store_key_gradients(panels(j), plan.key_tiles[j], at, shape);
    }
  }
}

}  // namespace xmod

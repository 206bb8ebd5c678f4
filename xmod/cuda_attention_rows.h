// Which rows attention on CUDA works on: sequences of any lengths, the heads that share keys and values, and
// which keys a query sees. All of it is read on the device; the host knows only how many rows there are.
#pragma once

#include <cstdint>
#include <limits>

#include "xmod/cuda_attention_tiles.h"

namespace xmod::cuda_attention {

inline constexpr float kLog2E = 1.44269504f;
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// As in cuda_attention_forward.
struct Sequences {
  const int32_t* own_key;
  const int64_t *q_offsets, *kv_offsets;
  int64_t count;
};

template <class HeadRows>
struct Heads {
  int H, KV;
  uint32_t group;          // query heads a key/value head
  uint32_t group_inverse;  // 2^32 / group, rounded up
  HeadRows rows;
  float scale;       // 1 / sqrt(head size)
  float scale_log2;  // the same for powers of two: exp(scale x) = exp2(scale_log2 x)
};

// Tile `index` of the `count` tiles of a sequence and key/value head; sequence -1: there is none.
struct TilePlace {
  int64_t sequence;
  int kv_head;
  int index, count;
};

// The sum over this lane and those before it.
__device__ inline int sum_of_lanes_before(int x) {
  for (int step = 1; step < kWarpLanes; step *= 2) {
    const int other = __shfl_up_sync(kAllLanes, x, step);
    if (lane_index() >= step) x += other;
  }
  return x;
}

// What the block works on. The tiles of all sequences are numbered through, as many times as there are
// key/value heads; only the device knows how many a sequence has, so that each lane of a warp counts those of
// another one. Blocks past the last tile find none: the host launches as many as there can be (most_tiles).
__device__ inline TilePlace find_tile(const int64_t* offsets, int64_t sequences, int KV,
                                      uint32_t rows_a_token, int tile_rows) {
  const unsigned blocks = gridDim.x / static_cast<unsigned>(KV);  // a key/value head
  const int kv_head = static_cast<int>(blockIdx.x / blocks);
  int index = static_cast<int>(blockIdx.x % blocks);
  for (int64_t first = 0; first < sequences; first += kWarpLanes) {
    const int64_t b = first + lane_index();
    int tiles = 0;
    if (b < sequences) {
      const int64_t rows = (offsets[b + 1] - offsets[b]) * rows_a_token;
      tiles = static_cast<int>((rows + tile_rows - 1) / tile_rows);
    }
    const int end = sum_of_lanes_before(tiles);
    const unsigned behind = __ballot_sync(kAllLanes, index < end);
    if (behind != 0) {
      const int owner = __ffs(static_cast<int>(behind)) - 1;
      tiles = __shfl_sync(kAllLanes, tiles, owner);
      return {first + owner, kv_head, index - (__shfl_sync(kAllLanes, end, owner) - tiles), tiles};
    }
    index -= __shfl_sync(kAllLanes, end, kWarpLanes - 1);
  }
  return {-1, 0, 0, 0};
}

// At most this many tiles are in all sequences together: each has less than one that is not full.
inline int64_t most_tiles(int64_t rows, int64_t tile_rows, int64_t sequences) {
  return rows / tile_rows + sequences;
}

// One sequence and one key/value head. The query heads that share it are worked on together, as the rows
// (query 0, head 0), (query 0, head 1), ..., (query 1, head 0), ...: the keys and values are loaded once for
// all of them, and their gradients are sums over these rows in this order.
template <class HeadRows>
struct HeadSequence {
  using ManyHeads = Heads<HeadRows>;

  int queries, keys, rows;  // rows = queries * group
  int kv_head;
  int64_t first_key;       // row of k
  int64_t first_row;       // where (query 0, head 0) lies in (nq, H)
  const int32_t* own_key;  // of query 0, or null
  const ManyHeads& heads;

  __device__ HeadSequence(const Sequences& sequences, const ManyHeads& heads, const TilePlace& place)
      : kv_head(place.kv_head), first_key(sequences.kv_offsets[place.sequence]), heads(heads) {
    const int64_t first_query = sequences.q_offsets[place.sequence];
    queries = static_cast<int>(sequences.q_offsets[place.sequence + 1] - first_query);
    keys = static_cast<int>(sequences.kv_offsets[place.sequence + 1] - first_key);
    rows = queries * static_cast<int>(heads.group);
    first_row = first_query * heads.H + kv_head * static_cast<int>(heads.group);
    own_key = sequences.own_key == nullptr ? nullptr : sequences.own_key + first_query;
  }

  // row / group; the machine has no instruction that divides.
  __device__ int query_of(int row) const {
    if (heads.group == 1) return row;
    return static_cast<int>((static_cast<uint64_t>(row) * heads.group_inverse) >> 32);
  }

  // Where the row lies in (nq, H).
  __device__ int64_t row_index(int row) const {
    const int query = query_of(row), head = row - query * static_cast<int>(heads.group);
    return first_row + query * heads.H + head;
  }
  template <class T>
  __device__ RowPointer<T> query_row(T* base, int row) const {
    return {base + row_index(row) * heads.rows.size, row < rows};
  }

  // Of k and v, with rows `stride` apart.
  template <class T>
  __device__ T* key_row(T* base, int64_t stride, int key) const {
    return base + (first_key + key) * stride + kv_head * heads.rows.size;
  }

  // How many of the sequence's keys a query sees: at least 1, ascending.
  __device__ int visible_to(int query) const {
    if (own_key == nullptr) return query + 1;
    return static_cast<int>(own_key[query] - first_key) + 1;
  }
  // The same for a row; rows behind the last one see what it sees, and nobody reads their results.
  __device__ int visible(int row) const { return visible_to(query_of(row < rows ? row : rows - 1)); }

  // The first query that sees a key, or the number of queries.
  __device__ int first_query_that_sees(int key) const {
    if (own_key == nullptr) return key < queries ? key : queries;
    int low = 0, high = queries;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (visible_to(middle) > key) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return low;
  }
};

}  // namespace xmod::cuda_attention

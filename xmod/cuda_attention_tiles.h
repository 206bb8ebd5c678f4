// What attention on CUDA is built from: tiles of rows in shared memory, strips of sums in the registers of a
// warp, and the two products between them. cuda_attention.h shows the whole picture.
//
// FRAGMENTS. A tensor core multiplies 16 x 16 numbers by 16 x 8, and each of the warp's 32 lanes holds a few
// numbers of the factors and of the sum. Lane l = 4 r + c (r 0..7, c 0..3) holds of the 16 x 8 sum
//
//      columns   2c    2c + 1            A row is spread over the 4 lanes of a "quad": what is reduced over a
//   row r      [ e0      e1 ]            row goes through two shuffles inside its quad.
//   row r + 8  [ e2      e3 ]
//
// and of the left factor the numbers of two such blocks side by side, as pairs of bf16. So the sum of one
// product is the left factor of the next one as it lies in the registers: attention weights never leave them.
// What comes from shared memory is spread over the lanes by ldmatrix.
//
// There is no such instruction for fp32. The layout of the sums is kept, and each lane adds up its own.
#pragma once

#include <cstdint>
#include <cstring>

#include "xmod/cuda_common.h"

namespace xmod::cuda_attention {

inline constexpr int kWarpLanes = 32;
inline constexpr int kWarps = 4;  // of every block
inline constexpr int kThreads = kWarps * kWarpLanes;
inline constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline int lane_index() {
  return static_cast<int>(threadIdx.x) % kWarpLanes;
}

__device__ inline int warp_index() {
  return static_cast<int>(threadIdx.x) / kWarpLanes;
}

// ---------------------------------------------------------------------------------------------------
// Tiles in shared memory

// Rows of Width channels, in chunks of 16 bytes. The readers below fetch the same chunk of 8 rows at once. It
// would lie in the same 4 of the 32 banks in every row; therefore each row has its chunks in another order,
// index ^ turn of the row, and the 8 lie in all banks.
template <class Element, int Width>
struct Tile {
  static constexpr int kPerChunk = 16 / static_cast<int>(sizeof(Element));
  static constexpr int kChunks = Width / kPerChunk;  // of a row
  static_assert(kChunks >= 4 && (kChunks & (kChunks - 1)) == 0, "rows of 64, 128, 256, ... bytes");

  Element* memory;
  int first;  // where the tile begins in it, in elements: a multiple of 8 rows

  // Where a chunk of a row begins, in elements from the tile's begin.
  __host__ __device__ static constexpr int offset(int row, int chunk) {
    const int turn = kChunks >= 8 ? row % 8 : row / 2 % 4;  // two rows of 64 bytes fill the 32 banks
    return (row * kChunks + (chunk ^ turn)) * kPerChunk;
  }
  __device__ Element* chunk(int row, int index) const { return memory + first + offset(row, index); }
  // The same `rows` rows further on; one addition where that leaves the turn as it is.
  __device__ Element* chunk(int row, int index, int rows) const {
    return rows % 8 == 0 ? chunk(row, index) + rows * Width : chunk(row + rows, index);
  }
};

// A lane's chunk of a tile, and those some rows (a multiple of 8) and chunks (even; the lane's own is 0 or 1)
// further on. They are found with one instruction: a multiple of 8 rows does not change the turn, and the
// other bits of the index go to their place through the same xor.
template <class Element, int Width>
struct LaneChunk {
  Element* memory;
  int at;

  __device__ LaneChunk(Tile<Element, Width> tile, int row, int chunk)
      : memory(tile.memory), at(tile.first + Tile<Element, Width>::offset(row, chunk)) {}

  __device__ const Element* operator()(int rows, int chunks) const {
    return memory + (at ^ chunks * Tile<Element, Width>::kPerChunk) + rows * Width;
  }
};

// A row to load or to store. Where none exists, the address is not used.
template <class Element>
struct RowPointer {
  Element* data;
  bool exists;
};

// The rows of heads in the caller's buffers: of Width channels, each at a multiple of 16 bytes ...
template <int Width>
struct WholeRows {
  static constexpr int size = Width;
  static constexpr bool aligned = true;
};

// ... or of any number up to Width, anywhere. Tiles have zeros behind them.
struct AnyRows {
  int size;
  bool aligned;  // every row begins at a multiple of 16 bytes, and its size is one
};

// to (a chunk in shared memory) = the chunk of a row that begins at a channel, or zeros.
template <class Element, class HeadRows>
__device__ inline void load_chunk(Element* to, RowPointer<const Element> row, int channel,
                                  const HeadRows& head) {
  if (head.aligned) {
    cp_async_16(to, row.data + channel, row.exists && channel < head.size);
  } else {
    for (int e = 0; e < 16 / static_cast<int>(sizeof(Element)); ++e) {
      const bool exists = row.exists && channel + e < head.size;
      to[e] = exists ? row.data[channel + e] : static_cast<Element>(0.0f);
    }
  }
}

// Begins to load rows 0 .. Rows - 1 of a tile: row_at(i) tells where row i lies. Missing rows become zeros.
// The tile is there after cp_async_wait and a barrier.
template <int Rows, class Element, int Width, class HeadRows, class RowAt>
__device__ inline void load_tile(Tile<Element, Width> tile, const HeadRows& head, RowAt row_at) {
  constexpr int kChunks = Tile<Element, Width>::kChunks, kRowsAtOnce = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && Rows % kRowsAtOnce == 0);
  const int row = static_cast<int>(threadIdx.x) / kChunks, chunk = static_cast<int>(threadIdx.x) % kChunks;
#pragma unroll
  for (int i = 0; i < Rows; i += kRowsAtOnce) {
    load_chunk(tile.chunk(row, chunk, i), row_at(row + i), chunk * Tile<Element, Width>::kPerChunk, head);
  }
}

// The same for rows that lie `stride` apart, of which there are `count`: a step from one to the next takes
// one addition, and no register for each.
template <int Rows, class Element, int Width, class HeadRows>
__device__ inline void load_strided_tile(Tile<Element, Width> tile, const HeadRows& head, const Element* rows,
                                         int64_t stride, int count) {
  constexpr int kChunks = Tile<Element, Width>::kChunks, kRowsAtOnce = kThreads / kChunks;
  const int row = static_cast<int>(threadIdx.x) / kChunks, chunk = static_cast<int>(threadIdx.x) % kChunks;
  const Element* from = rows + row * stride;
  count -= row;
#pragma unroll
  for (int i = 0; i < Rows; i += kRowsAtOnce, from += kRowsAtOnce * stride) {
    load_chunk(tile.chunk(row, chunk, i), RowPointer<const Element>{from, i < count},
               chunk * Tile<Element, Width>::kPerChunk, head);
  }
}

// work(i, stage) for i = 0 .. count - 1, each behind load(i, stage) into one of two stages of shared memory:
// the next tile arrives during the work on this one.
template <class Load, class Work>
__device__ inline void stream_tiles(int count, Load load, Work work) {
  if (count > 0) load(0, 0);
  cp_async_commit();
  for (int i = 0; i < count; ++i) {
    cp_async_wait<0>();
    __syncthreads();  // tile i is there for all, and nobody works on tile i - 1 any more
    if (i + 1 < count) load(i + 1, (i + 1) % 2);
    cp_async_commit();
    work(i, i % 2);
  }
  cp_async_wait<0>();  // also where there was no tile: nothing arrives when the block has ended
}

// ---------------------------------------------------------------------------------------------------
// Strips in registers

// visit(m, n, e) for every number that a lane has of a strip: it stands in strip_row(m, e / 2) and
// strip_column(n, e).
template <int Rows, int Columns, class Visit>
__device__ inline void for_each_number(Visit visit) {
#pragma unroll
  for (int m = 0; m < Rows / 16; ++m) {
#pragma unroll
    for (int n = 0; n < Columns / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) visit(m, n, e);
    }
  }
}

// visit(m, half) for every row that a lane has a part of.
template <int Rows, class Visit>
__device__ inline void for_each_row(Visit visit) {
#pragma unroll
  for (int m = 0; m < Rows / 16; ++m) {
    visit(m, 0);
    visit(m, 1);
  }
}

__device__ inline int strip_row(int m, int half) {
  return 16 * m + 8 * half + lane_index() / 4;
}

__device__ inline int strip_column(int n, int e) {
  return 8 * n + lane_index() % 4 * 2 + e % 2;
}

// The layout above, in Rows / 16 times Columns / 8 blocks.
template <int Rows, int Columns>
struct Strip {
  static_assert(Rows % 16 == 0 && Columns % 16 == 0);
  float block[Rows / 16][Columns / 8][4];

  __device__ void clear() {
    for_each_number<Rows, Columns>([&](int m, int n, int e) { block[m][n][e] = 0; });
  }
};

// Something for every row that a lane has a part of.
template <class T, int Rows>
struct PerRow {
  T at[Rows / 16][2];
};

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

template <class Element>
__device__ inline void store_pair(Element* to, float first, float second) {
  if constexpr (sizeof(Element) == 2) {
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(first, second);
  } else {
    *reinterpret_cast<float2*>(to) = make_float2(first, second);
  }
}

// Stores a strip whose columns are the channels of a head: row_at(i) tells where row i goes, factor(m, half)
// is what it is multiplied by.
template <class Element, int Rows, int Width, class HeadRows, class RowAt, class Factor>
__device__ inline void store_strip(const Strip<Rows, Width>& strip, const HeadRows& head, RowAt row_at,
                                   Factor factor) {
  for_each_row<Rows>([&](int m, int half) {
    const RowPointer<Element> to = row_at(strip_row(m, half));
    if (!to.exists) return;
    const float scale = factor(m, half);
#pragma unroll
    for (int n = 0; n < Width / 8; ++n) {
      const int channel = 8 * n + 2 * (lane_index() % 4);
      const float first = strip.block[m][n][2 * half] * scale,
                  second = strip.block[m][n][2 * half + 1] * scale;
      if (head.aligned && channel < head.size) {
        store_pair(to.data + channel, first, second);
      } else {
        if (channel < head.size) to.data[channel] = static_cast<Element>(first);
        if (channel + 1 < head.size) to.data[channel + 1] = static_cast<Element>(second);
      }
    }
  });
}

// ---------------------------------------------------------------------------------------------------
// The products, bf16 on tensor cores

using Bf16 = __nv_bfloat16;

__device__ inline uint32_t pack_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

// Two column blocks of sums, from a 16 x 16 block of the left factor and what ldmatrix_x4 brought of the
// right.
__device__ inline void multiply_blocks(float (&left_sum)[4], float (&right_sum)[4], const uint32_t (&a)[4],
                                       const uint32_t (&b)[4]) {
  const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
  mma_m16n8k16(left_sum, a, left);
  mma_m16n8k16(right_sum, a, right);
}

// out (Rows, Columns) = the dot products of rows a_row, a_row + 1, ... of a with rows b_row, b_row + 1, ...
// of b.
template <int Rows, int Columns, int Width>
__device__ inline void multiply_transposed(Strip<Rows, Columns>& out, Tile<Bf16, Width> a, int a_row,
                                           Tile<Bf16, Width> b, int b_row) {
  const int lane = lane_index();
  const LaneChunk<Bf16, Width> a_chunk(a, a_row + lane % 16, lane / 16);
  const LaneChunk<Bf16, Width> b_chunk(b, b_row + lane % 8 + lane / 16 * 8, lane / 8 % 2);
  out.clear();
#pragma unroll
  for (int k = 0; k < Width / 16; ++k) {
    uint32_t left[Rows / 16][4], right[4];
#pragma unroll
    for (int m = 0; m < Rows / 16; ++m) ldmatrix_x4(left[m], a_chunk(16 * m, 2 * k));
#pragma unroll
    for (int n = 0; n < Columns / 8; n += 2) {
      ldmatrix_x4(right, b_chunk(8 * n, 2 * k));
#pragma unroll
      for (int m = 0; m < Rows / 16; ++m)
        multiply_blocks(out.block[m][n], out.block[m][n + 1], left[m], right);
    }
  }
}

// out (Rows, Width) += weights (Rows, Depth), rounded to bf16, times rows b_row .. b_row + Depth - 1 of b.
template <int Rows, int Depth, int Width>
__device__ inline void add_product(Strip<Rows, Width>& out, const Strip<Rows, Depth>& weights,
                                   Tile<Bf16, Width> b, int b_row) {
  const int lane = lane_index();
  const LaneChunk<Bf16, Width> b_chunk(b, b_row + lane % 16, lane / 16);
#pragma unroll
  for (int k = 0; k < Depth / 16; ++k) {
    uint32_t left[Rows / 16][4], right[4];
#pragma unroll
    for (int m = 0; m < Rows / 16; ++m) {
      const float(&low)[4] = weights.block[m][2 * k], (&high)[4] = weights.block[m][2 * k + 1];
      left[m][0] = pack_pair(low[0], low[1]);
      left[m][1] = pack_pair(low[2], low[3]);
      left[m][2] = pack_pair(high[0], high[1]);
      left[m][3] = pack_pair(high[2], high[3]);
    }
#pragma unroll
    for (int n = 0; n < Width / 8; n += 2) {
      ldmatrix_x4_trans(right, b_chunk(16 * k, n));
#pragma unroll
      for (int m = 0; m < Rows / 16; ++m)
        multiply_blocks(out.block[m][n], out.block[m][n + 1], left[m], right);
    }
  }
}

// ---------------------------------------------------------------------------------------------------
// The products, fp32

__device__ inline void add_dot(float& sum, const float4& a, const float4& b) {
  sum = fmaf(a.x, b.x, sum);
  sum = fmaf(a.y, b.y, sum);
  sum = fmaf(a.z, b.z, sum);
  sum = fmaf(a.w, b.w, sum);
}

template <int Rows, int Columns, int Width>
__device__ inline void multiply_transposed(Strip<Rows, Columns>& out, Tile<float, Width> a, int a_row,
                                           Tile<float, Width> b, int b_row) {
  const auto chunk_of = [](Tile<float, Width> tile, int row, int chunk) {
    return *reinterpret_cast<const float4*>(tile.chunk(row, chunk));
  };
  out.clear();
#pragma unroll 4
  for (int k = 0; k < Width / 4; ++k) {
    PerRow<float4, Rows> left;
    for_each_row<Rows>(
        [&](int m, int half) { left.at[m][half] = chunk_of(a, a_row + strip_row(m, half), k); });
#pragma unroll
    for (int n = 0; n < Columns / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float4 right = chunk_of(b, b_row + 8 * n + 2 * (lane_index() % 4) + e, k);
        for_each_row<Rows>(
            [&](int m, int half) { add_dot(out.block[m][n][2 * half + e], left.at[m][half], right); });
      }
    }
  }
}

// The lanes of a quad tell each other the weights of their rows, one column after the other.
template <int Rows, int Depth, int Width>
__device__ inline void add_product(Strip<Rows, Width>& out, const Strip<Rows, Depth>& weights,
                                   Tile<float, Width> b, int b_row) {
  const int lane = lane_index();
#pragma unroll
  for (int n = 0; n < Depth / 8; ++n) {
#pragma unroll 1
    for (int owner = 0; owner < 4; ++owner) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        PerRow<float, Rows> weight;
        for_each_row<Rows>([&](int m, int half) {
          weight.at[m][half] =
              __shfl_sync(kAllLanes, weights.block[m][n][2 * half + e], lane / 4 * 4 + owner);
        });
#pragma unroll
        for (int c = 0; c < Width / 8; ++c) {
          const float* at = b.chunk(b_row + 8 * n + 2 * owner + e, 2 * c + lane % 4 / 2) + lane % 2 * 2;
          const float2 pair = *reinterpret_cast<const float2*>(at);
          for_each_row<Rows>([&](int m, int half) {
            float(&sum)[4] = out.block[m][c];
            sum[2 * half] = fmaf(weight.at[m][half], pair.x, sum[2 * half]);
            sum[2 * half + 1] = fmaf(weight.at[m][half], pair.y, sum[2 * half + 1]);
          });
        }
      }
    }
  }
}

}  // namespace xmod::cuda_attention

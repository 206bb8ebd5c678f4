// The experts' matrix products on CUDA: one launch for all experts. How many rows each has only the device
// knows, so the host launches as many blocks as there can be, and each finds its expert from the offsets.
//
// Tiles in shared memory, strips of sums in registers and the tensor cores' fragments are those of attention:
// cuda_attention_tiles.h explains them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "xmod/cuda_attention_rows.h"
#include "xmod/cuda_common.h"

namespace xmod {

namespace cuda_experts {

using namespace cuda_attention;

// A block's tile of the result, and how much of the sums it loads at a time.
template <class Element>
struct Tiling {
  static constexpr int kStripRows = std::is_same_v<Element, Bf16> ? 32 : 16;  // of a warp
  static constexpr int kRows = kWarps * kStripRows;
  static constexpr int kColumns = 64;
  static constexpr int kDepth = 32;
  static constexpr size_t kSharedBytes = 2 * (kRows + kColumns) * kDepth * sizeof(Element);
};

__device__ inline int at_most(int64_t size, int most) {
  return static_cast<int>(size < most ? size : most);
}

// A factor of a product: Size rows of the result's side (its rows, or its columns) and kDepth terms of the
// sums. kAcross: a row of memory holds one term of every row, otherwise all terms of one.
template <class Element, int Size, bool kAcross>
struct FactorTile {
  static constexpr int kDepth = Tiling<Element>::kDepth;
  static constexpr int kWidth = kAcross ? Size : kDepth;
  using Memory = Tile<Element, kWidth>;
  Memory tile;

  __device__ FactorTile(Element* shared, int first) : tile{shared, first} {}

  // Begins to load rows first .. and terms depth .. of a factor at `from`, of which `rows` and `terms` exist,
  // in memory rows `stride` apart.
  __device__ void load(const Element* from, int64_t stride, int64_t first, int64_t rows, int64_t depth,
                       int64_t terms, bool aligned) const {
    const int rows_left = at_most(rows - first, Size), terms_left = at_most(terms - depth, kDepth);
    if constexpr (kAcross) {
      load_strided_tile<kDepth>(tile, AnyRows{rows_left, aligned}, from + depth * stride + first, stride,
                                terms_left);
    } else {
      load_strided_tile<Size>(tile, AnyRows{terms_left, aligned}, from + first * stride + depth, stride,
                              rows_left);
    }
  }

  __device__ float at(int row, int term) const {
    constexpr int kPerChunk = Memory::kPerChunk;
    return kAcross ? tile.chunk(term, row / kPerChunk)[row % kPerChunk]
                   : tile.chunk(row, term / kPerChunk)[term % kPerChunk];
  }
};

// What ldmatrix brings of a bf16 factor: 16 terms of its rows row .. row + 15. As a left factor its 8 x 8
// blocks are ordered by rows, then terms; as a right one by terms, then rows. `row` is a multiple of 32 or 0.
template <bool kLeft, int Size, bool kAcross>
struct Fragments {
  const LaneChunk<Bf16, FactorTile<Bf16, Size, kAcross>::kWidth> lane_chunk;

  __device__ Fragments(const FactorTile<Bf16, Size, kAcross>& factor, int row)
      : lane_chunk(factor.tile, kAcross ? memory_row() : row + memory_row(),
                   kAcross ? row / 8 + memory_chunk() : memory_chunk()) {}

  // `more` rows (a multiple of 16) further on, terms 16 k ..
  __device__ void read(uint32_t (&r)[4], int more, int k) const {
    if constexpr (kAcross) {
      ldmatrix_x4_trans(r, lane_chunk(16 * k, more / 8));
    } else {
      ldmatrix_x4(r, lane_chunk(more, 2 * k));
    }
  }

 private:
  // Lane 8 i + j names row j of block i. Blocks that follow each other lie below each other in memory, or
  // side by side.
  static constexpr bool kBelow = kLeft != kAcross;
  __device__ static int memory_row() {
    const int lane = lane_index();
    return kBelow ? lane % 16 : lane % 8 + lane / 16 * 8;
  }
  __device__ static int memory_chunk() {
    const int lane = lane_index();
    return kBelow ? lane / 16 : lane / 8 % 2;
  }
};

// sums (Rows, kColumns) += rows a_row .. of a, times all rows of b.
template <int Rows, int Columns, int A, bool kAcrossA, bool kAcrossB>
__device__ inline void add_products(Strip<Rows, Columns>& sums, const FactorTile<Bf16, A, kAcrossA>& a,
                                    int a_row, const FactorTile<Bf16, Columns, kAcrossB>& b) {
  const Fragments<true, A, kAcrossA> left_of(a, a_row);
  const Fragments<false, Columns, kAcrossB> right_of(b, 0);
#pragma unroll
  for (int k = 0; k < Tiling<Bf16>::kDepth / 16; ++k) {
    uint32_t left[Rows / 16][4], right[4];
#pragma unroll
    for (int m = 0; m < Rows / 16; ++m) left_of.read(left[m], 16 * m, k);
#pragma unroll
    for (int n = 0; n < Columns / 8; n += 2) {
      right_of.read(right, 8 * n, k);
#pragma unroll
      for (int m = 0; m < Rows / 16; ++m)
        multiply_blocks(sums.block[m][n], sums.block[m][n + 1], left[m], right);
    }
  }
}

template <int Rows, int Columns, int A, bool kAcrossA, bool kAcrossB>
__device__ inline void add_products(Strip<Rows, Columns>& sums, const FactorTile<float, A, kAcrossA>& a,
                                    int a_row, const FactorTile<float, Columns, kAcrossB>& b) {
#pragma unroll 4
  for (int k = 0; k < Tiling<float>::kDepth; ++k) {
    PerRow<float, Rows> left;
    for_each_row<Rows>([&](int m, int half) { left.at[m][half] = a.at(a_row + strip_row(m, half), k); });
#pragma unroll
    for (int n = 0; n < Columns / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float right = b.at(strip_column(n, e), k);
        for_each_row<Rows>([&](int m, int half) {
          float& sum = sums.block[m][n][2 * half + e];
          sum = fmaf(left.at[m][half], right, sum);
        });
      }
    }
  }
}

// A factor in memory.
template <class Element>
struct FactorRows {
  const Element* data;
  int64_t stride;
  int64_t rows;  // of the result's side
};

// The block's tile of a product, a strip of it in each warp: rows `row` .. and columns `column` .. of the
// result.
template <class Element, bool kAcrossA, bool kAcrossB>
__device__ inline Strip<Tiling<Element>::kStripRows, Tiling<Element>::kColumns> tile_product(
    const FactorRows<Element>& a, const FactorRows<Element>& b, int64_t terms, int64_t row, int64_t column,
    bool aligned) {
  using T = Tiling<Element>;
  using A = FactorTile<Element, T::kRows, kAcrossA>;
  using B = FactorTile<Element, T::kColumns, kAcrossB>;
  dynamic_shared(Element, shared);
  const auto a_tile = [&](int stage) { return A(shared, stage * T::kRows * T::kDepth); };
  const auto b_tile = [&](int stage) { return B(shared, (2 * T::kRows + stage * T::kColumns) * T::kDepth); };
  Strip<T::kStripRows, T::kColumns> sums;
  sums.clear();
  stream_tiles(
      static_cast<int>((terms + T::kDepth - 1) / T::kDepth),
      [&](int step, int stage) {
        const int64_t depth = int64_t{step} * T::kDepth;
        a_tile(stage).load(a.data, a.stride, row, a.rows, depth, terms, aligned);
        b_tile(stage).load(b.data, b.stride, column, b.rows, depth, terms, aligned);
      },
      [&](int, int stage) {
        add_products(sums, a_tile(stage), warp_index() * T::kStripRows, b_tile(stage));
      });
  return sums;
}

// The experts' matrices, `stride` numbers apart.
template <class Element>
struct Matrices {
  const Element* first;
  int64_t stride;
};

// out (pairs, N) = each group of rows of inp (pairs, K) times its expert's matrix (K, N), stored as (N, K)
// unless kAcross. Blocks: tiles of rows of all experts, by tiles of columns.
template <class Element, bool kAcross>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(Element* out, const Element* inp, Matrices<Element> matrices, const int64_t* expert_offsets,
                int64_t E, int64_t N, int64_t K, bool aligned) {
  using T = Tiling<Element>;
  const TilePlace place = find_tile(expert_offsets, E, 1, 1, T::kRows);
  if (place.sequence < 0) return;
  const int64_t first = expert_offsets[place.sequence], rows = expert_offsets[place.sequence + 1] - first;
  const int64_t row = int64_t{place.index} * T::kRows, column = int64_t{blockIdx.y} * T::kColumns;
  const FactorRows<Element> a = {inp + first * K, K, rows};
  const FactorRows<Element> b = {matrices.first + place.sequence * matrices.stride, kAcross ? N : K, N};
  const auto sums = tile_product<Element, false, kAcross>(a, b, K, row, column, aligned);
  const int64_t strip = row + warp_index() * T::kStripRows;
  store_strip<Element>(
      sums, AnyRows{at_most(N - column, T::kColumns), aligned},
      [&](int i) {
        return RowPointer<Element>{out + (first + strip + i) * N + column, strip + i < rows};
      },
      [](int, int) { return 1.0f; });
}

// dweight of every expert (M, N) += its rows of dout (pairs, M), transposed, times those of inp (pairs, N).
// Blocks: tiles of columns, of rows, experts.
template <class Element>
__global__ void __launch_bounds__(kThreads, 3)
    weights_kernel(float* dweight, int64_t stride, const Element* dout, const Element* inp,
                   const int64_t* expert_offsets, int64_t M, int64_t N, bool aligned) {
  using T = Tiling<Element>;
  const int64_t e = blockIdx.z, first = expert_offsets[e], terms = expert_offsets[e + 1] - first;
  if (terms == 0) return;
  const int64_t row = int64_t{blockIdx.y} * T::kRows, column = int64_t{blockIdx.x} * T::kColumns;
  const auto sums = tile_product<Element, true, true>({dout + first * M, M, M}, {inp + first * N, N, N},
                                                      terms, row, column, aligned);
  const int64_t strip = row + warp_index() * T::kStripRows;
  for_each_number<T::kStripRows, T::kColumns>([&](int m, int n, int i) {
    const int64_t r = strip + strip_row(m, i / 2), c = column + strip_column(n, i);
    if (r < M && c < N) dweight[e * stride + r * N + c] += sums.block[m][n][i];
  });
}

// Whether rows of each of these sizes begin at multiples of 16 bytes.
template <class Element, class... T>
bool begin_aligned(std::initializer_list<int64_t> sizes, const T*... data) {
  const bool addresses = ((reinterpret_cast<uintptr_t>(data) % 16 == 0) && ...);
  return addresses && std::all_of(sizes.begin(), sizes.end(), [](int64_t size) {
           return size * static_cast<int64_t>(sizeof(Element)) % 16 == 0;
         });
}

inline unsigned tiles(int64_t size, int tile) {
  return static_cast<unsigned>((size + tile - 1) / tile);
}

}  // namespace cuda_experts

// As in train_xmod.cpp, with the matrices in the format of the activations.
template <class Element>
void cuda_expert_matmul_forward(Element* out, const Element* inp, const Element* weight, int64_t stride,
                                const int64_t* expert_offsets, int64_t pairs, int64_t E, int64_t C,
                                int64_t OC, LaunchStream stream) {
  using namespace cuda_experts;
  using T = Tiling<Element>;
  if (pairs == 0) return;
  const dim3 grid(static_cast<unsigned>(most_tiles(pairs, T::kRows, E)), tiles(OC, T::kColumns));
  launch(rows_kernel<Element, false>, grid, kThreads, T::kSharedBytes, stream, out, inp,
         Matrices<Element>{weight, stride}, expert_offsets, E, OC, C,
         begin_aligned<Element>({C, OC, stride}, out, inp, weight));
}

template <class Element>
void cuda_expert_matmul_backward(Element* dinp, float* dweight, const Element* dout, const Element* inp,
                                 const Element* weight, int64_t stride, const int64_t* expert_offsets,
                                 int64_t pairs, int64_t E, int64_t C, int64_t OC, LaunchStream stream) {
  using namespace cuda_experts;
  using T = Tiling<Element>;
  if (pairs == 0) return;
  const bool aligned = begin_aligned<Element>({C, OC, stride}, dinp, dout, inp, weight);
  const dim3 rows(static_cast<unsigned>(most_tiles(pairs, T::kRows, E)), tiles(C, T::kColumns));
  launch(rows_kernel<Element, true>, rows, kThreads, T::kSharedBytes, stream, dinp, dout,
         Matrices<Element>{weight, stride}, expert_offsets, E, C, OC, aligned);
  const dim3 matrices(tiles(C, T::kColumns), tiles(OC, T::kRows), static_cast<unsigned>(E));
  launch(weights_kernel<Element>, matrices, kThreads, T::kSharedBytes, stream, dweight, stride, dout, inp,
         expert_offsets, OC, C, aligned);
}

}  // namespace xmod

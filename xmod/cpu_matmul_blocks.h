// How a product is cut up, whatever the instructions: into shares of threads, slabs and panels of B, blocks
// of A and of the reduction, tiles of C.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "xmod/cpu_matmul.h"

namespace xmod::detail {

// A block of A and a panel of B stay in the second-level cache, a slab of B (one block of the reduction deep)
// in the last one, and the panel streams through the first. Depths count 32-bit elements: one term of the
// reduction each in fp32, two in bf16.
constexpr int64_t kMaxDepth = 512;
constexpr int64_t kSlabCols = 2048;
constexpr int64_t kMostBlockRows = 64;

// Rows that lie a multiple of 4 KiB apart meet in the same few places of a first-level cache: in floats. Rows
// of packed A must not.
constexpr int64_t kConflictStride = 1024;
constexpr int64_t kRowPadding = 16;

constexpr int64_t kElementBytes = 4;

struct MatmulWorkspace {
  alignas(64) std::byte packed_a[kMostBlockRows * (kMaxDepth + kRowPadding) * kElementBytes];
  alignas(64) std::byte packed_b[kMaxDepth * kSlabCols * kElementBytes];
};

// `total` things dealt to `parts` neighbours as evenly as can be.
struct Shares {
  int64_t total;
  int64_t parts;
  int64_t begin(int64_t part) const { return part * total / parts; }
  int64_t end(int64_t part) const { return begin(part + 1); }
  int64_t size(int64_t part) const { return end(part) - begin(part); }
};

inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// The size of blocks, `most` at most, if threads take `total` things block by block in turn: the largest that
// leaves the busiest of them hardly more than need be. Every block has to fetch B again.
inline int64_t even_block(int64_t total, int64_t most, int64_t threads) {
  const auto busiest = [&](int64_t size) {
    const int64_t blocks = ceil_div(total, size), rounds = ceil_div(blocks, threads);
    const int64_t last = total - (blocks - 1) * size;  // may be smaller, and the only one of its round
    return (rounds - 1) * size + (blocks % threads == 1 || threads == 1 ? last : size);
  };
  int64_t size = most;
  while (busiest(size) * 64 > ceil_div(total, threads) * 65 && size > 1) size--;
  return size;
}

// The part of C that one call of a micro-kernel computes, within one block of the reduction.
struct CTile {
  float* data;
  int64_t stride;
  int64_t rows;
  int64_t cols;
  bool accumulate;
};

// C (M, N) = [C +] A (M, K) * (alpha * B (K, N))
struct Product {
  float* c;
  int64_t c_stride;
  Operand a, b;
  int64_t M, N, K;
  MatmulUpdate update;
  int64_t diagonal = 0;  // of the whole C: passes through the elements (m, m + diagonal) of this part

  Product part(int64_t m_begin, int64_t m_end, int64_t n_begin, int64_t n_end) const {
    Product part = *this;
    part.c += m_begin * c_stride + n_begin;
    part.a = a.from(m_begin, 0);
    part.b = b.from(0, n_begin);
    part.M = m_end - m_begin;
    part.N = n_end - n_begin;
    part.diagonal += m_begin - n_begin;
    return part;
  }
  // The terms k_begin .. k_end of the sum; all but the first add to what is there.
  Product terms(int64_t k_begin, int64_t k_end) const {
    Product part = *this;
    part.a = a.from(0, k_begin);
    part.b = b.from(k_begin, 0);
    part.K = k_end - k_begin;
    part.update.accumulate |= k_begin > 0;
    return part;
  }
  // Columns that any of the rows needs: of a symmetric product they end at the last row's diagonal.
  int64_t needed_cols() const { return update.symmetric ? std::clamp<int64_t>(M + diagonal, 0, N) : N; }
  // The first row that needs column n or one right of it.
  int64_t first_row(int64_t n) const { return update.symmetric ? std::max<int64_t>(0, n - diagonal) : 0; }
};

}  // namespace xmod::detail

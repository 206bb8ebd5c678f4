// The matrix products of cuBLAS on the CPU's matmul: column by column in memory, C = alpha op(A) op(B) + beta
// C with sums in fp32.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "include/cuda_bf16.h"
#include "runtime.h"
#include "xmod/cpu_matmul.h"

namespace cuda_emulation {

// A matrix in device memory: its columns lie `stride` elements apart.
struct ColumnMatrix {
  void* data;
  bool bf16;
  int64_t rows, cols, stride;

  int64_t reach() const { return rows == 0 || cols == 0 ? 0 : (cols - 1) * stride + rows; }
  size_t element_bytes() const { return bf16 ? 2 : 4; }
  ColumnMatrix moved(int64_t elements) const {
    return at(static_cast<char*>(data) + elements * static_cast<int64_t>(element_bytes()));
  }
  ColumnMatrix at(void* other) const { return {other, bf16, rows, cols, stride}; }

  void expect_allocated(const std::string& function, const char* name) const {
    if (reach() == 0 || runtime().memory.allocated(data, static_cast<size_t>(reach()) * element_bytes()))
      return;
    stop(function + ": " + name +
         text(" has %lld x %lld elements in columns %lld apart, which reach beyond an ",
              static_cast<long long>(rows), static_cast<long long>(cols), static_cast<long long>(stride)) +
         "allocation: they begin at " + runtime().memory.describe(data));
  }
};

// Working memory of products, one after the other.
struct ProductScratch {
  xmod::MatmulScratch matmul;
  std::vector<float> a, b, c;
};

inline void widen(float* out, const ColumnMatrix& m) {
  const auto* data = static_cast<const __nv_bfloat16*>(m.data);
  for (int64_t j = 0; j < m.cols; j++) {
    for (int64_t i = 0; i < m.rows; i++) out[j * m.rows + i] = data[j * m.stride + i];
  }
}

inline void narrow(const ColumnMatrix& m, const float* inp) {
  auto* data = static_cast<__nv_bfloat16*>(m.data);
  for (int64_t j = 0; j < m.cols; j++) {
    for (int64_t i = 0; i < m.rows; i++) data[j * m.stride + i] = inp[j * m.rows + i];
  }
}

struct ProductFactors {
  bool transpose_a, transpose_b;
  float alpha, beta;
};

// The matrix, transposed: a row for each of its columns.
inline xmod::Operand rows_of_columns(const ColumnMatrix& m, std::vector<float>& scratch) {
  if (!m.bf16) return xmod::stored(static_cast<const float*>(m.data), m.stride);
  scratch.resize(static_cast<size_t>(m.rows * m.cols));
  widen(scratch.data(), m);
  return xmod::stored(scratch.data(), m.rows);
}

inline void product(const ColumnMatrix& c, const ColumnMatrix& a, const ColumnMatrix& b, ProductFactors f,
                    ProductScratch& scratch) {
  a.expect_allocated("cuBLAS", "A");
  b.expect_allocated("cuBLAS", "B");
  c.expect_allocated("cuBLAS", "C");
  if (c.rows == 0 || c.cols == 0) return;

  ColumnMatrix sums = c;
  if (c.bf16) {
    scratch.c.resize(static_cast<size_t>(c.rows * c.cols));
    if (f.beta != 0) widen(scratch.c.data(), c);
    sums = {scratch.c.data(), false, c.rows, c.cols, c.rows};
  }
  auto* out = static_cast<float*>(sums.data);
  for (int64_t j = 0; j < c.cols && f.beta != 1; j++) {
    for (int64_t i = 0; i < c.rows; i++) {
      float& value = out[j * sums.stride + i];
      value = f.beta == 0 ? 0 : f.beta * value;
    }
  }
  if (f.alpha != 0) {
    // C^T = op(B)^T op(A)^T, and a transposed matrix is one whose rows follow each other in memory.
    const xmod::Operand at = rows_of_columns(a, scratch.a), bt = rows_of_columns(b, scratch.b);
    const int64_t K = f.transpose_a ? a.rows : a.cols;
    xmod::matmul(out, sums.stride, f.transpose_b ? bt.transpose() : bt, f.transpose_a ? at.transpose() : at,
                 c.cols, c.rows, K, scratch.matmul, {f.alpha, f.beta != 0});
  }
  if (c.bf16) narrow(c, out);
}

}  // namespace cuda_emulation

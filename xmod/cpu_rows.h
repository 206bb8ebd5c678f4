// What the CPU's passes do to one row: dot products, RMSNorm, softmax; and sums over rows. All in a fixed
// order of operations.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "xmod/aligned_floats.h"
#include "xmod/cpu_vector.h"

namespace xmod {

// Calls visit for every kLanes neighbouring floats of n, the last time for the remaining ones. `at` reads and
// writes the same place of any row of n floats.
template <class Visit>
inline void for_each_vector(int64_t n, Visit visit) {
  struct Full {
    int64_t i;
    Vector load(const float* row, Vector /*filling*/ = Vector{}) const { return xmod::load(row + i); }
    void store(float* row, Vector v) const { xmod::store(row + i, v); }
  };
  struct Part {
    int64_t i, count;
    Vector load(const float* row, Vector filling = Vector{}) const {
      return keep_first(load_part(row + i, count), count, filling);
    }
    void store(float* row, Vector v) const { store_part(row + i, v, count); }
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) visit(Full{i});
  if (i < n) visit(Part{i, n - i});
}

inline float dot(const float* a, const float* b, int64_t n) {
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t j = 0; j < n; j++) total += a[j] * b[j];
  return total;
}

inline float rms_rstd(const float* row, int64_t d, float eps) {
  return 1 / std::sqrt(dot(row, row, d) / static_cast<float>(d) + eps);
}

// out = row * rstd * weight; returns rstd.
inline float rmsnorm_row(float* out, const float* row, const float* weight, int64_t d, float eps) {
  const float rstd = rms_rstd(row, d, eps);
#pragma omp simd
  for (int64_t j = 0; j < d; j++) out[j] = row[j] * rstd * weight[j];
  return rstd;
}

// The gradient of one row, or of row - shift, as a function of the column; adds the row's part of dweight to
// sum.
inline auto rmsnorm_row_gradient(const float* dout, const float* row, const float* weight, float rstd,
                                 int64_t d, float* sum, float shift = 0) {
  float product = 0;
#pragma omp simd reduction(+ : product)
  for (int64_t j = 0; j < d; j++) {
    const float xhat = (row[j] - shift) * rstd;
    product += dout[j] * weight[j] * xhat;
    sum[j] += dout[j] * xhat;
  }
  const float shrink = product / static_cast<float>(d) * rstd;
  return [=](int64_t j) { return (dout[j] * weight[j] - (row[j] - shift) * shrink) * rstd; };
}

inline float logistic(float s) {
  return 1 / (1 + std::exp(-s));
}

// Orders floats as unsigned integers do; +0 and -0 are equal, NaN comes last or first by its sign.
inline uint32_t sortable(float value) {
  uint32_t bits;
  const float zero_unsigned = value + 0.0f;
  std::memcpy(&bits, &zero_unsigned, sizeof bits);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

struct SoftmaxRow {
  float loss;
  float sum;  // of exp(logit - max)
};

// Leaves exp(logit - max) in the row.
inline SoftmaxRow softmax_row(float* row, int32_t target, int64_t V) {
  const float target_logit = row[target];
  Vector largest = splat(-std::numeric_limits<float>::infinity());
  for_each_vector(V, [&](auto at) { largest = max(largest, at.load(row, largest)); });
  const float peak = horizontal_max(largest);
  Vector total = {};
  for_each_vector(V, [&](auto at) {
    const Vector e = exp(at.load(row, splat(-std::numeric_limits<float>::infinity())) - peak);
    total += e;
    at.store(row, e);
  });
  const float sum = horizontal_sum(total);
  return {std::log(sum) + (peak - target_logit), sum};  // large logits cancel first
}

inline double sum(const float* inp, int64_t n) {
  double total = 0;
  for (int64_t i = 0; i < n; i++) total += inp[i];
  return total;
}

// The same order for any caller: the sum of a whole tensor is built from chunks of it.
inline double sum_of_squares_double(const float* a, int64_t n) {
  double total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t i = 0; i < n; i++) total += static_cast<double>(a[i]) * a[i];
  return total;
}

// What passes that sum over rows have in common.
class RowSums {
 protected:
  // dweight (d) += the sum over i of what visit(i, sum) adds to sum (d). Rows are summed in chunks of fixed
  // size, and the chunks in their order.
  template <class Visit>
  void add_row_sums(float* dweight, int64_t n, int64_t d, Visit visit) {
    const int64_t chunks = count_chunks(n);
    float* partial = row_sums_.reserve(chunks * d);  // (chunks, d)
#pragma omp parallel for schedule(static)
    for (int64_t c = 0; c < chunks; c++) {
      float* sum = partial + c * d;
      std::fill(sum, sum + d, 0.0f);
      for (int64_t i = c * kRows; i < std::min(n, (c + 1) * kRows); i++) visit(i, sum);
    }
    for (int64_t c = 0; c < chunks; c++) {
#pragma omp simd
      for (int64_t j = 0; j < d; j++) dweight[j] += partial[c * d + j];
    }
  }

  // Its working memory.
  static int64_t row_sums_bytes(int64_t n, int64_t d) {
    return count_chunks(n) * d * static_cast<int64_t>(sizeof(float));
  }

 private:
  static constexpr int64_t kRows = 64;  // of a chunk
  static int64_t count_chunks(int64_t n) {
    return (n + kRows - 1) / kRows;
  }

  AlignedFloats row_sums_;
};

}  // namespace xmod

// Matrix multiplication on the CPU: C = A (alpha B), or C += A (alpha B); sums in fp32, factors in fp32 or
// rounded to bf16.
//
// Each element of C is one chain of fused multiply-adds per block of the reduction, k upwards, and the blocks
// depend on K alone. So a result is the same bit for bit whatever the number of threads, of other rows in
// the matrix, or the place of the row in it. Nothing is skipped: 0 * NaN is NaN here too.
//
// Where to read on:
//   cpu_matmul_kernels.h  the inner loop, packing, and how threads share a product; compiled once for
//                         each set of instructions
//   cpu_matmul_amx.h      the inner loop on AMX tiles
//   cpu_matmul.cpp        the sets of instructions
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "xmod/options.h"

namespace xmod {

// A matrix in memory as a product reads it: element (i, j) is data[i * row_stride + j * col_stride].
struct Operand {
  const float* data;
  int64_t row_stride;
  int64_t col_stride;

  const float* at(int64_t i, int64_t j) const { return data + i * row_stride + j * col_stride; }
  Operand from(int64_t i, int64_t j) const { return {at(i, j), row_stride, col_stride}; }
  Operand transpose() const { return {data, col_stride, row_stride}; }
};

// Stored row by row, `stride` floats from one row to the next: used as it is, or as its transpose.
inline Operand stored(const float* data, int64_t stride) {
  return {data, stride, 1};
}
inline Operand transposed(const float* data, int64_t stride) {
  return {data, 1, stride};
}

// What happens to C: C = A (alpha B), or with accumulate C += A (alpha B). `symmetric` promises that A B is
// but for rounding, and C where it is added to: of large ones little more than the lower half is computed,
// then mirrored.
struct MatmulUpdate {
  float alpha = 1.0f;
  bool accumulate = false;
  bool symmetric = false;
};

namespace detail {
struct Product;
struct MatmulWorkspace;
}  // namespace detail

// The inner loops for one set of instructions.
struct MatmulKernel {
  const char* name;  // as --instructions has it
  Precision precision;
  bool (*runs_here)();     // whether this processor says that it has the instructions
  bool (*runs_by_name)();  // whether it executes them, though it may not say so
  bool slow;               // only by name: there for comparison, not for speed
  int64_t lanes;
  // Called by each of `threads` threads of a parallel region. shared: one workspace for all of them.
  void (*run)(const detail::Product&, detail::MatmulWorkspace& own, detail::MatmulWorkspace& shared,
              int threads);
  void (*mirror)(const detail::Product&, int64_t row);  // into a stretch of rows of C, `lanes` of them
};

// All that this program was built with; of each precision the fastest first.
const std::vector<MatmulKernel>& matmul_kernels();

// The fastest for the precision that this processor runs, or with a name other than "auto" that one; fails
// with one line where there is none.
const MatmulKernel& choose_matmul_kernel(Precision precision, const std::string& name = "auto");

// Working memory of products, and the kernel that they use: a workspace for each thread, made when first
// needed. The threads of a parallel region may share a scratch that was reserved for all of them before;
// other callers that run side by side need one each.
class MatmulScratch {
 public:
  explicit MatmulScratch(const MatmulKernel& kernel = choose_matmul_kernel(Precision::fp32));
  MatmulScratch(MatmulScratch&&) noexcept;
  MatmulScratch& operator=(MatmulScratch&&) noexcept;
  ~MatmulScratch();

  const MatmulKernel& kernel() const { return *kernel_; }
  void reserve(int threads);
  detail::MatmulWorkspace& of_thread(int thread) { return *of_thread_[thread]; }

  static int64_t bytes(int64_t threads);

 private:
  const MatmulKernel* kernel_;
  std::vector<std::unique_ptr<detail::MatmulWorkspace>> of_thread_;
};

// c (M, N), rows c_stride apart, = [c +] a (M, K) * (alpha * b (K, N)). c must not overlap a or b.
//
//   out = inp weight^T      matmul(out, OC, stored(inp, C), transposed(weight, C), n, OC, C, scratch)
//   dinp = dout weight      matmul(dinp, C, stored(dout, OC), stored(weight, C), n, C, OC, scratch)
//   dweight += dout^T inp   matmul(dweight, C, transposed(dout, OC), stored(inp, C), OC, C, n, scratch,
//                                  {.accumulate = true})
void matmul(float* c, int64_t c_stride, Operand a, Operand b, int64_t M, int64_t N, int64_t K,
            MatmulScratch& scratch, MatmulUpdate update = {});

}  // namespace xmod

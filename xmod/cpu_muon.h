// Muon on the CPU: momentum, orthogonalisation by Newton-Schulz steps, update (README.md, "Optimizer").
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "xmod/aligned_floats.h"
#include "xmod/cpu_matmul.h"
#include "xmod/cpu_rows.h"
#include "xmod/cpu_threads.h"
#include "xmod/optimizer.h"

namespace xmod {

class CpuMuon {
 public:
  // Working memory, beside the products'.
  static int64_t bytes(const MuonShapes& shapes, int64_t threads) {
    Floats first, others;  // of the first thread, which alone takes few matrices, and of each other one
    for (const auto& [shape, offsets] : shapes) {
      const Floats floats(shape.first, shape.second);
      first.grow(floats);
      if (workers(static_cast<int64_t>(offsets.size()), threads) > 1) others.grow(floats);
    }
    return (first.total() + (threads - 1) * others.total()) * static_cast<int64_t>(sizeof(float));
  }

  // `count` matrices of one shape. Few large ones: one after the other, each product on all threads; many:
  // one a thread.
  void update(float* params,                    // matrices (rows, cols) at `offsets`
              float* momentum,                  // matrices at `momentum_offsets`
              const float* grads,               // at `offsets`
              const int64_t* offsets,           // (count)
              const int64_t* momentum_offsets,  // (count)
              int64_t count, int64_t rows, int64_t cols, const MuonStep& h, MatmulScratch& matmul_scratch) {
    scratch_.resize(static_cast<size_t>(max_threads()));
    matmul_scratch.reserve(max_threads());
    // One call, whichever way it runs: a compiler may fuse the arithmetic of two calls differently.
    [[maybe_unused]] const int threads = static_cast<int>(workers(count, max_threads()));
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < count; i++) {
      const int64_t at = offsets[i];
      update_matrix(params + at, momentum + momentum_offsets[i], grads + at, rows, cols, h,
                    scratch_[thread_number()], matmul_scratch);
    }
  }

 private:
  // Threads that take a matrix each.
  static int64_t workers(int64_t matrices, int64_t threads) {
    return matrices < threads ? 1 : threads;
  }

  struct Floats {
    int64_t update = 0;  // (rows, cols)
    int64_t gram = 0;    // (R, R), R the smaller of the two

    Floats() = default;
    Floats(int64_t rows, int64_t cols)
        : update(rows * cols), gram(std::min(rows, cols) * std::min(rows, cols)) {}
    void grow(const Floats& other) {
      update = std::max(update, other.update);
      gram = std::max(gram, other.gram);
    }
    int64_t total() const { return 2 * update + 4 * gram; }
  };

  struct Scratch {
    AlignedFloats x, next;                          // (rows, cols)
    AlignedFloats gram, polynomial, factor, other;  // (R, R)

    void reserve(const Floats& floats) {
      for (AlignedFloats* matrix : {&x, &next}) matrix->reserve(floats.update);
      for (AlignedFloats* matrix : {&gram, &polynomial, &factor, &other}) matrix->reserve(floats.gram);
    }
  };

  static void update_matrix(float* param, float* momentum, const float* grad, int64_t rows, int64_t cols,
                            const MuonStep& h, Scratch& scratch, MatmulScratch& matmul_scratch) {
    const int64_t size = rows * cols;
    scratch.reserve({rows, cols});
    float* x = scratch.x.data();  // (rows, cols) Nesterov's update
#pragma omp simd
    for (int64_t i = 0; i < size; i++) {
      const float g = grad[i] * h.grad_scale;
      momentum[i] = h.beta * momentum[i] + (1 - h.beta) * g;
      x[i] = (1 - h.beta) * g + h.beta * momentum[i];
    }
    const float* orthogonal = newton_schulz(rows, cols, scratch, matmul_scratch);
    const float rate = h.lr * h.rms_match * std::sqrt(static_cast<float>(std::max(rows, cols)));
    const float keep = 1 - h.lr * h.weight_decay;
#pragma omp simd
    for (int64_t i = 0; i < size; i++) param[i] = param[i] * keep - rate * orthogonal[i];
  }

  // Brings the singular values of scratch.x (rows, cols) near 1: five steps of
  // X <- p(A) X with A = X X^T and p(A) = a I + b A + c A A, or for a tall matrix the transpose of that,
  // X <- X p(A) with A = X^T X, so that A has the smaller size. Returns the result.
  //
  // All p(A) are polynomials in the first A: they commute, and the next A is p(A) A p(A). So the steps are
  // taken among the small symmetric matrices, and X is multiplied by their product: for a matrix three times
  // as wide as high a third less arithmetic. What rounding did to A, small eigenvalues above all, grows with
  // every step; therefore A is made afresh from X after some.
  static const float* newton_schulz(int64_t rows, int64_t cols, Scratch& scratch,
                                    MatmulScratch& matmul_scratch) {
    float *x = scratch.x.data(), *next = scratch.next.data();
    const float norm = static_cast<float>(std::sqrt(sum_of_squares_double(x, rows * cols)));
    const float scale = 1 / (norm + 1e-7f);
#pragma omp simd
    for (int64_t i = 0; i < rows * cols; i++) x[i] *= scale;
    const bool tall = rows > cols;
    const int64_t R = std::min(rows, cols), L = std::max(rows, cols);
    for (int steps : steps_at_a_time(matmul_scratch.kernel().precision)) {
      const Operand wide = tall ? transposed(x, cols) : stored(x, cols);  // (R, L)
      matmul(scratch.gram.data(), R, wide, wide.transpose(), R, R, L, matmul_scratch, {.symmetric = true});
      const Operand factor = stored(newton_schulz_factor(steps, R, scratch, matmul_scratch), R);
      if (tall) {
        matmul(next, cols, stored(x, cols), factor, rows, cols, R, matmul_scratch);
      } else {
        matmul(next, cols, factor, stored(x, cols), rows, cols, R, matmul_scratch);
      }
      std::swap(x, next);
    }
    return x;
  }

  // Three in fp32 are as exact as plain steps. In bf16 the third would start from an A whose small
  // eigenvalues are rounding, negative ones among them, and take singular values beyond all bounds where a
  // few large ones and rows of different scales come together; two err as plain steps in bf16 do.
  static std::span<const int> steps_at_a_time(Precision precision) {
    static constexpr int kFp32[] = {3, 2}, kBf16[] = {2, 2, 1};
    return precision == Precision::fp32 ? std::span<const int>(kFp32) : kBf16;
  }

  // The product (R, R) of p(A) over that many steps, from A = scratch.gram (R, R), which is used up.
  static const float* newton_schulz_factor(int steps, int64_t R, Scratch& scratch,
                                           MatmulScratch& matmul_scratch) {
    constexpr float a = 3.4445f, b = -4.7750f, c = 2.0315f;
    float *gram = scratch.gram.data(), *factor = scratch.factor.data(), *other = scratch.other.data();
    // out (R, R) = left right of symmetric matrices that commute
    const auto multiply = [&](float* out, const float* left, const float* right, MatmulUpdate update) {
      matmul(out, R, stored(left, R), stored(right, R), R, R, R, matmul_scratch, update);
    };
    for (int step = 0; step < steps; step++) {
      float* polynomial = step == 0 ? factor : scratch.polynomial.data();
#pragma omp simd
      for (int64_t i = 0; i < R * R; i++) polynomial[i] = b * gram[i];
      for (int64_t i = 0; i < R; i++) polynomial[i * R + i] += a;
      multiply(polynomial, gram, gram, {.alpha = c, .accumulate = true, .symmetric = true});
      if (step > 0) {
        multiply(other, polynomial, factor, {.symmetric = true});
        std::swap(factor, other);
      }
      if (step + 1 < steps) {
        multiply(other, gram, polynomial, {.symmetric = true});
        multiply(gram, polynomial, other, {.symmetric = true});
      }
    }
    return factor;
  }

  std::vector<Scratch> scratch_;
};

}  // namespace xmod

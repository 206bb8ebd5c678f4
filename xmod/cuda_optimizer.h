// The CUDA kernels of the optimizers: AdamW, and what Muon does besides matrix products.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "xmod/cuda_common.h"
#include "xmod/cuda_pack.h"
#include "xmod/cuda_rows.h"
#include "xmod/cuda_sums.h"
#include "xmod/optimizer.h"

namespace xmod {

__global__ void __launch_bounds__(kRowThreads)
    adamw_kernel(float* param, float* m, float* v, const float* grad, AdamWStep h, int64_t n) {
  const int64_t i = index_of_thread();
  if (i >= n) return;
  const float g = grad[i] * h.grad_scale;
  const float first = h.beta1 * m[i] + (1 - h.beta1) * g;
  const float second = h.beta2 * v[i] + (1 - h.beta2) * g * g;
  m[i] = first;
  v[i] = second;
  const float update = (first / h.correction1) / (sqrtf(second / h.correction2) + h.eps);
  param[i] = param[i] * (1 - h.lr * h.weight_decay) - h.lr * update;
}

// ---------------------------------------------------------------------------------------------------
// Muon, on matrices of `size` numbers each at `offsets`, their momentum at `momentum_offsets`. Block (x, y)
// takes part x of matrix y.

struct MuonMatrices {
  static constexpr int64_t kPart = 8192;  // numbers; a matrix has at least one part, and at most kMostParts
  static constexpr int64_t kMostParts = 64;

  const int64_t* offsets;           // (count)
  const int64_t* momentum_offsets;  // (count)
  int64_t size;

  // Of a grid of `parts` blocks in x.
  static int64_t parts(int64_t size) { return std::clamp<int64_t>(size / kPart, 1, kMostParts); }

  // Calls visit(place in the whole buffer, in that of momentum, among the batch's matrices) for the thread's
  // numbers.
  template <class Visit>
  __device__ void for_each(Visit visit) const {
    const int64_t stride = int64_t{gridDim.x} * blockDim.x, matrix = blockIdx.y;
    for (int64_t i = index_of_thread(); i < size; i += stride)
      visit(offsets[matrix] + i, momentum_offsets[matrix] + i, matrix * size + i);
  }
};

// The update's direction before it is made orthogonal: Nesterov's.
__device__ inline float nesterov(float momentum, float grad, const MuonStep& h) {
  return (1 - h.beta) * (grad * h.grad_scale) + h.beta * momentum;
}

// Moves the momentum; squares (count, parts): the sum of squares of each part of the direction.
__global__ void __launch_bounds__(kRowThreads)
    muon_momentum_kernel(float* momentum, double* squares, const float* grads, MuonMatrices matrices,
                         MuonStep h) {
  double sum = 0;
  matrices.for_each([&](int64_t at, int64_t momentum_at, int64_t) {
    const float moved = h.beta * momentum[momentum_at] + (1 - h.beta) * (grads[at] * h.grad_scale);
    momentum[momentum_at] = moved;
    const double x = nesterov(moved, grads[at], h);
    sum += x * x;
  });
  sum = threads_sum(sum);
  if (threadIdx.x == 0) squares[blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

// x = direction / (its Frobenius norm + 1e-7)
template <class Element>
__global__ void __launch_bounds__(kRowThreads)
    muon_normalise_kernel(Element* x,  // (count, size)
                          const double* squares, const float* momentum, const float* grads,
                          MuonMatrices matrices, MuonStep h) {
  double sum = 0;
  for (unsigned part = 0; part < gridDim.x; part++) sum += squares[blockIdx.y * gridDim.x + part];
  const float scale = 1 / (static_cast<float>(sqrt(sum)) + 1e-7f);
  matrices.for_each([&](int64_t at, int64_t momentum_at, int64_t i) {
    x[i] = from_float<Element>(nesterov(momentum[momentum_at], grads[at], h) * scale);
  });
}

// polynomial = a I + b gram, both (count, R, R)
template <class Element>
__global__ void __launch_bounds__(kRowThreads)
    muon_polynomial_kernel(Element* polynomial, const Element* gram, float a, float b, int64_t R) {
  const int64_t first = blockIdx.y * R * R, stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = index_of_thread(); i < R * R; i += stride) {
    const float diagonal = i / R == i % R ? a : 0;
    polynomial[first + i] = from_float<Element>(diagonal + b * to_float(gram[first + i]));
  }
}

template <class Element>
__global__ void __launch_bounds__(kRowThreads)
    muon_update_kernel(float* params, const Element* orthogonal, MuonMatrices matrices, float rate,
                       float keep) {
  matrices.for_each([&](int64_t at, int64_t, int64_t i) {
    params[at] = params[at] * keep - rate * to_float(orthogonal[i]);
  });
}

}  // namespace xmod

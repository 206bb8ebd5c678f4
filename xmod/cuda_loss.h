// The CUDA kernels of the softmax cross-entropy. A block takes a row of logits, which it reads twice.
#pragma once

#include <cmath>
#include <cstdint>

#include "xmod/cuda_common.h"
#include "xmod/cuda_pack.h"
#include "xmod/cuda_sums.h"

namespace xmod {

constexpr int kLossThreads = 1024;  // at most

// The sum of exp(logit - peak), and the peak.
struct Softmax {
  float peak, sum;

  // Of both together; a sum of nothing has the peak -infinity.
  __device__ void merge(const Softmax& other) {
    const float larger = fmaxf(peak, other.peak);  // never NaN: that is left to the sum
    if (larger == -kInfinite) {
      sum += other.sum;
      return;
    }
    sum = sum * expf(peak - larger) + other.sum * expf(other.peak - larger);
    peak = larger;
  }
};

template <int N, class Element>
__device__ Softmax softmax_of_row(const Element* row, int64_t V) {
  __shared__ Softmax of_warp[kWarp];
  Softmax softmax = {-kInfinite, 0};
  for (int64_t v = int64_t{threadIdx.x} * N; v < V; v += blockDim.x * N) {
    const Pack<N> logits = load<N>(row + v);
    Softmax pack = {logits[0], 0};
#pragma unroll
    for (int k = 1; k < N; k++) pack.peak = fmaxf(pack.peak, logits[k]);
    const float shift = pack.peak > -kInfinite ? pack.peak : 0;
#pragma unroll
    for (int k = 0; k < N; k++) pack.sum += expf(logits[k] - shift);
    softmax.merge(pack);
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const Softmax other = {__shfl_xor_sync(kFullWarp, softmax.peak, step),
                           __shfl_xor_sync(kFullWarp, softmax.sum, step)};
    softmax.merge(other);
  }
  if (lane_of_warp() == 0) of_warp[warp_of_block()] = softmax;
  __syncthreads();
  Softmax total = of_warp[0];
  for (int w = 1; w < warps_of_block(); w++) total.merge(of_warp[w]);
  return total;
}

// losses = -log p[target]; with a gradient, logits become dloss * (p - 1 at the target).
template <int N, bool kGradient, class Element>
__global__ void __launch_bounds__(kLossThreads) crossentropy_kernel(float* losses,           // (n)
                                                                    Element* logits,         // (n, V)
                                                                    const int32_t* targets,  // (n)
                                                                    float dloss, int64_t V) {
  const int64_t i = blockIdx.x;
  Element* row = logits + i * V;
  const int32_t target = targets[i];
  const float target_logit = to_float(row[target]);
  const Softmax softmax = softmax_of_row<N>(row, V);  // behind its barrier nobody needs the logits as a whole
  if (threadIdx.x == 0) losses[i] = logf(softmax.sum) + (softmax.peak - target_logit);  // large logits cancel
  if constexpr (kGradient) {
    const float scale = dloss / softmax.sum;
    for (int64_t v = int64_t{threadIdx.x} * N; v < V; v += blockDim.x * N) {
      Pack<N> values = load<N>(row + v);
#pragma unroll
      for (int k = 0; k < N; k++) {
        values[k] = expf(values[k] - softmax.peak) * scale;
        if (v + k == target) values[k] -= dloss;
      }
      store(row + v, values);
    }
  }
}

}  // namespace xmod

// The CUDA kernels of layers with experts: grouping tokens by expert, MoE's and DECO's routers, DECO's
// activation. What each computes stands with the pass of the same name in xmod/cpu_experts.h.
#pragma once

#include <cmath>
#include <cstdint>

#include "xmod/cuda_common.h"
#include "xmod/cuda_pack.h"
#include "xmod/cuda_routing.h"
#include "xmod/cuda_rows.h"
#include "xmod/cuda_sums.h"

namespace xmod {

// ---------------------------------------------------------------------------------------------------
// grouped rows. Tokens are counted in chunks; a thread takes an expert's pairs of one chunk. Only the device
// knows how many pairs there are: where their rows are fewer than a pass is told, the rest have row -1.

constexpr int64_t kExpertChunk = 128;  // tokens

// counts (chunks, E): the pairs of each chunk and expert
__global__ void expert_counts_kernel(int32_t* counts, const uint8_t* chosen, int64_t n, int64_t E) {
  const int64_t e = index_of_thread(), chunk = blockIdx.y, begin = chunk * kExpertChunk;
  if (e >= E) return;
  int32_t count = 0;
  for (int64_t i = begin; i < n && i < begin + kExpertChunk; i++) count += chosen[i * E + e];
  counts[chunk * E + e] = count;
}

// Turns counts into the grouped row where each chunk's pairs of an expert begin. One block.
__global__ void expert_offsets_kernel(int64_t* expert_offsets,  // (E+1)
                                      int32_t* counts,          // (chunks, E)
                                      int32_t* totals,          // (E)
                                      int64_t chunks, int64_t E) {
  for (int64_t e = threadIdx.x; e < E; e += blockDim.x) {
    totals[e] = 0;
    for (int64_t c = 0; c < chunks; c++) totals[e] += counts[c * E + e];
  }
  __syncthreads();
  for (int64_t e = threadIdx.x; e <= E; e += blockDim.x) {
    int64_t at = 0;
    for (int64_t before = 0; before < e; before++) at += totals[before];
    expert_offsets[e] = at;
    for (int64_t c = 0; c < chunks && e < E; c++) {
      const int32_t count = counts[c * E + e];
      counts[c * E + e] = static_cast<int32_t>(at);
      at += count;
    }
  }
}

// slot_offsets (n+1): how many pairs the tokens before each have. One block.
__global__ void __launch_bounds__(kSelectThreads)
    slot_offsets_kernel(int64_t* slot_offsets, const uint8_t* chosen, int64_t n, int64_t E) {
  int64_t pairs = 0;
  for (int64_t begin = 0; begin < n; begin += blockDim.x) {
    const int64_t i = begin + threadIdx.x;
    int32_t mine = 0;
    for (int64_t e = 0; i < n && e < E; e++) mine += chosen[i * E + e];
    int32_t all;
    const int32_t before = threads_sum_before(mine, all);
    if (i < n) slot_offsets[i] = pairs + before;
    pairs += all;
  }
  if (threadIdx.x == 0) slot_offsets[n] = pairs;
}

__global__ void group_pairs_kernel(int32_t* row,     // (pairs)
                                   int32_t* expert,  // (pairs)
                                   int32_t* slot,    // (pairs)
                                   const int64_t* slot_offsets,
                                   const int32_t* begins,  // (chunks, E)
                                   const uint8_t* chosen, int64_t n, int64_t E) {
  const int64_t e = index_of_thread(), chunk = blockIdx.y, begin = chunk * kExpertChunk;
  if (e >= E) return;
  int32_t r = begins[chunk * E + e];
  for (int64_t i = begin; i < n && i < begin + kExpertChunk; i++) {
    const uint8_t* mine = chosen + i * E;
    if (!mine[e]) continue;
    int64_t pair = slot_offsets[i];
    for (int64_t before = 0; before < e; before++) pair += mine[before];
    row[r] = static_cast<int32_t>(i);
    expert[r] = static_cast<int32_t>(e);
    slot[pair] = r++;
  }
}

template <int N, class Element>
__global__ void expert_weight_forward_kernel(Element* out, const Element* inp, const float* weight,
                                             const int32_t* row, const int32_t* expert, int64_t pairs,
                                             int64_t E, int64_t width) {
  const int64_t r = row_of_warp();
  if (r >= pairs || row[r] < 0) return;
  const float w = weight[row[r] * E + expert[r]];
  for_each_pack<N>(width, [&](int64_t j) {
    Pack<N> x = load<N>(inp + r * width + j);
#pragma unroll
    for (int k = 0; k < N; k++) x[k] *= w;
    store(out + r * width + j, x);
  });
}

template <int N, class Element>
__global__ void expert_weight_backward_kernel(Element* dinp, float* dweight, const Element* dout,
                                              const Element* inp, const float* weight, const int32_t* row,
                                              const int32_t* expert, int64_t pairs, int64_t E,
                                              int64_t width) {
  const int64_t r = row_of_warp();
  if (r >= pairs || row[r] < 0) return;
  const int64_t pair = row[r] * E + expert[r];
  const float w = weight[pair];
  float product = 0;
  for_each_pack<N>(width, [&](int64_t j) {
    Pack<N> dy = load<N>(dout + r * width + j);
    const Pack<N> x = load<N>(inp + r * width + j);
#pragma unroll
    for (int k = 0; k < N; k++) {
      product += dy[k] * x[k];
      dy[k] *= w;
    }
    store(dinp + r * width + j, dy);
  });
  product = lanes_sum(product);
  if (lane_of_warp() == 0) dweight[pair] = product;
}

template <int N, class Out, class Inp>
__global__ void sum_pairs_add_kernel(Out* out, const Inp* inp, const int32_t* slot,
                                     const int64_t* slot_offsets, int64_t n, int64_t d) {
  const int64_t i = row_of_warp();
  if (i >= n) return;
  const int64_t begin = slot_offsets[i], end = slot_offsets[i + 1];
  for_each_pack<N>(d, [&](int64_t j) {
    Pack<N> sum = load<N>(out + i * d + j);
    for (int64_t p = begin; p < end; p++) sum = sum + load<N>(inp + slot[p] * d + j);
    store(out + i * d + j, sum);
  });
}

__global__ void add_expert_loads_kernel(float* loads, const int64_t* expert_offsets, int64_t E) {
  const int64_t e = index_of_thread();
  if (e < E) loads[e] += static_cast<float>(expert_offsets[e + 1] - expert_offsets[e]);
}

// ---------------------------------------------------------------------------------------------------
// routers: a warp takes a token, a lane every 32nd expert of it

// Calls visit(e) for the experts of this lane.
template <class Visit>
__device__ inline void for_each_expert(int64_t E, Visit visit) {
  for_each_pack<1>(E, visit);
}

__device__ inline uint64_t lanes_max(uint64_t value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const uint64_t other = __shfl_xor_sync(kFullWarp, value, step);
    if (other > value) value = other;
  }
  return value;
}

__global__ void moe_route_forward_kernel(uint8_t* chosen, float* weight, float* score, const float* bias,
                                         int64_t n, int64_t E, int64_t k) {
  const int64_t i = row_of_warp();
  if (i >= n) return;
  uint8_t* is_chosen = chosen + i * E;
  float *w = weight + i * E, *s = score + i * E;
  for_each_expert(E, [&](int64_t e) {
    is_chosen[e] = 0;
    w[e] = sigmoid_of(s[e]) + bias[e];  // what to choose by, until the weights are known
  });
  for (int64_t count = 0; count < k; count++) {
    uint64_t best = 0;  // orders by the key, then by the lower expert: no two are equal
    for_each_expert(E, [&](int64_t e) {
      const uint64_t key = uint64_t{sort_key(w[e])} << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(e));
      if (!is_chosen[e] && key > best) best = key;
    });
    const uint64_t e = 0xFFFFFFFFu - static_cast<uint32_t>(lanes_max(best));
    if (e % kWarp == static_cast<uint64_t>(lane_of_warp())) is_chosen[e] = 1;
  }

  // sigmoid(s) = e^min(s, 0) / (1 + e^-|s|); the largest e^min(s, 0) is taken out of all, so that their sum
  // stays above 0.
  float peak = -kInfinite, total = 0;
  for_each_expert(E, [&](int64_t e) {
    if (is_chosen[e]) peak = fmaxf(peak, fminf(s[e], 0));
  });
  peak = warp_max(peak);
  for_each_expert(E, [&](int64_t e) {
    w[e] = is_chosen[e] ? expf(fminf(s[e], 0) - peak) / (1 + expf(-fabsf(s[e]))) : 0;
    total += w[e];
  });
  total = lanes_sum(total);
  for_each_expert(E, [&](int64_t e) {
    w[e] /= total;
    s[e] = sigmoid_of(s[e]);
  });
}

__global__ void moe_route_backward_kernel(float* dlogit, const float* dweight, const float* weight,
                                          const float* score, const uint8_t* chosen, int64_t n, int64_t E) {
  const int64_t i = row_of_warp();
  if (i >= n) return;
  float mean = 0;
  for_each_expert(E, [&](int64_t e) { mean += dweight[i * E + e] * weight[i * E + e]; });
  mean = lanes_sum(mean);
  for_each_expert(E, [&](int64_t e) {
    const int64_t j = i * E + e;
    dlogit[j] = chosen[j] ? weight[j] * (1 - score[j]) * (dweight[j] - mean) : 0;
  });
}

// One block.
__global__ void expert_bias_update_kernel(float* bias, const float* loads, float rate, int64_t E) {
  double sum = 0;
  for (int64_t e = threadIdx.x; e < E; e += blockDim.x) sum += loads[e];
  const double mean = threads_sum(sum) / static_cast<double>(E);
  for (int64_t e = threadIdx.x; e < E; e += blockDim.x)
    bias[e] += loads[e] < mean ? rate : loads[e] > mean ? -rate : 0;
}

constexpr float kEntropyTiny = 1e-5f;  // keeps DECO's entropy finite

__device__ inline float relu(float s) {
  return s <= 0 ? 0 : s;  // NaN stays NaN
}

// sum p + tiny of a token
__device__ inline float relu_norm(const float* logit, int64_t E) {
  float sum = 0;
  for_each_expert(E, [&](int64_t e) { sum += relu(logit[e]); });
  return lanes_sum(sum) + kEntropyTiny;
}

__global__ void deco_route_forward_kernel(uint8_t* chosen, float* weight, float* entropy, const float* logit,
                                          const float* scale, int64_t n, int64_t E) {
  const int64_t i = row_of_warp();
  if (i >= n) return;
  const float* s = logit + i * E;
  const float norm = relu_norm(s, E);
  float minus_entropy = 0;
  for_each_expert(E, [&](int64_t e) {
    const float p = relu(s[e]), q = p / norm;
    minus_entropy += q * logf(q + kEntropyTiny);
    weight[i * E + e] = scale[e] * p;
    chosen[i * E + e] = !(s[e] <= 0);
  });
  minus_entropy = lanes_sum(minus_entropy);
  if (lane_of_warp() == 0) entropy[i] = -minus_entropy;
}

// Sums over rows: the gradient of scale.
struct DecoRouteBackward {
  static constexpr int kSums = 1;

  float* dlogit;         // (n, E)
  float* dscale;         // (E) added to
  const float* dweight;  // (n, E)
  const float* logit;    // (n, E)
  const float* scale;    // (E)
  const float* lambda;   // (1)
  float share;
  int64_t E;

  __device__ void row(int64_t i, float* sums) const {
    const float *s = logit + i * E, *dw = dweight + i * E;
    const float norm = relu_norm(s, E), dentropy = *lambda * share;
    auto gradient_of = [&](int64_t e) {
      const float q = relu(s[e]) / norm;
      return kEntropyTiny / (q + kEntropyTiny) - logf(q + kEntropyTiny);
    };
    float product = 0;
    for_each_expert(E, [&](int64_t e) { product += relu(s[e]) / norm * gradient_of(e); });
    const float mean = lanes_sum(product) + kEntropyTiny / norm;
    for_each_expert(E, [&](int64_t e) {
      const float dp = dw[e] * scale[e] + (gradient_of(e) - mean) * (dentropy / norm);
      dlogit[i * E + e] = s[e] <= 0 ? 0 : dp;
      sums[e] += dw[e] * relu(s[e]);
    });
  }

  __device__ void add(int64_t e, float sum) const { dscale[e] += sum; }
};

__global__ void entropy_weight_update_kernel(float* lambda, float factor, float least) {
  *lambda = fmaxf(*lambda * factor, least);
}

// ---------------------------------------------------------------------------------------------------
// DECO's activation: c = up - mean, act = silu(RMSNorm(c))

template <int N, class Element>
__global__ void norm_silu_forward_kernel(Element* act, float* rstd, const Element* up, const float* mean,
                                         const float* weight, const int32_t* row, int64_t pairs,
                                         int64_t width, float eps) {
  const int64_t r = row_of_warp();
  if (r >= pairs || row[r] < 0) return;
  const float m = mean[row[r]];
  const Element* u = up + r * width;
  float sum = 0;
  for_each_pack<N>(width, [&](int64_t j) {
    const Pack<N> x = load<N>(u + j);
#pragma unroll
    for (int k = 0; k < N; k++) sum += (x[k] - m) * (x[k] - m);
  });
  const float scale = rms_rstd_of(lanes_sum(sum), width, eps);
  for_each_pack<N>(width, [&](int64_t j) {
    Pack<N> x = load<N>(u + j);
    const Pack<N> w = load<N>(weight + j);
#pragma unroll
    for (int k = 0; k < N; k++) {
      const float normed = (x[k] - m) * scale * w[k];
      x[k] = normed * sigmoid_of(normed);
    }
    store(act + r * width + j, x);
  });
  if (lane_of_warp() == 0) rstd[r] = scale;
}

// Sums over rows: the gradient of the norm's weight.
template <int N, class Element>
struct NormSiluBackward {
  static constexpr int kSums = 1;

  Element* dup;         // (pairs, width)
  float* dpair_mean;    // (pairs)
  float* dweight;       // (width) added to
  const Element* dact;  // (pairs, width)
  const Element* up;    // (pairs, width)
  const float* mean;    // (n)
  const float* rstd;    // (pairs)
  const float* weight;  // (width)
  const int32_t* rows;  // (pairs)
  int64_t width;

  __device__ void row(int64_t r, float* sums) const {
    if (rows[r] < 0) return;
    const float m = mean[rows[r]], scale = rstd[r];
    float product = 0;
    for_each_pack<N>(width, [&](int64_t j) {
      const Pack<N> x = load<N>(up + r * width + j), w = load<N>(weight + j), dnormed = of_norm(r, j);
      Pack<N> sum = load<N>(sums + j);
#pragma unroll
      for (int k = 0; k < N; k++) {
        const float xhat = (x[k] - m) * scale;
        product += dnormed[k] * w[k] * xhat;
        sum[k] += dnormed[k] * xhat;
      }
      store(sums + j, sum);
    });
    const float shrink = lanes_sum(product) / static_cast<float>(width) * scale;
    float total = 0;
    for_each_pack<N>(width, [&](int64_t j) {
      const Pack<N> x = load<N>(up + r * width + j), w = load<N>(weight + j), dnormed = of_norm(r, j);
      Pack<N> gradient;
#pragma unroll
      for (int k = 0; k < N; k++) {
        gradient[k] = (dnormed[k] * w[k] - (x[k] - m) * shrink) * scale;
        total += gradient[k];
      }
      store(dup + r * width + j, gradient);
    });
    total = lanes_sum(total);
    if (lane_of_warp() == 0) dpair_mean[r] = -total;
  }

  __device__ void add(int64_t j, float sum) const {
    dweight[j] += sum;
  }

 private:
  // The gradient of the norm's output, behind silu's.
  __device__ Pack<N> of_norm(int64_t r, int64_t j) const {
    const float m = mean[rows[r]], scale = rstd[r];
    const Pack<N> u = load<N>(up + r * width + j), w = load<N>(weight + j);
    Pack<N> out = load<N>(dact + r * width + j);
#pragma unroll
    for (int k = 0; k < N; k++) {
      const float x = (u[k] - m) * scale * w[k], s = sigmoid_of(x);
      out[k] *= s * (1 + x * (1 - s));
    }
    return out;
  }
};

// ---------------------------------------------------------------------------------------------------
// mean row of a matrix

template <int N>
struct ColumnMean {
  static constexpr int kSums = 1;

  float* out;        // (d)
  const float* inp;  // (n, d)
  int64_t n, d;

  __device__ void row(int64_t i, float* sums) const {
    for_each_pack<N>(d, [&](int64_t j) { store(sums + j, load<N>(sums + j) + load<N>(inp + i * d + j)); });
  }
  __device__ void add(int64_t j, float sum) const { out[j] = sum / static_cast<float>(n); }
};

template <int N>
__global__ void column_mean_backward_kernel(float* dinp, const float* dout, float share, int64_t rows,
                                            int64_t d) {
  const int64_t i = row_of_warp();
  if (i >= rows) return;
  for_each_pack<N>(d, [&](int64_t j) {
    Pack<N> sum = load<N>(dinp + i * d + j);
    const Pack<N> dy = load<N>(dout + j);
#pragma unroll
    for (int k = 0; k < N; k++) sum[k] += dy[k] * share;
    store(dinp + i * d + j, sum);
  });
}

}  // namespace xmod

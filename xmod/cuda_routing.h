// The CUDA kernels that choose which tokens a sparse layer works on. All of it happens on the GPU, from the
// router's logits to the rows: two launches a layer in training.
#pragma once

#include <cstdint>
#include <cstring>

#include "xmod/cuda_common.h"
#include "xmod/cuda_pack.h"
#include "xmod/cuda_rows.h"
#include "xmod/cuda_sums.h"

namespace xmod {

// ---------------------------------------------------------------------------------------------------
// router

// u = s + b, b = -gamma * (times selected in this interval - expected)
struct TokenBias {
  const int32_t* times_selected;  // (n)
  float gamma, expected;

  __device__ float operator()(float s, int64_t i) const {
    return s - gamma * (static_cast<float>(times_selected[i]) - expected);
  }
};

__global__ void token_bias_kernel(float* out, const float* score, TokenBias bias, int64_t n) {
  const int64_t i = index_of_thread();
  if (i < n) out[i] = bias(score[i], i);
}

// score = weight . RMSNorm(stream); with u, also the score to select by.
template <int N>
__global__ void __launch_bounds__(kRowThreads)
    router_forward_kernel(float* score, float* u, const float* stream, const float* weight, TokenBias bias,
                          int64_t n, int64_t d, float eps) {
  const int64_t i = row_of_warp();
  if (i >= n) return;
  float product = 0, sum = 0;
  for_each_pack<N>(d, [&](int64_t j) {
    const Pack<N> x = load<N>(stream + i * d + j), w = load<N>(weight + j);
    sum += squares(x);
#pragma unroll
    for (int k = 0; k < N; k++) product += x[k] * w[k];
  });
  const float s = lanes_sum(product) * rms_rstd_of(lanes_sum(sum), d, eps);
  if (lane_of_warp() != 0) return;
  score[i] = s;
  if (u) u[i] = bias(s, i);
}

// Sums over rows: the gradient of the router's weight.
template <int N>
struct RouterBackward {
  static constexpr int kSums = 1;

  float* dx;            // (n, d) added to
  float* dweight;       // (d) added to
  const float* dlogit;  // (n)
  const float* x;       // (n, d)
  const float* weight;  // (d)
  int64_t d;
  float eps;

  __device__ void row(int64_t i, float* sums) const {
    const float* inp = x + i * d;
    float product = 0, sum = 0;
    for_each_pack<N>(d, [&](int64_t j) {
      const Pack<N> v = load<N>(inp + j), w = load<N>(weight + j);
      sum += squares(v);
#pragma unroll
      for (int k = 0; k < N; k++) product += v[k] * w[k];
    });
    const float rstd = rms_rstd_of(lanes_sum(sum), d, eps), s = lanes_sum(product) * rstd;
    const float ds = dlogit[i], shrink = s * rstd / static_cast<float>(d);
    for_each_pack<N>(d, [&](int64_t j) {
      const Pack<N> v = load<N>(inp + j), w = load<N>(weight + j);
      Pack<N> gradient = load<N>(dx + i * d + j), of_weight = load<N>(sums + j);
#pragma unroll
      for (int k = 0; k < N; k++) {
        gradient[k] += ds * rstd * (w[k] - v[k] * shrink);
        of_weight[k] += ds * v[k] * rstd;
      }
      store(dx + i * d + j, gradient);
      store(sums + j, of_weight);
    });
  }

  __device__ void add(int64_t j, float sum) const {
    dweight[j] += sum;
  }
};

// ---------------------------------------------------------------------------------------------------
// selection

constexpr int kSelectThreads = 1024;  // at most
constexpr int kSelectItems = 4;       // neighbours that a thread takes

// Where what is known of a selected token goes; without position the row is all.
struct SelectedRows {
  int32_t* row;                 // (n) of the stream
  int32_t* position;            // (n), or null
  float* logit;                 // (n) its router logit
  int32_t* times_selected;      // (all tokens) one more
  const int32_t* all_position;  // (all tokens)
  const float* score;           // (all tokens)

  __device__ void put(int64_t at, int64_t token) const {
    row[at] = static_cast<int32_t>(token);
    if (position) {
      position[at] = all_position[token];
      count(at, token);
    }
  }
  __device__ void count(int64_t at, int64_t token) const {
    logit[at] = score[token];
    times_selected[token]++;
  }
};

__global__ void count_selected_kernel(SelectedRows rows, int64_t n) {
  const int64_t i = index_of_thread();
  if (i < n) rows.count(i, rows.row[i]);
}

// Orders floats as unsigned integers do; +0 and -0 are equal, NaN comes last or first by its sign.
__device__ inline uint32_t sort_key(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline float of_sort_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}

// Two counts of up to 65535 each.
struct Counts {
  uint32_t both = 0;
  __device__ void add(bool first, bool second) { both += (first ? 1u : 0u) + (second ? 1u << 16 : 0u); }
  __device__ int64_t first() const { return both & 0xFFFFu; }
  __device__ int64_t second() const { return both >> 16; }
};

// The counts of the threads before this one; total: of all threads.
__device__ inline Counts counts_before(Counts mine, Counts& total) {
  return {threads_sum_before(mine.both, total.both)};
}

// The key that is the wanted-th largest of T, found digit by digit from the highest: a histogram of the keys
// that agree with the digits known so far tells the next one. Leaves in `wanted` how many of the keys equal
// to it belong to the wanted ones.
__device__ inline uint32_t find_key(const float* u, int64_t T, int& wanted) {
  constexpr int kDigits = 256, kEach = kDigits / kWarp;
  __shared__ int histogram[kDigits];
  __shared__ int found_digit, found_wanted;
  uint32_t known = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int digit = threadIdx.x; digit < kDigits; digit += blockDim.x) histogram[digit] = 0;
    __syncthreads();
    for (int64_t t = threadIdx.x; t < T; t += blockDim.x) {
      const uint32_t key = sort_key(u[t]);
      if (shift == 24 || key >> (shift + 8) == known) atomicAdd(&histogram[key >> shift & 255u], 1);
    }
    __syncthreads();
    if (warp_of_block() == 0) {  // a lane takes kEach digits, from the largest down
      const int largest = kDigits - 1 - lane_of_warp() * kEach;
      int sum = 0;
      for (int k = 0; k < kEach; k++) sum += histogram[largest - k];
      int up_to = sum;
#pragma unroll
      for (int step = 1; step < kWarp; step *= 2) {
        const int other = __shfl_up_sync(kFullWarp, up_to, step);
        if (lane_of_warp() >= step) up_to += other;
      }
      int before = up_to - sum;
      if (before < wanted && wanted <= up_to) {
        int digit = largest;
        while (before + histogram[digit] < wanted) before += histogram[digit--];
        found_digit = digit;
        found_wanted = wanted - before;
      }
    }
    __syncthreads();
    known = known << 8 | static_cast<uint32_t>(found_digit);
    wanted = found_wanted;
  }
  return known;
}

// A block takes a sequence: its C tokens with the largest u, ties to the earlier token, in position order.
// One on a multiprocessor is enough, since there are few: nvcc need not save registers for a second.
__global__ void __launch_bounds__(kSelectThreads, 1) select_topk_kernel(SelectedRows rows,  // (B*C)
                                                                        int64_t* offsets,   // (B+1), or null
                                                                        float* kth,  // (B) the C-th largest u
                                                                        const float* u,  // (B, T)
                                                                        int64_t T, int64_t C) {
  const int64_t b = blockIdx.x;
  u += b * T;
  int wanted = static_cast<int>(C);
  const uint32_t smallest = find_key(u, T, wanted);
  if (threadIdx.x == 0) {
    kth[b] = of_sort_key(smallest);
    if (offsets) offsets[b] = b * C;
    if (offsets && b == gridDim.x - 1) offsets[b + 1] = (b + 1) * C;
  }
  int64_t above = 0, equal = 0;  // how many tokens before are
  for (int64_t begin = 0; begin < T; begin += int64_t{blockDim.x} * kSelectItems) {
    const int64_t first = begin + threadIdx.x * kSelectItems;
    uint32_t keys[kSelectItems];
    Counts mine, all;
#pragma unroll
    for (int k = 0; k < kSelectItems; k++) {
      keys[k] = first + k < T ? sort_key(u[first + k]) : 0;
      mine.add(first + k < T && keys[k] > smallest, first + k < T && keys[k] == smallest);
    }
    const Counts before = counts_before(mine, all);
    int64_t a = above + before.first(), e = equal + before.second();
#pragma unroll
    for (int k = 0; k < kSelectItems; k++) {
      if (first + k >= T || keys[k] < smallest) continue;
      const bool is_equal = keys[k] == smallest;
      if (!is_equal || e < wanted) rows.put(b * C + a + (e < wanted ? e : wanted), b * T + first + k);
      if (is_equal)
        e++;
      else
        a++;
    }
    above += all.first(), equal += all.second();
  }
}

// Every token with u > tau, in order. One block takes all of them: this is for evaluation and generation.
__global__ void __launch_bounds__(kSelectThreads)
    select_threshold_kernel(int32_t* row,                // (up to all rows)
                            int64_t* offsets,            // (B+1)
                            const float* u,              // (all rows)
                            const float* tau,            // (1)
                            const int64_t* all_offsets,  // (B+1)
                            int64_t B) {
  __shared__ int32_t selected_before[kSelectThreads];  // in this chunk
  const int64_t n = all_offsets[B];
  int64_t selected = 0;
  for (int64_t begin = 0; begin <= n; begin += blockDim.x) {  // once more behind the last row, for offsets[B]
    const int64_t i = begin + threadIdx.x;
    Counts mine, all;
    const bool take = i < n && u[i] > *tau;
    mine.add(take, false);
    const Counts before = counts_before(mine, all);
    if (take) row[selected + before.first()] = static_cast<int32_t>(i);
    selected_before[threadIdx.x] = static_cast<int32_t>(before.first());
    __syncthreads();
    for (int64_t b = threadIdx.x; b <= B; b += blockDim.x) {
      const int64_t at = all_offsets[b] - begin;
      if (at >= 0 && at < blockDim.x) offsets[b] = selected + selected_before[at];
    }
    __syncthreads();
    selected += all.first();
  }
}

// ---------------------------------------------------------------------------------------------------
// thresholds

// A thread takes a row: there are as many as sparse layers.
__global__ void add_row_means_kernel(float* out, const float* inp, int64_t rows, int64_t columns) {
  const int64_t i = index_of_thread();
  if (i >= rows) return;
  double sum = 0;
  for (int64_t j = 0; j < columns; j++) sum += inp[i * columns + j];
  out[i] += static_cast<float>(sum / static_cast<double>(columns));
}

__global__ void threshold_update_kernel(float* tau, const float* kth_sum, float scale, float rate,
                                        int64_t layers) {
  const int64_t l = index_of_thread();
  if (l < layers) tau[l] += rate * (kth_sum[l] * scale - tau[l]);
}

}  // namespace xmod

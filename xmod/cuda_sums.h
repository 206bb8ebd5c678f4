// Sums on the GPU: inside a warp and a block, over the rows of a tensor, over a whole tensor. The order
// depends on the shapes alone, so results repeat bit for bit; no number is added by an atomic.
#pragma once

#include <algorithm>
#include <cstdint>

#include "xmod/cuda_common.h"
#include "xmod/cuda_pack.h"
#include "xmod/error.h"

namespace xmod {

constexpr int kWarp = 32;
constexpr int kRowThreads = 256;  // of a block whose warps take a row each

__device__ inline int lane_of_warp() {
  return static_cast<int>(threadIdx.x) % kWarp;
}
__device__ inline int warp_of_block() {
  return static_cast<int>(threadIdx.x) / kWarp;
}
__device__ inline int warps_of_block() {
  return static_cast<int>(blockDim.x) / kWarp;
}

// Of kLanes neighbours; each of them receives it.
template <int kLanes = kWarp, class T>
__device__ inline T lanes_sum(T value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(kFullWarp, value, step);
  return value;
}

// Of all threads of the block; each of them receives it.
template <class T>
__device__ inline T threads_sum(T value) {
  __shared__ T of_warp[kWarp];
  value = lanes_sum(value);
  if (lane_of_warp() == 0) of_warp[warp_of_block()] = value;
  __syncthreads();
  T total = 0;
  for (int w = 0; w < warps_of_block(); w++) total += of_warp[w];
  __syncthreads();
  return total;
}

// Of an integer of each thread: the sum of the threads before this one; total: of all threads.
template <class T>
__device__ inline T threads_sum_before(T mine, T& total) {
  __shared__ T of_warp[kWarp];
  T sum = mine;  // of the lanes up to this one
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const T other = __shfl_up_sync(kFullWarp, sum, step);
    if (lane_of_warp() >= step) sum += other;
  }
  if (lane_of_warp() == kWarp - 1) of_warp[warp_of_block()] = sum;
  __syncthreads();
  T before = 0;
  total = 0;
  for (int w = 0; w < warps_of_block(); w++) {
    if (w < warp_of_block()) before += of_warp[w];
    total += of_warp[w];
  }
  __syncthreads();
  return before + sum - mine;
}

// Whether this block is the last of `blocks` to come here. It then sees what the others wrote before they
// came. Leaves the counter at 0, as it was.
__device__ inline bool is_last_to_come(unsigned* counter, unsigned blocks) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(counter, 1u) == blocks - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// ---------------------------------------------------------------------------------------------------
// sums over the rows of a tensor

// What blocks leave for each other.
struct SumScratch {
  static constexpr int64_t kMostBlocks = 256;
  static constexpr int64_t kGroup = 16;  // blocks whose sums are added first
  static constexpr int64_t kCounters = 1 + kMostBlocks / kGroup;

  float* partial = nullptr;      // (kMostBlocks + kMostBlocks/kGroup, width)
  unsigned* counters = nullptr;  // (kCounters) 0 between kernels

  static int64_t floats(int64_t width) { return (kMostBlocks + kMostBlocks / kGroup) * width; }
};

namespace detail {

__device__ inline double column_sum(const float* rows, int64_t count, int64_t width, int64_t j) {
  double total = 0;
  for (int64_t i = 0; i < count; i++) total += rows[i * width + j];
  return total;
}

}  // namespace detail

// Calls visit.row(i, sums) with a whole warp for each of n rows; sums (Visit::kSums, width) in shared memory
// are the warp's own. Then calls visit.add(j, sum) once for each column, with what all of them hold. Warps
// are summed in their order, then blocks by groups of kGroup, then the groups. Two blocks on a
// multiprocessor are enough, since there are at most kMostBlocks; nvcc, left to itself, would rather spill
// registers for more.
template <class Visit>
__global__ void __launch_bounds__(kRowThreads, 2)
    row_sums_kernel(Visit visit, SumScratch scratch, int64_t n, int64_t width) {
  dynamic_shared(float, sums);  // (warps * Visit::kSums, width)
  const int64_t per_warp = Visit::kSums * width, warps = warps_of_block();
  for (int64_t j = threadIdx.x; j < warps * per_warp; j += blockDim.x) sums[j] = 0;
  __syncthreads();
  const int64_t rows = (n + gridDim.x - 1) / gridDim.x;  // of a block
  const int64_t begin = blockIdx.x * rows, end = begin + rows < n ? begin + rows : n;
  for (int64_t i = begin + warp_of_block(); i < end; i += warps)
    visit.row(i, sums + warp_of_block() * per_warp);
  __syncthreads();

  for (int64_t j = threadIdx.x; j < width; j += blockDim.x) {
    scratch.partial[blockIdx.x * width + j] =
        static_cast<float>(detail::column_sum(sums, warps * Visit::kSums, width, j));
  }
  constexpr int64_t kGroup = SumScratch::kGroup;
  const int64_t groups = (gridDim.x + kGroup - 1) / kGroup, group = blockIdx.x / kGroup;
  const int64_t members = group + 1 < groups ? kGroup : gridDim.x - group * kGroup;
  if (!is_last_to_come(scratch.counters + 1 + group, static_cast<unsigned>(members))) return;
  float* of_groups = scratch.partial + gridDim.x * width;  // (groups, width)
  for (int64_t j = threadIdx.x; j < width; j += blockDim.x) {
    const float* first = scratch.partial + group * kGroup * width;
    of_groups[group * width + j] = static_cast<float>(detail::column_sum(first, members, width, j));
  }
  if (!is_last_to_come(scratch.counters, static_cast<unsigned>(groups))) return;
  for (int64_t j = threadIdx.x; j < width; j += blockDim.x)
    visit.add(j, static_cast<float>(detail::column_sum(of_groups, groups, width, j)));
}

// Runs row_sums_kernel; n > 0.
template <class Visit>
void launch_row_sums(const Visit& visit, const SumScratch& scratch, int64_t n, int64_t width,
                     LaunchStream stream) {
  constexpr int64_t kShared = 48 * 1024;
  const int64_t bytes_per_warp = Visit::kSums * width * static_cast<int64_t>(sizeof(float));
  if (bytes_per_warp > kShared) {
    fail("rows of ", width, " numbers: the CUDA backend sums over rows of at most ",
         kShared / static_cast<int64_t>(sizeof(float)) / Visit::kSums, "; use train_xmod");
  }
  const int64_t warps = std::min<int64_t>(kRowThreads / kWarp, kShared / bytes_per_warp);
  const int64_t blocks = std::min((n + warps - 1) / warps, SumScratch::kMostBlocks);
  launch(row_sums_kernel<Visit>, static_cast<unsigned>(blocks), static_cast<unsigned>(warps * kWarp),
         static_cast<size_t>(warps * bytes_per_warp), stream, visit, scratch, n, width);
}

// ---------------------------------------------------------------------------------------------------
// sums over a whole tensor

constexpr int64_t kMostSumBlocks = 1024;

struct Value {
  __device__ double operator()(float x) const { return x; }
};
struct Square {
  __device__ double operator()(float x) const { return static_cast<double>(x) * x; }
};

// total = the sum of term(inp)
template <class Term>
__global__ void __launch_bounds__(kRowThreads) tensor_sum_kernel(double* total,      // (1)
                                                                 double* partial,    // (blocks)
                                                                 unsigned* counter,  // (1)
                                                                 const float* inp,   // (n)
                                                                 int64_t n, Term term) {
  double sum = 0;
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += threads) sum += term(inp[i]);
  sum = threads_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
  if (!is_last_to_come(counter, gridDim.x)) return;
  sum = 0;
  for (unsigned b = threadIdx.x; b < gridDim.x; b += blockDim.x) sum += partial[b];
  sum = threads_sum(sum);
  if (threadIdx.x == 0) *total = sum;
}

}  // namespace xmod

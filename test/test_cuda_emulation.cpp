// The CPU in the place of a GPU: what kernels compute there, and which of their defects it finds.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "normal_numbers.h"
#include "xmod/cpu_matmul.h"
#include "xmod/cuda_common.h"

// A name, because messages can give the names of kernels that the linker knows.
namespace xmod::emulation_test {

using bf16 = __nv_bfloat16;
using Ints = std::vector<int>;

// An array on the device.
template <class T>
class Array {
 public:
  explicit Array(size_t n) : size_(n) { cuda_check(cudaMalloc(&data_, n * sizeof(T))); }
  explicit Array(const std::vector<T>& values) : Array(values.size()) {
    cuda_check(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~Array() { cudaFree(data_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  operator T*() const { return data_; }
  std::vector<T> values() const {
    std::vector<T> out(size_);
    cuda_check(cudaMemcpy(out.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return out;
  }

 private:
  size_t size_;
  T* data_ = nullptr;
};

std::vector<bf16> narrowed(const Floats& values) {
  return std::vector<bf16>(values.begin(), values.end());
}
Floats widened(const std::vector<bf16>& values) {
  return Floats(values.begin(), values.end());
}

template <class Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// Results must not depend on the order of threads: tests run in several.
const std::vector<uint64_t> kOrders = {0, 1, 2, 3, 4, 5, 6, 7};

class CudaEmulation : public ::testing::Test {
 protected:
  CudaEmulation() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  ~CudaEmulation() override {
    cuda_emulation::set_thread_order(0);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }

  template <class Body>
  static void in_any_order(Body body) {
    for (uint64_t order : kOrders) {
      SCOPED_TRACE(order);
      cuda_emulation::set_thread_order(order);
      body();
    }
  }
};
using CudaEmulationDeathTest = CudaEmulation;

// ---------------------------------------------------------------------------------------------------
// Launches

struct Place {
  uint3 thread, block;
  uint3 block_size, grid_size;
};

__global__ void note_places(Place* out) {
  const size_t block = blockIdx.x + size_t{gridDim.x} * (blockIdx.y + size_t{gridDim.y} * blockIdx.z);
  const size_t thread = threadIdx.x + size_t{blockDim.x} * (threadIdx.y + size_t{blockDim.y} * threadIdx.z);
  out[block * (blockDim.x * blockDim.y * blockDim.z) + thread] = {threadIdx, blockIdx, blockDim, gridDim};
}

TEST_F(CudaEmulation, EveryThreadOfEveryBlockRunsOnce) {
  const dim3 grid(5, 3, 2), block(17, 3, 4);
  const size_t threads = 17 * 3 * 4, n = threads * 5 * 3 * 2;
  in_any_order([&] {
    Array<Place> out(n);
    launch(note_places, grid, block, 0, nullptr, out);
    const std::vector<Place> places = out.values();
    for (size_t i = 0; i < n; i++) {
      const Place& p = places[i];
      ASSERT_EQ(p.thread.x + 17 * (p.thread.y + 3 * p.thread.z), i % threads);
      ASSERT_EQ(p.block.x + 5 * (p.block.y + 3 * p.block.z), i / threads);
      ASSERT_EQ(p.block_size.y, 3u);
      ASSERT_EQ(p.grid_size.z, 2u);
    }
  });
}

template <class T, int Factor>
__global__ void multiply(T* out, const T* inp, T addend, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) out[i] = Factor * inp[i] + addend;
}

TEST_F(CudaEmulation, KernelsMayBeTemplatesAndArgumentsConvert) {
  Array<double> inp({1, 2, 3}), out(3);
  launch(multiply<double, 10>, 1, 32, 0, nullptr, out, inp, 5, 3L);
  EXPECT_EQ(out.values(), (std::vector<double>{15, 25, 35}));
}

__global__ void use_dynamic_memory(int* out, int n) {
  dynamic_shared(int, shared);
  shared[n - 1] = 7;
  out[0] = shared[n - 1];
}

void swiglu_pass(dim3 grid, dim3 block, size_t shared_bytes, int* out) {
  launch(use_dynamic_memory, grid, block, shared_bytes, nullptr, out,
         static_cast<int>(shared_bytes / sizeof(int)));
}

TEST_F(CudaEmulation, ALaunchThatNoDeviceTakesIsAnErrorOfThePass) {
  Array<int> out(1);
  const std::string invalid = "CUDA: launching a kernel in swiglu_pass failed: cudaErrorInvalidConfiguration";
  for (const dim3 grid : {dim3(0), dim3(1, 0), dim3(1, 65536), dim3(1, 1, 65536)})
    EXPECT_EQ(error_of([&] { swiglu_pass(grid, 1, 4, out); }).substr(0, invalid.size()), invalid);
  for (const dim3 block : {dim3(0), dim3(1025), dim3(32, 33), dim3(1, 1, 65)})
    EXPECT_EQ(error_of([&] { swiglu_pass(1, block, 4, out); }).substr(0, invalid.size()), invalid);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(CudaEmulation, LaunchAsksForMuchSharedMemoryWhichADeviceGivesOnRequestOnly) {
  Array<int> out(1);
  const auto directly = [&](size_t bytes) {
    cudaLaunchConfig_t config = {};
    config.gridDim = config.blockDim = 1;
    config.dynamicSmemBytes = bytes;
    return cudaLaunchKernelEx(&config, use_dynamic_memory, static_cast<int*>(out),
                              static_cast<int>(bytes / 4));
  };
  EXPECT_EQ(directly(48 << 10), cudaSuccess);
  EXPECT_EQ(directly((48 << 10) + 4), cudaErrorInvalidValue);
  swiglu_pass(1, 1, 227 << 10, out);
  EXPECT_EQ(out.values(), Ints{7});
  EXPECT_NE(error_of([&] { swiglu_pass(1, 1, (227 << 10) + 4, out); }).find("cudaErrorInvalidValue"),
            std::string::npos);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
}

// ---------------------------------------------------------------------------------------------------
// Barriers and shared memory

template <bool Barrier>
__global__ void reverse(int* out, const int* inp) {
  __shared__ int shared[256];
  const unsigned i = threadIdx.x, n = blockDim.x;
  shared[i] = inp[blockIdx.x * n + i];
  if (Barrier) __syncthreads();
  out[blockIdx.x * n + i] = shared[n - 1 - i];
}

template <class T>
__global__ void reverse_dynamic(T* out, const T* inp, int rounds) {
  dynamic_shared(T, shared);
  const unsigned i = threadIdx.x, n = blockDim.x;
  T value = inp[i];
  for (int round = 0; round < rounds; round++) {
    __syncthreads();
    shared[i] = value;
    __syncthreads();
    value = shared[n - 1 - i] + 1;
  }
  out[i] = value;
}

Ints counted(int n) {
  Ints out(static_cast<size_t>(n));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

Ints reversed_blocks(const Ints& values, size_t block) {
  Ints out = values;
  for (size_t i = 0; i < out.size(); i += block) {
    const auto begin = out.begin() + static_cast<ptrdiff_t>(i);
    std::reverse(begin, begin + static_cast<ptrdiff_t>(block));
  }
  return out;
}

TEST_F(CudaEmulation, BarriersMakeWritesToSharedMemoryVisible) {
  const Ints values = counted(40 * 192);
  const Array<int> inp(values), out(values.size());
  in_any_order([&] {
    launch(reverse<true>, 40, 192, 0, nullptr, out, inp);
    EXPECT_EQ(out.values(), reversed_blocks(values, 192));
  });
}

TEST_F(CudaEmulation, DynamicSharedMemoryIsSharedByTheThreadsOfABlock) {
  const Ints values = counted(77);
  const Array<int> inp(values), out(77);
  in_any_order([&] {
    launch(reverse_dynamic<int>, 1, 77, 77 * sizeof(int), nullptr, out, inp, 5);
    const Ints result = out.values();
    for (int i = 0; i < 77; i++) EXPECT_EQ(result[static_cast<size_t>(i)], 76 - i + 5);
  });
}

TEST_F(CudaEmulation, AMissingBarrierShowsInSomeOrder) {
  const Ints values = counted(192);
  const Array<int> inp(values), out(values.size());
  std::set<Ints> results;
  for (uint64_t order : kOrders) {
    cuda_emulation::set_thread_order(order);
    launch(reverse<false>, 1, 192, 0, nullptr, out, inp);
    results.insert(out.values());
  }
  EXPECT_GT(results.size(), 4u);
}

// The second barrier is missing: a quick warp overwrites what a slow one has yet to read.
template <bool SecondBarrier>
__global__ void shift_twice(int* out) {
  __shared__ int shared[128];
  const unsigned i = threadIdx.x;
  shared[i] = static_cast<int>(i);
  __syncthreads();
  const int next = shared[(i + 32) % 128];
  if (SecondBarrier) __syncthreads();
  shared[i] = next;
  __syncthreads();
  out[i] = shared[(i + 32) % 128];
}

TEST_F(CudaEmulation, ASharedArrayThatIsWrittenTooEarlyShowsInSomeOrder) {
  Ints expected;
  for (int i = 0; i < 128; i++) expected.push_back((i + 64) % 128);
  const Array<int> out(128);
  size_t wrong = 0;
  in_any_order([&] {
    launch(shift_twice<true>, 1, 128, 0, nullptr, out);
    EXPECT_EQ(out.values(), expected);
    launch(shift_twice<false>, 1, 128, 0, nullptr, out);
    wrong += out.values() != expected;
  });
  EXPECT_GT(wrong, kOrders.size() / 2);
}

__global__ void queue_up(int* order, int* next) {
  order[atomicAdd(next, 1)] = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
}

Ints queue(unsigned blocks, unsigned threads) {
  const Array<int> order(blocks * threads), next(Ints{0});
  launch(queue_up, blocks, threads, 0, nullptr, order, next);
  return order.values();
}

TEST_F(CudaEmulation, ASeedChoosesTheOrderOfThreadsAndBlocks) {
  EXPECT_EQ(queue(2, 64), counted(128));
  std::set<Ints> orders;
  bool block_1_first = false;
  in_any_order([&] {
    Ints order = queue(2, 64);
    orders.insert(order);
    block_1_first |= order[0] >= 64;
    std::sort(order.begin(), order.end());
    EXPECT_EQ(order, counted(128));
  });
  EXPECT_EQ(orders.size(), kOrders.size());
  EXPECT_TRUE(block_1_first);
}

__global__ void leave_early(int* out) {
  if (threadIdx.x == 40) return;
  __syncthreads();
  out[threadIdx.x] = 1;
}
__global__ void two_barriers(int* out) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[threadIdx.x] = 1;
}
__global__ void barrier_against_shuffle(int* out) {
  int value = 0;
  if (threadIdx.x % 2) {
    __syncthreads();
  } else {
    value = __shfl_xor_sync(kFullWarp, value, 2);
  }
  out[threadIdx.x] = value;
}

TEST_F(CudaEmulationDeathTest, ADivergentBarrierStopsTheProgram) {
  const Array<int> out(64);
  in_any_order([&] {
    EXPECT_DEATH(
        launch(leave_early, 1, 64, 0, nullptr, out),
        R"(leave_early.*block \(0,0,0\): divergent barrier: thread .*__syncthreads at .*test_cuda_emulation)");
    EXPECT_DEATH(
        launch(two_barriers, 1, 64, 0, nullptr, out),
        R"(two_barriers.*divergent barrier: thread \(.* came to __syncthreads at .*, but .* waits in __sync)");
    EXPECT_DEATH(launch(barrier_against_shuffle, 1, 32, 0, nullptr, out),
                 R"(divergent barrier: .* waits in __syncthreads at .*, but .*, which do not come)");
  });
}

// ---------------------------------------------------------------------------------------------------
// Fresh memory

__global__ void read_fresh(float* out, float* device) {
  __shared__ float fixed[8];
  __shared__ bf16 halves[8];
  dynamic_shared(float, dynamic);
  out[0] = fixed[3];
  out[1] = __bfloat162float(halves[5]);
  out[2] = dynamic[7];
  out[3] = device[2];
  for (int i = 0; i < 8; i++) fixed[i] = dynamic[i] = halves[i] = 1;  // which the next block must not find
}

TEST_F(CudaEmulation, FreshMemoryIsNotANumber) {
  const Array<float> out(4), device(5);
  for (int i = 0; i < 2; i++) {
    launch(read_fresh, 3, 1, 32, nullptr, out, device);
    for (float value : out.values()) EXPECT_TRUE(std::isnan(value));
  }
}

// ---------------------------------------------------------------------------------------------------
// Shuffles

enum class Shuffle { index, up, down, exclusive_or };

template <class T>
__global__ void shuffle_lanes(T* out, const T* inp, Shuffle shuffle, int by, int width) {
  const int i = static_cast<int>(threadIdx.x);
  const T value = inp[i];
  switch (shuffle) {
    case Shuffle::index:
      out[i] = __shfl_sync(kFullWarp, value, by + i % 3, width);
      break;
    case Shuffle::up:
      out[i] = __shfl_up_sync(kFullWarp, value, static_cast<unsigned>(by), width);
      break;
    case Shuffle::down:
      out[i] = __shfl_down_sync(kFullWarp, value, static_cast<unsigned>(by), width);
      break;
    case Shuffle::exclusive_or:
      out[i] = __shfl_xor_sync(kFullWarp, value, by, width);
      break;
  }
}

// Of which lane the definition of CUDA says that lane i gets the value.
int source_lane(int i, Shuffle shuffle, int by, int width) {
  const int begin = i / width * width;
  switch (shuffle) {
    case Shuffle::index:
      return begin + (by + i % 3) % width;
    case Shuffle::up:
      return i - by >= begin ? i - by : i;
    case Shuffle::down:
      return i + by < begin + width ? i + by : i;
    case Shuffle::exclusive_or:
      return (i ^ by) < begin + width ? i ^ by : i;
  }
  return -1;
}

template <class T>
void expect_shuffles(const std::vector<T>& values) {
  const Array<T> inp(values), out(32);
  for (Shuffle shuffle : {Shuffle::index, Shuffle::up, Shuffle::down, Shuffle::exclusive_or}) {
    for (int width : {32, 16, 4, 1}) {
      for (int by : {0, 1, 3, 16, 31}) {
        launch(shuffle_lanes<T>, 1, 32, 0, nullptr, out, inp, shuffle, by, width);
        const std::vector<T> result = out.values();
        for (int i = 0; i < 32; i++) {
          ASSERT_EQ(result[static_cast<size_t>(i)],
                    values[static_cast<size_t>(source_lane(i, shuffle, by, width))])
              << static_cast<int>(shuffle) << " by " << by << " width " << width << " lane " << i;
        }
      }
    }
  }
}

TEST_F(CudaEmulation, ShufflesTakeTheValueOfTheLaneThatTheirDefinitionNames) {
  Floats values;
  for (int i = 0; i < 32; i++) values.push_back(1.5f * static_cast<float>(i));
  const auto as = [&]<class T>(T) { return std::vector<T>(values.begin(), values.end()); };
  in_any_order([&] {
    expect_shuffles(as(float{}));
    expect_shuffles(as(int{}));
    expect_shuffles(as(uint64_t{}));
    expect_shuffles(as(double{}));
    expect_shuffles(as(bf16{}));
  });
}

// The warps of a block, and the halves of a warp, do not wait for each other.
__global__ void halves_apart(float* out) {
  const unsigned i = threadIdx.x, lane = i % 32;
  float value = static_cast<float>(i);
  if (lane < 16) {
    for (int distance = 8; distance > 0; distance /= 2) value += __shfl_xor_sync(0x0000ffff, value, distance);
  } else if (__any_sync(0xffff0000, lane == 20)) {
    value = __shfl_sync(0xffff0000, value, 20);
  }
  __syncwarp();
  out[i] = value;
}

TEST_F(CudaEmulation, LanesOfDisjointMasksMeetApart) {
  const Array<float> out(64);
  in_any_order([&] {
    launch(halves_apart, 1, 64, 0, nullptr, out);
    const Floats result = out.values();
    for (size_t i = 0; i < 64; i++) {
      const float first = static_cast<float>(i / 32 * 32);
      EXPECT_EQ(result[i], i % 32 < 16 ? 16 * first + 120 : first + 20) << i;
    }
  });
}

__global__ void take_from_outside(float* out) {
  if (threadIdx.x < 8) out[threadIdx.x] = __shfl_sync(0xff, 1.0f, static_cast<int>(threadIdx.x) + 1);
}

TEST_F(CudaEmulation, WhatALaneOutsideOfTheMaskHoldsIsNotANumber) {
  const Array<float> out(8);
  launch(take_from_outside, 1, 32, 0, nullptr, out);
  const Floats result = out.values();
  EXPECT_EQ(result[6], 1);
  EXPECT_TRUE(std::isnan(result[7]));
}

// ---------------------------------------------------------------------------------------------------
// Votes and reductions

__global__ void vote(unsigned* out, const int* inp, unsigned mask) {
  if (!(mask >> threadIdx.x & 1)) return;
  const int value = inp[threadIdx.x];
  unsigned* to = out + threadIdx.x * 16;
  to[0] = __ballot_sync(mask, value > 0);
  to[1] = static_cast<unsigned>(__any_sync(mask, value == 9));
  to[2] = static_cast<unsigned>(__any_sync(mask, value == 1000));
  to[3] = static_cast<unsigned>(__all_sync(mask, value < 1000));
  to[4] = static_cast<unsigned>(__all_sync(mask, value != 9));
  to[5] = static_cast<unsigned>(__reduce_add_sync(mask, value));
  to[6] = static_cast<unsigned>(__reduce_min_sync(mask, value));
  to[7] = static_cast<unsigned>(__reduce_max_sync(mask, value));
  const unsigned bits = static_cast<unsigned>(value);
  to[8] = __reduce_add_sync(mask, bits);
  to[9] = __reduce_min_sync(mask, bits);
  to[10] = __reduce_max_sync(mask, bits);
  to[11] = __reduce_and_sync(mask, bits);
  to[12] = __reduce_or_sync(mask, bits);
  to[13] = __reduce_xor_sync(mask, bits);
  to[14] = __match_any_sync(mask, value % 3);
}

TEST_F(CudaEmulation, VotesAndReductionsSeeTheLanesOfTheMask) {
  Ints values;
  for (int i = 0; i < 32; i++) values.push_back((i * 7) % 23 - 9);
  const Array<int> inp(values);
  const Array<unsigned> out(32 * 16);
  for (unsigned mask : {0xffffffffu, 0x0f0f1234u, 0x00000100u}) {
    unsigned positive = 0, total = 0, all = ~0u, any = 0, odd = 0;
    int least = 1000, most = -1000;
    unsigned least_bits = ~0u, most_bits = 0;
    bool nine = false;
    for (unsigned i = 0; i < 32; i++) {
      if (!(mask >> i & 1)) continue;
      const int value = values[i];
      const unsigned bits = static_cast<unsigned>(value);
      positive |= unsigned{value > 0} << i;
      total += bits;
      nine |= value == 9;
      least = std::min(least, value), most = std::max(most, value);
      least_bits = std::min(least_bits, bits), most_bits = std::max(most_bits, bits);
      all &= bits, any |= bits, odd ^= bits;
    }
    in_any_order([&] {
      launch(vote, 1, 32, 0, nullptr, out, inp, mask);
      const std::vector<unsigned> result = out.values();
      for (unsigned i = 0; i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        unsigned equal = 0;
        for (unsigned j = 0; j < 32; j++)
          equal |= unsigned{(mask >> j & 1) && values[j] % 3 == values[i] % 3} << j;
        const std::vector<unsigned> expected = {positive,
                                                nine,
                                                0,
                                                1,
                                                !nine,
                                                total,
                                                static_cast<unsigned>(least),
                                                static_cast<unsigned>(most),
                                                total,
                                                least_bits,
                                                most_bits,
                                                all,
                                                any,
                                                odd,
                                                equal};
        EXPECT_EQ(std::vector<unsigned>(result.begin() + i * 16, result.begin() + i * 16 + 15), expected)
            << "lane " << i << " of mask " << mask;
      }
    });
  }
}

__global__ void own_lane_missing(int* out) {
  out[threadIdx.x] = __shfl_sync(0x7fffffffu, 1, 0);
}
__global__ void masks_differ(int* out) {
  out[threadIdx.x] = static_cast<int>(__ballot_sync(threadIdx.x < 5 ? kFullWarp : 0xfffffffeu, 1));
}
__global__ void functions_differ(int* out) {
  out[threadIdx.x] = threadIdx.x < 5 ? __any_sync(kFullWarp, 1) : __all_sync(kFullWarp, 1);
}
__global__ void some_lanes_stay_away(int* out) {
  if (threadIdx.x != 9) out[threadIdx.x] = static_cast<int>(__ballot_sync(kFullWarp, 1));
}
__global__ void full_mask(int* out) {
  out[threadIdx.x] = static_cast<int>(__ballot_sync(kFullWarp, 1));
}

TEST_F(CudaEmulationDeathTest, AMaskThatIsNotTheLanesThatComeStopsTheProgram) {
  const Array<int> out(64);
  in_any_order([&] {
    EXPECT_DEATH(launch(own_lane_missing, 1, 32, 0, nullptr, out),
                 R"(own_lane_missing.*: __shfl_sync at .*mask 0x7fffffff, which lacks its own lane 31)");
    EXPECT_DEATH(launch(masks_differ, 1, 32, 0, nullptr, out),
                 R"(__ballot_sync at .* came with mask 0x.*mask 0x)");
    EXPECT_DEATH(launch(functions_differ, 1, 32, 0, nullptr, out),
                 R"(came with mask .* wait in __a[nl][yl]_sync)");
    EXPECT_DEATH(launch(some_lanes_stay_away, 1, 32, 0, nullptr, out),
                 R"(thread \(9,0,0\) has ended|0x00000200)");
    EXPECT_DEATH(launch(full_mask, 1, 48, 0, nullptr, out), R"(but the warp has lanes 0x0000ffff only)");
  });
}

// ---------------------------------------------------------------------------------------------------
// Sums of cuda_common.h

template <int Threads>
__global__ void sums(float* sum, float* most, const float* inp) {
  const float value = inp[threadIdx.x];
  const float first = block_sum<Threads>(value), second = block_sum<Threads>(2 * value);
  sum[threadIdx.x] = first + second;
  most[threadIdx.x] = warp_max(value) + 0 * warp_sum(value);
}

template <int Threads>
void expect_sums() {
  const Floats values = normal_numbers(Threads, 1);
  const Array<float> inp(values), sum(Threads), most(Threads);
  Floats first_sum;
  for (uint64_t order : kOrders) {
    cuda_emulation::set_thread_order(order);
    launch(sums<Threads>, 1, Threads, 0, nullptr, sum, most, inp);
    const Floats result = sum.values(), maxima = most.values();
    if (first_sum.empty()) first_sum = result;
    EXPECT_EQ(result, first_sum);
    EXPECT_EQ(result, Floats(Threads, result[0]));
    EXPECT_NEAR(result[0], 3 * std::accumulate(values.begin(), values.end(), 0.0), 1e-4);
    for (ptrdiff_t warp = 0; warp < Threads; warp += 32) {
      const float peak = *std::max_element(values.begin() + warp, values.begin() + warp + 32);
      for (ptrdiff_t i = warp; i < warp + 32; i++) EXPECT_EQ(maxima[static_cast<size_t>(i)], peak);
    }
  }
}

TEST_F(CudaEmulation, SumsOfWarpsAndBlocksReachEveryThread) {
  expect_sums<32>();
  expect_sums<96>();
  expect_sums<256>();
  expect_sums<1024>();
}

// ---------------------------------------------------------------------------------------------------
// Atomics

template <class T>
__global__ void count(T* out) {
  const T i = static_cast<T>(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(out, i);
  atomicMax(out + 1, i * 7 % 1009);
  atomicMin(out + 2, i * 7 % 1009);
  atomicOr(out + 3, T{1} << i % 31);
  atomicXor(out + 4, T{1} << i % 30);
  atomicAnd(out + 5, ~(T{1} << i % 31));
  atomicSub(out + 6, T{1});
  atomicExch(out + 7, T{3});
  for (T seen = out[8], next = 0; (next = atomicCAS(out + 8, seen, seen + 2)) != seen;) seen = next;
}

template <class T>
void expect_counts() {
  constexpr unsigned kBlocks = 64, kThreads = 128, n = kBlocks * kThreads;
  std::vector<T> expected = {T{n} * (n - 1) / 2, 1008,           0, 0x7fffffff, 0,
                             T(~T{0x7fffffff}),  T(T{0} - T{n}), 3, T{2 * n}};
  for (unsigned i = 0; i < n; i++) expected[4] ^= T{1} << i % 30;
  const Array<T> out({0, 0, 500, 0, 0, T(~T{0}), 0, 0, 0});
  launch(count<T>, kBlocks, kThreads, 0, nullptr, out);
  EXPECT_EQ(out.values(), expected);
}

TEST_F(CudaEmulation, AtomicsOfAllBlocksAddUp) {
  for (int round = 0; round < 5; round++) {
    expect_counts<int>();
    expect_counts<unsigned>();
    expect_counts<unsigned long long>();
  }
}

// ---------------------------------------------------------------------------------------------------
// Matrices

// The layout of fragments as the PTX manual gives it, element by element.
struct Fragment {
  int row, col;
};
Fragment of_a(int lane, int i) {
  return {(i < 2 || (i >= 4 && i < 6)) ? lane / 4 : lane / 4 + 8, lane % 4 * 2 + (i & 1) + (i < 4 ? 0 : 8)};
}
Fragment of_b(int lane, int i) {
  return {lane % 4 * 2 + (i & 1) + (i < 2 ? 0 : 8), lane / 4};
}
Fragment of_c(int lane, int i) {
  return {i < 2 ? lane / 4 : lane / 4 + 8, lane % 4 * 2 + (i & 1)};
}

__global__ void multiply_fragments(float* d, const uint32_t* a, const uint32_t* b) {
  const unsigned lane = threadIdx.x;
  float sums[4];
  uint32_t a_part[4], b_part[2];
  for (unsigned i = 0; i < 4; i++) sums[i] = d[4 * lane + i];
  for (unsigned i = 0; i < 4; i++) a_part[i] = a[4 * lane + i];
  for (unsigned i = 0; i < 2; i++) b_part[i] = b[2 * lane + i];
  mma_m16n8k16(sums, a_part, b_part);
  for (unsigned i = 0; i < 4; i++) d[4 * lane + i] = sums[i];
}

// (rows, cols) c + a b, in double precision.
Floats plain_product(const Floats& c, const Floats& a, const Floats& b, size_t rows, size_t cols,
                     size_t depth) {
  Floats out;
  for (size_t i = 0; i < rows; i++) {
    for (size_t j = 0; j < cols; j++) {
      double sum = c[i * cols + j];
      for (size_t k = 0; k < depth; k++) sum += double{a[i * depth + k]} * b[k * cols + j];
      out.push_back(static_cast<float>(sum));
    }
  }
  return out;
}

void expect_near(const Floats& a, const Floats& b, float bound) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); i++) ASSERT_NEAR(a[i], b[i], bound) << "element " << i;
}

TEST_F(CudaEmulation, MmaMultipliesMatricesThatLieInLanesAsDocumented) {
  const std::vector<bf16> a = narrowed(normal_numbers(16 * 16, 1)), b = narrowed(normal_numbers(16 * 8, 2));
  const Floats c = normal_numbers(16 * 8, 3);
  std::vector<bf16> a_lanes, b_lanes;
  Floats c_lanes;
  for (int lane = 0; lane < 32; lane++) {
    for (int i = 0; i < 8; i++)
      a_lanes.push_back(a[static_cast<size_t>(of_a(lane, i).row * 16 + of_a(lane, i).col)]);
    for (int i = 0; i < 4; i++)
      b_lanes.push_back(b[static_cast<size_t>(of_b(lane, i).row * 8 + of_b(lane, i).col)]);
    for (int i = 0; i < 4; i++)
      c_lanes.push_back(c[static_cast<size_t>(of_c(lane, i).row * 8 + of_c(lane, i).col)]);
  }
  const Array<bf16> a_device(a_lanes), b_device(b_lanes);
  in_any_order([&] {
    const Array<float> d(c_lanes);
    launch(multiply_fragments, 1, 32, 0, nullptr, d,
           reinterpret_cast<const uint32_t*>(static_cast<bf16*>(a_device)),
           reinterpret_cast<const uint32_t*>(static_cast<bf16*>(b_device)));
    const Floats lanes = d.values();
    Floats result(16 * 8);
    for (int lane = 0; lane < 32; lane++) {
      for (int i = 0; i < 4; i++)
        result[static_cast<size_t>(of_c(lane, i).row * 8 + of_c(lane, i).col)] =
            lanes[static_cast<size_t>(4 * lane + i)];
    }
    expect_near(result, plain_product(c, widened(a), widened(b), 16, 8, 16), 1e-5f);
  });
}

// Rows of 8 elements, one after the other; out: (lanes, registers) of 4, trans 4, 2, trans 2 matrices.
__global__ void load_matrices(uint32_t* out, const uint16_t* inp) {
  __shared__ __align__(16) uint16_t rows[32][8];
  const unsigned lane = threadIdx.x;
  for (unsigned i = 0; i < 8; i++) rows[lane][i] = inp[lane * 8 + i];
  __syncthreads();
  uint32_t four[4], two[2];
  ldmatrix_x4(four, rows[lane]);
  for (unsigned i = 0; i < 4; i++) out[lane * 12 + i] = four[i];
  ldmatrix_x4_trans(four, rows[lane]);
  for (unsigned i = 0; i < 4; i++) out[lane * 12 + 4 + i] = four[i];
  ldmatrix_x2(two, lane < 16 ? rows[lane] : nullptr);
  for (unsigned i = 0; i < 2; i++) out[lane * 12 + 8 + i] = two[i];
  ldmatrix_x2_trans(two, lane < 16 ? rows[lane] : nullptr);
  for (unsigned i = 0; i < 2; i++) out[lane * 12 + 10 + i] = two[i];
}

TEST_F(CudaEmulation, LdmatrixDealsRowsOrColumnsToLanes) {
  std::vector<uint16_t> rows;  // 1000 matrix + 10 row + column
  for (int matrix = 0; matrix < 4; matrix++) {
    for (int i = 0; i < 64; i++) rows.push_back(static_cast<uint16_t>(1000 * matrix + 10 * (i / 8) + i % 8));
  }
  const Array<uint16_t> inp(rows);
  const Array<uint32_t> out(32 * 12);
  in_any_order([&] {
    launch(load_matrices, 1, 32, 0, nullptr, out, inp);
    const std::vector<uint32_t> result = out.values();
    const auto element = [&](size_t lane, size_t i, int half) {
      return int(result[lane * 12 + i] >> 16 * half & 0xffff);
    };
    for (size_t lane = 0; lane < 32; lane++) {
      const int g = static_cast<int>(lane / 4), t = static_cast<int>(lane % 4);
      for (int half = 0; half < 2; half++) {
        for (int matrix = 0; matrix < 4; matrix++) {
          const size_t i = static_cast<size_t>(matrix);
          EXPECT_EQ(element(lane, i, half), 1000 * matrix + 10 * g + 2 * t + half);
          EXPECT_EQ(element(lane, 4 + i, half), 1000 * matrix + 10 * (2 * t + half) + g);
          if (matrix > 1) continue;
          EXPECT_EQ(element(lane, 8 + i, half), 1000 * matrix + 10 * g + 2 * t + half);
          EXPECT_EQ(element(lane, 10 + i, half), 1000 * matrix + 10 * (2 * t + half) + g);
        }
      }
    }
  });
}

// d (16, 8) = a (16, K) b (K, 8), both stored row by row, the next tiles on their way while one is
// multiplied: cp.async, ldmatrix and mma as kernels combine them.
__global__ void multiply_tiles(float* d, const bf16* a, const bf16* b, int K) {
  __shared__ __align__(16) bf16 a_tile[2][16][16];
  __shared__ __align__(16) bf16 b_tile[2][16][8];
  const int lane = static_cast<int>(threadIdx.x);
  const auto fetch = [&](int tile) {
    const int k = 16 * tile, slot = tile % 2;
    const bool inside = k < K;
    cp_async_16(&a_tile[slot][lane / 2][lane % 2 * 8], a + (lane / 2) * K + k + lane % 2 * 8, inside);
    if (lane < 16) cp_async_16(&b_tile[slot][lane][0], b + (k + lane) * 8, inside);
    cp_async_commit();
  };
  float sums[4] = {};
  fetch(0);
  for (int tile = 0; 16 * tile < K; tile++) {
    fetch(tile + 1);
    cp_async_wait<1>();
    __syncwarp();
    uint32_t a_part[4], b_part[2];
    ldmatrix_x4(a_part, &a_tile[tile % 2][lane % 16][lane / 16 * 8]);
    ldmatrix_x2_trans(b_part, &b_tile[tile % 2][lane % 16][0]);
    mma_m16n8k16(sums, a_part, b_part);
    __syncwarp();
  }
  for (int i = 0; i < 4; i++) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
}

TEST_F(CudaEmulation, TilesFetchedLoadedAndMultipliedMakeAProduct) {
  constexpr size_t K = 80;
  const std::vector<bf16> a = narrowed(normal_numbers(16 * K, 4)), b = narrowed(normal_numbers(K * 8, 5));
  const Array<bf16> a_device(a), b_device(b);
  const Array<float> d(16 * 8);
  in_any_order([&] {
    launch(multiply_tiles, 1, 32, 0, nullptr, d, a_device, b_device, static_cast<int>(K));
    expect_near(d.values(), plain_product(Floats(16 * 8), widened(a), widened(b), 16, 8, K), 1e-4f);
  });
}

// What shared memory holds after each step of two groups of copies.
__global__ void watch_copies(float* out, const float* inp) {
  __shared__ __align__(16) float shared[12];
  for (int i = 0; i < 12; i++) shared[i] = -1;
  cp_async_16(shared, inp, true);
  cp_async_commit();
  cp_async_16(shared + 4, inp + 4, true);
  cp_async_16(shared + 8, nullptr, false);
  cp_async_commit();
  for (int i = 0; i < 12; i++) out[i] = shared[i];
  cp_async_wait<1>();
  for (int i = 0; i < 12; i++) out[12 + i] = shared[i];
  cp_async_wait<0>();
  for (int i = 0; i < 12; i++) out[24 + i] = shared[i];
}

TEST_F(CudaEmulation, AsynchronousCopiesArriveWhenTheyAreWaitedFor) {
  const Array<float> inp({1, 2, 3, 4, 5, 6, 7, 8}), out(36);
  launch(watch_copies, 1, 1, 0, nullptr, out, inp);
  const Floats result = out.values();
  for (size_t i = 0; i < 12; i++)
    EXPECT_TRUE(std::isnan(result[i])) << "too early, and too late for what was there";
  EXPECT_EQ(Floats(result.begin() + 12, result.begin() + 16), (Floats{1, 2, 3, 4}));
  for (size_t i = 16; i < 24; i++) EXPECT_TRUE(std::isnan(result[i]));
  EXPECT_EQ(Floats(result.begin() + 24, result.end()), (Floats{1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0}));
}

__global__ void copy_unaligned(const float* inp) {
  __shared__ __align__(16) float shared[8];
  cp_async_16(shared + 1, inp, true);
}
__global__ void copy_to_global(float* inp) {
  cp_async_16(inp, inp + 4, true);
}
__global__ void mma_of_half_a_warp(float* out) {
  float d[4] = {};
  const uint32_t a[4] = {}, b[2] = {};
  if (threadIdx.x < 16) mma_m16n8k16(d, a, b);
  out[0] = d[0];
}

TEST_F(CudaEmulationDeathTest, InstructionsThatADeviceDoesNotAllowStopTheProgram) {
  const Array<float> memory(8);
  EXPECT_DEATH(launch(copy_unaligned, 1, 1, 0, nullptr, memory),
               "cp_async_16: .* is not aligned to 16 bytes");
  EXPECT_DEATH(launch(copy_to_global, 1, 1, 0, nullptr, memory), "cp_async_16: .* is not shared memory");
  EXPECT_DEATH(launch(mma_of_half_a_warp, 1, 32, 0, nullptr, memory), "mma_m16n8k16");
}

// ---------------------------------------------------------------------------------------------------
// bf16

TEST(CudaEmulationBf16, EveryBf16SurvivesTheWayToFloatAndBack) {
  for (unsigned bits = 0; bits < 0x10000; bits++) {
    const bf16 value = __ushort_as_bfloat16(static_cast<unsigned short>(bits));
    const float wide = __bfloat162float(value);
    if (std::isnan(wide)) {
      EXPECT_EQ(__bfloat16_as_ushort(__float2bfloat16(wide)), 0x7fff);
    } else {
      ASSERT_EQ(std::bit_cast<uint32_t>(wide), bits << 16);
      ASSERT_EQ(__bfloat16_as_ushort(__float2bfloat16(wide)), bits);
    }
  }
}

TEST(CudaEmulationBf16, ConversionRoundsToTheNearestAndTiesToEven) {
  for (uint32_t high = 0x0080; high < 0x7f80; high += 37) {  // two neighbours, and floats between them
    const uint32_t first = high << 16;
    const auto rounded = [&](uint32_t offset) {
      return __bfloat16_as_ushort(__float2bfloat16_rn(std::bit_cast<float>(first + offset)));
    };
    EXPECT_EQ(rounded(0x7fff), high);
    EXPECT_EQ(rounded(0x8000), high + (high & 1));
    EXPECT_EQ(rounded(0x8001), high + 1);
  }
  EXPECT_TRUE(std::isinf(static_cast<float>(__float2bfloat16(std::numeric_limits<float>::max()))));
}

TEST(CudaEmulationBf16, PairsKeepTheirOrder) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(1.5f, -2.0f);
  EXPECT_EQ(std::bit_cast<uint32_t>(pair), 0xc0003fc0u);
  EXPECT_EQ(__low2float(pair), 1.5f);
  EXPECT_EQ(__high2float(pair), -2.0f);
  EXPECT_EQ(__bfloat1622float2(pair).y, -2.0f);
}

// ---------------------------------------------------------------------------------------------------
// Memory

__global__ void write_at(char* memory, ptrdiff_t at) {
  memory[at] = 1;
}
__global__ void write_dynamic_at(int at) {
  dynamic_shared(char, shared);
  shared[at] = 1;
}

TEST_F(CudaEmulationDeathTest, AWriteOutsideOfAnAllocationStopsTheProgram) {
  const Array<char> memory(100), neighbour(100);
  for (const ptrdiff_t inside : {0, 99}) launch(write_at, 1, 1, 0, nullptr, memory, inside);
  for (const ptrdiff_t outside : {-1, -256, 100, 127, 255, 256, 300}) {
    EXPECT_DEATH(launch(write_at, 1, 1, 0, nullptr, memory, outside),
                 "write_at.*found a write outside of an allocation: .*" + std::to_string(outside) +
                     " bytes from the begin of an allocation of 100 bytes");
  }
  EXPECT_DEATH(launch(write_at, 1, 1, 0, nullptr, memory, -(ptrdiff_t{1} << 42)),
               "write_at.*access to memory");
}

TEST_F(CudaEmulationDeathTest, AWriteOutsideOfDynamicSharedMemoryStopsTheProgram) {
  for (const int inside : {0, 50}) launch(write_dynamic_at, 1, 1, 51, nullptr, inside);
  for (const int outside : {-1, -200, 51, 52, 63, 200}) {
    EXPECT_DEATH(
        launch(write_dynamic_at, 1, 1, 51, nullptr, outside),
        "a write outside of dynamic shared memory, " + std::to_string(outside) + " bytes from its begin");
  }
}

__global__ void load_vector(float4* out, const float* inp, int at) {
  out[0] = *reinterpret_cast<const float4*>(inp + at);
}

TEST_F(CudaEmulationDeathTest, AVectorThatIsNotAlignedStopsTheProgram) {
  const Array<float> inp(Floats{1, 2, 3, 4, 5, 6, 7, 8});
  const Array<float4> out(1);
  launch(load_vector, 1, 1, 0, nullptr, out, inp, 4);
  EXPECT_EQ(out.values()[0].w, 8);
  EXPECT_DEATH(launch(load_vector, 1, 1, 0, nullptr, out, inp, 1),
               "to misaligned address|of misaligned address|load_vector.*not aligned to its size");
}

__global__ void use_much_stack(char* out, int depth) {
  volatile char local[300 << 10];
  local[depth] = 1;
  out[0] = local[depth];
}

TEST_F(CudaEmulationDeathTest, HostAndDeviceCannotTouchEachOthersMemory) {
  const Array<float> memory(10);
  float on_host = 0;
  volatile float* const device = memory;
  EXPECT_DEATH(on_host = device[3],
               "host code touches device memory .* 12 bytes from the begin of an allocation of 40");
  EXPECT_DEATH(device[3] = 1, "host code touches device memory");
  launch(multiply<float, 1>, 1, 1, 0, nullptr, memory, memory, 1.0f, 0);
  EXPECT_DEATH(on_host = device[3], "host code touches device memory");
  EXPECT_DEATH(launch(multiply<float, 1>, 1, 1, 0, nullptr, memory, &on_host, 1.0f, 0),
               "multiply.*argument 1 is a pointer to host memory");
}

TEST_F(CudaEmulationDeathTest, FreedMemoryIsGone) {
  float* memory;
  cuda_check(cudaMalloc(&memory, 40));
  cuda_check(cudaFree(memory));
  EXPECT_EQ(cudaFree(memory), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_DEATH(launch(multiply<float, 1>, 1, 1, 0, nullptr, memory, memory, 1.0f, 1),
               "argument 0 is a pointer to");
}

TEST_F(CudaEmulationDeathTest, AThreadThatNeedsTooMuchStackStopsTheProgram) {
  const Array<char> memory(1);
  EXPECT_DEATH(launch(use_much_stack, 1, 1, 0, nullptr, memory, 0),
               "use_much_stack.* needs more than its stack");
}

TEST_F(CudaEmulation, CopiesThatLeaveAnAllocationAreErrors) {
  const Array<float> memory(10), other(20);
  Floats host(20);
  float* const data = memory;
  EXPECT_EQ(cudaMemcpy(data, host.data(), 44, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(data + 1, host.data(), 40, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(host.data(), data + 10, 4, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(data, other, 44, cudaMemcpyDeviceToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(data, host.data(), 40, cudaMemcpyDeviceToHost), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(data, 0, 41), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(data + 10, host.data(), 0, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemset(data, 0, 40), cudaSuccess);
  EXPECT_EQ(cudaMemcpy(static_cast<float*>(other) + 10, data, 40, cudaMemcpyDefault), cudaSuccess);
  EXPECT_EQ(other.values()[19], 0);
}

TEST_F(CudaEmulation, MemoryRunsOut) {
  size_t free = 0, total = 0;
  cuda_check(cudaMemGetInfo(&free, &total));
  const size_t used = total - free;
  cuda_emulation::set_memory_bytes(used + (1 << 20));
  char* memory;
  cuda_check(cudaMalloc(&memory, 1 << 19));
  cuda_check(cudaMemGetInfo(&free, &total));
  EXPECT_EQ(free, size_t{1} << 19);
  char* more = memory;
  EXPECT_EQ(error_of([&] { cuda_check(cudaMalloc(&more, (1 << 19) + 1)); }),
            "CUDA: cudaMalloc failed: cudaErrorMemoryAllocation (out of memory): use a smaller --batch-size, "
            "or --recompute block");
  EXPECT_EQ(more, nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  cuda_check(cudaFree(memory));
  cuda_emulation::set_memory_bytes(size_t{16} << 30);
}

TEST_F(CudaEmulation, AMachineWithoutADevice) {
  cuda_emulation::set_device_count(0);
  int count = -1;
  EXPECT_EQ(error_of([&] { cuda_check(cudaGetDeviceCount(&count)); }),
            "CUDA: cudaGetDeviceCount failed: cudaErrorNoDevice (no CUDA-capable device is detected): train "
            "without a "
            "GPU: ./train_xmod takes the same flags");
  EXPECT_EQ(count, 0);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNoDevice);
  cuda_emulation::set_device_count(1);
  cuda_check(cudaGetDeviceCount(&count));
  EXPECT_EQ(count, 1);
}

// ---------------------------------------------------------------------------------------------------
// Streams, events, graphs

class CudaEmulationStream : public CudaEmulation {
 protected:
  CudaEmulationStream() { cuda_check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~CudaEmulationStream() override { cuda_check(cudaStreamDestroy(stream_)); }

  // What work() gives the stream becomes a graph; null if it cannot.
  template <class Work>
  cudaGraph_t capture(Work work, cudaError_t expected = cudaSuccess) {
    cudaGraph_t graph = nullptr;
    cuda_check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    work();
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), expected);
    return graph;
  }

  cudaStream_t stream_ = nullptr;
};

TEST_F(CudaEmulationStream, WhatTheHostGetsArrivesWhenItWaits) {
  const Array<float> memory({1, 2});
  Floats host = {7, 7};
  cuda_check(cudaMemcpyAsync(host.data(), memory, 8, cudaMemcpyDeviceToHost, stream_));
  EXPECT_TRUE(std::isnan(host[0]) && std::isnan(host[1]));
  launch(multiply<float, 10>, 1, 32, 0, stream_, memory, memory, 0.0f, 2);
  cuda_check(cudaStreamSynchronize(stream_));
  EXPECT_EQ(host, (Floats{1, 2}));
  EXPECT_EQ(memory.values(), (Floats{10, 20}));
}

TEST_F(CudaEmulationStream, EventsTellTheTimeBetweenThem) {
  cudaEvent_t begin, end;
  cuda_check(cudaEventCreate(&begin));
  cuda_check(cudaEventCreate(&end));
  float milliseconds = -1;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  cuda_check(cudaEventRecord(begin, stream_));
  const Array<float> memory(Floats(1000, 1.0f));
  launch(multiply<float, 1>, 4, 256, 0, stream_, memory, memory, 1.0f, 1000);
  cuda_check(cudaEventRecord(end, stream_));
  cuda_check(cudaEventSynchronize(end));
  cuda_check(cudaEventElapsedTime(&milliseconds, begin, end));
  EXPECT_GT(milliseconds, 0);
  cuda_check(cudaEventDestroy(begin));
  cuda_check(cudaEventDestroy(end));
}

TEST_F(CudaEmulationStream, AGraphRepeatsWhatWasCaptured) {
  const Array<float> a({1, 2}), b({0, 0});
  float addend = 1;
  const cudaGraph_t graph = capture([&] {
    cuda_check(cudaMemcpyAsync(b, a, 8, cudaMemcpyDeviceToDevice, stream_));
    launch(multiply<float, 10>, 1, 32, 0, stream_, a, b, addend, 2);
    cuda_check(cudaMemsetAsync(b, 0, 4, stream_));
    addend = 1000;  // too late: arguments are copied
  });
  EXPECT_EQ(a.values(), (Floats{1, 2})) << "nothing runs while it is captured";
  size_t nodes = 0;
  cuda_check(cudaGraphGetNodes(graph, nullptr, &nodes));
  EXPECT_EQ(nodes, 3u);

  cudaGraphExec_t executable;
  cuda_check(cudaGraphInstantiate(&executable, graph, 0));
  cuda_check(cudaGraphDestroy(graph));
  const int64_t launches = cuda_emulation::launches();
  for (int i = 0; i < 3; i++) cuda_check(cudaGraphLaunch(executable, stream_));
  cuda_check(cudaStreamSynchronize(stream_));
  EXPECT_EQ(a.values(), (Floats{1111, 2111}));
  EXPECT_EQ(b.values(), (Floats{0, 211}));
  EXPECT_EQ(cuda_emulation::launches(), launches + 3);
  cuda_check(cudaGraphExecDestroy(executable));
}

TEST_F(CudaEmulationStream, AStreamThatWaitsForACapturedOneIsCapturedToo) {
  cudaStream_t other;
  cudaEvent_t fork, join;
  cuda_check(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  cuda_check(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  cuda_check(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  const Array<float> memory({1, 2});
  const auto fork_and_join = [&](bool joined) {
    cuda_check(cudaEventRecord(fork, stream_));
    cuda_check(cudaStreamWaitEvent(other, fork));
    launch(multiply<float, 10>, 1, 32, 0, other, memory, memory, 0.0f, 2);
    if (!joined) return;
    cuda_check(cudaEventRecord(join, other));
    cuda_check(cudaStreamWaitEvent(stream_, join));
  };
  const cudaGraph_t graph = capture([&] { fork_and_join(true); });
  size_t nodes = 0;
  cuda_check(cudaGraphGetNodes(graph, nullptr, &nodes));
  EXPECT_EQ(nodes, 1u);
  cuda_check(cudaGraphDestroy(graph));
  EXPECT_EQ(memory.values(), (Floats{1, 2}));
  EXPECT_EQ(capture([&] { fork_and_join(false); }, cudaErrorStreamCaptureUnjoined), nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorStreamCaptureUnjoined);
  launch(multiply<float, 10>, 1, 32, 0, other, memory, memory, 0.0f, 2);
  EXPECT_EQ(memory.values(), (Floats{10, 20}));
  cuda_check(cudaEventDestroy(fork));
  cuda_check(cudaEventDestroy(join));
  cuda_check(cudaStreamDestroy(other));
}

TEST_F(CudaEmulationStream, WorkThatTheHostWaitsForCannotBeCaptured) {
  const Array<float> memory({1, 2});
  float* fresh = nullptr;
  float host = 5;
  cudaEvent_t event;
  cuda_check(cudaEventCreate(&event));
  const std::vector<std::function<cudaError_t()>> forbidden = {
      [&] { return cudaStreamSynchronize(stream_); },
      [&] { return cudaDeviceSynchronize(); },
      [&] { return cudaMemcpy(&host, memory, 4, cudaMemcpyDeviceToHost); },
      [&] { return cudaMemcpy(memory, &host, 4, cudaMemcpyHostToDevice); },
      [&] { return cudaMalloc(&fresh, 4); },
      [&] { return cudaFree(memory); },
      [&] {
        cuda_check(cudaEventRecord(event, stream_));
        return cudaEventSynchronize(event);
      },
  };
  for (size_t i = 0; i < forbidden.size(); i++) {
    SCOPED_TRACE(i);
    const cudaGraph_t graph = capture(
        [&] {
          launch(multiply<float, 10>, 1, 32, 0, stream_, memory, memory, 0.0f, 2);
          EXPECT_EQ(forbidden[i](), cudaErrorStreamCaptureUnsupported);
          EXPECT_NE(error_of([&] {
                      launch(multiply<float, 10>, 1, 32, 0, stream_, memory, memory, 0.0f, 2);
                    }).find("cudaErrorStreamCaptureInvalidated"),
                    std::string::npos);
        },
        cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(graph, nullptr);
    EXPECT_EQ(cudaGetLastError(), cudaErrorStreamCaptureInvalidated);
  }
  EXPECT_EQ(memory.values(), (Floats{1, 2}));
  EXPECT_EQ(host, 5);
  cuda_check(cudaEventDestroy(event));
}

using CudaEmulationStreamDeathTest = CudaEmulationStream;

TEST_F(CudaEmulationStreamDeathTest, AGraphMustNotReadAVariableOfAFunction) {
  const Array<float> memory({1, 2});
  const auto upload = [&] {
    const float value = 3;
    return cudaMemcpyAsync(memory, &value, 4, cudaMemcpyHostToDevice, stream_);
  };
  cuda_check(upload());
  EXPECT_DEATH(capture(upload), "a graph would copy from or to a variable of a function");
}

// ---------------------------------------------------------------------------------------------------
// cuBLAS

class CudaEmulationBlas : public CudaEmulationStream {
 protected:
  CudaEmulationBlas() {
    cuda_check(cublasCreate(&handle_));
    cuda_check(cublasSetStream(handle_, stream_));
    cuda_check(cublasSetMathMode(handle_, CUBLAS_DEFAULT_MATH));
  }
  ~CudaEmulationBlas() override { cuda_check(cublasDestroy(handle_)); }

  cublasHandle_t handle_ = nullptr;
};

template <class T>
constexpr cudaDataType kType = std::is_same_v<T, float> ? CUDA_R_32F : CUDA_R_16BF;

template <class T>
std::vector<T> random_numbers(size_t n, uint64_t seed) {
  const Floats values = normal_numbers(n, seed);
  return std::vector<T>(values.begin(), values.end());
}

// Products of column-major matrices, whose columns lie further apart than they are long, in double precision.
struct BlasProblem {
  int m = 13, n = 7, k = 29;
  cublasOperation_t transa, transb;
  float alpha, beta;

  int a_rows() const { return transa == CUBLAS_OP_N ? m : k; }
  int b_rows() const { return transb == CUBLAS_OP_N ? k : n; }
  int lda() const { return a_rows() + 3; }
  int ldb() const { return b_rows() + 1; }
  int ldc() const { return m + 2; }
  size_t a_size() const { return static_cast<size_t>(lda() * (m + k - a_rows())); }
  size_t b_size() const { return static_cast<size_t>(ldb() * (k + n - b_rows())); }
  size_t c_size() const { return static_cast<size_t>(ldc() * n); }

  template <class In, class Out>
  std::vector<Out> expected(const In* a, const In* b, const Out* c) const {
    std::vector<Out> out(c, c + c_size());
    for (int j = 0; j < n; j++) {
      for (int i = 0; i < m; i++) {
        double sum = 0;
        for (int l = 0; l < k; l++) {
          const float a_il = a[transa == CUBLAS_OP_N ? l * lda() + i : i * lda() + l];
          const float b_lj = b[transb == CUBLAS_OP_N ? j * ldb() + l : l * ldb() + j];
          sum += double{a_il} * b_lj;
        }
        const double before = beta == 0 ? 0 : beta * static_cast<float>(c[j * ldc() + i]);
        out[static_cast<size_t>(j * ldc() + i)] = static_cast<float>(alpha * sum + before);
      }
    }
    return out;
  }
};

std::vector<BlasProblem> blas_problems() {
  std::vector<BlasProblem> all;
  for (cublasOperation_t transa : {CUBLAS_OP_N, CUBLAS_OP_T}) {
    for (cublasOperation_t transb : {CUBLAS_OP_N, CUBLAS_OP_T}) {
      for (auto [alpha, beta] : {std::pair{1.0f, 0.0f}, {1.0f, 1.0f}, {-0.5f, 0.25f}, {0.0f, 2.0f}})
        all.push_back({.transa = transa, .transb = transb, .alpha = alpha, .beta = beta});
    }
  }
  return all;
}

template <class T>
void expect_close(const std::vector<T>& result, const std::vector<T>& expected) {
  const float bound = std::is_same_v<T, float> ? 2e-5f : 0.01f;  // of the value's size
  ASSERT_EQ(result.size(), expected.size());
  for (size_t i = 0; i < result.size(); i++) {
    const float got = result[i], wanted = expected[i];
    ASSERT_NEAR(got, wanted, bound * std::max(1.0f, std::abs(wanted))) << "element " << i;
  }
}

template <class In, class Out>
void expect_products(cublasHandle_t handle, cudaStream_t stream) {
  constexpr size_t kBatch = 3;
  for (const BlasProblem& p : blas_problems()) {
    const std::vector<In> a = random_numbers<In>(kBatch * p.a_size(), 1),
                          b = random_numbers<In>(kBatch * p.b_size(), 2);
    std::vector<Out> c = random_numbers<Out>(kBatch * p.c_size(), 3);
    if (p.beta == 0) std::fill(c.begin(), c.end(), Out{std::numeric_limits<float>::quiet_NaN()});
    const Array<In> a_device(a), b_device(b);
    const Array<Out> one(c), strided(c), batched(c);

    cuda_check(cublasGemmEx(handle, p.transa, p.transb, p.m, p.n, p.k, &p.alpha, a_device, kType<In>, p.lda(),
                            b_device, kType<In>, p.ldb(), &p.beta, one, kType<Out>, p.ldc(),
                            CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    cuda_check(cublasGemmStridedBatchedEx(handle, p.transa, p.transb, p.m, p.n, p.k, &p.alpha, a_device,
                                          kType<In>, p.lda(), static_cast<long long>(p.a_size()), b_device,
                                          kType<In>, p.ldb(), static_cast<long long>(p.b_size()), &p.beta,
                                          strided, kType<Out>, p.ldc(), static_cast<long long>(p.c_size()),
                                          kBatch, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));

    std::vector<const void*> a_pointers, b_pointers;
    std::vector<void*> c_pointers;
    for (size_t i = 0; i < kBatch; i++) {
      a_pointers.push_back(a_device + (kBatch - 1 - i) * p.a_size());
      b_pointers.push_back(b_device + i * p.b_size());
      c_pointers.push_back(batched + i * p.c_size());
    }
    const Array<const void*> a_array(a_pointers), b_array(b_pointers);
    const Array<void*> c_array(c_pointers);
    cuda_check(cublasGemmBatchedEx(handle, p.transa, p.transb, p.m, p.n, p.k, &p.alpha, a_array, kType<In>,
                                   p.lda(), b_array, kType<In>, p.ldb(), &p.beta, c_array, kType<Out>,
                                   p.ldc(), kBatch, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    cuda_check(cudaStreamSynchronize(stream));

    const auto expected = [&](size_t a_at, size_t at) {
      return p.expected(a.data() + a_at * p.a_size(), b.data() + at * p.b_size(), c.data() + at * p.c_size());
    };
    const auto inside = [&](const std::vector<Out>& all, size_t at) {  // without the rows between the columns
      std::vector<Out> out(p.c_size());
      for (size_t i = 0; i < out.size(); i++) {
        if (static_cast<int>(i) % p.ldc() < p.m) out[i] = all[at * p.c_size() + i];
      }
      return out;
    };
    for (size_t i = 0; i < kBatch; i++) {
      expect_close(inside(strided.values(), i), inside(expected(i, i), 0));
      expect_close(inside(batched.values(), i), inside(expected(kBatch - 1 - i, i), 0));
    }
    expect_close(inside(one.values(), 0), inside(expected(0, 0), 0));
    const std::vector<Out> all = one.values();
    for (size_t i = 0; i < c.size(); i++) {
      const bool untouched = i >= p.c_size() || static_cast<int>(i) % p.ldc() >= p.m;
      if (untouched) {
        EXPECT_EQ(std::memcmp(&all[i], &c[i], sizeof(Out)), 0) << i;
      }
    }
  }
}

TEST_F(CudaEmulationBlas, ProductsOfAllShapesAndTypes) {
  expect_products<float, float>(handle_, stream_);
  expect_products<bf16, float>(handle_, stream_);
  expect_products<bf16, bf16>(handle_, stream_);
}

TEST_F(CudaEmulationBlas, AProductIsCapturedWithItsFactors) {
  const Array<float> a(Floats{2}), b(Floats{3}), c(Floats{10});
  float alpha = 1, beta = 1;
  const cudaGraph_t graph = capture([&] {
    cuda_check(cublasSgemm(handle_, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, 1, &alpha, a, 1, b, 1, &beta, c, 1));
    alpha = 100;
  });
  EXPECT_EQ(c.values(), Floats{10});
  cudaGraphExec_t executable;
  cuda_check(cudaGraphInstantiate(&executable, graph, 0));
  cuda_check(cudaGraphLaunch(executable, stream_));
  cuda_check(cudaGraphLaunch(executable, stream_));
  EXPECT_EQ(c.values(), Floats{22});
  cuda_check(cudaGraphExecDestroy(executable));
  cuda_check(cudaGraphDestroy(graph));
}

TEST_F(CudaEmulationBlas, ArgumentsThatCuBlasRefusesAreErrors) {
  const Array<float> a(6), b(6), c(4);
  const float one = 1;
  const auto product = [&](int m, int lda, cudaDataType a_type, cudaDataType b_type, cudaDataType c_type) {
    return cublasGemmEx(handle_, CUBLAS_OP_N, CUBLAS_OP_N, m, 2, 3, &one, a, a_type, lda, b, b_type, 3, &one,
                        c, c_type, 2, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
  };
  EXPECT_EQ(product(2, 2, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(product(-1, 2, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(product(2, 1, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(product(2, 2, CUDA_R_32F, CUDA_R_16BF, CUDA_R_32F), CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(product(2, 2, CUDA_R_32F, CUDA_R_32F, CUDA_R_16BF), CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_NE(error_of([&] {
              cuda_check(product(2, 1, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F));
            }).find("cuBLAS: product failed: CUBLAS_STATUS_INVALID_VALUE"),
            std::string::npos);
}

TEST_F(CudaEmulationDeathTest, AMatrixThatReachesOutOfItsAllocationStopsTheProgram) {
  cublasHandle_t handle;
  cuda_check(cublasCreate(&handle));
  const Array<float> a(6), b(6), c(4);
  const float one = 1;
  EXPECT_DEATH(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 4, &one, a, 2, b, 4, &one, c, 2),
               "A has 2 x 4 elements in columns 2 apart, which reach beyond");
  EXPECT_DEATH(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 3, &one, a, 2, b, 3, &one, c, 3),
               "C has 2 x 2 elements in columns 3 apart, which reach beyond");
  cuda_check(cublasDestroy(handle));
}

}  // namespace xmod::emulation_test

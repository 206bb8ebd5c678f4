// The CPU in the place of a GPU: what kernels compute there, and which of their defects it finds.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "cuda_emulation_test.h"
#include "xmod/cuda_common.h"

namespace xmod::emulation_test {

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

}  // namespace xmod::emulation_test

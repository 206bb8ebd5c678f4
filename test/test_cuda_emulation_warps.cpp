// The CPU in the place of a GPU: what the lanes of a warp do together, sums, matrices and bf16.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cuda_emulation_test.h"
#include "xmod/cuda_common.h"

namespace xmod::emulation_test {

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

}  // namespace xmod::emulation_test

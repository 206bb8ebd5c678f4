// What the machine can do at most, measured: fused multiply-adds that never leave the registers, and memory
// read and copied. Every figure of `make bench` stands beside one of these.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "bench/clock.h"

namespace xmod::bench {

// ---------------------------------------------------------------------------------------------------
// Arithmetic

// A loop of `sums` independent chains, enough to hide the latency of a multiply-add in every unit that does
// them, all different, or the compiler would see that they are one. A macro, since the compiler must see the
// vectors in a function that has the instructions for them.
#define XMOD_FMA_LOOP(name, attribute, lanes, sums)                                    \
  attribute inline float name(int64_t rounds, float factor) {                          \
    typedef float Vector __attribute__((vector_size(lanes * sizeof(float))));          \
    const Vector a = Vector{} + factor, b = Vector{} + (1 - factor);                   \
    Vector sum[sums];                                                                  \
    for (int i = 0; i < sums; i++) sum[i] = Vector{} + static_cast<float>(i);          \
    for (int64_t round = 0; round < rounds; round++) {                                 \
      _Pragma("GCC unroll 32") for (int i = 0; i < sums; i++) sum[i] = sum[i] * a + b; \
    }                                                                                  \
    Vector total = {};                                                                 \
    for (int i = 0; i < sums; i++) total += sum[i];                                    \
    return total[0];                                                                   \
  }

#if defined(__x86_64__)
XMOD_FMA_LOOP(fma_loop_avx512, [[gnu::target("avx512f")]], 16, 12)
XMOD_FMA_LOOP(fma_loop_avx2, [[gnu::target("avx2,fma")]], 8, 12)
XMOD_FMA_LOOP(fma_loop_portable, , 4, 12)
#else
XMOD_FMA_LOOP(fma_loop_portable, , 4, 16)
#endif
#undef XMOD_FMA_LOOP

// A loop that keeps the arithmetic units busy.
struct PeakLoop {
  const char* name;
  float (*run)(int64_t rounds, float factor);
  double flops_per_round;
};

// The widest vectors that this processor multiplies in fp32.
inline PeakLoop fp32_loop() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return {"AVX-512", fma_loop_avx512, 2 * 16 * 12};
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return {"AVX2", fma_loop_avx2, 2 * 8 * 12};
  }
  return {"SSE2", fma_loop_portable, 2 * 4 * 12};
#else
  return {"vectors of 4", fma_loop_portable, 2 * 4 * 16};
#endif
}

// FLOP/s of the loop on `threads` threads: the best of many short runs, since whatever else the machine does
// can only make a run slower.
inline double measure_flops(const PeakLoop& loop, int threads) {
  constexpr int64_t kRounds = 200000;
  volatile float factor = 0.999f, sink = 0;
  const auto run = [&] {
#pragma omp parallel num_threads(threads)
    sink = loop.run(kRounds, factor);
  };
  return static_cast<double>(kRounds) * loop.flops_per_round * threads / smallest(time_repeatedly(run, 0.5));
}

// ---------------------------------------------------------------------------------------------------
// Memory

struct Bandwidth {
  double read = 0;  // bytes a second
  double copy = 0;  // bytes read and bytes written a second
};

// Of `bytes` in memory, on all threads: the best of some runs.
inline Bandwidth measure_bandwidth(int64_t bytes, double seconds) {
  const int64_t n = bytes / static_cast<int64_t>(sizeof(uint64_t)), half = n / 2;
  const std::unique_ptr<uint64_t[]> owner(new uint64_t[static_cast<size_t>(n)]);
  uint64_t* const data = owner.get();
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < n; i++) data[i] = 1;

  volatile uint64_t sink = 0;
  auto read = [&] {
    uint64_t total = 0;
#pragma omp parallel for schedule(static) reduction(+ : total)
    for (int64_t i = 0; i < n; i++) total += data[i];
    sink = total;
  };
  auto copy = [&] {
    constexpr int64_t kPiece = 1 << 16;
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < half; at += kPiece) {
      std::memcpy(data + half + at, data + at,
                  static_cast<size_t>(std::min(kPiece, half - at)) * sizeof *data);
    }
  };
  const auto rate = [&](const auto& run) {
    return static_cast<double>(bytes) / smallest(time_repeatedly(run, seconds));
  };
  return {rate(read), rate(copy)};
}

// ---------------------------------------------------------------------------------------------------

struct Peaks {
  PeakLoop fp32;
  double fp32_one = 0, fp32_all = 0;  // FLOP/s of one thread, of all
  Bandwidth memory, cache;
};

constexpr int64_t kMemoryBytes = int64_t{1} << 30;  // beyond every cache
constexpr int64_t kCacheBytes = int64_t{1} << 24;   // the size of a layer's tensors; in the last-level cache

inline Peaks measure_peaks(int threads) {
  const PeakLoop fp32 = fp32_loop();
  return {fp32, measure_flops(fp32, 1), measure_flops(fp32, threads), measure_bandwidth(kMemoryBytes, 1),
          measure_bandwidth(kCacheBytes, 0.3)};
}

}  // namespace xmod::bench

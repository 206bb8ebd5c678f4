// What the machine can do at most, measured: multiply-adds in fp32 and of bf16 factors that never leave the
// registers, and memory read and copied. Every figure of `make bench` stands beside one of these.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#include "bench/clock.h"
#include "xmod/cpu_instructions.h"

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

#if defined(__x86_64__)

// Each instruction adds the products of two pairs of bf16 numbers to every lane.
[[gnu::target("avx512f,avx512bf16")]] inline float bf16_loop_avx512(int64_t rounds, float factor) {
  constexpr int kSums = 12;
  const __m512bh a = reinterpret_cast<__m512bh>(_mm512_set1_ps(factor)), b = a;
  __m512 sum[kSums];
  for (int i = 0; i < kSums; i++) sum[i] = _mm512_set1_ps(static_cast<float>(i));
  for (int64_t round = 0; round < rounds; round++) {
#pragma GCC unroll 32
    for (int i = 0; i < kSums; i++) sum[i] = _mm512_dpbf16_ps(sum[i], a, b);
  }
  float total = 0;
  for (int i = 0; i < kSums; i++) total += _mm512_cvtss_f32(sum[i]);
  return total;
}

// Four tiles of sums, as the products have them: one instruction multiplies 16 x 32 by 32 x 16 bf16 numbers.
[[gnu::target("amx-tile,amx-bf16")]] inline float bf16_loop_amx(int64_t rounds, float) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  _tile_loadconfig(&config);  // also zeros the tiles
  for (int64_t round = 0; round < rounds; round++) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return 0;
}

#endif

// A loop that keeps the arithmetic units busy.
struct PeakLoop {
  std::string instructions;  // those of a kernel for products have its name
  std::string arithmetic;
  float (*run)(int64_t rounds, float factor);
  double flops_per_round;
};

// Those that this processor runs: first the widest vectors that it multiplies in fp32, then bf16.
inline std::vector<PeakLoop> peak_loops() {
  const std::string fp32 = "fp32 multiply-add";
#if defined(__x86_64__)
  const std::string bf16 = "bf16 factors, fp32 sums";
  std::vector<PeakLoop> loops;
  if (has_avx512()) {
    loops.push_back({"avx512", fp32, fma_loop_avx512, 2 * 16 * 12});
  } else if (has_avx2()) {
    loops.push_back({"avx2", fp32, fma_loop_avx2, 2 * 8 * 12});
  } else {
    loops.push_back({"sse2", fp32, fma_loop_portable, 2 * 4 * 12});
  }
  if (executes_avx512_bf16()) loops.push_back({"avx512-bf16", bf16, bf16_loop_avx512, 2 * 2 * 16 * 12});
  if (has_amx_bf16()) loops.push_back({"amx", bf16, bf16_loop_amx, 4 * 2 * 16 * 16 * 32});
  return loops;
#else
  return {{"vectors of 4", fp32, fma_loop_portable, 2 * 4 * 16}};
#endif
}

// Runs the loop once on each of `threads` threads; returns the FLOPs done.
inline double run_peak_loop(const PeakLoop& loop, int threads) {
  constexpr int64_t kRounds = 200000;
  volatile float factor = 0.999f, sink = 0;
#pragma omp parallel num_threads(threads)
  sink = loop.run(kRounds, factor);
  (void)sink;
  return static_cast<double>(kRounds) * loop.flops_per_round * threads;
}

// FLOP/s of the loop on `threads` threads: the best of many short runs, since whatever else the machine does
// can only make a run slower.
inline double measure_flops(const PeakLoop& loop, int threads, double seconds) {
  double flops = 0;
  const auto run = [&] { flops = run_peak_loop(loop, threads); };
  const double fastest = smallest(time_repeatedly(run, seconds));
  return flops / fastest;
}

// The same over 100 runs one after the other: what the machine gives at this moment, interruptions included.
inline double measure_flops_now(const PeakLoop& loop, int threads) {
  double flops = 0;
  const Stopwatch watch;
  for (int run = 0; run < 100; run++) flops += run_peak_loop(loop, threads);
  return flops / watch.seconds();
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

struct Peak {
  PeakLoop loop;
  double one, all;  // FLOP/s of one thread, of all
};

struct Peaks {
  std::vector<Peak> arithmetic;
  Bandwidth memory, cache;

  double fp32() const { return arithmetic[0].all; }

  // Of the loop on the instructions of a kernel for products; fp32 for a kernel without a loop.
  double products(const std::string& kernel) const {
    for (const Peak& peak : arithmetic) {
      if (peak.loop.instructions == kernel) return peak.all;
    }
    return fp32();
  }
};

constexpr int64_t kMemoryBytes = int64_t{1} << 30;  // beyond every cache
constexpr int64_t kCacheBytes = int64_t{1} << 24;   // the size of a layer's tensors; in the last-level cache

// About `seconds` for each.
inline Peaks measure_peaks(int threads, double seconds) {
  Peaks peaks;
  for (const PeakLoop& loop : peak_loops())
    peaks.arithmetic.push_back(
        {loop, measure_flops(loop, 1, seconds), measure_flops(loop, threads, seconds)});
  peaks.memory = measure_bandwidth(kMemoryBytes, seconds);
  peaks.cache = measure_bandwidth(kCacheBytes, seconds);
  return peaks;
}

}  // namespace xmod::bench

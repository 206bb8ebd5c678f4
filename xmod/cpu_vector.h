// A vector of floats as wide as the processor's registers, through the compiler's vector extension
// (g++ and clang++): `+ - * / < ?:` work lane by lane and `a * b + c` becomes one fused instruction.
// Every reduction has a fixed order, so results do not depend on threads or on the caller's loop.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

namespace xmod {

#if defined(__AVX512F__)
inline constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int64_t kLanes = 8;
#else
inline constexpr int64_t kLanes = 4;
#endif

typedef float Vector __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t VectorMask __attribute__((vector_size(kLanes * sizeof(float))));  // lanes 0 or -1
typedef uint32_t VectorBits __attribute__((vector_size(kLanes * sizeof(float))));

inline Vector splat(float value) {
  return value - Vector{};
}  // not Vector{} + value: keeps -0

inline Vector load(const float* source) {
  Vector v;
  std::memcpy(&v, source, sizeof v);  // one unaligned load
  return v;
}

inline void store(float* target, Vector v) {
  std::memcpy(target, &v, sizeof v);
}

// The first `count` < kLanes floats, zeros behind them; nothing beyond them is touched.
inline Vector load_part(const float* source, int64_t count) {
  Vector v = {};
  std::memcpy(&v, source, static_cast<size_t>(count) * sizeof(float));
  return v;
}

inline void store_part(float* target, Vector v, int64_t count) {
  std::memcpy(target, &v, static_cast<size_t>(count) * sizeof(float));
}

// 0, 1, 2, ... as integers
inline VectorMask lane_index() {
  VectorMask lanes;
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = static_cast<int32_t>(i);
  return lanes;
}

// `v` in lanes 0 .. count - 1, `other` behind them.
inline Vector keep_first(Vector v, int64_t count, Vector other) {
  return lane_index() < static_cast<int32_t>(count) ? v : other;
}

// The larger of each lane; b where either is NaN (so `max(v, NaN)` is NaN and `max(NaN, v)` is v).
inline Vector max(Vector a, Vector b) {
  return a > b ? a : b;
}

namespace detail {

// Lane i of the result is lane i ^ Distance of v.
template <int64_t Distance, int64_t... I>
Vector swap_lanes(Vector v, std::integer_sequence<int64_t, I...>) {
  return __builtin_shufflevector(v, v, (I ^ Distance)...);
}

// Folds the vector in halves: kLanes / 2 pairs first, then half as many, ... until every lane holds the
// result.
template <int64_t Distance, class Combine>
Vector fold(Vector v, Combine combine) {
  if constexpr (Distance == 0) {
    return v;
  } else {
    Vector swapped = swap_lanes<Distance>(v, std::make_integer_sequence<int64_t, kLanes>());
    return fold<Distance / 2>(combine(v, swapped), combine);
  }
}

}  // namespace detail

inline float horizontal_sum(Vector v) {
  return detail::fold<kLanes / 2>(v, [](Vector a, Vector b) { return a + b; })[0];
}

inline float horizontal_max(Vector v) {
  return detail::fold<kLanes / 2>(v, [](Vector a, Vector b) { return max(a, b); })[0];
}

// e^x within 2 ulp. Results below the smallest normal number are 0, beyond the largest +inf; NaN stays NaN.
// With n = round(x / ln 2) and r = x - n ln 2 in [-ln 2 / 2, ln 2 / 2]: e^x = 2^n e^r, and
// e^r = 1 + r + r^2 q(r) with q of degree 4, the minimax fit of the relative error.
inline Vector exp(Vector x) {
  constexpr float kLargest = 88.72283f;    // the last float whose e^x is finite
  constexpr float kSmallest = -87.33654f;  // the last float whose e^x is normal
  constexpr float kRound = 12582912.0f;    // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  constexpr float kLn2High = 0.693359375f;  // ln 2 in two parts; n * kLn2High is exact
  constexpr float kLn2Low = -2.12194440e-4f;

  Vector shifted = x * 1.44269504f + kRound;
  Vector n = shifted - kRound;
  Vector r = x - n * kLn2High;
  r = r - n * kLn2Low;
  Vector q = r * 1.3814540579915047e-3f + 8.36874544620514e-3f;
  q = q * r + 4.166838899254799e-2f;
  q = q * r + 1.666652113199234e-1f;
  q = q * r + 4.999999403953552e-1f;
  Vector power = q * (r * r) + r + 1.0f;

  // n is added to the exponent: shifting it there drops the high bits of kRound.
  VectorBits bits = reinterpret_cast<VectorBits>(power) + (reinterpret_cast<VectorBits>(shifted) << 23);
  Vector result = reinterpret_cast<Vector>(bits);
  result = x <= kLargest ? result : x + std::numeric_limits<float>::infinity();  // +inf, or NaN for NaN
  return x < kSmallest ? Vector{} : result;
}

// The natural logarithm within 2 ulp; -inf for 0 and subnormal numbers, +inf for +inf, NaN for negative
// numbers and NaN. x = 2^n m with m in [sqrt(1/2), sqrt(2)); with f = m - 1 and s = f / (2 + f), log m = 2
// atanh(s), the series 2 (s + s^3 / 3 + s^5 / 5 + ...), written so that the exact f carries most of the sum.
inline Vector log(Vector x) {
  constexpr uint32_t kSqrtHalf = 0x3f3504f3;  // the bits of sqrt(1/2)
  constexpr float kLn2High = 0.693359375f;
  constexpr float kLn2Low = -2.12194440e-4f;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();

  VectorBits above = reinterpret_cast<VectorBits>(x) - kSqrtHalf;
  VectorMask exponent = reinterpret_cast<VectorMask>(above) >> 23;
  Vector m = reinterpret_cast<Vector>((above & 0x7fffff) + kSqrtHalf);
  Vector n = __builtin_convertvector(exponent, Vector);
  Vector f = m - 1.0f;
  Vector s = f / (f + 2.0f);
  Vector z = s * s;
  Vector tail =
      z * (z * (z * (z * (2.0f / 9) + 2.0f / 7) + 2.0f / 5) + 2.0f / 3);  // of 2 atanh(s) / s, beyond 2
  Vector result = n * kLn2High + (f - (s * (f - tail) - n * kLn2Low));
  result = x < kInfinity ? result : x;
  result = x < std::numeric_limits<float>::min() ? splat(-kInfinity) : result;
  return x < 0.0f ? splat(std::numeric_limits<float>::quiet_NaN()) : result;
}

inline Vector sigmoid(Vector x) {
  return 1.0f / (1.0f + exp(-x));
}

}  // namespace xmod

// __nv_bfloat16 and pairs of them. Conversions round to the nearest, ties to even, as CUDA's do; arithmetic
// computes in float and rounds once.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "../vector_types.h"

struct __nv_bfloat16_raw {
  unsigned short x;
};

struct alignas(2) __nv_bfloat16 {
  unsigned short __x;

  __nv_bfloat16() = default;
  constexpr __nv_bfloat16(const __nv_bfloat16_raw& raw) : __x(raw.x) {}
  constexpr __nv_bfloat16(float f) : __x(round(f)) {}
  constexpr __nv_bfloat16(double f) : __nv_bfloat16(static_cast<float>(f)) {}
  template <class Integer>
  requires std::is_integral_v<Integer>
  constexpr __nv_bfloat16(Integer i) : __nv_bfloat16(static_cast<float>(i)) {}

  constexpr operator float() const { return std::bit_cast<float>(uint32_t{__x} << 16); }
  constexpr operator __nv_bfloat16_raw() const { return {__x}; }

 private:
  static constexpr unsigned short round(float f) {
    const uint32_t bits = std::bit_cast<uint32_t>(f);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;  // not a number
    return static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;

  __nv_bfloat162() = default;
  constexpr __nv_bfloat162(const __nv_bfloat16& x, const __nv_bfloat16& y) : x(x), y(y) {}
};

using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

// ---------------------------------------------------------------------------------------------------
// Conversions

inline __nv_bfloat16 __float2bfloat16(float f) {
  return f;
}
inline __nv_bfloat16 __float2bfloat16_rn(float f) {
  return f;
}
inline __nv_bfloat16 __double2bfloat16(double f) {
  return f;
}
inline float __bfloat162float(__nv_bfloat16 b) {
  return b;
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {x, y};
}
inline __nv_bfloat162 __float22bfloat162_rn(float2 f) {
  return {f.x, f.y};
}
inline __nv_bfloat162 __float2bfloat162_rn(float f) {
  return {f, f};
}
inline float2 __bfloat1622float2(__nv_bfloat162 b) {
  return {b.x, b.y};
}
inline float __low2float(__nv_bfloat162 b) {
  return b.x;
}
inline float __high2float(__nv_bfloat162 b) {
  return b.y;
}
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 b) {
  return b.x;
}
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 b) {
  return b.y;
}
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) {
  return {x, y};
}
inline __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 b) {
  return {b, b};
}
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) {
  return {x, y};
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 b) {
  return b.__x;
}
inline short __bfloat16_as_short(__nv_bfloat16 b) {
  return static_cast<short>(b.__x);
}
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
  return __nv_bfloat16_raw{bits};
}
inline __nv_bfloat16 __short_as_bfloat16(short bits) {
  return __nv_bfloat16_raw{static_cast<unsigned short>(bits)};
}

// ---------------------------------------------------------------------------------------------------
// Arithmetic

#define CUDA_EMULATION_BFLOAT(op)                                           \
  inline __nv_bfloat16 operator op(__nv_bfloat16 a, __nv_bfloat16 b) {      \
    return static_cast<float>(a) op static_cast<float>(b);                  \
  }                                                                         \
  inline __nv_bfloat162 operator op(__nv_bfloat162 a, __nv_bfloat162 b) {   \
    return {a.x op b.x, a.y op b.y};                                        \
  }                                                                         \
  inline __nv_bfloat16& operator op##=(__nv_bfloat16& a, __nv_bfloat16 b) { \
    return a = a op b;                                                      \
  }
CUDA_EMULATION_BFLOAT(+)
CUDA_EMULATION_BFLOAT(-)
CUDA_EMULATION_BFLOAT(*)
CUDA_EMULATION_BFLOAT(/)
#undef CUDA_EMULATION_BFLOAT

inline __nv_bfloat16 __hadd(__nv_bfloat16 a, __nv_bfloat16 b) {
  return a + b;
}
inline __nv_bfloat16 __hmul(__nv_bfloat16 a, __nv_bfloat16 b) {
  return a * b;
}
inline __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) {
  return std::fma(static_cast<float>(a), static_cast<float>(b), static_cast<float>(c));
}
inline __nv_bfloat162 __hadd2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return a + b;
}
inline __nv_bfloat162 __hmul2(__nv_bfloat162 a, __nv_bfloat162 b) {
  return a * b;
}
inline __nv_bfloat162 __hfma2(__nv_bfloat162 a, __nv_bfloat162 b, __nv_bfloat162 c) {
  return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}

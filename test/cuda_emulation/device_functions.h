// Functions of one thread: atomics, loads and stores with hints, bits, and arithmetic.
#pragma once

#include <math.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "block.h"

namespace cuda_emulation {

template <class T>
concept Word = std::is_integral_v<T> &&(sizeof(T) == 4 || sizeof(T) == 8);

// old = *address; *address = change(old), all at once; returns old.
template <class T, class Change>
T atomic_change(T* address, Change change) {
  T old = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(address, &old, change(old), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return old;
}

template <class T>
using Same = std::type_identity_t<T>;

}  // namespace cuda_emulation

// ---------------------------------------------------------------------------------------------------
// Barriers

inline void __syncthreads(const cuda_emulation::At& at = cuda_emulation::At::current()) {
  cuda_emulation::current_block().barrier("__syncthreads", at);
}
inline void __threadfence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
inline void __threadfence_block() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

// ---------------------------------------------------------------------------------------------------
// Atomics, on integers only: a sum of floats would depend on the order in which threads come.

template <cuda_emulation::Word T>
T atomicAdd(T* address, cuda_emulation::Same<T> value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
template <cuda_emulation::Word T>
T atomicSub(T* address, cuda_emulation::Same<T> value) {
  return __atomic_fetch_sub(address, value, __ATOMIC_RELAXED);
}
template <cuda_emulation::Word T>
T atomicExch(T* address, cuda_emulation::Same<T> value) {
  return __atomic_exchange_n(address, value, __ATOMIC_RELAXED);
}
template <cuda_emulation::Word T>
T atomicCAS(T* address, cuda_emulation::Same<T> expected, cuda_emulation::Same<T> value) {
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}
template <cuda_emulation::Word T>
T atomicMax(T* address, cuda_emulation::Same<T> value) {
  return cuda_emulation::atomic_change(address, [&](T old) { return std::max(old, value); });
}
template <cuda_emulation::Word T>
T atomicMin(T* address, cuda_emulation::Same<T> value) {
  return cuda_emulation::atomic_change(address, [&](T old) { return std::min(old, value); });
}
template <cuda_emulation::Word T>
T atomicAnd(T* address, cuda_emulation::Same<T> value) {
  return __atomic_fetch_and(address, value, __ATOMIC_RELAXED);
}
template <cuda_emulation::Word T>
T atomicOr(T* address, cuda_emulation::Same<T> value) {
  return __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
template <cuda_emulation::Word T>
T atomicXor(T* address, cuda_emulation::Same<T> value) {
  return __atomic_fetch_xor(address, value, __ATOMIC_RELAXED);
}

// ---------------------------------------------------------------------------------------------------
// Loads and stores with a hint for the cache

template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
T __ldca(const T* address) {
  return *address;
}
template <class T>
T __ldcs(const T* address) {
  return *address;
}
template <class T>
void __stcg(T* address, cuda_emulation::Same<T> value) {
  *address = value;
}
template <class T>
void __stcs(T* address, cuda_emulation::Same<T> value) {
  *address = value;
}

// ---------------------------------------------------------------------------------------------------
// Bits

inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline int __popcll(unsigned long long x) {
  return std::popcount(x);
}
inline int __clz(int x) {
  return std::countl_zero(static_cast<unsigned>(x));
}
inline int __clzll(long long x) {
  return std::countl_zero(static_cast<unsigned long long>(x));
}
inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __ffsll(long long x) {
  return __builtin_ffsll(x);
}
inline unsigned __brev(unsigned x) {
  unsigned out = 0;
  for (int i = 0; i < 32; i++) out |= (x >> i & 1) << (31 - i);
  return out;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  unsigned out = 0;
  for (int i = 0; i < 4; i++)
    out |= static_cast<unsigned>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return out;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>(uint64_t{x} * y >> 32);
}
inline int __mulhi(int x, int y) {
  return static_cast<int>(int64_t{x} * y >> 32);
}
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(x) * y >> 64);
}
inline int __float_as_int(float x) {
  return std::bit_cast<int>(x);
}
inline unsigned __float_as_uint(float x) {
  return std::bit_cast<unsigned>(x);
}
inline float __int_as_float(int x) {
  return std::bit_cast<float>(x);
}
inline float __uint_as_float(unsigned x) {
  return std::bit_cast<float>(x);
}
inline long long __double_as_longlong(double x) {
  return std::bit_cast<long long>(x);
}
inline double __longlong_as_double(long long x) {
  return std::bit_cast<double>(x);
}

// ---------------------------------------------------------------------------------------------------
// Arithmetic

#define CUDA_EMULATION_MIN_MAX(T) \
  inline T min(T a, T b) {        \
    return b < a ? b : a;         \
  }                               \
  inline T max(T a, T b) {        \
    return a < b ? b : a;         \
  }
CUDA_EMULATION_MIN_MAX(int)
CUDA_EMULATION_MIN_MAX(unsigned)
CUDA_EMULATION_MIN_MAX(long)
CUDA_EMULATION_MIN_MAX(unsigned long)
CUDA_EMULATION_MIN_MAX(long long)
CUDA_EMULATION_MIN_MAX(unsigned long long)
#undef CUDA_EMULATION_MIN_MAX
inline float min(float a, float b) {
  return fminf(a, b);
}
inline float max(float a, float b) {
  return fmaxf(a, b);
}
inline double min(double a, double b) {
  return fmin(a, b);
}
inline double max(double a, double b) {
  return fmax(a, b);
}

inline float rsqrtf(float x) {
  return 1.0f / std::sqrt(x);
}
inline double rsqrt(double x) {
  return 1.0 / std::sqrt(x);
}
inline float __fdividef(float x, float y) {
  return x / y;
}
inline float __frcp_rn(float x) {
  return 1.0f / x;
}
inline float __fdiv_rn(float x, float y) {
  return x / y;
}
inline float __fsqrt_rn(float x) {
  return std::sqrt(x);
}
inline float __frsqrt_rn(float x) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x)));
}
// Never fused with what stands around them.
[[gnu::noinline]] inline float __fadd_rn(float x, float y) {
  return x + y;
}
[[gnu::noinline]] inline float __fsub_rn(float x, float y) {
  return x - y;
}
[[gnu::noinline]] inline float __fmul_rn(float x, float y) {
  return x * y;
}
inline float __fmaf_rn(float x, float y, float z) {
  return std::fma(x, y, z);
}
[[gnu::noinline]] inline double __dadd_rn(double x, double y) {
  return x + y;
}
[[gnu::noinline]] inline double __dmul_rn(double x, double y) {
  return x * y;
}
inline double __fma_rn(double x, double y, double z) {
  return std::fma(x, y, z);
}
inline float __saturatef(float x) {
  return x > 0 ? std::min(x, 1.0f) : 0.0f;
}
inline int __float2int_rn(float x) {
  return static_cast<int>(std::nearbyint(x));
}
inline int __float2int_rz(float x) {
  return static_cast<int>(x);
}
inline int __float2int_rd(float x) {
  return static_cast<int>(std::floor(x));
}
inline float __int2float_rn(int x) {
  return static_cast<float>(x);
}
inline float __uint2float_rn(unsigned x) {
  return static_cast<float>(x);
}
inline float __double2float_rn(double x) {
  return static_cast<float>(x);
}
inline float __ll2float_rn(long long x) {
  return static_cast<float>(x);
}

// The quick versions. The C library has functions of the same names, so these are macros.
#define __expf(x) expf(x)
#define __exp2f(x) exp2f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __powf(x, y) powf(x, y)

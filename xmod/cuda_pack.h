// How the CUDA kernels read and write numbers: several neighbours at once, in fp32 registers whatever their
// format in memory.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "xmod/cuda_common.h"

namespace xmod {

using bf16 = __nv_bfloat16;

constexpr float kInfinite = std::numeric_limits<float>::infinity();

__device__ inline float to_float(float value) {
  return value;
}
__device__ inline float to_float(bf16 value) {
  return __bfloat162float(value);
}

template <class T>
__device__ inline T from_float(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    return __float2bfloat16(value);  // to the nearest, ties to even
  }
}

template <int N>
struct Pack {
  float values[N];
  __device__ float& operator[](int k) { return values[k]; }
  __device__ float operator[](int k) const { return values[k]; }
};

namespace detail {

// What one memory instruction moves.
template <int bytes>
struct Word;
template <>
struct Word<2> {
  using type = uint16_t;
};
template <>
struct Word<4> {
  using type = uint32_t;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};

template <int N, class T>
struct Moves {
  static constexpr int kBytes = N * sizeof(T) < 16 ? N * sizeof(T) : 16;
  static constexpr int kEach = kBytes / sizeof(T);  // numbers a word
  using Word = typename detail::Word<kBytes>::type;
};

}  // namespace detail

// N neighbours; the address is a multiple of their size or of 16 bytes, whichever is less.
template <int N, class T>
__device__ inline Pack<N> load(const T* from) {
  using Moves = detail::Moves<N, T>;
  Pack<N> out;
#pragma unroll
  for (int first = 0; first < N; first += Moves::kEach) {
    const typename Moves::Word word = *reinterpret_cast<const typename Moves::Word*>(from + first);
    T part[Moves::kEach];
    std::memcpy(static_cast<void*>(part), &word, sizeof word);
#pragma unroll
    for (int k = 0; k < Moves::kEach; k++) out[first + k] = to_float(part[k]);
  }
  return out;
}

template <int N, class T>
__device__ inline void store(T* to, const Pack<N>& values) {
  using Moves = detail::Moves<N, T>;
#pragma unroll
  for (int first = 0; first < N; first += Moves::kEach) {
    T part[Moves::kEach];
#pragma unroll
    for (int k = 0; k < Moves::kEach; k++) part[k] = from_float<T>(values[first + k]);
    typename Moves::Word word;
    std::memcpy(&word, static_cast<const void*>(part), sizeof word);
    *reinterpret_cast<typename Moves::Word*>(to + first) = word;
  }
}

constexpr int kPack = 8;

// On the host: calls run(pack) with the size of packs that rows of d numbers at these addresses can be read
// in, kPack or 1, as a std::integral_constant.
template <class Run, class... T>
void with_pack(int64_t d, Run run, const T*... rows) {
  const bool aligned = ((reinterpret_cast<uintptr_t>(rows) % 16 == 0) && ...);
  if (d % kPack == 0 && aligned) {
    run(std::integral_constant<int, kPack>{});
  } else {
    run(std::integral_constant<int, 1>{});
  }
}

}  // namespace xmod

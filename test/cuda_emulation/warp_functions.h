// Functions that lanes of a warp execute together.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "block.h"
#include "device_functions.h"

namespace cuda_emulation {

// ---------------------------------------------------------------------------------------------------
// Shuffles

// The value of lane `from`. A lane outside of the mask brings nothing: what is taken from it is poison.
template <class T>
T shuffle(const char* function, unsigned mask, T value, unsigned from, const At& at) {
  static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 2, 4 or 8 bytes");
  struct Brought {
    T value, result;
    unsigned from;
  };
  Brought brought{value, value, from};
  const auto finish = [](Lanes<Brought> lanes) {
    lanes.for_each([&](unsigned lane) {
      Brought& mine = lanes[lane];
      if (lanes.has(mine.from)) {
        mine.result = lanes[mine.from].value;
      } else {
        poison(&mine.result, sizeof(T));
      }
    });
  };
  current_block().meet<Brought>(function, mask, brought, finish, at);
  return brought.result;
}

// Integers shorter than int become int, as on the device.
template <class T>
auto promoted(T value) {
  if constexpr (std::is_integral_v<T>) {
    return +value;
  } else {
    return value;
  }
}

// ---------------------------------------------------------------------------------------------------
// Votes and reductions

template <class T>
struct Vote {
  T value, result;
};

// Every lane gets combine(values of the lanes of the mask, in order).
template <class T, class Combine>
T reduce(const char* function, unsigned mask, T value, Combine, const At& at) {
  Vote<T> brought{value, value};
  const auto finish = [](Lanes<Vote<T>> lanes) {
    T total{};
    bool first = true;
    lanes.for_each([&](unsigned lane) {
      total = first ? lanes[lane].value : Combine{}(total, lanes[lane].value);
      first = false;
    });
    lanes.for_each([&](unsigned lane) { lanes[lane].result = total; });
  };
  current_block().meet<Vote<T>>(function, mask, brought, finish, at);
  return brought.result;
}

inline unsigned ballot(const char* function, unsigned mask, bool vote, const At& at) {
  Vote<unsigned> brought{vote, 0};
  const auto finish = [](Lanes<Vote<unsigned>> lanes) {
    unsigned votes = 0;
    lanes.for_each([&](unsigned lane) { votes |= lanes[lane].value << lane; });
    lanes.for_each([&](unsigned lane) { lanes[lane].result = votes; });
  };
  current_block().meet<Vote<unsigned>>(function, mask, brought, finish, at);
  return brought.result;
}

template <class T>
unsigned match_any(const char* function, unsigned mask, T value, const At& at) {
  struct Brought {
    T value;
    unsigned result;
  };
  Brought brought{value, 0};
  const auto finish = [](Lanes<Brought> lanes) {
    lanes.for_each([&](unsigned lane) {
      lanes.for_each([&](unsigned other) {
        if (lanes[other].value == lanes[lane].value) lanes[lane].result |= 1u << other;
      });
    });
  };
  current_block().meet<Brought>(function, mask, brought, finish, at);
  return brought.result;
}

// ---------------------------------------------------------------------------------------------------
// Matrices. Group g = lane / 4 and place t = lane % 4 say what a lane holds.

constexpr unsigned kAllLanes = 0xffffffffu;

// The two bf16 of a register.
struct Pair {
  float low, high;
  explicit Pair(uint32_t word)
      : low(std::bit_cast<float>(word << 16)), high(std::bit_cast<float>(word & 0xffff0000u)) {}
};

// d (16, 8) += a (16, 16) b (16, 8)
struct MatrixProduct {
  typedef float Row __attribute__((vector_size(8 * sizeof(float))));

  float a[16][16];
  Row b[16], d[16];

  void multiply() {
    for (int row = 0; row < 16; row += 4) {  // four at a time: each is a chain of additions
      Row d0 = d[row], d1 = d[row + 1], d2 = d[row + 2], d3 = d[row + 3];
      for (int k = 0; k < 16; k++) {
        d0 += a[row][k] * b[k];
        d1 += a[row + 1][k] * b[k];
        d2 += a[row + 2][k] * b[k];
        d3 += a[row + 3][k] * b[k];
      }
      d[row] = d0, d[row + 1] = d1, d[row + 2] = d2, d[row + 3] = d3;
    }
  }
};

inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                         const At& at = At::current()) {
  struct Fragments {
    float* d;
    const uint32_t *a, *b;
  };
  Fragments brought{d, a, b};
  const auto finish = [](Lanes<Fragments> lanes) {
    MatrixProduct p;
    for (unsigned lane = 0; lane < kWarp; lane++) {
      const unsigned g = lane / 4, t = lane % 4;
      const Fragments& f = lanes[lane];
      for (unsigned i = 0; i < 4; i++) {
        const Pair pair(f.a[i]);
        float* to = &p.a[g + 8 * (i % 2)][2 * t + 8 * (i / 2)];
        to[0] = pair.low, to[1] = pair.high;
      }
      for (unsigned i = 0; i < 2; i++) {
        const Pair pair(f.b[i]);
        p.b[2 * t + 8 * i][g] = pair.low, p.b[2 * t + 8 * i + 1][g] = pair.high;
        p.d[g + 8 * i][2 * t] = f.d[2 * i], p.d[g + 8 * i][2 * t + 1] = f.d[2 * i + 1];
      }
    }
    p.multiply();
    for (unsigned lane = 0; lane < kWarp; lane++) {
      const unsigned g = lane / 4, t = lane % 4;
      for (unsigned i = 0; i < 4; i++) lanes[lane].d[i] = p.d[g + 8 * (i / 2)][2 * t + i % 2];
    }
  };
  current_block().meet<Fragments>("mma_m16n8k16", kAllLanes, brought, finish, at);
}

inline void expect_shared(const char* function, const void* address) {
  Block& block = current_block();
  if (!block.is_shared(address)) block.stop_thread(text("%s: %p is not shared memory", function, address));
  if (reinterpret_cast<uintptr_t>(address) % 16)
    block.stop_thread(text("%s: %p is not aligned to 16 bytes", function, address));
}

// Lane 8i + j brings row j of matrix i; lane (g, t) takes elements 2t, 2t+1 of row g of each, or of column g.
template <unsigned Matrices, bool Transpose>
void ldmatrix(const char* function, uint32_t (&r)[Matrices], const void* row, const At& at) {
  struct Brought {
    const char* row;
    uint32_t* r;
  };
  if (current_block().lane() < 8 * Matrices) expect_shared(function, row);
  Brought brought{static_cast<const char*>(row), r};
  const auto finish = [](Lanes<Brought> lanes) {
    for (unsigned i = 0; i < Matrices; i++) {
      uint16_t matrix[8][8];
      for (unsigned row = 0; row < 8; row++)
        std::memcpy(matrix[row], lanes[8 * i + row].row, sizeof matrix[row]);
      for (unsigned lane = 0; lane < kWarp; lane++) {
        const unsigned g = lane / 4, t = lane % 4;
        const uint32_t low = Transpose ? matrix[2 * t][g] : matrix[g][2 * t];
        const uint32_t high = Transpose ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1];
        lanes[lane].r[i] = low | high << 16;
      }
    }
  };
  current_block().meet<Brought>(function, kAllLanes, brought, finish, at);
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* shared, const At& at = At::current()) {
  ldmatrix<4, false>("ldmatrix_x4", r, shared, at);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* shared, const At& at = At::current()) {
  ldmatrix<4, true>("ldmatrix_x4_trans", r, shared, at);
}
inline void ldmatrix_x2(uint32_t (&r)[2], const void* shared, const At& at = At::current()) {
  ldmatrix<2, false>("ldmatrix_x2", r, shared, at);
}
inline void ldmatrix_x2_trans(uint32_t (&r)[2], const void* shared, const At& at = At::current()) {
  ldmatrix<2, true>("ldmatrix_x2_trans", r, shared, at);
}

// ---------------------------------------------------------------------------------------------------
// Asynchronous copies: nothing arrives before the thread waits for it, and what was there is lost at once.

inline void cp_async_16(void* shared, const void* global, bool valid) {
  expect_shared("cp_async_16", shared);
  Block& block = current_block();
  if (valid && reinterpret_cast<uintptr_t>(global) % 16)
    block.stop_thread(text("cp_async_16: the source %p is not aligned to 16 bytes", global));
  poison(shared, 16);
  block.running().copies.push_back({shared, global, valid});
}

inline void cp_async_commit() {
  Thread& thread = current_block().running();
  thread.groups.push_back(thread.copies.size());
}

template <int Pending>
void cp_async_wait() {
  Thread& thread = current_block().running();
  if (thread.groups.size() <= Pending) return;
  const size_t complete = thread.groups.size() - Pending, copies = thread.groups[complete - 1];
  for (size_t i = 0; i < copies; i++) {
    const Thread::Copy& copy = thread.copies[i];
    if (copy.valid) {
      std::memcpy(copy.shared, copy.global, 16);
    } else {
      std::memset(copy.shared, 0, 16);
    }
  }
  thread.copies.erase(thread.copies.begin(), thread.copies.begin() + static_cast<ptrdiff_t>(copies));
  thread.groups.erase(thread.groups.begin(), thread.groups.begin() + static_cast<ptrdiff_t>(complete));
  for (size_t& end : thread.groups) end -= copies;
}

}  // namespace cuda_emulation

// ---------------------------------------------------------------------------------------------------
// CUDA's names

inline void __syncwarp(unsigned mask = ~0u, const cuda_emulation::At& at = cuda_emulation::At::current()) {
  cuda_emulation::ballot("__syncwarp", mask, true, at);
}

// Lanes are shuffled within sections of `width` neighbours, which is a power of 2.
template <class T>
auto __shfl_sync(unsigned mask, T value, int from, int width = 32,
                 const cuda_emulation::At& at = cuda_emulation::At::current()) {
  const unsigned lane = cuda_emulation::current_block().lane(), w = static_cast<unsigned>(width);
  const unsigned source = (lane & ~(w - 1)) | (static_cast<unsigned>(from) & (w - 1));
  return cuda_emulation::shuffle("__shfl_sync", mask, cuda_emulation::promoted(value), source, at);
}
template <class T>
auto __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32,
                     const cuda_emulation::At& at = cuda_emulation::At::current()) {
  const unsigned lane = cuda_emulation::current_block().lane(), w = static_cast<unsigned>(width);
  const unsigned source = lane ^ static_cast<unsigned>(lanes), last = lane | (w - 1);
  return cuda_emulation::shuffle("__shfl_xor_sync", mask, cuda_emulation::promoted(value),
                                 source > last ? lane : source, at);
}
template <class T>
auto __shfl_down_sync(unsigned mask, T value, unsigned lanes, int width = 32,
                      const cuda_emulation::At& at = cuda_emulation::At::current()) {
  const unsigned lane = cuda_emulation::current_block().lane(), w = static_cast<unsigned>(width);
  const unsigned source = lane + lanes, last = lane | (w - 1);
  return cuda_emulation::shuffle("__shfl_down_sync", mask, cuda_emulation::promoted(value),
                                 source > last ? lane : source, at);
}
template <class T>
auto __shfl_up_sync(unsigned mask, T value, unsigned lanes, int width = 32,
                    const cuda_emulation::At& at = cuda_emulation::At::current()) {
  const unsigned lane = cuda_emulation::current_block().lane(), w = static_cast<unsigned>(width);
  const unsigned first = lane & ~(w - 1);
  return cuda_emulation::shuffle("__shfl_up_sync", mask, cuda_emulation::promoted(value),
                                 lane < first + lanes ? lane : lane - lanes, at);
}

inline unsigned __ballot_sync(unsigned mask, int vote,
                              const cuda_emulation::At& at = cuda_emulation::At::current()) {
  return cuda_emulation::ballot("__ballot_sync", mask, vote, at);
}
inline int __any_sync(unsigned mask, int vote, const cuda_emulation::At& at = cuda_emulation::At::current()) {
  return cuda_emulation::ballot("__any_sync", mask, vote, at) != 0;
}
inline int __all_sync(unsigned mask, int vote, const cuda_emulation::At& at = cuda_emulation::At::current()) {
  return cuda_emulation::ballot("__all_sync", mask, vote, at) == mask;
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value,
                          const cuda_emulation::At& at = cuda_emulation::At::current()) {
  return cuda_emulation::match_any("__match_any_sync", mask, value, at);
}

#define CUDA_EMULATION_REDUCE(T, name, combined)                                                        \
  inline T name(unsigned mask, T value, const cuda_emulation::At& at = cuda_emulation::At::current()) { \
    return cuda_emulation::reduce(                                                                      \
        #name, mask, value, [](T a, T b) { return combined; }, at);                                     \
  }
CUDA_EMULATION_REDUCE(unsigned, __reduce_add_sync, a + b)
CUDA_EMULATION_REDUCE(unsigned, __reduce_min_sync, std::min(a, b))
CUDA_EMULATION_REDUCE(unsigned, __reduce_max_sync, std::max(a, b))
CUDA_EMULATION_REDUCE(unsigned, __reduce_and_sync, a& b)
CUDA_EMULATION_REDUCE(unsigned, __reduce_or_sync, a | b)
CUDA_EMULATION_REDUCE(unsigned, __reduce_xor_sync, a ^ b)
CUDA_EMULATION_REDUCE(int, __reduce_add_sync,
                      static_cast<int>(static_cast<unsigned>(a) + static_cast<unsigned>(b)))
CUDA_EMULATION_REDUCE(int, __reduce_min_sync, std::min(a, b))
CUDA_EMULATION_REDUCE(int, __reduce_max_sync, std::max(a, b))
#undef CUDA_EMULATION_REDUCE

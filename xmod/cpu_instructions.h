// What the processor can do beyond what the program was compiled for.
#pragma once

#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#endif
#ifdef __linux__
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

namespace xmod {

inline bool always() {
  return true;
}

#ifdef __x86_64__

inline bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

inline bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

inline bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16");
}

// Virtual machines may hide avx512bf16 from the list of features though the processor executes it. Whoever
// asks for it by name gets it if one instruction, in a process of its own, is not a fatal one.
[[gnu::target("avx512f,avx512bf16")]] inline void execute_avx512_bf16() {
  volatile __m512 sum = _mm512_dpbf16_ps(_mm512_setzero_ps(), __m512bh{}, __m512bh{});
  (void)sum;
}

inline bool executes_avx512_bf16() {
  if (has_avx512_bf16()) return true;
#ifdef __linux__
  if (!has_avx512()) return false;
  const pid_t child = fork();
  if (child == 0) {
    execute_avx512_bf16();
    _exit(0);
  }
  int status = 1;
  return child > 0 && waitpid(child, &status, 0) == child && status == 0;
#else
  return false;
#endif
}

// The tile registers are many: Linux hands them out on request.
inline bool has_amx_bf16() {
#ifdef __linux__
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;  // of CPUID leaf 7, EDX
  constexpr long kRequestPermission = 0x1023, kTileData = 18;   // arch_prctl
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!has_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  return (d & kAmxBf16) && (d & kAmxTile) && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

#endif  // __x86_64__

}  // namespace xmod

// The sets of instructions that products run on.
#include "xmod/cpu_matmul.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#ifdef __x86_64__
#include <immintrin.h>
#endif
#ifdef _OPENMP
#include <omp.h>
#endif

#include "xmod/cpu_instructions.h"
#include "xmod/cpu_matmul_blocks.h"
#include "xmod/cpu_threads.h"
#include "xmod/error.h"

// Between these two every function may use the named instructions, whatever the rest is compiled for.
#define XMOD_PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define XMOD_BEGIN_INSTRUCTIONS(names) \
  XMOD_PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define XMOD_END_INSTRUCTIONS XMOD_PRAGMA(clang attribute pop)
#else
#define XMOD_BEGIN_INSTRUCTIONS(names) XMOD_PRAGMA(GCC push_options) XMOD_PRAGMA(GCC target(names))
#define XMOD_END_INSTRUCTIONS XMOD_PRAGMA(GCC pop_options)
#endif

// Vectors wider than the target's go between functions of one set of instructions only.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace xmod::detail {

namespace portable {
#include "xmod/cpu_matmul_kernels.h"

#ifdef __aarch64__
using Fp32Tile = RegisterTile<Fp32<4, 12, 2>>;  // 24 + 2 + 1 of NEON's 32 registers
#else
using Fp32Tile = RegisterTile<Fp32<4, 6, 2>>;
#endif
using Bf16Tile = RegisterTile<Bf16<4, 6, 2>>;
}  // namespace portable

#ifdef __x86_64__

XMOD_BEGIN_INSTRUCTIONS("avx2,fma")
namespace avx2 {
#include "xmod/cpu_matmul_kernels.h"

using Fp32Tile = RegisterTile<Fp32<8, 6, 2>>;  // 12 + 2 + 1 of 16 registers
}  // namespace avx2
XMOD_END_INSTRUCTIONS

XMOD_BEGIN_INSTRUCTIONS("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq")
namespace avx512 {
#include "xmod/cpu_matmul_kernels.h"

using Fp32Tile = RegisterTile<Fp32<16, 12, 2>>;  // 24 + 2 + 1 of 32 registers
}  // namespace avx512
XMOD_END_INSTRUCTIONS

XMOD_BEGIN_INSTRUCTIONS("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
namespace avx512_bf16 {
#include "xmod/cpu_matmul_kernels.h"

struct Factors : Bf16<16, 8, 3> {  // 24 + 3 + 1 of 32 registers; 12 x 2 was slower
  static Floats multiply_add(const Floats& sum, uint32_t a, const Elements& b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(a))),
                            reinterpret_cast<__m512bh>(b));
  }
};
using Bf16Tile = RegisterTile<Factors>;
}  // namespace avx512_bf16
XMOD_END_INSTRUCTIONS

XMOD_BEGIN_INSTRUCTIONS("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,amx-tile,amx-bf16")
namespace amx {
#include "xmod/cpu_matmul_kernels.h"
// behind it
#include "xmod/cpu_matmul_amx.h"

// By assembler text: the compilers' own functions take the numbers of tiles as literals only.
struct HardwareTiles {
  static void configure() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  static void release() { asm volatile("tilerelease"); }
  template <int Tile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
  }
  template <int Tile>
  static void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile) : "memory");
  }
  template <int Tile>
  static void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile) : "memory");
  }
  template <int C, int A, int B>
  static void multiply_add() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};
using Bf16Tile = AmxTile<HardwareTiles>;
}  // namespace amx
XMOD_END_INSTRUCTIONS

#endif  // __x86_64__

static void multiply(const Product& p, int threads, MatmulScratch& scratch) {
  const MatmulKernel& kernel = scratch.kernel();
  const int caller = thread_number();  // of a parallel region around this call
  scratch.reserve(caller + threads);
  // A region of its own also for one thread: what the kernel shares out is for these threads only.
#pragma omp parallel num_threads(threads)
  {
    const int thread = threads > 1 ? thread_number() : caller;
    kernel.run(p, scratch.of_thread(thread), scratch.of_thread(caller), threads);
    if (p.update.symmetric) {
#pragma omp for schedule(dynamic, 4)
      for (int64_t row = 0; row < p.M; row += kernel.lanes) kernel.mirror(p, row);
    }
  }
}

// Threads worth waking for a product of that many multiply-adds; one inside a parallel region.
static int matmul_threads(int64_t multiply_adds) {
#ifdef _OPENMP
  constexpr int64_t kTooFewToShare = 1 << 17;
  return omp_in_parallel() || multiply_adds < kTooFewToShare ? 1 : omp_get_max_threads();
#else
  (void)multiply_adds;
  return 1;
#endif
}

}  // namespace xmod::detail

namespace xmod {

const std::vector<MatmulKernel>& matmul_kernels() {
  using namespace detail;
  static const std::vector<MatmulKernel> kernels = {
#ifdef __x86_64__
      amx::kernel_of<amx::Bf16Tile>("amx", has_amx_bf16, has_amx_bf16),
      avx512_bf16::kernel_of<avx512_bf16::Bf16Tile>("avx512-bf16", has_avx512_bf16, executes_avx512_bf16),
      avx512::kernel_of<avx512::Fp32Tile>("avx512", has_avx512, has_avx512),
      avx2::kernel_of<avx2::Fp32Tile>("avx2", has_avx2, has_avx2),
#endif
      portable::kernel_of<portable::Fp32Tile>("portable", always, always),
      portable::kernel_of<portable::Bf16Tile>("portable", always, always, true),
  };
  return kernels;
}

// "a, b or c": the kernels of a precision.
static std::string kernel_names(Precision precision) {
  std::string names;
  for (const MatmulKernel& kernel : matmul_kernels()) {
    if (kernel.precision == precision) names += (names.empty() ? "" : ", ") + std::string(kernel.name);
  }
  return names;
}

const MatmulKernel& choose_matmul_kernel(Precision precision, const std::string& name) {
  const bool any = name == "auto";
  bool known = false;
  for (const MatmulKernel& kernel : matmul_kernels()) {
    if (kernel.precision != precision || (any ? kernel.slow : name != kernel.name)) continue;
    known = true;
    if (any ? kernel.runs_here() : kernel.runs_by_name()) return kernel;
  }
  const std::string products = std::string(precision_name(precision)) + " products";
  if (any) {
    usage_error("--precision ", precision_name(precision),
                ": this processor has no fast instructions for it (", kernel_names(precision),
                "): use fp32, or --instructions portable, which computes the same slowly");
  }
  if (!known)
    usage_error("--instructions ", name, ": there are no ", products, " of that name; there are ",
                kernel_names(precision));
  usage_error("--instructions ", name,
              ": this processor does not have them; leave the flag out to use the best it has");
}

MatmulScratch::MatmulScratch(const MatmulKernel& kernel) : kernel_(&kernel) {}
MatmulScratch::MatmulScratch(MatmulScratch&&) noexcept = default;
MatmulScratch& MatmulScratch::operator=(MatmulScratch&&) noexcept = default;
MatmulScratch::~MatmulScratch() = default;

// Each workspace is written by its thread first, so that it lies near it, and whole: what is planned is what
// is taken.
void MatmulScratch::reserve(int threads) {
  const int before = static_cast<int>(of_thread_.size());
  while (static_cast<int>(of_thread_.size()) < threads) of_thread_.emplace_back(new detail::MatmulWorkspace);
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (before < threads)
  for (int i = before; i < threads; i++) std::memset(of_thread_[i].get(), 0, sizeof(detail::MatmulWorkspace));
}

int64_t MatmulScratch::bytes(int64_t threads) {
  return threads * static_cast<int64_t>(sizeof(detail::MatmulWorkspace));
}

void matmul(float* c, int64_t c_stride, Operand a, Operand b, int64_t M, int64_t N, int64_t K,
            MatmulScratch& scratch, MatmulUpdate update) {
  if (M == 0 || N == 0) return;
  if (K == 0) {
    if (update.accumulate) return;
    for (int64_t m = 0; m < M; m++) std::fill_n(c + m * c_stride, N, 0.0f);
    return;
  }
  const detail::Product product{c, c_stride, a, b, M, N, K, update, 0};
  detail::multiply(product, detail::matmul_threads(M * N * K), scratch);
}

}  // namespace xmod

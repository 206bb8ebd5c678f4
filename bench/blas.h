// The matrix products of a BLAS library that lies on this machine, loaded at run time, in turn with our own.
#pragma once

#include <dlfcn.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "bench/clock.h"
#include "xmod/cpu_matmul.h"
#include "xmod/error.h"

namespace xmod::bench {

// cblas_sgemm of a shared library.
class Blas {
 public:
  Blas(const std::string& library, int threads) {
    // An OpenBLAS older than the processor takes it for an ancient one, and is five times as slow.
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw")) setenv("OPENBLAS_CORETYPE", "SkylakeX", 0);
#endif
    void* const handle = dlopen(library.c_str(), RTLD_NOW);
    if (!handle) fail("--blas ", library, ": ", dlerror());
    sgemm_ = reinterpret_cast<Sgemm>(dlsym(handle, "cblas_sgemm"));
    if (!sgemm_) fail("--blas ", library, " has no cblas_sgemm; name another library");
    const auto set_threads = reinterpret_cast<void (*)(int)>(dlsym(handle, "openblas_set_num_threads"));
    if (set_threads) set_threads(threads);
  }

  // c (M, N) = beta c + a b; a and b as cblas takes them: transposed or not.
  void multiply(float* c, const float* a, bool a_transposed, const float* b, bool b_transposed, int64_t M,
                int64_t N, int64_t K, float beta) const {
    const auto i = [](int64_t size) { return static_cast<int>(size); };
    sgemm_(kRowMajor, a_transposed ? kTranspose : kPlain, b_transposed ? kTranspose : kPlain, i(M), i(N),
           i(K), 1.0f, a, i(a_transposed ? M : K), b, i(b_transposed ? K : N), beta, c, i(N));
  }

 private:
  static constexpr int kRowMajor = 101, kPlain = 111, kTranspose = 112;
  using Sgemm = void (*)(int, int, int, int, int, int, float, const float*, int, const float*, int, float,
                         float*, int);
  Sgemm sgemm_;
};

struct ProductRace {
  std::string pass;
  double ours, theirs;        // seconds: medians
  double ratio, least, most;  // theirs / ours, by pair
  double of_fastest;          // the same of the fastest runs, which a busy neighbour slows down least
};

// The products of a weight (OC, C) and n rows whose names contain `only`, each in turns of a block of ours
// and a block of theirs, with a rest before each: a library's threads may spin for a while behind its last
// call.
inline std::vector<ProductRace> race_products(const Blas& blas, int64_t n, int64_t C, int64_t OC,
                                              const std::string& only, double seconds) {
  constexpr int kPairs = 5;
  std::vector<float> inp(static_cast<size_t>(n * C), 0.5f), out(static_cast<size_t>(n * OC), 0.25f),
      weight(static_cast<size_t>(OC * C), 0.125f);
  float *x = inp.data(), *y = out.data(), *w = weight.data();
  MatmulScratch scratch;
  struct Pair {
    std::string pass;
    std::function<void()> ours, theirs;
  };
  const std::vector<Pair> pairs = {
      {"forward", [&] { matmul(y, OC, stored(x, C), transposed(w, C), n, OC, C, scratch); },
       [&] { blas.multiply(y, x, false, w, true, n, OC, C, 0); }},
      {"dinp", [&] { matmul(x, C, stored(y, OC), stored(w, C), n, C, OC, scratch); },
       [&] { blas.multiply(x, y, false, w, false, n, C, OC, 0); }},
      {"dweight",
       [&] { matmul(w, C, transposed(y, OC), stored(x, C), OC, C, n, scratch, {.accumulate = true}); },
       [&] { blas.multiply(w, y, true, x, false, OC, C, n, 1); }}};
  std::vector<ProductRace> races;
  for (const Pair& pair : pairs) {
    if (pair.pass.find(only) == std::string::npos) continue;
    std::fill(inp.begin(), inp.end(), 0.5f);
    std::fill(out.begin(), out.end(), 0.25f);
    std::fill(weight.begin(), weight.end(), 0.125f);
    const auto timed = [&](const std::function<void()>& run) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      return time_repeatedly(run, seconds / kPairs);
    };
    std::vector<double> ours, theirs, ratios, our_fastest, their_fastest;
    for (int i = 0; i < kPairs; i++) {
      const std::vector<double> our_times = timed(pair.ours), their_times = timed(pair.theirs);
      ours.push_back(median(our_times));
      theirs.push_back(median(their_times));
      ratios.push_back(theirs.back() / ours.back());
      our_fastest.push_back(smallest(our_times));
      their_fastest.push_back(smallest(their_times));
    }
    races.push_back({pair.pass, median(ours), median(theirs), median(ratios), smallest(ratios),
                     largest(ratios), smallest(their_fastest) / smallest(our_fastest)});
  }
  return races;
}

}  // namespace xmod::bench

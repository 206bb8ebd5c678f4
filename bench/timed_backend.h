// A backend that times its passes: it is the backend below it, and notes for every pass, by shape, how long
// each call took and what it costs at least.
//
// A new pass needs one line: its name, its arguments and its cost.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "bench/clock.h"
#include "xmod/cpu_matmul.h"
#include "xmod/optimizer.h"

namespace xmod::bench {

enum class Kind { product, attention, muon, memory };

// What a pass cannot do without: floating-point operations, and bytes, each tensor read or written once.
// Elementwise arithmetic is not counted.
struct Cost {
  Kind kind;
  std::array<int64_t, 3> shape;  // trailing zeros: not used
  double flops;
  double bytes;
};

namespace detail {

// (n, C) times (C, OC)
inline Cost product(int64_t n, int64_t C, int64_t OC) {
  return {Kind::product, {n, C, OC}, 2.0 * n * C * OC, 4.0 * (n * C + C * OC + n * OC)};
}

// So many tensors of (n, d) floats read or written.
inline Cost moves(double tensors, int64_t n, int64_t d = 0) {
  return {Kind::memory, {n, d, 0}, 0, 4 * tensors * static_cast<double>(d ? n * d : n)};
}

// `products` products of (hd) vectors for every query and each key that it sees; `tensors` as large as q.
inline Cost attention(int products, double tensors, const int32_t* own_key, const int64_t* q_offsets,
                      const int64_t* kv_offsets, int64_t B, int64_t H, int64_t KV, int64_t hd) {
  int64_t pairs = 0;
  for (int64_t b = 0; b < B; b++) {
    for (int64_t i = q_offsets[b]; i < q_offsets[b + 1]; i++)
      pairs += own_key ? own_key[i] - kv_offsets[b] + 1 : i - q_offsets[b] + 1;
  }
  const double n = static_cast<double>(q_offsets[B]), keys = static_cast<double>(kv_offsets[B]);
  return {Kind::attention,
          {q_offsets[B], B, H * hd},
          2.0 * products * hd * H * static_cast<double>(pairs),
          2 * tensors * hd * (n * H + keys * KV)};
}

// Newton-Schulz steps on matrices whose smaller size is R, the larger L, as xmod/cpu_muon.h takes them: two
// products of R R L, and of symmetric ones, a half of two of R R L and of fourteen of R R R.
inline Cost muon(int64_t count, int64_t rows, int64_t cols) {
  const double R = static_cast<double>(std::min(rows, cols)), L = static_cast<double>(std::max(rows, cols));
  return {Kind::muon, {count, rows, cols}, count * (6 * R * R * L + 14 * R * R * R), 4 * 5 * count * R * L};
}

}  // namespace detail

// The calls of one pass with one shape.
struct PassCalls {
  Cost cost;
  std::vector<double> seconds;
  std::function<void()> again;  // repeats the first call
};

template <class Backend>
class TimedBackend : public Backend {
 public:
  using Backend::Backend;

  std::map<std::pair<std::string_view, std::array<int64_t, 3>>, PassCalls> passes;

// Shadows Backend::pass, which takes `parameters`, by one that is timed.
#define TIMED(pass, parameters, ...)                                                                     \
  static Cost cost_of_##pass parameters {                                                                \
    using namespace detail;                                                                              \
    return __VA_ARGS__;                                                                                  \
  }                                                                                                      \
  template <class... Arguments>                                                                          \
  auto pass(Arguments... arguments) {                                                                    \
    auto run = [=, this] { return Backend::pass(arguments...); };                                        \
    const Timer timer(passes[{#pass, cost_of_##pass(arguments...).shape}], cost_of_##pass(arguments...), \
                      run);                                                                              \
    return run();                                                                                        \
  }

  using P = const void*;  // any tensor
  using N = int64_t;

  TIMED(matmul_forward, (P, P, P, N n, N C, N OC), product(n, C, OC))
  TIMED(matmul_add_forward, (P, P, P, N n, N C, N OC), product(n, C, OC))
  TIMED(matmul_dinp, (P, P, P, N n, N C, N OC, const MatmulUpdate&), product(n, C, OC))
  TIMED(matmul_dweight, (P, P, P, N n, N C, N OC), product(n, C, OC))

  TIMED(attention_forward,
        (P, P, P, P, P, N, const int32_t* own_key, const int64_t* q_offsets, const int64_t* kv_offsets, N,
         N B, N H, N KV, N hd),
        attention(2, 2, own_key, q_offsets, kv_offsets, B, H, KV, hd))
  TIMED(attention_backward,
        (P, P, P, N, P, P, P, P, N, P, P, const int32_t* own_key, const int64_t* q_offsets,
         const int64_t* kv_offsets, N, N, N B, N H, N KV, N hd),
        attention(5, 4, own_key, q_offsets, kv_offsets, B, H, KV, hd))

  TIMED(encoder_forward, (P, P, P, N n, N d), moves(2, n, d))
  TIMED(encoder_backward, (P, P, P, N n, N, N d), moves(3, n, d))
  TIMED(rmsnorm_forward, (P, P, P, P, N n, N d, float), moves(2, n, d))
  TIMED(rmsnorm_backward, (P, P, P, P, P, P, N n, N d), moves(3, n, d))
  TIMED(rmsnorm_add_backward, (P, P, P, P, P, P, N n, N d), moves(4, n, d))
  TIMED(gather_rmsnorm_forward, (P, P, P, P, P, P, N n, N d, float), moves(3, n, d))
  TIMED(residual_rmsnorm_forward, (P, P, P, P, P, P, N n, N d, float), moves(4, n, d))
  TIMED(residual_rmsnorm_backward, (P, P, P, P, P, P, P, N n, N d), moves(5, n, d))
  TIMED(router_backward, (P, P, P, P, P, N n, N d, float), moves(3, n, d))
  TIMED(route_topk, (P, P, P, P, P, P, P, P, P, P, P, float, float, N B, N T, N, N d, float),
        moves(1, B* T, d))
  TIMED(gated_scatter_forward, (P, P, P, P, P, N n, N d), moves(3, n, d))
  TIMED(gated_scatter_backward, (P, P, P, P, P, P logit, P, P, N n, N d), moves(logit ? 3 : 2, n, d))
  TIMED(scatter_add, (P, P, P, N n, N d), moves(3, n, d))
  TIMED(gather, (P, P, P, N n, N d), moves(2, n, d))
  TIMED(qk_norm_rope_forward, (P, P, P, P, P, P, P, P, N n, N, N H, N KV, N hd, float),
        moves(2, n, (H + KV) * hd))
  TIMED(qk_norm_rope_backward, (P, P, P, P, P, P, P, P, P, P, P, N n, N, N H, N KV, N hd),
        moves(3, n, (H + KV) * hd))
  TIMED(swiglu_forward, (P, P, N n, N F), moves(3, n, F))
  TIMED(swiglu_backward, (P, P, P, N n, N F), moves(5, n, F))
  TIMED(crossentropy_forward_backward, (P, P, P, float, N n, N V), moves(2, n, V))
  TIMED(zero, (P, N n), moves(1, n))
  TIMED(sum_of_squares, (P, N n), moves(1, n))
  TIMED(adamw_update, (P, P, P, P, const AdamWStep&, N n), moves(7, n))
  TIMED(muon_update, (P, P, P, P, P, N count, N rows, N cols, const MuonStep&), muon(count, rows, cols))
#undef TIMED

  // A backward pass of a product is timed as the two products that it is.
  void matmul_backward(float* dinp, float* dweight, const float* dout, const float* inp, const float* weight,
                       int64_t n, int64_t C, int64_t OC) {
    matmul_dinp(dinp, dout, weight, n, C, OC, MatmulUpdate{});
    matmul_dweight(dweight, dout, inp, n, C, OC);
  }
  void matmul_add_backward(float* dinp, float* dweight, const float* dout, const float* inp,
                           const float* weight, int64_t n, int64_t C, int64_t OC) {
    matmul_dinp(dinp, dout, weight, n, C, OC, MatmulUpdate{.accumulate = true});
    matmul_dweight(dweight, dout, inp, n, C, OC);
  }

 private:
  // Times one call, from its construction to its end.
  class Timer {
   public:
    template <class Run>
    Timer(PassCalls& calls, const Cost& cost, const Run& run) : calls_(calls) {
      if (calls.seconds.empty()) calls.cost = cost, calls.again = run;
      watch_ = {};
    }
    ~Timer() { calls_.seconds.push_back(watch_.seconds()); }

   private:
    PassCalls& calls_;
    Stopwatch watch_;
  };
};

}  // namespace xmod::bench

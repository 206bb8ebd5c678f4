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

#include "xmod/optimizer.h"

namespace xmod::bench {

// By what bounds them: arithmetic on the factors of products, the same in fp32 in any case, memory.
enum class Kind { product, fp32_product, attention, muon, memory };

// What a pass cannot do without: floating-point operations, and bytes, each tensor read or written once.
// Elementwise arithmetic is not counted.
struct Cost {
  Kind kind;
  std::array<int64_t, 3> shape;  // trailing zeros: not used
  double flops;
  double bytes;
};

namespace detail {

// Bytes of an element of each tensor.
template <class... T>
constexpr double element_bytes(const T*...) {
  return (0.0 + ... + sizeof(T));
}

// (n, C) times (C, OC)
template <class Out, class Inp>
Cost product(int64_t n, int64_t C, int64_t OC, const Out* out, const Inp* inp, Kind kind = Kind::product) {
  const double bytes = element_bytes(inp) * (n * C + C * OC) + element_bytes(out) * (n * OC);
  return {kind, {n, C, OC}, 2.0 * n * C * OC, bytes};
}

// (n, OC) times (OC, C): the gradient of the rows.
template <class Out, class Inp>
Cost row_product(int64_t n, int64_t C, int64_t OC, const Out* dinp, const Inp* dout) {
  Cost cost = product(n, OC, C, dinp, dout);
  cost.shape = {n, C, OC};
  return cost;
}

// The gradient of the matrix, which is added to.
template <class Out, class Inp>
Cost weight_product(int64_t n, int64_t C, int64_t OC, const Out* dweight, const Inp* inp) {
  const double bytes = element_bytes(inp) * (n * C + n * OC) + element_bytes(dweight, dweight) * (C * OC);
  return {Kind::product, {n, C, OC}, 2.0 * n * C * OC, bytes};
}

// The gradients of the rows and of the matrix.
template <class Out, class Inp>
Cost fp32_gradients(int64_t n, int64_t C, int64_t OC, const Out* dinp, const Inp* dout) {
  Cost cost = product(n, C, OC, dout, dinp, Kind::fp32_product);
  cost.flops *= 2, cost.bytes *= 2;
  return cost;
}

// Rows (pairs, C), each times one of E matrices (C, OC).
template <class Out, class Inp>
Cost expert_product(int64_t pairs, int64_t E, int64_t C, int64_t OC, const Out* out, const Inp* inp) {
  Cost cost = product(pairs, C, OC, out, inp);
  cost.bytes += element_bytes(inp) * ((E - 1) * C * OC);
  return cost;
}

// Their gradients: of the rows, in their format, and of the matrices in fp32, which are added to.
template <class Out, class Inp>
Cost expert_gradients(int64_t pairs, int64_t E, int64_t C, int64_t OC, const Out* dinp, const Inp* dout) {
  Cost cost = expert_product(pairs, E, OC, C, dinp, dout);
  cost.shape = {pairs, C, OC};
  cost.flops *= 2;
  cost.bytes +=
      element_bytes(dout) * (pairs * (C + OC)) + 2 * sizeof(float) * static_cast<double>(E * C * OC);
  return cost;
}

// Tensors of (n, d) read or written: one that is added to stands there twice.
template <class... T>
Cost moves(int64_t n, int64_t d, const T*... tensors) {
  return {Kind::memory, {n, d, 0}, 0, element_bytes(tensors...) * static_cast<double>(n * d)};
}
template <class... T>
Cost moves(int64_t n, const T*... tensors) {
  return {Kind::memory, {n, 0, 0}, 0, element_bytes(tensors...) * static_cast<double>(n)};
}

// `products` products of (hd) vectors for every query and each key that it sees, in B sequences of one
// length; `tensors` as large as q and as many as large as k.
template <class Element>
Cost attention(int products, double tensors, const Element* q, int64_t nq, int64_t B, int64_t H, int64_t KV,
               int64_t hd) {
  const double n = static_cast<double>(nq), pairs = n * (n / static_cast<double>(B) + 1) / 2;
  return {Kind::attention,
          {nq, B, H * hd},
          2.0 * products * hd * H * pairs,
          element_bytes(q) * tensors * hd * n * (H + KV)};
}

inline Cost muon(int64_t count, int64_t rows, int64_t cols) {
  return {Kind::muon,
          {count, rows, cols},
          static_cast<double>(count * newton_schulz_flops(rows, cols)),
          4.0 * static_cast<double>(5 * count * rows * cols)};
}

}  // namespace detail

// The calls of one pass with one shape.
struct PassCalls {
  Cost cost;
  int64_t count = 0;
  std::vector<double> seconds;
  std::function<void()> again;  // repeats the first call
};

// What becomes of a call.
enum class Timing {
  off,     // it runs
  on,      // and is timed
  counted  // only its cost is noted: nothing runs, and no memory is used
};

// Clock: how long a call takes, as xmod::bench::WallClock tells it.
template <class Backend, class Clock>
class TimedBackend : public Backend {
 public:
  using Backend::Backend;

  Timing timing = Timing::on;
  Clock clock{*this};
  std::map<std::pair<std::string_view, std::array<int64_t, 3>>, PassCalls> passes;

// Shadows Backend::pass, which takes `parameters`, by one that is timed.
#define TIMED(pass, parameters, ...)                                                                     \
  Cost cost_of_##pass parameters {                                                                       \
    using namespace detail;                                                                              \
    return __VA_ARGS__;                                                                                  \
  }                                                                                                      \
  template <class... Arguments>                                                                          \
  auto pass(Arguments... arguments) {                                                                    \
    return call(#pass, cost_of_##pass(arguments...), [=, this] { return Backend::pass(arguments...); }); \
  }

  using N = int64_t;
  using P = const void*;  // a tensor that is not weighed

  TIMED(matmul_forward, (auto out, auto inp, P, N n, N C, N OC), product(n, C, OC, out, inp))
  TIMED(matmul_add_forward, (auto out, auto inp, P, N n, N C, N OC), product(n, C, OC, out, inp))
  TIMED(matmul_dinp, (auto dinp, auto dout, P, N n, N C, N OC, bool), row_product(n, C, OC, dinp, dout))
  TIMED(matmul_dweight, (auto dweight, P, auto inp, N n, N C, N OC), weight_product(n, C, OC, dweight, inp))
  TIMED(matmul_fp32_forward, (auto out, P, P, N n, N C, N OC),
        product(n, C, OC, out, out, Kind::fp32_product))
  TIMED(matmul_fp32_backward, (auto dinp, P, auto dout, P, P, N n, N C, N OC),
        fp32_gradients(n, C, OC, dinp, dout))
  TIMED(matmul_fp32_add_backward, (auto dinp, P, auto dout, P, P, N n, N C, N OC),
        fp32_gradients(n, C, OC, dinp, dout))

  TIMED(attention_forward, (P, P, auto q, P, P, N, P, P, P, N nq, N B, N H, N KV, N hd),
        attention(2, 2, q, nq, B, H, KV, hd))
  TIMED(attention_backward, (P, P, P, N, P, auto q, P, P, N, P, P, P, P, P, N nq, N, N B, N H, N KV, N hd),
        attention(5, 4, q, nq, B, H, KV, hd))

  TIMED(encoder_forward, (auto out, P, auto embed, N n, N d), moves(n, d, out, embed))
  TIMED(encoder_backward, (auto dembed, auto dout, P, N n, N, N d), moves(n, d, dembed, dembed, dout))
  TIMED(rmsnorm_forward, (auto out, P, auto inp, P, N n, N d, float), moves(n, d, out, inp))
  TIMED(rmsnorm_backward, (auto dinp, P, auto dout, auto inp, P, P, N n, N d), moves(n, d, dinp, dout, inp))
  TIMED(rmsnorm_add_backward, (auto dinp, P, auto dout, auto inp, P, P, N n, N d),
        moves(n, d, dinp, dinp, dout, inp))
  TIMED(gather_rmsnorm_forward, (auto x, auto out, P, auto stream, P, P, N n, N d, float),
        moves(n, d, x, out, stream))
  TIMED(residual_rmsnorm_forward, (auto h, auto out, P, auto x, auto delta, P, N n, N d, float),
        moves(n, d, h, out, x, delta))
  TIMED(residual_rmsnorm_backward, (auto dx, auto ddelta, P, auto dout, auto h, P, P, N n, N d),
        moves(n, d, dx, ddelta, ddelta, dout, h))
  TIMED(router_backward, (auto dx, P, P, auto x, P, N n, N d, float), moves(n, d, dx, dx, x))
  TIMED(route_topk, (P, P, P, P, P, P, P, P, auto stream, P, P, float, float, N B, N T, N, N d, float),
        moves(B* T, d, stream))
  TIMED(gated_scatter_forward, (auto stream, auto delta, P, P, P, N n, N d),
        moves(n, d, stream, stream, delta))
  TIMED(gated_scatter_backward, (auto ddelta, P, P, auto dstream, auto delta, auto logit, P, P, N n, N d),
        logit ? moves(n, d, ddelta, dstream, delta) : moves(n, d, ddelta, dstream))
  TIMED(scatter_add, (auto stream, auto inp, P, N n, N d), moves(n, d, stream, stream, inp))
  TIMED(gather, (auto out, auto stream, P, N n, N d), moves(n, d, out, stream))
  TIMED(qk_norm_rope_forward, (P, P, P, auto qkv, P, P, P, P, N n, N, N H, N KV, N hd, float),
        moves(n, (H + KV) * hd, qkv, qkv))
  TIMED(qk_norm_rope_backward, (P, P, P, P, P, auto qkv, P, P, P, P, P, N n, N, N H, N KV, N hd),
        moves(n, (H + KV) * hd, qkv, qkv, qkv))
  TIMED(swiglu_forward, (auto act, auto gate_up, N n, N F), moves(n, F, act, gate_up, gate_up))
  TIMED(swiglu_backward, (auto dgate_up, auto dact, auto gate_up, N n, N F),
        moves(n, F, dgate_up, dgate_up, dact, gate_up, gate_up))
  TIMED(crossentropy_forward_backward, (P, auto logits, P, float, N n, N V), moves(n, V, logits, logits))
  TIMED(zero, (auto data, N n), moves(n, data))
  TIMED(sum_of_squares, (auto inp, N n), moves(n, inp))
  TIMED(adamw_update, (auto param, auto m, auto v, auto grad, const AdamWStep&, N n),
        moves(n, param, param, m, m, v, v, grad))
  TIMED(muon_update, (P, P, P, P, P, N count, N rows, N cols, const MuonStep&), muon(count, rows, cols))

  TIMED(moe_route_forward, (auto chosen, auto weight, auto score, P, N n, N E, N),
        moves(n, E, chosen, weight, score, score))
  TIMED(moe_route_backward, (auto dlogit, auto dweight, auto weight, auto score, auto chosen, N n, N E),
        moves(n, E, dlogit, dweight, weight, score, chosen))
  TIMED(expert_matmul_forward, (auto out, auto inp, P, N, P, N pairs, N E, N C, N OC),
        expert_product(pairs, E, C, OC, out, inp))
  TIMED(expert_matmul_backward, (auto dinp, P, auto dout, P, P, N, P, N pairs, N E, N C, N OC),
        expert_gradients(pairs, E, C, OC, dinp, dout))
  TIMED(expert_weight_forward, (auto out, auto inp, P, P, P, N pairs, N, N width),
        moves(pairs, width, out, inp))
  TIMED(expert_weight_backward, (auto dinp, P, auto dout, auto inp, P, P, P, N pairs, N, N, N width),
        moves(pairs, width, dinp, dout, inp))
  TIMED(sum_pairs_add, (auto out, auto inp, P, P, N n, N d),
        moves(n, d, out, out, inp))  // every token has one pair at least
#undef TIMED

// Shadows what is not worth a time.
#define UNTIMED(pass)                                     \
  template <class... Arguments>                           \
  auto pass(Arguments... arguments) {                     \
    using Result = decltype(Backend::pass(arguments...)); \
    if (timing == Timing::counted) return Result();       \
    return Backend::pass(arguments...);                   \
  }
  UNTIMED(fill)
  UNTIMED(add_expert_loads)
  UNTIMED(expert_bias_update)
  UNTIMED(copy)
  UNTIMED(to_device)
  UNTIMED(to_host)
  UNTIMED(fill_sequence)
  UNTIMED(fill_positions)
  UNTIMED(uniform_offsets)
  UNTIMED(rope_table)
  UNTIMED(use_parameters)
  UNTIMED(add_row_means)
  UNTIMED(threshold_update)
  UNTIMED(mean)
#undef UNTIMED

  // Counted, all pairs that there may be.
  N group_by_expert(int32_t* row, int32_t* expert, int32_t* slot, N* slot_offsets, N* expert_offsets,
                    const uint8_t* chosen, N n, N E, N most_pairs) {
    const N pairs = call("group_by_expert", detail::moves(n, E, chosen), [=, this] {
      return Backend::group_by_expert(row, expert, slot, slot_offsets, expert_offsets, chosen, n, E,
                                      most_pairs);
    });
    return timing == Timing::counted ? most_pairs : pairs;
  }

  // A backward pass of a product is timed as the two products that it is.
  template <class X>
  void matmul_backward(X* dinp, float* dweight, const X* dout, const X* inp, const float* weight, N n, N C,
                       N OC) {
    matmul_dinp(dinp, dout, weight, n, C, OC, false);
    matmul_dweight(dweight, dout, inp, n, C, OC);
  }
  template <class X>
  void matmul_add_backward(X* dinp, float* dweight, const X* dout, const X* inp, const float* weight, N n,
                           N C, N OC) {
    matmul_dinp(dinp, dout, weight, n, C, OC, true);
    matmul_dweight(dweight, dout, inp, n, C, OC);
  }

  // Memory that nobody uses is addresses alone.
  template <class T>
  T* allocate(N n) {
    if (timing != Timing::counted) return Backend::template allocate<T>(n);
    constexpr N kAlignment = 256;
    T* const data = reinterpret_cast<T*>(unused_);
    unused_ += (n * static_cast<N>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return data;
  }
  template <class T>
  void release(T* data) {
    if (timing != Timing::counted) Backend::release(data);
  }

 private:
  template <class Run>
  auto call(std::string_view pass, const Cost& cost, Run run) {
    using Result = decltype(run());
    if (timing == Timing::off) return run();
    PassCalls& calls = passes[{pass, cost.shape}];
    if (calls.count++ == 0) calls.cost = cost, calls.again = run;
    if (timing == Timing::counted) return Result();
    const typename Clock::Timer timer(clock, calls.seconds);
    return run();
  }

  N unused_ = N{1} << 40;  // where addresses begin that are nobody's
};

}  // namespace xmod::bench

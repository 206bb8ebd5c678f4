// Mixture of experts, E:k+s: a token goes to the k of E experts with the largest score + bias and to all s
// shared ones, each a SwiGLU of width expert_dim. No token is dropped.
//
//   score = sigmoid(W_r x), weights = the chosen scores divided by their sum
//   y = sum of weight * expert(x) + sum of the shared experts
//
// The load is balanced without an auxiliary loss: after a training step the bias of an expert moves by
// expert_bias_rate towards the mean load (close_step).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "xmod/layers/experts.h"
#include "xmod/layers/swiglu.h"

namespace xmod {

struct Moe {
  int64_t router = -1;             // (E, d)
  int64_t bias = -1;               // (E) buffer
  int64_t loads = -1;              // (E) step sum: tokens that chose each expert
  std::vector<int64_t> gate_proj;  // E of (expert_dim, d); fused with up_proj: (2 expert_dim, d)
  std::vector<int64_t> down_proj;  // E of (d, expert_dim)
  std::vector<Swiglu> shared;      // s

  static int64_t matrix_parameters(const ModelConfig& c) {
    return 3 * c.dim * c.expert_dim * (c.experts + c.shared_experts);
  }
  static double matrix_parameters_per_token(const ModelConfig& c) {
    return 3.0 * c.dim * c.expert_dim * (c.experts_per_token + c.shared_experts);
  }

  void add_parameters(TensorAdder layer, const ModelConfig& c) {
    TensorAdder add = layer.inside("mlp");
    router = add.parameter("gate.weight", {c.experts, c.dim}, Optimizer::adamw, Init::router);
    auto add_expert = [&](const std::string& kind, int64_t e) {
      Swiglu expert;
      expert.add_parameters(add.inside(kind).inside(std::to_string(e)), c.dim, c.expert_dim);
      return expert;
    };
    for (int64_t e = 0; e < c.experts; e++) {
      const Swiglu expert = add_expert("experts", e);
      gate_proj.push_back(expert.gate_proj);
      down_proj.push_back(expert.down_proj);
    }
    for (int64_t e = 0; e < c.shared_experts; e++) shared.push_back(add_expert("shared_experts", e));
    bias = add.buffer("gate.e_score_correction_bias", {c.experts});
    loads = add.step_sum(c.experts);
  }

  // Behind a training step.
  template <class Backend>
  void close_step(const LayerContext<Backend>& ctx, const ExpertLoads&) const {
    ctx.be.expert_bias_update(ctx.buffers + bias, ctx.step_sums + loads,
                              static_cast<float>(ctx.config.expert_bias_rate), ctx.config.experts);
  }

  template <class floatX>
  struct Saved {
    ExpertGroups groups;
    float* score = nullptr;     // (n, E)
    float* weight = nullptr;    // (n, E) 0 where not chosen
    floatX* gate_up = nullptr;  // (pairs, 2 expert_dim)
    floatX* act = nullptr;      // (pairs, expert_dim)
    std::vector<Swiglu::Saved<floatX>> shared;
  };

  template <class floatX>
  Saved<floatX> carve_saved(Arena& arena, const ModelConfig& c, int64_t n) const {
    const int64_t pairs = n * c.experts_per_token;
    Saved<floatX> a;
    a.groups = ExpertGroups::carve(arena, n, c.experts, pairs);
    a.score = arena.take<float>(n * c.experts);
    a.weight = arena.take<float>(n * c.experts);
    a.gate_up = arena.take<floatX>(pairs * 2 * c.expert_dim);
    a.act = arena.take<floatX>(pairs * c.expert_dim);
    for (const Swiglu& expert : shared) a.shared.push_back(expert.carve_saved<floatX>(arena, c, n));
    return a;
  }

  template <class floatX>
  struct Scratch {
    ExpertScratch<floatX> experts;
    floatX* dgate_up = nullptr;  // (pairs, 2 expert_dim)
    float* dlogit = nullptr;     // (n, E)
    Swiglu::Scratch<floatX> shared;
  };

  template <class floatX>
  Scratch<floatX> carve_scratch(Arena& arena, const ModelConfig& c, int64_t n, bool training) const {
    const int64_t pairs = n * c.experts_per_token;
    Scratch<floatX> s;
    s.experts = ExpertScratch<floatX>::carve(arena, c, n, pairs, training);
    if (!training) return s;
    s.dgate_up = arena.take<floatX>(pairs * 2 * c.expert_dim);
    s.dlogit = arena.take<float>(n * c.experts);
    if (!shared.empty()) s.shared = shared[0].carve_scratch<floatX>(arena, c, n, training);
    return s;
  }

  // From inp (n, d).
  template <class Backend, class floatX>
  void activate(const LayerContext<Backend>& ctx, Saved<floatX>& a, const Scratch<floatX>& s,
                const floatX* inp, int64_t n) const {
    const int64_t d = ctx.config.dim, E = ctx.config.experts, width = ctx.config.expert_dim;
    Backend& be = ctx.be;
    ExpertGroups& groups = a.groups;
    be.matmul_fp32_forward(a.score, inp, ctx.weight(router), n, d, E);
    be.moe_route_forward(groups.chosen, a.weight, a.score, ctx.buffers + bias, n, E,
                         ctx.config.experts_per_token);
    groups.group(ctx, n, E, n * ctx.config.experts_per_token, loads);
    groups.expand_forward(ctx, s.experts, a.gate_up, inp, gate_proj, 2 * width);
    be.swiglu_forward(a.act, a.gate_up, groups.pairs, width);
    for (size_t e = 0; e < shared.size(); e++) shared[e].activate(ctx, a.shared[e], s.shared, inp, n);
  }

  // out (n, d) += the experts' outputs
  template <class Backend, class floatX>
  void project(const LayerContext<Backend>& ctx, const Saved<floatX>& a, const Scratch<floatX>& s, float* out,
               int64_t n) const {
    a.groups.project_forward(ctx, s.experts, out, a.act, a.weight, down_proj, n);
    for (size_t e = 0; e < shared.size(); e++) shared[e].project(ctx, a.shared[e], s.shared, out, n);
  }

  // From dout (n, d) to dinp (n, d) and the gradients of the matrices and the router; none through the
  // choice.
  template <class Backend, class floatX>
  void backward(const LayerContext<Backend>& ctx, const Saved<floatX>& a, const Scratch<floatX>& s,
                Gradient mode, floatX* dinp, const floatX* dout, const floatX* inp, int64_t n) const {
    const int64_t d = ctx.config.dim, E = ctx.config.experts, width = ctx.config.expert_dim;
    Backend& be = ctx.be;
    const ExpertGroups& groups = a.groups;
    groups.project_backward(ctx, s.experts, dout, a.act, a.weight, down_proj, n);
    be.swiglu_backward(s.dgate_up, s.experts.dact, a.gate_up, groups.pairs, width);
    groups.expand_backward(ctx, s.experts, s.dgate_up, inp, gate_proj, 2 * width);

    be.moe_route_backward(s.dlogit, s.experts.dweight, a.weight, a.score, groups.chosen, n, E);
    ctx.matmul_fp32_backward(mode, dinp, router, s.dlogit, inp, n, d, E);
    be.sum_pairs_add(dinp, s.experts.dgrouped, groups.slot, groups.slot_offsets, n, d);
    for (size_t e = 0; e < shared.size(); e++)
      shared[e].backward(ctx, a.shared[e], s.shared, Gradient::add, dinp, dout, inp, n);
  }
};

}  // namespace xmod

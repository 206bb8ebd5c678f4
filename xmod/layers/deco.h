// DECO's experts (the paper's neighbour): a ReLU decides which experts a token goes to, and how many. The
// routed experts are not gated; one shared SwiGLU takes every token.
//
//   p = ReLU(W_r x), active where p > 0
//   u = W_up x over the rows of all experts, c = u - mean(u)
//   a_e = silu( g * c_e / sqrt(mean(c_e^2) + eps) )                               NormSiLU
//   y = sum over active e of scale_e p_e W_down,e a_e + shared(x)
//
// The mean runs over every expert, active or not: it equals (the mean row of W_up) x, so that nothing has to
// be computed for the others. Training adds to the loss the entropy of p / (sum p + 1e-5), with a weight
// lambda that grows while too many pairs are active (close_step).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "xmod/layers/experts.h"
#include "xmod/layers/swiglu.h"

namespace xmod {

struct Deco {
  int64_t router = -1;             // (E, d)
  int64_t scale = -1;              // (E)
  int64_t norm = -1;               // (expert_dim) g
  int64_t lambda = -1;             // (1) buffer: weight of the entropy, the same in every layer
  int64_t loads = -1;              // (E) step sum: tokens for which each expert is active
  std::vector<int64_t> up_proj;    // E of (expert_dim, d), without gaps: also one (E*expert_dim, d)
  std::vector<int64_t> down_proj;  // E of (d, expert_dim)
  Swiglu shared;                   // shared_experts * expert_dim wide; 0: none

  static int64_t matrix_parameters(const ModelConfig& c) {
    return c.dim * c.expert_dim * (2 * c.experts + 3 * c.shared_experts);
  }
  // With the share of active experts that training aims at.
  static double matrix_parameters_per_token(const ModelConfig& c) {
    return c.dim * c.expert_dim * (2.0 * c.experts * c.active_ratio + 3.0 * c.shared_experts);
  }

  void add_parameters(TensorAdder layer, const ModelConfig& c) {
    TensorAdder add = layer.inside("mlp");
    router = add.parameter("gate.weight", {c.experts, c.dim}, Optimizer::adamw, Init::relu_router);
    scale = add.parameter("expert_scale", {c.experts}, Optimizer::adamw, Init::expert_scale);
    norm = add.norm("expert_norm", c.expert_dim);
    for (int64_t e = 0; e < c.experts; e++) {
      // The mean of all their rows is taken in fp32.
      up_proj.push_back(expert(add, e).matrix("up_proj", c.expert_dim, c.dim, Init::matrix, /*fused=*/e > 0,
                                              Read::in_fp32));
    }
    for (int64_t e = 0; e < c.experts; e++) {
      down_proj.push_back(expert(add, e).matrix("down_proj", c.dim, c.expert_dim, Init::residual_matrix));
    }
    if (c.shared_experts > 0)
      shared.add_parameters(add.inside("shared_expert"), c.dim, c.shared_experts * c.expert_dim);
    lambda = add.buffer("entropy_weight", {1}, static_cast<float>(c.entropy_weight));
    loads = add.step_sum(c.experts);
  }

  // Behind a training step: the pairs of all layers count.
  template <class Backend>
  void close_step(const LayerContext<Backend>& ctx, const ExpertLoads& loads) const {
    const ModelConfig& c = ctx.config;
    const bool too_many = loads.active_ratio > c.active_ratio;
    const double factor = too_many ? c.entropy_growth : 1 / c.entropy_growth;
    ctx.be.entropy_weight_update(ctx.buffers + lambda, static_cast<float>(factor),
                                 static_cast<float>(c.entropy_weight));
  }

  template <class floatX>
  struct Saved {
    ExpertGroups groups;
    float* logit = nullptr;    // (n, E)
    float* weight = nullptr;   // (n, E) scale * p
    float* entropy = nullptr;  // (n)
    floatX* up = nullptr;      // (pairs, expert_dim) u of the active pairs
    float* mean = nullptr;     // (n) mean of u over all experts
    float* rstd = nullptr;     // (pairs)
    floatX* act = nullptr;     // (pairs, expert_dim)
    Swiglu::Saved<floatX> shared;
  };

  // Any number of pairs may be active.
  template <class floatX>
  Saved<floatX> carve_saved(Arena& arena, const ModelConfig& c, int64_t n) const {
    const int64_t pairs = n * c.experts;
    Saved<floatX> a;
    a.groups = ExpertGroups::carve(arena, n, c.experts, pairs);
    a.logit = arena.take<float>(n * c.experts);
    a.weight = arena.take<float>(n * c.experts);
    a.entropy = arena.take<float>(n);
    a.up = arena.take<floatX>(pairs * c.expert_dim);
    a.mean = arena.take<float>(n);
    a.rstd = arena.take<float>(pairs);
    a.act = arena.take<floatX>(pairs * c.expert_dim);
    if (c.shared_experts > 0) a.shared = shared.carve_saved<floatX>(arena, c, n);
    return a;
  }

  template <class floatX>
  struct Scratch {
    ExpertScratch<floatX> experts;
    float* mean_row = nullptr;    // (d) mean row of W_up
    floatX* dup = nullptr;        // (pairs, expert_dim)
    float* dpair_mean = nullptr;  // (pairs) gradient of the token's mean from each pair
    float* dmean = nullptr;       // (n)
    float* dmean_row = nullptr;   // (d)
    float* dlogit = nullptr;      // (n, E)
    Swiglu::Scratch<floatX> shared;
  };

  template <class floatX>
  Scratch<floatX> carve_scratch(Arena& arena, const ModelConfig& c, int64_t n, bool training) const {
    const int64_t pairs = n * c.experts;
    Scratch<floatX> s;
    s.experts = ExpertScratch<floatX>::carve(arena, c, n, pairs, training);
    s.mean_row = arena.take<float>(c.dim);
    if (!training) return s;
    s.dup = arena.take<floatX>(pairs * c.expert_dim);
    s.dpair_mean = arena.take<float>(pairs);
    s.dmean = arena.take<float>(n);
    s.dmean_row = arena.take<float>(c.dim);
    s.dlogit = arena.take<float>(n * c.experts);
    if (c.shared_experts > 0) s.shared = shared.carve_scratch<floatX>(arena, c, n, training);
    return s;
  }

  // From inp (n, d).
  template <class Backend, class floatX>
  void activate(const LayerContext<Backend>& ctx, Saved<floatX>& a, const Scratch<floatX>& s,
                const floatX* inp, int64_t n) const {
    const int64_t d = ctx.config.dim, E = ctx.config.experts, width = ctx.config.expert_dim;
    Backend& be = ctx.be;
    ExpertGroups& groups = a.groups;
    be.matmul_fp32_forward(a.logit, inp, ctx.weight(router), n, d, E);
    be.deco_route_forward(groups.chosen, a.weight, a.entropy, a.logit, ctx.weight(scale), n, E);
    groups.group(ctx, n, E, n * E, loads);

    be.column_mean(s.mean_row, ctx.weight(up_proj[0]), E * width, d);
    be.matmul_fp32_forward(a.mean, inp, s.mean_row, n, d, 1);
    groups.expand_forward(ctx, s.experts, a.up, inp, up_proj, width);
    be.norm_silu_forward(a.act, a.rstd, a.up, a.mean, ctx.weight(norm), groups.row, groups.pairs, width,
                         ctx.eps());
    if (shared.width > 0) shared.activate(ctx, a.shared, s.shared, inp, n);
  }

  // out (n, d) += the experts' outputs
  template <class Backend, class floatX>
  void project(const LayerContext<Backend>& ctx, const Saved<floatX>& a, const Scratch<floatX>& s, float* out,
               int64_t n) const {
    a.groups.project_forward(ctx, s.experts, out, a.act, a.weight, down_proj, n);
    if (shared.width > 0) shared.project(ctx, a.shared, s.shared, out, n);
  }

  // From dout (n, d) and the entropy to dinp (n, d) and the gradients of every parameter.
  template <class Backend, class floatX>
  void backward(const LayerContext<Backend>& ctx, const Saved<floatX>& a, const Scratch<floatX>& s,
                Gradient mode, floatX* dinp, const floatX* dout, const floatX* inp, int64_t n) const {
    const int64_t d = ctx.config.dim, E = ctx.config.experts, width = ctx.config.expert_dim;
    Backend& be = ctx.be;
    const ExpertGroups& groups = a.groups;
    groups.project_backward(ctx, s.experts, dout, a.act, a.weight, down_proj, n);
    be.norm_silu_backward(s.dup, s.dpair_mean, ctx.gradient(norm), s.experts.dact, a.up, a.mean, a.rstd,
                          ctx.weight(norm), groups.row, groups.pairs, width);
    groups.expand_backward(ctx, s.experts, s.dup, inp, up_proj, width);

    be.deco_route_backward(s.dlogit, ctx.gradient(scale), s.experts.dweight, a.logit, ctx.weight(scale),
                           ctx.buffers + lambda, ctx.dtoken / static_cast<float>(ctx.config.active_layers), n,
                           E);
    ctx.matmul_fp32_backward(mode, dinp, router, s.dlogit, inp, n, d, E);
    be.sum_pairs_add(dinp, s.experts.dgrouped, groups.slot, groups.slot_offsets, n, d);
    mean_backward(ctx, s, groups, dinp, inp, n);
    if (shared.width > 0) shared.backward(ctx, a.shared, s.shared, Gradient::add, dinp, dout, inp, n);
  }

 private:
  static TensorAdder expert(const TensorAdder& add, int64_t e) {
    return add.inside("experts").inside(std::to_string(e));
  }

  // Through the mean that every pair subtracts: to the input, and in equal parts to all rows of W_up.
  template <class Backend, class floatX>
  void mean_backward(const LayerContext<Backend>& ctx, const Scratch<floatX>& s, const ExpertGroups& groups,
                     floatX* dinp, const floatX* inp, int64_t n) const {
    const int64_t d = ctx.config.dim, rows = ctx.config.experts * ctx.config.expert_dim;
    Backend& be = ctx.be;
    be.zero(s.dmean, n);
    be.sum_pairs_add(s.dmean, s.dpair_mean, groups.slot, groups.slot_offsets, n, 1);
    be.column_mean(s.mean_row, ctx.weight(up_proj[0]), rows, d);
    be.zero(s.dmean_row, d);
    be.matmul_fp32_add_backward(dinp, s.dmean_row, s.dmean, inp, s.mean_row, n, d, 1);
    be.column_mean_backward(ctx.gradient(up_proj[0]), s.dmean_row, rows, d);
  }
};

}  // namespace xmod

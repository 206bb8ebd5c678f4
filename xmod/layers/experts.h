// What layers with experts share: tokens grouped by expert, so that each expert is one matrix product.
#pragma once

#include <cstdint>
#include <vector>

#include "xmod/layers/context.h"

namespace xmod {

// Around the experts' matrices, shared by all layers: pairs of (token, expert) in the order of the experts.
template <class floatX>
struct ExpertScratch {
  floatX* grouped = nullptr;    // (pairs, d) inputs, then outputs, of the experts
  floatX* weighted = nullptr;   // (pairs, expert_dim) weight * act
  floatX* dgrouped = nullptr;   // (pairs, d)
  floatX* dweighted = nullptr;  // (pairs, expert_dim)
  floatX* dact = nullptr;       // (pairs, expert_dim)
  float* dweight = nullptr;     // (n, E)

  static ExpertScratch carve(Arena& arena, const ModelConfig& c, int64_t n, int64_t most_pairs,
                             bool training) {
    ExpertScratch s;
    s.grouped = arena.take<floatX>(most_pairs * c.dim);
    s.weighted = arena.take<floatX>(most_pairs * c.expert_dim);
    if (!training) return s;
    s.dgrouped = arena.take<floatX>(most_pairs * c.dim);
    s.dweighted = arena.take<floatX>(most_pairs * c.expert_dim);
    s.dact = arena.take<floatX>(most_pairs * c.expert_dim);
    s.dweight = arena.take<float>(n * c.experts);
    return s;
  }
};

// The (token, expert) pairs of a layer, in two orders: by expert, where the products run, and by token, where
// their results are summed.
struct ExpertGroups {
  uint8_t* chosen = nullptr;        // (n, E) 1 where the token goes to the expert
  int32_t* row = nullptr;           // (pairs) the token of each grouped row
  int32_t* expert = nullptr;        // (pairs) its expert
  int32_t* slot = nullptr;          // (pairs) the grouped row of each pair, by token, then expert
  int64_t* slot_offsets = nullptr;  // (n+1) token i owns slot[slot_offsets[i] .. slot_offsets[i+1])
  int64_t* offsets = nullptr;       // (E+1) expert e owns grouped rows offsets[e] .. offsets[e+1]
  int64_t pairs = 0;                // at least offsets[E]: what group_by_expert returned

  static ExpertGroups carve(Arena& arena, int64_t n, int64_t E, int64_t most_pairs) {
    ExpertGroups g;
    g.chosen = arena.take<uint8_t>(n * E);
    g.row = arena.take<int32_t>(most_pairs);
    g.expert = arena.take<int32_t>(most_pairs);
    g.slot = arena.take<int32_t>(most_pairs);
    g.slot_offsets = arena.take<int64_t>(n + 1);
    g.offsets = arena.take<int64_t>(E + 1);
    return g;
  }

  // From `chosen`, at most most_pairs of them; notes the loads of a training step.
  template <class Backend>
  void group(const LayerContext<Backend>& ctx, int64_t n, int64_t E, int64_t most_pairs, int64_t loads) {
    pairs = ctx.be.group_by_expert(row, expert, slot, slot_offsets, offsets, chosen, n, E, most_pairs);
    if (ctx.step_sums) ctx.be.add_expert_loads(ctx.step_sums + loads, offsets, E);
  }

  // out (pairs, OC) = inp (pairs, C) W_e^T, each group by its expert's matrix (OC, C)
  template <class Backend, class floatX>
  void matmul_forward(const LayerContext<Backend>& ctx, floatX* out, const floatX* inp,
                      const std::vector<int64_t>& matrices, int64_t C, int64_t OC) const {
    ctx.be.expert_matmul_forward(out, inp, ctx.weight(matrices[0]), stride_of(matrices), offsets, pairs,
                                 ctx.config.experts, C, OC);
  }

  // dinp (pairs, C) and the gradient of every expert's matrix
  template <class Backend, class floatX>
  void matmul_backward(const LayerContext<Backend>& ctx, floatX* dinp, const std::vector<int64_t>& matrices,
                       const floatX* dout, const floatX* inp, int64_t C, int64_t OC) const {
    ctx.be.expert_matmul_backward(dinp, ctx.gradient(matrices[0]), dout, inp, ctx.weight(matrices[0]),
                                  stride_of(matrices), offsets, pairs, ctx.config.experts, C, OC);
  }

  // out (pairs, OC) = W_up,e inp of each pair's token, inp (n, d)
  template <class Backend, class floatX>
  void expand_forward(const LayerContext<Backend>& ctx, const ExpertScratch<floatX>& s, floatX* out,
                      const floatX* inp, const std::vector<int64_t>& up_proj, int64_t OC) const {
    const int64_t d = ctx.config.dim;
    ctx.be.gather(s.grouped, inp, row, pairs, d);
    matmul_forward(ctx, out, s.grouped, up_proj, d, OC);
  }

  // From dout (pairs, OC): s.dgrouped, the gradient of each pair's input, and the gradients of the matrices.
  template <class Backend, class floatX>
  void expand_backward(const LayerContext<Backend>& ctx, const ExpertScratch<floatX>& s, const floatX* dout,
                       const floatX* inp, const std::vector<int64_t>& up_proj, int64_t OC) const {
    const int64_t d = ctx.config.dim;
    ctx.be.gather(s.grouped, inp, row, pairs, d);
    matmul_backward(ctx, s.dgrouped, up_proj, dout, s.grouped, d, OC);
  }

  // out (n, d) += the sum over a token's pairs of W_down,e (weight * act), act (pairs, expert_dim), weight
  // (n, E)
  template <class Backend, class floatX>
  void project_forward(const LayerContext<Backend>& ctx, const ExpertScratch<floatX>& s, float* out,
                       const floatX* act, const float* weight, const std::vector<int64_t>& down_proj,
                       int64_t n) const {
    const int64_t d = ctx.config.dim, E = ctx.config.experts, width = ctx.config.expert_dim;
    ctx.be.expert_weight_forward(s.weighted, act, weight, row, expert, pairs, E, width);
    matmul_forward(ctx, s.grouped, s.weighted, down_proj, width, d);
    ctx.be.sum_pairs_add(out, s.grouped, slot, slot_offsets, n, d);
  }

  // From dout (n, d): s.dact, s.dweight and the gradients of the matrices.
  template <class Backend, class floatX>
  void project_backward(const LayerContext<Backend>& ctx, const ExpertScratch<floatX>& s, const floatX* dout,
                        const floatX* act, const float* weight, const std::vector<int64_t>& down_proj,
                        int64_t n) const {
    const int64_t d = ctx.config.dim, E = ctx.config.experts, width = ctx.config.expert_dim;
    ctx.be.expert_weight_forward(s.weighted, act, weight, row, expert, pairs, E, width);
    ctx.be.gather(s.dgrouped, dout, row, pairs, d);
    matmul_backward(ctx, s.dweighted, down_proj, s.dgrouped, s.weighted, width, d);
    ctx.be.expert_weight_backward(s.dact, s.dweight, s.dweighted, act, weight, row, expert, pairs, n, E,
                                  width);
  }

 private:
  // The experts of a layer are added to the parameter table one like the other: their matrices lie evenly.
  static int64_t stride_of(const std::vector<int64_t>& matrices) {
    return matrices.size() > 1 ? matrices[1] - matrices[0] : 0;
  }
};

}  // namespace xmod

// The dense feed-forward network: FFN(x) = W_down( silu(W_gate x) * (W_up x) ).
#pragma once

#include <cstdint>

#include "xmod/layers/context.h"
#include "xmod/layers/expert_loads.h"
#include "xmod/parameter_table.h"

namespace xmod {

struct Swiglu {
  int64_t width = 0;       // F
  int64_t gate_proj = -1;  // (F, d); fused with up_proj: (2F, d)
  int64_t down_proj = -1;  // (d, F)

  static int64_t matrix_parameters(const ModelConfig& c) { return 3 * c.dim * c.ffn_dim; }
  static double matrix_parameters_per_token(const ModelConfig& c) { return 3.0 * c.dim * c.ffn_dim; }

  void add_parameters(TensorAdder layer, const ModelConfig& c) {
    add_parameters(layer.inside("mlp"), c.dim, c.ffn_dim);
  }

  void add_parameters(TensorAdder add, int64_t dim, int64_t hidden) {
    width = hidden;
    gate_proj = add.matrix("gate_proj", width, dim);
    add.matrix("up_proj", width, dim, Init::matrix, true);
    down_proj = add.matrix("down_proj", dim, width, Init::residual_matrix);
  }

  template <class Backend>
  void close_step(const LayerContext<Backend>&, const ExpertLoads&) const {}

  template <class floatX>
  struct Saved {
    floatX* gate_up = nullptr;  // (n, 2F)
    floatX* act = nullptr;      // (n, F) silu(gate) * up
  };

  template <class floatX>
  Saved<floatX> carve_saved(Arena& arena, const ModelConfig&, int64_t n) const {
    return {arena.take<floatX>(n * 2 * width), arena.take<floatX>(n * width)};
  }

  template <class floatX>
  struct Scratch {
    floatX* dact = nullptr;      // (n, F)
    floatX* dgate_up = nullptr;  // (n, 2F)
  };

  template <class floatX>
  Scratch<floatX> carve_scratch(Arena& arena, const ModelConfig&, int64_t n, bool training) const {
    if (!training) return {};
    return {arena.take<floatX>(n * width), arena.take<floatX>(n * 2 * width)};
  }

  // From inp (n, d).
  template <class Backend, class floatX>
  void activate(const LayerContext<Backend>& ctx, Saved<floatX>& a, const Scratch<floatX>&, const floatX* inp,
                int64_t n) const {
    ctx.be.matmul_forward(a.gate_up, inp, ctx.weight(gate_proj), n, ctx.config.dim, 2 * width);
    ctx.be.swiglu_forward(a.act, a.gate_up, n, width);
  }

  // out (n, d) += W_down act
  template <class Backend, class floatX>
  void project(const LayerContext<Backend>& ctx, const Saved<floatX>& a, const Scratch<floatX>&, float* out,
               int64_t n) const {
    ctx.be.matmul_add_forward(out, a.act, ctx.weight(down_proj), n, width, ctx.config.dim);
  }

  // From dout (n, d) to dinp (n, d) and the gradients of the matrices.
  template <class Backend, class floatX>
  void backward(const LayerContext<Backend>& ctx, const Saved<floatX>& a, const Scratch<floatX>& g,
                Gradient mode, floatX* dinp, const floatX* dout, const floatX* inp, int64_t n) const {
    const int64_t d = ctx.config.dim;
    ctx.matmul_backward(Gradient::write, g.dact, down_proj, dout, a.act, n, width, d);
    ctx.be.swiglu_backward(g.dgate_up, g.dact, a.gate_up, n, width);
    ctx.matmul_backward(mode, dinp, gate_proj, g.dgate_up, inp, n, d, 2 * width);
  }
};

}  // namespace xmod

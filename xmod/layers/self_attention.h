// Attention of a set of rows among themselves: all tokens of a sequence in a dense layer, the selected ones
// in a sparse layer. Causal, grouped key/value heads, RMSNorm on every query and key head before RoPE at the
// tokens' original positions.
#pragma once

#include <cstdint>

#include "xmod/layers/context.h"
#include "xmod/parameter_table.h"

namespace xmod {

// The tensors of an attention and its last product, whatever its rows.
struct AttentionParameters {
  int64_t input_layernorm = -1;  // (d)
  int64_t q_proj = -1;           // (H*hd, d); fused with k_proj and v_proj: (qkv_dim, d)
  int64_t k_proj = -1;           // (KV*hd, d); fused with v_proj: (2*KV*hd, d)
  int64_t q_norm = -1;           // (hd)
  int64_t k_norm = -1;           // (hd)
  int64_t o_proj = -1;           // (d, H*hd)

  static int64_t matrix_parameters(const ModelConfig& c) { return c.dim * (c.qkv_dim() + c.q_dim()); }

  void add_parameters(TensorAdder layer, const ModelConfig& c) {
    input_layernorm = layer.norm("input_layernorm", c.dim);
    TensorAdder add = layer.inside("self_attn");
    q_proj = add.matrix("q_proj", c.q_dim(), c.dim);
    k_proj = add.matrix("k_proj", c.kv_dim(), c.dim, Init::matrix, true);
    add.matrix("v_proj", c.kv_dim(), c.dim, Init::matrix, true);
    q_norm = add.norm("q_norm", c.head_dim);
    k_norm = add.norm("k_norm", c.head_dim);
    o_proj = add.matrix("o_proj", c.dim, c.q_dim(), Init::residual_matrix);
  }

  // delta (n, d) = W_o attn
  template <class Backend, class Saved>
  void project(const LayerContext<Backend>& ctx, const Saved& a, float* delta, const Rows& rows) const {
    const ModelConfig& c = ctx.config;
    ctx.be.matmul_forward(delta, a.attn, ctx.weight(o_proj), rows.n, c.q_dim(), c.dim);
  }
};

struct SelfAttention : AttentionParameters {
  static double matrix_parameters_per_token(const ModelConfig& c, double share) {
    return static_cast<double>(matrix_parameters(c)) * share;
  }
  static double score_share(double share) { return share * share; }  // query-key pairs, of T^2
  static double cache_share(double share) { return share; }          // tokens in the key/value cache

  template <class floatX>
  struct Saved {
    floatX* norm = nullptr;    // (n, d) RMSNorm(x)
    float* rstd = nullptr;     // (n)
    floatX* qkv = nullptr;     // (n, qkv_dim) projections; v is used from here
    floatX* q = nullptr;       // (n, H*hd) after QK-norm and RoPE
    floatX* k = nullptr;       // (n, KV*hd)
    float* qk_rstd = nullptr;  // (n, H+KV)
    floatX* attn = nullptr;    // (n, H*hd)
    float* lse = nullptr;      // (n, H) log-sum-exp of the scaled scores
  };

  // n: the layer's rows; of `all` tokens.
  template <class floatX>
  Saved<floatX> carve_saved(Arena& arena, const ModelConfig& c, int64_t n, int64_t /*all*/) const {
    Saved<floatX> a;
    a.norm = arena.take<floatX>(n * c.dim);
    a.rstd = arena.take<float>(n);
    a.qkv = arena.take<floatX>(n * c.qkv_dim());
    a.q = arena.take<floatX>(n * c.q_dim());
    a.k = arena.take<floatX>(n * c.kv_dim());
    a.qk_rstd = arena.take<float>(n * (c.heads + c.kv_heads));
    a.attn = arena.take<floatX>(n * c.q_dim());
    a.lse = arena.take<float>(n * c.heads);
    return a;
  }

  template <class floatX>
  struct Scratch {
    floatX* dnorm = nullptr;  // (n, d)
    floatX* dattn = nullptr;  // (n, H*hd)
    floatX* dq = nullptr;     // (n, H*hd)
    floatX* dk = nullptr;     // (n, KV*hd)
    floatX* dqkv = nullptr;   // (n, qkv_dim)
  };

  template <class floatX>
  Scratch<floatX> carve_scratch(Arena& arena, const ModelConfig& c, int64_t n, bool training) const {
    if (!training) return {};
    return {arena.take<floatX>(n * c.dim), arena.take<floatX>(n * c.q_dim()),
            arena.take<floatX>(n * c.q_dim()), arena.take<floatX>(n * c.kv_dim()),
            arena.take<floatX>(n * c.qkv_dim())};
  }

  // x (n, d) = the rows of the stream, attended to each other.
  template <class Backend, class floatX>
  void attend(const LayerContext<Backend>& ctx, Saved<floatX>& a, float* x, const Rows& rows) const {
    const ModelConfig& c = ctx.config;
    Backend& be = ctx.be;
    be.gather_rmsnorm_forward(x, a.norm, a.rstd, ctx.stream, ctx.weight(input_layernorm), rows.row, rows.n,
                              c.dim, ctx.eps());
    be.matmul_forward(a.qkv, a.norm, ctx.weight(q_proj), rows.n, c.dim, c.qkv_dim());
    be.qk_norm_rope_forward(a.q, a.k, a.qk_rstd, a.qkv, ctx.weight(q_norm), ctx.weight(k_norm), ctx.rope,
                            rows.position, rows.n, c.seq_len, c.heads, c.kv_heads, c.head_dim, ctx.eps());
    const KeysValues<floatX> kv = ctx.keys_values(a.k, values(a.qkv, c), c.qkv_dim(), rows);
    be.attention_forward(a.attn, a.lse, a.q, kv.k, kv.v, kv.v_stride, kv.own_key, rows.offsets, kv.offsets,
                         rows.n, ctx.B, c.heads, c.kv_heads, c.head_dim);
  }

  // From ddelta (n, d): the gradients of the parameters; dx (n, d) += d(x).
  template <class Backend, class floatX>
  void backward(const LayerContext<Backend>& ctx, const Saved<floatX>& a, const Scratch<floatX>& g, float* dx,
                const floatX* ddelta, const float* x, const Rows& rows) const {
    const ModelConfig& c = ctx.config;
    Backend& be = ctx.be;
    ctx.matmul_backward(Gradient::write, g.dattn, o_proj, ddelta, a.attn, rows.n, c.q_dim(), c.dim);
    be.attention_backward(g.dq, g.dk, values(g.dqkv, c), c.qkv_dim(), g.dattn, a.q, a.k, values(a.qkv, c),
                          c.qkv_dim(), a.attn, a.lse, nullptr, rows.offsets, rows.offsets, rows.n, rows.n,
                          ctx.B, c.heads, c.kv_heads, c.head_dim);
    be.qk_norm_rope_backward(g.dqkv, ctx.gradient(q_norm), ctx.gradient(k_norm), g.dq, g.dk, a.qkv,
                             ctx.weight(q_norm), ctx.weight(k_norm), a.qk_rstd, ctx.rope, rows.position,
                             rows.n, c.seq_len, c.heads, c.kv_heads, c.head_dim);
    ctx.matmul_backward(Gradient::write, g.dnorm, q_proj, g.dqkv, a.norm, rows.n, c.dim, c.qkv_dim());
    be.rmsnorm_add_backward(dx, ctx.gradient(input_layernorm), g.dnorm, x, ctx.weight(input_layernorm),
                            a.rstd, rows.n, c.dim);
  }

 private:
  // Where v begins in rows of q, k and v.
  template <class floatX>
  static floatX* values(floatX* qkv, const ModelConfig& c) {
    return qkv + c.q_dim() + c.kv_dim();
  }
};

}  // namespace xmod

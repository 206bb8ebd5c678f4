// Selected-Q/full-KV attention: keys and values of ALL tokens of the sequence, queries of the selected ones,
// each of which sees every key up to its own position.
#pragma once

#include <cstdint>

#include "xmod/layers/self_attention.h"

namespace xmod {

struct SelectedQAttention : AttentionParameters {
  static double matrix_parameters_per_token(const ModelConfig& c, double share) {
    return 2.0 * c.dim * c.kv_dim() + 2.0 * c.dim * c.q_dim() * share;
  }
  static double score_share(double share) { return share; }
  static double cache_share(double) { return 1; }

  template <class floatX>
  struct Saved {
    floatX* all_norm = nullptr;  // (B*T, d) RMSNorm of the stream before the layer
    float* all_rstd = nullptr;   // (B*T)
    floatX* kv = nullptr;        // (B*T, 2*KV*hd) projections; v is used from here
    floatX* k = nullptr;         // (B*T, KV*hd) after QK-norm and RoPE
    float* k_rstd = nullptr;     // (B*T, KV)
    floatX* norm = nullptr;      // (n, d) the selected rows of all_norm
    floatX* q_inp = nullptr;     // (n, H*hd) projection
    floatX* q = nullptr;         // (n, H*hd) after QK-norm and RoPE
    float* q_rstd = nullptr;     // (n, H)
    floatX* attn = nullptr;      // (n, H*hd)
    float* lse = nullptr;        // (n, H)
    int32_t* own_key = nullptr;  // (n) with a cache: where each query's own key lies
  };

  template <class floatX>
  Saved<floatX> carve_saved(Arena& arena, const ModelConfig& c, int64_t n, int64_t all) const {
    Saved<floatX> a;
    a.all_norm = arena.take<floatX>(all * c.dim);
    a.all_rstd = arena.take<float>(all);
    a.kv = arena.take<floatX>(all * 2 * c.kv_dim());
    a.k = arena.take<floatX>(all * c.kv_dim());
    a.k_rstd = arena.take<float>(all * c.kv_heads);
    a.norm = arena.take<floatX>(n * c.dim);
    a.q_inp = arena.take<floatX>(n * c.q_dim());
    a.q = arena.take<floatX>(n * c.q_dim());
    a.q_rstd = arena.take<float>(n * c.heads);
    a.attn = arena.take<floatX>(n * c.q_dim());
    a.lse = arena.take<float>(n * c.heads);
    a.own_key = arena.take<int32_t>(n);
    return a;
  }

  template <class floatX>
  struct Scratch {
    floatX* dattn = nullptr;      // (n, H*hd)
    floatX* dq = nullptr;         // (n, H*hd)
    floatX* dq_inp = nullptr;     // (n, H*hd)
    floatX* dnorm = nullptr;      // (n, d)
    floatX* dk = nullptr;         // (B*T, KV*hd)
    floatX* dkv = nullptr;        // (B*T, 2*KV*hd)
    floatX* dall_norm = nullptr;  // (B*T, d)
  };

  // For n up to all tokens.
  template <class floatX>
  Scratch<floatX> carve_scratch(Arena& arena, const ModelConfig& c, int64_t n, bool training) const {
    if (!training) return {};
    return {arena.take<floatX>(n * c.q_dim()),  arena.take<floatX>(n * c.q_dim()),
            arena.take<floatX>(n * c.q_dim()),  arena.take<floatX>(n * c.dim),
            arena.take<floatX>(n * c.kv_dim()), arena.take<floatX>(n * 2 * c.kv_dim()),
            arena.take<floatX>(n * c.dim)};
  }

  // x (n, d) = the rows of the stream, attended to all rows of it.
  template <class Backend, class floatX>
  void attend(const LayerContext<Backend>& ctx, Saved<floatX>& a, float* x, const Rows& rows) const {
    const ModelConfig& c = ctx.config;
    Backend& be = ctx.be;
    const Rows& all = ctx.all_rows;
    be.rmsnorm_forward(a.all_norm, a.all_rstd, ctx.stream, ctx.weight(input_layernorm), all.n, c.dim,
                       ctx.eps());
    be.matmul_forward(a.kv, a.all_norm, ctx.weight(k_proj), all.n, c.dim, 2 * c.kv_dim());
    be.qk_norm_rope_forward(nullptr, a.k, a.k_rstd, a.kv, nullptr, ctx.weight(k_norm), ctx.rope, all.position,
                            all.n, c.seq_len, 0, c.kv_heads, c.head_dim, ctx.eps());

    be.gather(x, ctx.stream, rows.row, rows.n, c.dim);
    be.gather(a.norm, a.all_norm, rows.row, rows.n, c.dim);
    be.matmul_forward(a.q_inp, a.norm, ctx.weight(q_proj), rows.n, c.dim, c.q_dim());
    be.qk_norm_rope_forward(a.q, nullptr, a.q_rstd, a.q_inp, ctx.weight(q_norm), nullptr, ctx.rope,
                            rows.position, rows.n, c.seq_len, c.heads, 0, c.head_dim, ctx.eps());

    const KeysValues<floatX> kv = ctx.keys_values(a.k, a.kv + c.kv_dim(), 2 * c.kv_dim(), all);
    const int32_t* own_key = rows.row;  // a row of the stream is also its key's
    if (kv.own_key) {
      be.gather_ints(a.own_key, kv.own_key, rows.row, rows.n);
      own_key = a.own_key;
    }
    be.attention_forward(a.attn, a.lse, a.q, kv.k, kv.v, kv.v_stride, own_key, rows.offsets, kv.offsets,
                         rows.n, ctx.B, c.heads, c.kv_heads, c.head_dim);
  }

  // From ddelta (n, d): the gradients of the parameters. What reaches x through the norm is added to the
  // gradient of the whole stream: keys and values come from every token.
  template <class Backend, class floatX>
  void backward(const LayerContext<Backend>& ctx, const Saved<floatX>& a, const Scratch<floatX>& g,
                float* /*dx*/, const floatX* ddelta, const float* /*x*/, const Rows& rows) const {
    const ModelConfig& c = ctx.config;
    Backend& be = ctx.be;
    const Rows& all = ctx.all_rows;
    ctx.matmul_backward(Gradient::write, g.dattn, o_proj, ddelta, a.attn, rows.n, c.q_dim(), c.dim);
    be.attention_backward(g.dq, g.dk, g.dkv + c.kv_dim(), 2 * c.kv_dim(), g.dattn, a.q, a.k,
                          a.kv + c.kv_dim(), 2 * c.kv_dim(), a.attn, a.lse, rows.row, rows.offsets,
                          all.offsets, rows.n, all.n, ctx.B, c.heads, c.kv_heads, c.head_dim);

    be.qk_norm_rope_backward(g.dq_inp, ctx.gradient(q_norm), nullptr, g.dq, nullptr, a.q_inp,
                             ctx.weight(q_norm), nullptr, a.q_rstd, ctx.rope, rows.position, rows.n,
                             c.seq_len, c.heads, 0, c.head_dim);
    ctx.matmul_backward(Gradient::write, g.dnorm, q_proj, g.dq_inp, a.norm, rows.n, c.dim, c.q_dim());

    be.qk_norm_rope_backward(g.dkv, nullptr, ctx.gradient(k_norm), nullptr, g.dk, a.kv, nullptr,
                             ctx.weight(k_norm), a.k_rstd, ctx.rope, all.position, all.n, c.seq_len, 0,
                             c.kv_heads, c.head_dim);
    ctx.matmul_backward(Gradient::write, g.dall_norm, k_proj, g.dkv, a.all_norm, all.n, c.dim,
                        2 * c.kv_dim());

    be.scatter_add(g.dall_norm, g.dnorm, rows.row, rows.n, c.dim);
    be.rmsnorm_add_backward(ctx.dstream, ctx.gradient(input_layernorm), g.dall_norm, ctx.stream,
                            ctx.weight(input_layernorm), a.all_rstd, all.n, c.dim);
  }
};

}  // namespace xmod

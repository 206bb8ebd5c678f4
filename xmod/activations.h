// Where every intermediate tensor lives: one arena, carved in the order of the passes. The same functions
// count the bytes (for `plan`, before anything is allocated) and hand out the pointers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "xmod_common.h"

namespace xmod {

// Hands out pieces of one allocation; with no base it only counts. Bytes are kept by group for the report.
class Arena {
 public:
  explicit Arena(void* base = nullptr) : base_(reinterpret_cast<uintptr_t>(base)) {}

  void group(const std::string& name) { groups_.emplace_back(name, 0); }

  template <class T>
  T* take(int64_t count) {
    const int64_t bytes = (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    const uintptr_t address = base_ + static_cast<uintptr_t>(used_);
    used_ += bytes;
    groups_.back().second += bytes;
    return reinterpret_cast<T*>(address);
  }

  int64_t used() const { return used_; }
  // The next pieces lie over the ones of the running group that were handed out behind `used`.
  void rewind(int64_t used) {
    groups_.back().second += used - used_;
    used_ = used;
  }
  const std::vector<std::pair<std::string, int64_t>>& groups() const { return groups_; }

 private:
  uintptr_t base_;
  int64_t used_ = 0;
  std::vector<std::pair<std::string, int64_t>> groups_;
};

// The rows of the residual stream (B*T, d) that a layer works on, in order.
struct Rows {
  int32_t* row = nullptr;      // (n) b*T + t, ascending
  int64_t* offsets = nullptr;  // (B+1) sequence b owns row[offsets[b] .. offsets[b+1])
  int64_t n = 0;
};

// What a layer keeps from its forward pass for its backward pass. n is B*T, or B*C in a sparse layer.
template <class floatX>
struct LayerActivations {
  Rows rows;
  float* x = nullptr;             // (n, d) the layer's rows of the residual stream
  floatX* attn_norm = nullptr;    // (n, d) RMSNorm(x)
  float* attn_rstd = nullptr;     // (n)
  floatX* qkv = nullptr;          // (n, qkv_dim) projections; v is used from here
  floatX* q = nullptr;            // (n, H*hd) after QK-norm and RoPE
  floatX* k = nullptr;            // (n, KV*hd)
  float* qk_rstd = nullptr;       // (n, H+KV)
  floatX* attn = nullptr;         // (n, H*hd)
  float* lse = nullptr;           // (n, H) log-sum-exp of the scaled scores
  float* h = nullptr;             // (n, d) x + attention
  floatX* ffn_norm = nullptr;     // (n, d) RMSNorm(h)
  float* ffn_rstd = nullptr;      // (n)
  floatX* gate_up = nullptr;      // (n, 2F)
  floatX* act = nullptr;          // (n, F) silu(gate) * up
  float* delta = nullptr;         // (n, d) D = attention + FFN; shared by all dense layers
  float* router_logit = nullptr;  // (n) s of the selected rows
};

// Gradients inside one layer; all layers share them.
template <class floatX>
struct LayerGradients {
  floatX* ddelta = nullptr;    // (n, d)
  float* dx = nullptr;         // (n, d)
  floatX* dnorm = nullptr;     // (n, d)
  floatX* dact = nullptr;      // (n, F)
  floatX* dgate_up = nullptr;  // (n, 2F)
  floatX* dattn = nullptr;     // (n, H*hd)
  floatX* dq = nullptr;        // (n, H*hd)
  floatX* dk = nullptr;        // (n, KV*hd)
  floatX* dqkv = nullptr;      // (n, qkv_dim)
  float* dlogit = nullptr;     // (n)
};

template <class floatX>
struct Activations {
  int32_t* tokens = nullptr;     // (n)
  int32_t* targets = nullptr;    // (n)
  float* stream = nullptr;       // (n, d) the residual stream, updated in place
  float* dstream = nullptr;      // (n, d) its gradient, walked back in place
  floatX* final_norm = nullptr;  // (n, d)
  float* final_rstd = nullptr;   // (n)
  floatX* dfinal = nullptr;      // (n, d)
  floatX* logits = nullptr;      // (logit_rows, V) of one chunk of rows, then their gradient
  int64_t logit_rows = 0;
  float* losses = nullptr;  // (n)

  int32_t* all_rows = nullptr;        // (n) 0, 1, 2, ...
  int64_t* all_offsets = nullptr;     // (B+1) 0, T, 2T, ...
  int64_t* topk_offsets = nullptr;    // (B+1) 0, C, 2C, ...
  float* score = nullptr;             // (n) router logits s of every token
  float* selection_score = nullptr;   // (n) u = s + token-choice bias
  int32_t* times_selected = nullptr;  // (n) c of the running interval
  float* kth_score = nullptr;         // (sparse layers, B) the C-th largest u

  std::vector<LayerActivations<floatX>> layers;
  LayerGradients<floatX> grads;
};

// Chunks of rows for the output head, so that (n, V) logits never stand in memory for a large vocabulary.
inline int64_t logit_rows_per_chunk(int64_t n, int64_t vocab_size) {
  constexpr int64_t kLogits = int64_t{1} << 23;
  return std::clamp<int64_t>(kLogits / vocab_size, 64, std::max<int64_t>(64, n));
}

namespace detail {

template <class floatX>
LayerActivations<floatX> carve_layer(Arena& arena, const ModelConfig& c, const Layer& layer, int64_t n,
                                     int64_t B) {
  LayerActivations<floatX> a;
  a.rows.n = n;
  if (layer.routed) {
    a.rows.row = arena.take<int32_t>(n);
    a.rows.offsets = arena.take<int64_t>(B + 1);
    a.router_logit = arena.take<float>(n);
    a.delta = arena.take<float>(n * c.dim);
  }
  a.x = arena.take<float>(n * c.dim);
  a.attn_norm = arena.take<floatX>(n * c.dim);
  a.attn_rstd = arena.take<float>(n);
  a.qkv = arena.take<floatX>(n * c.qkv_dim());
  a.q = arena.take<floatX>(n * c.q_dim());
  a.k = arena.take<floatX>(n * c.kv_dim());
  a.qk_rstd = arena.take<float>(n * (c.heads + c.kv_heads));
  a.attn = arena.take<floatX>(n * c.q_dim());
  a.lse = arena.take<float>(n * c.heads);
  a.h = arena.take<float>(n * c.dim);
  a.ffn_norm = arena.take<floatX>(n * c.dim);
  a.ffn_rstd = arena.take<float>(n);
  a.gate_up = arena.take<floatX>(n * 2 * c.ffn_dim);
  a.act = arena.take<floatX>(n * c.ffn_dim);
  return a;
}

template <class floatX>
LayerGradients<floatX> carve_gradients(Arena& arena, const ModelConfig& c, int64_t n) {
  LayerGradients<floatX> g;
  g.ddelta = arena.take<floatX>(n * c.dim);
  g.dx = arena.take<float>(n * c.dim);
  g.dnorm = arena.take<floatX>(n * c.dim);
  g.dact = arena.take<floatX>(n * c.ffn_dim);
  g.dgate_up = arena.take<floatX>(n * 2 * c.ffn_dim);
  g.dattn = arena.take<floatX>(n * c.q_dim());
  g.dq = arena.take<floatX>(n * c.q_dim());
  g.dk = arena.take<floatX>(n * c.kv_dim());
  g.dqkv = arena.take<floatX>(n * c.qkv_dim());
  g.dlogit = arena.take<float>(n);
  return g;
}

}  // namespace detail

enum class Use {
  training,   // every layer keeps what its backward pass needs; top-k routing
  inference,  // all layers use the same space, large enough for threshold routing, which may select any
              // number of tokens
};

// Carves everything for batches of up to B sequences of T tokens.
template <class floatX>
Activations<floatX> carve_activations(Arena& arena, const ModelConfig& c, const LayerPlan& plan, int64_t B,
                                      int64_t T, Use use) {
  const bool training = use == Use::training;
  const int64_t n = B * T;
  Activations<floatX> a;
  arena.group("residual stream and routing scores");
  a.tokens = arena.take<int32_t>(n);
  a.targets = arena.take<int32_t>(n);
  a.stream = arena.take<float>(n * c.dim);
  a.all_rows = arena.take<int32_t>(n);
  a.all_offsets = arena.take<int64_t>(B + 1);
  a.topk_offsets = arena.take<int64_t>(B + 1);
  a.score = arena.take<float>(n);
  a.selection_score = arena.take<float>(n);
  a.times_selected = arena.take<int32_t>(n);
  a.kth_score = arena.take<float>(count_sparse(plan) * B);

  arena.group("output head");
  a.final_norm = arena.take<floatX>(n * c.dim);
  a.final_rstd = arena.take<float>(n);
  a.logit_rows = logit_rows_per_chunk(n, c.vocab_size);
  a.logits = arena.take<floatX>(a.logit_rows * c.vocab_size);
  a.losses = arena.take<float>(n);

  if (training) {
    arena.group("gradients of activations");
    a.dstream = arena.take<float>(n * c.dim);
    a.dfinal = arena.take<floatX>(n * c.dim);
    a.grads = detail::carve_gradients<floatX>(arena, c, n);
  }
  arena.group(training ? "saved by dense layers" : "layer (one space for all)");
  float* dense_delta = arena.take<float>(n * c.dim);
  const int64_t layers_begin = arena.used();
  int64_t layers_end = layers_begin;
  for (int pass = 0; pass < 2; pass++) {  // dense layers first: one group of bytes each
    if (pass == 1 && training) arena.group("saved by sparse layers");
    if (pass == 0) a.layers.resize(plan.size());
    for (size_t l = 0; l < plan.size(); l++) {
      if (plan[l].routed != (pass == 1)) continue;
      if (!training) arena.rewind(layers_begin);
      const int64_t rows = plan[l].routed && training ? B * tokens_selected(c, T) : n;
      a.layers[l] = detail::carve_layer<floatX>(arena, c, plan[l], rows, B);
      if (!plan[l].routed) {
        a.layers[l].rows = {a.all_rows, a.all_offsets, n};
        a.layers[l].delta = dense_delta;
      }
      layers_end = std::max(layers_end, arena.used());
    }
  }
  arena.rewind(layers_end);
  return a;
}

// Bytes of the arena, by group, before anything is allocated.
template <class floatX>
Arena measure_activations(const ModelConfig& c, int64_t B, int64_t T, Use use) {
  Arena arena;
  carve_activations<floatX>(arena, c, make_layer_plan(c), B, T, use);
  return arena;
}

// Whether the passes of all its layer kinds are built; `plan` can count the others.
inline bool has_passes(const LayerPlan& plan) {
  return std::all_of(plan.begin(), plan.end(), [](const Layer& layer) {
    return layer.ffn == Ffn::swiglu &&
           layer.attention == (layer.routed ? Attention::selected : Attention::full);
  });
}

inline void require_passes(const ModelConfig& c) {
  if (has_passes(make_layer_plan(c))) return;
  fail("--arch ", arch_name(c.arch),
       ": `plan` can count this architecture, but its passes are not built yet; ",
       "train dense, mod or xmod");
}

}  // namespace xmod

// Where every intermediate tensor lives: one arena, carved in the order of the passes. The same functions
// count the bytes (for `plan`, before anything is allocated) and hand out the pointers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <variant>
#include <vector>

#include "xmod/arena.h"
#include "xmod_common.h"

namespace xmod {

// What the backward pass of a layer needs of its forward pass, in three parts: what it works on, what its
// attention and the norm before its FFN compute, what its FFN computes. n is B*T, or B*C in a sparse layer.
template <class floatX>
struct LayerActivations {
  Rows rows;
  float* router_logit = nullptr;  // (n) s of the selected rows
  float* x = nullptr;             // (n, d) the layer's rows of the residual stream

  SavedOf<AttentionKind, floatX> attention;
  float* h = nullptr;          // (n, d) x + attention; x itself in a layer without
  floatX* ffn_norm = nullptr;  // (n, d) RMSNorm(h)
  float* ffn_rstd = nullptr;   // (n)
  float* delta = nullptr;      // (n, d) D = attention + FFN, for a sparse layer's gate; dense ones share it

  SavedOf<FfnKind, floatX> ffn;
};

// What all layers share: gradients inside one layer, and the scratch of the layer kinds.
template <class floatX>
struct LayerScratch {
  floatX* ddelta = nullptr;  // (n, d)
  float* dx = nullptr;       // (n, d)
  floatX* dnorm = nullptr;   // (n, d)
  float* dlogit = nullptr;   // (n)
  ScratchOf<AttentionKind, floatX> attention;
  ScratchOf<FfnKind, floatX> ffn;
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

  Rows all_rows;                      // every row of the stream
  float* score = nullptr;             // (n) router logits s of every token
  float* selection_score = nullptr;   // (n) u = s + token-choice bias
  int32_t* times_selected = nullptr;  // (n) c of the running interval
  float* kth_score = nullptr;         // (sparse layers, B) the C-th largest u

  std::vector<LayerActivations<floatX>> layers;  // one of each entry of the plan
  LayerScratch<floatX> scratch;
};

// Chunks of rows for the output head, so that (n, V) logits never stand in memory for a large vocabulary.
// Each chunk reads the head's matrix (V, d) and adds to its gradient: with few rows that would take longer
// than the products.
inline int64_t logit_rows_per_chunk(int64_t n, int64_t vocab_size, int64_t d) {
  constexpr int64_t kLogits = int64_t{1} << 23, kFewest = 64;
  const int64_t rows = std::max({kLogits / vocab_size, 2 * d, kFewest});
  return std::min(rows, std::max(kFewest, n));
}

enum class Use {
  training,   // top-k routing
  inference,  // also threshold routing, which may select any number of tokens; no backward pass
};

// What a layer does not keep for its backward pass. It is computed again there, from what is kept.
enum class Recompute {
  none,   // keeps all
  ffn,    // not what its FFN computes
  block,  // only what it works on
};

namespace detail {

// Parts of a layer's tensors.
struct LayerParts {
  bool input, block, ffn;
  LayerParts others() const { return {!input, !block, !ffn}; }
};

inline LayerParts parts_kept(Use use, Recompute recompute) {
  if (use == Use::inference) return {false, false, false};
  return {true, recompute != Recompute::block, recompute == Recompute::none};
}

// n: the layer's rows; of `all` tokens in B sequences.
template <class floatX>
void carve_layer(Arena& arena, LayerActivations<floatX>& a, const LayerParts& parts, const ModelConfig& c,
                 const Layer& layer, const LayerParameters& p, int64_t n, int64_t all, int64_t B) {
  if (parts.input) {
    if (layer.routed) {
      a.rows = {arena.take<int32_t>(n), arena.take<int32_t>(n), arena.take<int64_t>(B + 1), n};
      a.router_logit = arena.take<float>(n);
    }
    a.x = arena.take<float>(n * c.dim);
  }
  if (parts.block) {
    std::visit([&](const auto& kind) { a.attention = kind.template carve_saved<floatX>(arena, c, n, all); },
               p.attention);
    if (layer.ffn != Ffn::none) {
      a.h = layer.attention == Attention::none ? a.x : arena.take<float>(n * c.dim);
      a.ffn_norm = arena.take<floatX>(n * c.dim);
      a.ffn_rstd = arena.take<float>(n);
    }
    if (layer.routed) a.delta = arena.take<float>(n * c.dim);
  }
  if (parts.ffn)
    std::visit([&](const auto& kind) { a.ffn = kind.template carve_saved<floatX>(arena, c, n); }, p.ffn);
}

// The scratch of every kind in the table, once.
template <class floatX, class Kinds>
void carve_kind_scratch(Arena& arena, const ModelConfig& c, const ParameterTable& table,
                        Kinds LayerParameters::*part, int64_t n, bool training,
                        ScratchOf<Kinds, floatX>& scratch) {
  std::vector<bool> carved(std::variant_size_v<Kinds>);
  for (const LayerParameters& p : table.layers) {
    const Kinds& kinds = p.*part;
    if (carved[kinds.index()]) continue;
    carved[kinds.index()] = true;
    std::visit(
        [&](const auto& kind) {
          using Kind = std::decay_t<decltype(kind)>;
          std::get<typename Kind::template Scratch<floatX>>(scratch) =
              kind.template carve_scratch<floatX>(arena, c, n, training);
        },
        kinds);
  }
}

template <class floatX>
LayerScratch<floatX> carve_scratch(Arena& arena, const ModelConfig& c, const ParameterTable& table, int64_t n,
                                   bool training) {
  LayerScratch<floatX> s;
  if (training) {
    s.ddelta = arena.take<floatX>(n * c.dim);
    s.dx = arena.take<float>(n * c.dim);
    s.dnorm = arena.take<floatX>(n * c.dim);
    s.dlogit = arena.take<float>(n);
  }
  carve_kind_scratch<floatX>(arena, c, table, &LayerParameters::attention, n, training, s.attention);
  carve_kind_scratch<floatX>(arena, c, table, &LayerParameters::ffn, n, training, s.ffn);
  return s;
}

// The tensors of all layers: what each keeps, and one space for the rest of whichever is at work.
template <class floatX>
std::vector<LayerActivations<floatX>> carve_layers(Arena& arena, const ModelConfig& c, const LayerPlan& plan,
                                                   const ParameterTable& table, const Rows& all_rows,
                                                   int64_t B, int64_t T, Use use, Recompute recompute) {
  const LayerParts kept = parts_kept(use, recompute);
  const int64_t n = B * T;
  std::vector<LayerActivations<floatX>> layers(plan.size());
  auto carve = [&](size_t l, const LayerParts& parts) {
    const int64_t rows = plan[l].routed && use == Use::training ? B * tokens_selected(c, T) : n;
    carve_layer<floatX>(arena, layers[l], parts, c, plan[l], table.layers[l], rows, n, B);
  };
  for (const bool routed : {false, true}) {
    arena.group(routed ? "saved by sparse layers" : "saved by dense layers");
    for (size_t l = 0; l < plan.size(); l++) {
      if (plan[l].routed == routed) carve(l, kept);
    }
  }

  arena.group("layer at work (one space for all)");
  float* dense_delta = arena.take<float>(n * c.dim);
  const int64_t begin = arena.used();
  int64_t end = begin;
  for (size_t l = 0; l < plan.size(); l++) {
    arena.rewind(begin);
    carve(l, kept.others());
    end = std::max(end, arena.used());
    if (plan[l].routed) continue;
    layers[l].rows = all_rows;
    layers[l].delta = dense_delta;
  }
  arena.rewind(end);
  return layers;
}

}  // namespace detail

// Carves everything for batches of up to B sequences of T tokens.
template <class floatX>
Activations<floatX> carve_activations(Arena& arena, const ModelConfig& c, const LayerPlan& plan,
                                      const ParameterTable& table, int64_t B, int64_t T, Use use,
                                      Recompute recompute = Recompute::none) {
  const bool training = use == Use::training;
  const int64_t n = B * T;
  Activations<floatX> a;
  arena.group("residual stream and routing scores");
  a.tokens = arena.take<int32_t>(n);
  a.targets = arena.take<int32_t>(n);
  a.stream = arena.take<float>(n * c.dim);
  a.all_rows = {arena.take<int32_t>(n), arena.take<int32_t>(n), arena.take<int64_t>(B + 1), n};
  a.score = arena.take<float>(n);
  a.selection_score = arena.take<float>(n);
  a.times_selected = arena.take<int32_t>(n);
  a.kth_score = arena.take<float>(count_sparse(plan) * B);

  arena.group("output head");
  a.final_norm = arena.take<floatX>(n * c.dim);
  a.final_rstd = arena.take<float>(n);
  a.logit_rows = logit_rows_per_chunk(n, c.vocab_size, c.dim);
  a.logits = arena.take<floatX>(a.logit_rows * c.vocab_size);
  a.losses = arena.take<float>(n);

  arena.group(training ? "gradients of activations" : "layers' scratch");
  if (training) {
    a.dstream = arena.take<float>(n * c.dim);
    a.dfinal = arena.take<floatX>(n * c.dim);
  }
  a.scratch = detail::carve_scratch<floatX>(arena, c, table, n, training);

  a.layers = detail::carve_layers<floatX>(arena, c, plan, table, a.all_rows, B, T, use, recompute);
  return a;
}

// Bytes of the arena, by group, before anything is allocated.
template <class floatX>
Arena measure_activations(const ModelConfig& c, int64_t B, int64_t T, Use use,
                          Recompute recompute = Recompute::none) {
  Arena arena;
  const LayerPlan plan = make_layer_plan(c);
  carve_activations<floatX>(arena, c, plan, make_parameter_table(c, plan), B, T, use, recompute);
  return arena;
}

// Of a model on batches of up to B sequences. Evaluation happens between training steps, in the same memory.
template <class floatX>
int64_t arena_bytes(const ModelConfig& c, int64_t B, Use use, Recompute recompute) {
  const int64_t inference = measure_activations<floatX>(c, B, c.seq_len, Use::inference).used();
  if (use == Use::inference) return inference;
  return std::max(inference, measure_activations<floatX>(c, B, c.seq_len, use, recompute).used());
}

}  // namespace xmod

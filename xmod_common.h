// What every backend and command shares: the model's configuration, its layer plan, the table of its tensors
// and the accounting of parameters and FLOPs. Pure arithmetic; nothing here touches data.
//
// The kinds of layers, and what each must supply, stand in xmod/layers/family.h.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "xmod/layers/family.h"
#include "xmod/model_config.h"
#include "xmod/parameter_table.h"

namespace xmod {

// ---------------------------------------------------------------------------------------------------
// Layer plan

// Attention and FFN of a layer run over all tokens or, in a sparse layer, over the routed ones. The attention
// that the routed FFNs of a routed-ffn unit share is an entry of its own, under the number of its first
// layer.
struct Layer {
  Attention attention = Attention::self;
  Ffn ffn = Ffn::swiglu;
  bool routed = false;            // a sparse layer: it has a router
  int64_t number = 0;             // as in the names of its tensors
  int64_t sparse_index = -1;      // counts the sparse layers of the model
  int64_t depth_in_interval = 0;  // j: sparse layers passed in this interval before this one
};

using LayerPlan = std::vector<Layer>;

namespace detail {

// Appends layers and numbers them.
class PlanBuilder {
 public:
  void dense(Ffn ffn = Ffn::swiglu) {
    plan_.push_back({Attention::self, ffn, false, layers_++});
    depth_ = 0;
  }
  void sparse(Attention attention) {
    plan_.push_back({attention, Ffn::swiglu, true, layers_++, sparse_layers_++, depth_++});
  }
  void attention_of_next_layer() { plan_.push_back({Attention::self, Ffn::none, false, layers_}); }
  LayerPlan take() { return std::move(plan_); }

 private:
  LayerPlan plan_;
  int64_t layers_ = 0, sparse_layers_ = 0, depth_ = 0;
};

// K sparse layers: together as much compute per token as one dense layer.
inline void append_unit(PlanBuilder& plan, const ModelConfig& c) {
  const bool shared_attention = c.arch == Arch::routed_ffn;
  if (shared_attention) plan.attention_of_next_layer();
  const Attention attention = shared_attention             ? Attention::none
                              : c.arch == Arch::selected_q ? Attention::selected_q
                                                           : Attention::self;
  for (int64_t i = 0; i < c.token_sparsity; i++) plan.sparse(attention);
}

// Every layer alike; deco begins with its dense ones.
inline LayerPlan unrouted_plan(const ModelConfig& c) {
  const Ffn ffn = c.arch == Arch::moe ? Ffn::moe : c.arch == Arch::deco ? Ffn::deco : Ffn::swiglu;
  const int64_t prefix = c.arch == Arch::deco ? c.dense_prefix : 0;
  PlanBuilder plan;
  for (int64_t i = 0; i < c.active_layers; i++) plan.dense(i < prefix ? Ffn::swiglu : ffn);
  return plan.take();
}

// Sparse and dense in turn; the largest n with (n + 1) + n / K <= L_act.
inline LayerPlan mod_plan(const ModelConfig& c) {
  const int64_t n = (c.active_layers - 1) * c.token_sparsity / (c.token_sparsity + 1);
  PlanBuilder plan;
  plan.dense();
  for (int64_t i = 0; i < n; i++) {
    plan.sparse(Attention::self);
    plan.dense();
  }
  return plan.take();
}

// The prefix, then units and anchors; the last unit is an anchor.
inline LayerPlan unit_plan(const ModelConfig& c) {
  PlanBuilder plan;
  for (int64_t i = 0; i < c.dense_prefix; i++) plan.dense();
  const int64_t units = c.active_layers - c.dense_prefix;
  int64_t since_anchor = 0;  // sparse units behind the last anchor
  for (int64_t unit = 0; unit < units; unit++) {
    const bool anchor = c.anchors && (since_anchor == c.anchor_stride || unit == units - 1);
    if (anchor) {
      plan.dense();
    } else {
      append_unit(plan, c);
    }
    since_anchor = anchor ? 0 : since_anchor + 1;
  }
  return plan.take();
}

}  // namespace detail

// README.md, "Layer plan": reproduces every layer count of the paper.
inline LayerPlan make_layer_plan(const ModelConfig& c) {
  if (has_units(c.arch)) return detail::unit_plan(c);
  return c.arch == Arch::mod ? detail::mod_plan(c) : detail::unrouted_plan(c);
}

inline int64_t count_layers(const LayerPlan& plan) {
  return plan.empty() ? 0 : plan.back().number + 1;
}

inline int64_t count_sparse(const LayerPlan& plan) {
  int64_t n = 0;
  for (const Layer& layer : plan) n += layer.routed;
  return n;
}

// "DDSSSSD...": one letter a layer.
inline std::string pattern(const LayerPlan& plan) {
  std::string letters(static_cast<size_t>(count_layers(plan)), 'D');
  for (const Layer& layer : plan) {
    if (layer.routed) letters[static_cast<size_t>(layer.number)] = 'S';
  }
  return letters;
}

// ---------------------------------------------------------------------------------------------------
// Parameter table

// One layer's tensors: offsets in the parameters' allocation, or in the buffers'; -1 where it has no such
// one.
struct LayerParameters {
  AttentionKind attention;
  int64_t begin = -1;                     // where the layer's tensors begin
  int64_t post_attention_layernorm = -1;  // (d)
  FfnKind ffn;
  int64_t router = -1;         // (1, d)
  int64_t residual_gate = -1;  // (1)
};

// The first buffers are the thresholds of the sparse layers, the first step sums the means of their C-th
// largest scores: both (sparse layers), in order.
struct ParameterTable : TensorTable {
  std::vector<LayerParameters> layers;  // one of each entry of the plan
  int64_t embed_tokens = -1;            // (V, d)
  int64_t final_norm = -1;              // (d)
  int64_t lm_head = -1;                 // (V, d) the output head: embed_tokens itself where it is tied
};

inline std::string layer_prefix(int64_t layer) {
  return "model.layers." + std::to_string(layer) + ".";
}

namespace detail {

inline LayerParameters add_layer_parameters(TensorAdder add, const ModelConfig& c, const Layer& layer) {
  LayerParameters p{
      .attention = attention_kind(layer.attention), .begin = add.next_offset(), .ffn = ffn_kind(layer.ffn)};
  std::visit([&](auto& kind) { kind.add_parameters(add, c); }, p.attention);
  if (layer.ffn != Ffn::none) p.post_attention_layernorm = add.norm("post_attention_layernorm", c.dim);
  std::visit([&](auto& kind) { kind.add_parameters(add, c); }, p.ffn);
  if (layer.routed) {
    p.router = add.parameter("router.weight", {1, c.dim}, Optimizer::adamw, Init::router);
    if (has_residual_gate(c))
      p.residual_gate = add.parameter("residual_gate", {1}, Optimizer::adamw, Init::gate);
  }
  return p;
}

}  // namespace detail

inline ParameterTable make_parameter_table(const ModelConfig& c, const LayerPlan& plan) {
  ParameterTable table;
  TensorAdder model(table, "model.");
  auto layer_adder = [&](const Layer& layer) { return TensorAdder(table, layer_prefix(layer.number)); };
  for (const Layer& layer : plan) {
    if (!layer.routed) continue;
    layer_adder(layer).buffer("router.threshold", {1});
    model.step_sum(1);
  }
  table.embed_tokens =
      model.parameter("embed_tokens.weight", {c.vocab_size, c.dim}, Optimizer::adamw, Init::embedding);
  for (const Layer& layer : plan)
    table.layers.push_back(detail::add_layer_parameters(layer_adder(layer), c, layer));
  table.final_norm = model.norm("norm", c.dim);
  table.lm_head = c.tie_word_embeddings
                      ? table.embed_tokens
                      : TensorAdder(table, "").parameter("lm_head.weight", {c.vocab_size, c.dim},
                                                         Optimizer::adamw, Init::embedding,
                                                         /*fused=*/false, Read::by_products_alone);
  return table;
}

// ---------------------------------------------------------------------------------------------------
// Accounting (README.md, "Accounting"): what the paper counts, to its printed digits

// Matrix parameters of a layer.
inline int64_t layer_parameters(const ModelConfig& c, const Layer& layer) {
  auto parameters = [&](const auto& kind) { return kind.matrix_parameters(c); };
  return std::visit(parameters, attention_kind(layer.attention)) +
         std::visit(parameters, ffn_kind(layer.ffn));
}

// The share of the tokens that a layer processes.
inline double token_share(const ModelConfig& c, const Layer& layer) {
  return layer.routed ? 1.0 / static_cast<double>(c.token_sparsity) : 1.0;
}

// Matrix parameters of a layer that one token passes through on average.
inline double matrix_parameters_per_token(const ModelConfig& c, const Layer& layer) {
  const double share = token_share(c, layer);
  return std::visit([&](const auto& kind) { return kind.matrix_parameters_per_token(c, share); },
                    attention_kind(layer.attention)) +
         share * std::visit([&](const auto& kind) { return kind.matrix_parameters_per_token(c); },
                            ffn_kind(layer.ffn));
}

// Query-key pairs of a layer's attention as a share of T^2 (causality not counted, as in the paper).
inline double attention_cost(const ModelConfig& c, const Layer& layer) {
  return std::visit([&](const auto& kind) { return kind.score_share(token_share(c, layer)); },
                    attention_kind(layer.attention));
}

// Tokens in the key/value cache of a layer as a share of those it has seen.
inline double cache_share(const ModelConfig& c, const Layer& layer) {
  return std::visit([&](const auto& kind) { return kind.cache_share(token_share(c, layer)); },
                    attention_kind(layer.attention));
}

// Parameters of the embedding, and of the output head where that is a matrix of its own.
inline int64_t vocabulary_parameters(const ModelConfig& c) {
  return c.vocab_size * c.dim * (c.tie_word_embeddings ? 1 : 2);
}

struct Accounting {
  int64_t layers = 0, dense_layers = 0, sparse_layers = 0;
  int64_t params_total = 0;     // every trained number
  int64_t params_matrix = 0;    // embedding and matrices: the paper's N
  double params_active = 0;     // embedding and the matrices a token passes through: N_act
  double flops_per_token = 0;   // forward; training costs 3 times as much
  double cached_per_token = 0;  // numbers that the key/value caches keep for a token, on average
};

inline Accounting account(const ModelConfig& c) {
  const LayerPlan plan = make_layer_plan(c);
  Accounting a;
  a.layers = count_layers(plan);
  a.sparse_layers = count_sparse(plan);
  a.dense_layers = a.layers - a.sparse_layers;
  a.params_total = make_parameter_table(c, plan).count();
  a.params_matrix = vocabulary_parameters(c);
  double per_token = 0, attention = 0;
  for (const Layer& layer : plan) {
    a.params_matrix += layer_parameters(c, layer);
    per_token += matrix_parameters_per_token(c, layer);
    attention += attention_cost(c, layer);
    a.cached_per_token += cache_share(c, layer) * 2 * static_cast<double>(c.kv_dim());
  }
  a.params_active = static_cast<double>(vocabulary_parameters(c)) + per_token;
  a.flops_per_token = 2 * per_token + 4.0 * c.seq_len * c.q_dim() * attention;
  return a;
}

// The dense model with the same active layers: what every comparison is relative to.
inline ModelConfig dense_reference(ModelConfig c) {
  c.arch = Arch::dense;
  return c;
}

inline double flops_ratio_to_dense(const ModelConfig& c) {
  return account(c).flops_per_token / account(dense_reference(c)).flops_per_token;
}

inline double training_flops_per_token(const ModelConfig& c) {
  return 3 * account(c).flops_per_token;
}

}  // namespace xmod

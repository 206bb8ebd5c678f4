// What every backend and command shares: the model's configuration, its layer plan, the accounting of
// parameters and FLOPs, and the table of parameters. Pure arithmetic; nothing here touches data.
//
// To add a layer kind: say in make_layer_plan where it stands and which Attention and Ffn it has, give it its
// tensors in add_layer_parameters and its cost in layer_parameters, matrix_parameters_per_token and
// attention_cost (all below), its saved tensors in xmod/activations.h and its passes in xmod/model.h and the
// backends.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "xmod/error.h"

namespace xmod {

// ---------------------------------------------------------------------------------------------------
// Configuration

enum class Arch { dense, mod, xmod, routed_ffn, selected_q, moe };

inline const std::vector<std::pair<std::string, Arch>>& arch_names() {
  static const std::vector<std::pair<std::string, Arch>> names = {{"dense", Arch::dense},
                                                                  {"mod", Arch::mod},
                                                                  {"xmod", Arch::xmod},
                                                                  {"routed-ffn", Arch::routed_ffn},
                                                                  {"selected-q", Arch::selected_q},
                                                                  {"moe", Arch::moe}};
  return names;
}

inline std::string arch_name(Arch arch) {
  for (const auto& [name, value] : arch_names()) {
    if (value == arch) return name;
  }
  return "?";
}

// The defaults are the `tiny` preset.
struct ModelConfig {
  Arch arch = Arch::xmod;
  int64_t vocab_size = 256;   // V
  int64_t dim = 128;          // d, width of the residual stream
  int64_t active_layers = 8;  // L_act: dense layers + sparse layers / K
  int64_t heads = 2;          // H query heads
  int64_t kv_heads = 1;       // KV key/value heads; H is a multiple
  int64_t head_dim = 64;      // hd
  int64_t ffn_dim = 384;      // F
  int64_t seq_len = 256;      // T

  int64_t token_sparsity = 4;  // K: a sparse layer processes ceil(T/K) tokens of a sequence
  int64_t anchor_stride = 1;   // A: sparse units between dense anchors
  int64_t dense_prefix = 2;    // P: dense layers before the first unit
  bool anchors = true;
  bool residual_gate = true;       // false fixes alpha at 1
  double token_bias_strength = 1;  // gamma of the token-choice bias
  double residual_gate_init = 1;   // alpha at the start

  int64_t experts = 0;  // moe: E routed experts ...
  int64_t experts_per_token = 0;
  int64_t shared_experts = 0;
  int64_t expert_dim = 0;  // ... each a SwiGLU of this width

  double rope_theta = 10000;
  double rms_norm_eps = 1e-6;

  int64_t q_dim() const { return heads * head_dim; }
  int64_t kv_dim() const { return kv_heads * head_dim; }
  int64_t qkv_dim() const { return q_dim() + 2 * kv_dim(); }  // one row of the fused projection
};

// RoPE's base frequency where the user gives none (our choice: long contexts need slower angles).
inline double default_rope_theta(int64_t seq_len) {
  return seq_len >= 16384 ? 1e6 : 10000;
}

// Tokens of one sequence that a sparse layer processes under top-k routing.
inline int64_t tokens_selected(const ModelConfig& config, int64_t seq_len) {
  return (seq_len + config.token_sparsity - 1) / config.token_sparsity;
}

// Which of the routing options an architecture has.
inline bool has_units(Arch arch) {
  return arch == Arch::xmod || arch == Arch::routed_ffn || arch == Arch::selected_q;
}
inline bool is_routed(Arch arch) {
  return has_units(arch) || arch == Arch::mod;
}
// MoD is the same sparse layer without the paper's two stabilisers.
inline bool has_residual_gate(const ModelConfig& c) {
  return c.residual_gate && has_units(c.arch);
}
inline double token_bias(const ModelConfig& c) {
  return has_units(c.arch) ? c.token_bias_strength : 0;
}

// Throws a usage error that names the flag to change.
inline void validate(const ModelConfig& c) {
  auto positive = [](int64_t value, const char* flag) {
    if (value < 1) usage_error(flag, " ", value, ": expected a whole number of at least 1");
  };
  positive(c.vocab_size, "--vocab-size");
  positive(c.dim, "--dim");
  positive(c.active_layers, "--active-layers");
  positive(c.heads, "--heads");
  positive(c.kv_heads, "--kv-heads");
  positive(c.head_dim, "--head-dim");
  positive(c.ffn_dim, "--ffn-dim");
  positive(c.seq_len, "--seq-len");
  if (c.heads % c.kv_heads != 0) {
    usage_error("--heads ", c.heads, " is not a multiple of --kv-heads ", c.kv_heads,
                ": each key/value head serves the same number of query heads");
  }
  if (c.head_dim % 2 != 0) {
    usage_error("--head-dim ", c.head_dim, " is odd: RoPE rotates pairs, choose an even head size");
  }
  if (!(c.rope_theta > 0)) usage_error("--rope-theta ", c.rope_theta, ": expected a number above 0");
  if (is_routed(c.arch)) {
    positive(c.token_sparsity, "--token-sparsity");
    if (c.token_sparsity > c.seq_len) {
      usage_error("--token-sparsity ", c.token_sparsity, " is larger than --seq-len ", c.seq_len,
                  ": a sparse layer would select less than one token of a sequence");
    }
  }
  if (has_units(c.arch)) {
    positive(c.anchor_stride, "--anchor-stride");
    if (c.dense_prefix < 0 || c.dense_prefix >= c.active_layers) {
      usage_error("--dense-prefix ", c.dense_prefix,
                  ": expected 0 to --active-layers - 1 = ", c.active_layers - 1,
                  ", so that at least one unit follows the prefix");
    }
    if (!std::isfinite(c.token_bias_strength) || c.token_bias_strength < 0) {
      usage_error("--token-bias-strength ", c.token_bias_strength, ": expected a number of at least 0");
    }
    if (!std::isfinite(c.residual_gate_init)) {
      usage_error("--residual-gate-init ", c.residual_gate_init, ": expected a finite number");
    }
  }
  if (c.arch == Arch::moe) {
    positive(c.experts, "--experts");
    positive(c.experts_per_token, "--experts-per-token");
    positive(c.expert_dim, "--expert-dim");
    if (c.shared_experts < 0) usage_error("--shared-experts ", c.shared_experts, ": expected 0 or more");
    if (c.experts_per_token > c.experts) {
      usage_error("--experts-per-token ", c.experts_per_token, " is larger than --experts ", c.experts);
    }
  }
}

// The backbones of the paper's Table 4, and `tiny` for two CPU cores.
struct Preset {
  std::string name;
  ModelConfig config;
};

inline std::vector<Preset> presets() {
  auto paper = [](int64_t dim, int64_t head_dim, int64_t ffn_dim) {
    ModelConfig c;
    c.vocab_size = 100352;
    c.dim = dim;
    c.active_layers = 28;
    c.heads = 16;
    c.kv_heads = 8;
    c.head_dim = head_dim;
    c.ffn_dim = ffn_dim;
    c.seq_len = 32768;
    c.rope_theta = default_rope_theta(c.seq_len);
    c.token_sparsity = 8;
    c.anchor_stride = 4;
    c.dense_prefix = 4;
    return c;
  };
  return {{"tiny", ModelConfig{}},          {"165M", paper(512, 64, 1536)},
          {"298M", paper(768, 64, 2304)},   {"556M", paper(1024, 128, 3072)},
          {"936M", paper(1536, 128, 3840)}, {"1.65B", paper(2048, 128, 6144)}};
}

// ---------------------------------------------------------------------------------------------------
// Layer plan

// A layer is an attention part and an FFN part, each over all tokens or over the routed ones.
enum class Attention {
  none,        // routed-ffn: the layers of a unit behind the first
  full,        // all tokens
  selected,    // queries, keys and values of the selected tokens only
  selected_q,  // queries of the selected tokens, keys and values of all
};
enum class Ffn { swiglu, moe };

struct Layer {
  Attention attention = Attention::full;
  Ffn ffn = Ffn::swiglu;
  bool routed = false;            // a sparse layer: it has a router, and its FFN runs on selected tokens
  int64_t sparse_index = -1;      // counts the sparse layers of the model
  int64_t depth_in_interval = 0;  // j: sparse layers passed in this interval before this one
};

using LayerPlan = std::vector<Layer>;

namespace detail {

// Appends layers and numbers the sparse ones.
class PlanBuilder {
 public:
  void dense(Ffn ffn) {
    plan_.push_back({Attention::full, ffn});
    depth_ = 0;
  }
  void sparse(Attention attention) {
    plan_.push_back({attention, Ffn::swiglu, true, sparse_layers_++, depth_++});
  }
  LayerPlan take() { return std::move(plan_); }

 private:
  LayerPlan plan_;
  int64_t sparse_layers_ = 0, depth_ = 0;
};

// K sparse layers: together as much compute per token as one dense layer.
inline void append_unit(PlanBuilder& plan, const ModelConfig& c) {
  for (int64_t i = 0; i < c.token_sparsity; i++) {
    switch (c.arch) {
      case Arch::routed_ffn:
        plan.sparse(i == 0 ? Attention::full : Attention::none);
        break;
      case Arch::selected_q:
        plan.sparse(Attention::selected_q);
        break;
      default:
        plan.sparse(Attention::selected);
        break;
    }
  }
}

}  // namespace detail

// README.md, "Layer plan": reproduces every layer count of the paper.
inline LayerPlan make_layer_plan(const ModelConfig& c) {
  detail::PlanBuilder plan;
  if (!is_routed(c.arch)) {
    for (int64_t i = 0; i < c.active_layers; i++) plan.dense(c.arch == Arch::moe ? Ffn::moe : Ffn::swiglu);
    return plan.take();
  }
  if (c.arch == Arch::mod) {
    // Sparse and dense in turn; the largest n with (n + 1) + n / K <= L_act.
    const int64_t n = (c.active_layers - 1) * c.token_sparsity / (c.token_sparsity + 1);
    plan.dense(Ffn::swiglu);
    for (int64_t i = 0; i < n; i++) {
      plan.sparse(Attention::selected);
      plan.dense(Ffn::swiglu);
    }
    return plan.take();
  }
  for (int64_t i = 0; i < c.dense_prefix; i++) plan.dense(Ffn::swiglu);
  const int64_t units = c.active_layers - c.dense_prefix;
  int64_t since_anchor = 0;  // sparse units behind the last anchor
  for (int64_t unit = 0; unit < units; unit++) {
    const bool anchor = c.anchors && (since_anchor == c.anchor_stride || unit == units - 1);
    if (anchor) {
      plan.dense(Ffn::swiglu);
    } else {
      detail::append_unit(plan, c);
    }
    since_anchor = anchor ? 0 : since_anchor + 1;
  }
  return plan.take();
}

inline int64_t count_sparse(const LayerPlan& plan) {
  int64_t n = 0;
  for (const Layer& layer : plan) n += layer.routed;
  return n;
}

// "DDSSSSD...": one letter a layer.
inline std::string pattern(const LayerPlan& plan) {
  std::string letters;
  for (const Layer& layer : plan) letters += layer.routed ? 'S' : 'D';
  return letters;
}

// ---------------------------------------------------------------------------------------------------
// Parameter table

enum class Optimizer { muon, adamw };
enum class Init {
  embedding,        // N(0, 0.02^2)
  matrix,           // N(0, 1/fan_in)
  residual_matrix,  // the same, divided by sqrt(2 * active_layers): it writes to the residual stream
  ones,             // norms
  router,           // N(0, 0.25/d)
  gate,             // residual_gate_init
};

struct Parameter {
  std::string name;            // Hugging Face's
  std::vector<int64_t> shape;  // row-major; matrices are (out, in)
  int64_t offset;              // floats from the start of the allocation
  int64_t size;                // floats
  Optimizer optimizer;
  Init init;
};

// Weight decay pulls on what multiplies activations, not on norms, routers and gates.
inline bool has_weight_decay(const Parameter& p) {
  return p.optimizer == Optimizer::muon || p.init == Init::embedding;
}

// Offsets of one layer's tensors in the allocation; -1 where the layer has no such tensor. k_proj and v_proj
// follow q_proj without a gap, up_proj follows gate_proj: each group is also one fused matrix.
struct LayerParameters {
  int64_t input_layernorm = -1;           // (d)
  int64_t q_proj = -1;                    // (H*hd, d); fused with k_proj and v_proj: (qkv_dim, d)
  int64_t q_norm = -1, k_norm = -1;       // (hd)
  int64_t o_proj = -1;                    // (d, H*hd)
  int64_t post_attention_layernorm = -1;  // (d)
  int64_t gate_proj = -1;                 // (F, d); fused with up_proj: (2F, d)
  int64_t down_proj = -1;                 // (d, F)
  int64_t router = -1;                    // (1, d)
  int64_t residual_gate = -1;             // (1)
};

struct ParameterTable {
  std::vector<Parameter> entries;
  std::vector<LayerParameters> layers;
  int64_t embed_tokens = -1;  // (V, d), also the output head
  int64_t final_norm = -1;    // (d)
  int64_t total = 0;          // floats of the allocation, padding included

  int64_t count() const {  // parameters, padding excluded
    int64_t n = 0;
    for (const Parameter& p : entries) n += p.size;
    return n;
  }
};

namespace detail {

constexpr int64_t kAlignment = 16;  // floats: one cache line

// Appends one tensor and returns its offset. A tensor fused with the previous one starts where that ends.
inline int64_t add_parameter(ParameterTable& table, std::string name, std::vector<int64_t> shape,
                             Optimizer optimizer, Init init, bool fused_with_previous = false) {
  int64_t size = 1;
  for (int64_t n : shape) size *= n;
  int64_t offset = table.entries.empty() ? 0 : table.entries.back().offset + table.entries.back().size;
  if (!fused_with_previous) offset = (offset + kAlignment - 1) / kAlignment * kAlignment;
  table.entries.push_back({std::move(name), std::move(shape), offset, size, optimizer, init});
  table.total = offset + size;
  return offset;
}

// The tensors of one layer, by its kind.
inline LayerParameters add_layer_parameters(ParameterTable& table, const ModelConfig& c, const Layer& layer,
                                            const std::string& prefix) {
  LayerParameters p;
  auto matrix = [&](const char* name, int64_t out, int64_t in, Init init, bool fused = false) {
    return add_parameter(table, prefix + name + ".weight", {out, in}, Optimizer::muon, init, fused);
  };
  auto norm = [&](const char* name, int64_t n) {
    return add_parameter(table, prefix + name + ".weight", {n}, Optimizer::adamw, Init::ones);
  };
  if (layer.attention != Attention::none) {
    p.input_layernorm = norm("input_layernorm", c.dim);
    p.q_proj = matrix("self_attn.q_proj", c.q_dim(), c.dim, Init::matrix);
    matrix("self_attn.k_proj", c.kv_dim(), c.dim, Init::matrix, true);
    matrix("self_attn.v_proj", c.kv_dim(), c.dim, Init::matrix, true);
    p.q_norm = norm("self_attn.q_norm", c.head_dim);
    p.k_norm = norm("self_attn.k_norm", c.head_dim);
    p.o_proj = matrix("self_attn.o_proj", c.dim, c.q_dim(), Init::residual_matrix);
  }
  p.post_attention_layernorm = norm("post_attention_layernorm", c.dim);
  if (layer.ffn == Ffn::swiglu) {
    p.gate_proj = matrix("mlp.gate_proj", c.ffn_dim, c.dim, Init::matrix);
    matrix("mlp.up_proj", c.ffn_dim, c.dim, Init::matrix, true);
    p.down_proj = matrix("mlp.down_proj", c.dim, c.ffn_dim, Init::residual_matrix);
  }
  if (layer.ffn == Ffn::moe) {
    add_parameter(table, prefix + "mlp.gate.weight", {c.experts, c.dim}, Optimizer::adamw, Init::router);
    for (int64_t e = 0; e < c.experts + c.shared_experts; e++) {
      const std::string expert = e < c.experts ? "mlp.experts." + std::to_string(e)
                                               : "mlp.shared_experts." + std::to_string(e - c.experts);
      matrix((expert + ".gate_proj").c_str(), c.expert_dim, c.dim, Init::matrix);
      matrix((expert + ".up_proj").c_str(), c.expert_dim, c.dim, Init::matrix, true);
      matrix((expert + ".down_proj").c_str(), c.dim, c.expert_dim, Init::residual_matrix);
    }
  }
  if (layer.routed) {
    p.router = add_parameter(table, prefix + "router.weight", {1, c.dim}, Optimizer::adamw, Init::router);
    if (has_residual_gate(c)) {
      p.residual_gate = add_parameter(table, prefix + "residual_gate", {1}, Optimizer::adamw, Init::gate);
    }
  }
  return p;
}

}  // namespace detail

inline std::string layer_prefix(int64_t layer) {
  return "model.layers." + std::to_string(layer) + ".";
}

inline ParameterTable make_parameter_table(const ModelConfig& c, const LayerPlan& plan) {
  ParameterTable table;
  table.embed_tokens = detail::add_parameter(table, "model.embed_tokens.weight", {c.vocab_size, c.dim},
                                             Optimizer::adamw, Init::embedding);
  for (size_t l = 0; l < plan.size(); l++) {
    table.layers.push_back(
        detail::add_layer_parameters(table, c, plan[l], layer_prefix(static_cast<int64_t>(l))));
  }
  table.final_norm = detail::add_parameter(table, "model.norm.weight", {c.dim}, Optimizer::adamw, Init::ones);
  return table;
}

// ---------------------------------------------------------------------------------------------------
// Accounting (README.md, "Accounting"): what the paper counts, to its printed digits

// Matrix parameters of a layer's attention and FFN.
inline int64_t attention_parameters(const ModelConfig& c) {
  return c.dim * (c.qkv_dim() + c.q_dim());
}
inline int64_t ffn_parameters(const ModelConfig& c, Ffn ffn) {
  return ffn == Ffn::moe ? 3 * c.dim * c.expert_dim * (c.experts + c.shared_experts) : 3 * c.dim * c.ffn_dim;
}
inline int64_t layer_parameters(const ModelConfig& c, const Layer& layer) {
  return (layer.attention == Attention::none ? 0 : attention_parameters(c)) + ffn_parameters(c, layer.ffn);
}

// Matrix parameters of a layer that one token passes through on average: 1/K of those that only selected
// tokens pass.
inline double matrix_parameters_per_token(const ModelConfig& c, const Layer& layer) {
  const double share = layer.routed ? 1.0 / c.token_sparsity : 1.0;
  double attention = 0;
  switch (layer.attention) {
    case Attention::none:
      break;
    case Attention::full:
      attention = attention_parameters(c);
      break;
    case Attention::selected:
      attention = attention_parameters(c) * share;
      break;
    case Attention::selected_q:
      attention = 2.0 * c.dim * c.kv_dim() + 2.0 * c.dim * c.q_dim() * share;
      break;
  }
  const double ffn = layer.ffn == Ffn::moe
                         ? 3.0 * c.dim * c.expert_dim * (c.experts_per_token + c.shared_experts)
                         : 3.0 * c.dim * c.ffn_dim * share;
  return attention + ffn;
}

// Query-key pairs of a layer's attention as a share of T^2 (causality not counted, as in the paper).
inline double attention_cost(const ModelConfig& c, const Layer& layer) {
  const double share = 1.0 / c.token_sparsity;
  switch (layer.attention) {
    case Attention::none:
      return 0;
    case Attention::full:
      return 1;
    case Attention::selected:
      return share * share;
    case Attention::selected_q:
      return share;
  }
  return 0;
}

struct Accounting {
  int64_t layers = 0, dense_layers = 0, sparse_layers = 0;
  int64_t params_total = 0;    // every trained number
  int64_t params_matrix = 0;   // embedding and matrices: the paper's N
  double params_active = 0;    // embedding and the matrices a token passes through: N_act
  double flops_per_token = 0;  // forward; training costs 3 times as much
};

inline Accounting account(const ModelConfig& c) {
  const LayerPlan plan = make_layer_plan(c);
  Accounting a;
  a.layers = static_cast<int64_t>(plan.size());
  a.sparse_layers = count_sparse(plan);
  a.dense_layers = a.layers - a.sparse_layers;
  a.params_total = make_parameter_table(c, plan).count();
  a.params_matrix = c.vocab_size * c.dim;
  double per_token = 0, attention = 0;
  for (const Layer& layer : plan) {
    a.params_matrix += layer_parameters(c, layer);
    per_token += matrix_parameters_per_token(c, layer);
    attention += attention_cost(c, layer);
  }
  a.params_active = static_cast<double>(c.vocab_size * c.dim) + per_token;
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

// A model's configuration: its architecture, sizes and routing, what may stand in them, and the presets.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "xmod/error.h"

namespace xmod {

// ---------------------------------------------------------------------------------------------------
// Configuration

enum class Arch { dense, mod, xmod, routed_ffn, selected_q, moe, deco };

inline const std::vector<std::pair<std::string, Arch>>& arch_names() {
  static const std::vector<std::pair<std::string, Arch>> names = {{"dense", Arch::dense},
                                                                  {"mod", Arch::mod},
                                                                  {"xmod", Arch::xmod},
                                                                  {"routed-ffn", Arch::routed_ffn},
                                                                  {"selected-q", Arch::selected_q},
                                                                  {"moe", Arch::moe},
                                                                  {"deco", Arch::deco}};
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

  int64_t experts = 0;             // moe, deco: E routed experts ...
  int64_t expert_dim = 0;          // ... each of this width
  int64_t experts_per_token = 0;   // moe: k; in deco a ReLU decides
  int64_t shared_experts = 0;      // moe: s experts for every token; deco: one, s * expert_dim wide
  double expert_bias_rate = 0.01;  // moe: of balancing the load, 0 for none
  double active_ratio = 0.2;       // deco: the share of (token, expert) pairs to train towards
  double entropy_weight = 1e-8;    // deco: lambda at the start, and the least it falls to
  double entropy_growth = 1.002;   // deco: lambda's factor of a step

  double rope_theta = 10000;
  double rms_norm_eps = 1e-6;
  bool tie_word_embeddings = true;  // the embedding is also the output head

  int64_t q_dim() const { return heads * head_dim; }
  int64_t kv_dim() const { return kv_heads * head_dim; }
  int64_t qkv_dim() const { return q_dim() + 2 * kv_dim(); }  // one row of the fused projection
};

// RoPE's base frequency where the user gives none (our choice: long contexts need slower angles).
inline double default_rope_theta(int64_t seq_len) {
  return seq_len >= 16384 ? 1e6 : 10000;
}

// The defaults that depend on other fields.
inline void set_derived_defaults(ModelConfig& c) {
  c.rope_theta = default_rope_theta(c.seq_len);
  if (c.arch == Arch::deco) c.dense_prefix = c.shared_experts = 1;  // as in DECO's models
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
inline bool has_experts(Arch arch) {
  return arch == Arch::moe || arch == Arch::deco;
}
inline bool has_dense_prefix(Arch arch) {
  return has_units(arch) || arch == Arch::deco;
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
  if (has_dense_prefix(c.arch) && (c.dense_prefix < 0 || c.dense_prefix >= c.active_layers)) {
    usage_error("--dense-prefix ", c.dense_prefix,
                ": expected 0 to --active-layers - 1 = ", c.active_layers - 1, ", so that at least one ",
                has_units(c.arch) ? "unit" : "layer with experts", " follows the prefix");
  }
  if (has_units(c.arch)) {
    positive(c.anchor_stride, "--anchor-stride");
    if (!std::isfinite(c.token_bias_strength) || c.token_bias_strength < 0) {
      usage_error("--token-bias-strength ", c.token_bias_strength, ": expected a number of at least 0");
    }
    if (!std::isfinite(c.residual_gate_init)) {
      usage_error("--residual-gate-init ", c.residual_gate_init, ": expected a finite number");
    }
  }
  if (has_experts(c.arch)) {
    positive(c.experts, "--experts");
    positive(c.expert_dim, "--expert-dim");
    if (c.shared_experts < 0) usage_error("--shared-experts ", c.shared_experts, ": expected 0 or more");
  }
  if (c.arch == Arch::moe) {
    positive(c.experts_per_token, "--experts-per-token");
    if (c.experts_per_token > c.experts) {
      usage_error("--experts-per-token ", c.experts_per_token, " is larger than --experts ", c.experts,
                  ": a token goes to that many different ones");
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

}  // namespace xmod

// A model's configuration by name. One table ties each field to its key in config.json, its flag on the
// command line, its range and the architectures it belongs to: reading, writing, comparing and parsing all
// walk that table. config.json keeps Hugging Face's keys, so that a dense model opens there as Qwen3 and a
// Qwen3 config.json opens here.
#pragma once

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "xmod/error.h"
#include "xmod/files.h"
#include "xmod/json_file.h"
#include "xmod_common.h"

namespace xmod {

// The shortest text that reads back as the same number: 0.0032, 1e-06, 20000000000000.
inline std::string shortest(double value) {
  char text[32];
  return std::string(text, std::to_chars(text, text + sizeof text, value).ptr);
}

// What a number may be. text() goes on after "a number": " of at least 1", " above 0", " from 0 to 1".
struct Range {
  double min = -std::numeric_limits<double>::infinity();
  double max = std::numeric_limits<double>::infinity();
  bool above_min = false;  // min itself lies outside

  bool contains(double value) const {
    return (above_min ? value > min : value >= min) && value <= max && std::isfinite(value);
  }

  std::string text() const {
    if (std::isinf(min)) return "";
    if (above_min) return " above " + shortest(min) + (std::isinf(max) ? "" : ", at most " + shortest(max));
    if (std::isinf(max)) return " of at least " + shortest(min);
    return " from " + shortest(min) + " to " + shortest(max);
  }
};

inline Range at_least(double min) {
  return {min};
}
inline Range above(double min) {
  return {min, std::numeric_limits<double>::infinity(), true};
}
inline Range between(double min, double max) {
  return {min, max};
}

// ---------------------------------------------------------------------------------------------------
// The fields

struct ModelField {
  const char* key;   // in config.json
  const char* flag;  // on the command line, without the dashes; empty: none
  std::variant<int64_t ModelConfig::*, double ModelConfig::*, bool ModelConfig::*> member;
  Range range;                // of a number
  bool (*belongs_to)(Arch);   // the architectures that know the field
  bool hugging_face = false;  // the key is Hugging Face's; the others are ours
};

inline const std::vector<ModelField>& model_fields() {
  using C = ModelConfig;
  auto any = [](Arch) { return true; };
  auto moe = [](Arch arch) { return arch == Arch::moe; };
  auto deco = [](Arch arch) { return arch == Arch::deco; };
  // Token ids and row numbers are 32-bit. Widths beyond a million are typing errors.
  const Range index = between(1, 2147483647), width = between(1, 1 << 20);
  static const std::vector<ModelField> fields = {
      {"vocab_size", "vocab-size", &C::vocab_size, index, any, true},
      {"hidden_size", "dim", &C::dim, width, any, true},
      {"active_layers", "active-layers", &C::active_layers, width, any},
      {"num_attention_heads", "heads", &C::heads, between(1, 4096), any, true},
      {"num_key_value_heads", "kv-heads", &C::kv_heads, between(1, 4096), any, true},
      {"head_dim", "head-dim", &C::head_dim, between(1, 4096), any, true},
      {"intermediate_size", "ffn-dim", &C::ffn_dim, width, any, true},
      {"max_position_embeddings", "seq-len", &C::seq_len, index, any, true},
      {"rope_theta", "rope-theta", &C::rope_theta, between(1, 1e12), any, true},
      {"rms_norm_eps", "", &C::rms_norm_eps, between(1e-30, 1), any, true},
      {"tie_word_embeddings", "untied-head", &C::tie_word_embeddings, {}, any, true},
      {"token_sparsity", "token-sparsity", &C::token_sparsity, index, is_routed},
      {"anchor_stride", "anchor-stride", &C::anchor_stride, index, has_units},
      {"dense_prefix", "dense-prefix", &C::dense_prefix, at_least(0), has_dense_prefix},
      {"anchors", "no-anchors", &C::anchors, {}, has_units},
      {"residual_gate", "no-residual-gate", &C::residual_gate, {}, has_units},
      {"token_bias_strength", "token-bias-strength", &C::token_bias_strength, between(0, 1e6), has_units},
      {"residual_gate_init", "residual-gate-init", &C::residual_gate_init, between(-1e6, 1e6), has_units},
      {"experts", "experts", &C::experts, between(0, 65536), has_experts},
      {"experts_per_token", "experts-per-token", &C::experts_per_token, between(0, 65536), moe},
      {"shared_experts", "shared-experts", &C::shared_experts, between(0, 65536), has_experts},
      {"expert_dim", "expert-dim", &C::expert_dim, between(0, 1 << 20), has_experts},
      {"expert_bias_rate", "expert-bias-rate", &C::expert_bias_rate, between(0, 1e6), moe},
      {"active_ratio", "active-ratio", &C::active_ratio, Range{0, 1, true}, deco},
      {"entropy_weight", "entropy-weight", &C::entropy_weight, between(0, 1e6), deco},
      {"entropy_growth", "entropy-growth", &C::entropy_growth, between(1, 1e6), deco},
  };
  return fields;
}

inline const ModelField& model_field(const std::string& flag) {
  for (const ModelField& field : model_fields()) {
    if (field.flag == flag) return field;
  }
  fail("no model field has the flag --", flag);
}

// Refuses what could not be counted in 64 bits or would fill the memory with layers' names, before any plan
// is made. In floating point, since that is the point.
inline void validate_size(const ModelConfig& c, int64_t batch_size = 1) {
  constexpr double kLayers = 1e5, kTensors = 1e7, kParameters = 1e15, kBytes = 1e18, kRows = 2147483647;
  auto real = [](int64_t n) { return static_cast<double>(n); };
  const double layers = real(c.active_layers) * real(has_units(c.arch) ? c.token_sparsity : 2);
  if (layers > kLayers) {
    usage_error("--active-layers ", c.active_layers,
                has_units(c.arch) ? " times --token-sparsity " + std::to_string(c.token_sparsity) : "",
                " is more than ", shortest(kLayers), " layers, choose fewer");
  }
  const double experts = has_experts(c.arch) ? real(c.experts) + real(c.shared_experts) : 0;
  if (layers * experts * 3 > kTensors) {
    usage_error("--experts ", c.experts, " in --active-layers ", c.active_layers, " is more than ",
                shortest(kTensors), " matrices, choose fewer");
  }
  const double ffn = std::max(real(c.ffn_dim), experts * real(c.expert_dim));
  const double layer = real(c.dim) * (real(c.qkv_dim()) + real(c.q_dim()) + 3 * ffn);
  const double parameters = real(c.vocab_size) * real(c.dim) + layers * layer;
  if (parameters > kParameters) {
    usage_error("--dim ", c.dim, " with --ffn-dim ", c.ffn_dim, " and --vocab-size ", c.vocab_size,
                " makes up to ", parameters, " parameters, more than ", shortest(kParameters),
                "; choose a smaller model");
  }
  const double rows = real(batch_size) * real(c.seq_len);
  if (rows > kRows) {
    usage_error("--batch-size ", batch_size, " times --seq-len ", c.seq_len,
                " is more than 2147483647 tokens, choose a smaller batch");
  }
  const double row_bytes = 4 * (8 * real(c.dim) + 4 * real(c.qkv_dim()) + 8 * ffn + 4 * real(c.heads) +
                                experts * (2 * real(c.dim) + 8));
  if (rows * row_bytes * layers > kBytes) {
    usage_error("--batch-size ", batch_size, " with --seq-len ", c.seq_len, " needs up to ",
                rows * row_bytes * layers, " bytes of activations, choose a smaller batch or model");
  }
}

// ---------------------------------------------------------------------------------------------------
// Writing

inline nlohmann::json config_to_json(const ModelConfig& c) {
  const bool dense = c.arch == Arch::dense;
  const LayerPlan plan = make_layer_plan(c);
  nlohmann::json out = {
      {"architectures", nlohmann::json::array({dense ? "Qwen3ForCausalLM" : "XModForCausalLM"})},
      {"model_type", dense ? "qwen3" : "xmod"},
      {"num_hidden_layers", count_layers(plan)},
      {"hidden_act", "silu"},
      {"attention_bias", false},
      {"torch_dtype", "float32"},
      {"arch", arch_name(c.arch)},
      {"layer_pattern", pattern(plan)},
  };
  for (const ModelField& field : model_fields()) {
    if (!field.hugging_face && !field.belongs_to(c.arch)) continue;
    std::visit([&](auto member) { out[field.key] = c.*member; }, field.member);
  }
  out["residual_gate"] = has_residual_gate(c);  // what the architecture makes of them: mod has neither
  out["token_bias_strength"] = token_bias(c);
  return out;
}

// ---------------------------------------------------------------------------------------------------
// Reading

namespace detail {

// Takes checked values out of one config.json. Every complaint names the file and the key.
class ConfigReader {
 public:
  ConfigReader(const nlohmann::json& json, const std::string& path) : json_(json), path_(path) {
    if (!json.is_object()) fail(path, ": expected a JSON object of settings, found ", show(json));
  }

  bool has(const char* key) const { return json_.contains(key); }

  const nlohmann::json& value(const char* key) const {
    const auto found = json_.find(key);
    if (found == json_.end()) fail(path_, ": the key ", key, " is missing; is it the right file, and whole?");
    return *found;
  }

  void read(const char* key, const Range& range, int64_t& out) const {
    const nlohmann::json& found = value(key);
    const bool fits = found.is_number_unsigned()
                          ? found.get<uint64_t>() <= uint64_t{std::numeric_limits<int64_t>::max()}
                          : found.is_number_integer();
    if (!fits || !range.contains(found.get<double>())) complain(key, "a whole number" + range.text());
    out = found.get<int64_t>();
  }
  void read(const char* key, const Range& range, double& out) const {
    const nlohmann::json& found = value(key);
    if (!found.is_number() || !range.contains(found.get<double>())) complain(key, "a number" + range.text());
    out = found.get<double>();
  }
  void read(const char* key, const Range&, bool& out) const {
    if (!value(key).is_boolean()) complain(key, "true or false");
    out = value(key).get<bool>();
  }

  std::string text(const char* key) const {
    if (!value(key).is_string()) complain(key, "a text");
    return value(key).get<std::string>();
  }

  // A setting that changes what the model computes, and of which only one value is built.
  void expect_if_present(const char* key, const nlohmann::json& only) const {
    if (has(key) && value(key) != only) complain(key, show(only) + ", the only value this program computes");
  }

  [[noreturn]] void complain(const char* key, const std::string& expected) const {
    fail(path_, ": ", key, " is ", show(value(key)), ", expected ", expected);
  }

 private:
  static std::string show(const nlohmann::json& value) {
    constexpr size_t kLongest = 60;
    std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
    if (text.size() > kLongest) text = text.substr(0, kLongest) + "...";
    return text;
  }

  const nlohmann::json& json_;
  const std::string& path_;
};

inline Arch read_arch(const ConfigReader& in) {
  const std::string model_type = in.text("model_type");
  if (model_type != "qwen3" && model_type != "xmod") {
    in.complain("model_type", "\"xmod\" or Hugging Face's dense \"qwen3\"");
  }
  if (model_type == "qwen3" && !in.has("arch")) return Arch::dense;
  const std::string name = in.text("arch");
  std::string valid;
  for (const auto& [known, arch] : arch_names()) {
    if (known == name && (arch == Arch::dense) == (model_type == "qwen3")) return arch;
    if ((arch == Arch::dense) == (model_type == "qwen3")) valid += (valid.empty() ? "" : " ") + known;
  }
  in.complain("arch", "one of: " + valid + " (model_type is \"" + model_type + "\")");
}

// What a Qwen3 model of Hugging Face may have and this program does not compute.
inline void refuse_other_blocks(const ConfigReader& in) {
  in.expect_if_present("hidden_act", "silu");
  in.expect_if_present("attention_bias", false);
  in.expect_if_present("attention_dropout", 0);
  in.expect_if_present("use_sliding_window", false);
  in.expect_if_present("rope_scaling", nullptr);
  in.expect_if_present("quantization_config", nullptr);
  if (!in.has("layer_types")) return;
  for (const nlohmann::json& type : in.value("layer_types")) {
    if (type != "full_attention")
      in.complain("layer_types", "\"full_attention\" for every layer, the only one this program computes");
  }
}

// Newer transformers keep rope_theta inside rope_parameters.
inline void read_rope(const ConfigReader& in, const std::string& path, ModelConfig& c) {
  const Range range = model_field("rope-theta").range;
  if (!in.has("rope_parameters")) return in.read("rope_theta", range, c.rope_theta);
  const std::string inner_path = path + ": rope_parameters";
  const ConfigReader inner(in.value("rope_parameters"), inner_path);
  inner.expect_if_present("rope_type", "default");
  inner.expect_if_present("partial_rotary_factor", 1);
  inner.read("rope_theta", range, c.rope_theta);
}

inline void read_fields(const ConfigReader& in, const std::string& path, ModelConfig& c) {
  for (const ModelField& field : model_fields()) {
    if (field.key == std::string("rope_theta")) {
      read_rope(in, path, c);
    } else if (field.hugging_face || (in.has("arch") && field.belongs_to(c.arch))) {
      std::visit([&](auto member) { in.read(field.key, field.range, c.*member); }, field.member);
    }
  }
  if (!in.has("arch")) in.read("num_hidden_layers", model_field("active-layers").range, c.active_layers);
}

// A message about flags, told in the words of config.json.
inline std::string flags_to_keys(std::string message) {
  std::vector<const ModelField*> fields;
  for (const ModelField& field : model_fields()) {
    if (*field.flag != '\0') fields.push_back(&field);
  }
  auto longer = [](auto a, auto b) { return std::string(a->flag).size() > std::string(b->flag).size(); };
  std::sort(fields.begin(), fields.end(), longer);  // --experts-per-token before --experts
  for (const ModelField* field : fields) {
    const std::string flag = std::string("--") + field->flag;
    for (size_t at; (at = message.find(flag)) != std::string::npos;) {
      message.replace(at, flag.size(), field->key);
    }
  }
  return message;
}

inline void check_model(const ModelConfig& c, const std::string& path) {
  try {
    validate_size(c);
    validate(c);
  } catch (const Error& error) {
    fail(path, ": ", flags_to_keys(error.what()));
  }
}

inline void check_layers(const ConfigReader& in, const ModelConfig& c) {
  const LayerPlan plan = make_layer_plan(c);
  int64_t layers = 0;
  in.read("num_hidden_layers", at_least(1), layers);
  if (layers != count_layers(plan)) {
    in.complain("num_hidden_layers",
                std::to_string(count_layers(plan)) + ", which follows from the other keys");
  }
  if (!in.has("arch") || in.text("layer_pattern") == pattern(plan)) return;
  in.complain("layer_pattern", "the pattern that follows from the other keys: " + pattern(plan));
}

}  // namespace detail

// path is for messages only.
inline ModelConfig config_from_json(const nlohmann::json& json, const std::string& path) {
  const detail::ConfigReader in(json, path);
  ModelConfig c;
  c.arch = detail::read_arch(in);
  detail::refuse_other_blocks(in);
  detail::read_fields(in, path, c);
  detail::check_model(c, path);
  detail::check_layers(in, c);
  return c;
}

// Of a checkpoint's directory, which `flag` gave.
inline ModelConfig load_config(const std::string& checkpoint, const char* flag = "--checkpoint") {
  if (!is_directory(checkpoint)) {
    fail(flag, " ", checkpoint, ": no such directory, expected one such as OUT/step_00000500");
  }
  const std::string path = checkpoint + "/config.json";
  return config_from_json(read_json_file(path), path);
}

// ---------------------------------------------------------------------------------------------------
// Comparing

namespace detail {
inline std::string show_field(int64_t value) {
  return std::to_string(value);
}
inline std::string show_field(double value) {
  return shortest(value);
}
inline std::string show_field(bool value) {
  return value ? "true" : "false";
}
}  // namespace detail

// The first field in which two models differ, with a's and b's value: "--dim 256 against 128". Empty where
// they are the same model; fields that the architecture does not know do not count.
inline std::string describe_difference(const ModelConfig& a, const ModelConfig& b) {
  if (a.arch != b.arch) return "--arch " + arch_name(a.arch) + " against " + arch_name(b.arch);
  for (const ModelField& field : model_fields()) {
    if (!field.belongs_to(a.arch)) continue;
    const bool by_flag = *field.flag != '\0' && !std::holds_alternative<bool ModelConfig::*>(field.member);
    const std::string name = by_flag ? std::string("--") + field.flag : field.key;
    std::string difference;
    std::visit(
        [&](auto member) {
          if (a.*member == b.*member) return;
          difference =
              name + " " + detail::show_field(a.*member) + " against " + detail::show_field(b.*member);
        },
        field.member);
    if (!difference.empty()) return difference;
  }
  return "";
}

}  // namespace xmod

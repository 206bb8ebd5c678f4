// config.json: writing, reading, what is refused, and how two models differ.
#include "xmod/config_json.h"

#include <gtest/gtest.h>

#include <climits>
#include <string>
#include <vector>

using namespace xmod;
using nlohmann::json;

namespace {

const char* const kPath = "out/step_00000007/config.json";

// Every architecture, with values that differ from the defaults in every field that it knows.
std::vector<ModelConfig> models() {
  std::vector<ModelConfig> all;
  for (const auto& [name, arch] : arch_names()) {
    ModelConfig c;
    c.arch = arch;
    c.vocab_size = 50257;
    c.dim = 96;
    c.active_layers = 9;
    c.heads = 6;
    c.kv_heads = 3;
    c.head_dim = 32;
    c.ffn_dim = 100;
    c.seq_len = 64;
    c.rope_theta = 12345.5;
    c.rms_norm_eps = 1e-5;
    if (is_routed(arch)) c.token_sparsity = 3;
    if (has_units(arch)) {
      c.anchor_stride = 2;
      c.dense_prefix = 1;
      c.token_bias_strength = 0.1;
      c.residual_gate_init = 1 / std::sqrt(3.0);
    }
    if (has_experts(arch)) {
      c.experts = 8;
      c.shared_experts = 2;
      c.expert_dim = 48;
    }
    if (arch == Arch::moe) {
      c.experts_per_token = 2;
      c.expert_bias_rate = 0.01;
    }
    if (arch == Arch::deco) {
      c.dense_prefix = 2;
      c.active_ratio = 0.3;
      c.entropy_weight = 0.001;
      c.entropy_growth = 1.01;
    }
    all.push_back(c);
  }
  all.push_back(all[2]);
  all.back().anchors = false;
  all.push_back(all[2]);
  all.back().residual_gate = false;
  all.push_back(all[2]);
  all.back().tie_word_embeddings = false;
  return all;
}

ModelConfig xmod_model() {
  return models()[2];
}

// A Qwen3 config.json as Hugging Face writes it.
json qwen3() {
  return json::parse(R"({
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
    "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
    "use_sliding_window": false, "vocab_size": 151936
  })");
}

std::string error_of(const json& config) {
  try {
    config_from_json(config, kPath);
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code, 1);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << "one line: " << error.what();
    return error.what();
  }
  return "no error";
}

void expect_error(const json& config, const std::vector<std::string>& parts) {
  const std::string message = error_of(config);
  EXPECT_EQ(message.find(kPath), 0u) << message;
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
  }
}

json with(json config, const std::string& key, const json& value) {
  config[key] = value;
  return config;
}

json without(json config, const std::string& key) {
  config.erase(key);
  return config;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------
// Round trip

TEST(RoundTrip, EveryArchitectureExactly) {
  for (const ModelConfig& c : models()) {
    const json written = json::parse(config_to_json(c).dump(2));
    const ModelConfig read = config_from_json(written, kPath);
    EXPECT_EQ(describe_difference(c, read), "") << arch_name(c.arch);
    EXPECT_EQ(config_to_json(read), written) << arch_name(c.arch);
  }
}

TEST(RoundTrip, Presets) {
  for (const Preset& preset : presets()) {
    EXPECT_EQ(describe_difference(config_from_json(config_to_json(preset.config), kPath), preset.config), "");
  }
}

TEST(Writing, KeysOfTheContract) {
  const json out = config_to_json(xmod_model());
  for (const char* key : {"architectures",
                          "model_type",
                          "hidden_size",
                          "num_hidden_layers",
                          "num_attention_heads",
                          "num_key_value_heads",
                          "head_dim",
                          "intermediate_size",
                          "vocab_size",
                          "max_position_embeddings",
                          "rope_theta",
                          "rms_norm_eps",
                          "tie_word_embeddings",
                          "hidden_act",
                          "attention_bias",
                          "torch_dtype",
                          "arch",
                          "active_layers",
                          "dense_prefix",
                          "token_sparsity",
                          "anchor_stride",
                          "anchors",
                          "residual_gate",
                          "token_bias_strength",
                          "residual_gate_init",
                          "layer_pattern"}) {
    EXPECT_TRUE(out.contains(key)) << key;
  }
  EXPECT_FALSE(out.contains("experts")) << "an option of other architectures";
  EXPECT_TRUE(config_to_json(models()[5]).contains("experts"));
  EXPECT_EQ(out["architectures"], json::parse(R"(["XModForCausalLM"])"));
  EXPECT_EQ(out["model_type"], "xmod");
  EXPECT_EQ(out["hidden_size"], 96);
  EXPECT_EQ(out["max_position_embeddings"], 64);
  EXPECT_EQ(out["layer_pattern"], pattern(make_layer_plan(xmod_model())));
  EXPECT_EQ(out["num_hidden_layers"], out["layer_pattern"].get<std::string>().size());
  EXPECT_EQ(out["tie_word_embeddings"], true);
  EXPECT_EQ(out["hidden_act"], "silu");
  EXPECT_EQ(out["attention_bias"], false);
  EXPECT_EQ(out["torch_dtype"], "float32");
}

TEST(Writing, DenseIsQwen3) {
  const json out = config_to_json(models()[0]);
  EXPECT_EQ(out["architectures"], json::parse(R"(["Qwen3ForCausalLM"])"));
  EXPECT_EQ(out["model_type"], "qwen3");
  EXPECT_EQ(out["num_hidden_layers"], 9);
}

// Readers of the file need not know which architecture ignores which switch.
TEST(Writing, ModHasNeitherGateNorBias) {
  const json out = config_to_json(models()[1]);
  EXPECT_EQ(out["arch"], "mod");
  EXPECT_EQ(out["residual_gate"], false);
  EXPECT_EQ(out["token_bias_strength"], 0);
}

// A file by another writer may leave out what its architecture does not know.
TEST(Reading, KeysOfOtherArchitecturesDoNotCount) {
  json dense = config_to_json(models()[0]);
  for (const ModelField& field : model_fields()) {
    if (!field.belongs_to(Arch::dense)) dense.erase(field.key);
  }
  EXPECT_EQ(describe_difference(config_from_json(dense, kPath), models()[0]), "");
  dense["experts"] = "many";
  EXPECT_EQ(error_of(dense), "no error");
}

// ---------------------------------------------------------------------------------------------------
// Hugging Face's Qwen3

TEST(Qwen3, ReadsAsDense) {
  const ModelConfig c = config_from_json(qwen3(), kPath);
  EXPECT_EQ(c.arch, Arch::dense);
  EXPECT_EQ(c.active_layers, 28);
  EXPECT_EQ(c.vocab_size, 151936);
  EXPECT_EQ(c.dim, 1024);
  EXPECT_EQ(c.heads, 16);
  EXPECT_EQ(c.kv_heads, 8);
  EXPECT_EQ(c.head_dim, 128);
  EXPECT_EQ(c.ffn_dim, 3072);
  EXPECT_EQ(c.seq_len, 40960);
  EXPECT_EQ(c.rope_theta, 1e6);
  EXPECT_EQ(c.rms_norm_eps, 1e-6);
}

TEST(Qwen3, RopeParametersOfNewerVersions) {
  json config = without(without(qwen3(), "rope_theta"), "rope_scaling");
  config["rope_parameters"] = {{"rope_theta", 500000.0}, {"rope_type", "default"}};
  EXPECT_EQ(config_from_json(config, kPath).rope_theta, 500000);
  config["rope_parameters"]["rope_type"] = "yarn";
  expect_error(config, {"rope_parameters: rope_type is \"yarn\", expected \"default\""});
  config["rope_parameters"] = {{"rope_type", "default"}};
  expect_error(config, {"rope_parameters: the key rope_theta is missing"});
  config["rope_parameters"] = {{"rope_theta", 500000.0}, {"partial_rotary_factor", 0.5}};
  expect_error(config, {"rope_parameters: partial_rotary_factor is 0.5, expected 1"});
  config["rope_theta"] = 10000.0;  // of an older version: the newer key counts
  config["rope_parameters"] = {{"rope_theta", 500000.0}};
  EXPECT_EQ(config_from_json(config, kPath).rope_theta, 500000);
}

TEST(Qwen3, AnOutputHeadOfItsOwn) {
  EXPECT_TRUE(config_from_json(qwen3(), kPath).tie_word_embeddings);
  const ModelConfig c = config_from_json(with(qwen3(), "tie_word_embeddings", false), kPath);
  EXPECT_FALSE(c.tie_word_embeddings);
  EXPECT_EQ(config_to_json(c)["tie_word_embeddings"], false);
}

TEST(Qwen3, RefusesWhatIsNotComputedHere) {
  expect_error(with(qwen3(), "tie_word_embeddings", 1), {"tie_word_embeddings is 1, expected true or false"});
  expect_error(without(qwen3(), "tie_word_embeddings"), {"tie_word_embeddings", "missing"});
  expect_error(with(qwen3(), "hidden_act", "gelu"), {"hidden_act is \"gelu\", expected \"silu\""});
  expect_error(with(qwen3(), "attention_bias", true), {"attention_bias is true, expected false"});
  expect_error(with(qwen3(), "use_sliding_window", true), {"use_sliding_window is true"});
  expect_error(with(qwen3(), "rope_scaling", {{"type", "yarn"}}), {"rope_scaling is {\"type\":\"yarn\"}"});
  expect_error(with(qwen3(), "attention_dropout", 0.1), {"attention_dropout is 0.1, expected 0"});
  expect_error(with(qwen3(), "quantization_config", {{"bits", 4}}), {"quantization_config is {\"bits\":4}"});
  expect_error(with(qwen3(), "layer_types", {"full_attention", "sliding_attention"}),
               {"layer_types is", "expected \"full_attention\" for every layer"});
  EXPECT_EQ(error_of(with(qwen3(), "layer_types", {"full_attention", "full_attention"})), "no error");
  expect_error(with(qwen3(), "model_type", "llama"), {"model_type is \"llama\"", "qwen3"});
  expect_error(with(qwen3(), "model_type", "qwen3_moe"), {"model_type is \"qwen3_moe\""});
}

// ---------------------------------------------------------------------------------------------------
// Refused

TEST(Refused, NotAnObject) {
  for (const char* text : {"[1, 2]", "3", "null", "\"xmod\""}) {
    expect_error(json::parse(text), {"expected a JSON object", std::string(text).substr(1, 1)});
  }
}

TEST(Refused, MissingKeys) {
  const json good = config_to_json(xmod_model());
  for (const auto& [key, value] : good.items()) {
    const bool optional =
        key == "architectures" || key == "hidden_act" || key == "attention_bias" || key == "torch_dtype";
    const json config = without(good, key);
    if (optional) {
      EXPECT_EQ(error_of(config), "no error") << key;
    } else {
      expect_error(config, {"the key " + key + " is missing"});
    }
  }
  for (const ModelConfig& c : models()) {
    for (const ModelField& field : model_fields()) {
      if (field.hugging_face || !field.belongs_to(c.arch)) continue;
      expect_error(without(config_to_json(c), field.key),
                   {std::string("the key ") + field.key + " is missing"});
    }
  }
  for (const char* key : {"hidden_size", "num_hidden_layers", "head_dim", "rope_theta", "model_type"}) {
    expect_error(without(qwen3(), key), {std::string("the key ") + key + " is missing"});
  }
}

TEST(Refused, WrongTypes) {
  const json good = config_to_json(xmod_model());
  for (const ModelField& field : model_fields()) {
    if (!field.belongs_to(Arch::xmod)) continue;
    for (const json& bad : {json("x"), json(nullptr), json::array({1}), json::object()}) {
      expect_error(with(good, field.key, bad), {std::string(field.key) + " is " + bad.dump(), "expected"});
    }
    if (std::holds_alternative<bool ModelConfig::*>(field.member)) {
      expect_error(with(good, field.key, 1), {"expected true or false"});
    } else {
      expect_error(with(good, field.key, true), {"expected a"});
    }
    if (std::holds_alternative<int64_t ModelConfig::*>(field.member)) {
      expect_error(with(good, field.key, 2.5), {std::string(field.key) + " is 2.5, expected a whole number"});
    }
  }
  expect_error(with(good, "arch", 3), {"arch is 3, expected a text"});
  expect_error(with(good, "layer_pattern", 3), {"layer_pattern is 3, expected a text"});
}

TEST(Refused, NumbersOutOfRange) {
  const json good = config_to_json(xmod_model());
  for (const ModelField& field : model_fields()) {
    if (!field.belongs_to(Arch::xmod)) continue;
    if (!std::holds_alternative<int64_t ModelConfig::*>(field.member)) continue;
    for (const json& bad : {json(-1), json(INT64_MIN), json(UINT64_MAX)}) {
      expect_error(with(good, field.key, bad), {std::string(field.key) + " is " + bad.dump()});
    }
  }
  expect_error(with(good, "hidden_size", 0), {"hidden_size is 0, expected a whole number from 1 to 1048576"});
  expect_error(with(good, "rope_theta", 0), {"rope_theta is 0, expected a number from 1 to 1e+12"});
  expect_error(with(good, "rms_norm_eps", -1e-6), {"rms_norm_eps"});
  expect_error(with(good, "rms_norm_eps", 1e-60), {"rms_norm_eps"});  // 0 as a float
  expect_error(with(good, "token_bias_strength", -1), {"token_bias_strength is -1"});
}

TEST(Refused, ModelsThatCannotBeInTheWordsOfTheFile) {
  const json good = config_to_json(xmod_model());
  expect_error(with(good, "num_attention_heads", 7),
               {"num_attention_heads 7 is not a multiple of num_key_value_heads 3"});
  expect_error(with(good, "head_dim", 31), {"head_dim 31 is odd"});
  expect_error(with(good, "token_sparsity", 65), {"token_sparsity 65", "max_position_embeddings 64"});
  expect_error(with(good, "dense_prefix", 9), {"dense_prefix 9", "active_layers"});
  expect_error(with(config_to_json(models()[5]), "experts_per_token", 9),
               {"experts_per_token 9 is larger than experts 8"});
  for (const json& config : {with(good, "num_attention_heads", 7), with(good, "head_dim", 31)}) {
    EXPECT_EQ(error_of(config).find("--"), std::string::npos) << error_of(config);
  }
}

// A hostile file must not make the reader allocate a plan of a billion layers.
TEST(Refused, SizesBeyondCounting) {
  const json good = config_to_json(xmod_model());
  expect_error(with(with(good, "active_layers", 1000000), "max_position_embeddings", 2147483647),
               {"active_layers 1000000", "layers"});
  expect_error(with(with(good, "token_sparsity", 2000000000), "max_position_embeddings", 2147483647),
               {"token_sparsity 2000000000", "layers"});
  expect_error(with(qwen3(), "num_hidden_layers", 1000000), {"active_layers 1000000", "layers"});
  expect_error(with(qwen3(), "num_hidden_layers", int64_t{1} << 40), {"num_hidden_layers is 1099511627776"});
}

TEST(Refused, LayersThatDoNotFollow) {
  const json good = config_to_json(xmod_model());
  const std::string right = good["layer_pattern"];
  expect_error(with(good, "num_hidden_layers", 5),
               {"num_hidden_layers is 5, expected " + std::to_string(right.size())});
  expect_error(with(good, "layer_pattern", "DDSS"), {"layer_pattern is \"DDSS\", expected", right});
  expect_error(with(good, "active_layers", 10), {"num_hidden_layers"});
  expect_error(with(good, "anchors", false), {"num_hidden_layers"});
}

TEST(Refused, Architectures) {
  const json good = config_to_json(xmod_model());
  expect_error(with(good, "arch", "xmodd"),
               {"arch is \"xmodd\", expected one of: mod xmod routed-ffn selected-q moe"});
  expect_error(with(good, "arch", "dense"), {"arch is \"dense\"", "model_type is \"xmod\""});
  expect_error(with(qwen3(), "arch", "xmod"), {"arch is \"xmod\", expected one of: dense"});
  expect_error(without(good, "arch"), {"the key arch is missing"});
}

TEST(Refused, LongAndStrangeValuesStayOneLine) {
  const json good = config_to_json(xmod_model());
  expect_error(with(good, "hidden_size", std::string(100000, 'x')), {"xxx...", "expected a whole number"});
  expect_error(with(good, "arch", "a\nb\xff"), {"arch is \"a\\nb"});
  EXPECT_LT(error_of(with(good, "hidden_size", std::string(100000, 'x'))).size(), 300u);
}

// ---------------------------------------------------------------------------------------------------
// Differences

TEST(Difference, NamesTheFirstFieldWithBothValues) {
  const ModelConfig a = xmod_model();
  ModelConfig b = a;
  EXPECT_EQ(describe_difference(a, b), "");
  b.residual_gate_init = 0.25;
  EXPECT_EQ(describe_difference(b, a), "--residual-gate-init 0.25 against 0.5773502691896258");
  b.anchors = false;
  EXPECT_EQ(describe_difference(a, b), "anchors true against false");
  b.rms_norm_eps = 1e-6;
  EXPECT_EQ(describe_difference(a, b), "rms_norm_eps 1e-05 against 1e-06");
  b.dim = 128;
  EXPECT_EQ(describe_difference(a, b), "--dim 96 against 128");
  b.arch = Arch::dense;
  EXPECT_EQ(describe_difference(a, b), "--arch xmod against dense");
}

TEST(Difference, EveryFieldOfTheArchitectureCounts) {
  for (const ModelConfig& a : models()) {
    for (const ModelField& field : model_fields()) {
      ModelConfig b = a;
      std::visit([&](auto member) { b.*member = !(b.*member); }, field.member);
      EXPECT_EQ(describe_difference(a, b).empty(), !field.belongs_to(a.arch))
          << arch_name(a.arch) << " " << field.key;
    }
  }
}

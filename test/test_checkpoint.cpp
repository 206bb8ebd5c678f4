// Checkpoints hold all of a run's state, go back in bit for bit, and are refused when anything is wrong with
// them. Killing a run, full disks and the like stand in test_training.py.
#include "xmod/checkpoint.h"

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <functional>

#include "backend.h"
#include "expect_error.h"

namespace xmod {
namespace {

using Names = std::vector<std::string>;

ModelConfig small_config(Arch arch) {
  ModelConfig c;
  c.arch = arch;
  c.vocab_size = 37;
  c.dim = 12;
  c.active_layers = 5;
  c.heads = 2;
  c.kv_heads = 1;
  c.head_dim = 6;
  c.ffn_dim = 20;
  c.seq_len = 10;
  c.token_sparsity = 2;
  c.dense_prefix = 1;
  if (has_experts(arch)) {
    c.experts = 3;
    c.expert_dim = 8;
    c.shared_experts = 1;
  }
  if (arch == Arch::moe) c.experts_per_token = 2;
  if (arch == Arch::deco) c.entropy_weight = 0.1, c.entropy_growth = 1.5;  // so much that it shows
  return c;
}

// A model, its optimizer and where the run stands.
struct SmallRun {
  static constexpr int64_t kBatch = 2;

  // With steps: initialised, and trained for so many.
  SmallRun(TestBackend& be, const ModelConfig& config, Optimizer choice = Optimizer::muon, int64_t steps = 0)
      : be(be), model(be, config, kBatch, Use::training), optimizer(be, model.table, {.choice = choice}) {
    if (steps > 0) model.initialise(1);
    train(steps);
  }

  void train(int64_t steps) {
    const int64_t T = model.config.seq_len;
    for (int64_t i = 0; i < steps; i++) {
      state.step++;
      state.tokens += kBatch * T;
      state.loader.position = 3 * state.step;
      const Ints tokens =
          random_ids(kBatch * T + 1, model.config.vocab_size, static_cast<uint64_t>(state.step));
      model.zero_gradients();
      model.forward_backward(tokens.data(), tokens.data() + 1, kBatch, T, 1);
      optimizer.update(model.params(), model.grads(), optimizer.gradient_norm(model.grads()), state.step,
                       1e-2, 1e-2);
      model.close_step(state.step, 1);
    }
  }

  // Every number that a checkpoint has to keep.
  Floats numbers() const {
    Floats all = download(be, model.params(), model.table.total);
    append(all, download(be, model.buffers(), model.table.buffers_total));
    append(all, download(be, optimizer.first_moment(), model.table.total));
    append(all, download(be, optimizer.second_moment(), optimizer.table.second_moment_total));
    return all;
  }

  std::string save(const std::string& out) const {
    save_checkpoint(out, model, optimizer, state, {});
    return checkpoint_directory(out, state.step);
  }
  void load(const std::string& checkpoint) { state = load_checkpoint(checkpoint, model, optimizer); }

  TestBackend& be;
  Model<TestBackend> model;
  OptimizerState<TestBackend> optimizer;
  TrainerState state{
      .step = 0, .tokens = 0, .loader = {.seed = 42, .epoch = 1, .position = 0, .num_sequences = 99}};
};

class Checkpoints : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "xmod_checkpoint_XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    out_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(out_); }

  SmallRun trained(const ModelConfig& config, int64_t steps, Optimizer choice = Optimizer::muon) {
    return SmallRun(be_, config, choice, steps);
  }

  TestBackend be_{{.threads = 1}};
  std::string out_;
};

void put(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::trunc) << text;
}

// ---------------------------------------------------------------------------------------------------
// there and back

class RoundTrip : public Checkpoints, public ::testing::WithParamInterface<std::tuple<Arch, Optimizer>> {};

INSTANTIATE_TEST_SUITE_P(All, RoundTrip,
                         ::testing::Combine(::testing::Values(Arch::dense, Arch::mod, Arch::xmod,
                                                              Arch::routed_ffn, Arch::selected_q, Arch::moe,
                                                              Arch::deco),
                                            ::testing::Values(Optimizer::muon, Optimizer::adamw)),
                         [](const auto& info) {
                           return identifier(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) == Optimizer::muon ? "_muon" : "_adamw");
                         });

TEST_P(RoundTrip, EveryNumberComesBackAndTrainingGoesOnBitForBit) {
  const auto [arch, choice] = GetParam();
  SmallRun run = trained(small_config(arch), 3, choice);
  const std::string checkpoint = run.save(out_);

  SmallRun resumed(be_, small_config(arch), choice);
  resumed.load(checkpoint);
  EXPECT_TRUE(same_bits(resumed.numbers(), run.numbers()));
  EXPECT_EQ(detail::to_json(resumed.state), detail::to_json(run.state));
  EXPECT_EQ(resumed.state.step, 3);
  EXPECT_EQ(resumed.state.tokens, 60);
  EXPECT_EQ(resumed.state.loader.seed, 42u);
  EXPECT_EQ(resumed.state.loader.epoch, 1);
  EXPECT_EQ(resumed.state.loader.position, 9);
  EXPECT_EQ(resumed.state.loader.num_sequences, 99);

  run.train(2);
  resumed.train(2);
  EXPECT_TRUE(same_bits(resumed.numbers(), run.numbers()));
}

TEST_F(Checkpoints, TheFilesAndTensorsOfACheckpoint) {
  const SmallRun run = trained(small_config(Arch::xmod), 1);
  save_checkpoint(out_, run.model, run.optimizer, run.state, {{"tokenizer.bin", "its bytes"}});
  const std::string checkpoint = out_ + "/step_00000001";
  EXPECT_EQ(directory_entries(out_), Names{"step_00000001"});
  EXPECT_EQ(directory_entries(checkpoint), (Names{"config.json", "model.safetensors", "optimizer.safetensors",
                                                  "tokenizer.bin", "trainer.json"}));
  EXPECT_EQ(read_file(checkpoint + "/tokenizer.bin"), "its bytes");
  EXPECT_EQ(describe_difference(load_config(checkpoint), run.model.config), "");

  const SafetensorsFile weights(checkpoint + "/model.safetensors");  // layers: D SS D SS D
  EXPECT_EQ(weights.metadata().at("format"), "pt");
  EXPECT_EQ(weights.tensors().size(), 2 + 7 * 11 + 4 * 3u);
  EXPECT_EQ(weights.info("model.embed_tokens.weight").shape, (Shape{37, 12}));
  EXPECT_EQ(weights.info("model.layers.0.self_attn.q_proj.weight").shape, (Shape{12, 12}));
  EXPECT_EQ(weights.info("model.layers.4.self_attn.v_proj.weight").shape, (Shape{6, 12}));
  EXPECT_EQ(weights.info("model.layers.2.router.weight").shape, (Shape{1, 12}));
  EXPECT_EQ(weights.info("model.layers.2.router.threshold").shape, (Shape{1}));
  EXPECT_EQ(weights.info("model.layers.1.residual_gate").shape, (Shape{1}));
  EXPECT_FALSE(weights.contains("model.layers.0.router.weight"));

  const SafetensorsFile state(checkpoint + "/optimizer.safetensors");
  EXPECT_TRUE(state.contains("model.layers.1.mlp.down_proj.weight.momentum"));
  EXPECT_FALSE(state.contains("model.layers.1.mlp.down_proj.weight.exp_avg"));
  EXPECT_TRUE(state.contains("model.embed_tokens.weight.exp_avg"));
  EXPECT_TRUE(state.contains("model.embed_tokens.weight.exp_avg_sq"));
  EXPECT_TRUE(state.contains("model.layers.1.residual_gate.exp_avg_sq"));
}

TEST_F(Checkpoints, ADenseModelHasQwen3sTensorsAndNoOthers) {
  const std::string checkpoint = trained(small_config(Arch::dense), 1).save(out_);
  EXPECT_EQ(SafetensorsFile(checkpoint + "/model.safetensors").tensors().size(), 2 + 5 * 11u);
}

// Hugging Face's names where it has such layers.
TEST_F(Checkpoints, TheTensorsOfLayersWithExperts) {
  const std::string moe = trained(small_config(Arch::moe), 2).save(out_ + "/moe") + "/model.safetensors";
  const SafetensorsFile weights(moe);
  EXPECT_EQ(weights.tensors().size(), 2 + 5 * (8 + 1 + 1 + 3 * 3 + 3u));
  EXPECT_EQ(weights.info("model.layers.0.mlp.gate.weight").shape, (Shape{3, 12}));
  EXPECT_EQ(weights.info("model.layers.0.mlp.gate.e_score_correction_bias").shape, (Shape{3}));
  EXPECT_EQ(weights.info("model.layers.4.mlp.experts.2.up_proj.weight").shape, (Shape{8, 12}));
  EXPECT_EQ(weights.info("model.layers.4.mlp.shared_experts.0.down_proj.weight").shape, (Shape{12, 8}));
  Floats biases(3);
  weights.read_f32("model.layers.2.mlp.gate.e_score_correction_bias", {3}, biases.data());
  EXPECT_NE(biases, Floats(3)) << "the biases have not moved";

  const SmallRun run = trained(small_config(Arch::deco), 1);
  const std::string deco = run.save(out_ + "/deco");
  const SafetensorsFile others(deco + "/model.safetensors");
  EXPECT_EQ(others.tensors().size(), 2 + 11 + 4 * (8 + 3 + 2 * 3 + 3 + 1u));
  EXPECT_EQ(others.info("model.layers.1.mlp.expert_scale").shape, (Shape{3}));
  EXPECT_EQ(others.info("model.layers.1.mlp.expert_norm.weight").shape, (Shape{8}));
  EXPECT_EQ(others.info("model.layers.1.mlp.shared_expert.gate_proj.weight").shape, (Shape{8, 12}));
  EXPECT_FALSE(others.contains("model.layers.0.mlp.gate.weight"));
  Floats lambda(1);
  others.read_f32("model.layers.1.mlp.entropy_weight", {1}, lambda.data());
  EXPECT_EQ(lambda[0], entropy_weight(run.model));
  EXPECT_NE(lambda[0], static_cast<float>(run.model.config.entropy_weight)) << "lambda has not moved";
}

TEST_F(Checkpoints, TheSameStepIsWrittenAnew) {
  SmallRun run = trained(small_config(Arch::xmod), 1);
  const std::string checkpoint = run.save(out_);
  put(checkpoint + "/stale", "from before");
  const float changed = 7;
  be_.to_device(run.model.params(), &changed, 1);
  run.save(out_);
  EXPECT_EQ(directory_entries(out_), Names{"step_00000001"});
  EXPECT_FALSE(path_exists(checkpoint + "/stale"));
  SmallRun again(be_, run.model.config);
  again.load(checkpoint);
  EXPECT_EQ(again.numbers()[0], 7);
}

// ---------------------------------------------------------------------------------------------------
// numbers that are none

TEST_F(Checkpoints, ARunThatDivergedDoesNotReplaceItsCheckpoint) {
  SmallRun run = trained(small_config(Arch::xmod), 1);
  run.save(out_);
  const Floats good = run.numbers();
  run.state.step = 2;
  const int64_t last = run.model.table.total - 1, moments = run.optimizer.table.second_moment_total;
  const std::vector<std::pair<float*, const char*>> places = {
      {run.model.params(), "model.embed_tokens.weight"},
      {run.model.params() + last, "model.norm.weight"},
      {run.model.thresholds() + 1, "model.layers.2.router.threshold"},
      {run.optimizer.first_moment(), "model.embed_tokens.weight.exp_avg"},
      {run.optimizer.second_moment(), "model.embed_tokens.weight.exp_avg_sq"}};
  ASSERT_GT(moments, 0);
  for (const auto& [place, name] : places) {
    for (float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      const float before = download(be_, place, 1)[0];
      be_.to_device(place, &bad, 1);
      expect_error([&] { run.save(out_); }, {"step_00000002", name, "infinite or NaN"});
      be_.to_device(place, &before, 1);
      EXPECT_EQ(directory_entries(out_), Names{"step_00000001"});
    }
  }
  SmallRun resumed(be_, run.model.config);
  resumed.load(out_ + "/step_00000001");
  EXPECT_TRUE(same_bits(resumed.numbers(), good));
  run.save(out_);  // nothing is wrong any more
  EXPECT_EQ(directory_entries(out_), (Names{"step_00000001", "step_00000002"}));
}

// ---------------------------------------------------------------------------------------------------
// checkpoints that do not belong here

TEST_F(Checkpoints, AnotherModelIsRefused) {
  const std::string checkpoint = trained(small_config(Arch::xmod), 1).save(out_);
  const std::vector<std::pair<std::function<void(ModelConfig&)>, std::string>> changes = {
      {[](ModelConfig& c) { c.arch = Arch::mod; }, "--arch mod against xmod"},
      {[](ModelConfig& c) { c.dim = 16; }, "--dim 16 against 12"},
      {[](ModelConfig& c) { c.vocab_size = 38; }, "--vocab-size 38 against 37"},
      {[](ModelConfig& c) { c.heads = 3; }, "--heads 3 against 2"},
      {[](ModelConfig& c) { c.seq_len = 11; }, "--seq-len 11 against 10"},
      {[](ModelConfig& c) { c.token_sparsity = 3; }, "--token-sparsity 3 against 2"},
      {[](ModelConfig& c) { c.anchors = false; }, "anchors false against true"},
      {[](ModelConfig& c) { c.residual_gate = false; }, "residual_gate false against true"},
      {[](ModelConfig& c) { c.token_bias_strength = 0; }, "--token-bias-strength 0 against 1"},
      {[](ModelConfig& c) { c.rope_theta = 500; }, "--rope-theta 500 against 10000"}};
  for (const auto& [change, difference] : changes) {
    ModelConfig other = small_config(Arch::xmod);
    change(other);
    SmallRun run(be_, other);
    expect_error([&] { run.load(checkpoint); }, {"--resume", checkpoint, difference});
  }
}

TEST_F(Checkpoints, OtherExpertsAreRefused) {
  using Change = std::function<void(ModelConfig&)>;
  auto check = [&](Arch arch, const std::vector<std::pair<Change, std::string>>& changes) {
    const std::string checkpoint = trained(small_config(arch), 1).save(out_ + "/" + arch_name(arch));
    for (const auto& [change, difference] : changes) {
      ModelConfig other = small_config(arch);
      change(other);
      SmallRun run(be_, other);
      expect_error([&] { run.load(checkpoint); }, {"--resume", checkpoint, difference});
    }
  };
  check(Arch::moe, {{[](ModelConfig& c) { c.experts = 4; }, "--experts 4 against 3"},
                    {[](ModelConfig& c) { c.experts_per_token = 1; }, "--experts-per-token 1 against 2"},
                    {[](ModelConfig& c) { c.shared_experts = 0; }, "--shared-experts 0 against 1"},
                    {[](ModelConfig& c) { c.expert_dim = 9; }, "--expert-dim 9 against 8"},
                    {[](ModelConfig& c) { c.expert_bias_rate = 0; }, "--expert-bias-rate 0 against 0.01"}});
  check(Arch::deco,
        {{[](ModelConfig& c) { c.arch = Arch::moe, c.experts_per_token = 1; }, "--arch moe against deco"},
         {[](ModelConfig& c) { c.active_ratio = 0.5; }, "--active-ratio 0.5 against 0.2"},
         {[](ModelConfig& c) { c.entropy_weight = 1; }, "--entropy-weight 1 against 0.1"},
         {[](ModelConfig& c) { c.entropy_growth = 2; }, "--entropy-growth 2 against 1.5"}});
}

TEST_F(Checkpoints, AnotherOptimizerIsRefused) {
  const ModelConfig config = small_config(Arch::xmod);
  const std::string muon = trained(config, 1).save(out_ + "/muon");
  const std::string adamw = trained(config, 1, Optimizer::adamw).save(out_ + "/adamw");
  SmallRun with_muon(be_, config), with_adamw(be_, config, Optimizer::adamw);
  expect_error([&] { with_muon.load(adamw); }, {"--resume", adamw, "another --optimizer"});
  expect_error([&] { with_adamw.load(muon); }, {"--resume", muon, "another --optimizer"});
}

// model.safetensors as an editor of such files could leave it.
class Edited : public Checkpoints {
 protected:
  struct Tensor {
    TensorInfo info;
    Floats values;
  };

  void SetUp() override {
    Checkpoints::SetUp();
    open(Arch::xmod);
  }

  void open(Arch arch) {
    arch_ = arch;
    tensors_.clear();
    checkpoint_ = trained(small_config(arch), 1).save(out_ + "/" + arch_name(arch));
    path_ = checkpoint_ + "/model.safetensors";
    const SafetensorsFile file(path_);
    for (const TensorInfo& info : file.tensors()) {
      tensors_.push_back({{info.name, info.dtype, info.shape}, Floats(static_cast<size_t>(info.elements()))});
      file.read_f32(info.name, info.shape, tensors_.back().values.data());
    }
  }

  Tensor& tensor(const std::string& name) {
    for (Tensor& t : tensors_) {
      if (t.info.name == name) return t;
    }
    ADD_FAILURE() << name;
    return tensors_[0];
  }

  void write(Dtype dtype = Dtype::F32) {
    std::vector<TensorInfo> infos;
    for (Tensor& t : tensors_) infos.push_back({t.info.name, dtype, t.info.shape});
    SafetensorsWriter writer(path_, infos);
    for (Tensor& t : tensors_) {
      std::vector<uint16_t> halves;
      for (float value : t.values)
        halves.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16));
      writer.write(t.info.name, dtype == Dtype::F32 ? static_cast<void*>(t.values.data()) : halves.data());
    }
    writer.commit();
  }

  // eval and generate read only the weights; --resume reads all.
  void expect_refused(const Names& parts) {
    Model<TestBackend> model(be_, load_config(checkpoint_), 1, Use::inference);
    expect_error([&] { load_model(checkpoint_, model); }, parts);
    SmallRun run(be_, small_config(arch_));
    expect_error([&] { run.load(checkpoint_); }, parts);
  }

  Arch arch_;
  std::string checkpoint_, path_;
  std::vector<Tensor> tensors_;
};

TEST_F(Edited, UnchangedItOpens) {
  write();
  SmallRun run(be_, small_config(Arch::xmod));
  run.load(checkpoint_);
  EXPECT_TRUE(same_bits(run.numbers(), trained(small_config(Arch::xmod), 1).numbers()));
}

TEST_F(Edited, Bfloat16WeightsOpenToo) {
  write(Dtype::BF16);
  SmallRun run(be_, small_config(Arch::xmod));
  run.load(checkpoint_);
  const Floats exact = tensor("model.norm.weight").values;
  const Floats found = download(be_, run.model.params() + run.model.table.final_norm, 12);
  for (size_t i = 0; i < exact.size(); i++) {
    EXPECT_EQ(std::bit_cast<uint32_t>(found[i]), std::bit_cast<uint32_t>(exact[i]) & 0xffff0000u);
  }
}

TEST_F(Edited, AMissingTensor) {
  std::erase_if(tensors_, [](const Tensor& t) { return t.info.name == "model.layers.2.router.threshold"; });
  write();
  expect_refused({path_, "no tensor model.layers.2.router.threshold"});
}

TEST_F(Edited, AnUnknownTensor) {
  tensors_.push_back({{"model.layers.9.extra\nline", Dtype::F32, {3}}, {1, 2, 3}});
  write();
  expect_refused({path_, "model.layers.9.extra?line", "not one of this model's 91 tensors"});
}

TEST_F(Edited, AnotherShape) {
  tensor("model.layers.0.mlp.up_proj.weight").info.shape = {12, 20};
  write();
  expect_refused({path_, "model.layers.0.mlp.up_proj.weight", "[12, 20]", "[20, 12]"});
}

TEST_F(Edited, AnotherSize) {
  tensor("model.norm.weight") = {{"model.norm.weight", Dtype::F32, {4000}}, Floats(4000, 1.0f)};
  write();
  expect_refused({path_, "model.norm.weight", "[4000]", "[12]"});
}

TEST_F(Edited, WeightsThatAreNotNumbers) {
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    float& value = tensor("model.layers.1.self_attn.k_proj.weight").values[5];
    const float before = std::exchange(value, bad);
    write();
    expect_refused({path_, "model.layers.1.self_attn.k_proj.weight"});
    value = before;
  }
}

TEST_F(Edited, ExpertBiases) {
  open(Arch::moe);
  const std::string bias = "model.layers.2.mlp.gate.e_score_correction_bias";
  for (float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    tensor(bias).values[1] = bad;
    write();
    expect_refused({path_, bias});
  }
  tensor(bias) = {{bias, Dtype::F32, {4}}, Floats(4)};
  write();
  expect_refused({path_, bias, "[4]", "[3]"});
  std::erase_if(tensors_, [&](const Tensor& t) { return t.info.name == bias; });
  write();
  expect_refused({path_, "no tensor " + bias});
}

// ---------------------------------------------------------------------------------------------------
// JSON that is broken

TEST_F(Checkpoints, TrainerJsonIsCheckedKeyByKey) {
  const std::string checkpoint = trained(small_config(Arch::mod), 1).save(out_);
  const std::string path = checkpoint + "/trainer.json", good = read_file(path);
  auto changed = [&](const std::function<void(nlohmann::json&)>& change) {
    nlohmann::json json = nlohmann::json::parse(good);
    change(json);
    return json.dump();
  };
  using Json = nlohmann::json;
  const std::vector<std::pair<std::string, std::string>> broken = {
      {"", "not valid JSON"},
      {good.substr(0, good.size() / 2), "not valid JSON"},
      {"[1, 2]", "expected a JSON object"},
      {std::string(100000, '[') + std::string(100000, ']'), "deep"},
      {changed([](Json& j) { j.erase("step"); }), "step is missing"},
      {changed([](Json& j) { j["step"] = "one\ntwo"; }), "step is \"one\\ntwo\""},
      {changed([](Json& j) { j["step"] = -1; }), "step is -1"},
      {changed([](Json& j) { j["step"] = 1.5; }), "step is 1.5"},
      {changed([](Json& j) { j["tokens"] = nullptr; }), "tokens is null"},
      {changed([](Json& j) { j["tokens"] = 1e30; }), "tokens is 1e+30"},
      {changed([](Json& j) { j.erase("data_loader"); }), "data_loader is missing"},
      {changed([](Json& j) { j["data_loader"] = 3; }), "data_loader: expected a JSON object"},
      {changed([](Json& j) { j["data_loader"].erase("epoch"); }), "data_loader: the key epoch is missing"},
      {changed([](Json& j) { j["data_loader"]["position"] = -3; }), "data_loader: position is -3"}};
  for (const auto& [text, part] : broken) {
    put(path, text);
    SmallRun run(be_, small_config(Arch::mod));
    expect_error([&] { run.load(checkpoint); }, {path, part});
  }
  std::filesystem::remove(path);
  SmallRun run(be_, small_config(Arch::mod));
  expect_error([&] { run.load(checkpoint); }, {path, "No such file"});
  put(path, good);
  run.load(checkpoint);
}

TEST_F(Checkpoints, ALargeSeedComesBack) {
  SmallRun run = trained(small_config(Arch::dense), 1);
  run.state.loader.seed = INT64_MAX;  // the largest that --seed takes
  SmallRun resumed(be_, run.model.config);
  resumed.load(run.save(out_));
  EXPECT_EQ(resumed.state.loader.seed, uint64_t{INT64_MAX});
}

TEST_F(Checkpoints, ConfigJsonThatIsBroken) {
  const std::string checkpoint = trained(small_config(Arch::mod), 1).save(out_);
  const std::string path = checkpoint + "/config.json";
  for (const std::string& text :
       {std::string("{"), std::string("\xff\xfe"), std::string(100000, '['),
        "{\"model_type\":" + std::string(100000, '[') + std::string(100000, ']') + "}"}) {
    put(path, text);
    expect_error([&] { load_config(checkpoint); }, {path});
  }
  put(path, "[]");
  expect_error([&] { load_config(checkpoint); }, {path, "expected a JSON object"});
  std::filesystem::remove(path);
  expect_error([&] { load_config(checkpoint); }, {path, "No such file"});
  expect_error([&] { load_config(out_ + "/step_00000009"); }, {"step_00000009", "no such directory"});
}

}  // namespace
}  // namespace xmod

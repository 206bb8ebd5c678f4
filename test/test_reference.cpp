// The whole model against PyTorch: every file of test/data/ was made by scripts/dump_reference.py, in double
// precision from single-precision weights. Every tensor on its own, normalised error
// at most 1e-5; routing exactly.
#include <filesystem>
#include <nlohmann/json.hpp>

#include "backend.h"
#include "xmod/config_json.h"
#include "xmod/safetensors.h"

namespace xmod {
namespace {

constexpr double kBound = 1e-5;

// A dump, and the model that it describes on a backend.
template <class Backend>
class Reference : public ::testing::TestWithParam<std::string> {
 protected:
  explicit Reference(const MachineOptions& machine = {})
      : be_(machine),
        path_("test/data/" + GetParam() + ".safetensors"),
        dump_(path_),
        config_(config_from_json(nlohmann::json::parse(dump_.metadata().at("config")), path_)),
        optimizer_json_(nlohmann::json::parse(dump_.metadata().at("optimizer"))),
        B_(dump_.info("tokens").shape[0]),
        T_(dump_.info("tokens").shape[1] - 1),
        model_(be_, config_, B_, Use::training) {
    std::vector<int32_t> rows(static_cast<size_t>(B_ * (T_ + 1)));
    dump_.read("tokens", {B_, T_ + 1}, rows.data());
    for (int64_t b = 0; b < B_; b++) {
      const auto row = rows.begin() + b * (T_ + 1);
      tokens_.insert(tokens_.end(), row, row + T_);
      targets_.insert(targets_.end(), row + 1, row + 1 + T_);
    }
    for (const Parameter& p : model_.table.entries) {
      const std::vector<float> values = tensor("param." + p.name, p.shape);
      be_.to_device(model_.params() + p.offset, values.data(), p.size);
    }
    for (const Buffer& b : model_.table.buffers) {
      if (!dump_.contains("buffer." + b.name)) continue;
      const std::vector<float> values = tensor("buffer." + b.name, b.shape);
      be_.to_device(model_.buffers() + b.offset, values.data(), b.size);
    }
  }

  std::vector<float> tensor(const std::string& name, const Shape& shape) {
    int64_t size = 1;
    for (int64_t n : shape) size *= n;
    std::vector<float> values(static_cast<size_t>(size));
    dump_.read_f32(name, shape, values.data());
    return values;
  }

  // Compares a table of parameters (weights, gradients) tensor by tensor.
  void expect_parameters(const std::string& prefix, const float* device) {
    for (const Parameter& p : model_.table.entries) {
      const double error =
          normalised_error(download(be_, device + p.offset, p.size), tensor(prefix + p.name, p.shape));
      EXPECT_LE(error, kBound) << prefix << p.name;
    }
  }

  // (B, T, V)
  std::vector<float> logits(Routing routing) {
    std::vector<float> all(static_cast<size_t>(B_ * T_ * config_.vocab_size));
    for (int64_t b = 0; b < B_; b++)
      model_.logits(all.data() + b * T_ * config_.vocab_size, tokens_.data() + b * T_, T_, 0, T_, routing);
    return all;
  }

  void expect_logits(const std::string& name, Routing routing) {
    EXPECT_LE(normalised_error(logits(routing), tensor(name, {B_, T_, config_.vocab_size})), kBound) << name;
  }

  // Of an entry of the plan, as the dump's tensors carry it.
  std::string number(size_t l) const { return std::to_string(model_.plan[l].number); }

  double forward_backward() {
    model_.zero_gradients();
    return model_.forward_backward(tokens_.data(), targets_.data(), B_, T_, 1.0f);
  }

  // Trains on the dump's batch; calls visit(step from 0, loads) after each step.
  template <class Visit>
  void three_steps(Visit visit) {
    OptimizerConfig config;
    config.weight_decay = optimizer_json_.at("weight_decay");
    config.grad_clip = optimizer_json_.at("grad_clip");
    OptimizerState<Backend> optimizer(be_, model_.table, config);
    for (int64_t step = 1; step <= 3; step++) {
      forward_backward();
      optimizer.update(model_.params(), model_.grads(), optimizer.gradient_norm(model_.grads()), step,
                       optimizer_json_.at("lr"), optimizer_json_.at("adamw_lr"));
      visit(static_cast<size_t>(step - 1), model_.close_step(step, 1));
    }
  }

  Backend be_;
  std::string path_;
  SafetensorsFile dump_;
  ModelConfig config_;
  nlohmann::json optimizer_json_;
  int64_t B_, T_;
  Model<Backend> model_;
  std::vector<int32_t> tokens_, targets_;
};

class ReferenceTest : public Reference<TestBackend> {};
class RoutedReferenceTest : public ReferenceTest {};   // dumps with sparse layers
class ExpertsReferenceTest : public ReferenceTest {};  // dumps with experts
class DecoReferenceTest : public ReferenceTest {};

// On the CPU with the kernel that every processor runs; that the fast ones compute the same is shown in
// test_cpu_matmul.cpp.
#ifdef XMOD_TEST_CUDA
using Bf16Backend = CudaBackend<bf16>;
#else
using Bf16Backend = CpuBackend;
#endif

// Dumps with the error of a low-precision run.
class Bf16ReferenceTest : public Reference<Bf16Backend> {
 protected:
  Bf16ReferenceTest() : Reference({.precision = Precision::bf16, .instructions = "portable"}) {}

  void expect_within_twice_the_error_of_pytorch(const std::string& name, const Floats& found,
                                                const Shape& shape) {
    const double error = normalised_error(found, tensor(name, shape));
    EXPECT_LE(error, 2 * tensor("bf16_error." + name, {1})[0] + kBound) << name;
    largest_error_ = std::max(largest_error_, error);
  }

  double largest_error_ = 0;
};

TEST_P(ReferenceTest, LossAndEveryGradient) {
  const double loss = forward_backward();
  EXPECT_NEAR(loss, tensor("loss", {1})[0], kBound * loss);
  expect_parameters("grad.", model_.grads());
  const double norm = std::sqrt(be_.sum_of_squares(model_.grads(), model_.table.total));
  EXPECT_NEAR(norm, tensor("grad_norm", {1})[0], kBound * norm);
}

#if defined(XMOD_TEST_CUDA) && !defined(__CUDACC__)
// Launch by launch and from a graph.
TEST_P(ReferenceTest, TheSameBitsInAnyOrderOfThreads) {
  forward_backward();
  const Floats first = download(be_, model_.grads(), model_.table.total);
  for (uint64_t seed : {1, 2, 3}) {
    cuda_emulation::set_thread_order(seed);
    forward_backward();
    EXPECT_TRUE(same_bits(download(be_, model_.grads(), model_.table.total), first)) << "order " << seed;
  }
  cuda_emulation::set_thread_order(0);
}
#endif

TEST_P(RoutedReferenceTest, RoutingIndicesExactly) {
  forward_backward();
  const int64_t C = tokens_selected(config_, T_);
  for (size_t l = 0; l < model_.plan.size(); l++) {
    if (!model_.plan[l].routed) continue;
    std::vector<int32_t> expected(static_cast<size_t>(B_ * C));
    dump_.read("routing." + number(l), {B_, C}, expected.data());
    for (int64_t i = 0; i < B_ * C; i++) expected[i] += static_cast<int32_t>(i / C * T_);
    const Rows& rows = model_.activations().layers[l].rows;
    EXPECT_EQ(rows.n, B_ * C);
    EXPECT_EQ(download(be_, rows.row, B_ * C), expected) << "layer " << number(l);
  }
}

TEST_P(ExpertsReferenceTest, ExpertsExactly) {
  forward_backward();
  const int64_t n = B_ * T_, E = config_.experts, k = config_.experts_per_token;
  for (size_t l = 0; l < model_.plan.size(); l++) {
    const auto& saved = model_.activations().layers[l].ffn;
    std::vector<uint8_t> expected(static_cast<size_t>(n * E)), chosen;
    if (const auto* moe = std::get_if<Moe::Saved<float>>(&saved)) {
      chosen = download(be_, moe->groups.chosen, n * E);
      std::vector<int32_t> ids(static_cast<size_t>(n * k));
      dump_.read("experts." + number(l), {n, k}, ids.data());
      for (int64_t i = 0; i < n * k; i++) expected[i / k * E + ids[i]] = 1;
    } else if (const auto* deco = std::get_if<Deco::Saved<float>>(&saved)) {
      chosen = download(be_, deco->groups.chosen, n * E);
      std::vector<int32_t> active(static_cast<size_t>(n * E));
      dump_.read("active." + number(l), {n, E}, active.data());
      std::copy(active.begin(), active.end(), expected.begin());
    } else {
      continue;
    }
    EXPECT_EQ(chosen, expected) << "layer " << number(l);
  }
}

TEST_P(DecoReferenceTest, EntropyTermAndItsWeight) {
  forward_backward();
  double entropy = 0;
  for (const auto& layer : model_.activations().layers) {
    const auto* deco = std::get_if<Deco::Saved<float>>(&layer.ffn);
    if (deco) entropy += be_.mean(deco->entropy, B_ * T_);
  }
  const double expected = tensor("entropy_loss", {1})[0];
  EXPECT_GT(expected, 0);
  EXPECT_NEAR(entropy / static_cast<double>(count_layers(model_.plan)), expected, kBound * expected);

  const std::vector<float> ratio = tensor("expert_active_ratio", {3}), weight = tensor("entropy_weight", {3});
  three_steps([&](size_t step, const ExpertLoads& loads) {
    EXPECT_NEAR(loads.active_ratio, ratio[step], 1e-7) << "step " << step;
    for (const float lambda : entropy_weights(model_))
      EXPECT_NEAR(lambda, weight[step], kBound * weight[step]) << "step " << step;
  });
}

TEST_P(ReferenceTest, LogitsUnderTopK) {
  expect_logits("logits", Routing::topk);
}

TEST_P(RoutedReferenceTest, LogitsUnderThreshold) {
  const std::vector<float> tau = tensor("threshold_tau", {model_.sparse_layers});
  be_.to_device(model_.thresholds(), tau.data(), model_.sparse_layers);
  expect_logits("threshold_logits", Routing::threshold);
}

TEST_P(RoutedReferenceTest, SelectionUnderThresholdExactly) {
  const std::vector<float> tau = tensor("threshold_tau", {model_.sparse_layers});
  be_.to_device(model_.thresholds(), tau.data(), model_.sparse_layers);
  std::vector<std::vector<int32_t>> selected;  // of each layer, in this order
  model_.on_selection = [&](int64_t, const Rows& rows) {
    selected.push_back(download(be_, rows.row, rows.n));
  };
  model_.loss(tokens_.data(), targets_.data(), B_, T_, Routing::threshold);
  size_t next = 0;
  for (size_t l = 0; l < model_.plan.size(); l++) {
    if (!model_.plan[l].routed) continue;
    std::vector<int32_t> mask(static_cast<size_t>(B_ * T_)), expected;
    dump_.read("threshold_mask." + number(l), {B_, T_}, mask.data());
    for (int64_t i = 0; i < B_ * T_; i++) {
      if (mask[i]) expected.push_back(static_cast<int32_t>(i));
    }
    EXPECT_EQ(selected.at(next++), expected) << "layer " << number(l);
  }
}

TEST_P(ReferenceTest, WeightsAndThresholdsAfterThreeSteps) {
  three_steps([](size_t, const ExpertLoads&) {});
  expect_parameters("step3.", model_.params());
  for (const Buffer& b : model_.table.buffers) {
    if (!dump_.contains("step3." + b.name)) continue;  // deco's entropy weights: DecoReferenceTest
    const std::vector<float> expected = tensor("step3." + b.name, b.shape);
    const std::vector<float> found = download(be_, model_.buffers() + b.offset, b.size);
    for (size_t i = 0; i < expected.size(); i++)
      EXPECT_NEAR(found[i], expected[i], kBound * std::max(1.0f, std::abs(expected[i]))) << b.name;
  }
}

TEST_P(Bf16ReferenceTest, ErrsAtMostTwiceAsMuchAsPyTorchUnderAutocast) {
  const float loss = static_cast<float>(forward_backward());
  expect_within_twice_the_error_of_pytorch("loss", {loss}, {1});
  for (const Parameter& p : model_.table.entries) {
    expect_within_twice_the_error_of_pytorch("grad." + p.name,
                                             download(be_, model_.grads() + p.offset, p.size), p.shape);
  }
  expect_within_twice_the_error_of_pytorch("logits", logits(Routing::topk), {B_, T_, config_.vocab_size});
  EXPECT_GT(largest_error_, 100 * kBound) << "this is no bf16";
}

std::vector<std::string> cases(bool (*belongs)(Arch) = nullptr) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("test/data")) {
    if (entry.path().extension() != ".safetensors") continue;
    const std::string config = SafetensorsFile(entry.path().string()).metadata().at("config");
    const Arch arch = config_from_json(nlohmann::json::parse(config), entry.path().string()).arch;
    if (!belongs || belongs(arch)) names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> cases_with_bf16() {
  std::vector<std::string> names;
  for (const std::string& name : cases()) {
    if (SafetensorsFile("test/data/" + name + ".safetensors").contains("bf16_error.loss"))
      names.push_back(name);
  }
  return names;
}

bool is_deco(Arch arch) {
  return arch == Arch::deco;
}

std::string case_name(const ::testing::TestParamInfo<std::string>& info) {
  return info.param;
}

INSTANTIATE_TEST_SUITE_P(Dumps, ReferenceTest, ::testing::ValuesIn(cases()), case_name);
INSTANTIATE_TEST_SUITE_P(Dumps, RoutedReferenceTest, ::testing::ValuesIn(cases(is_routed)), case_name);
INSTANTIATE_TEST_SUITE_P(Dumps, ExpertsReferenceTest, ::testing::ValuesIn(cases(has_experts)), case_name);
INSTANTIATE_TEST_SUITE_P(Dumps, DecoReferenceTest, ::testing::ValuesIn(cases(is_deco)), case_name);
INSTANTIATE_TEST_SUITE_P(Dumps, Bf16ReferenceTest, ::testing::ValuesIn(cases_with_bf16()), case_name);

TEST(ReferenceDumps, AreAllThere) {
  const std::vector<std::string> expected = {
      "deco",          "deco_no_shared", "dense",           "dense_untied",    "mod",
      "moe",           "moe_extremes",   "no_anchors",      "no_dense_prefix", "no_residual_gate",
      "no_token_bias", "routed_ffn",     "routed_ffn_a2k2", "selected_q",      "selected_q_a1k2",
      "xmod_a1k4",     "xmod_a2k3",      "xmod_c1",         "xmod_ragged"};
  EXPECT_EQ(cases(), expected);
}

}  // namespace
}  // namespace xmod

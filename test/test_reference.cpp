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

class ReferenceTest : public ::testing::TestWithParam<std::string> {
 protected:
  ReferenceTest()
      : path_("test/data/" + GetParam() + ".safetensors"),
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

  void expect_logits(const std::string& name, Routing routing) {
    std::vector<float> logits(static_cast<size_t>(B_ * T_ * config_.vocab_size));
    for (int64_t b = 0; b < B_; b++) {
      model_.logits(logits.data() + b * T_ * config_.vocab_size, tokens_.data() + b * T_, T_, 0, T_, routing);
    }
    EXPECT_LE(normalised_error(logits, tensor(name, {B_, T_, config_.vocab_size})), kBound) << name;
  }

  double forward_backward() {
    model_.zero_gradients();
    return model_.forward_backward(tokens_.data(), targets_.data(), B_, T_, 1.0f);
  }

  TestBackend be_;
  std::string path_;
  SafetensorsFile dump_;
  ModelConfig config_;
  nlohmann::json optimizer_json_;
  int64_t B_, T_;
  Model<TestBackend> model_;
  std::vector<int32_t> tokens_, targets_;
};

TEST_P(ReferenceTest, LossAndEveryGradient) {
  const double loss = forward_backward();
  EXPECT_NEAR(loss, tensor("loss", {1})[0], kBound * loss);
  expect_parameters("grad.", model_.grads());
  const double norm = std::sqrt(be_.sum_of_squares(model_.grads(), model_.table.total));
  EXPECT_NEAR(norm, tensor("grad_norm", {1})[0], kBound * norm);
}

TEST_P(ReferenceTest, RoutingIndicesExactly) {
  forward_backward();
  const int64_t C = tokens_selected(config_, T_);
  for (size_t l = 0; l < model_.plan.size(); l++) {
    if (!model_.plan[l].routed) continue;
    std::vector<int32_t> expected(static_cast<size_t>(B_ * C));
    dump_.read("routing." + std::to_string(l), {B_, C}, expected.data());
    for (int64_t i = 0; i < B_ * C; i++) expected[i] += static_cast<int32_t>(i / C * T_);
    const Rows& rows = model_.activations().layers[l].rows;
    EXPECT_EQ(rows.n, B_ * C);
    EXPECT_EQ(download(be_, rows.row, B_ * C), expected) << "layer " << l;
  }
}

TEST_P(ReferenceTest, LogitsUnderTopK) {
  expect_logits("logits", Routing::topk);
}

TEST_P(ReferenceTest, LogitsUnderThreshold) {
  if (model_.sparse_layers == 0) GTEST_SKIP() << "a dense model has no threshold";
  const std::vector<float> tau = tensor("threshold_tau", {model_.sparse_layers});
  be_.to_device(model_.thresholds(), tau.data(), model_.sparse_layers);
  expect_logits("threshold_logits", Routing::threshold);
}

TEST_P(ReferenceTest, SelectionUnderThresholdExactly) {
  if (model_.sparse_layers == 0) GTEST_SKIP() << "a dense model has no threshold";
  const std::vector<float> tau = tensor("threshold_tau", {model_.sparse_layers});
  be_.to_device(model_.thresholds(), tau.data(), model_.sparse_layers);
  std::vector<std::vector<int32_t>> selected;  // of each layer, in this order
  model_.on_selection = [&](size_t, const Rows& rows) {
    selected.push_back(download(be_, rows.row, rows.n));
  };
  model_.loss(tokens_.data(), targets_.data(), B_, T_, Routing::threshold);
  size_t next = 0;
  for (size_t l = 0; l < model_.plan.size(); l++) {
    if (!model_.plan[l].routed) continue;
    std::vector<int32_t> mask(static_cast<size_t>(B_ * T_)), expected;
    dump_.read("threshold_mask." + std::to_string(l), {B_, T_}, mask.data());
    for (int64_t i = 0; i < B_ * T_; i++) {
      if (mask[i]) expected.push_back(static_cast<int32_t>(i));
    }
    EXPECT_EQ(selected.at(next++), expected) << "layer " << l;
  }
}

TEST_P(ReferenceTest, WeightsAndThresholdsAfterThreeSteps) {
  OptimizerConfig config;
  config.weight_decay = optimizer_json_.at("weight_decay");
  config.grad_clip = optimizer_json_.at("grad_clip");
  OptimizerState<TestBackend> optimizer(be_, model_.table, config);
  for (int64_t step = 1; step <= 3; step++) {
    forward_backward();
    optimizer.update(model_.params(), model_.grads(), optimizer.gradient_norm(model_.grads()), step,
                     optimizer_json_.at("lr"), optimizer_json_.at("adamw_lr"));
    model_.update_thresholds(step, 1);
  }
  expect_parameters("step3.", model_.params());
  const std::vector<float> tau = download(be_, model_.thresholds(), model_.sparse_layers);
  for (size_t l = 0; l < model_.plan.size(); l++) {
    if (!model_.plan[l].routed) continue;
    const float expected =
        tensor("step3." + layer_prefix(static_cast<int64_t>(l)) + "router.threshold", {1})[0];
    EXPECT_NEAR(tau[model_.plan[l].sparse_index], expected, kBound * std::max(1.0f, std::abs(expected)))
        << "layer " << l;
  }
}

std::vector<std::string> cases() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("test/data")) {
    if (entry.path().extension() == ".safetensors") names.push_back(entry.path().stem().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

INSTANTIATE_TEST_SUITE_P(Dumps, ReferenceTest, ::testing::ValuesIn(cases()),
                         [](const auto& info) { return info.param; });

TEST(ReferenceDumps, AreAllThere) {
  const std::vector<std::string> expected = {
      "dense",         "mod",       "no_anchors", "no_dense_prefix", "no_residual_gate",
      "no_token_bias", "xmod_a1k4", "xmod_a2k3",  "xmod_c1",         "xmod_ragged"};
  EXPECT_EQ(cases(), expected);
}

}  // namespace
}  // namespace xmod

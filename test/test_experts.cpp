// Models with experts: that no token depends on the others, the models that MoE and DECO become in limiting
// cases, and what a training step moves without a gradient.
#include <numeric>
#include <optional>

#include "small_models.h"

namespace xmod {
namespace {

// ---------------------------------------------------------------------------------------------------
// summarise_loads

void expect_loads(const ExpertLoads& found, const ExpertLoads& expected) {
  EXPECT_NEAR(found.max, expected.max, 1e-12);
  EXPECT_NEAR(found.entropy, expected.entropy, 1e-12);
  EXPECT_NEAR(found.active_ratio, expected.active_ratio, 1e-12);
}

TEST(SummariseLoads, EvenLoads) {
  expect_loads(summarise_loads({{6, 6, 6, 6}}, 12), {.max = 1, .entropy = 1, .active_ratio = 0.5});
}

TEST(SummariseLoads, OneExpertTakesAll) {
  expect_loads(summarise_loads({{0, 0, 12, 0}}, 12), {.max = 4, .entropy = 0, .active_ratio = 0.25});
}

TEST(SummariseLoads, InBetween) {
  const double entropy = 0.5 * std::log(2) + 2 * 0.25 * std::log(4);
  expect_loads(summarise_loads({{2, 4, 2, 0}}, 4),
               {.max = 2, .entropy = entropy / std::log(4), .active_ratio = 0.5});
}

// Each figure is that of its own worst layer; the ratio is that of all.
TEST(SummariseLoads, TheWorstLayer) {
  const std::vector<float> even = {3, 3, 3, 3}, split = {6, 6, 0, 0}, peak = {8, 2, 1, 1};
  const double peak_entropy =
      -(8 * std::log(8 / 12.0) + 2 * std::log(2 / 12.0) + 2 * std::log(1 / 12.0)) / 12 / std::log(4);
  ASSERT_GT(peak_entropy, 0.5);  // split's
  for (const auto& layers : {std::vector{even, split, peak}, std::vector{peak, split, even}}) {
    expect_loads(summarise_loads(layers, 12), {.max = 8 / 3.0, .entropy = 0.5, .active_ratio = 0.25});
  }
}

TEST(SummariseLoads, LayersWithoutAnyLoadCountAsInactiveOnly) {
  expect_loads(summarise_loads({{0, 0}, {1, 3}}, 4),
               {.max = 1.5,
                .entropy = (0.25 * std::log(4) - 0.75 * std::log(0.75)) / std::log(2),
                .active_ratio = 0.25});
  expect_loads(summarise_loads({{0, 0}}, 4), {.max = 0, .entropy = 1, .active_ratio = 0});
}

TEST(SummariseLoads, OneExpertIsAlwaysEven) {
  expect_loads(summarise_loads({{5}}, 10), {.max = 1, .entropy = 1, .active_ratio = 0.5});
}

TEST(SummariseLoads, NoLayerAndNoToken) {
  EXPECT_EQ(summarise_loads({}, 10).active_ratio, 0);
  EXPECT_EQ(summarise_loads({{0, 0}}, 0).active_ratio, 0);
}

// ---------------------------------------------------------------------------------------------------
// both kinds

class Experts : public ::testing::TestWithParam<Arch> {
 protected:
  Experts() : config_(small_config(GetParam())), model_(be_, config_, kBatch, Use::training) {
    randomise(model_);
  }

  // Adds to counts[layer][expert] what the last batch chose.
  void count(std::vector<Floats>& counts, const Batch& batch) const {
    const auto chosen = chosen_experts(model_, batch.B * batch.T);
    counts.resize(chosen.size(), Floats(static_cast<size_t>(config_.experts)));
    for (size_t l = 0; l < chosen.size(); l++) {
      for (size_t i = 0; i < chosen[l].size(); i++)
        counts[l][i % static_cast<size_t>(config_.experts)] += chosen[l][i];
    }
  }

  static constexpr int64_t kBatch = 4;
  TestBackend be_{{.threads = 1}};
  ModelConfig config_;
  TestModel model_;
};

INSTANTIATE_TEST_SUITE_P(Architectures, Experts, ::testing::Values(Arch::moe, Arch::deco),
                         [](const auto& info) { return identifier(info.param); });

TEST_P(Experts, NoTokenDependsOnThoseBehindIt) {
  const Batch batch = random_batch(config_, 1);
  const int64_t V = config_.vocab_size, last = batch.T - 1;
  const Floats whole = logits(model_, batch);
  for (int64_t T = 1; T < batch.T; T++) {
    const Batch prefix = {1, T, row_of(batch.tokens, 0, T), row_of(batch.targets, 0, T)};
    EXPECT_TRUE(same_bits(logits(model_, prefix), row_of(whole, 0, T * V))) << T;
  }
  for (int32_t id = 0; id < V; id++) {
    if (id == batch.tokens[last]) continue;
    Batch changed = batch;
    changed.tokens[last] = id;
    const Floats after = logits(model_, changed);
    EXPECT_TRUE(same_bits(row_of(after, 0, last * V), row_of(whole, 0, last * V))) << id;
    EXPECT_FALSE(same_bits(row_of(after, last, V), row_of(whole, last, V))) << id;
  }
}

// However many tokens want the same experts, none is turned away: 96 equal tokens, and one of them alone.
TEST_P(Experts, ACrowdGetsWhatOneTokenGets) {
  const Batch alone = {1, 1, {17}, {3}};
  const size_t size = static_cast<size_t>(kBatch * config_.seq_len);
  const Batch crowd = {kBatch, config_.seq_len, Ints(size, 17), Ints(size, 3)};
  loss_of(model_, alone);
  const Floats expected = download(be_, model_.activations().final_norm, config_.dim);
  forward_backward(model_, crowd);
  std::vector<Floats> counts;
  count(counts, crowd);
  for (const Floats& layer : counts) {
    for (float tokens : layer) EXPECT_TRUE(tokens == 0 || tokens == static_cast<float>(size)) << tokens;
  }
  for (int64_t b = 0; b < kBatch; b++) {
    const float* row = model_.activations().final_norm + b * config_.seq_len * config_.dim;
    EXPECT_TRUE(same_bits(download(be_, row, config_.dim), expected)) << "sequence " << b;
  }
}

// Over all layers and micro-batches of the step, and of nothing else.
TEST_P(Experts, LoadsAreThoseOfTheStep) {
  for (int64_t step = 1; step <= 3; step++) {
    std::vector<Floats> counts;
    int64_t tokens = 0;
    for (int64_t micro = 0; micro < step; micro++) {
      const Batch batch = random_batch(config_, 2, static_cast<uint64_t>(10 * step + micro));
      forward_backward(model_, batch);
      count(counts, batch);
      tokens += batch.B * batch.T;
      loss_of(model_, random_batch(config_, 4));
    }
    EXPECT_EQ(counts.size(), GetParam() == Arch::deco ? 2u : 3u);
    double pairs = 0, all_pairs = 0;
    for (const Floats& layer : counts) {
      pairs += std::accumulate(layer.begin(), layer.end(), 0.0);
      all_pairs += static_cast<double>(tokens * config_.experts);
    }
    const ExpertLoads loads = model_.close_step(step, step);
    expect_loads(loads, summarise_loads(counts, tokens));
    EXPECT_DOUBLE_EQ(loads.active_ratio, pairs / all_pairs);
    EXPECT_GT(loads.max, 1) << "some expert is busier than others";
    EXPECT_LT(loads.active_ratio, 1);
  }
}

// ---------------------------------------------------------------------------------------------------
// MoE

ModelConfig dense_with(int64_t ffn_dim, int64_t layers) {
  ModelConfig c = small_config(Arch::dense);
  c.ffn_dim = ffn_dim;
  c.active_layers = layers;
  return c;
}

// "model.layers.0.mlp.up_proj.weight" -> "model.layers.0.mlp.experts.0.up_proj.weight"
std::string inside_mlp(std::string name, const std::string& part) {
  const size_t at = name.find("mlp.");
  if (at != std::string::npos) name.insert(at + 4, part);
  return name;
}

class MoeTest : public ::testing::Test {
 protected:
  // A model of so many experts, no shared ones.
  void make(int64_t experts, int64_t chosen, std::function<void(ModelConfig&)> change = nullptr) {
    config_ = small_config(Arch::moe);
    config_.experts = experts;
    config_.experts_per_token = chosen;
    config_.shared_experts = 0;
    if (change) change(config_);
    model_.emplace(be_, config_, 2, Use::training);
    randomise(*model_);
  }

  // Biases of the layers (layers, E): all buffers that a model without sparse layers has.
  void set_biases(const Floats& biases) {
    ASSERT_EQ(static_cast<int64_t>(biases.size()), model_->table.buffers_total);
    be_.to_device(model_->buffers(), biases.data(), model_->table.buffers_total);
  }

  TestBackend be_{{.threads = 1}};
  ModelConfig config_;
  std::optional<TestModel> model_;
};

TEST_F(MoeTest, OneExpertIsTheDenseModelBitForBit) {
  make(1, 1);
  TestModel dense(be_, dense_with(config_.expert_dim, config_.active_layers), 2, Use::training);
  auto twin = [](const std::string& name) { return inside_mlp(name, "experts.0."); };
  copy_weights(dense, *model_, twin);
  const Batch batch = random_batch(config_, 2);
  EXPECT_EQ(forward_backward(*model_, batch), forward_backward(dense, batch));
  const Floats found = gradients_so_far(*model_), expected = gradients_so_far(dense);
  for (const Parameter& p : dense.table.entries) {
    EXPECT_TRUE(same_bits(slice(found, parameter(*model_, twin(p.name))), slice(expected, p))) << p.name;
  }
  EXPECT_TRUE(same_bits(logits(*model_, sequence_of(batch, 0)), logits(dense, sequence_of(batch, 0))));
}

// The weights of the chosen experts sum to 1, so that experts all alike are one dense FFN, whatever the
// router.
TEST_F(MoeTest, ExpertsAllAlikeAreTheDenseModel) {
  for (int64_t chosen : {1, 2, 4}) {
    make(4, chosen);
    TestModel dense(be_, dense_with(config_.expert_dim, config_.active_layers), 2, Use::training);
    copy_weights(dense, *model_, [](const std::string& name) { return inside_mlp(name, "experts.0."); });
    for (const std::string expert : {"experts.1.", "experts.2.", "experts.3."}) {
      for (const Parameter& p : dense.table.entries) {
        set_weights(*model_, parameter(*model_, inside_mlp(p.name, expert)), weights_of(dense, p));
      }
    }
    const Batch batch = random_batch(config_, 2);
    const Floats expected = gradients(dense, batch), found = gradients(*model_, batch);
    EXPECT_LE(normalised_error(logits(*model_, sequence_of(batch, 0)), logits(dense, sequence_of(batch, 0))),
              1e-6);
    for (const Parameter& p : dense.table.entries) {
      if (p.name.find("mlp.") == std::string::npos) continue;
      Doubles sum(static_cast<size_t>(p.size));
      for (const std::string expert : {"experts.0.", "experts.1.", "experts.2.", "experts.3."}) {
        sum = plus(sum, doubles(slice(found, parameter(*model_, inside_mlp(p.name, expert)))));
      }
      EXPECT_LE(normalised_error(slice(expected, p), sum), 1e-5) << p.name << ", " << chosen << " chosen";
    }
  }
}

// Nothing is left to choose: the biases have no say, and loads are even.
TEST_F(MoeTest, WhereEveryExpertIsChosenBiasesDoNothing) {
  make(3, 3);
  const Batch batch = random_batch(config_, 2);
  const Floats expected = gradients(*model_, batch);
  const ExpertLoads loads = model_->close_step(1, 1);
  expect_loads(loads, {.max = 1, .entropy = 1, .active_ratio = 1});
  EXPECT_EQ(buffers_of(*model_), Floats(9, 0.0f)) << "an even load moves no bias";
  set_biases(normal_numbers(9, 1));
  EXPECT_TRUE(same_bits(gradients(*model_, batch), expected));
}

// Scores all alike: the lowest experts are chosen, and the model is that of these alone.
TEST_F(MoeTest, TiesGoToTheLowerExperts) {
  make(5, 2);
  set_all(*model_, Init::router, 0);
  ModelConfig few = config_;
  few.experts = 2;
  TestModel of_two(be_, few, 2, Use::training);
  copy_weights(of_two, *model_, [](const std::string& name) {
    return name.ends_with("mlp.gate.weight") ? std::string() : name;  // zero
  });
  const Batch batch = random_batch(config_, 2);
  const Floats expected = gradients(of_two, batch), found = gradients(*model_, batch);
  for (const auto& chosen : chosen_experts(*model_, batch.B * batch.T)) {
    for (size_t i = 0; i < chosen.size(); i++) EXPECT_EQ(chosen[i], i % 5 < 2) << i;
  }
  EXPECT_TRUE(same_bits(logits(*model_, sequence_of(batch, 1)), logits(of_two, sequence_of(batch, 1))));
  for (const Parameter& p : of_two.table.entries) {
    if (p.init == Init::router) continue;  // another shape
    EXPECT_TRUE(same_bits(slice(found, parameter(*model_, p.name)), slice(expected, p))) << p.name;
  }
  for (const Parameter& p : model_->table.entries) {
    if (p.name.find("experts.2.") == std::string::npos) continue;
    EXPECT_EQ(slice(found, p), Floats(static_cast<size_t>(p.size))) << p.name << " had no token";
  }
}

// bias += rate * sign(mean load - load), by the loads of all micro-batches.
TEST_F(MoeTest, BiasesMoveByTheRateAgainstTheLoad) {
  const float rate = 0.125f;  // exact in sums
  make(5, 2, [&](ModelConfig& c) { c.expert_bias_rate = rate; });
  Floats expected(15);
  for (int64_t step = 1; step <= 4; step++) {
    Floats loads(15);
    for (int64_t micro = 0; micro < 3; micro++) {
      const Batch batch = random_batch(config_, 2, static_cast<uint64_t>(10 * step + micro));
      forward_backward(*model_, batch);
      const auto chosen = chosen_experts(*model_, batch.B * batch.T);
      for (size_t l = 0; l < chosen.size(); l++) {
        for (size_t i = 0; i < chosen[l].size(); i++) loads[5 * l + i % 5] += chosen[l][i];
      }
    }
    model_->close_step(step, 3);
    const float mean = 3 * 2 * static_cast<float>(config_.seq_len) * 2 / 5;
    for (size_t i = 0; i < 15; i++) {
      expected[i] += loads[i] < mean ? rate : loads[i] > mean ? -rate : 0;
    }
    EXPECT_EQ(buffers_of(*model_), expected) << "step " << step;
  }
}

TEST_F(MoeTest, ARateOfZeroLeavesTheBiases) {
  make(5, 2, [](ModelConfig& c) { c.expert_bias_rate = 0; });
  const Floats biases = normal_numbers(15, 3);
  set_biases(biases);
  forward_backward(*model_, random_batch(config_, 2));
  EXPECT_GT(model_->close_step(1, 1).max, 1.05) << "the load is not even";
  EXPECT_TRUE(same_bits(buffers_of(*model_), biases));
}

TEST_F(MoeTest, ABiasDrawsEveryTokenInTrainingAndEvaluation) {
  make(5, 1);
  const Batch batch = random_batch(config_, 2);
  const double before = loss_of(*model_, batch);
  Floats biases(15);
  for (size_t layer = 0; layer < 3; layer++) biases[5 * layer + 3] = 2;  // more than scores differ
  set_biases(biases);
  const double loss = forward_backward(*model_, batch);
  expect_loads(model_->close_step(1, 1), {.max = 5, .entropy = 0, .active_ratio = 0.2});
  EXPECT_NE(loss, before);
  set_biases(biases);
  EXPECT_EQ(loss_of(*model_, batch), loss);
}

// ---------------------------------------------------------------------------------------------------
// DECO

class DecoTest : public ::testing::Test {
 protected:
  void make(std::function<void(ModelConfig&)> change = nullptr) {
    config_ = small_config(Arch::deco);
    config_.dense_prefix = 0;
    if (change) change(config_);
    model_.emplace(be_, config_, 2, Use::training);
    randomise(*model_);
  }

  // Calls change(values) with every tensor whose name ends so.
  void change_weights(const std::string& end, const std::function<void(Floats&)>& change) {
    int64_t changed = 0;
    for (const Parameter& p : model_->table.entries) {
      if (!p.name.ends_with(end)) continue;
      Floats values = weights_of(*model_, p);
      change(values);
      set_weights(*model_, p, values);
      changed++;
    }
    EXPECT_GT(changed, 0) << end;
  }

  // Gives every router logit this sign: the first number of every token is so large that no layer turns it.
  void set_every_logit(float sign) {
    const size_t d = static_cast<size_t>(config_.dim);
    change_weights("embed_tokens.weight", [&](Floats& embedding) {
      for (size_t i = 0; i < embedding.size(); i += d) embedding[i] = 20;
    });
    change_weights("mlp.gate.weight", [&](Floats& router) {
      for (size_t i = 0; i < router.size(); i++) router[i] = i % d == 0 ? sign : 0;
    });
  }

  TestBackend be_{{.threads = 1}};
  ModelConfig config_;
  std::optional<TestModel> model_;
};

// But through the mean of the up projections, which takes all experts.
TEST_F(DecoTest, AnExpertThatIsNeverActiveChangesNothing) {
  make();
  const size_t d = static_cast<size_t>(config_.dim), expert = 2;
  auto row_of_expert = [&](auto begin) { return begin + static_cast<int64_t>(expert * d); };
  change_weights("mlp.gate.weight", [&](Floats& router) {
    std::fill_n(row_of_expert(router.begin()), d, 0.0f);  // a logit of 0 is not above 0
  });
  const Batch batch = random_batch(config_, 2), sequence = sequence_of(batch, 0);
  const Floats gradient = gradients(*model_, batch), expected = logits(*model_, sequence);
  for (const auto& chosen : chosen_experts(*model_, batch.B * batch.T)) {
    for (size_t i = expert; i < chosen.size(); i += 5) EXPECT_EQ(chosen[i], 0);
  }
  for (const Parameter& p : model_->table.entries) {
    const Floats g = slice(gradient, p);
    if (p.name.ends_with("experts.2.down_proj.weight")) {
      EXPECT_EQ(g, Floats(g.size())) << p.name;
    } else if (p.name.ends_with("mlp.expert_scale")) {
      EXPECT_EQ(g[expert], 0) << p.name;
    } else if (p.name.ends_with("mlp.gate.weight")) {
      EXPECT_EQ(Floats(row_of_expert(g.begin()), row_of_expert(g.begin()) + static_cast<int64_t>(d)),
                Floats(d))
          << p.name;
    } else if (p.name.ends_with("experts.2.up_proj.weight")) {
      EXPECT_NE(g, Floats(g.size())) << p.name;
      for (int64_t row = 1; row < config_.expert_dim; row++) {
        EXPECT_EQ(row_of(g, row, config_.dim), row_of(g, 0, config_.dim)) << p.name << ", row " << row;
      }
    }
  }

  change_weights("experts.2.down_proj.weight", [](Floats& w) { w.assign(w.size(), 1e6f); });
  change_weights("mlp.expert_scale", [&](Floats& scale) { scale[expert] = -1e6f; });
  EXPECT_TRUE(same_bits(logits(*model_, sequence), expected));

  change_weights("experts.2.up_proj.weight", [&](Floats& w) {  // its rows in another order
    std::rotate(w.begin(), w.begin() + static_cast<int64_t>(5 * d), w.end());
  });
  EXPECT_LE(normalised_error(logits(*model_, sequence), expected), 1e-6);
  change_weights("experts.2.up_proj.weight", [](Floats& w) {
    for (float& value : w) value += 0.5f;
  });
  EXPECT_GT(normalised_error(logits(*model_, sequence), expected), 1e-4);
}

// Only the shared expert is left: a dense FFN of its width; without one, attention only.
TEST_F(DecoTest, WithoutAnActiveExpertTheSharedOneIsLeft) {
  for (int64_t shared : {2, 0}) {
    make([&](ModelConfig& c) { c.shared_experts = shared; });
    set_every_logit(-1);
    TestModel dense(be_, dense_with(std::max<int64_t>(1, shared) * config_.expert_dim, config_.active_layers),
                    2, Use::training);
    auto twin = [&](const std::string& name) {
      if (shared == 0 && name.find("mlp.") != std::string::npos) return std::string();  // zero
      return inside_mlp(name, "shared_expert.");
    };
    copy_weights(dense, *model_, twin);
    const Batch batch = random_batch(config_, 2);
    EXPECT_EQ(forward_backward(*model_, batch), forward_backward(dense, batch));
    const Floats found = gradients_so_far(*model_), expected = gradients_so_far(dense);
    for (const Parameter& p : dense.table.entries) {
      if (twin(p.name).empty()) continue;
      EXPECT_TRUE(same_bits(slice(found, parameter(*model_, twin(p.name))), slice(expected, p))) << p.name;
    }
    for (const Parameter& p : model_->table.entries) {
      if (p.name.find("experts.") == std::string::npos && p.init != Init::relu_router) continue;
      EXPECT_EQ(slice(found, p), Floats(static_cast<size_t>(p.size))) << p.name;
    }
    EXPECT_TRUE(same_bits(logits(*model_, sequence_of(batch, 1)), logits(dense, sequence_of(batch, 1))));
    expect_loads(model_->close_step(1, 1), {.max = 0, .entropy = 1, .active_ratio = 0});
  }
}

// lambda grows while more pairs than the target are active, and falls to where it began.
TEST_F(DecoTest, TheEntropyWeightFollowsTheActiveRatio) {
  make([](ModelConfig& c) { c.entropy_weight = 0.5, c.entropy_growth = 1.25; });
  const Batch batch = random_batch(config_, 2);
  auto step_with_logits = [&](float sign) {
    set_every_logit(sign);
    forward_backward(*model_, batch);
    return model_->close_step(1, 1).active_ratio;
  };
  EXPECT_EQ(entropy_weight(*model_), 0.5);
  EXPECT_EQ(step_with_logits(1), 1);
  EXPECT_FLOAT_EQ(entropy_weight(*model_), 0.5 * 1.25);
  EXPECT_EQ(step_with_logits(1), 1);
  EXPECT_FLOAT_EQ(entropy_weight(*model_), 0.5 * 1.25 * 1.25);
  EXPECT_EQ(step_with_logits(-1), 0);
  EXPECT_FLOAT_EQ(entropy_weight(*model_), 0.5 * 1.25);
  set_entropy_weight(*model_, 0.6);
  EXPECT_EQ(step_with_logits(-1), 0);
  EXPECT_EQ(entropy_weight(*model_), 0.5);
  EXPECT_EQ(step_with_logits(-1), 0);
  EXPECT_EQ(entropy_weight(*model_), 0.5);
}

TEST_F(DecoTest, ARatioAtItsTargetDoesNotRaiseTheEntropyWeight) {
  make([](ModelConfig& c) { c.active_ratio = 1; });
  set_every_logit(1);
  forward_backward(*model_, random_batch(config_, 2));
  EXPECT_EQ(model_->close_step(1, 1).active_ratio, 1);
  EXPECT_EQ(entropy_weight(*model_), static_cast<float>(config_.entropy_weight));
}

// It is trained on, but the loss that is reported stays the cross-entropy.
TEST_F(DecoTest, TheEntropyTermIsInTheGradientAndNotInTheLoss) {
  make();
  const Batch batch = random_batch(config_, 2);
  set_entropy_weight(*model_, 0);
  const Floats without = gradients(*model_, batch);
  const double loss = forward_backward(*model_, batch);
  EXPECT_EQ(loss_of(*model_, batch), loss);
  set_entropy_weight(*model_, 0.5);
  const Floats with = gradients(*model_, batch);
  EXPECT_EQ(forward_backward(*model_, batch), loss);
  for (const Parameter& p : model_->table.entries) {
    if (p.init != Init::relu_router) continue;
    EXPECT_GT(normalised_error(slice(with, p), slice(without, p)), 0.01) << p.name;
  }
}

}  // namespace
}  // namespace xmod

// What must hold for the whole model whatever its weights: exact equalities between
// runs that should not differ, and for each of them a run that must differ.
#include <map>
#include <optional>

#include "backend.h"

namespace xmod {
namespace {

// ---------------------------------------------------------------------------------------------------
// models and batches

ModelConfig small_config(Arch arch) {
  ModelConfig c;
  c.arch = arch;
  c.vocab_size = 61;
  c.dim = 24;
  c.active_layers = 5;
  c.heads = 4;
  c.kv_heads = 2;
  c.head_dim = 6;
  c.ffn_dim = 40;
  c.seq_len = 24;
  c.token_sparsity = 4;
  c.anchor_stride = 1;
  c.dense_prefix = 1;
  return c;
}

struct NamedConfig {
  std::string name;
  ModelConfig config;
  std::string layers;  // the pattern this name stands for

  friend void PrintTo(const NamedConfig& c, std::ostream* out) { *out << c.name; }
};

std::vector<NamedConfig> configs() {
  auto with = [](Arch arch, auto change) {
    ModelConfig c = small_config(arch);
    change(c);
    return c;
  };
  auto none = [](ModelConfig&) {};
  return {
      {"dense", with(Arch::dense, none), "DDDDD"},
      {"mod", with(Arch::mod, none), "DSDSDSD"},
      {"xmod", with(Arch::xmod, none), "DSSSSDSSSSD"},
      {"incomplete_interval",
       with(Arch::xmod,
            [](ModelConfig& c) { c.token_sparsity = 3, c.anchor_stride = 2, c.active_layers = 6; }),
       "DSSSSSSDSSSD"},
      {"ragged", with(Arch::xmod, [](ModelConfig& c) { c.seq_len = 23, c.token_sparsity = 5; }),
       "DSSSSSDSSSSSD"},
      {"one_token",
       with(Arch::xmod, [](ModelConfig& c) { c.seq_len = 8, c.token_sparsity = 8, c.active_layers = 3; }),
       "DSSSSSSSSD"},
      {"no_anchors",
       with(Arch::xmod, [](ModelConfig& c) { c.anchors = false, c.dense_prefix = 0, c.active_layers = 2; }),
       "SSSSSSSS"},
      {"no_stabilisers",
       with(Arch::xmod, [](ModelConfig& c) { c.residual_gate = false, c.token_bias_strength = 0; }),
       "DSSSSDSSSSD"},
  };
}

ModelConfig config_named(const std::string& name) {
  for (const NamedConfig& c : configs()) {
    if (c.name == name) return c.config;
  }
  ADD_FAILURE() << "no such configuration: " << name;
  return {};
}

using TestModel = Model<TestBackend>;

// Random weights in which nothing is special: norms and gates differ from 1, logits from 0.
void randomise(TestModel& model, uint64_t seed = 1) {
  model.initialise(seed);
  Floats params = download(model.backend(), model.params(), model.table.total);
  for (const Parameter& p : model.table.entries) {
    const Floats noise = normal_numbers(p.size, seed + stream_of(p.name), 0.2);
    for (int64_t i = 0; i < p.size; i++) {
      float& value = params[p.offset + i];
      if (p.init == Init::embedding) value *= 20;
      if (p.init == Init::ones || p.init == Init::gate) value += noise[i];
    }
  }
  model.backend().to_device(model.params(), params.data(), model.table.total);
}

struct Batch {
  int64_t B, T;
  Ints tokens, targets;  // (B, T)
};

Batch random_batch(const ModelConfig& c, int64_t B, uint64_t seed = 1, int64_t T = 0) {
  if (T == 0) T = c.seq_len;
  return {B, T, random_ids(B * T, c.vocab_size, seed), random_ids(B * T, c.vocab_size, seed + 1000)};
}

Batch sequence_of(const Batch& batch, int64_t b) {
  return {1, batch.T, row_of(batch.tokens, b, batch.T), row_of(batch.targets, b, batch.T)};
}

double loss_of(TestModel& model, const Batch& batch, Routing routing = Routing::topk) {
  return model.loss(batch.tokens.data(), batch.targets.data(), batch.B, batch.T, routing);
}

double forward_backward(TestModel& model, const Batch& batch, float loss_scale = 1) {
  return model.forward_backward(batch.tokens.data(), batch.targets.data(), batch.B, batch.T, loss_scale);
}

Floats gradients_so_far(const TestModel& model) {
  return download(model.backend(), model.grads(), model.table.total);
}

Floats gradients(TestModel& model, const Batch& batch) {
  model.zero_gradients();
  forward_backward(model, batch);
  return gradients_so_far(model);
}

// Logits (T, V) of a batch of one sequence.
Floats logits(TestModel& model, const Batch& batch, Routing routing) {
  Floats out(static_cast<size_t>(batch.T * model.config.vocab_size));
  model.logits(out.data(), batch.tokens.data(), batch.T, 0, batch.T, routing);
  return out;
}

Floats slice(const Floats& all, const Parameter& p) {
  return Floats(all.begin() + p.offset, all.begin() + p.offset + p.size);
}

// The thresholds after one training step on the batch: they then select about C tokens.
void learn_thresholds(TestModel& model, const Batch& batch) {
  forward_backward(model, batch);
  model.close_step(1, 1);
}

void set_thresholds(TestModel& model, float tau) {
  const Floats all(static_cast<size_t>(model.sparse_layers), tau);
  model.backend().to_device(model.thresholds(), all.data(), model.sparse_layers);
}

// What each sparse layer selects in one run, in the order of the layers.
std::vector<Ints> selections(TestModel& model, const Batch& batch, Routing routing) {
  std::vector<Ints> all;
  model.on_selection = [&](size_t, const Rows& rows) {
    all.push_back(download(model.backend(), rows.row, rows.n));
  };
  loss_of(model, batch, routing);
  model.on_selection = nullptr;
  return all;
}

// Copies the weights of every tensor of `to` from the tensor of `from` that `source` names.
template <class Source>
void copy_weights(TestModel& to, const TestModel& from, Source source) {
  std::map<std::string, const Parameter*> by_name;
  for (const Parameter& p : from.table.entries) by_name[p.name] = &p;
  const Floats weights = download(from.backend(), from.params(), from.table.total);
  for (const Parameter& p : to.table.entries) {
    const Floats values = slice(weights, *by_name.at(source(p.name)));
    to.backend().to_device(to.params() + p.offset, values.data(), p.size);
  }
}

// Every architecture and ablation, on one thread (that results do not depend on threads is shown below).
class ModelTest : public ::testing::TestWithParam<NamedConfig> {
 protected:
  ModelTest() : config_(GetParam().config), model_(be_, config_, kBatch, Use::training) { randomise(model_); }

  static constexpr int64_t kBatch = 4;
  TestBackend be_{1};
  ModelConfig config_;
  TestModel model_;
};

INSTANTIATE_TEST_SUITE_P(Architectures, ModelTest, ::testing::ValuesIn(configs()),
                         [](const auto& info) { return info.param.name; });

TEST_P(ModelTest, HasTheLayersItIsNamedFor) {
  EXPECT_EQ(pattern(model_.plan), GetParam().layers);
}

// ---------------------------------------------------------------------------------------------------
// the same run, the same bits

TEST(Determinism, LossAndGradientsDoNotDependOnThreads) {
  for (const std::string name : {"dense", "mod", "incomplete_interval"}) {
    ModelConfig config = config_named(name);
    config.dim = 72, config.ffn_dim = 136, config.seq_len = 97;  // products large enough to be shared out
    const Batch batch = random_batch(config, 2);
    expect_same_bits_for_any_thread_count([&](TestBackend& be) {
      TestModel model(be, config, 2, Use::training);
      randomise(model);
      Floats all = gradients(model, batch);
      learn_thresholds(model, batch);
      append(all, download(be, model.thresholds(), model.sparse_layers));
      for (Routing routing : {Routing::topk, Routing::threshold}) {
        all.push_back(static_cast<float>(loss_of(model, batch, routing)));
        append(all, logits(model, sequence_of(batch, 1), routing));
      }
      return all;
    });
  }
}

TEST_P(ModelTest, RepeatsBitForBitWithAnEvaluationBetween) {
  const Batch batch = random_batch(config_, 3);
  const Floats first = gradients(model_, batch);
  loss_of(model_, random_batch(config_, 4, 2), Routing::topk);
  loss_of(model_, random_batch(config_, 4, 2), Routing::threshold);
  EXPECT_TRUE(same_bits(gradients(model_, batch), first));
}

TEST_P(ModelTest, TrainingAndEvaluationGiveTheSameLoss) {
  const Batch batch = random_batch(config_, 3);
  EXPECT_EQ(loss_of(model_, batch), forward_backward(model_, batch));
}

TEST_P(ModelTest, LossIsTheMeanCrossEntropyOfTheLogits) {
  const Batch batch = random_batch(config_, 1);
  for (Routing routing : {Routing::topk, Routing::threshold}) {
    const Floats all = logits(model_, batch, routing);
    double total = 0;
    for (int64_t t = 0; t < batch.T; t++) {
      const Doubles row = doubles(row_of(all, t, config_.vocab_size));
      double sum = 0;
      for (double logit : row) sum += std::exp(logit - row[batch.targets[t]]);
      total += std::log(sum);
    }
    EXPECT_NEAR(loss_of(model_, batch, routing), total / static_cast<double>(batch.T), 1e-6 * total);
  }
}

// A model for long sequences takes a short one like a model for short ones.
TEST_P(ModelTest, ShortSequences) {
  for (int64_t T : {int64_t{1}, config_.token_sparsity, config_.seq_len - 1}) {
    ModelConfig short_config = config_;
    short_config.seq_len = T;
    TestModel short_model(be_, short_config, 2, Use::training);
    randomise(short_model);
    const Batch batch = random_batch(short_config, 2);
    EXPECT_TRUE(same_bits(gradients(model_, batch), gradients(short_model, batch))) << "T " << T;
  }
}

// ---------------------------------------------------------------------------------------------------
// batches

TEST_P(ModelTest, EachSequenceOfABatchIsAsIfAlone) {
  const int64_t d = config_.dim;
  learn_thresholds(model_, random_batch(config_, 4, 2));
  for (Routing routing : {Routing::topk, Routing::threshold}) {
    const Batch batch = random_batch(config_, 4);
    loss_of(model_, batch, routing);
    const Floats losses = download(be_, model_.activations().losses, batch.B * batch.T);
    const Floats final_norm = download(be_, model_.activations().final_norm, batch.B * batch.T * d);
    for (int64_t b = 0; b < batch.B; b++) {
      loss_of(model_, sequence_of(batch, b), routing);
      EXPECT_TRUE(same_bits(download(be_, model_.activations().losses, batch.T), row_of(losses, b, batch.T)));
      EXPECT_TRUE(same_bits(download(be_, model_.activations().final_norm, batch.T * d),
                            row_of(final_norm, b, batch.T * d)));
    }
  }
}

TEST_P(ModelTest, TwoMicroBatchesEqualOneOfDoubleSize) {
  const Batch whole = random_batch(config_, 4);
  const double loss = forward_backward(model_, whole);
  const Floats expected = gradients_so_far(model_);
  model_.close_step(1, 1);
  const Floats expected_tau = download(be_, model_.thresholds(), model_.sparse_layers);

  model_.zero_gradients();
  set_thresholds(model_, 0);
  double sum = 0;
  for (int64_t half = 0; half < 2; half++) {
    const Batch part = {2, whole.T, row_of(whole.tokens, half, 2 * whole.T),
                        row_of(whole.targets, half, 2 * whole.T)};
    sum += 0.5 * forward_backward(model_, part, 0.5f);
  }
  model_.close_step(1, 2);
  EXPECT_NEAR(sum, loss, 1e-6 * loss);
  const Floats accumulated = gradients_so_far(model_);
  for (const Parameter& p : model_.table.entries) {
    const double bound = p.size == 1 ? 1e-4 : 1e-5;  // a gate's one number is a sum that may cancel
    EXPECT_LE(normalised_error(slice(accumulated, p), slice(expected, p)), bound) << p.name;
  }
  EXPECT_LE(normalised_error(download(be_, model_.thresholds(), model_.sparse_layers), doubles(expected_tau)),
            1e-6);
}

// ---------------------------------------------------------------------------------------------------
// the gradient of the whole model

// By how much the least certain choice of any sparse layer was made: the C-th largest score less the next
// one.
double selection_margin(TestModel& model, const Batch& batch) {
  const int64_t C = tokens_selected(model.config, batch.T);
  double margin = std::numeric_limits<double>::infinity();
  model.on_selection = [&](size_t, const Rows&) {
    const Floats u = download(model.backend(), model.activations().selection_score, batch.B * batch.T);
    for (int64_t b = 0; b < batch.B && C < batch.T; b++) {
      Floats sorted = row_of(u, b, batch.T);
      std::sort(sorted.begin(), sorted.end(), std::greater<>());
      margin = std::min(margin, static_cast<double>(sorted[C - 1]) - sorted[C]);
    }
  };
  loss_of(model, batch);
  model.on_selection = nullptr;
  return margin;
}

// Of fifty batches, the one whose selection a small change of the weights is least likely to change.
Batch batch_of_clear_choices(TestModel& model, int64_t B) {
  Batch best;
  double best_margin = -1;
  for (uint64_t seed = 1; seed <= 50; seed++) {
    const Batch batch = random_batch(model.config, B, seed);
    const double margin = selection_margin(model, batch);
    if (margin > best_margin) best = batch, best_margin = margin;
  }
  return best;
}

// Compares the slope of the loss with the gradient: each tensor along a direction that is half its gradient,
// half random. The selection has to be the same on both sides; where it is not, the step is halved.
class Slope {
 public:
  Slope(TestModel& model, const Batch& batch)
      : model_(model),
        batch_(batch),
        weights_(download(model.backend(), model.params(), model.table.total)),
        gradients_(gradients(model, batch)),
        selected_(selections(model, batch, Routing::topk)) {}

  void check(const Parameter& p) {
    const Floats w = slice(weights_, p), g = slice(gradients_, p);
    const double size = norm(g);
    const Floats direction = half_random(p, g, size);
    const double expected = dot(doubles(g), doubles(direction));
    // Moves the loss by about this much, but no tensor by more than a share of itself.
    double step = std::min(0.003 / size, 0.03 * norm(w));
    for (int attempt = 0; attempt < 8; attempt++, step /= 2) {
      const std::optional<double> wide = slope_along(p, direction, step);
      const std::optional<double> narrow = slope_along(p, direction, step / 2);
      if (!wide || !narrow) continue;
      const double slope = (4 * *narrow - *wide) / 3;  // what depends on the step's square cancels
      const double rounding = 4e-7 / step;
      EXPECT_NEAR(slope, expected, 0.01 * size + rounding) << p.name << ", step " << step;
      EXPECT_TRUE(size == 0 || rounding < 0.1 * size) << p.name << ": the loss is too coarse for this step";
      return;
    }
    ADD_FAILURE() << p.name << ": every step changes the selection";
  }

 private:
  static double norm(const Floats& values) { return std::sqrt(dot(doubles(values), doubles(values))); }

  static Floats half_random(const Parameter& p, Floats gradient, double size) {
    const Floats random = normal_numbers(p.size, stream_of(p.name));
    for (int64_t i = 0; i < p.size; i++) {
      const double part = size == 0 ? 0 : gradient[i] / size;
      gradient[i] = static_cast<float>(part + random[i] / std::sqrt(static_cast<double>(p.size)));
    }
    return gradient;
  }

  // Nothing where the selection is not the same on both sides.
  std::optional<double> slope_along(const Parameter& p, const Floats& direction, double step) {
    double losses[2];
    bool same = true;
    for (int side = 0; side < 2; side++) {
      Floats moved = slice(weights_, p);
      for (int64_t i = 0; i < p.size; i++) {
        moved[i] += static_cast<float>(side == 0 ? step : -step) * direction[i];
      }
      model_.backend().to_device(model_.params() + p.offset, moved.data(), p.size);
      same = same && selections(model_, batch_, Routing::topk) == selected_;
      losses[side] = loss_of(model_, batch_);
    }
    model_.backend().to_device(model_.params() + p.offset, weights_.data() + p.offset, p.size);
    if (!same) return std::nullopt;
    return (losses[0] - losses[1]) / (2 * step);
  }

  TestModel& model_;
  const Batch batch_;
  const Floats weights_, gradients_;
  const std::vector<Ints> selected_;
};

TEST_P(ModelTest, GradientOfEveryTensorIsTheSlopeOfTheLoss) {
  Slope slope(model_, batch_of_clear_choices(model_, 2));
  for (const Parameter& p : model_.table.entries) slope.check(p);
}

// ---------------------------------------------------------------------------------------------------
// selection

TEST_P(ModelTest, EverySparseLayerSelectsExactlyCAscendingTokens) {
  for (int64_t T : {config_.seq_len, config_.seq_len - 1, int64_t{1}}) {
    const Batch batch = random_batch(config_, 3, 1, T);
    const int64_t C = (T + config_.token_sparsity - 1) / config_.token_sparsity;
    const std::vector<Ints> all = selections(model_, batch, Routing::topk);
    EXPECT_EQ(static_cast<int64_t>(all.size()), model_.sparse_layers);
    for (const Ints& row : all) {
      ASSERT_EQ(static_cast<int64_t>(row.size()), batch.B * C);
      for (int64_t i = 0; i < batch.B * C; i++) {
        EXPECT_EQ(row[i] / T, i / C) << "sequence";
        EXPECT_TRUE(i % C == 0 || row[i - 1] < row[i]) << "ascending";
      }
    }
  }
}

// The stream before each sparse layer and behind the last: in a model without dense layers each layer's rows
// are all that changes.
void check_unselected_rows(TestModel& model, const Batch& batch, Routing routing) {
  const int64_t n = batch.B * batch.T, d = model.config.dim;
  std::vector<Floats> streams;
  std::vector<Ints> selected;
  model.on_selection = [&](size_t, const Rows& rows) {
    streams.push_back(download(model.backend(), model.activations().stream, n * d));
    selected.push_back(download(model.backend(), rows.row, rows.n));
  };
  loss_of(model, batch, routing);
  streams.push_back(download(model.backend(), model.activations().stream, n * d));
  model.on_selection = nullptr;

  ASSERT_EQ(static_cast<int64_t>(selected.size()), model.sparse_layers);
  for (size_t l = 0; l < selected.size(); l++) {
    EXPECT_GT(selected[l].size(), 0u);
    EXPECT_LT(static_cast<int64_t>(selected[l].size()), n);
    for (int64_t i = 0; i < n; i++) {
      const bool chosen = std::binary_search(selected[l].begin(), selected[l].end(), static_cast<int32_t>(i));
      const bool same = static_cast<bool>(same_bits(row_of(streams[l], i, d), row_of(streams[l + 1], i, d)));
      EXPECT_EQ(same, !chosen) << "layer " << l << ", row " << i;
    }
  }
}

TEST(SparseLayer, LeavesRowsItDidNotSelectUntouched) {
  TestBackend be(1);
  const ModelConfig config = config_named("no_anchors");
  TestModel model(be, config, 3, Use::training);
  randomise(model);
  const Batch batch = random_batch(config, 3);
  learn_thresholds(model, batch);
  check_unselected_rows(model, batch, Routing::topk);
  check_unselected_rows(model, batch, Routing::threshold);
}

// A router of zeros and gates of 1 leave nothing of a sparse layer that selects every token.
class DenseEquivalent : public ::testing::TestWithParam<Arch> {
 protected:
  DenseEquivalent()
      : dense_(be_, small_config(Arch::dense), 2, Use::training),
        sparse_(be_, sparse_config(), 2, Use::training) {
    randomise(dense_);
    for (const Parameter& p : sparse_.table.entries) {
      const Floats values(static_cast<size_t>(p.size), p.init == Init::gate ? 1.0f : 0.0f);
      be_.to_device(sparse_.params() + p.offset, values.data(), p.size);
    }
    const Floats weights = download(be_, dense_.params(), dense_.table.total);
    for (const Parameter& p : dense_.table.entries) {
      be_.to_device(sparse_.params() + twin(p).offset, weights.data() + p.offset, p.size);
    }
  }

  static ModelConfig sparse_config() {
    ModelConfig c = small_config(GetParam());
    c.token_sparsity = 1;
    return c;
  }
  const Parameter& twin(const Parameter& dense) const {
    for (const Parameter& p : sparse_.table.entries) {
      if (p.name == dense.name) return p;
    }
    ADD_FAILURE() << dense.name << " is missing";
    return dense;
  }

  TestBackend be_{1};
  TestModel dense_, sparse_;
  const Batch batch_ = random_batch(small_config(Arch::dense), 2);
};

INSTANTIATE_TEST_SUITE_P(K1, DenseEquivalent, ::testing::Values(Arch::xmod, Arch::mod),
                         [](const auto& info) { return arch_name(info.param); });

TEST_P(DenseEquivalent, LossAndEveryGradientBitForBit) {
  EXPECT_EQ(pattern(sparse_.plan), "DSDSD");
  EXPECT_EQ(forward_backward(sparse_, batch_), forward_backward(dense_, batch_));
  const Floats got = gradients_so_far(sparse_), expected = gradients_so_far(dense_);
  for (const Parameter& p : dense_.table.entries) {
    EXPECT_TRUE(same_bits(slice(got, twin(p)), slice(expected, p))) << p.name;
  }
}

TEST_P(DenseEquivalent, LogitsBitForBit) {
  set_thresholds(sparse_, -1);  // below the score of every token, 0
  const Batch sequence = sequence_of(batch_, 1);
  const Floats expected = logits(dense_, sequence, Routing::topk);
  EXPECT_TRUE(same_bits(logits(sparse_, sequence, Routing::topk), expected));
  EXPECT_TRUE(same_bits(logits(sparse_, sequence, Routing::threshold), expected));
}

TEST_P(DenseEquivalent, IsLostWhenARouterScores) {
  for (const Parameter& p : sparse_.table.entries) {
    if (p.init != Init::router) continue;
    const Floats values = normal_numbers(p.size, 1, 0.01);
    be_.to_device(sparse_.params() + p.offset, values.data(), p.size);
  }
  EXPECT_NE(forward_backward(sparse_, batch_), forward_backward(dense_, batch_));
}

// ---------------------------------------------------------------------------------------------------
// threshold routing

class ThresholdRouting : public ::testing::Test {
 protected:
  ThresholdRouting() : config_(config_named("xmod")), model_(be_, config_, 4, Use::training) {
    randomise(model_);
    learn_thresholds(model_, random_batch(config_, 4));
  }

  TestBackend be_{1};
  ModelConfig config_;
  TestModel model_;
};

TEST_F(ThresholdRouting, EarlierLogitsDoNotChangeWithAFutureToken) {
  const Batch batch = random_batch(config_, 1);
  const int64_t V = config_.vocab_size;
  const Floats before = logits(model_, batch, Routing::threshold);
  for (const Ints& row : selections(model_, batch, Routing::threshold)) {  // or there is nothing to show
    EXPECT_GT(row.size(), 0u);
    EXPECT_LT(static_cast<int64_t>(row.size()), batch.T);
  }
  for (int64_t t : {int64_t{1}, batch.T / 2, batch.T - 1}) {
    for (int32_t id = 0; id < V; id += 3) {
      if (id == batch.tokens[t]) continue;
      Batch changed = batch;
      changed.tokens[t] = id;
      const Floats after = logits(model_, changed, Routing::threshold);
      EXPECT_TRUE(same_bits(row_of(after, 0, t * V), row_of(before, 0, t * V))) << "token " << t;
      EXPECT_FALSE(same_bits(row_of(after, t, V), row_of(before, t, V))) << "token " << t;
    }
  }
}

// The companion that shows the test above can fail: the C best of a sequence are known at its end.
TEST_F(ThresholdRouting, UnderTopKEarlierLogitsDoChangeWithAFutureToken) {
  const Batch batch = random_batch(config_, 1);
  const int64_t V = config_.vocab_size, t = batch.T - 1;
  const Floats before = logits(model_, batch, Routing::topk);
  int64_t changes = 0;
  for (int32_t id = 0; id < V; id++) {
    Batch changed = batch;
    changed.tokens[t] = id;
    const Floats after = logits(model_, changed, Routing::topk);
    changes += !same_bits(row_of(after, 0, t * V), row_of(before, 0, t * V));
  }
  EXPECT_GT(changes, 5);
}

TEST_F(ThresholdRouting, APrefixHasTheLogitsOfTheWhole) {
  const Batch batch = random_batch(config_, 1);
  const int64_t V = config_.vocab_size;
  const Floats whole = logits(model_, batch, Routing::threshold);
  for (int64_t T = 1; T < batch.T; T++) {
    const Batch prefix = {1, T, row_of(batch.tokens, 0, T), row_of(batch.targets, 0, T)};
    EXPECT_TRUE(same_bits(logits(model_, prefix, Routing::threshold), row_of(whole, 0, T * V))) << T;
  }
}

// Nothing is left but the dense layers.
TEST_F(ThresholdRouting, WithoutASelectionTheModelIsItsDenseLayers) {
  set_thresholds(model_, std::numeric_limits<float>::infinity());
  ModelConfig dense_config = config_;
  dense_config.arch = Arch::dense;
  dense_config.active_layers = 3;
  TestModel dense(be_, dense_config, 1, Use::inference);
  std::vector<int64_t> dense_layers;
  for (size_t l = 0; l < model_.plan.size(); l++) {
    if (!model_.plan[l].routed) dense_layers.push_back(static_cast<int64_t>(l));
  }
  ASSERT_EQ(dense_layers.size(), 3u);
  copy_weights(dense, model_, [&](std::string name) {
    for (int64_t l = 2; l >= 0; l--) {
      const std::string prefix = layer_prefix(l);
      if (name.starts_with(prefix)) return layer_prefix(dense_layers[l]) + name.substr(prefix.size());
    }
    return name;
  });
  const Batch batch = random_batch(config_, 1);
  for (const Ints& row : selections(model_, batch, Routing::threshold)) EXPECT_EQ(row.size(), 0u);
  EXPECT_TRUE(same_bits(logits(model_, batch, Routing::threshold), logits(dense, batch, Routing::threshold)));
}

TEST_F(ThresholdRouting, JustBelowTheCthScoreIsTopK) {
  const Batch batch = random_batch(config_, 1);
  const double topk = loss_of(model_, batch);
  Floats tau = download(be_, model_.activations().kth_score, model_.sparse_layers);
  for (float& value : tau) value = std::nextafter(value, -std::numeric_limits<float>::infinity());
  be_.to_device(model_.thresholds(), tau.data(), model_.sparse_layers);
  EXPECT_EQ(selections(model_, batch, Routing::threshold), selections(model_, batch, Routing::topk));
  EXPECT_EQ(loss_of(model_, batch, Routing::threshold), topk);
}

TEST_F(ThresholdRouting, SelectingEveryTokenIsPossible) {
  set_thresholds(model_, -std::numeric_limits<float>::infinity());
  const Batch batch = random_batch(config_, 4);
  for (const Ints& row : selections(model_, batch, Routing::threshold)) {
    EXPECT_EQ(static_cast<int64_t>(row.size()), batch.B * batch.T);
  }
  EXPECT_TRUE(std::isfinite(loss_of(model_, batch, Routing::threshold)));
}

// tau_n = sum over i of 0.01 * 0.99^(n-i) * u_i / (1 - 0.99^n), u_i the mean C-th largest score of step i.
TEST_F(ThresholdRouting, ThresholdsAreAveragesWithBiasCorrection) {
  set_thresholds(model_, 123);  // the first step forgets it
  const int64_t steps = 12, micro_batches = 2, B = 3, layers = model_.sparse_layers;
  std::vector<Doubles> scores;  // of each step
  for (int64_t step = 1; step <= steps; step++) {
    Doubles mean(static_cast<size_t>(layers));
    for (int64_t micro = 0; micro < micro_batches; micro++) {
      forward_backward(model_, random_batch(config_, B, 10 * static_cast<uint64_t>(step + 100 * micro)));
      const Floats kth = download(be_, model_.activations().kth_score, layers * B);
      for (int64_t i = 0; i < layers * B; i++) mean[i / B] += kth[i] / static_cast<double>(B * micro_batches);
    }
    scores.push_back(mean);
    model_.close_step(step, micro_batches);

    const Floats tau = download(be_, model_.thresholds(), layers);
    for (int64_t l = 0; l < layers; l++) {
      double expected = 0;
      for (int64_t i = 1; i <= step; i++) {
        expected += 0.01 * std::pow(0.99, static_cast<double>(step - i)) * scores[i - 1][l];
      }
      expected /= 1 - std::pow(0.99, static_cast<double>(step));
      EXPECT_NEAR(tau[l], expected, 1e-5) << "step " << step << ", layer " << l;
    }
  }
}

// ---------------------------------------------------------------------------------------------------
// token-choice bias

// How often each token was selected in its interval, behind each sparse layer: visit(layer, counts).
template <class Visit>
void for_each_count(TestModel& model, const Batch& batch, Routing routing, Visit visit) {
  model.on_selection = [&](size_t l, const Rows&) {
    visit(model.plan[l], download(model.backend(), model.activations().times_selected, batch.B * batch.T));
  };
  loss_of(model, batch, routing);
  model.on_selection = nullptr;
}

TEST_P(ModelTest, CountsStartAgainAtEveryDenseLayer) {
  const Batch batch = random_batch(config_, 2);
  learn_thresholds(model_, batch);
  for (Routing routing : {Routing::topk, Routing::threshold}) {
    const std::vector<Ints> selected = selections(model_, batch, routing);
    Ints expected;
    for_each_count(model_, batch, routing, [&](const Layer& layer, const Ints& counts) {
      if (layer.depth_in_interval == 0) expected.assign(counts.size(), 0);
      for (int32_t row : selected[layer.sparse_index]) expected[row]++;
      EXPECT_EQ(counts, expected) << "sparse layer " << layer.sparse_index;
    });
  }
}

// Far stronger than any score, the bias hands out turns: as often as K layers have passed, each token was
// selected once more.
int64_t tokens_out_of_turn(double strength, int64_t anchor_stride) {
  TestBackend be(1);
  ModelConfig config = small_config(Arch::xmod);
  config.anchor_stride = anchor_stride;
  config.active_layers = 1 + 2 * (anchor_stride + 1);
  config.token_bias_strength = strength;
  TestModel model(be, config, 2, Use::training);
  randomise(model);
  int64_t out_of_turn = 0;
  for_each_count(model, random_batch(config, 2), Routing::topk, [&](const Layer& layer, const Ints& counts) {
    const int64_t passed = layer.depth_in_interval + 1;
    for (int64_t count : counts) {
      out_of_turn += count < passed / config.token_sparsity;
      out_of_turn += count > (passed + config.token_sparsity - 1) / config.token_sparsity;
    }
  });
  return out_of_turn;
}

TEST(TokenBias, WhenStrongSelectsEachTokenOnceInKLayers) {
  EXPECT_EQ(tokens_out_of_turn(1000, 1), 0);
  EXPECT_EQ(tokens_out_of_turn(1000, 3), 0);
  EXPECT_GT(tokens_out_of_turn(0, 1), 10);  // the scores alone do not
}

// ---------------------------------------------------------------------------------------------------
// output head in chunks of rows

// A vocabulary so large that the logits of 64 rows are all that fits.
class ChunkedHead : public ::testing::Test {
 protected:
  static ModelConfig chunked_config() {
    ModelConfig c = small_config(Arch::dense);
    c.vocab_size = 131072;
    c.dim = 8;
    c.active_layers = 1;
    c.ffn_dim = 8;
    c.seq_len = 70;
    return c;
  }

  ChunkedHead() : config_(chunked_config()), model_(be_, config_, 4, Use::training) { model_.initialise(1); }

  TestBackend be_{1};
  ModelConfig config_;
  TestModel model_;
};

TEST_F(ChunkedHead, GivesTheLossAndGradientOfOneChunk) {
  const int64_t T = 35;
  const Batch batch = random_batch(config_, 4, 1, T);
  const double loss = forward_backward(model_, batch);
  ASSERT_EQ(model_.activations().logit_rows, 64);  // of 140: chunks of 64, 64 and 12
  const Floats expected = gradients_so_far(model_);
  const Floats losses = download(be_, model_.activations().losses, batch.B * T);
  loss_of(model_, batch);
  EXPECT_TRUE(same_bits(download(be_, model_.activations().losses, batch.B * T), losses));

  model_.zero_gradients();
  double sum = 0;
  for (int64_t b = 0; b < batch.B; b++) {
    sum += 0.25 * forward_backward(model_, sequence_of(batch, b), 0.25f);
    EXPECT_TRUE(same_bits(download(be_, model_.activations().losses, T), row_of(losses, b, T)));
  }
  EXPECT_NEAR(sum, loss, 1e-9 * loss);
  const Floats accumulated = gradients_so_far(model_);
  for (const Parameter& p : model_.table.entries) {
    EXPECT_LE(normalised_error(slice(accumulated, p), slice(expected, p)), 1e-5) << p.name;
  }
}

TEST_F(ChunkedHead, GivesTheLogitsOfOneRow) {
  const Batch batch = random_batch(config_, 1);
  const int64_t V = config_.vocab_size;
  const Floats all = logits(model_, batch, Routing::topk);
  for (int64_t t : {0, 63, 64, 69}) {
    Floats one(static_cast<size_t>(V));
    model_.logits(one.data(), batch.tokens.data(), batch.T, t, 1, Routing::topk);
    EXPECT_TRUE(same_bits(one, row_of(all, t, V))) << "row " << t;
  }
}

}  // namespace
}  // namespace xmod

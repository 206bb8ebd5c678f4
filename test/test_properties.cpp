// What must hold for the whole model whatever its architecture and weights: exact equalities between runs
// that should not differ, and the gradient as the slope of what is trained. Routing has
// test_properties_routing.cpp, experts test_experts.cpp.
#include <optional>

#include "small_models.h"

namespace xmod {
namespace {

INSTANTIATE_TEST_SUITE_P(Architectures, ModelTest, ::testing::ValuesIn(configs()),
                         [](const auto& info) { return info.param.name; });

TEST_P(ModelTest, HasTheLayersItIsNamedFor) {
  EXPECT_EQ(pattern(model_.plan), GetParam().layers);
}

// ---------------------------------------------------------------------------------------------------
// the same run, the same bits

TEST(Determinism, LossAndGradientsDoNotDependOnThreads) {
  for (const std::string name :
       {"dense", "mod", "incomplete_interval", "routed_ffn", "selected_q", "moe", "deco"}) {
    SCOPED_TRACE(name);
    ModelConfig config = config_named(name);
    config.dim = 72, config.ffn_dim = 136, config.seq_len = 97;  // products large enough to be shared out
    if (has_experts(config.arch)) config.expert_dim = 72;
    const Batch batch = random_batch(config, 2);
    expect_same_bits_for_any_threads([&](TestBackend& be) {
      TestModel model(be, config, 2, Use::training);
      randomise(model);
      Floats all = gradients(model, batch);
      learn_thresholds(model, batch);
      append(all, buffers_of(model));
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

// In the gradient and in all that moves without one: thresholds, expert biases, deco's entropy weight.
TEST_P(ModelTest, TwoMicroBatchesEqualOneOfDoubleSize) {
  const Batch whole = random_batch(config_, 4);
  const double loss = forward_backward(model_, whole);
  const Floats expected = gradients_so_far(model_);
  const ExpertLoads expected_loads = model_.close_step(1, 1);
  const Floats expected_buffers = buffers_of(model_);

  model_.zero_gradients();
  reset_buffers(model_);
  double sum = 0;
  for (int64_t half = 0; half < 2; half++) {
    sum += 0.5 * forward_backward(model_, sequences_of(whole, 2 * half, 2), 0.5f);
  }
  const ExpertLoads loads = model_.close_step(1, 2);
  EXPECT_NEAR(sum, loss, 1e-6 * loss);
  const Floats accumulated = gradients_so_far(model_);
  for (const Parameter& p : model_.table.entries) {
    const double bound = p.size == 1 ? 1e-4 : 1e-5;  // a gate's one number is a sum that may cancel
    EXPECT_LE(normalised_error(slice(accumulated, p), slice(expected, p)), bound) << p.name;
  }
  EXPECT_LE(normalised_error(buffers_of(model_), expected_buffers), 1e-6);
  EXPECT_EQ(loads.max, expected_loads.max);
  EXPECT_EQ(loads.entropy, expected_loads.entropy);
  EXPECT_EQ(loads.active_ratio, expected_loads.active_ratio);
}

// ---------------------------------------------------------------------------------------------------
// what a layer does not keep for its backward pass

// Everything that two micro-batches with an evaluation between them leave behind, and how often layers
// selected.
struct TrainedStep {
  Floats gradients, buffers;
  double losses[3];
  ExpertLoads loads;
  int64_t selections = 0;

  TrainedStep(TestModel& model, const Batch& first, const Batch& second) {
    model.on_selection = [&](int64_t, const Rows&) { selections++; };
    model.zero_gradients();
    losses[0] = forward_backward(model, first, 0.5f);
    losses[1] = loss_of(model, second, Routing::threshold);
    losses[2] = forward_backward(model, second, 0.5f);
    gradients = gradients_so_far(model);
    loads = model.close_step(1, 2);
    buffers = buffers_of(model);
    model.on_selection = nullptr;
  }
};

TEST_P(ModelTest, ComputingActivationsAgainChangesNoBit) {
  const Batch first = random_batch(config_, 4, 1), second = random_batch(config_, 3, 2);
  const TrainedStep expected(model_, first, second);
  for (Recompute recompute : {Recompute::ffn, Recompute::block}) {
    SCOPED_TRACE(recompute == Recompute::ffn ? "ffn" : "block");
    TestModel model(be_, config_, kBatch, Use::training, recompute);
    randomise(model);
    const TrainedStep found(model, first, second);
    for (const Parameter& p : model.table.entries)
      EXPECT_TRUE(same_bits(slice(found.gradients, p), slice(expected.gradients, p))) << p.name;
    EXPECT_TRUE(same_bits(found.buffers, expected.buffers));
    for (int i = 0; i < 3; i++) EXPECT_EQ(found.losses[i], expected.losses[i]);
    EXPECT_EQ(found.loads.max, expected.loads.max);
    EXPECT_EQ(found.loads.entropy, expected.loads.entropy);
    EXPECT_EQ(found.loads.active_ratio, expected.loads.active_ratio);
    EXPECT_EQ(found.selections, expected.selections);
  }
}

// ---------------------------------------------------------------------------------------------------
// the gradient of the whole model

// Thousands of steps: too many for an emulated GPU, whose gradients test_reference.cpp compares with
// PyTorch's.
#ifndef XMOD_TEST_CUDA

// By how much the least certain choice of any sparse layer was made: the C-th largest score less the next
// one.
double selection_margin(TestModel& model, const Batch& batch) {
  const int64_t C = tokens_selected(model.config, batch.T);
  double margin = std::numeric_limits<double>::infinity();
  model.on_selection = [&](int64_t, const Rows&) {
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
  Batch best = random_batch(model.config, B);
  if (model.sparse_layers == 0) return best;
  double best_margin = -1;
  for (uint64_t seed = 1; seed <= 50; seed++) {
    const Batch batch = random_batch(model.config, B, seed);
    const double margin = selection_margin(model, batch);
    if (margin > best_margin) best = batch, best_margin = margin;
  }
  return best;
}

// What training minimises: the loss and, in deco, lambda times the mean entropy of a layer.
double objective(TestModel& model, const Batch& batch) {
  double value = forward_backward(model, batch);
  for (const auto& layer : model.activations().layers) {
    const auto* deco = std::get_if<Deco::Saved<float>>(&layer.ffn);
    if (!deco) continue;
    value += entropy_weight(model) * model.backend().mean(deco->entropy, batch.B * batch.T) /
             static_cast<double>(count_layers(model.plan));
  }
  return value;
}

// Everything that the last forward_backward on n tokens chose and that no gradient sees: tokens and experts.
std::vector<Ints> choices(const TestModel& model, int64_t n) {
  std::vector<Ints> all;
  for (size_t l = 0; l < model.plan.size(); l++) {
    const Rows& rows = model.activations().layers[l].rows;
    if (model.plan[l].routed) all.push_back(download(model.backend(), rows.row, rows.n));
  }
  for (const std::vector<uint8_t>& chosen : chosen_experts(model, n)) {
    all.emplace_back(chosen.begin(), chosen.end());
  }
  return all;
}

// Compares the slope of the objective with the gradient: each tensor along a direction that is half its
// gradient, half random. The choices have to be the same on both sides; where they are not, the step is
// halved.
class Slope {
 public:
  Slope(TestModel& model, const Batch& batch)
      : model_(model),
        batch_(batch),
        weights_(download(model.backend(), model.params(), model.table.total)),
        gradients_(gradients(model, batch)),
        choices_(choices(model, batch.B * batch.T)) {}

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
    ADD_FAILURE() << p.name << ": every step changes a choice";
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

  // Nothing where a choice is not the same on both sides.
  std::optional<double> slope_along(const Parameter& p, const Floats& direction, double step) {
    double losses[2];
    bool same = true;
    for (int side = 0; side < 2; side++) {
      Floats moved = slice(weights_, p);
      for (int64_t i = 0; i < p.size; i++) {
        moved[i] += static_cast<float>(side == 0 ? step : -step) * direction[i];
      }
      set_weights(model_, p, moved);
      losses[side] = objective(model_, batch_);
      same = same && choices(model_, batch_.B * batch_.T) == choices_;
    }
    set_weights(model_, p, slice(weights_, p));
    if (!same) return std::nullopt;
    return (losses[0] - losses[1]) / (2 * step);
  }

  TestModel& model_;
  const Batch batch_;
  const Floats weights_, gradients_;
  const std::vector<Ints> choices_;
};

TEST_P(ModelTest, GradientOfEveryTensorIsTheSlopeOfTheLoss) {
  Slope slope(model_, batch_of_clear_choices(model_, 2));
  for (const Parameter& p : model_.table.entries) slope.check(p);
}
#endif

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

  TestBackend be_{{.threads = 1}};
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

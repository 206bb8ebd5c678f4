// What must hold of routing whatever the weights: which tokens a sparse layer selects, under top-k and by
// threshold, and what becomes of those that it does not.
#include "small_models.h"

namespace xmod {
namespace {

std::vector<NamedConfig> routed_configs() {
  std::vector<NamedConfig> routed = configs();
  std::erase_if(routed, [](const NamedConfig& c) { return !is_routed(c.config.arch); });
  return routed;
}

INSTANTIATE_TEST_SUITE_P(Architectures, ModelTest, ::testing::ValuesIn(routed_configs()),
                         [](const auto& info) { return info.param.name; });

const auto kEveryUnit = ::testing::Values(Arch::xmod, Arch::routed_ffn, Arch::selected_q);

std::string param_name(const ::testing::TestParamInfo<Arch>& info) {
  return identifier(info.param);
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

// The stream before each sparse layer and behind the last: where nothing stands between them, each layer's
// rows are all that changes.
void check_unselected_rows(TestModel& model, const Batch& batch, Routing routing) {
  const int64_t n = batch.B * batch.T, d = model.config.dim;
  std::vector<Floats> streams;
  std::vector<Ints> selected;
  model.on_selection = [&](int64_t, const Rows& rows) {
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

class SparseLayer : public ::testing::TestWithParam<Arch> {};
INSTANTIATE_TEST_SUITE_P(Architectures, SparseLayer, kEveryUnit, param_name);

TEST_P(SparseLayer, LeavesRowsItDidNotSelectUntouched) {
  TestBackend be({.threads = 1});
  ModelConfig config = small_config(GetParam());
  config.anchors = false, config.dense_prefix = 0;
  config.active_layers = GetParam() == Arch::routed_ffn ? 1 : 2;  // between units lies an attention
  TestModel model(be, config, 3, Use::training);
  randomise(model);
  const Batch batch = random_batch(config, 3);
  learn_thresholds(model, batch);
  check_unselected_rows(model, batch, Routing::topk);
  check_unselected_rows(model, batch, Routing::threshold);
}

// ---------------------------------------------------------------------------------------------------
// K = 1

// How near the dense model each architecture comes; 0: bit for bit.
struct Nearness {
  Arch arch;
  double logits, gradients;

  friend void PrintTo(const Nearness& n, std::ostream* out) { *out << arch_name(n.arch); }
};

// A router of zeros and gates of 1 leave nothing of a sparse layer that selects every token.
class DenseEquivalent : public ::testing::TestWithParam<Nearness> {
 protected:
  DenseEquivalent()
      : dense_(be_, small_config(Arch::dense), 2, Use::training),
        sparse_(be_, sparse_config(), 2, Use::training) {
    randomise(dense_);
    set_all(sparse_, Init::gate, 1);
    for (const Parameter& p : dense_.table.entries) {
      set_weights(sparse_, parameter(sparse_, p.name), weights_of(dense_, p));
    }
  }

  static ModelConfig sparse_config() {
    ModelConfig c = small_config(GetParam().arch);
    c.token_sparsity = 1;
    return c;
  }

  TestBackend be_{{.threads = 1}};
  TestModel dense_, sparse_;
  const Batch batch_ = random_batch(small_config(Arch::dense), 2);
};

// routed-ffn adds attention and FFN to the stream one after the other; selected-q projects queries apart from
// keys and values, which only its backward pass sums in another order.
INSTANTIATE_TEST_SUITE_P(K1, DenseEquivalent,
                         ::testing::Values(Nearness{Arch::xmod, 0, 0}, Nearness{Arch::mod, 0, 0},
                                           Nearness{Arch::selected_q, 0, 1e-5},
                                           Nearness{Arch::routed_ffn, 1e-6, 1e-5}),
                         [](const auto& info) { return identifier(info.param.arch); });

TEST_P(DenseEquivalent, LossAndEveryGradient) {
  EXPECT_EQ(pattern(sparse_.plan), "DSDSD");
  const double expected_loss = forward_backward(dense_, batch_), loss = forward_backward(sparse_, batch_);
  EXPECT_NEAR(loss, expected_loss, GetParam().logits * expected_loss);
  const Floats found = gradients_so_far(sparse_), expected = gradients_so_far(dense_);
  for (const Parameter& p : dense_.table.entries) {
    expect_close(slice(found, parameter(sparse_, p.name)), slice(expected, p), GetParam().gradients, p.name);
  }
}

TEST_P(DenseEquivalent, Logits) {
  set_thresholds(sparse_, -1);  // below the score of every token, 0
  const Batch sequence = sequence_of(batch_, 1);
  const Floats expected = logits(dense_, sequence);
  expect_close(logits(sparse_, sequence, Routing::topk), expected, GetParam().logits);
  expect_close(logits(sparse_, sequence, Routing::threshold), expected, GetParam().logits);
}

TEST_P(DenseEquivalent, IsLostWhenARouterScores) {
  const Floats expected = logits(dense_, sequence_of(batch_, 1));
  for (const Parameter& p : sparse_.table.entries) {
    if (p.init == Init::router) set_weights(sparse_, p, normal_numbers(p.size, 1, 0.01));
  }
  EXPECT_GT(normalised_error(logits(sparse_, sequence_of(batch_, 1)), expected), 1e-4);
}

// ---------------------------------------------------------------------------------------------------
// threshold routing

class ThresholdRouting : public ::testing::TestWithParam<Arch> {
 protected:
  ThresholdRouting() : config_(small_config(GetParam())), model_(be_, config_, 4, Use::training) {
    randomise(model_);
    learn_thresholds(model_, random_batch(config_, 4));
  }

  TestBackend be_{{.threads = 1}};
  ModelConfig config_;
  TestModel model_;
};

INSTANTIATE_TEST_SUITE_P(Architectures, ThresholdRouting, kEveryUnit, param_name);

TEST_P(ThresholdRouting, EarlierLogitsDoNotChangeWithAFutureToken) {
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
TEST_P(ThresholdRouting, UnderTopKEarlierLogitsDoChangeWithAFutureToken) {
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

TEST_P(ThresholdRouting, APrefixHasTheLogitsOfTheWhole) {
  const Batch batch = random_batch(config_, 1);
  const int64_t V = config_.vocab_size;
  const Floats whole = logits(model_, batch, Routing::threshold);
  for (int64_t T = 1; T < batch.T; T++) {
    const Batch prefix = {1, T, row_of(batch.tokens, 0, T), row_of(batch.targets, 0, T)};
    EXPECT_TRUE(same_bits(logits(model_, prefix, Routing::threshold), row_of(whole, 0, T * V))) << T;
  }
}

// Nothing is left but the dense layers and, in routed-ffn, the attentions that its units share: dense layers
// whose FFN gives zero.
TEST_P(ThresholdRouting, WithoutASelectionTheModelIsItsOtherLayers) {
  set_thresholds(model_, std::numeric_limits<float>::infinity());
  std::vector<Layer> others;
  for (const Layer& layer : model_.plan) {
    if (!layer.routed) others.push_back(layer);
  }
  ModelConfig dense_config = config_;
  dense_config.arch = Arch::dense;
  dense_config.active_layers = static_cast<int64_t>(others.size());
  ASSERT_EQ(others.size(), GetParam() == Arch::routed_ffn ? 5u : 3u);
  TestModel dense(be_, dense_config, 1, Use::inference);
  copy_weights(dense, model_, [&](const std::string& name) {
    for (int64_t l = 0; l < dense_config.active_layers; l++) {
      const std::string prefix = layer_prefix(l);
      if (!name.starts_with(prefix)) continue;
      if (others[l].ffn == Ffn::none && name.ends_with("down_proj.weight")) return std::string();  // zero
      return layer_prefix(others[l].number) + name.substr(prefix.size());
    }
    return name;
  });
  const Batch batch = random_batch(config_, 1);
  for (const Ints& row : selections(model_, batch, Routing::threshold)) EXPECT_EQ(row.size(), 0u);
  EXPECT_TRUE(same_bits(logits(model_, batch, Routing::threshold), logits(dense, batch)));
}

TEST_P(ThresholdRouting, JustBelowTheCthScoreIsTopK) {
  const Batch batch = random_batch(config_, 1);
  const double topk = loss_of(model_, batch);
  Floats tau = download(be_, model_.activations().kth_score, model_.sparse_layers);
  for (float& value : tau) value = std::nextafter(value, -std::numeric_limits<float>::infinity());
  be_.to_device(model_.thresholds(), tau.data(), model_.sparse_layers);
  EXPECT_EQ(selections(model_, batch, Routing::threshold), selections(model_, batch, Routing::topk));
  EXPECT_EQ(loss_of(model_, batch, Routing::threshold), topk);
}

TEST_P(ThresholdRouting, SelectingEveryTokenIsPossible) {
  set_thresholds(model_, -std::numeric_limits<float>::infinity());
  const Batch batch = random_batch(config_, 4);
  for (const Ints& row : selections(model_, batch, Routing::threshold)) {
    EXPECT_EQ(static_cast<int64_t>(row.size()), batch.B * batch.T);
  }
  EXPECT_TRUE(std::isfinite(loss_of(model_, batch, Routing::threshold)));
}

// tau_n = sum over i of 0.01 * 0.99^(n-i) * u_i / (1 - 0.99^n), u_i the mean C-th largest score of step i.
TEST_P(ThresholdRouting, ThresholdsAreAveragesWithBiasCorrection) {
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
  model.on_selection = [&](int64_t number, const Rows&) {
    visit(sparse_layer(model, number),
          download(model.backend(), model.activations().times_selected, batch.B * batch.T));
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
  TestBackend be({.threads = 1});
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

}  // namespace
}  // namespace xmod

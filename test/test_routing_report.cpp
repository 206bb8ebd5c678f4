// What sparse layers select: figures of hand-made selections, the paper's references to its digits, whole
// models against masks kept by the test itself, and the files written.
#include "xmod/routing_report.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <numeric>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "small_models.h"
#include "xmod/routing_map.h"
#include "xmod/routing_output.h"

namespace xmod {
namespace {

// ---------------------------------------------------------------------------------------------------
// intervals

std::string describe(const std::vector<Interval>& intervals) {
  std::string text;
  for (const Interval& i : intervals) {
    text += std::to_string(i.first_layer) + "+" + std::to_string(i.length) + "@" +
            std::to_string(i.first_sparse) + " ";
  }
  return text;
}

std::string intervals_named(const std::string& name) {
  return describe(intervals_of(make_layer_plan(config_named(name))));
}

TEST(Intervals, AreTheRunsOfSparseLayers) {
  EXPECT_EQ(intervals_named("xmod"), "1+4@0 6+4@4 ");                 // DSSSSDSSSSD
  EXPECT_EQ(intervals_named("incomplete_interval"), "1+6@0 8+3@6 ");  // DSSSSSSDSSSD
  EXPECT_EQ(intervals_named("mod"), "1+1@0 3+1@1 5+1@2 ");            // DSDSDSD
  EXPECT_EQ(intervals_named("no_anchors"), "0+8@0 ");
  EXPECT_EQ(intervals_named("routed_ffn"), "1+6@0 8+3@6 ") << "the units' shared attentions end no interval";
  EXPECT_EQ(intervals_named("dense"), "");
}

TEST(Intervals, ThePapersHaveTheLengthsOfItsFigure5) {
  for (const auto& [A, K, lengths] : std::vector<std::tuple<int64_t, int64_t, std::set<int64_t>>>{
           {1, 16, {16}}, {4, 8, {32, 24}}, {3, 16, {48}}}) {
    ModelConfig c = presets().back().config;
    c.anchor_stride = A;
    c.token_sparsity = K;
    const std::vector<Interval> intervals = intervals_of(make_layer_plan(c));
    std::set<int64_t> found;
    for (const Interval& interval : intervals) found.insert(interval.length);
    EXPECT_EQ(found, lengths) << A << "," << K;
    for (size_t i : longest_intervals(intervals)) EXPECT_EQ(intervals[i].length, A * K);
  }
}

// ---------------------------------------------------------------------------------------------------
// references

TEST(References, ThePapersTable10ToEveryDigit) {
  struct Row {
    int64_t layers, K;
    std::string repeated, independent, jaccard;
  };
  for (const Row& row : {Row{16, 16, "6.250", "64.39", "3.226"}, Row{32, 8, "12.50", "98.61", "6.667"},
                         Row{48, 16, "6.250", "95.49", "3.226"}}) {
    const SelectionFigures repeated = repeated_subset(row.layers, row.K);
    const SelectionFigures independent = independent_subsets(row.layers, row.K);
    EXPECT_EQ(detail::percent(repeated.coverage), row.repeated);
    EXPECT_EQ(detail::percent(repeated.jaccard), "100.0");
    EXPECT_EQ(detail::percent(independent.coverage), row.independent);
    EXPECT_EQ(detail::percent(independent.jaccard), row.jaccard);
  }
}

TEST(References, UpdatesOfTwoLayersByHand) {
  EXPECT_EQ(repeated_subset(2, 4).updates, (Doubles{0.75, 0, 0.25}));
  EXPECT_EQ(independent_subsets(2, 4).updates, (Doubles{0.5625, 0.375, 0.0625}));
  EXPECT_EQ(independent_subsets(3, 1).updates, (Doubles{0, 0, 0, 1})) << "K = 1 selects every token";
}

TEST(References, UpdatesAreDistributionsOfTheSameMean) {
  for (int64_t layers : {1, 7, 48, 300}) {
    for (const SelectionFigures& f : {repeated_subset(layers, 16), independent_subsets(layers, 16)}) {
      double total = 0, mean = 0;
      for (size_t c = 0; c < f.updates.size(); c++) {
        total += f.updates[c];
        mean += static_cast<double>(c) * f.updates[c];
      }
      EXPECT_NEAR(total, 1, 1e-12);
      EXPECT_NEAR(mean, static_cast<double>(layers) / 16, 1e-12);
      EXPECT_NEAR(f.coverage, 1 - f.updates[0], 1e-12);
    }
  }
}

TEST(References, OneLayerHasNoOverlap) {
  EXPECT_FALSE(repeated_subset(1, 4).jaccard.has_value());
  EXPECT_FALSE(independent_subsets(1, 4).jaccard.has_value());
}

TEST(References, IndependentSubsetsAgreeByChance) {
  EXPECT_EQ(independent_agreement(2), 0.5);
  EXPECT_EQ(independent_agreement(4), 0.625);
}

// ---------------------------------------------------------------------------------------------------
// figures of selections made by hand

// K = 2, layers D SS D SS D; sequences of 4 tokens, so C = 2.
ModelConfig hand_config() {
  ModelConfig c = small_config(Arch::xmod);
  c.token_sparsity = 2;
  c.seq_len = 4;
  return c;
}

// Two sequences: rows 0-3 and 4-7.
RoutingMeasurement hand_measurement() {
  const Selections threshold = {{0, 1, 4}, {1, 2, 3, 4}, {0, 5}, {}};
  const Selections topk = {{0, 1, 4, 5}, {1, 2, 4, 7}, {0, 1, 4, 5}, {2, 3, 6, 7}};
  RoutingMeasurement m(hand_config());
  add_batch(m, threshold, topk, 2);
  return m;
}

TEST(HandMade, Layers) {
  const RoutingMeasurement m = hand_measurement();
  ASSERT_EQ(describe(m.intervals), "1+2@0 4+2@2 ");
  EXPECT_EQ(m.tokens(), 8);
  const LayerCounts& first = m.threshold.layers[0];
  EXPECT_EQ(first.selected, 3);
  EXPECT_EQ(first.fewest, 1);
  EXPECT_EQ(first.most, 2);
  EXPECT_EQ(first.away, 1);  // 2 and 1 of C = 2
  EXPECT_EQ(first.covered, 3);
  EXPECT_FALSE(detail::jaccard(first).has_value()) << "there is no layer before it";
  const LayerCounts& second = m.threshold.layers[1];
  EXPECT_EQ(second.covered, 5);  // 0 1 2 3 4
  EXPECT_EQ(detail::jaccard(second), 2.0 / 5);
  EXPECT_EQ(second.away, 2);  // 3 and 1
  EXPECT_EQ(detail::jaccard(m.threshold.layers[2]), std::nullopt) << "intervals do not look back";
  EXPECT_EQ(m.threshold.layers[3].fewest, 0);
  EXPECT_EQ(layer_agreement(m, 0), 1 - 1.0 / 8);  // 5
  EXPECT_EQ(layer_agreement(m, 1), 1 - 2.0 / 8);  // 3, 7
  EXPECT_EQ(layer_agreement(m, 3), 1 - 4.0 / 8);
  EXPECT_EQ(layer_agreement_same_scores(m, 1), 1 - 2.0 / 8);
}

TEST(HandMade, Intervals) {
  const RoutingMeasurement m = hand_measurement();
  const RoutingFigures first = interval_figures(m, 0), second = interval_figures(m, 1);
  EXPECT_EQ(first.threshold.coverage, 5.0 / 8);
  EXPECT_EQ(first.threshold.jaccard, 2.0 / 5);
  EXPECT_EQ(first.threshold.updates, (Doubles{3.0 / 8, 3.0 / 8, 2.0 / 8}));
  EXPECT_EQ(first.topk.coverage, 6.0 / 8);
  EXPECT_EQ(first.topk.jaccard, 2.0 / 6);
  EXPECT_EQ(first.agreement, 1 - 1.5 / 8);
  EXPECT_EQ(first.agreement_same_scores, 1 - 1.5 / 8);
  EXPECT_EQ(second.threshold.coverage, 2.0 / 8);
  EXPECT_EQ(second.threshold.jaccard, 0.0) << "the second layer selects nothing, the first does";
  EXPECT_EQ(second.topk.coverage, 1);
  EXPECT_EQ(second.topk.updates, (Doubles{0, 1, 0}));
  EXPECT_EQ(second.agreement, 1 - 3.0 / 8);
}

TEST(HandMade, TheModelIsTheMeanOfItsIntervals) {
  const RoutingFigures f = model_figures(hand_measurement());
  EXPECT_EQ(f.threshold.coverage, 3.5 / 8);
  EXPECT_EQ(f.threshold.jaccard, 1.0 / 5);
  EXPECT_EQ(f.threshold.updates, (Doubles{4.5 / 8, 2.5 / 8, 1.0 / 8}));
  EXPECT_EQ(f.independent.coverage, 0.75);
  EXPECT_EQ(f.agreement, 1 - 2.25 / 8);
}

TEST(HandMade, AShorterIntervalDoesNotCountForTheModel) {
  ModelConfig c = config_named("incomplete_interval");  // DSSSSSSDSSSD, K = 3
  c.seq_len = 3;
  const Selections in_turn = {{0}, {1}, {2}, {0}, {1}, {2}, {0}, {0}, {0}};
  RoutingMeasurement m(c);
  add_batch(m, in_turn, in_turn, 1);
  const RoutingFigures f = model_figures(m), last = interval_figures(m, 1);
  EXPECT_EQ(f.threshold.coverage, 1);
  EXPECT_EQ(f.threshold.jaccard, 0.0);
  EXPECT_EQ(f.threshold.updates, (Doubles{0, 0, 1, 0, 0, 0, 0}));
  EXPECT_EQ(f.agreement, 1);
  EXPECT_EQ(last.threshold.coverage, 1.0 / 3);
  EXPECT_EQ(last.threshold.jaccard, 1.0);
  EXPECT_DOUBLE_EQ(last.independent.coverage, 1 - 8.0 / 27) << "by its own length";
}

TEST(HandMade, WhereNothingIsSelectedThereIsNoOverlap) {
  RoutingMeasurement m(hand_config());
  add_batch(m, Selections(4), Selections(4), 2);
  const RoutingFigures f = model_figures(m);
  EXPECT_EQ(f.threshold.coverage, 0);
  EXPECT_FALSE(f.threshold.jaccard.has_value());
  EXPECT_EQ(f.agreement, 1);
  EXPECT_EQ(f.agreement_same_scores, 0.5);
}

TEST(HandMade, BatchesAddUp) {
  RoutingMeasurement parts(hand_config());
  add_batch(parts, {{0, 1}, {1, 2, 3}, {0}, {}}, {{0, 1}, {1, 2}, {0, 1}, {2, 3}}, 1);
  add_batch(parts, {{0}, {0}, {1}, {}}, {{0, 1}, {0, 3}, {0, 1}, {2, 3}}, 1);
  EXPECT_EQ(routing_json(parts, "c"), routing_json(hand_measurement(), "c"));
}

// ---------------------------------------------------------------------------------------------------
// whole models

// A token shard of 13 sequences, two of which are the batch's last ones where batches are of 4 or of 11.
class RoutedModel : public ::testing::TestWithParam<NamedConfig> {
 protected:
  static constexpr int64_t kSequences = 13;

  RoutedModel()
      : config_(GetParam().config),
        model_(be_, config_, kSequences, Use::training),
        all_{kSequences, 0, {}, {}} {
    randomise(model_);
    std::string name = ::testing::TempDir() + "xmod_routing_XXXXXX";
    EXPECT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
    write_shard(random_ids(kSequences * config_.seq_len + 1, config_.vocab_size, 5));
    learn_thresholds(model_, random_batch(config_, kSequences, 7));  // of other text
  }
  ~RoutedModel() override { std::filesystem::remove_all(folder_); }

  void write_shard(const Ints& ids) {
    std::vector<int32_t> header(256);
    header[0] = kShardMagicUint16, header[1] = kShardVersionUint16;
    header[2] = static_cast<int32_t>(ids.size());
    const std::vector<uint16_t> tokens(ids.begin(), ids.end());
    std::ofstream file(shard(), std::ios::binary);
    file.write(reinterpret_cast<const char*>(header.data()), kShardHeaderBytes);
    file.write(reinterpret_cast<const char*>(tokens.data()), static_cast<std::streamsize>(2 * tokens.size()));
    all_ = {kSequences, config_.seq_len, Ints(ids.begin(), ids.end() - 1), Ints(ids.begin() + 1, ids.end())};
  }
  std::string shard() const { return folder_ + "/val.bin"; }

  RoutingMeasurement measure(int64_t batch_size, const BatchObserver& observe = nullptr) {
    TokenShards shards(shard(), config_.seq_len, config_.vocab_size);
    EvalLoader loader(std::move(shards), batch_size);
    return measure_routing(model_, loader, batch_size, observe);
  }

  // mask[layer][row], of all sequences at once, by the model's own word.
  std::vector<std::vector<bool>> masks(Routing routing) {
    std::vector<std::vector<bool>> all;
    for (const Ints& rows : selections(model_, all_, routing)) {
      all.emplace_back(static_cast<size_t>(all_.B * all_.T));
      for (int32_t row : rows) all.back()[row] = true;
    }
    return all;
  }

  TestBackend be_{{.threads = 1}};
  ModelConfig config_;
  TestModel model_;
  Batch all_;
  std::string folder_;
};

std::vector<NamedConfig> routed_configs() {
  std::vector<NamedConfig> routed;
  for (const NamedConfig& c : configs()) {
    if (is_routed(c.config.arch)) routed.push_back(c);
  }
  return routed;
}

INSTANTIATE_TEST_SUITE_P(Configurations, RoutedModel, ::testing::ValuesIn(routed_configs()),
                         [](const auto& info) { return info.param.name; });

// Figures by their definitions, token after token.
void expect_figures(const SelectionFigures& found, const std::vector<std::vector<bool>>& masks,
                    const Interval& interval) {
  const size_t n = masks[0].size(), first = interval.first_sparse, L = interval.length;
  Doubles updates(L + 1);
  for (size_t i = 0; i < n; i++) {
    size_t times = 0;
    for (size_t l = first; l < first + L; l++) times += masks[l][i];
    updates[times] += 1.0 / static_cast<double>(n);
  }
  double overlap = 0, pairs = 0;
  for (size_t l = first; l + 1 < first + L; l++) {
    double both = 0, either = 0;
    for (size_t i = 0; i < n; i++) {
      both += masks[l][i] && masks[l + 1][i];
      either += masks[l][i] || masks[l + 1][i];
    }
    if (either == 0) continue;
    overlap += both / either;
    pairs++;
  }
  for (size_t c = 0; c <= L; c++) EXPECT_NEAR(found.updates[c], updates[c], 1e-12);
  EXPECT_NEAR(found.coverage, 1 - updates[0], 1e-12);
  ASSERT_EQ(found.jaccard.has_value(), pairs > 0);
  if (pairs > 0) {
    EXPECT_NEAR(*found.jaccard, overlap / pairs, 1e-12);
  }
}

TEST_P(RoutedModel, FiguresAreThoseOfTheMasks) {
  const auto threshold = masks(Routing::threshold), topk = masks(Routing::topk);
  EXPECT_NE(threshold, topk);  // or there is little to show
  const RoutingMeasurement m = measure(4);
  ASSERT_EQ(m.sequences, kSequences);
  for (size_t i = 0; i < m.intervals.size(); i++) {
    const Interval& at = m.intervals[i];
    const RoutingFigures f = interval_figures(m, i);
    expect_figures(f.threshold, threshold, at);
    expect_figures(f.topk, topk, at);
    double alike = 0;
    for (int64_t l = at.first_sparse; l < at.first_sparse + at.length; l++) {
      for (size_t row = 0; row < topk[l].size(); row++) alike += threshold[l][row] == topk[l][row];
    }
    EXPECT_NEAR(f.agreement, alike / static_cast<double>(at.length * m.tokens()), 1e-12);
  }
}

TEST_P(RoutedModel, SelectedTokensAreCountedBySequence) {
  const RoutingMeasurement m = measure(4);
  const std::vector<Ints> threshold = selections(model_, all_, Routing::threshold);
  const int64_t C = tokens_selected(config_, config_.seq_len);
  for (size_t l = 0; l < threshold.size(); l++) {
    EXPECT_EQ(m.threshold.layers[l].selected, static_cast<int64_t>(threshold[l].size()));
    EXPECT_LE(m.threshold.layers[l].fewest * kSequences, m.threshold.layers[l].selected);
    EXPECT_GE(m.threshold.layers[l].most * kSequences, m.threshold.layers[l].selected);
    EXPECT_EQ(m.topk.layers[l].fewest, C);
    EXPECT_EQ(m.topk.layers[l].most, C);
    EXPECT_EQ(m.topk.layers[l].away, 0);
  }
}

// The claim behind agreement_same_scores: of one set of scores, the tokens above the threshold and the C best
// contain each other.
TEST_P(RoutedModel, OnTheSameScoresOneSetContainsTheOther) {
  const int64_t n = all_.B * all_.T, C = tokens_selected(config_, all_.T);
  DeviceBuffer<TestBackend, int32_t> best(be_, all_.B * C);
  DeviceBuffer<TestBackend, float> kth(be_, all_.B);
  std::vector<double> agreement;
  model_.on_selection = [&](int64_t, const Rows& rows) {
    be_.select_topk(best.data(), kth.data(), model_.activations().selection_score, all_.B, all_.T, C);
    std::vector<bool> above(n), top(n);
    for (int32_t row : download(be_, rows.row, rows.n)) above[row] = true;
    for (int32_t row : download(be_, best.data(), all_.B * C)) top[row] = true;
    double alike = 0;
    for (int64_t i = 0; i < n; i++) alike += above[i] == top[i];
    agreement.push_back(alike / static_cast<double>(n));
  };
  loss_of(model_, all_, Routing::threshold);
  model_.on_selection = nullptr;
  const RoutingMeasurement m = measure(4);
  ASSERT_EQ(agreement.size(), m.threshold.layers.size());
  for (size_t l = 0; l < agreement.size(); l++) {
    EXPECT_NEAR(layer_agreement_same_scores(m, static_cast<int64_t>(l)), agreement[l], 1e-12);
  }
}

TEST_P(RoutedModel, BatchesOfAnySizeGiveTheSame) {
  RoutingMeasurement expected = measure(kSequences);
  EXPECT_NEAR(expected.threshold.loss, loss_of(model_, all_, Routing::threshold), 1e-6);
  EXPECT_NEAR(expected.topk.loss, loss_of(model_, all_, Routing::topk), 1e-6);
  for (int64_t batch_size : {1, 4, 11}) {
    RoutingMeasurement m = measure(batch_size);
    EXPECT_NEAR(m.topk.loss, expected.topk.loss, 1e-6);
    m.topk.loss = expected.topk.loss;  // their sums round differently
    m.threshold.loss = expected.threshold.loss;
    EXPECT_EQ(routing_json(m, ""), routing_json(expected, "")) << "batches of " << batch_size;
  }
}

TEST_P(RoutedModel, AThresholdJustBelowTheCthScoreIsTopK) {
  const Batch one = sequence_of(all_, 0);
  loss_of(model_, one, Routing::topk);
  Floats tau = download(be_, model_.activations().kth_score, model_.sparse_layers);
  for (float& value : tau) value = std::nextafter(value, -std::numeric_limits<float>::infinity());
  be_.to_device(model_.thresholds(), tau.data(), model_.sparse_layers);
  RoutingMeasurement m(config_);
  add_batch(m, selections(model_, one, Routing::threshold), selections(model_, one, Routing::topk), 1);
  const RoutingFigures f = model_figures(m);
  EXPECT_EQ(f.agreement, 1);
  EXPECT_EQ(f.agreement_same_scores, 1);
  EXPECT_EQ(f.threshold.updates, f.topk.updates);
}

TEST_P(RoutedModel, TheMapHasAnSWhereALayerSelects) {
  const int64_t size = 5 * config_.seq_len + 3;  // ends within a batch and a sequence
  RoutingMap map(config_, size);
  measure(
      4, [&](const int32_t* tokens, int64_t B, const Selections& selected) { map.add(tokens, B, selected); });
  ASSERT_EQ(map.size(), size);
  const auto threshold = masks(Routing::threshold);
  std::vector<int64_t> numbers;
  for (const Layer& layer : model_.plan) {
    if (layer.routed) numbers.push_back(layer.number);
  }
  std::istringstream lines(map.csv(Tokenizer::bytes()));
  std::string line;
  std::getline(lines, line);
  EXPECT_EQ(line, "sequence,position,id,text,layers");
  for (int64_t row = 0; row < size; row++) {
    ASSERT_TRUE(std::getline(lines, line));
    const std::string place =
        std::to_string(row / config_.seq_len) + "," + std::to_string(row % config_.seq_len) + ",";
    EXPECT_TRUE(line.starts_with(place + std::to_string(all_.tokens[row]) + ",")) << line;
    std::string letters = pattern(model_.plan);
    for (size_t l = 0; l < numbers.size(); l++) letters[numbers[l]] = threshold[l][row] ? 'S' : '.';
    EXPECT_TRUE(line.ends_with("," + letters)) << line << ", not " << letters;
  }
  EXPECT_FALSE(std::getline(lines, line));
}

// ---------------------------------------------------------------------------------------------------
// text, CSV, JSON

std::string text_of(const RoutingMeasurement& m) {
  std::ostringstream out;
  print_routing(m, out);
  return out.str();
}

void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in:\n" << text;
  }
}

TEST(Percent, FourDigitsAsInThePaper) {
  EXPECT_EQ(detail::percent(1), "100.0");
  EXPECT_EQ(detail::percent(0.125), "12.50");
  EXPECT_EQ(detail::percent(0.01947), "1.947");
  EXPECT_EQ(detail::percent(0), "0.000");
  EXPECT_EQ(detail::percent(std::nullopt), "-");
}

TEST(Text, RowsOfTable10) {
  expect_parts(
      text_of(hand_measurement()),
      {"xmod A1K2: 4 sparse layers in 2 intervals; 2 sequences of 4 tokens\n",
       "\nxmod A1K2           50.00   100.0     75.00   33.33     43.75   20.00     87.50   16.67       "
       "71.88\n",
       "\n  layers 1-2        50.00   100.0     75.00   33.33     62.50   40.00     75.00   33.33       "
       "81.25\n",
       "independent subsets would 50.00%", "in an interval of 2 layers ",
       "(T/K = 2):\n1.1 on average, 56.2% of T/K; layers from 0.0 to 2.0, single sequences from 0 to 3.\n",
       "\n         2        50.00        25.00        12.50        12.50\n"});
}

TEST(Text, SaysWhenAnIntervalIsIncomplete) {
  const Selections any = {{0}, {1}, {2}, {0}, {1}, {2}, {0}, {0}, {0}};
  ModelConfig c = config_named("incomplete_interval");
  c.seq_len = 3;
  RoutingMeasurement m(c);
  add_batch(m, any, any, 1);
  expect_parts(text_of(m), {"(The first row is the mean of the 1 complete interval.)"});
  EXPECT_EQ(text_of(hand_measurement()).find("complete"), std::string::npos);
}

TEST(Text, ADashWhereThereIsNoOverlap) {
  RoutingMeasurement m(small_config(Arch::mod));  // K = 4, T = 24
  const Selections any(3, Ints{0, 1, 2, 3, 4, 5});
  add_batch(m, any, any, 1);
  expect_parts(text_of(m), {"\nmod K4              25.00       -     25.00       -     25.00       -     "
                            "25.00       -       100.0\n",
                            "\n  layer 1  ", "in an interval of 1 layer "});
}

TEST(Text, LinesFit) {
  std::istringstream lines(text_of(hand_measurement()));
  for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100u) << line;
}

TEST(Text, NamesWhatTheBiasIs) {
  ModelConfig c = hand_config();
  EXPECT_EQ(detail::routing_title(c), "xmod A1K2");
  c.token_bias_strength = 0;
  EXPECT_EQ(detail::routing_title(c), "xmod A1K2 without token-choice bias");
  EXPECT_EQ(detail::routing_title(small_config(Arch::mod)), "mod K4");
}

TEST(Csv, OneRowALayer) {
  EXPECT_EQ(
      routing_csv(hand_measurement()),
      "layer,interval,depth,tokens_per_k,selected_threshold,selected_topk,fewest_threshold,most_threshold,"
      "covered_threshold,covered_topk,jaccard_threshold,jaccard_topk,agreement,agreement_same_scores\n"
      "1,0,0,2,1.5,2,1,2,0.375,0.5,,,0.875,0.875\n"
      "2,0,1,2,2,2,1,3,0.625,0.75,0.4,0.333333333,0.75,0.75\n"
      "4,1,0,2,1,2,1,1,0.25,0.5,,,0.75,0.75\n"
      "5,1,1,2,0,2,0,0,0.25,1,0,0,0.5,0.5\n");
}

TEST(Json, HoldsWhatTheTableDoes) {
  const RoutingMeasurement m = hand_measurement();
  const nlohmann::ordered_json json = nlohmann::ordered_json::parse(routing_json(m, "some/where").dump());
  EXPECT_EQ(json["checkpoint"], "some/where");
  EXPECT_EQ(json["pattern"], "DSSDSSD");
  EXPECT_EQ(json["all"]["intervals"], 2);
  EXPECT_EQ(json["all"]["layers"], 2);
  const RoutingFigures f = model_figures(m);
  EXPECT_EQ(json["all"]["threshold"]["coverage"], f.threshold.coverage);
  EXPECT_EQ(json["all"]["topk"]["jaccard"], *f.topk.jaccard);
  EXPECT_EQ(json["all"]["independent_subsets"]["updates"].get<Doubles>(), f.independent.updates);
  EXPECT_EQ(json["all"]["agreement"], f.agreement);
  ASSERT_EQ(json["intervals"].size(), 2u);
  EXPECT_EQ(json["intervals"][1]["first_layer"], 4);
  ASSERT_EQ(json["layers"].size(), 4u);
  EXPECT_EQ(json["layers"][3]["layer"], 5);
  EXPECT_EQ(json["layers"][3]["depth"], 1);
  EXPECT_EQ(json["layers"][1]["threshold"]["covered"], 0.625);
  EXPECT_TRUE(json["layers"][2]["threshold"]["jaccard"].is_null());
}

// ---------------------------------------------------------------------------------------------------
// the map's text

TEST(MapText, OneLineOfPrintableText) {
  EXPECT_EQ(detail::escape_text("a\n\tb\\n"), "a\\n\\tb\\\\n");
  EXPECT_EQ(detail::escape_text("Grüße 猫"), "Grüße 猫");
  EXPECT_EQ(detail::escape_text("\xC3"), "\\xC3") << "half a character";
  EXPECT_EQ(detail::escape_text("\xED\xA0\x80\r\x7F"), "\\xED\\xA0\\x80\\x0D\\x7F") << "a surrogate is none";
  EXPECT_EQ(detail::escape_text(std::string_view("\0", 1)), "\\x00");
}

TEST(MapText, QuotesWhatTheCsvNeedsQuoted) {
  EXPECT_EQ(detail::csv_text("word"), "word");
  EXPECT_EQ(detail::csv_text(","), "\",\"");
  EXPECT_EQ(detail::csv_text("a\"b"), "\"a\"\"b\"");
}

TEST(RoutingMap, KeepsNoMoreThanAsked) {
  RoutingMap map(hand_config(), 6);
  const Ints tokens = {'a', 'b', ',', '\n', 'e', 'f', 'g', 'h'};
  map.add(tokens.data(), 2, {{0, 4}, {1, 5, 7}, {}, {0}});
  map.add(tokens.data(), 2, {{0}, {0}, {0}, {0}});
  EXPECT_EQ(map.csv(Tokenizer::bytes()),
            "sequence,position,id,text,layers\n"
            "0,0,97,a,DS.D.SD\n0,1,98,b,D.SD..D\n0,2,44,\",\",D..D..D\n0,3,10,\\n,D..D..D\n"
            "1,0,101,e,DS.D..D\n1,1,102,f,D.SD..D\n");
}

}  // namespace
}  // namespace xmod

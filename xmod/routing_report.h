// What sparse layers select, measured on data: the figures of the paper's Table 10 and Figure 5.
//
// An interval is a run of sparse layers between two dense ones. Of one interval of L layers, over all tokens
// of all sequences:
//   coverage   share of the tokens that one of its layers or more selects
//   Jaccard    of two consecutive layers: tokens selected by both / tokens selected by either; the mean over
//              the L - 1 pairs
//   updates    how many of its layers select a token: the distribution over tokens
//   agreement  share of (token, layer) pairs that threshold and top-k routing decide alike, selected or not.
//              Each routing runs the model on its own, so its earlier choices have moved the stream and the
//              token-choice bias of its later ones.
//   agreement on the same scores
//              the same where both judge one stream, that of the threshold's run. Both take the highest
//              scores, so one set contains the other, and they differ in |tokens selected - C|.
// Of a model: the mean over its longest intervals, which are the complete ones (the last may be shorter).
//
// Two references are known without a model, for layers that each select 1/K of the tokens: all layers select
// the same subset, or each a random one of its own.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "dataloader.h"
#include "xmod/model.h"

namespace xmod {

// ---------------------------------------------------------------------------------------------------
// Intervals

struct Interval {
  int64_t first_layer;   // number as in the names of tensors; the others follow it
  int64_t first_sparse;  // index among the sparse layers of the model
  int64_t length;        // L
};

inline std::vector<Interval> intervals_of(const LayerPlan& plan) {
  std::vector<Interval> intervals;
  for (const Layer& layer : plan) {
    if (!layer.routed) continue;
    if (layer.depth_in_interval == 0) intervals.push_back({layer.number, layer.sparse_index, 0});
    intervals.back().length++;
  }
  return intervals;
}

// ---------------------------------------------------------------------------------------------------
// Counting

// The rows b*T + t that each sparse layer selects of a batch, ascending.
using Selections = std::vector<std::vector<int32_t>>;

struct LayerCounts {
  int64_t selected = 0;                  // tokens
  int64_t fewest = INT64_MAX, most = 0;  // of one sequence
  int64_t away = 0;                      // sum over sequences of |selected - C|
  int64_t by_both = 0, by_either = 0;    // tokens that this layer and (or) the one before it selects
  int64_t covered = 0;                   // tokens selected here or earlier in the interval
};

// Under one kind of routing, over all batches so far.
struct RoutingCounts {
  std::vector<LayerCounts> layers;            // of each sparse layer
  std::vector<std::vector<int64_t>> updates;  // of each interval: tokens that 0, 1, .. L layers select
  double loss = 0;                            // mean
};

namespace detail {

// How many numbers two ascending lists have in common.
inline int64_t count_common(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  int64_t common = 0;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    common += a[i] == b[j];
    const bool forward_a = a[i] <= b[j], forward_b = b[j] <= a[i];
    i += forward_a;
    j += forward_b;
  }
  return common;
}

inline void count_per_sequence(LayerCounts& counts, const std::vector<int32_t>& rows, int64_t B, int64_t T,
                               int64_t C) {
  std::vector<int64_t> selected(static_cast<size_t>(B));
  for (int32_t row : rows) selected[static_cast<size_t>(row / T)]++;
  for (int64_t n : selected) {
    counts.selected += n;
    counts.fewest = std::min(counts.fewest, n);
    counts.most = std::max(counts.most, n);
    counts.away += std::abs(n - C);
  }
}

inline void count_interval(RoutingCounts& counts, const Selections& selections, const Interval& interval,
                           std::vector<int64_t>& updates, int64_t B, int64_t T, int64_t C) {
  std::vector<int32_t> times_selected(static_cast<size_t>(B * T));
  int64_t covered = 0;
  for (int64_t l = interval.first_sparse; l < interval.first_sparse + interval.length; l++) {
    const std::vector<int32_t>& rows = selections[l];
    LayerCounts& layer = counts.layers[l];
    count_per_sequence(layer, rows, B, T, C);
    if (l > interval.first_sparse) {
      const std::vector<int32_t>& before = selections[l - 1];
      const int64_t common = count_common(rows, before);
      layer.by_both += common;
      layer.by_either += static_cast<int64_t>(rows.size() + before.size()) - common;
    }
    for (int32_t row : rows) covered += times_selected[row]++ == 0;
    layer.covered += covered;
  }
  for (int32_t times : times_selected) updates[times]++;
}

}  // namespace detail

inline RoutingCounts no_counts(const std::vector<Interval>& intervals) {
  RoutingCounts counts;
  for (const Interval& interval : intervals) {
    counts.layers.resize(counts.layers.size() + static_cast<size_t>(interval.length));
    counts.updates.emplace_back(static_cast<size_t>(interval.length + 1));
  }
  return counts;
}

// Adds the selections of one batch (B, T); C: the tokens of a sequence that top-k routing selects.
inline void count_selections(RoutingCounts& counts, const Selections& selections,
                             const std::vector<Interval>& intervals, int64_t B, int64_t T, int64_t C) {
  for (size_t i = 0; i < intervals.size(); i++) {
    detail::count_interval(counts, selections, intervals[i], counts.updates[i], B, T, C);
  }
}

// ---------------------------------------------------------------------------------------------------
// Measuring a model

struct RoutingMeasurement {
  explicit RoutingMeasurement(const ModelConfig& config)
      : config(config),
        intervals(intervals_of(make_layer_plan(config))),
        threshold(no_counts(intervals)),
        topk(no_counts(intervals)),
        differing(threshold.layers.size()) {}

  int64_t tokens() const { return sequences * config.seq_len; }

  ModelConfig config;
  std::vector<Interval> intervals;
  int64_t sequences = 0;
  RoutingCounts threshold, topk;
  std::vector<int64_t> differing;  // of each sparse layer: tokens that only one of the two routings selects
};

// Adds what the two routings select of one batch.
inline void add_batch(RoutingMeasurement& m, const Selections& threshold, const Selections& topk, int64_t B) {
  const int64_t T = m.config.seq_len, C = tokens_selected(m.config, T);
  count_selections(m.threshold, threshold, m.intervals, B, T, C);
  count_selections(m.topk, topk, m.intervals, B, T, C);
  for (size_t l = 0; l < threshold.size(); l++) {
    m.differing[l] += static_cast<int64_t>(threshold[l].size() + topk[l].size()) -
                      2 * detail::count_common(threshold[l], topk[l]);
  }
  m.sequences += B;
}

// Runs the model on tokens (B, T). Returns the mean loss and what the sparse layers selected.
template <class Backend>
std::pair<double, Selections> run_and_record(Model<Backend>& model, const int32_t* tokens,
                                             const int32_t* targets, int64_t B, int64_t T, Routing routing) {
  Selections selections;
  model.on_selection = [&](int64_t, const Rows& rows) {
    selections.emplace_back(static_cast<size_t>(rows.n));
    model.backend().to_host(selections.back().data(), rows.row, rows.n);
  };
  const double loss = model.loss(tokens, targets, B, T, routing);
  model.on_selection = nullptr;
  return {loss, std::move(selections)};
}

// Told of every batch: tokens (B, T) and what threshold routing selects of them.
using BatchObserver = std::function<void(const int32_t* tokens, int64_t B, const Selections& threshold)>;

// Goes over the loader's sequences; holds the selections of one batch at a time.
template <class Backend>
RoutingMeasurement measure_routing(Model<Backend>& model, EvalLoader& loader, int64_t batch_size,
                                   const BatchObserver& observe = nullptr) {
  RoutingMeasurement m(model.config);
  const int64_t T = m.config.seq_len;
  std::vector<int32_t> tokens(static_cast<size_t>(batch_size * T)), targets(tokens.size());
  loader.reset();
  while (const int64_t B = loader.next_batch(tokens.data(), targets.data())) {
    auto run = [&](Routing routing) {
      return run_and_record(model, tokens.data(), targets.data(), B, T, routing);
    };
    const auto [threshold_loss, threshold] = run(Routing::threshold);
    const auto [topk_loss, topk] = run(Routing::topk);
    const double share = static_cast<double>(B) / static_cast<double>(loader.num_sequences());
    m.threshold.loss += share * threshold_loss;
    m.topk.loss += share * topk_loss;
    add_batch(m, threshold, topk, B);
    if (observe) observe(tokens.data(), B, threshold);
  }
  return m;
}

// ---------------------------------------------------------------------------------------------------
// From counts to figures; all are shares, 0 to 1

// Of an interval's selections under one routing, or of a reference.
struct SelectionFigures {
  double coverage = 0;
  std::optional<double> jaccard;  // none where there are no two layers that select anything
  std::vector<double> updates;    // share of the tokens that 0, 1, .. L layers select
};

struct RoutingFigures {
  SelectionFigures repeated, independent;  // the references
  SelectionFigures threshold, topk;        // measured
  double agreement = 0, agreement_same_scores = 0;
};

namespace detail {

inline double share(int64_t part, int64_t whole) {
  return static_cast<double>(part) / static_cast<double>(whole);
}

inline std::optional<double> mean(const std::vector<double>& values) {
  if (values.empty()) return std::nullopt;
  double sum = 0;
  for (double value : values) sum += value;
  return sum / static_cast<double>(values.size());
}

// Of the layer and the one before it in the interval.
inline std::optional<double> jaccard(const LayerCounts& layer) {
  if (layer.by_either == 0) return std::nullopt;
  return share(layer.by_both, layer.by_either);
}

inline SelectionFigures measured_figures(const RoutingCounts& counts, size_t interval, const Interval& at,
                                         int64_t tokens) {
  SelectionFigures f;
  std::vector<double> overlaps;
  for (int64_t l = at.first_sparse; l < at.first_sparse + at.length; l++) {
    if (const auto overlap = jaccard(counts.layers[l])) overlaps.push_back(*overlap);
    f.coverage = share(counts.layers[l].covered, tokens);
  }
  f.jaccard = mean(overlaps);
  for (int64_t n : counts.updates[interval]) f.updates.push_back(share(n, tokens));
  return f;
}

inline SelectionFigures mean_figures(const std::vector<SelectionFigures>& intervals) {
  std::vector<double> coverages, overlaps;
  for (const SelectionFigures& interval : intervals) {
    coverages.push_back(interval.coverage);
    if (interval.jaccard) overlaps.push_back(*interval.jaccard);
  }
  SelectionFigures f{*mean(coverages), mean(overlaps), {}};
  for (size_t c = 0; c < intervals.front().updates.size(); c++) {
    std::vector<double> shares;
    for (const SelectionFigures& interval : intervals) shares.push_back(interval.updates[c]);
    f.updates.push_back(*mean(shares));
  }
  return f;
}

}  // namespace detail

// Every layer selects the same 1/K of the tokens.
inline SelectionFigures repeated_subset(int64_t layers, int64_t K) {
  const double p = 1.0 / static_cast<double>(K);
  SelectionFigures f{p, std::nullopt, std::vector<double>(static_cast<size_t>(layers + 1))};
  if (layers > 1) f.jaccard = 1;
  f.updates.front() = 1 - p;
  f.updates.back() = p;
  return f;
}

// Every layer selects 1/K of the tokens, whatever the others do: a token's updates are binomial.
inline SelectionFigures independent_subsets(int64_t layers, int64_t K) {
  const double p = 1.0 / static_cast<double>(K);
  std::vector<double> updates(static_cast<size_t>(layers + 1));
  updates[0] = 1;
  for (int64_t layer = 1; layer <= layers; layer++) {  // the distribution behind so many layers
    for (int64_t c = layer; c > 0; c--) updates[c] = updates[c] * (1 - p) + updates[c - 1] * p;
    updates[0] *= 1 - p;
  }
  SelectionFigures f{1 - updates[0], std::nullopt, std::move(updates)};
  if (layers > 1) f.jaccard = p * p / (p + p - p * p);
  return f;
}

// Share of the pairs (token, layer) that two independent subsets decide alike.
inline double independent_agreement(int64_t K) {
  const double p = 1.0 / static_cast<double>(K);
  return p * p + (1 - p) * (1 - p);
}

inline double layer_agreement(const RoutingMeasurement& m, int64_t sparse_index) {
  return 1 - detail::share(m.differing[sparse_index], m.tokens());
}

inline double layer_agreement_same_scores(const RoutingMeasurement& m, int64_t sparse_index) {
  return 1 - detail::share(m.threshold.layers[sparse_index].away, m.tokens());
}

inline RoutingFigures interval_figures(const RoutingMeasurement& m, size_t interval) {
  const Interval& at = m.intervals[interval];
  const int64_t K = m.config.token_sparsity;
  RoutingFigures f;
  f.repeated = repeated_subset(at.length, K);
  f.independent = independent_subsets(at.length, K);
  f.threshold = detail::measured_figures(m.threshold, interval, at, m.tokens());
  f.topk = detail::measured_figures(m.topk, interval, at, m.tokens());
  int64_t differing = 0, away = 0;
  for (int64_t l = at.first_sparse; l < at.first_sparse + at.length; l++) {
    differing += m.differing[l];
    away += m.threshold.layers[l].away;
  }
  f.agreement = 1 - detail::share(differing, at.length * m.tokens());
  f.agreement_same_scores = 1 - detail::share(away, at.length * m.tokens());
  return f;
}

// The intervals that a model's figures are the mean of.
inline std::vector<size_t> longest_intervals(const std::vector<Interval>& intervals) {
  int64_t longest = 0;
  for (const Interval& interval : intervals) longest = std::max(longest, interval.length);
  std::vector<size_t> found;
  for (size_t i = 0; i < intervals.size(); i++) {
    if (intervals[i].length == longest) found.push_back(i);
  }
  return found;
}

inline RoutingFigures model_figures(const RoutingMeasurement& m) {
  std::vector<RoutingFigures> all;
  for (size_t i : longest_intervals(m.intervals)) all.push_back(interval_figures(m, i));
  auto collect = [&](auto member) {
    std::vector<std::decay_t<decltype(all[0].*member)>> values;
    for (const RoutingFigures& f : all) values.push_back(f.*member);
    return values;
  };
  return {.repeated = detail::mean_figures(collect(&RoutingFigures::repeated)),
          .independent = detail::mean_figures(collect(&RoutingFigures::independent)),
          .threshold = detail::mean_figures(collect(&RoutingFigures::threshold)),
          .topk = detail::mean_figures(collect(&RoutingFigures::topk)),
          .agreement = *detail::mean(collect(&RoutingFigures::agreement)),
          .agreement_same_scores = *detail::mean(collect(&RoutingFigures::agreement_same_scores))};
}

}  // namespace xmod

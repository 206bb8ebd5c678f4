// The figures of routing_report.h as text, CSV and JSON. Text is in percent, as the paper's tables; CSV and
// JSON hold shares.
#pragma once

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "xmod/plan.h"
#include "xmod/routing_report.h"

namespace xmod {

namespace detail {

// "xmod A1K4 without token-choice bias"
inline std::string routing_title(const ModelConfig& c) {
  const bool unbiased = has_units(c.arch) && c.token_bias_strength == 0;
  return title(c) + (unbiased ? " without token-choice bias" : "");
}

// A share with the four digits of the paper's Table 10: 6.250, 64.39, 100.0.
inline std::string percent(std::optional<double> share) {
  return share ? print("%#.4g", 100 * *share) : "-";
}

inline std::string layer_range(const Interval& interval) {
  const int64_t last = interval.first_layer + interval.length - 1;
  const std::string first = std::to_string(interval.first_layer);
  return interval.length == 1 ? "layer " + first : "layers " + first + "-" + std::to_string(last);
}

inline std::string count_of(size_t n, const std::string& what) {
  return std::to_string(n) + " " + what + (n == 1 ? "" : "s");
}

// ---------------------------------------------------------------------------------------------------
// Text

// A text in a column of its own.
inline std::string column(const std::string& text, size_t width) {
  return text + std::string(width - std::min(width, text.size()), ' ');
}

// One row of Table 10, with top-k routing between the paper's columns.
inline std::string table_row(const std::string& label, const RoutingFigures& f) {
  std::string row = label;
  for (const SelectionFigures* s : {&f.repeated, &f.independent, &f.threshold, &f.topk}) {
    row += print("  %8s %7s", percent(s->coverage).c_str(), percent(s->jaccard).c_str());
  }
  return row + print("   %9s\n", percent(f.agreement).c_str());
}

inline void print_table(const RoutingMeasurement& m, const RoutingFigures& all, std::ostream& out) {
  const std::string model = title(m.config);
  const size_t width = std::max<size_t>(model.size(), 15);
  out << column("percent", width);
  for (const char* group : {"repeated subset", "independent", "threshold", "top-k"}) {
    out << print("  %16s", group);
  }
  out << print("   %9s\n", "threshold") << column("", width);
  for (int i = 0; i < 4; i++) out << "  coverage Jaccard";
  out << print("   %9s\n", "= top-k") << table_row(column(model, width), all);
  for (size_t i = 0; i < m.intervals.size(); i++) {
    out << table_row(column("  " + layer_range(m.intervals[i]), width), interval_figures(m, i));
  }
}

inline void print_agreement(const RoutingMeasurement& m, const RoutingFigures& all, std::ostream& out) {
  out << "\nThreshold and top-k routing decide " << percent(all.agreement)
      << "% of the (token, layer) pairs alike, each on the stream\nthat its own choices made; on the same "
         "scores "
      << percent(all.agreement_same_scores) << "%, and independent subsets would "
      << percent(independent_agreement(m.config.token_sparsity)) << "%.\nLoss "
      << print("%.4f under threshold, %.4f under top-k routing.\n", m.threshold.loss, m.topk.loss);
}

// Tokens of a sequence that a layer selects under threshold routing.
inline void print_selected(const RoutingMeasurement& m, std::ostream& out) {
  const std::vector<LayerCounts>& layers = m.threshold.layers;
  auto per_sequence = [&](const LayerCounts& l) { return share(l.selected, m.sequences); };
  double mean = 0;
  int64_t fewest = INT64_MAX, most = 0;
  for (const LayerCounts& l : layers) {
    mean += per_sequence(l) / static_cast<double>(layers.size());
    fewest = std::min(fewest, l.fewest);
    most = std::max(most, l.most);
  }
  const auto [least, largest] =
      std::minmax_element(layers.begin(), layers.end(),
                          [](const LayerCounts& a, const LayerCounts& b) { return a.selected < b.selected; });
  const double target = share(m.config.seq_len, m.config.token_sparsity);
  out << "\nTokens that a layer selects of a sequence under threshold routing (T/K = "
      << print("%.4g):\n%.1f on average, %.1f%% of T/K; layers from %.1f to %.1f, single sequences from ",
               target, mean, 100 * mean / target, per_sequence(*least), per_sequence(*largest))
      << fewest << " to " << most << ".\n";
}

// Rows in which every share rounds to zero are left out.
inline void print_updates(const RoutingFigures& all, std::ostream& out) {
  const std::vector<const SelectionFigures*> columns = {&all.repeated, &all.independent, &all.threshold,
                                                        &all.topk};
  const size_t L = all.threshold.updates.size() - 1;
  out << "\nSparse updates of a token in an interval of " << count_of(L, "layer")
      << " (percent of the tokens)\n"
      << "   updates     repeated  independent    threshold        top-k\n";
  for (size_t c = 0; c <= L; c++) {
    const bool shown = std::any_of(columns.begin(), columns.end(),
                                   [&](const SelectionFigures* f) { return f->updates[c] >= 0.00005; });
    if (!shown) continue;
    out << print("%10lld", static_cast<long long>(c));
    for (const SelectionFigures* f : columns) out << print("%13.2f", 100 * f->updates[c]);
    out << "\n";
  }
}

// ---------------------------------------------------------------------------------------------------
// CSV

inline std::string cell(std::optional<double> value) {
  return value ? print(",%.9g", *value) : ",";
}

inline std::string csv_row(const RoutingMeasurement& m, size_t interval, int64_t depth) {
  const Interval& at = m.intervals[interval];
  const int64_t l = at.first_sparse + depth;
  const LayerCounts &threshold = m.threshold.layers[l], &topk = m.topk.layers[l];
  std::string row = std::to_string(at.first_layer + depth) + "," + std::to_string(interval) + "," +
                    std::to_string(depth) + cell(share(m.config.seq_len, m.config.token_sparsity));
  for (const LayerCounts* counts : {&threshold, &topk}) row += cell(share(counts->selected, m.sequences));
  row += "," + std::to_string(threshold.fewest) + "," + std::to_string(threshold.most);
  for (const LayerCounts* counts : {&threshold, &topk}) row += cell(share(counts->covered, m.tokens()));
  for (const LayerCounts* counts : {&threshold, &topk}) row += cell(jaccard(*counts));
  return row + cell(layer_agreement(m, l)) + cell(layer_agreement_same_scores(m, l)) + "\n";
}

// ---------------------------------------------------------------------------------------------------
// JSON

using Json = nlohmann::ordered_json;

inline Json json_value(std::optional<double> value) {
  return value ? Json(*value) : Json(nullptr);
}

inline Json figures_json(const SelectionFigures& f) {
  return {{"coverage", f.coverage}, {"jaccard", json_value(f.jaccard)}, {"updates", f.updates}};
}

inline void add_figures(Json& json, const RoutingFigures& f) {
  json["repeated_subset"] = figures_json(f.repeated);
  json["independent_subsets"] = figures_json(f.independent);
  json["threshold"] = figures_json(f.threshold);
  json["topk"] = figures_json(f.topk);
  json["agreement"] = f.agreement;
  json["agreement_same_scores"] = f.agreement_same_scores;
}

inline Json interval_json(const RoutingMeasurement& m, size_t interval) {
  const Interval& at = m.intervals[interval];
  Json json = {{"first_layer", at.first_layer}, {"layers", at.length}};
  add_figures(json, interval_figures(m, interval));
  return json;
}

inline Json layer_json(const LayerCounts& counts, const RoutingMeasurement& m) {
  return {{"selected", share(counts.selected, m.sequences)},
          {"fewest", counts.fewest},
          {"most", counts.most},
          {"covered", share(counts.covered, m.tokens())},
          {"jaccard", json_value(jaccard(counts))}};
}

inline Json layers_json(const RoutingMeasurement& m) {
  Json layers = Json::array();
  for (size_t i = 0; i < m.intervals.size(); i++) {
    for (int64_t depth = 0; depth < m.intervals[i].length; depth++) {
      const int64_t l = m.intervals[i].first_sparse + depth;
      layers.push_back({{"layer", m.intervals[i].first_layer + depth},
                        {"interval", i},
                        {"depth", depth},
                        {"threshold", layer_json(m.threshold.layers[l], m)},
                        {"topk", layer_json(m.topk.layers[l], m)},
                        {"agreement", layer_agreement(m, l)},
                        {"agreement_same_scores", layer_agreement_same_scores(m, l)}});
    }
  }
  return layers;
}

}  // namespace detail

inline void print_routing(const RoutingMeasurement& m, std::ostream& out) {
  const RoutingFigures all = model_figures(m);
  const size_t longest = longest_intervals(m.intervals).size();
  out << detail::routing_title(m.config) << ": "
      << detail::count_of(m.threshold.layers.size(), "sparse layer") << " in "
      << detail::count_of(m.intervals.size(), "interval") << "; " << m.sequences << " sequences of "
      << m.config.seq_len << " tokens\n\n";
  detail::print_table(m, all, out);
  if (longest < m.intervals.size()) {
    out << "(The first row is the mean of the " << detail::count_of(longest, "complete interval") << ".)\n";
  }
  detail::print_agreement(m, all, out);
  detail::print_selected(m, out);
  detail::print_updates(all, out);
}

// One row a sparse layer. selected_*: tokens of a sequence, on average; covered_*: share of the tokens that
// this layer or an earlier one of its interval selects; jaccard_*: with the layer before it there.
inline std::string routing_csv(const RoutingMeasurement& m) {
  std::string csv =
      "layer,interval,depth,tokens_per_k,selected_threshold,selected_topk,fewest_threshold,most_threshold,"
      "covered_threshold,covered_topk,jaccard_threshold,jaccard_topk,agreement,agreement_same_scores\n";
  for (size_t i = 0; i < m.intervals.size(); i++) {
    for (int64_t depth = 0; depth < m.intervals[i].length; depth++) csv += detail::csv_row(m, i, depth);
  }
  return csv;
}

inline nlohmann::ordered_json routing_json(const RoutingMeasurement& m, const std::string& checkpoint) {
  const ModelConfig& c = m.config;
  nlohmann::ordered_json json = {{"checkpoint", checkpoint},
                                 {"model", detail::routing_title(c)},
                                 {"pattern", pattern(make_layer_plan(c))},
                                 {"token_sparsity", c.token_sparsity},
                                 {"context", c.seq_len},
                                 {"sequences", m.sequences},
                                 {"val_loss_topk", m.topk.loss},
                                 {"val_loss_threshold", m.threshold.loss}};
  const std::vector<size_t> longest = longest_intervals(m.intervals);
  json["all"] = {{"intervals", longest.size()}, {"layers", m.intervals[longest.front()].length}};
  detail::add_figures(json["all"], model_figures(m));
  for (size_t i = 0; i < m.intervals.size(); i++) json["intervals"].push_back(detail::interval_json(m, i));
  json["layers"] = detail::layers_json(m);
  return json;
}

}  // namespace xmod

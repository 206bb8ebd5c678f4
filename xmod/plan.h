// `plan`: what a model is made of and what it costs, before anything is allocated: a picture of its layers,
// parameters, FLOPs, tokens for a compute budget, memory by group; with a fitted scaling law also what loss
// to expect.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "xmod/memory_plan.h"
#include "xmod/options.h"
#include "xmod/scaling_law.h"
#include "xmod_common.h"

namespace xmod {

// ---------------------------------------------------------------------------------------------------
// The layer pattern, drawn

namespace detail {

// A run of dense layers, or of sparse ones in units of `unit` layers.
struct LayerRun {
  bool sparse;
  int64_t length;
  int64_t unit;
};

inline std::vector<LayerRun> layer_runs(const ModelConfig& c, const LayerPlan& plan) {
  const int64_t unit = has_units(c.arch) ? c.token_sparsity : 1;
  std::vector<LayerRun> runs;
  for (const Layer& layer : plan) {
    if (layer.ffn == Ffn::none) continue;  // drawn as part of the layer it opens
    if (runs.empty() || runs.back().sparse != layer.routed) runs.push_back({layer.routed, 0, unit});
    runs.back().length++;
  }
  return runs;
}

inline std::string times(int64_t n, const std::string& what) {
  return n == 1 ? what : std::to_string(n) + "x" + what;
}

inline std::string abbreviate(const LayerRun& run) {
  if (!run.sparse) return times(run.length, "D");
  const std::string unit = times(run.unit, "S");
  const int64_t units = run.length / run.unit;
  return units == 1 ? unit : times(units, run.unit == 1 ? unit : concatenate("(", unit, ")"));
}

constexpr int64_t kRowWidth = 96;

// "SSSS", or "300xS" where that would not fit a row.
inline std::string letters(char letter, int64_t n) {
  return n <= kRowWidth ? std::string(static_cast<size_t>(n), letter) : times(n, std::string(1, letter));
}

// "SSSS SSSS"; one row for each unit where they do not fit into one.
inline std::vector<std::string> draw_sparse(const LayerRun& run) {
  const int64_t units = run.length / run.unit;
  const std::string unit = letters('S', run.unit);
  if (units * static_cast<int64_t>(unit.size() + 1) > kRowWidth) {
    return std::vector<std::string>(static_cast<size_t>(units), unit);
  }
  std::string row = unit;
  for (int64_t i = 1; i < units; i++) row.append(" ").append(unit);
  return {row};
}

}  // namespace detail

// "4xD 4x[4x(8xS) D] 3x(8xS) D": runs of layers, equal intervals counted.
inline std::string abbreviated_pattern(const ModelConfig& c, const LayerPlan& plan) {
  const std::vector<detail::LayerRun> runs = detail::layer_runs(c, plan);
  std::vector<std::pair<std::string, int64_t>> parts;  // and how often each stands in a row
  for (size_t i = 0; i < runs.size(); i++) {
    std::string part = detail::abbreviate(runs[i]);
    if (runs[i].sparse && i + 1 < runs.size()) part.append(" ").append(detail::abbreviate(runs[++i]));
    if (parts.empty() || parts.back().first != part) parts.emplace_back(part, 0);
    parts.back().second++;
  }
  std::string text;
  for (const auto& [part, count] : parts) {
    if (!text.empty()) text += ' ';
    text += count == 1 ? part : detail::times(count, detail::concatenate("[", part, "]"));
  }
  return text;
}

// One letter a layer, one word a unit, one row an interval with the anchor that ends it.
inline std::vector<std::string> pattern_rows(const ModelConfig& c, const LayerPlan& plan) {
  std::vector<std::string> rows;
  bool open = false;  // the last row waits for its anchor
  for (const detail::LayerRun& run : detail::layer_runs(c, plan)) {
    if (run.sparse) {
      for (std::string& row : detail::draw_sparse(run)) rows.push_back(std::move(row));
    } else {
      if (open) rows.back() += " D";
      const int64_t rest = run.length - (open ? 1 : 0);
      if (rest > 0) rows.push_back(detail::letters('D', rest));
    }
    open = run.sparse;
  }
  return rows;
}

// ---------------------------------------------------------------------------------------------------
// The plan

// Tokens that a compute budget pays for.
inline int64_t tokens_for_compute(const ModelConfig& c, double compute) {
  const double tokens = compute / training_flops_per_token(c);
  if (tokens > 9e18)
    usage_error("--compute ", compute, " is more than 9e18 tokens of this model; choose less");
  return static_cast<int64_t>(tokens);
}

namespace detail {

inline nlohmann::ordered_json memory_json(const MemoryEstimate& memory) {
  nlohmann::ordered_json out;
  for (const auto& [name, bytes] : memory.groups) out[name] = bytes;
  out["total"] = memory.total();
  return out;
}

// "6:64+2" is the paper's way to write 6 of 64 experts and 2 shared ones.
inline std::string title(const ModelConfig& c) {
  std::string name = arch_name(c.arch);
  if (c.arch == Arch::mod) name += " K" + std::to_string(c.token_sparsity);
  if (has_units(c.arch)) {
    name += c.anchors ? " A" + std::to_string(c.anchor_stride) + "K" : " without anchors, K";
    name += std::to_string(c.token_sparsity);
  }
  if (c.arch == Arch::deco) {
    name += " " + std::to_string(c.experts) + " experts";
    if (c.shared_experts > 0) name += " and a shared one";
  }
  if (c.arch == Arch::moe) {
    name += " " + std::to_string(c.experts_per_token) + ":" + std::to_string(c.experts);
    if (c.shared_experts > 0) name += "+" + std::to_string(c.shared_experts);
  }
  return name;
}

inline std::string meaning_of_dense(const ModelConfig& c) {
  if (c.arch == Arch::moe) return "attention of every token; the feed-forward part by experts";
  if (c.arch == Arch::deco) {
    return "attention of every token; behind " + std::to_string(c.dense_prefix) +
           " dense layers the feed-forward part by experts that a ReLU chooses";
  }
  return "dense: processes every token";
}

inline std::string meaning_of_sparse(const ModelConfig& c) {
  const std::string share = "1 in " + std::to_string(c.token_sparsity) + " tokens";
  if (c.arch == Arch::routed_ffn) {
    return "sparse: the first of a unit has attention over every token; the feed-forward part processes " +
           share;
  }
  if (c.arch == Arch::selected_q) return "sparse: keys and values of every token; the rest of " + share;
  return "sparse: processes " + share;
}

inline void print_layers(const ModelConfig& c, std::ostream& out) {
  const LayerPlan plan = make_layer_plan(c);
  const std::vector<std::string> rows = pattern_rows(c, plan);
  out << "Layers\n  " << abbreviated_pattern(c, plan) << "\n\n";
  for (size_t i = 0, same; i < rows.size(); i += same) {
    for (same = 1; i + same < rows.size() && rows[i + same] == rows[i];) same++;
    out << "  " << rows[i] << (same > 1 ? "   x" + std::to_string(same) : "") << "\n";
  }
  out << "\n  D  " << meaning_of_dense(c) << "\n";
  if (count_sparse(plan) > 0) out << "  S  " << meaning_of_sparse(c) << "\n";
}

// 2.64B, 540M, 1.46M
inline std::string rounded(double n) {
  const char unit = n >= 1e9 ? 'B' : n >= 1e6 ? 'M' : 'K';
  const double scaled = n / (unit == 'B' ? 1e9 : unit == 'M' ? 1e6 : 1e3);
  const int digits = scaled < 10 ? 2 : scaled < 100 ? 1 : 0;
  return print("%.*f%c", digits, scaled, unit);
}

// 3.93e9
inline std::string scientific(double x) {
  int exponent = x > 0 ? static_cast<int>(std::floor(std::log10(x))) : 0;
  if (x / std::pow(10, exponent) >= 9.995) exponent++;
  return print("%.2fe%d", x / std::pow(10, exponent), exponent);
}

// 2,640,123,456
inline std::string grouped(int64_t n) {
  const std::string digits = std::to_string(n);
  std::string text;
  for (size_t i = 0; i < digits.size(); i++) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

inline std::string trimmed(const std::string& text) {
  return text.substr(text.find_first_not_of(' '));
}

inline void print_counts(const ModelConfig& c, double compute, std::ostream& out) {
  const Accounting a = account(c);
  const double dense = account(dense_reference(c)).flops_per_token;
  auto row = [&](const char* name, const std::string& value) {
    out << print("  %-22s", name) << value << "\n";
  };
  auto parameters = [](double n) { return rounded(n) + " (" + grouped(std::llround(n)) + ")"; };
  out << "\nCounts\n";
  row("layers", std::to_string(a.layers) + " = " + std::to_string(a.dense_layers) + " dense + " +
                    std::to_string(a.sparse_layers) + " sparse; " + std::to_string(c.active_layers) +
                    " active");
  row("parameters", parameters(static_cast<double>(a.params_total)));
  row("  in matrices", parameters(static_cast<double>(a.params_matrix)));
  row("  active for a token", parameters(a.params_active));
  row("FLOPs per token",
      scientific(a.flops_per_token) + " forward, " + scientific(3 * a.flops_per_token) + " to train");
  row("  relative to dense", print("%.2f of ", a.flops_per_token / dense) + scientific(dense));
  const double full = static_cast<double>(c.seq_len) * sizeof(float);
  row("key/value cache", trimmed(bytes(std::llround(a.cached_per_token * full))) + " for a full context");
  row("  a dense model's", trimmed(bytes(std::llround(account(dense_reference(c)).cached_per_token * full))));
  if (compute > 0) {
    const double tokens = static_cast<double>(tokens_for_compute(c, compute));
    row("tokens", scientific(tokens) + " for " + scientific(compute) + " FLOPs");
    row("  a dense model's", scientific(compute / (3 * dense)));
  }
}

inline LawPrediction predict_by(const std::string& path, const ModelConfig& c) {
  const LawPoint point = law_point(c, path);
  const LawPrediction prediction = predict(read_scaling_law(path), point);
  if (!std::isfinite(prediction.delta))
    fail(path, ": its law gives no finite number for this model; is the file damaged?");
  return prediction;
}

inline nlohmann::ordered_json prediction_json(const LawPrediction& prediction) {
  nlohmann::ordered_json out = {{"delta", prediction.delta}};
  if (prediction.confidence > 0) {
    out["low"] = prediction.low;
    out["high"] = prediction.high;
    out["confidence"] = prediction.confidence;
  }
  out["beyond"] = prediction.beyond;
  return out;
}

inline void print_prediction(const LawPrediction& prediction, const std::string& path, std::ostream& out) {
  out << "\nLoss, by the law of " << path << "\n"
      << print("  %-22s", "relative to dense") << print("%+.4f nats per token", prediction.delta);
  if (prediction.confidence > 0) {
    out << print(", %.0f%% interval %+.4f to %+.4f", 100 * prediction.confidence, prediction.low,
                 prediction.high);
  }
  out << "\n";
  if (!prediction.beyond.empty())
    out << "  beyond the runs that the law was fitted to: " << prediction.beyond << "\n";
}

}  // namespace detail

template <class Backend>
nlohmann::ordered_json plan_json(const ModelConfig& c, const PlanOptions& o, const RunSize& run) {
  const Accounting a = account(c);
  nlohmann::ordered_json out = {
      {"arch", arch_name(c.arch)},
      {"pattern", pattern(make_layer_plan(c))},
      {"layers", a.layers},
      {"dense_layers", a.dense_layers},
      {"sparse_layers", a.sparse_layers},
      {"active_layers", c.active_layers},
      {"params_total", a.params_total},
      {"params_matrix", a.params_matrix},
      {"params_active", std::llround(a.params_active)},
      {"flops_per_token", a.flops_per_token},
      {"flops_ratio_to_dense", flops_ratio_to_dense(c)},
      {"cache_bytes", std::llround(a.cached_per_token * static_cast<double>(c.seq_len) * sizeof(float))},
      {"tokens", nullptr},
      {"memory", detail::memory_json(training_memory<Backend>(c, run))},
  };
  if (o.compute > 0) out["tokens"] = tokens_for_compute(c, o.compute);
  if (!o.law.empty()) out["scaling_law"] = detail::prediction_json(detail::predict_by(o.law, c));
  return out;
}

// Without --ranks, of one.
inline RunSize planned_run(const Options& options) {
  return run_size(options.plan, options.machine.threads, std::max<int64_t>(1, options.plan.ranks));
}

template <class Backend>
void print_plan(const Options& options, std::ostream& out) {
  const ModelConfig& c = options.model;
  const PlanOptions& o = options.plan;
  const RunSize run = planned_run(options);
  if (o.json) {
    out << plan_json<Backend>(c, o, run).dump(2) << "\n";
    return;
  }
  LawPrediction prediction;  // first, so that a law that does not apply is told before anything is printed
  if (!o.law.empty()) prediction = detail::predict_by(o.law, c);
  out << detail::title(c) << ", " << c.active_layers << " active layers, context " << c.seq_len << "\n\n";
  detail::print_layers(c, out);
  detail::print_counts(c, o.compute, out);
  if (!o.law.empty()) detail::print_prediction(prediction, o.law, out);
  const int64_t threads = threads_of<Backend>(run);
  out << "\nMemory to train on batches of " << o.batch_size << " x " << c.seq_len << " tokens in "
      << precision_name(options.machine.precision) << ", with " << threads
      << (threads == 1 ? " thread" : " threads")
      << (run.ranks > 1 ? ", on each of " + std::to_string(run.ranks) + " ranks\n" : "\n");
  print_memory(training_memory<Backend>(c, run), out);
}

}  // namespace xmod

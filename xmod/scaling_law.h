// The scaling law of X-MoD, read from the file that `scripts/scaling_law.py fit` writes: how far the loss of
// a model lies from that of the dense model with the same active parameters, context and training FLOPs.
//
//   Delta = e - u Nact^-eta_N (1 - (N/Nact)^-rho_N)                  sparse capacity
//             + w L^-eta_L (K^rho_L - 1)                             sparse context
//             - z (K^rho_K - 1) ((2A/(A+1))^rho_A - 1)               anchor stride
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "xmod/json_file.h"
#include "xmod_common.h"

namespace xmod {

inline constexpr std::array<const char*, 10> kLawConstants = {"e",     "u",     "eta_N", "rho_N", "w",
                                                              "eta_L", "rho_L", "z",     "rho_K", "rho_A"};

using LawConstants = std::array<double, kLawConstants.size()>;  // in this order

struct LawRange {
  std::string name;  // L, K, A, N_act
  double low, high;  // of the runs that the law was fitted to
};

struct ScalingLaw {
  LawConstants constants;
  std::vector<LawConstants> samples;  // of the bootstrap; empty: nothing tells how certain the law is
  double confidence = 0.95;           // of the interval that the samples give
  std::vector<LawRange> ranges;
};

// What the law knows of a model.
struct LawPoint {
  double N, N_act, L, K, A;
};

struct LawPrediction {
  double delta = 0;          // nats per token
  double low = 0, high = 0;  // where the law has samples
  double confidence = 0;     // 0: it has none
  std::string beyond = "";   // "K above 8, L below 128": outside of the runs that the law was fitted to
};

inline double law_delta(const LawConstants& constants, const LawPoint& p) {
  const auto [e, u, eta_N, rho_N, w, eta_L, rho_L, z, rho_K, rho_A] = constants;
  const double capacity = u * std::pow(p.N_act, -eta_N) * (1 - std::pow(p.N / p.N_act, -rho_N));
  const double context = w * std::pow(p.L, -eta_L) * (std::pow(p.K, rho_L) - 1);
  const double stride = z * (std::pow(p.K, rho_K) - 1) * (std::pow(2 * p.A / (p.A + 1), rho_A) - 1);
  return e - capacity + context - stride;
}

namespace detail {

inline const char* law_remedy() {
  return "; give the file that `scaling_law.py fit --out` wrote";
}

inline LawConstants law_constants(const nlohmann::json& law, const std::string& path) {
  const auto found = law.is_object() ? law.find("constants") : law.end();
  if (!law.is_object() || found == law.end() || !found->is_object())
    fail(path, ": no \"constants\" in it", law_remedy());
  LawConstants constants{};
  std::string missing;
  for (size_t i = 0; i < constants.size(); i++) {
    const std::string name = kLawConstants[i];
    const nlohmann::json value = found->value(name, nlohmann::json());
    if (value.is_null()) {
      missing += (missing.empty() ? "" : ", ") + name;
    } else if (!value.is_number() || !std::isfinite(value.get<double>())) {
      fail(path, ": ", name, " is ", value.dump(), ", expected a number", law_remedy());
    } else {
      constants[i] = value.get<double>();
    }
  }
  if (!missing.empty()) {
    fail(path, ": the law's constants ", missing, " are missing in it; fit it to runs of your own with ",
         "`scaling_law.py fit --out`");
  }
  return constants;
}

inline std::vector<LawConstants> law_samples(const nlohmann::json& law, const std::string& path) {
  std::vector<LawConstants> samples;
  for (const nlohmann::json& row : law.value("samples", nlohmann::json::array())) {
    const auto is_number = [](const nlohmann::json& value) { return value.is_number(); };
    if (!row.is_array() || row.size() != kLawConstants.size() ||
        !std::all_of(row.begin(), row.end(), is_number))
      fail(path, ": its samples are not rows of ", kLawConstants.size(), " numbers", law_remedy());
    samples.push_back(row.get<LawConstants>());
  }
  return samples;
}

inline std::vector<LawRange> law_ranges(const nlohmann::json& law, const std::string& path) {
  std::vector<LawRange> ranges;
  const nlohmann::json found = law.value("range", nlohmann::json::object());
  for (const char* name : {"L", "K", "A", "N_act"}) {
    if (!found.is_object() || !found.contains(name)) continue;
    const nlohmann::json& ends = found[name];
    if (!ends.is_array() || ends.size() != 2 || !ends[0].is_number() || !ends[1].is_number())
      fail(path, ": its range of ", name, " is not two numbers", law_remedy());
    ranges.push_back({name, ends[0].get<double>(), ends[1].get<double>()});
  }
  return ranges;
}

// By linear interpolation between the sorted values.
inline double quantile(const std::vector<double>& sorted, double share) {
  const double at = share * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(at);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (at - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

// Nobody asks about a hundredth: backbones of one size differ by their norms and routers.
inline std::string beyond(const std::vector<LawRange>& ranges, const LawPoint& p) {
  const std::pair<std::string, double> values[] = {{"L", p.L}, {"K", p.K}, {"A", p.A}, {"N_act", p.N_act}};
  std::string text;
  for (const LawRange& range : ranges) {
    for (const auto& [name, value] : values) {
      if (name != range.name || (value >= 0.99 * range.low && value <= 1.01 * range.high)) continue;
      const bool above = value > range.high;
      text += concatenate(text.empty() ? "" : ", ", name, above ? " above " : " below ",
                          above ? range.high : range.low);
    }
  }
  return text;
}

}  // namespace detail

inline ScalingLaw read_scaling_law(const std::string& path) {
  const nlohmann::json law = read_json_file(path);
  ScalingLaw result;
  result.constants = detail::law_constants(law, path);
  result.samples = detail::law_samples(law, path);
  result.ranges = detail::law_ranges(law, path);
  const nlohmann::json confidence = law.value("confidence", nlohmann::json(result.confidence));
  if (confidence.is_number()) result.confidence = std::clamp(confidence.get<double>(), 0.0, 1.0);
  return result;
}

namespace detail {

// Of a stride longer than the model, only what there is room for counts: the longest run of sparse units.
inline int64_t stride_in_effect(const ModelConfig& c) {
  int64_t run = 0, longest = 0;
  for (const Layer& layer : make_layer_plan(c)) {
    run = layer.routed ? run + 1 : 0;
    longest = std::max(longest, run);
  }
  return std::min(c.anchor_stride, longest / c.token_sparsity);
}

}  // namespace detail

// The law describes X-MoD alone.
inline LawPoint law_point(const ModelConfig& c, const std::string& path) {
  if (c.arch != Arch::xmod || !c.anchors) {
    usage_error("--law ", path, ": the law describes --arch xmod with anchors, not ",
                c.arch == Arch::xmod ? "--no-anchors" : "--arch " + std::string(arch_name(c.arch)));
  }
  const Accounting a = account(c);
  return {static_cast<double>(a.params_total), a.params_active, static_cast<double>(c.seq_len),
          static_cast<double>(c.token_sparsity), static_cast<double>(detail::stride_in_effect(c))};
}

inline LawPrediction predict(const ScalingLaw& law, const LawPoint& point) {
  LawPrediction prediction{law_delta(law.constants, point)};
  if (!law.samples.empty()) {
    std::vector<double> deltas;
    for (const LawConstants& sample : law.samples) deltas.push_back(law_delta(sample, point));
    std::sort(deltas.begin(), deltas.end());
    prediction.confidence = law.confidence;
    prediction.low = detail::quantile(deltas, (1 - law.confidence) / 2);
    prediction.high = detail::quantile(deltas, (1 + law.confidence) / 2);
  }
  prediction.beyond = detail::beyond(law.ranges, point);
  return prediction;
}

}  // namespace xmod

// One optimizer step over the parameter table: global gradient-norm clipping, then Muon on the matrices and
// AdamW on the rest (README.md, "Optimizer"). The arithmetic itself is a backend's.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "xmod/device_buffer.h"
#include "xmod_common.h"

namespace xmod {

struct MuonStep {
  float lr;
  float weight_decay;
  float grad_scale;        // clipping factor
  float beta = 0.95f;      // momentum
  float rms_match = 0.2f;  // the update's RMS as a share of lr, that of AdamW's updates
};

struct AdamWStep {
  float lr;
  float weight_decay;
  float grad_scale;
  float correction1, correction2;  // 1 - beta^step
  float beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f;
};

struct OptimizerConfig {
  Optimizer choice = Optimizer::muon;  // adamw: for every parameter
  double weight_decay = 0.1;
  double grad_clip = 1.0;  // 0: none
};

// Where a parameter's optimizer state lies: the first moment at the parameter's own offset, the second moment
// (AdamW only) packed.
struct OptimizerTable {
  std::vector<Optimizer> optimizer;           // of each entry of the parameter table
  std::vector<int64_t> second_moment_offset;  // of each entry; -1 under Muon
  int64_t second_moment_total = 0;            // floats
};

inline OptimizerTable make_optimizer_table(const ParameterTable& table, Optimizer choice) {
  OptimizerTable result;
  for (const Parameter& p : table.entries) {
    const bool muon = choice == Optimizer::muon && p.optimizer == Optimizer::muon;
    result.optimizer.push_back(muon ? Optimizer::muon : Optimizer::adamw);
    result.second_moment_offset.push_back(muon ? -1 : result.second_moment_total);
    if (!muon)
      result.second_moment_total +=
          (p.size + detail::kAlignment - 1) / detail::kAlignment * detail::kAlignment;
  }
  return result;
}

// The matrices that Muon updates, by (rows, cols): their offsets. Equal shapes go to the backend together.
using MuonShapes = std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>>;

inline MuonShapes muon_shapes(const ParameterTable& parameters, const OptimizerTable& table) {
  MuonShapes shapes;
  for (size_t i = 0; i < parameters.entries.size(); i++) {
    const Parameter& p = parameters.entries[i];
    if (table.optimizer[i] == Optimizer::muon) shapes[{p.shape[0], p.shape[1]}].push_back(p.offset);
  }
  return shapes;
}

template <class Backend>
class OptimizerState {
 public:
  OptimizerState(Backend& backend, const ParameterTable& parameters, const OptimizerConfig& config)
      : config(config),
        table(make_optimizer_table(parameters, config.choice)),
        be_(backend),
        parameters_(parameters),
        first_moment_(backend, parameters.total),
        second_moment_(backend, table.second_moment_total),
        shapes_(muon_shapes(parameters, table)) {}

  // Norm of the whole gradient, padding (zero) included.
  double gradient_norm(const float* grads) { return std::sqrt(be_.sum_of_squares(grads, parameters_.total)); }

  // Updates params in place. step counts from 1; lr for Muon, adamw_lr for AdamW.
  void update(float* params, const float* grads, double gradient_norm, int64_t step, double lr,
              double adamw_lr) {
    const bool clip = config.grad_clip > 0 && gradient_norm > config.grad_clip;
    const float scale = clip ? static_cast<float>(config.grad_clip / gradient_norm) : 1.0f;
    muon(params, grads, {static_cast<float>(lr), static_cast<float>(config.weight_decay), scale});
    const AdamWStep defaults{};
    AdamWStep h{static_cast<float>(adamw_lr), 0, scale,
                static_cast<float>(1 - std::pow(defaults.beta1, static_cast<double>(step))),
                static_cast<float>(1 - std::pow(defaults.beta2, static_cast<double>(step)))};
    adamw(params, grads, h);
  }

  float* first_moment() const { return first_moment_.data(); }    // (parameters.total)
  float* second_moment() const { return second_moment_.data(); }  // (table.second_moment_total)

  const OptimizerConfig config;
  const OptimizerTable table;

 private:
  void muon(float* params, const float* grads, const MuonStep& h) {
    for (const auto& [shape, offsets] : shapes_) {
      be_.muon_update(params, first_moment_.data(), grads, offsets.data(),
                      static_cast<int64_t>(offsets.size()), shape.first, shape.second, h);
    }
  }

  void adamw(float* params, const float* grads, AdamWStep h) {
    for (size_t i = 0; i < parameters_.entries.size(); i++) {
      const Parameter& p = parameters_.entries[i];
      if (table.optimizer[i] != Optimizer::adamw) continue;
      h.weight_decay = has_weight_decay(p) ? static_cast<float>(config.weight_decay) : 0;
      be_.adamw_update(params + p.offset, first_moment_.data() + p.offset,
                       second_moment_.data() + table.second_moment_offset[i], grads + p.offset, h, p.size);
    }
  }

  Backend& be_;
  const ParameterTable& parameters_;
  DeviceBuffer<Backend, float> first_moment_;
  DeviceBuffer<Backend, float> second_moment_;
  const MuonShapes shapes_;
};

}  // namespace xmod

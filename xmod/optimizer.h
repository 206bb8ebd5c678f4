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
    if (!muon) result.second_moment_total += detail::padded(p.size);
  }
  return result;
}

// Consecutive elements of a parameter, and where their moments lie in the allocations of the rank that owns
// them.
struct OptimizerPiece {
  int64_t entry;          // of the parameter table
  int64_t first, size;    // of its elements; all of them under Muon
  int64_t first_moment;   // offsets, in floats
  int64_t second_moment;  // -1 under Muon
};

// What one rank keeps of the optimizer's state, and updates.
struct OptimizerShare {
  std::vector<OptimizerPiece> pieces;  // in the order of the table
  int64_t first_moment_total = 0;      // floats, padding included
  int64_t second_moment_total = 0;
  int64_t muon_flops = 0;  // of an optimizer step

  int64_t bytes() const {
    return (first_moment_total + second_moment_total) * static_cast<int64_t>(sizeof(float));
  }
};

// All of it, the first moments in the layout of the parameters.
inline OptimizerShare whole_optimizer(const TensorTable& parameters, const OptimizerTable& table) {
  OptimizerShare all;
  for (size_t i = 0; i < parameters.entries.size(); i++) {
    const Parameter& p = parameters.entries[i];
    all.pieces.push_back({static_cast<int64_t>(i), 0, p.size, p.offset, table.second_moment_offset[i]});
  }
  all.first_moment_total = parameters.total;
  all.second_moment_total = table.second_moment_total;
  return all;
}

// The matrices of a share that Muon updates, by (rows, cols): their offsets. Equal shapes go to the backend
// together.
using MuonShapes = std::map<std::pair<int64_t, int64_t>, std::vector<int64_t>>;

inline MuonShapes muon_shapes(const TensorTable& parameters, const OptimizerShare& share) {
  MuonShapes shapes;
  for (const OptimizerPiece& piece : share.pieces) {
    const Parameter& p = parameters.entries[static_cast<size_t>(piece.entry)];
    if (piece.second_moment < 0) shapes[{p.shape[0], p.shape[1]}].push_back(p.offset);
  }
  return shapes;
}

// FLOPs that Newton-Schulz steps on a matrix cannot do without, and with which xmod/cpu_muon.h takes them in
// fp32 (in bf16 with 9 R R L + 11 R R R). With R the smaller size and L the larger: two products of 2 R R L
// FLOPs, and of symmetric ones, a half of two of that size and of fourteen of 2 R R R.
inline int64_t newton_schulz_flops(int64_t rows, int64_t cols) {
  const int64_t R = std::min(rows, cols), L = std::max(rows, cols);
  return 6 * R * R * L + 14 * R * R * R;
}

template <class Backend>
class OptimizerState {
 public:
  // shares: of all ranks; none: this one has everything.
  OptimizerState(Backend& backend, const ParameterTable& parameters, const OptimizerConfig& config,
                 std::vector<OptimizerShare> shares = {}, size_t rank = 0)
      : config(config),
        table(make_optimizer_table(parameters, config.choice)),
        is_shared(!shares.empty()),
        shares(is_shared ? std::move(shares)
                         : std::vector<OptimizerShare>{whole_optimizer(parameters, table)}),
        be_(backend),
        parameters_(parameters),
        share_(this->shares[is_shared ? rank : 0]),
        first_moment_(backend, share_.first_moment_total),
        second_moment_(backend, share_.second_moment_total) {
    for (const OptimizerPiece& piece : share_.pieces) {
      if (!is_muon(piece)) continue;
      const Parameter& p = parameter(piece);
      Matrices& matrices = matrices_[{p.shape[0], p.shape[1]}];
      matrices.offsets.push_back(p.offset);
      matrices.momentum_offsets.push_back(piece.first_moment);
    }
  }

  // Norm of the whole gradient, padding (zero) included.
  double gradient_norm(const float* grads) { return std::sqrt(be_.sum_of_squares(grads, parameters_.total)); }

  // Of this rank's share of the gradient.
  double shared_sum_of_squares(const float* grads) {
    double sum = 0;
    for (const OptimizerPiece& piece : share_.pieces)
      sum += be_.sum_of_squares(grads + parameter(piece).offset + piece.first, piece.size);
    return sum;
  }

  // Updates params in place, those of this rank's share. step counts from 1; lr for Muon, adamw_lr for AdamW.
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

  // Of this rank's share; of the whole, the first moments lie as the parameters do.
  float* first_moment() const { return first_moment_.data(); }
  float* second_moment() const { return second_moment_.data(); }

  const OptimizerConfig config;
  const OptimizerTable table;
  const bool is_shared;
  const std::vector<OptimizerShare> shares;  // of every rank; one where it is not shared

 private:
  // Of one shape.
  struct Matrices {
    std::vector<int64_t> offsets, momentum_offsets;
  };

  const Parameter& parameter(const OptimizerPiece& piece) const {
    return parameters_.entries[static_cast<size_t>(piece.entry)];
  }
  bool is_muon(const OptimizerPiece& piece) const {
    return table.optimizer[static_cast<size_t>(piece.entry)] == Optimizer::muon;
  }

  void muon(float* params, const float* grads, const MuonStep& h) {
    for (const auto& [shape, matrices] : matrices_) {
      be_.muon_update(params, first_moment_.data(), grads, matrices.offsets.data(),
                      matrices.momentum_offsets.data(), static_cast<int64_t>(matrices.offsets.size()),
                      shape.first, shape.second, h);
    }
  }

  void adamw(float* params, const float* grads, AdamWStep h) {
    for (const OptimizerPiece& piece : share_.pieces) {
      if (is_muon(piece)) continue;
      const Parameter& p = parameter(piece);
      const int64_t at = p.offset + piece.first;
      h.weight_decay = has_weight_decay(p) ? static_cast<float>(config.weight_decay) : 0;
      be_.adamw_update(params + at, first_moment_.data() + piece.first_moment,
                       second_moment_.data() + piece.second_moment, grads + at, h, piece.size);
    }
  }

  Backend& be_;
  const ParameterTable& parameters_;
  const OptimizerShare& share_;
  DeviceBuffer<Backend, float> first_moment_;
  DeviceBuffer<Backend, float> second_moment_;
  std::map<std::pair<int64_t, int64_t>, Matrices> matrices_;  // under Muon, by (rows, cols)
};

}  // namespace xmod

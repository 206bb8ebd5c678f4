// A model in training on random tokens, for programs that measure how fast that is.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "bench/timed_backend.h"
#include "xmod/device_buffer.h"
#include "xmod/error.h"
#include "xmod/model.h"
#include "xmod/optimizer.h"
#include "xmod/rng.h"

namespace xmod::bench {

template <class Backend>
class Training {
 public:
  Training(Backend& backend, const ModelConfig& config, int64_t B)
      : config(config),
        B_(B),
        model_(backend, config, B, Use::training),
        optimizer_(backend, model_.table, {}),
        tokens_(static_cast<size_t>(B * config.seq_len)) {
    std::mt19937 random(1);
    for (int32_t& token : tokens_) token = static_cast<int32_t>(random() % config.vocab_size);
    if (backend.timing != Timing::counted) fill_weights(backend);
  }

  int64_t tokens() const { return static_cast<int64_t>(tokens_.size()); }
  const Model<Backend>& model() const { return model_; }

  void step() {
    micro_batch();
    update();
  }

  void micro_batch() { model_.forward_backward(tokens_.data(), tokens_.data(), B_, config.seq_len, 1); }

  // Leaves the gradients zero, as they are at first.
  void update() {
    const double norm = optimizer_.gradient_norm(model_.grads());
    if (!std::isfinite(norm)) fail("the gradient is not finite: these figures would mean nothing");
    optimizer_.update(model_.params(), model_.grads(), norm, ++steps_, kRate, kRate);
    model_.close_step(steps_, 1);
    model_.zero_gradients();
  }

  const ModelConfig config;

 private:
  static constexpr double kRate = 1e-3;

  // Norms and gates are ones, matrices normally distributed: of the same numbers again and again, which
  // unlike those of a training run take no time to speak of.
  void fill_weights(Backend& backend) {
    constexpr int64_t kNumbers = int64_t{1} << 20;
    const DeviceBuffer<Backend, float> numbers(backend, kNumbers);
    std::vector<float> host(kNumbers);
    int64_t fan_in = 0;  // of the numbers
    for (const Parameter& p : model_.table.entries) {
      float* const weight = model_.params() + p.offset;
      if (p.shape.size() < 2) {
        backend.fill(weight, 1, p.size);
        continue;
      }
      if (p.shape.back() != fan_in) {
        fan_in = p.shape.back();
        fill_normal(host.data(), kNumbers, 1 / std::sqrt(static_cast<double>(fan_in)), 1, 1);
        backend.to_device(numbers.data(), host.data(), kNumbers);
      }
      for (int64_t first = 0; first < p.size; first += kNumbers)
        backend.copy(weight + first, numbers.data(), std::min(kNumbers, p.size - first));
    }
  }

  int64_t B_;
  Model<Backend> model_;
  OptimizerState<Backend> optimizer_;
  std::vector<int32_t> tokens_;  // (B, T)
  int64_t steps_ = 0;
};

}  // namespace xmod::bench

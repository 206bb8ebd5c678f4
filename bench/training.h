// A model in training on random tokens, for programs that measure how fast that is.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "bench/timed_backend.h"
#include "xmod/error.h"
#include "xmod/model.h"
#include "xmod/optimizer.h"

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
    if (backend.timing != Timing::counted) model_.initialise(1);
  }

  int64_t tokens() const { return static_cast<int64_t>(tokens_.size()); }
  const Model<Backend>& model() const { return model_; }

  void step() {
    model_.zero_gradients();
    micro_batch();
    update();
  }

  void micro_batch() { model_.forward_backward(tokens_.data(), tokens_.data(), B_, config.seq_len, 1); }

  void update() {
    const double norm = optimizer_.gradient_norm(model_.grads());
    if (!std::isfinite(norm)) fail("the gradient is not finite: these figures would mean nothing");
    optimizer_.update(model_.params(), model_.grads(), norm, ++steps_, kRate, kRate);
    model_.close_step(steps_, 1);
  }

  const ModelConfig config;

 private:
  static constexpr double kRate = 1e-3;

  int64_t B_;
  Model<Backend> model_;
  OptimizerState<Backend> optimizer_;
  std::vector<int32_t> tokens_;  // (B, T)
  int64_t steps_ = 0;
};

}  // namespace xmod::bench

// Trains as xmod/trainer.h does and records what training_record.h names, on any backend.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "training_record.h"
#include "xmod/model.h"
#include "xmod/optimizer.h"

namespace xmod {

template <class Backend>
class TrainingRecorder {
 public:
  explicit TrainingRecorder(const TrainingRun& run)
      : run_(run),
        be_(run.machine),
        model_(be_, run.config, run.B, Use::training),
        optimizer_(be_, model_.table, {Optimizer::muon, run.weight_decay, run.grad_clip}) {
    model_.initialise(run.seed);
  }

  TrainingRecord record() {
    TrainingRecord record;
    for (size_t i = 0; i < run_.batches.size(); i++) {
      if (i < run_.states.size() && !run_.states[i].params.empty()) start_from(run_.states[i]);
      record.push_back(step(run_.batches[i], static_cast<int64_t>(i) + 1));
    }
    return record;
  }

 private:
  using floatX = typename Backend::floatX;

  RecordedStep step(const std::vector<int32_t>& batch, int64_t number) {
    const int64_t T = run_.config.seq_len;
    std::vector<int32_t> tokens, targets;
    for (int64_t b = 0; b < run_.B; b++) {
      const auto row = batch.begin() + b * (T + 1);
      tokens.insert(tokens.end(), row, row + T);
      targets.insert(targets.end(), row + 1, row + 1 + T);
    }
    RecordedStep step;
    if (run_.keep_tensors) step.state = state();
    model_.zero_gradients();
    step.loss = model_.forward_backward(tokens.data(), targets.data(), run_.B, T, 1);
    if (run_.keep_tensors) {
      record_activations(step);
      step.gradients = parameters(model_.grads());
    }
    optimizer_.update(model_.params(), model_.grads(), optimizer_.gradient_norm(model_.grads()), number,
                      run_.lr, run_.adamw_lr);
    model_.close_step(number, 1);
    if (!run_.keep_tensors) return step;
    step.weights = parameters(model_.params());
    step.weights.push_back({"thresholds, biases", state().buffers});
    return step;
  }

  // What a layer works on and what its parts compute, layer by layer.
  void record_activations(RecordedStep& step) {
    const Activations<floatX>& act = model_.activations();
    const int64_t n = run_.B * run_.config.seq_len, d = run_.config.dim;
    for (size_t l = 0; l < act.layers.size(); l++) {
      const LayerActivations<floatX>& a = act.layers[l];
      const int64_t rows = a.rows.n;
      layer_ = "layers." + std::to_string(l) + ".";
      add(step.activations, "x", a.x, rows * d);
      if (model_.plan[l].routed) {
        add(step.routing, "rows", a.rows.row, rows);
        add(step.activations, "router_logit", a.router_logit, rows);
        add(step.activations, "delta", a.delta, rows * d);
      }
      std::visit([&](const auto& saved) { record_kind(step, saved, rows, n); }, a.attention);
      if (model_.plan[l].ffn == Ffn::none) continue;
      add(step.activations, "h", a.h, rows * d);
      add(step.activations, "ffn_norm", a.ffn_norm, rows * d);
      std::visit([&](const auto& saved) { record_kind(step, saved, rows, n); }, a.ffn);
    }
    layer_.clear();
    add(step.activations, "final_norm", act.final_norm, n * d);
    add(step.activations, "losses", act.losses, n);
    add(step.gradients, "embedding output", act.dstream, n * d);
  }

  void record_kind(RecordedStep&, const NoAttention::Saved<floatX>&, int64_t, int64_t) {}
  void record_kind(RecordedStep&, const NoFfn::Saved<floatX>&, int64_t, int64_t) {}

  void record_kind(RecordedStep& step, const SelfAttention::Saved<floatX>& a, int64_t rows, int64_t) {
    const ModelConfig& c = run_.config;
    add(step.activations, "norm", a.norm, rows * c.dim);
    add(step.activations, "qkv", a.qkv, rows * c.qkv_dim());
    add(step.activations, "q", a.q, rows * c.q_dim());
    add(step.activations, "k", a.k, rows * c.kv_dim());
    add(step.activations, "attn", a.attn, rows * c.q_dim());
  }

  void record_kind(RecordedStep& step, const SelectedQAttention::Saved<floatX>& a, int64_t rows, int64_t n) {
    const ModelConfig& c = run_.config;
    add(step.activations, "kv", a.kv, n * 2 * c.kv_dim());
    add(step.activations, "k", a.k, n * c.kv_dim());
    add(step.activations, "q", a.q, rows * c.q_dim());
    add(step.activations, "attn", a.attn, rows * c.q_dim());
  }

  void record_kind(RecordedStep& step, const Swiglu::Saved<floatX>& a, int64_t rows, int64_t) {
    add(step.activations, "gate_up", a.gate_up, rows * 2 * run_.config.ffn_dim);
    add(step.activations, "act", a.act, rows * run_.config.ffn_dim);
  }

  void record_kind(RecordedStep& step, const Moe::Saved<floatX>& a, int64_t rows, int64_t) {
    const ModelConfig& c = run_.config;
    const int64_t pairs = rows * c.experts_per_token;
    add(step.routing, "experts", a.groups.chosen, rows * c.experts);
    add(step.activations, "score", a.score, rows * c.experts);
    add(step.activations, "weight", a.weight, rows * c.experts);
    add(step.activations, "gate_up", a.gate_up, pairs * 2 * c.expert_dim);
    add(step.activations, "act", a.act, pairs * c.expert_dim);
  }

  void record_kind(RecordedStep& step, const Deco::Saved<floatX>& a, int64_t rows, int64_t) {
    const ModelConfig& c = run_.config;
    add(step.routing, "experts", a.groups.chosen, rows * c.experts);
    add(step.activations, "weight", a.weight, rows * c.experts);
    add(step.activations, "mean", a.mean, rows);
    int64_t pairs = 0;
    for (float chosen : step.routing.back().values) pairs += chosen != 0;
    add(step.activations, "up", a.up, pairs * c.expert_dim);
    add(step.activations, "act", a.act, pairs * c.expert_dim);
  }

  template <class T>
  void add(std::vector<RecordedTensor>& tensors, const std::string& name, const T* device, int64_t n) {
    tensors.push_back({layer_ + name, download(device, n)});
  }

  std::vector<RecordedTensor> parameters(const float* device) {
    std::vector<RecordedTensor> tensors;
    for (const Parameter& p : model_.table.entries)
      tensors.push_back({p.name, download(device + p.offset, p.size)});
    return tensors;
  }

  template <class T>
  std::vector<float> download(const T* device, int64_t n) {
    std::vector<T> host(static_cast<size_t>(n));
    be_.to_host(host.data(), device, n);
    std::vector<float> values;
    for (const T value : host) values.push_back(static_cast<float>(value));
    return values;
  }

  TrainingState state() {
    return {download(model_.params(), model_.table.total),
            download(model_.buffers(), model_.table.buffers_total)};
  }

  void start_from(const TrainingState& state) {
    be_.to_device(model_.params(), state.params.data(), model_.table.total);
    be_.to_device(model_.buffers(), state.buffers.data(), model_.table.buffers_total);
  }

  const TrainingRun& run_;
  Backend be_;
  Model<Backend> model_;
  OptimizerState<Backend> optimizer_;
  std::string layer_;  // the prefix of names
};

}  // namespace xmod

// Models of a few thousand parameters, one of each architecture and ablation, and what tests of whole models
// do with them.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "backend.h"
#include "small_config.h"

namespace xmod {

// ---------------------------------------------------------------------------------------------------
// Configurations

struct NamedConfig {
  std::string name;
  ModelConfig config;
  std::string layers;  // the pattern this name stands for

  friend void PrintTo(const NamedConfig& c, std::ostream* out) { *out << c.name; }
};

inline std::vector<NamedConfig> configs() {
  auto with = [](Arch arch, auto change) {
    ModelConfig c = small_config(arch);
    change(c);
    return c;
  };
  auto none = [](ModelConfig&) {};
  auto long_intervals = [](ModelConfig& c) {
    c.token_sparsity = 3, c.anchor_stride = 2, c.active_layers = 6;
  };
  auto ragged = [](ModelConfig& c) { c.seq_len = 23, c.token_sparsity = 5; };
  return {
      {"dense", with(Arch::dense, none), "DDDDD"},
      {"untied_head", with(Arch::xmod, [](ModelConfig& c) { c.tie_word_embeddings = false; }), "DSSSSDSSSSD"},
      {"mod", with(Arch::mod, none), "DSDSDSD"},
      {"xmod", with(Arch::xmod, none), "DSSSSDSSSSD"},
      {"incomplete_interval", with(Arch::xmod, long_intervals), "DSSSSSSDSSSD"},
      {"ragged", with(Arch::xmod, ragged), "DSSSSSDSSSSSD"},
      {"one_token",
       with(Arch::xmod, [](ModelConfig& c) { c.seq_len = 8, c.token_sparsity = 8, c.active_layers = 3; }),
       "DSSSSSSSSD"},
      {"no_anchors",
       with(Arch::xmod, [](ModelConfig& c) { c.anchors = false, c.dense_prefix = 0, c.active_layers = 2; }),
       "SSSSSSSS"},
      {"no_stabilisers",
       with(Arch::xmod, [](ModelConfig& c) { c.residual_gate = false, c.token_bias_strength = 0; }),
       "DSSSSDSSSSD"},
      {"routed_ffn", with(Arch::routed_ffn, long_intervals), "DSSSSSSDSSSD"},
      {"selected_q", with(Arch::selected_q, ragged), "DSSSSSDSSSSSD"},
      {"moe", with(Arch::moe, none), "DDD"},
      {"moe_all_chosen",
       with(Arch::moe, [](ModelConfig& c) { c.experts_per_token = 5, c.shared_experts = 0; }), "DDD"},
      {"deco", with(Arch::deco, none), "DDD"},
      {"deco_one_expert",
       with(Arch::deco, [](ModelConfig& c) { c.experts = 1, c.dense_prefix = c.shared_experts = 0; }), "DDD"},
  };
}

inline ModelConfig config_named(const std::string& name) {
  for (const NamedConfig& c : configs()) {
    if (c.name == name) return c.config;
  }
  ADD_FAILURE() << "no such configuration: " << name;
  return {};
}

// ---------------------------------------------------------------------------------------------------
// Models

using TestModel = Model<TestBackend>;

inline Floats slice(const Floats& all, const Parameter& p) {
  return Floats(all.begin() + p.offset, all.begin() + p.offset + p.size);
}

inline const Parameter& parameter(const TestModel& model, const std::string& name) {
  for (const Parameter& p : model.table.entries) {
    if (p.name == name) return p;
  }
  throw std::out_of_range("no parameter " + name);
}

inline Floats weights_of(const TestModel& model, const Parameter& p) {
  return download(model.backend(), model.params() + p.offset, p.size);
}

inline void set_weights(TestModel& model, const Parameter& p, const Floats& values) {
  ASSERT_EQ(static_cast<int64_t>(values.size()), p.size) << p.name;
  model.backend().to_device(model.params() + p.offset, values.data(), p.size);
}

// Every tensor of this initialisation becomes `value`.
inline void set_all(TestModel& model, Init init, float value) {
  for (const Parameter& p : model.table.entries) {
    if (p.init == init) set_weights(model, p, Floats(static_cast<size_t>(p.size), value));
  }
}

// Random weights in which nothing is special: norms and gates differ from 1, logits from 0.
inline void randomise(TestModel& model, uint64_t seed = 1) {
  model.initialise(seed);
  for (const Parameter& p : model.table.entries) {
    Floats values = weights_of(model, p);
    const Floats noise = normal_numbers(p.size, seed + stream_of(p.name), 0.2);
    for (int64_t i = 0; i < p.size; i++) {
      if (p.init == Init::embedding || p.init == Init::relu_router) values[i] *= 20;
      if (p.init == Init::ones || p.init == Init::gate || p.init == Init::expert_scale) values[i] += noise[i];
    }
    set_weights(model, p, values);
  }
}

// Copies the weights of every tensor of `to` from the tensor of `from` that `source` names; an empty name
// leaves it as it is.
template <class Source>
void copy_weights(TestModel& to, const TestModel& from, Source source) {
  for (const Parameter& p : to.table.entries) {
    const std::string name = source(p.name);
    if (!name.empty()) set_weights(to, p, weights_of(from, parameter(from, name)));
  }
}

inline Floats buffers_of(const TestModel& model) {
  return download(model.backend(), model.buffers(), model.table.buffers_total);
}

// As before training.
inline void reset_buffers(TestModel& model) {
  for (const Buffer& b : model.table.buffers)
    model.backend().fill(model.buffers() + b.offset, b.init, b.size);
}

inline void set_thresholds(TestModel& model, float tau) {
  const Floats all(static_cast<size_t>(model.sparse_layers), tau);
  model.backend().to_device(model.thresholds(), all.data(), model.sparse_layers);
}

// The sparse layer of this number.
inline const Layer& sparse_layer(const TestModel& model, int64_t number) {
  for (const Layer& layer : model.plan) {
    if (layer.routed && layer.number == number) return layer;
  }
  throw std::out_of_range("no sparse layer of this number");
}

// ---------------------------------------------------------------------------------------------------
// Batches

struct Batch {
  int64_t B, T;
  Ints tokens, targets;  // (B, T)
};

inline Batch random_batch(const ModelConfig& c, int64_t B, uint64_t seed = 1, int64_t T = 0) {
  if (T == 0) T = c.seq_len;
  return {B, T, random_ids(B * T, c.vocab_size, seed), random_ids(B * T, c.vocab_size, seed + 1000)};
}

// count sequences from the first-th.
inline Batch sequences_of(const Batch& batch, int64_t first, int64_t count) {
  auto part = [&](const Ints& ids) {
    return Ints(ids.begin() + first * batch.T, ids.begin() + (first + count) * batch.T);
  };
  return {count, batch.T, part(batch.tokens), part(batch.targets)};
}

inline Batch sequence_of(const Batch& batch, int64_t b) {
  return sequences_of(batch, b, 1);
}

inline double loss_of(TestModel& model, const Batch& batch, Routing routing = Routing::topk) {
  return model.loss(batch.tokens.data(), batch.targets.data(), batch.B, batch.T, routing);
}

inline double forward_backward(TestModel& model, const Batch& batch, float loss_scale = 1) {
  return model.forward_backward(batch.tokens.data(), batch.targets.data(), batch.B, batch.T, loss_scale);
}

inline Floats gradients_so_far(const TestModel& model) {
  return download(model.backend(), model.grads(), model.table.total);
}

inline Floats gradients(TestModel& model, const Batch& batch) {
  model.zero_gradients();
  forward_backward(model, batch);
  return gradients_so_far(model);
}

// Logits (T, V) of a batch of one sequence.
inline Floats logits(TestModel& model, const Batch& batch, Routing routing = Routing::topk) {
  Floats out(static_cast<size_t>(batch.T * model.config.vocab_size));
  model.logits(out.data(), batch.tokens.data(), batch.T, 0, batch.T, routing);
  return out;
}

// ---------------------------------------------------------------------------------------------------
// What a model chose

// What each sparse layer selects in one run, in the order of the layers.
inline std::vector<Ints> selections(TestModel& model, const Batch& batch, Routing routing) {
  std::vector<Ints> all;
  model.on_selection = [&](int64_t, const Rows& rows) {
    all.push_back(download(model.backend(), rows.row, rows.n));
  };
  loss_of(model, batch, routing);
  model.on_selection = nullptr;
  return all;
}

// Which experts each of n tokens went to in the last forward_backward, (n, E) for every layer with experts.
inline std::vector<std::vector<uint8_t>> chosen_experts(const TestModel& model, int64_t n) {
  std::vector<std::vector<uint8_t>> all;
  for (const auto& layer : model.activations().layers) {
    auto add = [&](const ExpertGroups& groups) {
      all.push_back(download(model.backend(), groups.chosen, n * model.config.experts));
    };
    if (const auto* moe = std::get_if<Moe::Saved<float>>(&layer.ffn)) add(moe->groups);
    if (const auto* deco = std::get_if<Deco::Saved<float>>(&layer.ffn)) add(deco->groups);
  }
  return all;
}

// The thresholds after one training step on the batch: they then select about C tokens.
inline void learn_thresholds(TestModel& model, const Batch& batch) {
  forward_backward(model, batch);
  model.close_step(1, 1);
}

// ---------------------------------------------------------------------------------------------------
// Comparing

// Equal bit for bit where the bound is 0.
inline void expect_close(const Floats& found, const Floats& expected, double bound,
                         const std::string& what = "") {
  if (bound == 0) {
    EXPECT_TRUE(same_bits(found, expected)) << what;
  } else {
    EXPECT_LE(normalised_error(found, expected), bound) << what;
  }
}

// Every architecture and ablation, on one thread (that results do not depend on threads is shown elsewhere).
class ModelTest : public ::testing::TestWithParam<NamedConfig> {
 protected:
  ModelTest() : config_(GetParam().config), model_(be_, config_, kBatch, Use::training) { randomise(model_); }

  static constexpr int64_t kBatch = 4;
  TestBackend be_{{.threads = 1}};
  ModelConfig config_;
  TestModel model_;
};

}  // namespace xmod

// `plan --ranks`: what a training step costs on several ranks, before there are any: bytes on the network, a
// prediction of the step's time, and whether a rank's memory suffices. docs/ranks.md derives the equations
// and holds them against measured runs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numeric>
#include <ostream>
#include <string>
#include <variant>
#include <vector>

#include "xmod/optimizer_shares.h"
#include "xmod/plan.h"
#include "xmod/run_length.h"

namespace xmod {

// The ranks and what they run on.
struct RankSetup {
  int64_t ranks = 1;          // R
  int64_t zero = 0;           // 1: each rank updates its share of the parameters
  int64_t batch_size = 1;     // sequences of a rank's micro-batch
  int64_t micro_batches = 1;  // of a rank in a step
  Optimizer optimizer = Optimizer::muon;
  Recompute recompute = Recompute::none;
  double device_flops = 0;                       // that a rank reaches a second
  double bandwidth = 0;                          // bytes that a rank sends, and at once receives, a second
  int64_t product_weight_bytes = sizeof(float);  // of a weight that products alone read, on its way to all
  int64_t (*newton_schulz_flops)(int64_t rows, int64_t cols) = xmod::newton_schulz_flops;  // a backend's
};

// ---------------------------------------------------------------------------------------------------
// What a rank computes

namespace detail {

inline double attention_flops(const ModelConfig& c, const Layer& layer) {
  return 4.0 * static_cast<double>(c.seq_len * c.q_dim()) * attention_cost(c, layer);
}

// Of a token, forward.
inline double layer_flops(const ModelConfig& c, const Layer& layer) {
  return 2 * matrix_parameters_per_token(c, layer) + attention_flops(c, layer);
}

// What a layer computes once more in its backward pass. A third of an FFN is its last product, which only a
// sparse layer's gate needs.
inline double recomputed_flops(const ModelConfig& c, const Layer& layer, Recompute recompute) {
  const double ffn =
      2 * token_share(c, layer) *
      std::visit([&](const auto& kind) { return kind.matrix_parameters_per_token(c); }, ffn_kind(layer.ffn));
  switch (recompute) {
    case Recompute::none:
      return 0;
    case Recompute::ffn:
      return ffn * 2 / 3;
    case Recompute::block:
      return layer_flops(c, layer) - (layer.routed ? 0 : ffn / 3);
  }
  return 0;
}

inline double head_flops(const ModelConfig& c) {
  return 2.0 * static_cast<double>(c.vocab_size) * static_cast<double>(c.dim);
}

}  // namespace detail

// Of a token: as `plan` counts them, and the output head beside.
inline double forward_flops(const ModelConfig& c) {
  return account(c).flops_per_token + detail::head_flops(c);
}

// A piece of the backward pass, and the gradients that are complete behind it.
struct BackwardStage {
  double flops = 0;              // of a token
  std::vector<int64_t> entries;  // of the parameter table
};

// The head, the layers from the last to the first, the embedding. A tied embedding takes gradients from both
// ends, so it is complete last.
inline std::vector<BackwardStage> backward_stages(const ModelConfig& c, const LayerPlan& plan,
                                                  const ParameterTable& table, Recompute recompute) {
  const auto layers = static_cast<size_t>(count_layers(plan));
  std::vector<BackwardStage> stages(layers + 2);
  auto stage_of_layer = [&](int64_t number) -> BackwardStage& {
    return stages[layers - static_cast<size_t>(number)];
  };
  stages.front().flops = 2 * detail::head_flops(c);
  for (const Layer& layer : plan) {
    stage_of_layer(layer.number).flops +=
        2 * detail::layer_flops(c, layer) + detail::recomputed_flops(c, layer, recompute);
  }
  for (size_t i = 0; i < table.entries.size(); i++) {
    const Parameter& p = table.entries[i];
    int number = 0;
    const bool in_layer = std::sscanf(p.name.c_str(), "model.layers.%d.", &number) == 1;
    BackwardStage& stage = in_layer                         ? stage_of_layer(number)
                           : p.offset == table.embed_tokens ? stages.back()
                                                            : stages.front();
    stage.entries.push_back(static_cast<int64_t>(i));
  }
  return stages;
}

// Of the optimizer step of the rank that has most to do. AdamW's arithmetic is not counted.
inline double optimizer_flops(const ParameterTable& table, const std::vector<OptimizerShare>& shares,
                              const RankSetup& s) {
  int64_t most = 0;
  for (const OptimizerShare& share : shares) {
    int64_t flops = 0;
    for (const auto& [shape, offsets] : muon_shapes(table, share))
      flops += static_cast<int64_t>(offsets.size()) * s.newton_schulz_flops(shape.first, shape.second);
    most = std::max(most, flops);
  }
  return static_cast<double>(most);
}

// ---------------------------------------------------------------------------------------------------
// What a rank sends and receives
//
// Gradients go to the rank that owns them, which adds them up. --zero 0: owners alternate in small pieces,
// and the sums go back to all. --zero 1: the owner is the rank that updates the parameter; the new weights go
// to all when the optimizer is through, in the format in which they are read.

namespace detail {

// Bytes that one direction of a rank's link carries behind each stage.
using LinkLoad = std::vector<double>;

inline double bytes_of(int64_t floats) {
  return static_cast<double>(floats) * sizeof(float);
}

// One of all that are alike.
inline LinkLoad even_load(const std::vector<BackwardStage>& stages, const ParameterTable& table,
                          int64_t ranks) {
  LinkLoad load;
  for (const BackwardStage& stage : stages) {
    int64_t floats = 0;
    for (int64_t entry : stage.entries) floats += table.entries[static_cast<size_t>(entry)].size;
    load.push_back(2 * bytes_of(floats) * static_cast<double>(ranks - 1) / static_cast<double>(ranks));
  }
  return load;
}

// Calls visit for each direction of each rank's link.
template <class Visit>
void for_each_link(const std::vector<BackwardStage>& stages, const ParameterTable& table, const RankSetup& s,
                   const std::vector<OptimizerShare>& shares, Visit visit) {
  const LinkLoad even = even_load(stages, table, s.ranks);
  if (s.zero == 0) return visit(even);
  std::vector<size_t> stage_of(table.entries.size());
  for (size_t i = 0; i < stages.size(); i++) {
    for (int64_t entry : stages[i].entries) stage_of[static_cast<size_t>(entry)] = i;
  }
  const auto others = static_cast<double>(s.ranks - 1);
  for (const OptimizerShare& share : shares) {
    LinkLoad received(stages.size()), sent(stages.size());
    for (size_t i = 0; i < stages.size(); i++) sent[i] = even[i] / 2 * static_cast<double>(s.ranks) / others;
    for (const OptimizerPiece& piece : share.pieces) {
      const size_t stage = stage_of[static_cast<size_t>(piece.entry)];
      received[stage] += others * bytes_of(piece.size);
      sent[stage] -= bytes_of(piece.size);
    }
    visit(received);
    visit(sent);
  }
}

// Of the busiest rank: its weights to every other rank, or theirs to it.
inline double weight_bytes(const ParameterTable& table, const RankSetup& s,
                           const std::vector<OptimizerShare>& shares) {
  auto bytes = [&](const Parameter& p, int64_t size) {
    const bool as_factor = p.read == Read::by_products_alone;
    return static_cast<double>(size) *
           static_cast<double>(as_factor ? s.product_weight_bytes : sizeof(float));
  };
  double all = 0, most = 0;
  for (const Parameter& p : table.entries) all += bytes(p, p.size);
  for (const OptimizerShare& share : shares) {
    double own = 0;
    for (const OptimizerPiece& piece : share.pieces)
      own += bytes(table.entries[static_cast<size_t>(piece.entry)], piece.size);
    most = std::max({most, static_cast<double>(s.ranks - 1) * own, all - own});
  }
  return most;
}

// Seconds until the last gradients have arrived, from the start of the last micro-batch's backward pass. What
// is complete is sent at once, one stage behind the other, while the pass goes on.
inline double arrival(const std::vector<BackwardStage>& stages, const LinkLoad& load, const RankSetup& s,
                      double tokens) {
  double ready = 0, arrived = 0;
  for (size_t i = 0; i < stages.size(); i++) {
    ready += stages[i].flops * tokens / s.device_flops;
    arrived = std::max(ready, arrived) + load[i] / s.bandwidth;
  }
  return arrived;
}

}  // namespace detail

// Bytes a step of one direction of a rank's link, the busiest.
struct StepTraffic {
  double gradients = 0;
  double weights = 0;
};

// ---------------------------------------------------------------------------------------------------
// How long a step takes

struct StepTime {
  double forward = 0, backward = 0;  // seconds, of all micro-batches
  double hidden = 0, exposed = 0;    // gradients on their way: while the backward pass runs, and behind it
  double optimizer = 0;
  double weights = 0;  // on their way from their owners to all

  double seconds() const { return forward + backward + exposed + optimizer + weights; }
};

struct RankPlan {
  RankSetup setup;
  int64_t step_tokens = 0;  // of all ranks
  StepTraffic traffic;
  StepTime time;                // zero where the device's or the network's speed is not known
  double one_rank_seconds = 0;  // for the same tokens

  bool has_time() const { return one_rank_seconds > 0; }
  // Of R ranks against R times one.
  double efficiency() const { return one_rank_seconds / (static_cast<double>(setup.ranks) * time.seconds()); }
  double tokens_per_second() const { return static_cast<double>(step_tokens) / time.seconds(); }
};

class StepPlanner {
 public:
  StepPlanner(const ModelConfig& c, const RankSetup& s)
      : c_(c),
        s_(s),
        plan_(make_layer_plan(c)),
        table_(make_parameter_table(c, plan_)),
        stages_(backward_stages(c, plan_, table_, s.recompute)) {}

  StepTraffic traffic() const {
    StepTraffic traffic;
    if (s_.ranks == 1) return traffic;
    const std::vector<OptimizerShare> all = shares(s_);
    detail::for_each_link(stages_, table_, s_, all, [&](const detail::LinkLoad& load) {
      traffic.gradients = std::max(traffic.gradients, std::accumulate(load.begin(), load.end(), 0.0));
    });
    if (s_.zero > 0) traffic.weights = detail::weight_bytes(table_, s_, all);
    return traffic;
  }

  StepTime time() const { return time_on(s_); }

  // One rank's, for the tokens of all.
  double one_rank_seconds() const {
    RankSetup one = s_;
    one.ranks = 1;
    one.micro_batches *= s_.ranks;
    return time_on(one).seconds();
  }

 private:
  // Of those that differ: without --zero 1 all ranks do the same.
  std::vector<OptimizerShare> shares(const RankSetup& s) const {
    return share_optimizer(table_, make_optimizer_table(table_, s.optimizer), s.zero == 0 ? 1 : s.ranks);
  }

  StepTime time_on(const RankSetup& s) const {
    const auto tokens = static_cast<double>(s.batch_size * c_.seq_len);
    const auto micro_batches = static_cast<double>(s.micro_batches);
    double backward = 0;  // of one micro-batch
    for (const BackwardStage& stage : stages_) backward += stage.flops * tokens / s.device_flops;
    const std::vector<OptimizerShare> all = shares(s);
    StepTime time;
    time.forward = micro_batches * forward_flops(c_) * tokens / s.device_flops;
    time.backward = micro_batches * backward;
    time.optimizer = optimizer_flops(table_, all, s) / s.device_flops;
    if (s.ranks == 1) return time;
    const StepTraffic sent = traffic();
    detail::for_each_link(stages_, table_, s, all, [&](const detail::LinkLoad& load) {
      time.exposed = std::max(time.exposed, detail::arrival(stages_, load, s, tokens) - backward);
    });
    time.hidden = sent.gradients / s.bandwidth - time.exposed;
    time.weights = sent.weights / s.bandwidth;
    return time;
  }

  const ModelConfig c_;
  const RankSetup s_;
  const LayerPlan plan_;
  const ParameterTable table_;
  const std::vector<BackwardStage> stages_;
};

inline RankPlan plan_ranks(const ModelConfig& c, const RankSetup& s) {
  const StepPlanner planner(c, s);
  RankPlan plan;
  plan.setup = s;
  plan.step_tokens = s.ranks * s.micro_batches * s.batch_size * c.seq_len;
  plan.traffic = planner.traffic();
  if (s.device_flops == 0 || (s.ranks > 1 && s.bandwidth == 0)) return plan;
  plan.time = planner.time();
  plan.one_rank_seconds = planner.one_rank_seconds();
  return plan;
}

// ---------------------------------------------------------------------------------------------------
// Output

namespace detail {

constexpr double kGigabyte = 1e9;

template <class Backend>
RankSetup rank_setup(const ModelConfig& c, const PlanOptions& options) {
  const PlanOptions o = resolve_grad_accum(options, c, options.ranks);
  return {o.ranks,
          o.zero,
          o.batch_size,
          o.grad_accum,
          o.optimizer,
          o.recompute,
          o.device_flops,
          o.bandwidth * kGigabyte,
          sizeof(typename Backend::floatX),
          Backend::newton_schulz_flops};
}

inline nlohmann::ordered_json rank_plan_json(const RankPlan& plan, int64_t memory, double device_memory) {
  const RankSetup& s = plan.setup;
  nlohmann::ordered_json out = {
      {"ranks", s.ranks},
      {"zero", s.zero},
      {"step_tokens", plan.step_tokens},
      {"memory_bytes", memory},
      {"fits_device_memory", nullptr},
      {"gradient_bytes", std::llround(plan.traffic.gradients)},
      {"weight_bytes", std::llround(plan.traffic.weights)},
      {"seconds", nullptr},
      {"step_seconds", nullptr},
      {"tokens_per_second", nullptr},
      {"scaling_efficiency", nullptr},
  };
  if (device_memory > 0) out["fits_device_memory"] = static_cast<double>(memory) <= device_memory;
  if (!plan.has_time()) return out;
  const StepTime& t = plan.time;
  out["seconds"] = {{"forward", t.forward},         {"backward", t.backward},
                    {"gradients_hidden", t.hidden}, {"gradients_exposed", t.exposed},
                    {"optimizer", t.optimizer},     {"weights", t.weights}};
  out["step_seconds"] = t.seconds();
  out["tokens_per_second"] = plan.tokens_per_second();
  out["scaling_efficiency"] = plan.efficiency();
  return out;
}

// "12.3 ms"
inline std::string show_seconds(double seconds) {
  return seconds < 1 ? print("%9.2f ms", 1e3 * seconds) : print("%9.2f s", seconds);
}

// Of a column's entry, for use in a sentence.
inline std::string unpadded(const std::string& entry) {
  return entry.substr(entry.find_first_not_of(' '));
}

inline void print_step_time(const RankPlan& plan, std::ostream& out) {
  auto row = [&](const char* name, const std::string& value) {
    out << print("  %-38s", name) << value << "\n";
  };
  const StepTime& t = plan.time;
  row("forward", show_seconds(t.forward));
  row("backward", show_seconds(t.backward));
  row("gradients, behind the backward pass",
      show_seconds(t.exposed) + " (and " + unpadded(show_seconds(t.hidden)) + " during it)");
  row("optimizer", show_seconds(t.optimizer));
  row("weights to all ranks", show_seconds(t.weights));
  row("step", show_seconds(t.seconds()) + ", " + rounded(plan.tokens_per_second()) + " tokens a second");
  row("scaling efficiency", print("%9.1f%% of ", 100 * plan.efficiency()) + std::to_string(plan.setup.ranks) +
                                " times one rank on the same tokens");
}

inline void print_rank_plan(const RankPlan& plan, int64_t memory, double device_memory, std::ostream& out) {
  const RankSetup& s = plan.setup;
  out << "\nA step on " << s.ranks << (s.ranks == 1 ? " rank" : " ranks") << " with --zero " << s.zero << ": "
      << grouped(plan.step_tokens) << " tokens in " << s.micro_batches
      << (s.micro_batches == 1 ? " micro-batch" : " micro-batches") << " a rank\n";
  auto row = [&](const char* name, const std::string& value) {
    out << print("  %-38s", name) << value << "\n";
  };
  row("gradients, sent or received by a rank", bytes(std::llround(plan.traffic.gradients)));
  if (s.zero > 0) row("weights, sent or received by a rank", bytes(std::llround(plan.traffic.weights)));
  if (plan.has_time()) {
    print_step_time(plan, out);
  } else {
    out << "  (its time: give --device-flops" << (s.ranks > 1 ? " and --bandwidth" : "") << ")\n";
  }
  if (device_memory == 0) return;
  const double share = static_cast<double>(memory) / device_memory;
  row("memory of a rank", print("%9.0f%% of ", 100 * share) + unpadded(bytes(std::llround(device_memory))) +
                              (share <= 1 ? ": fits" : ": does not fit"));
}

}  // namespace detail

// `plan`, with or without --ranks.
template <class Backend>
void print_plan_of_ranks(const Options& options, std::ostream& out) {
  const PlanOptions& o = options.plan;
  if (o.ranks == 0) return print_plan<Backend>(options, out);
  const RankPlan plan = plan_ranks(options.model, detail::rank_setup<Backend>(options.model, o));
  const RunSize run = planned_run(options);
  const int64_t memory = training_memory<Backend>(options.model, run).total();
  const double device_memory = o.device_memory * detail::kGigabyte;
  if (o.json) {
    nlohmann::ordered_json json = plan_json<Backend>(options.model, o, run);
    json["parallel"] = detail::rank_plan_json(plan, memory, device_memory);
    out << json.dump(2) << "\n";
  } else {
    print_plan<Backend>(options, out);
    detail::print_rank_plan(plan, memory, device_memory, out);
  }
}

}  // namespace xmod

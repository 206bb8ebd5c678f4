// What all ranks of a run must have alike: with other data or flags on some of them, they would train
// together what nobody has asked for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "dataloader.h"
#include "xmod/communicator.h"
#include "xmod/config_json.h"
#include "xmod/fingerprint.h"
#include "xmod/flag_values.h"
#include "xmod/model.h"
#include "xmod/options.h"

namespace xmod {

using Fact = std::pair<std::string, std::string>;  // what, and how it is
using Facts = std::vector<Fact>;

// Every rank calls this with facts of the same names in the same order.
inline void require_same(Communicator& ranks, const Facts& facts) {
  std::string mine;
  for (const auto& [name, value] : facts) mine += value + '\n';
  const std::vector<std::string> all = ranks.gather(mine);
  for (size_t rank = 1; rank < all.size(); rank++) {
    std::istringstream first(all[0]), other(all[rank]);
    for (const auto& [name, value] : facts) {
      std::string expected, found;
      std::getline(first, expected);
      std::getline(other, found);
      if (found == expected) continue;
      fail(name, ": rank ", rank, " has ", found, ", rank 0 has ", expected,
           "; every process needs the same");
    }
  }
}

// The options that decide a run.
inline Facts training_facts(const TrainOptions& o) {
  Facts facts;
  auto add = [&](const char* flag, const auto& value) {
    facts.emplace_back(flag, detail::show_value(value));
  };
  add("--batch-size", o.batch_size);
  add("--grad-accum", o.grad_accum);
  add("--steps", o.steps);
  add("--compute", o.compute);
  add("--optimizer", o.optimizer);
  add("--lr", o.lr);
  add("--adamw-lr", o.adamw_lr);
  add("--weight-decay", o.weight_decay);
  add("--warmup-steps", o.warmup_steps);
  add("--lr-schedule", o.lr_schedule);
  add("--final-lr-fraction", o.final_lr_fraction);
  add("--grad-clip", o.grad_clip);
  add("--zero", o.zero);
  add("--eval-interval", o.eval_interval);
  add("--eval-batches", o.eval_batches);
  add("--checkpoint-interval", o.checkpoint_interval);
  add("--seed", o.seed);
  facts.emplace_back("--init-from", o.init_from.empty() ? "nothing" : "a checkpoint");
  return facts;
}

// Those that tell models apart most often, each by its name; behind them all the others at once.
inline Facts model_facts(const ModelConfig& c) {
  Facts facts = {{"--arch", arch_name(c.arch)}};
  auto add = [&](const char* flag, const auto& value) {
    facts.emplace_back(flag, detail::show_value(value));
  };
  add("--vocab-size", c.vocab_size);
  add("--dim", c.dim);
  add("--active-layers", c.active_layers);
  add("--heads", c.heads);
  add("--kv-heads", c.kv_heads);
  add("--head-dim", c.head_dim);
  add("--ffn-dim", c.ffn_dim);
  add("--seq-len", c.seq_len);
  add("--token-sparsity", c.token_sparsity);
  add("--anchor-stride", c.anchor_stride);
  add("--dense-prefix", c.dense_prefix);
  facts.emplace_back("the model's flags", config_to_json(c).dump());
  return facts;
}

// validation: null where there is none.
inline void require_same_run(Communicator& ranks, const ModelConfig& model, const TrainOptions& o,
                             Precision precision, const TokenShards& training,
                             const TokenShards* validation) {
  if (ranks.size() == 1) return;
  Facts facts = training_facts(o);
  facts.emplace_back("--precision", precision_name(precision));
  for (Fact& fact : model_facts(model)) facts.push_back(std::move(fact));
  facts.emplace_back("--train-data", training.fingerprint());
  facts.emplace_back("--val-data", validation ? validation->fingerprint() : "none");
  require_same(ranks, facts);
}

template <class Backend>
uint64_t hash_parameters(const Model<Backend>& model) {
  constexpr int64_t kPiece = int64_t{1} << 20;
  std::vector<float> host(static_cast<size_t>(std::min(kPiece, model.table.total)));
  uint64_t hash = kHashStart;
  for (int64_t first = 0; first < model.table.total; first += kPiece) {
    const int64_t n = std::min(kPiece, model.table.total - first);
    model.backend().to_host(host.data(), model.params() + first, n);
    hash = hash_floats(host.data(), n, hash);
  }
  return hash;
}

// The ranks' weights are moved by the same arithmetic, and part where processors differ in it.
template <class Backend>
void require_same_weights(Communicator& ranks, const Model<Backend>& model, int64_t step) {
  if (ranks.size() == 1) return;
  require_same(ranks,
               {{detail::concatenate("the weights at step ", step), show_hash(hash_parameters(model))}});
}

}  // namespace xmod

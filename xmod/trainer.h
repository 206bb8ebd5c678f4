// The training loop, written once for every backend.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "dataloader.h"
#include "xmod/agreement.h"
#include "xmod/checkpoint.h"
#include "xmod/communicator.h"
#include "xmod/evaluate.h"
#include "xmod/init_from.h"
#include "xmod/metrics.h"
#include "xmod/model.h"
#include "xmod/optimizer.h"
#include "xmod/optimizer_shares.h"
#include "xmod/options.h"
#include "xmod/plan.h"
#include "xmod/rank_exchange.h"
#include "xmod/run_length.h"
#include "xmod/schedule.h"
#include "xmod/stopwatch.h"
#include "xmod/tokenizer.h"

namespace xmod {

template <class Backend>
class Trainer {
 public:
  // Reads the data's headers, makes the output directory ready, and only then allocates the model.
  // Of several ranks, each reads its own data; the first alone writes: to `log`, and to --out.
  Trainer(Backend& backend, Communicator& ranks, const Options& options, std::ostream& log)
      : ranks_(ranks),
        o_(resolve_grad_accum(options.train, options.model, ranks.size())),
        config_(options.model),
        log_(ranks.is_root() ? log : silence_),
        loader_(TokenShards(o_.train_data, config_.seq_len, config_.vocab_size, "--train-data"),
                o_.batch_size, static_cast<uint64_t>(o_.seed), ranks.rank(), ranks.size()),
        validation_(open_validation()),
        resume_from_((require_agreement(options), find_checkpoint())),
        shares_(optimizer_shares()),
        model_((announce(backend), backend), config_, o_.batch_size, Use::training, o_.recompute, masters()),
        optimizer_(backend, model_.table, {o_.optimizer, o_.weight_decay, o_.grad_clip}, shares_,
                   static_cast<size_t>(ranks.rank())),
        exchange_(ranks, model_, optimizer_),
        tokens_(static_cast<size_t>(o_.batch_size * config_.seq_len)),
        targets_(tokens_.size()) {}

  void run() {
    start();
    std::optional<MetricsLog> metrics;
    if (ranks_.is_root()) {
      metrics.emplace((std::filesystem::path(o_.out) / "metrics.csv").string(), state_.step,
                      has_experts(config_.arch));
    }
    while (state_.step < steps_) {
      Stopwatch watch;
      const double waited = ranks_.waited();
      MetricsRow row = train_step();
      row.tokens_per_second = static_cast<double>(step_tokens()) / watch.seconds();
      train_seconds_ += watch.seconds();
      waited_seconds_ += ranks_.waited() - waited;
      if (is_due(o_.eval_interval)) evaluate_into(row);
      if (metrics) metrics->append(row);
      print_progress(row);
      if (!is_due(o_.checkpoint_interval)) continue;
      if (metrics) metrics->sync();
      save();
    }
  }

 private:
  // --- before the first step ---

  std::unique_ptr<EvalLoader> open_validation() {
    if (o_.val_data.empty()) return nullptr;
    TokenShards shards(o_.val_data, config_.seq_len, config_.vocab_size, "--val-data");
    const int64_t most = o_.eval_batches == 0 ? shards.num_sequences() : o_.eval_batches * o_.batch_size;
    return std::make_unique<EvalLoader>(std::move(shards), o_.batch_size, most);
  }

  void require_agreement(const Options& options) {
    require_same_run(ranks_, options, loader_.shards(), validation_ ? &validation_->shards() : nullptr);
  }

  std::vector<OptimizerShare> optimizer_shares() const {
    if (o_.zero == 0 || ranks_.size() == 1) return {};
    const ParameterTable table = make_parameter_table(config_, make_layer_plan(config_));
    return share_optimizer(table, make_optimizer_table(table, o_.optimizer), ranks_.size());
  }

  // The fp32 weights of this rank; none: it has all.
  std::vector<NumberRange> masters() const {
    if (!detail::shares_masters<Backend>(run_size(o_, 0, ranks_.size()))) return {};
    return kept_masters(make_parameter_table(config_, make_layer_plan(config_)),
                        shares_[static_cast<size_t>(ranks_.rank())]);
  }

  // The newest whole checkpoint in --out, to resume from.
  std::optional<CheckpointEntry> find_checkpoint() {
    if (!ranks_.is_root()) return std::nullopt;
    create_directories(o_.out);
    lock_ = lock_directory(o_.out);
    recover_checkpoints(o_.out);
    const std::vector<CheckpointEntry> all = list_checkpoints(o_.out);
    if (all.empty()) return std::nullopt;
    if (!o_.resume) {
      fail("--out ", o_.out, " already holds ", all.back().directory,
           ": give --resume to go on from it, or another --out");
    }
    return all.back();
  }

  // Says what is going to be trained, on what, and in how much memory.
  void announce(const Backend& backend) {
    const Accounting a = account(config_);
    log_ << detail::title(config_) << ": " << a.layers << " layers (" << a.dense_layers << " dense, "
         << a.sparse_layers << " sparse), " << detail::rounded(static_cast<double>(a.params_total))
         << " parameters, " << detail::scientific(a.flops_per_token) << " FLOPs per token; "
         << backend.description() << "\n";
    log_ << "  " << abbreviated_pattern(config_, make_layer_plan(config_)) << "\n";
    announce_data("training", loader_.shards(), loader_.shards().num_sequences());
    if (validation_) announce_data("validation", validation_->shards(), validation_->num_sequences());
    log_ << (ranks_.size() > 1 ? "memory of each process\n" : "memory\n");
    print_memory(training_memory<Backend>(config_, run_size(o_, 0, ranks_.size())), log_);
    log_ << std::flush;
  }

  void announce_data(const char* name, const TokenShards& shards, int64_t used) {
    log_ << name << ": " << shards.num_tokens() << " tokens in " << shards.num_shards() << " shard"
         << (shards.num_shards() == 1 ? "" : "s") << ", " << used << " of " << shards.num_sequences()
         << " sequences used";
    if (shards.unused_tokens() > 0)
      log_ << ", " << shards.unused_tokens() << " tokens at shard ends fill none";
    log_ << "\n";
  }

  void start() {
    tokenizer_ = read_tokenizer();
    bool resumes = resume_from_.has_value();  // the first rank knows
    ranks_.broadcast(&resumes, sizeof resumes);
    if (resumes) {
      resume();
    } else {
      model_.initialise(static_cast<uint64_t>(o_.seed));
      if (!o_.init_from.empty()) load_first_weights(o_.init_from, model_, log_);
      state_.loader = loader_.state();
      if (o_.resume) log_ << "no checkpoint in " << o_.out << " yet: starting from step 0\n";
    }
    // What products read is not there yet where fp32 weights are shared out; and once the owners have sent
    // it, other weights on some ranks would show no more.
    require_same_weights(ranks_, model_, state_.step, model_.has_all_masters);
    if (!model_.has_all_masters) exchange_.spread_parameters();
    first_step_ = state_.step;
    steps_ = resolve_steps(config_, o_, step_tokens(), state_);
    warmup_ = resolve_warmup(o_, steps_);
    announce_steps();
  }

  // Only the first rank needs to see the files.
  void resume() {
    const std::string directory = resume_from_ ? resume_from_->directory : "";
    state_ = load_checkpoint(directory, model_, optimizer_, ranks_);
    if (resume_from_ && state_.step != resume_from_->step) {
      fail(directory, "/trainer.json: step ", state_.step, ", expected ", resume_from_->step,
           " by the directory's name; give the directory its name back");
    }
    loader_.restore(state_.loader);
    if (!ranks_.is_root()) return;
    keep_newest_checkpoints(o_.out, o_.keep_checkpoints);  // the run may have ended before it came to that
    log_ << "resuming from " << directory << "\n";
  }

  void announce_steps() {
    if (state_.step >= steps_) {
      log_ << "already at step " << state_.step << " of " << steps_ << "\n";
      return;
    }
    const int64_t steps = steps_ - state_.step;
    log_ << steps << " steps of " << step_tokens() << " tokens, "
         << detail::scientific(static_cast<double>(steps) * static_cast<double>(step_tokens()) *
                               training_flops_per_token(config_))
         << " training FLOPs\n"
         << std::flush;
  }

  // The file beside the first training shard, if there is one; samples then print as text. A model that has
  // learned other ids than those of the shards would be of no use.
  std::vector<std::pair<std::string, std::string>> read_tokenizer() {
    const std::string name = "tokenizer.bin";
    const std::string shard = loader_.shards().first_path();
    const std::string path = (std::filesystem::path(shard).parent_path() / name).string();
    const std::string learned = o_.init_from + "/" + name;
    const bool has_learned = !o_.init_from.empty() && path_exists(learned);
    if (!path_exists(path)) {
      if (!has_learned) return {};
      return {{name, read_file(learned)}};
    }
    load_tokenizer(path, config_.vocab_size);  // better refused now than when text is to be generated
    if (has_learned && read_file(learned) != read_file(path)) {
      fail(path, ": another tokenizer than ", learned,
           ", which the weights of --init-from were trained with; ", "make the shards with that one");
    }
    return {{name, read_file(path)}};
  }

  // --- one step ---

  // Of all ranks.
  int64_t step_tokens() const { return o_.batch_size * o_.grad_accum * config_.seq_len * ranks_.size(); }
  int64_t micro_batches() const { return o_.grad_accum * ranks_.size(); }

  MetricsRow train_step() {
    const double factor = schedule_factor(o_.lr_schedule, state_.step, steps_, warmup_, o_.final_lr_fraction);
    const double adamw_lr = (o_.adamw_lr < 0 ? o_.lr : o_.adamw_lr) * factor;
    const double lr = o_.optimizer == Optimizer::muon ? o_.lr * factor : adamw_lr;
    const int64_t step = state_.step + 1;
    const double loss = accumulate_gradients();
    require_finite("loss", loss, step, "the update");
    const double grad_norm = gradient_norm();
    require_finite("gradient norm", grad_norm, step, "the update");
    optimizer_.update(model_.params(), model_.grads(), grad_norm, step, lr, adamw_lr);
    exchange_.spread_parameters();
    if (ranks_.size() > 1)
      model_.sum_over_ranks(ranks_.size(), [&](float* sums, int64_t n) { ranks_.sum(sums, n); });
    const ExpertLoads loads = model_.close_step(step, micro_batches());
    state_.step = step;
    state_.tokens += step_tokens();
    state_.loader = loader_.state();
    return {.step = step,
            .tokens = state_.tokens,
            .flops = static_cast<double>(state_.tokens) * training_flops_per_token(config_),
            .train_loss = loss,
            .val_loss_topk = {},
            .val_loss_threshold = {},
            .lr = lr,
            .grad_norm = grad_norm,
            .tokens_per_second = 0,
            .expert_loads = loads};
  }

  // Leaves the gradient of the step's mean loss; returns the loss.
  double accumulate_gradients() {
    model_.zero_gradients();
    const double share = 1.0 / static_cast<double>(micro_batches());
    double loss = 0;
    for (int64_t micro = 0; micro < o_.grad_accum; micro++) {
      loader_.next_batch(tokens_.data(), targets_.data());
      if (micro + 1 == o_.grad_accum) exchange_.begin_gradients();
      loss += share * model_.forward_backward(tokens_.data(), targets_.data(), o_.batch_size, config_.seq_len,
                                              static_cast<float>(share));
    }
    exchange_.finish_gradients();
    ranks_.sum(&loss, 1);
    return loss;
  }

  double gradient_norm() {
    if (!optimizer_.is_shared) return optimizer_.gradient_norm(model_.grads());
    double sum = optimizer_.shared_sum_of_squares(model_.grads());
    ranks_.sum(&sum, 1);
    return std::sqrt(sum);
  }

  // Stops before the weights of a diverged step get anywhere: into memory (`before` the update), or into a
  // checkpoint that would push out a good one.
  void require_finite(const char* what, double value, int64_t step, const char* before) {
    if (std::isfinite(value)) return;
    const std::vector<CheckpointEntry> all = list_checkpoints(o_.out);
    fail("step ", step, ": the ", what, " is ", std::isnan(value) ? "NaN" : "infinite", ", stopped before ",
         before, "; last checkpoint: ", all.empty() ? "none" : all.back().directory,
         "; try a lower --lr or a longer --warmup-steps");
  }

  // --- between steps ---

  bool is_due(int64_t interval) const {
    return state_.step == steps_ || (interval > 0 && state_.step % interval == 0);
  }

  void evaluate_into(MetricsRow& row) {
    if (!validation_) return;
    const ValidationLoss loss = evaluate(model_, *validation_, o_.batch_size, ranks_);
    require_finite("validation loss", loss.topk + loss.threshold, row.step, "saving");
    row.val_loss_topk = loss.topk;
    row.val_loss_threshold = loss.threshold;
  }

  void save() {
    require_same_weights(ranks_, model_, state_.step);
    save_checkpoint(o_.out, model_, optimizer_, state_, tokenizer_, ranks_);
    if (!ranks_.is_root()) return;
    keep_newest_checkpoints(o_.out, o_.keep_checkpoints);
  }

  // About fifty lines a run, and one for every evaluation.
  void print_progress(const MetricsRow& row) {
    window_steps_++;
    const bool line_due = row.val_loss_topk || state_.step == steps_ || state_.step == first_step_ + 1 ||
                          state_.step % std::max<int64_t>(1, steps_ / 50) == 0;
    if (!line_due) return;
    const double rate = static_cast<double>(window_steps_ * step_tokens()) / train_seconds_;
    const double waiting = waited_seconds_ / train_seconds_;
    const double wall_per_step = wall_.seconds() / static_cast<double>(state_.step - first_step_);
    window_steps_ = 0;
    train_seconds_ = waited_seconds_ = 0;
    char text[256];
    std::snprintf(
        text, sizeof text,
        "step %*lld/%lld | loss %.4f | %slr %.2e | norm %.3f | %.1fk tok/s | %.1f GFLOP/s | %s%s left",
        static_cast<int>(std::to_string(steps_).size()), static_cast<long long>(state_.step),
        static_cast<long long>(steps_), row.train_loss, show_validation(row).c_str(), row.lr, row.grad_norm,
        rate / 1e3, rate * training_flops_per_token(config_) / 1e9, show_waiting(waiting).c_str(),
        show_duration(wall_per_step * static_cast<double>(steps_ - state_.step)).c_str());
    log_ << text << "\n" << std::flush;
  }

  // The share of the time in which this rank did nothing but wait for the others.
  std::string show_waiting(double share) const {
    if (ranks_.size() == 1) return "";
    return std::to_string(std::llround(100 * share)) + "% waiting | ";
  }

  std::string show_validation(const MetricsRow& row) const {
    if (!row.val_loss_topk) return "";
    char text[64];
    if (model_.sparse_layers == 0) {
      std::snprintf(text, sizeof text, "val %.4f | ", *row.val_loss_topk);
    } else {
      std::snprintf(text, sizeof text, "val %.4f top-k, %.4f threshold | ", *row.val_loss_topk,
                    *row.val_loss_threshold);
    }
    return text;
  }

  Communicator& ranks_;
  const TrainOptions o_;
  const ModelConfig config_;
  std::ostream silence_{nullptr};
  std::ostream& log_;
  TrainLoader loader_;
  std::unique_ptr<EvalLoader> validation_;
  FileDescriptor lock_;  // of the output directory
  std::optional<CheckpointEntry> resume_from_;
  const std::vector<OptimizerShare> shares_;  // of every rank; none where nothing is shared out
  Model<Backend> model_;
  OptimizerState<Backend> optimizer_;
  RankExchange<Backend> exchange_;
  std::vector<int32_t> tokens_, targets_;                       // (B, T) one micro-batch
  std::vector<std::pair<std::string, std::string>> tokenizer_;  // (name, bytes) to travel with checkpoints
  TrainerState state_;
  int64_t steps_ = 0, warmup_ = 0;
  int64_t first_step_ = 0;                         // of this process
  int64_t window_steps_ = 0;                       // since the last progress line ...
  double train_seconds_ = 0, waited_seconds_ = 0;  // ... and the time in them, and what of it went by waiting
  Stopwatch wall_;
};

}  // namespace xmod

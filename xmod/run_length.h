// How long a run is: optimizer steps, and the micro-batches of each.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "xmod/checkpoint.h"
#include "xmod/error.h"
#include "xmod/options.h"
#include "xmod_common.h"

namespace xmod {

// Optimizer steps of a run: given, or as many as the compute budget pays for (to the nearest, at least one).
// What a resumed run has already trained on, perhaps in steps of another size, is taken from the budget.
inline int64_t resolve_steps(const ModelConfig& model, const TrainOptions& o, int64_t step_tokens,
                             const TrainerState& done = {}) {
  if (o.steps > 0) return o.steps;
  const double tokens = o.compute / training_flops_per_token(model) - static_cast<double>(done.tokens);
  const double steps = tokens / static_cast<double>(step_tokens) + static_cast<double>(done.step);
  if (steps > 1e12)
    usage_error("--compute ", o.compute, " is more than 1e12 steps of this model; choose less");
  return std::max<int64_t>({1, done.step, std::llround(steps)});
}

// --total-batch-tokens says how many micro-batches a step has, on so many ranks. Of TrainOptions or
// PlanOptions.
template <class Part>
Part resolve_grad_accum(Part o, const ModelConfig& model, int64_t ranks) {
  if (o.total_batch_tokens == 0) return o;
  const int64_t once = o.batch_size * model.seq_len * ranks;  // tokens of a micro-batch on every rank
  o.grad_accum = o.total_batch_tokens / once;
  if (o.grad_accum * once != o.total_batch_tokens) {
    usage_error("--total-batch-tokens ", o.total_batch_tokens, ": expected a multiple of ", once, " (", ranks,
                ranks == 1 ? " process x " : " processes x ", o.batch_size, " sequences x ", model.seq_len,
                " tokens); the next ones are ", std::max<int64_t>(1, o.grad_accum) * once, " and ",
                (std::max<int64_t>(1, o.grad_accum) + 1) * once);
  }
  return o;
}

inline int64_t resolve_warmup(const TrainOptions& o, int64_t steps) {
  return o.warmup_steps >= 0 ? o.warmup_steps : std::min<int64_t>(500, steps / 20);
}

}  // namespace xmod

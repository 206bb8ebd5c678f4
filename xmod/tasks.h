// Scores on tasks, as lm-evaluation-harness computes them.
//
// The model answers an item with the choice of the largest log-likelihood given the context: the sum over the
// choice's tokens. `acc` is the share of right answers; `acc_norm` the same with each sum divided by the
// bytes of the choice. LAMBADA has one choice, the last word of a passage, which is right if each of its
// tokens is the most probable one (greedy decoding would write it); its perplexity is exp(-mean
// log-likelihood of the words).
//
// Sparse layers use threshold routing. It is causal, so what stands behind a token changes nothing, and
// sequences of different lengths share a batch, filled up at their ends.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "xmod/model.h"
#include "xmod/task_file.h"

namespace xmod {

// ---------------------------------------------------------------------------------------------------
// Windows

// What one run of the model sees of context + choice: `length` inputs from the token `first` on. The target
// of each is the token behind it, and the last `scored` targets belong to the choice.
struct Window {
  size_t item, choice;
  int64_t first, length, scored;
};

// One window of at most T inputs, with as much of the context as fits: a long one loses its beginning. A
// choice longer than T is scored in several windows.
inline std::vector<Window> windows_of(size_t item, size_t choice, int64_t context_size, int64_t choice_size,
                                      int64_t T) {
  std::vector<Window> windows;
  const int64_t size = context_size + choice_size;
  for (int64_t begin = context_size; begin < size; begin += T) {
    const int64_t end = std::min(begin + T, size);
    const int64_t first = std::max<int64_t>(0, end - 1 - T);
    windows.push_back({item, choice, first, end - 1 - first, end - begin});
  }
  return windows;
}

// Of the first `items` items. Longest first: batches hold windows of similar length, and time left is not
// underestimated.
inline std::vector<Window> windows_of(const TaskFile& file, size_t items, int64_t T) {
  std::vector<Window> windows;
  for (size_t i = 0; i < items; i++) {
    const TaskItem& item = file.items[i];
    for (size_t c = 0; c < item.choices.size(); c++) {
      const auto more = windows_of(i, c, static_cast<int64_t>(item.context.size()),
                                   static_cast<int64_t>(item.choices[c].tokens.size()), T);
      windows.insert(windows.end(), more.begin(), more.end());
    }
  }
  std::stable_sort(windows.begin(), windows.end(),
                   [](const Window& a, const Window& b) { return a.length > b.length; });
  return windows;
}

// Items whose context does not fit into T tokens with each of the choices.
inline int64_t count_cut(const TaskFile& file, size_t items, int64_t T) {
  return std::count_if(
      file.items.begin(), file.items.begin() + static_cast<int64_t>(items), [&](const TaskItem& i) {
        return std::any_of(i.choices.begin(), i.choices.end(), [&](const TaskChoice& choice) {
          return static_cast<int64_t>(i.context.size() + choice.tokens.size()) - 1 > T;
        });
      });
}

inline int32_t token_at(const TaskItem& item, size_t choice, int64_t place) {
  const int64_t context_size = static_cast<int64_t>(item.context.size());
  return place < context_size ? item.context[static_cast<size_t>(place)]
                              : item.choices[choice].tokens[static_cast<size_t>(place - context_size)];
}

// ---------------------------------------------------------------------------------------------------
// Log-likelihoods

struct ChoiceScore {
  double loglikelihood = 0;
  bool greedy = true;  // each token is the most probable one; of lambada only
};

using ItemScore = std::vector<ChoiceScore>;  // one of each choice

// Is told how many of all tokens are done.
using TaskProgress = std::function<void(int64_t done, int64_t all)>;

template <class Backend>
class TaskScorer {
 public:
  explicit TaskScorer(Model<Backend>& model) : model_(model), V_(model.config.vocab_size) {}

  // Scores the first `items` items of a file.
  std::vector<ItemScore> score(const TaskFile& file, size_t items, const TaskProgress& progress) {
    std::vector<ItemScore> scores;
    for (size_t i = 0; i < items; i++) scores.emplace_back(file.items[i].choices.size());
    const std::vector<Window> windows = windows_of(file, items, model_.config.seq_len);
    int64_t all = 0, done = 0;
    for (const Window& window : windows) all += window.length;
    const size_t batch = static_cast<size_t>(model_.max_batch());
    for (size_t next = 0; next < windows.size(); next += batch) {
      const std::vector<Window> part(
          windows.begin() + static_cast<int64_t>(next),
          windows.begin() + static_cast<int64_t>(std::min(next + batch, windows.size())));
      score_batch(file, part, scores);
      for (const Window& window : part) done += window.length;
      progress(done, all);
    }
    return scores;
  }

 private:
  // Adds what the windows say to the scores of their choices.
  void score_batch(const TaskFile& file, const std::vector<Window>& windows, std::vector<ItemScore>& scores) {
    run_model(file, windows);
    for (size_t b = 0; b < windows.size(); b++) {
      const Window& w = windows[b];
      ChoiceScore& score = scores[w.item][w.choice];
      const int64_t end = static_cast<int64_t>(b) * T_ + w.length;
      for (int64_t row = end - w.scored; row < end; row++)
        score.loglikelihood -= losses_[static_cast<size_t>(row)];
      if (!std::isfinite(score.loglikelihood)) {
        fail("the model's logits are not finite numbers; its training diverged: take an earlier checkpoint");
      }
      if (file.task == Task::lambada) score.greedy = score.greedy && are_greedy(end - w.scored, end);
    }
  }

  // Leaves T_, targets_ (B, T_) and losses_ (B, T_) of the batch, and its final activations in the model.
  void run_model(const TaskFile& file, const std::vector<Window>& windows) {
    const int64_t B = static_cast<int64_t>(windows.size());
    T_ = windows.front().length;
    tokens_.assign(static_cast<size_t>(B * T_), 0);
    targets_.assign(tokens_.size(), 0);
    for (size_t b = 0; b < windows.size(); b++) {
      const Window& w = windows[b];
      for (int64_t t = 0; t < w.length; t++) {
        const size_t row = b * static_cast<size_t>(T_) + static_cast<size_t>(t);
        tokens_[row] = token_at(file.items[w.item], w.choice, w.first + t);
        targets_[row] = token_at(file.items[w.item], w.choice, w.first + t + 1);
      }
    }
    model_.loss(tokens_.data(), targets_.data(), B, T_, Routing::threshold);
    losses_.resize(tokens_.size());
    model_.backend().to_host(losses_.data(), model_.activations().losses, B * T_);
  }

  // Whether each target of the rows begin .. end is the most probable token; of equal ones the first.
  bool are_greedy(int64_t begin, int64_t end) {
    const auto& act = model_.activations();
    const int64_t d = model_.config.dim;
    for (int64_t row = begin; row < end; row++) {
      model_.backend().matmul_forward(act.logits, act.final_norm + row * d,
                                      model_.params() + model_.table.lm_head, 1, d, V_);
      logits_.resize(static_cast<size_t>(V_));
      model_.backend().to_host(logits_.data(), act.logits, V_);
      const auto best = std::max_element(logits_.begin(), logits_.end()) - logits_.begin();
      if (best != targets_[static_cast<size_t>(row)]) return false;
    }
    return true;
  }

  Model<Backend>& model_;
  const int64_t V_;
  int64_t T_ = 0;                                 // of the running batch: its longest window
  std::vector<int32_t> tokens_, targets_;         // (B, T_)
  std::vector<float> losses_;                     // (B, T_)
  std::vector<typename Backend::floatX> logits_;  // (V)
};

// ---------------------------------------------------------------------------------------------------
// Accuracies

// A mean over items and its standard error, which a single item does not have (NaN).
struct Estimate {
  double value, error;
};

inline Estimate mean_of(const std::vector<double>& values) {
  const double n = static_cast<double>(values.size());
  double sum = 0, squares = 0;
  for (double value : values) sum += value;
  for (double value : values) squares += (value - sum / n) * (value - sum / n);
  return {sum / n, std::sqrt(squares / (n - 1) / n)};
}

struct TaskScores {
  std::vector<ItemScore> items;
  int64_t cut = 0;  // items whose context was cut
  Estimate acc{};
  std::optional<Estimate> acc_norm, perplexity;
};

// The choice of the largest log-likelihood, divided by its length if normalised; of equal ones the first.
inline size_t best_choice(const TaskItem& item, const ItemScore& score, bool normalised) {
  auto value = [&](size_t c) {
    return normalised ? score[c].loglikelihood / static_cast<double>(item.choices[c].length)
                      : score[c].loglikelihood;
  };
  size_t best = 0;
  for (size_t c = 1; c < score.size(); c++) {
    if (value(c) > value(best)) best = c;
  }
  return best;
}

// 1 where the answer is right, else 0.
inline std::vector<double> right_answers(const TaskFile& file, const std::vector<ItemScore>& scores,
                                         bool normalised) {
  std::vector<double> right;
  for (size_t i = 0; i < scores.size(); i++) {
    const TaskItem& item = file.items[i];
    const bool is_right = file.task == Task::lambada
                              ? scores[i][0].greedy
                              : best_choice(item, scores[i], normalised) == static_cast<size_t>(item.gold);
    right.push_back(is_right ? 1 : 0);
  }
  return right;
}

// exp(-mean); its error to first order: |d exp(-m) / dm| times that of the mean.
inline Estimate perplexity(const std::vector<ItemScore>& scores) {
  std::vector<double> loglikelihoods;
  for (const ItemScore& score : scores) loglikelihoods.push_back(score[0].loglikelihood);
  const Estimate mean = mean_of(loglikelihoods);
  return {std::exp(-mean.value), std::exp(-mean.value) * mean.error};
}

// max_items: the first so many; 0: all.
template <class Backend>
TaskScores evaluate_task(Model<Backend>& model, const TaskFile& file, int64_t max_items,
                         const TaskProgress& progress) {
  const size_t items =
      max_items == 0 ? file.items.size() : std::min(file.items.size(), static_cast<size_t>(max_items));
  TaskScores result;
  result.items = TaskScorer<Backend>(model).score(file, items, progress);
  result.cut = count_cut(file, items, model.config.seq_len);
  result.acc = mean_of(right_answers(file, result.items, false));
  if (traits(file.task).normalised) result.acc_norm = mean_of(right_answers(file, result.items, true));
  if (file.task == Task::lambada) result.perplexity = perplexity(result.items);
  return result;
}

}  // namespace xmod

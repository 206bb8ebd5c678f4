// Text from a checkpoint, token by token. Sparse layers use threshold routing: whether a token passes through
// a layer depends on nothing behind it, so what was written never changes and its keys and values are kept.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "xmod/model.h"
#include "xmod/options.h"
#include "xmod/rng.h"
#include "xmod/tokenizer.h"

namespace xmod {

struct Sampling {
  double temperature = 0.8;  // 0: always the most probable token
  int64_t top_k = 0;         // only the k most probable ones; 0: all
  double top_p = 1;          // only the most probable ones that together reach p
};

// One token id by logits (V); u in (0, 1) decides.
inline int32_t sample_token(const std::vector<float>& logits, const Sampling& sampling, double u) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return logits[a] > logits[b]; });
  if (sampling.temperature == 0) return order[0];
  if (sampling.top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(sampling.top_k)));

  std::vector<double> weight;  // unnormalised probabilities, largest first
  for (int32_t id : order) {
    weight.push_back(std::exp((static_cast<double>(logits[id]) - logits[order[0]]) / sampling.temperature));
  }
  const double total = std::accumulate(weight.begin(), weight.end(), 0.0);
  size_t kept = 0;
  double kept_total = 0;
  while (kept < weight.size() && (kept == 0 || kept_total < sampling.top_p * total))
    kept_total += weight[kept++];

  double rest = u * kept_total;
  for (size_t i = 0; i < kept; i++) {
    rest -= weight[i];
    if (rest < 0) return order[i];
  }
  return order[kept - 1];
}

// Several texts that grow side by side, each as it would alone.
template <class Backend>
class Generation {
 public:
  // texts: token ids, at least one each. end: the id that closes a text, -1 for none. Without the cache,
  // every token takes a run over all before it; the texts are the same.
  Generation(Model<Backend>& model, std::vector<std::vector<int32_t>> texts, const Sampling& sampling,
             uint64_t seed, int32_t end, bool use_cache = true)
      : model_(model),
        texts_(std::move(texts)),
        sampling_(sampling),
        seed_(seed),
        end_(end),
        use_cache_(use_cache),
        cache_(model.make_cache(static_cast<int64_t>(texts_.size()))),
        begin_(texts_.size()),
        fed_(texts_.size()),
        open_(texts_.size(), true),
        logits_(texts_.size() * static_cast<size_t>(model.config.vocab_size)) {}

  // Lets every open text grow by up to `count` tokens, calling emit(text, id) for each.
  template <class Emit>
  void run(int64_t count, Emit emit) {
    for (int64_t i = 0; i < count && std::find(open_.begin(), open_.end(), true) != open_.end(); i++) {
      feed();
      for (size_t text = 0; text < texts_.size(); text++) {
        if (open_[text]) grow(text, i, emit);
      }
    }
  }

  bool is_open(size_t text) const { return open_[text]; }
  int64_t cache_bytes() const { return cache_.bytes(); }
  int64_t cached_tokens() const {
    return std::accumulate(cache_.length.begin(), cache_.length.end(), int64_t{0});
  }

 private:
  // Brings the tokens that the model has not seen yet into the cache.
  void feed() {
    std::vector<int32_t> tokens;
    std::vector<int64_t> offsets = {0};
    for (size_t text = 0; text < texts_.size(); text++) {
      if (open_[text]) {
        make_context(text);
        if (!use_cache_) forget(text);
        tokens.insert(tokens.end(), texts_[text].begin() + static_cast<int64_t>(fed_[text]),
                      texts_[text].end());
        fed_[text] = texts_[text].size();
      }
      offsets.push_back(static_cast<int64_t>(tokens.size()));
    }
    model_.extend(logits_.data(), cache_, tokens.data(), offsets);
  }

  // Where the context is full, a text goes on from the newest half of it. A longer prompt begins with as much
  // of its end as fits.
  void make_context(size_t text) {
    const int64_t T = model_.config.seq_len, size = static_cast<int64_t>(texts_[text].size());
    const int64_t more = size - static_cast<int64_t>(fed_[text]);
    if (cache_.length[text] + more <= T) return;
    const int64_t kept = fed_[text] == 0 ? T : std::max<int64_t>(1, T / 2);
    begin_[text] = static_cast<size_t>(size - kept);
    forget(text);
  }

  void forget(size_t text) {
    cache_.forget(static_cast<int64_t>(text));
    fed_[text] = begin_[text];
  }

  template <class Emit>
  void grow(size_t text, int64_t i, Emit emit) {
    const auto V = static_cast<size_t>(model_.config.vocab_size);
    const std::vector<float> logits(logits_.begin() + static_cast<int64_t>(text * V),
                                    logits_.begin() + static_cast<int64_t>((text + 1) * V));
    if (!std::all_of(logits.begin(), logits.end(), [](float logit) { return std::isfinite(logit); })) {
      fail("the model's logits are not finite numbers; its training diverged: take an earlier checkpoint");
    }
    const double u = to_unit_interval(philox(seed_, stream_of("generate"), static_cast<uint64_t>(i))[0]);
    const int32_t id = sample_token(logits, sampling_, u);
    if (id == end_) {
      open_[text] = false;
      return;
    }
    texts_[text].push_back(id);
    emit(text, id);
  }

  Model<Backend>& model_;
  std::vector<std::vector<int32_t>> texts_;
  const Sampling sampling_;
  const uint64_t seed_;
  const int32_t end_;
  const bool use_cache_;
  KeyValueCache<Backend> cache_;
  std::vector<size_t> begin_;  // of each text: where its context begins ...
  std::vector<size_t> fed_;    // ... and ends, as far as the model has seen it
  std::vector<bool> open_;     // texts that have not ended
  std::vector<float> logits_;  // (texts, V) behind the last token of each
};

}  // namespace xmod

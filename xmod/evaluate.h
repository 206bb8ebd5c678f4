// Validation loss under both kinds of routing.
#pragma once

#include <cstdint>
#include <vector>

#include "dataloader.h"
#include "xmod/model.h"

namespace xmod {

struct ValidationLoss {
  double topk;
  double threshold;  // equal to topk in a dense model
};

// Mean loss over all targets of the loader's sequences. Every batch counts by its size, the last included.
template <class Backend>
ValidationLoss evaluate(Model<Backend>& model, EvalLoader& loader, int64_t batch_size) {
  const int64_t T = loader.shards().sequence_length();
  std::vector<int32_t> tokens(static_cast<size_t>(batch_size * T)), targets(tokens.size());
  double topk = 0, threshold = 0;
  loader.reset();
  while (const int64_t B = loader.next_batch(tokens.data(), targets.data())) {
    const double share = static_cast<double>(B) / static_cast<double>(loader.num_sequences());
    topk += share * model.loss(tokens.data(), targets.data(), B, T, Routing::topk);
    if (model.sparse_layers == 0) continue;
    threshold += share * model.loss(tokens.data(), targets.data(), B, T, Routing::threshold);
  }
  return {topk, model.sparse_layers == 0 ? topk : threshold};
}

}  // namespace xmod

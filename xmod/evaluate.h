// Validation loss under both kinds of routing.
#pragma once

#include <cstdint>
#include <vector>

#include "dataloader.h"
#include "xmod/communicator.h"
#include "xmod/model.h"

namespace xmod {

struct ValidationLoss {
  double topk;
  double threshold;  // equal to topk in a dense model
};

// Mean loss over all targets of the loader's sequences. Every batch counts by its size, the last included.
// Ranks take the batches in turn; the losses are then added in the order of the batches, as one rank does it.
template <class Backend>
ValidationLoss evaluate(Model<Backend>& model, EvalLoader& loader, int64_t batch_size, Communicator& ranks) {
  const int64_t T = loader.shards().sequence_length();
  std::vector<int32_t> tokens(static_cast<size_t>(batch_size * T)), targets(tokens.size());
  const int64_t batches = loader.num_batches();
  std::vector<double> shares(static_cast<size_t>(2 * batches));  // of each batch in the two losses
  loader.reset();
  for (int64_t i = 0; i < batches; i++) {
    if (i % ranks.size() != ranks.rank()) {
      loader.skip_batch();
      continue;
    }
    const int64_t B = loader.next_batch(tokens.data(), targets.data());
    const double share = static_cast<double>(B) / static_cast<double>(loader.num_sequences());
    double* losses = shares.data() + 2 * i;
    losses[0] = share * model.loss(tokens.data(), targets.data(), B, T, Routing::topk);
    if (model.sparse_layers == 0) continue;
    losses[1] = share * model.loss(tokens.data(), targets.data(), B, T, Routing::threshold);
  }
  ranks.sum(shares.data(), 2 * batches);
  double topk = 0, threshold = 0;
  for (int64_t i = 0; i < batches; i++) {
    topk += shares[static_cast<size_t>(2 * i)];
    threshold += shares[static_cast<size_t>(2 * i + 1)];
  }
  return {topk, model.sparse_layers == 0 ? topk : threshold};
}

template <class Backend>
ValidationLoss evaluate(Model<Backend>& model, EvalLoader& loader, int64_t batch_size) {
  Communicator alone;
  return evaluate(model, loader, batch_size, alone);
}

}  // namespace xmod

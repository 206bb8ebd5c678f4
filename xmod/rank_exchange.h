// The gradients' way to the ranks that need their sums, and the parameters' way back, for a model on the
// host; xmod/device_exchange.h is for one on a device.
#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>

#include "xmod/device_exchange.h"
#include "xmod/gradient_exchange.h"
#include "xmod/model.h"
#include "xmod/optimizer.h"

namespace xmod {

template <class Backend>
class HostExchange {
 public:
  HostExchange(Communicator& ranks, Model<Backend>& model, const OptimizerState<Backend>& optimizer)
      : model_(model) {
    if (ranks.size() == 1) return;
    using Goal = GradientExchange::Goal;
    gradients_.emplace(ranks, exchanged_pieces(model.table, optimizer, ranks.size()),
                       optimizer.is_shared ? Goal::sum_for_owner : Goal::sum_for_all);
    if (optimizer.is_shared) parameters_.emplace(ranks, gradients_->pieces(), Goal::copy_to_all);
  }

  // The next batch is the step's last: what its backward pass is through with, goes.
  void begin_gradients() {
    if (!gradients_) return;
    gradients_->begin(model_.grads());
    model_.on_gradients = [this](int64_t offset) { gradients_->ready(offset); };
  }
  void finish_gradients() {
    if (!gradients_) return;
    model_.on_gradients = nullptr;
    gradients_->finish();
  }

  // From the ranks that have updated them to the others.
  void spread_parameters() {
    if (!parameters_) return;
    parameters_->begin(model_.params());
    parameters_->finish();
  }

 private:
  Model<Backend>& model_;
  std::optional<GradientExchange> gradients_, parameters_;  // none: a single rank, or nothing to spread
};

template <class Backend>
using RankExchange =
    std::conditional_t<Backend::kProcessor == Processor::cpu, HostExchange<Backend>, DeviceExchange<Backend>>;

}  // namespace xmod

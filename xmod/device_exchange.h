// As xmod/rank_exchange.h, for a model on a device. Where MPI reads device memory, messages begin and end
// there. Else they go through a copy of the gradients in memory of the host that the device can reach by
// itself: what is final is copied there, the sums are copied back, both beside the backward pass.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

#include "xmod/gradient_exchange.h"
#include "xmod/model.h"
#include "xmod/optimizer.h"

namespace xmod {

template <class Backend>
class DeviceExchange {
 public:
  DeviceExchange(Communicator& ranks, Model<Backend>& model, const OptimizerState<Backend>& optimizer)
      : ranks_(ranks), model_(model), direct_(ranks.reads_device_memory()) {
    if (ranks.size() == 1) return;
    using Goal = GradientExchange::Goal;
    side_.emplace();
    gradients_.emplace(ranks, exchanged_pieces(model.table, optimizer, ranks.size()),
                       optimizer.is_shared ? Goal::sum_for_owner : Goal::sum_for_all,
                       direct_ ? device_adder() : GradientExchange::Adder{});
    if (optimizer.is_shared) parameters_.emplace(ranks, gradients_->pieces(), Goal::copy_to_all);
    if (!direct_) copy_ = side_->allocate_host(model.table.total);
    // Always set, so that every batch runs the same way: as a graph, where the backend has them.
    model.on_gradients = [this](int64_t offset) {
      if (open_) ready(offset);
    };
  }

  void begin_gradients() {
    if (!gradients_) return;
    open_ = true;
    copied_from_ = model_.table.total;
    gradients_->on_piece = [this](const RankPiece& piece) { put_back(model_.grads(), piece); };
    gradients_->begin(direct_ ? model_.grads() : copy_);
  }

  void finish_gradients() {
    if (!gradients_) return;
    ready(0);
    open_ = false;
    side_->wait();
    gradients_->finish();
    side_->wait();
    copies_.clear();
  }

  void spread_parameters() {
    if (!parameters_) return;
    float* params = model_.params();
    model_.backend().wait();
    if (!direct_) {
      for (const RankPiece& piece : parameters_->pieces()) {
        if (piece.owner == ranks_.rank())
          side_->to_host(copy_ + piece.offset, params + piece.offset, piece.size);
      }
      side_->wait();
    }
    parameters_->on_piece = [this, params](const RankPiece& piece) { put_back(params, piece); };
    parameters_->begin(direct_ ? params : copy_);
    parameters_->finish();
    side_->wait();
  }

 private:
  using SideStream = typename Backend::SideStream;

  // Numbers from `offset` on, on their way to the host.
  struct Copy {
    int64_t offset;
    typename SideStream::Mark arrived;
  };

  // The device is through with the gradients from `offset` on.
  void ready(int64_t offset) {
    if (direct_) return gradients_->ready(offset);
    if (offset < copied_from_) {
      side_->to_host(copy_ + offset, model_.grads() + offset, copied_from_ - offset);
      copies_.push_back({offset, side_->mark()});
      copied_from_ = offset;
    }
    while (copies_.size() > 1 && side_->passed(copies_[1].arrived)) copies_.pop_front();
    if (!copies_.empty() && side_->passed(copies_[0].arrived)) gradients_->ready(copies_[0].offset);
  }

  void put_back(float* device, const RankPiece& piece) {
    if (!direct_) side_->to_device(device + piece.offset, copy_ + piece.offset, piece.size);
  }

  GradientExchange::Adder device_adder() {
    return {[this](int64_t n) { return side_->allocate_device(n); },
            [this](float* own, const float* others, int64_t stride, int64_t n) {
              side_->add_in_rank_order(own, others, stride, ranks_.rank(), ranks_.size(), n);
              side_->wait();  // before a message takes the sum
            }};
  }

  Communicator& ranks_;
  Model<Backend>& model_;
  const bool direct_;
  std::optional<SideStream> side_;
  std::optional<GradientExchange> gradients_, parameters_;
  float* copy_ = nullptr;  // (table.total) on the host
  bool open_ = false;      // the step's last batch runs
  int64_t copied_from_ = 0;
  std::deque<Copy> copies_;  // the earliest has perhaps arrived, those behind it have not
};

}  // namespace xmod

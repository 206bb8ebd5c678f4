// As xmod/rank_exchange.h, for a model on a device. Where MPI reads device memory, messages begin and end
// there. Else they go through a copy of the gradients in memory of the host that the device can reach by
// itself: what is final is copied there, the sums are copied back, both beside the backward pass.
//
// Where ranks share out the fp32 weights, those of matrix products travel in the format of the products.
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
    if (optimizer.is_shared) {
      auto pieces_of = [&](Read read) { return owned_pieces(model.table, optimizer.shares, read); };
      parameters_.emplace(ranks, model.has_all_masters ? gradients_->pieces() : pieces_of(Read::in_fp32),
                          Goal::copy_to_all);
      if (!model.has_all_masters)
        product_weights_.emplace(ranks, pieces_of(Read::by_products_alone), Goal::copy_to_all);
    }
    if (!direct_ || !model.has_all_masters) copy_ = side_->allocate_host(model.table.total);
    // Always set, so that every batch runs the same way: as a graph, where the backend has them.
    model.on_gradients = [this](int64_t offset) {
      if (open_) ready(offset);
    };
  }

  void begin_gradients() {
    if (!gradients_) return;
    open_ = true;
    copied_from_ = model_.table.total;
    gradients_->on_piece = [this](const RankPiece& piece) {
      if (!direct_) put_back(model_.grads(), piece);
    };
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
    // Not every MPI that reads a device's memory reads memory with holes.
    spread(*parameters_, model_.params(), direct_ && model_.has_all_masters);
    if constexpr (Backend::kMixed) {
      if (!product_weights_) return;
      model_.use_parameters();
      spread(*product_weights_, model_.product_weights(), direct_);
    }
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

  // numbers: on the device, in the layout of the parameters.
  template <class Number>
  void spread(GradientExchange& exchange, Number* numbers, bool direct) {
    model_.backend().wait();
    if (direct) {
      exchange.begin(numbers);
      return exchange.finish();
    }
    for (const RankPiece& piece : exchange.pieces()) {
      if (piece.owner == ranks_.rank())
        side_->to_host(copy_of(numbers) + piece.offset, numbers + piece.offset, piece.size);
    }
    side_->wait();
    exchange.on_piece = [this, numbers](const RankPiece& piece) { put_back(numbers, piece); };
    exchange.begin(copy_of(numbers));
    exchange.finish();
    side_->wait();
  }

  template <class Number>
  Number* copy_of(const Number* /*device*/) const {
    static_assert(sizeof(Number) <= sizeof(float));
    return reinterpret_cast<Number*>(copy_);
  }

  template <class Number>
  void put_back(Number* device, const RankPiece& piece) {
    side_->to_device(device + piece.offset, copy_of(device) + piece.offset, piece.size);
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
  std::optional<GradientExchange> gradients_, parameters_, product_weights_;
  float* copy_ = nullptr;  // (table.total) on the host: of gradients, then of weights
  bool open_ = false;      // the step's last batch runs
  int64_t copied_from_ = 0;
  std::deque<Copy> copies_;  // the earliest has perhaps arrived, those behind it have not
};

}  // namespace xmod

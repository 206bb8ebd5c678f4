// Keys and values of the tokens that a layer's attention has seen, so that text grows by a token without
// running the model over all that stands before it. A sparse layer keeps only the tokens it selected: its
// cache is 1/K of a dense layer's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "xmod/arena.h"
#include "xmod/device_buffer.h"
#include "xmod/model_config.h"

namespace xmod {

// What a layer's queries attend to.
template <class floatX>
struct KeysValues {
  const floatX* k = nullptr;  // (keys, KV*hd)
  const floatX* v = nullptr;  // (keys, KV*hd), rows v_stride apart
  int64_t v_stride = 0;
  const int32_t* own_key =
      nullptr;  // (n) the key of each new token; null: keys are the new tokens themselves
  const int64_t* offsets = nullptr;  // (B+1) where each sequence's keys begin
};

// One layer's cache of B sequences, which may have any lengths. It grows as tokens come.
template <class Backend>
class LayerCache {
 public:
  using floatX = typename Backend::floatX;

  LayerCache(Backend& be, int64_t B, int64_t width)
      : be_(be), B_(B), width_(width), count_(static_cast<size_t>(B)) {}

  // Adds the keys and values of new tokens behind those of their sequences, and returns all of them.
  // k, v: (n, width), v's rows v_stride apart; rows: the tokens.
  KeysValues<floatX> append(const floatX* k, const floatX* v, int64_t v_stride, const Rows& rows) {
    std::vector<int64_t> offsets(static_cast<size_t>(B_ + 1));
    be_.to_host(offsets.data(), rows.offsets, B_ + 1);
    make_room(offsets);
    std::vector<int32_t> slots;
    for (int64_t b = 0; b < B_; b++) {
      for (int64_t i = offsets[b]; i < offsets[b + 1]; i++)
        slots.push_back(static_cast<int32_t>(b * capacity_ + count_[b]++));
    }
    slot_ = std::make_unique<DeviceBuffer<Backend, int32_t>>(be_, rows.n);
    be_.to_device(slot_->data(), slots.data(), rows.n);
    be_.scatter_rows(k_->data(), k, width_, slot_->data(), rows.n, width_);
    be_.scatter_rows(v_->data(), v, v_stride, slot_->data(), rows.n, width_);
    return {k_->data(), v_->data(), width_, slot_->data(), offsets_->data()};
  }

  void forget(int64_t sequence) { count_[sequence] = 0; }

  // Of the tokens that it holds, in all sequences.
  int64_t bytes() const {
    int64_t tokens = 0;
    for (int64_t count : count_) tokens += count;
    return tokens * 2 * width_ * static_cast<int64_t>(sizeof(floatX));
  }

 private:
  // Rows for the tokens to come; in steps, so that copying stays rare.
  void make_room(const std::vector<int64_t>& offsets) {
    int64_t needed = 1;
    for (int64_t b = 0; b < B_; b++) needed = std::max(needed, count_[b] + offsets[b + 1] - offsets[b]);
    if (needed <= capacity_) return;
    const int64_t capacity = needed + needed / 16 + 16;
    k_ = grown(k_, capacity);
    v_ = grown(v_, capacity);
    offsets_ = std::make_unique<DeviceBuffer<Backend, int64_t>>(be_, B_ + 1);
    be_.uniform_offsets(offsets_->data(), B_, capacity);
    capacity_ = capacity;
  }

  using Floats = std::unique_ptr<DeviceBuffer<Backend, floatX>>;

  Floats grown(const Floats& old, int64_t capacity) const {
    auto out = std::make_unique<DeviceBuffer<Backend, floatX>>(be_, B_ * capacity * width_);
    for (int64_t b = 0; old && b < B_; b++)
      be_.copy(out->data() + b * capacity * width_, old->data() + b * capacity_ * width_, count_[b] * width_);
    return out;
  }

  Backend& be_;
  int64_t B_, width_;
  int64_t capacity_ = 0;                                     // rows for each sequence
  std::vector<int64_t> count_;                               // (B) rows in use
  Floats k_, v_;                                             // (B, capacity, width)
  std::unique_ptr<DeviceBuffer<Backend, int32_t>> slot_;     // (n) rows of the newest tokens
  std::unique_ptr<DeviceBuffer<Backend, int64_t>> offsets_;  // (B+1) 0, capacity, ...
};

// The caches of a model, one for each entry of its plan, and how long its sequences are.
template <class Backend>
struct KeyValueCache {
  KeyValueCache(Backend& be, const ModelConfig& c, size_t layers, int64_t B)
      : length(static_cast<size_t>(B)) {
    for (size_t l = 0; l < layers; l++) this->layers.emplace_back(be, B, c.kv_dim());
  }

  int64_t sequences() const { return static_cast<int64_t>(length.size()); }
  void forget(int64_t sequence) {
    for (LayerCache<Backend>& layer : layers) layer.forget(sequence);
    length[sequence] = 0;
  }
  int64_t bytes() const {
    int64_t sum = 0;
    for (const LayerCache<Backend>& layer : layers) sum += layer.bytes();
    return sum;
  }

  std::vector<LayerCache<Backend>> layers;
  std::vector<int32_t> length;  // (B) tokens of each sequence so far
};

}  // namespace xmod

// Which rank keeps the optimizer state of which parameters (`--zero 1`), and updates them: arithmetic on the
// tables alone, so every rank comes to the same answer by itself.
//
// A matrix under Muon stays whole, since the Newton-Schulz steps need all of it; AdamW goes element by
// element, so its tensors (a large embedding, above all) may be cut anywhere.
//
//   1. Matrices, the dearest first, each to the rank whose Newton-Schulz steps cost least so far and whose
//      state has room for it in 1/R of the whole.
//   2. Matrices of equal cost change places until equal shapes stand on few ranks, which update them as one
//      batch. Among those ranks owners alternate along the model, so that a layer's gradients, which are
//      ready together, go to several ranks.
//   3. The tensors of AdamW, one behind the other, fill every rank up to the same memory.
//
// Hence every rank has 1/R of the state, unless whole matrices are too coarse for that: where the matrices of
// one rank alone are more, AdamW's tensors level the others only, and more ranks than matrices leave some
// without any. All presets, dense and sparse, come out even: the paper's up to 64 ranks, tiny up to 12.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "xmod/optimizer.h"

namespace xmod {

namespace detail {

// Pieces are padded so that they begin where vectors are aligned, and a cut moves no element between a loop
// over vectors and its remainder: the results are those of an uncut tensor, bit for bit.
class OptimizerDealer {
 public:
  OptimizerDealer(const std::vector<Parameter>& entries, const std::vector<Optimizer>& optimizer,
                  int64_t ranks)
      : entries_(entries),
        optimizer_(optimizer),
        shares_(static_cast<size_t>(ranks)),
        matrices_(shares_.size()),
        room_(shares_.size()) {
    for (size_t i = 0; i < entries.size(); i++) even_share_ += padded(entries[i].size) * (is_muon(i) ? 1 : 2);
    even_share_ = (even_share_ + ranks - 1) / ranks;
  }

  std::vector<OptimizerShare> deal() {
    deal_matrices();
    level_memory();
    deal_elements();
    for (OptimizerShare& share : shares_) lay_out(share);
    return std::move(shares_);
  }

 private:
  using Shape = std::vector<int64_t>;

  // Of equal cost and size: (rows, cols) and (cols, rows), each shape's matrices in the order of the table.
  struct CostClass {
    std::map<Shape, std::vector<int64_t>> entries;
    int64_t count = 0;
  };

  bool is_muon(size_t entry) const { return optimizer_[entry] == Optimizer::muon; }
  int64_t size_of(int64_t entry) const { return entries_[static_cast<size_t>(entry)].size; }

  void deal_matrices() {
    std::map<std::pair<int64_t, int64_t>, CostClass, std::greater<>> classes;  // by FLOPs and floats
    for (size_t i = 0; i < entries_.size(); i++) {
      if (!is_muon(i)) continue;
      const Shape& shape = entries_[i].shape;
      CostClass& equal = classes[{newton_schulz_flops(shape[0], shape[1]), padded(entries_[i].size)}];
      equal.entries[shape].push_back(static_cast<int64_t>(i));
      equal.count++;
    }
    for (const auto& [key, equal] : classes) {
      std::vector<int64_t> counts = count_by_rank(key.first, key.second, equal.count);
      auto rank = counts.begin();
      for (const auto& [shape, entries] : equal.entries) deal_shape(entries, counts, rank);
    }
  }

  // How many matrices of one cost and size each rank takes.
  std::vector<int64_t> count_by_rank(int64_t flops, int64_t floats, int64_t matrices) {
    std::vector<int64_t> counts(shares_.size());
    for (int64_t i = 0; i < matrices; i++) {
      const size_t rank = next_rank(floats);
      shares_[rank].muon_flops += flops;
      matrices_[rank] += floats;
      counts[rank]++;
    }
    return counts;
  }

  // The one with least to compute of those that have room for so many floats; without any, the one with
  // fewest.
  size_t next_rank(int64_t floats) const {
    size_t best = 0;
    auto key = [&](size_t r) {
      const bool full = matrices_[r] + floats > even_share_;
      return std::make_tuple(full, full ? matrices_[r] : 0, shares_[r].muon_flops);
    };
    for (size_t r = 1; r < shares_.size(); r++) {
      if (key(r) < key(best)) best = r;
    }
    return best;
  }

  // To the ranks from `rank` on, as many as their counts say, in turn; takes them from the counts.
  void deal_shape(const std::vector<int64_t>& entries, std::vector<int64_t>& counts,
                  std::vector<int64_t>::iterator& rank) {
    std::vector<std::pair<size_t, int64_t>> takers;  // a rank, and how many it takes
    for (auto left = static_cast<int64_t>(entries.size()); left > 0;) {
      const int64_t taken = std::min(left, *rank);
      if (taken > 0) takers.emplace_back(rank - counts.begin(), taken);
      left -= taken;
      *rank -= taken;
      if (*rank == 0) ++rank;
    }
    for (size_t next = 0; next < entries.size();) {
      for (auto& [taker, count] : takers) {
        if (count == 0) continue;
        count--;
        const int64_t entry = entries[next++];
        shares_[taker].pieces.push_back({entry, 0, size_of(entry), -1, -1});
      }
    }
  }

  // Room for elements of AdamW (two floats each) up to the lowest level that holds them all.
  void level_memory() {
    int64_t elements = 0;
    for (size_t i = 0; i < entries_.size(); i++) elements += is_muon(i) ? 0 : padded(entries_[i].size);
    int64_t low = 0, high = *std::max_element(matrices_.begin(), matrices_.end()) + 2 * elements;
    auto make_room = [&](int64_t level) {
      int64_t all = 0;
      for (size_t r = 0; r < room_.size(); r++) {
        room_[r] = std::max<int64_t>(0, level - matrices_[r]) / 2 / kAlignment * kAlignment;
        all += room_[r];
      }
      return all;
    };
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (make_room(middle) >= elements) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    make_room(high);
  }

  void deal_elements() {
    size_t rank = 0;
    for (size_t i = 0; i < entries_.size(); i++) {
      const int64_t size = entries_[i].size;
      for (int64_t first = 0; !is_muon(i) && first < size;) {
        while (room_[rank] == 0) rank++;
        const int64_t taken = std::min(size - first, room_[rank]);
        shares_[rank].pieces.push_back({static_cast<int64_t>(i), first, taken, -1, -1});
        room_[rank] -= padded(taken);
        first += taken;
      }
    }
  }

  void lay_out(OptimizerShare& share) {
    std::sort(share.pieces.begin(), share.pieces.end(),
              [](const auto& a, const auto& b) { return a.entry < b.entry; });
    for (OptimizerPiece& piece : share.pieces) {
      piece.first_moment = share.first_moment_total;
      share.first_moment_total += padded(piece.size);
      if (is_muon(static_cast<size_t>(piece.entry))) continue;
      piece.second_moment = share.second_moment_total;
      share.second_moment_total += padded(piece.size);
    }
  }

  const std::vector<Parameter>& entries_;
  const std::vector<Optimizer>& optimizer_;
  std::vector<OptimizerShare> shares_;
  std::vector<int64_t> matrices_;  // floats of each rank's matrices
  std::vector<int64_t> room_;      // of each rank, for elements of AdamW
  int64_t even_share_ = 0;         // floats of state
};

}  // namespace detail

// One share a rank. Every element of every parameter is in exactly one piece.
inline std::vector<OptimizerShare> share_optimizer(const TensorTable& parameters, const OptimizerTable& table,
                                                   int64_t ranks) {
  return detail::OptimizerDealer(parameters.entries, table.optimizer, ranks).deal();
}

// Of which parameters a rank keeps fp32 weights, where products read them in bf16: of those that it updates,
// and of all that passes read in fp32.
inline std::vector<NumberRange> kept_masters(const TensorTable& parameters, const OptimizerShare& share) {
  std::vector<NumberRange> kept;
  for (const Parameter& p : parameters.entries) {
    if (p.read == Read::in_fp32) kept.push_back({p.offset, p.size});
  }
  for (const OptimizerPiece& piece : share.pieces) {
    const Parameter& p = parameters.entries[static_cast<size_t>(piece.entry)];
    if (p.read == Read::by_products_alone) kept.push_back({p.offset + piece.first, piece.size});
  }
  return kept;
}

}  // namespace xmod

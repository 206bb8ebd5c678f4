// Which rank keeps the optimizer state of which parameters (`--zero 1`), and updates them: arithmetic on the
// tables alone, so every rank comes to the same answer by itself.
//
// A matrix under Muon stays whole, since the Newton-Schulz steps need all of it; AdamW goes element by
// element, so its tensors (a large embedding, above all) may be cut anywhere.
//
//   1. Matrices, the dearest first, each to the rank whose Newton-Schulz steps cost least so far.
//   2. Matrices of equal cost change places until equal shapes stand on few ranks, which update them as one
//      batch. Among those ranks owners alternate along the model, so that a layer's gradients, which are
//      ready together, go to several ranks.
//   3. The tensors of AdamW, one behind the other, fill every rank up to the same memory.
//
// Hence every rank has 1/R of the state, unless whole matrices are too coarse for that: where the matrices of
// one rank alone are more, AdamW's tensors level the others only, and more ranks than matrices leave some
// without any. The paper's presets and their sparse models come out even up to 64 ranks; the tiny ones, whose
// embedding is small, stay below 1.05/R up to 12.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "xmod/optimizer.h"

namespace xmod {

// Five steps: with R the smaller size and L the larger, a product of 2 R R L FLOPs, and of two symmetric ones
// (R R L and R R R) a half each.
inline int64_t newton_schulz_flops(int64_t rows, int64_t cols) {
  const int64_t R = std::min(rows, cols), L = std::max(rows, cols);
  return 5 * R * R * (3 * L + R);
}

namespace detail {

// So that a rank's pieces begin where vectors are aligned, and a cut moves no element between a loop over
// vectors and its remainder: the results are those of an uncut tensor, bit for bit.
inline int64_t padded(int64_t floats) {
  return (floats + kAlignment - 1) / kAlignment * kAlignment;
}

class OptimizerDealer {
 public:
  OptimizerDealer(const std::vector<Parameter>& entries, const std::vector<Optimizer>& optimizer,
                  int64_t ranks)
      : entries_(entries),
        optimizer_(optimizer),
        shares_(static_cast<size_t>(ranks)),
        room_(shares_.size()) {}

  std::vector<OptimizerShare> deal() {
    deal_matrices();
    level_memory();
    deal_elements();
    for (OptimizerShare& share : shares_) lay_out(share);
    return std::move(shares_);
  }

 private:
  using Shape = std::vector<int64_t>;

  // Of equal cost: (rows, cols) and (cols, rows), each shape's matrices in the order of the table.
  struct CostClass {
    std::map<Shape, std::vector<int64_t>> entries;
    int64_t count = 0;
  };

  bool is_muon(size_t entry) const { return optimizer_[entry] == Optimizer::muon; }
  int64_t size_of(int64_t entry) const { return entries_[static_cast<size_t>(entry)].size; }

  void deal_matrices() {
    std::map<int64_t, CostClass, std::greater<>> classes;
    for (size_t i = 0; i < entries_.size(); i++) {
      if (!is_muon(i)) continue;
      const Shape& shape = entries_[i].shape;
      CostClass& equal = classes[newton_schulz_flops(shape[0], shape[1])];
      equal.entries[shape].push_back(static_cast<int64_t>(i));
      equal.count++;
    }
    for (const auto& [flops, equal] : classes) {
      std::vector<int64_t> counts = count_by_rank(flops, equal.count);
      auto rank = counts.begin();
      for (const auto& [shape, entries] : equal.entries) deal_shape(entries, counts, rank);
    }
  }

  // How many matrices of one cost each rank takes.
  std::vector<int64_t> count_by_rank(int64_t flops, int64_t matrices) {
    std::vector<int64_t> counts(shares_.size());
    for (int64_t i = 0; i < matrices; i++) {
      const auto least = std::min_element(shares_.begin(), shares_.end(), [](const auto& a, const auto& b) {
        return a.muon_flops < b.muon_flops;
      });
      least->muon_flops += flops;
      counts[static_cast<size_t>(least - shares_.begin())]++;
    }
    return counts;
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
    std::vector<int64_t> matrices;  // floats of a rank
    int64_t elements = 0, low = 0, high = 0;
    for (size_t i = 0; i < entries_.size(); i++) elements += is_muon(i) ? 0 : padded(entries_[i].size);
    for (const OptimizerShare& share : shares_) {
      int64_t floats = 0;
      for (const OptimizerPiece& piece : share.pieces) floats += padded(piece.size);
      matrices.push_back(floats);
      high = std::max(high, floats + 2 * elements);
    }
    auto make_room = [&](int64_t level) {
      int64_t all = 0;
      for (size_t r = 0; r < room_.size(); r++) {
        room_[r] = std::max<int64_t>(0, level - matrices[r]) / 2 / kAlignment * kAlignment;
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
  std::vector<int64_t> room_;  // of each rank, for elements of AdamW
};

}  // namespace detail

// The matrices of a share that Muon updates, as those of a whole table.
inline MuonShapes muon_shapes(const TensorTable& parameters, const OptimizerShare& share) {
  MuonShapes shapes;
  for (const OptimizerPiece& piece : share.pieces) {
    const Parameter& p = parameters.entries[static_cast<size_t>(piece.entry)];
    if (piece.second_moment < 0) shapes[{p.shape[0], p.shape[1]}].push_back(p.offset);
  }
  return shapes;
}

// One share a rank. Every element of every parameter is in exactly one piece.
inline std::vector<OptimizerShare> share_optimizer(const TensorTable& parameters, const OptimizerTable& table,
                                                   int64_t ranks) {
  return detail::OptimizerDealer(parameters.entries, table.optimizer, ranks).deal();
}

}  // namespace xmod

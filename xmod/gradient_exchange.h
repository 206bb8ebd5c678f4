// Adds up the ranks' gradients while the backward pass still runs.
//
// The allocation is cut into pieces, each with a rank that owns it. As soon as a piece's gradients are final,
// every other rank sends its own to the owner, which adds them in the order of the ranks, so that the sum is
// the same bits whoever owns the piece and whatever arrives first. Then the owner sends the sum to all
// (--zero 0), or keeps it, updates its parameters and sends those (--zero 1; in bf16, where products alone
// read them so). Either way a rank sends and receives at most 2 (R-1)/R of the allocation a step, which is
// the least that R ranks can do in fp32.
//
// MPI may move data only when it is called: every call of ready() does that, too.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "xmod/aligned_floats.h"
#include "xmod/communicator.h"
#include "xmod/optimizer_shares.h"

namespace xmod {

// Consecutive numbers of an allocation and the rank that owns them.
struct RankPiece {
  int64_t offset, size;
  int owner;
};

constexpr int64_t kLargestPiece = int64_t{1} << 18;  // numbers: a message of 1 MiB
constexpr int64_t kSmallestPiece = int64_t{1} << 12;

// Last numbers first, as the backward pass comes to them; the ranks take turns.
inline std::vector<RankPiece> even_pieces(int64_t total, int ranks) {
  const int64_t wanted = detail::padded(total / (8 * ranks));
  const int64_t size = std::clamp(wanted, kSmallestPiece, kLargestPiece);
  std::vector<RankPiece> pieces;
  int owner = 0;
  for (int64_t end = total; end > 0; end -= std::min(end, size)) {
    const int64_t begin = std::max<int64_t>(0, end - size);
    pieces.push_back({begin, end - begin, owner});
    owner = (owner + 1) % ranks;
  }
  return pieces;
}

// Each with the rank that updates it; last numbers first. read: only of parameters that are read so.
inline std::vector<RankPiece> owned_pieces(const TensorTable& table,
                                           const std::vector<OptimizerShare>& shares,
                                           std::optional<Read> read = {}) {
  std::vector<RankPiece> pieces;
  for (size_t rank = 0; rank < shares.size(); rank++) {
    for (const OptimizerPiece& p : shares[rank].pieces) {
      const Parameter& parameter = table.entries[static_cast<size_t>(p.entry)];
      if (read && parameter.read != *read) continue;
      const int64_t begin = parameter.offset + p.first;
      for (int64_t first = 0; first < p.size; first += kLargestPiece) {
        pieces.push_back({begin + first, std::min(kLargestPiece, p.size - first), static_cast<int>(rank)});
      }
    }
  }
  std::sort(pieces.begin(), pieces.end(), [](const auto& a, const auto& b) { return a.offset > b.offset; });
  return pieces;
}

// --zero 0: even ones; --zero 1: those of the optimizer's shares.
template <class Optimizer>
std::vector<RankPiece> exchanged_pieces(const TensorTable& table, const Optimizer& optimizer, int ranks) {
  return optimizer.is_shared ? owned_pieces(table, optimizer.shares) : even_pieces(table.total, ranks);
}

// own (n) becomes the sum over the ranks in their order; others: (ranks - 1, stride), of all but `rank`.
inline void add_in_rank_order(float* own, const float* others, int64_t stride, int rank, int ranks,
                              int64_t n) {
  constexpr int64_t kBlock = 4096;
#pragma omp parallel for schedule(static)
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t count = std::min(kBlock, n - first);
    float sum[kBlock] = {};
    for (int r = 0; r < ranks; r++) {
      const float* values = (r == rank ? own : others + (r < rank ? r : r - 1) * stride) + first;
      if (r == 0) {
        std::copy_n(values, count, sum);
      } else {
#pragma omp simd
        for (int64_t i = 0; i < count; i++) sum[i] += values[i];
      }
    }
    std::copy_n(sum, count, own + first);
  }
}

class GradientExchange {
 public:
  enum class Goal {
    sum_for_all,    // every rank gets the sums
    sum_for_owner,  // a piece's owner does; with the others, the piece is left as it was
    copy_to_all,    // the owner's numbers, as they are
  };

  // Where the others' numbers arrive, and how they are added to a rank's own: by default on the host.
  struct Adder {
    std::function<float*(int64_t n)> allocate;  // once, kept by whoever allocates
    std::function<void(float* own, const float* others, int64_t stride, int64_t n)> add;
  };

  GradientExchange(Communicator& ranks, std::vector<RankPiece> pieces, Goal goal, Adder adder = {})
      : ranks_(ranks),
        messages_(ranks),
        goal_(goal),
        pieces_(std::move(pieces)),
        states_(pieces_.size()),
        stride_(largest(pieces_)),
        adder_(adder.add ? std::move(adder) : host_adder()) {
    if (goal == Goal::copy_to_all) return;
    slots_ = count_slots(pieces_, ranks.size());
    arrived_ = adder_.allocate(slots_ * (ranks.size() - 1) * stride_);
  }
  GradientExchange(const GradientExchange&) = delete;
  GradientExchange& operator=(const GradientExchange&) = delete;

  // Memory for what arrives, beside the allocation itself.
  static int64_t bytes(const std::vector<RankPiece>& pieces, int ranks) {
    return count_slots(pieces, ranks) * (ranks - 1) * largest(pieces) * static_cast<int64_t>(sizeof(float));
  }

  const std::vector<RankPiece>& pieces() const { return pieces_; }

  // When set, is told that this rank has the result of a piece (not of those that it only sends).
  std::function<void(const RankPiece&)> on_piece;

  // A step begins: values is the allocation, of floats where there are sums.
  template <class Number>
  void begin(Number* values) {
    values_ = reinterpret_cast<char*>(values);
    width_ = sizeof(Number);
    next_ = 0;
    under_way_ = 0;
    free_slots_.clear();
    for (int64_t i = slots_; i-- > 0;) free_slots_.push_back(i);
  }

  // All numbers from `offset` on are final.
  void ready(int64_t offset) {
    final_from_ = offset;
    go_on(messages_.completed());
  }

  // Waits for all pieces.
  void finish() {
    ready(0);
    while (under_way_ > 0) go_on(messages_.wait());
  }

 private:
  enum class Stage { gathering, sending, spreading, receiving };

  struct State {
    Stage stage = Stage::gathering;
    int pending = 0;    // messages
    int64_t slot = -1;  // where the others' numbers arrive
  };

  static int64_t largest(const std::vector<RankPiece>& pieces) {
    int64_t size = 0;
    for (const RankPiece& piece : pieces) size = std::max(size, piece.size);
    return size;
  }

  // Pieces whose numbers may arrive at a time.
  static int64_t count_slots(const std::vector<RankPiece>& pieces, int ranks) {
    constexpr int64_t kFloats = int64_t{1} << 23, kMostSlots = 64;
    const int64_t slot = std::max<int64_t>(1, (ranks - 1) * largest(pieces));
    return std::min(static_cast<int64_t>(pieces.size()), std::clamp<int64_t>(kFloats / slot, 2, kMostSlots));
  }

  char* values_of(size_t piece) const { return values_ + pieces_[piece].offset * width_; }
  int64_t bytes_of(size_t piece) const { return pieces_[piece].size * width_; }
  bool is_owner(size_t piece) const { return pieces_[piece].owner == ranks_.rank(); }

  // Two messages of a pair of ranks may be under way for a piece, one each way; a tag comes again only when
  // an earlier piece with it is through.
  static int tag(size_t piece, bool sum) {
    return static_cast<int>(piece % (Messages::kTags / 2)) * 2 + (sum ? 1 : 0);
  }

  void go_on(const std::vector<int64_t>& ids) {
    for (int64_t id : ids) {
      const auto piece = static_cast<size_t>(id);
      if (--states_[piece].pending == 0) advance(piece);
    }
    // In the order of the pieces on every rank: the first that is not through is then under way everywhere,
    // so that somebody can always go on.
    const size_t window = static_cast<size_t>(std::max(64, 2 * ranks_.size()));
    while (next_ < pieces_.size() && pieces_[next_].offset >= final_from_ && under_way_ < window) {
      if (!start(next_)) break;
      next_++;
    }
  }

  bool start(size_t piece) {
    State& state = states_[piece];
    if (goal_ == Goal::copy_to_all) {
      under_way_++;
      spread(piece);
    } else if (is_owner(piece)) {
      if (free_slots_.empty()) return false;
      under_way_++;
      state = {Stage::gathering, ranks_.size() - 1, free_slots_.back()};
      free_slots_.pop_back();
      float* slot = slot_of(state);
      for_each_other([&](int rank) {
        messages_.receive(slot, bytes_of(piece), rank, tag(piece, false), static_cast<int64_t>(piece));
        slot += stride_;
      });
    } else {
      under_way_++;
      state = {Stage::sending, 1, -1};
      messages_.send(values_of(piece), bytes_of(piece), pieces_[piece].owner, tag(piece, false),
                     static_cast<int64_t>(piece));
    }
    return true;
  }

  // No message of the piece is under way any more.
  void advance(size_t piece) {
    State& state = states_[piece];
    const bool first_half = state.stage == Stage::gathering || state.stage == Stage::sending;
    if (state.stage == Stage::gathering) {
      adder_.add(reinterpret_cast<float*>(values_of(piece)), slot_of(state), stride_, pieces_[piece].size);
      free_slots_.push_back(state.slot);
    }
    const bool has_result = state.stage == Stage::gathering || state.stage == Stage::receiving;
    if (has_result && on_piece) on_piece(pieces_[piece]);
    if (first_half && goal_ == Goal::sum_for_all) {
      spread(piece);
    } else {
      under_way_--;
    }
  }

  // From the owner to the others.
  void spread(size_t piece) {
    const int64_t bytes = bytes_of(piece);
    const auto id = static_cast<int64_t>(piece);
    if (is_owner(piece)) {
      states_[piece] = {Stage::spreading, ranks_.size() - 1, -1};
      for_each_other([&](int rank) { messages_.send(values_of(piece), bytes, rank, tag(piece, true), id); });
    } else {
      states_[piece] = {Stage::receiving, 1, -1};
      messages_.receive(values_of(piece), bytes, pieces_[piece].owner, tag(piece, true), id);
    }
  }

  template <class Visit>
  void for_each_other(Visit visit) const {
    for (int r = 0; r < ranks_.size(); r++) {
      if (r != ranks_.rank()) visit(r);
    }
  }

  float* slot_of(const State& state) const { return arrived_ + state.slot * (ranks_.size() - 1) * stride_; }

  Adder host_adder() {
    return {[this](int64_t n) { return host_.reserve(n); },
            [this](float* own, const float* others, int64_t stride, int64_t n) {
              add_in_rank_order(own, others, stride, ranks_.rank(), ranks_.size(), n);
            }};
  }

  Communicator& ranks_;
  Messages messages_;
  const Goal goal_;
  const std::vector<RankPiece> pieces_;  // in the order in which they become final
  std::vector<State> states_;            // of each piece
  const int64_t stride_;                 // numbers of the largest piece
  int64_t slots_ = 0;
  AlignedFloats host_;
  const Adder adder_;
  float* arrived_ = nullptr;  // (slots, ranks - 1, stride)
  std::vector<int64_t> free_slots_;
  char* values_ = nullptr;
  int64_t width_ = 0;  // bytes of a number
  size_t next_ = 0;    // the first piece that has not started
  size_t under_way_ = 0;
  int64_t final_from_ = 0;
};

}  // namespace xmod

// One allocation for all intermediate tensors, handed out piece by piece; and the rows that a layer works on.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace xmod {

// Hands out pieces of one allocation; with no base it only counts. Bytes are kept by group for the report.
class Arena {
 public:
  explicit Arena(void* base = nullptr) : base_(reinterpret_cast<uintptr_t>(base)) {}

  void group(const std::string& name) { groups_.emplace_back(name, 0); }

  template <class T>
  T* take(int64_t count) {
    const int64_t bytes = (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    const uintptr_t address = base_ + static_cast<uintptr_t>(used_);
    used_ += bytes;
    groups_.back().second += bytes;
    return reinterpret_cast<T*>(address);
  }

  int64_t used() const { return used_; }
  // The next pieces lie over the ones of the running group that were handed out behind `used`.
  void rewind(int64_t used) {
    groups_.back().second += used - used_;
    used_ = used;
  }
  const std::vector<std::pair<std::string, int64_t>>& groups() const { return groups_; }

 private:
  uintptr_t base_;
  int64_t used_ = 0;
  std::vector<std::pair<std::string, int64_t>> groups_;
};

// The rows of the residual stream that a layer works on, in order.
struct Rows {
  int32_t* row = nullptr;       // (n) row of the stream, ascending
  int32_t* position = nullptr;  // (n) the token's position in its sequence
  int64_t* offsets = nullptr;   // (B+1) sequence b owns row[offsets[b] .. offsets[b+1])
  int64_t n = 0;
};

}  // namespace xmod

// Working memory of the CPU's passes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace xmod {

// Floats on a cache line's border; grows on demand, never shrinks, forgets nothing it need not.
class AlignedFloats {
 public:
  // At least `count` floats. A later call may move them.
  float* reserve(int64_t count) {
    constexpr int64_t kPerLine = sizeof(Line) / sizeof(float);
    const size_t lines = static_cast<size_t>((count + kPerLine - 1) / kPerLine);
    if (lines_.size() < lines) lines_.resize(lines);
    return data();
  }
  float* data() { return lines_.empty() ? nullptr : lines_.data()->values; }

 private:
  struct alignas(64) Line {
    float values[16];
  };
  std::vector<Line> lines_;
};

}  // namespace xmod

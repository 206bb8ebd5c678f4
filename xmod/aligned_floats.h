// Working memory of the CPU's passes.
#pragma once

#include <cstdint>
#include <memory>

namespace xmod {

// Floats on a cache line's border. They grow on demand, to the size that is asked for, and never shrink.
class AlignedFloats {
 public:
  // At least `count` floats. Where there were fewer, what stood in them is lost: old and new ones never lie
  // in memory side by side.
  float* reserve(int64_t count) {
    constexpr int64_t kPerLine = sizeof(Line) / sizeof(float);
    const int64_t lines = (count + kPerLine - 1) / kPerLine;
    if (lines > lines_) {
      data_.reset();
      data_.reset(new Line[static_cast<size_t>(lines)]());
      lines_ = lines;
    }
    return data();
  }
  float* data() { return data_ ? data_[0].values : nullptr; }

 private:
  struct alignas(64) Line {
    float values[16];
  };
  std::unique_ptr<Line[]> data_;
  int64_t lines_ = 0;
};

}  // namespace xmod

// Memory on a backend's device, released with its owner.
#pragma once

#include <cstdint>
#include <vector>

#include "xmod/parameter_table.h"

namespace xmod {

// One allocation of n T's on the backend's device, zero at first.
template <class Backend, class T>
class DeviceBuffer {
 public:
  DeviceBuffer(Backend& backend, int64_t n) : DeviceBuffer(backend, n, {{0, n}}) {}

  // Where the backend can do so, only these parts of it have memory.
  DeviceBuffer(Backend& backend, int64_t n, const std::vector<NumberRange>& parts)
      : backend_(&backend), data_(allocate(backend, n, parts)), size_(n) {
    for (const NumberRange& part : parts) backend.zero(data_ + part.offset, part.size);
  }
  ~DeviceBuffer() { backend_->release(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  T* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  static T* allocate(Backend& backend, int64_t n, const std::vector<NumberRange>& parts) {
    if constexpr (requires { backend.template allocate_parts<T>(n, parts); }) {
      const bool is_whole = parts.size() == 1 && parts[0].size == n;
      if (!is_whole) return backend.template allocate_parts<T>(n, parts);
    }
    return backend.template allocate<T>(n);
  }

  Backend* backend_;
  T* data_;
  int64_t size_;
};

}  // namespace xmod

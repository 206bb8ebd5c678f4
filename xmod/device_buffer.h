// Memory on a backend's device, released with its owner.
#pragma once

#include <cstdint>

namespace xmod {

// One allocation of n T's on the backend's device, zero at first.
template <class Backend, class T>
class DeviceBuffer {
 public:
  DeviceBuffer(Backend& backend, int64_t n)
      : backend_(&backend), data_(backend.template allocate<T>(n)), size_(n) {
    backend.zero(data_, n);
  }
  ~DeviceBuffer() { backend_->release(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;

  T* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  Backend* backend_;
  T* data_;
  int64_t size_;
};

}  // namespace xmod

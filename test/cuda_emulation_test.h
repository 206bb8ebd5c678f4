// What the tests of the emulated GPU share: arrays on the device, and orders of threads.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "normal_numbers.h"
#include "xmod/cuda_common.h"

// A name, because messages can give the names of kernels that the linker knows.
namespace xmod::emulation_test {

using bf16 = __nv_bfloat16;
using Ints = std::vector<int>;

// An array on the device.
template <class T>
class Array {
 public:
  explicit Array(size_t n) : size_(n) { cuda_check(cudaMalloc(&data_, n * sizeof(T))); }
  explicit Array(const std::vector<T>& values) : Array(values.size()) {
    cuda_check(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~Array() { cudaFree(data_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  operator T*() const { return data_; }
  std::vector<T> values() const {
    std::vector<T> out(size_);
    cuda_check(cudaMemcpy(out.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost));
    return out;
  }

 private:
  size_t size_;
  T* data_ = nullptr;
};

// out = Factor inp + addend, of n numbers
template <class T, int Factor>
__global__ void multiply(T* out, const T* inp, T addend, int n) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i < n) out[i] = Factor * inp[i] + addend;
}

inline std::vector<bf16> narrowed(const Floats& values) {
  return std::vector<bf16>(values.begin(), values.end());
}
inline Floats widened(const std::vector<bf16>& values) {
  return Floats(values.begin(), values.end());
}

template <class Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// Results must not depend on the order of threads: tests run in several.
inline const std::vector<uint64_t> kOrders = {0, 1, 2, 3, 4, 5, 6, 7};

class CudaEmulation : public ::testing::Test {
 protected:
  CudaEmulation() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  ~CudaEmulation() override {
    cuda_emulation::set_thread_order(0);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }

  template <class Body>
  static void in_any_order(Body body) {
    for (uint64_t order : kOrders) {
      SCOPED_TRACE(order);
      cuda_emulation::set_thread_order(order);
      body();
    }
  }
};
using CudaEmulationDeathTest = CudaEmulation;

}  // namespace xmod::emulation_test

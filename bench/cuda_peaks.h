// What a GPU can do at most, measured: products of large matrices by cuBLAS, memory copied. And what its data
// sheet says, where it is known.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "bench/clock.h"
#include "bench/cuda_clock.h"
#include "xmod/cuda_common.h"
#include "xmod/cuda_pack.h"
#include "xmod/device_buffer.h"
#include "xmod/rng.h"

namespace xmod::bench {

// FLOP/s of products of factors without zeros to skip, and bytes a second.
struct DataSheet {
  double bf16, fp32, memory;
};

inline constexpr DataSheet kH200 = {989e12, 67e12, 4.8e12};

// Zeros: not known.
inline DataSheet data_sheet(const std::string& device) {
  const std::vector<std::pair<std::string, DataSheet>> known = {
      {"H200", kH200}, {"H100", {989e12, 67e12, 3.35e12}}, {"A100", {312e12, 19.5e12, 2.04e12}}};
  for (const auto& [name, sheet] : known) {
    if (device.find(name) != std::string::npos) return sheet;
  }
  return {};
}

// Square products of one size, on random numbers: a GPU that multiplies zeros is faster than it ever is.
template <class Backend>
class LargeProduct {
 public:
  LargeProduct(Backend& backend, int64_t size)
      : backend_(backend),
        size_(size),
        a_(backend, size * size),
        b_(backend, size * size),
        c_(backend, size * size) {
    cuda_check(cublasCreate(&handle_));
    cuda_check(cublasSetStream(handle_, backend.stream()));
    fill(a_.data(), 1);
    fill(b_.data(), 2);
  }
  ~LargeProduct() { cublasDestroy(handle_); }
  LargeProduct(const LargeProduct&) = delete;
  LargeProduct& operator=(const LargeProduct&) = delete;

  // FLOP/s: the best of some runs.
  double rate(cudaDataType_t factors, cublasComputeType_t compute, double seconds) {
    const float one = 1, zero = 0;
    const int n = static_cast<int>(size_);
    const auto run = [&] {
      cuda_check(cublasGemmEx(handle_, CUBLAS_OP_T, CUBLAS_OP_N, n, n, n, &one, a_.data(), factors, n,
                              b_.data(), factors, n, &zero, c_.data(), factors, n, compute,
                              CUBLAS_GEMM_DEFAULT));
    };
    const double flops =
        2.0 * static_cast<double>(size_) * static_cast<double>(size_) * static_cast<double>(size_);
    return flops / smallest(backend_.clock.repeat(run, seconds));
  }

 private:
  // Seen as bf16, too, the numbers are some and no NaN: pairs of bf16 that are both normally distributed.
  void fill(float* data, uint64_t stream) {
    constexpr int64_t kPiece = int64_t{1} << 20;
    const int64_t n = size_ * size_, piece = std::min(kPiece, n);
    std::vector<float> numbers(static_cast<size_t>(2 * piece));
    fill_normal(numbers.data(), 2 * piece, 1, 1, stream);
    std::vector<bf16> pairs(numbers.begin(), numbers.end());
    for (int64_t first = 0; first < n; first += piece)
      backend_.to_device(reinterpret_cast<bf16*>(data + first), pairs.data(), 2 * std::min(piece, n - first));
  }

  Backend& backend_;
  int64_t size_;
  DeviceBuffer<Backend, float> a_, b_, c_;
  cublasHandle_t handle_ = nullptr;
};

// Bytes read and bytes written a second by a copy of half of `bytes` to the other half: the best of some
// runs.
template <class Backend>
double copy_rate(Backend& backend, int64_t bytes, double seconds) {
  const int64_t n = bytes / 2;
  const DeviceBuffer<Backend, unsigned char> memory(backend, 2 * n);
  const auto run = [&] {
    cuda_check(cudaMemcpyAsync(memory.data() + n, memory.data(), static_cast<size_t>(n),
                               cudaMemcpyDeviceToDevice, backend.stream()));
  };
  return 2 * static_cast<double>(n) / smallest(backend.clock.repeat(run, seconds));
}

struct CudaPeaks {
  double bf16, tf32, fp32;  // FLOP/s of products
  double memory, cache;     // bytes a second
};

struct PeakSizes {
  int64_t matrix = 8192;
  int64_t memory = int64_t{8} << 30;  // bytes that a copy reads and writes; beyond every cache
  int64_t cache = int64_t{32} << 20;  // the size of a sparse layer's tensors; in the cache
};

// About `seconds` for each.
template <class Backend>
CudaPeaks measure_cuda_peaks(Backend& backend, const PeakSizes& sizes, double seconds) {
  CudaPeaks peaks = {};
  {
    LargeProduct<Backend> product(backend, sizes.matrix);
    peaks.bf16 = product.rate(CUDA_R_16BF, CUBLAS_COMPUTE_32F, seconds);
    peaks.tf32 = product.rate(CUDA_R_32F, CUBLAS_COMPUTE_32F_FAST_TF32, seconds);
    peaks.fp32 = product.rate(CUDA_R_32F, CUBLAS_COMPUTE_32F, seconds);
  }
  peaks.memory = copy_rate(backend, sizes.memory, seconds);
  peaks.cache = copy_rate(backend, sizes.cache, seconds);
  return peaks;
}

}  // namespace xmod::bench

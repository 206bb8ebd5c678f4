// Memory that the CUDA backend keeps for itself: scratch that grows as passes need it, and the weights in
// bf16.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>

#include "xmod/cuda_common.h"
#include "xmod/cuda_pack.h"

namespace xmod {

// Passes run one after the other, so that each may use all of a scratch.
template <class T>
class CudaScratch {
 public:
  // allocations: counted on whenever the scratch moves
  explicit CudaScratch(int64_t& allocations) : allocations_(allocations) {}
  ~CudaScratch() { cudaFree(data_); }
  CudaScratch(const CudaScratch&) = delete;
  CudaScratch& operator=(const CudaScratch&) = delete;

  // Room for n; what was there before is lost where it has to grow.
  T* reserve(int64_t n) {
    if (n <= size_) return data_;
    cuda_check(cudaFree(data_));
    data_ = nullptr;
    size_ = 0;
    allocations_++;
    cuda_check(cudaMalloc(&data_, static_cast<size_t>(n) * sizeof(T)));
    size_ = n;
    return data_;
  }

 private:
  int64_t& allocations_;
  T* data_ = nullptr;
  int64_t size_ = 0;
};

// Copies in bf16 of whole parameter buffers: what the products read. The masters stay in fp32.
class Bf16Weights {
 public:
  explicit Bf16Weights(int64_t& allocations) : allocations_(allocations) {}

  // The copy of params (n); a new one where there is none.
  bf16* copy_of(const float* params, int64_t n) {
    for (Copy& copy : copies_) {
      if (copy.params == params && copy.n == n) return copy.weights.reserve(n);
    }
    forget(params);
    copies_.emplace_back(params, n, allocations_);
    return copies_.back().weights.reserve(n);
  }

  // Of the copy of the buffer in which a weight lies; null: in none.
  const bf16* find(const float* weight) {
    for (Copy& copy : copies_) {
      if (weight >= copy.params && weight < copy.params + copy.n)
        return copy.weights.reserve(0) + (weight - copy.params);
    }
    return nullptr;
  }

  // When the buffer goes.
  void forget(const void* params) {
    copies_.remove_if([&](const Copy& copy) { return copy.params == params; });
  }

 private:
  struct Copy {
    Copy(const float* params, int64_t n, int64_t& allocations) : params(params), n(n), weights(allocations) {}
    const float* params;
    int64_t n;
    CudaScratch<bf16> weights;
  };
  int64_t& allocations_;
  std::list<Copy> copies_;
};

}  // namespace xmod

// Matrix products on the GPU, by cuBLAS: fp32 or bf16 factors, fp32 sums.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "xmod/cuda_common.h"
#include "xmod/cuda_pack.h"
#include "xmod/error.h"

namespace xmod {

// A factor of a product, row-major; transposed: stored with rows and columns exchanged.
template <class T>
struct Factor {
  const T* data;
  bool transposed = false;
};

// Rows, columns, and the sum's length.
struct MatmulSize {
  int64_t M, N, K;
};

// `count` products of one size; factors and results lie one behind the other.
class CudaMatmul {
 public:
  static constexpr size_t kWorkspace = size_t{32} << 20;  // as cuBLAS recommends for Hopper

  explicit CudaMatmul(cudaStream_t stream) {
    cuda_check(cublasCreate(&handle_));
    cuda_check(cublasSetStream(handle_, stream));
    cuda_check(cudaMalloc(&workspace_, kWorkspace));
    // Of our own: it is there before a graph is captured, and a product's bits never depend on another's.
    cuda_check(cublasSetWorkspace(handle_, workspace_, kWorkspace));
  }
  ~CudaMatmul() {
    cublasDestroy(handle_);
    cudaFree(workspace_);
  }
  CudaMatmul(const CudaMatmul&) = delete;
  CudaMatmul& operator=(const CudaMatmul&) = delete;

  // c (M, N) = alpha a b + beta c, with a (M, K) and b (K, N)
  template <class C, class T>
  void operator()(C* c, Factor<T> a, Factor<T> b, const MatmulSize& size, float alpha = 1, float beta = 0,
                  int64_t count = 1) {
    if (size.M == 0 || size.N == 0 || count == 0) return;
    // cuBLAS thinks in columns: it sees every matrix transposed, so it computes c^T = b^T a^T.
    const int M = narrow(size.M), N = narrow(size.N), K = narrow(size.K);
    const int b_stride = b.transposed ? K : N, a_stride = a.transposed ? M : K;
    cuda_check(cublasGemmStridedBatchedEx(
        handle_, operation(b.transposed), operation(a.transposed), N, M, K, &alpha, b.data, type<T>(),
        b_stride, size.K * size.N, a.data, type<T>(), a_stride, size.M * size.K, &beta, c, type<C>(), N,
        size.M * size.N, narrow(count), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  }

 private:
  template <class T>
  static constexpr cudaDataType_t type() {
    return std::is_same_v<T, float> ? CUDA_R_32F : CUDA_R_16BF;
  }
  static cublasOperation_t operation(bool transposed) { return transposed ? CUBLAS_OP_T : CUBLAS_OP_N; }
  static int narrow(int64_t size) {
    if (size <= std::numeric_limits<int>::max()) return static_cast<int>(size);
    fail("a matrix of ", size, " rows or columns is more than cuBLAS takes; use a smaller --batch-size");
  }

  cublasHandle_t handle_ = nullptr;
  void* workspace_ = nullptr;
};

}  // namespace xmod

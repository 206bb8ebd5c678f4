// cuBLAS on the CPU's matmul, for tests: products of fp32 or bf16 matrices with sums in fp32.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../product.h"
#include "cuda_bf16.h"
#include "cuda_runtime.h"

enum cublasStatus_t {
  CUBLAS_STATUS_SUCCESS = 0,
  CUBLAS_STATUS_NOT_INITIALIZED = 1,
  CUBLAS_STATUS_ALLOC_FAILED = 3,
  CUBLAS_STATUS_INVALID_VALUE = 7,
  CUBLAS_STATUS_ARCH_MISMATCH = 8,
  CUBLAS_STATUS_EXECUTION_FAILED = 13,
  CUBLAS_STATUS_INTERNAL_ERROR = 14,
  CUBLAS_STATUS_NOT_SUPPORTED = 15,
};

enum cublasOperation_t { CUBLAS_OP_N, CUBLAS_OP_T };
enum cublasPointerMode_t { CUBLAS_POINTER_MODE_HOST, CUBLAS_POINTER_MODE_DEVICE };
enum cublasGemmAlgo_t { CUBLAS_GEMM_DEFAULT = -1, CUBLAS_GEMM_DEFAULT_TENSOR_OP = 99 };
enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_16BF = 14 };
using cudaDataType = cudaDataType_t;

enum cublasMath_t {
  CUBLAS_DEFAULT_MATH = 0,
  CUBLAS_PEDANTIC_MATH = 2,
  CUBLAS_TF32_TENSOR_OP_MATH = 3,
  CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION = 16,
};

enum cublasComputeType_t {
  CUBLAS_COMPUTE_32F = 68,
  CUBLAS_COMPUTE_32F_PEDANTIC = 69,
  CUBLAS_COMPUTE_32F_FAST_16BF = 75,
  CUBLAS_COMPUTE_32F_FAST_TF32 = 77,
};

struct cublasContext {
  cudaStream_t stream = nullptr;
  cuda_emulation::ProductScratch scratch;
};
using cublasHandle_t = cublasContext*;

inline const char* cublasGetStatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH:
      return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR:
      return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
  }
  return "unknown status";
}
inline const char* cublasGetStatusString(cublasStatus_t status) {
  return cublasGetStatusName(status);
}

// As on the device, the first handle must not be made while a stream is captured.
inline cublasStatus_t cublasCreate(cublasHandle_t* handle) {
  *handle = nullptr;
  if (cuda_emulation::runtime().outside_of_captures() != cudaSuccess) return CUBLAS_STATUS_ALLOC_FAILED;
  *handle = new cublasContext;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasDestroy(cublasHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  handle->stream = stream;
  return CUBLAS_STATUS_SUCCESS;
}
inline cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t) {
  return handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}
inline cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void* workspace, size_t bytes) {
  if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
  return bytes == 0 || cuda_emulation::runtime().memory.allocated(workspace, bytes)
             ? CUBLAS_STATUS_SUCCESS
             : CUBLAS_STATUS_INVALID_VALUE;
}

namespace cuda_emulation {

// What all products say alike: C (m, n) = alpha op(A) (m, k) op(B) (k, n) + beta C. alpha and beta are
// numbers on the host, read when the call is made.
struct ProductCall {
  cublasHandle_t handle;
  cublasOperation_t transa, transb;
  int m, n, k;
  const void *alpha, *beta;
  ColumnMatrix a, b, c;
  cublasComputeType_t compute;

  ProductCall(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n, int k,
              const void* alpha, const void* a, cudaDataType a_type, int lda, const void* b,
              cudaDataType b_type, int ldb, const void* beta, void* c, cudaDataType c_type, int ldc,
              cublasComputeType_t compute)
      : handle(handle),
        transa(transa),
        transb(transb),
        m(m),
        n(n),
        k(k),
        alpha(alpha),
        beta(beta),
        a(matrix(a, a_type, transa == CUBLAS_OP_N ? m : k, transa == CUBLAS_OP_N ? k : m, lda)),
        b(matrix(b, b_type, transb == CUBLAS_OP_N ? k : n, transb == CUBLAS_OP_N ? n : k, ldb)),
        c(matrix(c, c_type, m, n, ldc)),
        compute(compute) {}

  static ColumnMatrix matrix(const void* data, cudaDataType type, int rows, int cols, int stride) {
    return {const_cast<void*>(data), type == CUDA_R_16BF, rows, cols, stride};
  }

  cublasStatus_t valid() const {
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (m < 0 || n < 0 || k < 0 || !alpha || !beta) return CUBLAS_STATUS_INVALID_VALUE;
    for (const ColumnMatrix* x : {&a, &b, &c}) {
      if (x->stride < std::max<int64_t>(1, x->rows)) return CUBLAS_STATUS_INVALID_VALUE;
    }
    const bool together = a.bf16 == b.bf16 && (a.bf16 || !c.bf16);
    return together ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
  }

  // Runs `count` products, the i-th on the matrices that of_batch(i) returns: C, A, B.
  template <class OfBatch>
  cublasStatus_t submit(int count, OfBatch of_batch) const {
    if (const cublasStatus_t status = valid()) return status;
    if (count < 0) return CUBLAS_STATUS_INVALID_VALUE;
    const ProductFactors factors{transa != CUBLAS_OP_N, transb != CUBLAS_OP_N,
                                 *static_cast<const float*>(alpha), *static_cast<const float*>(beta)};
    const auto work = [=, handle = handle] {
      const DeviceMemory::Access access(runtime().memory);
      for (int i = 0; i < count; i++) {
        const auto [c, a, b] = of_batch(i);
        product(c, a, b, factors, handle->scratch);
      }
      runtime().memory.check([] { return std::string("cuBLAS"); });
    };
    const cudaError_t error = runtime().submit(handle->stream, NodeKind::library, work);
    return error == cudaSuccess ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_EXECUTION_FAILED;
  }
};

struct ProductMatrices {
  ColumnMatrix c, a, b;
};

}  // namespace cuda_emulation

inline cublasStatus_t cublasGemmEx(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb,
                                   int m, int n, int k, const void* alpha, const void* A, cudaDataType Atype,
                                   int lda, const void* B, cudaDataType Btype, int ldb, const void* beta,
                                   void* C, cudaDataType Ctype, int ldc, cublasComputeType_t compute,
                                   cublasGemmAlgo_t) {
  const cuda_emulation::ProductCall call(handle, transa, transb, m, n, k, alpha, A, Atype, lda, B, Btype, ldb,
                                         beta, C, Ctype, ldc, compute);
  return call.submit(1, [c = call.c, a = call.a, b = call.b](int) {
    return cuda_emulation::ProductMatrices{c, a, b};
  });
}

inline cublasStatus_t cublasGemmStridedBatchedEx(
    cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb, int m, int n, int k,
    const void* alpha, const void* A, cudaDataType Atype, int lda, long long strideA, const void* B,
    cudaDataType Btype, int ldb, long long strideB, const void* beta, void* C, cudaDataType Ctype, int ldc,
    long long strideC, int count, cublasComputeType_t compute, cublasGemmAlgo_t) {
  const cuda_emulation::ProductCall call(handle, transa, transb, m, n, k, alpha, A, Atype, lda, B, Btype, ldb,
                                         beta, C, Ctype, ldc, compute);
  return call.submit(count, [=, c = call.c, a = call.a, b = call.b](int i) {
    return cuda_emulation::ProductMatrices{c.moved(i * strideC), a.moved(i * strideA), b.moved(i * strideB)};
  });
}

// The arrays of pointers lie on the device.
inline cublasStatus_t cublasGemmBatchedEx(cublasHandle_t handle, cublasOperation_t transa,
                                          cublasOperation_t transb, int m, int n, int k, const void* alpha,
                                          const void* const A[], cudaDataType Atype, int lda,
                                          const void* const B[], cudaDataType Btype, int ldb,
                                          const void* beta, void* const C[], cudaDataType Ctype, int ldc,
                                          int count, cublasComputeType_t compute, cublasGemmAlgo_t) {
  const cuda_emulation::ProductCall call(handle, transa, transb, m, n, k, alpha, nullptr, Atype, lda, nullptr,
                                         Btype, ldb, beta, nullptr, Ctype, ldc, compute);
  return call.submit(count, [=, c = call.c, a = call.a, b = call.b](int i) {
    return cuda_emulation::ProductMatrices{c.at(C[i]), a.at(const_cast<void*>(A[i])),
                                           b.at(const_cast<void*>(B[i]))};
  });
}

inline cublasStatus_t cublasSgemm(cublasHandle_t handle, cublasOperation_t transa, cublasOperation_t transb,
                                  int m, int n, int k, const float* alpha, const float* A, int lda,
                                  const float* B, int ldb, const float* beta, float* C, int ldc) {
  return cublasGemmEx(handle, transa, transb, m, n, k, alpha, A, CUDA_R_32F, lda, B, CUDA_R_32F, ldb, beta, C,
                      CUDA_R_32F, ldc, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}

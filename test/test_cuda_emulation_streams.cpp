// The CPU in the place of a GPU: streams, events, graphs and cuBLAS.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "cuda_emulation_test.h"
#include "xmod/cuda_common.h"

namespace xmod::emulation_test {

// ---------------------------------------------------------------------------------------------------
// Streams, events, graphs

class CudaEmulationStream : public CudaEmulation {
 protected:
  CudaEmulationStream() { cuda_check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~CudaEmulationStream() override { cuda_check(cudaStreamDestroy(stream_)); }

  // What work() gives the stream becomes a graph; null if it cannot.
  template <class Work>
  cudaGraph_t capture(Work work, cudaError_t expected = cudaSuccess) {
    cudaGraph_t graph = nullptr;
    cuda_check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    work();
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), expected);
    return graph;
  }

  cudaStream_t stream_ = nullptr;
};

TEST_F(CudaEmulationStream, WhatTheHostGetsArrivesWhenItWaits) {
  const Array<float> memory({1, 2});
  Floats host = {7, 7};
  cuda_check(cudaMemcpyAsync(host.data(), memory, 8, cudaMemcpyDeviceToHost, stream_));
  EXPECT_TRUE(std::isnan(host[0]) && std::isnan(host[1]));
  launch(multiply<float, 10>, 1, 32, 0, stream_, memory, memory, 0.0f, 2);
  cuda_check(cudaStreamSynchronize(stream_));
  EXPECT_EQ(host, (Floats{1, 2}));
  EXPECT_EQ(memory.values(), (Floats{10, 20}));
}

TEST_F(CudaEmulationStream, EventsTellTheTimeBetweenThem) {
  cudaEvent_t begin, end;
  cuda_check(cudaEventCreate(&begin));
  cuda_check(cudaEventCreate(&end));
  float milliseconds = -1;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidResourceHandle);
  cuda_check(cudaEventRecord(begin, stream_));
  const Array<float> memory(Floats(1000, 1.0f));
  launch(multiply<float, 1>, 4, 256, 0, stream_, memory, memory, 1.0f, 1000);
  cuda_check(cudaEventRecord(end, stream_));
  cuda_check(cudaEventSynchronize(end));
  cuda_check(cudaEventElapsedTime(&milliseconds, begin, end));
  EXPECT_GT(milliseconds, 0);
  cuda_check(cudaEventDestroy(begin));
  cuda_check(cudaEventDestroy(end));
}

TEST_F(CudaEmulationStream, AGraphRepeatsWhatWasCaptured) {
  const Array<float> a({1, 2}), b({0, 0});
  float addend = 1;
  const cudaGraph_t graph = capture([&] {
    cuda_check(cudaMemcpyAsync(b, a, 8, cudaMemcpyDeviceToDevice, stream_));
    launch(multiply<float, 10>, 1, 32, 0, stream_, a, b, addend, 2);
    cuda_check(cudaMemsetAsync(b, 0, 4, stream_));
    addend = 1000;  // too late: arguments are copied
  });
  EXPECT_EQ(a.values(), (Floats{1, 2})) << "nothing runs while it is captured";
  size_t nodes = 0;
  cuda_check(cudaGraphGetNodes(graph, nullptr, &nodes));
  EXPECT_EQ(nodes, 3u);

  cudaGraphExec_t executable;
  cuda_check(cudaGraphInstantiate(&executable, graph, 0));
  cuda_check(cudaGraphDestroy(graph));
  const int64_t launches = cuda_emulation::launches();
  for (int i = 0; i < 3; i++) cuda_check(cudaGraphLaunch(executable, stream_));
  cuda_check(cudaStreamSynchronize(stream_));
  EXPECT_EQ(a.values(), (Floats{1111, 2111}));
  EXPECT_EQ(b.values(), (Floats{0, 211}));
  EXPECT_EQ(cuda_emulation::launches(), launches + 3);
  cuda_check(cudaGraphExecDestroy(executable));
}

TEST_F(CudaEmulationStream, AStreamThatWaitsForACapturedOneIsCapturedToo) {
  cudaStream_t other;
  cudaEvent_t fork, join;
  cuda_check(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  cuda_check(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  cuda_check(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  const Array<float> memory({1, 2});
  const auto fork_and_join = [&](bool joined) {
    cuda_check(cudaEventRecord(fork, stream_));
    cuda_check(cudaStreamWaitEvent(other, fork));
    launch(multiply<float, 10>, 1, 32, 0, other, memory, memory, 0.0f, 2);
    if (!joined) return;
    cuda_check(cudaEventRecord(join, other));
    cuda_check(cudaStreamWaitEvent(stream_, join));
  };
  const cudaGraph_t graph = capture([&] { fork_and_join(true); });
  size_t nodes = 0;
  cuda_check(cudaGraphGetNodes(graph, nullptr, &nodes));
  EXPECT_EQ(nodes, 1u);
  cuda_check(cudaGraphDestroy(graph));
  EXPECT_EQ(memory.values(), (Floats{1, 2}));
  EXPECT_EQ(capture([&] { fork_and_join(false); }, cudaErrorStreamCaptureUnjoined), nullptr);
  EXPECT_EQ(cudaGetLastError(), cudaErrorStreamCaptureUnjoined);
  launch(multiply<float, 10>, 1, 32, 0, other, memory, memory, 0.0f, 2);
  EXPECT_EQ(memory.values(), (Floats{10, 20}));
  cuda_check(cudaEventDestroy(fork));
  cuda_check(cudaEventDestroy(join));
  cuda_check(cudaStreamDestroy(other));
}

TEST_F(CudaEmulationStream, WorkThatTheHostWaitsForCannotBeCaptured) {
  const Array<float> memory({1, 2});
  float* fresh = nullptr;
  float host = 5;
  cudaEvent_t event;
  cuda_check(cudaEventCreate(&event));
  const std::vector<std::function<cudaError_t()>> forbidden = {
      [&] { return cudaStreamSynchronize(stream_); },
      [&] { return cudaDeviceSynchronize(); },
      [&] { return cudaMemcpy(&host, memory, 4, cudaMemcpyDeviceToHost); },
      [&] { return cudaMemcpy(memory, &host, 4, cudaMemcpyHostToDevice); },
      [&] { return cudaMalloc(&fresh, 4); },
      [&] { return cudaFree(memory); },
      [&] {
        cuda_check(cudaEventRecord(event, stream_));
        return cudaEventSynchronize(event);
      },
  };
  for (size_t i = 0; i < forbidden.size(); i++) {
    SCOPED_TRACE(i);
    const cudaGraph_t graph = capture(
        [&] {
          launch(multiply<float, 10>, 1, 32, 0, stream_, memory, memory, 0.0f, 2);
          EXPECT_EQ(forbidden[i](), cudaErrorStreamCaptureUnsupported);
          EXPECT_NE(error_of([&] {
                      launch(multiply<float, 10>, 1, 32, 0, stream_, memory, memory, 0.0f, 2);
                    }).find("cudaErrorStreamCaptureInvalidated"),
                    std::string::npos);
        },
        cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(graph, nullptr);
    EXPECT_EQ(cudaGetLastError(), cudaErrorStreamCaptureInvalidated);
  }
  EXPECT_EQ(memory.values(), (Floats{1, 2}));
  EXPECT_EQ(host, 5);
  cuda_check(cudaEventDestroy(event));
}

using CudaEmulationStreamDeathTest = CudaEmulationStream;

TEST_F(CudaEmulationStreamDeathTest, AGraphMustNotReadAVariableOfAFunction) {
  const Array<float> memory({1, 2});
  const auto upload = [&] {
    const float value = 3;
    return cudaMemcpyAsync(memory, &value, 4, cudaMemcpyHostToDevice, stream_);
  };
  cuda_check(upload());
  EXPECT_DEATH(capture(upload), "a graph would copy from or to a variable of a function");
}

// ---------------------------------------------------------------------------------------------------
// cuBLAS

class CudaEmulationBlas : public CudaEmulationStream {
 protected:
  CudaEmulationBlas() {
    cuda_check(cublasCreate(&handle_));
    cuda_check(cublasSetStream(handle_, stream_));
    cuda_check(cublasSetMathMode(handle_, CUBLAS_DEFAULT_MATH));
  }
  ~CudaEmulationBlas() override { cuda_check(cublasDestroy(handle_)); }

  cublasHandle_t handle_ = nullptr;
};

template <class T>
constexpr cudaDataType kType = std::is_same_v<T, float> ? CUDA_R_32F : CUDA_R_16BF;

template <class T>
std::vector<T> random_numbers(size_t n, uint64_t seed) {
  const Floats values = normal_numbers(n, seed);
  return std::vector<T>(values.begin(), values.end());
}

// Products of column-major matrices, whose columns lie further apart than they are long, in double precision.
struct BlasProblem {
  int m = 13, n = 7, k = 29;
  cublasOperation_t transa, transb;
  float alpha, beta;

  int a_rows() const { return transa == CUBLAS_OP_N ? m : k; }
  int b_rows() const { return transb == CUBLAS_OP_N ? k : n; }
  int lda() const { return a_rows() + 3; }
  int ldb() const { return b_rows() + 1; }
  int ldc() const { return m + 2; }
  size_t a_size() const { return static_cast<size_t>(lda() * (m + k - a_rows())); }
  size_t b_size() const { return static_cast<size_t>(ldb() * (k + n - b_rows())); }
  size_t c_size() const { return static_cast<size_t>(ldc() * n); }

  template <class In, class Out>
  std::vector<Out> expected(const In* a, const In* b, const Out* c) const {
    std::vector<Out> out(c, c + c_size());
    for (int j = 0; j < n; j++) {
      for (int i = 0; i < m; i++) {
        double sum = 0;
        for (int l = 0; l < k; l++) {
          const float a_il = a[transa == CUBLAS_OP_N ? l * lda() + i : i * lda() + l];
          const float b_lj = b[transb == CUBLAS_OP_N ? j * ldb() + l : l * ldb() + j];
          sum += double{a_il} * b_lj;
        }
        const double before = beta == 0 ? 0 : beta * static_cast<float>(c[j * ldc() + i]);
        out[static_cast<size_t>(j * ldc() + i)] = static_cast<float>(alpha * sum + before);
      }
    }
    return out;
  }
};

std::vector<BlasProblem> blas_problems() {
  std::vector<BlasProblem> all;
  for (cublasOperation_t transa : {CUBLAS_OP_N, CUBLAS_OP_T}) {
    for (cublasOperation_t transb : {CUBLAS_OP_N, CUBLAS_OP_T}) {
      for (auto [alpha, beta] : {std::pair{1.0f, 0.0f}, {1.0f, 1.0f}, {-0.5f, 0.25f}, {0.0f, 2.0f}})
        all.push_back({.transa = transa, .transb = transb, .alpha = alpha, .beta = beta});
    }
  }
  return all;
}

template <class T>
void expect_close(const std::vector<T>& result, const std::vector<T>& expected) {
  const float bound = std::is_same_v<T, float> ? 2e-5f : 0.01f;  // of the value's size
  ASSERT_EQ(result.size(), expected.size());
  for (size_t i = 0; i < result.size(); i++) {
    const float got = result[i], wanted = expected[i];
    ASSERT_NEAR(got, wanted, bound * std::max(1.0f, std::abs(wanted))) << "element " << i;
  }
}

template <class In, class Out>
void expect_products(cublasHandle_t handle, cudaStream_t stream) {
  constexpr size_t kBatch = 3;
  for (const BlasProblem& p : blas_problems()) {
    const std::vector<In> a = random_numbers<In>(kBatch * p.a_size(), 1),
                          b = random_numbers<In>(kBatch * p.b_size(), 2);
    std::vector<Out> c = random_numbers<Out>(kBatch * p.c_size(), 3);
    if (p.beta == 0) std::fill(c.begin(), c.end(), Out{std::numeric_limits<float>::quiet_NaN()});
    const Array<In> a_device(a), b_device(b);
    const Array<Out> one(c), strided(c), batched(c);

    cuda_check(cublasGemmEx(handle, p.transa, p.transb, p.m, p.n, p.k, &p.alpha, a_device, kType<In>, p.lda(),
                            b_device, kType<In>, p.ldb(), &p.beta, one, kType<Out>, p.ldc(),
                            CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    cuda_check(cublasGemmStridedBatchedEx(handle, p.transa, p.transb, p.m, p.n, p.k, &p.alpha, a_device,
                                          kType<In>, p.lda(), static_cast<long long>(p.a_size()), b_device,
                                          kType<In>, p.ldb(), static_cast<long long>(p.b_size()), &p.beta,
                                          strided, kType<Out>, p.ldc(), static_cast<long long>(p.c_size()),
                                          kBatch, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));

    std::vector<const void*> a_pointers, b_pointers;
    std::vector<void*> c_pointers;
    for (size_t i = 0; i < kBatch; i++) {
      a_pointers.push_back(a_device + (kBatch - 1 - i) * p.a_size());
      b_pointers.push_back(b_device + i * p.b_size());
      c_pointers.push_back(batched + i * p.c_size());
    }
    const Array<const void*> a_array(a_pointers), b_array(b_pointers);
    const Array<void*> c_array(c_pointers);
    cuda_check(cublasGemmBatchedEx(handle, p.transa, p.transb, p.m, p.n, p.k, &p.alpha, a_array, kType<In>,
                                   p.lda(), b_array, kType<In>, p.ldb(), &p.beta, c_array, kType<Out>,
                                   p.ldc(), kBatch, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    cuda_check(cudaStreamSynchronize(stream));

    const auto expected = [&](size_t a_at, size_t at) {
      return p.expected(a.data() + a_at * p.a_size(), b.data() + at * p.b_size(), c.data() + at * p.c_size());
    };
    const auto inside = [&](const std::vector<Out>& all, size_t at) {  // without the rows between the columns
      std::vector<Out> out(p.c_size());
      for (size_t i = 0; i < out.size(); i++) {
        if (static_cast<int>(i) % p.ldc() < p.m) out[i] = all[at * p.c_size() + i];
      }
      return out;
    };
    for (size_t i = 0; i < kBatch; i++) {
      expect_close(inside(strided.values(), i), inside(expected(i, i), 0));
      expect_close(inside(batched.values(), i), inside(expected(kBatch - 1 - i, i), 0));
    }
    expect_close(inside(one.values(), 0), inside(expected(0, 0), 0));
    const std::vector<Out> all = one.values();
    for (size_t i = 0; i < c.size(); i++) {
      const bool untouched = i >= p.c_size() || static_cast<int>(i) % p.ldc() >= p.m;
      if (untouched) {
        EXPECT_EQ(std::memcmp(&all[i], &c[i], sizeof(Out)), 0) << i;
      }
    }
  }
}

TEST_F(CudaEmulationBlas, ProductsOfAllShapesAndTypes) {
  expect_products<float, float>(handle_, stream_);
  expect_products<bf16, float>(handle_, stream_);
  expect_products<bf16, bf16>(handle_, stream_);
}

TEST_F(CudaEmulationBlas, AProductIsCapturedWithItsFactors) {
  const Array<float> a(Floats{2}), b(Floats{3}), c(Floats{10});
  float alpha = 1, beta = 1;
  const cudaGraph_t graph = capture([&] {
    cuda_check(cublasSgemm(handle_, CUBLAS_OP_N, CUBLAS_OP_N, 1, 1, 1, &alpha, a, 1, b, 1, &beta, c, 1));
    alpha = 100;
  });
  EXPECT_EQ(c.values(), Floats{10});
  cudaGraphExec_t executable;
  cuda_check(cudaGraphInstantiate(&executable, graph, 0));
  cuda_check(cudaGraphLaunch(executable, stream_));
  cuda_check(cudaGraphLaunch(executable, stream_));
  EXPECT_EQ(c.values(), Floats{22});
  cuda_check(cudaGraphExecDestroy(executable));
  cuda_check(cudaGraphDestroy(graph));
}

TEST_F(CudaEmulationBlas, ArgumentsThatCuBlasRefusesAreErrors) {
  const Array<float> a(6), b(6), c(4);
  const float one = 1;
  const auto product = [&](int m, int lda, cudaDataType a_type, cudaDataType b_type, cudaDataType c_type) {
    return cublasGemmEx(handle_, CUBLAS_OP_N, CUBLAS_OP_N, m, 2, 3, &one, a, a_type, lda, b, b_type, 3, &one,
                        c, c_type, 2, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
  };
  EXPECT_EQ(product(2, 2, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(product(-1, 2, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(product(2, 1, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(product(2, 2, CUDA_R_32F, CUDA_R_16BF, CUDA_R_32F), CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(product(2, 2, CUDA_R_32F, CUDA_R_32F, CUDA_R_16BF), CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_NE(error_of([&] {
              cuda_check(product(2, 1, CUDA_R_32F, CUDA_R_32F, CUDA_R_32F));
            }).find("cuBLAS: product failed: CUBLAS_STATUS_INVALID_VALUE"),
            std::string::npos);
}

TEST_F(CudaEmulationDeathTest, AMatrixThatReachesOutOfItsAllocationStopsTheProgram) {
  cublasHandle_t handle;
  cuda_check(cublasCreate(&handle));
  const Array<float> a(6), b(6), c(4);
  const float one = 1;
  EXPECT_DEATH(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 4, &one, a, 2, b, 4, &one, c, 2),
               "A has 2 x 4 elements in columns 2 apart, which reach beyond");
  EXPECT_DEATH(cublasSgemm(handle, CUBLAS_OP_N, CUBLAS_OP_N, 2, 2, 3, &one, a, 2, b, 3, &one, c, 3),
               "C has 2 x 2 elements in columns 3 apart, which reach beyond");
  cuda_check(cublasDestroy(handle));
}

}  // namespace xmod::emulation_test

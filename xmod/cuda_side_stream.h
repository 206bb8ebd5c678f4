// Copies beside the running step, and sums of what other ranks have sent: what xmod/device_exchange.h needs
// of a GPU.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "xmod/cuda_common.h"
#include "xmod/cuda_sums.h"

namespace xmod {

class CudaStream {
 public:
  CudaStream() { cuda_check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~CudaStream() { cudaStreamDestroy(stream_); }
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// A place in a stream's work, of which the host can ask whether the GPU has come there.
class CudaMark {
 public:
  CudaMark() { cuda_check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  ~CudaMark() { cudaEventDestroy(event_); }
  CudaMark(const CudaMark&) = delete;
  CudaMark& operator=(const CudaMark&) = delete;

  // In work that is being captured, the mark becomes part of the graph, and is set anew whenever that runs.
  void set(cudaStream_t stream) {
    cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    cuda_check(cudaStreamIsCapturing(stream, &capturing));
    if (capturing == cudaStreamCaptureStatusActive) {
      cuda_check(cudaEventRecordWithFlags(event_, stream, cudaEventRecordExternal));
    } else {
      cuda_check(cudaEventRecord(event_, stream));
    }
  }

  bool passed() const {
    const cudaError_t error = cudaEventQuery(event_);
    if (error == cudaErrorNotReady) return false;
    cuda_check(error);
    return true;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// own (n) becomes the sum over the ranks in their order; others: (ranks - 1, stride), of all but `rank`.
__global__ void __launch_bounds__(kRowThreads)
    add_in_rank_order_kernel(float* own, const float* others, int64_t stride, int rank, int ranks,
                             int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float sum = rank == 0 ? own[i] : others[i];
  for (int r = 1; r < ranks; r++) sum += r == rank ? own[i] : others[(r < rank ? r : r - 1) * stride + i];
  own[i] = sum;
}

class CudaSideStream {
 public:
  using Mark = std::shared_ptr<CudaMark>;

  CudaSideStream() = default;
  ~CudaSideStream() {
    for (float* data : host_) cudaFreeHost(data);
    for (float* data : device_) cudaFree(data);
  }
  CudaSideStream(const CudaSideStream&) = delete;
  CudaSideStream& operator=(const CudaSideStream&) = delete;

  // n numbers of the host that the GPU reaches by itself; kept as long as the stream, as the next.
  float* allocate_host(int64_t n) {
    float* data = nullptr;
    cuda_check(cudaMallocHost(&data, static_cast<size_t>(n) * sizeof(float)));
    host_.push_back(data);
    return data;
  }
  float* allocate_device(int64_t n) {
    float* data = nullptr;
    cuda_check(cudaMalloc(&data, static_cast<size_t>(n) * sizeof(float)));
    device_.push_back(data);
    return data;
  }

  template <class Number>
  void to_host(Number* host, const Number* device, int64_t n) {
    copy(host, device, n, cudaMemcpyDeviceToHost);
  }
  template <class Number>
  void to_device(Number* device, const Number* host, int64_t n) {
    copy(device, host, n, cudaMemcpyHostToDevice);
  }

  void add_in_rank_order(float* own, const float* others, int64_t stride, int rank, int ranks, int64_t n) {
    const auto blocks = static_cast<unsigned>((n + kRowThreads - 1) / kRowThreads);
    launch(add_in_rank_order_kernel, blocks, kRowThreads, 0, stream_.get(), own, others, stride, rank, ranks,
           n);
  }

  // Behind what the stream has been given so far.
  Mark mark() {
    auto mark = std::make_shared<CudaMark>();
    mark->set(stream_.get());
    return mark;
  }
  static bool passed(const Mark& mark) { return mark->passed(); }

  void wait() { cuda_check(cudaStreamSynchronize(stream_.get())); }

 private:
  template <class Number>
  void copy(Number* to, const Number* from, int64_t n, cudaMemcpyKind kind) {
    cuda_check(cudaMemcpyAsync(to, from, static_cast<size_t>(n) * sizeof(Number), kind, stream_.get()));
  }

  CudaStream stream_;
  std::vector<float*> host_, device_;
};

}  // namespace xmod

// Work that is launched again and again with the same arguments: from its second time on as a CUDA graph. A
// deep model is thousands of short kernels, which the GPU finishes sooner than the host can launch them one
// by one.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "xmod/cuda_common.h"
#include "xmod/error.h"

namespace xmod {

// What a work's launches depend on, besides what lies in the memory that they read.
struct WorkKey {
  const void* owner;
  int64_t B, T;
  float scale;

  bool operator==(const WorkKey&) const = default;
};

class CudaGraph {
 public:
  CudaGraph() = default;
  ~CudaGraph() { drop(); }
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  // Runs work() on the stream. `allocations` changes whenever memory that it may use is allocated or
  // released: then it runs launch by launch once more, so that scratch finds its size before a graph is made.
  template <class Work>
  void run(const WorkKey& key, const int64_t& allocations, cudaStream_t stream, Work work) {
    if (!enabled || !(key == key_) || allocations != allocations_) {
      drop();
      work();
      key_ = key;
      allocations_ = allocations;
      return;
    }
    if (!graph_ && !refused_) capture(stream, work);
    if (graph_) {
      cuda_check(cudaGraphLaunch(graph_, stream));
    } else {
      work();
    }
  }

  // Kernels, products, copies and fills of the graph; 0: there is none.
  int64_t nodes() const { return nodes_; }

  bool enabled = true;

 private:
  template <class Work>
  void capture(cudaStream_t stream, Work work) {
    cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    std::string failure;
    try {
      work();
    } catch (const Error& error) {
      failure = error.what();
    }
    cudaGraph_t graph = nullptr;
    const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
    if (failure.empty() && ended != cudaSuccess) failure = cudaGetErrorName(ended);
    if (failure.empty()) {
      const cudaError_t error = cudaGraphInstantiate(&graph_, graph, 0);
      if (error != cudaSuccess) failure = cudaGetErrorName(error);
      size_t nodes = 0;
      cuda_check(cudaGraphGetNodes(graph, nullptr, &nodes));
      nodes_ = static_cast<int64_t>(nodes);
    }
    if (graph) cudaGraphDestroy(graph);
    if (failure.empty()) return;
    cudaGetLastError();  // it is dealt with
    drop();
    refused_ = true;
    if (!told_) std::fprintf(stderr, "no CUDA graph: %s; training goes on without\n", failure.c_str());
    told_ = true;
  }

  void drop() {
    if (graph_) cudaGraphExecDestroy(graph_);
    graph_ = nullptr;
    nodes_ = 0;
    refused_ = false;
  }

  WorkKey key_ = {};
  int64_t allocations_ = -1;
  cudaGraphExec_t graph_ = nullptr;
  int64_t nodes_ = 0;
  bool refused_ = false;  // the work of this key
  bool told_ = false;
};

}  // namespace xmod

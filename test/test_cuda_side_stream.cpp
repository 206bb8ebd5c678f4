// What the exchange between ranks asks of a GPU: sums in the order of the ranks, copies beside a step, marks
// in it.
#include "xmod/cuda_side_stream.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "normal_numbers.h"
#include "xmod/gradient_exchange.h"

namespace xmod {
namespace {

TEST(CudaSideStream, AddsAsTheHostDoes) {
  constexpr int kRanks = 4;
  constexpr int64_t n = 1000, stride = 1024;
  CudaSideStream side;
  float* own = side.allocate_device(n);
  float* others = side.allocate_device((kRanks - 1) * stride);
  float* result = side.allocate_host(n);
  for (int rank = 0; rank < kRanks; rank++) {
    Floats mine = normal_numbers(n, 1), theirs = normal_numbers((kRanks - 1) * stride, 2);
    side.to_device(own, mine.data(), n);
    side.to_device(others, theirs.data(), (kRanks - 1) * stride);
    side.add_in_rank_order(own, others, stride, rank, kRanks, n);
    side.to_host(result, own, n);
    side.wait();
    add_in_rank_order(mine.data(), theirs.data(), stride, rank, kRanks, n);
    EXPECT_EQ(std::memcmp(result, mine.data(), n * sizeof(float)), 0) << "rank " << rank;
  }
}

// Numbers that came by a copy are there once its mark has been passed.
TEST(CudaSideStream, MarksFollowTheCopies) {
  constexpr int64_t n = 300;
  CudaSideStream side;
  const Floats values = normal_numbers(n, 3);
  float* device = side.allocate_device(n);
  float* host = side.allocate_host(n);
  side.to_device(device, values.data(), n);
  side.to_host(host, device, n);
  const CudaSideStream::Mark mark = side.mark();
  while (!side.passed(mark)) {
  }
  EXPECT_EQ(std::memcmp(host, values.data(), n * sizeof(float)), 0);
}

// A mark in a graph is set whenever the graph runs.
TEST(CudaMark, IsPartOfAGraph) {
  CudaStream stream;
  CudaMark mark;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cuda_check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal));
  mark.set(stream.get());
  cuda_check(cudaStreamEndCapture(stream.get(), &graph));
  size_t nodes = 0;
  cuda_check(cudaGraphGetNodes(graph, nullptr, &nodes));
  EXPECT_EQ(nodes, 1u);
  cuda_check(cudaGraphInstantiate(&executable, graph, 0));
  for (int run = 0; run < 2; run++) {
    cuda_check(cudaGraphLaunch(executable, stream.get()));
    cuda_check(cudaStreamSynchronize(stream.get()));
    EXPECT_TRUE(mark.passed());
  }
  cuda_check(cudaGraphExecDestroy(executable));
  cuda_check(cudaGraphDestroy(graph));
}

}  // namespace
}  // namespace xmod

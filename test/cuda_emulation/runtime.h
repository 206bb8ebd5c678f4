// The runtime's state and what its functions do.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "block.h"
#include "memory.h"
#include "report.h"
#include "runtime_types.h"

namespace cuda_emulation {

constexpr size_t kSharedBytes = 48 << 10;        // of a block, without asking
constexpr size_t kSharedBytesOptin = 227 << 10;  // and with

class Runtime {
 public:
  static Runtime& instance() {
    static Runtime runtime;
    return runtime;
  }

  DeviceMemory& memory = DeviceMemory::instance();
  cudaStream_t const default_stream = new CUstream_st;
  uint64_t thread_order = environment_number("CUDA_EMULATION_SEED");
  int devices = 1;
  bool has_virtual_memory = true;
  cudaError_t device_error = cudaSuccess;
  int64_t launches = 0;

  // ------------------------------------------------------------------------------------------------
  // errors

  cudaError_t result(cudaError_t error) {
    if (error != cudaSuccess) last_error_ = error;
    return error;
  }
  cudaError_t last_error(bool forget) {
    return forget ? std::exchange(last_error_, cudaSuccess) : last_error_;
  }

  // ------------------------------------------------------------------------------------------------
  // work for streams

  Stream& stream(cudaStream_t stream) {
    return reinterpret_cast<uintptr_t>(stream) <= 2 ? *default_stream : *stream;
  }

  cudaError_t submit(cudaStream_t to, NodeKind kind, std::function<void()> work) {
    Stream& s = stream(to);
    if (s.capture) {
      if (s.capture->broken) return result(cudaErrorStreamCaptureInvalidated);
      s.capture->graph.nodes.push_back({kind, std::move(work)});
      s.capture->find(&s)->work++;
      return cudaSuccess;
    }
    if (&s == default_stream && break_captures([](const Capture& c) { return c.origin()->blocking; }))
      return result(cudaErrorStreamCaptureImplicit);
    work();
    return cudaSuccess;
  }

  // For what must not happen while a stream is captured: the device would have to wait, or to allocate.
  cudaError_t outside_of_captures() {
    const bool broke = break_captures([](const Capture& c) { return !c.relaxed; });
    return result(broke ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
  }

  cudaError_t wait_for(Stream& s) {
    if (s.capture) {
      s.capture->broken = true;
      return result(cudaErrorStreamCaptureUnsupported);
    }
    if (const cudaError_t error = outside_of_captures()) return error;
    s.deliver();
    return cudaSuccess;
  }

  cudaError_t wait_for_all() {
    if (break_captures([](const Capture&) { return true; })) return result(cudaErrorStreamCaptureUnsupported);
    default_stream->deliver();
    for (Stream* s : streams_) s->deliver();
    return cudaSuccess;
  }

  void add(Stream* s) { streams_.push_back(s); }
  void remove(Stream* s) { std::erase(streams_, s); }

  cudaError_t begin_capture(Stream& s, bool relaxed) {
    if (&s == default_stream) return result(cudaErrorStreamCaptureUnsupported);
    if (s.capture) return result(cudaErrorIllegalState);
    s.capture = std::make_shared<Capture>(Capture{{{&s}}, relaxed, false, {}});
    captures_.push_back(s.capture.get());
    return cudaSuccess;
  }

  // Stream s waits for what was captured before the event, and is captured with it.
  void join_capture(Stream& s, const Event& event) {
    Capture& capture = *event.capture;
    if (!s.capture) {
      s.capture = event.capture;
      capture.members.push_back({&s, 1});
    }
    Capture::Member* other = capture.find(event.stream);
    if (other && event.stream != &s) other->awaited = std::max(other->awaited, event.captured_work);
  }

  cudaError_t end_capture(Stream& s, cudaGraph_t* graph) {
    *graph = nullptr;
    if (!s.capture) return result(cudaErrorIllegalState);
    if (s.capture->origin() != &s) return result(cudaErrorStreamCaptureUnmatched);
    const std::shared_ptr<Capture> capture = s.capture;
    std::erase(captures_, capture.get());
    bool joined = true;
    for (const Capture::Member& member : capture->members) {
      member.stream->capture = nullptr;
      joined &= member.stream == &s || member.awaited == member.work;
    }
    if (capture->broken) return result(cudaErrorStreamCaptureInvalidated);
    if (!joined) return result(cudaErrorStreamCaptureUnjoined);
    *graph = new CUgraph_st{{std::move(capture->graph.nodes)}};
    return cudaSuccess;
  }

  // ------------------------------------------------------------------------------------------------
  // kernels

  void allow_shared_bytes(const void* kernel, size_t bytes) { shared_bytes_allowed_[kernel] = bytes; }

  cudaError_t valid(const Launch& launch) {
    const auto allowed = shared_bytes_allowed_.find(launch.address);
    const size_t most = allowed == shared_bytes_allowed_.end() ? kSharedBytes : allowed->second;
    const dim3 g = launch.grid, b = launch.block;
    if (launch.threads() == 0 || launch.threads() > 1024 || b.z > 64) return cudaErrorInvalidConfiguration;
    if (launch.blocks() == 0 || g.x > 0x7fffffff || g.y > 65535 || g.z > 65535)
      return cudaErrorInvalidConfiguration;
    return launch.shared_bytes > most ? cudaErrorInvalidValue : cudaSuccess;
  }

  void run(Launch launch) {
    launches++;
    const DeviceMemory::Access access(memory);
    launch.seed = thread_order == 0 ? 0 : Dice(thread_order + static_cast<uint64_t>(launches)).word() | 1;
    run_blocks(launch, BlockOrder(launch.blocks(), launch.seed));
    memory.check([&] { return kernel_name(launch.address); });
  }

 private:
  // Blocks come in any order: block i of the run is number (i * step + start) % n.
  class BlockOrder {
   public:
    BlockOrder(size_t n, uint64_t seed) : n_(n) {
      if (seed == 0 || n < 2) return;
      Dice dice(seed);
      start_ = dice.below(n);
      do step_ = 1 + dice.below(n - 1);
      while (std::gcd(step_, n) != 1);
    }
    size_t block(size_t i) const { return static_cast<size_t>((__uint128_t{i} * step_ + start_) % n_); }

   private:
    size_t n_, start_ = 0, step_ = 1;
  };

  // The machine's threads share the blocks, if the first blocks show that it is worth the while.
  void run_blocks(const Launch& launch, const BlockOrder& order) {
    constexpr auto kLong = std::chrono::microseconds(500);
    const int threads = most_threads();
    while (static_cast<int>(blocks_.size()) < threads) blocks_.push_back(std::make_unique<Block>());
    const auto begin = std::chrono::steady_clock::now();
    const size_t n = launch.blocks();
    size_t done = 0;
    bool share = false;
    while (done < n && !share) {
      run_block(launch, order.block(done++), 0);
      if (threads > 1) share = (n - done) * (std::chrono::steady_clock::now() - begin) > done * kLong;
    }
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (share)
    for (size_t i = done; i < n; i++) run_block(launch, order.block(i), share ? thread_number() : 0);
  }

  void run_block(const Launch& launch, size_t number, int thread) {
    const size_t x = launch.grid.x, y = launch.grid.y;
    const uint3 index = {static_cast<unsigned>(number % x), static_cast<unsigned>(number / x % y),
                         static_cast<unsigned>(number / x / y)};
    blocks_[static_cast<size_t>(thread)]->run(launch, index);
  }

#ifdef _OPENMP
  static int most_threads() {
    return omp_in_parallel() ? 1 : omp_get_max_threads();
  }
  static int thread_number() {
    return omp_get_thread_num();
  }
#else
  static int most_threads() {
    return 1;
  }
  static int thread_number() {
    return 0;
  }
#endif

  static uint64_t environment_number(const char* name) {
    const char* value = std::getenv(name);
    return value ? std::strtoull(value, nullptr, 10) : 0;
  }

  template <class Which>
  bool break_captures(Which which) {
    bool any = false;
    for (Capture* capture : captures_) {
      if (which(*capture)) any = capture->broken = true;
    }
    return any;
  }

  cudaError_t last_error_ = cudaSuccess;
  std::vector<Stream*> streams_;
  std::vector<Capture*> captures_;
  std::map<const void*, size_t> shared_bytes_allowed_;
  std::vector<std::unique_ptr<Block>> blocks_;
};

inline Runtime& runtime() {
  return Runtime::instance();
}

// A kernel and its arguments, copied when it is launched or captured.
template <class... Parameters>
class KernelCall {
 public:
  KernelCall(void (*kernel)(Parameters...), Parameters... arguments)
      : kernel_(kernel), arguments_(std::move(arguments)...) {}

  void run(Launch launch) const {
    int number = 0;
    std::apply([&](const auto&... argument) { (check_pointer(launch, argument, number++), ...); },
               arguments_);
    launch.call = [](const void* call) {
      const auto* self = static_cast<const KernelCall*>(call);
      std::apply(self->kernel_, self->arguments_);
    };
    launch.kernel = this;
    runtime().run(launch);
  }

 private:
  template <class T>
  static void check_pointer(const Launch& launch, const T& argument, int number) {
    if constexpr (std::is_pointer_v<T>) {
      const void* pointer = reinterpret_cast<const void*>(argument);
      if (!pointer || runtime().memory.allocated(pointer, 0)) return;
      stop(kernel_name(launch.address) + text(": argument %d is a pointer to ", number) +
           (runtime().memory.contains(pointer) ? runtime().memory.describe(pointer) : "host memory"));
    }
  }

  void (*kernel_)(Parameters...);
  std::tuple<Parameters...> arguments_;
};

}  // namespace cuda_emulation

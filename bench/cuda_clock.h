// Time on a GPU's stream, by events: when work began and ended there, whenever the host launched it.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "bench/clock.h"
#include "xmod/cuda_common.h"

namespace xmod::bench {

class CudaEvent {
 public:
  CudaEvent() { cuda_check(cudaEventCreate(&event_)); }
  ~CudaEvent() {
    if (event_) cudaEventDestroy(event_);
  }
  CudaEvent(CudaEvent&& other) noexcept : event_(std::exchange(other.event_, nullptr)) {}
  CudaEvent& operator=(CudaEvent&&) = delete;

  void record(cudaStream_t stream) { cuda_check(cudaEventRecord(event_, stream)); }
  double seconds_since(const CudaEvent& begin) const {
    float milliseconds = 0;
    cuda_check(cudaEventElapsedTime(&milliseconds, begin.event_, event_));
    return milliseconds * 1e-3;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Keeps one thread busy with a chain of operations that nobody can shorten.
__global__ void stall_kernel(uint32_t* word, int64_t operations) {
  uint32_t x = *word;
  for (int64_t i = 0; i < operations; i++) x = x * 1664525u + 1013904223u;
  *word = x;
}

// Times the calls of a backend that launches its work on one stream. Most passes are shorter than it takes
// the host to launch them. So that their times do not tell of the host, the stream is stalled again and
// again, between two calls, until work for a while lies ready.
class EventClock {
 public:
  template <class Backend>
  explicit EventClock(const Backend& backend) : stream_(backend.stream()) {
    cuda_check(cudaMalloc(&word_, sizeof *word_));
    cuda_check(cudaMemsetAsync(word_, 1, sizeof *word_, stream_));
  }
  ~EventClock() { cudaFree(word_); }
  EventClock(const EventClock&) = delete;
  EventClock& operator=(const EventClock&) = delete;

  // Of one call, from its construction to its end.
  class Timer {
   public:
    Timer(EventClock& clock, std::vector<double>& seconds) : clock_(clock), lap_(clock.next_lap()) {
      clock.laps_[lap_].seconds = &seconds;
      clock.laps_[lap_].begin.record(clock.stream_);
    }
    ~Timer() { clock_.laps_[lap_].end.record(clock_.stream_); }

   private:
    EventClock& clock_;
    size_t lap_;
  };

  // Waits for the work, and puts the time of every call where it belongs.
  void collect() {
    cuda_check(cudaStreamSynchronize(stream_));
    for (size_t i = 0; i < used_; i++)
      laps_[i].seconds->push_back(laps_[i].end.seconds_since(laps_[i].begin));
    used_ = 0;
  }

  // Seconds of each run, for about `seconds` in all but three times at least; one run before them is not
  // counted.
  template <class Run>
  std::vector<double> repeat(const Run& run, double seconds) {
    constexpr int kTogether = 10;
    run();
    std::vector<double> times;
    const Stopwatch all;
    while (times.size() < 3 || all.seconds() < seconds) {
      stall();
      for (int i = 0; i < kTogether; i++) {
        const Timer timer(*this, times);
        run();
      }
      collect();
    }
    return times;
  }

 private:
  static constexpr size_t kCallsReady = 64;  // a stream takes about a thousand launches in advance
  static constexpr int64_t kOperations = int64_t{1} << 20;  // some milliseconds

  struct Lap {
    CudaEvent begin, end;
    std::vector<double>* seconds = nullptr;
  };

  size_t next_lap() {
    if (used_ % kCallsReady == 0) stall();
    if (used_ == laps_.size()) laps_.emplace_back();
    return used_++;
  }

  void stall() { launch(stall_kernel, 1, 1, 0, stream_, word_, kOperations); }

  cudaStream_t stream_;
  uint32_t* word_ = nullptr;
  std::vector<Lap> laps_;  // the first `used_` wait to be read
  size_t used_ = 0;
};

}  // namespace xmod::bench

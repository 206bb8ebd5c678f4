// Time, and what to make of many measurements of it.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <numeric>
#include <system_error>
#include <vector>

#include "xmod/stopwatch.h"

namespace xmod::bench {

// How much of the time this process was kept from the processors by others, as Linux counts it: the mean over
// `threads` busy threads. NaN where the system does not tell.
class Interruptions {
 public:
  explicit Interruptions(int threads) : threads_(threads) {}
  double share() const { return (waited() - waited_) / threads_ / watch_.seconds(); }

 private:
  // Seconds that threads of this process stood ready without a processor.
  static double waited() {
    double total = 0;
    std::error_code error;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", error)) {
      double ran = 0, waited = std::numeric_limits<double>::quiet_NaN();  // nanoseconds
      std::ifstream(task.path() / "schedstat") >> ran >> waited;
      total += waited * 1e-9;
    }
    return error ? std::numeric_limits<double>::quiet_NaN() : total;
  }

  int threads_;
  Stopwatch watch_;
  double waited_ = waited();
};

inline double smallest(const std::vector<double>& values) {
  return *std::min_element(values.begin(), values.end());
}
inline double largest(const std::vector<double>& values) {
  return *std::max_element(values.begin(), values.end());
}

inline double sum(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0);
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

// Seconds of each run, for about `seconds` in all but three times at least; one run before them is not
// counted.
template <class Run>
std::vector<double> time_repeatedly(const Run& run, double seconds) {
  run();
  std::vector<double> times;
  const Stopwatch all;
  while (times.size() < 3 || all.seconds() < seconds) {
    const Stopwatch one;
    run();
    times.push_back(one.seconds());
  }
  return times;
}

// Times the calls of a backend that has done its work when it returns.
class WallClock {
 public:
  template <class Backend>
  explicit WallClock(const Backend&) {}

  // Of one call, from its construction to its end.
  class Timer {
   public:
    Timer(WallClock&, std::vector<double>& seconds) : seconds_(seconds) {}
    ~Timer() { seconds_.push_back(watch_.seconds()); }

   private:
    std::vector<double>& seconds_;
    Stopwatch watch_;
  };

  // Makes sure that the time of every call stands where it belongs.
  void collect() {}

  template <class Run>
  std::vector<double> repeat(const Run& run, double seconds) {
    return time_repeatedly(run, seconds);
  }
};

}  // namespace xmod::bench

// The backend under test, and what tests of its passes share. Every test of a pass or of the whole model is
// written against TestBackend; the Makefile builds it once for each backend.
#pragma once

#define TESTING
#ifdef XMOD_TEST_CUDA
#include "train_xmod.cu"

using TestBackend = xmod::CudaBackend<float>;
#else
#include "train_xmod.cpp"

using TestBackend = xmod::CpuBackend;
#endif

// Whether a GPU's kernels run on the CPU: right, and thousands of times slower.
#if defined(XMOD_TEST_CUDA) && !defined(__CUDACC__)
inline constexpr bool kEmulated = true;
#else
inline constexpr bool kEmulated = false;
#endif

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "normal_numbers.h"

namespace xmod {

using Doubles = std::vector<double>;
using Ints = std::vector<int32_t>;

// For the names of parametrised tests.
inline std::string identifier(Arch arch) {
  std::string name = arch_name(arch);
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

// ---------------------------------------------------------------------------------------------------
// Comparing

// ||a - b|| / ||b||: the error of a tensor as a share of its size. NaN where either holds one.
template <class Number>
double normalised_error(const Floats& a, const std::vector<Number>& b) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < b.size(); i++) {
    const double gap = static_cast<double>(a[i]) - b[i];
    difference += gap * gap;
    size += static_cast<double>(b[i]) * b[i];
  }
  return size == 0 ? std::sqrt(difference) : std::sqrt(difference / size);
}

// Equal bit for bit: NaN equals itself, +0 and -0 differ.
template <class T>
::testing::AssertionResult same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return ::testing::AssertionFailure() << a.size() << " values, not " << b.size();
  for (size_t i = 0; i < a.size(); i++) {
    if (std::memcmp(&a[i], &b[i], sizeof(T)) == 0) continue;
    return ::testing::AssertionFailure() << "value " << i << " is " << a[i] << ", not " << b[i];
  }
  return ::testing::AssertionSuccess();
}

// ---------------------------------------------------------------------------------------------------
// Numbers on the host

// count numbers of 0 .. bound-1
inline Ints random_ids(int64_t count, int64_t bound, uint64_t seed) {
  Ints out;
  for (int64_t i = 0; i < count; i++) {
    const uint32_t word = philox(seed, stream_of("ids"), static_cast<uint64_t>(i))[0];
    out.push_back(static_cast<int32_t>(word % static_cast<uint64_t>(bound)));
  }
  return out;
}

inline Doubles doubles(const Floats& values) {
  return Doubles(values.begin(), values.end());
}

inline double dot(const Doubles& a, const Doubles& b) {
  double total = 0;
  for (size_t i = 0; i < a.size(); i++) total += a[i] * b[i];
  return total;
}

inline Doubles plus(Doubles a, const Doubles& b) {
  for (size_t i = 0; i < a.size(); i++) a[i] += b[i];
  return a;
}

// Row i of a matrix with d columns.
template <class Number>
std::vector<Number> row_of(const std::vector<Number>& matrix, int64_t i, int64_t d) {
  return std::vector<Number>(matrix.begin() + i * d, matrix.begin() + (i + 1) * d);
}

template <class Number>
void append(std::vector<Number>& all, const std::vector<Number>& more) {
  all.insert(all.end(), more.begin(), more.end());
}

// The gradient of loss at x by central differences.
template <class Loss>
Doubles numeric_gradient(Doubles x, Loss loss) {
  constexpr double kStep = 1e-5;
  Doubles gradient;
  for (double& value : x) {
    const double before = value;
    value = before + kStep;
    const double up = loss(x);
    value = before - kStep;
    const double down = loss(x);
    value = before;
    gradient.push_back((up - down) / (2 * kStep));
  }
  return gradient;
}

// ---------------------------------------------------------------------------------------------------
// Tensors on the device

// n values of the device, on the host.
template <class Backend, class T>
std::vector<T> download(Backend& be, const T* device, int64_t n) {
  std::vector<T> host(static_cast<size_t>(n));
  be.to_host(host.data(), device, n);
  return host;
}

// A tensor on the device between two guard zones, which a pass must neither use nor change: they hold NaN, so
// that what is read there spoils the result, and they are compared when the tensor goes.
template <class T>
class Guarded {
 public:
  // An input, or an output that is added to.
  Guarded(TestBackend& be, const std::vector<T>& values)
      : be_(be),
        size_(static_cast<int64_t>(values.size())),
        memory_(be.template allocate<T>(size_ + 2 * kGuard)) {
    std::vector<T> all(values.size() + 2 * kGuard, guard());
    std::copy(values.begin(), values.end(), all.begin() + kGuard);
    be_.to_device(memory_, all.data(), size_ + 2 * kGuard);
  }
  // An output: not a number until it is written.
  Guarded(TestBackend& be, int64_t n) : Guarded(be, std::vector<T>(static_cast<size_t>(n), guard())) {}

  ~Guarded() {
    const std::vector<T> intact(kGuard, guard());
    EXPECT_TRUE(same_bits(download(be_, memory_, kGuard), intact)) << "written before a tensor's begin";
    EXPECT_TRUE(same_bits(download(be_, memory_ + kGuard + size_, kGuard), intact))
        << "written behind a tensor's end";
    be_.release(memory_);
  }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;

  T* data() const { return memory_ + kGuard; }
  operator T*() const { return data(); }
  std::vector<T> values() const { return download(be_, memory_ + kGuard, size_); }

  static T guard() {
    if constexpr (std::is_floating_point_v<T>) {
      return std::bit_cast<float>(0x7fc0dead);  // a NaN
    } else {
      using Limits = std::numeric_limits<T>;
      return (Limits::is_signed ? Limits::min() : Limits::max()) / 3;  // far outside of any tensor
    }
  }

 private:
  static constexpr int64_t kGuard = 64;  // keeps the tensor's alignment

  TestBackend& be_;
  int64_t size_;
  T* memory_;
};

class PassTest : public ::testing::Test {
 protected:
  template <class T>
  Guarded<T> holding(const std::vector<T>& values) {
    return Guarded<T>(be_, values);
  }
  template <class T = float>
  Guarded<T> unwritten(int64_t n) {
    return Guarded<T>(be_, n);
  }

  TestBackend be_;
};

// Calls run(backend) -> Floats on backends whose threads work in several ways: on the CPU, several numbers of
// them; where CUDA is emulated, in several orders. The results must be equal bit for bit.
template <class Run>
void expect_same_bits_for_any_threads(Run run) {
  Floats first;
  auto check = [&](TestBackend& be, const std::string& threads) {
    const Floats result = run(be);
    ASSERT_FALSE(result.empty());
    if (first.empty()) first = result;
    EXPECT_TRUE(same_bits(result, first)) << threads;
  };
#ifdef XMOD_TEST_CUDA
  for (uint64_t seed : {0, 1, 2, 0}) {
#ifndef __CUDACC__
    cuda_emulation::set_thread_order(seed);
#endif
    TestBackend be;
    check(be, "order " + std::to_string(seed) + " against 0");
  }
#else
  const int before = TestBackend::threads();
  for (int threads : {1, 2, 3, 2}) {
    TestBackend be({.threads = threads});
    check(be, std::to_string(threads) + " threads against 1");
  }
  TestBackend restored({.threads = before});
#endif
}

// ---------------------------------------------------------------------------------------------------
// deco's lambda, the same in all of its layers

inline Floats entropy_weights(const Model<TestBackend>& model) {
  Floats all;
  for (const LayerParameters& p : model.table.layers) {
    const auto* deco = std::get_if<Deco>(&p.ffn);
    if (deco) append(all, download(model.backend(), model.buffers() + deco->lambda, 1));
  }
  return all;
}

inline float entropy_weight(const Model<TestBackend>& model) {
  const Floats all = entropy_weights(model);
  for (float lambda : all) EXPECT_EQ(lambda, all[0]);
  return all.empty() ? 0 : all[0];
}

inline void set_entropy_weight(const Model<TestBackend>& model, float lambda) {
  for (const LayerParameters& p : model.table.layers) {
    const auto* deco = std::get_if<Deco>(&p.ffn);
    if (deco) model.backend().to_device(model.buffers() + deco->lambda, &lambda, 1);
  }
}

}  // namespace xmod

// The backend under test. Every test of a pass or of the whole model is written against TestBackend; the
// Makefile builds it once for each backend.
#pragma once

#define TESTING
#include "train_xmod.cpp"

using TestBackend = xmod::CpuBackend;

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

namespace xmod {

// ||a - b|| / ||b||: the error of a tensor as a share of its size.
inline double normalised_error(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < b.size(); i++) {
    const double gap = static_cast<double>(a[i]) - b[i];
    difference += gap * gap;
    size += static_cast<double>(b[i]) * b[i];
  }
  return size == 0 ? std::sqrt(difference) : std::sqrt(difference / size);
}

// n values of the device, on the host.
template <class T>
std::vector<T> download(TestBackend& be, const T* device, int64_t n) {
  std::vector<T> host(static_cast<size_t>(n));
  be.to_host(host.data(), device, n);
  return host;
}

}  // namespace xmod

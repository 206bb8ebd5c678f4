// The vector helpers lane by lane against double precision.
#include "xmod/cpu_vector.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace xmod {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kSmallestNormal = std::numeric_limits<float>::min();

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// |got - expected| in units of the last place of expected.
double ulp_error(float got, double expected) {
  const int exponent = std::max(std::ilogb(expected), -126);
  return std::abs(got - expected) / std::ldexp(1.0, exponent - 23);
}

// Calls visit(x, f(x)) for floats spread over all bit patterns first .. last; x varies from lane to lane.
template <class Function, class Visit>
void sweep(uint32_t first, uint32_t last, Function f, Visit visit) {
  constexpr uint64_t kStep = 997;
  for (uint64_t bits = first; bits <= last; bits += kStep * kLanes) {
    Vector x;
    for (int64_t i = 0; i < kLanes; ++i) {
      x[i] =
          from_bits(static_cast<uint32_t>(std::min<uint64_t>(bits + kStep * static_cast<uint64_t>(i), last)));
    }
    const Vector y = f(x);
    for (int64_t i = 0; i < kLanes; ++i) visit(x[i], y[i]);
  }
}

constexpr uint32_t kInfinityBits = 0x7f800000, kNegative = 0x80000000;

TEST(CpuVector, LoadAndStoreTouchExactlyTheirFloats) {
  std::vector<float> source(kLanes + 2), target(kLanes + 2, -1.0f);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<float>(i);
  store(target.data() + 1, load(source.data() + 1));
  EXPECT_EQ(target.front(), -1.0f);
  EXPECT_EQ(target.back(), -1.0f);
  for (int64_t i = 1; i <= kLanes; ++i) EXPECT_EQ(target[static_cast<size_t>(i)], static_cast<float>(i));

  for (int64_t count = 0; count < kLanes; ++count) {
    std::vector<float> exact(source.begin(), source.begin() + count);
    const Vector v = load_part(exact.data(), count);
    std::vector<float> part(kLanes, -1.0f);
    store_part(part.data(), v, count);
    for (int64_t i = 0; i < kLanes; ++i) {
      EXPECT_EQ(v[i], i < count ? static_cast<float>(i) : 0.0f);
      EXPECT_EQ(part[static_cast<size_t>(i)], i < count ? static_cast<float>(i) : -1.0f);
    }
  }
}

TEST(CpuVector, KeepFirstReplacesTheRest) {
  for (int64_t count : {int64_t{-3}, int64_t{0}, int64_t{1}, kLanes - 1, kLanes, kLanes + 5}) {
    const Vector v = keep_first(splat(1.0f), count, splat(-kInfinity));
    for (int64_t i = 0; i < kLanes; ++i) EXPECT_EQ(v[i], i < count ? 1.0f : -kInfinity);
  }
}

TEST(CpuVector, HorizontalSumAddsHalves) {
  Vector v = {};
  std::vector<float> lanes(kLanes);
  for (int64_t i = 0; i < kLanes; ++i) {
    const float value = 1.0f / static_cast<float>(3 + 7 * i % 11) + 1e4f * static_cast<float>(i % 3);
    v[i] = value;
    lanes[static_cast<size_t>(i)] = value;
  }
  for (int64_t half = kLanes / 2; half > 0; half /= 2) {
    for (int64_t i = 0; i < half; ++i) lanes[static_cast<size_t>(i)] += lanes[static_cast<size_t>(i + half)];
  }
  EXPECT_EQ(horizontal_sum(v), lanes[0]);  // the stated order, bit for bit
}

TEST(CpuVector, HorizontalMaxFindsEveryLane) {
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    Vector v = splat(-5.0f);
    v[lane] = -2.0f;
    EXPECT_EQ(horizontal_max(v), -2.0f);
  }
}

TEST(CpuVector, ExpIsWithinTwoUlpEverywhere) {
  double worst = 0;
  for (uint32_t sign : {0u, kNegative}) {
    sweep(
        sign, sign + kInfinityBits, [](Vector x) { return exp(x); },
        [&](float x, float y) {
          const double expected = std::exp(static_cast<double>(x));
          if (expected < kSmallestNormal) {
            ASSERT_EQ(y, 0.0f) << x;
          } else if (static_cast<float>(expected) == kInfinity) {
            ASSERT_EQ(y, kInfinity) << x;
          } else {
            worst = std::max(worst, ulp_error(y, expected));
            ASSERT_LE(worst, 2.0) << x;
          }
        });
  }
  EXPECT_GT(worst, 0.0);
}

TEST(CpuVector, ExpAtTheEndsOfItsRange) {
  const auto exp_of = [](float x) { return exp(splat(x))[kLanes - 1]; };
  EXPECT_EQ(exp_of(0.0f), 1.0f);
  EXPECT_EQ(exp_of(-0.0f), 1.0f);
  EXPECT_EQ(exp_of(-kInfinity), 0.0f);
  EXPECT_EQ(exp_of(kInfinity), kInfinity);
  EXPECT_EQ(exp_of(-1e30f), 0.0f);
  EXPECT_EQ(exp_of(1e30f), kInfinity);
  for (float x = -87.5f; x < -87.2f; x = std::nextafter(x, 0.0f)) {  // where results become normal
    const double expected = std::exp(static_cast<double>(x));
    if (expected < kSmallestNormal)
      ASSERT_EQ(exp_of(x), 0.0f) << x;
    else
      ASSERT_LE(ulp_error(exp_of(x), expected), 2.0) << x;
  }
  for (float x = 88.6f; x < 88.8f; x = std::nextafter(x, 100.0f)) {  // where they overflow
    const double expected = std::exp(static_cast<double>(x));
    if (expected > std::numeric_limits<float>::max())
      ASSERT_EQ(exp_of(x), kInfinity) << x;
    else
      ASSERT_LE(ulp_error(exp_of(x), expected), 2.0) << x;
  }
}

TEST(CpuVector, NanStaysNan) {
  for (uint32_t bits : {0x7fc00000u, 0xffc00000u, 0x7f800001u, 0x7fffffffu, 0xff812345u}) {
    const Vector nan = splat(from_bits(bits));
    for (int64_t i = 0; i < kLanes; ++i) {
      EXPECT_TRUE(std::isnan(exp(nan)[i])) << bits;
      EXPECT_TRUE(std::isnan(log(nan)[i])) << bits;
      EXPECT_TRUE(std::isnan(sigmoid(nan)[i])) << bits;
    }
    EXPECT_TRUE(std::isnan(horizontal_sum(nan)));
  }
}

TEST(CpuVector, LogIsWithinTwoUlpEverywhere) {
  sweep(
      0x00800000, kInfinityBits - 1, [](Vector x) { return log(x); },
      [](float x, float y) {
        const double expected = std::log(static_cast<double>(x));
        if (x == 1.0f)
          ASSERT_EQ(y, 0.0f);
        else
          ASSERT_LE(ulp_error(y, expected), 2.0) << x;
      });
  const auto log_of = [](float x) { return log(splat(x))[0]; };
  EXPECT_EQ(log_of(1.0f), 0.0f);
  EXPECT_EQ(log_of(0.0f), -kInfinity);
  EXPECT_EQ(log_of(-0.0f), -kInfinity);
  EXPECT_EQ(log_of(1e-40f), -kInfinity);
  EXPECT_EQ(log_of(kInfinity), kInfinity);
  EXPECT_TRUE(std::isnan(log_of(-1.0f)));
  EXPECT_TRUE(std::isnan(log_of(-kInfinity)));
}

TEST(CpuVector, SigmoidStaysBetweenZeroAndOne) {
  for (uint32_t sign : {0u, kNegative}) {
    sweep(
        sign, sign + kInfinityBits, [](Vector x) { return sigmoid(x); },
        [](float x, float y) {
          const double expected = 1.0 / (1.0 + std::exp(-static_cast<double>(x)));
          ASSERT_GE(y, 0.0f) << x;
          ASSERT_LE(y, 1.0f) << x;
          if (x > -87.0f)
            ASSERT_LE(ulp_error(y, expected), 3.0) << x;
          else
            ASSERT_LE(y, 1e-37f) << x;
        });
  }
  EXPECT_EQ(sigmoid(splat(0.0f))[0], 0.5f);
}

}  // namespace
}  // namespace xmod

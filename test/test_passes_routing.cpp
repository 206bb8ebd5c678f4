// The passes that choose which tokens a sparse layer works on, and the router's gradient.
#include <numeric>

#include "backend.h"

namespace xmod {
namespace {

constexpr double kBound = 1e-5;  // normalised error
constexpr float kEps = 0.03f;    // large enough for its absence to show
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// ---------------------------------------------------------------------------------------------------
// router

double router_reference(const Doubles& x, const Doubles& weight) {
  return dot(x, weight) / std::sqrt(dot(x, x) / static_cast<double>(x.size()) + kEps);
}

TEST_F(PassTest, RouterForwardAndBackward) {
  for (const auto& [n, d] :
       {std::pair<int64_t, int64_t>{0, 5}, {1, 3}, {1, 33}, {67, 19}, {131, 70}, {37, 264}}) {
    SCOPED_TRACE("n " + std::to_string(n) + ", d " + std::to_string(d));
    const Floats x = normal_numbers(n * d, 1), weight = normal_numbers(d, 2), ds = normal_numbers(n, 3);
    const Floats dx_before = normal_numbers(n * d, 4), dweight_before = normal_numbers(d, 5);
    auto score = unwritten(n), dx = holding(dx_before), dweight = holding(dweight_before);
    be_.router_forward(score, holding(x), holding(weight), n, d, kEps);
    be_.router_backward(dx, dweight, holding(ds), holding(x), holding(weight), n, d, kEps);

    const Doubles w = doubles(weight);
    Doubles expected, dx_after, dweight_after = doubles(dweight_before);
    for (int64_t i = 0; i < n; i++) {
      const Doubles row = doubles(row_of(x, i, d));
      expected.push_back(router_reference(row, w));
      append(dx_after,
             numeric_gradient(row, [&](const Doubles& v) { return ds[i] * router_reference(v, w); }));
      dweight_after =
          plus(dweight_after,
               numeric_gradient(w, [&](const Doubles& v) { return ds[i] * router_reference(row, v); }));
    }
    EXPECT_LE(normalised_error(score.values(), expected), kBound);
    EXPECT_LE(normalised_error(dx.values(), plus(dx_after, doubles(dx_before))), kBound);
    EXPECT_LE(normalised_error(dweight.values(), dweight_after), kBound);
  }
}

// The score decides the selection, so it has to be the same whatever else is in the batch.
TEST_F(PassTest, RouterScoreOfARowDependsOnThatRowOnly) {
  const int64_t n = 29, d = 77;
  const Floats x = normal_numbers(n * d, 1), weight = normal_numbers(d, 2);
  auto all = unwritten(n);
  be_.router_forward(all, holding(x), holding(weight), n, d, kEps);
  for (int64_t i = 0; i < n; i++) {
    auto alone = unwritten(1);
    be_.router_forward(alone, holding(row_of(x, i, d)), holding(weight), 1, d, kEps);
    EXPECT_TRUE(same_bits(alone.values(), row_of(all.values(), i, 1)));
  }
}

TEST_F(PassTest, RouterDoesNotDependOnThreads) {
  const int64_t n = 333, d = 77;
  expect_same_bits_for_any_threads([&](TestBackend& be) {
    const Guarded<float> x(be, normal_numbers(n * d, 1)), weight(be, normal_numbers(d, 2));
    const Guarded<float> score(be, n), dx(be, normal_numbers(n * d, 4)), dweight(be, normal_numbers(d, 5));
    be.router_forward(score, x, weight, n, d, kEps);
    be.router_backward(dx, dweight, score, x, weight, n, d, kEps);
    Floats all;
    for (const auto* out : {&score, &dx, &dweight}) append(all, out->values());
    return all;
  });
}

// ---------------------------------------------------------------------------------------------------
// token-choice bias

TEST_F(PassTest, TokenBias) {
  for (int64_t n : {0, 1, 333}) {
    const Floats score = normal_numbers(n, 1);
    const Ints times = random_ids(n, 5, 2);
    const float gamma = 0.7f, expected_times = 1.25f;
    auto out = unwritten(n);
    be_.token_bias_forward(out, holding(score), holding(times), gamma, expected_times, n);
    Doubles expected;
    for (int64_t i = 0; i < n; i++) expected.push_back(score[i] - gamma * (times[i] - expected_times));
    EXPECT_LE(normalised_error(out.values(), expected), kBound);
  }
}

TEST_F(PassTest, TokenBiasOfStrengthZeroChangesNothing) {
  const Floats score = normal_numbers(100, 1);
  auto out = unwritten(100);
  be_.token_bias_forward(out, holding(score), holding(random_ids(100, 5, 2)), 0, 1.25f, 100);
  EXPECT_TRUE(same_bits(out.values(), score));
}

// ---------------------------------------------------------------------------------------------------
// top-k selection

struct Selection {
  Ints row;    // (B*C)
  Floats kth;  // (B)
};

Selection select_topk(TestBackend& be, const Floats& u, int64_t B, int64_t C) {
  const Guarded<int32_t> row(be, B * C);
  const Guarded<float> kth(be, B);
  const int64_t T = static_cast<int64_t>(u.size()) / B;
  be.select_topk(row, kth, Guarded<float>(be, u), B, T, C);
  return {row.values(), kth.values()};
}

// By sorting: the stable order keeps the earlier token first.
Selection select_topk_reference(const Floats& u, int64_t B, int64_t C) {
  const int64_t T = static_cast<int64_t>(u.size()) / B;
  Selection out;
  for (int64_t b = 0; b < B; b++) {
    Ints order(static_cast<size_t>(T));
    std::iota(order.begin(), order.end(), static_cast<int32_t>(b * T));
    std::stable_sort(order.begin(), order.end(), [&](int32_t i, int32_t j) { return u[i] > u[j]; });
    out.kth.push_back(u[order[C - 1]]);
    order.resize(static_cast<size_t>(C));
    std::sort(order.begin(), order.end());
    append(out.row, order);
  }
  return out;
}

void check_topk(TestBackend& be, const Floats& u, int64_t B, int64_t C) {
  const Selection got = select_topk(be, u, B, C), expected = select_topk_reference(u, B, C);
  EXPECT_EQ(got.row, expected.row);
  EXPECT_EQ(got.kth, expected.kth);  // by value: either zero will do
}

TEST_F(PassTest, TopKSelectsTheLargest) {
  for (int64_t B : {1, 3}) {
    for (int64_t T : {1, 2, 13, 128, 1001, 5003}) {
      for (int64_t C : {int64_t{1}, (T + 3) / 4, T - 1, T}) {
        if (C < 1) continue;
        SCOPED_TRACE("B " + std::to_string(B) + ", T " + std::to_string(T) + ", C " + std::to_string(C));
        check_topk(be_, normal_numbers(B * T, 1), B, C);
      }
    }
  }
}

TEST_F(PassTest, TopKTiesGoToTheEarlierToken) {
  const int64_t B = 3, T = 131;
  Floats few;  // of four different values
  for (int32_t id : random_ids(B * T, 4, 1)) few.push_back(static_cast<float>(id - 2));
  for (int64_t C : {1, 2, 33, 64, 130, 131}) {
    SCOPED_TRACE("C " + std::to_string(C));
    check_topk(be_, few, B, C);
    check_topk(be_, Floats(static_cast<size_t>(B * T), -0.5f), B, C);
  }
}

TEST_F(PassTest, TopKTakesBothZerosForEqual) {
  EXPECT_EQ(select_topk(be_, {-0.0f, 0.0f, -0.0f, 0.0f, -1}, 1, 2).row, (Ints{0, 1}));
  EXPECT_EQ(select_topk(be_, {0.0f, -0.0f, 0.0f, 1}, 1, 3).row, (Ints{0, 1, 3}));
}

TEST_F(PassTest, TopKOrdersExtremes) {
  const float smallest = std::numeric_limits<float>::denorm_min(),
              largest = std::numeric_limits<float>::max();
  const Floats u = {-kInfinity, -largest, -1, -smallest, 0, smallest, 1, largest, kInfinity};
  for (int64_t C = 1; C <= 9; C++) {
    check_topk(be_, u, 1, C);
    check_topk(be_, Floats(u.rbegin(), u.rend()), 1, C);
  }
}

// Training stops at the first loss that is not a number, so all that matters here is to stay in bounds.
TEST_F(PassTest, TopKOfNanSelectsExactlyCAscendingTokens) {
  const int64_t B = 2, T = 37;
  for (float nan : {kNan, -kNan}) {
    for (int64_t every : {1, 2, 5}) {
      Floats u = normal_numbers(B * T, 1);
      for (int64_t i = 0; i < B * T; i += every) u[i] = nan;
      for (int64_t C : {1, 10, 37}) {
        const Ints row = select_topk(be_, u, B, C).row;
        for (int64_t i = 0; i < B * C; i++) {
          EXPECT_EQ(row[i] / T, i / C);
          if (i % C > 0) {
            EXPECT_LT(row[i - 1], row[i]);
          }
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------
// threshold selection

void check_threshold(TestBackend& be, const Floats& u, float tau, int64_t B) {
  const int64_t T = static_cast<int64_t>(u.size()) / B;
  Ints expected;
  std::vector<int64_t> expected_offsets = {0};
  for (int64_t i = 0; i < B * T; i++) {
    if (u[i] > tau) expected.push_back(static_cast<int32_t>(i));
    if ((i + 1) % T == 0) expected_offsets.push_back(static_cast<int64_t>(expected.size()));
  }
  const Guarded<int32_t> row(be, B * T);
  const Guarded<int64_t> offsets(be, B + 1), all_offsets(be, B + 1);
  be.uniform_offsets(all_offsets, B, T);
  const int64_t n = be.select_threshold(row, offsets, Guarded<float>(be, u), Guarded<float>(be, Floats{tau}),
                                        all_offsets, B);
  ASSERT_EQ(n, static_cast<int64_t>(expected.size()));
  EXPECT_EQ(download(be, row.data(), n), expected);
  EXPECT_EQ(offsets.values(), expected_offsets);
}

TEST_F(PassTest, ThresholdSelectsWhatLiesAbove) {
  for (int64_t B : {1, 3}) {
    for (int64_t T : {1, 2, 33, 1001, 1700}) {
      Floats u;  // of nine different values: some equal the threshold
      for (int32_t id : random_ids(B * T, 9, 1)) u.push_back(static_cast<float>(id - 4));
      for (float tau : {-5.0f, -4.0f, 0.0f, 3.0f, 4.0f, kInfinity, -kInfinity, kNan}) {
        SCOPED_TRACE("B " + std::to_string(B) + ", T " + std::to_string(T) + ", tau " + std::to_string(tau));
        check_threshold(be_, u, tau, B);
      }
    }
  }
}

TEST_F(PassTest, ThresholdInSequencesOfAnyLength) {
  const Guarded<int32_t> row(be_, 6);
  const Guarded<int64_t> offsets(be_, 5), all_offsets(be_, std::vector<int64_t>{0, 1, 1, 4, 6});
  const Guarded<float> u(be_, Floats{1, 0, 2, 3, 0, 4}), tau(be_, Floats{0.5f});
  ASSERT_EQ(be_.select_threshold(row, offsets, u, tau, all_offsets, 4), 4);
  EXPECT_EQ(download(be_, row.data(), 4), (Ints{0, 2, 3, 5}));
  EXPECT_EQ(offsets.values(), (std::vector<int64_t>{0, 1, 1, 3, 4}));
}

TEST_F(PassTest, ThresholdLeavesSequencesWithoutSelection) {
  check_threshold(be_, {0, 0, 2, 2, 0, 0}, 1, 3);
  check_threshold(be_, {2, 0, 0, 0, 0, 2}, 1, 3);
  check_threshold(be_, {kNan, 2, kNan, -kNan}, 1, 2);
}

// ---------------------------------------------------------------------------------------------------
// after the selection

TEST_F(PassTest, CountSelected) {
  const int64_t tokens = 100;
  const Floats score = normal_numbers(tokens, 1);
  for (const Ints& row : {Ints{}, Ints{99}, Ints{0, 3, 4, 50, 98}}) {
    const Ints before = random_ids(tokens, 7, 2);
    const int64_t n = static_cast<int64_t>(row.size());
    auto logit = unwritten(n);
    auto times = holding(before);
    be_.count_selected(logit, times, holding(score), holding(row), n);
    Floats expected_logit;
    Ints expected_times = before;
    for (int32_t r : row) expected_logit.push_back(score[r]), expected_times[r]++;
    EXPECT_TRUE(same_bits(logit.values(), expected_logit));
    EXPECT_EQ(times.values(), expected_times);
  }
}

// What a layer does in one pass, pass by pass.
TEST_F(PassTest, RouteTopKIsItsPassesTogether) {
  struct Case {
    int64_t B, T, C, d;
  };
  for (const auto& [B, T, C, d] : {Case{1, 1, 1, 5}, {2, 37, 10, 19}, {3, 128, 1, 24}, {2, 1001, 251, 8}}) {
    SCOPED_TRACE("B " + std::to_string(B) + ", T " + std::to_string(T) + ", C " + std::to_string(C));
    const int64_t n = B * T;
    const float gamma = 0.5f, expected_times = 1.25f;
    const Guarded<float> stream(be_, normal_numbers(n * d, 1)), weight(be_, normal_numbers(d, 2));
    const Guarded<int32_t> all_position(be_, random_ids(n, 1000, 3));
    const Ints times_before = random_ids(n, 4, 4);

    const Guarded<float> score(be_, n), u(be_, n), kth(be_, B), logit(be_, B * C);
    const Guarded<int32_t> row(be_, B * C), position(be_, B * C), times(be_, times_before);
    const Guarded<int64_t> offsets(be_, B + 1);
    be_.router_forward(score, stream, weight, n, d, kEps);
    be_.token_bias_forward(u, score, times, gamma, expected_times, n);
    be_.select_topk(row, kth, u, B, T, C);
    be_.uniform_offsets(offsets, B, C);
    be_.gather_ints(position, all_position, row, B * C);
    be_.count_selected(logit, times, score, row, B * C);

    const Guarded<float> score2(be_, n), u2(be_, n), kth2(be_, B), logit2(be_, B * C);
    const Guarded<int32_t> row2(be_, B * C), position2(be_, B * C), times2(be_, times_before);
    const Guarded<int64_t> offsets2(be_, B + 1);
    be_.route_topk(row2, position2, offsets2, logit2, kth2, score2, u2, times2, stream, weight, all_position,
                   gamma, expected_times, B, T, C, d, kEps);
    EXPECT_EQ(row2.values(), row.values());
    EXPECT_EQ(position2.values(), position.values());
    EXPECT_EQ(offsets2.values(), offsets.values());
    EXPECT_EQ(times2.values(), times.values());
    EXPECT_TRUE(same_bits(logit2.values(), logit.values()));
    EXPECT_TRUE(same_bits(kth2.values(), kth.values()));
    EXPECT_TRUE(same_bits(score2.values(), score.values()));
    EXPECT_TRUE(same_bits(u2.values(), u.values()));
  }
}

// ---------------------------------------------------------------------------------------------------
// thresholds

TEST_F(PassTest, AddRowMeans) {
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{0, 3}, {1, 1}, {5, 1}, {7, 33}}) {
    const Floats before = normal_numbers(rows, 1), inp = normal_numbers(rows * columns, 2);
    auto out = holding(before);
    be_.add_row_means(out, holding(inp), rows, columns);
    Doubles expected = doubles(before);
    for (int64_t i = 0; i < rows * columns; i++) {
      expected[i / columns] += inp[i] / static_cast<double>(columns);
    }
    EXPECT_LE(normalised_error(out.values(), expected), kBound);
  }
}

TEST_F(PassTest, ThresholdUpdateMovesTau) {
  for (int64_t layers : {0, 1, 35}) {
    const Floats tau_before = normal_numbers(layers, 1), sum = normal_numbers(layers, 2);
    const float scale = 0.25f, rate = 0.3f;
    auto tau = holding(tau_before), kth_sum = holding(sum);
    be_.threshold_update(tau, kth_sum, scale, rate, layers);
    Doubles expected;
    for (int64_t l = 0; l < layers; l++) {
      expected.push_back(tau_before[l] + rate * (sum[l] * static_cast<double>(scale) - tau_before[l]));
    }
    EXPECT_LE(normalised_error(tau.values(), expected), kBound);
    EXPECT_EQ(kth_sum.values(), sum);
  }
}

}  // namespace
}  // namespace xmod

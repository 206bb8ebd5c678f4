// The passes of layers with experts: grouping tokens by expert, MoE's and DECO's routers, DECO's activation.
// Forward against references in double precision, backward against central differences of those.
#include <numeric>

#include "backend.h"

namespace xmod {
namespace {

using Bytes = std::vector<uint8_t>;
using Offsets = std::vector<int64_t>;

constexpr double kBound = 1e-5;  // normalised error
constexpr float kEps = 0.03f;    // large enough for its absence to show
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Tokens, experts, width: no tokens, one of each, multiples of no vector, more rows than one chunk of a sum.
struct Size {
  int64_t n, E, width;
};
const std::vector<Size> kSizes = {{0, 3, 7}, {1, 1, 1}, {5, 1, 33}, {67, 5, 19}, {131, 19, 40}};

template <class Check>
void for_each_size(Check check) {
  for (const auto& [n, E, width] : kSizes) {
    SCOPED_TRACE("n " + std::to_string(n) + ", E " + std::to_string(E) + ", width " + std::to_string(width));
    check(n, E, width);
  }
}

double logistic_reference(double s) {
  return 1 / (1 + std::exp(-s));
}

// Values where chosen, 0 elsewhere.
Floats masked(Floats values, const Bytes& chosen) {
  for (size_t j = 0; j < values.size(); j++) {
    if (!chosen[j]) values[j] = 0;
  }
  return values;
}

// ---------------------------------------------------------------------------------------------------
// grouped rows

// About two of five pairs; with some experts, the first has every token and the last none, and the second
// token has no expert but that first one.
Bytes some_choice(int64_t n, int64_t E) {
  Bytes chosen;
  for (int32_t id : random_ids(n * E, 5, 7)) chosen.push_back(id < 2);
  for (int64_t i = 0; i < n && E > 2; i++) {
    chosen[i * E] = 1, chosen[i * E + E - 1] = 0;
    if (i == 1) std::fill_n(chosen.begin() + i * E + 1, E - 1, uint8_t{0});
  }
  return chosen;
}

// The grouping of a choice, found by sorting.
struct Groups {
  Groups(const Bytes& chosen, int64_t n, int64_t E) : slot_offsets{0}, expert_offsets{0} {
    std::vector<std::pair<int32_t, int32_t>> sorted;  // (expert, token)
    for (int32_t i = 0; i < n; i++) {
      for (int32_t e = 0; e < E; e++) {
        if (chosen[i * E + e]) sorted.emplace_back(e, i);
      }
    }
    std::sort(sorted.begin(), sorted.end());
    for (const auto& [e, i] : sorted) expert.push_back(e), row.push_back(i);
    for (int32_t e = 0; e < E; e++) {
      expert_offsets.push_back(expert_offsets.back() + std::count(expert.begin(), expert.end(), e));
    }
    for (int32_t i = 0; i < n; i++) {
      for (int32_t r = 0; r < pairs(); r++) {
        if (row[r] == i) slot.push_back(r);  // by expert, as the rows are
      }
      slot_offsets.push_back(static_cast<int64_t>(slot.size()));
    }
  }

  int64_t pairs() const { return static_cast<int64_t>(row.size()); }

  Ints row, expert, slot;
  Offsets slot_offsets, expert_offsets;
};

void check_grouping(TestBackend& be, const Bytes& chosen, int64_t n, int64_t E) {
  const Groups expected(chosen, n, E);
  const int64_t pairs = expected.pairs();
  for (const int64_t most : {pairs, n * E}) {
    const Guarded<int32_t> row(be, most), expert(be, most), slot(be, most);
    const Guarded<int64_t> slot_offsets(be, n + 1), expert_offsets(be, E + 1);
    const int64_t told = be.group_by_expert(row, expert, slot, slot_offsets, expert_offsets,
                                            Guarded<uint8_t>(be, chosen), n, E, most);
    ASSERT_TRUE(told == pairs || told == most);
    EXPECT_EQ(row_of(row.values(), 0, pairs), expected.row);
    EXPECT_EQ(row_of(expert.values(), 0, pairs), expected.expert);
    EXPECT_EQ(row_of(slot.values(), 0, pairs), expected.slot);
    EXPECT_EQ(slot_offsets.values(), expected.slot_offsets);
    EXPECT_EQ(expert_offsets.values(), expected.expert_offsets);
    const Ints rows = row.values();
    for (int64_t r = pairs; r < told; r++) EXPECT_EQ(rows[r], -1) << "behind the last pair";
  }
}

TEST_F(PassTest, GroupByExpert) {
  for_each_size([&](int64_t n, int64_t E, int64_t) {
    check_grouping(be_, some_choice(n, E), n, E);
    check_grouping(be_, Bytes(static_cast<size_t>(n * E), 0), n, E);
    check_grouping(be_, Bytes(static_cast<size_t>(n * E), 1), n, E);
  });
}

// Sizes around the tiles of CUDA's kernels: with and without whole packs, experts without a row and with more
// than a tile.
TEST_F(PassTest, ExpertMatmulForwardAndBackward) {
  struct Sizes {
    std::vector<int64_t> rows;  // of each expert
    int64_t C, OC, more;        // numbers between the experts' matrices
  };
  for (const Sizes& s :
       {Sizes{{3}, 5, 7, 0}, Sizes{{0, 4, 0, 150, 33}, 24, 12, 4}, Sizes{{129, 1}, 72, 136, 8},
        Sizes{{0, 0}, 8, 8, 0}, Sizes{{64, 128, 17}, 33, 65, 3}}) {
    const int64_t E = static_cast<int64_t>(s.rows.size()), C = s.C, OC = s.OC, stride = C * OC + s.more;
    Offsets offsets = {0};
    for (int64_t rows : s.rows) offsets.push_back(offsets.back() + rows);
    const int64_t pairs = offsets.back(), size = (E - 1) * stride + C * OC;
    const Floats inp = normal_numbers(pairs * C, 1), dout = normal_numbers(pairs * OC, 2),
                 weight = normal_numbers(size, 3), before = normal_numbers(size, 4);
    auto out = unwritten(pairs * OC), dinp = unwritten(pairs * C);
    auto dweight = holding(before), held = holding(weight);
    be_.expert_matmul_forward(out, holding(inp), held, stride, holding(offsets), pairs, E, C, OC);
    be_.expert_matmul_backward(dinp, dweight, holding(dout), holding(inp), held, stride, holding(offsets),
                               pairs, E, C, OC);

    Doubles expected(static_cast<size_t>(pairs * OC)), expected_dinp(static_cast<size_t>(pairs * C)),
        expected_dweight = doubles(before);
    for (int64_t e = 0; e < E; e++) {
      for (int64_t r = offsets[e]; r < offsets[e + 1]; r++) {
        for (int64_t o = 0; o < OC; o++) {
          for (int64_t i = 0; i < C; i++) {
            const double w = weight[e * stride + o * C + i], dy = dout[r * OC + o], x = inp[r * C + i];
            expected[r * OC + o] += w * x;
            expected_dinp[r * C + i] += w * dy;
            expected_dweight[e * stride + o * C + i] += dy * x;
          }
        }
      }
    }
    EXPECT_LE(normalised_error(out.values(), expected), kBound);
    EXPECT_LE(normalised_error(dinp.values(), expected_dinp), kBound);
    EXPECT_LE(normalised_error(dweight.values(), expected_dweight), kBound);
    const Floats written = dweight.values();
    for (int64_t i = 0; i < size; i++) {
      if (i % stride < C * OC) continue;
      EXPECT_EQ(written[i], before[i]) << "between two matrices";
    }
  }
}

TEST_F(PassTest, ExpertWeightForwardAndBackward) {
  for_each_size([&](int64_t n, int64_t E, int64_t width) {
    const Bytes chosen = some_choice(n, E);
    const Groups groups(chosen, n, E);
    const int64_t pairs = groups.pairs(), size = pairs * width;
    const Floats inp = normal_numbers(size, 1), dout = normal_numbers(size, 2);
    const Floats weight = masked(normal_numbers(n * E, 3), chosen);
    auto out = unwritten(size), dinp = unwritten(size), dweight = unwritten(n * E);
    auto row = holding(groups.row), expert = holding(groups.expert);
    be_.expert_weight_forward(out, holding(inp), holding(weight), row, expert, pairs, E, width);
    be_.expert_weight_backward(dinp, dweight, holding(dout), holding(inp), holding(weight), row, expert,
                               pairs, n, E, width);

    Doubles expected, expected_dinp, expected_dweight(static_cast<size_t>(n * E));
    for (int64_t r = 0; r < pairs; r++) {
      const int64_t pair = groups.row[r] * E + groups.expert[r];
      for (int64_t j = r * width; j < (r + 1) * width; j++) {
        expected.push_back(static_cast<double>(weight[pair]) * inp[j]);
        expected_dinp.push_back(static_cast<double>(weight[pair]) * dout[j]);
      }
      expected_dweight[pair] = dot(doubles(row_of(inp, r, width)), doubles(row_of(dout, r, width)));
    }
    EXPECT_LE(normalised_error(out.values(), expected), kBound);
    EXPECT_LE(normalised_error(dinp.values(), expected_dinp), kBound);
    EXPECT_LE(normalised_error(dweight.values(), expected_dweight), kBound);
    EXPECT_TRUE(same_bits(dweight.values(), masked(dweight.values(), chosen)));
  });
}

TEST_F(PassTest, SumPairsAdd) {
  for_each_size([&](int64_t n, int64_t E, int64_t width) {
    for (int64_t d : {int64_t{1}, width}) {
      const Groups groups(some_choice(n, E), n, E);
      const int64_t pairs = groups.pairs();
      const Floats before = normal_numbers(n * d, 1), inp = normal_numbers(pairs * d, 2);
      auto out = holding(before);
      be_.sum_pairs_add(out, holding(inp), holding(groups.slot), holding(groups.slot_offsets), n, d);
      Doubles expected = doubles(before);
      for (int64_t r = 0; r < pairs; r++) {
        for (int64_t j = 0; j < d; j++) expected[groups.row[r] * d + j] += inp[r * d + j];
      }
      EXPECT_LE(normalised_error(out.values(), expected), kBound);
    }
  });
}

// A token's rows are added one after the other, in the experts' order: the large ones cancel first.
TEST_F(PassTest, SumPairsAddsInTheOrderOfTheExperts) {
  const Groups groups({1, 1, 1}, 1, 3);
  auto out = holding(Floats{0});
  be_.sum_pairs_add(out, holding(Floats{1e8f, -1e8f, 1}), holding(groups.slot), holding(groups.slot_offsets),
                    1, 1);
  EXPECT_EQ(out.values(), Floats{1});
}

TEST_F(PassTest, AddExpertLoads) {
  for_each_size([&](int64_t n, int64_t E, int64_t) {
    const Groups groups(some_choice(n, E), n, E);
    auto loads = holding(Floats(static_cast<size_t>(E), 3));
    be_.add_expert_loads(loads, holding(groups.expert_offsets), E);
    Floats expected(static_cast<size_t>(E), 3);
    for (int32_t e : groups.expert) expected[e]++;
    EXPECT_EQ(loads.values(), expected);
  });
}

// ---------------------------------------------------------------------------------------------------
// MoE's router

struct MoeRoute {
  Bytes chosen;
  Floats weight, score;
};

MoeRoute moe_route(TestBackend& be, const Floats& logit, const Floats& bias, int64_t n, int64_t E,
                   int64_t k) {
  const Guarded<uint8_t> chosen(be, n * E);
  const Guarded<float> weight(be, n * E), score(be, logit);
  be.moe_route_forward(chosen, weight, score, Guarded<float>(be, bias), n, E, k);
  return {chosen.values(), weight.values(), score.values()};
}

// By sorting: the stable order keeps the lower expert first.
Bytes moe_choice_reference(const Floats& logit, const Floats& bias, int64_t n, int64_t E, int64_t k) {
  Bytes chosen(static_cast<size_t>(n * E));
  for (int64_t i = 0; i < n; i++) {
    Doubles key;
    for (int64_t e = 0; e < E; e++) key.push_back(logistic_reference(logit[i * E + e]) + bias[e]);
    Ints order(static_cast<size_t>(E));
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return key[a] > key[b]; });
    for (int64_t j = 0; j < k; j++) chosen[i * E + order[j]] = 1;
  }
  return chosen;
}

// The weights of one token.
Doubles moe_weights_reference(const Doubles& logit, const Bytes& chosen) {
  double total = 0;
  Doubles weight;
  for (size_t e = 0; e < logit.size(); e++) {
    weight.push_back(chosen[e] ? logistic_reference(logit[e]) : 0);
    total += weight[e];
  }
  for (double& w : weight) w /= total;
  return weight;
}

void check_moe_route(TestBackend& be, const Floats& logit, const Floats& bias, int64_t n, int64_t E,
                     int64_t k) {
  const MoeRoute got = moe_route(be, logit, bias, n, E, k);
  const Bytes chosen = moe_choice_reference(logit, bias, n, E, k);
  const Floats dweight = masked(normal_numbers(n * E, 11), chosen);
  const Guarded<float> dlogit(be, n * E);
  be.moe_route_backward(dlogit, Guarded<float>(be, dweight), Guarded<float>(be, got.weight),
                        Guarded<float>(be, got.score), Guarded<uint8_t>(be, got.chosen), n, E);

  Doubles score, weight, gradient;
  for (float s : logit) score.push_back(logistic_reference(s));
  for (int64_t i = 0; i < n; i++) {
    const Bytes mine = row_of(chosen, i, E);
    const Doubles s = doubles(row_of(logit, i, E)), dw = doubles(row_of(dweight, i, E));
    append(weight, moe_weights_reference(s, mine));
    append(gradient,
           numeric_gradient(s, [&](const Doubles& v) { return dot(dw, moe_weights_reference(v, mine)); }));
  }
  EXPECT_EQ(got.chosen, chosen);
  for (int64_t j = 0; j < n * E; j++) EXPECT_NEAR(got.score[j], score[j], 1e-6);
  EXPECT_LE(normalised_error(got.weight, weight), kBound);
  EXPECT_TRUE(same_bits(got.weight, masked(got.weight, chosen)));
  EXPECT_LE(normalised_error(dlogit.values(), gradient), kBound);
  EXPECT_TRUE(same_bits(dlogit.values(), masked(dlogit.values(), chosen)));
}

TEST_F(PassTest, MoeRouteForwardAndBackward) {
  for (const auto& [n, E] : {std::pair<int64_t, int64_t>{0, 3}, {1, 1}, {5, 1}, {67, 5}, {131, 37}}) {
    for (int64_t k : {int64_t{1}, std::min<int64_t>(E, 3), E}) {
      SCOPED_TRACE("n " + std::to_string(n) + ", E " + std::to_string(E) + ", k " + std::to_string(k));
      check_moe_route(be_, normal_numbers(n * E, 1, 3), normal_numbers(E, 2, 0.3), n, E, k);
    }
  }
}

TEST_F(PassTest, MoeRouteTiesGoToTheLowerExpert) {
  const int64_t n = 31, E = 37;
  Floats few;  // of four different values
  for (int32_t id : random_ids(n * E, 4, 1)) few.push_back(static_cast<float>(id - 2));
  for (int64_t k : {1, 2, 18, 36, 37}) {
    SCOPED_TRACE("k " + std::to_string(k));
    check_moe_route(be_, few, Floats(E, 0.25f), n, E, k);
    check_moe_route(be_, Floats(n * E, -0.5f), Floats(E), n, E, k);
  }
}

// The bias decides who is chosen and does not show in the weights.
TEST_F(PassTest, MoeBiasOnlyChooses) {
  const MoeRoute route = moe_route(be_, {0, 0, 0}, {-2, 5, 4}, 1, 3, 2);
  EXPECT_EQ(route.chosen, (Bytes{0, 1, 1}));
  EXPECT_EQ(route.weight, (Floats{0, 0.5f, 0.5f}));
  EXPECT_EQ(route.score, Floats(3, 0.5f));
}

// Scores that underflow in fp32 still have a ratio.
TEST_F(PassTest, MoeRouteOfVeryNegativeLogits) {
  check_moe_route(be_, {-200, -201, -203, -204}, Floats(4), 1, 4, 3);
  check_moe_route(be_, {-100, -100, -103, -101}, {0, 0, 1, 0}, 1, 4, 2);
}

TEST_F(PassTest, MoeRouteOfExtremeLogits) {
  const float largest = std::numeric_limits<float>::max();
  const auto weights = [&](const Floats& logit) { return moe_route(be_, logit, Floats(2), 1, 2, 2).weight; };
  EXPECT_EQ(weights({largest, largest}), (Floats{0.5f, 0.5f}));
  EXPECT_EQ(weights({-largest, -largest}), (Floats{0.5f, 0.5f}));
  EXPECT_EQ(weights({-largest, largest}), (Floats{0, 1}));
  EXPECT_EQ(weights({-1, -largest}), (Floats{1, 0}));
  const MoeRoute route = moe_route(be_, {-largest, -largest}, Floats(2), 1, 2, 2);
  auto dlogit = unwritten(2);
  be_.moe_route_backward(dlogit, holding(Floats{1, -1}), holding(route.weight), holding(route.score),
                         holding(route.chosen), 1, 2);
  EXPECT_EQ(dlogit.values(), (Floats{0.5f, -0.5f}));  // softmax's
}

// Training stops at the first loss that is not a number; until then nothing may leave its bounds.
TEST_F(PassTest, MoeRouteOfNanChoosesExactlyK) {
  const int64_t n = 23, E = 19;
  for (int64_t every : {1, 2, 5}) {
    Floats logit = normal_numbers(n * E, 1);
    for (int64_t j = 0; j < n * E; j += every) logit[j] = kNan;
    for (int64_t k : {1, 4, 19}) {
      const Bytes chosen = moe_route(be_, logit, Floats(E), n, E, k).chosen;
      for (int64_t i = 0; i < n; i++) {
        const Bytes mine = row_of(chosen, i, E);
        EXPECT_EQ(std::count(mine.begin(), mine.end(), 1), k);
        EXPECT_EQ(std::count(mine.begin(), mine.end(), 0), E - k);
      }
    }
  }
}

TEST_F(PassTest, MoeWeightOfNanIsNan) {
  const MoeRoute route = moe_route(be_, {1, kNan, 2}, Floats(3), 1, 3, 3);
  for (float weight : route.weight) EXPECT_TRUE(std::isnan(weight));
}

TEST_F(PassTest, ExpertBiasUpdate) {
  const Floats before = normal_numbers(5, 1);
  const float rate = 0.01f;
  auto bias = holding(before);
  be_.expert_bias_update(bias, holding(Floats{7, 3, 4, 5, 1}), rate, 5);  // mean 4
  EXPECT_TRUE(same_bits(bias.values(), Floats{before[0] - rate, before[1] + rate, before[2], before[3] - rate,
                                              before[4] + rate}));
  auto balanced = holding(before);
  be_.expert_bias_update(balanced, holding(Floats(5, 1234567)), rate, 5);
  EXPECT_TRUE(same_bits(balanced.values(), before));
  auto single = holding(Floats{0.5f});
  be_.expert_bias_update(single, holding(Floats{9}), rate, 1);
  EXPECT_EQ(single.values(), Floats{0.5f});
}

// ---------------------------------------------------------------------------------------------------
// DECO's router

constexpr double kTiny = 1e-5;

double entropy_reference(const Doubles& p) {
  const double norm = std::accumulate(p.begin(), p.end(), kTiny);
  double entropy = 0;
  for (double p_e : p) entropy -= p_e / norm * std::log(p_e / norm + kTiny);
  return entropy;
}

// Logits of both signs from 5e-5 to 3, so that the small constants show; the second token has no
// active expert.
Floats deco_logits(int64_t n, int64_t E) {
  Floats logit = normal_numbers(n * E, 1, 4);
  for (int64_t j = 0; j < n * E; j++) {
    const bool positive = j / E != 1 && (E == 1 || j % 3 != 1);
    const float size = std::exp(std::clamp(logit[j] - 4, -10.0f, 1.0f));
    logit[j] = positive ? size : -size;
  }
  return logit;
}

Doubles relu_reference(const Floats& logit) {
  Doubles p;
  for (float s : logit) p.push_back(std::max(static_cast<double>(s), 0.0));
  return p;
}

TEST_F(PassTest, DecoRouteForward) {
  for_each_size([&](int64_t n, int64_t E, int64_t) {
    const Floats logit = deco_logits(n, E), scale = normal_numbers(E, 2);
    auto chosen = unwritten<uint8_t>(n * E);
    auto weight = unwritten(n * E), entropy = unwritten(n);
    be_.deco_route_forward(chosen, weight, entropy, holding(logit), holding(scale), n, E);

    Bytes expected_chosen;
    Doubles expected;
    for (int64_t j = 0; j < n * E; j++) {
      expected_chosen.push_back(logit[j] > 0);
      expected.push_back(scale[j % E] * std::max(static_cast<double>(logit[j]), 0.0));
    }
    EXPECT_EQ(chosen.values(), expected_chosen);
    EXPECT_LE(normalised_error(weight.values(), expected), kBound);
    for (int64_t i = 0; i < n; i++) {
      EXPECT_NEAR(entropy.values()[i], entropy_reference(relu_reference(row_of(logit, i, E))), 1e-6);
    }
  });
}

TEST_F(PassTest, DecoActivatesAboveZero) {
  const Floats logit = {0, -0.0f, std::numeric_limits<float>::min(), -1, 2};
  auto chosen = unwritten<uint8_t>(5);
  auto weight = unwritten(5), entropy = unwritten(1);
  be_.deco_route_forward(chosen, weight, entropy, holding(logit), holding(Floats(5, 3)), 1, 5);
  EXPECT_EQ(chosen.values(), (Bytes{0, 0, 1, 0, 1}));
  EXPECT_EQ(weight.values(), (Floats{0, 0, 3 * logit[2], 0, 6}));
}

TEST_F(PassTest, DecoNanShows) {
  auto chosen = unwritten<uint8_t>(3);
  auto weight = unwritten(3), entropy = unwritten(1);
  be_.deco_route_forward(chosen, weight, entropy, holding(Floats{-1, kNan, 1}), holding(Floats(3, 1)), 1, 3);
  EXPECT_EQ(chosen.values(), (Bytes{0, 1, 1}));
  EXPECT_TRUE(std::isnan(weight.values()[1]));
  EXPECT_TRUE(std::isnan(entropy.values()[0]));
}

// The gradient of a token's logits. The entropy's is found in log(p), as p may be smaller than any step.
Doubles deco_gradient_reference(const Floats& logit, const Floats& dweight, const Floats& scale,
                                double dentropy) {
  const Doubles p = relu_reference(logit);
  Doubles log_p;
  for (double p_e : p) log_p.push_back(std::log(p_e));
  Doubles gradient = numeric_gradient(log_p, [&](Doubles v) {
    for (double& value : v) value = std::exp(value);
    return dentropy * entropy_reference(v);
  });
  for (size_t e = 0; e < p.size(); e++) {
    gradient[e] = p[e] > 0 ? gradient[e] / p[e] + dweight[e] * static_cast<double>(scale[e]) : 0;
  }
  return gradient;
}

TEST_F(PassTest, EntropyWeightUpdateHasAFloor) {
  auto lambda = holding(Floats{0.5f});
  be_.entropy_weight_update(lambda, 1.5f, 0.4f);
  EXPECT_EQ(lambda.values(), Floats{0.75f});
  be_.entropy_weight_update(lambda, 0.5f, 0.4f);
  EXPECT_EQ(lambda.values(), Floats{0.4f});
}

// Through the weights, through the entropy, through both.
TEST_F(PassTest, DecoRouteBackward) {
  for (const auto& shares : {std::pair<float, float>{1, 0}, {0, 0.3f}, {1, 0.3f}}) {
    const float weight_share = shares.first, dentropy = shares.second;
    for_each_size([&](int64_t n, int64_t E, int64_t) {
      const Floats logit = deco_logits(n, E), scale = normal_numbers(E, 2), before = normal_numbers(E, 3);
      const Doubles p = relu_reference(logit);
      Floats dweight = normal_numbers(n * E, 4, weight_share);
      for (int64_t j = 0; j < n * E; j++) dweight[j] = logit[j] > 0 ? dweight[j] : 0;
      auto dlogit = unwritten(n * E), dscale = holding(before);
      be_.deco_route_backward(dlogit, dscale, holding(dweight), holding(logit), holding(scale),
                              holding(Floats{2 * dentropy}), 0.5f, n, E);

      const Floats got = dlogit.values();
      Doubles expected_dscale = doubles(before);
      for (int64_t i = 0; i < n; i++) {
        const Doubles mine = row_of(p, i, E);
        const double norm = std::accumulate(mine.begin(), mine.end(), kTiny);
        const Doubles gradient =
            deco_gradient_reference(row_of(logit, i, E), row_of(dweight, i, E), scale, dentropy);
        for (int64_t e = 0; e < E; e++) {
          // The entropy's part is a difference of numbers near 1, divided by norm.
          const double bound = kBound * (std::abs(gradient[e]) + dentropy / norm) + 1e-6;
          ASSERT_NEAR(got[i * E + e], gradient[e], bound) << "token " << i << ", expert " << e;
          if (logit[i * E + e] <= 0) {
            ASSERT_EQ(got[i * E + e], 0);
          }
          expected_dscale[e] += dweight[i * E + e] * mine[e];
        }
      }
      EXPECT_LE(normalised_error(dscale.values(), expected_dscale), kBound);
    });
  }
}

TEST_F(PassTest, DecoRouteBackwardAtZeroIsZero) {
  auto dlogit = unwritten(4), dscale = holding(Floats(4));
  be_.deco_route_backward(dlogit, dscale, holding(Floats(4)), holding(Floats{0, -0.0f, -1, -1e-30f}),
                          holding(Floats(4, 1)), holding(Floats{1}), 1, 1, 4);
  EXPECT_EQ(dlogit.values(), Floats(4));
  EXPECT_EQ(dscale.values(), Floats(4));
}

// ---------------------------------------------------------------------------------------------------
// DECO's activation

double norm_silu_rstd_reference(const Doubles& up, double mean) {
  double squares = 0;
  for (double u : up) squares += (u - mean) * (u - mean);
  return 1 / std::sqrt(squares / static_cast<double>(up.size()) + kEps);
}

Doubles norm_silu_reference(const Doubles& up, double mean, const Doubles& weight) {
  const double rstd = norm_silu_rstd_reference(up, mean);
  Doubles act;
  for (size_t j = 0; j < up.size(); j++) {
    const double x = weight[j] * (up[j] - mean) * rstd;
    act.push_back(x * logistic_reference(x));
  }
  return act;
}

TEST_F(PassTest, NormSiluForwardAndBackward) {
  for_each_size([&](int64_t n, int64_t E, int64_t width) {
    E = std::min<int64_t>(E, 5);
    const Groups groups(some_choice(n, E), n, E);
    const int64_t pairs = groups.pairs(), size = pairs * width;
    const Floats up = normal_numbers(size, 1), mean = normal_numbers(n, 2), dact = normal_numbers(size, 3);
    const Floats weight = normal_numbers(width, 4, 2), before = normal_numbers(width, 5);
    auto row = holding(groups.row);
    auto act = unwritten(size), rstd = unwritten(pairs);
    auto dup = unwritten(size), dpair_mean = unwritten(pairs), dweight = holding(before);
    be_.norm_silu_forward(act, rstd, holding(up), holding(mean), holding(weight), row, pairs, width, kEps);
    be_.norm_silu_backward(dup, dpair_mean, dweight, holding(dact), holding(up), holding(mean), rstd,
                           holding(weight), row, pairs, width);

    const Doubles w = doubles(weight);
    Doubles expected, expected_rstd, expected_dup, expected_dmean, expected_dweight = doubles(before);
    for (int64_t r = 0; r < pairs; r++) {
      const Doubles u = doubles(row_of(up, r, width)), dy = doubles(row_of(dact, r, width));
      const double m = mean[groups.row[r]];
      append(expected, norm_silu_reference(u, m, w));
      expected_rstd.push_back(norm_silu_rstd_reference(u, m));
      append(expected_dup,
             numeric_gradient(u, [&](const Doubles& v) { return dot(dy, norm_silu_reference(v, m, w)); }));
      append(expected_dmean, numeric_gradient({m}, [&](const Doubles& v) {
               return dot(dy, norm_silu_reference(u, v[0], w));
             }));
      expected_dweight =
          plus(expected_dweight,
               numeric_gradient(w, [&](const Doubles& v) { return dot(dy, norm_silu_reference(u, m, v)); }));
    }
    EXPECT_LE(normalised_error(act.values(), expected), kBound);
    EXPECT_LE(normalised_error(rstd.values(), expected_rstd), kBound);
    EXPECT_LE(normalised_error(dup.values(), expected_dup), kBound);
    EXPECT_LE(normalised_error(dpair_mean.values(), expected_dmean), kBound);
    EXPECT_LE(normalised_error(dweight.values(), expected_dweight), kBound);
  });
}

TEST_F(PassTest, ColumnMeanForwardAndBackward) {
  for (const auto& [rows, d] : {std::pair<int64_t, int64_t>{1, 1}, {1, 33}, {67, 19}, {1000, 70}}) {
    const Floats inp = normal_numbers(rows * d, 1), dout = normal_numbers(d, 2);
    const Floats before = normal_numbers(rows * d, 3);
    auto out = unwritten(d), dinp = holding(before);
    be_.column_mean(out, holding(inp), rows, d);
    be_.column_mean_backward(dinp, holding(dout), rows, d);
    Doubles expected(static_cast<size_t>(d)), added;
    for (int64_t j = 0; j < rows * d; j++) {
      expected[j % d] += inp[j] / static_cast<double>(rows);
      added.push_back(dout[j % d] / static_cast<double>(rows));
    }
    EXPECT_LE(normalised_error(out.values(), expected), kBound);
    EXPECT_LE(normalised_error(dinp.values(), plus(added, doubles(before))), kBound);
  }
}

// ---------------------------------------------------------------------------------------------------
// the same bits for any number of threads

TEST_F(PassTest, ExpertRowsDoNotDependOnThreads) {
  const int64_t n = 333, E = 7, width = 77;
  const Groups groups(some_choice(n, E), n, E);
  const int64_t pairs = groups.pairs(), size = pairs * width;
  const Floats values = normal_numbers(size, 1), gradients = normal_numbers(size, 2);
  expect_same_bits_for_any_threads([&](TestBackend& be) {
    const Guarded<int32_t> row(be, groups.row), expert(be, groups.expert), slot(be, groups.slot);
    const Guarded<int64_t> slot_offsets(be, groups.slot_offsets);
    const Guarded<float> inp(be, values), dout(be, gradients), mean(be, normal_numbers(n, 3));
    const Guarded<float> weight(be, normal_numbers(n * E, 4)), norm_weight(be, normal_numbers(width, 5));
    const Guarded<float> act(be, size), rstd(be, pairs), out(be, size), dweight(be, n * E);
    const Guarded<float> dinp(be, size), dup(be, size), dpair_mean(be, pairs),
        dnorm(be, norm_weight.values());
    const Guarded<float> y(be, normal_numbers(n * width, 6)), mean_row(be, width);
    be.norm_silu_forward(act, rstd, inp, mean, norm_weight, row, pairs, width, kEps);
    be.expert_weight_forward(out, act, weight, row, expert, pairs, E, width);
    be.sum_pairs_add(y, out, slot, slot_offsets, n, width);
    be.column_mean(mean_row, y, n, width);
    be.expert_weight_backward(dinp, dweight, dout, act, weight, row, expert, pairs, n, E, width);
    be.norm_silu_backward(dup, dpair_mean, dnorm, dinp, inp, mean, rstd, norm_weight, row, pairs, width);
    be.column_mean_backward(dup, mean_row, pairs, width);
    Floats all;
    for (const auto* result : {&out, &y, &mean_row, &dweight, &dup, &dpair_mean, &dnorm}) {
      append(all, result->values());
    }
    return all;
  });
}

TEST_F(PassTest, ExpertRoutesDoNotDependOnThreads) {
  const int64_t n = 333, E = 19, k = 3;
  const Floats logits = normal_numbers(n * E, 1);
  expect_same_bits_for_any_threads([&](TestBackend& be) {
    const Guarded<uint8_t> chosen(be, n * E), active(be, n * E);
    const Guarded<float> logit(be, logits), score(be, logits), per_expert(be, normal_numbers(E, 2));
    const Guarded<float> moe_weight(be, n * E), dmoe_logit(be, n * E);
    const Guarded<float> deco_weight(be, n * E), entropy(be, n), ddeco_logit(be, n * E);
    const Guarded<float> dscale(be, normal_numbers(E, 3));
    be.moe_route_forward(chosen, moe_weight, score, per_expert, n, E, k);
    be.moe_route_backward(dmoe_logit, moe_weight, moe_weight, score, chosen, n, E);
    be.deco_route_forward(active, deco_weight, entropy, logit, per_expert, n, E);
    be.deco_route_backward(ddeco_logit, dscale, deco_weight, logit, per_expert, holding(Floats{0.1f}), 1, n,
                           E);
    Floats all;
    for (const auto* result :
         {&score, &moe_weight, &dmoe_logit, &deco_weight, &entropy, &ddeco_logit, &dscale}) {
      append(all, result->values());
    }
    return all;
  });
}

}  // namespace
}  // namespace xmod

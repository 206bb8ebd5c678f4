// Attention against a plain reference in double precision, and the properties that training relies on.
#include "xmod/cpu_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

namespace xmod {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kSentinel = -12345.0f;
constexpr int64_t kGuard = 64;  // sentinels on either side of an output

using Positions = std::vector<int64_t>;

struct Case {
  std::vector<int64_t> lengths;  // (B) in keys
  int64_t H, KV, hd;
  std::vector<Positions> selected = {};  // (B) ascending: those that have a query; none given: all

  bool all_selected() const { return selected.empty(); }
  int64_t B() const { return static_cast<int64_t>(lengths.size()); }
  std::vector<int64_t> kv_offsets() const {
    std::vector<int64_t> result = {0};
    for (int64_t length : lengths) result.push_back(result.back() + length);
    return result;
  }
  std::vector<int64_t> q_offsets() const {
    if (all_selected()) return kv_offsets();
    std::vector<int64_t> result = {0};
    for (const Positions& positions : selected) {
      result.push_back(result.back() + static_cast<int64_t>(positions.size()));
    }
    return result;
  }
  std::vector<int32_t> own_keys() const {
    std::vector<int32_t> result(static_cast<size_t>(all_selected() ? keys() : 0));
    std::iota(result.begin(), result.end(), 0);
    for (size_t b = 0; b < selected.size(); ++b) {
      for (int64_t t : selected[b]) result.push_back(static_cast<int32_t>(kv_offsets()[b] + t));
    }
    return result;
  }
  int64_t keys() const { return kv_offsets().back(); }
  int64_t queries() const { return q_offsets().back(); }
  int64_t fused_row() const { return (H + 2 * KV) * hd; }
  int64_t value_column() const { return (H + KV) * hd; }  // of v in a fused row q, k, v
};

std::string describe(const Case& c) {
  std::ostringstream text;
  text << "H " << c.H << " KV " << c.KV << " hd " << c.hd << " lengths";
  for (int64_t length : c.lengths) text << ' ' << length;
  if (!c.all_selected()) text << " queries";
  for (const Positions& positions : c.selected) text << ' ' << positions.size();
  return text.str();
}

std::vector<float> normal_numbers(int64_t count, uint32_t seed, float deviation = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution(0.0f, deviation);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = distribution(generator);
  return values;
}

struct Inputs {
  std::vector<float> q, k, qkv, dout;  // v is a slice of qkv; its other columns are NaN and must not be read
};

Inputs make_inputs(const Case& c, float deviation = 1.0f) {
  Inputs in{normal_numbers(c.queries() * c.H * c.hd, 1, deviation),
            normal_numbers(c.keys() * c.KV * c.hd, 2, deviation), normal_numbers(c.keys() * c.fused_row(), 3),
            normal_numbers(c.queries() * c.H * c.hd, 4)};
  for (int64_t i = 0; i < static_cast<int64_t>(in.qkv.size()); ++i) {
    if (i % c.fused_row() < c.value_column()) in.qkv[static_cast<size_t>(i)] = kNan;
  }
  return in;
}

// An output prefilled with NaN between sentinels.
class Guarded {
 public:
  explicit Guarded(int64_t count) : values_(static_cast<size_t>(count + 2 * kGuard), kSentinel) {
    std::fill(values_.begin() + kGuard, values_.end() - kGuard, kNan);
  }
  float* data() { return values_.data() + kGuard; }
  const float* data() const { return values_.data() + kGuard; }
  int64_t size() const { return static_cast<int64_t>(values_.size()) - 2 * kGuard; }
  float operator[](int64_t i) const { return data()[i]; }
  void expect_guards_untouched() const {
    for (int64_t i = 0; i < kGuard; ++i) {
      ASSERT_EQ(values_[static_cast<size_t>(i)], kSentinel);
      ASSERT_EQ(values_[values_.size() - 1 - static_cast<size_t>(i)], kSentinel);
    }
  }

 private:
  std::vector<float> values_;
};

struct Outputs {
  Guarded out, lse, dq, dk, dqkv;
  explicit Outputs(const Case& c)
      : out(c.queries() * c.H * c.hd),
        lse(c.queries() * c.H),
        dq(c.queries() * c.H * c.hd),
        dk(c.keys() * c.KV * c.hd),
        dqkv(c.keys() * c.fused_row()) {}
};

Outputs run(const Case& c, const Inputs& in, const int32_t* own_keys, AttentionScratch& scratch) {
  Outputs o(c);
  const std::vector<int64_t> q_offsets = c.q_offsets(), kv_offsets = c.kv_offsets();
  const float* v = in.qkv.data() + c.value_column();
  attention_forward(o.out.data(), o.lse.data(), in.q.data(), in.k.data(), v, c.fused_row(), own_keys,
                    q_offsets.data(), kv_offsets.data(), c.B(), c.H, c.KV, c.hd, scratch);
  attention_backward(o.dq.data(), o.dk.data(), o.dqkv.data() + c.value_column(), c.fused_row(),
                     in.dout.data(), in.q.data(), in.k.data(), v, c.fused_row(), o.out.data(), o.lse.data(),
                     own_keys, q_offsets.data(), kv_offsets.data(), c.B(), c.H, c.KV, c.hd, scratch);
  return o;
}

Outputs run(const Case& c, const Inputs& in, AttentionScratch& scratch) {
  const std::vector<int32_t> own_keys = c.own_keys();
  return run(c, in, c.all_selected() ? nullptr : own_keys.data(), scratch);
}

Outputs run(const Case& c, const Inputs& in) {
  AttentionScratch scratch;
  return run(c, in, scratch);
}

struct Reference {
  std::vector<double> out, lse, dq, dk, dv;  // dv (keys, KV, hd), compact
};

// Scores, softmax and the chain rule as the formulas say, row by row.
Reference reference(const Case& c, const Inputs& in) {
  const int64_t H = c.H, KV = c.KV, hd = c.hd;
  Reference r{std::vector<double>(static_cast<size_t>(c.queries() * H * hd)),
              std::vector<double>(static_cast<size_t>(c.queries() * H)),
              std::vector<double>(static_cast<size_t>(c.queries() * H * hd)),
              std::vector<double>(static_cast<size_t>(c.keys() * KV * hd)),
              std::vector<double>(static_cast<size_t>(c.keys() * KV * hd))};
  const double scale = 1.0 / std::sqrt(static_cast<double>(hd));
  const std::vector<int64_t> q_offsets = c.q_offsets(), kv_offsets = c.kv_offsets();
  const std::vector<int32_t> own_keys = c.own_keys();
  for (size_t b = 0; b + 1 < q_offsets.size(); ++b) {
    for (int64_t t = q_offsets[b]; t < q_offsets[b + 1]; ++t) {
      for (int64_t h = 0; h < H; ++h) {
        const int64_t g = h / (H / KV), first = kv_offsets[b];
        const int64_t keys = own_keys[static_cast<size_t>(t)] - first + 1;
        const float* q = &in.q[static_cast<size_t>((t * H + h) * hd)];
        const float* dout = &in.dout[static_cast<size_t>((t * H + h) * hd)];
        const auto key = [&](int64_t s) { return &in.k[static_cast<size_t>(((first + s) * KV + g) * hd)]; };
        const auto value = [&](int64_t s) {
          return &in.qkv[static_cast<size_t>((first + s) * c.fused_row() + c.value_column() + g * hd)];
        };
        std::vector<double> p(static_cast<size_t>(keys));
        for (int64_t s = 0; s < keys; ++s) {
          p[static_cast<size_t>(s)] = scale * std::inner_product(q, q + hd, key(s), 0.0);
        }
        const double top = *std::max_element(p.begin(), p.end());
        double total = 0;
        for (double& x : p) total += x = std::exp(x - top);
        for (double& x : p) x /= total;
        r.lse[static_cast<size_t>(t * H + h)] = top + std::log(total);

        double delta = 0;
        std::vector<double> dp(p.size());
        for (int64_t s = 0; s < keys; ++s) {
          for (int64_t i = 0; i < hd; ++i) {
            r.out[static_cast<size_t>((t * H + h) * hd + i)] += p[static_cast<size_t>(s)] * value(s)[i];
            r.dv[static_cast<size_t>(((first + s) * KV + g) * hd + i)] += p[static_cast<size_t>(s)] * dout[i];
          }
          dp[static_cast<size_t>(s)] = std::inner_product(dout, dout + hd, value(s), 0.0);
          delta += p[static_cast<size_t>(s)] * dp[static_cast<size_t>(s)];
        }
        for (int64_t s = 0; s < keys; ++s) {
          const double ds = scale * p[static_cast<size_t>(s)] * (dp[static_cast<size_t>(s)] - delta);
          for (int64_t i = 0; i < hd; ++i) {
            r.dq[static_cast<size_t>((t * H + h) * hd + i)] += ds * key(s)[i];
            r.dk[static_cast<size_t>(((first + s) * KV + g) * hd + i)] += ds * q[i];
          }
        }
      }
    }
  }
  return r;
}

// The value slices of a fused buffer, compact (keys, KV, hd).
std::vector<float> value_slices(const Case& c, const Guarded& fused) {
  std::vector<float> result;
  for (int64_t i = 0; i < fused.size(); ++i) {
    if (i % c.fused_row() >= c.value_column()) result.push_back(fused[i]);
  }
  return result;
}

// ||got - expected|| / ||expected||
double normalised_error(const float* got, const std::vector<double>& expected) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += (got[i] - expected[i]) * (got[i] - expected[i]);
    norm += expected[i] * expected[i];
  }
  return std::sqrt(error / std::max(norm, 1e-300));
}

double largest_error(const float* got, const std::vector<double>& expected) {
  double largest = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double error = std::abs(got[i] - expected[i]);
    if (!(error <= largest)) largest = error;  // also where it is NaN
  }
  return largest;
}

void expect_agreement(const Case& c, const Inputs& in, const Outputs& got, double bound) {
  SCOPED_TRACE(describe(c));
  const Reference expected = reference(c, in);
  EXPECT_LE(normalised_error(got.out.data(), expected.out), bound);
  EXPECT_LE(normalised_error(got.lse.data(), expected.lse), bound);
  EXPECT_LE(normalised_error(value_slices(c, got.dqkv).data(), expected.dv), bound);
  // Where every query sees one key only, both are exactly zero.
  EXPECT_LE(normalised_error(got.dq.data(), expected.dq), bound);
  EXPECT_LE(normalised_error(got.dk.data(), expected.dk), bound);
  for (const Guarded* guarded : {&got.out, &got.lse, &got.dq, &got.dk, &got.dqkv})
    guarded->expect_guards_untouched();
  for (int64_t i = 0; i < got.dqkv.size(); ++i) {
    if (i % c.fused_row() < c.value_column()) {
      ASSERT_TRUE(std::isnan(got.dqkv[i])) << "column outside the slice was written";
    }
  }
}

const std::vector<Case> kCases = {
    {{256}, 2, 1, 64},
    {{64, 64, 64}, 2, 1, 64},
    {{1}, 2, 1, 8},
    {{1, 1, 2}, 1, 1, 10},
    {{0, 5, 0, 0, 17, 1, 0}, 4, 2, 24},
    {{95, 96, 97}, 3, 3, 16},
    {{191, 192, 193}, 2, 1, 10},
    {{47, 48, 49, 23, 24, 25}, 2, 1, 24},
    {{130, 7}, 6, 2, 34},
    {{100, 33}, 4, 4, 128},
    {{70}, 7, 1, 6},
    {{29}, 49, 1, 8},  // more heads in a group than rows in a tile
    {{40, 3}, 64, 2, 12},
    {{300}, 1, 1, 2},
};

// About one position in `sparsity`, without a pattern.
Positions some_positions(int64_t length, int64_t sparsity, uint32_t seed) {
  std::mt19937 generator(seed);
  Positions positions;
  for (int64_t t = 0; t < length; ++t) {
    if (static_cast<int64_t>(generator()) % sparsity == 0) positions.push_back(t);
  }
  return positions;
}

Positions position_range(int64_t first, int64_t last) {
  Positions positions(static_cast<size_t>(last - first));
  std::iota(positions.begin(), positions.end(), first);
  return positions;
}

// Queries of some of the positions: few and many, none at all, one, only early ones (which leave whole key
// tiles unseen), only late ones, dense runs with gaps of several key tiles.
const std::vector<Case> kSubsetCases = {
    {{256}, 2, 1, 64, {some_positions(256, 4, 1)}},
    {{300, 300, 300}, 4, 2, 24, {some_positions(300, 2, 2), {}, some_positions(300, 16, 3)}},
    {{400, 0, 400, 5}, 2, 1, 10, {{0}, {}, {399}, {}}},
    {{500, 200}, 1, 1, 16, {{3, 4, 100, 290}, position_range(150, 200)}},
    {{97, 96, 95}, 2, 2, 8, {{95, 96}, {0, 95}, {94}}},
    {{1, 2, 1}, 2, 1, 12, {{0}, {0}, {}}},
    {{700}, 6, 2, 34, {position_range(90, 400)}},
    {{290, 30}, 7, 1, 6, {some_positions(290, 3, 4), some_positions(30, 3, 5)}},
    {{40, 300}, 64, 2, 12, {{7, 39}, some_positions(300, 8, 6)}},
    {{193}, 3, 3, 128, {some_positions(193, 5, 7)}},
    {{200, 10}, 2, 1, 8, {{}, {}}},
};

TEST(CpuAttention, AgreesWithDoublePrecision) {
  AttentionScratch scratch;  // one for all cases: what an earlier, larger case left in it must not matter
  for (const std::vector<Case>* cases : {&kCases, &kSubsetCases}) {
    for (const Case& c : *cases) {
      const Inputs in = make_inputs(c);
      expect_agreement(c, in, run(c, in, scratch), 2e-6);
    }
  }
}

TEST(CpuAttention, NoSequenceAtAll) {
  AttentionScratch scratch;
  const int64_t offsets[] = {0, 0};
  for (int64_t B : {0, 1}) {
    attention_forward(nullptr, nullptr, nullptr, nullptr, nullptr, 8, nullptr, offsets, offsets, B, 1, 1, 8,
                      scratch);
    attention_backward(nullptr, nullptr, nullptr, 8, nullptr, nullptr, nullptr, nullptr, 8, nullptr, nullptr,
                       nullptr, offsets, offsets, B, 1, 1, 8, scratch);
  }
}

// <dout, out> as a function of the inputs, differentiated numerically along random directions.
void expect_finite_differences(const Case& c) {
  SCOPED_TRACE(describe(c));
  const Inputs in = make_inputs(c);
  const Outputs got = run(c, in);
  const auto loss = [&](const Inputs& at) {
    const Reference r = reference(c, at);
    return std::inner_product(r.out.begin(), r.out.end(), at.dout.begin(), 0.0);
  };
  const auto expect_slope = [&](std::vector<float> Inputs::*member, const float* gradient, const char* name) {
    const std::vector<float> direction = normal_numbers(static_cast<int64_t>((in.*member).size()), 9);
    constexpr float kStep = 1.0f / 1024;
    Inputs plus = in, minus = in;
    double slope = 0;
    for (size_t i = 0; i < direction.size(); ++i) {
      if (std::isnan((in.*member)[i])) continue;
      (plus.*member)[i] += kStep * direction[i];
      (minus.*member)[i] -= kStep * direction[i];
      slope += (static_cast<double>((plus.*member)[i]) - (minus.*member)[i]) * gradient[i];
    }
    const double difference = loss(plus) - loss(minus);
    EXPECT_NEAR(slope, difference, 1e-3 * std::abs(difference)) << name;
  };
  expect_slope(&Inputs::q, got.dq.data(), "dq");
  expect_slope(&Inputs::k, got.dk.data(), "dk");
  expect_slope(&Inputs::qkv, got.dqkv.data(), "dv");
}

TEST(CpuAttention, GradientsAgreeWithFiniteDifferences) {
  expect_finite_differences({{20, 0, 101, 1}, 4, 2, 10});
  expect_finite_differences({{20, 0, 150, 30}, 4, 2, 10, {{4, 5, 17}, {}, some_positions(150, 4, 8), {}}});
}

bool same_bits(const float* a, const float* b, int64_t count) {
  return std::memcmp(a, b, static_cast<size_t>(count) * sizeof(float)) == 0;
}

void expect_same_bits(const Outputs& a, const Outputs& b) {
  EXPECT_TRUE(same_bits(a.out.data(), b.out.data(), a.out.size()));
  EXPECT_TRUE(same_bits(a.lse.data(), b.lse.data(), a.lse.size()));
  EXPECT_TRUE(same_bits(a.dq.data(), b.dq.data(), a.dq.size()));
  EXPECT_TRUE(same_bits(a.dk.data(), b.dk.data(), a.dk.size()));
  EXPECT_TRUE(same_bits(a.dqkv.data(), b.dqkv.data(), a.dqkv.size()));
}

#ifdef _OPENMP
// Whole sequences a thread where the number of those with queries divides evenly (1 and 2 threads of the
// first and third case), else shared keys.
TEST(CpuAttention, TheNumberOfThreadsDoesNotMatter) {
  const int before = omp_get_max_threads();
  for (const Case& c :
       {Case{{150, 300, 7, 290}, 2, 1, 24}, Case{{330}, 2, 1, 64},
        Case{{350, 100, 400}, 2, 1, 24, {some_positions(350, 3, 1), {}, some_positions(400, 6, 2)}},
        Case{{700}, 2, 1, 64, {some_positions(600, 4, 3)}}}) {
    SCOPED_TRACE(describe(c));
    const Inputs in = make_inputs(c);
    omp_set_num_threads(1);
    const Outputs one = run(c, in);
    for (int threads : {2, 3, 5}) {
      omp_set_num_threads(threads);
      expect_same_bits(one, run(c, in));
    }
  }
  omp_set_num_threads(before);
}
#endif

TEST(CpuAttention, QueriesOfAllKeysEqualNoOwnKeysGiven) {
  AttentionScratch scratch;
  for (const Case& c : kCases) {
    SCOPED_TRACE(describe(c));
    const Inputs in = make_inputs(c);
    expect_same_bits(run(c, in, nullptr, scratch), run(c, in, c.own_keys().data(), scratch));
  }
}

// The rows own_keys[0], own_keys[1], ... of a buffer with `width` floats a row.
std::vector<float> gather_rows(const float* source, const std::vector<int32_t>& own_keys, int64_t width) {
  std::vector<float> result;
  for (int64_t row : own_keys) result.insert(result.end(), source + row * width, source + (row + 1) * width);
  return result;
}

// Attention with a query for every key whose other rows of dout are zero: the selected rows of out, lse and
// dq are those of the subset, and dk and dv are the same, since the other rows only add zeros.
TEST(CpuAttention, SomeQueriesEqualTheirRowsAmongAll) {
  for (const Case& c : kSubsetCases) {
    SCOPED_TRACE(describe(c));
    const Case all{c.lengths, c.H, c.KV, c.hd};
    const std::vector<int32_t> own_keys = c.own_keys();
    const int64_t width = c.H * c.hd;
    Inputs in_all = make_inputs(all);
    std::vector<bool> selected(static_cast<size_t>(c.keys()));
    for (int32_t row : own_keys) selected[static_cast<size_t>(row)] = true;
    for (size_t i = 0; i < in_all.dout.size(); ++i) {
      if (!selected[i / static_cast<size_t>(width)]) in_all.dout[i] = 0;
    }
    const Inputs in = {gather_rows(in_all.q.data(), own_keys, width), in_all.k, in_all.qkv,
                       gather_rows(in_all.dout.data(), own_keys, width)};

    const Outputs expected = run(all, in_all), got = run(c, in);
    const auto expect_rows = [&](const Guarded& rows, const Guarded& all_rows, int64_t row_width) {
      const std::vector<float> gathered = gather_rows(all_rows.data(), own_keys, row_width);
      EXPECT_TRUE(same_bits(rows.data(), gathered.data(), rows.size()));
    };
    expect_rows(got.out, expected.out, width);
    expect_rows(got.lse, expected.lse, c.H);
    expect_rows(got.dq, expected.dq, width);
    EXPECT_TRUE(same_bits(got.dk.data(), expected.dk.data(), got.dk.size()));
    EXPECT_TRUE(same_bits(got.dqkv.data(), expected.dqkv.data(), got.dqkv.size()));
  }
}

// Nothing of a key behind the last query reaches a result, not even as 0 * NaN, and its gradients are zero.
TEST(CpuAttention, KeysThatNoQuerySeesDoNotMatter) {
  for (const Case& c : kSubsetCases) {
    SCOPED_TRACE(describe(c));
    const Inputs in = make_inputs(c);
    const std::vector<int64_t> kv_offsets = c.kv_offsets();
    Positions unseen;
    for (size_t b = 0; b < c.lengths.size(); ++b) {
      const int64_t seen = c.selected[b].empty() ? 0 : c.selected[b].back() + 1;
      for (int64_t t = seen; t < c.lengths[b]; ++t) unseen.push_back(kv_offsets[b] + t);
    }

    Inputs poisoned = in;
    const int64_t key_width = c.KV * c.hd;
    for (int64_t row : unseen) {
      std::fill_n(poisoned.k.begin() + row * key_width, key_width, kNan);
      std::fill_n(poisoned.qkv.begin() + row * c.fused_row(), c.fused_row(), kNan);
    }
    const Outputs got = run(c, poisoned);
    expect_same_bits(got, run(c, in));
    for (int64_t row : unseen) {
      for (int64_t i = 0; i < key_width; ++i) {
        ASSERT_EQ(got.dk[row * key_width + i], 0.0f) << row;
        ASSERT_EQ(got.dqkv[row * c.fused_row() + c.value_column() + i], 0.0f) << row;
      }
    }
  }
}

TEST(CpuAttention, NoWorkOnKeysThatNoQuerySees) {
  using namespace attention;
  const Case c{{1000, 300, 192}, 2, 1, 64, {{0, 95, 96, 191}, {}, {191}}};
  const std::vector<int32_t> own_keys = c.own_keys();
  const std::vector<int64_t> q_offsets = c.q_offsets(), kv_offsets = c.kv_offsets();
  AttentionScratch scratch;
  list_tiles(scratch, {own_keys.data(), q_offsets.data(), kv_offsets.data(), c.B()}, {c.H, c.KV, c.hd});

  static_assert(kKeyTile == 96);
  ASSERT_EQ(scratch.query_tiles.size(), 2u);
  for (const QueryTile& tile : scratch.query_tiles) EXPECT_EQ(tile.key_tiles(), 2);
  std::vector<bool> seen;
  for (const KeyTile& tile : scratch.key_tiles) seen.push_back(tile.seen);
  std::vector<bool> expected(11 + 4 + 2);  // of the sequences' key tiles, the first two of the first and last
  for (size_t i : {0, 1, 15, 16}) expected[i] = true;
  EXPECT_EQ(seen, expected);
}

// The rows first .. first + count - 1 of every input.
Inputs slice_rows(const Case& c, const Inputs& in, int64_t first, int64_t count) {
  const auto slice = [&](const std::vector<float>& values, int64_t width) {
    return std::vector<float>(values.begin() + first * width, values.begin() + (first + count) * width);
  };
  return {slice(in.q, c.H * c.hd), slice(in.k, c.KV * c.hd), slice(in.qkv, c.fused_row()),
          slice(in.dout, c.H * c.hd)};
}

TEST(CpuAttention, ASequenceInABatchEqualsTheSequenceAlone) {
  const Case c{{13, 97, 0, 250, 64}, 4, 2, 16};
  const Inputs in = make_inputs(c);
  const Outputs batch = run(c, in);
  const std::vector<int64_t> offsets = c.kv_offsets();
  for (size_t b = 0; b < c.lengths.size(); ++b) {
    const Case alone{{c.lengths[b]}, c.H, c.KV, c.hd};
    const int64_t first = offsets[b];
    const Outputs got = run(alone, slice_rows(c, in, first, c.lengths[b]));
    EXPECT_TRUE(same_bits(got.out.data(), batch.out.data() + first * c.H * c.hd, got.out.size()));
    EXPECT_TRUE(same_bits(got.lse.data(), batch.lse.data() + first * c.H, got.lse.size()));
    EXPECT_TRUE(same_bits(got.dq.data(), batch.dq.data() + first * c.H * c.hd, got.dq.size()));
    EXPECT_TRUE(same_bits(got.dk.data(), batch.dk.data() + first * c.KV * c.hd, got.dk.size()));
    EXPECT_TRUE(same_bits(got.dqkv.data(), batch.dqkv.data() + first * c.fused_row(), got.dqkv.size()));
  }
}

TEST(CpuAttention, LaterTokensDoNotChangeEarlierRows) {
  const Case full{{230}, 2, 1, 64};
  const Inputs in = make_inputs(full);
  const Outputs expected = run(full, in);
  for (int64_t length : {1, 2, 31, 96, 97, 150, 229}) {
    const Case cut{{length}, 2, 1, 64};
    const Outputs got = run(cut, slice_rows(full, in, 0, length));
    EXPECT_TRUE(same_bits(got.out.data(), expected.out.data(), got.out.size())) << length;
    EXPECT_TRUE(same_bits(got.lse.data(), expected.lse.data(), got.lse.size())) << length;
  }
}

TEST(CpuAttention, LargeScoresDoNotOverflow) {
  const Case c{{150, 3}, 2, 1, 16};
  Inputs in = make_inputs(c, 100.0f);  // scores q k / 4 of about +-1e4
  const Reference expected = reference(c, in);
  EXPECT_GT(*std::max_element(expected.lse.begin(), expected.lse.end()), 1e4);
  const Outputs got = run(c, in);
  EXPECT_LE(normalised_error(got.lse.data(), expected.lse), 1e-6);
  EXPECT_LE(normalised_error(got.out.data(), expected.out), 1e-3);  // a score's rounding is 1e-3 here
  EXPECT_LE(normalised_error(value_slices(c, got.dqkv).data(), expected.dv), 1e-2);
  // The softmax is nearly one-hot, so terms of several hundred cancel in dq and dk.
  EXPECT_LE(largest_error(got.dq.data(), expected.dq), 1e-1);
  EXPECT_LE(largest_error(got.dk.data(), expected.dk), 1e-1);
}

// Not merely small: Muon normalises every update, so it would train q_proj and k_proj on rounding noise.
TEST(CpuAttention, ASingleKeyLeavesExactlyNoGradientOfItsScore) {
  for (const Case& c : {Case{{1, 1, 1}, 4, 2, 24}, Case{{120, 1, 50}, 4, 2, 24, {{0}, {0}, {0}}}}) {
    const Outputs got = run(c, make_inputs(c));
    for (int64_t i = 0; i < got.dq.size(); ++i) ASSERT_EQ(got.dq[i], 0.0f);
    for (int64_t i = 0; i < got.dk.size(); ++i) ASSERT_EQ(got.dk[i], 0.0f);
  }
}

TEST(CpuAttention, NanInAKeyReachesTheRowsThatSeeIt) {
  const Case c{{100, 20}, 2, 1, 8};
  Inputs in = make_inputs(c);
  constexpr int64_t kRow = 61;
  in.k[kRow * 8 + 3] = kNan;
  const Outputs got = run(c, in);
  for (int64_t row = 0; row < c.keys(); ++row) {
    const bool sees = row >= kRow && row < c.lengths[0];
    for (int64_t h = 0; h < c.H; ++h) ASSERT_EQ(std::isnan(got.lse[row * c.H + h]), sees) << row;
    for (int64_t i = row * c.H * c.hd; i < (row + 1) * c.H * c.hd; ++i) {
      if (sees ||
          row >= c.lengths[0]) {  // an earlier row may take a NaN from its neighbours' tile as 0 * NaN
        ASSERT_EQ(std::isnan(got.out[i]), sees) << row;
        ASSERT_EQ(std::isnan(got.dq[i]), sees) << row;
      }
    }
  }
}

}  // namespace
}  // namespace xmod

// The matrix products and the passes of the attention part, against references in double precision. (The
// tiles of the CPU's own products and attention have tests of their own; these run over every backend.)
#include "backend.h"

namespace xmod {
namespace {

constexpr double kBound = 1e-5;  // normalised error
constexpr float kEps = 0.03f;    // large enough for its absence to show

// ---------------------------------------------------------------------------------------------------
// matrix products

// a (M, K) b (K, N), each read through (row, column) strides
Doubles product(const Floats& a, int64_t a_row, int64_t a_column, const Floats& b, int64_t b_row,
                int64_t b_column, int64_t M, int64_t N, int64_t K) {
  Doubles c(static_cast<size_t>(M * N));
  for (int64_t m = 0; m < M; m++) {
    for (int64_t k = 0; k < K; k++) {
      const double factor = a[m * a_row + k * a_column];
      for (int64_t n = 0; n < N; n++) c[m * N + n] += factor * b[k * b_row + n * b_column];
    }
  }
  return c;
}

struct ProductSize {
  int64_t n, C, OC;
};

const std::vector<ProductSize> kProductSizes = {{0, 5, 3},    {1, 1, 1},      {1, 33, 7},    {7, 1, 50},
                                                {13, 70, 19}, {67, 129, 131}, {300, 17, 259}};

TEST_F(PassTest, MatmulForward) {
  for (const auto& [n, C, OC] : kProductSizes) {
    SCOPED_TRACE("n " + std::to_string(n) + ", C " + std::to_string(C) + ", OC " + std::to_string(OC));
    const Floats inp = normal_numbers(n * C, 1), weight = normal_numbers(OC * C, 2);
    const Floats before = normal_numbers(n * OC, 3);
    auto out = unwritten(n * OC), added = holding(before);
    be_.matmul_forward(out, holding(inp), holding(weight), n, C, OC);
    be_.matmul_add_forward(added, holding(inp), holding(weight), n, C, OC);
    const Doubles expected = product(inp, C, 1, weight, 1, C, n, OC, C);
    EXPECT_LE(normalised_error(out.values(), expected), kBound);
    EXPECT_LE(normalised_error(added.values(), plus(expected, doubles(before))), kBound);
  }
}

TEST_F(PassTest, MatmulBackward) {
  for (const auto& [n, C, OC] : kProductSizes) {
    SCOPED_TRACE("n " + std::to_string(n) + ", C " + std::to_string(C) + ", OC " + std::to_string(OC));
    const Floats dout = normal_numbers(n * OC, 1), inp = normal_numbers(n * C, 2);
    const Floats weight = normal_numbers(OC * C, 3), before = normal_numbers(OC * C, 4);
    const Floats dinp_before = normal_numbers(n * C, 5);
    auto dinp = unwritten(n * C), dinp_added = holding(dinp_before);
    auto dweight = holding(before), dweight_again = holding(before);
    be_.matmul_backward(dinp, dweight, holding(dout), holding(inp), holding(weight), n, C, OC);
    be_.matmul_add_backward(dinp_added, dweight_again, holding(dout), holding(inp), holding(weight), n, C,
                            OC);
    const Doubles expected_dinp = product(dout, OC, 1, weight, C, 1, n, C, OC);
    EXPECT_LE(normalised_error(dinp.values(), expected_dinp), kBound);
    EXPECT_LE(normalised_error(dinp_added.values(), plus(expected_dinp, doubles(dinp_before))), kBound);
    const Doubles gradient = product(dout, 1, OC, inp, C, 1, OC, C, n);
    EXPECT_LE(normalised_error(dweight.values(), plus(gradient, doubles(before))), kBound);
    EXPECT_TRUE(same_bits(dweight_again.values(), dweight.values()));
    if (n == 0) {
      EXPECT_TRUE(same_bits(dweight.values(), before));
    }
  }
}

// Of both kinds of gradients of an input, and with and without a second summand.
Floats fp32_products(TestBackend& be) {
  const int64_t n = 67, C = 129, OC = 31;
  const Guarded<float> inp(be, normal_numbers(n * C, 1)), weight(be, normal_numbers(OC * C, 2));
  const Guarded<float> out(be, n * OC), dinp(be, n * C), dweight(be, normal_numbers(OC * C, 3));
  be.matmul_fp32_forward(out, inp, weight, n, C, OC);
  be.matmul_fp32_backward(dinp, dweight, out, inp, weight, n, C, OC);
  be.matmul_fp32_add_backward(dinp, dweight, out, inp, weight, n, C, OC);
  Floats all;
  for (const Guarded<float>* tensor : {&out, &dinp, &dweight}) append(all, tensor->values());
  return all;
}

TEST_F(PassTest, MatmulFp32IsTheProductInFp32) {
  const int64_t n = 67, C = 129, OC = 31;
  const auto inp = holding(normal_numbers(n * C, 1)), weight = holding(normal_numbers(OC * C, 2));
  auto out = unwritten(n * OC), dinp = unwritten(n * C), dweight = holding(normal_numbers(OC * C, 3));
  be_.matmul_forward(out, inp, weight, n, C, OC);
  be_.matmul_backward(dinp, dweight, out, inp, weight, n, C, OC);
  be_.matmul_add_backward(dinp, dweight, out, inp, weight, n, C, OC);
  Floats all;
  for (const Guarded<float>* tensor : {&out, &dinp, &dweight}) append(all, tensor->values());
  EXPECT_LE(normalised_error(fp32_products(be_), all), 1e-6);
}

#ifndef XMOD_TEST_CUDA
TEST_F(PassTest, MatmulFp32IsTheSameUnderBf16) {
  TestBackend bf16({.precision = Precision::bf16, .instructions = "portable"});
  EXPECT_TRUE(same_bits(fp32_products(bf16), fp32_products(be_)));
}
#endif

TEST_F(PassTest, MatmulDoesNotDependOnThreads) {
  const int64_t n = 301, C = 131, OC = 77;
  expect_same_bits_for_any_threads([&](TestBackend& be) {
    const Guarded<float> inp(be, normal_numbers(n * C, 1)), weight(be, normal_numbers(OC * C, 2));
    const Guarded<float> out(be, n * OC), dinp(be, n * C), dweight(be, normal_numbers(OC * C, 3));
    be.matmul_forward(out, inp, weight, n, C, OC);
    be.matmul_backward(dinp, dweight, out, inp, weight, n, C, OC);
    be.matmul_add_backward(dinp, dweight, out, inp, weight, n, C, OC);
    be.matmul_add_forward(out, inp, weight, n, C, OC);
    Floats all;
    for (const auto* result : {&out, &dinp, &dweight}) append(all, result->values());
    return all;
  });
}

// ---------------------------------------------------------------------------------------------------
// QK-norm and RoPE

constexpr double kTheta = 100;

double angle(int64_t t, int64_t j, int64_t hd) {
  return static_cast<double>(t) / std::pow(kTheta, 2.0 * static_cast<double>(j) / static_cast<double>(hd));
}

// One head at position t.
Doubles qk_norm_rope_reference(Doubles x, const Doubles& weight, int64_t t) {
  const int64_t hd = static_cast<int64_t>(x.size()), half = hd / 2;
  const double rstd = 1 / std::sqrt(dot(x, x) / static_cast<double>(hd) + kEps);
  for (int64_t j = 0; j < hd; j++) x[j] *= rstd * weight[j];
  Doubles out(x.size());
  for (int64_t j = 0; j < half; j++) {
    const double cosine = std::cos(angle(t, j, hd)), sine = std::sin(angle(t, j, hd));
    out[j] = x[j] * cosine - x[j + half] * sine;
    out[j + half] = x[j + half] * cosine + x[j] * sine;
  }
  return out;
}

TEST_F(PassTest, RopeTable) {
  for (const auto& [T, hd] : {std::pair<int64_t, int64_t>{1, 2}, {5, 6}, {77, 34}}) {
    auto table = unwritten(T * hd);
    be_.rope_table(table, T, hd, kTheta);
    Doubles expected(static_cast<size_t>(T * hd));
    for (int64_t t = 0; t < T; t++) {
      for (int64_t j = 0; j < hd / 2; j++) {
        expected[t * (hd / 2) + j] = std::cos(angle(t, j, hd));
        expected[(T + t) * (hd / 2) + j] = std::sin(angle(t, j, hd));
      }
    }
    EXPECT_LE(normalised_error(table.values(), expected), 1e-7);
  }
}

struct Heads {
  int64_t H, KV, hd;
  int64_t qkv() const { return (H + 2 * KV) * hd; }
};

std::string describe(const Heads& h) {
  return "H " + std::to_string(h.H) + ", KV " + std::to_string(h.KV) + ", hd " + std::to_string(h.hd);
}

// Rows of three sequences of 40 tokens, in a table of 50 positions: RoPE turns by the place in the sequence.
constexpr int64_t kT = 40, kTableT = 50;

// Of rows b*T + t.
Ints positions(Ints row) {
  for (int32_t& r : row) r %= static_cast<int32_t>(kT);
  return row;
}

Ints rows_of_three_sequences(int64_t n) {
  Ints row;
  for (int64_t i = 0; i < n; i++) row.push_back(static_cast<int32_t>(i * 3 * kT / n + i % 2));
  return row;
}

// Weights and gradients of one kind of head, queries or keys: `count` heads behind `first` in a row of qkv.
struct HeadsReference {
  HeadsReference(const Heads& h, int64_t first, int64_t count, const Floats& qkv, const Floats& weight,
                 const Floats& dheads, const Floats& dweight_before, const Ints& row)
      : dweight(doubles(dweight_before)) {
    const int64_t heads_of_a_row = h.H + 2 * h.KV;
    for (size_t i = 0; i < row.size(); i++) {
      for (int64_t head = 0; head < count; head++) {
        const int64_t at = static_cast<int64_t>(i), t = row[i] % kT;
        const Doubles x = doubles(row_of(qkv, at * heads_of_a_row + first + head, h.hd)), w = doubles(weight);
        const Doubles dy = doubles(row_of(dheads, at * count + head, h.hd));
        append(out, qk_norm_rope_reference(x, w, t));
        rstd.push_back(1 / std::sqrt(dot(x, x) / static_cast<double>(h.hd) + kEps));
        append(dinp, numeric_gradient(
                         x, [&](const Doubles& v) { return dot(dy, qk_norm_rope_reference(v, w, t)); }));
        dweight = plus(dweight, numeric_gradient(w, [&](const Doubles& v) {
                         return dot(dy, qk_norm_rope_reference(x, v, t));
                       }));
      }
    }
  }
  Doubles out, rstd, dinp, dweight;
};

// Columns first .. first + count of every row of width columns.
Floats columns(const Floats& matrix, int64_t width, int64_t first, int64_t count) {
  Floats out;
  for (size_t at = 0; at < matrix.size(); at += static_cast<size_t>(width)) {
    const auto begin = matrix.begin() + static_cast<int64_t>(at) + first;
    out.insert(out.end(), begin, begin + count);
  }
  return out;
}

TEST_F(PassTest, QkNormRopeForwardAndBackward) {
  for (const Heads& h : {Heads{1, 1, 2}, {2, 1, 6}, {3, 3, 34}, {4, 2, 16}, {3, 1, 64}, {2, 1, 128}}) {
    for (int64_t n : {0, 1, 31}) {
      SCOPED_TRACE(describe(h) + ", n " + std::to_string(n));
      const Ints row = rows_of_three_sequences(n);
      const Floats qkv = normal_numbers(n * h.qkv(), 1);
      const Floats q_weight = normal_numbers(h.hd, 2), k_weight = normal_numbers(h.hd, 3);
      const Floats dq = normal_numbers(n * h.H * h.hd, 4), dk = normal_numbers(n * h.KV * h.hd, 5);
      const Floats dq_weight_before = normal_numbers(h.hd, 6), dk_weight_before = normal_numbers(h.hd, 7);

      auto q = unwritten(n * h.H * h.hd), k = unwritten(n * h.KV * h.hd), rstd = unwritten(n * (h.H + h.KV));
      auto dqkv = unwritten(n * h.qkv()), dq_weight = holding(dq_weight_before),
           dk_weight = holding(dk_weight_before), rope = unwritten(kTableT * h.hd);
      auto qkv_in = holding(qkv), q_weight_in = holding(q_weight), k_weight_in = holding(k_weight);
      auto position = holding(positions(row));
      be_.rope_table(rope, kTableT, h.hd, kTheta);
      be_.qk_norm_rope_forward(q, k, rstd, qkv_in, q_weight_in, k_weight_in, rope, position, n, kTableT, h.H,
                               h.KV, h.hd, kEps);
      be_.qk_norm_rope_backward(dqkv, dq_weight, dk_weight, holding(dq), holding(dk), qkv_in, q_weight_in,
                                k_weight_in, rstd, rope, position, n, kTableT, h.H, h.KV, h.hd);

      const HeadsReference queries(h, 0, h.H, qkv, q_weight, dq, dq_weight_before, row);
      const HeadsReference keys(h, h.H, h.KV, qkv, k_weight, dk, dk_weight_before, row);
      EXPECT_LE(normalised_error(q.values(), queries.out), kBound);
      EXPECT_LE(normalised_error(k.values(), keys.out), kBound);
      EXPECT_LE(normalised_error(columns(rstd.values(), h.H + h.KV, 0, h.H), queries.rstd), kBound);
      EXPECT_LE(normalised_error(columns(rstd.values(), h.H + h.KV, h.H, h.KV), keys.rstd), kBound);
      const Floats gradient = dqkv.values();
      EXPECT_LE(normalised_error(columns(gradient, h.qkv(), 0, h.H * h.hd), queries.dinp), kBound);
      EXPECT_LE(normalised_error(columns(gradient, h.qkv(), h.H * h.hd, h.KV * h.hd), keys.dinp), kBound);
      EXPECT_LE(normalised_error(dq_weight.values(), queries.dweight), kBound);
      EXPECT_LE(normalised_error(dk_weight.values(), keys.dweight), kBound);
      // v's part belongs to attention_backward.
      EXPECT_TRUE(same_bits(columns(gradient, h.qkv(), (h.H + h.KV) * h.hd, h.KV * h.hd),
                            Floats(static_cast<size_t>(n * h.KV * h.hd), Guarded<float>::guard())));
    }
  }
}

TEST_F(PassTest, QkNormRopeDoesNotDependOnThreads) {
  const Heads h{4, 2, 18};
  const int64_t n = 333;
  Ints row(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; i++) row[i] = static_cast<int32_t>(i % kT);
  expect_same_bits_for_any_threads([&](TestBackend& be) {
    const Guarded<float> q(be, n * h.H * h.hd), k(be, n * h.KV * h.hd), rstd(be, n * (h.H + h.KV));
    const Guarded<float> qkv(be, normal_numbers(n * h.qkv(), 1)), rope(be, kTableT * h.hd);
    const Guarded<float> weight(be, normal_numbers(h.hd, 2)), dqkv(be, qkv.values());
    const Guarded<float> dq_weight(be, weight.values()), dk_weight(be, weight.values());
    const Guarded<int32_t> rows(be, row);
    be.rope_table(rope, kTableT, h.hd, kTheta);
    be.qk_norm_rope_forward(q, k, rstd, qkv, weight, weight, rope, rows, n, kTableT, h.H, h.KV, h.hd, kEps);
    be.qk_norm_rope_backward(dqkv, dq_weight, dk_weight, q, k, qkv, weight, weight, rstd, rope, rows, n,
                             kTableT, h.H, h.KV, h.hd);
    Floats all;
    for (const auto* out : {&q, &k, &rstd, &dqkv, &dq_weight, &dk_weight}) append(all, out->values());
    return all;
  });
}

// ---------------------------------------------------------------------------------------------------
// attention

struct AttentionCase {
  Heads heads;
  std::vector<int64_t> lengths;

  std::vector<int64_t> offsets() const {
    std::vector<int64_t> out = {0};
    for (int64_t length : lengths) out.push_back(out.back() + length);
    return out;
  }
};

// q (n, H*hd), k and v (n, KV*hd), in and out.
struct QueriesKeysValues {
  Doubles q, k, v;
};

// Row i of the sequence that begins at row `begin`, head `head`: where it looks, and how much.
Doubles attention_weights(const Heads& h, const QueriesKeysValues& x, int64_t begin, int64_t i,
                          int64_t head) {
  const int64_t group = h.H / h.KV;
  const Doubles q = row_of(x.q, i * h.H + head, h.hd);
  Doubles weights;
  double sum = 0;
  for (int64_t j = begin; j <= i; j++) {
    const double score = dot(q, row_of(x.k, j * h.KV + head / group, h.hd));
    weights.push_back(std::exp(score / std::sqrt(static_cast<double>(h.hd))));
    sum += weights.back();
  }
  weights.push_back(sum);
  return weights;  // unnormalised; the last one is their sum
}

// visit(begin, i, head) for every row and head.
template <class Visit>
void for_each_query(const AttentionCase& c, Visit visit) {
  const std::vector<int64_t> offsets = c.offsets();
  for (size_t b = 0; b < c.lengths.size(); b++) {
    for (int64_t i = offsets[b]; i < offsets[b + 1]; i++) {
      for (int64_t head = 0; head < c.heads.H; head++) visit(offsets[b], i, head);
    }
  }
}

struct AttentionOut {
  Doubles out, lse;
};

AttentionOut attention_reference(const AttentionCase& c, const QueriesKeysValues& x) {
  const Heads& h = c.heads;
  AttentionOut result;
  for_each_query(c, [&](int64_t begin, int64_t i, int64_t head) {
    const Doubles weights = attention_weights(h, x, begin, i, head);
    Doubles out(static_cast<size_t>(h.hd));
    for (int64_t j = begin; j <= i; j++) {
      const double share = weights[j - begin] / weights.back();
      const int64_t v = (j * h.KV + head / (h.H / h.KV)) * h.hd;
      for (int64_t e = 0; e < h.hd; e++) out[e] += share * x.v[v + e];
    }
    append(result.out, out);
    result.lse.push_back(std::log(weights.back()));
  });
  return result;
}

QueriesKeysValues attention_gradient(const AttentionCase& c, const QueriesKeysValues& x,
                                     const Doubles& dout) {
  const Heads& h = c.heads;
  QueriesKeysValues d{Doubles(x.q.size()), Doubles(x.k.size()), Doubles(x.v.size())};
  const double scale = 1 / std::sqrt(static_cast<double>(h.hd));
  for_each_query(c, [&](int64_t begin, int64_t i, int64_t head) {
    const Doubles weights = attention_weights(h, x, begin, i, head);
    const Doubles dy = row_of(dout, i * h.H + head, h.hd);
    const int64_t q = (i * h.H + head) * h.hd, kv_head = head / (h.H / h.KV);
    double mean = 0;  // of dP over the row's weights
    for (int64_t j = begin; j <= i; j++) {
      mean += weights[j - begin] / weights.back() * dot(dy, row_of(x.v, j * h.KV + kv_head, h.hd));
    }
    for (int64_t j = begin; j <= i; j++) {
      const double share = weights[j - begin] / weights.back();
      const double dscore = share * (dot(dy, row_of(x.v, j * h.KV + kv_head, h.hd)) - mean) * scale;
      const int64_t kv = (j * h.KV + kv_head) * h.hd;
      for (int64_t e = 0; e < h.hd; e++) {
        d.v[kv + e] += share * dy[e];
        d.q[q + e] += dscore * x.k[kv + e];
        d.k[kv + e] += dscore * x.q[q + e];
      }
    }
  });
  return d;
}

QueriesKeysValues random_attention(const AttentionCase& c) {
  const int64_t n = c.offsets().back(), hd = c.heads.hd;
  return {doubles(normal_numbers(n * c.heads.H * hd, 1)), doubles(normal_numbers(n * c.heads.KV * hd, 2)),
          doubles(normal_numbers(n * c.heads.KV * hd, 3))};
}

TEST(AttentionReference, HasTheRightGradient) {
  const AttentionCase c{{4, 2, 2}, {3, 2}};
  const QueriesKeysValues x = random_attention(c);
  const Doubles dout = doubles(normal_numbers(static_cast<int64_t>(x.q.size()), 4));
  const QueriesKeysValues analytic = attention_gradient(c, x, dout);
  auto check = [&](Doubles QueriesKeysValues::*member) {
    const Doubles numeric = numeric_gradient(x.*member, [&](const Doubles& v) {
      QueriesKeysValues moved = x;
      moved.*member = v;
      return dot(dout, attention_reference(c, moved).out);
    });
    for (size_t i = 0; i < numeric.size(); i++) EXPECT_NEAR((analytic.*member)[i], numeric[i], 1e-8);
  };
  check(&QueriesKeysValues::q);
  check(&QueriesKeysValues::k);
  check(&QueriesKeysValues::v);
}

Floats floats(const Doubles& values) {
  return Floats(values.begin(), values.end());
}

// Rows (n, (H+2KV)*hd) whose q and k parts are NaN: attention reads only v there.
Floats fused_values(const Heads& h, const Doubles& v) {
  const int64_t width = h.KV * h.hd, n = static_cast<int64_t>(v.size()) / width;
  Floats out(static_cast<size_t>(n * h.qkv()), Guarded<float>::guard());
  for (int64_t i = 0; i < n; i++) {
    const Floats row = floats(row_of(v, i, width));
    std::copy(row.begin(), row.end(), out.begin() + (i + 1) * h.qkv() - width);
  }
  return out;
}

// Sequences of no row, one row, and more than a tile, as threshold routing makes them.
const std::vector<AttentionCase> kAttentionCases = {
    {{2, 1, 6}, {0}},        {{2, 1, 6}, {0, 0, 0}},       {{1, 1, 2}, {1}},
    {{4, 2, 6}, {5, 1, 17}}, {{3, 1, 34}, {0, 97, 50, 0}}, {{2, 2, 64}, {130, 0, 3}},
    {{6, 2, 16}, {205}},
};

TEST_F(PassTest, AttentionForwardAndBackward) {
  for (const AttentionCase& c : kAttentionCases) {
    const Heads& h = c.heads;
    const std::vector<int64_t> offsets = c.offsets();
    const int64_t n = offsets.back(), B = static_cast<int64_t>(c.lengths.size());
    SCOPED_TRACE(describe(h) + ", n " + std::to_string(n));
    const QueriesKeysValues x = random_attention(c);
    const Floats dout = normal_numbers(n * h.H * h.hd, 4);
    auto out = unwritten(n * h.H * h.hd), lse = unwritten(n * h.H), dq = unwritten(n * h.H * h.hd),
         dk = unwritten(n * h.KV * h.hd), dqkv = unwritten(n * h.qkv());
    auto q = holding(floats(x.q)), k = holding(floats(x.k)), qkv = holding(fused_values(h, x.v));
    auto rows = holding(offsets);
    const int64_t qk = (h.H + h.KV) * h.hd;
    be_.attention_forward(out, lse, q, k, qkv.data() + qk, h.qkv(), nullptr, rows, rows, n, B, h.H, h.KV,
                          h.hd);
    be_.attention_backward(dq, dk, dqkv.data() + qk, h.qkv(), holding(dout), q, k, qkv.data() + qk, h.qkv(),
                           out, lse, nullptr, rows, rows, n, n, B, h.H, h.KV, h.hd);

    const AttentionOut expected = attention_reference(c, x);
    const QueriesKeysValues gradient = attention_gradient(c, x, doubles(dout));
    EXPECT_LE(normalised_error(out.values(), expected.out), kBound);
    EXPECT_LE(normalised_error(lse.values(), expected.lse), kBound);
    EXPECT_LE(normalised_error(dq.values(), gradient.q), kBound);
    EXPECT_LE(normalised_error(dk.values(), gradient.k), kBound);
    EXPECT_LE(normalised_error(columns(dqkv.values(), h.qkv(), qk, h.KV * h.hd), gradient.v), kBound);
    EXPECT_TRUE(same_bits(columns(dqkv.values(), h.qkv(), 0, qk),
                          Floats(static_cast<size_t>(n * qk), Guarded<float>::guard())));
  }
}

// Every third query over all keys: their rows of the full attention, and the gradient it has when nothing
// comes from the other queries.
TEST_F(PassTest, AttentionOfSomeQueries) {
  for (const AttentionCase& c : kAttentionCases) {
    const Heads& h = c.heads;
    const std::vector<int64_t> offsets = c.offsets();
    const int64_t n = offsets.back(), B = static_cast<int64_t>(c.lengths.size()), width = h.H * h.hd;
    SCOPED_TRACE(describe(h) + ", n " + std::to_string(n));
    const QueriesKeysValues x = random_attention(c);
    Ints chosen;
    std::vector<int64_t> q_offsets;
    for (int64_t i = 0, b = 0; i <= n; i++) {
      for (; b <= B && offsets[b] == i; b++) q_offsets.push_back(static_cast<int64_t>(chosen.size()));
      if (i < n && i % 3 == 1) chosen.push_back(static_cast<int32_t>(i));
    }
    const int64_t nq = static_cast<int64_t>(chosen.size());
    Floats some_q, some_dout, dout(static_cast<size_t>(n * width));
    for (int32_t i : chosen) append(some_q, floats(row_of(x.q, i, width)));
    some_dout = normal_numbers(nq * width, 4);
    for (int64_t i = 0; i < nq; i++)
      std::copy_n(some_dout.begin() + i * width, width, dout.begin() + chosen[i] * width);

    auto out = unwritten(nq * width), lse = unwritten(nq * h.H), dq = unwritten(nq * width),
         dk = unwritten(n * h.KV * h.hd), dv = unwritten(n * h.KV * h.hd);
    auto q = holding(some_q), k = holding(floats(x.k)), v = holding(floats(x.v));
    auto q_rows = holding(q_offsets), rows = holding(offsets);
    auto own_key = holding(chosen);
    const int64_t kv = h.KV * h.hd;
    be_.attention_forward(out, lse, q, k, v, kv, own_key, q_rows, rows, nq, B, h.H, h.KV, h.hd);
    be_.attention_backward(dq, dk, dv, kv, holding(some_dout), q, k, v, kv, out, lse, own_key, q_rows, rows,
                           nq, n, B, h.H, h.KV, h.hd);

    const AttentionOut all = attention_reference(c, x);
    const QueriesKeysValues gradient = attention_gradient(c, x, doubles(dout));
    Doubles expected_out, expected_dq;
    for (int32_t i : chosen) {
      append(expected_out, row_of(all.out, i, width));
      append(expected_dq, row_of(gradient.q, i, width));
    }
    EXPECT_LE(normalised_error(out.values(), expected_out), kBound);
    EXPECT_LE(normalised_error(dq.values(), expected_dq), kBound);
    EXPECT_LE(normalised_error(dk.values(), gradient.k), kBound);
    EXPECT_LE(normalised_error(dv.values(), gradient.v), kBound);
  }
}

TEST_F(PassTest, AttentionDoesNotDependOnThreads) {
  for (const AttentionCase& c : {kAttentionCases[4], kAttentionCases[6]}) {
    const Heads& h = c.heads;
    const int64_t n = c.offsets().back(), B = static_cast<int64_t>(c.lengths.size());
    const QueriesKeysValues x = random_attention(c);
    expect_same_bits_for_any_threads([&](TestBackend& be) {
      const Guarded<float> out(be, n * h.H * h.hd), lse(be, n * h.H), dq(be, n * h.H * h.hd);
      const Guarded<float> dk(be, n * h.KV * h.hd), dqkv(be, n * h.qkv());
      const Guarded<float> q(be, floats(x.q)), k(be, floats(x.k)), qkv(be, fused_values(h, x.v));
      const Guarded<int64_t> rows(be, c.offsets());
      const int64_t qk = (h.H + h.KV) * h.hd;
      be.attention_forward(out, lse, q, k, qkv.data() + qk, h.qkv(), nullptr, rows, rows, n, B, h.H, h.KV,
                           h.hd);
      be.attention_backward(dq, dk, dqkv.data() + qk, h.qkv(), q, q, k, qkv.data() + qk, h.qkv(), out, lse,
                            nullptr, rows, rows, n, n, B, h.H, h.KV, h.hd);
      Floats all;
      for (const auto* result : {&out, &lse, &dq, &dk, &dqkv}) append(all, result->values());
      return all;
    });
  }
}

}  // namespace
}  // namespace xmod

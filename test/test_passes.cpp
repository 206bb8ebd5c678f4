// The passes that work row by row: embedding, RMSNorm in all its forms, residual update, FFN activation,
// loss, and the sums over whole tensors. Forward against a reference in double precision, backward against
// central differences of that reference.
#include "backend.h"

namespace xmod {
namespace {

constexpr double kBound = 1e-5;  // normalised error
constexpr float kEps = 0.03f;    // large enough for its absence to show

struct Size {
  int64_t n, d;
};

// No rows, one row, multiples of no vector or tile, more rows than one chunk of a sum over rows; rows that
// can be read in large pieces.
const std::vector<Size> kSizes = {{0, 7}, {1, 3}, {1, 33}, {67, 19}, {131, 70}, {1, 8}, {37, 264}};

template <class Check>
void for_each_size(Check check) {
  for (const auto& [n, d] : kSizes) {
    SCOPED_TRACE("n " + std::to_string(n) + ", d " + std::to_string(d));
    check(n, d);
  }
}

// n rows of a stream, ascending, with gaps.
Ints some_rows(int64_t n) {
  Ints row;
  for (int64_t i = 0; i < n; i++) row.push_back(static_cast<int32_t>(2 * i + i % 3 / 2));
  return row;
}
int64_t stream_rows(int64_t n) {
  return 2 * n + 1;
}

// What some_rows select from stream.
Floats gathered(const Floats& stream, const Ints& row, int64_t d) {
  Floats out;
  for (int32_t r : row) append(out, row_of(stream, r, d));
  return out;
}

double logistic_reference(double s) {
  return 1 / (1 + std::exp(-s));
}

// ---------------------------------------------------------------------------------------------------
// index tables and memory

TEST_F(PassTest, FillSequenceCounts) {
  for (int64_t n : {0, 1, 77}) {
    auto out = unwritten<int32_t>(n);
    be_.fill_sequence(out, n);
    Ints expected;
    for (int32_t i = 0; i < n; i++) expected.push_back(i);
    EXPECT_EQ(out.values(), expected);
  }
}

TEST_F(PassTest, FillPositionsCountsOnInEverySequence) {
  const Guarded<int64_t> offsets(be_, std::vector<int64_t>{0, 3, 3, 5});
  auto from_0 = unwritten<int32_t>(5), from_start = unwritten<int32_t>(5);
  be_.fill_positions(from_0, offsets, nullptr, 3);
  be_.fill_positions(from_start, offsets, Guarded<int32_t>(be_, Ints{7, 1, 0}), 3);
  EXPECT_EQ(from_0.values(), (Ints{0, 1, 2, 0, 1}));
  EXPECT_EQ(from_start.values(), (Ints{7, 8, 9, 0, 1}));
}

TEST_F(PassTest, GatherIntsAndScatterRows) {
  auto ints = unwritten<int32_t>(3);
  be_.gather_ints(ints, Guarded<int32_t>(be_, Ints{5, 6, 7, 8}), Guarded<int32_t>(be_, Ints{3, 0, 3}), 3);
  EXPECT_EQ(ints.values(), (Ints{8, 5, 8}));

  auto rows = holding(Floats{1, 2, 3, 4, 5, 6});  // 3 rows of 2; row 1 stays
  const Guarded<float> inp(be_, Floats{10, 11, -1, 20, 21, -1});
  be_.scatter_rows(rows, inp, 3, Guarded<int32_t>(be_, Ints{2, 0}), 2, 2);
  EXPECT_EQ(rows.values(), (Floats{20, 21, 3, 4, 10, 11}));
}

TEST_F(PassTest, UniformOffsets) {
  auto out = unwritten<int64_t>(4);
  be_.uniform_offsets(out, 3, int64_t{1} << 33);
  EXPECT_EQ(out.values(),
            (std::vector<int64_t>{0, int64_t{1} << 33, int64_t{2} << 33, 3 * (int64_t{1} << 33)}));
}

TEST_F(PassTest, MemoryIsCopiedAndZeroed) {
  for (int64_t n : {0, 1, 1000}) {
    const Floats values = normal_numbers(n, 1);
    auto inp = holding(values), zeroed = holding(values), out = unwritten(n);
    be_.copy<float>(out, inp, n);
    be_.zero<float>(zeroed, n);
    EXPECT_TRUE(same_bits(out.values(), values));
    EXPECT_TRUE(same_bits(zeroed.values(), Floats(static_cast<size_t>(n))));
  }
}

// ---------------------------------------------------------------------------------------------------
// embedding

TEST_F(PassTest, EncoderForwardCopiesRows) {
  for_each_size([&](int64_t n, int64_t d) {
    const int64_t V = 13;
    const Floats embed = normal_numbers(V * d, 1);
    const Ints tokens = random_ids(n, V, 2);
    auto out = unwritten(n * d);
    be_.encoder_forward(out, holding(tokens), holding(embed), n, d);
    EXPECT_TRUE(same_bits(out.values(), gathered(embed, tokens, d)));
  });
}

TEST_F(PassTest, EncoderBackwardAddsUpEveryOccurrence) {
  for_each_size([&](int64_t n, int64_t d) {
    const int64_t V = 13;  // fewer than rows: most tokens occur several times
    const Floats before = normal_numbers(V * d, 1), dout = normal_numbers(n * d, 2);
    const Ints tokens = random_ids(n, V - 1, 3);  // the last one never
    auto dembed = holding(before);
    be_.encoder_backward(dembed, holding(dout), holding(tokens), n, V, d);

    Doubles expected = doubles(before);
    for (int64_t i = 0; i < n; i++) {
      for (int64_t j = 0; j < d; j++) expected[tokens[i] * d + j] += dout[i * d + j];
    }
    EXPECT_LE(normalised_error(dembed.values(), expected), kBound);
    EXPECT_TRUE(same_bits(row_of(dembed.values(), V - 1, d), row_of(before, V - 1, d)));
  });
}

// ---------------------------------------------------------------------------------------------------
// RMSNorm

double rstd_reference(const Doubles& x) {
  return 1 / std::sqrt(dot(x, x) / static_cast<double>(x.size()) + kEps);
}

Doubles rmsnorm_reference(Doubles x, const Doubles& weight) {
  const double rstd = rstd_reference(x);
  for (size_t j = 0; j < x.size(); j++) x[j] *= rstd * weight[j];
  return x;
}

// RMSNorm of inp (n, d): its inputs as numbers, its outputs and gradients as the reference has them.
struct NormCase {
  NormCase(int64_t n, int64_t d)
      : inp(normal_numbers(n * d, 1)),
        weight(normal_numbers(d, 2)),
        dout(normal_numbers(n * d, 3)),
        dweight_before(normal_numbers(d, 4)),
        dweight_after(doubles(dweight_before)) {
    const Doubles w = doubles(weight);
    for (int64_t i = 0; i < n; i++) {
      const Doubles x = doubles(row_of(inp, i, d)), dy = doubles(row_of(dout, i, d));
      rstd.push_back(rstd_reference(x));
      append(out, rmsnorm_reference(x, w));
      append(dinp, numeric_gradient(x, [&](const Doubles& v) { return dot(dy, rmsnorm_reference(v, w)); }));
      dweight_after =
          plus(dweight_after,
               numeric_gradient(w, [&](const Doubles& v) { return dot(dy, rmsnorm_reference(x, v)); }));
    }
  }

  Floats rstd_floats() const { return Floats(rstd.begin(), rstd.end()); }

  Floats inp, weight, dout, dweight_before;
  Doubles dweight_after, out, rstd, dinp;
};

TEST_F(PassTest, RmsnormForward) {
  for_each_size([&](int64_t n, int64_t d) {
    const NormCase c(n, d);
    auto out = unwritten(n * d), rstd = unwritten(n);
    be_.rmsnorm_forward(out, rstd, holding(c.inp), holding(c.weight), n, d, kEps);
    EXPECT_LE(normalised_error(out.values(), c.out), kBound);
    EXPECT_LE(normalised_error(rstd.values(), c.rstd), kBound);
  });
}

TEST_F(PassTest, RmsnormBackward) {
  for_each_size([&](int64_t n, int64_t d) {
    const NormCase c(n, d);
    auto dinp = unwritten(n * d), dweight = holding(c.dweight_before);
    be_.rmsnorm_backward(dinp, dweight, holding(c.dout), holding(c.inp), holding(c.weight),
                         holding(c.rstd_floats()), n, d);
    EXPECT_LE(normalised_error(dinp.values(), c.dinp), kBound);
    EXPECT_LE(normalised_error(dweight.values(), c.dweight_after), kBound);
  });
}

TEST_F(PassTest, RmsnormAddBackward) {
  for_each_size([&](int64_t n, int64_t d) {
    const NormCase c(n, d);
    const Floats before = normal_numbers(n * d, 5);
    auto dinp = holding(before), dweight = holding(c.dweight_before);
    be_.rmsnorm_add_backward(dinp, dweight, holding(c.dout), holding(c.inp), holding(c.weight),
                             holding(c.rstd_floats()), n, d);
    EXPECT_LE(normalised_error(dinp.values(), plus(c.dinp, doubles(before))), kBound);
    EXPECT_LE(normalised_error(dweight.values(), c.dweight_after), kBound);
  });
}

TEST_F(PassTest, GatherRmsnormForward) {
  for_each_size([&](int64_t n, int64_t d) {
    const NormCase c(n, d);
    const Ints row = some_rows(n);
    Floats stream = normal_numbers(stream_rows(n) * d, 5);
    for (int64_t i = 0; i < n; i++) std::copy_n(c.inp.begin() + i * d, d, stream.begin() + row[i] * d);
    auto x = unwritten(n * d), out = unwritten(n * d), rstd = unwritten(n);
    be_.gather_rmsnorm_forward(x, out, rstd, holding(stream), holding(c.weight), holding(row), n, d, kEps);
    EXPECT_TRUE(same_bits(x.values(), c.inp));
    EXPECT_LE(normalised_error(out.values(), c.out), kBound);
    EXPECT_LE(normalised_error(rstd.values(), c.rstd), kBound);
  });
}

TEST_F(PassTest, ResidualRmsnormForward) {
  for_each_size([&](int64_t n, int64_t d) {
    const NormCase c(n, d);
    const Floats delta = normal_numbers(n * d, 5);
    Floats x = c.inp;
    for (size_t i = 0; i < x.size(); i++) x[i] -= delta[i];
    Doubles sum;  // exactly what the pass is given
    for (size_t i = 0; i < x.size(); i++) sum.push_back(static_cast<double>(x[i]) + delta[i]);
    auto h = unwritten(n * d), out = unwritten(n * d), rstd = unwritten(n);
    be_.residual_rmsnorm_forward(h, out, rstd, holding(x), holding(delta), holding(c.weight), n, d, kEps);
    EXPECT_LE(normalised_error(h.values(), sum), kBound);
    EXPECT_LE(normalised_error(out.values(), c.out), kBound);
    EXPECT_LE(normalised_error(rstd.values(), c.rstd), kBound);
  });
}

TEST_F(PassTest, ResidualRmsnormBackwardReachesBothSummands) {
  for_each_size([&](int64_t n, int64_t d) {
    const NormCase c(n, d);
    const Floats before = normal_numbers(n * d, 5);
    auto dx = unwritten(n * d), ddelta = holding(before), dweight = holding(c.dweight_before);
    be_.residual_rmsnorm_backward(dx, ddelta, dweight, holding(c.dout), holding(c.inp), holding(c.weight),
                                  holding(c.rstd_floats()), n, d);
    EXPECT_LE(normalised_error(dx.values(), c.dinp), kBound);
    EXPECT_LE(normalised_error(ddelta.values(), plus(c.dinp, doubles(before))), kBound);
    EXPECT_LE(normalised_error(dweight.values(), c.dweight_after), kBound);
  });
}

// ---------------------------------------------------------------------------------------------------
// residual update

// With a router and alpha, with a router alone (mod), without either (dense).
struct Gate {
  bool routed, scaled;
};
const std::vector<Gate> kGates = {{true, true}, {true, false}, {false, false}};

// What the pass adds to the selected rows: gate * delta.
Doubles update_reference(const Doubles& delta, const Doubles& logit, double alpha, bool routed, int64_t d) {
  Doubles out = delta;
  for (size_t i = 0; i < out.size() && routed; i++) {
    out[i] *= alpha * 2 * logistic_reference(logit[i / static_cast<size_t>(d)]);
  }
  return out;
}

TEST_F(PassTest, GatedScatterForwardLeavesOtherRowsUntouched) {
  for (const Gate& gate : kGates) {
    const bool routed = gate.routed, scaled = gate.scaled;
    for_each_size([&](int64_t n, int64_t d) {
      const Floats before = normal_numbers(stream_rows(n) * d, 1), delta = normal_numbers(n * d, 2);
      const Floats logit = normal_numbers(n, 3, 2);
      const float alpha = -0.7f;
      const Ints row = some_rows(n);
      auto stream = holding(before), logits = holding(logit), alphas = holding(Floats{alpha});
      be_.gated_scatter_forward(stream, holding(delta), routed ? logits.data() : nullptr,
                                scaled ? alphas.data() : nullptr, holding(row), n, d);

      const Doubles update = update_reference(doubles(delta), doubles(logit), scaled ? alpha : 1, routed, d);
      Doubles expected = doubles(before);
      Floats untouched = before;
      const Floats after = stream.values();
      for (int64_t i = 0; i < n; i++) {
        for (int64_t j = 0; j < d; j++) expected[row[i] * d + j] += update[i * d + j];
        std::copy_n(after.begin() + row[i] * d, d, untouched.begin() + row[i] * d);
      }
      EXPECT_LE(normalised_error(after, expected), kBound);
      EXPECT_TRUE(same_bits(after, untouched));
    });
  }
}

TEST_F(PassTest, GatedScatterBackward) {
  for (const Gate& gate : kGates) {
    const bool routed = gate.routed, scaled = gate.scaled;
    for_each_size([&](int64_t n, int64_t d) {
      const Floats dstream = normal_numbers(stream_rows(n) * d, 1), delta = normal_numbers(n * d, 2);
      const Floats logit = normal_numbers(n, 3, 2);
      const double alpha = scaled ? -0.7f : 1;
      const Ints row = some_rows(n);
      auto ddelta = unwritten(n * d), dlogit = unwritten(n), dalpha = holding(Floats{0.5f});
      auto logits = holding(logit), alphas = holding(Floats{-0.7f});
      be_.gated_scatter_backward(ddelta, dlogit, scaled ? dalpha.data() : nullptr, holding(dstream),
                                 holding(delta), routed ? logits.data() : nullptr,
                                 scaled ? alphas.data() : nullptr, holding(row), n, d);

      const Doubles dout = doubles(gathered(dstream, row, d));
      EXPECT_LE(normalised_error(ddelta.values(), update_reference(dout, doubles(logit), alpha, routed, d)),
                kBound);
      if (!routed) {
        EXPECT_TRUE(same_bits(dlogit.values(), Floats(static_cast<size_t>(n), Guarded<float>::guard())));
        return;
      }
      Doubles expected_dlogit;
      for (int64_t i = 0; i < n; i++) {
        const Doubles dy = row_of(dout, i, d), delta_row = row_of(doubles(delta), i, d);
        append(expected_dlogit, numeric_gradient({logit[i]}, [&](const Doubles& s) {
                 return dot(dy, update_reference(delta_row, s, alpha, true, d));
               }));
      }
      EXPECT_LE(normalised_error(dlogit.values(), expected_dlogit), kBound);
      const Doubles expected_dalpha = numeric_gradient({alpha}, [&](const Doubles& a) {
        return dot(dout, update_reference(doubles(delta), doubles(logit), a[0], true, d));
      });
      EXPECT_NEAR(dalpha.values()[0], scaled ? 0.5 + expected_dalpha[0] : 0.5,
                  kBound * std::sqrt(1.0 + static_cast<double>(n * d)));
    });
  }
}

TEST_F(PassTest, GatherAndScatterAdd) {
  for_each_size([&](int64_t n, int64_t d) {
    const Floats before = normal_numbers(stream_rows(n) * d, 1), inp = normal_numbers(n * d, 2);
    const Ints row = some_rows(n);
    auto stream = holding(before), out = unwritten(n * d);
    be_.gather(out, stream, holding(row), n, d);
    EXPECT_TRUE(same_bits(out.values(), gathered(before, row, d)));

    be_.scatter_add(stream, holding(inp), holding(row), n, d);
    Floats expected = before;
    for (int64_t i = 0; i < n; i++) {
      for (int64_t j = 0; j < d; j++) expected[row[i] * d + j] += inp[i * d + j];
    }
    EXPECT_TRUE(same_bits(stream.values(), expected));
  });
}

// ---------------------------------------------------------------------------------------------------
// FFN activation

double swiglu_reference(double gate, double up) {
  return gate * logistic_reference(gate) * up;
}

TEST_F(PassTest, SwigluForwardAndBackward) {
  for_each_size([&](int64_t n, int64_t d) {
    const int64_t F = d;
    const Floats gate_up = normal_numbers(n * 2 * F, 1, 2), dact = normal_numbers(n * F, 2);
    auto act = unwritten(n * F), dgate_up = unwritten(n * 2 * F);
    be_.swiglu_forward(act, holding(gate_up), n, F);
    be_.swiglu_backward(dgate_up, holding(dact), holding(gate_up), n, F);

    Doubles expected(static_cast<size_t>(n * F)), gradient(static_cast<size_t>(n * 2 * F));
    for (int64_t i = 0; i < n; i++) {
      for (int64_t j = 0; j < F; j++) {
        const int64_t gate = i * 2 * F + j, up = gate + F;
        expected[i * F + j] = swiglu_reference(gate_up[gate], gate_up[up]);
        const Doubles both = numeric_gradient({gate_up[gate], gate_up[up]}, [&](const Doubles& v) {
          return dact[i * F + j] * swiglu_reference(v[0], v[1]);
        });
        gradient[gate] = both[0], gradient[up] = both[1];
      }
    }
    EXPECT_LE(normalised_error(act.values(), expected), kBound);
    EXPECT_LE(normalised_error(dgate_up.values(), gradient), kBound);
  });
}

// A gate far from zero neither overflows nor becomes NaN: silu(-100) = 0, silu(100) = 100.
TEST_F(PassTest, SwigluOfLargeGates) {
  auto act = unwritten(2), dgate_up = unwritten(4);
  auto gate_up = holding(Floats{-100, 100, 3, 3});
  be_.swiglu_forward(act, gate_up, 1, 2);
  be_.swiglu_backward(dgate_up, holding(Floats{1, 1}), gate_up, 1, 2);
  EXPECT_LE(normalised_error(act.values(), Doubles{0, 300}), kBound);
  EXPECT_LE(normalised_error(dgate_up.values(), Doubles{0, 3, 0, 100}), kBound);
}

// ---------------------------------------------------------------------------------------------------
// loss

double crossentropy_reference(const Doubles& logits, int32_t target) {
  const double peak = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (double logit : logits) sum += std::exp(logit - peak);
  return std::log(sum) + (peak - logits[static_cast<size_t>(target)]);
}

Doubles crossentropy_gradient(const Doubles& logits, int32_t target, double dloss) {
  const double shift = logits[static_cast<size_t>(target)] + crossentropy_reference(logits, target);
  Doubles out;
  for (double logit : logits) out.push_back(dloss * std::exp(logit - shift));
  out[static_cast<size_t>(target)] -= dloss;
  return out;
}

TEST_F(PassTest, CrossentropyReferenceHasTheRightGradient) {
  const Doubles logits = {0.3, -1.2, 2.5, 0.1};
  const Doubles numeric =
      numeric_gradient(logits, [](const Doubles& v) { return 0.25 * crossentropy_reference(v, 1); });
  const Doubles analytic = crossentropy_gradient(logits, 1, 0.25);
  for (size_t v = 0; v < logits.size(); v++) EXPECT_NEAR(numeric[v], analytic[v], 1e-8);
}

// Near certainty both are small differences of numbers near 1, and as exact as those.
void check_crossentropy(TestBackend& be, const Floats& logits, const Ints& targets, int64_t V) {
  const int64_t n = static_cast<int64_t>(targets.size());
  const float dloss = 0.3f;
  const Guarded<float> forward_losses(be, n), both_losses(be, n), spent(be, logits), dlogits(be, logits);
  const Guarded<int32_t> device_targets(be, targets);
  be.crossentropy_forward(forward_losses, spent, device_targets, n, V);
  be.crossentropy_forward_backward(both_losses, dlogits, device_targets, dloss, n, V);

  const Floats losses = forward_losses.values(), gradients = dlogits.values();
  EXPECT_TRUE(same_bits(both_losses.values(), losses));
  for (int64_t i = 0; i < n; i++) {
    const Doubles row = row_of(doubles(logits), i, V);
    const double loss = crossentropy_reference(row, targets[i]);
    EXPECT_NEAR(losses[i], loss, kBound * (1 + loss)) << "row " << i;
    const Doubles gradient = crossentropy_gradient(row, targets[i], dloss);
    for (int64_t v = 0; v < V; v++) {
      ASSERT_NEAR(gradients[i * V + v], gradient[v], kBound * std::max(0.1 * dloss, std::abs(gradient[v])))
          << "row " << i << ", column " << v;
    }
  }
}

TEST_F(PassTest, Crossentropy) {
  for (int64_t V : {1, 2, 15, 33, 257, 1003, 1032}) {
    for (int64_t n : {0, 1, 19}) {
      SCOPED_TRACE("n " + std::to_string(n) + ", V " + std::to_string(V));
      Ints targets = random_ids(n, V, 2);
      if (n > 1) targets[0] = 0, targets[1] = static_cast<int32_t>(V - 1);
      check_crossentropy(be_, normal_numbers(n * V, 1, 3), targets, V);
    }
  }
}

// Far from zero the exponentials overflow, and the loss is a small difference of large numbers.
TEST_F(PassTest, CrossentropyOfLargeLogits) {
  const int64_t n = 11, V = 37;
  for (float offset : {1e4f, -1e4f}) {
    Floats logits = normal_numbers(n * V, 1);
    for (float& logit : logits) logit += offset;
    check_crossentropy(be_, logits, random_ids(n, V, 2), V);
  }
  check_crossentropy(be_, normal_numbers(n * V, 1, 1e4), random_ids(n, V, 2), V);
}

// A loss that is not finite has to show, wherever it comes from: training stops on it.
TEST_F(PassTest, CrossentropyOfNanIsNan) {
  for (int64_t V : {5, 40}) {
    Floats logits = normal_numbers(V * V, 1);  // row i has a NaN in column i
    for (int64_t i = 0; i < V; i++) logits[i * V + i] = std::numeric_limits<float>::quiet_NaN();
    auto device_logits = holding(logits), losses = holding(Floats(static_cast<size_t>(V)));
    be_.crossentropy_forward(losses, device_logits, holding(random_ids(V, V, 2)), V, V);
    for (float loss : losses.values()) EXPECT_TRUE(std::isnan(loss));
  }
}

// ---------------------------------------------------------------------------------------------------
// sums over whole tensors

TEST_F(PassTest, MeanAndSumOfSquares) {
  for (int64_t n : {1, 7, 1000, 40001, 3000000}) {
    const Floats values = normal_numbers(n, 1);
    double sum = 0, squares = 0;
    for (float v : values) sum += v, squares += static_cast<double>(v) * v;
    auto inp = holding(values);
    EXPECT_NEAR(be_.mean(inp, n), sum / static_cast<double>(n), 1e-12 * std::sqrt(squares)) << n;
    EXPECT_NEAR(be_.sum_of_squares(inp, n), squares, 1e-12 * squares) << n;
  }
  auto empty = unwritten(0);
  EXPECT_EQ(be_.sum_of_squares(empty, 0), 0);
}

// Squares of fp32 numbers that only a double holds.
TEST_F(PassTest, SumOfSquaresDoesNotOverflow) {
  auto inp = holding(Floats{3e30f, 4e30f});
  EXPECT_NEAR(std::sqrt(be_.sum_of_squares(inp, 2)), 5e30, 1e24);
}

// ---------------------------------------------------------------------------------------------------
// every pass that adds up rows: the same bits for any number of threads

TEST_F(PassTest, SumsOverRowsDoNotDependOnThreads) {
  const int64_t n = 333, d = 77, V = 5;
  const Floats inp = normal_numbers(n * d, 1), dout = normal_numbers(n * d, 2), weight = normal_numbers(d, 3);
  const Ints tokens = random_ids(n, V, 4);
  expect_same_bits_for_any_threads([&](TestBackend& be) {
    const Guarded<float> x(be, inp), dy(be, dout), w(be, weight), rstd(be, normal_numbers(n, 5));
    const Guarded<float> dx(be, n * d), dx_added(be, inp), ddelta(be, inp);
    const Guarded<float> dw1(be, weight), dw2(be, weight), dw3(be, weight), dembed(be, row_of(inp, 0, V * d));
    be.rmsnorm_backward(dx, dw1, dy, x, w, rstd, n, d);
    be.rmsnorm_add_backward(dx_added, dw2, dy, x, w, rstd, n, d);
    be.residual_rmsnorm_backward(dx, ddelta, dw3, dy, x, w, rstd, n, d);
    be.encoder_backward(dembed, dy, Guarded<int32_t>(be, tokens), n, V, d);
    Floats all;
    for (const auto* out : {&dx, &dx_added, &ddelta, &dw1, &dw2, &dw3, &dembed}) append(all, out->values());
    return all;
  });
}

TEST_F(PassTest, GatedScatterBackwardDoesNotDependOnThreads) {
  const int64_t n = 333, d = 77;
  const Ints row = some_rows(n);
  expect_same_bits_for_any_threads([&](TestBackend& be) {
    const Guarded<float> ddelta(be, n * d), dlogit(be, n), dalpha(be, Floats{0.5f}), alpha(be, Floats{0.7f});
    const Guarded<float> dstream(be, normal_numbers(stream_rows(n) * d, 1)),
        delta(be, normal_numbers(n * d, 2));
    be.gated_scatter_backward(ddelta, dlogit, dalpha, dstream, delta,
                              Guarded<float>(be, normal_numbers(n, 3)), alpha, Guarded<int32_t>(be, row), n,
                              d);
    Floats all;
    for (const auto* out : {&ddelta, &dlogit, &dalpha}) append(all, out->values());
    return all;
  });
}

TEST_F(PassTest, LossAndWholeTensorSumsDoNotDependOnThreads) {
  const int64_t n = 37, V = 1003;
  const Floats logits = normal_numbers(n * V, 1, 3);
  expect_same_bits_for_any_threads([&](TestBackend& be) {
    const Guarded<float> losses(be, n), dlogits(be, logits), inp(be, logits);
    be.crossentropy_forward_backward(losses, dlogits, Guarded<int32_t>(be, random_ids(n, V, 2)), 0.1f, n, V);
    Floats all = losses.values();
    append(all, dlogits.values());
    const double sums[] = {be.mean(inp, n * V), be.sum_of_squares(inp, n * V)};
    for (double sum : sums) {  // both halves of its bits
      const uint64_t bits = std::bit_cast<uint64_t>(sum);
      all.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits >> 32)));
      all.push_back(std::bit_cast<float>(static_cast<uint32_t>(bits)));
    }
    return all;
  });
}

}  // namespace
}  // namespace xmod

// The CUDA backend with bf16 activations against the same backend in fp32, which the other tests check: given
// the same numbers, a pass computes the same and rounds what it stores.
#define XMOD_TEST_CUDA
#include <memory>

#include "backend.h"

namespace xmod {
namespace {

using Bf16Backend = CudaBackend<bf16>;

constexpr float kEps = 0.03f;  // large enough for its absence to show

// Values that bf16 holds: both formats are given the same.
Floats rounded(Floats values) {
  for (float& value : values) value = bf16(value);
  return values;
}
Floats numbers(int64_t n, uint64_t seed, double deviation = 1) {
  return rounded(normal_numbers(n, seed, deviation));
}

// What a pass left in a tensor, in fp32, and whether it was stored in the format of activations.
struct Result {
  Floats values;
  bool activations;
};

// Runs passes on one backend: tensors in, results out.
template <class Backend>
class PassRun {
 public:
  using floatX = typename Backend::floatX;

  Backend be;
  std::vector<Result> results;

  template <class T>
  T* given(const std::vector<T>& values) {
    T* data = allocate<T>(static_cast<int64_t>(values.size()));
    be.to_device(data, values.data(), static_cast<int64_t>(values.size()));
    return data;
  }
  floatX* activations(const Floats& values) {
    return given(std::vector<floatX>(values.begin(), values.end()));
  }
  // Not numbers until they are written.
  template <class T>
  T* allocate(int64_t n) {
    auto memory = std::make_shared<std::vector<T>>();
    T* data = be.template allocate<T>(n);
    owned_.emplace_back(data, [this](T* p) { be.release(p); });
    return data;
  }
  floatX* new_activations(int64_t n) { return allocate<floatX>(n); }
  float* new_floats(int64_t n) { return allocate<float>(n); }

  template <class T>
  void result(const T* device, int64_t n) {
    std::vector<T> host(static_cast<size_t>(n));
    be.to_host(host.data(), device, n);
    results.push_back({Floats(host.begin(), host.end()), std::is_same_v<T, bf16>});
  }

 private:
  std::vector<std::shared_ptr<void>> owned_;
};

// Calls passes(run) on both backends. Numbers that only bf16 rounds may differ by 2^-8 of themselves (half a
// unit in the last place is 2^-9), all others by what another order of sums may cause.
template <class Passes>
void expect_same_but_rounded(Passes passes) {
  PassRun<CudaBackend<float>> exact;
  PassRun<Bf16Backend> low;
  passes(exact);
  passes(low);
  ASSERT_EQ(low.results.size(), exact.results.size());
  int64_t stored_in_bf16 = 0;
  for (size_t r = 0; r < exact.results.size(); r++) {
    SCOPED_TRACE("result " + std::to_string(r));
    const Floats &expected = exact.results[r].values, &found = low.results[r].values;
    if (!low.results[r].activations) {
      EXPECT_LE(normalised_error(found, expected), 1e-5);
      continue;
    }
    stored_in_bf16++;
    const double size =
        std::sqrt(dot(doubles(expected), doubles(expected)) / std::max<double>(1, expected.size()));
    for (size_t i = 0; i < expected.size(); i++)
      ASSERT_NEAR(found[i], expected[i], std::ldexp(std::abs(expected[i]), -8) + 1e-5 * size)
          << "number " << i;
  }
  EXPECT_GT(stored_in_bf16, 0) << "nothing here tells bf16 from fp32";
}

struct Size {
  int64_t n, d;
};
const std::vector<Size> kSizes = {{1, 3}, {67, 19}, {1, 8}, {37, 264}};

template <class Check>
void for_each_size(Check check) {
  for (const auto& [n, d] : kSizes) {
    SCOPED_TRACE("n " + std::to_string(n) + ", d " + std::to_string(d));
    check(n, d);
  }
}

// n rows of 2n + 1.
Ints some_rows(int64_t n) {
  Ints row;
  for (int64_t i = 0; i < n; i++) row.push_back(static_cast<int32_t>(2 * i + i % 3 / 2));
  return row;
}

TEST(Bf16, RmsnormForward) {
  for_each_size([](int64_t n, int64_t d) {
    expect_same_but_rounded([&](auto& run) {
      const auto weight = run.given(normal_numbers(d, 1)), x = run.given(normal_numbers(n * d, 2));
      const auto stream = run.given(normal_numbers((2 * n + 1) * d, 3));
      const auto delta = run.given(normal_numbers(n * d, 4));
      for (int form = 0; form < 3; form++) {
        const auto out = run.new_activations(n * d);
        const auto rstd = run.new_floats(n), kept = run.new_floats(n * d);
        if (form == 0) run.be.rmsnorm_forward(out, rstd, x, weight, n, d, kEps);
        if (form == 1)
          run.be.gather_rmsnorm_forward(kept, out, rstd, stream, weight, run.given(some_rows(n)), n, d, kEps);
        if (form == 2) run.be.residual_rmsnorm_forward(kept, out, rstd, x, delta, weight, n, d, kEps);
        run.result(out, n * d);
        run.result(rstd, n);
        if (form > 0) run.result(kept, n * d);
      }
    });
  });
}

TEST(Bf16, RmsnormBackward) {
  for_each_size([](int64_t n, int64_t d) {
    expect_same_but_rounded([&](auto& run) {
      const auto weight = run.given(normal_numbers(d, 1)), x = run.given(normal_numbers(n * d, 2));
      const auto rstd = run.given(normal_numbers(n, 3));
      const auto dout = run.activations(numbers(n * d, 4)), ddelta = run.activations(numbers(n * d, 5));
      const auto dinp = run.new_floats(n * d), dx = run.new_floats(n * d);
      const auto added = run.given(normal_numbers(n * d, 6)), dweight = run.given(normal_numbers(d, 7));
      run.be.rmsnorm_backward(dinp, dweight, dout, x, weight, rstd, n, d);
      run.be.rmsnorm_add_backward(added, dweight, dout, x, weight, rstd, n, d);
      run.be.residual_rmsnorm_backward(dx, ddelta, dweight, dout, x, weight, rstd, n, d);
      for (const float* gradient : {dinp, added, dx}) run.result(gradient, n * d);
      run.result(dweight, d);
      run.result(ddelta, n * d);
    });
  });
}

TEST(Bf16, RowsFromOnePlaceToAnother) {
  for_each_size([](int64_t n, int64_t d) {
    expect_same_but_rounded([&](auto& run) {
      const int64_t all = 2 * n + 1;
      const auto row = run.given(some_rows(n));
      const auto inp = run.activations(numbers(all * d, 1)), some = run.activations(numbers(n * 2 * d, 2));
      const auto gathered = run.new_activations(n * d), added = run.activations(numbers(all * d, 3)),
                 scattered = run.activations(numbers(all * d, 4));
      run.be.gather(gathered, inp, row, n, d);
      run.be.scatter_add(added, some, row, n, d);
      run.be.scatter_rows(scattered, some + d, 2 * d, row, n, d);
      run.result(gathered, n * d);
      run.result(added, all * d);
      run.result(scattered, all * d);
    });
  });
}

TEST(Bf16, GatedScatterBackward) {
  for (const bool routed : {true, false}) {
    for_each_size([&](int64_t n, int64_t d) {
      expect_same_but_rounded([&](auto& run) {
        const auto dstream = run.given(normal_numbers((2 * n + 1) * d, 1));
        const auto delta = run.given(normal_numbers(n * d, 2)), logit = run.given(normal_numbers(n, 3));
        const auto alpha = run.given(Floats{0.7f}), dalpha = run.given(Floats{0.5f});
        const auto dlogit = run.given(Floats(static_cast<size_t>(n)));
        const auto ddelta = run.new_activations(n * d);
        run.be.gated_scatter_backward(ddelta, dlogit, dalpha, dstream, delta, routed ? logit : nullptr, alpha,
                                      run.given(some_rows(n)), n, d);
        run.result(ddelta, n * d);
        run.result(dlogit, n);
        run.result(dalpha, 1);
      });
    });
  }
}

// Weights outside of parameters are rounded as they come, those of parameters once, for all products to come.
TEST(Bf16, MatrixProducts) {
  for (const auto& [n, C, OC] : {std::array<int64_t, 3>{1, 1, 1}, {13, 70, 19}, {64, 128, 136}}) {
    for (const bool in_parameters : {false, true}) {
      SCOPED_TRACE("n " + std::to_string(n) + ", C " + std::to_string(C) + ", OC " + std::to_string(OC));
      expect_same_but_rounded([&, n = n, C = C, OC = OC](auto& run) {
        const int64_t before = 16;
        Floats params(static_cast<size_t>(before + OC * C + 5));
        float* buffer = run.given(params);
        if (in_parameters) run.be.use_parameters(buffer, before + OC * C + 5, {{0, before + OC * C + 5}});
        const Floats weights = numbers(OC * C, 1);
        std::copy(weights.begin(), weights.end(), params.begin() + before);
        run.be.to_device(buffer, params.data(), before + OC * C + 5);
        if (in_parameters) run.be.use_parameters(buffer, before + OC * C + 5, {{0, before + OC * C + 5}});
        const float* weight = buffer + before;

        const auto inp = run.activations(numbers(n * C, 2)), dout = run.activations(numbers(n * OC, 3));
        const auto dout_floats = run.given(numbers(n * OC, 4));
        const auto out = run.new_activations(n * OC), dinp = run.new_activations(n * C),
                   dinp_of_floats = run.new_activations(n * C);
        const auto out_floats = run.new_floats(n * OC), sum = run.given(normal_numbers(n * OC, 5)),
                   dweight = run.given(normal_numbers(OC * C, 6));
        run.be.matmul_forward(out, inp, weight, n, C, OC);
        run.be.matmul_forward(out_floats, inp, weight, n, C, OC);
        run.be.matmul_add_forward(sum, inp, weight, n, C, OC);
        run.be.matmul_backward(dinp, dweight, dout, inp, weight, n, C, OC);
        run.be.matmul_fp32_backward(dinp_of_floats, dweight, dout_floats, inp, weight, n, C, OC);
        run.result(out, n * OC);
        run.result(out_floats, n * OC);
        run.result(sum, n * OC);
        run.result(dinp, n * C);
        run.result(dinp_of_floats, n * C);
        run.result(dweight, OC * C);
      });
    }
  }
}

TEST(Bf16, ProductsThatAddToTheirGradient) {
  const int64_t n = 13, C = 24, OC = 19;
  expect_same_but_rounded([&](auto& run) {
    const auto weight = run.given(numbers(OC * C, 1)), dweight = run.given(normal_numbers(OC * C, 2));
    const auto inp = run.activations(numbers(n * C, 3)), dout = run.activations(numbers(n * OC, 4));
    const auto dinp = run.activations(numbers(n * C, 5)), dinp_of_floats = run.activations(numbers(n * C, 6));
    run.be.matmul_add_backward(dinp, dweight, dout, inp, weight, n, C, OC);
    run.be.matmul_fp32_add_backward(dinp_of_floats, dweight, run.given(numbers(n * OC, 7)), inp, weight, n, C,
                                    OC);
    run.result(dinp, n * C);
    run.result(dinp_of_floats, n * C);
    run.result(dweight, OC * C);
  });
}

// A buffer of parameters that is gone lends its copy to nobody.
TEST(Bf16, WeightsOfAReleasedBufferAreForgotten) {
  Bf16Backend be;
  const int64_t C = 8;
  const std::vector<bf16> inp(C, 1.0f);
  bf16* device_inp = be.allocate<bf16>(C);
  float* out = be.allocate<float>(1);
  be.to_device(device_inp, inp.data(), C);
  for (const float value : {1.0f, 2.0f, 3.0f}) {
    float* weight = be.allocate<float>(C);
    be.fill(weight, value, C);
    if (value == 1) be.use_parameters(weight, C, {{0, C}});
    be.matmul_forward(out, device_inp, weight, 1, C, 1);
    float found = 0;
    be.to_host(&found, out, 1);
    EXPECT_EQ(found, value * C);
    be.release(weight);
  }
  be.release(device_inp);
  be.release(out);
}

TEST(Bf16, QkNormRope) {
  const int64_t n = 31, table_T = 40, H = 3, KV = 2;
  for (int64_t hd : {6, 64, 128}) {
    SCOPED_TRACE("head size " + std::to_string(hd));
    expect_same_but_rounded([&](auto& run) {
      const auto qkv = run.activations(numbers(n * (H + 2 * KV) * hd, 1));
      const auto q_weight = run.given(normal_numbers(hd, 2)), k_weight = run.given(normal_numbers(hd, 3));
      const auto dq = run.activations(numbers(n * H * hd, 4)), dk = run.activations(numbers(n * KV * hd, 5));
      const auto dq_weight = run.given(normal_numbers(hd, 6)), dk_weight = run.given(normal_numbers(hd, 7));
      const auto rope = run.new_floats(table_T * hd), rstd = run.new_floats(n * (H + KV));
      const auto q = run.new_activations(n * H * hd), k = run.new_activations(n * KV * hd),
                 dqkv = run.activations(numbers(n * (H + 2 * KV) * hd, 8));
      const auto position = run.given(random_ids(n, table_T, 9));
      run.be.rope_table(rope, table_T, hd, 100);
      run.be.qk_norm_rope_forward(q, k, rstd, qkv, q_weight, k_weight, rope, position, n, table_T, H, KV, hd,
                                  kEps);
      run.be.qk_norm_rope_backward(dqkv, dq_weight, dk_weight, dq, dk, qkv, q_weight, k_weight, rstd, rope,
                                   position, n, table_T, H, KV, hd);
      run.result(q, n * H * hd);
      run.result(k, n * KV * hd);
      run.result(rstd, n * (H + KV));
      run.result(dqkv, n * (H + 2 * KV) * hd);
      run.result(dq_weight, hd);
      run.result(dk_weight, hd);
    });
  }
}

TEST(Bf16, Swiglu) {
  for_each_size([](int64_t n, int64_t F) {
    expect_same_but_rounded([&](auto& run) {
      const auto gate_up = run.activations(numbers(n * 2 * F, 1, 2)),
                 dact = run.activations(numbers(n * F, 2));
      const auto act = run.new_activations(n * F), dgate_up = run.new_activations(n * 2 * F);
      run.be.swiglu_forward(act, gate_up, n, F);
      run.be.swiglu_backward(dgate_up, dact, gate_up, n, F);
      run.result(act, n * F);
      run.result(dgate_up, n * 2 * F);
    });
  });
}

TEST(Bf16, Crossentropy) {
  const int64_t n = 19;
  for (int64_t V : {1, 33, 257, 1032}) {
    SCOPED_TRACE("V " + std::to_string(V));
    expect_same_but_rounded([&](auto& run) {
      const auto logits = run.activations(numbers(n * V, 1, 3));
      const auto targets = run.given(random_ids(n, V, 2));
      const auto losses = run.new_floats(n), both = run.new_floats(n);
      run.be.crossentropy_forward(losses, logits, targets, n, V);
      run.be.crossentropy_forward_backward(both, logits, targets, 0.3f, n, V);
      run.result(losses, n);
      run.result(both, n);
      run.result(logits, n * V);
    });
  }
}

TEST(Bf16, ExpertMatmuls) {
  for (const auto& [C, OC, more] : {std::array<int64_t, 3>{40, 136, 8}, {72, 24, 0}, {19, 33, 5}}) {
    SCOPED_TRACE("C " + std::to_string(C) + ", OC " + std::to_string(OC));
    const std::vector<int64_t> offsets = {0, 150, 150, 187, 188};
    const int64_t E = 4, pairs = offsets.back(), stride = C * OC + more, size = (E - 1) * stride + C * OC;
    expect_same_but_rounded([&, C = C, OC = OC](auto& run) {
      const auto inp = run.activations(numbers(pairs * C, 1)), dout = run.activations(numbers(pairs * OC, 2));
      const auto weight = run.given(numbers(size, 3)), dweight = run.given(normal_numbers(size, 4));
      const auto out = run.new_activations(pairs * OC), dinp = run.new_activations(pairs * C);
      const auto at = run.given(offsets);
      run.be.expert_matmul_forward(out, inp, weight, stride, at, pairs, E, C, OC);
      run.be.expert_matmul_backward(dinp, dweight, dout, inp, weight, stride, at, pairs, E, C, OC);
      run.result(out, pairs * OC);
      run.result(dinp, pairs * C);
      run.result(dweight, size);
    });
  }
}

TEST(Bf16, Experts) {
  for (const auto& [n, E, width] : {std::array<int64_t, 3>{5, 1, 33}, {31, 5, 19}, {31, 5, 40}}) {
    SCOPED_TRACE("n " + std::to_string(n) + ", E " + std::to_string(E) + ", width " + std::to_string(width));
    std::vector<uint8_t> chosen;
    for (int32_t id : random_ids(n * E, 5, 7)) chosen.push_back(id < 2);
    const int64_t pairs = std::count(chosen.begin(), chosen.end(), 1);
    expect_same_but_rounded([&, n = n, E = E, width = width](auto& run) {
      const int64_t most = n * E;
      const auto row = run.template allocate<int32_t>(most), expert = run.template allocate<int32_t>(most),
                 slot = run.template allocate<int32_t>(most);
      const auto slot_offsets = run.template allocate<int64_t>(n + 1);
      const auto offsets = run.template allocate<int64_t>(E + 1);
      // More than there are: what lies behind them must neither be read nor written.
      const int64_t told =
          run.be.group_by_expert(row, expert, slot, slot_offsets, offsets, run.given(chosen), n, E, most);
      const auto up = run.activations(numbers(pairs * width, 1)),
                 dy = run.activations(numbers(pairs * width, 2));
      const auto weight = run.given(normal_numbers(n * E, 3)), norm = run.given(normal_numbers(width, 4)),
                 mean = run.given(normal_numbers(n, 5)), dnorm = run.given(normal_numbers(width, 6));
      const auto act = run.new_activations(pairs * width), weighted = run.new_activations(pairs * width),
                 dact = run.new_activations(pairs * width), dup = run.new_activations(pairs * width);
      const auto rstd = run.new_floats(pairs), dweight = run.new_floats(n * E), dmean = run.new_floats(pairs);
      const auto sum = run.given(normal_numbers(n * width, 8));
      const auto low_sum = run.activations(numbers(n * width, 9));
      run.be.norm_silu_forward(act, rstd, up, mean, norm, row, told, width, kEps);
      run.be.norm_silu_backward(dup, dmean, dnorm, dy, up, mean, rstd, norm, row, told, width);
      run.be.expert_weight_forward(weighted, up, weight, row, expert, told, E, width);
      run.be.expert_weight_backward(dact, dweight, dy, up, weight, row, expert, told, n, E, width);
      run.be.sum_pairs_add(sum, dy, slot, slot_offsets, n, width);
      run.be.sum_pairs_add(low_sum, dy, slot, slot_offsets, n, width);
      for (const auto* activations : {act, dup, weighted, dact}) run.result(activations, pairs * width);
      run.result(low_sum, n * width);
      run.result(sum, n * width);
      run.result(rstd, pairs);
      run.result(dmean, pairs);
      run.result(dnorm, width);
      run.result(dweight, n * E);
    });
  }
}

// Five Newton-Schulz steps in bf16 leave an orthogonal matrix about as far from one as its own rounding does.
TEST(Bf16, MuonMakesMatricesOrthogonal) {
  for (const auto& [rows, cols] : {std::pair<int64_t, int64_t>{16, 40}, {40, 16}, {24, 24}}) {
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(cols));
    const int64_t count = 3, size = rows * cols, R = std::min(rows, cols);
    PassRun<CudaBackend<float>> exact;
    PassRun<Bf16Backend> low;
    auto update = [&, rows = rows, cols = cols](auto& run) {
      float* params = run.given(Floats(static_cast<size_t>(count * size)));
      float* momentum = run.given(Floats(static_cast<size_t>(count * size)));
      const std::vector<int64_t> offsets = {2 * size, 0, size};
      run.be.muon_update(params, momentum, run.given(normal_numbers(count * size, 1)), offsets.data(),
                         offsets.data(), count, rows, cols, {1, 0, 1});
      run.result(params, count * size);
      run.result(momentum, count * size);
    };
    update(exact);
    update(low);
    EXPECT_TRUE(same_bits(low.results[1].values, exact.results[1].values)) << "momentum";
    EXPECT_LE(normalised_error(low.results[0].values, exact.results[0].values), 0.03);
    EXPECT_GT(normalised_error(low.results[0].values, exact.results[0].values), 1e-4) << "not in bf16";
    const double rate = 0.2 * std::sqrt(static_cast<double>(std::max(rows, cols)));
    for (int64_t i = 0; i < count; i++) {
      double squares = 0;
      for (float u : row_of(low.results[0].values, i, size)) squares += std::pow(u / rate, 2);
      EXPECT_NEAR(std::sqrt(squares / static_cast<double>(R)), 0.9, 0.25);  // of singular values near 1
    }
  }
}

}  // namespace
}  // namespace xmod

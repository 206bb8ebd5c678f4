// Attention's CUDA kernels, run on the CPU, against a plain computation in double precision; and the
// properties that training relies on.
#include "xmod/cuda_attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <type_traits>
#include <vector>

#include "round_to_bf16.h"

namespace xmod::cuda_attention_test {

using Bf16 = __nv_bfloat16;
using Floats = std::vector<float>;
using Doubles = std::vector<double>;
using Positions = std::vector<int64_t>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kSentinel = -12345.0f;

// ---------------------------------------------------------------------------------------------------
// Cases

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
    for (const Positions& positions : selected)
      result.push_back(result.back() + static_cast<int64_t>(positions.size()));
    return result;
  }
  std::vector<int32_t> own_keys() const {
    std::vector<int32_t> result(static_cast<size_t>(all_selected() ? keys() : 0));
    std::iota(result.begin(), result.end(), 0);
    const std::vector<int64_t> offsets = kv_offsets();
    for (size_t b = 0; b < selected.size(); ++b)
      for (int64_t t : selected[b]) result.push_back(static_cast<int32_t>(offsets[b] + t));
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

Positions position_range(int64_t first, int64_t last) {
  Positions positions(static_cast<size_t>(last - first));
  std::iota(positions.begin(), positions.end(), first);
  return positions;
}

// About one position in `sparsity`, without a pattern.
Positions some_positions(int64_t length, uint32_t sparsity, uint32_t seed) {
  std::mt19937 generator(seed);
  Positions positions;
  for (int64_t t = 0; t < length; ++t)
    if (generator() % sparsity == 0) positions.push_back(t);
  return positions;
}

// Around the sizes of tiles, groups of 1, 2, 4 and others, and more sequences than a warp has lanes.
const std::vector<Case> kCases = {
    {{1}, 2, 1, 8},
    {{2}, 1, 1, 64},
    {{63}, 4, 1, 32},
    {{64}, 2, 2, 16},
    {{65, 1, 0, 33}, 4, 2, 64},
    {{130}, 2, 1, 128},
    {{130, 2}, 1, 1, 64},
    {{0, 0, 17, 5, 0}, 6, 2, 10},
    {{40, 3}, 7, 1, 6},
    {{23}, 20, 2, 4},
    {{29, 70}, 3, 3, 34},
    {{3, 0, 1, 2, 0, 4, 1, 1, 0, 2, 3, 1, 1, 2, 0, 0, 1, 5,
      1, 1, 2, 1, 0, 1, 3, 1, 1, 0, 2, 1, 1, 1, 4, 0, 1, 2},
     2,
     1,
     2},
};

// Queries of some of the positions: few and many, none at all, one, only early ones (which leave whole key
// tiles unseen), only late ones, dense runs with gaps of several key tiles.
const std::vector<Case> kSubsetCases = {
    {{200}, 2, 1, 64, {some_positions(200, 4, 1)}},
    {{150, 90, 70}, 4, 2, 24, {some_positions(150, 2, 2), {}, some_positions(70, 16, 3)}},
    {{140, 0, 140, 5}, 2, 1, 10, {{0}, {}, {139}, {}}},
    {{300, 80}, 1, 1, 128, {{3, 4, 100, 250}, position_range(50, 80)}},
    {{1, 2, 1}, 2, 1, 12, {{0}, {0}, {}}},
    {{60, 10}, 2, 1, 8, {{}, {}}},
};

// ---------------------------------------------------------------------------------------------------
// Inputs and outputs

Floats normal_numbers(int64_t count, uint32_t seed, float deviation = 1.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> distribution(0.0f, deviation);
  Floats values(static_cast<size_t>(count));
  for (float& value : values) value = distribution(generator);
  return values;
}

struct Inputs {
  Floats q, k, qkv, dout;  // v is a slice of qkv; its other columns are NaN and must not be read
};

// As Element holds them.
template <class Element>
Inputs make_inputs(const Case& c, float deviation = 1.0f) {
  Inputs in{normal_numbers(c.queries() * c.H * c.hd, 1, deviation),
            normal_numbers(c.keys() * c.KV * c.hd, 2, deviation), normal_numbers(c.keys() * c.fused_row(), 3),
            normal_numbers(c.queries() * c.H * c.hd, 4)};
  for (size_t i = 0; i < in.qkv.size(); ++i)
    if (static_cast<int64_t>(i) % c.fused_row() < c.value_column()) in.qkv[i] = kNan;
  for (Floats* values : {&in.q, &in.k, &in.qkv, &in.dout})
    for (float& x : *values) x = static_cast<float>(static_cast<Element>(x));
  return in;
}

// An array on the device with guards on either side; `shift` elements past a multiple of 16 bytes.
template <class T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values, size_t shift = 0)
      : size_(values.size()), guard_(kGuard + shift) {
    std::vector<T> all(size_ + 2 * guard_, static_cast<T>(kSentinel));
    std::copy(values.begin(), values.end(), all.begin() + static_cast<int64_t>(guard_));
    cuda_check(cudaMalloc(&data_, all.size() * sizeof(T)));
    cuda_check(cudaMemcpy(data_, all.data(), all.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  // Not written yet.
  DeviceArray(int64_t count, size_t shift = 0)
      : DeviceArray(std::vector<T>(static_cast<size_t>(count), static_cast<T>(kNan)), shift) {}
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* get() const { return data_ + guard_; }
  std::vector<T> values() const {
    std::vector<T> all(size_ + 2 * guard_);
    cuda_check(cudaMemcpy(all.data(), data_, all.size() * sizeof(T), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < guard_; ++i) {
      EXPECT_EQ(static_cast<float>(all[i]), static_cast<float>(static_cast<T>(kSentinel)));
      EXPECT_EQ(static_cast<float>(all[all.size() - 1 - i]), static_cast<float>(static_cast<T>(kSentinel)));
    }
    return std::vector<T>(all.begin() + static_cast<int64_t>(guard_),
                          all.end() - static_cast<int64_t>(guard_));
  }

 private:
  static constexpr size_t kGuard = 64;
  size_t size_, guard_;
  T* data_ = nullptr;
};

template <class Element>
std::vector<Element> elements(const Floats& values) {
  return std::vector<Element>(values.begin(), values.end());
}

template <class Element>
Floats floats(const DeviceArray<Element>& array) {
  Floats result;
  for (Element x : array.values()) result.push_back(static_cast<float>(x));
  return result;
}

struct Outputs {
  Floats out, lse, dq, dk, dqkv;

  bool operator==(const Outputs& other) const = default;
};

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

void expect_same_bits(const Outputs& a, const Outputs& b) {
  EXPECT_TRUE(same_bits(a.out, b.out));
  EXPECT_TRUE(same_bits(a.lse, b.lse));
  EXPECT_TRUE(same_bits(a.dq, b.dq));
  EXPECT_TRUE(same_bits(a.dk, b.dk));
  EXPECT_TRUE(same_bits(a.dqkv, b.dqkv));
}

// Both passes. shift: of all buffers of Elements, from a multiple of 16 bytes
template <class Element>
Outputs run(const Case& c, const Inputs& in, bool give_own_keys, size_t shift = 0) {
  const DeviceArray<Element> q(elements<Element>(in.q), shift), k(elements<Element>(in.k), shift),
      qkv(elements<Element>(in.qkv), shift), dout(elements<Element>(in.dout), shift);
  const DeviceArray<Element> out(c.queries() * c.H * c.hd, shift), dq(c.queries() * c.H * c.hd, shift),
      dk(c.keys() * c.KV * c.hd, shift), dqkv(c.keys() * c.fused_row(), shift);
  const DeviceArray<float> lse(c.queries() * c.H);
  const DeviceArray<int32_t> own_keys(c.own_keys());
  const DeviceArray<int64_t> q_offsets(c.q_offsets()), kv_offsets(c.kv_offsets());
  const DeviceArray<float> workspace(cuda_attention_workspace_bytes(c.queries(), c.H) /
                                     static_cast<int64_t>(sizeof(float)));
  const int32_t* own_key = give_own_keys ? own_keys.get() : nullptr;
  const Element* v = qkv.get() + c.value_column();

  cuda_attention_forward(out.get(), lse.get(), q.get(), k.get(), v, c.fused_row(), own_key, q_offsets.get(),
                         kv_offsets.get(), c.queries(), c.B(), c.H, c.KV, c.hd, nullptr);
  cuda_attention_backward(dq.get(), dk.get(), dqkv.get() + c.value_column(), c.fused_row(), dout.get(),
                          q.get(), k.get(), v, c.fused_row(), out.get(), lse.get(), own_key, q_offsets.get(),
                          kv_offsets.get(), c.queries(), c.keys(), c.B(), c.H, c.KV, c.hd, workspace.get(),
                          nullptr);
  workspace.values();  // whose guards must be there
  return {floats(out), floats(lse), floats(dq), floats(dk), floats(dqkv)};
}

template <class Element>
Outputs run(const Case& c, const Inputs& in) {
  return run<Element>(c, in, !c.all_selected());
}

// The columns of v in rows of q, k and v.
Floats value_slices(const Case& c, const Floats& fused) {
  Floats result;
  for (size_t i = 0; i < fused.size(); ++i)
    if (static_cast<int64_t>(i) % c.fused_row() >= c.value_column()) result.push_back(fused[i]);
  return result;
}

// ---------------------------------------------------------------------------------------------------
// The reference

struct Reference {
  Doubles out, lse, dq, dk, dv;  // dv (keys, KV, hd), compact
};

double exact(double x) {
  return x;
}

// Scores, softmax and the chain rule as the formulas say, row by row. `round` is applied to the factors of
// products, as they go to a tensor core, and to the results.
Reference reference(const Case& c, const Inputs& in, double (*round)(double)) {
  const int64_t H = c.H, KV = c.KV, hd = c.hd;
  Reference r{
      Doubles(static_cast<size_t>(c.queries() * H * hd)), Doubles(static_cast<size_t>(c.queries() * H)),
      Doubles(static_cast<size_t>(c.queries() * H * hd)), Doubles(static_cast<size_t>(c.keys() * KV * hd)),
      Doubles(static_cast<size_t>(c.keys() * KV * hd))};
  const double scale = 1.0 / std::sqrt(static_cast<double>(hd));
  const std::vector<int64_t> q_offsets = c.q_offsets(), kv_offsets = c.kv_offsets();
  const std::vector<int32_t> own_keys = c.own_keys();
  const auto dot = [hd](const float* a, const float* b) {
    double sum = 0;
    for (int64_t i = 0; i < hd; ++i) sum += static_cast<double>(a[i]) * b[i];
    return sum;
  };

  const auto add_row = [&](int64_t first, int64_t t, int64_t h) {
    const size_t keys = static_cast<size_t>(own_keys[static_cast<size_t>(t)] - first + 1);
    const int64_t g = h / (H / KV), at = (t * H + h) * hd;
    const float *q = in.q.data() + at, *dout = in.dout.data() + at;
    const auto key = [&](size_t s) {
      return in.k.data() + ((first + static_cast<int64_t>(s)) * KV + g) * hd;
    };
    const auto value = [&](size_t s) {
      return in.qkv.data() + (first + static_cast<int64_t>(s)) * c.fused_row() + c.value_column() + g * hd;
    };
    const auto gradient_at = [&](size_t s) { return ((first + static_cast<int64_t>(s)) * KV + g) * hd; };
    Doubles p(keys);
    for (size_t s = 0; s < keys; ++s) p[s] = scale * dot(q, key(s));
    const double top = *std::max_element(p.begin(), p.end());
    double total = 0;
    for (double& x : p) total += x = std::exp(x - top);
    r.lse[static_cast<size_t>(t * H + h)] = top + std::log(total);

    double delta = 0;
    for (int64_t i = 0; i < hd; ++i) {
      double& out = r.out[static_cast<size_t>(at + i)];
      for (size_t s = 0; s < keys; ++s) out += round(p[s]) * value(s)[i];
      out = round(out / total);
      delta += out * dout[i];
    }
    for (size_t s = 0; s < keys; ++s) {
      const double weight = round(p[s] / total), dscore = round(p[s] / total * (dot(dout, value(s)) - delta));
      for (int64_t i = 0; i < hd; ++i) {
        r.dv[static_cast<size_t>(gradient_at(s) + i)] += weight * dout[i];
        r.dq[static_cast<size_t>(at + i)] += scale * dscore * key(s)[i];
        r.dk[static_cast<size_t>(gradient_at(s) + i)] += scale * dscore * q[i];
      }
    }
  };
  for (size_t b = 0; b + 1 < q_offsets.size(); ++b)
    for (int64_t t = q_offsets[b]; t < q_offsets[b + 1]; ++t)
      for (int64_t h = 0; h < H; ++h) add_row(kv_offsets[b], t, h);
  for (Doubles* result : {&r.dq, &r.dk, &r.dv})
    for (double& x : *result) x = round(x);
  return r;
}

template <class Values>
double distance(const Values& got, const Doubles& expected) {
  EXPECT_EQ(got.size(), expected.size());
  double sum = 0;
  for (size_t i = 0; i < expected.size(); ++i)
    sum += (static_cast<double>(got[i]) - expected[i]) * (static_cast<double>(got[i]) - expected[i]);
  return std::sqrt(sum);
}

double norm(const Doubles& values) {
  return distance(Doubles(values.size()), values);
}

void expect_only_values_written(const Case& c, const Outputs& got) {
  for (size_t i = 0; i < got.dqkv.size(); ++i) {
    if (static_cast<int64_t>(i) % c.fused_row() < c.value_column()) {
      ASSERT_TRUE(std::isnan(got.dqkv[i])) << "column outside of the slice was written";
    }
  }
}

// Where every query sees one key only, dq and dk are zero, but for the reference's own rounding.
void expect_close(const Floats& got, const Doubles& expected, double bound, const char* name) {
  EXPECT_LE(distance(got, expected), bound * norm(expected) + 1e-12) << name;
}

void expect_fp32_agreement(const Case& c, float deviation = 1.0f) {
  SCOPED_TRACE(describe(c));
  constexpr double kBound = 1e-5;
  const Inputs in = make_inputs<float>(c, deviation);
  const Outputs got = run<float>(c, in);
  const Reference expected = reference(c, in, exact);
  expect_close(got.out, expected.out, kBound, "out");
  expect_close(got.lse, expected.lse, kBound, "lse");
  expect_close(got.dq, expected.dq, kBound, "dq");
  expect_close(got.dk, expected.dk, kBound, "dk");
  expect_close(value_slices(c, got.dqkv), expected.dv, kBound, "dv");
  expect_only_values_written(c, got);
}

// At most twice the error of the same computation with its factors and results rounded to bf16.
void expect_bf16_agreement(const Case& c) {
  SCOPED_TRACE(describe(c));
  const Inputs in = make_inputs<Bf16>(c);
  const Outputs got = run<Bf16>(c, in);
  const Reference expected = reference(c, in, exact), rounded = reference(c, in, round_to_bf16);
  const auto expect_twice = [](const Floats& values, const Doubles& wanted, const Doubles& low,
                               const char* name) {
    EXPECT_LE(distance(values, wanted), 2 * distance(low, wanted) + 1e-6 * norm(wanted)) << name;
  };
  expect_twice(got.out, expected.out, rounded.out, "out");
  expect_close(got.lse, expected.lse, 1e-5, "lse");
  expect_twice(got.dq, expected.dq, rounded.dq, "dq");
  expect_twice(got.dk, expected.dk, rounded.dk, "dk");
  expect_twice(value_slices(c, got.dqkv), expected.dv, rounded.dv, "dv");
  expect_only_values_written(c, got);
}

// Where CUDA is emulated. A GPU has an order of its own, another one each time.
void set_thread_order([[maybe_unused]] uint64_t seed) {
#ifndef __CUDACC__
  cuda_emulation::set_thread_order(seed);
#endif
}

class CudaAttention : public ::testing::Test {
 protected:
  ~CudaAttention() override { set_thread_order(0); }
};

TEST_F(CudaAttention, Fp32AgreesWithDoublePrecision) {
  for (const std::vector<Case>* cases : {&kCases, &kSubsetCases})
    for (const Case& c : *cases) expect_fp32_agreement(c);
}

TEST_F(CudaAttention, Bf16IsAsExactAsItsRounding) {
  for (const std::vector<Case>* cases : {&kCases, &kSubsetCases})
    for (const Case& c : *cases) expect_bf16_agreement(c);
}

// Scores of a few hundred: exp of them would overflow.
TEST_F(CudaAttention, LargeScoresDoNotOverflow) {
  expect_fp32_agreement({{70}, 2, 1, 16}, 10.0f);
  const Case c{{70}, 2, 1, 64};
  const Inputs in = make_inputs<Bf16>(c, 10.0f);
  const Outputs got = run<Bf16>(c, in);
  for (const Floats* values : {&got.out, &got.lse, &got.dq, &got.dk})
    for (float x : *values) ASSERT_TRUE(std::isfinite(x));
}

TEST_F(CudaAttention, NoSequenceAtAll) {
  const std::vector<int64_t> offsets = {0, 0};
  const DeviceArray<int64_t> device_offsets(offsets);
  for (int64_t B : {0, 1}) {
    cuda_attention_forward<float>(nullptr, nullptr, nullptr, nullptr, nullptr, 8, nullptr,
                                  device_offsets.get(), device_offsets.get(), 0, B, 1, 1, 8, nullptr);
    cuda_attention_backward<float>(nullptr, nullptr, nullptr, 8, nullptr, nullptr, nullptr, nullptr, 8,
                                   nullptr, nullptr, nullptr, device_offsets.get(), device_offsets.get(), 0,
                                   0, B, 1, 1, 8, nullptr, nullptr);
  }
}

// ---------------------------------------------------------------------------------------------------
// Equal for equal work, bit for bit

template <class Element>
void expect_any_thread_order() {
  for (const Case& c : {Case{{65, 1, 0, 33}, 4, 2, 64}, Case{{90}, 2, 1, 128}, kSubsetCases[1]}) {
    SCOPED_TRACE(describe(c));
    const Inputs in = make_inputs<Element>(c);
    set_thread_order(0);
    const Outputs expected = run<Element>(c, in);
    for (uint64_t order : {1, 2, 3}) {
      set_thread_order(order);
      expect_same_bits(run<Element>(c, in), expected);
    }
    set_thread_order(0);
  }
}

TEST_F(CudaAttention, TheOrderOfThreadsDoesNotMatter) {
  expect_any_thread_order<float>();
  expect_any_thread_order<Bf16>();
}

TEST_F(CudaAttention, QueriesOfAllKeysEqualNoOwnKeysGiven) {
  for (const Case& c : {Case{{65, 1, 0, 33}, 4, 2, 64}, Case{{40, 3}, 7, 1, 6}}) {
    SCOPED_TRACE(describe(c));
    const Inputs in = make_inputs<Bf16>(c);
    expect_same_bits(run<Bf16>(c, in, false), run<Bf16>(c, in, true));
  }
}

// Whole heads of 64 and 128 channels have kernels of their own, other sizes and places share some.
template <class Element>
void expect_any_place() {
  for (const Case& c : {Case{{70}, 2, 1, 64}, Case{{33}, 2, 1, 128}}) {
    SCOPED_TRACE(describe(c));
    const Inputs in = make_inputs<Element>(c);
    expect_same_bits(run<Element>(c, in, false, 0), run<Element>(c, in, false, 1));
  }
}

TEST_F(CudaAttention, BuffersThatBeginAnywhereGiveTheSame) {
  expect_any_place<float>();
  expect_any_place<Bf16>();
}

// Rows first .. first + count - 1 of `width` numbers each.
Floats slice(const Floats& values, int64_t first, int64_t count, int64_t width) {
  return Floats(values.begin() + first * width, values.begin() + (first + count) * width);
}

TEST_F(CudaAttention, ASequenceInABatchEqualsTheSequenceAlone) {
  const Case c{{13, 70, 0, 64}, 4, 2, 64};
  const Inputs in = make_inputs<Bf16>(c);
  const Outputs batch = run<Bf16>(c, in);
  const int64_t q = c.H * c.hd, k = c.KV * c.hd, qkv = c.fused_row();
  for (size_t b = 0; b < c.lengths.size(); ++b) {
    const int64_t first = c.kv_offsets()[b], n = c.lengths[b];
    const Case alone{{n}, c.H, c.KV, c.hd};
    const Inputs its = {slice(in.q, first, n, q), slice(in.k, first, n, k), slice(in.qkv, first, n, qkv),
                        slice(in.dout, first, n, q)};
    expect_same_bits(run<Bf16>(alone, its), {slice(batch.out, first, n, q), slice(batch.lse, first, n, c.H),
                                             slice(batch.dq, first, n, q), slice(batch.dk, first, n, k),
                                             slice(batch.dqkv, first, n, qkv)});
  }
}

// Nothing of a key behind the last query reaches a result, not even as 0 * NaN, and its gradients are zero: a
// cache has room for keys to come.
template <class Element>
void expect_unseen_keys_unread(const Case& c) {
  SCOPED_TRACE(describe(c));
  const Inputs in = make_inputs<Element>(c);
  Inputs poisoned = in;
  const int64_t width = c.KV * c.hd;
  Positions unseen;
  for (size_t b = 0; b < c.lengths.size(); ++b) {
    const int64_t seen = c.selected[b].empty() ? 0 : c.selected[b].back() + 1;
    for (int64_t t = seen; t < c.lengths[b]; ++t) unseen.push_back(c.kv_offsets()[b] + t);
  }
  for (int64_t row : unseen) {
    std::fill_n(poisoned.k.begin() + row * width, width, kNan);
    std::fill_n(poisoned.qkv.begin() + row * c.fused_row(), c.fused_row(), kNan);
  }
  const Outputs got = run<Element>(c, poisoned);
  expect_same_bits(got, run<Element>(c, in));
  const Floats dv = value_slices(c, got.dqkv);
  for (int64_t row : unseen) {
    for (int64_t i = 0; i < width; ++i) {
      ASSERT_EQ(got.dk[static_cast<size_t>(row * width + i)], 0.0f) << row;
      ASSERT_EQ(dv[static_cast<size_t>(row * width + i)], 0.0f) << row;
    }
  }
}

TEST_F(CudaAttention, KeysThatNoQuerySeesDoNotMatter) {
  expect_unseen_keys_unread<float>({{40, 50, 3}, 2, 1, 8, {{0, 20}, {}, {1}}});
  expect_unseen_keys_unread<Bf16>({{150, 0, 70}, 4, 2, 64, {{3, 70}, {}, {33}}});
}

// The softmax over one key is constant: no rounding may be left of its gradient.
template <class Element>
void expect_no_gradient_of_one_key() {
  const Case c{{1, 40, 1}, 4, 2, 64, {{0}, {0, 1, 39}, {0}}};
  const Outputs got = run<Element>(c, make_inputs<Element>(c));
  const auto all_zero = [](const Floats& values) {
    return std::all_of(values.begin(), values.end(), [](float x) { return x == 0; });
  };
  const int64_t q = c.H * c.hd, k = c.KV * c.hd;
  EXPECT_TRUE(all_zero(slice(got.dq, 0, 2, q)));
  EXPECT_FALSE(all_zero(slice(got.dq, 2, 1, q)));
  EXPECT_TRUE(all_zero(slice(got.dq, 4, 1, q)));
  EXPECT_TRUE(all_zero(slice(got.dk, 0, 1, k)));
  EXPECT_FALSE(all_zero(slice(got.dk, 1, 1, k)));
  EXPECT_TRUE(all_zero(slice(got.dk, 41, 1, k)));
}

TEST_F(CudaAttention, AQueryOfOneKeyHasNoGradient) {
  expect_no_gradient_of_one_key<float>();
  expect_no_gradient_of_one_key<Bf16>();
}

// ---------------------------------------------------------------------------------------------------
// Tiles, launches, errors

// The 8 rows of a chunk that are read at once lie in 32 different banks of 4 bytes, and no two chunks share a
// place.
template <class Element, int Width>
void expect_no_bank_conflict() {
  using Layout = cuda_attention::Tile<Element, Width>;
  std::set<int> places;
  for (int row = 0; row < 16; ++row)
    for (int chunk = 0; chunk < Layout::kChunks; ++chunk) places.insert(Layout::offset(row, chunk));
  EXPECT_EQ(places.size(), static_cast<size_t>(16 * Layout::kChunks));
  EXPECT_EQ(*places.rbegin(), 16 * Width - Layout::kPerChunk);
  for (int chunk = 0; chunk < Layout::kChunks; ++chunk) {
    std::set<size_t> banks;
    for (int row = 8; row < 16; ++row)
      banks.insert(static_cast<size_t>(Layout::offset(row, chunk)) * sizeof(Element) % 128);
    EXPECT_EQ(banks.size(), 8u) << "chunk " << chunk;
  }
}

TEST_F(CudaAttention, TilesHaveNoBankConflicts) {
  expect_no_bank_conflict<Bf16, 32>();
  expect_no_bank_conflict<Bf16, 64>();
  expect_no_bank_conflict<Bf16, 128>();
  expect_no_bank_conflict<float, 32>();
  expect_no_bank_conflict<float, 64>();
  expect_no_bank_conflict<float, 128>();
}

// A stream that is captured refuses to be waited for, and copies would be in its graph.
TEST_F(CudaAttention, IsThreeLaunchesAndNothingElse) {
  const Case c{{5, 3}, 2, 1, 64};
  const DeviceArray<Bf16> x(c.keys() * c.fused_row());
  const DeviceArray<float> lse(c.queries() * c.H), workspace(4 * c.queries() * c.H);
  const DeviceArray<int64_t> offsets(c.kv_offsets());
  cudaStream_t stream;
  cudaGraph_t graph;
  cuda_check(cudaStreamCreate(&stream));
  const auto launches_of = [&](auto pass) {
    cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    pass();
    cuda_check(cudaStreamEndCapture(stream, &graph));
    size_t count = 0;
    cuda_check(cudaGraphGetNodes(graph, nullptr, &count));
    cuda_check(cudaGraphDestroy(graph));
    return count;
  };
  EXPECT_EQ(launches_of([&] {
              cuda_attention_forward(x.get(), lse.get(), x.get(), x.get(), x.get(), 64, nullptr,
                                     offsets.get(), offsets.get(), c.queries(), c.B(), c.H, c.KV, c.hd,
                                     stream);
            }),
            1u);
  EXPECT_EQ(launches_of([&] {
              cuda_attention_backward(x.get(), x.get(), x.get(), 64, x.get(), x.get(), x.get(), x.get(), 64,
                                      x.get(), lse.get(), nullptr, offsets.get(), offsets.get(), c.queries(),
                                      c.keys(), c.B(), c.H, c.KV, c.hd, workspace.get(), stream);
            }),
            2u);
  cuda_check(cudaStreamDestroy(stream));
}

std::string error_of_forward(int64_t nq, int64_t H, int64_t hd) {
  try {
    cuda_attention_forward<float>(nullptr, nullptr, nullptr, nullptr, nullptr, hd, nullptr, nullptr, nullptr,
                                  nq, 1, H, 1, hd, nullptr);
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST_F(CudaAttention, SizesThatAreNotPossibleEndInALine) {
  EXPECT_EQ(
      error_of_forward(1, 1, 130),
      "attention on CUDA: a head has 130 channels, at most 128 are possible: choose a smaller --head-dim, or "
      "train without a GPU (./train_xmod)");
  EXPECT_EQ(
      error_of_forward(1 << 24, 16, 64),
      "attention on CUDA: 16777216 tokens with 16 query heads a key/value head are too many: use a smaller "
      "--batch-size");
}

}  // namespace xmod::cuda_attention_test

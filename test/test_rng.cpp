// Philox against its authors' known answers, the normal numbers made from it, and the model's initial
// weights.
#include "xmod/rng.h"

#include <map>
#include <set>

#include "backend.h"

namespace xmod {
namespace {

using Words = std::array<uint32_t, 4>;

// The generator's own convention is four counter words and two key words, lowest first. The known answers are
// those of Random123's philox4x32-10.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox(0, 0, 0), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox(~uint64_t{0}, ~uint64_t{0}, ~uint64_t{0}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  // counter 243f6a88 85a308d3 13198a2e 03707344, key a4093822 299f31d0
  EXPECT_EQ(philox(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, DependsOnEveryBitOfSeedStreamAndCounter) {
  std::set<Words> seen = {philox(1, 2, 3)};
  for (int bit = 0; bit < 64; bit++) {
    const uint64_t flip = uint64_t{1} << bit;
    seen.insert(philox(1 ^ flip, 2, 3));
    seen.insert(philox(1, 2 ^ flip, 3));
    seen.insert(philox(1, 2, 3 ^ flip));
  }
  EXPECT_EQ(seen.size(), 1u + 3 * 64);
}

TEST(UnitInterval, ExcludesBothEnds) {
  EXPECT_GT(to_unit_interval(0), 0);
  EXPECT_LT(to_unit_interval(~uint32_t{0}), 1);
  EXPECT_NEAR(to_unit_interval(1u << 31), 0.5, 1e-9);
}

TEST(StreamOf, IsFnv1a) {
  EXPECT_EQ(stream_of(""), 0xcbf29ce484222325u);
  EXPECT_EQ(stream_of("a"), 0xaf63dc4c8601ec8cu);
  EXPECT_EQ(stream_of("foobar"), 0x85944171f73967e8u);
}

// ---------------------------------------------------------------------------------------------------
// normal numbers

// The standard deviation of what is estimated here, times this, is never reached by chance.
constexpr double kSigmas = 5;

TEST(FillNormal, HasTheMomentsOfANormalDistribution) {
  const int64_t n = 1 << 18;
  const double deviation = 0.5;
  Floats values(n);
  fill_normal(values.data(), n, deviation, 7, 8);
  double moment[5] = {}, neighbours = 0;
  for (int64_t i = 0; i < n; i++) {
    const double x = values[i] / deviation;
    for (int k = 1; k <= 4; k++) moment[k] += std::pow(x, k) / n;
    if (i > 0) neighbours += x * values[i - 1] / deviation / n;
  }
  const double one = kSigmas / std::sqrt(static_cast<double>(n));
  EXPECT_NEAR(moment[1], 0, one);
  EXPECT_NEAR(moment[2], 1, one * std::sqrt(2.0));
  EXPECT_NEAR(moment[3], 0, one * std::sqrt(15.0));
  EXPECT_NEAR(moment[4], 3, one * std::sqrt(96.0));
  EXPECT_NEAR(neighbours, 0, one);
}

TEST(FillNormal, AnyPieceIsAPartOfTheWhole) {
  const int64_t n = 1003;
  Floats whole(n), pieces(n);
  fill_normal(whole.data(), n, 1, 7, 8);
  for (int64_t first = 0; first < n; first += 100)
    fill_normal(pieces.data() + first, std::min<int64_t>(100, n - first), 1, 7, 8, first);
  EXPECT_TRUE(same_bits(pieces, whole));
}

// The share of numbers below x must be that of the distribution, far out in the tails as well.
TEST(FillNormal, HasTheDistributionFunctionOfANormalDistribution) {
  const int64_t n = 1 << 18;
  Floats values(n);
  fill_normal(values.data(), n, 1, 9, 10);
  for (double x : {-4.0, -2.0, -1.0, -0.3, 0.0, 0.5, 1.5, 3.0}) {
    const double expected = 0.5 * std::erfc(-x / std::sqrt(2.0));
    const auto below = std::count_if(values.begin(), values.end(), [&](float v) { return v < x; });
    EXPECT_NEAR(static_cast<double>(below) / n, expected, kSigmas * std::sqrt(expected * (1 - expected) / n));
  }
}

TEST(FillNormal, WritesExactlyNNumbersWhicheverN) {
  Floats all(103);
  fill_normal(all.data(), 103, 1, 1, 2);
  for (int64_t n = 0; n <= 103; n++) {
    Floats some(104, -77);
    fill_normal(some.data(), n, 1, 1, 2);
    EXPECT_TRUE(same_bits(row_of(some, 0, n), row_of(all, 0, n)));
    EXPECT_EQ(some[static_cast<size_t>(n)], -77);
  }
}

TEST(FillNormal, DependsOnSeedAndStream) {
  Floats a(100), b(100), c(100);
  fill_normal(a.data(), 100, 1, 1, 1);
  fill_normal(b.data(), 100, 1, 2, 1);
  fill_normal(c.data(), 100, 1, 1, 2);
  for (size_t i = 0; i < 100; i++) {
    EXPECT_NE(a[i], b[i]);
    EXPECT_NE(a[i], c[i]);
    EXPECT_NE(b[i], c[i]);
  }
}

TEST(FillNormal, DoesNotDependOnThreads) {
  expect_same_bits_for_any_threads([](TestBackend&) {
    Floats values(10007);
    fill_normal(values.data(), 10007, 1, 1, 2);
    return values;
  });
}

// ---------------------------------------------------------------------------------------------------
// initial weights (README.md, "Init")

// All sizes differ, so that no fan-in can be taken for another; more layers than active layers.
ModelConfig init_config(Arch arch) {
  ModelConfig c;
  c.arch = arch;
  c.vocab_size = 211;
  c.dim = 40;
  c.active_layers = 5;
  c.heads = 6;
  c.kv_heads = 2;
  c.head_dim = 10;
  c.ffn_dim = 90;
  c.seq_len = 16;
  c.dense_prefix = 1;
  c.residual_gate_init = 0.625;
  c.tie_word_embeddings = false;
  return c;
}

class InitialWeights : public ::testing::Test {
 protected:
  Floats initialised(Arch arch, uint64_t seed) {
    Model<TestBackend> model(be_, init_config(arch), 1, Use::inference);
    model.initialise(seed);
    return download(be_, model.params(), model.table.total);
  }
  static ParameterTable table_of(Arch arch) {
    const ModelConfig c = init_config(arch);
    return make_parameter_table(c, make_layer_plan(c));
  }
  static Floats slice(const Floats& all, const Parameter& p) {
    return Floats(all.begin() + p.offset, all.begin() + p.offset + p.size);
  }

  TestBackend be_;
};

TEST_F(InitialWeights, HaveTheDeviationsOfTheDesign) {
  const double d = 40, q = 60, F = 90, residual = 1 / std::sqrt(2.0 * 5);
  const std::map<std::string, double> deviation = {
      {"model.embed_tokens.weight", 0.02},
      {"lm_head.weight", 0.02},
      {"self_attn.q_proj.weight", 1 / std::sqrt(d)},
      {"self_attn.k_proj.weight", 1 / std::sqrt(d)},
      {"self_attn.v_proj.weight", 1 / std::sqrt(d)},
      {"self_attn.o_proj.weight", residual / std::sqrt(q)},
      {"mlp.gate_proj.weight", 1 / std::sqrt(d)},
      {"mlp.up_proj.weight", 1 / std::sqrt(d)},
      {"mlp.down_proj.weight", residual / std::sqrt(F)},
      {"router.weight", 0.5 / std::sqrt(d)},
  };
  const std::map<std::string, float> constant = {
      {"input_layernorm.weight", 1.0f},  {"post_attention_layernorm.weight", 1.0f},
      {"self_attn.q_norm.weight", 1.0f}, {"self_attn.k_norm.weight", 1.0f},
      {"model.norm.weight", 1.0f},       {"residual_gate", 0.625f},
  };
  const Floats weights = initialised(Arch::xmod, 1);
  std::map<std::string, Floats> by_kind;  // the tensors of all layers together
  for (const Parameter& p : table_of(Arch::xmod).entries) {
    std::string kind = p.name;
    if (kind.starts_with("model.layers.")) kind = kind.substr(kind.find('.', 13) + 1);
    append(by_kind[kind], slice(weights, p));
  }
  EXPECT_EQ(by_kind.size(), deviation.size() + constant.size());
  for (const auto& [kind, values] : by_kind) {
    if (constant.contains(kind)) {
      EXPECT_EQ(values, Floats(values.size(), constant.at(kind))) << kind;
      continue;
    }
    const double n = static_cast<double>(values.size()), expected = deviation.at(kind);
    double sum = 0;
    for (float value : values) sum += value;
    EXPECT_NEAR(sum / n, 0, kSigmas * expected / std::sqrt(n)) << kind;
    EXPECT_NEAR(std::sqrt(dot(doubles(values), doubles(values)) / n) / expected, 1,
                kSigmas / std::sqrt(2 * n))
        << kind;
  }
}

TEST_F(InitialWeights, DifferBetweenTensorsAndSeeds) {
  const Floats one = initialised(Arch::xmod, 1), two = initialised(Arch::xmod, 2);
  std::set<float> first_of_each;
  int64_t random_tensors = 0;
  for (const Parameter& p : table_of(Arch::xmod).entries) {
    if (p.init == Init::ones || p.init == Init::gate) continue;
    random_tensors++;
    first_of_each.insert(one[p.offset] / two[p.offset]);
    EXPECT_NE(one[p.offset], two[p.offset]) << p.name;
  }
  EXPECT_EQ(static_cast<int64_t>(first_of_each.size()), random_tensors);
}

// A tensor of the same name starts the same in every model, so that ablations compare like with like.
TEST_F(InitialWeights, AreTheSameInEveryArchitecture) {
  const Floats xmod = initialised(Arch::xmod, 1), dense = initialised(Arch::dense, 1);
  std::map<std::string, Floats> by_name;
  for (const Parameter& p : table_of(Arch::xmod).entries) by_name[p.name] = slice(xmod, p);
  for (const Parameter& p : table_of(Arch::dense).entries) {
    EXPECT_TRUE(same_bits(slice(dense, p), by_name.at(p.name))) << p.name;
  }
}

TEST_F(InitialWeights, DoNotDependOnThreads) {
  expect_same_bits_for_any_threads([&](TestBackend&) { return initialised(Arch::xmod, 3); });
}

}  // namespace
}  // namespace xmod

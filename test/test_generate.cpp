// Choosing a token, and text that never changes once it is written.
#include "xmod/generate.h"

#include <set>

#include "backend.h"
#include "small_config.h"
#include "xmod/error.h"

namespace xmod {
namespace {

constexpr Sampling kGreedy{.temperature = 0};

// ---------------------------------------------------------------------------------------------------
// sample_token

// How often each id is drawn when u walks evenly through (0, 1).
Doubles shares(const Floats& logits, const Sampling& sampling) {
  constexpr int kDraws = 20000;
  Doubles share(logits.size());
  for (int i = 0; i < kDraws; i++) {
    share[static_cast<size_t>(sample_token(logits, sampling, (i + 0.5) / kDraws))] += 1.0 / kDraws;
  }
  return share;
}

// Logits with these probabilities at temperature 1.
Floats logits_of(const Doubles& probabilities) {
  Floats logits;
  for (double p : probabilities) logits.push_back(static_cast<float>(std::log(p) + 3));
  return logits;
}

void expect_shares(const Doubles& found, const Doubles& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < found.size(); i++) {
    EXPECT_NEAR(found[i], expected[i], 2e-4) << "id " << i;
    if (expected[i] == 0) {
      EXPECT_EQ(found[i], 0) << "id " << i;
    }
  }
}

const Doubles kProbabilities = {0.1, 0.4, 0.05, 0.25, 0.2};

TEST(SampleToken, FollowsTheProbabilities) {
  expect_shares(shares(logits_of(kProbabilities), {.temperature = 1}), kProbabilities);
}

TEST(SampleToken, TemperatureZeroTakesTheLargestAndTheFirstOfEqualOnes) {
  for (double u : {1e-9, 0.3, 1 - 1e-9}) {
    EXPECT_EQ(sample_token({0.5f, 2.0f, 1.0f}, kGreedy, u), 1);
    EXPECT_EQ(sample_token({-3.0f, -2.0f, -2.0f, -2.0f}, kGreedy, u), 1);
  }
}

// p^(1/temperature), normalised: squares at 1/2.
TEST(SampleToken, TemperatureSharpensAndFlattens) {
  const Floats logits = logits_of({0.8, 0.2});
  expect_shares(shares(logits, {.temperature = 0.5}), {0.64 / 0.68, 0.04 / 0.68});
  expect_shares(shares(logits, {.temperature = 1e9}), {0.5, 0.5});
  expect_shares(shares(logits, {.temperature = 1e-9}), {1, 0});
}

TEST(SampleToken, TopKLeavesTheKMostProbable) {
  const Floats logits = logits_of(kProbabilities);
  expect_shares(shares(logits, {.temperature = 1, .top_k = 1}), {0, 1, 0, 0, 0});
  expect_shares(shares(logits, {.temperature = 1, .top_k = 3}), {0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85});
  for (int64_t off : {0, 5, 1000}) {
    expect_shares(shares(logits, {.temperature = 1, .top_k = off}), kProbabilities);
  }
}

// The fewest tokens whose probabilities reach p: the one that crosses it still belongs.
TEST(SampleToken, TopPLeavesTheMostProbableThatReachP) {
  const Floats logits = logits_of(kProbabilities);
  auto top_p = [&](double p) { return shares(logits, {.temperature = 1, .top_p = p}); };
  expect_shares(top_p(1e-9), {0, 1, 0, 0, 0});
  expect_shares(top_p(0.39), {0, 1, 0, 0, 0});
  expect_shares(top_p(0.41), {0, 0.4 / 0.65, 0, 0.25 / 0.65, 0});
  expect_shares(top_p(0.66), {0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85});
  expect_shares(top_p(0.951), kProbabilities);
  expect_shares(top_p(1), kProbabilities);
}

// top-p counts within what top-k and the temperature leave.
TEST(SampleToken, TopKAndTopPTogether) {
  const Floats logits = logits_of(kProbabilities);
  expect_shares(shares(logits, {.temperature = 1, .top_k = 2, .top_p = 0.6}), {0, 1, 0, 0, 0});
  expect_shares(shares(logits, {.temperature = 1, .top_k = 2, .top_p = 0.62}),
                {0, 0.4 / 0.65, 0, 0.25 / 0.65, 0});
}

TEST(SampleToken, LogitsOfAnySize) {
  for (const Floats& logits : {Floats{1e30f, -1e30f, 3e38f}, Floats{-3e38f, -3e38f, -2e38f}}) {
    for (double temperature : {1e-300, 1.0, 1e300}) {
      for (double u : {1e-9, 0.5, 1 - 1e-9}) {
        const int32_t id = sample_token(logits, {.temperature = temperature}, u);
        if (temperature < 1e300) {
          EXPECT_EQ(id, 2);
        }
        EXPECT_TRUE(0 <= id && id < 3);
      }
    }
  }
  EXPECT_EQ(sample_token({7.0f}, {.temperature = 1}, 0.5), 0);
}

// ---------------------------------------------------------------------------------------------------
// generate

ModelConfig config_of(Arch arch, int64_t seq_len) {
  ModelConfig c = small_config(arch);
  c.seq_len = seq_len;
  c.token_sparsity = 2;
  return c;
}

class Generate : public ::testing::TestWithParam<Arch> {
 protected:
  // One batch of random tokens gives the thresholds a value amid the scores.
  explicit Generate(int64_t seq_len = 24)
      : config_(config_of(GetParam(), seq_len)), model_(be_, config_, 3, Use::training) {
    model_.initialise(5);
    const Ints tokens = random_ids(config_.seq_len, config_.vocab_size, 1);
    model_.forward_backward(tokens.data(), tokens.data(), 1, config_.seq_len, 1);
    model_.close_step(1, 1);
  }

  Ints text(const Ints& prompt, int64_t count, const Sampling& sampling, uint64_t seed = 1,
            int32_t end = -1) {
    return texts({prompt}, count, sampling, seed, end)[0];
  }

  std::vector<Ints> texts(const std::vector<Ints>& prompts, int64_t count, const Sampling& sampling,
                          uint64_t seed = 1, int32_t end = -1) {
    std::vector<Ints> out(prompts.size());
    Generation<TestBackend> generation(model_, prompts, sampling, seed, end);
    generation.run(count, [&](size_t text, int32_t id) { out[text].push_back(id); });
    return out;
  }

  // (tokens, V)
  Floats logits(const Ints& tokens, Routing routing) {
    const int64_t T = static_cast<int64_t>(tokens.size());
    Floats out(static_cast<size_t>(T * config_.vocab_size));
    model_.logits(out.data(), tokens.data(), T, 0, T, routing);
    return out;
  }

  TestBackend be_{{.threads = 1}};
  const ModelConfig config_;
  Model<TestBackend> model_;
};

class GenerateLong : public Generate {
 protected:
  GenerateLong() : Generate(512) {}
};

const auto kArchitectures = ::testing::Values(Arch::dense, Arch::mod, Arch::xmod, Arch::routed_ffn,
                                              Arch::selected_q, Arch::moe, Arch::deco);
const auto name_of = [](const auto& info) { return identifier(info.param); };
INSTANTIATE_TEST_SUITE_P(Architectures, Generate, kArchitectures, name_of);
INSTANTIATE_TEST_SUITE_P(Architectures, GenerateLong, kArchitectures, name_of);

Ints first(const Ints& tokens, int64_t count) {
  return Ints(tokens.begin(), tokens.begin() + count);
}

TEST_P(Generate, TheSameSeedGivesTheSameText) {
  const Ints prompt = {1, 2, 3};
  const Ints once = text(prompt, 12, {.temperature = 1});
  EXPECT_EQ(once.size(), 12u);
  EXPECT_EQ(text(prompt, 12, {.temperature = 1}), once);
  EXPECT_NE(text(prompt, 12, {.temperature = 1}, 2), once);
  EXPECT_NE(text({3, 2, 1}, 12, {.temperature = 1}), once);
}

TEST_P(Generate, WhatWasWrittenStaysWhenMoreIsWritten) {
  const Ints longest = text({1, 2, 3}, 60, {.temperature = 1});
  for (int64_t count : {1, 7, 21, 22, 40}) {
    EXPECT_EQ(text({1, 2, 3}, count, {.temperature = 1}), first(longest, count));
  }
}

// One pass over the finished text makes every choice again: no token looked at those behind it.
TEST_P(Generate, OnePassOverTheWholeTextChoosesTheSameTokens) {
  const int64_t V = config_.vocab_size;
  Ints all = {7, 30, 2};
  append(all, text(all, config_.seq_len - 3, kGreedy));
  EXPECT_GT((std::set<int32_t>(all.begin() + 3, all.end()).size()), 1u) << "one token again and again";

  bool some_selected = false, some_left = false;
  model_.on_selection = [&](int64_t, const Rows& rows) {
    some_selected |= rows.n > 0;
    some_left |= rows.n < config_.seq_len;
  };
  const Floats whole = logits(all, Routing::threshold);
  if (model_.sparse_layers > 0) {
    EXPECT_TRUE(some_selected && some_left) << "thresholds decide nothing";
  }
  for (int64_t t = 3; t < config_.seq_len; t++) {
    EXPECT_EQ(sample_token(row_of(whole, t - 1, V), kGreedy, 0.5), all[static_cast<size_t>(t)]) << t;
  }
}

// The same on the logits; under top-k a token's place depends on those behind it, and this test sees that.
TEST_P(Generate, LaterTokensChangeEarlierLogitsUnderTopKOnly) {
  const Ints all = random_ids(config_.seq_len, config_.vocab_size, 9);
  double threshold_change = 0, topk_change = 0;
  for (int64_t size = 1; size < config_.seq_len; size++) {
    auto change = [&](Routing routing) {
      const Floats whole = logits(all, routing), part = logits(first(all, size), routing);
      return normalised_error(part, Floats(whole.begin(), whole.begin() + static_cast<int64_t>(part.size())));
    };
    threshold_change = std::max(threshold_change, change(Routing::threshold));
    topk_change = std::max(topk_change, change(Routing::topk));
  }
  EXPECT_LE(threshold_change, 1e-6);
  if (model_.sparse_layers > 0) {
    EXPECT_GT(topk_change, 1e-3);
  }
}

TEST_P(Generate, APromptBeyondTheContextCountsFromItsEnd) {
  const Ints prompt = random_ids(100, config_.vocab_size, 3);
  const Ints tail(prompt.end() - config_.seq_len, prompt.end());
  EXPECT_EQ(text(prompt, 10, {.temperature = 1}), text(tail, 10, {.temperature = 1}));
}

// Whatever the pieces in which the cache gets to see a text.
TEST_P(Generate, LogitsWithACacheAreThoseOfOnePass) {
  const int64_t V = config_.vocab_size;
  const Ints all = random_ids(config_.seq_len, V, 11);
  const Floats whole = logits(all, Routing::threshold);
  for (const std::vector<int64_t>& pieces : std::vector<std::vector<int64_t>>{{1}, {5, 1, 1, 7, 1}, {24}}) {
    KeyValueCache<TestBackend> cache = model_.make_cache(1);
    Floats out(static_cast<size_t>(V));
    size_t piece = 0;
    for (int64_t t = 0, more; t < config_.seq_len; t += more, piece++) {
      more = std::min(pieces[piece % pieces.size()], config_.seq_len - t);
      model_.extend(out.data(), cache, all.data() + t, {0, more});
      EXPECT_LE(normalised_error(out, row_of(whole, t + more - 1, V)), 1e-5) << "token " << t + more - 1;
    }
  }
}

// Also beyond the context.
TEST_P(Generate, TheSameTextWithoutACache) {
  const std::vector<Ints> prompts = {{1, 2, 3}, random_ids(30, config_.vocab_size, 3)};
  const std::vector<Ints> expected = texts(prompts, 70, kGreedy);
  std::vector<Ints> found(2);
  Generation<TestBackend> generation(model_, prompts, kGreedy, 1, -1, /*use_cache=*/false);
  generation.run(70, [&](size_t text, int32_t id) { found[text].push_back(id); });
  EXPECT_EQ(found, expected);
}

// 500 greedy steps within one context: the logits of every position, and with them every choice, are those of
// one pass over the finished text.
TEST_P(GenerateLong, EveryPositionIsThatOfOnePass) {
  const int64_t V = config_.vocab_size, steps = kEmulated ? 40 : 500;  // an emulated step takes 0.1 s
  Ints all = {7, 30, 2};
  const int64_t prompt = static_cast<int64_t>(all.size());
  KeyValueCache<TestBackend> cache = model_.make_cache(1);
  std::vector<Floats> cached(static_cast<size_t>(steps), Floats(static_cast<size_t>(V)));
  for (int64_t i = 0, fed = 0; i < steps; i++) {
    const int64_t size = static_cast<int64_t>(all.size());
    model_.extend(cached[i].data(), cache, all.data() + fed, {0, size - fed});
    fed = size;
    all.push_back(sample_token(cached[i], kGreedy, 0.5));
  }
  EXPECT_EQ(text(first(all, prompt), steps, kGreedy), Ints(all.begin() + prompt, all.end()));

  const Floats whole = logits(all, Routing::threshold);
  for (int64_t i = 0; i < steps; i++) {
    const Floats row = row_of(whole, prompt + i - 1, V);
    EXPECT_LE(normalised_error(cached[i], row), 1e-5) << "step " << i;
    EXPECT_EQ(sample_token(row, kGreedy, 0.5), all[static_cast<size_t>(prompt + i)]) << "step " << i;
  }
}

TEST_P(Generate, ABatchGivesTheTextsOfItsRows) {
  const std::vector<Ints> prompts = {{1, 2, 3}, random_ids(30, config_.vocab_size, 3), {9}};
  const int32_t end = text({9}, 40, {.temperature = 1})[5];  // one of the texts ends early
  for (const Sampling& sampling : {kGreedy, Sampling{.temperature = 1}}) {
    const std::vector<Ints> together = texts(prompts, 40, sampling, 1, end);
    for (size_t i = 0; i < prompts.size(); i++) {
      EXPECT_EQ(together[i], text(prompts[i], 40, sampling, 1, end)) << i;
    }
  }
}

// With a full context the newest half of it goes on.
TEST_P(Generate, GoesOnFromHalfOfAFullContext) {
  const Ints prompt = random_ids(config_.seq_len, config_.vocab_size, 3);
  const Ints out = text(prompt, 8, kGreedy);
  Ints seen = prompt;
  seen.push_back(out[0]);
  const Ints half(seen.end() - config_.seq_len / 2, seen.end());
  EXPECT_EQ(text(half, 7, kGreedy), Ints(out.begin() + 1, out.end()));
}

// A sparse layer's cache holds the tokens it selected, one of K; a dense layer's all of them.
TEST_P(Generate, TheCacheHoldsWhatWasAttendedWith) {
  const Ints all = random_ids(config_.seq_len, config_.vocab_size, 9);
  int64_t selected = 0;
  model_.on_selection = [&](int64_t, const Rows& rows) { selected += rows.n; };
  KeyValueCache<TestBackend> cache = model_.make_cache(1);
  Floats out(static_cast<size_t>(config_.vocab_size));
  model_.extend(out.data(), cache, all.data(), {0, config_.seq_len});
  model_.on_selection = nullptr;
  int64_t tokens = 0;
  for (const Layer& layer : model_.plan) {
    if (layer.attention == Attention::selected_q || (layer.attention == Attention::self && !layer.routed))
      tokens += config_.seq_len;
  }
  if (config_.arch == Arch::mod || config_.arch == Arch::xmod) tokens += selected;
  EXPECT_EQ(cache.bytes(), tokens * 2 * config_.kv_dim() * static_cast<int64_t>(sizeof(float)));
  EXPECT_EQ(cache.length[0], config_.seq_len);
  cache.forget(0);
  EXPECT_EQ(cache.bytes(), 0);
}

TEST_P(Generate, StopsAtTheEndTokenAndDoesNotShowIt) {
  const Ints endless = text({1}, 20, {.temperature = 1});
  const int32_t end = endless[7];
  const int64_t place = std::find(endless.begin(), endless.end(), end) - endless.begin();
  EXPECT_EQ(text({1}, 20, {.temperature = 1}, 1, end), first(endless, place));
}

TEST_P(Generate, AModelThatDivergedIsAnError) {
  const float huge = 3e38f;
  for (int64_t i = 0; i < config_.dim; i++)
    be_.to_device(model_.params() + model_.table.final_norm + i, &huge, 1);
  try {
    text({1, 2}, 3, kGreedy);
    FAIL() << "expected an error";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("not finite"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace xmod

// What `plan --ranks` says: traffic and time against sums by hand, memory against the shares, its output.
#include "xmod/rank_plan.h"

#include <set>
#include <sstream>

#include "backend.h"
#include "expect_error.h"

namespace xmod {
namespace {

constexpr double kFlops = 1e9, kFast = 1e30;

ModelConfig tiny(Arch arch = Arch::dense) {
  ModelConfig c;
  c.arch = arch;
  if (has_experts(arch)) {
    c.experts = 8;
    c.experts_per_token = 2;
    c.shared_experts = 1;
    c.expert_dim = 64;
  }
  if (arch == Arch::deco) c.dense_prefix = 1;
  return c;
}

RankSetup setup(int64_t ranks, int64_t zero, double bandwidth = kFast) {
  RankSetup s;
  s.ranks = ranks;
  s.zero = zero;
  s.batch_size = 2;
  s.device_flops = kFlops;
  s.bandwidth = bandwidth;
  return s;
}

ParameterTable table_of(const ModelConfig& c) {
  return make_parameter_table(c, make_layer_plan(c));
}

std::vector<OptimizerShare> shares_of(const ModelConfig& c, int64_t ranks,
                                      Optimizer choice = Optimizer::muon) {
  const ParameterTable table = table_of(c);
  return share_optimizer(table, make_optimizer_table(table, choice), ranks);
}

// Numbers of a layer of a dense tiny model, of its embedding, and of all.
constexpr int64_t kMatrices = 2 * 128 * 128 + 2 * 64 * 128 + 3 * 384 * 128;
constexpr int64_t kLayer = kMatrices + 2 * 128 + 2 * 64, kEmbedding = 256 * 128;
constexpr int64_t kModel = 8 * kLayer + kEmbedding + 128;

// Seconds that 512 tokens of it take, forward.
constexpr double kLayerSeconds = 512 * (2.0 * kMatrices + 4 * 256 * 128) / kFlops;
constexpr double kHeadSeconds = 512 * 2.0 * kEmbedding / kFlops;

// ---------------------------------------------------------------------------------------------------
// Computing

TEST(RankPlan, OneRankComputesAndSendsNothing) {
  const RankPlan plan = plan_ranks(tiny(), setup(1, 0, 0));
  EXPECT_EQ(plan.traffic.gradients, 0);
  EXPECT_EQ(plan.traffic.weights, 0);
  EXPECT_EQ(plan.step_tokens, 512);
  EXPECT_NEAR(plan.time.forward, 8 * kLayerSeconds + kHeadSeconds, 1e-12);
  EXPECT_NEAR(plan.time.backward, 2 * (8 * kLayerSeconds + kHeadSeconds), 1e-12);
  const double muon = 8.0 * (2 * newton_schulz_flops(128, 128) + 2 * newton_schulz_flops(64, 128) +
                             3 * newton_schulz_flops(384, 128));
  EXPECT_NEAR(plan.time.optimizer, muon / kFlops, 1e-12);
  EXPECT_EQ(plan.time.exposed, 0);
  EXPECT_EQ(plan.efficiency(), 1);
  EXPECT_NEAR(plan.tokens_per_second() * plan.time.seconds(), 512, 1e-9);
}

TEST(RankPlan, StagesAreTheWholeBackwardPass) {
  for (const auto& [name, arch] : arch_names()) {
    for (bool tied : {true, false}) {
      SCOPED_TRACE(name + (tied ? " tied" : " untied"));
      ModelConfig c = tiny(arch);
      c.tie_word_embeddings = tied;
      const LayerPlan plan = make_layer_plan(c);
      const ParameterTable table = table_of(c);
      double flops = 0;
      std::vector<int> times(table.entries.size());
      std::vector<int64_t> offsets;  // of the last tensor of each stage, with gradients
      for (const BackwardStage& stage : backward_stages(c, plan, table, Recompute::none)) {
        flops += stage.flops;
        for (int64_t entry : stage.entries) times.at(static_cast<size_t>(entry))++;
        if (!stage.entries.empty())
          offsets.push_back(table.entries[static_cast<size_t>(stage.entries.back())].offset);
      }
      EXPECT_NEAR(flops, 2 * forward_flops(c), 1e-9 * flops);
      EXPECT_EQ(times, std::vector<int>(times.size(), 1));
      EXPECT_EQ(offsets.front(), tied ? table.final_norm : table.lm_head);
      EXPECT_EQ(offsets.back(), table.embed_tokens);
      EXPECT_TRUE(std::is_sorted(offsets.rbegin(), offsets.rend()))
          << "gradients end from the back of the table";
    }
  }
}

// ffn: gate and up again; block: all but the last product, which a sparse layer's gate needs.
TEST(RankPlan, RecomputedLayersTakeLonger) {
  auto backward = [](const ModelConfig& c, Recompute recompute) {
    RankSetup s = setup(1, 0);
    s.recompute = recompute;
    return plan_ranks(c, s).time.backward * kFlops / 512;
  };
  const double none = backward(tiny(), Recompute::none);
  EXPECT_NEAR(backward(tiny(), Recompute::ffn) - none, 8 * 2.0 * 2 * 384 * 128, 1);
  EXPECT_NEAR(backward(tiny(), Recompute::block) - none, 8 * (2.0 * (kMatrices - 384 * 128) + 4 * 256 * 128),
              1);
  ModelConfig sparse = tiny(Arch::xmod);  // 5 dense layers, and 12 for a quarter of the tokens
  EXPECT_NEAR(
      backward(sparse, Recompute::block) - backward(sparse, Recompute::none),
      5 * (2.0 * (kMatrices - 384 * 128) + 4 * 256 * 128) + 12 * (2.0 * kMatrices / 4 + 4.0 * 256 * 128 / 16),
      1);
}

// ---------------------------------------------------------------------------------------------------
// Sending

TEST(RankPlan, TrafficIsTheLeastThatRanksCanDo) {
  for (int64_t ranks : {2, 3, 8}) {
    const double others = static_cast<double>(ranks - 1) / static_cast<double>(ranks);
    const StepTraffic all = plan_ranks(tiny(), setup(ranks, 0)).traffic;
    EXPECT_NEAR(all.gradients, 2 * others * 4 * kModel, 1);
    EXPECT_EQ(all.weights, 0);
    RankSetup even = setup(ranks, 1);  // AdamW's elements can be shared out evenly
    even.optimizer = Optimizer::adamw;
    const StepTraffic owned = plan_ranks(tiny(), even).traffic;
    EXPECT_NEAR(owned.gradients, others * 4 * kModel, 0.001 * owned.gradients);
    EXPECT_NEAR(owned.weights, others * 4 * kModel, 0.001 * owned.weights);
  }
}

// In bf16: all that products alone read travels in two bytes.
TEST(RankPlan, WeightsTravelAsTheyAreRead) {
  RankSetup even = setup(4, 1);
  even.optimizer = Optimizer::adamw;
  const StepTraffic fp32 = plan_ranks(tiny(), even).traffic;
  even.product_weight_bytes = 2;
  const StepTraffic bf16 = plan_ranks(tiny(), even).traffic;
  EXPECT_EQ(bf16.gradients, fp32.gradients);
  EXPECT_NEAR(fp32.weights, 3 * kModel, 0.001 * fp32.weights);
  // An uneven rest: the embedding and the norms, which keep four bytes, lie on the first ranks.
  EXPECT_GE(bf16.weights, 3 * (2 * kModel + 2.0 * (kModel - 8 * kMatrices)) / 4);
  EXPECT_LE(bf16.weights, 0.75 * fp32.weights);
}

// Whole matrices are uneven: what counts is the rank with most.
TEST(RankPlan, TheBusiestOwnerIsShown) {
  const ModelConfig c = tiny(Arch::xmod);
  const StepTraffic traffic = plan_ranks(c, setup(24, 1)).traffic;
  double most = 0;
  for (const OptimizerShare& share : shares_of(c, 24)) {
    double own = 0;
    for (const OptimizerPiece& piece : share.pieces) own += static_cast<double>(piece.size);
    most = std::max(most, own);
  }
  EXPECT_EQ(traffic.weights, 23 * most * 4);
  EXPECT_GT(most, static_cast<double>(table_of(c).count()) / 24 * 1.01);
  EXPECT_GE(traffic.gradients, 23 * most * 4);
}

// Every gradient that one rank receives another has sent.
TEST(RankPlan, WhatIsSentIsReceived) {
  for (const auto& [name, arch] : arch_names()) {
    const ModelConfig c = tiny(arch);
    const LayerPlan plan = make_layer_plan(c);
    const ParameterTable table = table_of(c);
    const RankSetup s = setup(5, 1);
    std::vector<double> directions[2];
    int calls = 0;
    detail::for_each_link(backward_stages(c, plan, table, Recompute::none), table, s, shares_of(c, 5),
                          [&](const detail::LinkLoad& load) {
                            std::vector<double>& sum = directions[calls++ % 2];
                            sum.resize(load.size());
                            for (size_t i = 0; i < load.size(); i++) {
                              EXPECT_GE(load[i], -1e-6);
                              sum[i] += load[i];
                            }
                          });
    EXPECT_EQ(calls, 10);
    double all = 0;
    for (size_t i = 0; i < directions[0].size(); i++) {
      EXPECT_NEAR(directions[0][i], directions[1][i], 1e-3) << name;
      all += directions[0][i];
    }
    EXPECT_NEAR(all, 4.0 * 4 * static_cast<double>(table.count()), 1);
  }
}

// ---------------------------------------------------------------------------------------------------
// Hiding

// Of a fast network only what comes last shows: the first layer's gradients and the embedding's.
TEST(RankPlan, OnlyTheLastGradientsOfAFastNetworkShow) {
  const double bandwidth = 1e9;
  ASSERT_LT(4.0 * kLayer / bandwidth, 2 * kLayerSeconds)
      << "a layer's are through before the next one's come";
  const StepTime time = plan_ranks(tiny(), setup(2, 0, bandwidth)).time;
  EXPECT_NEAR(time.exposed, 4.0 * (kLayer + kEmbedding) / bandwidth, 1e-12);
  EXPECT_NEAR(time.hidden, 4.0 * (7 * kLayer + 128) / bandwidth, 1e-12);
}

// A slow one is busy from the end of the head's backward pass on.
TEST(RankPlan, ASlowNetworkIsHiddenAsLongAsThereIsWork) {
  const double bandwidth = 1e6;
  const StepTime time = plan_ranks(tiny(), setup(2, 0, bandwidth)).time;
  const double sending = 4.0 * kModel / bandwidth;
  // The final norm's few numbers leave first; the network then waits for the last layer.
  EXPECT_NEAR(time.exposed, 2 * kLayerSeconds + 4.0 * (kModel - 128) / bandwidth - 8 * 2 * kLayerSeconds,
              1e-9);
  EXPECT_NEAR(time.hidden + time.exposed, sending, 1e-9);
}

// Only the last micro-batch's backward pass makes gradients that are complete.
TEST(RankPlan, AccumulationHidesNoMore) {
  RankSetup s = setup(2, 0, 1e7);
  const RankPlan one = plan_ranks(tiny(), s);
  s.micro_batches = 3;
  const RankPlan three = plan_ranks(tiny(), s);
  EXPECT_EQ(three.step_tokens, 3 * one.step_tokens);
  EXPECT_NEAR(three.time.forward, 3 * one.time.forward, 1e-12);
  EXPECT_NEAR(three.time.backward, 3 * one.time.backward, 1e-12);
  EXPECT_NEAR(three.time.exposed, one.time.exposed, 1e-9);
  EXPECT_EQ(three.traffic.gradients, one.traffic.gradients);
  EXPECT_GT(three.efficiency(), one.efficiency());
}

// --zero 1 divides the optimizer's work too; --zero 0 does it everywhere.
TEST(RankPlan, EfficiencyOnAPerfectNetwork) {
  const ModelConfig c = tiny();
  const double compute = 3 * (8 * kLayerSeconds + kHeadSeconds);
  const double muon = static_cast<double>(shares_of(c, 1)[0].muon_flops) / kFlops;
  for (int64_t ranks : {2, 4, 8}) {
    const auto R = static_cast<double>(ranks);
    EXPECT_NEAR(plan_ranks(c, setup(ranks, 0)).efficiency(), (R * compute + muon) / (R * (compute + muon)),
                1e-9);
    int64_t most = 0;
    for (const OptimizerShare& share : shares_of(c, ranks)) most = std::max(most, share.muon_flops);
    const double shared = static_cast<double>(most) / kFlops;
    EXPECT_NEAR(plan_ranks(c, setup(ranks, 1)).efficiency(), (R * compute + muon) / (R * (compute + shared)),
                1e-9);
  }
}

// The largest share's matrices, counted as the backend takes them.
TEST(RankPlan, NewtonSchulzStepsOfTheBackend) {
  RankSetup s = setup(2, 1);
  s.newton_schulz_flops = [](int64_t, int64_t) { return int64_t{1000}; };
  size_t most = 0;
  for (const OptimizerShare& share : shares_of(tiny(), 2)) {
    size_t matrices = 0;
    for (const auto& [shape, offsets] : muon_shapes(table_of(tiny()), share)) matrices += offsets.size();
    most = std::max(most, matrices);
  }
  EXPECT_GE(most, 7u * 8 / 2);
  EXPECT_DOUBLE_EQ(plan_ranks(tiny(), s).time.optimizer, 1000.0 * static_cast<double>(most) / kFlops);
}

TEST(RankPlan, EfficiencyOfEveryModel) {
  std::vector<ModelConfig> models;
  for (const auto& [name, arch] : arch_names()) models.push_back(tiny(arch));
  for (const Preset& preset : presets()) models.push_back(preset.config);
  for (const ModelConfig& c : models) {
    for (int64_t ranks : {2, 8, 64}) {
      for (int64_t zero : {0, 1}) {
        double before = 0;
        for (double bandwidth : {1e6, 1e8, 1e10, 1e14}) {
          const RankPlan plan = plan_ranks(c, setup(ranks, zero, bandwidth));
          EXPECT_GT(plan.efficiency(), before) << "a faster network helps";
          EXPECT_LE(plan.efficiency(), 1 + 1e-12);
          EXPECT_GE(plan.time.hidden, -1e-9);
          before = plan.efficiency();
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------
// Memory and output

Options options_of(const ModelConfig& c, int64_t ranks, int64_t zero, bool json) {
  Options o;
  o.command = Command::plan;
  o.model = c;
  o.machine.threads = 1;
  o.plan.batch_size = 2;
  o.plan.ranks = ranks;
  o.plan.zero = zero;
  o.plan.json = json;
  return o;
}

std::string printed(const Options& o) {
  std::ostringstream out;
  print_plan_of_ranks<TestBackend>(o, out);
  return out.str();
}

nlohmann::json json_of(const Options& o) {
  return nlohmann::json::parse(printed(o));
}

int64_t optimizer_bytes(const nlohmann::json& plan) {
  return plan["memory"]["optimizer: momentum"].get<int64_t>() +
         plan["memory"]["optimizer: AdamW's second moments"].get<int64_t>();
}

TEST(RankPlanMemory, TheOptimizerIsSharedOutAndTheRestIsNot) {
  for (Optimizer choice : {Optimizer::muon, Optimizer::adamw}) {
    auto plan = [&](int64_t ranks, int64_t zero) {
      Options o = options_of(tiny(Arch::xmod), ranks, zero, true);
      o.plan.optimizer = choice;
      return json_of(o);
    };
    const nlohmann::json alone = plan(0, 0);
    const int64_t whole = optimizer_bytes(alone);
    for (int64_t ranks : {2, 3, 4}) {
      const nlohmann::json shared = plan(ranks, 1);
      EXPECT_EQ(optimizer_bytes(plan(ranks, 0)), whole);
      EXPECT_LE(static_cast<double>(optimizer_bytes(shared)), 1.05 * static_cast<double>(whole / ranks));
      EXPECT_GE(optimizer_bytes(shared), whole / ranks - 64);
      for (const char* group : {"parameters", "gradients", "saved by dense layers", "output head"})
        EXPECT_EQ(shared["memory"][group], alone["memory"][group]);
      EXPECT_EQ(shared["parallel"]["memory_bytes"], shared["memory"]["total"]);
    }
  }
}

// A share that has only some of the shapes needs less to orthogonalise them.
TEST(RankPlanMemory, WorkingMemoryOfMuonIsTheOwners) {
  const ModelConfig c = tiny();
  const ParameterTable table = table_of(c);
  const nlohmann::json memory = json_of(options_of(c, 56, 1, true))["memory"];
  int64_t most = 0;
  for (const OptimizerShare& share : shares_of(c, 56))
    most = std::max(most, share.bytes() + TestBackend::muon_bytes(muon_shapes(table, share), 1));
  EXPECT_EQ(memory["optimizer: momentum"].get<int64_t>() +
                memory["optimizer: AdamW's second moments"].get<int64_t>() +
                memory["working memory of Muon"].get<int64_t>(),
            most);
}

TEST(RankPlanJson, KeysAndWhatIsNotKnown) {
  const std::set<std::string> expected = {
      "ranks",        "zero",    "step_tokens",  "memory_bytes",      "fits_device_memory", "gradient_bytes",
      "weight_bytes", "seconds", "step_seconds", "tokens_per_second", "scaling_efficiency"};
  EXPECT_FALSE(json_of(options_of(tiny(), 0, 0, true)).contains("parallel"));
  Options o = options_of(tiny(), 4, 1, true);
  const nlohmann::json unknown = json_of(o)["parallel"];
  std::set<std::string> keys;
  for (const auto& [key, value] : unknown.items()) keys.insert(key);
  EXPECT_EQ(keys, expected);
  EXPECT_EQ(unknown["ranks"], 4);
  EXPECT_EQ(unknown["zero"], 1);
  EXPECT_EQ(unknown["step_tokens"], 4 * 2 * 256);
  for (const char* key :
       {"fits_device_memory", "seconds", "step_seconds", "tokens_per_second", "scaling_efficiency"})
    EXPECT_TRUE(unknown[key].is_null()) << key;
  o.plan.device_flops = 1e9;
  EXPECT_TRUE(json_of(o)["parallel"]["step_seconds"].is_null()) << "the network's speed is missing";
  o.plan.bandwidth = 0.1;  // GB/s
  o.plan.grad_accum = 3;
  const nlohmann::json known = json_of(o)["parallel"];
  EXPECT_EQ(known["step_tokens"], 3 * 4 * 2 * 256);
  RankSetup s = setup(4, 1, 1e8);
  s.micro_batches = 3;
  const RankPlan plan = plan_ranks(tiny(), s);
  EXPECT_NEAR(known["step_seconds"].get<double>(), plan.time.seconds(), 1e-9);
  EXPECT_NEAR(known["scaling_efficiency"].get<double>(), plan.efficiency(), 1e-9);
  double sum = -known["seconds"]["gradients_hidden"].get<double>();
  for (const auto& [part, seconds] : known["seconds"].items()) sum += seconds.get<double>();
  EXPECT_NEAR(sum, known["step_seconds"].get<double>(), 1e-9);
}

TEST(RankPlanJson, TheTotalBatchSaysHowManyMicroBatches) {
  Options o = options_of(tiny(), 4, 0, true);
  o.plan.total_batch_tokens = 3 * 4 * 512;
  EXPECT_EQ(json_of(o)["parallel"]["step_tokens"], 3 * 4 * 512);
  o.plan.total_batch_tokens++;
  try {
    printed(o);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code, 2);
    expect_parts(error.what(), {"--total-batch-tokens 6145", "multiple of 2048"});
  }
}

// What waits to be added, and MPI itself.
TEST(RankPlanMemory, SeveralRanksNeedBuffers) {
  auto memory = [](int64_t ranks, int64_t zero) {
    return json_of(options_of(tiny(), ranks, zero, true))["memory"];
  };
  EXPECT_EQ(memory(1, 1), memory(0, 0)) << "one rank shares nothing out";
  EXPECT_EQ(memory(1, 0)["gradients that other ranks send"], 0);
  EXPECT_EQ(memory(1, 0)["MPI"], 0);
  EXPECT_GT(memory(2, 0)["MPI"], 0);
  EXPECT_EQ(memory(3, 0)["gradients that other ranks send"],
            GradientExchange::bytes(even_pieces(table_of(tiny()).total, 3), 3));
  EXPECT_EQ(memory(3, 1)["gradients that other ranks send"],
            GradientExchange::bytes(owned_pieces(table_of(tiny()), shares_of(tiny(), 3)), 3));
}

TEST(RankPlanJson, FitsUpToTheLastByte) {
  Options o = options_of(tiny(), 2, 1, true);
  const double needed = json_of(o)["memory"]["total"].get<double>();
  o.plan.device_memory = needed / 1e9;
  EXPECT_EQ(json_of(o)["parallel"]["fits_device_memory"], true);
  o.plan.device_memory = (needed - 1) / 1e9;
  EXPECT_EQ(json_of(o)["parallel"]["fits_device_memory"], false);
}

TEST(RankPlanText, SaysWhatItKnows) {
  Options o = options_of(tiny(), 4, 1, false);
  expect_parts(printed(o),
               {"with 1 thread, on each of 4 ranks", "A step on 4 ranks with --zero 1: 2,048 tokens",
                "1 micro-batch a rank", "(its time: give --device-flops and --bandwidth)"});
  EXPECT_EQ(printed(o).find("fits"), std::string::npos);
  o.plan.device_flops = 1e9;
  o.plan.bandwidth = 1;
  o.plan.device_memory = 1;
  o.plan.grad_accum = 2;
  expect_parts(printed(o),
               {"4,096 tokens in 2 micro-batches a rank", "scaling efficiency", "% of 4 times one rank",
                "weights to all ranks", "tokens a second", "% of 953.67 MiB: fits"});
  o.plan.device_memory = 0.01;
  expect_parts(printed(o), {"9.54 MiB: does not fit"});
  o.plan.ranks = 1;
  o.plan.bandwidth = 0;
  expect_parts(printed(o), {"A step on 1 rank with", "100.0% of 1 times one rank"});
}

}  // namespace
}  // namespace xmod

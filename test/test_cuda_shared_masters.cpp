// Under --zero 1 with bf16 a rank has only some of the fp32 weights: that it computes the same, how much
// memory that takes, and what happens where the others would be. Several ranks that speak with each other are
// in test_ranks.py.
#define XMOD_TEST_CUDA
#include <set>

#include "expect_error.h"
#include "small_models.h"
#include "xmod/agreement.h"
#include "xmod/memory_plan.h"

namespace xmod {
namespace {

using Bf16Backend = CudaBackend<bf16>;
using Bf16Model = Model<Bf16Backend>;

constexpr int64_t kRanks = 3, kBatch = 2;

std::vector<OptimizerShare> shares_of(const ParameterTable& table, int64_t ranks = kRanks) {
  return share_optimizer(table, make_optimizer_table(table, Optimizer::muon), ranks);
}

// The model of a rank, with all that it has and is sent before a step.
struct Rank {
  Rank(Bf16Backend& be, const Bf16Model& whole, const std::vector<OptimizerShare>& shares, size_t rank)
      : model(be, whole.config, kBatch, Use::training, Recompute::none,
              kept_masters(whole.table, shares[rank])) {
    model.initialise(1);
    model.use_parameters();
    for (const RankPiece& piece : owned_pieces(whole.table, shares, Read::by_products_alone)) {
      if (piece.owner != static_cast<int>(rank))
        be.copy(model.product_weights() + piece.offset, whole.product_weights() + piece.offset, piece.size);
    }
  }

  Bf16Model model;
};

// Losses and gradients.
Floats results_of(Bf16Model& model) {
  const Batch batch = random_batch(model.config, kBatch);
  model.zero_gradients();
  const int32_t *tokens = batch.tokens.data(), *targets = batch.targets.data();
  const double loss = model.forward_backward(tokens, targets, batch.B, batch.T, 1);
  Floats all = download(model.backend(), model.grads(), model.table.total);
  all.push_back(static_cast<float>(loss));
  for (const Routing routing : {Routing::topk, Routing::threshold})
    all.push_back(static_cast<float>(model.loss(tokens, targets, batch.B, batch.T, routing)));
  return all;
}

// Of the weights that a rank updates.
Floats masters_of(const Bf16Model& model, const OptimizerShare& share) {
  Floats all;
  for (const OptimizerPiece& piece : share.pieces) {
    const Parameter& p = model.table.entries[static_cast<size_t>(piece.entry)];
    append(all, download(model.backend(), model.params() + p.offset + piece.first, piece.size));
  }
  return all;
}

class SharedMasters : public ::testing::TestWithParam<NamedConfig> {};

// What a rank does not have is in a hole, where whoever reads it is stopped, or not a number (emulated).
TEST_P(SharedMasters, TrainAsAllMastersDo) {
  Bf16Backend be;
  Bf16Model whole(be, GetParam().config, kBatch, Use::training);
  whole.initialise(1);
  const Floats expected = results_of(whole);
  const std::vector<OptimizerShare> shares = shares_of(whole.table);
  OptimizerState<Bf16Backend>(be, whole.table, {}).update(whole.params(), whole.grads(), 1, 1, 0.1, 0.1);
  Bf16Model start(be, GetParam().config, kBatch, Use::training);
  start.initialise(1);
  start.use_parameters();
  for (size_t rank = 0; rank < shares.size(); rank++) {
    SCOPED_TRACE("rank " + std::to_string(rank));
    Rank mine(be, start, shares, rank);
    EXPECT_TRUE(same_bits(results_of(mine.model), expected));
    OptimizerState<Bf16Backend>(be, mine.model.table, {}, shares, rank)
        .update(mine.model.params(), mine.model.grads(), 1, 1, 0.1, 0.1);
    EXPECT_TRUE(same_bits(masters_of(mine.model, shares[rank]), masters_of(whole, shares[rank])));
  }
}

// One of each architecture; dense layers are in all.
std::vector<NamedConfig> architectures() {
  const std::set<std::string> names = {"untied_head", "mod", "routed_ffn", "selected_q", "moe", "deco"};
  std::vector<NamedConfig> all;
  for (const NamedConfig& c : configs()) {
    if (names.count(c.name)) all.push_back(c);
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Models, SharedMasters, ::testing::ValuesIn(architectures()),
                         [](const auto& info) { return info.param.name; });

// ---------------------------------------------------------------------------------------------------
// Memory

// So large that pages are small beside its matrices.
ModelConfig larger_config() {
  ModelConfig c = small_config(Arch::xmod);
  c.dim = kEmulated ? 64 : 1024;
  c.ffn_dim = 4 * c.dim, c.head_dim = c.dim / c.heads;
  return c;
}

// On a device others allocate too, and page tables count.
constexpr double kUncertainty = kEmulated ? 0 : 4 << 20;

int64_t memory_used() {
  size_t free = 0, total = 0;
  cuda_check(cudaMemGetInfo(&free, &total));
  return static_cast<int64_t>(total - free);
}

int64_t bytes(const MemoryEstimate& memory, const std::string& group) {
  for (const auto& [name, size] : memory.groups) {
    if (name == group) return size;
  }
  ADD_FAILURE() << "no group " << group;
  return 0;
}

// Muon's working memory, which is part of what makes one rank need more than others, is allocated in a step.
TEST(SharedMastersMemory, IsWhatThePlanSays) {
  const ModelConfig c = larger_config();
  const ParameterTable table = make_parameter_table(c, make_layer_plan(c));
  int64_t in_fp32 = 0;
  for (const Parameter& p : table.entries) in_fp32 += p.read == Read::in_fp32 ? p.size : 0;
  Bf16Backend be;
  for (int64_t ranks : {2, 3, 4}) {
    RunSize run;
    run.ranks = ranks, run.zero = 1;
    const MemoryEstimate plan = training_memory<Bf16Backend>(c, run);
    int64_t most = 0, masters_of_most = 0;
    for (const OptimizerShare& share : shares_of(table, ranks)) {
      const std::vector<NumberRange> kept = kept_masters(table, share);
      const int64_t before = memory_used();
      const int64_t masters = [&] {
        const DeviceBuffer<Bf16Backend, float> params(be, table.total, kept);
        return memory_used() - before;
      }();
      EXPECT_NEAR(memory_used(), before, kUncertainty) << "not given back";
      const int64_t granules = 2 * static_cast<int64_t>(kept.size()) * kSparseGranule;
      EXPECT_LE(masters, 4 * (1.1 * static_cast<double>(table.total) / ranks + in_fp32) + granules);
      const int64_t all = masters + share.bytes() + Bf16Backend::muon_bytes(muon_shapes(table, share), 1);
      if (all > most) most = all, masters_of_most = masters;
    }
    EXPECT_LT(masters_of_most, 4 * table.total * 4 / 5) << "the test shows little";
    EXPECT_NEAR(bytes(plan, "parameters"), masters_of_most, kUncertainty);
    EXPECT_NEAR(bytes(plan, "parameters") + bytes(plan, "optimizer: momentum") +
                    bytes(plan, "optimizer: AdamW's second moments") + bytes(plan, "working memory of Muon"),
                most, kUncertainty);
    run.zero = 0;
    EXPECT_EQ(bytes(training_memory<Bf16Backend>(c, run), "parameters"), 4 * table.total);
    run.zero = 1;
    EXPECT_EQ(bytes(training_memory<TestBackend>(c, run), "parameters"), 4 * table.total) << "in fp32";
  }
}

TEST(SharedMastersMemory, HolesHoldNothing) {
  Bf16Backend be;
  constexpr int64_t kPage = kSparseGranule / sizeof(float);
  const DeviceBuffer<Bf16Backend, float> params(be, 6 * kPage, {{kPage + 1, 10}, {3 * kPage, 2 * kPage}});
  be.fill(params.data() + kPage, 2, kPage);  // all of a page that is there
  EXPECT_EQ(download(be, params.data() + 3 * kPage, 2 * kPage), Floats(2 * kPage)) << "zero at first";
  EXPECT_EQ(download(be, params.data() + kPage + 1, 1), Floats{2});
#ifndef __CUDACC__
  for (const int64_t hole : {int64_t{0}, 2 * kPage, 5 * kPage}) {
    expect_error([&] { download(be, params.data() + hole, 1); }, {"cudaErrorInvalidValue"});
    EXPECT_DEATH(be.fill(params.data() + hole, 1, 1), "access to memory at");
  }
#endif
}

#ifndef __CUDACC__

TEST(SharedMastersMemory, IsWholeWhereTheDriverHasNoHoles) {
  Bf16Backend be;
  cuda_emulation::set_virtual_memory(false);
  ::testing::internal::CaptureStderr();
  const int64_t before = memory_used();
  const DeviceBuffer<Bf16Backend, float> params(be, 10000, {{0, 10}, {5000, 16}});
  const std::string said = ::testing::internal::GetCapturedStderr();
  cuda_emulation::set_virtual_memory(true);
  EXPECT_GE(memory_used() - before, 40000);
  EXPECT_EQ(said, "fp32 weights are not shared out: this driver has no virtual memory management\n");
  be.fill(params.data(), 1, 10000);
}
#endif

// ---------------------------------------------------------------------------------------------------
// Agreement

TEST(SharedMastersAgreement, IsAboutWhatAllRanksHave) {
  Bf16Backend be;
  Bf16Model whole(be, small_config(Arch::xmod), kBatch, Use::training);
  whole.initialise(1);
  whole.use_parameters();
  const std::vector<OptimizerShare> shares = shares_of(whole.table);
  const Rank first(be, whole, shares, 0), second(be, whole, shares, 1);
  EXPECT_EQ(hash_parameters(first.model), hash_parameters(second.model));
  uint64_t last = hash_parameters(second.model);
  for (const Parameter& p : second.model.table.entries) {
    if (p.read == Read::in_fp32) {
      be.fill(second.model.params() + p.offset + p.size - 1, 3, 1);
    } else {
      const bf16 three = 3.0f;
      be.to_device(second.model.product_weights() + p.offset + p.size - 1, &three, 1);
    }
    const uint64_t now = hash_parameters(second.model);
    EXPECT_NE(now, last) << p.name;
    last = now;
  }
}

}  // namespace
}  // namespace xmod

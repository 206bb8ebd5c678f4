// Training steps as CUDA graphs: the same numbers as launch by launch, and how many launches a layer costs.
#define XMOD_TEST_CUDA
#include "small_models.h"

namespace xmod {
namespace {

class CudaGraphTest : public ModelTest {};

std::vector<NamedConfig> one_of_each_kind() {
  std::vector<NamedConfig> some;
  for (const std::string name : {"dense", "mod", "xmod", "routed_ffn", "selected_q", "moe", "deco"})
    some.push_back({name, config_named(name), ""});
  return some;
}

INSTANTIATE_TEST_SUITE_P(Architectures, CudaGraphTest, ::testing::ValuesIn(one_of_each_kind()),
                         [](const auto& info) { return info.param.name; });

// Losses, gradients and thresholds of some steps with an evaluation, another batch size and new weights in
// between; nodes: of the graph behind each forward_backward.
Floats train(const ModelConfig& config, bool graphs, std::vector<int64_t>& nodes) {
  TestBackend be;
  be.use_graphs(graphs);
  TestModel model(be, config, 3, Use::training);
  randomise(model);
  Floats all;
  auto step = [&](const Batch& batch) {
    all.push_back(static_cast<float>(forward_backward(model, batch, 0.5f)));
    nodes.push_back(be.graph_nodes());
  };
  for (uint64_t seed : {1, 2, 3}) step(random_batch(config, 3, seed));
  all.push_back(static_cast<float>(loss_of(model, random_batch(config, 2, 4), Routing::threshold)));
  step(random_batch(config, 3, 5));
  append(all, gradients_so_far(model));
  step(random_batch(config, 2, 6));
  model.close_step(1, 5);
  model.zero_gradients();
  randomise(model, 2);
  for (uint64_t seed : {7, 8}) step(random_batch(config, 2, seed));
  append(all, gradients_so_far(model));
  append(all, buffers_of(model));
  return all;
}

TEST_P(CudaGraphTest, GivesTheBitsOfLaunchByLaunch) {
  std::vector<int64_t> nodes, no_nodes;
  ::testing::internal::CaptureStderr();
  const Floats with_graphs = train(config_, true, nodes);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(same_bits(with_graphs, train(config_, false, no_nodes)));
  EXPECT_EQ(no_nodes, std::vector<int64_t>(7));
  EXPECT_EQ(said, "");
  ASSERT_EQ(nodes.size(), 7u);
  for (size_t first : {0, 4}) EXPECT_EQ(nodes[first], 0) << "the first step of a shape runs launch by launch";
  for (size_t later : {1, 2, 3, 5, 6}) EXPECT_GT(nodes[later], 0) << "step " << later;
  EXPECT_EQ(nodes[2], nodes[1]);
  EXPECT_EQ(nodes[3], nodes[1]) << "an evaluation needs no new graph";
}

// What cannot be captured runs launch by launch, as before, and says so once.
TEST(CudaGraph, FallsBackWhereWorkCannotBeCaptured) {
  TestBackend be;
  int32_t* device = be.allocate<int32_t>(4);
  Ints host(4);
  int runs = 0;
  auto read = [&] {
    be.fill_sequence(device, 4);
    be.to_host(host.data(), device, 4);  // waits
    runs++;
  };
  ::testing::internal::CaptureStderr();
  for (int step = 0; step < 4; step++) {
    host.assign(4, -1);
    be.repeat(&be, 1, 1, 1, read);
    EXPECT_EQ(host, (Ints{0, 1, 2, 3})) << "step " << step;
    EXPECT_EQ(be.graph_nodes(), 0);
  }
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(runs, 4);
  EXPECT_EQ(said.find("no CUDA graph: "), 0u) << said;
  EXPECT_NE(said.find("cudaErrorStreamCaptureUnsupported"), std::string::npos) << said;
  EXPECT_EQ(said.find('\n'), said.size() - 1) << said;
  be.release(device);
}

TEST(CudaGraph, OfTheBackendsOptions) {
  for (const bool use : {true, false}) {
    TestBackend be(MachineOptions{.cuda_graph = use});
    int32_t* device = be.allocate<int32_t>(4);
    for (int step = 0; step < 2; step++) be.repeat(&be, 1, 1, 1, [&] { be.fill_sequence(device, 4); });
    EXPECT_EQ(be.graph_nodes(), use ? 1 : 0);
    be.release(device);
  }
}

// ---------------------------------------------------------------------------------------------------
// launches, which the emulation counts outside of graphs, too
#ifndef __CUDACC__

// Of sparse layers alone.
ModelConfig sparse_layers_config(int64_t units) {
  ModelConfig c = small_config(Arch::xmod);
  c.anchors = false, c.dense_prefix = 0, c.active_layers = units;
  return c;
}

// Kernels, products, copies and fills of a training step.
int64_t launches_of_step(const ModelConfig& config) {
  TestBackend be;
  TestModel model(be, config, 2, Use::training);
  randomise(model);
  for (int step = 0; step < 2; step++) forward_backward(model, random_batch(config, 2));
  return be.graph_nodes();
}

// Kernels of a forward pass.
int64_t kernels_of_evaluation(const ModelConfig& config) {
  TestBackend be;
  TestModel model(be, config, 2, Use::training);
  randomise(model);
  loss_of(model, random_batch(config, 2));
  const int64_t before = cuda_emulation::launches();
  loss_of(model, random_batch(config, 2));
  return cuda_emulation::launches() - before;
}

TEST(Launches, OfASparseLayer) {
  constexpr int64_t kProducts = 4;  // q, k, v together; output; gate and up together; down
  const int64_t layers = sparse_layers_config(1).token_sparsity;
  const int64_t more_kernels =
      kernels_of_evaluation(sparse_layers_config(3)) - kernels_of_evaluation(sparse_layers_config(2));
  const int64_t more = launches_of_step(sparse_layers_config(3)) - launches_of_step(sparse_layers_config(2));
  const int64_t forward = more_kernels / layers + kProducts, backward = more / layers - forward;
  EXPECT_EQ(more_kernels % layers, 0);
  EXPECT_EQ(more % layers, 0);
  EXPECT_EQ(forward, 12);
  EXPECT_EQ(backward, 17);
}

TEST(Launches, DoNotGrowWithTheNumberOfExperts) {
  for (Arch arch : {Arch::moe, Arch::deco}) {
    const ModelConfig few = small_config(arch);
    ModelConfig many = few;
    many.experts = 11;
    EXPECT_GT(launches_of_step(few), 0);
    EXPECT_EQ(launches_of_step(many), launches_of_step(few)) << arch_name(arch);
  }
}

#endif

}  // namespace
}  // namespace xmod

// A run that starts from a checkpoint: which layer begins as which, that every weight arrives, that with K =
// 1 the model is the dense one, and what is refused.
#include "xmod/init_from.h"

#include <stdlib.h>

#include <filesystem>
#include <sstream>

#include "small_models.h"

namespace xmod {
namespace {

using Numbers = std::vector<int64_t>;

Numbers mapping(const ModelConfig& c) {
  return source_layers(c, make_layer_plan(c));
}

ModelConfig with_layers(Arch arch, int64_t active_layers, int64_t K, int64_t A = 1) {
  ModelConfig c = small_config(arch);
  c.active_layers = active_layers;
  c.token_sparsity = K;
  c.anchor_stride = A;
  return c;
}

// ---------------------------------------------------------------------------------------------------
// which layer begins as which

TEST(SourceLayers, EachActiveLayerTakesTheOneInItsPlace) {
  EXPECT_EQ(mapping(with_layers(Arch::dense, 4, 4)), (Numbers{0, 1, 2, 3}));
  const Numbers a1k4 = {0, 1, 1, 1, 1, 2, 3, 3, 3, 3, 4};
  EXPECT_EQ(mapping(with_layers(Arch::xmod, 5, 4)), a1k4);
  EXPECT_EQ(mapping(with_layers(Arch::routed_ffn, 5, 4)), a1k4);
  EXPECT_EQ(mapping(with_layers(Arch::selected_q, 5, 4)), a1k4);
  EXPECT_EQ(mapping(with_layers(Arch::xmod, 6, 2, 2)), (Numbers{0, 1, 1, 2, 2, 3, 4, 4, 5}));
  ModelConfig c = with_layers(Arch::xmod, 3, 2);
  c.anchors = false;
  c.dense_prefix = 0;
  EXPECT_EQ(mapping(c), (Numbers{0, 0, 1, 1, 2, 2}));
}

TEST(SourceLayers, ModTakesThemByDepth) {
  EXPECT_EQ(mapping(with_layers(Arch::mod, 6, 4)), (Numbers{0, 1, 1, 2, 3, 3, 4, 4, 5}));
  EXPECT_EQ(mapping(with_layers(Arch::mod, 1, 4)), (Numbers{0}));
  EXPECT_EQ(mapping(with_layers(Arch::mod, 4, 1)), (Numbers{0, 2, 3}));
}

TEST(SourceLayers, WithK1EachLayerTakesItsOwn) {
  const Numbers own = {0, 1, 2, 3, 4, 5, 6};
  for (Arch arch : {Arch::mod, Arch::xmod, Arch::routed_ffn, Arch::selected_q})
    EXPECT_EQ(mapping(with_layers(arch, 7, 1)), own) << arch_name(arch);
}

// Of every size: from the first to the last, in order; mod leaves out none where it has enough layers, and
// its dense layers are all different.
TEST(SourceLayers, NoneIsLeftOut) {
  for (Arch arch : {Arch::mod, Arch::xmod}) {
    for (int64_t layers = 2; layers <= 40; layers++) {
      for (int64_t K : {2, 3, 8, 16}) {
        const ModelConfig c = with_layers(arch, layers, K);
        const LayerPlan plan = make_layer_plan(c);
        const Numbers source = source_layers(c, plan);
        ASSERT_EQ(static_cast<int64_t>(source.size()), count_layers(plan));
        if (source.size() < static_cast<size_t>(layers)) continue;
        EXPECT_EQ(source.front(), 0);
        EXPECT_EQ(source.back(), layers - 1);
        int64_t last_dense = -1;
        for (size_t i = 0; i < source.size(); i++) {
          if (i > 0) {
            EXPECT_TRUE(source[i] == source[i - 1] || source[i] == source[i - 1] + 1);
          }
          if (plan[i].routed) continue;
          EXPECT_GT(source[i], last_dense) << arch_name(arch) << " " << layers << " K" << K << " layer " << i;
          last_dense = source[i];
        }
      }
    }
  }
}

TEST(SourceLayers, AsTheLogTellsThem) {
  EXPECT_EQ(describe_layers({0, 1, 2, 2, 2, 3, 3}), "0, 1, 3 x 2, 2 x 3");
  EXPECT_EQ(describe_layers({0}), "0");
}

// ---------------------------------------------------------------------------------------------------
// weights

class InitFrom : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "xmod_init_XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  // A checkpoint of random weights.
  std::string save(TestModel& model) {
    randomise(model);
    OptimizerState<TestBackend> optimizer(be_, model.table, {});
    save_checkpoint(folder_, model, optimizer, {}, {});
    return checkpoint_directory(folder_, 0);
  }

  std::string start(TestModel& model, const std::string& checkpoint) {
    std::ostringstream log;
    load_first_weights(checkpoint, model, log);
    return log.str();
  }

  void expect_refused(const ModelConfig& c, const std::string& checkpoint,
                      const std::vector<std::string>& parts) {
    TestModel model(be_, c, 1, Use::inference);
    try {
      start(model, checkpoint);
      ADD_FAILURE() << "expected an error with '" << parts[0] << "'";
    } catch (const Error& error) {
      const std::string message = error.what();
      EXPECT_EQ(message.find("--init-from " + checkpoint), 0u) << message;
      for (const std::string& part : parts)
        EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' in '" << message << "'";
    }
  }

  TestBackend be_{{.threads = 1}};
  std::string folder_;
};

class InitFromDense : public InitFrom, public ::testing::WithParamInterface<Arch> {};

INSTANTIATE_TEST_SUITE_P(Architectures, InitFromDense,
                         ::testing::Values(Arch::dense, Arch::mod, Arch::xmod, Arch::routed_ffn,
                                           Arch::selected_q),
                         [](const auto& info) { return identifier(info.param); });

// alpha is 1, 2 sigmoid(0) too, and every layer selects every token.
TEST_P(InitFromDense, WithK1AndIdleRoutersTheModelIsTheDenseOne) {
  for (bool tied : {true, false}) {
    ModelConfig c = small_config(Arch::dense);
    c.tie_word_embeddings = tied;
    TestModel dense(be_, c, 1, Use::training);
    const std::string checkpoint = save(dense);
    c.arch = GetParam();
    c.token_sparsity = 1;
    TestModel model(be_, c, 1, Use::inference);
    model.initialise(9);
    start(model, checkpoint);
    set_all(model, Init::router, 0);
    const Batch batch = random_batch(c, 1);
    // routed-ffn adds attention and FFN to the stream one after the other, which rounds otherwise.
    expect_close(logits(model, batch), logits(dense, batch), c.arch == Arch::routed_ffn ? 1e-6 : 0);
    std::filesystem::remove_all(checkpoint);
  }
}

TEST_P(InitFromDense, SparseLayersRepeatAndRoutersStayAsTheyWere) {
  TestModel dense(be_, small_config(Arch::dense), 1, Use::training);
  const std::string checkpoint = save(dense);
  TestModel model(be_, small_config(GetParam()), 1, Use::inference);
  model.initialise(9);
  TestModel initial(be_, small_config(GetParam()), 1, Use::inference);
  initial.initialise(9);
  const std::string log = start(model, checkpoint);
  const Numbers source = source_layers(model.config, model.plan);
  EXPECT_NE(log.find("starting from the weights of " + checkpoint + "\n"), std::string::npos) << log;
  EXPECT_EQ(log.find("layers begin as its layers " + describe_layers(source) + "; routers and gates anew") !=
                std::string::npos,
            GetParam() != Arch::dense)
      << log;
  for (const Parameter& p : model.table.entries) {
    const bool own = p.init == Init::router || p.init == Init::gate;
    std::string name = p.name;
    if (name.starts_with("model.layers.")) {
      const std::string rest = name.substr(13);
      const size_t dot = rest.find('.');
      name = layer_prefix(source[std::stoul(rest.substr(0, dot))]) + rest.substr(dot + 1);
    }
    const Floats expected = own ? weights_of(initial, p) : weights_of(dense, parameter(dense, name));
    EXPECT_TRUE(same_bits(weights_of(model, p), expected)) << p.name;
  }
  EXPECT_TRUE(same_bits(buffers_of(model), buffers_of(initial)));
}

// A second run of the same model, on other data: thresholds come too.
TEST_F(InitFrom, AnyModelBeginsAsOneLikeIt) {
  for (Arch arch : {Arch::xmod, Arch::moe, Arch::deco}) {
    TestModel first(be_, small_config(arch), 2, Use::training);
    randomise(first);
    learn_thresholds(first, random_batch(first.config, 2));
    const std::string checkpoint = save(first);
    TestModel second(be_, small_config(arch), 1, Use::inference);
    second.initialise(9);
    EXPECT_EQ(start(second, checkpoint), "starting from the weights of " + checkpoint + "\n");
    EXPECT_TRUE(same_bits(download(be_, second.params(), second.table.total),
                          download(be_, first.params(), first.table.total)));
    EXPECT_TRUE(same_bits(buffers_of(second), buffers_of(first)));
    std::filesystem::remove_all(checkpoint);
  }
}

TEST_F(InitFrom, ContextAndRopeAreTheRunsOwn) {
  TestModel dense(be_, small_config(Arch::dense), 1, Use::training);
  const std::string checkpoint = save(dense);
  ModelConfig c = small_config(Arch::xmod);
  c.seq_len = 40;
  c.rope_theta = 5e5;
  TestModel model(be_, c, 1, Use::inference);
  start(model, checkpoint);
  EXPECT_TRUE(same_bits(weights_of(model, parameter(model, "model.norm.weight")),
                        weights_of(dense, parameter(dense, "model.norm.weight"))));
}

TEST_F(InitFrom, ModelsThatCannotBeginSo) {
  TestModel dense(be_, small_config(Arch::dense), 1, Use::training);
  const std::string checkpoint = save(dense);
  const ModelConfig good = small_config(Arch::xmod);
  auto refused = [&](auto change, const std::string& part) {
    ModelConfig c = good;
    change(c);
    expect_refused(c, checkpoint, {part});
  };
  refused([](ModelConfig& c) { c.vocab_size = 62; }, "--vocab-size 62 against 61");
  refused([](ModelConfig& c) { c.dim = 20; }, "--dim 20 against 24");
  refused([](ModelConfig& c) { c.active_layers = 6; }, "--active-layers 6 against 5");
  refused([](ModelConfig& c) { c.heads = 2; }, "--heads 2 against 4");
  refused([](ModelConfig& c) { c.kv_heads = 4; }, "--kv-heads 4 against 2");
  refused([](ModelConfig& c) { c.head_dim = 8; }, "--head-dim 8 against 6");
  refused([](ModelConfig& c) { c.ffn_dim = 44; }, "--ffn-dim 44 against 40");
  refused([](ModelConfig& c) { c.tie_word_embeddings = false; }, "tie_word_embeddings false against true");
  expect_refused(small_config(Arch::moe), checkpoint, {"no experts for --arch moe", "routed-ffn"});
  expect_refused(small_config(Arch::deco), checkpoint, {"no experts for --arch deco"});
}

TEST_F(InitFrom, ASparseModelIsNoStartForAnother) {
  TestModel xmod(be_, small_config(Arch::xmod), 1, Use::training);
  const std::string checkpoint = save(xmod);
  expect_refused(small_config(Arch::dense), checkpoint, {"--arch dense against xmod"});
  ModelConfig c = small_config(Arch::xmod);
  c.token_sparsity = 3;
  expect_refused(c, checkpoint, {"--token-sparsity 3 against 4"});
}

// Also those layers that no layer of the model begins as must be whole and right.
TEST_F(InitFrom, WeightsThatDoNotBelongToTheConfiguration) {
  TestModel dense(be_, small_config(Arch::dense), 1, Use::training);
  const std::string checkpoint = save(dense), path = checkpoint + "/model.safetensors";
  auto rewrite = [&](auto change) {
    std::vector<detail::StoredTensor> tensors = detail::model_tensors(dense);
    change(tensors);
    std::filesystem::remove(path);
    Communicator alone;
    detail::save_tensors(path, be_, tensors, alone);
  };
  auto refused = [&](const std::vector<std::string>& parts) {
    TestModel model(be_, small_config(Arch::xmod), 1, Use::inference);
    try {
      start(model, checkpoint);
      ADD_FAILURE() << "expected an error with '" << parts[0] << "'";
    } catch (const Error& error) {
      for (const std::string& part : parts)
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << part << " in " << error.what();
    }
  };
  rewrite([](auto& tensors) { tensors.erase(tensors.begin() + 7); });
  refused({path, "no tensor model.layers.0.self_attn.o_proj.weight"});
  rewrite([](auto& tensors) { tensors[1].name = "model.layers.0.self_attn.q_proj.bias"; });
  refused({path, "model.layers.0.input_layernorm.weight"});
  rewrite([](auto& tensors) {
    tensors.push_back(tensors[1]);
    tensors.back().name = "model.layers.0.self_attn.q_proj.bias";
  });
  refused({path, "q_proj.bias", "not one of this model's"});
  rewrite([](auto& tensors) { tensors[1].shape = {12}; });
  refused({path, "model.layers.0.input_layernorm.weight", "[12]", "[24]"});
}

}  // namespace
}  // namespace xmod

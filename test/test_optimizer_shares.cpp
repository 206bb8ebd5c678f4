// The shares of the optimizer's state: complete, whole where they must be, even, and the same at every call.
#include "xmod/optimizer_shares.h"

#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <string>
#include <tuple>

namespace xmod {
namespace {

struct Case {
  std::string name;
  ParameterTable parameters;
  OptimizerTable optimizer;
};

Case make_case(const std::string& name, const ModelConfig& c, Optimizer choice = Optimizer::muon) {
  ParameterTable table = make_parameter_table(c, make_layer_plan(c));
  const OptimizerTable optimizer = make_optimizer_table(table, choice);
  return {name, std::move(table), optimizer};
}

// Every kind of model of a preset's size.
std::vector<Case> cases(const Preset& preset) {
  std::vector<Case> all;
  for (const auto& [name, arch] : arch_names()) {
    ModelConfig c = preset.config;
    c.arch = arch;
    if (has_experts(arch)) {
      c.experts = 64;
      c.experts_per_token = 6;
      c.shared_experts = 1;
      c.expert_dim = c.ffn_dim / 8;
    }
    all.push_back(make_case(preset.name + " " + name, c));
  }
  ModelConfig untied = preset.config;
  untied.tie_word_embeddings = false;
  all.push_back(make_case(preset.name + " with AdamW alone, untied", untied, Optimizer::adamw));
  return all;
}

std::vector<Case> paper_cases() {
  std::vector<Case> all;
  for (const Preset& preset : presets()) {
    if (preset.name == "tiny") continue;
    for (Case& c : cases(preset)) all.push_back(std::move(c));
  }
  return all;
}

std::vector<OptimizerShare> shares_of(const Case& c, int64_t ranks) {
  return share_optimizer(c.parameters, c.optimizer, ranks);
}

bool is_muon(const Case& c, const OptimizerPiece& piece) {
  return c.optimizer.optimizer[static_cast<size_t>(piece.entry)] == Optimizer::muon;
}

const Parameter& parameter(const Case& c, const OptimizerPiece& piece) {
  return c.parameters.entries[static_cast<size_t>(piece.entry)];
}

int64_t whole_bytes(const Case& c) {
  return 4 * (c.parameters.total + c.optimizer.second_moment_total);
}

// What the rank with most has, in units of an even share.
double largest_share(const Case& c, int64_t ranks) {
  int64_t most = 0;
  for (const OptimizerShare& share : shares_of(c, ranks)) most = std::max(most, share.bytes());
  return static_cast<double>(most * ranks) / static_cast<double>(whole_bytes(c));
}

// Matrices (rows, cols) by hand, and a vector of AdamW's.
Case by_hand(const std::vector<std::pair<int64_t, int64_t>>& matrices, int64_t adamw = 0) {
  Case c;
  TensorAdder add(c.parameters, "");
  for (const auto& [rows, cols] : matrices) add.matrix(std::to_string(c.parameters.total), rows, cols);
  if (adamw > 0) add.norm("norm", adamw);
  c.optimizer = make_optimizer_table(c.parameters, Optimizer::muon);
  return c;
}

std::vector<std::vector<int64_t>> entries(const std::vector<OptimizerShare>& shares) {
  std::vector<std::vector<int64_t>> all;
  for (const OptimizerShare& share : shares) {
    all.emplace_back();
    for (const OptimizerPiece& piece : share.pieces) all.back().push_back(piece.entry);
  }
  return all;
}

// ---------------------------------------------------------------------------------------------------
// Complete

void expect_each_element_once(const Case& c, const std::vector<OptimizerShare>& shares) {
  std::vector<std::set<std::pair<int64_t, int64_t>>> owned(c.parameters.entries.size());  // first, end
  for (const OptimizerShare& share : shares) {
    for (const OptimizerPiece& piece : share.pieces)
      EXPECT_TRUE(
          owned.at(static_cast<size_t>(piece.entry)).emplace(piece.first, piece.first + piece.size).second);
  }
  for (size_t i = 0; i < owned.size(); i++) {
    int64_t end = 0;
    for (const auto& [first, last] : owned[i]) {
      EXPECT_EQ(first, end) << c.parameters.entries[i].name;
      EXPECT_GT(last, first);
      end = last;
    }
    EXPECT_EQ(end, c.parameters.entries[i].size) << c.parameters.entries[i].name;
    if (c.optimizer.optimizer[i] == Optimizer::muon) {
      EXPECT_EQ(owned[i].size(), 1u) << "a matrix is whole: " << c.parameters.entries[i].name;
    }
  }
}

// A rank's moments lie one behind the other, as vectors want them; its pieces in the table's order.
void expect_sound_layout(const Case& c, const OptimizerShare& share) {
  int64_t first_moment = 0, second_moment = 0, flops = 0;
  std::pair<int64_t, int64_t> last{-1, -1};
  for (const OptimizerPiece& piece : share.pieces) {
    const int64_t room = (piece.size + 15) / 16 * 16;
    EXPECT_LT(last, std::make_pair(piece.entry, piece.first));
    last = {piece.entry, piece.first};
    EXPECT_EQ(piece.first % 16, 0);
    EXPECT_EQ(piece.first_moment, first_moment);
    EXPECT_EQ(piece.second_moment, is_muon(c, piece) ? -1 : second_moment);
    first_moment += room;
    if (is_muon(c, piece)) {
      flops += newton_schulz_flops(parameter(c, piece).shape[0], parameter(c, piece).shape[1]);
    } else {
      second_moment += room;
    }
  }
  EXPECT_EQ(share.first_moment_total, first_moment);
  EXPECT_EQ(share.second_moment_total, second_moment);
  EXPECT_EQ(share.muon_flops, flops);
  EXPECT_EQ(share.bytes(), 4 * (first_moment + second_moment));
}

TEST(OptimizerShares, EveryElementHasOneOwner) {
  for (const Preset& preset : {presets()[0], presets()[1]}) {
    for (const Case& c : cases(preset)) {
      for (int64_t ranks : {1, 2, 3, 7, 16, 64, 1000}) {
        SCOPED_TRACE(c.name + ", ranks: " + std::to_string(ranks));
        const std::vector<OptimizerShare> shares = shares_of(c, ranks);
        ASSERT_EQ(shares.size(), static_cast<size_t>(ranks));
        expect_each_element_once(c, shares);
        for (const OptimizerShare& share : shares) expect_sound_layout(c, share);
      }
    }
  }
}

TEST(OptimizerShares, OneRankHasAll) {
  const Case c = make_case("tiny", ModelConfig{});
  const OptimizerShare all = shares_of(c, 1)[0];
  ASSERT_EQ(all.pieces.size(), c.parameters.entries.size());
  EXPECT_EQ(all.second_moment_total, c.optimizer.second_moment_total);
  for (size_t i = 0; i < all.pieces.size(); i++) {
    EXPECT_EQ(all.pieces[i].entry, static_cast<int64_t>(i));
    EXPECT_EQ(all.pieces[i].second_moment, c.optimizer.second_moment_offset[i]);
  }
}

// Nothing but the tables decides: neither memory addresses nor what was asked before.
TEST(OptimizerShares, TheSameAtEveryCall) {
  auto flat = [](const std::vector<OptimizerShare>& shares) {
    std::vector<std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t>> all;
    for (const OptimizerShare& s : shares) {
      for (const OptimizerPiece& p : s.pieces)
        all.emplace_back(p.entry, p.first, p.size, p.first_moment, p.second_moment);
    }
    return all;
  };
  const auto first = flat(shares_of(make_case("", ModelConfig{}), 5));
  shares_of(make_case("", presets()[1].config), 9);
  EXPECT_EQ(flat(shares_of(make_case("", ModelConfig{}), 5)), first);
}

// ---------------------------------------------------------------------------------------------------
// Even

TEST(OptimizerShares, MemoryIsEvenForThePaperUpTo64Ranks) {
  for (const Case& c : paper_cases()) {
    for (int64_t ranks = 2; ranks <= 64; ranks++) {
      EXPECT_LE(largest_share(c, ranks), 1.002) << c.name << ", ranks: " << ranks;
    }
  }
}

TEST(OptimizerShares, MemoryOfTinyModelsUpTo12Ranks) {
  for (const Case& c : cases(presets()[0])) {
    for (int64_t ranks = 2; ranks <= 12; ranks++) {
      EXPECT_LE(largest_share(c, ranks), 1.002) << c.name << ", ranks: " << ranks;
    }
  }
}

TEST(OptimizerShares, NewtonSchulzStepsAreBalanced) {
  for (const Preset& preset : presets()) {
    const bool tiny = preset.name == "tiny";
    for (const Case& c : cases(preset)) {
      for (int64_t ranks : {2, 3, 4, 8, 12, 32, 64}) {
        if (tiny && ranks > 12) continue;
        int64_t most = 0;
        double all = 0;
        for (const OptimizerShare& share : shares_of(c, ranks)) {
          most = std::max(most, share.muon_flops);
          all += static_cast<double>(share.muon_flops);
        }
        const double bound = ranks <= 4 ? 1.02 : ranks <= 12 ? 1.1 : 1.2;
        EXPECT_LE(static_cast<double>(most * ranks), bound * all) << c.name << ", ranks: " << ranks;
      }
    }
  }
}

TEST(OptimizerShares, CostOfNewtonSchulzSteps) {
  EXPECT_EQ(newton_schulz_flops(1, 1), 2 * 2 + (2 + 14));
  EXPECT_EQ(newton_schulz_flops(2, 3), 2 * (2 * 2 * 2 * 3) + 2 * (2 * 2 * 3) + 14 * (2 * 2 * 2));
  EXPECT_EQ(newton_schulz_flops(3, 2), newton_schulz_flops(2, 3));
}

// The dearest first, as in packing: 96 | 64 + 32 and not 96 + 32 | 64.
TEST(OptimizerShares, TheDearestMatricesGoFirst) {
  EXPECT_EQ(entries(shares_of(by_hand({{32, 32}, {64, 64}, {96, 96}}), 2)),
            (std::vector<std::vector<int64_t>>{{2}, {0, 1}}));
}

// A rank without room takes none, however little it has to compute: here 2048 floats are an even share, and
// the squares cost more than their size.
TEST(OptimizerShares, MemoryComesBeforeBalance) {
  EXPECT_GT(newton_schulz_flops(32, 32), newton_schulz_flops(8, 128));
  EXPECT_EQ(entries(shares_of(by_hand({{32, 32}, {8, 128}, {8, 128}, {8, 128}}), 2)),
            (std::vector<std::vector<int64_t>>{{0, 1}, {2, 3}}));
}

TEST(OptimizerShares, ElementsOfAdamWLevelTheMemory) {
  // Floats of the matrices: 1024, 256, 0; AdamW has two for each of its 512 elements.
  const Case c = by_hand({{32, 32}, {16, 16}}, 512);
  const std::vector<OptimizerShare> shares = shares_of(c, 3);
  EXPECT_EQ(entries(shares), (std::vector<std::vector<int64_t>>{{0}, {1, 2}, {2}}));
  EXPECT_EQ(shares[1].pieces[1].size, 192);  // 256 + 2 * 192 = 2 * 320
  EXPECT_EQ(shares[2].pieces[0].first, 192);
  EXPECT_EQ(shares[2].pieces[0].size, 320);
}

// Where one matrix is more than an even share, it is the largest share and the others are level.
TEST(OptimizerShares, AMatrixThatIsTooLargeStandsAlone) {
  const Case c = by_hand({{64, 64}, {16, 16}, {16, 16}}, 256);
  const std::vector<OptimizerShare> shares = shares_of(c, 3);
  EXPECT_EQ(shares[0].bytes(), 4 * 64 * 64);
  EXPECT_EQ(shares[1].bytes(), 4 * (256 + 256));
  EXPECT_EQ(shares[2].bytes(), 4 * (256 + 256));
}

TEST(OptimizerShares, MoreRanksThanTensors) {
  const std::vector<OptimizerShare> shares = shares_of(by_hand({{16, 16}, {16, 16}}, 16), 5);
  EXPECT_EQ(entries(shares), (std::vector<std::vector<int64_t>>{{0}, {1}, {2}, {}, {}}));
  EXPECT_EQ(shares[4].bytes(), 0);
}

// ---------------------------------------------------------------------------------------------------
// Batches and neighbours

// (16, 32) and (32, 16) cost the same, so they may change places: at most one rank has both.
TEST(OptimizerShares, EqualShapesStayTogether) {
  const std::pair<int64_t, int64_t> A{16, 32}, B{32, 16};
  EXPECT_EQ(entries(shares_of(by_hand({A, B, A, B, A, B}), 3)),
            (std::vector<std::vector<int64_t>>{{0, 4}, {1, 2}, {3, 5}}));
  const ModelConfig dense = dense_reference(ModelConfig{});
  const Case c = make_case("dense", dense);
  int64_t mixed = 0;
  for (const OptimizerShare& share : shares_of(c, 6)) {
    std::set<std::vector<int64_t>> of_the_ffn;
    for (const OptimizerPiece& piece : share.pieces) {
      if (is_muon(c, piece) && piece.size == dense.dim * dense.ffn_dim)
        of_the_ffn.insert(parameter(c, piece).shape);
    }
    mixed += of_the_ffn.size() > 1;
  }
  EXPECT_LE(mixed, 1);
}

// What one layer's backward pass makes ready goes to several owners, not all to one.
TEST(OptimizerShares, OwnersAlternateAlongTheModel) {
  const std::pair<int64_t, int64_t> A{16, 32};
  EXPECT_EQ(entries(shares_of(by_hand({A, A, A, A, A, A}), 2)),
            (std::vector<std::vector<int64_t>>{{0, 2, 4}, {1, 3, 5}}));
  const Case c = make_case("165M", dense_reference(presets()[1].config));
  std::vector<std::set<size_t>> owners(28);
  const std::vector<OptimizerShare> shares = shares_of(c, 8);
  for (size_t r = 0; r < shares.size(); r++) {
    for (const OptimizerPiece& piece : shares[r].pieces) {
      if (is_muon(c, piece)) owners.at(static_cast<size_t>(piece.entry - 1) / 11).insert(r);
    }
  }
  for (const auto& of_layer : owners) EXPECT_GE(of_layer.size(), 4u);
}

// ---------------------------------------------------------------------------------------------------
// Weights in fp32, where products read bf16

// What products alone read is on one rank each; the rest is on all.
TEST(KeptMasters, AreOwnedOrReadInFp32) {
  for (const Case& c : cases(presets()[0])) {
    SCOPED_TRACE(c.name);
    std::vector<int> times(static_cast<size_t>(c.parameters.total));
    for (const OptimizerShare& share : shares_of(c, 3)) {
      for (const NumberRange& kept : kept_masters(c.parameters, share)) {
        for (int64_t i = kept.offset; i < kept.offset + kept.size; i++) times[static_cast<size_t>(i)]++;
      }
    }
    for (const Parameter& p : c.parameters.entries) {
      const int expected = p.read == Read::in_fp32 ? 3 : 1;
      const auto begin = times.begin() + p.offset;
      EXPECT_EQ(std::count(begin, begin + p.size, expected), p.size) << p.name;
    }
  }
}

// Norms, routers, gates, scales and the embedding, of which a row is looked up; all else is only multiplied.
TEST(KeptMasters, MatricesAreReadByProductsAlone) {
  for (const Case& c : cases(presets()[0])) {
    for (const Parameter& p : c.parameters.entries) {
      const bool averaged = p.name.find("experts.") != std::string::npos && c.name.ends_with("deco") &&
                            p.name.find("up_proj") != std::string::npos;
      const bool multiplied = p.optimizer == Optimizer::muon || p.name == "lm_head.weight";
      EXPECT_EQ(p.read == Read::by_products_alone, multiplied && !averaged) << c.name << " " << p.name;
    }
  }
}

}  // namespace
}  // namespace xmod

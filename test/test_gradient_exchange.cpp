// The pieces in which gradients travel between ranks, and the order in which they are added. What needs
// several ranks is in test_ranks.py.
#include "xmod/gradient_exchange.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <vector>

#include "expect_error.h"
#include "normal_numbers.h"
#include "xmod_common.h"

namespace xmod {
namespace {

// From the end to the begin, each number once, no message too long.
void expect_backwards(const std::vector<RankPiece>& pieces, int64_t begin, int64_t end, int ranks) {
  int64_t covered = end;
  for (const RankPiece& piece : pieces) {
    EXPECT_EQ(piece.offset + piece.size, covered);
    EXPECT_GT(piece.size, 0);
    EXPECT_LE(piece.size, kLargestPiece);
    EXPECT_GE(piece.owner, 0);
    EXPECT_LT(piece.owner, ranks);
    covered = piece.offset;
  }
  EXPECT_EQ(covered, begin);
}

TEST(EvenPieces, CoverTheAllocationAndLoadTheRanksAlike) {
  for (int ranks : {2, 3, 4, 64}) {
    for (int64_t total : {int64_t{1}, int64_t{4096}, int64_t{100003}, int64_t{50000000}}) {
      const std::vector<RankPiece> pieces = even_pieces(total, ranks);
      expect_backwards(pieces, 0, total, ranks);
      std::vector<int64_t> load(static_cast<size_t>(ranks));
      for (const RankPiece& piece : pieces) load[static_cast<size_t>(piece.owner)] += piece.size;
      const auto [least, most] = std::minmax_element(load.begin(), load.end());
      EXPECT_LE(*most - *least, 2 * std::max(kSmallestPiece, std::min(kLargestPiece, total / ranks)))
          << total << " on " << ranks;
    }
  }
}

TEST(OwnedPieces, AreTheSharesOfTheOptimizer) {
  ModelConfig c;
  c.vocab_size = 5000;
  const ParameterTable table = make_parameter_table(c, make_layer_plan(c));
  const OptimizerTable optimizer = make_optimizer_table(table, Optimizer::muon);
  for (int ranks : {2, 3, 7}) {
    const std::vector<OptimizerShare> shares = share_optimizer(table, optimizer, ranks);
    const std::vector<RankPiece> pieces = owned_pieces(table, shares);
    std::vector<int> owner(static_cast<size_t>(table.total), -1);
    int64_t last = table.total;
    for (const RankPiece& piece : pieces) {
      EXPECT_LE(piece.offset + piece.size, last) << "not in the order of the backward pass";
      EXPECT_LE(piece.size, kLargestPiece);
      last = piece.offset;
      std::fill_n(owner.begin() + piece.offset, piece.size, piece.owner);
    }
    for (size_t rank = 0; rank < shares.size(); rank++) {
      for (const OptimizerPiece& piece : shares[rank].pieces) {
        const int64_t begin = table.entries[static_cast<size_t>(piece.entry)].offset + piece.first;
        for (int64_t i = begin; i < begin + piece.size; i++)
          ASSERT_EQ(owner[static_cast<size_t>(i)], static_cast<int>(rank));
      }
    }
  }
}

TEST(OwnedPieces, OfThoseThatAreReadAlike) {
  ModelConfig c;
  const ParameterTable table = make_parameter_table(c, make_layer_plan(c));
  const auto shares = share_optimizer(table, make_optimizer_table(table, Optimizer::muon), 3);
  std::vector<int64_t> offsets[2], all;
  for (const RankPiece& piece : owned_pieces(table, shares)) all.push_back(piece.offset);
  for (const Read read : {Read::in_fp32, Read::by_products_alone}) {
    std::vector<int64_t>& of_read = offsets[read == Read::in_fp32 ? 0 : 1];
    for (const RankPiece& piece : owned_pieces(table, shares, read)) of_read.push_back(piece.offset);
    EXPECT_FALSE(of_read.empty());
    EXPECT_TRUE(std::is_sorted(of_read.rbegin(), of_read.rend()));
  }
  EXPECT_NE(std::count(offsets[0].begin(), offsets[0].end(), table.final_norm), 0);
  std::vector<int64_t> merged;
  std::merge(offsets[0].begin(), offsets[0].end(), offsets[1].begin(), offsets[1].end(),
             std::back_inserter(merged), std::greater<>());
  EXPECT_EQ(merged, all);
}

// Rank by rank, in fp32: other orders give other bits.
TEST(AddInRankOrder, GivesEveryOwnerTheSameBits) {
  constexpr int kRanks = 5;
  constexpr int64_t n = 9001, stride = 9100;
  std::vector<Floats> of_rank;
  for (uint64_t rank = 0; rank < kRanks; rank++) of_rank.push_back(normal_numbers(n, rank));
  Floats expected = of_rank[0], backwards = of_rank[kRanks - 1];
  for (int rank = 1; rank < kRanks; rank++) {
    for (int64_t i = 0; i < n; i++) expected[i] += of_rank[rank][i];
    for (int64_t i = 0; i < n; i++) backwards[i] += of_rank[kRanks - 1 - rank][i];
  }
  EXPECT_NE(std::memcmp(expected.data(), backwards.data(), n * sizeof(float)), 0) << "the test shows nothing";
  for (int owner = 0; owner < kRanks; owner++) {
    Floats own = of_rank[owner], others(static_cast<size_t>((kRanks - 1) * stride));
    for (int rank = 0, slot = 0; rank < kRanks; rank++) {
      if (rank != owner) std::copy_n(of_rank[rank].begin(), n, others.begin() + stride * slot++);
    }
    add_in_rank_order(own.data(), others.data(), stride, owner, kRanks, n);
    EXPECT_EQ(std::memcmp(own.data(), expected.data(), n * sizeof(float)), 0) << "owner " << owner;
  }
}

class LaunchTest : public ::testing::Test {
 protected:
  static constexpr const char* kNames[] = {
      "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE",
      "SLURM_PROCID",         "SLURM_STEP_NUM_TASKS"};
  void SetUp() override { forget(); }
  void TearDown() override { forget(); }
  static void forget() {
    for (const char* name : kNames) unsetenv(name);
  }
};

TEST_F(LaunchTest, IsReadFromTheEnvironment) {
  EXPECT_FALSE(find_launch().found);
  EXPECT_EQ(find_launch().size, 1);
  for (size_t i = 0; i < std::size(kNames); i += 2) {
    setenv(kNames[i], "2", 1);
    EXPECT_FALSE(find_launch().found) << "a rank of how many?";
    setenv(kNames[i + 1], "5", 1);
    EXPECT_TRUE(find_launch().found);
    EXPECT_EQ(find_launch().rank, 2);
    EXPECT_EQ(find_launch().size, 5);
    forget();
  }
}

// The tests are built without MPI.
TEST_F(LaunchTest, SeveralProcessesNeedMpi) {
  Communicator ranks;
  ranks.join();
  EXPECT_EQ(ranks.size(), 1);
  setenv("PMI_RANK", "0", 1);
  setenv("PMI_SIZE", "1", 1);
  ranks.join();
  setenv("PMI_SIZE", "3", 1);
  expect_error([&] { ranks.join(); }, {"3 processes were started", "without MPI", "install_deps.sh mpi"});
}

}  // namespace
}  // namespace xmod

// Shards good and bad, the order of sequences, ranks, resuming, and files beyond 4 GiB.
#include "dataloader.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>

using namespace xmod;
namespace fs = std::filesystem;

namespace {

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code, 1);
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << "one line: " << error.what();
    return error.what();
  }
  return "no error";
}

void expect_parts(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
  }
}

void append_integer(std::string& bytes, uint32_t value, int64_t width) {
  for (int64_t i = 0; i < width; i++) bytes.push_back(static_cast<char>(value >> (8 * i)));
}

std::string header(int32_t magic, int32_t version, int32_t count) {
  std::string bytes;
  for (int32_t field : {magic, version, count}) append_integer(bytes, static_cast<uint32_t>(field), 4);
  bytes.resize(kShardHeaderBytes);
  return bytes;
}

std::string shard(int64_t width, const std::vector<uint32_t>& tokens) {
  const int32_t count = static_cast<int32_t>(tokens.size());
  std::string bytes = width == 2 ? header(20240520, 1, count) : header(20240801, 7, count);
  for (uint32_t token : tokens) append_integer(bytes, token, width);
  return bytes;
}

// first, first + 1, ...: a token tells its own place.
std::vector<uint32_t> counting(int64_t count, uint32_t first = 0) {
  std::vector<uint32_t> tokens(static_cast<size_t>(count));
  for (uint32_t& token : tokens) token = first++;
  return tokens;
}

struct Batch {
  Batch(int64_t B, int64_t T) : inputs(static_cast<size_t>(B * T), -1), targets(inputs) {}
  std::vector<int32_t> inputs, targets;  // (B, T)
  bool operator==(const Batch&) const = default;
};

Batch next_batch(TrainLoader& loader, int64_t B, int64_t T) {
  Batch batch(B, T);
  loader.next_batch(batch.inputs.data(), batch.targets.data());
  return batch;
}

class DataLoaderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "xmod_dataloader_XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder = name;
  }
  void TearDown() override { fs::remove_all(folder); }

  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(folder / name, std::ios::binary) << bytes;
    return (folder / name).string();
  }
  std::string pattern() const { return (folder / "*.bin").string(); }

  // The error of opening a data set of this one file.
  std::string open_error(const std::string& bytes, int64_t T = 4, int64_t V = 100) const {
    write("shard.bin", bytes);
    return error_of([&] { TokenShards(pattern(), T, V); });
  }

  // Three shards of 23, 9 and 31 tokens: 5 + 2 + 7 sequences at T = 4, both widths.
  TokenShards three_shards() const {
    write("a.bin", shard(2, counting(23, 0)));
    write("b.bin", shard(4, counting(9, 100)));
    write("c.bin", shard(2, counting(31, 200)));
    return TokenShards(pattern(), 4, 300);
  }

  fs::path folder;
};

}  // namespace

// ---------------------------------------------------------------------------------------------- reading

TEST_F(DataLoaderTest, ReadsBothWidthsInOrderOfNamesAndReportsTheTail) {
  const TokenShards shards = three_shards();
  EXPECT_EQ(shards.num_shards(), 3);
  EXPECT_EQ(shards.num_tokens(), 23 + 9 + 31);
  EXPECT_EQ(shards.num_sequences(), 5 + 2 + 7);
  EXPECT_EQ(shards.unused_tokens(), 2 + 0 + 2);
  EXPECT_TRUE(shards.all_tokens_checked());

  const std::vector<int32_t> first_tokens = {0, 4, 8, 12, 16, 100, 104, 200, 204, 208, 212, 216, 220, 224};
  for (int64_t s = 0; s < shards.num_sequences(); s++) {
    Batch row(1, 4);
    shards.read_sequence(s, row.inputs.data(), row.targets.data());
    for (int32_t t = 0; t < 4; t++) {
      EXPECT_EQ(row.inputs[t], first_tokens[s] + t) << "sequence " << s;
      EXPECT_EQ(row.targets[t], first_tokens[s] + t + 1) << "sequence " << s;
    }
  }
}

TEST_F(DataLoaderTest, Uint32ShardsHoldLargeVocabularies) {
  write("large.bin", shard(4, {151935, 70000, 65536, 65535, 3}));
  const TokenShards shards(pattern(), 4, 151936);
  Batch row(1, 4);
  shards.read_sequence(0, row.inputs.data(), row.targets.data());
  EXPECT_EQ(row.inputs, (std::vector<int32_t>{151935, 70000, 65536, 65535}));
  EXPECT_EQ(row.targets, (std::vector<int32_t>{70000, 65536, 65535, 3}));
}

TEST_F(DataLoaderTest, SequenceCountAtItsBorders) {
  const int64_t T = 4;
  const std::map<int64_t, std::pair<int64_t, int64_t>> sequences_and_unused = {
      {5, {1, 0}}, {8, {1, 3}}, {9, {2, 0}}, {10, {2, 1}}, {12, {2, 3}}, {13, {3, 0}}};
  for (const auto& [count, expected] : sequences_and_unused) {
    write("shard.bin", shard(2, counting(count)));
    const TokenShards shards(pattern(), T, 100);
    EXPECT_EQ(shards.num_sequences(), expected.first) << count << " tokens";
    EXPECT_EQ(shards.unused_tokens(), expected.second) << count << " tokens";
  }
}

TEST_F(DataLoaderTest, APatternMayNameOneFileWithGlobCharacters) {
  const std::string path = write("odd[name.bin", shard(2, counting(9)));
  EXPECT_EQ(TokenShards(path, 4, 100).num_sequences(), 2);

  const std::string exact = write("train[1].bin", shard(2, counting(13)));
  write("train1.bin", shard(2, counting(9)));  // what the name would match as a pattern
  EXPECT_EQ(TokenShards(exact, 4, 100).num_sequences(), 3);
}

// -------------------------------------------------------------------------------------------- bad input

TEST_F(DataLoaderTest, NoFileMatches) {
  expect_parts(error_of([&] { TokenShards(pattern(), 4, 100, "--val-data"); }),
               {"--val-data", pattern(), "no file matches", "prepare_data.py"});
  expect_parts(error_of([&] { TokenShards("", 4, 100); }), {"--train-data ''", "no file matches"});
}

TEST_F(DataLoaderTest, NotAFile) {
  fs::create_directory(folder / "folder.bin");
  expect_parts(error_of([&] { TokenShards(pattern(), 4, 100); }), {"folder.bin", "it is a directory"});
}

TEST_F(DataLoaderTest, EmptyAndTruncatedFiles) {
  expect_parts(open_error(""), {"shard.bin", "empty file", "prepare_data.py"});
  expect_parts(open_error(shard(2, counting(9)).substr(0, 1023)),
               {"shard.bin", "truncated header", "have 1023 bytes", "expected 1024"});
  expect_parts(open_error(shard(2, counting(9)).substr(0, 1024 + 17)),
               {"shard.bin", "truncated", "have 1041 bytes", "expected 1042", "9 tokens of 2 bytes"});
  expect_parts(open_error(shard(4, counting(9)).substr(0, 1024 + 18)),
               {"shard.bin", "truncated", "have 1042 bytes", "expected 1060", "9 tokens of 4 bytes"});
}

TEST_F(DataLoaderTest, OverLongFiles) {
  expect_parts(open_error(shard(2, counting(9)) + "x"),
               {"shard.bin", "over-long", "have 1043 bytes", "expected 1042", "prepare_data.py"});
  expect_parts(open_error(shard(4, counting(9)) + "xxxx"), {"over-long", "have 1064 bytes", "expected 1060"});
}

TEST_F(DataLoaderTest, WrongMagicOrVersion) {
  expect_parts(open_error(std::string(2000, 'x')),
               {"shard.bin", "magic number 2021161080", "expected 20240520 (uint16 tokens) or 20240801"});
  expect_parts(open_error(header(20240520, 7, 0)), {"shard.bin", "version 7", "expected 1 "});
  expect_parts(open_error(header(20240801, 1, 0)), {"shard.bin", "version 1", "expected 7 "});
}

TEST_F(DataLoaderTest, ImpossibleTokenCount) {
  expect_parts(open_error(header(20240520, 1, -3) + "tokens"),
               {"shard.bin", "counts -3 tokens", "holds 3", "expected 0 to 2147483647", "--shard-tokens"});
}

TEST_F(DataLoaderTest, MoreTokensThanTheHeaderCanCount) {
  const std::string path = write("shard.bin", header(20240520, 1, 0));  // 2^32 tokens, wrapped to 0
  std::error_code full;
  fs::resize_file(path, 1024 + (uintmax_t{2} << 32), full);
  if (full) GTEST_SKIP() << "no sparse file of 8 GiB here: " << full.message();
  expect_parts(error_of([&] { TokenShards(pattern(), 4, 100); }),
               {"shard.bin", "counts 0 tokens", "holds 4294967296", "expected 0 to 2147483647"});
}

TEST_F(DataLoaderTest, FewerTokensThanOneSequence) {
  expect_parts(open_error(shard(2, counting(4))), {"shard.bin", "4 tokens", "at least 5", "--seq-len 4"});
  expect_parts(open_error(shard(2, {})), {"shard.bin", "0 tokens", "at least 5"});
  expect_parts(open_error(shard(2, counting(9)), 0), {"sequence length 0", "--seq-len"});
}

TEST_F(DataLoaderTest, OneBadShardAmongGoodOnesIsNamed) {
  write("a.bin", shard(2, counting(9)));
  write("b.bin", shard(2, counting(3)));
  expect_parts(error_of([&] { TokenShards(pattern(), 4, 100); }), {"b.bin", "3 tokens"});
}

TEST_F(DataLoaderTest, TokenOutsideTheVocabularyIsNamedAtOpening) {
  std::vector<uint32_t> tokens = counting(600000);
  for (uint32_t& token : tokens) token %= 100;
  tokens[555555] = 100;
  expect_parts(open_error(shard(2, tokens)), {"shard.bin", "token 555555", "id 100", "vocabulary size 100"});
  tokens[555555] = 4294967295u;  // negative if it were read as int32
  expect_parts(open_error(shard(4, tokens)), {"shard.bin", "token 555555", "id 4294967295", "--vocab-size"});
  tokens[555555] = 99;
  EXPECT_EQ(open_error(shard(4, tokens)), "no error");
}

TEST_F(DataLoaderTest, ShardThatChangesUnderUs) {
  const std::string path = write("shard.bin", shard(2, counting(9)));
  const TokenShards shards(pattern(), 4, 100);
  Batch row(1, 4);
  const auto read_last = [&] { shards.read_sequence(1, row.inputs.data(), row.targets.data()); };
  write("shard.bin", shard(2, counting(9, 95)));
  expect_parts(error_of(read_last), {"shard.bin", "token 5", "id 100"});
  fs::resize_file(path, 1024 + 10);
  expect_parts(error_of(read_last), {"shard.bin", "ends at byte 1034, 8 bytes short"});
  fs::remove(path);
  expect_parts(error_of(read_last), {"cannot read", "shard.bin", "No such file"});
}

// ---------------------------------------------------------------------------------------------- shuffling

TEST(Permutation, IsABijection) {
  for (int64_t n :
       {1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 63, 64, 65, 100, 255, 256, 257, 1000, 4096, 4097, 65537}) {
    for (uint64_t seed : {0u, 1u, 1337u}) {
      const Permutation order(n, seed, 3);
      std::vector<bool> seen(static_cast<size_t>(n), false);
      for (int64_t i = 0; i < n; i++) {
        const int64_t image = order(i);
        ASSERT_TRUE(0 <= image && image < n) << n;
        ASSERT_FALSE(seen[static_cast<size_t>(image)]) << n << " seed " << seed << " index " << i;
        seen[static_cast<size_t>(image)] = true;
      }
    }
  }
}

TEST(Permutation, ReachesFarInHugeDataSets) {
  const int64_t n = (int64_t{1} << 40) + 12345;
  const Permutation order(n, 1, 0);
  std::set<int64_t> images;
  for (int64_t i = 0; i < 10000; i++) images.insert(order(i));
  EXPECT_EQ(images.size(), 10000u);
  EXPECT_LT(*images.begin(), n / 500);
  EXPECT_GT(*images.rbegin(), n - n / 500);
}

TEST(Permutation, DiffersBetweenEpochsAndSeeds) {
  const auto order = [](uint64_t seed, uint64_t epoch) {
    const Permutation permutation(50, seed, epoch);
    std::vector<int64_t> images;
    for (int64_t i = 0; i < 50; i++) images.push_back(permutation(i));
    return images;
  };
  std::set<std::vector<int64_t>> orders;
  for (uint64_t seed = 0; seed < 20; seed++) {
    for (uint64_t epoch = 0; epoch < 20; epoch++) orders.insert(order(seed, epoch));
  }
  EXPECT_EQ(orders.size(), 400u);
  EXPECT_EQ(order(7, 2), order(7, 2));
}

// Over many epochs every sequence comes equally often at every place: chi-squared over an n x n table has
// mean (n-1)^2 and standard deviation sqrt(2) * (n-1); ten of those are never exceeded by chance.
TEST(Permutation, IsFairOverEpochs) {
  for (int64_t n : {3, 5, 12, 30}) {
    const int64_t epochs = 20000;
    std::vector<int64_t> table(static_cast<size_t>(n * n), 0);  // (place, sequence)
    for (int64_t epoch = 0; epoch < epochs; epoch++) {
      const Permutation order(n, 42, static_cast<uint64_t>(epoch));
      for (int64_t place = 0; place < n; place++) table[static_cast<size_t>(place * n + order(place))]++;
    }
    const double expected = static_cast<double>(epochs) / static_cast<double>(n);
    double chi_squared = 0;
    for (int64_t count : table) chi_squared += (count - expected) * (count - expected) / expected;
    const double freedom = static_cast<double>((n - 1) * (n - 1));
    EXPECT_LT(chi_squared, freedom + 10 * std::sqrt(2 * freedom)) << "n = " << n;
  }
}

TEST(Permutation, NeighboursAreNotKeptTogether) {
  const int64_t n = 10000;
  const Permutation order(n, 5, 0);
  int64_t adjacent = 0;
  for (int64_t i = 0; i + 1 < n; i++) adjacent += order(i + 1) == order(i) + 1;
  EXPECT_LT(adjacent, 10);  // a random order has about one
}

// ------------------------------------------------------------------------------------------- train loader

TEST_F(DataLoaderTest, RanksTogetherSeeEachEpochExactlyOnceInAnOrderOfTheSeedAlone) {
  const TokenShards shards = three_shards();
  const int64_t T = 4, epochs = 6, global_batch = 6,
                N = shards.num_sequences();  // 14: borders inside batches
  TrainLoader reference(shards, 1, 9);
  std::vector<Batch> line;
  for (int64_t i = 0; i < epochs * N; i++) line.push_back(next_batch(reference, 1, T));
  for (int64_t epoch = 0; epoch < epochs; epoch++) {
    std::set<int32_t> first_tokens;
    for (int64_t i = 0; i < N; i++) first_tokens.insert(line[epoch * N + i].inputs[0]);
    EXPECT_EQ(static_cast<int64_t>(first_tokens.size()), N) << "epoch " << epoch;
  }

  for (int64_t R : {1, 2, 3}) {
    const int64_t B = global_batch / R;
    for (int64_t rank = 0; rank < R; rank++) {
      TrainLoader loader(shards, B, 9, rank, R);
      for (int64_t step = 0; step < epochs * N / global_batch; step++) {
        const Batch batch = next_batch(loader, B, T);
        for (int64_t b = 0; b < B; b++) {
          const Batch& row = line[step * global_batch + rank * B + b];
          EXPECT_TRUE(std::equal(row.inputs.begin(), row.inputs.end(), batch.inputs.begin() + b * T));
          EXPECT_TRUE(std::equal(row.targets.begin(), row.targets.end(), batch.targets.begin() + b * T));
        }
      }
      EXPECT_EQ(loader.state().epoch, epochs);
      EXPECT_EQ(loader.state().position, 0);
    }
  }
}

TEST_F(DataLoaderTest, EpochsAndSeedsHaveOrdersOfTheirOwn) {
  const TokenShards shards = three_shards();
  const int64_t N = shards.num_sequences();
  TrainLoader loader(shards, N, 9), other_seed(shards, N, 10);
  const Batch first = next_batch(loader, N, 4), second = next_batch(loader, N, 4);
  EXPECT_FALSE(first == second);
  EXPECT_FALSE(first == next_batch(other_seed, N, 4));
}

TEST_F(DataLoaderTest, ResumesAtEveryPosition) {
  const TokenShards shards = three_shards();
  const int64_t B = 3, T = 4, steps = 15;  // 45 of 14 sequences: three epoch borders, each shard border often
  TrainLoader undisturbed(shards, B, 9);
  std::vector<TrainLoaderState> states;
  std::vector<Batch> batches;
  for (int64_t step = 0; step < steps; step++) {
    states.push_back(undisturbed.state());
    batches.push_back(next_batch(undisturbed, B, T));
  }
  for (int64_t kill = 0; kill < steps; kill++) {
    TrainLoader resumed(TokenShards(pattern(), T, 300), B, 12345);  // the seed of the checkpoint wins
    resumed.restore(states[kill]);
    for (int64_t step = kill; step < steps; step++) {
      EXPECT_EQ(next_batch(resumed, B, T), batches[step]) << "killed at " << kill << ", step " << step;
    }
  }
}

TEST_F(DataLoaderTest, ABatchMayBeLargerThanTheDataSet) {
  write("shard.bin", shard(2, counting(9)));
  TrainLoader loader(TokenShards(pattern(), 4, 100), 5, 1);
  const Batch batch = next_batch(loader, 5, 4);
  std::map<int32_t, int> count;
  for (int64_t b = 0; b < 4; b++) count[batch.inputs[b * 4]]++;  // two whole epochs
  EXPECT_EQ(count, (std::map<int32_t, int>{{0, 2}, {4, 2}}));
  EXPECT_EQ(loader.state().epoch, 2);
  EXPECT_EQ(loader.state().position, 1);
}

TEST_F(DataLoaderTest, RefusesAStateOfOtherData) {
  TrainLoader loader(three_shards(), 2, 1);
  TrainLoaderState state = loader.state();
  state.num_sequences = 15;
  expect_parts(error_of([&] { loader.restore(state); }),
               {"--train-data", "14 sequences of 4 tokens", "trained on 15", "without --resume"});
  state = {1, 0, 14, 14};
  expect_parts(error_of([&] { loader.restore(state); }), {"position 14", "expected 0 to 13", "damaged"});
  state = {1, -1, 3, 14};
  expect_parts(error_of([&] { loader.restore(state); }), {"epoch -1", "damaged"});
  expect_parts(error_of([&] { TrainLoader(three_shards(), 0, 1); }), {"batch size 0", "--batch-size"});
}

// -------------------------------------------------------------------------------------------- eval loader

TEST_F(DataLoaderTest, EvaluationReadsTheFirstSequencesInOrderAndAgainAfterReset) {
  EvalLoader loader(three_shards(), 4, 10);
  EXPECT_EQ(loader.num_sequences(), 10);
  for (int repeat = 0; repeat < 2; repeat++) {
    std::vector<int32_t> first_tokens;
    std::vector<int64_t> rows;
    do {
      Batch batch(4, 4);
      rows.push_back(loader.next_batch(batch.inputs.data(), batch.targets.data()));
      for (int64_t b = 0; b < rows.back(); b++) {
        first_tokens.push_back(batch.inputs[b * 4]);
        EXPECT_EQ(batch.targets[b * 4], batch.inputs[b * 4 + 1]);
      }
      for (int64_t b = rows.back(); b < 4; b++)
        EXPECT_EQ(batch.inputs[b * 4], -1) << "row " << b << " was written";
    } while (rows.back() > 0);
    EXPECT_EQ(rows, (std::vector<int64_t>{4, 4, 2, 0}));
    EXPECT_EQ(first_tokens, (std::vector<int32_t>{0, 4, 8, 12, 16, 100, 104, 200, 204, 208}));
    loader.reset();
  }
}

TEST_F(DataLoaderTest, EvaluationTakesWhatThereIs) {
  EXPECT_EQ(EvalLoader(three_shards(), 4, 1000).num_sequences(), 14);
  EXPECT_EQ(EvalLoader(three_shards(), 4).num_sequences(), 14);
  expect_parts(error_of([&] { EvalLoader(three_shards(), 4, 0); }), {"0 sequences", "--eval-batches"});
  expect_parts(error_of([&] { EvalLoader(three_shards(), 0); }), {"batch size 0", "--batch-size"});
}

// ------------------------------------------------------------------------------------- beyond 2^32 bytes

TEST_F(DataLoaderTest, ReadsBeyondFourGibibytes) {
  const int64_t count = (int64_t{1} << 30) + 1000;  // 4 GiB + 4000 bytes of uint32 tokens
  const std::string path = write("sparse.bin", header(20240801, 7, static_cast<int32_t>(count)));
  std::error_code full;
  fs::resize_file(path, static_cast<uintmax_t>(kShardHeaderBytes + count * 4), full);
  if (full) GTEST_SKIP() << "no sparse file of 4 GiB here: " << full.message();

  const int64_t T = 100, place = count / T * T - 3 * T;  // three sequences before the end
  ASSERT_GT(place * 4, int64_t{1} << 32);
  std::string tokens;
  for (uint32_t token = 0; token <= 200; token++) append_integer(tokens, 7000 + token, 4);
  {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(kShardHeaderBytes + place * 4);
    file << tokens;
  }

  const TokenShards shards(pattern(), T, 7151);
  EXPECT_FALSE(shards.all_tokens_checked());
  Batch row(1, T);
  shards.read_sequence(place / T, row.inputs.data(), row.targets.data());
  EXPECT_EQ(row.inputs.front(), 7000);
  EXPECT_EQ(row.inputs.back(), 7099);
  EXPECT_EQ(row.targets.back(), 7100);

  // Too large for the scan at opening, so the next sequence is the first to meet an id outside the
  // vocabulary.
  expect_parts(error_of([&] { shards.read_sequence(place / T + 1, row.inputs.data(), row.targets.data()); }),
               {"sparse.bin", "token " + std::to_string(place + 151), "id 7151", "vocabulary size 7151"});
}

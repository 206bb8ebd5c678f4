// Token data: shards on disk -> batches of (inputs, targets).
//
// A shard is a file in llm.c's layout, little endian:
//   256 int32   header: [0] magic, [1] version, [2] number of tokens, rest unused
//   tokens      uint16 each (magic 20240520, version 1) or uint32 each (magic 20240801, version 7)
// scripts/prepare_data.py writes them. A data set is all shards that a glob pattern matches, in the order of
// their names. Each shard is cut into sequences of T+1 tokens at stride T: inputs are the first T tokens of a
// sequence, targets the last T, so no token is a target twice in an epoch.
//
// Reads are plain pread calls: a file that shrinks under us gives an error line, where a memory map would
// give SIGBUS.
//
//   TokenShards   opens and checks a data set, reads one sequence
//   TrainLoader   shuffled batches without end, resumable, for one of several ranks
//   EvalLoader    the first sequences in the order of the file, once
#pragma once

#include <glob.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "xmod/error.h"
#include "xmod/files.h"
#include "xmod/fingerprint.h"
#include "xmod/permutation.h"

namespace xmod {

constexpr int64_t kShardHeaderBytes = 256 * 4;
constexpr int32_t kShardMagicUint16 = 20240520, kShardVersionUint16 = 1;
constexpr int32_t kShardMagicUint32 = 20240801, kShardVersionUint32 = 7;
constexpr int64_t kMaxShardTokens = INT32_MAX;        // the header's count is an int32
constexpr int64_t kFullScanBytes = int64_t{1} << 30;  // larger data sets are not scanned whole at opening
constexpr const char* kShardRemedy = "make it again with scripts/prepare_data.py";

// Unsigned little-endian integer of `width` bytes, whatever the byte order of the machine.
inline uint32_t little_endian(const unsigned char* bytes, int64_t width) {
  uint32_t value = 0;
  for (int64_t i = 0; i < width; i++) value |= static_cast<uint32_t>(bytes[i]) << (8 * i);
  return value;
}

class TokenShards {
 public:
  // pattern: glob of shards; T: sequence length; V: vocabulary size; flag: where the pattern came from, for
  // error lines. Every shard is checked here, and every token too while the data set is small.
  TokenShards(const std::string& pattern, int64_t T, int64_t V, const std::string& flag = "--train-data")
      : T_(T), V_(V), flag_(flag) {
    if (T < 1) fail("sequence length ", T, ": expected 1 or more; set --seq-len");
    int64_t bytes = 0;
    for (const std::string& path : matching_paths(pattern)) {
      const Shard shard = open_shard(path);
      bytes += shard.tokens * shard.width;
      num_tokens_ += shard.tokens;
      num_sequences_ += shard.sequences(T_);
      shards_.push_back(shard);
      sequences_up_to_.push_back(num_sequences_);
    }
    all_tokens_checked_ = bytes <= kFullScanBytes;
    if (all_tokens_checked_) {
      for (const Shard& shard : shards_) check_all_tokens(shard);
    }
  }

  int64_t sequence_length() const { return T_; }
  int64_t num_shards() const { return static_cast<int64_t>(shards_.size()); }
  int64_t num_tokens() const { return num_tokens_; }
  int64_t num_sequences() const { return num_sequences_; }
  // Tokens at the ends of shards that fill no sequence and are never read in training; worth a line to the
  // user. (The first token of a shard is an input only, so n sequences use n*T + 1 tokens.)
  int64_t unused_tokens() const { return num_tokens_ - num_sequences_ * T_ - num_shards(); }
  // False when the data set is too large for a scan at opening: tokens are then checked as they are read.
  bool all_tokens_checked() const { return all_tokens_checked_; }
  const std::string& flag() const { return flag_; }
  const std::string& first_path() const { return shards_.front().path; }
  std::vector<std::string> paths() const {
    std::vector<std::string> all;
    for (const auto& shard : shards_) all.push_back(shard.path);
    return all;
  }

  // For processes that are to read the same: sizes, and a hash of the names of shards and of samples of them.
  std::string fingerprint() const {
    uint64_t hash = kHashStart;
    for (const Shard& shard : shards_) {
      const std::string name = shard.path.substr(shard.path.rfind('/') + 1);
      hash = hash_bytes(name.data(), name.size() + 1, hash);
      hash = hash_samples(shard, hash);
    }
    return detail::concatenate(num_tokens_, " tokens in ", num_shards(), " shards, hash ", show_hash(hash));
  }

  // inputs (T), targets (T). Opens the shard anew: a data set may have more shards than a process may have
  // open files, and an open is cheap beside a training step.
  void read_sequence(int64_t index, int32_t* inputs, int32_t* targets) const {
    const auto past = std::upper_bound(sequences_up_to_.begin(), sequences_up_to_.end(), index);
    const Shard& shard = shards_[static_cast<size_t>(past - sequences_up_to_.begin())];
    const int64_t index_in_shard = index - (*past - shard.sequences(T_));
    std::vector<int32_t> tokens(static_cast<size_t>(T_ + 1));
    read_tokens(open_for_reading(shard.path), shard, index_in_shard * T_, T_ + 1, tokens.data());
    std::copy_n(tokens.data(), T_, inputs);
    std::copy_n(tokens.data() + 1, T_, targets);
  }

 private:
  struct Shard {
    std::string path;
    int64_t tokens;
    int64_t width;  // bytes per token: 2 or 4
    int64_t sequences(int64_t T) const { return (tokens - 1) / T; }
  };

  // Of up to 64 places all over a shard.
  static uint64_t hash_samples(const Shard& shard, uint64_t hash) {
    constexpr int64_t kSamples = 64, kBytes = 4096;
    const FileDescriptor file = open_for_reading(shard.path);
    const int64_t size = kShardHeaderBytes + shard.tokens * shard.width;
    const int64_t step = std::max(kBytes, size / kSamples);
    char bytes[kBytes];
    for (int64_t first = 0; first < size; first += step) {
      const int64_t n = std::min(kBytes, size - first);
      read_fully_at(file, bytes, n, first, shard.path);
      hash = hash_bytes(bytes, static_cast<size_t>(n), hash);
    }
    return hash;
  }

  std::vector<std::string> matching_paths(const std::string& pattern) const {
    if (path_exists(pattern)) return {pattern};  // perhaps a name with a character such as '[' in it
    glob_t found{};
    std::vector<std::string> paths;
    if (glob(pattern.c_str(), 0, nullptr, &found) == 0) {
      paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
    }
    globfree(&found);
    std::sort(paths.begin(), paths.end());  // glob's own order depends on the locale
    if (paths.empty()) {
      fail(flag_, " '", pattern,
           "': no file matches, expected token shards; check the pattern (quoted, so that ",
           "the shell leaves it alone) or make shards with scripts/prepare_data.py");
    }
    return paths;
  }

  Shard open_shard(const std::string& path) const {
    const FileDescriptor file = open_for_reading(path);
    const int64_t size = file_size(file, path);
    if (size == 0) fail(path, ": empty file, expected a token shard; ", kShardRemedy);
    if (size < kShardHeaderBytes) {
      fail(path, ": truncated header: have ", size, " bytes, expected ", kShardHeaderBytes, "; ",
           kShardRemedy);
    }
    unsigned char header[3 * 4];
    read_fully_at(file, header, sizeof header, 0, path);
    const int32_t magic = static_cast<int32_t>(little_endian(header, 4));
    const int32_t version = static_cast<int32_t>(little_endian(header + 4, 4));
    const int32_t tokens = static_cast<int32_t>(little_endian(header + 8, 4));
    const Shard shard{path, tokens, token_width(path, magic, version)};
    check_size(shard, size);
    if (shard.tokens < T_ + 1) {
      fail(path, ": ", shard.tokens, " tokens, expected at least ", T_ + 1, " (one sequence of --seq-len ",
           T_, " and its last target); lower --seq-len or give ", flag_, " larger shards");
    }
    return shard;
  }

  static int64_t token_width(const std::string& path, int32_t magic, int32_t version) {
    const bool narrow = magic == kShardMagicUint16;
    if (!narrow && magic != kShardMagicUint32) {
      fail(path, ": magic number ", magic, ", expected ", kShardMagicUint16, " (uint16 tokens) or ",
           kShardMagicUint32, " (uint32 tokens); this is no token shard: ", kShardRemedy);
    }
    const int32_t expected = narrow ? kShardVersionUint16 : kShardVersionUint32;
    if (version != expected) {
      fail(path, ": version ", version, ", expected ", expected, " with magic number ", magic, "; ",
           kShardRemedy);
    }
    return narrow ? 2 : 4;
  }

  static void check_size(const Shard& shard, int64_t size) {
    const int64_t held = (size - kShardHeaderBytes) / shard.width;
    if (shard.tokens < 0 || held > kMaxShardTokens) {
      fail(shard.path, ": header counts ", shard.tokens, " tokens and the file holds ", held,
           ", expected 0 to ", kMaxShardTokens, " in one shard; split it (prepare_data.py --shard-tokens)");
    }
    const int64_t expected = kShardHeaderBytes + shard.tokens * shard.width;
    if (size != expected) {
      fail(shard.path, size < expected ? ": truncated: have " : ": over-long: have ", size,
           " bytes, expected ", expected, " (", kShardHeaderBytes, " + ", shard.tokens, " tokens of ",
           shard.width, " bytes); ", kShardRemedy);
    }
  }

  void check_all_tokens(const Shard& shard) const {
    const FileDescriptor file = open_for_reading(shard.path);
    const int64_t chunk = int64_t{1} << 18;
    std::vector<int32_t> tokens(static_cast<size_t>(std::min(chunk, shard.tokens)));
    for (int64_t first = 0; first < shard.tokens; first += chunk) {
      read_tokens(file, shard, first, std::min(chunk, shard.tokens - first), tokens.data());
    }
  }

  // tokens (count): those of the shard from `first` on. No id >= V gets past here.
  void read_tokens(const FileDescriptor& file, const Shard& shard, int64_t first, int64_t count,
                   int32_t* tokens) const {
    std::vector<unsigned char> bytes(static_cast<size_t>(count * shard.width));
    read_fully_at(file, bytes.data(), count * shard.width, kShardHeaderBytes + first * shard.width,
                  shard.path);
    for (int64_t i = 0; i < count; i++) {
      const uint32_t id = little_endian(bytes.data() + i * shard.width, shard.width);
      if (id >= V_) {
        fail(shard.path, ": token ", first + i, " has id ", id, ", expected less than the vocabulary size ",
             V_, "; set --vocab-size to that of the tokenizer which made the shard, or ", kShardRemedy);
      }
      tokens[i] = static_cast<int32_t>(id);
    }
  }

  int64_t T_;
  int64_t V_;
  std::string flag_;
  std::vector<Shard> shards_;
  std::vector<int64_t> sequences_up_to_;  // (shards): running total, each shard included
  int64_t num_tokens_ = 0;
  int64_t num_sequences_ = 0;
  bool all_tokens_checked_ = false;
};

// Where a TrainLoader stands: all that a checkpoint needs. `position` counts sequences of the epoch that the
// batches so far have used up, over all ranks.
struct TrainLoaderState {
  uint64_t seed = 0;
  int64_t epoch = 0;
  int64_t position = 0;
  int64_t num_sequences = 0;
};

// Batches without end. Epoch after epoch, the sequences of the data set stand in a line, each epoch in an
// order of its own that depends on (seed, epoch) only. A step takes the next num_ranks * B of them, also
// across the border of an epoch; rank r gets the B from r * B on. So R ranks with batch B see together what
// one rank with batch R * B sees, nothing is dropped, and nothing is seen twice within an epoch.
class TrainLoader {
 public:
  TrainLoader(TokenShards shards, int64_t B, uint64_t seed, int64_t rank = 0, int64_t num_ranks = 1)
      : shards_(std::move(shards)), B_(B), rank_(rank), num_ranks_(num_ranks) {
    if (B < 1) fail("batch size ", B, ": expected 1 or more; set --batch-size");
    state_.seed = seed;
    state_.num_sequences = shards_.num_sequences();
  }

  const TokenShards& shards() const { return shards_; }
  const TrainLoaderState& state() const { return state_; }

  // Continues where `saved` was taken, with its seed; the batch size and number of ranks may have changed.
  void restore(const TrainLoaderState& saved) {
    if (saved.num_sequences != shards_.num_sequences()) {
      fail(shards_.flag(), ": ", shards_.num_sequences(), " sequences of ", shards_.sequence_length(),
           " tokens, but the checkpoint was trained on ", saved.num_sequences,
           "; resume with the same data, or start a new run without --resume");
    }
    if (saved.epoch < 0 || saved.position < 0 || saved.position >= saved.num_sequences) {
      fail("checkpoint: data position ", saved.position, " in epoch ", saved.epoch, ", expected 0 to ",
           saved.num_sequences - 1, " in epoch 0 or later; the checkpoint is damaged: resume from another");
    }
    state_ = saved;
  }

  // inputs (B, T), targets (B, T)
  void next_batch(int32_t* inputs, int32_t* targets) {
    const int64_t T = shards_.sequence_length();
    for (int64_t b = 0; b < B_; b++) {
      shards_.read_sequence(sequence_ahead(rank_ * B_ + b), inputs + b * T, targets + b * T);
    }
    state_.position += num_ranks_ * B_;
    state_.epoch += state_.position / state_.num_sequences;
    state_.position %= state_.num_sequences;
  }

 private:
  // The sequence `steps` places down the line from here, perhaps in a later epoch.
  int64_t sequence_ahead(int64_t steps) const {
    const int64_t place = state_.position + steps;
    const int64_t epoch = state_.epoch + place / state_.num_sequences;
    const Permutation order(state_.num_sequences, state_.seed, static_cast<uint64_t>(epoch));
    return order(place % state_.num_sequences);
  }

  TokenShards shards_;
  int64_t B_;
  int64_t rank_;
  int64_t num_ranks_;
  TrainLoaderState state_;
};

// The first sequences of a data set in the order of its files, once per reset.
class EvalLoader {
 public:
  // max_sequences: how many at most; the data set may have fewer
  EvalLoader(TokenShards shards, int64_t B, int64_t max_sequences = INT64_MAX)
      : shards_(std::move(shards)), B_(B), num_sequences_(std::min(max_sequences, shards_.num_sequences())) {
    if (B < 1) fail("batch size ", B, ": expected 1 or more; set --batch-size");
    if (max_sequences < 1)
      fail("evaluation over ", max_sequences, " sequences; set --eval-batches to 1 or more");
  }

  const TokenShards& shards() const { return shards_; }
  int64_t num_sequences() const { return num_sequences_; }
  void reset() { position_ = 0; }
  void skip_batch() { position_ += std::min(B_, num_sequences_ - position_); }
  int64_t num_batches() const { return (num_sequences_ + B_ - 1) / B_; }

  // inputs (B, T), targets (B, T); returns the number of rows written: B, fewer in the last batch, then 0.
  int64_t next_batch(int32_t* inputs, int32_t* targets) {
    const int64_t T = shards_.sequence_length();
    const int64_t rows = std::min(B_, num_sequences_ - position_);
    for (int64_t b = 0; b < rows; b++) {
      shards_.read_sequence(position_ + b, inputs + b * T, targets + b * T);
    }
    position_ += rows;
    return rows;
  }

 private:
  TokenShards shards_;
  int64_t B_;
  int64_t num_sequences_;
  int64_t position_ = 0;
};

}  // namespace xmod

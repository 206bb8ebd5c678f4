// Evaluation files: the items of one task, as token ids.
//
// The layout is llm.c's for multiple choice, little endian:
//   256 int32   header: [0] magic 20240522, [1] version: 1 for uint16, 2 (ours) for uint32, [2] number of
//   items,
//               [3] bytes of the longest item; all 0 in a file of llm.c: [4] task, [5] and [6] low and high
//               half of the tokenizer's fingerprint, [7] 1 if byte lengths follow the items
//   items       numbers of that width: a mark (the largest number), bytes of the item, its index, the right
//               choice, number of choices; number of tokens and tokens of the context, and of each choice
//   lengths     a number for each choice of each item: the bytes of its text, by which likelihoods are
//   normalised
// scripts/prepare_eval.py writes them. llm.c's own files say neither whose tokens they hold nor how long the
// texts are: ids are then checked against the vocabulary only, and likelihoods normalised by tokens.
#pragma once

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "dataloader.h"
#include "xmod/error.h"
#include "xmod/files.h"
#include "xmod/fingerprint.h"
#include "xmod/tokenizer.h"

namespace xmod {

enum class Task : int32_t { unnamed, hellaswag, arc_easy, arc_challenge, piqa, lambada, boolq };

struct TaskTraits {
  const char* name;
  const char* column;  // of the paper's tables, in the order of their columns
  bool normalised;     // lm-evaluation-harness reports acc_norm as well
};

inline const TaskTraits& traits(Task task) {
  static constexpr TaskTraits kTraits[] = {
      {"", "", true},
      {"hellaswag", "Hella.", true},
      {"arc-easy", "ARC-e", true},
      {"arc-challenge", "ARC-c", true},
      {"piqa", "PIQA", true},
      {"lambada", "LAMB.", false},
      {"boolq", "BoolQ", false},
  };
  return kTraits[static_cast<size_t>(task)];
}

struct TaskChoice {
  std::vector<int32_t> tokens;
  int64_t length = 0;  // by which its log-likelihood is normalised: bytes of its text, or tokens
};

struct TaskItem {
  std::vector<int32_t> context;     // one token at least
  std::vector<TaskChoice> choices;  // two at least; one in lambada: the last word
  int64_t gold = 0;                 // the right one
};

struct TaskFile {
  std::string path = {};
  std::string name = {};  // of the task; of the file, if that does not say its task
  Task task = Task::unnamed;
  bool lengths_in_bytes = false;
  std::vector<TaskItem> items = {};

  int64_t num_choices() const {
    int64_t n = 0;
    for (const TaskItem& item : items) n += static_cast<int64_t>(item.choices.size());
    return n;
  }
};

// FNV-1a over the length byte and the bytes of each token: what tells vocabularies apart.
inline uint64_t fingerprint(const Tokenizer& tokenizer) {
  uint64_t hash = kHashStart;
  for (int32_t id = 0; id < tokenizer.vocab_size(); id++) {
    const std::string_view token = tokenizer.token(id);
    const auto length = static_cast<unsigned char>(token.size());
    hash = hash_bytes(token.data(), token.size(), hash_bytes(&length, 1, hash));
  }
  return hash;
}

// Opens a file and checks its header; read_items() checks and reads the rest.
class TaskFileReader {
 public:
  explicit TaskFileReader(const std::string& path) : path_(path), bytes_(read_file(path, kLargestFile)) {
    if (size() < kHeaderBytes) {
      fail(path, ": truncated header: have ", size(), " bytes, expected ", kHeaderBytes, "; ", kRemedy);
    }
    if (header(0) != kMagic) {
      fail(path, ": magic number ", header(0), ", expected ", kMagic,
           "; this is no evaluation file: ", kRemedy);
    }
    if (header(1) != 1 && header(1) != 2) {
      fail(path, ": version ", header(1), ", expected 1 (uint16) or 2 (uint32); ", kRemedy);
    }
    if (header(2) < 1) fail(path, ": ", header(2), " items, expected 1 or more; ", kRemedy);
    if (header(4) < 0 || header(4) > static_cast<int32_t>(Task::boolq)) {
      fail(path, ": task number ", header(4), ", expected 0 to ", static_cast<int32_t>(Task::boolq), "; ",
           kRemedy);
    }
    if (header(7) != 0 && header(7) != 1) {
      fail(path, ": header field 7 is ", header(7), ", expected 0 or 1 (byte lengths follow); ", kRemedy);
    }
    width_ = header(1) == 1 ? 2 : 4;
    mark_ = header(1) == 1 ? 0xffff : 0xffffffff;
  }

  // Of the tokenizer that made the file; 0: not stated.
  uint64_t tokenizer_fingerprint() const {
    return static_cast<uint32_t>(header(5)) | static_cast<uint64_t>(static_cast<uint32_t>(header(6))) << 32;
  }

  void require_tokenizer(const Tokenizer& tokenizer) const {
    if (tokenizer_fingerprint() == fingerprint(tokenizer)) return;
    fail(path_, ": its tokens are those of another tokenizer (fingerprint ",
         show_hash(tokenizer_fingerprint()), ", expected ", show_hash(fingerprint(tokenizer)),
         "); make it with scripts/prepare_eval.py and --tokenizer-dir CHECKPOINT, for this checkpoint");
  }

  // V: vocabulary size; every id is less than that afterwards.
  TaskFile read_items(int64_t V) {
    TaskFile file{
        .path = path_, .name = traits(task()).name, .task = task(), .lengths_in_bytes = header(7) == 1};
    if (task() == Task::unnamed) file.name = std::filesystem::path(path_).stem().string();
    next_ = kHeaderBytes;
    for (item_ = 0; item_ < header(2); item_++) file.items.push_back(read_item(V));
    if (file.lengths_in_bytes) read_lengths(file.items);
    if (next_ != size()) {
      fail(path_, ": over-long: have ", size(), " bytes, expected ", next_, " for ", header(2), " items; ",
           kRemedy);
    }
    return file;
  }

 private:
  static constexpr int32_t kMagic = 20240522;
  static constexpr int64_t kHeaderBytes = 256 * 4, kLargestFile = int64_t{1} << 31;
  static constexpr const char* kRemedy = "make it again with scripts/prepare_eval.py";

  int64_t size() const { return static_cast<int64_t>(bytes_.size()); }
  const unsigned char* at(int64_t offset) const {
    return reinterpret_cast<const unsigned char*>(bytes_.data()) + offset;
  }
  int32_t header(int64_t field) const { return static_cast<int32_t>(little_endian(at(4 * field), 4)); }
  Task task() const { return static_cast<Task>(header(4)); }

  uint32_t read_number() {
    if (next_ + width_ > size()) {
      fail(path_, ": truncated: have ", size(), " bytes, which end within item ", item_, " of ", header(2),
           "; ", kRemedy);
    }
    const uint32_t number = little_endian(at(next_), width_);
    next_ += width_;
    return number;
  }

  TaskItem read_item(int64_t V) {
    const int64_t begin = next_;
    if (read_number() != mark_) fail_item("does not begin with the mark ", mark_);
    const int64_t stated_bytes = read_number();
    read_number();  // its index
    TaskItem item;
    item.gold = read_number();
    const int64_t choices = read_number();
    require_choices(choices, item.gold);
    item.context = read_tokens(V, "context");
    for (int64_t i = 0; i < choices; i++) {
      std::vector<int32_t> tokens = read_tokens(V, "choice");
      const int64_t length = static_cast<int64_t>(tokens.size());
      item.choices.push_back({std::move(tokens), length});
    }
    if (next_ - begin != stated_bytes) {
      fail_item("has ", next_ - begin, " bytes, but says that they are ", stated_bytes);
    }
    return item;
  }

  void require_choices(int64_t choices, int64_t gold) const {
    if (task() == Task::lambada && choices != 1)
      fail_item("has ", choices, " choices, expected 1: the last word");
    if (task() != Task::lambada && choices < 2) fail_item("has ", choices, " choices, expected 2 or more");
    if (gold >= choices)
      fail_item("has ", choices, " choices, but the right one is number ", gold, " from 0");
  }

  std::vector<int32_t> read_tokens(int64_t V, const char* what) {
    const int64_t count = read_number();
    if (count == 0) fail_item("has an empty ", what, ", expected 1 token or more");
    std::vector<int32_t> tokens;
    for (int64_t i = 0; i < count; i++) {
      const uint32_t id = read_number();
      if (id >= V) {
        fail(path_, ": item ", item_, " has a token of id ", id,
             ", expected less than the model's vocabulary size ", V,
             "; make it with scripts/prepare_eval.py and --tokenizer-dir CHECKPOINT, for this checkpoint");
      }
      tokens.push_back(static_cast<int32_t>(id));
    }
    return tokens;
  }

  void read_lengths(std::vector<TaskItem>& items) {
    item_ = 0;
    for (TaskItem& item : items) {
      for (TaskChoice& choice : item.choices) {
        choice.length = read_number();
        if (choice.length == 0) fail_item("has a choice of 0 bytes, expected 1 or more");
      }
      item_++;
    }
  }

  template <class... Parts>
  [[noreturn]] void fail_item(const Parts&... parts) const {
    fail(path_, ": item ", item_, " ", parts..., "; ", kRemedy);
  }

  std::string path_, bytes_;
  int64_t width_ = 0;  // bytes of a number
  uint32_t mark_ = 0;
  int64_t next_ = 0;  // where the next number begins
  int64_t item_ = 0;  // that is being read
};

}  // namespace xmod

// Text <-> token ids, by byte-level BPE.
//
// A vocabulary is a list of byte strings; the id of a token is its place in the list. Encoding cuts the text
// into pieces (words, numbers, punctuation, white space: the pre-split), starts each piece as single bytes
// and merges, again and again, the two neighbours whose concatenation is the token with the lowest id. That
// is BPE, because ids stand in the order in which training made the merges. Any bytes can be encoded and come
// back exactly, valid UTF-8 or not.
//
// The vocabulary lies beside the token shards as `tokenizer.bin`, llm.c's layout, little endian:
//   256 int32   header: [0] magic 20240328, [1] version 2, [2] number of tokens n, [3] id of the end-of-text
//               token or -1, [4] pre-split: 0 not stated, 1 GPT-2's, 2 cl100k's, 3 Qwen's (llm.c leaves it 0
//               and knows GPT-2 only, so 0 means 1)
//   n times     one byte: length, then so many bytes. Length 0: an id that stands for no text.
// Without a file, a token is a byte.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iterator>
#include <queue>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "xmod/error.h"
#include "xmod/files.h"

namespace xmod {

enum class PreSplit : int32_t { gpt2 = 1, cl100k = 2, qwen = 3 };

// Length of the first piece of `text`, which is not empty.
inline size_t first_piece(std::string_view text, PreSplit split);

class Tokenizer {
 public:
  // The 256 bytes, no end-of-text token.
  static Tokenizer bytes() {
    Tokenizer tokenizer;
    for (int byte = 0; byte < 256; byte++) tokenizer.add_token(std::string(1, static_cast<char>(byte)));
    return tokenizer;
  }

  static Tokenizer load(const std::string& path) {
    const std::string file = read_file(path);
    const int64_t header_bytes = 256 * 4, size = static_cast<int64_t>(file.size());
    if (size < header_bytes) {
      fail(path, ": truncated header: have ", size, " bytes, expected ", header_bytes, "; ", kRemedy);
    }
    const auto [magic, version, count, eot, split] = header(file);
    if (magic != kMagic) fail(path, ": magic number ", magic, ", expected ", kMagic, "; ", kRemedy);
    if (version != kVersion) fail(path, ": version ", version, ", expected ", kVersion, "; ", kRemedy);
    if (count < 1) fail(path, ": ", count, " tokens, expected 1 or more; ", kRemedy);
    if (eot < -1 || eot >= count) {
      fail(path, ": end-of-text token ", eot, ", expected -1 to ", count - 1, "; ", kRemedy);
    }
    if (split < 0 || split > 3) fail(path, ": pre-split ", split, ", expected 0 to 3; ", kRemedy);

    Tokenizer tokenizer;
    tokenizer.eot_ = eot;
    tokenizer.split_ = split == 0 ? PreSplit::gpt2 : PreSplit{split};
    int64_t next = header_bytes;
    for (int32_t id = 0; id < count; id++) {
      const int64_t length = next < size ? static_cast<unsigned char>(file[next]) : 0;
      if (next >= size || next + 1 + length > size) {
        fail(path, ": truncated: ends within token ", id, ", expected ", count, " tokens; ", kRemedy);
      }
      tokenizer.add_token(file.substr(next + 1, length));
      next += 1 + length;
    }
    if (next != size) {
      fail(path, ": over-long: have ", size, " bytes, expected ", next, " for ", count, " tokens; ", kRemedy);
    }
    return tokenizer;
  }

  int64_t vocab_size() const { return static_cast<int64_t>(tokens_.size()); }
  int32_t eot() const { return eot_; }  // -1: none

  // The bytes of one token: a part of a character, perhaps. A model may have more ids than the tokenizer (a
  // vocabulary rounded up); those show as the replacement character.
  std::string_view token(int32_t id) const {
    if (id < 0 || id >= vocab_size()) return "\xEF\xBF\xBD";
    return tokens_[static_cast<size_t>(id)];
  }

  std::string decode(const std::vector<int32_t>& ids) const {
    std::string text;
    for (int32_t id : ids) text += token(id);
    return text;
  }

  // `<|endoftext|>` in the text is text: only the caller can mean the end-of-text token.
  std::vector<int32_t> encode(std::string_view text) const {
    std::vector<int32_t> ids;
    while (!text.empty()) {
      const size_t length = first_piece(text, split_);
      encode_piece(text.substr(0, length), ids);
      text.remove_prefix(length);
    }
    return ids;
  }

 private:
  static constexpr int32_t kMagic = 20240328, kVersion = 2;
  static constexpr const char* kRemedy = "make it again with scripts/prepare_data.py";
  static constexpr int32_t kNone = -1;

  struct Header {
    int32_t magic, version, count, eot, split;
  };
  static Header header(const std::string& file) {
    const auto field = [&](size_t index) {
      uint32_t value = 0;
      for (size_t i = 0; i < 4; i++)
        value |= uint32_t{static_cast<unsigned char>(file[4 * index + i])} << 8 * i;
      return static_cast<int32_t>(value);
    };
    return {field(0), field(1), field(2), field(3), field(4)};
  }

  void add_token(const std::string& token) {
    const int32_t id = static_cast<int32_t>(tokens_.size());
    tokens_.push_back(token);
    if (!token.empty() && id != eot_) ids_.emplace(token, id);
  }

  int32_t id_of(std::string_view token) const {
    const auto found = ids_.find(token);
    return found == ids_.end() ? kNone : found->second;
  }

  // Appends the ids of one piece. The parts of the piece form a linked list over their first bytes; a queue
  // holds the possible merges, lowest id first, leftmost first among equals: O(n log n), however long a
  // piece.
  void encode_piece(std::string_view piece, std::vector<int32_t>& ids) const {
    if (const int32_t id = id_of(piece); id != kNone) return ids.push_back(id);

    const size_t size = piece.size();
    std::vector<size_t> end(size);    // end[i]: end of the part that begins at byte i; 0 if none begins there
    std::vector<size_t> begin(size);  // begin[e - 1]: begin of the part that ends at byte e
    using Merge = std::tuple<int32_t, size_t, size_t>;  // (id, begin, end)
    std::priority_queue<Merge, std::vector<Merge>, std::greater<>> merges;
    const auto consider = [&](size_t first, size_t last) {
      const int32_t id = id_of(piece.substr(first, last - first));
      if (id != kNone) merges.emplace(id, first, last);
    };
    for (size_t i = 0; i < size; i++) end[i] = i + 1, begin[i] = i;
    for (size_t i = 0; i + 1 < size; i++) consider(i, i + 2);

    while (!merges.empty()) {
      const auto [id, first, last] = merges.top();
      merges.pop();
      const size_t middle = end[first];
      if (middle == 0 || middle >= last || end[middle] != last)
        continue;  // a part has been merged away since
      end[first] = last;
      end[middle] = 0;
      begin[last - 1] = first;
      if (first > 0) consider(begin[first - 1], last);
      if (last < size) consider(first, end[last]);
    }

    for (size_t i = 0; i < size; i = end[i]) {
      const int32_t id = id_of(piece.substr(i, end[i] - i));
      if (id == kNone) {
        fail("the tokenizer has no token for byte ", static_cast<int>(static_cast<unsigned char>(piece[i])),
             ", expected one for each of the 256 bytes; ", kRemedy);
      }
      ids.push_back(id);
    }
  }

  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };

  std::vector<std::string> tokens_;
  std::unordered_map<std::string, int32_t, Hash, std::equal_to<>> ids_;  // all but the end-of-text token
  int32_t eot_ = -1;
  PreSplit split_ = PreSplit::gpt2;
};

// -------------------------------------------------------------------------------------------- pre-split
// The regular expressions of GPT-2, cl100k and Qwen, by hand. Letters and numbers are Unicode's general
// categories L and N, white space is its property White_Space; a byte that is not valid UTF-8 counts as
// punctuation.

enum class CharKind { letter, number, space, newline, other, none };

struct Char {
  CharKind kind;  // none: the end of the text
  size_t end;     // where the next character begins
};

inline Char char_at(std::string_view text, size_t begin);

inline bool is_white(CharKind kind) {
  return kind == CharKind::space || kind == CharKind::newline;
}

// End of the run of characters of one kind that begins here, of at most `longest` of them.
inline size_t run_end(std::string_view text, size_t begin, CharKind kind, int64_t longest = INT64_MAX) {
  for (; longest > 0; longest--) {
    const Char next = char_at(text, begin);
    if (next.kind != kind) break;
    begin = next.end;
  }
  return begin;
}

// Length of 's 't 'd 'm 'll 've 're at the beginning of the text, else 0.
inline size_t contraction(std::string_view text, bool any_case) {
  if (text[0] != '\'') return 0;
  for (std::string_view ending : {"s", "t", "d", "m", "ll", "ve", "re"}) {
    const std::string_view found = text.substr(1, ending.size());
    const auto same = [&](char a, char b) {
      return a == b || (any_case && a >= 'A' && a <= 'Z' && a - 'A' + 'a' == b);
    };
    if (std::equal(found.begin(), found.end(), ending.begin(), ending.end(), same)) return 1 + ending.size();
  }
  return 0;
}

// White space: for Qwen up to its last line break, if it has one; all of it at the end of the text; for
// cl100k up to its last line break; else all but the last character, which belongs to the word that follows,
// if there is more than one.
inline size_t white_piece(std::string_view text, PreSplit split) {
  size_t end = 0, last = 0, last_line = 0;
  for (Char next = char_at(text, 0); is_white(next.kind); next = char_at(text, end)) {
    last = end;
    end = next.end;
    if (next.kind == CharKind::newline) last_line = end;
  }
  if (split == PreSplit::qwen && last_line > 0) return last_line;
  if (end == text.size()) return end;
  if (split == PreSplit::cl100k && last_line > 0) return last_line;
  return last > 0 ? last : end;
}

// '(?:[sdmt]|ll|ve|re) | ?\p{L}+ | ?\p{N}+ | ?[^\s\p{L}\p{N}]+ |\s+$|\s+(?!\S)|\s
inline size_t gpt2_piece(std::string_view text) {
  if (const size_t length = contraction(text, false)) return length;
  const size_t word = text[0] == ' ' ? 1 : 0;
  const CharKind kind = char_at(text, word).kind;
  if (kind == CharKind::none || is_white(kind)) return white_piece(text, PreSplit::gpt2);
  return run_end(text, word, kind);
}

// '(?i:[sdmt]|ll|ve|re) |[^\r\n\p{L}\p{N}]?\p{L}+ |\p{N}{1,3} | ?[^\s\p{L}\p{N}]+[\r\n]*
// |\s+$|\s*[\r\n]|\s+(?!\S)|\s
// Qwen's has \p{N} in the place of \p{N}{1,3}, and |\s*[\r\n]+|\s+(?!\S)|\s+ at its end.
inline size_t cl100k_piece(std::string_view text, PreSplit split = PreSplit::cl100k) {
  if (const size_t length = contraction(text, true)) return length;
  const Char first = char_at(text, 0);
  const bool may_lead = first.kind == CharKind::space || first.kind == CharKind::other;
  const size_t word = may_lead ? first.end : 0;
  if (char_at(text, word).kind == CharKind::letter) return run_end(text, word, CharKind::letter);
  const int64_t digits = split == PreSplit::qwen ? 1 : 3;
  if (first.kind == CharKind::number) return run_end(text, 0, CharKind::number, digits);
  const size_t sign = text[0] == ' ' ? 1 : 0;
  const size_t signs_end = run_end(text, sign, CharKind::other);
  if (signs_end > sign) return run_end(text, signs_end, CharKind::newline);
  return white_piece(text, split);
}

inline size_t first_piece(std::string_view text, PreSplit split) {
  return split == PreSplit::gpt2 ? gpt2_piece(text) : cl100k_piece(text, split);
}

// --------------------------------------------------------------------------------------- characters' kinds

// The code point at `begin` and its length; length 0 where the bytes are not UTF-8, or an overlong form of
// it. (Surrogates and codes beyond Unicode pass: they have no kind, so they count as punctuation all the
// same.)
inline std::pair<char32_t, size_t> utf8_at(std::string_view text, size_t begin) {
  const auto byte = [&](size_t i) -> uint32_t {
    return begin + i < text.size() ? static_cast<unsigned char>(text[begin + i]) : 0;
  };
  const uint32_t lead = byte(0);
  if (lead < 0x80) return {lead, 1};
  const size_t length = lead >= 0xF0 ? 4 : lead >= 0xE0 ? 3 : 2;
  char32_t code = lead & (0x7F >> length);
  for (size_t i = 1; i < length; i++) {
    if ((byte(i) & 0xC0) != 0x80) return {0, 0};
    code = code << 6 | (byte(i) & 0x3F);
  }
  const char32_t smallest = length == 4 ? 0x10000 : length == 3 ? 0x800 : 0x80;
  if (lead < 0xC0 || lead > 0xF7 || code < smallest) return {0, 0};
  return {code, length};
}

// borders, ascending: code points belong to the set from the first border on, no longer from the second, ...
template <size_t N>
bool in_ranges(const char32_t (&borders)[N], char32_t code) {
  const auto next = std::upper_bound(std::begin(borders), std::end(borders), code);
  return (next - std::begin(borders)) % 2 == 1;
}

inline bool is_letter(char32_t code);
inline bool is_number(char32_t code);

inline bool is_unicode_space(char32_t code) {
  return code == 0x85 || code == 0xA0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200A) ||
         code == 0x2028 || code == 0x2029 || code == 0x202F || code == 0x205F || code == 0x3000;
}

inline CharKind ascii_kind(char32_t code) {
  if (code == '\n' || code == '\r') return CharKind::newline;
  if (code == ' ' || (code >= '\t' && code <= '\r')) return CharKind::space;
  if (code >= '0' && code <= '9') return CharKind::number;
  if ((code >= 'a' && code <= 'z') || (code >= 'A' && code <= 'Z')) return CharKind::letter;
  return CharKind::other;
}

inline Char char_at(std::string_view text, size_t begin) {
  if (begin >= text.size()) return {CharKind::none, begin};
  const auto [code, length] = utf8_at(text, begin);
  if (length == 0) return {CharKind::other, begin + 1};
  const size_t end = begin + length;
  if (code < 0x80) return {ascii_kind(code), end};
  if (is_letter(code)) return {CharKind::letter, end};
  if (is_number(code)) return {CharKind::number, end};
  return {is_unicode_space(code) ? CharKind::space : CharKind::other, end};
}

// Unicode 16's general categories L and N beyond ASCII, as borders. Code points that are not assigned may lie
// within a range: that joins many short ranges and costs nothing.
inline constexpr char32_t kLetterBorders[] = {
    0xAA,    0xAB,    0xB5,    0xB6,    0xBA,    0xBB,    0xC0,    0xD7,    0xD8,    0xF7,    0xF8,
    0x2C2,   0x2C6,   0x2D2,   0x2E0,   0x2E5,   0x2EC,   0x2ED,   0x2EE,   0x2EF,   0x370,   0x375,
    0x376,   0x37E,   0x37F,   0x380,   0x386,   0x387,   0x388,   0x3F6,   0x3F7,   0x482,   0x48A,
    0x55A,   0x560,   0x589,   0x5D0,   0x5F3,   0x620,   0x64B,   0x66E,   0x670,   0x671,   0x6D4,
    0x6D5,   0x6D6,   0x6E5,   0x6E7,   0x6EE,   0x6F0,   0x6FA,   0x6FD,   0x6FF,   0x700,   0x710,
    0x711,   0x712,   0x730,   0x74D,   0x7A6,   0x7B1,   0x7B2,   0x7CA,   0x7EB,   0x7F4,   0x7F6,
    0x7FA,   0x7FB,   0x800,   0x816,   0x81A,   0x81B,   0x824,   0x825,   0x828,   0x829,   0x840,
    0x859,   0x860,   0x888,   0x889,   0x88F,   0x8A0,   0x8CA,   0x904,   0x93A,   0x93D,   0x93E,
    0x950,   0x951,   0x958,   0x962,   0x971,   0x981,   0x985,   0x9BA,   0x9BD,   0x9BE,   0x9CE,
    0x9CF,   0x9DC,   0x9E2,   0x9F0,   0x9F2,   0x9FC,   0x9FD,   0xA05,   0xA3A,   0xA59,   0xA5F,
    0xA72,   0xA75,   0xA85,   0xABA,   0xABD,   0xABE,   0xAD0,   0xAE2,   0xAF9,   0xAFA,   0xB05,
    0xB3A,   0xB3D,   0xB3E,   0xB5C,   0xB62,   0xB71,   0xB72,   0xB83,   0xBBA,   0xBD0,   0xBD1,
    0xC05,   0xC3A,   0xC3D,   0xC3E,   0xC58,   0xC62,   0xC80,   0xC81,   0xC85,   0xCBA,   0xCBD,
    0xCBE,   0xCDD,   0xCE2,   0xCF1,   0xCF3,   0xD04,   0xD3B,   0xD3D,   0xD3E,   0xD4E,   0xD4F,
    0xD54,   0xD57,   0xD5F,   0xD62,   0xD7A,   0xD80,   0xD85,   0xDC7,   0xE01,   0xE31,   0xE32,
    0xE34,   0xE40,   0xE47,   0xE81,   0xEB1,   0xEB2,   0xEB4,   0xEBD,   0xEC7,   0xEDC,   0xF01,
    0xF40,   0xF6D,   0xF88,   0xF8D,   0x1000,  0x102B,  0x103F,  0x1040,  0x1050,  0x1056,  0x105A,
    0x105E,  0x1061,  0x1062,  0x1065,  0x1067,  0x106E,  0x1071,  0x1075,  0x1082,  0x108E,  0x108F,
    0x10A0,  0x10FB,  0x10FC,  0x135B,  0x1380,  0x1390,  0x13A0,  0x13FE,  0x1401,  0x166D,  0x166F,
    0x1680,  0x1681,  0x169B,  0x16A0,  0x16EB,  0x16F1,  0x1712,  0x171F,  0x1732,  0x1740,  0x1752,
    0x1760,  0x1771,  0x1780,  0x17B4,  0x17D7,  0x17D8,  0x17DC,  0x17DD,  0x1820,  0x1885,  0x1887,
    0x18A9,  0x18AA,  0x191F,  0x1950,  0x19CA,  0x1A00,  0x1A17,  0x1A20,  0x1A55,  0x1AA7,  0x1AA8,
    0x1B05,  0x1B34,  0x1B45,  0x1B4D,  0x1B83,  0x1BA1,  0x1BAE,  0x1BB0,  0x1BBA,  0x1BE6,  0x1C00,
    0x1C24,  0x1C4D,  0x1C50,  0x1C5A,  0x1C7E,  0x1C80,  0x1CC0,  0x1CE9,  0x1CED,  0x1CEE,  0x1CF4,
    0x1CF5,  0x1CF7,  0x1CFA,  0x1DC0,  0x1E00,  0x1FBD,  0x1FBE,  0x1FBF,  0x1FC2,  0x1FCD,  0x1FD0,
    0x1FDC,  0x1FE0,  0x1FED,  0x1FF2,  0x1FFD,  0x2071,  0x2072,  0x207F,  0x2080,  0x2090,  0x209D,
    0x2102,  0x2103,  0x2107,  0x2108,  0x210A,  0x2114,  0x2115,  0x2116,  0x2119,  0x211E,  0x2124,
    0x2125,  0x2126,  0x2127,  0x2128,  0x2129,  0x212A,  0x212E,  0x212F,  0x213A,  0x213C,  0x2140,
    0x2145,  0x214A,  0x214E,  0x214F,  0x2183,  0x2185,  0x2C00,  0x2CE5,  0x2CEB,  0x2CEF,  0x2CF2,
    0x2CF4,  0x2D00,  0x2D70,  0x2D80,  0x2DDF,  0x2E2F,  0x2E30,  0x3005,  0x3007,  0x3031,  0x3036,
    0x303B,  0x303D,  0x3041,  0x3097,  0x309D,  0x30A0,  0x30A1,  0x30FB,  0x30FC,  0x318F,  0x31A0,
    0x31C0,  0x31F0,  0x3200,  0x3400,  0x4DC0,  0x4E00,  0xA48D,  0xA4D0,  0xA4FE,  0xA500,  0xA60D,
    0xA610,  0xA620,  0xA62A,  0xA66F,  0xA67F,  0xA69E,  0xA6A0,  0xA6E6,  0xA717,  0xA720,  0xA722,
    0xA789,  0xA78B,  0xA802,  0xA803,  0xA806,  0xA807,  0xA80B,  0xA80C,  0xA823,  0xA840,  0xA874,
    0xA882,  0xA8B4,  0xA8F2,  0xA8F8,  0xA8FB,  0xA8FC,  0xA8FD,  0xA8FF,  0xA90A,  0xA926,  0xA930,
    0xA947,  0xA960,  0xA97D,  0xA984,  0xA9B3,  0xA9CF,  0xA9D0,  0xA9E0,  0xA9E5,  0xA9E6,  0xA9F0,
    0xA9FA,  0xAA29,  0xAA40,  0xAA43,  0xAA44,  0xAA4C,  0xAA60,  0xAA77,  0xAA7A,  0xAA7B,  0xAA7E,
    0xAAB0,  0xAAB1,  0xAAB2,  0xAAB5,  0xAAB7,  0xAAB9,  0xAABE,  0xAAC0,  0xAAC1,  0xAAC2,  0xAADE,
    0xAAE0,  0xAAEB,  0xAAF2,  0xAAF5,  0xAB01,  0xAB5B,  0xAB5C,  0xAB6A,  0xAB70,  0xABE3,  0xAC00,
    0xD7FC,  0xF900,  0xFB1E,  0xFB1F,  0xFB29,  0xFB2A,  0xFBB2,  0xFBD3,  0xFD3E,  0xFD50,  0xFD90,
    0xFD92,  0xFDC8,  0xFDF0,  0xFDFC,  0xFE70,  0xFEFD,  0xFF21,  0xFF3B,  0xFF41,  0xFF5B,  0xFF66,
    0xFFDD,  0x10000, 0x100FB, 0x10280, 0x102D1, 0x10300, 0x10320, 0x1032D, 0x10341, 0x10342, 0x1034A,
    0x10350, 0x10376, 0x10380, 0x1039E, 0x103A0, 0x103D0, 0x10400, 0x1049E, 0x104B0, 0x10564, 0x10570,
    0x10856, 0x10860, 0x10877, 0x10880, 0x1089F, 0x108E0, 0x108F6, 0x10900, 0x10916, 0x10920, 0x1093A,
    0x10980, 0x109B8, 0x109BE, 0x109C0, 0x10A00, 0x10A01, 0x10A10, 0x10A36, 0x10A60, 0x10A7D, 0x10A80,
    0x10A9D, 0x10AC0, 0x10AC8, 0x10AC9, 0x10AE5, 0x10B00, 0x10B36, 0x10B40, 0x10B56, 0x10B60, 0x10B73,
    0x10B80, 0x10B92, 0x10C00, 0x10CF3, 0x10D00, 0x10D24, 0x10D4A, 0x10D66, 0x10D6F, 0x10D86, 0x10E80,
    0x10EAA, 0x10EB0, 0x10EC5, 0x10F00, 0x10F1D, 0x10F27, 0x10F46, 0x10F70, 0x10F82, 0x10FB0, 0x10FC5,
    0x10FE0, 0x10FF7, 0x11003, 0x11038, 0x11071, 0x11073, 0x11075, 0x11076, 0x11083, 0x110B0, 0x110D0,
    0x110E9, 0x11103, 0x11127, 0x11144, 0x11145, 0x11147, 0x11173, 0x11176, 0x11177, 0x11183, 0x111B3,
    0x111C1, 0x111C5, 0x111DA, 0x111DB, 0x111DC, 0x111DD, 0x11200, 0x1122C, 0x1123F, 0x11241, 0x11280,
    0x112A9, 0x112B0, 0x112DF, 0x11305, 0x1133A, 0x1133D, 0x1133E, 0x11350, 0x11351, 0x1135D, 0x11362,
    0x11380, 0x113B8, 0x113D1, 0x113D2, 0x113D3, 0x113D4, 0x11400, 0x11435, 0x11447, 0x1144B, 0x1145F,
    0x114B0, 0x114C4, 0x114C6, 0x114C7, 0x114C8, 0x11580, 0x115AF, 0x115D8, 0x115DC, 0x11600, 0x11630,
    0x11644, 0x11645, 0x11680, 0x116AB, 0x116B8, 0x116B9, 0x11700, 0x1171B, 0x11740, 0x1182C, 0x118A0,
    0x118E0, 0x118FF, 0x11930, 0x1193F, 0x11940, 0x11941, 0x11942, 0x119A0, 0x119D1, 0x119E1, 0x119E2,
    0x119E3, 0x119E4, 0x11A00, 0x11A01, 0x11A0B, 0x11A33, 0x11A3A, 0x11A3B, 0x11A50, 0x11A51, 0x11A5C,
    0x11A8A, 0x11A9D, 0x11A9E, 0x11AB0, 0x11AF9, 0x11BC0, 0x11BE1, 0x11C00, 0x11C2F, 0x11C40, 0x11C41,
    0x11C72, 0x11C90, 0x11D00, 0x11D31, 0x11D46, 0x11D47, 0x11D60, 0x11D8A, 0x11D98, 0x11D99, 0x11EE0,
    0x11EF3, 0x11F02, 0x11F03, 0x11F04, 0x11F34, 0x11FB0, 0x11FB1, 0x12000, 0x1239A, 0x12480, 0x12544,
    0x12F90, 0x12FF1, 0x13000, 0x13430, 0x13441, 0x13447, 0x13460, 0x1611E, 0x16800, 0x16A5F, 0x16A70,
    0x16ABF, 0x16AD0, 0x16AEE, 0x16B00, 0x16B30, 0x16B40, 0x16B44, 0x16B63, 0x16D6D, 0x16E40, 0x16E80,
    0x16F00, 0x16F4B, 0x16F50, 0x16F51, 0x16F93, 0x16FE2, 0x16FE3, 0x16FE4, 0x17000, 0x1BC9A, 0x1D400,
    0x1D6C1, 0x1D6C2, 0x1D6DB, 0x1D6DC, 0x1D6FB, 0x1D6FC, 0x1D715, 0x1D716, 0x1D735, 0x1D736, 0x1D74F,
    0x1D750, 0x1D76F, 0x1D770, 0x1D789, 0x1D78A, 0x1D7A9, 0x1D7AA, 0x1D7C3, 0x1D7C4, 0x1D7CC, 0x1DF00,
    0x1DF2B, 0x1E030, 0x1E06E, 0x1E100, 0x1E12D, 0x1E137, 0x1E13E, 0x1E14E, 0x1E14F, 0x1E290, 0x1E2AE,
    0x1E2C0, 0x1E2EC, 0x1E4D0, 0x1E4EC, 0x1E5D0, 0x1E5EE, 0x1E5F0, 0x1E5F1, 0x1E7E0, 0x1E8C5, 0x1E900,
    0x1E944, 0x1E94B, 0x1E94C, 0x1EE00, 0x1EEBC, 0x20000, 0x323B0};

inline constexpr char32_t kNumberBorders[] = {
    0xB2,    0xB4,    0xB9,    0xBA,    0xBC,    0xBF,    0x660,   0x66A,   0x6F0,   0x6FA,   0x7C0,
    0x7CA,   0x966,   0x970,   0x9E6,   0x9F0,   0x9F4,   0x9FA,   0xA66,   0xA70,   0xAE6,   0xAF0,
    0xB66,   0xB70,   0xB72,   0xB78,   0xBE6,   0xBF3,   0xC66,   0xC70,   0xC78,   0xC7F,   0xCE6,
    0xCF0,   0xD58,   0xD5F,   0xD66,   0xD79,   0xDE6,   0xDF0,   0xE50,   0xE5A,   0xED0,   0xEDA,
    0xF20,   0xF34,   0x1040,  0x104A,  0x1090,  0x109A,  0x1369,  0x137D,  0x16EE,  0x16F1,  0x17E0,
    0x17FA,  0x1810,  0x181A,  0x1946,  0x1950,  0x19D0,  0x19DB,  0x1A80,  0x1A9A,  0x1B50,  0x1B5A,
    0x1BB0,  0x1BBA,  0x1C40,  0x1C4A,  0x1C50,  0x1C5A,  0x2070,  0x2071,  0x2074,  0x207A,  0x2080,
    0x208A,  0x2150,  0x2183,  0x2185,  0x218A,  0x2460,  0x249C,  0x24EA,  0x2500,  0x2776,  0x2794,
    0x2CFD,  0x2CFE,  0x3007,  0x3008,  0x3021,  0x302A,  0x3038,  0x303B,  0x3192,  0x3196,  0x3220,
    0x322A,  0x3248,  0x3250,  0x3251,  0x3260,  0x3280,  0x328A,  0x32B1,  0x32C0,  0xA620,  0xA62A,
    0xA6E6,  0xA6F0,  0xA830,  0xA836,  0xA8D0,  0xA8DA,  0xA900,  0xA90A,  0xA9D0,  0xA9DA,  0xA9F0,
    0xA9FA,  0xAA50,  0xAA5A,  0xABF0,  0xABFA,  0xFF10,  0xFF1A,  0x10107, 0x10134, 0x10140, 0x10179,
    0x1018A, 0x1018C, 0x102E1, 0x102FC, 0x10320, 0x10324, 0x10341, 0x10342, 0x1034A, 0x1034B, 0x103D1,
    0x103D6, 0x104A0, 0x104AA, 0x10858, 0x10860, 0x10879, 0x10880, 0x108A7, 0x108B0, 0x108FB, 0x10900,
    0x10916, 0x1091C, 0x109BC, 0x109BE, 0x109C0, 0x10A00, 0x10A40, 0x10A49, 0x10A7D, 0x10A7F, 0x10A9D,
    0x10AA0, 0x10AEB, 0x10AF0, 0x10B58, 0x10B60, 0x10B78, 0x10B80, 0x10BA9, 0x10BB0, 0x10CFA, 0x10D00,
    0x10D30, 0x10D4A, 0x10E60, 0x10E7F, 0x10F1D, 0x10F27, 0x10F51, 0x10F55, 0x10FC5, 0x10FCC, 0x11052,
    0x11070, 0x110F0, 0x110FA, 0x11136, 0x11140, 0x111D0, 0x111DA, 0x111E1, 0x111F5, 0x112F0, 0x112FA,
    0x11450, 0x1145A, 0x114D0, 0x114DA, 0x11650, 0x1165A, 0x116C0, 0x116E4, 0x11730, 0x1173C, 0x118E0,
    0x118F3, 0x11950, 0x1195A, 0x11BF0, 0x11BFA, 0x11C50, 0x11C6D, 0x11D50, 0x11D5A, 0x11DA0, 0x11DAA,
    0x11F50, 0x11F5A, 0x11FC0, 0x11FD5, 0x12400, 0x1246F, 0x16130, 0x1613A, 0x16A60, 0x16A6A, 0x16AC0,
    0x16ACA, 0x16B50, 0x16B62, 0x16D70, 0x16D7A, 0x16E80, 0x16E97, 0x1CCF0, 0x1CCFA, 0x1D2C0, 0x1D2F4,
    0x1D360, 0x1D379, 0x1D7CE, 0x1D800, 0x1E140, 0x1E14A, 0x1E2F0, 0x1E2FA, 0x1E4F0, 0x1E4FA, 0x1E5F1,
    0x1E5FB, 0x1E8C7, 0x1E8D0, 0x1E950, 0x1E95A, 0x1EC71, 0x1ECAC, 0x1ECAD, 0x1ECB0, 0x1ECB1, 0x1ED2E,
    0x1ED2F, 0x1ED3E, 0x1F100, 0x1F10D, 0x1FBF0, 0x1FBFA};

inline bool is_letter(char32_t code) {
  return in_ranges(kLetterBorders, code);
}
inline bool is_number(char32_t code) {
  return in_ranges(kNumberBorders, code);
}

// The tokenizer of a model with vocab_size token ids.
inline Tokenizer load_tokenizer(const std::string& path, int64_t vocab_size) {
  Tokenizer tokenizer = Tokenizer::load(path);
  if (tokenizer.vocab_size() > vocab_size) {
    fail(path, ": ", tokenizer.vocab_size(), " tokens, more than the model's vocabulary of ", vocab_size,
         "; put the tokenizer there that made the training shards, or train with a --vocab-size as large");
  }
  return tokenizer;
}

}  // namespace xmod

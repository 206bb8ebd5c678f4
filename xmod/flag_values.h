// Words of the command line as values: the names of choices, numbers with a range, and the names nearest to a
// mistyped one.
#pragma once

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "xmod/config_json.h"
#include "xmod/error.h"
#include "xmod/options.h"

namespace xmod {

namespace detail {

// ---------------------------------------------------------------------------------------------------
// Words and the names nearest to them

template <class Enum>
using Names = std::vector<std::pair<std::string, Enum>>;

inline Names<Command> names_of(Command) {
  return {{"train", Command::train},
          {"plan", Command::plan},
          {"eval", Command::eval},
          {"generate", Command::generate},
          {"routing", Command::routing}};
}
inline Names<Arch> names_of(Arch) {
  return arch_names();
}
inline Names<Optimizer> names_of(Optimizer) {
  return {{"muon", Optimizer::muon}, {"adamw", Optimizer::adamw}};
}
inline Names<LrSchedule> names_of(LrSchedule) {
  return {{"cosine", LrSchedule::cosine},
          {"linear", LrSchedule::linear},
          {"wsd", LrSchedule::wsd},
          {"constant", LrSchedule::constant}};
}
inline Names<Precision> names_of(Precision) {
  return {{precision_name(Precision::fp32), Precision::fp32},
          {precision_name(Precision::bf16), Precision::bf16}};
}

template <class Enum>
std::string name_of(Enum value) {
  for (const auto& [name, known] : names_of(value)) {
    if (known == value) return name;
  }
  return "?";
}

template <class Enum>
std::vector<std::string> all_names() {
  std::vector<std::string> all;
  for (const auto& [name, value] : names_of(Enum{})) all.push_back(name);
  return all;
}

// "a, b or c"
inline std::string join(const std::vector<std::string>& words, const std::string& last = " or ") {
  std::string text;
  for (size_t i = 0; i < words.size(); i++) {
    if (i > 0) text += i + 1 < words.size() ? ", " : last;
    text += words[i];
  }
  return text;
}

// Insertions, deletions, substitutions and swaps of neighbours that turn a into b.
inline size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); i++) {
    for (size_t j = 0; j <= b.size(); j++) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      const size_t changed = a[i - 1] != b[j - 1];
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + changed});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
  }
  return d[a.size()][b.size()];
}

// A word that is a part of the name ("sparsity" of "token-sparsity") counts as one mistake.
inline size_t mistakes(const std::string& word, const std::string& name) {
  constexpr size_t kTellingPart = 4;
  const bool part = word.size() >= kTellingPart && name.find(word) != std::string::npos;
  return std::min(edit_distance(word, name), part ? 1 : std::string::npos);
}

// "; did you mean A, B or C?": the one to three names with the fewest mistakes.
inline std::string suggestion(const std::string& word, const std::vector<std::string>& names,
                              const std::string& prefix = "") {
  constexpr size_t kMost = 3;
  size_t fewest = std::string::npos;
  for (const std::string& name : names) fewest = std::min(fewest, mistakes(word, name));
  std::vector<std::string> nearest;
  for (const std::string& name : names) {
    if (mistakes(word, name) == fewest && nearest.size() < kMost) nearest.push_back(prefix + name);
  }
  const bool likely = fewest <= std::max<size_t>(2, word.size() / 3);
  return likely ? "; did you mean " + join(nearest) + "?" : "; the nearest is " + join(nearest);
}

// ---------------------------------------------------------------------------------------------------
// Values: the whole word must be a value, and within its range

// A word of the command line, fit to stand in a message of one line.
inline std::string show_word(std::string word) {
  for (char& c : word) {
    if (std::iscntrl(static_cast<unsigned char>(c))) c = '?';
  }
  return word.empty() ? "''" : word;
}

template <class Number>
bool read_number(const std::string& text, Number& out) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && end == text.data() + text.size();
}

inline void parse_value(const std::string& flag, const std::string& text, const Range& range, int64_t& out) {
  if (read_number(text, out) && range.contains(static_cast<double>(out))) return;
  double real = 0;  // 1e3 where a whole number is due: say how to write it
  const bool whole = read_number(text, real) && std::abs(real) < 1e15 && real == std::floor(real);
  const std::string remedy =
      whole && range.contains(real) ? "; write " + std::to_string(static_cast<int64_t>(real)) : "";
  usage_error("--", flag, " ", show_word(text), ": expected a whole number", range.text(), remedy);
}

inline void parse_value(const std::string& flag, const std::string& text, const Range& range, double& out) {
  if (read_number(text, out) && range.contains(out)) return;
  usage_error("--", flag, " ", show_word(text), ": expected a number", range.text());
}

inline void parse_value(const std::string& flag, const std::string& text, const Range&, std::string& out) {
  if (text.empty()) usage_error("--", flag, " is empty: expected a text");
  out = text;
}

template <class Enum>
void parse_value(const std::string& flag, const std::string& text, const Range&, Enum& out) {
  for (const auto& [name, value] : names_of(Enum{})) {
    if (name == text) {
      out = value;
      return;
    }
  }
  const std::vector<std::string> valid = all_names<Enum>();
  usage_error("--", flag, " ", show_word(text), ": expected ", join(valid), suggestion(text, valid));
}

inline std::string show_value(int64_t value) {
  return std::to_string(value);
}
inline std::string show_value(double value) {
  return shortest(value);
}
inline std::string show_value(const std::string& value) {
  return value;
}
template <class Enum>
std::string show_value(Enum value) {
  return name_of(value);
}

}  // namespace detail

}  // namespace xmod

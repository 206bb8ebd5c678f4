// A map of token by layer over readable text, as a CSV file: one row a token, and in it one letter a layer.
//
//   sequence,position,id,text,layers
//   0,0,84,T,DD..S.D....DS...D     D dense; S sparse, selects the token; . sparse, passes it by
//
// In `text`, a line break is \n, a tab \t, a backslash \\, and a byte that is no part of a UTF-8 character
// within the token is \xE2.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "xmod/plan.h"
#include "xmod/routing_report.h"
#include "xmod/tokenizer.h"

namespace xmod {

namespace detail {

// Length of the character at `begin` of the text; 0 where a byte of it is no part of one.
inline size_t character_length(std::string_view text, size_t begin) {
  const auto [code, length] = utf8_at(text, begin);
  const bool surrogate = code >= 0xD800 && code < 0xE000;
  return surrogate || code > 0x10FFFF ? 0 : length;
}

// One line of printable text.
inline std::string escape_text(std::string_view text) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    const char c = text[at];
    const size_t length = character_length(text, at);
    if (c == '\n' || c == '\t' || c == '\\') {
      out.append("\\").append(1, c == '\n' ? 'n' : c == '\t' ? 't' : '\\');
    } else if (length == 0 || (c >= 0 && c < ' ') || c == 127) {
      out += print("\\x%02X", static_cast<unsigned>(static_cast<unsigned char>(c)));
    } else {
      out += text.substr(at, length);
    }
    at += std::max<size_t>(1, length);
  }
  return out;
}

inline std::string csv_text(const std::string& text) {
  if (text.find_first_of(",\"") == std::string::npos) return text;
  std::string quoted = "\"";
  for (char c : text) quoted.append(c == '"' ? 2 : 1, c);
  return quoted + "\"";
}

}  // namespace detail

// Collects the first `size` tokens that it is shown.
class RoutingMap {
 public:
  RoutingMap(const ModelConfig& config, int64_t size) : T_(config.seq_len), size_(size) {
    unselected_ = pattern(make_layer_plan(config));
    for (size_t layer = 0; layer < unselected_.size(); layer++) {
      if (unselected_[layer] == 'D') continue;
      sparse_layers_.push_back(layer);
      unselected_[layer] = '.';
    }
  }

  // tokens (B, T), and the rows of them that each sparse layer selects.
  void add(const int32_t* tokens, int64_t B, const Selections& selections) {
    const int64_t first = this->size(), count = std::min(B * T_, size_ - first);
    ids_.insert(ids_.end(), tokens, tokens + count);
    layers_.resize(ids_.size(), unselected_);
    for (size_t i = 0; i < selections.size(); i++) {
      for (int32_t row : selections[i]) {
        if (row < count) layers_[first + row][sparse_layers_[i]] = 'S';
      }
    }
  }

  int64_t size() const { return static_cast<int64_t>(ids_.size()); }

  std::string csv(const Tokenizer& tokenizer) const {
    std::string out = "sequence,position,id,text,layers\n";
    for (int64_t i = 0; i < size(); i++) {
      out += std::to_string(i / T_) + "," + std::to_string(i % T_) + "," + std::to_string(ids_[i]) + "," +
             detail::csv_text(detail::escape_text(tokenizer.token(ids_[i]))) + "," + layers_[i] + "\n";
    }
    return out;
  }

 private:
  int64_t T_, size_;
  std::string unselected_;             // a token's letters before any layer selects it
  std::vector<size_t> sparse_layers_;  // their numbers
  std::vector<int32_t> ids_;
  std::vector<std::string> layers_;
};

}  // namespace xmod

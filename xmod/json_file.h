// JSON from a file that may come from anywhere.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "xmod/error.h"
#include "xmod/files.h"

namespace xmod {

inline nlohmann::json read_json_file(const std::string& path) {
  // Such a value would be a tree so deep that walking it overflows the stack.
  auto refuse_depth = [&](int depth, nlohmann::json::parse_event_t, const nlohmann::json&) {
    constexpr int kDeepest = 32;
    if (depth > kDeepest) fail(path, ": nested more than ", kDeepest, " deep; is the file damaged?");
    return true;
  };
  const nlohmann::json parsed =
      nlohmann::json::parse(read_file(path), refuse_depth, /*allow_exceptions=*/false);
  if (parsed.is_discarded()) fail(path, ": not valid JSON; is the file damaged?");
  return parsed;
}

}  // namespace xmod

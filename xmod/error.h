// Errors that a user can cause: one line that names the file or flag, what was found, what was
// expected and the remedy. main() prints the line and returns exit_code; nothing else exits.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace xmod {

struct Error : std::runtime_error {
  Error(const std::string& message, int exit_code) : std::runtime_error(message), exit_code(exit_code) {}
  int exit_code;  // 1: data, files, training; 2: command line
};

namespace detail {
template <class... Parts>
std::string concatenate(const Parts&... parts) {
  std::ostringstream line;
  (line << ... << parts);
  return line.str();
}
}  // namespace detail

// Something outside the command line is wrong: exit status 1.
template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(detail::concatenate(parts...), 1);
}

// The command line is wrong: exit status 2.
template <class... Parts>
[[noreturn]] void usage_error(const Parts&... parts) {
  throw Error(detail::concatenate(parts...), 2);
}

}  // namespace xmod

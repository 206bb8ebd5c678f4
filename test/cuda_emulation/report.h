// How the emulation ends: a line that says what a kernel did, and abort().
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <source_location>
#include <string>

namespace cuda_emulation {

[[gnu::format(printf, 1, 2)]] inline std::string text(const char* format, ...) {
  char line[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof line, format, arguments);
  va_end(arguments);
  return line;
}

inline std::string text(const std::source_location& where) {
  return text("%s:%u (%s)", where.file_name(), where.line(), where.function_name());
}

[[noreturn]] inline void stop(const std::string& message) {
  std::fflush(stdout);
  std::fprintf(stderr, "cuda emulation: %s\n", message.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace cuda_emulation

// How the emulation ends: a line that says what a kernel did, and abort().
#pragma once

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
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

// A place in the source: where the function is called that has one as its last parameter by default.
struct At {
  const char* file = "";
  unsigned line = 0;
  const char* function = "";

  static constexpr At current(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE(),
                              const char* function = __builtin_FUNCTION()) {
    return {file, line, function};
  }
};

inline std::string text(const At& at) {
  return text("%s:%u (%s)", at.file, at.line, at.function);
}

[[noreturn]] inline void stop(const std::string& message) {
  std::fflush(stdout);
  std::fprintf(stderr, "cuda emulation: %s\n", message.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace cuda_emulation

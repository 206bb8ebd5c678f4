// How the emulation ends: a line that says what a kernel did, and abort().
#pragma once

#include <cxxabi.h>
#include <dlfcn.h>

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

// The name of a kernel, where the program was linked with -rdynamic.
inline std::string kernel_name(const void* kernel) {
  Dl_info info;
  if (!dladdr(kernel, &info) || !info.dli_sname || info.dli_saddr != kernel) return "a kernel";
  int status = 0;
  char* name = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  const std::string found = status == 0 ? name : info.dli_sname;
  std::free(name);
  return found;
}

[[noreturn]] inline void stop(const std::string& message) {
  std::fflush(stdout);
  std::fprintf(stderr, "cuda emulation: %s\n", message.c_str());
  std::fflush(stderr);
  std::abort();
}

}  // namespace cuda_emulation

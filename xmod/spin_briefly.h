#pragma once

#ifdef __linux__
#include <sys/auxv.h>
#include <unistd.h>
#endif

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

namespace xmod {

// GNU's OpenMP threads spin while they wait for each other. On a machine with other work to do they so keep
// the processor from the very thread they wait for, and a run gets ten times slower. A short spin costs an
// idle machine little, but the library reads its settings before main: set them and start once more.
inline void spin_briefly([[maybe_unused]] char** argv) {
#if defined(_OPENMP) && defined(__linux__)
  if (std::getenv("OMP_WAIT_POLICY") || std::getenv("GOMP_SPINCOUNT")) return;
  setenv("GOMP_SPINCOUNT", "10000", 1);
  // The program's own name; another one when it runs inside a loader or an emulator, and then all goes on as
  // it was, as it does where execv fails.
  std::error_code error;
  const std::string program = std::filesystem::read_symlink("/proc/self/exe", error).string();
  const char* started = reinterpret_cast<const char*>(getauxval(AT_EXECFN));
  if (!error && started && std::filesystem::equivalent(program, started, error)) execv(program.c_str(), argv);
#endif
}

}  // namespace xmod

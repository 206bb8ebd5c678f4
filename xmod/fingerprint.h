// Short marks of long data, by which two copies are told apart without laying them side by side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

namespace xmod {

constexpr uint64_t kHashStart = 0xcbf29ce484222325;

// FNV-1a, byte by byte.
inline uint64_t hash_bytes(const void* data, size_t size, uint64_t hash = kHashStart) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  for (size_t i = 0; i < size; i++) hash = (hash ^ bytes[i]) * 0x100000001b3;
  return hash;
}

// The same number by number: for gigabytes.
template <class Number>
uint64_t hash_numbers(const Number* values, int64_t n, uint64_t hash = kHashStart) {
  for (int64_t i = 0; i < n; i++) {
    uint32_t bits = 0;
    static_assert(sizeof(Number) <= sizeof bits);
    std::memcpy(&bits, values + i, sizeof(Number));
    hash = (hash ^ bits) * 0x100000001b3;
    hash ^= hash >> 32;
  }
  return hash;
}

inline std::string show_hash(uint64_t hash) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(hash));
  return text;
}

}  // namespace xmod

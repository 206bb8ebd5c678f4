// The device's memory: allocations between guard zones in one range of addresses, which host code cannot
// touch. It opens while kernels and copies run.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>

#include "block.h"
#include "report.h"

namespace cuda_emulation {

class DeviceMemory {
 public:
  static DeviceMemory& instance() {
    static DeviceMemory memory;
    return memory;
  }

  size_t capacity = size_t{16} << 30;

  size_t used() const { return used_; }

  // Null if it does not fit. Addresses are never used again, so that none of a freed allocation is good.
  void* allocate(size_t bytes) {
    const size_t space = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (used_ + space > capacity || top_ + space + 2 * kGuard > begin_ + kAddresses) return nullptr;
    grow(top_ + space + 2 * kGuard);
    char* data = top_ + kGuard;
    {
      const Access access(*this);
      poison(top_, space + 2 * kGuard);
    }
    top_ += space + 2 * kGuard;
    used_ += space;
    live_[data] = bytes;
    return data;
  }

  // False if it is not the begin of an allocation.
  bool release(void* data) {
    const auto found = live_.find(static_cast<char*>(data));
    if (found == live_.end()) return false;
    check([] { return std::string("cudaFree"); });
    const size_t space = (found->second + kAlignment - 1) / kAlignment * kAlignment;
    used_ -= space;
    drop_pages(found->first - kGuard, space + 2 * kGuard);
    live_.erase(found);
    leave_behind(live_.empty() ? top_ : live_.begin()->first - kGuard);
    return true;
  }

  // Addresses that have no memory yet: whoever touches them is stopped.
  void* reserve(size_t bytes) {
    const size_t page = page_bytes(), space = bytes + 2 * kGuard + page;
    if (bytes % page != 0 || top_ + space > begin_ + kAddresses) return nullptr;
    grow(top_ + space);
    const auto first = reinterpret_cast<uintptr_t>(top_) + kGuard;
    char* data = top_ + kGuard + (page - first % page) % page;
    {
      const Access access(*this);
      poison(top_, static_cast<size_t>(data - top_));
      poison(data + bytes, kGuard);
      punch(data, bytes);
    }
    top_ = data + bytes + kGuard;
    live_[data] = bytes;
    return data;
  }
  bool release_addresses(void* data) {
    const auto found = live_.find(static_cast<char*>(data));
    if (found == live_.end()) return false;
    std::erase_if(holes_, [&](const auto& hole) {
      return hole.first >= found->first && hole.first < found->first + found->second;
    });
    live_.erase(found);
    return true;
  }

  // Memory for a part of reserved addresses, which must be in one hole.
  bool map(void* data, size_t bytes) {
    char* const begin = static_cast<char*>(data);
    const auto above = holes_.upper_bound(begin);
    if (above == holes_.begin()) return false;
    const auto [hole, end] = *std::prev(above);
    if (begin + bytes > end) return false;
    holes_.erase(hole);
    if (hole < begin) holes_[hole] = begin;
    if (begin + bytes < end) holes_[begin + bytes] = end;
    used_ += bytes;
    const Access access(*this);
    poison(data, bytes);
    return true;
  }
  void unmap(void* data, size_t bytes) {
    punch(static_cast<char*>(data), bytes);
    drop_pages(static_cast<char*>(data), bytes);
    used_ -= bytes;
  }

  static size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

  // Stops if somebody wrote outside of an allocation; after() says when that was found.
  template <class After>
  void check(After after) {
    const Access access(*this);
    for (const auto& [data, bytes] : live_) {
      const size_t space = (bytes + kAlignment - 1) / kAlignment * kAlignment;
      const char* damage = unpoisoned(data - kNear, kNear);
      for (size_t i = bytes; !damage && i < space + kNear; i++) {
        if (data[i] != reinterpret_cast<const char*>(&kPoison)[i % sizeof kPoison]) damage = data + i;
      }
      if (damage)
        stop(after() + ": found a write outside of an allocation: " + describe(damage, data, bytes));
    }
  }

  bool contains(const void* address) const { return address >= begin_ && address < begin_ + kAddresses; }

  // Whether [data, data + bytes) lies inside of one allocation and has memory; its end belongs to it if bytes
  // is 0.
  bool allocated(const void* data, size_t bytes) const {
    const auto above = live_.upper_bound(static_cast<char*>(const_cast<void*>(data)));
    if (above == live_.begin()) return false;
    const auto& [begin, size] = *std::prev(above);
    const size_t offset = static_cast<size_t>(static_cast<const char*>(data) - begin);
    return offset <= size && bytes <= size - offset && !reaches_hole(static_cast<const char*>(data), bytes);
  }

  // What lies at an address of the device.
  std::string describe(const void* address) const {
    const char* at = static_cast<const char*>(address);
    const auto above = live_.upper_bound(const_cast<char*>(at));
    if (above == live_.begin()) return text("%p, which is not allocated", address);
    return describe(at, std::prev(above)->first, std::prev(above)->second);
  }

  // While one of these lives, device memory is open.
  class Access {
   public:
    explicit Access(DeviceMemory& memory) : memory_(memory) {
      if (memory_.open_++ == 0) memory_.protect(PROT_READ | PROT_WRITE);
    }
    ~Access() {
      if (--memory_.open_ == 0) memory_.protect(PROT_NONE);
    }
    Access(const Access&) = delete;
    Access& operator=(const Access&) = delete;

   private:
    DeviceMemory& memory_;
  };

 private:
  static constexpr size_t kAddresses = size_t{1} << 40;
  static constexpr size_t kAlignment = 256;
  static constexpr size_t kGuard = 4096;
  static constexpr size_t kNear = 256;      // of the guard zone, looked at after every launch
  static constexpr size_t kStep = 2 << 20;  // the range grows by

  DeviceMemory() {
    void* memory =
        mmap(nullptr, kAddresses + kStep, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) stop("cannot reserve addresses for device memory");
    const auto address = reinterpret_cast<uintptr_t>(memory);
    begin_ = low_ = top_ = end_ = static_cast<char*>(memory) + (kStep - address % kStep) % kStep;
    madvise(begin_, kAddresses, MADV_HUGEPAGE);
    watch_faults();
  }
  DeviceMemory(const DeviceMemory&) = delete;

  void grow(char* to) {
    if (to <= end_) return;
    end_ = begin_ + (static_cast<size_t>(to - begin_) + kStep - 1) / kStep * kStep;
    if (open_ > 0) protect(PROT_READ | PROT_WRITE);
  }

  // Holes stay closed.
  void protect(int protection) {
    char* begin = low_;
    for (const auto& [hole, end] : holes_) {
      protect(begin, hole, protection);
      begin = std::max(begin, end);
    }
    protect(begin, end_, protection);
  }
  static void protect(char* begin, char* end, int protection) {
    if (end > begin && mprotect(begin, static_cast<size_t>(end - begin), protection) != 0)
      stop("mprotect failed");
  }

  void punch(char* data, size_t bytes) {
    protect(data, data + bytes, PROT_NONE);
    holes_[data] = data + bytes;
  }

  bool reaches_hole(const char* data, size_t bytes) const {
    return std::any_of(holes_.begin(), holes_.end(),
                       [&](const auto& hole) { return hole.first < data + bytes && data < hole.second; });
  }

  // Nothing lives below an address: it stays closed from now on. Opening it would take longer and longer.
  void leave_behind(const char* address) {
    const size_t whole_pages = static_cast<size_t>(address - begin_) / page_bytes() * page_bytes();
    if (open_ == 0) low_ = begin_ + whole_pages;
  }

  // Gives whole pages back to the system.
  static void drop_pages(char* data, size_t bytes) {
    const size_t page = page_bytes();
    const auto address = reinterpret_cast<uintptr_t>(data);
    const uintptr_t first = (address + page - 1) / page * page, last = (address + bytes) / page * page;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
  }

  static std::string describe(const char* at, const char* data, size_t bytes) {
    return text("%p, %td bytes from the begin of an allocation of %zu bytes", static_cast<const void*>(at),
                at - data, bytes);
  }

  // ------------------------------------------------------------------------------------------------
  // What an access that the system refuses was

  static void watch_faults() {
#if !defined(__SANITIZE_ADDRESS__)
    static char stack[64 << 10];
    stack_t alternative = {};
    alternative.ss_sp = stack;
    alternative.ss_size = sizeof stack;
    sigaltstack(&alternative, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = explain_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESETHAND;
    sigaction(SIGSEGV, &action, nullptr);
#endif
  }

  static void explain_fault(int, siginfo_t* fault, void*) {
    const void* address = fault->si_addr;
    const DeviceMemory& memory = instance();
    if (!running_block) {
      if (memory.contains(address)) {
        stop("host code touches device memory at " + memory.describe(address) +
             ": on a GPU this is a segmentation fault; use cudaMemcpy");
      }
      return;  // the fault repeats, and ends the program as faults do
    }
    if (running_block->fiber_of(address)) {
      running_block->stop_thread(text("a thread needs more than its stack"));
    }
    if (fault->si_code == SI_KERNEL)
      running_block->stop_thread(
          "access to a vector that is not aligned to its size, or to no address at all");
    running_block->stop_thread("access to memory at " + memory.describe(address));
  }

  char* begin_ = nullptr;
  char* low_ = nullptr;  // where what lives begins
  char* top_ = nullptr;
  char* end_ = nullptr;
  size_t used_ = 0;
  int open_ = 0;
  std::map<char*, size_t> live_;
  std::map<char*, char*> holes_;  // addresses without memory: begin, end
};

}  // namespace cuda_emulation

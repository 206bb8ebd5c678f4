// Runs the threads of one block on fibers, one at a time: a thread runs until it has to wait for others, at a
// barrier of the block or at a meeting of lanes of its warp.
//
// A correct kernel computes the same whatever thread runs next. So a seed can choose that, and a missing
// barrier shows itself as a result that depends on the seed.
#pragma once

#include <link.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "fiber.h"
#include "report.h"
#include "vector_types.h"

// Of the thread that runs.
inline constinit thread_local uint3 threadIdx = {}, blockIdx = {};
inline constinit thread_local dim3 blockDim = {}, gridDim = {};
inline constexpr int warpSize = 32;

namespace cuda_emulation {

constexpr unsigned kWarp = 32;

// What memory holds before anything is written to it: as float, double, bf16 or two of them not a number, as
// an integer far beyond any index.
constexpr uint32_t kPoison = 0x7fff7fffu;

inline void poison(void* memory, size_t bytes) {
  char* out = static_cast<char*>(memory);
  size_t i = 0;
  for (; i + sizeof kPoison <= bytes; i += sizeof kPoison) std::memcpy(out + i, &kPoison, sizeof kPoison);
  std::memcpy(out + i, &kPoison, bytes - i);
}

// The first byte of [memory, memory + bytes) that is no longer as poison() left it; null if all are.
inline const char* unpoisoned(const void* memory, size_t bytes) {
  const char* data = static_cast<const char*>(memory);
  for (size_t i = 0; i < bytes; i++) {
    if (data[i] != reinterpret_cast<const char*>(&kPoison)[i % sizeof kPoison]) return data + i;
  }
  return nullptr;
}

// Words that are a function of the seed alone.
class Dice {
 public:
  explicit Dice(uint64_t seed = 0) : state_(seed) {}
  uint64_t word() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
  }
  size_t below(size_t bound) { return static_cast<size_t>(word() % bound); }

 private:
  uint64_t state_;
};

// A kernel with its arguments, and how it is launched.
struct Launch {
  dim3 grid, block;
  size_t shared_bytes = 0;
  void (*call)(const void* kernel) = nullptr;
  const void* kernel = nullptr;
  const void* address = nullptr;  // of the kernel itself
  uint64_t seed = 0;              // of the order of threads; 0: as they are numbered

  size_t threads() const { return size_t{block.x} * block.y * block.z; }
  size_t blocks() const { return size_t{grid.x} * grid.y * grid.z; }
};

struct Thread {
  enum State { ready, running, at_barrier, in_meeting, ended };

  uint3 index = {};
  unsigned number = 0;
  State state = ready;
  Fiber* fiber = nullptr;  // null until it begins
  const char* waits_in = "";
  const At* waits_at = nullptr;

  // cp.async: what was asked for, and how much of it each commit has seen.
  struct Copy {
    void* shared;
    const void* global;
    bool valid;
  };
  std::vector<Copy> copies;
  std::vector<size_t> groups;

  unsigned lane() const { return number % kWarp; }
};

// What the lanes of a meeting brought, each on its stack.
template <class Brought>
class Lanes {
 public:
  Lanes(void* const* of_lane, unsigned mask) : of_lane_(of_lane), mask_(mask) {}

  Brought& operator[](unsigned lane) const { return *static_cast<Brought*>(of_lane_[lane]); }
  bool has(unsigned lane) const { return mask_ >> lane & 1; }

  // Calls body(lane) for each of them, in order.
  template <class Body>
  void for_each(Body body) const {
    for (unsigned rest = mask_; rest; rest &= rest - 1) body(static_cast<unsigned>(std::countr_zero(rest)));
  }

 private:
  void* const* of_lane_;
  unsigned mask_;
};

// Lanes of a warp that came to the same function with the same mask. The last of them computes what all of
// them take away.
struct Meeting {
  const char* function;
  unsigned mask;
  unsigned arrived;
  void* of_lane[kWarp];
};

struct Warp {
  unsigned lanes = 0;  // that exist
  unsigned ended = 0;
  unsigned meetings = 0;   // that wait for lanes
  Meeting meeting[kWarp];  // disjoint ones at most: a lane is in one at a time
};

class Block;

// The block that this thread of the machine is running; null in host code.
inline constinit thread_local Block* running_block = nullptr;

// Static __shared__ variables are thread_local ones. They and those above are all there are, so that shared
// memory is the program's thread-local storage.
class StaticSharedMemory {
 public:
  static bool holds(const void* address) { return address >= begin() && address < begin() + extent().bytes; }
  static void poison_all() {
    Block* const kept = running_block;
    poison(begin(), extent().bytes);
    running_block = kept;
  }

 private:
  struct Extent {
    ptrdiff_t begin = 0;  // seen from running_block
    size_t bytes = 0;
  };

  static char* here() {
    char* address = reinterpret_cast<char*>(&running_block);
    asm("" : "+r"(address));  // what lies around it is ours, too
    return address;
  }
  static char* begin() { return here() + extent().begin; }
  static const Extent& extent() {
    static const Extent found = find();
    return found;
  }
  static Extent find() {
    Extent found;
    dl_iterate_phdr(
        [](dl_phdr_info* module, size_t, void* out) {
          char* const begin = static_cast<char*>(module->dlpi_tls_data);
          for (int i = 0; begin && i < module->dlpi_phnum; i++) {
            const size_t bytes = module->dlpi_phdr[i].p_memsz;
            if (module->dlpi_phdr[i].p_type != PT_TLS || here() < begin || here() >= begin + bytes) continue;
            *static_cast<Extent*>(out) = {begin - here(), bytes};
            return 1;
          }
          return 0;
        },
        &found);
    const char* errno_at = reinterpret_cast<char*>(&errno);
    if (found.bytes == 0 ||
        (errno_at >= here() + found.begin && errno_at < here() + found.begin + found.bytes))
      stop("shared memory needs thread-local storage that the C library does not share: link dynamically");
    return found;
  }
};

// Dynamic shared memory between two guard zones.
class DynamicSharedMemory {
 public:
  void prepare(size_t bytes) {
    bytes_ = bytes;
    const size_t words = (bytes + 2 * kGuard) / sizeof(Line) + 1;
    if (lines_.size() < words) lines_.resize(words);
    poison(lines_.data(), bytes + 2 * kGuard);
  }
  void* data() { return begin() + kGuard; }
  bool holds(const void* address) { return address >= data() && address < begin() + kGuard + bytes_; }

  // Where somebody wrote outside, in bytes from the begin; false if nobody did.
  bool damaged(ptrdiff_t& at) {
    const char* damage = unpoisoned(begin(), kGuard);
    if (!damage) {
      // The pattern goes on behind the memory, wherever that ends.
      const char* end = begin() + kGuard + bytes_;
      const size_t phase = bytes_ % sizeof kPoison;
      for (size_t i = 0; !damage && i < kGuard; i++) {
        if (end[i] != reinterpret_cast<const char*>(&kPoison)[(phase + i) % sizeof kPoison]) damage = end + i;
      }
    }
    if (damage) at = damage - static_cast<char*>(data());
    return damage;
  }

 private:
  static constexpr size_t kGuard = 256;
  struct alignas(128) Line {
    char bytes[128];
  };

  char* begin() { return reinterpret_cast<char*>(lines_.data()); }

  size_t bytes_ = 0;
  std::vector<Line> lines_;
};

class Block {
 public:
  Thread& running() { return *running_; }
  unsigned lane() const { return running_->lane(); }
  void* dynamic_shared() { return dynamic_.data(); }
  bool is_shared(const void* address) {
    return dynamic_.holds(address) || StaticSharedMemory::holds(address);
  }

  // Runs block `index` of the grid to its end.
  void run(const Launch& launch, uint3 index) {
    launch_ = &launch;
    index_ = index;
    prepare();
    running_block = this;
    StaticSharedMemory::poison_all();
    blockIdx = index;
    blockDim = launch.block;
    gridDim = launch.grid;
    Thread* first = next_ready();
    first->fiber = idle_fiber();
    begin(first);
    Fiber::change(host_, *first->fiber);
    running_block = nullptr;
    ptrdiff_t at;
    if (dynamic_.damaged(at)) {
      stop_here(text("a write outside of dynamic shared memory, %td bytes from its begin, of %zu bytes", at,
                     launch.shared_bytes));
    }
  }

  // __syncthreads: `at` is where it stands.
  void barrier(const char* function, const At& at) {
    if (ended_ > 0) {
      stop_here("divergent barrier: " + name(*running_) + " came to " + function + " at " + text(at) +
                ", but " + name(some_thread(Thread::ended)) + " has ended before it");
    }
    if (at_barrier_ > 0) {
      const Thread& other = some_thread(Thread::at_barrier);
      if (other.waits_at->line != at.line || !same(other.waits_at->file, at.file)) {
        stop_here("divergent barrier: " + name(*running_) + " came to " + function + " at " + text(at) +
                  ", but " + waiting(other));
      }
    }
    if (++at_barrier_ < threads_.size()) return wait(Thread::at_barrier, function, at);
    at_barrier_ = 0;
    for (size_t i = threads_.size(); i-- > 0;) {
      if (&threads_[i] != running_) make_ready(threads_[i]);
    }
  }

  // Meets the other lanes of the mask in `function`. The last one calls finish(lanes), which reads what all
  // lanes brought and writes their results there.
  template <class Brought>
  void meet(const char* function, unsigned mask, Brought& brought, void (*finish)(Lanes<Brought>),
            const At& at) {
    Warp& warp = warps_[running_->number / kWarp];
    const unsigned lane = running_->lane();
    Meeting* meeting = &warp.meeting[0];
    const bool usual = warp.meetings == 1 && meeting->mask == mask && meeting->function == function;
    if (!usual || !(mask >> lane & 1)) meeting = &join(warp, function, mask, at);
    meeting->of_lane[lane] = &brought;
    meeting->arrived |= 1u << lane;
    if (meeting->arrived != mask) return wait(Thread::in_meeting, function, at);

    const Lanes<Brought> lanes(meeting->of_lane, mask);
    finish(lanes);
    Thread* const first = &threads_[running_->number - lane];
    lanes.for_each([&](unsigned i) {
      if (i != lane) make_ready(first[i]);
    });
    const Meeting* last = &warp.meeting[--warp.meetings];
    if (meeting != last) *meeting = *last;
  }

  // Ends the program with a message about the running block.
  [[noreturn]] void stop_here(const std::string& message) const {
    stop(kernel_name(launch_->address) + text(", block (%u,%u,%u): ", index_.x, index_.y, index_.z) +
         message);
  }
  [[noreturn]] void stop_thread(const std::string& message) const {
    stop_here(name(*running_) + ": " + message);
  }

  const Fiber* fiber_of(const void* address) const {
    for (const auto& fiber : fibers_) {
      if (fiber->stack_holds(address)) return fiber.get();
    }
    return nullptr;
  }

 private:
  void prepare() {
    const Launch& l = *launch_;
    const unsigned n = static_cast<unsigned>(l.threads());
    dice_ = Dice(l.seed +
                 (index_.x + uint64_t{l.grid.x} * (index_.y + uint64_t{l.grid.y} * index_.z)) * 0x2545f491u);
    // Two kinds of order: any ready thread comes next, or one that shares the last one's way so far, in a
    // permuted order.
    any_next_ = l.seed != 0 && dice_.word() % 2;
    ended_ = at_barrier_ = 0;
    dynamic_.prepare(l.shared_bytes);
    threads_.resize(n);
    warps_.resize((n + kWarp - 1) / kWarp);
    for (Warp& warp : warps_) {
      warp.lanes = warp.ended = warp.meetings = 0;
    }
    unsigned number = 0;
    for (unsigned z = 0; z < l.block.z; z++) {
      for (unsigned y = 0; y < l.block.y; y++) {
        for (unsigned x = 0; x < l.block.x; x++, number++) {
          Thread& thread = threads_[number];
          thread.index = {x, y, z};
          thread.number = number;
          thread.state = Thread::ready;
          thread.fiber = nullptr;
          thread.copies.clear();
          thread.groups.clear();
          warps_[number / kWarp].lanes |= 1u << number % kWarp;
        }
      }
    }
    ready_.resize(n);
    ready_count_ = n;
    for (unsigned i = 0; i < n; i++) ready_[i] = &threads_[n - 1 - i];
    if (l.seed != 0) {
      for (unsigned i = n; i > 1; i--) std::swap(ready_[i - 1], ready_[dice_.below(i)]);
    }
  }

  static bool same(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }

  // The meeting of the warp that the running thread belongs to; a new one if it is the first.
  Meeting& join(Warp& warp, const char* function, unsigned mask, const At& at) {
    const auto complain = [&](const std::string& what) {
      stop_here(text("%s at ", function) + text(at) + ": " + name(*running_) +
                text(" came with mask 0x%08x, ", mask) + what);
    };
    if (!(mask >> running_->lane() & 1)) complain(text("which lacks its own lane %u", running_->lane()));
    if (mask & ~warp.lanes) complain(text("but the warp has lanes 0x%08x only", warp.lanes));
    if (mask & warp.ended) complain(text("but lanes 0x%08x of it have ended", mask & warp.ended));
    Meeting* found = nullptr;
    for (Meeting* m = warp.meeting; m < warp.meeting + warp.meetings; m++) {
      Meeting& meeting = *m;
      if (meeting.mask == mask && same(meeting.function, function)) {
        found = &meeting;
      } else if ((meeting.mask >> running_->lane() & 1) &&
                 (mask & meeting.arrived)) {  // each waits for the other
        complain(text("but lanes 0x%08x wait in %s with mask 0x%08x", meeting.arrived, meeting.function,
                      meeting.mask));
      }
    }
    if (found) return *found;
    Meeting& fresh = warp.meeting[warp.meetings++];
    fresh.function = function;
    fresh.mask = mask;
    fresh.arrived = 0;
    return fresh;
  }

  // ------------------------------------------------------------------------------------------------
  // who runs

  void make_ready(Thread& thread) {
    thread.state = Thread::ready;
    ready_[ready_count_++] = &thread;
  }

  Thread* next_ready() {
    if (ready_count_ == 0) return nullptr;
    if (any_next_) std::swap(ready_[dice_.below(ready_count_)], ready_[ready_count_ - 1]);
    return ready_[--ready_count_];
  }

  void begin(Thread* thread) {
    running_ = thread;
    thread->state = Thread::running;
    threadIdx = thread->index;
  }

  void wait(Thread::State state, const char* function, const At& at) {
    Thread* const me = running_;
    me->state = state;
    me->waits_in = function;
    me->waits_at = &at;
    Thread* next = next_ready();
    if (!next) stop_all_wait();
    if (!next->fiber) next->fiber = idle_fiber();
    begin(next);
    Fiber::change(*me->fiber, *next->fiber);
  }

  // What a fiber does: it runs a thread, and goes on with the next that has not begun. So threads that never
  // wait need one fiber in all.
  static void run_threads() {
    Block& block = *running_block;
    for (;;) {
      block.launch_->call(block.launch_->kernel);
      block.end_thread();
      Fiber* const here = block.running_->fiber;
      Thread* next = block.next_ready();
      if (next && !next->fiber) {
        next->fiber = here;
        block.begin(next);
        continue;
      }
      if (!next && block.ended_ < block.threads_.size()) block.stop_all_wait();
      block.idle_.push_back(here);
      if (next) block.begin(next);
      Fiber::change(*here, next ? *next->fiber : block.host_);
    }
  }

  void end_thread() {
    running_->state = Thread::ended;
    ended_++;
    Warp& warp = warps_[running_->number / kWarp];
    warp.ended |= 1u << running_->lane();
    if (at_barrier_ > 0) {
      stop_here("divergent barrier: " + name(*running_) + " has ended, but " +
                waiting(some_thread(Thread::at_barrier)));
    }
    for (unsigned i = 0; i < warp.meetings; i++) {
      const Meeting& meeting = warp.meeting[i];
      if (meeting.mask & warp.ended) {
        stop_here(name(*running_) + text(" has ended, but lanes 0x%08x wait for it in %s with mask 0x%08x",
                                         meeting.arrived, meeting.function, meeting.mask));
      }
    }
  }

  Fiber* idle_fiber() {
    if (idle_.empty()) {
      fibers_.push_back(std::make_unique<Fiber>(run_threads, fibers_.size()));
      return fibers_.back().get();
    }
    Fiber* fiber = idle_.back();
    idle_.pop_back();
    return fiber;
  }

  // ------------------------------------------------------------------------------------------------
  // what messages say

  static std::string name(const Thread& t) {
    return text("thread (%u,%u,%u)", t.index.x, t.index.y, t.index.z);
  }
  static std::string waiting(const Thread& t) {
    return name(t) + " waits in " + t.waits_in + " at " + text(*t.waits_at);
  }
  const Thread& some_thread(Thread::State state) const {
    for (const Thread& thread : threads_) {
      if (thread.state == state) return thread;
    }
    return threads_[0];
  }

  [[noreturn]] void stop_all_wait() const {
    std::string message = "every thread waits: ";
    if (at_barrier_ > 0)
      message = "divergent barrier: " + waiting(some_thread(Thread::at_barrier)) + ", but ";
    const Thread& other = some_thread(Thread::in_meeting);
    message += waiting(other);
    const Warp& warp = warps_[other.number / kWarp];
    for (unsigned i = 0; i < warp.meetings; i++) {
      const Meeting& meeting = warp.meeting[i];
      if (meeting.arrived >> other.lane() & 1)
        message += text(" for lanes 0x%08x of its warp, which do not come", meeting.mask & ~meeting.arrived);
    }
    stop_here(message);
  }

  const Launch* launch_ = nullptr;
  uint3 index_ = {};
  Dice dice_;
  bool any_next_ = false;
  Thread* running_ = nullptr;
  size_t ended_ = 0, at_barrier_ = 0;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<Thread*> ready_;  // the first ready_count_ of them
  size_t ready_count_ = 0;
  DynamicSharedMemory dynamic_;
  Fiber host_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
};

inline Block& current_block() {
  return *running_block;
}
inline void* dynamic_shared_memory() {
  return running_block->dynamic_shared();
}

}  // namespace cuda_emulation

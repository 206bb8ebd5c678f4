// Fibers: functions with a stack of their own that hand the processor to each other by name. One switch costs
// a few nanoseconds where it is written by hand, and two system calls elsewhere.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace cuda_emulation {

#if defined(__clang__)
#define CUDA_EMULATION_OPAQUE [[gnu::noinline]]
#else
#define CUDA_EMULATION_OPAQUE [[gnu::noinline, gnu::noipa]]
#endif

class Fiber {
 public:
  // The thread that runs already: something to switch back to.
  Fiber() = default;

  // Begins with entry(), which never returns, when it is first switched to. `number` shifts the stack a
  // little, so that the stacks of many fibers do not meet in the same lines of the cache.
  Fiber(void (*entry)(), size_t number) {
    bytes_ = kStackBytes + kGuardBytes;
    void* memory =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) {
      std::perror("cuda emulation: no memory for the stack of a thread");
      std::abort();
    }
    memory_ = static_cast<char*>(memory);
    prepare(entry, memory_ + bytes_ - number % 32 * 192);
  }
  ~Fiber() {
    if (memory_) munmap(memory_, bytes_);
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  bool stack_holds(const void* address) const {
    return memory_ && address >= memory_ && address < memory_ + bytes_;
  }

  // Leaves `from`, which must be running, until somebody switches to it.
  static void change(Fiber& from, Fiber& to);

 private:
  static constexpr size_t kStackBytes = 256 << 10;
  static constexpr size_t kGuardBytes = 1 << 20;  // below: no array of a thread reaches over it

  void prepare(void (*entry)(), char* top);

  char* memory_ = nullptr;
  size_t bytes_ = 0;
#if defined(__x86_64__) || defined(__aarch64__)
  void* stack_pointer_ = nullptr;
#else
  ucontext_t context_;
#endif
};

#if defined(__x86_64__)

// Where a fiber stands still its stack holds, from the top down: an address to go on from, rbx, rbp.
CUDA_EMULATION_OPAQUE inline void change_stack(void** from, void* to) {
  asm volatile(
      "leaq -128(%%rsp), %%rsp\n\t"
      "pushq %%rbp\n\t"
      "pushq %%rbx\n\t"
      "leaq 1f(%%rip), %%rax\n\t"
      "pushq %%rax\n\t"
      "movq %%rsp, (%0)\n\t"
      "movq %1, %%rsp\n\t"
      "popq %%rax\n\t"
      "jmpq *%%rax\n"
      "1:\n\t"
      "popq %%rbx\n\t"
      "popq %%rbp\n\t"
      "leaq 128(%%rsp), %%rsp"
      : "+D"(from), "+S"(to)
      :
      : "rax", "rcx", "rdx", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "memory", "cc");
}

inline void Fiber::prepare(void (*entry)(), char* top) {
  auto* word = reinterpret_cast<uintptr_t*>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{63});
  *--word = 0;  // entry's return address
  *--word = reinterpret_cast<uintptr_t>(entry);
  stack_pointer_ = word;
}

inline void Fiber::change(Fiber& from, Fiber& to) {
  change_stack(&from.stack_pointer_, to.stack_pointer_);
}

#elif defined(__aarch64__)

// Where a fiber stands still its stack holds, from the top down: x29, x19, an address to go on from.
CUDA_EMULATION_OPAQUE inline void change_stack(void** from, void* to) {
  register void** x0 asm("x0") = from;
  register void* x1 asm("x1") = to;
  asm volatile(
      "sub sp, sp, #32\n\t"
      "stp x29, x19, [sp]\n\t"
      "adr x9, 1f\n\t"
      "str x9, [sp, #16]\n\t"
      "mov x10, sp\n\t"
      "str x10, [%0]\n\t"
      "mov sp, %1\n\t"
      "ldr x9, [sp, #16]\n\t"
      "br x9\n"
      "1:\n\t"
      "ldp x29, x19, [sp]\n\t"
      "add sp, sp, #32"
      : "+r"(x0), "+r"(x1)
      :
      : "x2", "x3", "x4", "x5", "x6", "x7", "x8", "x9", "x10", "x11", "x12", "x13", "x14", "x15", "x16",
        "x17", "x20", "x21", "x22", "x23", "x24", "x25", "x26", "x27", "x28", "x30", "v8", "v9", "v10", "v11",
        "v12", "v13", "v14", "v15", "memory", "cc");
}

inline void Fiber::prepare(void (*entry)(), char* top) {
  auto* word = reinterpret_cast<uintptr_t*>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{63}) - 4;
  word[0] = word[1] = 0;
  word[2] = reinterpret_cast<uintptr_t>(entry);
  stack_pointer_ = word;
}

inline void Fiber::change(Fiber& from, Fiber& to) {
  change_stack(&from.stack_pointer_, to.stack_pointer_);
}

#else

inline void Fiber::prepare(void (*entry)(), char* top) {
  getcontext(&context_);
  context_.uc_stack.ss_sp = memory_;
  context_.uc_stack.ss_size = static_cast<size_t>(top - memory_);
  context_.uc_link = nullptr;
  makecontext(&context_, entry, 0);
}

inline void Fiber::change(Fiber& from, Fiber& to) {
  swapcontext(&from.context_, &to.context_);
}

#endif

}  // namespace cuda_emulation

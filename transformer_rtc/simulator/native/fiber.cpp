// SPDX-License-Identifier: Apache-2.0
#include "fiber.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <new>

namespace {

// Not all at the same place of their stacks: those are a power of two apart, and would share a few lines of the caches.
char* top_of(char* stack) {
  const uintptr_t number = reinterpret_cast<uintptr_t>(stack) / Stacks::kBytes;
  return stack + Stacks::kBytes - number % 32 * 128 - number / 32 % 8 * 4096;
}

}  // namespace

// What trtc_look writes, and where it goes on; in assembly, as link-time optimisation would lose it.
asm(R"(
.bss
.globl trtc_looked_at
.hidden trtc_looked_at
.p2align 4
trtc_looked_at:
  .zero 192
.text
)");

#if defined(__x86_64__)

// What the System V ABI has a call keep: rbx, rbp, r12 to r15 and the stack pointer.
asm(R"(
.text
.globl trtc_switch
.hidden trtc_switch
.type trtc_switch, @function
.p2align 4
trtc_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size trtc_switch, . - trtc_switch

.globl trtc_look
.hidden trtc_look
.type trtc_look, @function
.p2align 4
trtc_look:
  leaq trtc_looked_at(%rip), %rax
  movq %rbx, 0(%rax)
  movq %rbp, 8(%rax)
  movq %r12, 16(%rax)
  movq %r13, 24(%rax)
  movq %r14, 32(%rax)
  movq %r15, 40(%rax)
  movq %rsp, 176(%rax)
  jmp *184(%rax)
.size trtc_look, . - trtc_look
)");

void* prepare_fiber(char* stack, void (*entry)()) {
  auto* top = reinterpret_cast<uintptr_t*>(top_of(stack));
  *--top = 0;  // where the entry would return to; and its stack is aligned as after a call
  *--top = reinterpret_cast<uintptr_t>(entry);
  for (int i = 0; i < 6; ++i) *--top = 0;
  return top;
}

#elif defined(__aarch64__)

// What AAPCS64 has a call keep: x19 to x30, d8 to d15 and the stack pointer.
asm(R"(
.text
.globl trtc_switch
.hidden trtc_switch
.type trtc_switch, %function
.p2align 4
trtc_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size trtc_switch, . - trtc_switch

.globl trtc_look
.hidden trtc_look
.type trtc_look, @function
.p2align 4
trtc_look:
  adrp x16, trtc_looked_at
  add x16, x16, :lo12:trtc_looked_at
  stp x19, x20, [x16, #0]
  stp x21, x22, [x16, #16]
  stp x23, x24, [x16, #32]
  stp x25, x26, [x16, #48]
  stp x27, x28, [x16, #64]
  stp x29, x30, [x16, #80]
  stp d8, d9, [x16, #96]
  stp d10, d11, [x16, #112]
  stp d12, d13, [x16, #128]
  stp d14, d15, [x16, #144]
  mov x17, sp
  str x17, [x16, #176]
  ldr x16, [x16, #184]
  br x16
.size trtc_look, . - trtc_look
)");

void* prepare_fiber(char* stack, void (*entry)()) {
  auto* saved = reinterpret_cast<uintptr_t*>(top_of(stack) - 160);
  for (int i = 0; i < 20; ++i) saved[i] = 0;
  saved[11] = reinterpret_cast<uintptr_t>(entry);  // x30
  return saved;
}

#else
#error "the simulator runs on x86-64 and aarch64"
#endif

Stacks::~Stacks() {
  for (char* slab : slabs_) munmap(slab, kSlab * kBytes);
}

char* Stacks::take() {
  if (free_.empty()) {
    void* mapped =
        mmap(nullptr, kSlab * kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    auto* slab = static_cast<char*>(mapped);
    for (size_t i = kSlab; i-- > 0;) {
      if (slabs_.size() * kSlab < kGuarded) mprotect(slab + i * kBytes, kGuardBytes, PROT_NONE);
      free_.push_back(slab + i * kBytes);
    }
    slabs_.push_back(slab);
  }
  char* stack = free_.back();
  free_.pop_back();
  return stack;
}

void Stacks::give(char* stack) {
  if (left_ != nullptr) free_.push_back(left_);
  left_ = stack;
}

void Stacks::give_all() {
  left_ = nullptr;
  free_.clear();
  for (size_t i = slabs_.size(); i-- > 0;) {
    if (i * kSlab >= kKeep) madvise(slabs_[i], kSlab * kBytes, MADV_DONTNEED);
    for (size_t j = kSlab; j-- > 0;) free_.push_back(slabs_[i] + j * kBytes);
  }
}

bool Stacks::is_guard(const void* address) const {
  for (char* slab : slabs_) {
    const auto offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(slab);
    if (offset < kSlab * kBytes) return offset % kBytes < kGuardBytes;
  }
  return false;
}

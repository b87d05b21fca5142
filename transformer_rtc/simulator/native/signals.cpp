// SPDX-License-Identifier: Apache-2.0
#include "signals.hpp"

#include "calls.hpp"

#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

namespace simulator {

namespace {

constexpr uintptr_t kBelowStackPointer = 128;  // bytes that code may use
constexpr size_t kStackBytes = 64 * 1024;

// All registers that code may use, and the stack pointer.
Digest registers_of(const ucontext_t& context, uintptr_t* stack_pointer) {
  Digest digest;
#if defined(__x86_64__)
  const auto& registers = context.uc_mcontext;
  for (int i = REG_R8; i <= REG_EFL; ++i) digest.add(static_cast<uint64_t>(registers.gregs[i]));
  digest.add(registers.fpregs->_xmm, sizeof(registers.fpregs->_xmm));
  *stack_pointer = static_cast<uintptr_t>(registers.gregs[REG_RSP]);
#else
  const auto& registers = context.uc_mcontext;
  digest.add(registers.regs, sizeof(registers.regs));
  digest.add(registers.pstate);
  digest.add(registers.__reserved, 528);  // the first record: floating point
  *stack_pointer = registers.sp;
#endif
  return digest;
}

}  // namespace

Signals::Signals() {
  static char handler_stack[kStackBytes];
  stack_t stack{};
  stack.ss_sp = handler_stack;
  stack.ss_size = kStackBytes;
  sigaltstack(&stack, &old_stack_);
  thread_ = pthread_self();
  struct sigaction action{};
  action.sa_sigaction = &Signals::handle;
  for (size_t i = 0; i < kCount; ++i) {
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART;  // it may not return
    // A tick stays on the stack of the thread that it meets: others may run before it returns.
    if (kNumbers[i] != kTick) action.sa_flags |= SA_ONSTACK;
    sigaction(kNumbers[i], &action, &old_[i]);
  }
  sigevent event{};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = kTick;
  event._sigev_un._tid = static_cast<int>(syscall(SYS_gettid));
  has_timer_ = timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_) == 0;
  set_period(kPeriod);
}

void Signals::set_period(long nanoseconds) {
  const timespec period{0, nanoseconds};
  const itimerspec periods{period, period};
  if (has_timer_) timer_settime(timer_, 0, &periods, nullptr);
}

Signals::~Signals() {
  if (has_timer_) timer_delete(timer_);
  // A tick that is on its way must not meet the default action.
  struct sigaction ignore{};
  ignore.sa_handler = SIG_IGN;
  sigaction(kTick, &ignore, nullptr);
  for (size_t i = 0; i < kCount; ++i) sigaction(kNumbers[i], &old_[i], nullptr);
  sigaltstack(&old_stack_, nullptr);
}

void Signals::handle(int number, siginfo_t* info, void* context) {
#if defined(__x86_64__)
  const auto code = static_cast<uintptr_t>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#else
  const auto code = static_cast<uintptr_t>(static_cast<ucontext_t*>(context)->uc_mcontext.pc);
#endif
  Machine* machine = Machine::current;
  const bool on_fiber = machine != nullptr && machine->running_ != nullptr && pthread_equal(thread_, pthread_self());
  const bool touching = on_fiber && machine->touching_ != nullptr;
  const bool of_kernel =
      touching || (on_fiber && code >= machine->launch_->code_begin && code < machine->launch_->code_end);
  // Behind the instruction, as a return address lies behind its call.
  const auto* caller = touching ? machine->touching_ : reinterpret_cast<const void*>(code + 1);
  if (number == kTick) {
    if (!on_fiber) return;
    if (machine->switches_ != machine->ticked_switches_) {
      machine->ticked_switches_ = machine->switches_;
      machine->entered_at_ = cpu_seconds();
      machine->states_.clear();
    }
    if (of_kernel && !touching) {
      uintptr_t stack_pointer;
      const Digest registers = registers_of(*static_cast<ucontext_t*>(context), &stack_pointer);
      machine->check_end(caller, registers, stack_pointer - kBelowStackPointer);
    } else if (machine->launch_->checked && !touching) {
      // In the machine's own code: its next access shows the state of the kernel's.
      trtc_looked_at[kLookedAt - 1] = reinterpret_cast<uintptr_t>(&Calls::access_after_tick);
      machine->interface_.access = reinterpret_cast<decltype(machine->interface_.access)>(&trtc_look);
    }
    return;
  }
  if (on_fiber && number == SIGSEGV && machine->stacks_.is_guard(info->si_addr)) {
    machine->fail_here(
        "signal",
        "the thread's local variables need more than a stack of " + std::to_string(Stacks::kBytes / 1024) + " KiB",
        caller);
  }
  if (of_kernel && number == SIGFPE) machine->fail_here("overflow", "an integer division by zero", caller);
  if (of_kernel) {
    machine->fail_here("signal",
                       number == SIGILL ? "the kernel reaches a place that its compiler took for unreachable"
                                        : "an access of address " +
                                              machine->hexadecimal(reinterpret_cast<uintptr_t>(info->si_addr)) +
                                              ", which is no memory; SimulatedDevice(checked=True) tells more",
                       caller);
  }
  // Not a kernel's: let it happen again under whoever handled it before.
  for (size_t i = 0; i < kCount; ++i) {
    if (kNumbers[i] == number) sigaction(number, &old_[i], nullptr);
  }
}

}  // namespace simulator

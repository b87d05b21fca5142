// SPDX-License-Identifier: Apache-2.0
#include "signals.hpp"

#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

namespace simulator {

namespace {

constexpr int kTicksWithoutSwitch = 16;  // of a quarter of a second of work
constexpr size_t kStackBytes = 64 * 1024;

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
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // it does not return
  for (size_t i = 0; i < kCount; ++i) sigaction(kNumbers[i], &action, &old_[i]);
  sigevent event{};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = kTick;
  event._sigev_un._tid = static_cast<int>(syscall(SYS_gettid));
  const itimerspec quarters{{0, 250'000'000}, {0, 250'000'000}};
  has_timer_ =
      timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer_) == 0 && timer_settime(timer_, 0, &quarters, nullptr) == 0;
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
    if (!on_fiber || machine->switches_ != machine->ticked_switches_) {
      if (on_fiber) machine->ticked_switches_ = machine->switches_;
      machine->ticks_ = 0;
    } else if (++machine->ticks_ >= kTicksWithoutSwitch && of_kernel) {
      machine->fail_here("endless", "the thread runs on and on without meeting another", caller);
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

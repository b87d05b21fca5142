// SPDX-License-Identifier: Apache-2.0
// What unchecked code does wrong, and what never comes to an end: signals, told as faults.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include "machine.hpp"

namespace simulator {

// For a scope in which the machine runs, in this thread.
class Signals {
 public:
  Signals();
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  // Ticks come often from now on: each thread that spins takes some of them.
  static void quicken() { set_period(kQuickPeriod); }

 private:
  static constexpr int kTick = 40;  // a real-time signal that nobody else is known to use
  static constexpr int kNumbers[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, kTick};
  static constexpr size_t kCount = sizeof(kNumbers) / sizeof(kNumbers[0]);

  static constexpr long kPeriod = 20'000'000, kQuickPeriod = 1'000'000;  // nanoseconds

  static void set_period(long nanoseconds);
  static void handle(int number, siginfo_t* info, void* context);

  static inline struct sigaction old_[kCount];
  static inline pthread_t thread_;
  static inline timer_t timer_;
  static inline bool has_timer_;
  stack_t old_stack_{};
};

}  // namespace simulator

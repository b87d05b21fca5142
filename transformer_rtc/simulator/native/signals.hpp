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

 private:
  static constexpr int kTick = 40;  // a real-time signal that nobody else is known to use
  static constexpr int kNumbers[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, kTick};
  static constexpr size_t kCount = sizeof(kNumbers) / sizeof(kNumbers[0]);

  static void handle(int number, siginfo_t* info, void* context);

  static inline struct sigaction old_[kCount];
  static inline pthread_t thread_;
  stack_t old_stack_{};
  timer_t timer_{};
  bool has_timer_ = false;
};

}  // namespace simulator

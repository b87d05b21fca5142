// SPDX-License-Identifier: Apache-2.0
// Stackful fibers: a kernel's threads, run in turn by one thread of the process.
#pragma once

#include <cstddef>
#include <vector>

// Saves the running fiber's registers on its stack, its stack pointer in *save, and goes on where `load` was saved.
extern "C" void trtc_switch(void** save, void* load);

// A first stack pointer for trtc_switch: the fiber starts in `entry`, which never returns.
void* prepare_fiber(char* stack, void (*entry)());

// Stacks, kept for later launches.
class Stacks {
 public:
  static constexpr size_t kBytes = 128 * 1024;

  ~Stacks();
  char* take();
  // The stack may be in use until the next call of give() or give_all().
  void give(char* stack);
  // Gives all back, and their memory to the system, but for what a small launch needs.
  void give_all();
  // Whether an address is where no stack may grow.
  bool is_guard(const void* address) const;

 private:
  static constexpr size_t kSlab = 64;       // stacks mapped together
  static constexpr size_t kGuarded = 2048;  // the first ones have a guard page; each costs the system a mapping
  static constexpr size_t kKeep = 2048;     // keep their memory
  static constexpr size_t kGuardBytes = 4096;

  std::vector<char*> slabs_;
  std::vector<char*> free_;
  char* left_ = nullptr;  // given back last
};

// SPDX-License-Identifier: Apache-2.0
// What shows that a thread never ends: its registers, its stack and all memory are what they were before, and nobody
// else runs meanwhile. Then it does the same again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

// Of what a loop may depend on. Two states of one digest are one state, but for a chance in 2^128.
struct Digest {
  uint64_t low = 0x2545f4914f6cdd1du, high = 0x9e3779b97f4a7c15u;

  void add(const void* data, size_t bytes) {
    const auto* at = static_cast<const char*>(data);
    for (; bytes >= 8; bytes -= 8, at += 8) {
      uint64_t word;
      std::memcpy(&word, at, 8);
      add(word);
    }
    uint64_t rest = 0;
    std::memcpy(&rest, at, bytes);
    add(rest);
  }
  void add(uint64_t word) {
    low = (low ^ word) * 0xff51afd7ed558ccdu;
    low ^= low >> 32;
    high = (high + word) * 0xc4ceb9fe1a85ec53u;
    high ^= high >> 29;
  }
  bool operator==(const Digest& other) const { return low == other.low && high == other.high; }
};

double cpu_seconds();  // of this thread

constexpr char kEndless[] = "the thread does the same for ever, and no other can go on";

// The last states that a thread had at some places of its code.
class States {
 public:
  void clear() {
    for (State& state : states_) state.place = nullptr;
  }

  // Whether the thread was in this state here; it is remembered.
  bool repeats(const void* place, const Digest& digest) {
    for (const State& state : states_) {
      if (state.place == place && state.digest == digest) return true;
    }
    states_[next_++ % kCount] = {place, digest};
    return false;
  }

 private:
  static constexpr size_t kCount = 64;
  struct State {
    const void* place;
    Digest digest;
  };
  State states_[kCount] = {};
  size_t next_ = 0;
};

// Stands for the function whose address lies in the last word of trtc_looked_at: it leaves there the registers that a
// call keeps and the stack pointer, as its caller had them, and jumps on.
extern "C" void trtc_look();
constexpr size_t kLookedAt = 24;
extern "C" uintptr_t trtc_looked_at[kLookedAt];

// Rows that a group of CTAs takes in turn: they come through a ring of slots in shared memory, so that the next ones
// are on their way while one is worked on.
#pragma once

#include "rows.cuh"

namespace trtc {

// `Inputs` are the arrays that a row is read from. Of the `stages` slots one is worked on, and another is finished
// where that comes `lag` rows late. A thread sees its own Vecs of a slot; of ragged rows, those of all threads.
template <class Config, class Inputs>
struct RowRing {
  enum : int {
    stages = Config::stages,
    ahead = stages - 1 - Config::lag,  // rows that are on their way
  };
  // Whether one thread sends for a whole row.
  enum : bool { bulk = Config::bulk && TRTC_ARCHITECTURE >= 90 };
  Inputs inputs;
  Place<Config> place;
  char* slots;
  uint64* here;   // for each slot: completes when its row is there
  uint32 parity;  // of their phases
  int slot;       // of the row that is taken next
  int last_slot;  // and of the one that is finished next

  template <class Params>
  TRTC_DEVICE void begin(const Params& params, const Place<Config>& of, char* shared) {
    place = of;
    slots = shared;
    slot = last_slot = 0;
    here = nullptr;
    parity = 0;
    inputs.begin(params, place);
#if TRTC_ARCHITECTURE >= 90
    if constexpr (bulk) {
      TRTC_SHARED(uint64, barriers, stages);
      here = barriers;
      if (place.thread == 0) {
#pragma unroll
        for (int i = 0; i < stages; ++i) transaction_barrier_init(here + i);
      }
      cta_barrier();
    }
#endif
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) fetch(params, i, place.begin_row() + i * place.stride);
  }

  // Takes the CTA's rows that begin with `first_row`: waits for them, and sends for those that come next.
  template <class Params>
  TRTC_DEVICE void take(const Params& params, int64 first_row) {
    char* found = slots + slot * Config::slot_bytes;
    if constexpr (ahead == 0) {
      if constexpr (bulk) order_copies();
      fetch(params, slot, first_row);
    }
    wait_async<(ahead > 0 ? ahead - 1 : 0)>();
    const int64 row = first_row + place.row_in_cta;
    inputs.locate(params, found, place, row);
#if TRTC_ARCHITECTURE >= 90
    if constexpr (bulk) {
      transaction_barrier_wait(here + slot, parity);
      if (slot + 1 == stages) parity ^= 1;
    }
#endif
    if constexpr (bulk || Config::ragged) {
      if constexpr (!Inputs::leaves_outside) inputs.clear_outside(place.thread, place.columns(row, params.rows));
      order_copies();
    }
    if constexpr (ahead > 0) {
      fetch(params, slot + ahead < stages ? slot + ahead : slot + ahead - stages, first_row + ahead * place.stride);
    }
    slot = slot + 1 == stages ? 0 : slot + 1;
  }

  // Takes them again, `lag` turns later, to finish them.
  template <class Params>
  TRTC_DEVICE void take_again(const Params& params, int64 first_row) {
    char* found = slots + last_slot * Config::slot_bytes;
    if constexpr (Config::lag != 0) inputs.locate(params, found, place, first_row + place.row_in_cta);
    last_slot = last_slot + 1 == stages ? 0 : last_slot + 1;
  }

 private:
  // What all threads did with shared memory comes before copies that are sent for from here on.
  TRTC_DEVICE void order_copies() const {
#if TRTC_ARCHITECTURE >= 90
    fence_bulk();
#endif
    cta_barrier();
  }

  template <class Params>
  TRTC_DEVICE void fetch(const Params& params, int to, int64 first_row) {
    const int64 row = first_row + place.row_in_cta;
    if (first_row < params.rows) {
      inputs.fetch(params, slots + to * Config::slot_bytes, place, row, bulk ? here + to : nullptr);
    }
    commit_async();
  }
};

}  // namespace trtc

// Rows that a group of CTAs takes in turn: they come through a ring of slots in shared memory, so that the next ones
// are on their way while one is worked on.
#pragma once

#include "rows.cuh"

namespace trtc {

// `Inputs` are the arrays that a row is read from: locate(), fetch() and clear_before() as InputRow has them. Of the
// `stages` slots one is worked on, and another is finished where that comes `lag` rows late.
template <class Config, class Inputs>
struct RowRing {
  enum : int {
    stages = Config::stages,
    ahead = stages - 1 - Config::lag,  // rows that are on their way
  };
  Inputs inputs;
  Place<Config> place;
  char* slots;
  int slot;       // of the row that is taken next
  int last_slot;  // and of the one that is finished next

  template <class Params>
  TRTC_DEVICE void begin(const Params& params, const Place<Config>& of, char* shared) {
    place = of;
    slots = shared;
    slot = last_slot = 0;
    inputs.begin(params, place);
#pragma unroll 1
    for (int i = 0; i < ahead; ++i) fetch(params, i, place.begin_row() + i * place.stride);
  }

  // Takes the CTA's rows that begin with `first_row`: waits for them, and sends for those that come next. The slot.
  template <class Params>
  TRTC_DEVICE char* take(const Params& params, int64 first_row) {
    char* here = slots + slot * Config::slot_bytes;
    if constexpr (ahead == 0) fetch(params, slot, first_row);
    wait_async<(ahead > 0 ? ahead - 1 : 0)>();
    if constexpr (ahead > 0) {
      fetch(params, slot + ahead < stages ? slot + ahead : slot + ahead - stages, first_row + ahead * place.stride);
    }
    inputs.locate(params, here, place, first_row + place.row_in_cta);
    inputs.clear_before(place.thread);
    slot = slot + 1 == stages ? 0 : slot + 1;
    return here;
  }

  // Takes them again, `lag` turns later, to finish them.
  template <class Params>
  TRTC_DEVICE char* take_again(const Params& params, int64 first_row) {
    char* here = slots + last_slot * Config::slot_bytes;
    if constexpr (Config::lag != 0) inputs.locate(params, here, place, first_row + place.row_in_cta);
    last_slot = last_slot + 1 == stages ? 0 : last_slot + 1;
    return here;
  }

 private:
  template <class Params>
  TRTC_DEVICE void fetch(const Params& params, int to, int64 first_row) {
    const int64 row = first_row + place.row_in_cta;
    if (first_row < params.rows) {
      inputs.fetch(params, slots + to * Config::slot_bytes, place, row, place.columns(row, params.rows));
    }
    commit_async();
  }
};

}  // namespace trtc

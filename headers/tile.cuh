// Rows so short that a thread has a whole one: a warp brings those of its lanes, and takes their results away, through
// shared memory.
#pragma once

#include "rows.cuh"

namespace trtc {

// A warp's rows of one array, one behind the other. No other warp sees them. Where rows are a multiple of N elements,
// which threads read at once, blocks of 16 bytes change places within 128 bytes, so that those of neighbouring rows lie
// in different banks.
template <class Config>
struct RowTile {
  enum : int {
    N = Config::vector,
    steps = Config::steps,
    lanes = 32,
    block = 16,                       // bytes: N elements of the widest array
    turn_bytes = lanes * block,       // what a warp copies at once
    warp_bytes = steps * turn_bytes,  // of the longest rows
    cta_bytes = Config::rows_per_cta / lanes * warp_bytes,
  };

  char* shared;
  int columns;
  int lane;
  int count;  // of rows; below 1: there is none
  int64 first_row;

  // Of the CTA's rows from `cta_row` on.
  template <class Params>
  TRTC_DEVICE void begin(char* of_cta, const Params& params, int64 cta_row) {
    static_assert(Config::threads == 1 && Config::rows_per_cta % lanes == 0, "a thread has a row, and a warp 32");
    static_assert(steps * N == lanes, "of a row that lies alone a lane has an element");
    const uint32 thread = static_cast<uint32>(thread_index()), warp = thread / lanes;
    shared = of_cta + warp * warp_bytes;
    columns = params.columns;
    lane = static_cast<int>(thread % lanes);
    go_to(params, cta_row + warp * lanes);
  }
  // The same rows of another array, in shared memory `number` of its tiles further.
  TRTC_DEVICE RowTile of_array(int number) const {
    RowTile found = *this;
    found.shared += number * cta_bytes;
    return found;
  }
  template <class Params>
  TRTC_DEVICE void go_to(const Params& params, int64 row) {
    first_row = row;
    count = static_cast<int>(min(params.rows - row, static_cast<int64>(lanes)));
  }

  // Brings rows, which may be loaded by all lanes once each has waited.
  template <class T, class Params>
  TRTC_DEVICE void fetch(const RowArray& array, const Params& params) const {
    const T* all = static_cast<const T*>(array.data);
    if (is_dense(array, params)) {
      const char* from = reinterpret_cast<const char*>(all + first_row * columns);
      const Turns<T> turns(*this);
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        if (turns.has(k)) copy_async<block>(turns.at(k), from + lane * block + k * turn_bytes);
      }
      // What is behind the last row must not be touched, as a copy of a part of a block does (compute-sanitizer).
      const int element = count * columns - turns.rest + lane;
      if (turns.rest > 0 && lane <= turns.rest) bring(element, all + first_row * columns + element, lane < turns.rest);
    } else {
#pragma unroll 4
      for (int row = 0; row < count; ++row) {
        const T* of_row = all + array.offset(params, first_row + row);
        if (lane < columns || row + 1 == count) bring(row * columns + lane, of_row + lane, lane < columns);
      }
    }
  }

  // This thread's row, and `fill` behind it. A thread without one has the last.
  template <class T>
  TRTC_DEVICE void load(Vec<T, N> (&value)[steps], uint32 fill) const {
    const Words<T> words(*this, min(lane, count - 1));
#pragma unroll
    for (int k = 0; k < steps; ++k) value[k].fill(fill);
    if (is_whole()) {
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        if (k * N < columns) value[k].load_shared(address_of<T>(words.first + k * N));
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < steps; ++k) {
      if (k * N + N <= columns) {
#pragma unroll
        for (int i = 0; i < Vec<T, N>::words; ++i) value[k].word[i] = words.get(k * Vec<T, N>::words + i);
      } else if (k * N < columns) {
#pragma unroll
        for (int i = 0; i < N - 1; ++i) {
          if (k * N + i < columns) value[k].set_bits(i, words.element(k * N + i));
        }
      }
    }
  }

  // This thread's row, to where all have loaded one from.
  template <class T>
  TRTC_DEVICE void put(const Vec<T, N> (&value)[steps]) const {
    Words<T> words(*this, lane);
    warp_barrier();
    if (is_whole()) {
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        value[k].template store<Space::shared>(address_of<T>(words.first + k * N), k * N < columns);
      }
      return;
    }
#pragma unroll
    for (int k = 0; k < steps; ++k) {
      if (k * N + N <= columns) {
#pragma unroll
        for (int i = 0; i < Vec<T, N>::words; ++i) words.put(k * Vec<T, N>::words + i, value[k].word[i]);
      } else if (k * N < columns) {
        words.finish(k * N);
#pragma unroll
        for (int i = 0; i < N - 1; ++i) words.put_element(k * N + i, value[k].bits(i), k * N + i < columns);
      }
    }
  }

  // Takes the rows away.
  template <class T, class Params>
  TRTC_DEVICE void store(const RowArray& array, const Params& params) const {
    T* all = static_cast<T*>(array.data);
    warp_barrier();
    if (is_dense(array, params)) {
      T* to = all + first_row * columns;
      constexpr int of_block = block / static_cast<int>(sizeof(T));
      const Turns<T> turns(*this);
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        if (turns.has(k)) {
          Vec<T, of_block> value;
          value.load_shared(reinterpret_cast<const T*>(turns.at(k)));
          value.store(to + (lane + k * lanes) * of_block, true);
        }
      }
      const int element = count * columns - turns.rest + lane;
      if (lane < turns.rest) to[element] = *address_of<T>(element);
    } else {
#pragma unroll 4
      for (int row = 0; row < count; ++row) {
        T* of_row = all + array.offset(params, first_row + row);
        if (lane < columns) of_row[lane] = *address_of<T>(row * columns + lane);
      }
    }
  }

 private:
  // An element of the tile becomes one of global memory; or 0, which load() may see behind the last row.
  template <class T>
  TRTC_DEVICE void bring(int element, const T* from, bool exists) const {
    Vec<T, 1> value;
    value.load(from, exists ? 1 : 0, true);
    value.template store<Space::shared>(address_of<T>(element), true);
  }
  // Whether rows are whole Vecs.
  TRTC_DEVICE bool is_whole() const { return columns % N == 0; }
  // Whether rows follow each other without a gap, and those of every warp are aligned.
  template <class Params>
  TRTC_DEVICE bool is_dense(const RowArray& array, const Params& params) const {
    return params.inner_count == 1 && array.outer_stride == columns &&
           reinterpret_cast<uint64>(array.data) % block == 0;
  }
  TRTC_DEVICE int place_of(int byte) const { return is_whole() ? byte ^ (byte >> 7 & 7) * block : byte; }
  template <class T>
  TRTC_DEVICE T* address_of(int element) const {
    return reinterpret_cast<T*>(shared + place_of(element * static_cast<int>(sizeof(T))));
  }

  // The blocks of dense rows that this lane copies, one in a turn. Those of every second turn change places alike.
  template <class T>
  struct Turns {
    int bytes;  // of all rows
    int rest;   // elements behind the last whole block
    int end;    // of the first one
    char* even;
    char* odd;

    explicit TRTC_DEVICE Turns(const RowTile& tile)
        : bytes(tile.count * tile.columns * static_cast<int>(sizeof(T))),
          rest(bytes % block / static_cast<int>(sizeof(T))),
          end(tile.lane * block + block),
          even(tile.shared + tile.place_of(tile.lane * block)),
          odd(tile.shared + tile.place_of(tile.lane * block + turn_bytes) - turn_bytes) {}
    TRTC_DEVICE bool has(int k) const { return end + k * turn_bytes <= bytes; }
    TRTC_DEVICE char* at(int k) const { return (k % 2 == 0 ? even : odd) + k * turn_bytes; }
  };

  // A row that is not whole Vecs, in words of 4 bytes: where elements have 2, it may begin with the second one of a
  // word.
  template <class T>
  struct Words {
    enum : int { is_half = sizeof(T) == 2 };
    int first;  // element of the tile
    int shift;  // bits, of the row in its first word
    uint32* words;
    uint32 before;  // what put() had last

    TRTC_DEVICE Words(const RowTile& tile, int row) : first(row * tile.columns), before(0) {
      const int odd = is_half ? first & 1 : 0;
      shift = odd * 16;
      words = reinterpret_cast<uint32*>(tile.shared + (first - odd) * static_cast<int>(sizeof(T)));
    }
    // Word i of the row. Of halves there must be another one behind it.
    TRTC_DEVICE uint32 get(int i) const {
      if constexpr (is_half) return shift_right(words[i], words[i + 1], shift);
      return words[i];
    }
    TRTC_DEVICE uint32 element(int i) const {
      if constexpr (is_half) return half(i)[0];
      return words[i];
    }
    // In order. The last half of a shifted row is not written before finish().
    TRTC_DEVICE void put(int i, uint32 word) {
      if constexpr (is_half) {
        const bool begins = i == 0 && shift != 0;  // in a word that is the row's before, too
        store_4<Space::shared>(words + i, shift_left(before, word, shift), !begins);
        if (i == 0) store_2<Space::shared>(half(0), word, begins);
        before = word;
      } else {
        words[i] = word;
      }
    }
    TRTC_DEVICE void finish(int elements) const {
      if constexpr (is_half) store_2<Space::shared>(half(elements - 1), before >> 16, elements > 0 && shift != 0);
    }
    TRTC_DEVICE void put_element(int i, uint32 bits, bool valid) const {
      if constexpr (is_half) {
        store_2<Space::shared>(half(i), bits, valid);
      } else {
        store_4<Space::shared>(words + i, bits, valid);
      }
    }

   private:
    TRTC_DEVICE uint16* half(int i) const { return reinterpret_cast<uint16*>(words) + shift / 16 + i; }
  };
};

// A warp's tiles of several arrays: of the rows that have their turn, and of the next, which are on their way. A launch
// has its CTAs take turns.
template <class Config, int Arrays>
struct RowTiles {
  using Tile = RowTile<Config>;
  Tile now;
  Tile coming;
  int further;  // from the shared memory of `now` to that of `coming`

  template <class Params>
  TRTC_DEVICE void begin(char* shared, const Params& params, const Place<Config>& place) {
    further = Arrays * Tile::cta_bytes;
    coming.begin(shared, params, place.begin_row());
    now = coming;
    now.count = 0;
  }
  // Whether there are rows.
  template <class Params>
  TRTC_DEVICE bool turn(const Params& params, const Place<Config>& place) {
    now = coming;
    coming.go_to(params, now.first_row + place.stride);
    coming.shared += further;
    further = -further;
    warp_barrier();  // what was there has been taken away
    return now.count > 0;
  }
  // Called when the next rows have been fetched; returns whether there are any before them, which are here then.
  TRTC_DEVICE bool wait() const {
    commit_async();
    if (now.count <= 0) return false;
    wait_async<1>();
    warp_barrier();
    return true;
  }
};

}  // namespace trtc

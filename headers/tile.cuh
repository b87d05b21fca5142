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
    const int end = count * columns;
    if (is_dense(array, params)) {
      const T* rows = static_cast<const T*>(array.data) + first_row * columns;
      const char* from = reinterpret_cast<const char*>(rows) + lane * block;
      const Turns<T> turns(*this);
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        if (turns.has(k)) copy_async<block>(turns.at(k), from + k * turn_bytes);
      }
      // What is behind the last row must not be touched, as a copy of a part of a block does (compute-sanitizer).
      const int rest = end - turns.rest + lane;
      if (lane < turns.rest) *address_of<T>(rest) = rows[rest];
    } else {
      move_scattered<T, Bring>(array, params);
    }
    // Of a row that ends within a word load() sees the rest of the word, which is of no row behind the last one.
    if constexpr (sizeof(T) == 2) {
      if (lane == 0 && !is_whole() && count > 0) store_2<Space::shared>(address_of<T>(end), 0, true);
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
    warp_barrier();
    if (is_dense(array, params)) {
      T* to = static_cast<T*>(array.data) + first_row * columns;
      constexpr int of_block = Vec<T, N>::per_quad;
      const Turns<T> turns(*this);
#pragma unroll
      for (int k = 0; k < steps; ++k) {
        if (turns.has(k)) {
          Vec<T, of_block> value;
          value.load_shared(reinterpret_cast<const T*>(turns.at(k)));
          value.store(to + (lane + k * lanes) * of_block, true);
        }
      }
      const int rest = count * columns - turns.rest + lane;
      if (lane < turns.rest) to[rest] = *address_of<T>(rest);
    } else {
      move_scattered<T, Take>(array, params);
    }
  }

 private:
  // Up to `of_unit` neighbouring elements of one block of the tile become those of global memory, M at once. (17
  // elements of 2 bytes, forward, at an odd address: 0.39 of the copy's bandwidth, by 4 a unit 0.35, by 2 0.28.)
  template <class T, int M>
  struct Bring {
    enum : int { bytes = Vec<T, M>::bytes, of_unit = M > N ? M : N };
    static TRTC_DEVICE void unit(T* tile, const T* global, int count) {
      if constexpr (bytes < 4) {
        uint32 bits[of_unit];
#pragma unroll
        for (int i = 0; i < of_unit; ++i) bits[i] = load_element(global + i, i < count);
#pragma unroll
        for (int i = 0; i < of_unit; ++i) store_2<Space::shared>(tile + i, bits[i], i < count);
      } else {
#pragma unroll
        for (int i = 0; i < of_unit; i += M) {
          if (i < count) copy_async<bytes>(tile + i, global + i);
        }
      }
    }
  };
  // Those of global memory become those of the tile. (The same, with 4 brought in a unit: by 4 0.37, by 2 0.35, by 1
  // 0.30.)
  template <class T, int M>
  struct Take {
    enum : int { of_unit = M > 4 ? M : 4 };
    static TRTC_DEVICE void unit(const T* tile, T* global, int count) {
#pragma unroll
      for (int i = 0; i < of_unit; i += M) {
        if (i < count) {
          Vec<T, M> value;
          value.load_shared(tile + i);
          value.store(global + i, true);
        }
      }
    }
  };

  // Rows that lie anywhere, in blocks of 16 bytes where all consist of these. Each lane finds where a row begins, and
  // tells those that have units of it.
  template <class T, template <class, int> class Move, class Params>
  TRTC_DEVICE void move_scattered(const RowArray& array, const Params& params) const {
    constexpr int of_block = Vec<T, N>::per_quad;
    T* all = static_cast<T*>(array.data);
    T* of_lane = all + array.offset(params, first_row + min(lane, count - 1));
    if (columns % of_block == 0 && rows_aligned<T, of_block>(all, array.outer_stride, array.inner_stride)) {
      move_units<T, Move<T, of_block>>(of_lane);
    } else {
      move_units<T, Move<T, 1>>(of_lane);
    }
  }
  // A lane has every 32nd unit of the rows.
  template <class T, class Move>
  TRTC_DEVICE void move_units(T* of_lane) const {
    const int of_row = (columns + Move::of_unit - 1) / Move::of_unit;
    // Divides numbers up to 32 by 1 to 32.
    const int reciprocal = static_cast<int>(2048u / static_cast<uint32>(of_row)) + 1;
    const int rows_on = lanes * reciprocal >> 11, units_on = lanes - rows_on * of_row;
    int row = lane * reciprocal >> 11, unit = lane - row * of_row;
#pragma unroll 1
    for (int first = 0; first < count * of_row; first += lanes) {
      T* begin = reinterpret_cast<T*>(shuffle_from(reinterpret_cast<uint64>(of_lane), row));
      const int column = unit * Move::of_unit;
      if (row < count) Move::unit(address_of<T>(row * columns + column), begin + column, columns - column);
      row += rows_on;
      unit += units_on;
      const bool is_behind = unit >= of_row;
      unit -= is_behind ? of_row : 0;
      row += is_behind;
    }
  }

  // Whether rows are whole Vecs.
  TRTC_DEVICE bool is_whole() const { return columns % N == 0; }
  // Whether rows follow each other without a gap, and those of every warp are aligned.
  template <class Params>
  TRTC_DEVICE bool is_dense(const RowArray& array, const Params& params) const {
    return params.inner_count == 1 && array.outer_stride == columns &&
           reinterpret_cast<uint64>(array.data) % block == 0;
  }
  TRTC_DEVICE int place_of(int byte) const { return byte ^ (byte >> 3 & (is_whole() ? 7 * block : 0)); }
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

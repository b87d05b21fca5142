// SPDX-License-Identifier: Apache-2.0
// Rows so short that a thread has a whole one, of up to 32 columns: a warp brings its rows, one for each lane, through
// shared memory, and its results leave by the same way.
//
// A tile is what a warp has of an array: 32 rows, one behind the other without a gap. No other warp sees it. Of an
// array that is dense, too, blocks of 16 bytes are copied, however short rows are. Then each lane reads its own row.
// Where rows are whole vectors, a lane reads these at once, and blocks change places within 128 bytes, so that those of
// neighbouring rows lie in different banks. Else it reads words of 4 bytes; a row of 16-bit elements may begin in the
// middle of one.
//
// The kernel is persistent. Each warp has two places for a tile of every array: one for the rows that it works on,
// whose results take their place, and one for the next rows, which are on their way.
#pragma once

#include "softmax/row.cuh"

namespace trtc {

enum : int {
  LANES = 32,
  BLOCK = 16,                   // bytes
  BLOCKS = VECTORS_PER_THREAD,  // of a lane, in a tile of the longest rows
  TURN_BYTES = LANES * BLOCK,   // of the blocks that a warp moves at once
  WARP_BYTES = BLOCKS * TURN_BYTES,
  CTA_BYTES = ROWS_PER_CTA * BLOCKS * BLOCK,  // of one array's tiles
};
static_assert(THREADS_PER_ROW == 1 && CTAS_PER_ROW == 1 && ROWS_PER_CTA % LANES == 0, "a warp has a row for each lane");
static_assert(VECTORS_PER_THREAD * VEC_SIZE == LANES, "a row has at most 32 columns");

struct Tile {
  char* shared;
  int64 first_row;
  int count;  // of rows; below 1: there is none
};

TRTC_DEVICE int lane_index() { return thread_index() % LANES; }

// Rows of the tile whose first one would be this.
TRTC_DEVICE int count_rows(const Params& params, int64 first_row) {
  return static_cast<int>(min(params.rows - first_row, static_cast<int64>(LANES)));
}

// Whether rows are whole vectors: always, where a kernel is for whole rows (not UNALIGNED).
TRTC_DEVICE bool is_whole(int columns) { return !UNALIGNED || columns % VEC_SIZE == 0; }

// Where a byte of a tile is.
TRTC_DEVICE int place_of(int columns, int byte) { return byte ^ (is_whole(columns) ? byte >> 3 & 7 * BLOCK : 0); }

// An array of rows, of elements of `size` bytes.
struct RowArray {
  const void* data;
  int64 outer_stride;
  int64 inner_stride;
  int size;
};

// Whether rows follow each other without a gap, and those of every tile begin at a block.
TRTC_DEVICE bool is_dense(const Params& params, const RowArray& array) {
  return params.inner_count == 1 && array.outer_stride == params.columns &&
         reinterpret_cast<uint64>(array.data) % BLOCK == 0;
}

// ---- Between global memory and a tile -------------------------------------------------------------------------------
// By elements of `size` bytes, to the tile (`brings`) or from it. What is brought may be read once its lane has waited.

TRTC_DEVICE void take_block(const char* shared, char* global) {
  uint32 word[4];
  load_vector<4, Space::shared>(word, reinterpret_cast<const uint32*>(shared));
  store_vector<4>(reinterpret_cast<uint32*>(global), word);
}

// The first `count` of N elements, all on their way at once.
template <int N>
TRTC_DEVICE void move_elements(char* shared, char* global, int count, int size, bool brings) {
  if (size == 4 && brings) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < count) copy_async<4>(shared + 4 * i, global + 4 * i);
    }
    return;
  }
  char *const from = brings ? global : shared, *const to = brings ? shared : global;
  uint32 element[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < count) element[i] = size == 4 ? reinterpret_cast<uint32*>(from)[i] : reinterpret_cast<uint16*>(from)[i];
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if (i < count && size == 4) reinterpret_cast<uint32*>(to)[i] = element[i];
    if (i < count && size == 2) reinterpret_cast<uint16*>(to)[i] = static_cast<uint16>(element[i]);
  }
}

// Where the first and the second one of a lane's blocks are; every second one of those behind them changes places
// alike. Held in registers: else the compiler finds each block's anew.
struct BlockPlaces {
  uint32 even;
  uint32 odd;
};
TRTC_DEVICE BlockPlaces find_block_places(int columns) {
  const int first = lane_index() * BLOCK;
  BlockPlaces places = {static_cast<uint32>(place_of(columns, first)),
                        static_cast<uint32>(place_of(columns, first + TURN_BYTES) - TURN_BYTES)};
  forget_uses(places.even);
  forget_uses(places.odd);
  return places;
}

// Dense rows, of elements of T. Those of a full tile are whole blocks.
template <class T, bool Brings>
TRTC_DEVICE void move_dense(const Tile& tile, const BlockPlaces& places, int columns, const void* data) {
  constexpr int size = sizeof(T), at_once = 4;
  char* const rows = static_cast<char*>(const_cast<void*>(data)) + tile.first_row * static_cast<uint32>(columns) * size;
  const int bytes = tile.count * columns * size, left = bytes - (lane_index() + 1) * BLOCK;
  char* global = rows + lane_index() * BLOCK;
  forget_uses(global);
  char *const even = tile.shared + places.even, *const odd = tile.shared + places.odd;
#pragma unroll
  for (int begin = 0; begin < BLOCKS; begin += at_once) {
    if (begin * TURN_BYTES >= bytes) break;
    uint32 word[at_once][4];
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const int turn = (begin + i) * TURN_BYTES;
      char* const shared = (i % 2 == 0 ? even : odd) + turn;
      if (!Brings) {
        load_vector<4, Space::shared>(word[i], reinterpret_cast<const uint32*>(shared));
      } else if (left >= turn) {
        copy_async<BLOCK>(shared, global + turn);
      }
    }
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      const int turn = (begin + i) * TURN_BYTES;
      if (!Brings) store_vector<4>(reinterpret_cast<uint32*>(global + turn), word[i], left >= turn);
    }
  }
  if (tile.count == LANES) return;
  // What is behind the last row must not be touched, as a copy of a part of a block does (compute-sanitizer).
  const int last = bytes / BLOCK * BLOCK + lane_index() * size;
  if (last < bytes) move_elements<1>(tile.shared + place_of(columns, last), rows + last, 1, size, Brings);
}

// Rows that lie anywhere: by blocks, where all rows consist of these, or in units of VEC_SIZE neighbouring elements,
// which are within a block. Each lane has where a row begins, and passes it to those that move units of it.
TRTC_DEVICE void move_scattered(const Params& params, const Tile& tile, const RowArray& array, bool brings) {
  if (tile.count <= 0) return;
  const int columns = params.columns, size = array.size;
  const int64 row_of_lane = tile.first_row + min(lane_index(), tile.count - 1);
  char* const begin = static_cast<char*>(const_cast<void*>(array.data)) +
                      row_offset(params, row_of_lane, array.outer_stride, array.inner_stride) * size;
  const bool vectors_are_blocks = !UNALIGNED && VEC_SIZE * size == BLOCK;
  const uint64 strides = static_cast<uint64>(columns | array.outer_stride | array.inner_stride);
  const bool by_blocks =
      vectors_are_blocks || (reinterpret_cast<uint64>(array.data) | strides * static_cast<uint32>(size)) % BLOCK == 0;
  const int unit_bytes = by_blocks ? static_cast<int>(BLOCK) : VEC_SIZE * size;
  const int row_bytes = columns * size, units = (row_bytes + unit_bytes - 1) / unit_bytes;  // of a row
  // Divides numbers up to 32 by 1 to 32.
  const int reciprocal = static_cast<int>(2048u / static_cast<uint32>(units)) + 1;
  const int rows_on = LANES * reciprocal >> 11, units_on = LANES - rows_on * units;
  int row = lane_index() * reciprocal >> 11, unit = lane_index() - row * units;
#pragma unroll 1
  for (int first = 0; first < tile.count * units; first += LANES) {
    const int byte = unit * unit_bytes, left = row < tile.count ? row_bytes - byte : 0;
    char* const global = reinterpret_cast<char*>(shuffle_from(reinterpret_cast<uint64>(begin), row)) + byte;
    char* const shared = tile.shared + place_of(columns, row * row_bytes + byte);
    if (!by_blocks) {
      move_elements<VEC_SIZE>(shared, global, left / size, size, brings);
    } else if (left > 0) {
      if (brings) {
        copy_async<BLOCK>(shared, global);
      } else {
        take_block(shared, global);
      }
    }
    row += rows_on;
    unit += units_on;
    if (unit >= units) {
      unit -= units;
      ++row;
    }
  }
}

// Rows are read in words, up to the end of a vector and a word beyond, by lanes without a row as well: what is behind
// those of a warp's first tiles must be something.
TRTC_DEVICE void clear_behind(const Tile& tile, int columns, int size) {
  const uint32 zero[4] = {};
#pragma unroll 1
  for (int byte = max(tile.count, 0) * columns * size / BLOCK * BLOCK + lane_index() * BLOCK; byte < WARP_BYTES;
       byte += TURN_BYTES) {
    store_vector<4, Space::shared>(reinterpret_cast<uint32*>(tile.shared + place_of(columns, byte)), zero);
  }
}

// ---- Between a tile and a thread's row, each lane having one --------------------------------------------------------

// Whether a row comes so far.
TRTC_DEVICE bool has_vector(int columns, int k) { return k * VEC_SIZE < columns; }
// Whether vector k is one that the row ends in.
TRTC_DEVICE bool is_part(int columns, int k) { return has_vector(columns, k) && (k + 1) * VEC_SIZE > columns; }

// Of a row that is not whole: what of its last vector is behind its end becomes `fill`.
template <class T>
TRTC_DEVICE void fill_behind(uint32 (&word)[words_of<T, VEC_SIZE>], int columns, uint32 fill) {
  const int bits = columns % VEC_SIZE * 8 * static_cast<int>(sizeof(T));
#pragma unroll
  for (int i = 0; i < words_of<T, VEC_SIZE>; ++i) {
    const uint32 kept = i * 32 + 32 <= bits ? 0xffffffffu : i * 32 < bits ? 0xffffu : 0;
    word[i] = (word[i] & kept) | (fill & ~kept);
  }
}

// Where vector k of a whole row is.
template <class T>
TRTC_DEVICE T* vector_of_row(char* tile, int columns, int k) {
  const int element = lane_index() * columns + k * VEC_SIZE;
  return reinterpret_cast<T*>(tile + place_of(columns, element * static_cast<int>(sizeof(T))));
}

// The first word of a row that is not whole, and how many bits of it are the row's before.
template <class T>
TRTC_DEVICE uint32* words_of_row(char* tile, int columns) {
  const int first = lane_index() * columns;
  return reinterpret_cast<uint32*>(tile + (sizeof(T) == 2 ? first / 2 : first) * 4);
}
template <class T>
TRTC_DEVICE int shift_of_row(int columns) {
  return sizeof(T) == 2 ? lane_index() * columns % 2 * 16 : 0;
}

// A row: as many vectors as the longest ones have, which are within the tile. From the row's end to that of its last
// vector there is `fill`, where it `Fills`; behind that, and else, anything.
template <class T, bool Fills>
TRTC_DEVICE void load_row(uint32 (&word)[VECTORS_PER_THREAD][words_of<T, VEC_SIZE>], char* tile, int columns,
                          uint32 fill) {
  constexpr int words = words_of<T, VEC_SIZE>;
  if (is_whole(columns)) {
#pragma unroll
    for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
      load_vector<VEC_SIZE, Space::shared>(word[k], vector_of_row<T>(tile, columns, k));
    }
    return;
  }
  const uint32* const from = words_of_row<T>(tile, columns);
  const int shift = shift_of_row<T>(columns);
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD; ++k) {
#pragma unroll
    for (int i = 0; i < words; ++i) {
      const int at = k * words + i;
      word[k][i] = sizeof(T) == 2 ? shift_right(from[at], from[at + 1], shift) : from[at];
    }
  }
#pragma unroll
  for (int k = 0; k < VECTORS_PER_THREAD && Fills; ++k) {
    if (is_part(columns, k)) fill_behind<T>(word[k], columns, fill);
  }
}

// Vector k of a row, to where all have loaded theirs from. In order: `before` is the last word of the vector before.
// `behind`: the first element of the row behind this one, of which a word may have the end of this one.
template <class T>
TRTC_DEVICE void put_vector(uint32 (&word)[words_of<T, VEC_SIZE>], uint32& before, uint32 behind, char* tile,
                            int columns, int k) {
  constexpr int words = words_of<T, VEC_SIZE>;
  if (is_whole(columns)) {
    store_vector<VEC_SIZE, Space::shared>(vector_of_row<T>(tile, columns, k), word);
    return;
  }
  const int shift = shift_of_row<T>(columns);
  // A word of two rows' elements is the first one's.
  uint32* const to = words_of_row<T>(tile, columns) + (shift != 0) + k * words;
  if constexpr (sizeof(T) == 4) {
    const int count = columns % VEC_SIZE;
    if ((k + 1) * VEC_SIZE <= columns) {
#pragma unroll
      for (int i = 0; i < words; ++i) to[i] = word[i];
    } else {
#pragma unroll
      for (int i = 0; i < words - 1; ++i) {
        if (i < count) to[i] = word[i];
      }
    }
  } else {
    if (k > 0) to[-1] = shift_right(before, word[0], shift);
    if ((k + 1) * VEC_SIZE <= columns) {
#pragma unroll
      for (int i = 0; i < words - 1; ++i) to[i] = shift_right(word[i], word[i + 1], shift);
      before = word[words - 1];
    } else {
      fill_behind<T>(word, columns, behind);
      const int count = (columns % VEC_SIZE + (shift == 0)) / 2;
#pragma unroll
      for (int i = 0; i < words; ++i) {
        if (i < count) to[i] = shift_right(word[i], i + 1 < words ? word[(i + 1) % words] : 0, shift);
      }
    }
  }
}

}  // namespace trtc

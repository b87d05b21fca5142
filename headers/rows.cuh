// Rows: where they lie in global memory, which part of one is whose, and how one that no vector fits travels.
#pragma once

#include "row_vector.cuh"
#include "vector.cuh"

namespace trtc {

// An array of rows, as a launch describes it.
struct RowArray {
  void* data;
  int64 outer_stride;
  int64 inner_stride;

  template <class Params>
  TRTC_DEVICE int64 offset(const Params& params, int64 row) const {
    return row_offset(params, row, outer_stride, inner_stride);
  }
};

// What a thread has of the rows. Groups of `ctas_per_row` CTAs have `rows_per_cta` rows at a time.
template <class Config>
struct Place {
  int thread;  // of those of this CTA that share a row
  int row_in_cta;
  int rank;          // of this CTA among those that share its rows
  int first_column;  // of its slice of a row
  int most_columns;  // of that, 0 or less where the row does not come so far
  int64 group;
  int64 stride;  // rows of all groups together

  // Of rows whose size is known to the compiler; and of others, of which a CTA has `slice` columns.
  static TRTC_DEVICE Place here() { return here(Config::hidden, Config::slice); }
  static TRTC_DEVICE Place here(int columns, int slice) {
    constexpr bool one_row = Config::rows_per_cta == 1;
    const int rank = static_cast<int>(cta_index() % Config::ctas_per_row);
    const int first_column = rank * slice;
    return {one_row ? thread_index() : thread_index() % Config::threads,
            one_row ? 0 : thread_index() / Config::threads,
            rank,
            first_column,
            min(columns - first_column, slice),
            cta_index() / Config::ctas_per_row,
            ctas_in_grid() / Config::ctas_per_row * Config::rows_per_cta};
  }

  // A group's first rows begin here.
  TRTC_DEVICE int64 begin_row() const { return group * Config::rows_per_cta; }
  // A row past the last takes part in every barrier with no columns. One row a CTA: the launch has none past the last.
  TRTC_DEVICE bool exists(int64 row, int64 rows) const { return Config::rows_per_cta == 1 || row < rows; }
  TRTC_DEVICE int columns(int64 row, int64 rows) const { return exists(row, rows) ? most_columns : 0; }
};

// What a Vec's address must be a multiple of, in bytes.
template <class T, int N>
constexpr TRTC_DEVICE uint64 vec_alignment() {
  return Vec<T, N>::bytes < 16 ? Vec<T, N>::bytes : 16;
}

// Whether every Vec of N elements of every row is aligned.
template <class T, int N>
TRTC_DEVICE bool rows_aligned(const T* base, int64 outer_stride, int64 inner_stride) {
  const uint64 bits = reinterpret_cast<uint64>(base) | static_cast<uint64>(outer_stride | inner_stride) * sizeof(T);
  return bits % vec_alignment<T, N>() == 0;
}

// Whether rows that are `stride` elements from each other do not overlap, and have N elements.
template <int N>
TRTC_DEVICE bool rows_apart(int64 columns, int64 stride) {
  return columns >= N && stride >= columns;
}
// Of an array: there are N elements of it before each row but the first, and behind each but the last, then.
template <int N, class Params>
TRTC_DEVICE bool rows_apart(const Params& params, int64 columns, int64 outer_stride, int64 inner_stride) {
  return rows_apart<N>(columns, outer_stride) && (params.inner_count == 1 || inner_stride >= columns);
}

// Whether what is beside a part of a row, before it and behind it, is known to be memory of the same array, as much as
// a Vec has; else it is not touched.
struct Beside {
  bool before;
  bool behind;
};

// Beside row `number` of `count` that are apart, or are not.
TRTC_DEVICE Beside beside_row(int64 number, int64 count, bool apart) {
  return {apart && number > 0, apart && number + 1 < count};
}

// Beside what a CTA has of it.
template <class Config>
TRTC_DEVICE Beside beside_part(const Place<Config>& place, int64 columns, int64 number, int64 count, bool apart) {
  const Beside of_row = beside_row(number, count, apart);
  return {place.rank > 0 || of_row.before,
          place.first_column + place.most_columns + Config::vector <= columns || of_row.behind};
}

// A thread's Vecs of a part of a row, from the first one at `from` on: of the `left` elements from there on, and zeros.
// `aligned`: all Vecs are, and none is there in part.
template <class Config, class T, int N, int Count>
TRTC_DEVICE void load_vecs(Vec<T, N> (&value)[Count], const T* from, int left, bool aligned) {
  constexpr int stride = Config::threads * N;
  const auto has = [&](int k) { return Config::filled(k) || k * stride < left; };
  if constexpr (Vec<T, N>::bytes >= 16) {
    // Ahead of the branch, so that an aligned row does not wait for the text of others (RMSNorm, 1 to 128 rows of 4096:
    // 0.02 us).
#pragma unroll
    for (int k = 0; k < Count; ++k) value[k].load_early(from + k * stride, aligned && has(k));
    if (aligned) return;
  } else if (aligned) {
#pragma unroll
    for (int k = 0; k < Count; ++k) value[k].load_if(from + k * stride, has(k));
    return;
  }
#pragma unroll
  for (int k = 0; k < Count; ++k) value[k].load_elements(from + k * stride, left - k * stride);
}

// Copies a row's `count` elements from shared memory to global memory, which is aligned only to an element:
// neighbouring threads write neighbouring aligned words of 4 bytes.
template <class T>
TRTC_DEVICE void copy_from_shared(T* global, const T* shared, int count, int thread, int threads) {
  constexpr int per_word = 4 / static_cast<int>(sizeof(T));
  // Elements of the first word that lie before the row.
  const int before = count > 0 ? static_cast<int>(reinterpret_cast<uint64>(global) % 4 / sizeof(T)) : 0;
#pragma unroll 1
  for (int i = thread * per_word - before; i < count; i += threads * per_word) {
    if constexpr (per_word == 1) {
      global[i] = shared[i];
    } else if (i >= 0 && i + per_word <= count) {
      uint32 word = 0;
#pragma unroll
      for (int j = 0; j < per_word; ++j) word |= static_cast<uint32>(shared[i + j].bits) << 8 * sizeof(T) * j;
      *reinterpret_cast<uint32*>(global + i) = word;
    } else {
#pragma unroll 1
      for (int j = max(i, 0); j < min(i + per_word, count); ++j) global[j] = shared[j];
    }
  }
}

// Slots are a CTA's columns of a row, its part, as its threads' Vecs count them. Where no vector fits all rows
// (Config::ragged), they are the part's memory from the multiple of N elements before it on: its first column has slot
// `shift`, which differs from row to row, so that every Vec of a slot is aligned. Elsewhere the shift is 0.
//
// The rows of an input, one of which is in shared memory, or on its way there: each thread brings its own Vecs, and may
// read them when it has waited; or one thread brings all. Slots outside the part are zeros, where rows are ragged or
// come in bulk after clear_outside().
template <class T, class Config>
struct InputRow {
  enum : int { N = Config::vector };
  RowArray array;
  const T* all;  // from this CTA's first column on
  bool aligned;
  bool apart;
  T* shared;

  template <class Params>
  TRTC_DEVICE void begin(const RowArray& rows, const Params& params, const Place<Config>& place) {
    array = rows;
    all = static_cast<const T*>(rows.data) + place.first_column;
    aligned = Config::hidden % N == 0 && rows_aligned<T, N>(all, rows.outer_stride, rows.inner_stride);
    apart = rows_apart<N>(params, Config::hidden, rows.outer_stride, rows.inner_stride);
  }
  template <class Params>
  TRTC_DEVICE const T* of(const Params& params, int64 row) const {
    return all + array.offset(params, row);
  }
  template <class Params>
  TRTC_DEVICE int shift_of(const Params& params, int64 row) const {
    return Config::ragged ? elements_past<N>(of(params, row)) : 0;
  }
  template <class Params>
  TRTC_DEVICE void locate(const Params& params, char* region, const Place<Config>& place, int64 row, int of_row) {
    shared = row_in(region, place, of(params, row) - of_row);
  }
  // Where a region begins whose row is in the located one's place.
  TRTC_DEVICE char* in_place(const Place<Config>& place) const {
    return reinterpret_cast<char*>(shared - place.row_in_cta * Config::chunk);
  }

  // The bytes of a row's part, of a ragged one with all that its first and last Vec bring, if one copy can bring them;
  // else 0. Of a ragged row there must be memory of the same array before it and behind it: what is beyond must not be
  // touched, as a copy of a part of a Vec does (compute-sanitizer).
  template <class Params>
  TRTC_DEVICE int bulk_bytes(const Params& params, int64 row, int shift, int columns) const {
    const Beside beside = beside_row(row, params.rows, apart);
    const bool is_edge = Config::ragged && !(beside.before && beside.behind);
    const bool fits = Vec<T, N>::bytes >= 16 && columns > 0 && !is_edge && is_whole(of(params, row) - shift);
    return fits ? (columns + shift + N - 1) / N * Vec<T, N>::bytes : 0;
  }
#if TRTC_ARCHITECTURE >= 90
  // By one thread.
  template <class Params>
  TRTC_DEVICE void fetch_bulk(const Params& params, char* region, const Place<Config>& place, int64 row, int shift,
                              int columns, int bytes, uint64* barrier) const {
    const T* from = of(params, row) - shift;
    copy_bulk(row_in(region, place, from), from, bytes, barrier, shift * sizeof(T), (columns + shift) * sizeof(T));
  }
#endif

  // Each thread its own Vecs, which it may read when it has waited.
  template <class Params>
  TRTC_DEVICE void fetch(const Params& params, char* region, const Place<Config>& place, int64 row, int shift,
                         int columns) const {
    const T* from = of(params, row) - shift;
    const Beside beside = beside_row(row, params.rows, apart);
    const bool begins = Config::ragged && shift > 0 && !beside.before, ends = Config::ragged && !beside.behind;
    T* const to_row = row_in(region, place, from);
    if constexpr (Config::bulk && TRTC_ARCHITECTURE >= 90) {
      fetch_rare(to_row, from, place.thread, shift, columns, begins, ends, is_whole(from));
    } else {
      fetch_vecs(to_row, from, place.thread, shift, columns, begins, ends, is_whole(from));
    }
  }

  // What a ragged part's first and last Vec brought beside it, and what is behind them, becomes zeros: by each thread
  // in its own Vecs, once it has waited.
  TRTC_DEVICE void clear_outside(int thread, int shift, int columns) const {
    if (thread == 0 && shift > 0) keep_slots(0, shift, N);
#pragma unroll
    for (int k = 0; k < Config::steps; ++k) {
      const int slot = (k * Config::threads + thread) * N;
      if (!Config::filled(k) && slot + N > columns + shift) keep_slots(slot, slot, columns + shift);
    }
  }

  TRTC_DEVICE Vec<T, N> at(int slot) const {
    Vec<T, N> value;
    value.load_shared(shared + slot);
    return value;
  }

 private:
  // Whether every Vec of a row, which begins with the slot at `from`, is aligned.
  TRTC_DEVICE bool is_whole(const T* from) const { return Config::ragged ? rows_aligned<T, N>(from, 0, 0) : aligned; }
  // A ragged row that comes in bulk, from `from` on, lies as many blocks of 16 bytes behind a multiple of 128 bytes as
  // in global memory, and regions begin with one: elsewhere the copy takes two requests for each 128 bytes, and 1.17
  // times as long.
  static TRTC_DEVICE T* row_in(char* region, const Place<Config>& place, const T* from) {
    if constexpr (Config::ragged && Config::bulk && TRTC_ARCHITECTURE >= 90) {
      region += reinterpret_cast<uint64>(from) % 128 / 16 * 16;
    }
    return reinterpret_cast<T*>(region) + place.row_in_cta * Config::chunk;
  }

  // Of a Vec, the slots from `first` to before `end` stay, and others become zeros.
  TRTC_DEVICE void keep_slots(int slot, int first, int end) const {
    Vec<T, N> value;
    value.fill(0);
    if (first < end) {  // else nothing may have come
      value = at(slot);
      value.keep(first - slot, end - slot, 0);
    }
    value.template store<Space::shared>(shared + slot, true);
  }

  // Of a row that begins with the slot at `from`. `begins`, `ends`: before, behind the part is memory that must not be
  // touched. `is_whole`: every Vec of it is aligned.
  static TRTC_DEVICE void fetch_vecs(T* to_row, const T* from, int thread, int shift, int columns, bool begins,
                                     bool ends, bool is_whole) {
    if constexpr (Vec<T, N>::bytes >= 4) {
      if (is_whole) {
        constexpr int stride = Config::threads * N;
        const T* of_thread = from + thread * N;
        T* to = to_row + thread * N;
        const int left = columns + shift - thread * N;  // of the part, from the thread's first slot on
#pragma unroll
        for (int k = 0; k < Config::steps; ++k) {
          if (Config::inside(k)) {
            copy_async<Vec<T, N>::bytes>(to + k * stride, of_thread + k * stride);
          } else {
            const int end = min(max(left - k * stride, 0), static_cast<int>(N));
            const int before = Config::ragged && k == 0 && thread == 0 ? shift : 0;
            const bool is_first = k == 0 && begins && thread == 0 && end > 0;
            if (!is_first && (!ends || end == 0 || end == N)) {
              copy_async_part<Vec<T, N>::bytes>(to + k * stride, end > 0 ? of_thread + k * stride : from,
                                                before * sizeof(T), end * sizeof(T));
            }
          }
        }
        const int last = (columns + shift) / N;
#pragma unroll 1
        for (int edge = begins ? 0 : 1; edge <= (ends ? 1 : 0); ++edge) {
          const int vec = edge * last;
          if (vec % Config::threads == thread && vec * N < columns + shift) {
            fetch_each(to_row, from, vec * N, shift, columns);
          }
        }
        return;
      }
    }
#pragma unroll 1
    for (int k = 0; k < Config::steps; ++k) {
      fetch_each(to_row, from, (k * Config::threads + thread) * N, shift, columns);
    }
  }
  // Where most rows come in bulk: its text in each place is a fifth of what compiling takes (LayerNorm's backward with
  // dresidual, 4097 of bfloat16: 786 ms, and 650).
  static TRTC_OUT_OF_LINE void fetch_rare(T* to_row, const T* from, int thread, int shift, int columns, bool begins,
                                          bool ends, bool is_whole) {
    fetch_vecs(to_row, from, thread, shift, columns, begins, ends, is_whole);
  }

  static TRTC_DEVICE void fetch_each(T* to_row, const T* from, int slot, int shift, int columns) {
    Vec<T, N> value;
    if constexpr (Config::ragged) {
      value.fill(0);
      value.load_each(from + slot, shift - slot, columns + shift - slot);
    } else if constexpr (Config::stages > 0) {
      // All at once: LayerNorm's backward of 4096 columns of bfloat16 that begin anywhere 0.42 of a copy, and 0.34.
      value.load_elements(from + slot, columns - slot);
    } else {
      value.load(from + slot, columns - slot, false);  // which leaves LayerNorm the registers of 288 threads
    }
    value.template store<Space::shared>(to_row + slot, true);
  }
};

// The arrays that a row is read from. `Self` has each(), which calls something with every InputRow and where its row is
// in a slot; slots lie as the first one's rows do. (NVRTC has no generic lambdas.)
template <class Config, class Self>
struct InputRows {
  // Whether slots outside a part, which RowRing makes zeros, are left as they came, and out of what is summed.
  enum : bool { leaves_outside = false };
  int shift;  // of the row that was located last

  template <class Params>
  TRTC_DEVICE void locate(const Params& params, char* region, const Place<Config>& place, int64 row) {
    shift = shift_of(params, row);
    self().each(Locate<Params>{params, region, place, row, shift});
  }

  // `here` completes when what comes by bulk copies is there; null where none does.
  template <class Params>
  TRTC_DEVICE void fetch(const Params& params, char* region, const Place<Config>& place, int64 row, uint64* here) {
    const int row_shift = shift_of(params, row), columns = place.columns(row, params.rows);
#if TRTC_ARCHITECTURE >= 90
    if constexpr (Config::bulk) {
      int bytes = 0;
      self().each(CountBulk<Params>{params, row, row_shift, columns, bytes});
      if (place.thread == 0) transaction_barrier_expect(here, bytes);
    }
#endif
    self().each(Fetch<Params>{params, region, place, row, row_shift, columns, here});
  }

  TRTC_DEVICE void clear_outside(int thread, int columns) { self().each(Clear{thread, shift, columns}); }

 private:
  template <class Params>
  struct Locate {
    const Params& params;
    char* region;
    const Place<Config>& place;
    int64 row;
    int shift;
    template <class Array>
    TRTC_DEVICE void operator()(Array& array, int at) const {
      array.locate(params, region + at, place, row, shift);
    }
  };
  struct Clear {
    int thread, shift, columns;
    template <class Array>
    TRTC_DEVICE void operator()(const Array& array, int) const {
      array.clear_outside(thread, shift, columns);
    }
  };
  template <class Params>
  struct FirstShift {
    const Params& params;
    int64 row;
    int& found;  // below 0: not yet
    template <class Array>
    TRTC_DEVICE void operator()(const Array& array, int) const {
      if (found < 0) found = array.shift_of(params, row);
    }
  };
  template <class Params>
  struct CountBulk {
    const Params& params;
    int64 row;
    int shift, columns;
    int& bytes;
    template <class Array>
    TRTC_DEVICE void operator()(const Array& array, int) const {
      bytes += array.bulk_bytes(params, row, shift, columns);
    }
  };
  template <class Params>
  struct Fetch {
    const Params& params;
    char* region;
    const Place<Config>& place;
    int64 row;
    int shift, columns;
    uint64* here;
    template <class Array>
    TRTC_DEVICE void operator()(const Array& array, int at) const {
#if TRTC_ARCHITECTURE >= 90
      const int bytes = Config::bulk ? array.bulk_bytes(params, row, shift, columns) : 0;
      if (bytes > 0) {
        if (place.thread == 0) {
          array.fetch_bulk(params, region + at, place, row, shift, columns, bytes, here);
        }
        return;
      }
#endif
      array.fetch(params, region + at, place, row, shift, columns);
    }
  };

  TRTC_DEVICE Self& self() { return static_cast<Self&>(*this); }
  template <class Params>
  TRTC_DEVICE int shift_of(const Params& params, int64 row) {
    int found = -1;
    self().each(FirstShift<Params>{params, row, found});
    return found;
  }
};

// An output row's columns: to global memory, or, where no vector fits that, to shared memory first. Between put() and
// finish() the threads of a CTA do the same, but that warps which have nothing of a ragged row may put nothing.
template <class T, class Config>
struct OutputRow {
  enum : int { N = Config::vector };
  T* global;
  T* shared;
  int shift;
  bool aligned;

  template <class Params>
  TRTC_DEVICE void begin(const RowArray& rows, const Params& params, int64 row, const Place<Config>& place,
                         char* staging, int of_row = 0) {
    global = static_cast<T*>(rows.data) + place.first_column + rows.offset(params, row);
    shared = reinterpret_cast<T*>(staging) + place.row_in_cta * Config::chunk;
    shift = of_row;
    if constexpr (Config::ragged) {
      aligned = rows_aligned<T, N>(global - shift, 0, 0);
    } else {
      aligned = Config::hidden % N == 0 && rows_aligned<T, N>(global, rows.outer_stride, rows.inner_stride);
    }
  }

  // `first` is the chunk's first column; `inside`: all of the Vec lies in the part.
  TRTC_DEVICE void put(const Vec<T, N>& value, int slot, int first, int columns, bool inside = false) {
    if constexpr (Config::ragged) {
      if (aligned) {
        put_aligned(value, slot, columns, inside);
      } else {
        value.template store<Space::shared>(shared + slot, true);
      }
    } else if constexpr (N == 1) {
      value.store_element(global + slot, 0, slot < columns);
    } else {
      value.store(global + slot, aligned && (Config::exact || slot < columns));
      value.template store<Space::shared>(shared + (slot - first), !aligned);
    }
  }

  // The same of a ragged row that is known to be aligned.
  TRTC_DEVICE void put_aligned(const Vec<T, N>& value, int slot, int columns, bool inside) {
    const bool whole = inside || lies_inside(slot, columns);
    value.store(global - shift + slot, whole);  // so that a thread's Vecs have one address and constants
    if (!inside) value.template store<Space::shared>(shared + slot, !whole);
  }

  // `again`: there is another chunk or row, whose put() must wait.
  TRTC_DEVICE void finish(int first, int columns, int thread, bool again) {
    if constexpr (Config::ragged) {
      finish_ragged(columns, thread);
      return;
    }
    if (N == 1 || aligned) return;
    cta_barrier();
    copy_from_shared(global + first, shared, min(columns - first, Config::chunk), thread, Config::threads);
    if (again) cta_barrier();
  }

 private:
  TRTC_DEVICE bool lies_inside(int slot, int columns) const { return slot >= shift && slot - shift + N <= columns; }

  // What put() left in shared memory: all, by each thread its own Vecs; or the first and the last Vec, of which a
  // warp's lanes take an element each.
  TRTC_DEVICE void finish_ragged(int columns, int thread) const {
    if (!aligned) {
#pragma unroll 1
      for (int slot = thread * N; slot < columns + shift; slot += Config::threads * N) {
        Vec<T, N> value;
        value.load_shared(shared + slot);
        value.store_each(global + (slot - shift), shift - slot, columns + shift - slot);
      }
      return;
    }
    const int last = (columns + shift) / N;
    const bool has_first = thread < 32 && shift > 0;
    // The first Vec may be the last one too.
    const bool has_last = columns > 0 && (last > 0 || shift == 0) && last % Config::threads / 32 == thread / 32;
    if (!has_first && !has_last) return;
    warp_barrier();
    if (has_first) put_element(0, columns, thread);
    if (has_last) put_element(last * N, columns, thread);
    warp_barrier();  // before the Vecs' threads use them again
  }
  TRTC_DEVICE void put_element(int slot, int columns, int thread) const {
    slot += thread % 32;
    if (thread % 32 < N && slot >= shift && slot - shift < columns) global[slot - shift] = shared[slot];
  }
};

}  // namespace trtc

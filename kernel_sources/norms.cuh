// Normalization of rows: RMSNorm and LayerNorm. What the tuned kernels, forward and backward, and the general ones
// share.
//
//   y = (x - mean) * rstd * (weight + weight_offset) + bias,   rstd = 1 / sqrt(mean((x - mean)^2) + eps)
//
// with mean = 0 where a row is not centred (RMSNorm).
//
// A row is held by `threads` threads of each of `ctas_per_row` CTAs. Thread t of a CTA owns the columns
// [(k * threads + t) * N, ... + N) of each chunk of its CTA's slice, for k = 0, 1, ... steps - 1: the configuration
// alone fixes the order of a sum. Only how the bytes travel depends on alignment.
#pragma once

#include "reduce.cuh"
#include "ring.cuh"
#include "slots.cuh"

namespace trtc {

// What a kernel's program says of it (transformer_rtc/ops/norm/kernels.py), and what follows.
template <class Traits>
struct NormConfig : Traits {
  enum : int {
    chunk = Traits::steps * Traits::threads * Traits::vector,
    // The most columns that a CTA may have. Those of a ragged row may begin anywhere in their first Vec.
    most_of_cta = Traits::chunks * chunk - (Traits::ragged ? Traits::vector : 0),
    // A CTA's columns: about as many as the others that share a row, or all would wait for those that have more. Whole
    // lines of 128 bytes, or two, where these divide a row and the CTAs hold them: bulk copies are faster then.
    line = 64,
    lines = (Traits::hidden - 1) / (line * Traits::ctas_per_row) * line + line,
    vecs = (Traits::hidden - 1) / (Traits::vector * Traits::ctas_per_row) * Traits::vector + Traits::vector,
    slice = Traits::hidden % line == 0 && lines <= most_of_cta ? lines : vecs,
  };
  enum : bool {
    // Every Vec of every thread lies in the row: counts are constants then.
    exact = Traits::rows_per_cta == 1 &&
        static_cast<int64>(Traits::chunks) * chunk * Traits::ctas_per_row == Traits::hidden,
  };
  // Whether the columns of every Vec of step k lie in their part; and whether its slots do, wherever that begins.
  static constexpr TRTC_DEVICE bool filled(int k) {
    const int64 least = Traits::hidden - static_cast<int64>(Traits::ctas_per_row - 1) * slice;  // of the last part
    return exact ||
           (Traits::chunks == 1 && Traits::rows_per_cta == 1 && (k + 1) * Traits::threads * Traits::vector <= least);
  }
  static constexpr TRTC_DEVICE bool inside(int k) { return filled(k) && !(Traits::ragged && k == 0); }
  // Whether a warp has any of a ragged row's first `count` columns, or slots, in step k.
  static TRTC_DEVICE bool meets(int k, int thread, int count) {
    return !Traits::ragged || filled(k) || (k * Traits::threads + thread / 32 * 32) * Traits::vector < count;
  }
  static constexpr TRTC_DEVICE Exchange exchange() { return exchange_of<Traits>(); }
  static_assert(slice <= most_of_cta, "the CTAs tile the row");
  static_assert(!Traits::in_shared || Traits::chunks == 1, "shared memory holds a whole slice");
  static_assert(!Traits::ragged ||
                    (Traits::stages > 0 && Traits::lag == 0 && Traits::rows_per_cta == 1 && Traits::threads > 32),
                "what a CTA keeps of the weight is of one shift at a time, and its barriers order what threads share");
  static_assert(!Traits::bulk || (Traits::stages > 0 && Traits::rows_per_cta == 1), "one thread sends for a CTA's row");
  static_assert(Traits::together == 1 ||
                    (Traits::in_shared && Traits::stages == 0 && Traits::rows_per_cta == 1 && !Traits::per_head),
                "rows that a CTA works on together share their weight");

  // Whether element i of a Vec, the first of which is a part's `column`, is one of its `columns`.
  static TRTC_DEVICE bool within(int i, int column, int columns) {
    if constexpr (exact) return true;
    if constexpr (Traits::ragged) return column + i >= 0 && column + i < columns;
    return Traits::hidden % Traits::vector == 0 ? column < columns : column + i < columns;
  }

  // Of the columns of a Vec of step k, from `column` on, those that do not lie in the row become 0. The first one has
  // place `first`, and they go on from place 0.
  template <int N>
  static TRTC_DEVICE void clear_outside(float (&element)[N], int k, int column, int columns, int first = 0) {
    if (!filled(k)) {
      if (__builtin_expect(columns - column < N, 0)) {
#pragma unroll
        for (int i = 0; i < N; ++i) element[i] = column + ((i - first) & (N - 1)) < columns ? element[i] : 0.0f;
      }
    }
  }
};

// 1 / sqrt(mean + eps), unrounded: high + low.
struct Rstd {
  float high;
  float low;
};

// One Newton step on the approximation, except where that is 0 or infinite.
TRTC_DEVICE Rstd rstd_of(float sum_of_squares, float reciprocal_hidden, float eps) {
  const float value = fused_multiply_add(sum_of_squares, reciprocal_hidden, eps);
  const float y = approximate_rsqrt(value);
  const float error = fused_multiply_add(-value * y, y, 1.0f);
  if (error != error) return {y, 0.0f};
  const float high = fused_multiply_add(0.5f * y, error, y);
  return {high, fused_multiply_add(0.5f * y, error, y - high)};
}

// x * rstd * weight. Where the output is float, rounded once, so that 4 ulp hold at every length; where that meets
// infinity times zero in its correction, as the plain product.
template <class Output>
TRTC_DEVICE float normalized(float x, Rstd rstd, float weight) {
  const float product = x * rstd.high;
  const float y = product * weight;
  if constexpr (is_same<Output, float>) {
    const float rest = fused_multiply_add(x, rstd.low, fused_multiply_add(x, rstd.high, -product));
    const float corrected = fused_multiply_add(product, weight, rest * weight);
    return corrected == corrected ? corrected : y;
  } else {
    return y;
  }
}

// A row's mean, unrounded: high + rest; and what its elements' squares about the mean add up to.
struct Moments {
  float mean;
  float rest;
  float squares;
};

// The moments of a row of several CTAs, from what each found about a shift of its own, near its mean: the shift and the
// sums of deviations and of their squares (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
// computing sample variances", 1979). Lane i of a group of `Ctas` has those of CTA i, which holds `columns` of the row.
// Nothing is divided: that calls a function, around which registers are spilled.
// Less than 2^-18 of what it is the difference of is rounding: then there is no variance, as in a row of equal
// elements, and the mean is the nearest float, which is that element.
template <int Ctas>
TRTC_DEVICE Moments combined_moments(float shift, float deviations, float squares, float columns,
                                     float reciprocal_columns, float reciprocal_hidden) {
  float common = shift;
  const float own = deviations * reciprocal_columns;
  float rest = own;
  float about_mean = fused_multiply_add(-own, deviations, squares);
  float about_common = squares;
  if constexpr (Ctas > 1) {
    common = shuffle_from(shift, 0);
    const float offset = columns == 0.0f ? 0.0f : (shift - common) + own;
    rest = reduce_lanes<Sum, Ctas>(columns * offset) * reciprocal_hidden;
    const float from_mean = offset - rest;
    const float about_own = columns == 0.0f ? 0.0f : about_mean;
    about_mean = reduce_lanes<Sum, Ctas>(fused_multiply_add(columns * from_mean, from_mean, about_own));
    about_common = reduce_lanes<Sum, Ctas>(fused_multiply_add(columns * offset, offset, squares));
  }
  if (about_mean < 0x1p-18f * about_common) {
    about_mean = 0.0f;
    rest = (common + rest) - common;
  }
  return {common, rest, about_mean};
}

// The columns that CTA `rank` of those that share a row holds, and the inverse; 0 where there are none.
template <class Config>
TRTC_DEVICE float columns_of_cta(int rank) {
  constexpr int slice = Config::slice;
  return static_cast<float>(Config::exact ? slice : max(0, min(Config::hidden - rank * slice, slice)));
}
template <class Config>
TRTC_DEVICE float reciprocal_columns_of_cta(int rank) {
  constexpr int slice = Config::slice;
  constexpr int before_last = (Config::hidden - 1) / slice;  // CTAs
  constexpr float of_last = 1.0f / static_cast<float>(Config::hidden - before_last * slice);
  if constexpr (Config::exact) return of_last;
  return rank < before_last ? 1.0f / slice : rank == before_last ? of_last : 0.0f;
}

// A CTA's shift: about its part of the row's mean.
template <class Config>
TRTC_DEVICE float shift_of(float sum, int rank) {
  return sum * reciprocal_columns_of_cta<Config>(rank);
}

// The moments of a row from {shift, deviations, squares} as the row's CTAs have told each other.
template <class Config>
TRTC_DEVICE Moments row_moments(float shift, float deviations, float squares, int thread) {
  const int rank = thread % Config::ctas_per_row;
  return combined_moments<Config::ctas_per_row>(shift, deviations, squares, columns_of_cta<Config>(rank),
                                                reciprocal_columns_of_cta<Config>(rank), 1.0f / Config::hidden);
}

// Which row of per-head weights belongs to a row: the last of its leading dimensions.
template <bool PerHead, class Params>
TRTC_DEVICE int64 head_of(const Params& params, int64 row) {
  if constexpr (PerHead) {
    const uint32 token = multiply_high(static_cast<uint32>(row), params.heads_magic) >> params.heads_shift;
    return params.heads == 1 ? 0 : static_cast<int64>(static_cast<uint32>(row) - token * params.heads);
  } else {
    return 0;
  }
}

// Adds the squares of a Vec's elements. Sums are by Vec, by chunk and by row: no chain of additions grows long enough
// to lose an ulp.
template <class T, int N>
TRTC_DEVICE float sum_of_squares(const Vec<T, N>& value) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) sum = fused_multiply_add(value.get(i), value.get(i), sum);
  return sum;
}

template <class T, int N>
TRTC_DEVICE float sum_of(const Vec<T, N>& value) {
  float sum = value.get(0);
#pragma unroll
  for (int i = 1; i < N; ++i) sum += value.get(i);
  return sum;
}

// Rounded to T, element by element.
template <class T, class A, class B, int N>
TRTC_DEVICE Vec<T, N> sum_of_vecs(const Vec<A, N>& a, const Vec<B, N>& b) {
  Vec<T, N> sum;
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    sum.set(i, a.get(i) + b.get(i), N == 1 ? 0.0f : a.get(i + (N > 1)) + b.get(i + (N > 1)));
  }
  return sum;
}

// Sums over a ragged row, in an order that does not depend on its shift.
template <class Config>
using RaggedSum = ShiftedSum<Config::threads, Config::vector>;

// Adds up deviations and their squares.
template <int N>
TRTC_DEVICE void add_deviations(float (&sums)[2], const float (&deviation)[N]) {
  float of_vec[2] = {deviation[0], deviation[0] * deviation[0]};
#pragma unroll
  for (int i = 1; i < N; ++i) {
    of_vec[0] += deviation[i];
    of_vec[1] = fused_multiply_add(deviation[i], deviation[i], of_vec[1]);
  }
  sums[0] += of_vec[0];
  sums[1] += of_vec[1];
}

// A thread's sums of deviations and of their squares, as rows of its kind add up.
template <class Config>
struct DeviationSums {
  enum : int { N = Config::vector };
  float of_row[2] = {0.0f, 0.0f};
  RaggedSum<Config> of_ragged[2];

  TRTC_DEVICE void add(const float (&deviation)[N]) {
    if constexpr (Config::ragged) {
      of_ragged[0].add(deviation);
      of_ragged[1].add_products(deviation, deviation);
    } else {
      add_deviations(of_row, deviation);
    }
  }
  // Once, behind all.
  TRTC_DEVICE void finish() {
    if constexpr (Config::ragged) {
      of_row[0] = of_ragged[0].of_thread();
      of_row[1] = of_ragged[1].of_thread();
    }
  }
};

// The same of a thread's elements in one pass over them, about a shift that the row's threads in a CTA have before they
// know the mean: the mean of the first Vec of their part but for the largest and the smallest element, so that a single
// one far from the others does not move it; in the elements' type, so that most differences are exact.
template <class Config>
struct ThreadMoments {
  enum : int { N = Config::vector };
  DeviationSums<Config> sums;

  // From the part's first Vec, in places from `first` on.
  template <class T>
  static TRTC_DEVICE float shift_from(const Vec<T, N>& value, int columns, int first = 0) {
    float element[N];
#pragma unroll
    for (int i = 0; i < N; ++i) element[i] = value.get(i);
    Config::clear_outside(element, 0, 0, columns, first);
    float shift = trimmed_mean(element);
    if (columns < N) shift = columns <= 0 ? 0.0f : divide(sum(element), static_cast<float>(columns));
    Vec<T, 2> rounded;
    rounded.set(0, shift, shift);
    return rounded.get(0);
  }

  // The elements of Vec k, from the part's `column` on, in places from `first` on.
  template <class T>
  TRTC_DEVICE void add(const Vec<T, N>& value, float shift, int k, int column, int columns, int first = 0) {
    float deviation[N];
#pragma unroll
    for (int i = 0; i < N; ++i) deviation[i] = value.get(i) - shift;
    Config::clear_outside(deviation, k, column, columns, first);
    sums.add(deviation);
  }

 private:
  // In an order that does not depend on where a ragged row's elements begin.
  static TRTC_DEVICE float sum(const float (&element)[N]) {
    RaggedSum<Config> of_vec;
    of_vec.add(element);
    return of_vec.of_thread();
  }
  static TRTC_DEVICE float trimmed_mean(const float (&element)[N]) {
    if constexpr (N < 4) {
      return sum(element) * (1.0f / N);
    } else {
      // In pairs: the row waits for it.
      float most[N], least[N];
#pragma unroll
      for (int i = 0; i < N; ++i) most[i] = least[i] = element[i];
#pragma unroll
      for (int distance = N / 2; distance >= 1; distance /= 2) {
#pragma unroll
        for (int i = 0; i < distance; ++i) {
          most[i] = larger(most[i], most[i + distance]);
          least[i] = -larger(-least[i], -least[i + distance]);
        }
      }
      return (sum(element) - most[0] - least[0]) * (1.0f / (N - 2));
    }
  }
};

// Whether a shift is more than sqrt(2) standard deviations from the mean of the elements whose deviations from it these
// are the sums of: then the sum of squares about the mean loses more than 1.6 of its 24 bits. Of normally distributed
// elements one part of 10000 has such a shift, of Vecs of 4 one of 100. So is one about which they are too large for a
// float, or no numbers.
TRTC_DEVICE bool is_far(float deviations, float squares, float reciprocal_columns) {
  const float own = deviations * reciprocal_columns;
  return !(own * deviations <= (2.0f / 3.0f) * squares) || squares > 0x1.fffffep127f;
}

// An array of columns, such as the weight, as the Vecs of a CTA's slots need it. No vector fits it for a ragged row: a
// CTA keeps it in shared memory, each thread its own Vecs, and brings it again for a row of another shift. As floats
// with their offset that saves three instructions an element and row; as it is, where they would leave room for few
// CTAs.
template <class T, class Config>
struct ColumnArray {
  enum : int {
    N = Config::vector,
    // A thread's Vecs of floats lie in pieces of 16 bytes, for neighbouring threads to read neighbouring ones.
    piece = N < 4 ? N : 4,
    pieces = N / piece,
  };
  using Kept = Vec<typename Select<Config::float_columns, float, T>::Type, N>;
  const T* part;  // from the CTA's first column on
  char* staged;
  bool aligned;

  TRTC_DEVICE void begin(const void* array, int64 first, char* region) {
    part = static_cast<const T*>(array) + first;
    staged = region;
    aligned = !Config::ragged && rows_aligned<T, N>(part, 0, 0);
  }
  TRTC_DEVICE void stage(const Place<Config>& place, int shift, float offset) const {
#pragma unroll 1
    for (int number = place.thread; number * N < Config::chunk; number += Config::threads) {
      const int slot = number * N;
      Vec<T, N> value;
      value.fill(0);
      value.load_each(part + (slot - shift), shift - slot, place.most_columns + shift - slot);
      if constexpr (Config::float_columns) {
#pragma unroll
        for (int p = 0; p < pieces; ++p) {
          Vec<float, piece> one;
#pragma unroll
          for (int i = 0; i < piece; i += 2) {
            one.set(i, value.get(p * piece + i) + offset, value.get(p * piece + i + 1) + offset);
          }
          one.template store<Space::shared>(piece_of(number, p), true);
        }
      } else {
        value.template store<Space::shared>(reinterpret_cast<T*>(staged) + slot, true);
      }
    }
  }
  // Vec `number` of the part.
  TRTC_DEVICE void load(Kept& value, int number, int columns) const {
    if constexpr (Config::float_columns) {
#pragma unroll
      for (int p = 0; p < pieces; ++p) {
        Vec<float, piece> one;
        one.load_shared(piece_of(number, p));
#pragma unroll
        for (int i = 0; i < piece; ++i) value.word[p * piece + i] = one.word[i];
      }
    } else if constexpr (Config::ragged) {
      value.load_shared(reinterpret_cast<const T*>(staged) + number * N);
    } else {
      value.load(part + number * N, Config::exact ? static_cast<int>(N) : columns - number * N, aligned);
    }
  }
  // Element i with its offset.
  static TRTC_DEVICE float full(const Kept& value, int i, float offset) {
    return Config::float_columns ? value.get(i) : value.get(i) + offset;
  }

 private:
  TRTC_DEVICE float* piece_of(int number, int p) const {
    return reinterpret_cast<float*>(staged) + p * (Config::chunk / pieces) + number * piece;
  }
};

// ---- A scale of each row --------------------------------------------------------------------------------------------

// What a row is divided by whose largest magnitude is `amax`, so that this becomes `most`. A row of zeros has the
// scale 1. 2^-126 at least: the inverse of less is no number, or overflows.
struct RowScale {
  float scale, inverse;

  static TRTC_DEVICE RowScale of(float amax, float most) {
    if (amax == 0.0f) return {1.0f, 1.0f};
    const float inverse = divide(most, amax);  // of NaN, NaN
    return {Maximum::of(divide(amax, most), 0x1p-126f), inverse > 0x1p126f ? 0x1p126f : inverse};
  }
};

// ---- The largest magnitude of all rows ------------------------------------------------------------------------------

// Called by a whole CTA of `Threads`, at its end: `most` becomes the maximum of what it was and of each thread's
// `amax`. An access of each warp that changes it takes longer than rows take to stream: one of each CTA reads it, and
// few are larger (H100, RMSNorm of bfloat16 to float8, 32768 x 4096: 365 us, the rows 140).
template <int Threads>
TRTC_DEVICE void tell_amax(float* most, float amax) {
  constexpr int warps = Threads / 32;
  static_assert(warps * 32 == Threads && warps <= 32, "a lane for each warp");
  TRTC_SHARED(float, of_warps, warps);
  amax = reduce_lanes<Maximum, 32>(amax);
  if (thread_index() % 32 == 0) of_warps[thread_index() / 32] = amax;
  cta_barrier();
  if (thread_index() >= 32) return;
  amax = reduce_lanes<Maximum, 32>(thread_index() < warps ? of_warps[thread_index()] : 0.0f);
  if (thread_index() != 0) return;
  // As bits: NaN is above infinity.
  if (bits_from_float(amax) > bits_from_float(load_atomically_global(most))) maximum_global(most, amax);
}

// ---- Partial sums of the weight's gradients ------------------------------------------------------------------------

// Where a row of partial sums lies, [gradient][hidden]; its pitch is a whole number of Vecs.
TRTC_DEVICE int64 partial_offset(int64 row, int gradient, int gradients, int64 hidden) {
  return (row * gradients + gradient) * ((hidden + 7) / 8 * 8);
}

// How many of them a group of CTAs leaves that holds `rows` rows together: one for each head where it has all of them
// as often, and else one for each row.
TRTC_DEVICE int partial_rows(int rows, uint32 heads) {
  return rows % static_cast<int>(heads) == 0 ? static_cast<int>(heads) : rows;
}

// A second launch adds up the rows of partial sums, those of each head. A CTA of 8 warps has `Columns` columns; a
// thread reads 4 of them at once. Few threads, each with much on its way: CTAs of 32 warps, a column a lane, are most
// of them idle where rows are few, and those of long rows come in many waves.
template <int Columns>
struct FinishedColumns {
  enum : int {
    N = 4,
    warps = 8,
    lanes = Columns / N,        // of a row of partial sums
    rows_at_once = 32 / lanes,  // of a warp
  };
  static_assert(lanes * N == Columns && rows_at_once * lanes == 32 && Columns <= 32 * warps, "lanes and threads tile");

  // Thread i has that of column i in the end, where it stores any.
  TRTC_DEVICE int64 column() const { return cta_index() * Columns + thread_index(); }
  TRTC_DEVICE bool stores(int64 hidden) const { return thread_index() < Columns && column() < hidden; }

  // Of all gradients: one after the other, they would wait for memory twice.
  template <int Most, class Params>
  TRTC_DEVICE void sums(const Params& params, int rows_per_group, int gradients, float (&all)[Most]) const {
    const int lane = thread_index() % 32, warp = thread_index() / 32;
    const int own = static_cast<int>(cta_index()) * Columns + lane % lanes * N;
    const int columns = min(params.hidden - own, static_cast<int>(N));
    const int64 rows = static_cast<int64>(params.groups) * rows_per_group;
    const int64 step = warps * rows_at_once * static_cast<int64>(params.heads);
    const int64 first = cta_index_y() + (warp * rows_at_once + lane / lanes) * static_cast<int64>(params.heads);
    const float* of_row = static_cast<const float*>(params.partials) + own;
    const float* const last = of_row + partial_offset(rows - 1, 0, gradients, params.hidden);
    of_row += partial_offset(first, 0, gradients, params.hidden);
    const int64 to_next = partial_offset(step, 0, gradients, params.hidden);
    const int64 pitch = partial_offset(0, 1, gradients, params.hidden);
    TRTC_SHARED(float, of_warps, Most * warps * Columns);
    float sum[Most][N] = {};
    // Batches without a rest: behind the last row it is read again, and not added. (Loads that have a condition each
    // are waited for one by one.)
    constexpr int batch = 8;
    int64 row = first;
#pragma unroll 1
    for (; columns >= N && row < rows; row += batch * step, of_row += batch * to_next) {
      Vec<float, N> value[batch][Most];
#pragma unroll
      for (int k = 0; k < batch; ++k) {
        const float* from = row + k * step < rows ? of_row + k * to_next : last;
#pragma unroll
        for (int i = 0; i < Most; ++i) value[k][i].load_aligned(from + (i < gradients ? i * pitch : 0));
      }
      add_rows(value, row, step, rows, sum);
    }
    // What no Vec fits: the last columns of rows of another size, by smaller batches.
    constexpr int of_rest = 2;
#pragma unroll 1
    for (; columns > 0 && row < rows; row += of_rest * step, of_row += of_rest * to_next) {
      Vec<float, N> value[of_rest][Most];
#pragma unroll
      for (int k = 0; k < of_rest; ++k) {
        const float* from = row + k * step < rows ? of_row + k * to_next : last;
#pragma unroll
        for (int i = 0; i < Most; ++i) {
          value[k][i].load_elements(from + (i < gradients ? i * pitch : 0), columns);
        }
      }
      add_rows(value, row, step, rows, sum);
    }
#pragma unroll
    for (int i = 0; i < Most; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
#pragma unroll
        for (int distance = 16; distance >= lanes; distance /= 2) sum[i][j] += shuffle_xor(sum[i][j], distance);
        if (lane < lanes) of_warps[(i * warps + warp) * Columns + lane * N + j] = sum[i][j];
      }
    }
    cta_barrier();
#pragma unroll
    for (int i = 0; i < Most; ++i) {
      all[i] = 0.0f;
#pragma unroll
      for (int w = 0; w < warps; ++w) all[i] += of_warps[(i * warps + w) * Columns + thread_index() % Columns];
    }
  }

 private:
  // Row `row` and every `step`th behind it, those before `rows`.
  template <int Batch, int Most>
  static TRTC_DEVICE void add_rows(const Vec<float, N> (&value)[Batch][Most], int64 row, int64 step, int64 rows,
                                   float (&sum)[Most][N]) {
#pragma unroll
    for (int k = 0; k < Batch; ++k) {
      const bool valid = row + k * step < rows;
#pragma unroll
      for (int i = 0; i < Most; ++i) {
#pragma unroll
        for (int j = 0; j < N; ++j) sum[i][j] += valid ? value[k][i].get(j) : 0.0f;
      }
    }
  }
};

}  // namespace trtc

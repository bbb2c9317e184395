// What the vector and the tile form of `linear` share: rows made ready, results written.
#pragma once

#include <algorithm>

#include "parallel.h"
#include "rownorm.h"
#include "values.h"

namespace penstock::PENSTOCK_ISA {

struct Range {
  int64_t first, last;
};

// Part `part` of `parts` of `count` things.
static inline Range share(int64_t count, int64_t part, int64_t parts) {
  return {count * part / parts, count * (part + 1) / parts};
}

// Things in parts of one size, the last of what is left.
struct Deal {
  int64_t count, size, parts;
  Range part(int64_t i) const { return {i * size, std::min((i + 1) * size, count)}; }
};

constexpr int64_t kMostParts = 8;  // of a thread

// `count` things of `bytes` each to threads that take a part whenever they are free: about `part_bytes`
// at a time, in such parts as end soonest where all threads are as fast. Eight parts of 3 and 4 in turns
// let one of two threads do 16 of 28.
static inline Deal deal(int64_t count, int64_t bytes, int64_t part_bytes, int threads) {
  if (threads <= 1) return {count, count, count > 0};
  const int64_t each = (count * bytes / part_bytes + threads - 1) / threads;
  const int64_t wanted = std::clamp<int64_t>(each, 1, kMostParts);
  Deal best = {};
  int64_t soonest = 0, farthest = 0;
  for (int64_t e = (wanted + 1) / 2; e <= std::min(2 * wanted, kMostParts); e++) {
    const int64_t size = (count + threads * e - 1) / (threads * e);
    const int64_t parts = size > 0 ? (count + size - 1) / size : 0;
    const int64_t left = count - (parts - 1) * size;  // in the last part
    const int64_t before = (parts - 1) / threads * size;
    const int64_t end = before + ((parts - 1) % threads == 0 ? left : size);
    const int64_t far = e < wanted ? wanted - e : e - wanted;
    if (best.parts > 0 && (end > soonest || (end == soonest && far >= farthest))) continue;
    best = {count, size, parts};
    soonest = end;
    farthest = far;
  }
  return best;
}

// body(row) for each of `rows` rows, some to each of `threads` threads.
template <typename Body>
static inline void over_rows(int threads, int64_t rows, Body body) {
  const int64_t parts = rows < 4 * threads ? rows : 4 * threads;
  parallel(threads, parts, [&](int64_t part) {
    const FlushDenormals flush;
    const Range mine = share(rows, part, parts);
    for (int64_t row = mine.first; row < mine.last; row++) body(row);
  });
}

// Panels of a matrix; gate's and up's are padded apart.
static inline int64_t count_panels(const LinearArgs& a) {
  return (a.n + kColumns - 1) / kColumns * (a.gated ? 2 : 1);
}

static inline int64_t panel_bytes(const LinearArgs& a) {
  if (has_records(a.kind)) return a.padded_k / kRecord * record_lines(a.kind) * 64;
  const int64_t bits = a.kind != Weight::dense   ? bits_of(a.kind)
                       : a.dtype == DType::bf16 ? 16
                                                : 32;
  return a.padded_k * kColumns * bits / 8;
}

static inline Panel quantized_panel(const LinearArgs& a, int64_t p) {
  const int64_t first = p * a.groups * kColumns;
  const int64_t scale_bytes = a.scale_type == Scale::f32 ? 4 : a.scale_type == Scale::f16 ? 2 : 1;
  Panel w = {};
  w.data = static_cast<const uint8_t*>(a.weight) + p * panel_bytes(a);
  w.record_bytes = has_records(a.kind) ? record_lines(a.kind) * 64 : 0;
  if (a.scale) w.scale = static_cast<const unsigned char*>(a.scale) + first * scale_bytes;
  if (a.zero) w.zero = static_cast<const uint8_t*>(a.zero) + first;
  if (a.fine) w.fine = a.fine + p * a.padded_k;  // 16 columns for each 16 values of K
  w.table = a.table;
  w.group = a.padded_k / a.groups;
  w.groups = a.groups;
  w.scale_type = a.scale_type;
  return w;
}

// Row `row` of x, normalised where asked, as floats; zeros up to `padded`.
static inline void float_row(const LinearArgs& a, int64_t row, int64_t padded, float* out) {
  if (a.dtype == DType::bf16)
    take_row(static_cast<const bf16*>(a.x) + row * a.x_stride, a.k, a.norm, a.eps, padded, out);
  else
    take_row(static_cast<const float*>(a.x) + row * a.x_stride, a.k, a.norm, a.eps, padded, out);
}

// Rows that share a scale: each value by it, to the nearest, ±127 at most.
static inline void divide_row(const float* floats, int64_t count, float scale, int8_t* out) {
  const F16 by = set1(scale), end = set1(127.0f);
  for (int64_t j = 0; j < count; j += 16)
    store_bytes(out + j, min(max(load(floats + j) / by, zero() - end), end));
}

// What a row's scale is taken from: its greatest magnitude, by bits, of which a NaN's or an infinity's are
// the greatest.
struct Extent {
  F16 top = zero();

  void take(F16 v) { top = max_bits(top, abs(v)); }
  float highest() const { return reduce_max(top); }
  float bad() const { return reduce_add(top * zero()); }  // NaN where one of them isn't a number, else 0
};

// Floats as int8 in ±127, of the extent that was found; returns their scale, NaN where they hold one.
static inline float to_int8(const float* floats, int64_t count, const Extent& found, int8_t* out) {
  const float highest = found.highest();
  const F16 inverse = set1(highest > 1e-30f ? 127.0f / highest : 0.0f);
  int64_t j = 0;
  for (; j + 64 <= count; j += 64) {
    F16 v[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) v[i] = load(floats + j + 16 * i) * inverse;
    store_bytes(out + j, v);
  }
  for (; j < count; j += 16) store_bytes(out + j, load(floats + j) * inverse);
  return highest / 127.0f + found.bad();
}

// A row as floats, its root-mean-square norm taken and rotated where asked, zeros up to `padded`.
// scale: the norm's.
template <bool Rotated, bool Normed, typename T>
static inline Extent measure_row(const LinearArgs& a, const T* x, F16 scale, float* out) {
  const int64_t dim = a.k, padded = a.padded_k;
  Extent found;
  constexpr int parts = 4;
  const auto take = [&](int64_t j, F16 (&v)[parts], int count) {
    if constexpr (Rotated) rotate(v);
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
      found.take(v[i]);
      store(out + j + i * kColumns, v[i]);
    }
  };
  int64_t j = 0;
  for (; j + parts * kColumns <= dim; j += parts * kColumns) {
    F16 v[parts];
#pragma GCC unroll 4
    for (int i = 0; i < parts; i++) {
      v[i] = load(x + j + i * kColumns);
      if constexpr (Normed) v[i] = v[i] * scale * load(a.norm + j + i * kColumns);
    }
    if constexpr (Normed && sizeof(T) == sizeof(bf16)) {
      round_both(v[0], v[1]);
      round_both(v[2], v[3]);
    }
    take(j, v, parts);
  }
  for (; j < padded; j += parts * kColumns) {
    F16 v[parts];
    for (int i = 0; i < parts; i++) {
      const int64_t at = j + i * kColumns, left = std::min<int64_t>(dim - at, kColumns);
      v[i] = zero();
      if (left <= 0) continue;
      const int count = static_cast<int>(left);
      v[i] = load_some(x + at, count);
      if constexpr (Normed) v[i] = round_to<T>(v[i] * scale * load_first(a.norm + at, count));
      v[i] = keep_first(v[i], count, 0.0f);
    }
    take(j, v, static_cast<int>(std::min<int64_t>((padded - j) / kColumns, parts)));
  }
  return found;
}

template <typename T>
static inline Extent measure_row(const LinearArgs& a, const T* x, F16 scale, float* out) {
  if (a.rotated)
    return a.norm ? measure_row<true, true>(a, x, scale, out) : measure_row<true, false>(a, x, scale, out);
  return a.norm ? measure_row<false, true>(a, x, scale, out) : measure_row<false, false>(a, x, scale, out);
}

template <typename T>
static inline const T* row_at(const LinearArgs& a, int64_t row) {
  return static_cast<const T*>(a.x) + row * a.x_stride;
}

// What the norm, where there is one, multiplies R rows by.
template <int R>
static inline void norm_scales(const LinearArgs& a, int64_t row, F16 (&out)[R]) {
  if (!a.norm) return;
  a.dtype == DType::bf16 ? inverse_deviations(row_at<bf16>(a, row), a.x_stride, a.k, 0.0f, a.eps, out)
                         : inverse_deviations(row_at<float>(a, row), a.x_stride, a.k, 0.0f, a.eps, out);
}

// The same row as int8, by its own scale or by `input_scale`; returns it, NaN where the row holds one.
static inline float int8_row(const LinearArgs& a, int64_t row, F16 scale, int8_t* out) {
  float* floats =
      static_cast<float*>(scratch(Scratch::row, static_cast<size_t>(a.padded_k) * sizeof(float)));
  const Extent found = a.dtype == DType::bf16 ? measure_row(a, row_at<bf16>(a, row), scale, floats)
                                              : measure_row(a, row_at<float>(a, row), scale, floats);
  if (a.input_scale) {
    divide_row(floats, a.padded_k, *a.input_scale, out);
    return *a.input_scale + found.bad();
  }
  return to_int8(floats, a.padded_k, found, out);
}
static inline float int8_row(const LinearArgs& a, int64_t row, int8_t* out) {
  F16 scale[1] = {zero()};
  norm_scales(a, row, scale);
  return int8_row(a, row, scale[0], out);
}

// The same row as int8 in blocks, which have a scale each.
static inline void int8_blocks(const LinearArgs& a, int64_t row, int64_t block, int8_t* out,
                               float* scales) {
  float* floats =
      static_cast<float*>(scratch(Scratch::row, static_cast<size_t>(a.padded_k) * sizeof(float)));
  float_row(a, row, a.padded_k, floats);
  for (int64_t b = 0; b < a.padded_k / block; b++, floats += block, out += block) {
    Extent found;
    for (int64_t j = 0; j < block; j += 16) found.take(load(floats + j));
    scales[b] = to_int8(floats, block, found, out);
  }
}

// How many sums `sum_groups` makes of a row.
static inline int64_t row_sums(const LinearArgs& a) { return a.padded_k * 3 / 32; }

// Sums of `count` values of int8: of each 32, and behind those of each 16, times −16.
static inline void sum_groups(const int8_t* values, int64_t count, int16_t* sums) {
  int16_t* halves = sums + count / 32;
  for (int64_t j = 0; j < count; j += 32) {
    int two[2] = {0, 0};
    for (int64_t i = 0; i < 32; i++) two[i / 16] += values[j + i];
    *sums++ = static_cast<int16_t>(two[0] + two[1]);
    *halves++ = static_cast<int16_t>(-16 * two[0]);
    *halves++ = static_cast<int16_t>(-16 * two[1]);
  }
}

// The same row as values of E4M3, still floats; scales: of the weight's groups, each NaN where its
// part of the row holds one.
static inline void fp8_row(const LinearArgs& a, int64_t row, float* out, float* scales) {
  float_row(a, row, a.padded_k, out);
  const int64_t group = a.padded_k / a.groups;
  for (int64_t g = 0; g < a.groups; g++, out += group) {
    F16 top = zero(), bad = zero();
    for (int64_t j = 0; j < group; j += 16) {
      const F16 v = load(out + j);
      top = max(top, abs(v));
      bad = fma(v, zero(), bad);
    }
    const float highest = reduce_max(top), own = highest > 1e-30f ? highest / 448.0f : 1.0f;
    const float scale = a.input_scale ? *a.input_scale : own;
    const F16 by = set1(scale);
    for (int64_t j = 0; j < group; j += 16) store(out + j, round_e4m3(load(out + j) / by));
    scales[g] = scale + reduce_add(bad);
  }
}

// Takes 16 columns of one row at a time: bias, activation, gate, residual, rounding, store.
class Columns {
 public:
  // rows [first, first + count) of the panels that follow
  Columns(const LinearArgs& a, int64_t first, int64_t count) : a_(a), first_(first) {
    if (a.gated)
      gate_ = static_cast<float*>(
          scratch(Scratch::gate, static_cast<size_t>(count * kColumns) * sizeof(float)));
  }

  void operator()(int64_t row, int64_t panel, F16 value) const {
    if (a_.gated) return gated(row, panel, value);
    const int64_t column = panel * kColumns;
    const int count = left(column);
    if (a_.bias) value = value + load_first(a_.bias + column, count);
    if (a_.activation != Activation::none) value = activate(rounded(value), a_.activation);
    write(row, column, value, count);
  }

  // R rows of P panels. Not inlined: what becomes of a value is long, and R · P times as long unrolled.
  template <int R, int P>
  [[gnu::noinline]] void operator()(int64_t row, int64_t panel, const F16 (&values)[R][P]) const {
    if constexpr (P == 2)
      if (a_.gated) return gated_rows(row, panel, values);
#pragma GCC unroll 1
    for (int r = 0; r < R; r++)
#pragma GCC unroll 1
      for (int p = 0; p < P; p++) (*this)(row + r, panel + p, values[r][p]);
  }

 private:
  int left(int64_t column) const {
    return a_.n - column < kColumns ? static_cast<int>(a_.n - column) : kColumns;
  }

  // as if it had been stored in between
  F16 rounded(F16 value) const { return a_.dtype == DType::bf16 ? round_bf16(value) : value; }

  void gated(int64_t row, int64_t panel, F16 value) const {
    const int64_t column = panel / 2 * kColumns;
    const int count = left(column);
    if (a_.bias) value = value + load_first(a_.bias + (panel % 2 ? a_.n : 0) + column, count);
    float* gate = gate_ + (row - first_) * kColumns;
    if (panel % 2 == 0) return store(gate, rounded(value));
    write(row, column, gated_by(load(gate), rounded(value), a_.activation), count);
  }

  // Rows of a gate's panel and up's.
  template <int R>
  void gated_rows(int64_t row, int64_t panel, const F16 (&values)[R][2]) const {
    const int64_t column = panel / 2 * kColumns;
    const int count = left(column);
#pragma GCC unroll 1
    for (int r = 0; r < R; r++) {
      F16 gate = values[r][0], up = values[r][1];
      if (a_.bias) {
        gate = gate + load_first(a_.bias + column, count);
        up = up + load_first(a_.bias + a_.n + column, count);
      }
      write(row + r, column, gated_by(rounded(gate), rounded(up), a_.activation), count);
    }
  }

  template <typename T>
  void put(int64_t row, int64_t column, F16 value, int count) const {
    if (a_.adds) {
      T* to = static_cast<T*>(a_.residual) + row * a_.residual_stride + column;
      return store_some(to, load_some(to, count) + round_to<T>(value), count);
    }
    store_some(static_cast<T*>(a_.y) + row * a_.y_stride + column, value, count);
  }

  void write(int64_t row, int64_t column, F16 value, int count) const {
    a_.out_dtype == DType::bf16 ? put<bf16>(row, column, value, count)
                                : put<float>(row, column, value, count);
  }

  const LinearArgs& a_;
  int64_t first_;
  float* gate_ = nullptr;
};

}  // namespace penstock::PENSTOCK_ISA

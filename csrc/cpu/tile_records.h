// Rows in int8, in blocks of kRecord, times records of K-quants by tiles: the sums of scaled.h.
//
// A code times its group's factor doesn't fit into a byte, but into two, w = 2^shift · high + low. So a record
// is two products of bytes without a scale between them, and what comes after is done once for 256 values.
#pragma once

#include "scaled.h"
#include "tile_rows.h"

namespace penstock::PENSTOCK_ISA {

constexpr int64_t kPlane = kRecord * kColumns;  // bytes of a record's high or low ones

// 64 bytes; gcc computes with them as the instruction set can.
using U16x32 = uint16_t __attribute__((vector_size(64)));
using S16x32 = int16_t __attribute__((vector_size(64)));
using U32x16 = uint32_t __attribute__((vector_size(64)));

// Codes of up to five bits are multiplied by three bits of their factor at a time (a byte, unsigned), two of
// them at once, as they lie in a word; of six bits, by all of it, and w's two bytes are kept.
template <Weight W>
struct Split {
  static constexpr bool by_factor = Record<W>::zero == 0;
  static constexpr int shift = by_factor ? 3 : 8;
};

// A group's factors: each column's twice, or their upper and lower bits.
template <Weight W>
struct Factors {
  S16x32 high, low;

  [[gnu::always_inline]] Factors(const uint8_t* record, int64_t g) {
    const Sums found = widen_bytes(reinterpret_cast<const int8_t*>(record) + g * kColumns);
    U32x16 wide;
    __builtin_memcpy(&wide, &found, 64);
    high = low = (S16x32)((wide & 0xffff) | wide << 16);
    if constexpr (Split<W>::by_factor) {
      high >>= Split<W>::shift;
      low &= (1 << Split<W>::shift) - 1;
    }
  }
};

// The codes of a quad times their factors, to their places in both planes.
template <Weight W, int T>
[[gnu::always_inline]] static inline void split_quad(const uint8_t* record, int64_t unit,
                                                     const Factors<W>& by, uint8_t* planes) {
  const Sums found = record_codes<W, T>(record, unit);
  U16x32 codes, high, low;
  __builtin_memcpy(&codes, &found, 64);
  if constexpr (Split<W>::by_factor) {
    high = codes * (U16x32)by.high;
    low = codes * (U16x32)by.low;
  } else {
    const U16x32 even = (U16x32)(((S16x32)(codes & 255) - Record<W>::zero) * by.high);
    const U16x32 odd = (U16x32)(((S16x32)(codes >> 8) - Record<W>::zero) * by.high);
    high = even >> 8 | (odd & 0xff00);
    low = (even & 255) | odd << 8;
  }
  uint8_t* to = planes + (unit * 8 + T) * 64;
  __builtin_memcpy(to, &high, 64);
  __builtin_memcpy(to + kPlane, &low, 64);
}

// A record as planes of bytes [2, K / 4, 16, 4], which tiles take; what comes `ahead` bytes later is asked for.
template <Weight W>
static inline void split_record(const uint8_t* record, int64_t ahead, uint8_t* planes) {
  constexpr int64_t groups = kUnit / Record<W>::group;  // of a unit
  prefetch_lines(record + ahead, Record<W>::head);
  for (int64_t unit = 0; unit < kRecord / kUnit; unit++) {
    prefetch_lines(record + ahead + Record<W>::head + unit * Record<W>::unit, Record<W>::unit);
    const Factors<W> first(record, unit * groups), last(record, unit * groups + groups - 1);
    split_quad<W, 0>(record, unit, first, planes);
    split_quad<W, 1>(record, unit, first, planes);
    split_quad<W, 2>(record, unit, first, planes);
    split_quad<W, 3>(record, unit, first, planes);
    split_quad<W, 4>(record, unit, last, planes);
    split_quad<W, 5>(record, unit, last, planes);
    split_quad<W, 6>(record, unit, last, planes);
    split_quad<W, 7>(record, unit, last, planes);
  }
}

// What becomes of the sums of a record and up to two row tiles: a few rows at a time, while tiles multiply
// what comes next. A record's scales and minima are widened once for all of them.
template <Weight W>
class Due {
 public:
  Due() = default;  // of nothing
  // sums: [row tile][high, low][16, 16]; x: the record's share of `count` rows; totals: [rows, 16]
  Due(const uint8_t* record, const float* sums, const ScaledRows& x, float* totals, int64_t count)
      : sums_(sums), totals_(totals), left_(count), x_scale_(x.scale), x_sums_(x.sums), scale_pitch_(x.scale_pitch),
        sums_pitch_(x.sums_pitch) {
    const Direct<W> w(record);
    scale_ = w.scale();
    if constexpr (Record<W>::zero != 0) return;
    least_ = w.least();
    for (int64_t i = 0; i < 4; i++) minima_[i] = w.minima(i);
  }

  // The next kEach rows, if there are any.
  static constexpr int64_t kEach = 2;
  [[gnu::always_inline]] void some() {
    if (left_ <= 0) return;
#pragma GCC unroll 2
    for (int64_t j = 0; j < kEach; j++) one(j);
    left_ -= kEach;
    sums_ += kEach * kColumns;
    if (++turn_ == kTileRows / kEach) sums_ += kSums;  // past the low ones
    totals_ += kEach * kColumns;
    x_scale_ += kEach * scale_pitch_;
    x_sums_ += kEach * sums_pitch_;
  }
  void all() {
    while (left_ > 0) some();
  }

 private:
  // Rows that aren't there have room for a total, too.
  [[gnu::always_inline]] void one(int64_t row) const {
    const auto* high = reinterpret_cast<const int32_t*>(sums_) + row * kColumns;
    const F16 x_scale = set1(x_scale_[row * scale_pitch_]);
    float* total = totals_ + row * kColumns;
    const Sums found = raise_lanes<Split<W>::shift>(load_sums(high)) + load_sums(high + kSums);
    F16 sum = fma(to_float(found), scale_ * x_scale, load(total));
    if constexpr (Record<W>::zero == 0) {
      const int16_t* sums = x_sums_ + row * sums_pitch_;
      Sums taken = set_sums(0);
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) {
        int32_t two;
        __builtin_memcpy(&two, sums + 2 * i, 4);
        taken = add_words(taken, minima_[i], set_sums(two));
      }
      sum = fma(to_float(taken), least_ * x_scale, sum);
    }
    store(total, sum);
  }

  const float* sums_ = nullptr;  // all of these of the next row
  float* totals_ = nullptr;
  int64_t left_ = 0, turn_ = 0;
  const float* x_scale_ = nullptr;
  const int16_t* x_sums_ = nullptr;
  int64_t scale_pitch_ = 0, sums_pitch_ = 0;
  F16 scale_ = zero(), least_ = zero();
  Sums minima_[4] = {};  // of pairs of groups
};

#define PENSTOCK_HIGH_DOT(c, a, b)     \
  if constexpr (Split<W>::by_factor)   \
    TILE_DOT_UNSIGNED(c, a, b);        \
  else                                 \
    TILE_DOT_BYTES(c, a, b)

// Row tiles times panels of records: a record of K after the other, for several panels, so that its share of
// many rows comes from L2 for all of them.
template <Weight W>
class RecordSums {
 public:
  RecordSums(const LinearArgs& a, const TileRows& x, Range tiles, const Columns& to)
      : a_(a), x_(x), tiles_(tiles), to_(to), first_(tiles.first * kTileRows),
        last_(std::min(tiles.last * kTileRows, a.rows)), records_(a.padded_k / kRecord),
        rows_(scaled_rows<W>(a, reinterpret_cast<const int8_t*>(x.made), x.scale, x.block_sums)) {
    planes_ = static_cast<uint8_t*>(scratch(Scratch::unpacked, 2 * kPlane));
    const int64_t tile_count = tiles.last - tiles.first;
    panel_sums_ = tile_count * kSums;
    together_ = tile_count <= 2 ? 1 : std::max<int64_t>(kTotalTiles / tile_count, 1);
    sums_ = static_cast<float*>(scratch(
        Scratch::partials, static_cast<size_t>(8 * kSums + together_ * panel_sums_) * sizeof(float)));
    totals_ = sums_ + 8 * kSums;
  }

  // As many of the panels [first, last) as it takes together; returns how many.
  int64_t run(int64_t first, int64_t last) {
    const Panel w = quantized_panel(a_, first);
    const int64_t count = std::min(last - first, together_);
    for (int64_t at = 0; at < count * panel_sums_; at += kColumns) store(totals_ + at, zero());
    for (int64_t i = 0; i < records_; i++)
      for (int64_t p = 0; p < count; p++) {
        const uint8_t* record = w.data + p * panel_bytes(a_) + i * w.record_bytes;
        const int64_t next = p + 1 < count ? panel_bytes(a_) : w.record_bytes - p * panel_bytes(a_);
        one(record, next, i, totals_ + p * panel_sums_);
      }
    due_.all();
    for (int64_t p = 0; p < count; p++)
      for (int64_t row = first_; row < last_; row++)
        to_(row, first + p, load(totals_ + p * panel_sums_ + (row - first_) * kColumns));
    return count;
  }

 private:
  static constexpr int64_t kTiles = kRecord / 64;   // of a record
  static constexpr int64_t kTotalTiles = 512;       // of totals, in L2

  // All rows times record i of a panel.
  void one(const uint8_t* record, int64_t ahead, int64_t i, float* totals) {
    split_record<W>(record, ahead, planes_);
    for (int64_t m = tiles_.first; m < tiles_.last; m += 2) {
      float* sums = sums_ + turn_++ % 2 * 4 * kSums;
      const int64_t row = m * kTileRows, count = std::min(last_ - row, 2 * kTileRows);
      count > kTileRows ? multiply<true>(m, i, sums) : multiply<false>(m, i, sums);
      due_ = Due<W>(record, sums, rows_.at(row).template record<W>(i), totals + (row - first_) * kColumns,
                    count);
    }
  }

  // Sums of both planes of one row tile, or of two.
  template <bool Two>
  [[gnu::noinline]] void multiply(int64_t m, int64_t record, float* sums) {
    Due<W> due = due_;
    const unsigned char *rows = x_.tile(m, record * kTiles), *planes = planes_;
    const int64_t stride = x_.stride, below = Two ? x_.tile(m + 1, record * kTiles) - rows : 0;
    TILE_ZERO(0);
    TILE_ZERO(1);
    if constexpr (Two) {
      TILE_ZERO(2);
      TILE_ZERO(3);
    }
#pragma GCC unroll 4
    for (int64_t d = 0; d < kTiles; d++, rows += 64, planes += 1024) {
      TILE_LOAD_ROWS(4, rows, stride);
      TILE_LOAD_WEIGHTS(6, planes);
      PENSTOCK_HIGH_DOT(0, 4, 6);
      due.some();
      TILE_LOAD_WEIGHTS(7, planes + kPlane);
      TILE_DOT_UNSIGNED(1, 4, 7);
      due.some();
      if constexpr (Two) {
        TILE_LOAD_ROWS(5, rows + below, stride);
        PENSTOCK_HIGH_DOT(2, 5, 6);
        due.some();
        TILE_DOT_UNSIGNED(3, 5, 7);
        due.some();
      }
    }
    TILE_STORE(0, sums, 64);
    TILE_STORE(1, sums + kSums, 64);
    if constexpr (Two) {
      TILE_STORE(2, sums + 2 * kSums, 64);
      TILE_STORE(3, sums + 3 * kSums, 64);
    }
    due.all();
  }

  const LinearArgs& a_;
  const TileRows& x_;
  Range tiles_;
  const Columns& to_;
  int64_t first_, last_, records_;
  ScaledRows rows_;
  uint8_t* planes_;
  int64_t panel_sums_, together_;  // floats of a panel's totals; panels
  float* sums_;    // two times four tiles
  float* totals_;  // [panels, rows, 16], of whole tiles
  Due<W> due_;
  int64_t turn_ = 0;
};

static inline void multiply_records(const LinearArgs& a, const TileRows& x, Range tiles, Range panels,
                                    const Columns& to) {
  const auto kind = [&](int64_t p) { return record_kind(a.kind, quantized_panel(a, p).data); };
  for (int64_t p = panels.first; p < panels.last;) {
    int64_t last = p + 1;
    while (last < panels.last && kind(last) == kind(p)) last++;
    with_records(a.kind, quantized_panel(a, p).data, [&]<Weight W>() {
      RecordSums<W> sums(a, x, tiles, to);
      while (p < last) p += sums.run(p, last);
    });
  }
}

}  // namespace penstock::PENSTOCK_ISA

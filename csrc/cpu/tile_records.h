// Rows in int8, in blocks of kRecord, times records of K-quants by tiles: the sums of scaled.h.
//
// A code times its group's factor doesn't fit into a byte, but into two: w = 64 · high + low. So a record is
// two products of bytes without a scale between them, and what comes after is done once for 256 values.
#pragma once

#include "scaled.h"
#include "tile_rows.h"

namespace penstock::PENSTOCK_ISA {

constexpr int64_t kPlane = kRecord * kColumns;  // bytes of a record's high or low ones

// 64 bytes; gcc computes with them as the instruction set can.
using U16x32 = uint16_t __attribute__((vector_size(64)));
using S16x32 = int16_t __attribute__((vector_size(64)));
using U32x16 = uint32_t __attribute__((vector_size(64)));

// The codes of a quad times their factors, to their places in both planes.
template <Weight W, int T>
[[gnu::always_inline]] static inline void split_quad(const uint8_t* record, int64_t unit,
                                                     const S16x32& factor, uint8_t* planes) {
  const Sums found = record_codes<W, T>(record, unit);
  U16x32 codes;
  __builtin_memcpy(&codes, &found, 64);
  const S16x32 even = (S16x32)(codes & 255) - Record<W>::zero;
  const S16x32 odd = (S16x32)(codes >> 8) - Record<W>::zero;
  const S16x32 a = even * factor, b = odd * factor;
  const U16x32 high = (U16x32)((a >> 6) & 255) | (U16x32)(b >> 6) << 8;
  const U16x32 low = (U16x32)(a & 63) | (U16x32)(b & 63) << 8;
  uint8_t* to = planes + (unit * 8 + T) * 64;
  __builtin_memcpy(to, &high, 64);
  __builtin_memcpy(to + kPlane, &low, 64);
}

// Each column's factor, twice.
[[gnu::always_inline]] static inline void group_factor(const uint8_t* record, int64_t g,
                                                       S16x32& factor) {
  const Sums found = widen_bytes(reinterpret_cast<const int8_t*>(record) + g * kColumns);
  U32x16 wide;
  __builtin_memcpy(&wide, &found, 64);
  factor = (S16x32)((wide & 0xffff) | wide << 16);
}

// A record as planes of bytes [2, K / 4, 16, 4], which tiles take.
template <Weight W>
static inline void split_record(const uint8_t* record, uint8_t* planes) {
  for (int64_t unit = 0; unit < kRecord / kUnit; unit++) {
    S16x32 factor;
    group_factor(record, unit * kUnit / Record<W>::group, factor);
    split_quad<W, 0>(record, unit, factor, planes);
    split_quad<W, 1>(record, unit, factor, planes);
    split_quad<W, 2>(record, unit, factor, planes);
    split_quad<W, 3>(record, unit, factor, planes);
    if constexpr (Record<W>::group < kUnit) group_factor(record, 2 * unit + 1, factor);
    split_quad<W, 4>(record, unit, factor, planes);
    split_quad<W, 5>(record, unit, factor, planes);
    split_quad<W, 6>(record, unit, factor, planes);
    split_quad<W, 7>(record, unit, factor, planes);
  }
}

// Row tiles times panels of records, one after the other.
class RecordSums {
 public:
  RecordSums(const LinearArgs& a, const Packed& x, Range tiles, const Columns& to)
      : a_(a), x_(x), tiles_(tiles), to_(to), first_(tiles.first * kTileRows),
        last_(std::min(tiles.last * kTileRows, a.rows)), records_(a.padded_k / kRecord) {
    planes_ = static_cast<uint8_t*>(scratch(Scratch::unpacked, 2 * kPlane));
    const int64_t floats = 4 * kSums + (last_ - first_) * kColumns;
    sums_ = static_cast<float*>(
        scratch(Scratch::partials, static_cast<size_t>(floats) * sizeof(float)));
    totals_ = sums_ + 4 * kSums;
  }

  template <Weight W>
  void run(int64_t p) {
    const Panel w = quantized_panel(a_, p);
    for (int64_t row = first_; row < last_; row++) store(total(row), zero());
    for (int64_t i = 0; i < records_; i++) {
      const uint8_t* record = w.data + i * w.record_bytes;
      prefetch_lines(record + w.record_bytes, w.record_bytes);
      split_record<W>(record, planes_);
      for (int64_t m = tiles_.first; m < tiles_.last; m += 2) {
        const bool two = m + 1 < tiles_.last;
        two ? multiply<true>(m, i) : multiply<false>(m, i);
        finish<W>(record, m, i, sums_);
        if (two) finish<W>(record, m + 1, i, sums_ + 2 * kSums);
      }
    }
    for (int64_t row = first_; row < last_; row++) to_(row, p, load(total(row)));
  }

 private:
  static constexpr int64_t kTiles = kRecord / 64;  // of a record

  float* total(int64_t row) const { return totals_ + (row - first_) * kColumns; }

  // Sums of both planes of one row tile, or of two.
  template <bool Two>
  [[gnu::noinline]] void multiply(int64_t m, int64_t record) const {
    TILE_ZERO(0);
    TILE_ZERO(1);
    if constexpr (Two) {
      TILE_ZERO(2);
      TILE_ZERO(3);
    }
    for (int64_t d = 0; d < kTiles; d++) {
      const int64_t depth = record * kTiles + d;
      TILE_LOAD_ROWS(4, x_.tile(m, depth), 64);
      TILE_LOAD_WEIGHTS(6, planes_ + d * 1024);
      TILE_DOT_BYTES(0, 4, 6);
      TILE_LOAD_WEIGHTS(7, planes_ + kPlane + d * 1024);
      TILE_DOT_BYTES(1, 4, 7);
      if constexpr (Two) {
        TILE_LOAD_ROWS(5, x_.tile(m + 1, depth), 64);
        TILE_DOT_BYTES(2, 5, 6);
        TILE_DOT_BYTES(3, 5, 7);
      }
    }
    TILE_STORE(0, sums_, 64);
    TILE_STORE(1, sums_ + kSums, 64);
    if constexpr (Two) {
      TILE_STORE(2, sums_ + 2 * kSums, 64);
      TILE_STORE(3, sums_ + 3 * kSums, 64);
    }
  }

  // totals of row tile m += the sums of a record, high and low ones.
  template <Weight W>
  [[gnu::noinline]] void finish(const uint8_t* record, int64_t m, int64_t i,
                                const float* sums) const {
    const int64_t end = std::min((m + 1) * kTileRows, last_);
    const Direct<W> w(record);
    const auto* high = reinterpret_cast<const int32_t*>(sums);
    const ScaledRows rows = scaled_rows<W>(
        a_, reinterpret_cast<const int8_t*>(x_.tiles), x_.scale, x_.block_sums);
    for (int64_t row = m * kTileRows; row < end; row++, high += kColumns) {
      const Sums found[1] = {load_sums(high) * set_sums(64) + load_sums(high + kSums)};
      F16 own[1] = {load(total(row))};
      add_scaled<W>(w, rows.at(row).record<W>(i), found, own);
      store(total(row), own[0]);
    }
  }

  const LinearArgs& a_;
  const Packed& x_;
  Range tiles_;
  const Columns& to_;
  int64_t first_, last_, records_;
  uint8_t* planes_;
  float* sums_;    // four tiles
  float* totals_;  // [rows, 16]
};

static inline void multiply_records(const LinearArgs& a, const Packed& x, Range tiles, Range panels,
                                    const Columns& to) {
  RecordSums sums(a, x, tiles, to);
  for (int64_t p = panels.first; p < panels.last; p++)
    with_records(a.kind, quantized_panel(a, p).data, [&]<Weight W>() { sums.run<W>(p); });
}

}  // namespace penstock::PENSTOCK_ISA

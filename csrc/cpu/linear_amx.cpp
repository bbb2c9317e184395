// y = x · W by AMX tiles; the same bits as linear.cpp.
//
// A tile of weights is 16 lines of a panel, as it lies or widened into a block of K that stays in
// L1; rows are copied into tiles of 16 first (power-of-two strides would alias in L1). Two tiles of
// rows meet two panels. Where groups of K have scales of their own, the sums leave the tiles after
// each group.
#include "tiles.h"

#include "linear.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kSums = 256;               // of a tile
constexpr int64_t kBlockBytes = 14 * 1024;   // of a panel while all rows pass: two stay in L1

// What a LinearVariant leaves open: packed rows that stay in L2, and what a thread takes at a time.
constexpr int64_t kRowsBytes = 1024 * 1024;
constexpr int64_t kPartBytes = 256 * 1024;

struct Packed {
  unsigned char* tiles;  // [row tiles][depth] tiles
  float* scale;          // of int8 rows; [rows, groups] of rows in E4M3; else null
  int32_t* sums;         // [rows, groups] of int8 rows, where weights have zero points to take off
  int64_t row_tiles, depth;
  int64_t row_bytes;  // of a tile: 64, or 32 where a group is shorter than that
  int64_t bytes;      // of a tile
  int64_t step;       // values of K in a tile
};

Packed shape(const LinearArgs& a) {
  Packed x = {};
  x.row_bytes = a.int8_rows && a.padded_k / a.groups % 64 ? 32 : 64;
  x.bytes = kTileRows * x.row_bytes;
  x.step = x.row_bytes / (a.int8_rows ? 1 : 2);
  x.depth = a.padded_k / x.step;
  x.row_tiles = (a.rows + kTileRows - 1) / kTileRows;
  // two tiles more: the prefetch runs ahead
  x.tiles = static_cast<unsigned char*>(
      scratch(Scratch::tiles, static_cast<size_t>((x.row_tiles * x.depth + 2) * x.bytes)));
  if (a.int8_rows) {
    const size_t rows = static_cast<size_t>(x.row_tiles * kTileRows);
    const size_t groups = a.kind == Weight::int8_zero ? static_cast<size_t>(a.groups) : 0;
    x.scale = static_cast<float*>(scratch(Scratch::sums, rows * (1 + groups) * 4));
    if (groups) x.sums = reinterpret_cast<int32_t*>(x.scale + rows);
  } else if (a.fp8_rows) {
    const int64_t scales = x.row_tiles * kTileRows * a.groups;
    x.scale = static_cast<float*>(
        scratch(Scratch::sums, static_cast<size_t>(scales) * sizeof(float)));
  }
  return x;
}

// The sums of a row's groups.
void add_up(const LinearArgs& a, const int8_t* row, int32_t* sums) {
  const int64_t group = a.padded_k / a.groups;
  for (int64_t g = 0; g < a.groups; g++) {
    int32_t sum = 0;
    for (int64_t j = 0; j < group; j++) sum += row[g * group + j];
    sums[g] = sum;
  }
}

// One row into its place in its row tile; zeros where there is no such row.
void pack_row(const LinearArgs& a, const Packed& x, int64_t row) {
  unsigned char* to =
      x.tiles + row / kTileRows * x.depth * x.bytes + row % kTileRows * x.row_bytes;
  if (row >= a.rows) {
    for (int64_t d = 0; d < x.depth; d++)
      __builtin_memset(to + d * x.bytes, 0, static_cast<size_t>(x.row_bytes));
    if (x.sums)
      __builtin_memset(x.sums + row * a.groups, 0, static_cast<size_t>(a.groups) * 4);
    if (a.fp8_rows)
      __builtin_memset(x.scale + row * a.groups, 0, static_cast<size_t>(a.groups) * 4);
    return;
  }
  unsigned char* packed = static_cast<unsigned char*>(
      scratch(Scratch::rows, static_cast<size_t>(a.padded_k) * (sizeof(float) + 2)));
  if (a.int8_rows) {
    x.scale[row] = int8_row(a, row, reinterpret_cast<int8_t*>(packed));
    if (x.sums) add_up(a, reinterpret_cast<int8_t*>(packed), x.sums + row * a.groups);
  } else {
    float* floats = reinterpret_cast<float*>(packed + a.padded_k * 2);
    if (a.fp8_rows)
      fp8_row(a, row, floats, x.scale + row * a.groups);
    else
      float_row(a, row, a.padded_k, floats);
    for (int64_t j = 0; j < a.padded_k; j += 16)
      store(reinterpret_cast<bf16*>(packed) + j, load(floats + j));
  }
  for (int64_t d = 0; d < x.depth; d++)
    __builtin_memcpy(to + d * x.bytes, packed + d * x.row_bytes,
                     static_cast<size_t>(x.row_bytes));
}

inline void prefetch_tile(const unsigned char* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64)
    _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T0);
}

#define PENSTOCK_DOT(c, a, b) \
  if constexpr (Ints)         \
    TILE_DOT_BYTES(c, a, b);  \
  else                        \
    TILE_DOT(c, a, b)

// sums (4 tiles: row tile × panel) += rows · panels over `count` tiles of K; from zero if `fresh`.
template <bool TwoRows, bool Ints>
void multiply_tiles(const unsigned char* rows0, const unsigned char* rows1,
                    const unsigned char* panel0, const unsigned char* panel1, const Packed& x,
                    int64_t count, bool fresh, float* sums) {
  if (fresh) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    if constexpr (TwoRows) {
      TILE_ZERO(2);
      TILE_ZERO(3);
    }
  } else {
    TILE_LOAD_SUMS(0, sums);
    TILE_LOAD_SUMS(1, sums + kSums);
    if constexpr (TwoRows) {
      TILE_LOAD_SUMS(2, sums + 2 * kSums);
      TILE_LOAD_SUMS(3, sums + 3 * kSums);
    }
  }
  for (int64_t d = 0; d < count; d++) {
    const int64_t at = d * x.bytes;
    TILE_LOAD_ROWS(4, rows0 + at, x.row_bytes);
    TILE_LOAD_WEIGHTS(6, panel0 + at);
    if constexpr (TwoRows) {
      prefetch_tile(rows0 + at + 2 * x.bytes, x.bytes);
    } else {
      prefetch_tile(panel0 + at + kAheadBytes, x.bytes);
      prefetch_tile(panel1 + at + kAheadBytes, x.bytes);
    }
    PENSTOCK_DOT(0, 4, 6);
    TILE_LOAD_WEIGHTS(7, panel1 + at);
    PENSTOCK_DOT(1, 4, 7);
    if constexpr (TwoRows) {
      prefetch_tile(rows1 + at + 2 * x.bytes, x.bytes);
      TILE_LOAD_ROWS(5, rows1 + at, x.row_bytes);
      PENSTOCK_DOT(2, 5, 6);
      PENSTOCK_DOT(3, 5, 7);
    }
  }
  TILE_STORE(0, sums, 64);
  TILE_STORE(1, sums + kSums, 64);
  if constexpr (TwoRows) {
    TILE_STORE(2, sums + 2 * kSums, 64);
    TILE_STORE(3, sums + 3 * kSums, 64);
  }
}

// Row tiles [first, last) times panels p and p + 1 (or p twice when it is the last).
class PanelPair {
 public:
  PanelPair(const LinearArgs& a, const Packed& x, Range tiles, int64_t p, bool two)
      : a_(a), x_(x), tiles_(tiles), p_(p), two_(two) {
    if (a.kind != Weight::dense)
      for (int64_t i = 0; i < 2; i++) panel_[i] = quantized_panel(a, two ? p + i : p);
    const size_t sums = static_cast<size_t>((tiles.last - tiles.first + 1) * 2 * kSums);
    totals_ = static_cast<float*>(
        scratch(Scratch::partials, (sums + 4 * kSums) * sizeof(float)));
    one_group_ = totals_ + sums;
    // whole groups, as many as fit; with few rows a dense panel passes once anyway
    group_ = x.depth / a.groups;
    block_ = kBlockBytes / x.bytes;
    if (a.groups > 1) block_ = block_ < group_ ? group_ : block_ / group_ * group_;
    wide_ = static_cast<unsigned char*>(
        scratch(Scratch::unpacked, static_cast<size_t>(2 * (block_ * x.bytes + kAheadBytes))));
  }

  template <bool Ints>
  void run(const Columns& to) {
    const bool widen = a_.kind != Weight::dense && (bits_of(a_.kind) == 4 || !Ints);
    int64_t block = block_;
    if (!widen && a_.groups == 1 && tiles_.last - tiles_.first == 1) block = x_.depth;
    for (int64_t from = 0; from < x_.depth; from += block) {
      const int64_t count = from + block < x_.depth ? block : x_.depth - from;
      const unsigned char* panels[2];
      for (int64_t i = 0; i < 2; i++)
        panels[i] = widen ? widened<Ints>(i, from, count) : stored(i) + from * x_.bytes;
      for (int64_t m = tiles_.first; m < tiles_.last; m += 2)
        m + 1 < tiles_.last ? rows<true, Ints>(m, panels, from, count)
                            : rows<false, Ints>(m, panels, from, count);
    }
    write<Ints>(0, to);
    if (two_) write<Ints>(1, to);
  }

 private:
  const unsigned char* stored(int64_t i) const {
    const int64_t p = two_ ? p_ + i : p_;
    return static_cast<const unsigned char*>(a_.weight) + p * panel_bytes(a_);
  }

  template <bool Ints>
  const unsigned char* widened(int64_t i, int64_t from, int64_t count) {
    unsigned char* out = wide_ + (two_ ? i : 0) * block_ * x_.bytes;
    if (i == 1 && !two_) return out;
    const int64_t first = from * x_.step, last = (from + count) * x_.step;
    if constexpr (Ints)
      unpack_int8(panel_[i], first, last, reinterpret_cast<int8_t*>(out));
    else
      unpack_bf16(a_.kind, panel_[i], first, last, reinterpret_cast<bf16*>(out));
    return out;
  }

  float* total(int64_t m) const { return totals_ + (m - tiles_.first) * 2 * kSums; }

  template <bool TwoRows, bool Ints>
  void rows(int64_t m, const unsigned char* const* panels, int64_t from, int64_t count) {
    const unsigned char* rows0 = x_.tiles + (m * x_.depth + from) * x_.bytes;
    const unsigned char* rows1 = rows0 + x_.depth * x_.bytes;
    if (a_.groups == 1) {
      multiply_tiles<TwoRows, Ints>(rows0, rows1, panels[0], panels[1], x_, count, from == 0,
                                    total(m));
      return;
    }
    for (int64_t d = 0; d < count; d += group_) {
      const int64_t at = d * x_.bytes;
      multiply_tiles<TwoRows, Ints>(rows0 + at, rows1 + at, panels[0] + at, panels[1] + at, x_,
                                    group_, true, one_group_);
      scale<Ints>((from + d) / group_, m, TwoRows ? 4 : 2);
    }
  }

  // What the tiles hold of a row and a group, as floats: of integers less their zero points, of rows
  // in E4M3 times the scale.
  template <bool Ints>
  F16 sum_of(const float* sums, int64_t i, int64_t row, int64_t g) const {
    if constexpr (!Ints)
      return a_.fp8_rows ? load(sums) * set1(x_.scale[row * a_.groups + g]) : load(sums);
    const Sums found = load_sums(reinterpret_cast<const int32_t*>(sums));
    if (!x_.sums) return to_float(found);
    return to_float(found + zero_points<8>(panel_[i], g) *
                                set_sums(-x_.sums[row * a_.groups + g]));
  }

  // totals += the group's sums · its scales; `count` tiles from row tile m on, alternating between
  // the panels
  template <bool Ints>
  void scale(int64_t g, int64_t m, int64_t count) {
    const F16 scales[2] = {panel_[0].scales(g), panel_[1].scales(g)};
    float* totals = total(m);
    for (int64_t t = 0; t < count; t++)
      for (int64_t r = 0; r < kTileRows; r++) {
        const int64_t at = t * kSums + r * kColumns, row = (m + t / 2) * kTileRows + r;
        const F16 sum = sum_of<Ints>(one_group_ + at, t % 2, row, g);
        store(totals + at, fma(sum, scales[t % 2], g ? load(totals + at) : zero()));
      }
  }

  template <bool Ints>
  void write(int64_t i, const Columns& to) const {
    const bool single = a_.groups == 1 && a_.kind != Weight::dense;
    const F16 s = single ? panel_[i].scales(0) : zero();
    for (int64_t m = tiles_.first; m < tiles_.last; m++)
      for (int64_t r = 0; r < kTileRows && m * kTileRows + r < a_.rows; r++) {
        const float* sums = total(m) + i * kSums + r * kColumns;
        const int64_t row = m * kTileRows + r;
        F16 value = load(sums);
        if (single) value = fma(sum_of<Ints>(sums, i, row, 0), s, zero());
        if constexpr (Ints) value = value * set1(x_.scale[row]);
        to(row, p_ + i, value);
      }
  }

  const LinearArgs& a_;
  const Packed& x_;
  Range tiles_;
  int64_t p_;
  bool two_;
  Panel panel_[2] = {};
  int64_t group_, block_;  // tiles along K: of a group, and taken at a time
  float* totals_;
  float* one_group_;
  unsigned char* wide_;
};

// All rows times the panels [first, last).
[[gnu::noinline]] void multiply(const LinearArgs& a, const Packed& x, Range panels) {
  int64_t block = choice_or(a.variant.rows_bytes, kRowsBytes) / (x.depth * x.bytes) / 2 * 2;
  if (block < 2) block = 2;
  for (int64_t first = 0; first < x.row_tiles; first += block) {
    const Range tiles = {first, first + block < x.row_tiles ? first + block : x.row_tiles};
    const Columns to(a, tiles.first * kTileRows, (tiles.last - tiles.first) * kTileRows);
    for (int64_t p = panels.first; p < panels.last; p += 2) {
      PanelPair pair(a, x, tiles, p, p + 1 < panels.last);
      a.int8_rows ? pair.run<true>(to) : pair.run<false>(to);
    }
  }
}

}  // namespace

void linear_tiles(const LinearArgs& a) {
  const Packed x = shape(a);
  const int64_t pairs = (count_panels(a) + 1) / 2, bytes = 2 * panel_bytes(a);
  const Deal parts = deal(pairs, bytes, choice_or(a.variant.part_bytes, kPartBytes), a.threads);
  over_rows(a.threads, x.row_tiles * kTileRows, [&](int64_t row) { pack_row(a, x, row); });
  parallel(a.threads, parts.parts, [&](int64_t i) {
    const FlushDenormals flush;
    TILE_CONFIGURE(static_cast<int>(x.row_bytes));
    const Range mine = parts.part(i);
    const int64_t last = 2 * mine.last, count = count_panels(a);
    multiply(a, x, {2 * mine.first, last < count ? last : count});
    TILE_RELEASE();
  });
}

}  // namespace penstock::PENSTOCK_ISA

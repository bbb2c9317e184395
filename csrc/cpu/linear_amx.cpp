// y = x · W by AMX tiles; the same bits as linear.cpp.
//
// A tile of weights is 16 lines of a panel, as it lies or widened; rows are copied into tiles of 16 first
// (power-of-two strides would alias in L1). Two tiles of rows meet two panels. Where groups of K have
// scales of their own, tile_groups.h does it, of K-quants by int8 tile_records.h.
#include "row_largest.h"
#include "tile_groups.h"
#include "tile_records.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// A block of a pair of panels stays in L1 while rows pass it, a block of rows in L2 while panels pass;
// a core of Granite Rapids has 48 KB and 2 MB.
constexpr int64_t kBlockBytes = 10 * 1024;     // of a panel
constexpr int64_t kRowsBytes = 1024 * 1024;    // of packed rows: those of at most kBlockTiles, or part of K
constexpr int64_t kBlockTiles = 32;            // row tiles
constexpr int64_t kPartBytes = 256 * 1024;     // of panels that a thread takes at a time
constexpr int64_t kPartPairs = 8;              // of panels, where rows come from L3 once for each part

// `count` in as few blocks as there can be, of at most `most` and nearly one size.
struct Blocks {
  int64_t count, blocks;
  Blocks(int64_t n, int64_t most) : count(n), blocks((n + most - 1) / most) {}
  Range at(int64_t i) const { return share(count, i, blocks); }
};

// Two row tiles and two panels, over some of K.
struct Tiles {
  const unsigned char* rows[2];
  const unsigned char* panels[2];
  int64_t count;       // tiles of K
  int64_t bytes;       // of a tile
  int64_t pitch;       // bytes from one tile of rows to the next
  int64_t row_bytes;   // of one of its rows
  bool fresh;          // sums begin with zero
  int64_t ahead;       // where panels come from memory: so far ahead it is asked for; else 0
  float* sums;
};

// What the next block of panels reads, asked for in even parts while this one is multiplied.
struct Upcoming {
  const unsigned char* at[2];
  int64_t left, each;  // bytes of a panel: in all, and at a time
};

#define PENSTOCK_DOT(c, a, b) \
  if constexpr (Ints)         \
    TILE_DOT_BYTES(c, a, b);  \
  else                        \
    TILE_DOT(c, a, b)

// sums (4 tiles: row tile × panel) += rows · panels. Not inlined: all that the loop needs is in registers.
template <bool TwoRows, bool Ints>
[[gnu::noinline]] void multiply_tiles(const Tiles& t, Upcoming& upcoming, Finish& finish) {
  float* const sums = t.sums;
  if (t.fresh) {
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
  const unsigned char *rows0 = t.rows[0], *rows1 = t.rows[1];
  const unsigned char *panel0 = t.panels[0], *panel1 = t.panels[1];
  const unsigned char *next0 = upcoming.at[0], *next1 = upcoming.at[1];
  const int64_t bytes = t.bytes, row_bytes = t.row_bytes, end = t.count * bytes, ahead = t.ahead;
  const int64_t pitch = t.pitch, each = upcoming.left > 0 ? upcoming.each : 0;
  for (int64_t at = 0; at < end; at += bytes, rows0 += pitch, rows1 += pitch) {
    if (ahead) {
      prefetch_lines(panel0 + at + ahead, bytes);
      prefetch_lines(panel1 + at + ahead, bytes);
    }
    TILE_LOAD_ROWS(4, rows0, row_bytes);
    TILE_LOAD_WEIGHTS(6, panel0 + at);
    PENSTOCK_DOT(0, 4, 6);
    TILE_LOAD_WEIGHTS(7, panel1 + at);
    PENSTOCK_DOT(1, 4, 7);
    if constexpr (TwoRows) {
      TILE_LOAD_ROWS(5, rows1, row_bytes);
      PENSTOCK_DOT(2, 5, 6);
      PENSTOCK_DOT(3, 5, 7);
    }
    for (int64_t i = 0; i < each; i += 64, next0 += 64, next1 += 64) {
      prefetch(reinterpret_cast<const char*>(next0), false);
      prefetch(reinterpret_cast<const char*>(next1), false);
    }
    finish.some();
  }
  upcoming = {{next0, next1}, upcoming.left - t.count * each, upcoming.each};
  TILE_STORE(0, sums, 64);
  TILE_STORE(1, sums + kSums, 64);
  if constexpr (TwoRows) {
    TILE_STORE(2, sums + 2 * kSums, 64);
    TILE_STORE(3, sums + 3 * kSums, 64);
  }
}

// A block of row tiles times the panels [first, last), of one group: blocks of K that let rows stay in L2,
// in each of them pair after pair of panels, of a pair blocks that stay in L1, past which rows go.
class Product {
 public:
  Product(const LinearArgs& a, const Packed& x, Range tiles, Range panels, const Columns& to)
      : a_(a), x_(x), tiles_(tiles), panels_(panels),
        finish_(a, x, tiles.first * kTileRows, std::min(tiles.last * kTileRows, a.rows), to),
        widen_(a.kind != Weight::dense && (bits_of(a.kind) == 4 || !a.int8_rows)),
        outer_(x.depth, most_depth()), pairs_((panels.last - panels.first + 1) / 2),
        row_pairs_((tiles.last - tiles.first + 1) / 2) {
    pair_sums_ = row_pairs_ * 4 * kSums;
    kept_ = outer_.blocks > 1 ? pairs_ : 2;
    sums_ = static_cast<float*>(
        scratch(Scratch::partials, static_cast<size_t>(kept_ * pair_sums_) * sizeof(float)));
    // rows of one or two tiles pass once anyway
    most_ = row_pairs_ == 1 && !widen_ ? x.depth : kBlockBytes / x.bytes;
    if (widen_)
      wide_ = static_cast<unsigned char*>(
          scratch(Scratch::unpacked, static_cast<size_t>(2 * most_ * x.bytes)));
  }

  template <bool Ints>
  void run() {
    for (int64_t o = 0; o < outer_.blocks; o++)
      for (int64_t i = 0; i < pairs_; i++) pair<Ints>(outer_.at(o), i);
    finish_.all();
  }

 private:
  int64_t most_depth() const {
    const int64_t bytes = choice_or(a_.variant.rows_bytes, kRowsBytes);
    return std::max<int64_t>(bytes / ((tiles_.last - tiles_.first) * x_.bytes), 1);
  }

  template <bool Ints>
  void pair(Range depth, int64_t i) {
    const int64_t p = panels_.first + 2 * i, count = depth.last - depth.first;
    const bool two = p + 1 < panels_.last;
    float* sums = sums_ + i % kept_ * pair_sums_;
    const Blocks inner(count, most_);
    for (int64_t b = 0; b < inner.blocks; b++) {
      const Range part = inner.at(b);
      const bool last = b + 1 == inner.blocks;
      ask(last ? p + 2 : p, depth.first + inner.at(last ? 0 : b + 1).first, part.last - part.first);
      block<Ints>({depth.first + part.first, depth.first + part.last}, p, two, sums);
    }
    if (depth.last == x_.depth) finish_.begin(sums, p, two, count * row_pairs_);
  }

  // Upcoming: `count` tiles of K of the panels p and p + 1 from `first` on, over as many of these.
  void ask(int64_t p, int64_t first, int64_t count) {
    upcoming_ = {};
    if (row_pairs_ == 1 || p + 1 >= panels_.last) return;
    const int64_t bytes = panel_bytes(a_) / x_.depth;  // of a panel's tile
    const unsigned char* next =
        static_cast<const unsigned char*>(a_.weight) + p * panel_bytes(a_) + first * bytes;
    const int64_t each = (bytes / row_pairs_ + 63) / 64 * 64;
    upcoming_ = {{next, next + panel_bytes(a_)}, count * bytes, each};
  }

  // All rows past some of K of the panels p and p + 1 (or p twice when it is the last).
  template <bool Ints>
  void block(Range depth, int64_t p, bool two, float* sums) {
    Tiles t = {};
    t.count = depth.last - depth.first;
    t.bytes = x_.bytes;
    t.pitch = x_.pitch;
    t.row_bytes = x_.row_bytes;
    t.fresh = depth.first == 0;
    t.sums = sums;
    for (int64_t j = 0; j < 2; j++) t.panels[j] = panel<Ints>(p + (two ? j : 0), j, depth);
    const bool asked = row_pairs_ > 1 && p > panels_.first;
    t.ahead = widen_ || asked ? 0 : choice_or(a_.variant.ahead_bytes, kAheadBytes);
    for (int64_t m = tiles_.first; m < tiles_.last; m += 2, t.sums += 4 * kSums, t.ahead = 0) {
      for (int64_t r = 0; r < 2; r++)
        t.rows[r] = x_.tile(m + r, depth.first);
      m + 1 < tiles_.last ? multiply_tiles<true, Ints>(t, upcoming_, finish_)
                          : multiply_tiles<false, Ints>(t, upcoming_, finish_);
    }
  }

  // Depths [first, last) of panel p, widened into place j where it must be.
  template <bool Ints>
  const unsigned char* panel(int64_t p, int64_t j, Range depth) {
    if (!widen_)
      return static_cast<const unsigned char*>(a_.weight) + p * panel_bytes(a_) +
             depth.first * x_.bytes;
    unsigned char* out = wide_ + j * most_ * x_.bytes;
    const int64_t first = depth.first * x_.step, last = depth.last * x_.step;
    if constexpr (Ints)
      unpack_int8(quantized_panel(a_, p), first, last, reinterpret_cast<int8_t*>(out));
    else
      unpack_bf16(a_.kind, quantized_panel(a_, p), first, last, reinterpret_cast<bf16*>(out));
    return out;
  }

  const LinearArgs& a_;
  const Packed& x_;
  Range tiles_, panels_;
  Finish finish_;
  Upcoming upcoming_ = {};
  bool widen_;
  Blocks outer_;
  int64_t pairs_, row_pairs_;
  int64_t pair_sums_, kept_;  // floats of one pair's sums; of so many
  float* sums_;
  int64_t most_;       // tiles of K in an inner block
  unsigned char* wide_ = nullptr;
};

// All rows times the panels [first, last).
[[gnu::noinline]] void multiply(const LinearArgs& a, const Packed& x, Range panels) {
  const Blocks blocks(x.row_tiles, kBlockTiles);
  for (int64_t b = 0; b < blocks.blocks; b++) {
    const Range tiles = blocks.at(b);
    const Columns to(a, tiles.first * kTileRows, (tiles.last - tiles.first) * kTileRows);
    if (x.block_sums) {
      multiply_records(a, x, tiles, panels, to);
      continue;
    }
    if (a.groups > 1) {
      multiply_groups(a, x, tiles, panels, to);
      continue;
    }
    Product product(a, x, tiles, panels, to);
    a.int8_rows ? product.run<true>() : product.run<false>();
  }
}

Deal deal_pairs(const LinearArgs& a, const Packed& x) {
  const int64_t pairs = (count_panels(a) + 1) / 2, bytes = 2 * panel_bytes(a);
  const bool from_l3 = std::min(x.row_tiles, kBlockTiles) * x.depth * x.bytes > kRowsBytes;
  // rows that pass twice ask for a part's next pair
  const int64_t together = from_l3 ? kPartPairs : x.row_tiles > 2 ? kPartPairs / 2 : 1;
  const int64_t least = std::max(kPartBytes, together * bytes);
  return deal(pairs, bytes, choice_or(a.variant.part_bytes, static_cast<int32_t>(least)), a.threads);
}

}  // namespace

void linear_tiles(const LinearArgs& a) {
  const Packed x = shape(a);
  const Deal parts = deal_pairs(a, x);
  over_rows(a.threads, x.row_tiles * kTileRows, [&](int64_t row) { pack_row(a, x, row); });
  const RowLargest largest(a, parts.parts);
  parallel(a.threads, parts.parts, [&](int64_t i) {
    const Range pairs = parts.part(i);
    const Range mine = {2 * pairs.first, std::min(2 * pairs.last, count_panels(a))};
    largest.part(i, mine, [&](const LinearArgs& args) {
      const FlushDenormals flush;
      TILE_CONFIGURE(static_cast<int>(x.row_bytes), static_cast<int>(x.tile_rows));
      multiply(args, x, mine);
      TILE_RELEASE();
    });
  });
  largest.finish();
}

}  // namespace penstock::PENSTOCK_ISA

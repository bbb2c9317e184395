// y = x · W by AMX tiles; the same bits as linear.cpp.
//
// A tile of weights is 16 lines of a panel, as it lies or widened; one of rows lies in 16 of them. Two tiles of
// rows meet two panels. Where groups of K have
// scales of their own, tile_groups.h does it, of K-quants by int8 tile_records.h.
#include "row_largest.h"
#include "tile_groups.h"
#include "tile_records.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// A block of a pair of panels stays in L1 while rows pass it, which L1 doesn't keep; a block of rows in L2
// while panels pass. A core has 48 KB and 2 MB.
constexpr int64_t kBlockBytes = 20 * 1024;   // of a panel
constexpr int64_t kRowsBytes = 1100 * 1024;  // of rows, with all of K
constexpr int64_t kDepthBytes = 640 * 1024;  // and of at least kLeastTiles with a part of it, beside their sums
constexpr int64_t kLeastTiles = 16, kMostTiles = 64;  // row tiles
constexpr int64_t kGroupRowsBytes = 1200 * 1024;  // of rows, where groups have scales of their own …
constexpr int64_t kLeastGroupTiles = 8, kMostGroupTiles = 32;  // of records, always the latter
constexpr int64_t kAheadOfTiles = 3072;     // in a panel that comes from memory, into L1
constexpr int64_t kPartBytes = 256 * 1024;   // of panels that a thread takes at a time
constexpr int64_t kPartPairs = 8;            // of panels, where rows come from L3 once for each part

// `count` in as few blocks as there can be, of at most `most` and nearly one size.
struct Blocks {
  int64_t count, blocks;
  Blocks(int64_t n, int64_t most) : count(n), blocks((n + most - 1) / most) {}
  Range at(int64_t i) const { return share(count, i, blocks); }
};

// Two row tiles and two panels, over some of K.
struct Tiles {
  const unsigned char* rows;
  const unsigned char* panels;  // the second `stride` bytes from the first
  int64_t stride;
  int64_t count;       // tiles of K
  int64_t bytes;       // of a tile
  int64_t second;      // bytes from the first tile of rows to the second
  int64_t row_bytes;   // of a row in a tile
  int64_t row_stride;  // bytes from a row to the next
  int64_t ahead;       // where panels come from memory: so far ahead it is asked for; else 0
  const float* from;   // sums so far (4 tiles: panel × row tile); null: zero
  float* to;
};

// What the next block of panels reads, asked for in even parts while this one is multiplied.
struct Upcoming {
  const unsigned char* at;
  int64_t stride;      // from a panel to the next
  int64_t left, each;  // bytes of a panel: in all, and at a time
};

// t.to = t.from + rows · panels. Not inlined: all that the loop needs is in registers. Streams: rows pass L1.
template <bool TwoRows, bool Streams, bool Ints, Way W, Sum S>
[[gnu::noinline]] void multiply_tiles(const Tiles& t, Upcoming& upcoming, Finish& finish) {
  if (!t.from) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    if constexpr (TwoRows) {
      TILE_ZERO(2);
      TILE_ZERO(3);
    }
  } else {
    TILE_LOAD_SUMS(0, t.from);
    TILE_LOAD_SUMS(1, t.from + 2 * kSums);
    if constexpr (TwoRows) {
      TILE_LOAD_SUMS(2, t.from + kSums);
      TILE_LOAD_SUMS(3, t.from + 3 * kSums);
    }
  }
  const unsigned char *rows = t.rows, *panel = t.panels, *next = upcoming.at;
  const int64_t bytes = t.bytes, ahead = t.ahead, stride = t.stride;
  [[maybe_unused]] const int64_t row_stride = t.row_stride, second = t.second;
  const int64_t row_bytes = t.row_bytes;
  const int64_t each = upcoming.left > 0 ? upcoming.each : 0, next_stride = upcoming.stride;
  for (int64_t count = t.count; count > 0; count--, rows += row_bytes, panel += bytes) {
    if (ahead) {
      const int64_t place = count * bytes > ahead ? ahead : ahead + stride;  // beyond its end: of the next pair's
      prefetch_lines(panel + place, bytes);
      prefetch_lines(panel + stride + place, bytes);
    }
    if constexpr (Streams) {
      TILE_STREAM_ROWS(4, rows, row_stride);
      if constexpr (TwoRows) TILE_STREAM_ROWS(5, rows + second, row_stride);
    } else {
      TILE_LOAD_ROWS(4, rows, row_stride);
      if constexpr (TwoRows) TILE_LOAD_ROWS(5, rows + second, row_stride);
    }
    TILE_LOAD_WEIGHTS(6, panel);
    TILE_LOAD_WEIGHTS(7, panel + stride);
    TILE_DOT_OF(Ints, 0, 4, 6);
    TILE_DOT_OF(Ints, 1, 4, 7);
    if constexpr (TwoRows) {
      TILE_DOT_OF(Ints, 2, 5, 6);
      TILE_DOT_OF(Ints, 3, 5, 7);
    }
    for (int64_t i = each; i > 0; i -= 64, next += 64) {
      prefetch(reinterpret_cast<const char*>(next), false);
      prefetch(reinterpret_cast<const char*>(next + next_stride), false);
    }
    if constexpr (W != Way::other) finish.some<W, S>();
  }
  upcoming.at = next;
  upcoming.left -= t.count * each;
  TILE_STORE(0, t.to, 64);
  TILE_STORE(1, t.to + 2 * kSums, 64);
  if constexpr (TwoRows) {
    TILE_STORE(2, t.to + kSums, 64);
    TILE_STORE(3, t.to + 3 * kSums, 64);
  }
}

// Values k of K of a panel as its tiles have them. Not inlined: it would be in every `Product`.
template <bool Ints>
[[gnu::noinline]] void widen_panel(const LinearArgs& a, int64_t p, Range k, unsigned char* out) {
  if constexpr (Ints)
    unpack_int8(quantized_panel(a, p), k.first, k.last, reinterpret_cast<int8_t*>(out));
  else
    unpack_bf16(a.kind, quantized_panel(a, p), k.first, k.last, reinterpret_cast<bf16*>(out));
}

// A block of row tiles times the panels [first, last), of one group: blocks of K that let rows stay in L2,
// in each of them pair after pair of panels, of a pair blocks that stay in L1, past which rows go.
template <bool Ints, Way W, Sum S>
class Product {
 public:
  Product(const LinearArgs& a, const TileRows& x, Range tiles, Range panels, Finish& finish)
      : a_(a), x_(x), tiles_(tiles), panels_(panels), finish_(finish),
        widen_(a.kind != Weight::dense && (bits_of(a.kind) == 4 || !a.int8_rows)),
        outer_(x.depth, most_depth()), pairs_((panels.last - panels.first + 1) / 2),
        row_pairs_((tiles.last - tiles.first + 1) / 2) {
    pair_sums_ = row_pairs_ * 4 * kSums;
    kept_ = outer_.blocks > 1 ? pairs_ : 1;
    ring_ = static_cast<float*>(
        scratch(Scratch::partials, static_cast<size_t>(8 * kSums + kept_ * pair_sums_) * sizeof(float)));
    sums_ = ring_ + 8 * kSums;
    // rows of one or two tiles pass once anyway
    most_ = row_pairs_ == 1 && !widen_ ? x.depth : kBlockBytes / x.bytes;
    if (widen_)
      wide_ = static_cast<unsigned char*>(
          scratch(Scratch::unpacked, static_cast<size_t>(2 * most_ * x.bytes)));
  }

  void run() {
    for (int64_t o = 0; o < outer_.blocks; o++)
      for (int64_t i = 0; i < pairs_; i++) pair(outer_.at(o), i);
    if constexpr (W != Way::other) finish_.all<W, S>();
  }

 private:
  int64_t most_depth() const {
    const int64_t step = (tiles_.last - tiles_.first) * x_.bytes;
    if (x_.depth * step <= choice_or(a_.variant.rows_bytes, kRowsBytes)) return x_.depth;
    return std::max<int64_t>(choice_or(a_.variant.rows_bytes, kDepthBytes) / step, 1);
  }

  void pair(Range depth, int64_t i) {
    const int64_t p = panels_.first + 2 * i, count = depth.last - depth.first;
    const bool two = p + 1 < panels_.last;
    float* sums = sums_ + i % kept_ * pair_sums_;
    const Blocks inner(count, most_);
    for (int64_t b = 0; b < inner.blocks; b++) {
      const Range part = inner.at(b);
      const bool last = b + 1 == inner.blocks;
      ask(last ? p + 2 : p, depth.first + inner.at(last ? 0 : b + 1).first, part.last - part.first);
      block({depth.first + part.first, depth.first + part.last}, p, two, sums);
    }
  }

  // Upcoming: `count` tiles of K of the panels p and p + 1 from `first` on, over as many of these.
  void ask(int64_t p, int64_t first, int64_t count) {
    upcoming_ = {};
    if (row_pairs_ == 1 || p + 1 >= panels_.last) return;
    const int64_t bytes = panel_bytes(a_) / x_.depth;  // of a panel's tile
    const unsigned char* next =
        static_cast<const unsigned char*>(a_.weight) + p * panel_bytes(a_) + first * bytes;
    const int64_t each = (bytes / row_pairs_ + 63) / 64 * 64;
    upcoming_ = {next, panel_bytes(a_), count * bytes, each};
  }

  // All rows past some of K of the panels p and p + 1 (or p twice when it is the last).
  void block(Range depth, int64_t p, bool two, float* sums) {
    const bool ends = depth.last == x_.depth;
    Tiles t = {};
    t.count = depth.last - depth.first;
    t.bytes = x_.bytes;
    t.row_bytes = x_.row_bytes;
    t.row_stride = x_.stride;
    t.panels = panel(p, 0, depth);
    t.stride = two ? panel(p + 1, 1, depth) - t.panels : 0;
    const bool asked = row_pairs_ > 1 && p > panels_.first;
    t.ahead = widen_ || asked ? 0 : choice_or(a_.variant.ahead_bytes, kAheadOfTiles);
    for (int64_t m = tiles_.first; m < tiles_.last; m += 2, sums += 4 * kSums, t.ahead = 0) {
      t.rows = x_.tile(m, depth.first);
      t.from = depth.first ? sums : nullptr;
      t.to = ends ? ring_ + (turn_++ % 2) * 4 * kSums : sums;
      const bool both = m + 1 < tiles_.last;
      if (both) t.second = x_.tile(m + 1, depth.first) - t.rows;
      if (row_pairs_ == 1)
        both ? multiply_tiles<true, false, Ints, W, S>(t, upcoming_, finish_)
             : multiply_tiles<false, false, Ints, W, S>(t, upcoming_, finish_);
      else
        both ? multiply_tiles<true, true, Ints, W, S>(t, upcoming_, finish_)
             : multiply_tiles<false, true, Ints, W, S>(t, upcoming_, finish_);
      if (!ends) continue;
      if constexpr (W != Way::other) finish_.all<W, S>();
      finish_.begin(t.to, m * kTileRows, std::min((m + 2) * kTileRows, a_.rows), p, two, t.count);
    }
  }

  // Depths [first, last) of panel p, widened into place j where it must be.
  const unsigned char* panel(int64_t p, int64_t j, Range depth) {
    if (!widen_)
      return static_cast<const unsigned char*>(a_.weight) + p * panel_bytes(a_) +
             depth.first * x_.bytes;
    unsigned char* out = wide_ + j * most_ * x_.bytes;
    widen_panel<Ints>(a_, p, {depth.first * x_.step, depth.last * x_.step}, out);
    return out;
  }

  const LinearArgs& a_;
  const TileRows& x_;
  Range tiles_, panels_;
  Finish& finish_;
  Upcoming upcoming_ = {};
  bool widen_;
  Blocks outer_;
  int64_t pairs_, row_pairs_;
  int64_t pair_sums_, kept_;  // floats of one pair's sums; of so many, where rows pass several times
  float* ring_;               // two times four tiles that are done
  float* sums_;
  int64_t turn_ = 0;
  int64_t most_;  // tiles of K in an inner block
  unsigned char* wide_ = nullptr;
};

template <bool Ints>
void multiply_dense(const LinearArgs& a, const TileRows& x, Range tiles, Range panels, const Columns& to) {
  Finish finish(a, x, to);
  with_way<Ints>(finish.way(), a.kind != Weight::dense, [&]<Way W, Sum S>() {
    Product<Ints, W, S>(a, x, tiles, panels, finish).run();
  });
}

// Row tiles in blocks that stay in L2, of whole pairs.
struct RowBlocks {
  int64_t tiles;
  Blocks pairs;
  RowBlocks(const LinearArgs& a, const TileRows& x) : tiles(x.row_tiles), pairs((tiles + 1) / 2, most(a, x) / 2) {}
  Range at(int64_t i) const {
    const Range those = pairs.at(i);
    return {2 * those.first, std::min(2 * those.last, tiles)};
  }

 private:
  static int64_t most(const LinearArgs& a, const TileRows& x) {
    if (x.block_sums) return kMostGroupTiles;
    if (a.groups > 1)
      return std::clamp(choice_or(a.variant.rows_bytes, kGroupRowsBytes) / (x.depth * x.bytes) / 2 * 2,
                        kLeastGroupTiles, kMostGroupTiles);
    return std::clamp(choice_or(a.variant.rows_bytes, kRowsBytes) / (x.depth * x.bytes) / 2 * 2, kLeastTiles,
                      kMostTiles);
  }
};

// All rows times the panels [first, last).
[[gnu::noinline]] void multiply(const LinearArgs& a, const TileRows& x, Range panels) {
  const RowBlocks blocks(a, x);
  for (int64_t b = 0; b < blocks.pairs.blocks; b++) {
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
    a.int8_rows ? multiply_dense<true>(a, x, tiles, panels, to)
                : multiply_dense<false>(a, x, tiles, panels, to);
  }
}

Deal deal_pairs(const LinearArgs& a, const TileRows& x) {
  const int64_t pairs = (count_panels(a) + 1) / 2, bytes = 2 * panel_bytes(a);
  const bool from_l3 = x.row_tiles * x.depth * x.bytes > kRowsBytes;
  // rows that pass twice ask for a part's next pair
  const int64_t together = from_l3 ? kPartPairs : x.row_tiles > 2 ? kPartPairs / 2 : 1;
  const int64_t least = std::max(kPartBytes, together * bytes);
  return deal(pairs, bytes, choice_or(a.variant.part_bytes, static_cast<int32_t>(least)), a.threads);
}

}  // namespace

void linear_tiles(const LinearArgs& a) {
  const TileRows x = shape(a);
  const Deal parts = deal_pairs(a, x);
  const int64_t first = x.ready * kTileRows;
  over_rows(a.threads, (x.row_tiles * kTileRows - first) / kMadeRows,
            [&](int64_t i) { make_rows(a, x, first + i * kMadeRows); });
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

// Products by tiles where groups of K have scales of their own: sums leave the tiles after each group, and
// wait until they have reached memory.
#pragma once

#include "tile_finish.h"

namespace penstock::PENSTOCK_ISA {

constexpr int64_t kGroupPanels = 2;             // taken together: rows come from L2 once for both
constexpr int64_t kGroupBlockBytes = 12 * 1024;  // of a widened panel, at least a group; of integers …
constexpr int64_t kIntBlockBytes = 16 * 1024;
constexpr int64_t kStreamTiles = 4;             // so few row tiles: panels come as fast as memory gives them

// The products of one group, of `steps` tiles of K; between(i): what else there is to do, a quarter at a
// time, for which the processor has room between tiles' instructions but not behind them.
#define PENSTOCK_GROUP_TILES(sums, rows_tile, weights_tile)   \
  TILE_ZERO(sums);                                            \
  between(0);                                                 \
  for (int64_t s = 0; s < steps; s++) {                       \
    TILE_LOAD_ROWS(rows_tile, rows + s * row_bytes, stride);  \
    if (s == 0) between(1);                                   \
    TILE_LOAD_WEIGHTS(weights_tile, panel + s * bytes);       \
    if (s == 0) between(2);                                   \
    TILE_DOT_OF(kInts, sums, rows_tile, weights_tile);        \
  }                                                           \
  between(3)

template <int Tile, bool kInts, typename Between>
[[gnu::always_inline]] static inline void group_tiles(const unsigned char* rows,
                                                      const unsigned char* panel, int64_t row_bytes,
                                                      int64_t stride, int64_t steps, Between between) {
  const int64_t bytes = kTileRows * row_bytes;
  if constexpr (Tile == 0) {
    PENSTOCK_GROUP_TILES(0, 4, 6);
  } else if constexpr (Tile == 1) {
    PENSTOCK_GROUP_TILES(1, 5, 7);
  } else if constexpr (Tile == 2) {
    PENSTOCK_GROUP_TILES(2, 4, 6);
  } else {
    PENSTOCK_GROUP_TILES(3, 5, 7);
  }
}

template <int Tile>
[[gnu::always_inline]] static inline void store_tile(float* to) {
  if constexpr (Tile == 0) TILE_STORE(0, to, 64);
  if constexpr (Tile == 1) TILE_STORE(1, to, 64);
  if constexpr (Tile == 2) TILE_STORE(2, to, 64);
  if constexpr (Tile == 3) TILE_STORE(3, to, 64);
}

// Codes that tiles read as they lie.
struct AsTheyLie {
  explicit AsTheyLie(const Panel&) {}
};

// Codes W widened to what tiles read, int8 or bfloat16. Tables are made only once for a panel.
template <Weight W, bool Ints>
class Widened {
 public:
  [[gnu::always_inline]] explicit Widened(const Panel& w) : panel_(w), source_(w) {}
  // Values [from, to) of K.
  [[gnu::always_inline]] void operator()(int64_t from, int64_t to, unsigned char* out) {
    if constexpr (Ints)
      unpack_int8(panel_, from, to, reinterpret_cast<int8_t*>(out));
    else
      unpack_values(source_, panel_, from, to, reinterpret_cast<bf16*>(out));
  }

 private:
  struct None {
    explicit None(const Panel&) {}
  };
  const Panel& panel_;
  [[no_unique_address]] std::conditional_t<Ints, None, Values<W>> source_;
};

// Panels times row tiles.
template <Taken How>
class GroupSums {
 public:
  GroupSums(const LinearArgs& a, const TileRows& x, Range tiles, const Columns& to)
      : a_(a), x_(x), tiles_(tiles), finish_(a, x, to), widens_(bits_of(a.kind) == 4 || !kInts),
        group_(a.padded_k / a.groups), steps_(x.depth / a.groups), bytes_(steps_ * x.bytes) {
    const int64_t count = tiles.last - tiles.first;
    streams_ = x.row_tiles <= kStreamTiles;
    most_ = streams_ ? a.groups : std::max<int64_t>((kInts ? kIntBlockBytes : kGroupBlockBytes) / bytes_, 1);
    const int64_t blocks = (a.groups + most_ - 1) / most_;
    most_ = (a.groups + blocks - 1) / blocks;  // nearly one size
    mask_ = streams_ && count == 1 ? 7 : -1;
    ring_ = static_cast<float*>(scratch(
        Scratch::partials, static_cast<size_t>(8 * kSums + (count + 1) / 2 * 4 * kSums) * sizeof(float)));
    totals_ = ring_ + 8 * kSums;
    wide_ = static_cast<unsigned char*>(
        scratch(Scratch::unpacked, static_cast<size_t>((streams_ ? most_ + 8 : kGroupPanels * most_) * bytes_)));
  }

  // Panels [p, p + count) of codes W, count ≤ kGroupPanels.
  template <Weight W>
  void run(int64_t p, int64_t count) {
    using Source = std::conditional_t<bits_of(W) == 4 || !kInts, Widened<W, kInts>, AsTheyLie>;
    for (int64_t i = 0; i < count; i++) w_[i] = quantized_panel(a_, p + i);
    for (int64_t from = 0; from < a_.groups; from += most_) {
      const Range groups = {from, std::min(from + most_, a_.groups)};
      if (streams_) {
        for (int64_t i = 0; i < count; i++) {
          row_tile<Source>(i, tiles_.first, groups);
          for (int64_t m = tiles_.first + 1; m < tiles_.last; m++) row_tile<AsTheyLie>(i, m, groups);
        }
        continue;
      }
      for (int64_t i = 0; i < count; i++) {
        Source source(w_[i]);
        for (int64_t g = groups.first; g < groups.last; g++) widen(source, i, g, groups.first);
      }
      row_tiles(count, groups);
    }
    finish(p, count == 2);
  }

 private:
  static constexpr bool kInts = are_ints(How);
  static constexpr Sum kSum =
      How == Taken::ints || How == Taken::zeroed ? Sum::of_rows : Sum::floats;
  static constexpr int64_t kLag = 2;

  // All row tiles times `count` panels, whose codes are widened.
  [[gnu::noinline]] void row_tiles(int64_t count, Range groups) const {
    for (int64_t m = tiles_.first; m < tiles_.last; m++) {
      if (count == 2 && steps_ > 1 && m + 1 < tiles_.last) {
        float* totals = totals_ + (m - tiles_.first) / 2 * 4 * kSums;
        steps_ == 4 ? sum_four<4>(m, groups, totals) : sum_four<0>(m, groups, totals);
        m++;
      } else {
        for (int64_t i = 0; i < count; i++) row_tile<AsTheyLie>(i, m, groups);
      }
    }
  }

  [[gnu::noinline]] void finish(int64_t p, bool two) {
    for (int64_t m = tiles_.first; m < tiles_.last; m += 2) {
      finish_.begin(totals_ + (m - tiles_.first) * 2 * kSums, m * kTileRows,
                    std::min((m + 2) * kTileRows, a_.rows), p, two, 1);
      finish_.template all<kSum>();
    }
  }

  // Group g of panel i, the `g − first`th of those that lie there. Where panels stream, all lie in one place,
  // which a single row tile goes round in: what L1 holds.
  unsigned char* place(int64_t i, int64_t g, int64_t first) const {
    return wide_ + ((streams_ ? 0 : i * most_) + ((g - first) & mask_)) * bytes_;
  }
  // What tiles read of group g, counted from `first`, of panel i.
  [[gnu::always_inline]] const unsigned char* codes(int64_t i, int64_t g, int64_t first) const {
    return widens_ ? place(i, g, 0) : w_[i].data + (first + g) * bytes_;
  }
  // source: of panel i.
  template <typename Source>
  [[gnu::always_inline]] void widen(Source& source, int64_t i, int64_t g, int64_t first) const {
    if constexpr (!std::is_same_v<Source, AsTheyLie>) source(g * group_, (g + 1) * group_, place(i, g, first));
  }

  // totals of row tile m and panel i += the groups' sums · scales, one after the other. What is widened is so
  // two groups ahead of the tiles.
  template <typename Source>
  void row_tile(int64_t i, int64_t m, Range groups) const {
    const bool few = x_.tile_rows <= kFewTileRows;
    const int64_t tile = m - tiles_.first;
    float* totals = totals_ + (tile / 2 * 4 + i * 2 + tile % 2) * kSums;
    if (steps_ == 1)
      few ? sum_up<Source, kFewTileRows, 1>(i, m, groups, totals)
          : sum_up<Source, kTileRows, 1>(i, m, groups, totals);
    else
      few ? sum_up<Source, kFewTileRows, 0>(i, m, groups, totals)
          : sum_up<Source, kTileRows, 0>(i, m, groups, totals);
  }

  // Two row tiles from m on and two panels, whose groups are of at least two tiles: each tile is read half as
  // often, but totals have no room in registers. What a group's products left is added up between the next
  // one's. Steps: tiles of a group, or 0: as many as it has.
  template <int64_t Steps>
  [[gnu::noinline]] void sum_four(int64_t m, Range groups, float* totals) const {
    const int64_t count = groups.last - groups.first, steps = Steps ? Steps : steps_;
    const int64_t row_bytes = x_.row_bytes, bytes = kTileRows * row_bytes, stride = x_.stride;
    const unsigned char* rows = x_.tile(m, groups.first * steps);
    const int64_t below = x_.tile(m + 1, groups.first * steps) - rows;
    F16 scales[2];
    const float* done = nullptr;  // of the group that is added up
    int64_t of = 0;
    constexpr int each = Steps == 4 ? 4 : 8;  // rows at a time
    const auto add = [&](int turn) __attribute__((always_inline)) {
      if (!done || turn >= 64 / each) return;
      const int tile = turn * each / kTileRows, first = turn * each % kTileRows;
      const bool begins = of == 0;
#pragma GCC unroll 8
      for (int r = first; r < first + each; r++) {
        float* total = totals + tile * kSums + r * kColumns;
        const F16 sum = sum_of<How>(a_, x_, w_[tile / 2], done + tile * kSums + r * kColumns,
                                    (m + tile % 2) * kTileRows + r, of);
        store(total, fma(sum, scales[tile / 2], begins ? zero() : load(total)));
      }
    };
    for (int64_t g = 0; g <= count; g++) {
      if (g > 0) {
        of = groups.first + g - 1;
        done = ring_ + (g - 1) % 2 * 4 * kSums;
        for (int i = 0; i < 2; i++) scales[i] = w_[i].scales(of);
      }
      if (g == count) break;
      float* now = ring_ + g % 2 * 4 * kSums;
      const unsigned char* first = codes(0, g, groups.first);
      const unsigned char* second = codes(1, g, groups.first);
      TILE_ZERO(0);
      TILE_ZERO(1);
      TILE_ZERO(2);
      TILE_ZERO(3);
      for (int64_t s = 0; s < steps; s++, rows += row_bytes, first += bytes, second += bytes) {
        const int turn = static_cast<int>(std::min<int64_t>(s, 4)) * 4;
        TILE_STREAM_ROWS(4, rows, stride);
        TILE_LOAD_WEIGHTS(6, first);
        TILE_DOT_OF(kInts, 0, 4, 6);
        add(turn);
        TILE_LOAD_WEIGHTS(7, second);
        TILE_DOT_OF(kInts, 1, 4, 7);
        add(turn + 1);
        TILE_STREAM_ROWS(5, rows + below, stride);
        TILE_DOT_OF(kInts, 2, 5, 6);
        add(turn + 2);
        TILE_DOT_OF(kInts, 3, 5, 7);
        add(turn + 3);
      }
      TILE_STORE(0, now, 64);
      TILE_STORE(2, now + kSums, 64);
      TILE_STORE(1, now + 2 * kSums, 64);
      TILE_STORE(3, now + 3 * kSums, 64);
    }
    for (int turn = 0; turn < 64 / each; turn++) add(turn);
  }

  // The first R rows of a tile. Steps: tiles of a group, or 0: as many as it has. Four groups are under way:
  // each tile is stored two groups later, and added up after two more.
  template <typename Source, int64_t R, int64_t Steps>
  [[gnu::noinline]] void sum_up(int64_t i, int64_t m, Range groups, float* totals) const {
    const Panel& w = w_[i];
    const int64_t count = groups.last - groups.first, steps = Steps ? Steps : steps_;
    const int64_t row_bytes = x_.row_bytes, stride = x_.stride;
    const unsigned char* rows = x_.tile(m, groups.first * steps);
    float* const ring = ring_;
    Source source(w);
    for (int64_t g = 0; g < std::min(kLag, count); g++) widen(source, i, groups.first + g, groups.first);
    F16 total[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
      total[r] = groups.first == 0 ? zero() : load(totals + r * kColumns);
    const auto step = [&]<int T>(int64_t g) __attribute__((always_inline)) {
      if (g + kLag < count) widen(source, i, groups.first + g + kLag, groups.first);
      const int64_t done = groups.first + g - 2 * kLag;  // the group that is added up, if `adds`
      const bool adds = g >= 2 * kLag && g < count + 2 * kLag;
      const F16 scale = adds ? w.scales(done) : zero();
      const auto add = [&](int quarter) __attribute__((always_inline)) {
#pragma GCC unroll 4
        for (int j = 0; j < R / 4; j++) {
          const int r = quarter * static_cast<int>(R / 4) + j;
          const float* sums = ring + T * kSums + r * kColumns;
          total[r] = fma(sum_of<How>(a_, x_, w, sums, m * kTileRows + r, done), scale, total[r]);
        }
      };
      if (g < count) {
        const unsigned char* panel = codes(i, g, groups.first);
        if (adds)
          group_tiles<T, kInts>(rows, panel, row_bytes, stride, steps, add);
        else
          group_tiles<T, kInts>(rows, panel, row_bytes, stride, steps, [](int) {});
      } else if (adds) {
#pragma GCC unroll 4
        for (int quarter = 0; quarter < 4; quarter++) add(quarter);
      }
      constexpr int before = (T + 4 - kLag) % 4;
      if (g >= kLag && g < count + kLag) store_tile<before>(ring + before * kSums);
      rows += steps * row_bytes;
    };
    for (int64_t g = 0; g < count + 2 * kLag; g += 4) {
      step.template operator()<0>(g);
      step.template operator()<1>(g + 1);
      step.template operator()<2>(g + 2);
      step.template operator()<3>(g + 3);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) store(totals + r * kColumns, total[r]);
  }

  const LinearArgs& a_;
  const TileRows& x_;
  Range tiles_;
  Finish finish_;
  bool widens_;
  int64_t group_, steps_, bytes_;  // of a group: values of K, tiles, bytes of a widened panel
  bool streams_;                   // the first row tile passes as panels are widened
  int64_t most_, mask_;            // groups in a block; of the places of a group
  float* ring_;
  float* totals_;  // [pair of row tiles][panel][row tile][16 × 16]
  unsigned char* wide_;
  Panel w_[kGroupPanels] = {};
};

static inline void multiply_groups(const LinearArgs& a, const TileRows& x, Range tiles, Range panels,
                                   const Columns& to) {
  with_taken(taken(a, x), [&]<Taken How>() {
    GroupSums<How> sums(a, x, tiles, to);
    with_kind(a.kind, [&]<Weight W>() {
      if constexpr (!are_ints(How) || is_integer(W))
        for (int64_t p = panels.first; p < panels.last; p += kGroupPanels)
          sums.template run<W>(p, std::min(kGroupPanels, panels.last - p));
    });
  });
}

}  // namespace penstock::PENSTOCK_ISA

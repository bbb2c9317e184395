// Products by tiles where groups of K have scales of their own: sums leave the tiles after each group, and
// wait for two groups until they have reached memory.
#pragma once

#include "tile_finish.h"

namespace penstock::PENSTOCK_ISA {

constexpr int64_t kGroupPanels = 4;             // taken together: rows come from L2 once for all of them
constexpr int64_t kGroupBlockBytes = 6 * 1024;  // of a widened panel, at least a group
constexpr int64_t kStreamTiles = 4;             // so few row tiles: panels come as fast as memory gives them

// The sums of one group, of `steps` tiles of K. They lie in tile 0 or 1, so that two groups can be under way.
#define PENSTOCK_GROUP_TILES(sums, rows_tile, weights_tile) \
  TILE_ZERO(sums);                                          \
  for (int64_t s = 0; s < steps; s++) {                     \
    TILE_LOAD_ROWS(rows_tile, rows + s * pitch, row_bytes); \
    TILE_LOAD_WEIGHTS(weights_tile, panel + s * bytes);     \
    if constexpr (Ints)                                     \
      TILE_DOT_BYTES(sums, rows_tile, weights_tile);        \
    else                                                    \
      TILE_DOT(sums, rows_tile, weights_tile);              \
  }                                                         \
  TILE_STORE(sums, out, 64)

template <int Tile, bool Ints>
[[gnu::always_inline]] static inline void group_tiles(const unsigned char* rows,
                                                      const unsigned char* panel, int64_t row_bytes,
                                                      int64_t pitch, int64_t steps, float* out) {
  const int64_t bytes = kTileRows * row_bytes;
  if constexpr (Tile == 0) {
    PENSTOCK_GROUP_TILES(0, 4, 6);
  } else {
    PENSTOCK_GROUP_TILES(1, 5, 7);
  }
}

// Panels of codes W times row tiles.
template <Weight W, Taken How>
class GroupSums {
 public:
  GroupSums(const LinearArgs& a, const Packed& x, Range tiles, const Columns& to)
      : a_(a), x_(x), tiles_(tiles), finish_(a, x, to),
        group_(a.padded_k / a.groups), steps_(x.depth / a.groups), bytes_(steps_ * x.bytes) {
    const int64_t count = tiles.last - tiles.first;
    pair_ = (count + 1) / 2 * 4 * kSums;
    streams_ = count <= kStreamTiles;
    most_ = streams_ ? a.groups : std::max<int64_t>(kGroupBlockBytes / bytes_, 1);
    mask_ = count == 1 ? 7 : -1;
    ring_ = static_cast<float*>(scratch(
        Scratch::partials, static_cast<size_t>(4 * kSums + kGroupPanels / 2 * pair_) * sizeof(float)));
    totals_ = ring_ + 4 * kSums;
    wide_ = static_cast<unsigned char*>(
        scratch(Scratch::unpacked, static_cast<size_t>((streams_ ? most_ + 8 : kGroupPanels * most_) * bytes_)));
  }

  // Panels [p, p + count), count ≤ kGroupPanels.
  void run(int64_t p, int64_t count) {
    for (int64_t i = 0; i < count; i++) w_[i] = quantized_panel(a_, p + i);
    for (int64_t from = 0; from < a_.groups; from += most_) {
      const Range groups = {from, std::min(from + most_, a_.groups)};
      if (streams_) {
        for (int64_t i = 0; i < count; i++) {
          row_tile<kWidens>(i, tiles_.first, groups);
          for (int64_t m = tiles_.first + 1; m < tiles_.last; m++) row_tile<false>(i, m, groups);
        }
        continue;
      }
      if constexpr (kWidens)
        for (int64_t i = 0; i < count; i++)
          for (int64_t g = groups.first; g < groups.last; g++) widen(i, g, groups.first);
      for (int64_t m = tiles_.first; m < tiles_.last; m++)
        for (int64_t i = 0; i < count; i++) row_tile<false>(i, m, groups);
    }
    for (int64_t i = 0; i < count; i += 2)
      for (int64_t m = tiles_.first; m < tiles_.last; m += 2) {
        finish_.begin(totals_ + i / 2 * pair_ + (m - tiles_.first) * 2 * kSums, m * kTileRows,
                      std::min((m + 2) * kTileRows, a_.rows), p + i, i + 1 < count, 1);
        finish_.template all<kSum>();
      }
  }

 private:
  static constexpr bool kInts = are_ints(How);
  static constexpr Sum kSum =
      How == Taken::ints || How == Taken::zeroed ? Sum::of_rows : Sum::floats;
  static constexpr bool kWidens = bits_of(W) == 4 || !kInts;
  static constexpr int64_t kLag = 2;

  // Group g of panel i, the `g − first`th of those that lie there. Where panels stream, all lie in one place,
  // which a single row tile goes round in: what L1 holds.
  unsigned char* place(int64_t i, int64_t g, int64_t first) const {
    return wide_ + ((streams_ ? 0 : i * most_) + ((g - first) & mask_)) * bytes_;
  }
  [[gnu::always_inline]] void widen(int64_t i, int64_t g, int64_t first) const {
    unsigned char* out = place(i, g, first);
    const int64_t from = g * group_, to = from + group_;
    if constexpr (kInts)
      unpack_int8(w_[i], from, to, reinterpret_cast<int8_t*>(out));
    else
      unpack_values<W>(w_[i], from, to, reinterpret_cast<bf16*>(out));
  }

  // totals of row tile m and panel i += the groups' sums · scales, one after the other. Widens: two groups
  // ahead of the tiles.
  template <bool Widens>
  void row_tile(int64_t i, int64_t m, Range groups) const {
    const bool few = x_.tile_rows <= kFewTileRows;
    const int64_t tile = m - tiles_.first;
    float* totals = totals_ + i / 2 * pair_ + (tile / 2 * 4 + i % 2 * 2 + tile % 2) * kSums;
    if (steps_ == 1)
      few ? sum_up<Widens, kFewTileRows, 1>(i, m, groups, totals)
          : sum_up<Widens, kTileRows, 1>(i, m, groups, totals);
    else
      few ? sum_up<Widens, kFewTileRows, 0>(i, m, groups, totals)
          : sum_up<Widens, kTileRows, 0>(i, m, groups, totals);
  }

  // The first R rows of a tile. Steps: tiles of a group, or 0: as many as it has.
  template <bool Widens, int64_t R, int64_t Steps>
  [[gnu::noinline]] void sum_up(int64_t i, int64_t m, Range groups, float* totals) const {
    const Panel& w = w_[i];
    const int64_t count = groups.last - groups.first, steps = Steps ? Steps : steps_;
    const int64_t row_bytes = x_.row_bytes, bytes = steps * kTileRows * row_bytes;
    const int64_t pitch = x_.pitch;
    const unsigned char* rows = x_.tile(m, groups.first * steps);
    const unsigned char* panel = w.data + groups.first * bytes;
    const auto at = [&](int64_t g) {
      return kWidens ? place(i, g, 0) : panel + g * bytes;
    };
    float* const ring = ring_;
    if constexpr (Widens)
      for (int64_t g = 0; g < std::min(kLag, count); g++) widen(i, groups.first + g, groups.first);
    F16 total[R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
      total[r] = groups.first == 0 ? zero() : load(totals + r * kColumns);
    for (int64_t g = 0; g < count + kLag; g += 2, rows += 2 * steps * pitch) {
      float *now = ring + g % 4 * kSums, *before = ring + (g + kLag) % 4 * kSums;
      if (g < count) {
        if (Widens && g + kLag < count) widen(i, groups.first + g + kLag, groups.first);
        group_tiles<0, kInts>(rows, at(g), row_bytes, pitch, steps, now);
      }
      if (g >= kLag) add(w, m, groups.first + g - kLag, before, total);
      if (g + 1 < count) {
        if (Widens && g + 1 + kLag < count) widen(i, groups.first + g + 1 + kLag, groups.first);
        group_tiles<1, kInts>(rows + steps * pitch, at(g + 1), row_bytes, pitch, steps,
                              now + kSums);
      }
      if (g + 1 >= kLag && g + 1 < count + kLag)
        add(w, m, groups.first + g + 1 - kLag, before + kSums, total);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) store(totals + r * kColumns, total[r]);
  }

  template <int64_t R>
  [[gnu::always_inline]] void add(const Panel& w, int64_t m, int64_t g, const float* sums,
                                  F16 (&total)[R]) const {
    const F16 scale = w.scales(g);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
      total[r] = fma(sum_of<How>(a_, x_, w, sums + r * kColumns, m * kTileRows + r, g), scale, total[r]);
  }

  const LinearArgs& a_;
  const Packed& x_;
  Range tiles_;
  Finish finish_;
  int64_t group_, steps_, bytes_;  // of a group: values of K, tiles, bytes of a widened panel
  int64_t pair_;                   // floats of the totals of a pair of panels
  bool streams_;                   // the first row tile passes as panels are widened
  int64_t most_, mask_;            // groups in a block; of the places of a group
  float* ring_;
  float* totals_;  // [pair of panels][pair of row tiles][panel][row tile][16 × 16]
  unsigned char* wide_;
  Panel w_[kGroupPanels] = {};
};

static inline void multiply_groups(const LinearArgs& a, const Packed& x, Range tiles, Range panels,
                                   const Columns& to) {
  with_kind(a.kind, [&]<Weight W>() {
    with_taken(taken(a, x), [&]<Taken How>() {
      constexpr bool ints = are_ints(How);
      if constexpr (!ints || is_integer(W)) {
        GroupSums<W, How> sums(a, x, tiles, to);
        for (int64_t p = panels.first; p < panels.last; p += kGroupPanels)
          sums.run(p, std::min(kGroupPanels, panels.last - p));
      }
    });
  });
}

}  // namespace penstock::PENSTOCK_ISA

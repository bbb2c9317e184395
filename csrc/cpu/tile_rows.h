// Rows packed into tiles, and sums of tiles taken out of them.
#pragma once

#include "tiles.h"

#include "linear.h"

namespace penstock::PENSTOCK_ISA {

constexpr int64_t kTileRows = 16;
constexpr int64_t kFewTileRows = 8;  // a product of so few takes half of a tile's time
constexpr int64_t kSums = 256;       // of a tile

struct Packed {
  unsigned char* tiles;  // [pair of row tiles][depth][2] tiles: what is multiplied together lies together
  float* scale;          // of int8 rows; [rows, groups] of those in blocks and of E4M3; else null
  int32_t* sums;         // [rows, groups] of int8 rows, where weights have zero points to take off
  int16_t* block_sums;   // of rows that meet records: `sum_groups`
  int64_t row_tiles, depth;
  int64_t tile_rows;  // in a tile that are multiplied
  int64_t row_bytes;  // of a tile: 64, or 32 where a group is shorter than that
  int64_t bytes;      // of a tile
  int64_t pitch;      // bytes from a row tile's tile to its next one
  int64_t step;       // values of K in a tile

  // Tile d of row tile m.
  unsigned char* tile(int64_t m, int64_t d) const {
    return tiles + (m / 2 * depth * 2 + m % 2) * bytes + d * pitch;
  }
};

static inline Packed shape(const LinearArgs& a) {
  Packed x = {};
  x.row_bytes = a.int8_rows && a.padded_k / a.groups % 64 ? 32 : 64;
  x.bytes = kTileRows * x.row_bytes;
  x.step = x.row_bytes / (a.int8_rows ? 1 : 2);
  x.depth = a.padded_k / x.step;
  x.row_tiles = (a.rows + kTileRows - 1) / kTileRows;
  x.tile_rows = a.rows <= kFewTileRows ? kFewTileRows : kTileRows;
  x.pitch = x.row_tiles > 1 ? 2 * x.bytes : x.bytes;
  x.tiles = static_cast<unsigned char*>(scratch(
      Scratch::tiles, static_cast<size_t>((x.row_tiles + 1) / 2 * x.depth * 2 * x.bytes)));
  if (a.blocks && has_records(a.kind)) {
    const int64_t rows = x.row_tiles * kTileRows, scales = rows * (a.padded_k / kRecord);
    x.scale = static_cast<float*>(
        scratch(Scratch::sums, static_cast<size_t>(scales * 4 + rows * row_sums(a) * 2)));
    x.block_sums = reinterpret_cast<int16_t*>(x.scale + scales);
  } else if (a.int8_rows) {
    const size_t rows = static_cast<size_t>(x.row_tiles * kTileRows);
    const size_t groups = a.kind == Weight::int8_zero ? static_cast<size_t>(a.groups) : 0;
    const size_t scales = rows * (a.blocks ? static_cast<size_t>(a.groups) : 1);
    x.scale = static_cast<float*>(scratch(Scratch::sums, (scales + rows * groups) * 4));
    if (groups) x.sums = reinterpret_cast<int32_t*>(x.scale + scales);
  } else if (a.fp8_rows) {
    const int64_t scales = x.row_tiles * kTileRows * a.groups;
    x.scale = static_cast<float*>(
        scratch(Scratch::sums, static_cast<size_t>(scales) * sizeof(float)));
  }
  return x;
}

// The sums of a row's groups.
static inline void add_up(const LinearArgs& a, const int8_t* row, int32_t* sums) {
  const int64_t group = a.padded_k / a.groups;
  for (int64_t g = 0; g < a.groups; g++) {
    int32_t sum = 0;
    for (int64_t j = 0; j < group; j++) sum += row[g * group + j];
    sums[g] = sum;
  }
}

constexpr int64_t kPackRows = 4;  // rows that a thread makes ready at a time

// Whether rows' norms are taken by scales that are known before.
static inline bool asks_scale(const LinearArgs& a) {
  return a.norm && (a.int8_rows ? !a.blocks : !a.fp8_rows && a.k % 32 == 0);
}

// A row as bfloat16, normalised where asked (by `scale` if that is known), or as values of E4M3; zeros up to
// padded_k.
static inline void bf16_row(const LinearArgs& a, int64_t row, F16 scale, bf16* out, float* scales) {
  int64_t j = 0;
  if (asks_scale(a)) {
    const bf16* x = row_at<bf16>(a, row);
    const auto of = [&](int64_t at) { return load(x + at) * scale * load(a.norm + at); };
    for (; j < a.k; j += 32) store_both(out + j, out + j + 16, of(j), of(j + 16));
    for (; j < a.padded_k; j += 16) store(out + j, zero());
    return;
  }
  float* floats =
      static_cast<float*>(scratch(Scratch::row, static_cast<size_t>(a.padded_k) * sizeof(float)));
  if (a.fp8_rows)
    fp8_row(a, row, floats, scales);
  else
    float_row(a, row, a.padded_k, floats);
  for (; j < a.padded_k; j += 16) store(out + j, load(floats + j));
}

// A row as its tile has it, at `packed` if it isn't so in x; its scales, and sums of its groups.
// scale: the norm's, if `asks_scale`.
static inline const unsigned char* ready_row(const LinearArgs& a, const Packed& x, int64_t row, F16 scale,
                                             unsigned char* packed) {
  if (!a.int8_rows) {
    if (!a.fp8_rows && !a.norm && a.k == a.padded_k)
      return reinterpret_cast<const unsigned char*>(row_at<bf16>(a, row));
    bf16_row(a, row, scale, reinterpret_cast<bf16*>(packed), a.fp8_rows ? x.scale + row * a.groups : nullptr);
    return packed;
  }
  int8_t* bytes = reinterpret_cast<int8_t*>(packed);
  if (x.block_sums) {
    int8_blocks(a, row, kRecord, bytes, x.scale + row * (a.padded_k / kRecord));
    sum_groups(bytes, a.padded_k, x.block_sums + row * row_sums(a));
  } else if (a.blocks) {
    int8_blocks(a, row, a.padded_k / a.groups, bytes, x.scale + row * a.groups);
  } else {
    x.scale[row] = int8_row(a, row, scale, bytes);
  }
  if (x.sums) add_up(a, bytes, x.sums + row * a.groups);
  return packed;
}

// What there is of a row that isn't there.
static inline void no_row(const LinearArgs& a, const Packed& x, int64_t row) {
  if (x.sums) __builtin_memset(x.sums + row * a.groups, 0, static_cast<size_t>(a.groups) * 4);
  if (a.fp8_rows || (a.blocks && !x.block_sums))
    __builtin_memset(x.scale + row * a.groups, 0, static_cast<size_t>(a.groups) * 4);
}

// kPackRows rows from `first` on into their places in their row tile, line after line; zeros where there
// is no such row.
static inline void pack_rows(const LinearArgs& a, const Packed& x, int64_t first) {
  const int64_t row_bytes = x.row_bytes, bytes = x.depth * row_bytes;
  unsigned char* packed = static_cast<unsigned char*>(
      scratch(Scratch::rows, static_cast<size_t>(kPackRows * bytes)));
  const unsigned char* from[kPackRows];
  F16 scales[kPackRows];
  for (F16& scale : scales) scale = zero();
  const bool whole = first + kPackRows <= a.rows, asks = asks_scale(a);
  if (whole && asks) norm_scales(a, first, scales);
  for (int64_t r = 0; r < kPackRows; r++) {
    unsigned char* own = packed + r * bytes;
    if (first + r < a.rows) {
      if (!whole && asks) {
        F16 scale[1];
        norm_scales(a, first + r, scale);
        scales[r] = scale[0];
      }
      from[r] = ready_row(a, x, first + r, scales[r], own);
    } else {
      no_row(a, x, first + r);
      __builtin_memset(own, 0, static_cast<size_t>(bytes));
      from[r] = own;
    }
  }
  unsigned char* to = x.tile(first / kTileRows, 0) + first % kTileRows * row_bytes;
  for (int64_t d = 0; d < x.depth; d++, to += x.pitch)
    for (int64_t r = 0; r < kPackRows; r++) {
      if (row_bytes == 64)
        __builtin_memcpy(to + r * 64, from[r] + d * 64, 64);
      else
        __builtin_memcpy(to + r * 32, from[r] + d * 32, 32);
    }
}

static inline void prefetch_lines(const unsigned char* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64)
    _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T0);
}

// What becomes of a group's sums before its scale.
enum class Taken { plain, ints, zeroed, blocks, fp8 };

static inline Taken taken(const LinearArgs& a, const Packed& x) {
  if (a.blocks) return Taken::blocks;
  return a.int8_rows ? (x.sums ? Taken::zeroed : Taken::ints) : a.fp8_rows ? Taken::fp8 : Taken::plain;
}
constexpr bool are_ints(Taken how) {
  return how == Taken::ints || how == Taken::zeroed || how == Taken::blocks;
}

// 16 sums of row `row` and group g as floats: of integers less their zero points, of rows in blocks or in
// E4M3 times their scale.
template <Taken How>
static inline F16 sum_of(const LinearArgs& a, const Packed& x, const Panel& w, const float* sums,
                         int64_t row, int64_t g) {
  if constexpr (How == Taken::plain) return load(sums);
  if constexpr (How == Taken::fp8) return load(sums) * set1(x.scale[row * a.groups + g]);
  const Sums found = load_sums(reinterpret_cast<const int32_t*>(sums));
  if constexpr (How == Taken::zeroed)
    return to_float(found + zero_points<8>(w, g) * set_sums(-x.sums[row * a.groups + g]));
  if constexpr (How == Taken::blocks) return scaled_sum(found, x.scale, row * a.groups + g);
  return to_float(found);
}

// body(a constant of it)
template <typename Body>
static inline void with_taken(Taken how, Body body) {
  switch (how) {
    case Taken::plain: return body.template operator()<Taken::plain>();
    case Taken::ints: return body.template operator()<Taken::ints>();
    case Taken::zeroed: return body.template operator()<Taken::zeroed>();
    case Taken::blocks: return body.template operator()<Taken::blocks>();
    case Taken::fp8: return body.template operator()<Taken::fp8>();
  }
}

}  // namespace penstock::PENSTOCK_ISA

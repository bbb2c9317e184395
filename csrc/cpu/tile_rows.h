// Rows as tiles read them, and sums of tiles taken out of them.
#pragma once

#include "tiles.h"

#include "linear.h"

namespace penstock::PENSTOCK_ISA {

constexpr int64_t kTileRows = 16;
constexpr int64_t kFewTileRows = 8;  // a product of so few takes half of a tile's time
constexpr int64_t kSums = 256;       // of a tile
constexpr int64_t kMeet = 1024;      // bytes: rows so far apart are better copied …
constexpr int64_t kFarthest = 1 << 20;  // and farther ones too, for what is made would take as much

// Rows, one behind the other. The first `ready` row tiles are read where x has them, the others were made.
struct TileRows {
  const unsigned char* x;
  unsigned char* made;
  int64_t ready;
  int64_t stride;        // bytes from a row to the next: of made ones an odd number of lines, for many sets of L1
  float* scale;          // of int8 rows; [rows, groups] of those in blocks and of E4M3; else null
  int32_t* sums;         // [rows, groups] of int8 rows, where weights have zero points to take off
  int16_t* block_sums;   // of rows that meet records: `sum_groups`
  int64_t row_tiles, depth;
  int64_t tile_rows;  // in a tile that are multiplied
  int64_t row_bytes;  // of a tile: 64, or 32 where a group is shorter than that
  int64_t bytes;      // of a tile
  int64_t step;       // values of K in a tile

  // Tile d of row tile m.
  const unsigned char* tile(int64_t m, int64_t d) const {
    return (m < ready ? x + m * kTileRows * stride : made + (m - ready) * kTileRows * stride) + d * row_bytes;
  }
};

// Whether tiles can read x's rows where they are. Those of the last tile are made as far apart.
static inline bool lies_ready(const LinearArgs& a) {
  if (a.dtype != DType::bf16 || a.int8_rows || a.fp8_rows || a.norm || a.k != a.padded_k) return false;
  const int64_t stride = a.x_stride * 2;
  if (a.rows < kTileRows || stride < a.k * 2 || stride > kFarthest) return false;
  return stride % 64 == 0 && stride % kMeet != 0 && reinterpret_cast<uintptr_t>(a.x) % 64 == 0;
}

static inline TileRows shape(const LinearArgs& a) {
  TileRows x = {};
  x.row_bytes = a.int8_rows && a.padded_k / a.groups % 64 ? 32 : 64;
  x.bytes = kTileRows * x.row_bytes;
  x.step = x.row_bytes / (a.int8_rows ? 1 : 2);
  x.depth = a.padded_k / x.step;
  x.row_tiles = (a.rows + kTileRows - 1) / kTileRows;
  x.tile_rows = a.rows <= kFewTileRows ? kFewTileRows : kTileRows;
  x.stride = ((x.depth * x.row_bytes + 63) / 64 | 1) * 64;
  if (lies_ready(a)) {
    x.x = static_cast<const unsigned char*>(a.x);
    x.stride = a.x_stride * 2;
    x.ready = a.rows / kTileRows;
  }
  x.made = static_cast<unsigned char*>(
      scratch(Scratch::tiles, static_cast<size_t>((x.row_tiles - x.ready) * kTileRows * x.stride)));
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

constexpr int64_t kMadeRows = 4;  // rows that a thread makes ready at a time

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

// A row as tiles read it; its scales, and sums of its groups. scale: the norm's, if `asks_scale`.
static inline void make_row(const LinearArgs& a, const TileRows& x, int64_t row, F16 scale, unsigned char* out) {
  if (!a.int8_rows) {
    if (!a.fp8_rows && !a.norm && a.k == a.padded_k && a.dtype == DType::bf16) {
      __builtin_memcpy(out, row_at<bf16>(a, row), static_cast<size_t>(a.k) * sizeof(bf16));
      return;
    }
    return bf16_row(a, row, scale, reinterpret_cast<bf16*>(out), a.fp8_rows ? x.scale + row * a.groups : nullptr);
  }
  int8_t* bytes = reinterpret_cast<int8_t*>(out);
  if (x.block_sums) {
    int8_blocks(a, row, kRecord, bytes, x.scale + row * (a.padded_k / kRecord));
    sum_groups(bytes, a.padded_k, x.block_sums + row * row_sums(a));
  } else if (a.blocks) {
    int8_blocks(a, row, a.padded_k / a.groups, bytes, x.scale + row * a.groups);
  } else {
    x.scale[row] = int8_row(a, row, scale, bytes);
  }
  if (x.sums) add_up(a, bytes, x.sums + row * a.groups);
}

// What there is of a row that isn't there.
static inline void no_row(const LinearArgs& a, const TileRows& x, int64_t row) {
  if (x.sums) __builtin_memset(x.sums + row * a.groups, 0, static_cast<size_t>(a.groups) * 4);
  if (a.fp8_rows || (a.blocks && !x.block_sums))
    __builtin_memset(x.scale + row * a.groups, 0, static_cast<size_t>(a.groups) * 4);
}

// kMadeRows rows from `first` on, which is none that lies ready; zeros where there is no such row.
static inline void make_rows(const LinearArgs& a, const TileRows& x, int64_t first) {
  F16 scales[kMadeRows];
  for (F16& scale : scales) scale = zero();
  const bool whole = first + kMadeRows <= a.rows, asks = asks_scale(a);
  if (whole && asks) norm_scales(a, first, scales);
  unsigned char* out = x.made + (first - x.ready * kTileRows) * x.stride;
  for (int64_t row = first; row < first + kMadeRows; row++, out += x.stride) {
    if (row >= a.rows) {
      no_row(a, x, row);
      __builtin_memset(out, 0, static_cast<size_t>(x.depth * x.row_bytes));
      continue;
    }
    F16 scale[1] = {scales[row - first]};
    if (!whole && asks) norm_scales(a, row, scale);
    make_row(a, x, row, scale[0], out);
  }
}

static inline void prefetch_lines(const unsigned char* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64)
    _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T0);
}

// What becomes of a group's sums before its scale.
enum class Taken { plain, ints, zeroed, blocks, fp8 };

static inline Taken taken(const LinearArgs& a, const TileRows& x) {
  if (a.blocks) return Taken::blocks;
  return a.int8_rows ? (x.sums ? Taken::zeroed : Taken::ints) : a.fp8_rows ? Taken::fp8 : Taken::plain;
}
constexpr bool are_ints(Taken how) {
  return how == Taken::ints || how == Taken::zeroed || how == Taken::blocks;
}

// 16 sums of row `row` and group g as floats: of integers less their zero points, of rows in blocks or in
// E4M3 times their scale.
template <Taken How>
static inline F16 sum_of(const LinearArgs& a, const TileRows& x, const Panel& w, const float* sums,
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

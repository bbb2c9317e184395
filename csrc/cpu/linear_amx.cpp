// y = x · W + bias in bfloat16 by AMX tiles; the same bits as linear.cpp.
//
// A tile of weights is 16 lines of a panel as it lies; activations are copied into tiles of
// 16 rows × 32 values first (power-of-two strides would alias in L1). Two tiles of rows meet two
// panels, over a block of K small enough that the panels' part stays in L1 while all rows pass.
#include "linear.h"
#include "panels.h"
#include "tiles.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileRows = 16;
constexpr int64_t kDepth = 14;                    // tiles of K whose two panels stay in L1: 28 KB
constexpr int64_t kRowsBytes = 1024 * 1024;       // packed activations that stay in L2
constexpr int64_t kAhead = 4096;                  // prefetch distance along a panel, bytes

struct Packed {
  unsigned char* tiles;  // [row tiles][depth] of 1 KB
  int64_t row_tiles, depth;
};

// Row tile `m`: [depth][16 rows][32 values], zeros where there is no row or value.
void pack_rows(const LinearArgs& a, const Packed& packed, int64_t m) {
  for (int64_t r = 0; r < kTileRows; r++) {
    const int64_t row = m * kTileRows + r;
    const bf16* x = static_cast<const bf16*>(a.x) + row * a.x_stride;
    for (int64_t d = 0; d < packed.depth; d++) {
      unsigned char* to = packed.tiles + ((m * packed.depth + d) * kTileRows + r) * 64;
      int64_t left = row < a.rows ? a.k - d * kBlock : 0;
      left = left < 0 ? 0 : left > kBlock ? kBlock : left;
      __builtin_memcpy(to, x + d * kBlock, static_cast<size_t>(left) * 2);
      __builtin_memset(to + left * 2, 0, static_cast<size_t>(64 - left * 2));
    }
  }
}

inline void prefetch_tile(const unsigned char* p) {
  for (int64_t i = 0; i < kTileBytes; i += 64)
    _mm_prefetch(reinterpret_cast<const char*>(p + i), _MM_HINT_T0);
}

// sums (4 tiles of float: row tile × panel) += rows · panels over tiles [from, to) of K.
template <bool TwoRows>
void multiply_tiles(const unsigned char* rows0, const unsigned char* rows1,
                    const unsigned char* panel0, const unsigned char* panel1, int64_t from,
                    int64_t to, float* sums) {
  if (from == 0) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    if (TwoRows) {
      TILE_ZERO(2);
      TILE_ZERO(3);
    }
  } else {
    TILE_LOAD(0, sums);
    TILE_LOAD(1, sums + 256);
    if (TwoRows) {
      TILE_LOAD(2, sums + 512);
      TILE_LOAD(3, sums + 768);
    }
  }
  for (int64_t d = from; d < to; d++) {
    const int64_t at = d * kTileBytes;
    TILE_LOAD(4, rows0 + at);
    TILE_LOAD(6, panel0 + at);
    if (TwoRows) {
      prefetch_tile(rows0 + at + 2 * kTileBytes);
    } else {
      prefetch_tile(panel0 + at + kAhead);
      prefetch_tile(panel1 + at + kAhead);
    }
    TILE_DOT(0, 4, 6);
    TILE_LOAD(7, panel1 + at);
    TILE_DOT(1, 4, 7);
    if (TwoRows) {
      prefetch_tile(rows1 + at + 2 * kTileBytes);
      TILE_LOAD(5, rows1 + at);
      TILE_DOT(2, 5, 6);
      TILE_DOT(3, 5, 7);
    }
  }
  TILE_STORE(0, sums);
  TILE_STORE(1, sums + 256);
  if (TwoRows) {
    TILE_STORE(2, sums + 512);
    TILE_STORE(3, sums + 768);
  }
}

void write_tile(const LinearArgs& a, int64_t m, int64_t panel, const float* sums) {
  for (int64_t r = 0; r < kTileRows && m * kTileRows + r < a.rows; r++)
    write_columns(a, m * kTileRows + r, panel * kColumns, load(sums + r * kColumns));
}

// Row tiles [first, last) times panels p and p + 1 (or p twice when it is the last).
void multiply_pair(const LinearArgs& a, const Packed& x, int64_t first, int64_t last, int64_t p,
                   bool two_panels, float* sums) {
  const unsigned char* weight = static_cast<const unsigned char*>(a.weight);
  const int64_t stride = x.depth * kTileBytes;
  const unsigned char* panel0 = weight + p * stride;
  const unsigned char* panel1 = two_panels ? panel0 + stride : panel0;
  const bool single = last - first == 1;
  const int64_t step = single ? x.depth : kDepth;
  for (int64_t from = 0; from < x.depth; from += step) {
    const int64_t to = from + step < x.depth ? from + step : x.depth;
    for (int64_t m = first; m < last; m += 2) {
      const unsigned char* rows0 = x.tiles + m * stride;
      float* into = sums + (m - first) * 512;
      if (m + 1 < last)
        multiply_tiles<true>(rows0, rows0 + stride, panel0, panel1, from, to, into);
      else
        multiply_tiles<false>(rows0, rows0, panel0, panel1, from, to, into);
    }
  }
  for (int64_t m = first; m < last; m++) {
    write_tile(a, m, p, sums + (m - first) * 512);
    if (two_panels) write_tile(a, m, p + 1, sums + (m - first) * 512 + 256);
  }
}

}  // namespace

void linear_tiles(const LinearArgs& a) {
  Packed x;
  x.depth = (a.k + kBlock - 1) / kBlock;
  x.row_tiles = (a.rows + kTileRows - 1) / kTileRows;
  // two tiles more: the prefetch runs ahead
  x.tiles = static_cast<unsigned char*>(scratch(
      Scratch::tiles, static_cast<size_t>((x.row_tiles * x.depth + 2) * kTileBytes)));
  int64_t block = kRowsBytes / (x.depth * kTileBytes) / 2 * 2;
  if (block < 2) block = 2;
  const int64_t panels = (a.n + kColumns - 1) / kColumns;
#pragma omp parallel num_threads(a.threads)
  {
    const FlushDenormals flush;
#pragma omp for schedule(static)
    for (int64_t m = 0; m < x.row_tiles; m++) pack_rows(a, x, m);
    TILE_CONFIGURE();
    const int64_t held = block < x.row_tiles ? block : x.row_tiles;
    float* sums = static_cast<float*>(scratch(
        Scratch::partials, static_cast<size_t>((held + 1) * 512) * sizeof(float)));
    const Range mine = share(panels);
    for (int64_t first = 0; first < x.row_tiles; first += block) {
      const int64_t last = first + block < x.row_tiles ? first + block : x.row_tiles;
      for (int64_t p = mine.first; p < mine.last; p += 2)
        multiply_pair(a, x, first, last, p, p + 1 < mine.last, sums);
    }
    TILE_RELEASE();
  }
}

}  // namespace penstock::PENSTOCK_ISA

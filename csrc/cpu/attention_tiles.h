// The products of attention by AMX tiles, where this translation unit has them: the same bits as
// `multiply_panels`.
//
// Rows are packed into tiles of 16 × 32 values; a tile of a panel is 16 of its lines as they lie.
// Rows of a last tile that don't exist are computed too, from whatever lies there, and not used.
#pragma once

#include "panels.h"

#if defined(PENSTOCK_TILES)
#include "tiles.h"
#endif

namespace penstock::PENSTOCK_ISA {

constexpr int64_t kTileValues = 512;  // of a bfloat16 tile
constexpr int64_t kTileLines = 16;
constexpr int64_t kTileMinRows = 4;      // from as many rows tiles are faster

// 32 values, rounded to bfloat16.
static inline void store_group(bf16* out, F16 a, F16 b) {
#if defined(PENSTOCK_TILES) && defined(__AVX512F__)
  // every machine with AMX has AVX512_BF16; it takes denormals for zero
  __m512i both;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(both) : "v"(b.v), "v"(a.v));
  _mm512_storeu_si512(out, both);
#else
  store(out, a + zero());  // a sum with 0 leaves no denormals, which could be rounded up
  store(out + 16, b + zero());
#endif
}

#if defined(PENSTOCK_TILES)

constexpr bool kTiles = true;

// While it lives, this thread's tiles are set up.
class TileSetup {
 public:
  // rows: of what is multiplied; a product takes a cycle for each of its first 16
  explicit TileSetup(int64_t rows) { TILE_CONFIGURE(64, static_cast<int>(rows < kTileRows ? rows : kTileRows)); }
  ~TileSetup() { TILE_RELEASE(); }
  TileSetup(const TileSetup&) = delete;
  TileSetup& operator=(const TileSetup&) = delete;
};

template <bool TwoRows, typename At>
static inline void multiply_tiles(const bf16* rows, const bf16* below, int64_t depth,
                                  int64_t panels, At at, float* out, int64_t ldo) {
  for (int64_t p = 0; p < panels; p += 2) {
    const bool two = p + 1 < panels;
    TILE_ZERO(0);
    TILE_ZERO(1);
    if constexpr (TwoRows) {
      TILE_ZERO(2);
      TILE_ZERO(3);
    }
    for (int64_t d = 0; d < depth; d++) {
      TILE_LOAD_ROWS(4, rows + d * kTileValues, 64);
      TILE_LOAD_WEIGHTS(6, at(p, d));
      TILE_DOT(0, 4, 6);
      if (two) {
        TILE_LOAD_WEIGHTS(7, at(p + 1, d));
        TILE_DOT(1, 4, 7);
      }
      if constexpr (TwoRows) {
        TILE_LOAD_ROWS(5, below + d * kTileValues, 64);
        TILE_DOT(2, 5, 6);
        if (two) TILE_DOT(3, 5, 7);
      }
    }
    float* to = out + p * kColumns;
    TILE_STORE(0, to, ldo * 4);
    if (two) TILE_STORE(1, to + kColumns, ldo * 4);
    if constexpr (TwoRows) {
      TILE_STORE(2, to + 16 * ldo, ldo * 4);
      if (two) TILE_STORE(3, to + 16 * ldo + kColumns, ldo * 4);
    }
  }
}

// out [count, panels · 16], `ldo` floats apart, for up to 32 rows packed as [row tile][pitch] tiles:
// their first `depth` tiles of K times those of the panels. Tile d of panel p lies at at(p, d).
template <typename At>
static inline void multiply_tiles(const bf16* rows, int64_t count, int64_t depth, int64_t panels,
                                  At at, float* out, int64_t ldo, int64_t pitch = 0) {
  const bf16* below = rows + (pitch ? pitch : depth) * kTileValues;
  count > 16 ? multiply_tiles<true>(rows, below, depth, panels, at, out, ldo)
             : multiply_tiles<false>(rows, below, depth, panels, at, out, ldo);
}

#else

constexpr bool kTiles = false;

struct TileSetup {
  explicit TileSetup(int64_t) {}
};

#endif

}  // namespace penstock::PENSTOCK_ISA

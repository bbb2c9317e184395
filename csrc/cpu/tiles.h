// AMX's tiles; or the same in software (PENSTOCK_AMX_EMULATE), so that machines without AMX can
// test the code that drives them.
#pragma once

#include "vec.h"

#if defined(PENSTOCK_AMX_EMULATE)

namespace penstock::PENSTOCK_ISA {

struct SoftTile {
  alignas(64) unsigned char bytes[1024];
};
inline thread_local SoftTile soft_tiles[8];

static inline void soft_load(int t, const void* p) {
  __builtin_memcpy(soft_tiles[t].bytes, p, 1024);
}
static inline void soft_store(int t, void* p) { __builtin_memcpy(p, soft_tiles[t].bytes, 1024); }
static inline void soft_zero(int t) { __builtin_memset(soft_tiles[t].bytes, 0, 1024); }

// Intel SDM, TDPBF16PS: even and odd products apart, from zero, in order; then one addition.
static inline void soft_dot(int c, int a, int b) {
  for (int m = 0; m < 16; m++) {
    const bf16* row = reinterpret_cast<const bf16*>(soft_tiles[a].bytes + m * 64);
    F16 even = zero(), odd = zero();
    for (int k = 0; k < 16; k++) {
      F16 we, wo;
      load_pairs(reinterpret_cast<const bf16*>(soft_tiles[b].bytes + k * 64), we, wo);
      even = fma(set1(to_float(row[2 * k])), we, even);
      odd = fma(set1(to_float(row[2 * k + 1])), wo, odd);
    }
    float* out = reinterpret_cast<float*>(soft_tiles[c].bytes + m * 64);
    store(out, load(out) + (even + odd));
  }
}

}  // namespace penstock::PENSTOCK_ISA

#define TILE_CONFIGURE() ((void)0)
#define TILE_RELEASE() ((void)0)
#define TILE_ZERO(t) soft_zero(t)
#define TILE_LOAD(t, p) soft_load(t, p)
#define TILE_STORE(t, p) soft_store(t, p)
#define TILE_DOT(c, a, b) soft_dot(c, a, b)

#else

namespace penstock::PENSTOCK_ISA {

// Eight tiles of 16 rows × 64 bytes.
static inline void configure_tiles() {
  struct alignas(64) {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {};
  config.palette = 1;
  for (int t = 0; t < 8; t++) {
    config.row_bytes[t] = 64;
    config.rows[t] = 16;
  }
  // gcc 12's tile intrinsics don't say that they read memory
  asm volatile("" ::: "memory");
  _tile_loadconfig(&config);
}

}  // namespace penstock::PENSTOCK_ISA

#define TILE_CONFIGURE() configure_tiles()
#define TILE_RELEASE() _tile_release()
#define TILE_ZERO(t) _tile_zero(t)
#define TILE_LOAD(t, p)          \
  do {                           \
    asm volatile("" ::: "memory"); \
    _tile_loadd(t, p, 64);       \
  } while (0)
#define TILE_STORE(t, p)         \
  do {                           \
    _tile_stored(t, p, 64);      \
    asm volatile("" ::: "memory"); \
  } while (0)
#define TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)

#endif

// AMX's tiles; or the same in software (PENSTOCK_AMX_EMULATE), so that machines without AMX can
// test the code that drives them.
#pragma once

#include "integers.h"

#if defined(PENSTOCK_AMX_EMULATE)

namespace penstock::PENSTOCK_ISA {

struct SoftTile {
  alignas(64) unsigned char bytes[1024];
};
inline thread_local SoftTile soft_tiles[8];
inline thread_local int soft_row_bytes;  // of a tile of rows; the weights' has a quarter as many rows

[[gnu::noipa]] static inline void soft_configure(int row_bytes, int = 16) { soft_row_bytes = row_bytes; }

[[gnu::noipa]] static inline void soft_load_rows(int t, const void* p, int64_t stride) {
  for (int m = 0; m < 16; m++)
    __builtin_memcpy(soft_tiles[t].bytes + m * 64,
                     static_cast<const unsigned char*>(p) + m * stride,
                     static_cast<size_t>(soft_row_bytes));
}
[[gnu::noipa]] static inline void soft_load(int t, const void* p, int bytes = 1024) {
  __builtin_memcpy(soft_tiles[t].bytes, p, static_cast<size_t>(bytes));
}
[[gnu::noipa]] static inline void soft_store(int t, void* p, int64_t stride) {
  for (int m = 0; m < 16; m++)
    __builtin_memcpy(static_cast<unsigned char*>(p) + m * stride, soft_tiles[t].bytes + m * 64, 64);
}
[[gnu::noipa]] static inline void soft_zero(int t) { __builtin_memset(soft_tiles[t].bytes, 0, 1024); }

// Intel SDM, TDPBF16PS: even and odd products apart, from zero, in order; then one addition.
[[gnu::noipa]] static inline void soft_dot(int c, int a, int b) {
  for (int m = 0; m < 16; m++) {
    const bf16* row = reinterpret_cast<const bf16*>(soft_tiles[a].bytes + m * 64);
    F16 even = zero(), odd = zero();
    for (int k = 0; k < 16; k++) {
      const bf16* line = reinterpret_cast<const bf16*>(soft_tiles[b].bytes + k * 64);
      even = fma(set1(to_float(row[2 * k])), load_even(line), even);
      odd = fma(set1(to_float(row[2 * k + 1])), load_odd(line), odd);
    }
    float* out = reinterpret_cast<float*>(soft_tiles[c].bytes + m * 64);
    store(out, load(out) + (even + odd));
  }
}

// TDPBSUD: four products of signed and unsigned bytes added to 32 bits.
[[gnu::noipa]] static inline void soft_dot_unsigned(int c, int a, int b) {
  for (int m = 0; m < 16; m++) {
    int32_t* out = reinterpret_cast<int32_t*>(soft_tiles[c].bytes + m * 64);
    const int8_t* row = reinterpret_cast<const int8_t*>(soft_tiles[a].bytes + m * 64);
    for (int k = 0; k < soft_row_bytes; k++)
      for (int n = 0; n < 16; n++) out[n] += row[k] * soft_tiles[b].bytes[k / 4 * 64 + n * 4 + k % 4];
  }
}

// TDPBSSD: four products of signed bytes added to 32 bits.
[[gnu::noipa]] static inline void soft_dot_bytes(int c, int a, int b) {
  for (int m = 0; m < 16; m++) {
    const int8_t* row = reinterpret_cast<const int8_t*>(soft_tiles[a].bytes + m * 64);
    int32_t* out = reinterpret_cast<int32_t*>(soft_tiles[c].bytes + m * 64);
    Sums acc[1][1] = {{load_sums(out)}};
    const Quiet none;
    for (int k = 0; k < soft_row_bytes; k += kUnit)
      multiply_unit<1, 1, 8>(soft_tiles[b].bytes + k * 16, 0, row + k, 0, none, acc);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), acc[0][0].lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8), acc[0][0].hi);
  }
}

}  // namespace penstock::PENSTOCK_ISA

#define TILE_CONFIGURE(...) soft_configure(__VA_ARGS__)
#define TILE_RELEASE() ((void)0)
#define TILE_ZERO(t) soft_zero(t)
#define TILE_LOAD_ROWS(t, p, stride) soft_load_rows(t, p, stride)
#define TILE_STREAM_ROWS(t, p, stride) soft_load_rows(t, p, stride)
#define TILE_LOAD_WEIGHTS(t, p) soft_load(t, p, 16 * soft_row_bytes)
#define TILE_STREAM_WEIGHTS(t, p) TILE_LOAD_WEIGHTS(t, p)
#define TILE_LOAD_SUMS(t, p) soft_load(t, p)
#define TILE_STORE(t, p, stride) soft_store(t, p, stride)
#define TILE_DOT(c, a, b) soft_dot(c, a, b)
#define TILE_DOT_BYTES(c, a, b) soft_dot_bytes(c, a, b)
#define TILE_DOT_UNSIGNED(c, a, b) soft_dot_unsigned(c, a, b)

#else

namespace penstock::PENSTOCK_ISA {

// Tiles 0 to 3 hold sums, `rows` × 16; 4 and 5 rows, `rows` × `row_bytes`; 6 and 7 weights, as many lines
// of 64 bytes as rows have words.
static inline void configure_tiles(int row_bytes, int rows = 16) {
  struct alignas(64) {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {};
  config.palette = 1;
  for (int t = 0; t < 8; t++) {
    config.row_bytes[t] = static_cast<uint16_t>(t == 4 || t == 5 ? row_bytes : 64);
    config.rows[t] = static_cast<uint8_t>(t >= 6 ? row_bytes / 4 : rows);
  }
  // gcc 12's tile intrinsics don't say that they read memory
  asm volatile("" ::: "memory");
  _tile_loadconfig(&config);
}

}  // namespace penstock::PENSTOCK_ISA

#define TILE_LOAD(t, p, stride)    \
  do {                             \
    asm volatile("" ::: "memory"); \
    _tile_loadd(t, p, stride);     \
  } while (0)
#define TILE_CONFIGURE(...) configure_tiles(__VA_ARGS__)
#define TILE_RELEASE() _tile_release()
#define TILE_ZERO(t) _tile_zero(t)
#define TILE_LOAD_ROWS(t, p, stride) TILE_LOAD(t, p, stride)
// of what L1 shall not keep
#define TILE_STREAM_ROWS(t, p, stride) \
  do {                                 \
    asm volatile("" ::: "memory");     \
    _tile_stream_loadd(t, p, stride);  \
  } while (0)
#define TILE_LOAD_WEIGHTS(t, p) TILE_LOAD(t, p, 64)
#define TILE_STREAM_WEIGHTS(t, p) TILE_STREAM_ROWS(t, p, 64)
#define TILE_LOAD_SUMS(t, p) TILE_LOAD(t, p, 64)
#define TILE_STORE(t, p, stride)   \
  do {                             \
    _tile_stored(t, p, stride);    \
    asm volatile("" ::: "memory"); \
  } while (0)
#define TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)
#define TILE_DOT_BYTES(c, a, b) _tile_dpbssd(c, a, b)
#define TILE_DOT_UNSIGNED(c, a, b) _tile_dpbsud(c, a, b)  // b's bytes are unsigned

#endif

// Of integers, or of bfloat16.
#define TILE_DOT_OF(ints, c, a, b) \
  if constexpr (ints)              \
    TILE_DOT_BYTES(c, a, b);       \
  else                             \
    TILE_DOT(c, a, b)

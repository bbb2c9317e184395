// Keys of latents, turned into the layout of values.
//
// What attention reads of a latent twice lies once in memory: 32 positions' keys [2, D/v, 16, v] become
// values [D/16, 32/v, 16, v]. Of bfloat16, a word of 8 bytes holds two dimensions of two positions in both
// layouts, so that 8 × 8 words are turned, and in each word two values change places.
#pragma once

#include "vec.h"

namespace penstock::PENSTOCK_ISA {

constexpr int64_t kTurnedPositions = 32;

// Four lines' halves of 32 bytes become four others'.
static inline void turn_words(const char* from, char* to) {
  __m256i r[4];
  for (int i = 0; i < 4; i++)
    r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * 64));
  const __m256i a = _mm256_unpacklo_epi64(r[0], r[1]), b = _mm256_unpackhi_epi64(r[0], r[1]);
  const __m256i c = _mm256_unpacklo_epi64(r[2], r[3]), d = _mm256_unpackhi_epi64(r[2], r[3]);
  const __m256i turned[4] = {
      _mm256_permute2x128_si256(a, c, 0x20), _mm256_permute2x128_si256(b, d, 0x20),
      _mm256_permute2x128_si256(a, c, 0x31), _mm256_permute2x128_si256(b, d, 0x31)};
  constexpr int order = _MM_SHUFFLE(3, 1, 2, 0);
  for (int i = 0; i < 4; i++)
    _mm256_storeu_si256(
        reinterpret_cast<__m256i*>(to + i * 64),
        _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(turned[i], order), order));
}

// Sixteen positions' sixteen dimensions.
static inline void turn_square(const bf16* from, bf16* to) {
  const char* lines = reinterpret_cast<const char*>(from);
  char* out = reinterpret_cast<char*>(to);
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 2; j++) turn_words(lines + i * 256 + j * 32, out + j * 256 + i * 32);
}
static inline void turn_square(const float* from, float* to) {
  for (int64_t d = 0; d < 16; d++)
    for (int64_t p = 0; p < 16; p++) to[p * 16 + d] = from[d * 16 + p];
}

// The first `values` dimensions, a multiple of 16, of 32 positions' keys of `padded_dim`.
template <typename T>
static inline void turn_keys(const T* keys, int64_t padded_dim, int64_t values, T* to) {
  for (int64_t d = 0; d < values; d += 16, keys += 256, to += kTurnedPositions * 16) {
    turn_square(keys, to);
    turn_square(keys + padded_dim * 16, to + 256);
  }
}

}  // namespace penstock::PENSTOCK_ISA

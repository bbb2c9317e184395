// A float matrix to dense panels in one pass: 16 × 16 words are transposed at a time.
#include <type_traits>

#include "panel_rows.h"

namespace penstock::PENSTOCK_ISA {
namespace {

inline __m256i load_words(const uint32_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

// Words [8, 8], rows 16 apart, transposed; `to` has rows 16 apart too.
void transpose(const uint32_t* from, uint32_t* to) {
  __m256i r[8], t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) r[i] = load_words(from + 16 * i);
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4)
#pragma GCC unroll 2
    for (int j = 0; j < 2; j++) {
      r[i + 2 * j] = _mm256_unpacklo_epi64(t[i + j], t[i + 2 + j]);
      r[i + 2 * j + 1] = _mm256_unpackhi_epi64(t[i + j], t[i + 2 + j]);
    }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    __m256i* low = reinterpret_cast<__m256i*>(to + 16 * i);
    __m256i* high = reinterpret_cast<__m256i*>(to + 16 * (i + 4));
    _mm256_storeu_si256(low, _mm256_permute2x128_si256(r[i], r[i + 4], 0x20));
    _mm256_storeu_si256(high, _mm256_permute2x128_si256(r[i], r[i + 4], 0x31));
  }
}

// `count` values as the panel's kind; a copy where they are of it already.
template <typename T, typename S>
void convert(const T* from, int64_t count, S* to) {
  if constexpr (std::is_same_v<T, S>)
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(T));
  else
    for (int64_t i = 0; i < count; i += 16) store(to + i, load(from + i));
}

template <typename T, typename S>
void one_panel(const PackArgs& a, int64_t panel) {
  constexpr int64_t step = 64 / sizeof(S);  // values of K in 16 words
  const Job<T> job(a, panel);
  uint32_t* out = static_cast<uint32_t*>(a.panels) + panel * 16 * a.padded_k * sizeof(S) / 4;
  T space[step];
  alignas(64) uint32_t words[16 * 16];
  for (int64_t at = 0; at < a.padded_k; at += step, out += 256) {
    for (int64_t c = 0; c < 16; c++)
      convert(job.values(c, at, step, space), step, reinterpret_cast<S*>(words + 16 * c));
    for (int i = 0; i < 2; i++)
      for (int j = 0; j < 2; j++) transpose(words + 128 * i + 8 * j, out + 128 * j + 8 * i);
  }
}

}  // namespace

void pack(const PackArgs& a) {
  with_source(a.dtype, [&]<typename T>(T*) {
    auto* one = a.to == DType::bf16 ? one_panel<T, bf16> : one_panel<T, float>;
    over_panels(a, [&](int64_t panel) { one(a, panel); });
  });
}

}  // namespace penstock::PENSTOCK_ISA

// Codes of 4 bits, looked up in a table: AVX-512.
//
// A line has eight of each column, in the half bytes of a word of 32 bits (integers.h). Lookups read the
// lower end of the word, for a float, or that of its upper half, for the upper half of a float, which is all
// that bfloat16 has, or both. Zero points, of at most 16, are taken off the codes themselves, all of a line
// at once, and so many values looked up that any difference is one of them.
#pragma once

#include "kquants.h"

namespace penstock::PENSTOCK_ISA {

// Integers may have zero points; other codes are what the panel's table says.
template <Weight W>
class Words {
  static constexpr bool kIntegers = W == Weight::int4;

 public:
  explicit Words(const Panel& w) : w_(w) {
    alignas(64) bf16 words[32];
    for (int i = 0; i < 2; i++) {
      alignas(64) float integers[16];
      for (int j = 0; j < 16; j++) integers[j] = static_cast<float>(16 * i + j - 16);
      const F16 found = load(kIntegers ? integers : w.table);
      floats_[i] = found.v;
      store_exact(words + 16 * i, found);
    }
    words_ = _mm512_load_si512(words);
  }

  // The lines that follow are of group g.
  void group(int64_t g) {
    if constexpr (!kIntegers) return;
    const Sums z = w_.zero ? zero_points<4>(w_, g) : set_sums(8);
    above_ = (set_sums(0x10101010) + z * set_sums(-0x01010101)).v;
  }

  // Value J of each column.
  template <int J>
  F16 at(const uint8_t* line) const {
    __m512i codes = half<J / 4>(_mm512_loadu_si512(line));
    if constexpr (J % 2) codes = _mm512_srli_epi32(codes, 8);
    if constexpr (J % 4 >= 2)
      return {_mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaaaaaau, codes, words_))};
    if constexpr (kIntegers) return {_mm512_permutex2var_ps(floats_[0], codes, floats_[1])};
    return {_mm512_permutexvar_ps(codes, floats_[0])};
  }

  // Values 4 · H and the next three, each pair as a word of bfloat16: the first and the third, or, Odd, the
  // second and the fourth; the upper half is the earlier one.
  template <int H, bool Odd>
  __m512i pair(const uint8_t* line) const {
    const __m512i codes = half<H>(_mm512_rol_epi32(_mm512_loadu_si512(line), 16));
    return _mm512_permutexvar_epi16(Odd ? _mm512_srli_epi32(codes, 8) : codes, words_);
  }

  // All eight, as four lines of a panel of bfloat16.
  void unpack(const uint8_t* line, bf16* out) const {
    const __m512i v = _mm512_loadu_si512(line);
    const __m512i codes[2] = {half<0>(v), half<1>(v)};
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      // the bytes of a word, each at the lower end of a word
      const __m512i first = _mm512_set4_epi32(0x0d0d0c0c, 0x09090808, 0x05050404, 0x01010000);
      const __m512i last = _mm512_set4_epi32(0x0f0f0e0e, 0x0b0b0a0a, 0x07070606, 0x03030202);
      _mm512_storeu_si512(out + h * 4 * kColumns, spread(codes[h], first));
      _mm512_storeu_si512(out + (h * 4 + 2) * kColumns, spread(codes[h], last));
    }
  }

 private:
  // Codes 4 · H and the next three of a line, one at the lower end of each byte: of integers, 16 more than
  // what they stand for; of others, 4 bits below such as don't count.
  template <int H>
  __m512i half(__m512i v) const {
    if constexpr (H) v = _mm512_srli_epi32(v, 4);
    if constexpr (!kIntegers) return v;
    return _mm512_add_epi8(_mm512_and_si512(v, _mm512_set1_epi8(15)), above_);
  }
  __m512i spread(__m512i codes, __m512i order) const {
    return _mm512_permutexvar_epi16(_mm512_shuffle_epi8(codes, order), words_);
  }

  const Panel& w_;
  __m512 floats_[2];  // integers from −16 on; or the table, twice
  __m512i words_;     // the same as bfloat16
  __m512i above_ = _mm512_setzero_si512();  // 16 less the zero point, in each byte
};

}  // namespace penstock::PENSTOCK_ISA

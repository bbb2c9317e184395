// Rounding of weights to int8 and int4 panels in one pass: ops/quantize.py says the arithmetic.
#include "panel_rows.h"
#include "rownorm.h"

namespace penstock::PENSTOCK_ISA {

namespace {

constexpr int64_t kColumns = 16;
constexpr int64_t kUnit = 32;         // values of K that every group is a multiple of
constexpr float kLeastHalf = 0x1p-24f;
constexpr float kLeastRow = 0x1p-100f;  // rows below it are zero

// The 8 bytes from p on.
inline uint64_t bytes_at(const int8_t* p) {
  uint64_t x;
  std::memcpy(&x, p, 8);
  return x;
}
inline void put_word(uint8_t* p, uint64_t x) {
  const uint32_t word = static_cast<uint32_t>(x);
  std::memcpy(p, &word, 4);
}

// A row's scale; NaN if a value isn't finite.
template <typename T>
float row_scale(const Job<T>& job, int64_t c) {
  T space[kUnit];
  F16 top = zero(), odd = zero();
  for (int64_t at = 0; at < job.k; at += kUnit) {
    const T* w = job.values(c, at, kUnit, space);
    for (int i = 0; i < kUnit; i += 16) {
      const F16 v = load(w + i);
      top = max(top, abs(v));
      odd = odd + v * zero();
    }
  }
  const float largest = reduce_max(top);
  if (reduce_add(odd) != 0.0f) return __builtin_nanf("");
  return largest >= kLeastRow ? largest / 127.0f : 1.0f;
}

template <typename T>
void int8_panel(const QuantizeArgs& a, int64_t panel) {
  const Job<T> job(a, panel);
  float* scale = static_cast<float*>(a.scale) + panel * kColumns;
  uint8_t* out = static_cast<uint8_t*>(a.panels) + panel * kColumns * a.padded_k;
  float inverse[kColumns];
  for (int64_t c = 0; c < kColumns; c++) {
    scale[c] = row_scale(job, c);
    inverse[c] = 1.0f / scale[c];
  }
  T space[kUnit];
  int8_t bytes[kUnit];
  for (int64_t at = 0; at < a.padded_k; at += kUnit)
    for (int64_t c = 0; c < kColumns; c++) {
      const T* w = job.values(c, at, kUnit, space);
      for (int i = 0; i < kUnit; i += 16) store_bytes(bytes + i, load(w + i) * set1(inverse[c]));
      uint8_t* to = out + at * kColumns + c * 4;
      for (int i = 0; i < kUnit / 8; i++) {
        const uint64_t x = bytes_at(bytes + 8 * i);
        put_word(to + i * 128, x);
        put_word(to + i * 128 + 64, x >> 32);
      }
    }
}

// Folds lanes as reduce_add does, to four.
inline __m128 fold(F16 a) {
  __m256 lo, hi;
  halves(a, lo, hi);
  const __m256 s8 = _mm256_add_ps(lo, hi);
  return _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
}

// The sums of four vectors' lanes.
inline __m128 sums(F16 a, F16 b, F16 c, F16 d) {
  __m128 s0 = fold(a), s1 = fold(b), s2 = fold(c), s3 = fold(d);
  _MM_TRANSPOSE4_PS(s0, s1, s2, s3);
  return _mm_add_ps(_mm_add_ps(s0, s2), _mm_add_ps(s1, s3));
}

inline F16 clamp_four_bits(F16 u) { return min(max(u, set1(-8.0f)), set1(7.0f)); }

inline void store_half(uint16_t* p, F16 a) {
  __m256 lo, hi;
  halves(a, lo, hi);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(lo, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8),
                   _mm256_cvtps_ph(hi, _MM_FROUND_TO_NEAREST_INT));
}

// One group of 16 columns, lane by lane what its scales come from.
template <int V>
struct Groups {
  static constexpr int64_t size = V * 16;
  alignas(64) float values[kColumns * size];
  alignas(64) float low[kColumns], high[kColumns], odd[kColumns];
  alignas(64) float inverse[kColumns], shift[kColumns] = {};

  template <typename T>
  void read(const Job<T>& job, int64_t at) {
    T space[size];
    for (int64_t c = 0; c < kColumns; c++) {
      const T* from = job.values(c, at, size, space);
      F16 bottom = zero(), top = zero(), sum = zero();
#pragma GCC unroll 8
      for (int i = 0; i < V; i++) {
        const F16 v = load(from + 16 * i);
        store(values + c * size + 16 * i, v);
        bottom = max(zero() - v, bottom);
        top = max(v, top);
        sum = sum + v * zero();
      }
      low[c] = -reduce_max(bottom);
      high[c] = reduce_max(top);
      odd[c] = reduce_add(sum);  // NaN if a value isn't finite
    }
  }

  // What the values of columns c to c + 3 lose by rounding, squared, in units of their scales.
  __m128 losses(int64_t c, const float* inverses) const {
    F16 sum[4];
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const F16 by = set1(inverses[c + j]);
      sum[j] = zero();
#pragma GCC unroll 8
      for (int i = 0; i < V; i++) {
        const F16 u = load(values + (c + j) * size + 16 * i) * by;
        const F16 r = u - round_even(clamp_four_bits(u));
        sum[j] = sum[j] + r * r;
      }
    }
    return sums(sum[0], sum[1], sum[2], sum[3]);
  }

  // Of four scales the one with the least squared error.
  void symmetric(uint16_t* scale) {
    const F16 bottom = load(low), top = load(high), up = zero() - bottom;
    const F16 end = max(top, up), sign = where_less(up, top, set1(-1.0f), set1(1.0f));
    F16 best = zero(), chosen = zero(), by = zero();
    for (int p = 0; p < 4; p++) {
      store_half(scale, copy_sign(max(end / set1(kInt4Parts[p]), set1(kLeastHalf)), sign));
      const F16 s = load_half(scale), reciprocal = set1(1.0f) / s;
      float error[kColumns];
      store(inverse, reciprocal);
      for (int64_t c = 0; c < kColumns; c += 4) _mm_storeu_ps(error + c, losses(c, inverse));
      const F16 e = load(error) * (s * s);
      chosen = p ? where_less(e, best, s, chosen) : s;
      by = p ? where_less(e, best, reciprocal, by) : reciprocal;
      best = p ? where_less(e, best, e, best) : e;
    }
    store(inverse, by);
    store_half(scale, chosen + load(odd));
  }

  void asymmetric(uint16_t* scale, uint8_t* offset) {
    const F16 step = (load(high) - load(low)) / set1(15.0f);
    store_half(scale, max(step, set1(kLeastHalf)));
    const F16 s = load_half(scale), reciprocal = set1(1.0f) / s;
    store(inverse, reciprocal);
    store(shift, min(round_even((zero() - load(low)) * reciprocal), set1(15.0f)));
    store_bytes(reinterpret_cast<int8_t*>(offset), load(shift));
    store_half(scale, s + load(odd));
  }
};

// 4-bit values of a group as bytes, to the lines of column c.
inline void put_nibbles(const int8_t* bytes, int64_t count, uint64_t flip, uint8_t* to) {
  for (int64_t i = 0; i < count / 8; i++) {
    const uint64_t x = (bytes_at(bytes + 8 * i) & 0x0f0f0f0f0f0f0f0full) ^ flip;
    put_word(to + i * 64, x | x >> 28);
  }
}

template <typename T, int V>
void int4_panel(const QuantizeArgs& a, int64_t panel) {
  constexpr int64_t group = V * 16;
  const Job<T> job(a, panel);
  const int64_t groups = a.padded_k / group;
  uint8_t* out = static_cast<uint8_t*>(a.panels) + panel * kColumns * a.padded_k / 2;
  Groups<V> w;
  int8_t bytes[group];
  for (int64_t g = 0; g < groups; g++) {
    w.read(job, g * group);
    const int64_t at = (panel * groups + g) * kColumns;
    uint16_t* scale = static_cast<uint16_t*>(a.scale) + at;
    if (a.symmetric)
      w.symmetric(scale);
    else
      w.asymmetric(scale, a.zero + at);
    for (int64_t c = 0; c < kColumns; c++) {
      const float* from = w.values + c * group;
      const F16 by = set1(w.inverse[c]), z = set1(w.shift[c]);
      uint8_t* to = out + g * group / 2 * kColumns + c * 4;
#pragma GCC unroll 8
      for (int i = 0; i < V; i++) {
        const F16 u = load(from + 16 * i) * by;
        store_bytes(bytes + 16 * i, a.symmetric ? clamp_four_bits(u)
                                                : min(max(round_even(u) + z, zero()), set1(15.0f)));
      }
      put_nibbles(bytes, group, a.symmetric ? 0x0808080808080808ull : 0, to);
    }
  }
}

}  // namespace

void quantize(const QuantizeArgs& a) {
  with_source(a.dtype, [&]<typename T>(T*) {
    auto* one = a.group == 0    ? int8_panel<T>
                : a.group == 32 ? int4_panel<T, 2>
                : a.group == 64 ? int4_panel<T, 4>
                                : int4_panel<T, 8>;
    over_panels(a, [&](int64_t panel) { one(a, panel); });
  });
}

void rotate(const PackArgs& a) {
  with_source(a.dtype, [&]<typename T>(T*) {
    over_panels(a, [&](int64_t panel) {
      const Job<T> job(a, panel);
      T space[64];
      for (int64_t c = 0; c < kColumns && panel * kColumns + c < a.n; c++) {
        float* out = static_cast<float*>(a.panels) + (panel * kColumns + c) * a.padded_k;
        for (int64_t at = 0; at < a.padded_k; at += 64) {
          const T* w = job.values(c, at, 64, space);
          for (int i = 0; i < 64; i += 16) store(out + at + i, load(w + i));
        }
        rotate_row(out, a.padded_k);
      }
    });
  });
}

}  // namespace penstock::PENSTOCK_ISA

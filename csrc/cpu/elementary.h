// Functions of sixteen lanes, the same bits with every instruction set.
#pragma once

#include "vec.h"

namespace penstock::PENSTOCK_ISA {

// e^x: argument reduction by ln 2 in two parts, then a polynomial of degree 6 (Cephes' expf
// coefficients). Below −87.3 it is 0, above 88.4 infinite.
static inline F16 exp(F16 x) {
  const F16 top = min(set1(88.3762626647949f), x);  // in this order a NaN x stays NaN
  const F16 n = round_even(top * set1(1.44269504088896341f));
  F16 r = fma(n, set1(-0.693359375f), top);
  r = fma(n, set1(2.12194440e-4f), r);
  F16 p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
  const F16 scaled = scale_by_power(p, max(n, set1(-126.0f)));
  const F16 high = where_less(set1(88.3762626647949f), x, set1(__builtin_inff()), scaled);
  return where_less(x, set1(-87.3365478515625f), zero(), high);
}

// p · 2^n, where the lowest bits of `raised` are n
static inline F16 times_power(F16 p, F16 raised) {
#if defined(__AVX512F__)
  const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(raised.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(p.v), n))};
#else
  const __m256i lo = _mm256_slli_epi32(_mm256_castps_si256(raised.lo), 23);
  const __m256i hi = _mm256_slli_epi32(_mm256_castps_si256(raised.hi), 23);
  return {_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p.lo), lo)),
          _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p.hi), hi))};
#endif
}

constexpr float kLog2E = 1.44269504088896341f;
constexpr float kWithin = 87.5f;  // about 126 ln 2

// 2^(x · by) of F16 or Many where that is an exponent of a float, in half as many steps as `exp`. The
// polynomial's coefficients are those of the least relative error over [−½, ½], 1.6e-7 in float.
template <typename V>
[[gnu::always_inline]] static inline V power_within(V x, float by) {
  const V raise = set1(0x1.8p23f);  // a sum with it is rounded to whole numbers
  const V raised = fma(x, set1(by), raise);
  const V f = fma(x, set1(by), raise - raised);
  V p = fma(set1(1.3264727e-3f), f, set1(9.6715130e-3f));
  p = fma(p, f, set1(5.5507336e-2f));
  p = fma(p, f, set1(2.4022242e-1f));
  p = fma(p, f, set1(6.9314700e-1f));
  return times_power(fma(p, f, set1(1.0f)), raised);
}

// e^x for x ≤ 0; what is 0 in `exp` may be a denormal here, which all that follows takes for 0.
template <typename V>
[[gnu::always_inline]] static inline V exp_below(V x) {
  return power_within(max(set1(-kWithin), x), kLog2E);  // in this order a NaN stays NaN
}

// 2^x for x ≤ 0 or hardly above, of F16 or Many, for what is rounded to bfloat16: by the polynomial of degree 3 that is 1
// at 0 and has the least relative error over [−½, ½], 1.0e-4, where rounding has 2.0e-3. Of x < −126 it is 0 or, as what
// follows takes for 0, a denormal.
template <typename V>
[[gnu::always_inline]] static inline V power_below(V x) {
#if defined(__AVX512F__)
  // a sum, not another rounding: beside tiles, sums have two ports
  const V f = fraction(x), n = x - f;
#else
  x = max(set1(-126.4f), x);  // in this order a NaN stays NaN
  const V raise = set1(0x1.8p23f), n = x + raise, f = x - (n - raise);
#endif
  const V c = fma(fma(set1(5.5009060e-2f), f, set1(2.4221097e-1f)), f, set1(6.9328290e-1f));
  const V p = fma(c, f, set1(1.0f));
#if defined(__AVX512F__)
  return scale_by_power(p, n);
#else
  return times_power(p, n);
#endif
}

static inline F16 tanh(F16 x) {
  const F16 t = exp(abs(x) * set1(-2.0f));
  return copy_sign((set1(1.0f) - t) / (set1(1.0f) + t), x);
}

// Abramowitz & Stegun 7.1.26: absolute error below 1.5e-7.
static inline F16 erf(F16 x) {
  const F16 a = abs(x);
  const F16 t = set1(1.0f) / fma(a, set1(0.3275911f), set1(1.0f));
  F16 p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  return copy_sign(set1(1.0f) - p * t * exp(zero() - a * a), x);
}

// Between −cap and cap: cap · tanh(x / cap).
static inline F16 softcapped(F16 x, float cap) { return set1(cap) * tanh(x / set1(cap)); }

}  // namespace penstock::PENSTOCK_ISA

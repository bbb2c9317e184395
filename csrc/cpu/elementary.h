// Functions of sixteen lanes, the same bits with every instruction set.
#pragma once

#include "vec.h"

namespace penstock::PENSTOCK_ISA {

// e^x of F16 or Many: argument reduction by ln 2 in two parts, then a polynomial of degree 6 (Cephes' expf
// coefficients). Below −87.3 it is 0, above 88.4 infinite.
template <typename V>
[[gnu::always_inline]] static inline V exp(V x) {
  const V top = min(set1(88.3762626647949f), x);  // in this order a NaN x stays NaN
  const V n = round_even(top * set1(1.44269504088896341f));
  V r = fma(n, set1(-0.693359375f), top);
  r = fma(n, set1(2.12194440e-4f), r);
  V p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = fma(p, r * r, r + set1(1.0f));
  const V scaled = scale_by_power(p, max(n, set1(-126.0f)));
  const V high = where_less(set1(88.3762626647949f), x, set1(__builtin_inff()), scaled);
  return where_less(x, set1(-87.3365478515625f), zero(), high);
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

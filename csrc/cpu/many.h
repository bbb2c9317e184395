// R times sixteen lanes at once: each step of a chain of operations for all of them before the next step,
// so that a processor's short queue of waiting instructions holds independent ones.
#pragma once

#include "elementary.h"

namespace penstock::PENSTOCK_ISA {

template <int R>
struct Many {
  F16 v[R];

  Many() = default;
  Many(F16 a) {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) v[r] = a;
  }

#define PENSTOCK_EACH(signature, value)          \
  [[gnu::always_inline]] friend inline Many signature {                 \
    Many out;                                    \
    _Pragma("GCC unroll 8") for (int r = 0; r < R; r++) out.v[r] = value; \
    return out;                                  \
  }
  PENSTOCK_EACH(operator+(Many a, Many b), a.v[r] + b.v[r])
  PENSTOCK_EACH(operator-(Many a, Many b), a.v[r] - b.v[r])
  PENSTOCK_EACH(operator*(Many a, Many b), a.v[r] * b.v[r])
  PENSTOCK_EACH(operator/(Many a, Many b), a.v[r] / b.v[r])
  PENSTOCK_EACH(fma(Many a, Many b, Many c), fma(a.v[r], b.v[r], c.v[r]))
  PENSTOCK_EACH(min(Many a, Many b), min(a.v[r], b.v[r]))
  PENSTOCK_EACH(max(Many a, Many b), max(a.v[r], b.v[r]))
#if defined(__AVX512F__)
  PENSTOCK_EACH(fraction(Many x), fraction(x.v[r]))
  PENSTOCK_EACH(scale_by_power(Many p, Many n), scale_by_power(p.v[r], n.v[r]))
#endif
  PENSTOCK_EACH(times_power(Many p, Many raised), times_power(p.v[r], raised.v[r]))
#undef PENSTOCK_EACH
};

}  // namespace penstock::PENSTOCK_ISA

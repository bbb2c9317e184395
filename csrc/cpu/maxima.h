// The largest of some numbers in one pass, and where it is.
#pragma once

#include "vec.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int kMaximaAhead = 1024;  // numbers to prefetch ahead: memory answers late
constexpr float kInfinity = __builtin_inff();

// Sixteen logits of which `count` exist; the others are -inf.
static inline F16 load_logits(const float* x, int count) {
  return count >= 16 ? load(x) : keep_first(load_first(x, count), count, -kInfinity);
}

// A running maximum of numbers, NaN aside; `strange` is 1 where a lane saw NaN or +inf.
struct Running {
  F16 best = set1(-kInfinity), strange = zero();
  void see(F16 v) {
    best = max(v, best);  // in this order a NaN leaves `best` as it is
    strange = where_less(v, set1(kInfinity), strange, set1(1.0f));
  }
  void join(const Running& other) {
    best = max(best, other.best);
    strange = max(strange, other.strange);
  }
};

// The largest number of a block; `strange` as in Running.
static inline float block_max(const float* x, int count, F16& strange) {
  Running a, b;  // two, so that neither waits for itself
  int j = 0;
  for (; j + 32 <= count; j += 32) {
    __builtin_prefetch(x + j + kMaximaAhead);
    __builtin_prefetch(x + j + 16 + kMaximaAhead);
    a.see(load(x + j));
    b.see(load(x + j + 16));
  }
  for (; j < count; j += 16) a.see(load_logits(x + j, count - j));
  a.join(b);
  strange = max(strange, a.strange);
  return reduce_max(a.best);
}

// Where the first of the numbers is that is no less than `least`; one is.
static inline int place_of(const float* x, int count, float least) {
  for (int j = 0;; j += 16)
    if (const unsigned found = not_less(load_logits(x + j, count - j), set1(least)))
      return j + __builtin_ctz(found);
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA

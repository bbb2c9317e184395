// What the kernels that choose tokens share: reading rows of logits. A row depends on no other row.
#pragma once

#include <algorithm>

#include "elementary.h"
#include "maxima.h"
#include "parallel.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int64_t kBlock = 256;         // logits per maximum and per partial sum
constexpr int64_t kScan = 2048;         // logits per maximum where only the largest is wanted
constexpr int64_t kSlice = 16 * 1024;   // logits of a row that are worth a part of their own
constexpr int64_t kParallel = 64 * 1024;  // below this many logits one thread does it all

// How much of a block that begins at `first` there is.
static inline int length_of(int64_t first, int64_t size, int64_t block = kBlock) {
  return static_cast<int>(size - first < block ? size - first : block);
}

// What is known of some logits of a row once they have been read.
struct Peak {
  float best;
  int64_t at;    // where the block of kScan begins that holds the first of the largest
  bool strange;  // there may be a NaN
};

static inline Peak scan(const float* x, int64_t first, int64_t last) {
  F16 strange = zero();
  Peak peak = {-kInfinity, first, false};
  for (; first < last; first += kScan) {
    const float found = block_max(x + first, length_of(first, last, kScan), strange);
    if (found > peak.best) peak.best = found, peak.at = first;
  }
  peak.strange = reduce_max(strange) > 0.0f;
  return peak;
}

// The place of a row's largest logit: the first of equals; the first NaN if there is one. `peaks`
// are those of the row's slices, in order.
static inline int64_t largest(const float* x, int64_t size, const Peak* peaks, int64_t slices) {
  Peak peak = peaks[0];
  for (int64_t i = 1; i < slices; i++) {
    if (peaks[i].best > peak.best) peak.best = peaks[i].best, peak.at = peaks[i].at;
    peak.strange |= peaks[i].strange;
  }
  if (peak.strange)
    for (int64_t i = 0; i < size; i++)
      if (x[i] != x[i]) return i;
  return peak.at + place_of(x + peak.at, length_of(peak.at, size, kScan), peak.best);
}

static inline int64_t largest(const float* x, int64_t size) {
  const Peak peak = scan(x, 0, size);
  return largest(x, size, &peak, 1);
}

// e^((x - peak) · inverse) of up to sixteen logits, 0 for those that don't exist.
static inline F16 weights_of(const float* x, int count, float peak, float inverse) {
  return exp((load_logits(x, count) - set1(peak)) * set1(inverse));
}

static inline float block_sum(const float* x, int count, float peak, float inverse) {
  F16 sum = zero();
  for (int j = 0; j < count; j += 16) sum = sum + weights_of(x + j, count - j, peak, inverse);
  return reduce_add(sum);
}

template <typename Args>
static inline void over_rows(const Args& a, int64_t rows, int64_t work,
                             void (*row)(const Args&, int64_t)) {
  parallel(work > kParallel ? a.threads : 1, rows, [&](int64_t r) { row(a, r); });
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA

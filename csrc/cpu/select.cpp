// Rows of logits: the largest, the k largest, and what a mask leaves out.
#include "leading.h"

namespace penstock::PENSTOCK_ISA {
namespace {

void top_k_row(const TopKArgs& a, const Reading& read, int64_t row) {
  const float* x = a.logits + row * a.stride;
  const Key* keys = leading(x, a.size, a.k, read.maxima_of(row), read.is_strange(row));
  float* values = a.values + row * a.k;
  for (int64_t j = 0; j < a.k; j++) {
    a.ids[row * a.k + j] = keys[j].id();
    values[j] = x[keys[j].id()];
  }
  if (a.weights) weigh(a, read, row, values, a.weights + row * a.k);
}

void scaled_top_k_row(const ScaledTopKArgs& a, const Reading& read, int64_t row) {
  const float* x = a.logits + row * a.stride;
  const Key* keys = leading(x, a.size, a.k, read.maxima_of(row), read.is_strange(row));
  float* scaled = a.scaled + row * a.k;
  int64_t* ids = a.ids + row * a.k;
  for (int64_t j = 0; j < a.k; j++) ids[j] = keys[j].id();
  const float peak = x[ids[0]], temperature = a.temperature[row], least = a.log_min_p[row];
  const int64_t top_k = a.top_k[row];
  const int64_t at = std::min(std::max<int64_t>(top_k, 1), a.k) - 1;
  const float kth = top_k < a.size ? x[ids[at]] : -kInfinity;
  a.peaks[row] = peak;
  bool kept = false;
  for (int64_t j = 0; j < a.k; j++) {
    const float value = x[ids[j]], share = (value - peak) / temperature;
    kept = value >= kth && share >= least;
    scaled[j] = kept ? share : -kInfinity;
  }
  a.more[row] = kept && a.k < a.size;
}

// Up to 32 logits: those without a bit become -inf. No branch looks at a bit of 32 that are there:
// they can't be predicted, and a store that changes nothing costs less than a wrong guess.
void mask_word(float* x, uint32_t allowed, int count) {
  if (count == 32) {
    put_lanes(x, ~allowed & 0xffff, set1(-kInfinity));
    put_lanes(x + 16, ~allowed >> 16, set1(-kInfinity));
    return;
  }
  for (int j = 0; j < count; j++)
    if (!(allowed >> j & 1)) x[j] = -kInfinity;
}

void mask_row(const MaskArgs& a, int64_t i) {
  float* x = a.logits + a.rows[i] * a.stride;
  const uint32_t* bits = a.bits + i * a.words;
  for (int64_t w = 0; w < a.words; w++)
    mask_word(x + 32 * w, bits[w], length_of(32 * w, a.size, 32));
}

}  // namespace

void argmax(const ArgmaxArgs& a) {
  const int threads = a.rows * a.size > kParallel ? a.threads : 1;
  // few rows are cut into slices, so that every thread has some
  const int64_t slices =
      threads == 1 || a.rows >= 4 * threads ? 1 : std::max<int64_t>(1, a.size / kSlice);
  const int64_t length = (a.size + slices * kScan - 1) / (slices * kScan) * kScan;
  Peak* peaks = static_cast<Peak*>(
      scratch(Scratch::partials, static_cast<size_t>(a.rows * slices) * sizeof(Peak)));
  parallel(threads, a.rows * slices, [&](int64_t i) {
    const int64_t first = i % slices * length;
    peaks[i] = scan(a.logits + i / slices * a.stride, std::min(first, a.size),
                    std::min(first + length, a.size));
  });
  for (int64_t row = 0; row < a.rows; row++) {
    const float* x = a.logits + row * a.stride;
    a.ids[row] = largest(x, a.size, peaks + row * slices, slices);
    a.values[row] = x[a.ids[row]];
  }
}

void mask(const MaskArgs& a) { over_rows(a, a.count, a.count * a.size, mask_row); }

void top_k(const TopKArgs& a) {
  over_leading(a, a.weights != nullptr,
               [&](const Reading& read, int64_t row) { top_k_row(a, read, row); });
}

void scaled_top_k(const ScaledTopKArgs& a) {
  over_leading(a, false, [&](const Reading& read, int64_t row) { scaled_top_k_row(a, read, row); });
}

}  // namespace penstock::PENSTOCK_ISA

// y = x · W + bias over packed panels, by vectors. linear_amx.cpp does the same by tiles.
#include "linear.h"

#include "panels.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// Bytes of widened activations that a thread goes over again and again: half of a small L2.
constexpr int64_t kRowsBytes = 512 * 1024;

template <typename T>
void widen_row(const T* x, int64_t k, int64_t padded_k, float* out) {
  int64_t j = 0;
  for (; j + 16 <= k; j += 16) store(out + j, load(x + j));
  for (; j < k; j++) out[j] = to_float(x[j]);
  for (; j < padded_k; j++) out[j] = 0.0f;
}

template <typename T>
void run(const LinearArgs& a) {
  const int64_t padded_k = (a.k + kBlock - 1) / kBlock * kBlock;
  const int64_t panels = (a.n + kColumns - 1) / kColumns;
  int64_t block = kRowsBytes / (padded_k * 4) / kMaxRows * kMaxRows;
  if (block < kMaxRows) block = kMaxRows;
  float* x = static_cast<float*>(
      scratch(Scratch::rows, static_cast<size_t>(a.rows * padded_k) * sizeof(float)));
  const T* source = static_cast<const T*>(a.x);
  const bool few = a.rows <= 4;
  if (few)
    for (int64_t r = 0; r < a.rows; r++)
      widen_row(source + r * a.x_stride, a.k, padded_k, x + r * padded_k);
#pragma omp parallel num_threads(a.threads) if (panels > 1)
  {
    const FlushDenormals flush;
    if (!few) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < a.rows; r++)
        widen_row(source + r * a.x_stride, a.k, padded_k, x + r * padded_k);
    }
    const Range mine = share(panels);
    const int64_t stride = padded_k * kColumns;  // elements of one panel
    const T* w = static_cast<const T*>(a.weight) + mine.first * stride;
    for (int64_t row = 0; row < a.rows; row += block) {
      const int64_t rows = a.rows - row < block ? a.rows - row : block;
      multiply_panels(
          x + row * padded_k, padded_k, rows, w, stride, mine.last - mine.first, padded_k,
          [](int64_t, int64_t) { return zero(); },
          [&](int64_t r, int64_t p, F16 value) {
            write_columns(a, row + r, (mine.first + p) * kColumns, value);
          });
    }
  }
}

}  // namespace

void linear(const LinearArgs& a) {
  if (a.dtype == DType::bf16)
    run<bf16>(a);
  else
    run<float>(a);
}

}  // namespace penstock::PENSTOCK_ISA

// y = x · W + bias over packed panels, by vectors. linear_amx.cpp does the same by tiles.
#include "linear.h"

#include "panels.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// Bytes of widened activations that a thread goes over again and again: half of a small L2.
constexpr int64_t kRowsBytes = 512 * 1024;

constexpr int64_t kPartBytes = 256 * 1024;

// Below this many bytes of weights times rows a second thread costs more than it saves.
constexpr int64_t kParallelBytes = 128 * 1024;

template <typename T>
void widen_row(const T* x, int64_t k, int64_t padded_k, float* out) {
  int64_t j = 0;
  for (; j + 16 <= k; j += 16) store(out + j, load(x + j));
  for (; j < k; j++) out[j] = to_float(x[j]);
  for (; j < padded_k; j++) out[j] = 0.0f;
}

// Into how many parts the panels are dealt: at least kPartBytes each, and a few for each thread.
int64_t count_parts(int64_t panels, int64_t panel_bytes, int threads) {
  int64_t parts = panels * panel_bytes / kPartBytes;
  if (parts > 8 * threads) parts = 8 * threads;
  if (parts < threads) parts = threads;
  return parts < panels ? parts : panels;
}

// All rows times the panels [first, last). Not inlined: inside a parallel region the compiler would
// read its arguments from memory again and again.
template <typename T>
[[gnu::noinline]] void multiply_part(const LinearArgs& a, const float* x, int64_t padded_k,
                                     int64_t first, int64_t last) {
  const int64_t stride = padded_k * kColumns;  // elements of one panel
  const T* w = static_cast<const T*>(a.weight) + first * stride;
  int64_t block = kRowsBytes / (padded_k * 4) / kMaxRows * kMaxRows;
  if (block < kMaxRows) block = kMaxRows;
  for (int64_t row = 0; row < a.rows; row += block) {
    const int64_t rows = a.rows - row < block ? a.rows - row : block;
    multiply_panels(
        x + row * padded_k, padded_k, rows, w, stride, last - first, padded_k,
        [](int64_t, int64_t) { return zero(); },
        [&](int64_t r, int64_t p, F16 value) {
          write_columns(a, row + r, (first + p) * kColumns, value);
        });
  }
}

template <typename T>
void run(const LinearArgs& a) {
  const int64_t padded_k = (a.k + kBlock - 1) / kBlock * kBlock;
  const int64_t panels = (a.n + kColumns - 1) / kColumns;
  float* x = static_cast<float*>(
      scratch(Scratch::rows, static_cast<size_t>(a.rows * padded_k) * sizeof(float)));
  const T* source = static_cast<const T*>(a.x);
  const int64_t panel_bytes = padded_k * kColumns * static_cast<int64_t>(sizeof(T));
  const int threads = panels * panel_bytes * a.rows > kParallelBytes ? a.threads : 1;
  const int64_t parts = count_parts(panels, panel_bytes, threads);
  const bool few = a.rows <= 4;
  if (few)
    for (int64_t r = 0; r < a.rows; r++)
      widen_row(source + r * a.x_stride, a.k, padded_k, x + r * padded_k);
#pragma omp parallel num_threads(threads)
  {
    const FlushDenormals flush;
    if (!few) {
#pragma omp for schedule(static)
      for (int64_t r = 0; r < a.rows; r++)
        widen_row(source + r * a.x_stride, a.k, padded_k, x + r * padded_k);
    }
    // Panels go to whichever thread is free, in parts large enough to stream: a core that is
    // slower, or busy with something else, then takes fewer.
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t part = 0; part < parts; part++)
      multiply_part<T>(a, x, padded_k, panels * part / parts, panels * (part + 1) / parts);
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

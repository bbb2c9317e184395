// The inner loop that projections, scores and weighted values share: rows times panels.
#pragma once

#include "vec.h"

namespace penstock::PENSTOCK_ISA {

constexpr int kColumns = 16;  // of a panel
constexpr int kBlock = 32;    // values of K whose even and odd products are summed apart

// Elements of a 64-byte panel line: v k-steps of 16 columns.
template <typename T>
constexpr int kVnni = 4 / static_cast<int>(sizeof(T));

// Shapes of the register tile. Few rows take one panel at a time, so that memory is one stream per
// thread, and the processor overlaps the K-blocks by itself: what AVX-512 machines like best.
#if defined(__AVX512F__)
constexpr int kFewRows = 3, kMaxRows = 6, kPanels = 2;
#else
constexpr int kFewRows = 1, kMaxRows = 2, kPanels = 1;
#endif

// How far ahead of the stream of weights memory is asked for, in values.
constexpr int64_t kAhead = 2048;

static inline void prefetch(const bf16* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
}

// acc[R][P] += x [R, k] · P panels over `k` values of K. Each acc is 16 columns.
// x: float rows `ldx` apart; w: panels `stride` elements apart.
template <int R, int P>
static inline void dot_panels(const float* x, int64_t ldx, const bf16* w, int64_t stride, int64_t k,
                              F16 (&acc)[R][P]) {
  for (int64_t k0 = 0; k0 < k; k0 += kBlock) {
    const int64_t pairs = k - k0 < kBlock ? (k - k0) / 2 : kBlock / 2;
    F16 even[R][P], odd[R][P];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) even[r][p] = odd[r][p] = zero();
    const float* xk = x + k0;
    const bf16* wk = w + k0 * kColumns;
    for (int64_t j = 0; j < pairs; j++) {
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) {
        F16 we, wo;
        if constexpr (R <= kFewRows) prefetch(wk + p * stride + j * 2 * kColumns + kAhead);
        load_pairs(wk + p * stride + j * 2 * kColumns, we, wo);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
          even[r][p] = fma(set1(xk[r * ldx + 2 * j]), we, even[r][p]);
          odd[r][p] = fma(set1(xk[r * ldx + 2 * j + 1]), wo, odd[r][p]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) acc[r][p] = acc[r][p] + (even[r][p] + odd[r][p]);
  }
}

template <int R, int P>
static inline void dot_panels(const float* x, int64_t ldx, const float* w, int64_t stride,
                              int64_t k, F16 (&acc)[R][P]) {
  for (int64_t j = 0; j < k; j++) {
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) {
      const F16 wj = load(w + p * stride + j * kColumns);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) acc[r][p] = fma(set1(x[r * ldx + j]), wj, acc[r][p]);
    }
  }
}

template <int R, int P, typename T, typename Init, typename Emit>
static inline void tile(const float* x, int64_t ldx, int64_t row, const T* w, int64_t stride,
                        int64_t panel, int64_t k, Init init, Emit emit) {
  F16 acc[R][P];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) acc[r][p] = init(row + r, panel + p);
  dot_panels<R, P>(x + row * ldx, ldx, w + panel * stride, stride, k, acc);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) emit(row + r, panel + p, acc[r][p]);
}

template <int P, typename T, typename Init, typename Emit>
static inline void all_rows(const float* x, int64_t ldx, int64_t rows, const T* w, int64_t stride,
                            int64_t panel, int64_t k, Init init, Emit emit) {
  int64_t r = 0;
#if defined(__AVX512F__)
  if (rows > kFewRows) {
    for (; rows - r >= 6; r += 6) tile<6, P>(x, ldx, r, w, stride, panel, k, init, emit);
    if (rows - r >= 4) tile<4, P>(x, ldx, r, w, stride, panel, k, init, emit), r += 4;
  }
  for (; rows - r >= 3; r += 3) tile<3, P>(x, ldx, r, w, stride, panel, k, init, emit);
  if (rows - r == 2) tile<2, P>(x, ldx, r, w, stride, panel, k, init, emit), r += 2;
#else
  for (; rows - r >= 2; r += 2) tile<2, P>(x, ldx, r, w, stride, panel, k, init, emit);
#endif
  for (; r < rows; r++) tile<1, P>(x, ldx, r, w, stride, panel, k, init, emit);
}

// For every row r < rows and every panel p < panels:
// emit(r, p, init(r, p) + 16 columns of x [rows, k] · panel p). The order of additions along k is
// the same for every r, p, rows and panels.
template <typename T, typename Init, typename Emit>
static inline void multiply_panels(const float* x, int64_t ldx, int64_t rows, const T* w,
                                   int64_t stride, int64_t panels, int64_t k, Init init,
                                   Emit emit) {
  int64_t p = 0;
#if !defined(__AVX512F__)
  if (rows == 1)  // two streams: 0.80 of the bandwidth on Zen 3 instead of 0.76
    for (; panels - p >= 2; p += 2) tile<1, 2>(x, ldx, 0, w, stride, p, k, init, emit);
#endif
  if (rows > kFewRows)
    for (; panels - p >= kPanels; p += kPanels)
      all_rows<kPanels>(x, ldx, rows, w, stride, p, k, init, emit);
  for (; p < panels; p++) all_rows<1>(x, ldx, rows, w, stride, p, k, init, emit);
}

}  // namespace penstock::PENSTOCK_ISA

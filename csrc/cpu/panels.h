// The inner loop that projections, scores and weighted values share: rows times panels.
#pragma once

#include "crossed.h"

namespace penstock::PENSTOCK_ISA {

constexpr int kBlock = 32;  // values of K whose even and odd products are summed apart

// Elements of a 64-byte panel line: v k-steps of 16 columns.
template <typename T>
constexpr int kVnni = 4 / static_cast<int>(sizeof(T));

// Shapes of the register tile. Few rows take one panel at a time, so that memory is one stream per
// thread, and the processor overlaps the K-blocks by itself: what AVX-512 machines like best.
#if defined(__AVX512F__)
constexpr int kFewRows = 3, kMaxRows = 6, kPanels = 2;
#else
constexpr int kFewRows = 1, kMaxRows = 4, kPanels = 1;
#endif

constexpr int64_t kCrossRows = 48;  // that pass over panels of bfloat16 often enough (crossed.h)

// So many sums of even products have room in registers beside as many of odd ones. FMAs of AVX2 need
// eight sums of 8 columns to hide their latency: of more rows, one half comes after the other.
#if defined(__AVX512F__)
constexpr int kTogether = 12;
#else
constexpr int kTogether = 2;
#endif

// What memory is asked for while rows pass over panels that lie one behind the other.
struct Ahead {
  int64_t bytes = 4096;  // few rows: so far ahead of each line they read
  bool next = false;     // more rows: the panels that come next, a part at each of their passes
  bool near = true;      // into L1, else into L2
};

static inline void prefetch(const char* at, bool near) {
  near ? _mm_prefetch(at, _MM_HINT_T0) : _mm_prefetch(at, _MM_HINT_T1);
}

// Asks for it.
class Stream {
 public:
  explicit Stream(const Ahead& ahead) : bytes_(ahead.bytes), near_(ahead.near) {}
  // More rows: `bytes` from `next` on, `lines` of 64 at the start of every `every`-th block of K.
  Stream(const Ahead& ahead, const void* next, int64_t bytes, int64_t lines, int64_t every)
      : next_(static_cast<const char*>(next)), left_(bytes / 64), lines_(lines), every_(every),
        near_(ahead.near) {}

  // Few rows read this line.
  void line(const void* at) const { prefetch(static_cast<const char*>(at) + bytes_, near_); }

  // More rows start with a block of kBlock values of K.
  void block() {
    if (left_ <= 0 || --turn_ > 0) return;
    turn_ = every_;
    left_ -= lines_;
    for (int64_t i = 0; i < lines_; i++, next_ += 64) prefetch(next_, near_);
  }

 private:
  const char* next_ = nullptr;
  int64_t bytes_ = 0, left_ = 0, lines_ = 0, every_ = 1, turn_ = 1;
  bool near_;
};

template <int R, int P>
static inline void clear(F16 (&sums)[R][P]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) sums[r][p] = zero();
}

// Even and odd products of one block of K.
template <int R, int P>
static inline void add_pairs(const float* x, int64_t ldx, const bf16* w, int64_t stride,
                             int64_t pairs, const Stream& stream, F16 (&even)[R][P],
                             F16 (&odd)[R][P]) {
  for (int64_t j = 0; j < pairs; j++) {
    F16 we[P], wo[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) {
      const bf16* line = w + p * stride + j * 2 * kColumns;
      if constexpr (R <= kFewRows) stream.line(line);
      we[p] = load_even(line);
      wo[p] = load_odd(line);
    }
    // a row at a time: where panels come first, gcc keeps all rows at hand and spills sums for it
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const F16 xe = set1(x[r * ldx + 2 * j]), xo = set1(x[r * ldx + 2 * j + 1]);
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) {
        even[r][p] = fma(xe, we[p], even[r][p]);
        odd[r][p] = fma(xo, wo[p], odd[r][p]);
      }
    }
  }
}

// Those of one panel that are even, or odd. The result waits in memory: left alone, gcc may keep it in
// registers, and in memory what is multiplied next.
template <bool Odd, int R>
static inline void sum_half(const float* x, int64_t ldx, const bf16* w, int64_t pairs,
                            F16 (&result)[R][1]) {
  F16 sums[R][1];
  clear(sums);
  for (int64_t j = 0; j < pairs; j++, w += 2 * kColumns) {
    const F16 half = Odd ? load_odd(w) : load_even(w);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      sums[r][0] = fma(set1(x[r * ldx + 2 * j + Odd]), half, sums[r][0]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) {
    result[r][0] = sums[r][0];
    if constexpr (!Odd) asm("" : "+m"(result[r][0]));
  }
}

// acc[R][P] += x [R, k] · P panels over `k` values of K. Each acc is 16 columns.
// x: float rows `ldx` apart; w: panels `stride` elements apart.
template <int R, int P>
static inline void dot_panels(const float* x, int64_t ldx, const bf16* w, int64_t stride, int64_t k,
                              Stream& stream, F16 (&acc)[R][P]) {
  for (int64_t k0 = 0; k0 < k; k0 += kBlock) {
    if constexpr (R > kFewRows) stream.block();
    const int64_t pairs = k - k0 < kBlock ? (k - k0) / 2 : kBlock / 2;
    const bf16* lines = w + k0 * kColumns;
    F16 even[R][P], odd[R][P];
    if constexpr (R * P <= kTogether) {
      clear(even);
      clear(odd);
      add_pairs(x + k0, ldx, lines, stride, pairs, stream, even, odd);
    } else {
      sum_half<false>(x + k0, ldx, lines, pairs, even);
      sum_half<true>(x + k0, ldx, lines, pairs, odd);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) acc[r][p] = acc[r][p] + (even[r][p] + odd[r][p]);
  }
}

template <int R, int P>
static inline void dot_panels(const float* x, int64_t ldx, const float* w, int64_t stride,
                              int64_t k, Stream&, F16 (&acc)[R][P]) {
  for (int64_t j = 0; j < k; j++) {
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) {
      const F16 wj = load(w + p * stride + j * kColumns);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) acc[r][p] = fma(set1(x[r * ldx + j]), wj, acc[r][p]);
    }
  }
}

#if defined(__AVX512BF16__)
// The same by products of two values: half as many steps, added in the same order. W: a panel whose
// lines are crossed already, or bf16.
template <int R, int P, typename W>
[[gnu::always_inline]] static inline void dot_panels(const crossed* x, int64_t ldx, const W* w,
                                                     int64_t stride, int64_t k, Stream& stream,
                                                     F16 (&acc)[R][P]) {
  for (int64_t k0 = 0; k0 < k; k0 += kBlock) {
    if constexpr (R > kFewRows) stream.block();
    const int64_t end = k - k0 < kBlock ? k : k0 + kBlock;
    F16 even[R][P], odd[R][P];
    clear(even);
    clear(odd);
    for (int64_t j = k0; j < end; j += 4) {
      Crossed lines[P];
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) {
        const W* line = w + p * stride + j * kColumns;
        if constexpr (R <= kFewRows) {
          stream.line(line);
          stream.line(line + 2 * kColumns);
        }
        lines[p] = load_crossed(line);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Crossed four = set_crossed(x + r * ldx + j);
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
          even[r][p] = dot(four.even, lines[p].even, even[r][p]);
          odd[r][p] = dot(four.odd, lines[p].odd, odd[r][p]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) acc[r][p] = acc[r][p] + (even[r][p] + odd[r][p]);
  }
}
#endif

// R rows from `row` on times P panels from `panel` on, which lie at w.
template <int R, int P, typename X, typename T, typename Init, typename Emit>
static inline void tile(const X* x, int64_t ldx, int64_t row, const T* w, int64_t stride,
                        int64_t panel, int64_t k, Stream& stream, Init init, Emit emit) {
  F16 acc[R][P];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) acc[r][p] = init(row + r, panel + p);
  dot_panels<R, P>(x + row * ldx, ldx, w, stride, k, stream, acc);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) emit(row + r, panel + p, acc[r][p]);
}

// How often `rows` go over a panel.
constexpr int64_t count_passes(int64_t rows) { return (rows + kMaxRows - 1) / kMaxRows; }

// one<R>(r) for all rows, R at a time. Eight: so many have room in registers.
template <bool Eight, typename One>
static inline void in_tiles(int64_t rows, One one) {
  int64_t r = 0;
#if defined(__AVX512F__)
  if constexpr (Eight)
    for (; rows - r == 8 || rows - r > 10; r += 8) one.template operator()<8>(r);
  for (; rows - r == 6 || rows - r > 7; r += 6) one.template operator()<6>(r);
  for (; rows - r >= 4; r += 4) one.template operator()<4>(r);
  for (; rows - r >= 3; r += 3) one.template operator()<3>(r);
#else
  for (; rows - r >= 4; r += 4) one.template operator()<4>(r);
#endif
  for (; rows - r >= 2; r += 2) one.template operator()<2>(r);
  for (; r < rows; r++) one.template operator()<1>(r);
}

template <typename X, int P>
constexpr bool kEight = std::is_same_v<X, crossed> && P == 1;

template <int P, typename X, typename T, typename Init, typename Emit>
static inline void all_rows(const X* x, int64_t ldx, int64_t rows, const T* w, int64_t stride,
                            int64_t panel, int64_t k, Stream& stream, Init init, Emit emit) {
  in_tiles<kEight<X, P>>(rows, [&]<int R>(int64_t r) {
    tile<R, P>(x, ldx, r, w, stride, panel, k, stream, init, emit);
  });
}

// P panels that lie together, of bfloat16 by crossed rows: many rows cross the lines once before, fewer
// take one panel at a time, whose sums for 8 rows have room in registers.
template <int P, typename X, typename T, typename Init, typename Emit>
static inline void all_passes(const X* x, int64_t ldx, int64_t rows, const T* w, int64_t stride,
                              int64_t panel, int64_t k, Stream& stream, Init init, Emit emit) {
  if constexpr (std::is_same_v<X, crossed>) {
    if (rows >= kCrossRows) {
      const int64_t size = k * kColumns;
      X* lines = static_cast<X*>(
          scratch(Scratch::unpacked, static_cast<size_t>(P * size) * sizeof(X)));
      for (int p = 0; p < P; p++) cross_panel(w + p * stride, k, lines + p * size);
      return all_rows<P>(x, ldx, rows, lines, size, panel, k, stream, init, emit);
    }
    if (P > 1 && rows > kMaxRows + 1) {
      for (int p = 0; p < P; p++)
        all_rows<1>(x, ldx, rows, w + p * stride, stride, panel + p, k, stream, init, emit);
      return;
    }
  }
  all_rows<P>(x, ldx, rows, w, stride, panel, k, stream, init, emit);
}

// For every row r < rows and every panel p < panels:
// emit(r, p, init(r, p) + 16 columns of x [rows, k] · panel p). The order of additions along k is
// the same for every r, p, rows and panels.
template <typename X, typename T, typename Init, typename Emit>
static inline void multiply_panels(const X* x, int64_t ldx, int64_t rows, const T* w,
                                   int64_t stride, int64_t panels, int64_t k, Init init, Emit emit,
                                   const Ahead& ahead = {}) {
  int64_t p = 0;
  Stream stream(ahead);
#if !defined(__AVX512F__)
  if (rows == 1)  // two streams: 0.80 of the bandwidth on Zen 3 instead of 0.76
    for (; panels - p >= 2; p += 2)
      tile<1, 2>(x, ldx, 0, w + p * stride, stride, p, k, stream, init, emit);
#endif
  const auto go_on = [&](int64_t next, int64_t count) {
    if (!ahead.next || rows <= kFewRows || panels - next < count) return;
    const int64_t bytes = count * k * kColumns * static_cast<int64_t>(sizeof(T));
    stream = Stream(ahead, w + next * stride, bytes, count * kBlock / kVnni<T>, count_passes(rows));
  };
  if (rows > kFewRows)
    for (; panels - p >= kPanels; p += kPanels) {
      go_on(p + kPanels, kPanels);
      all_passes<kPanels>(x, ldx, rows, w + p * stride, stride, p, k, stream, init, emit);
    }
  for (; p < panels; p++) {
    go_on(p + 1, 1);
    all_passes<1>(x, ldx, rows, w + p * stride, stride, p, k, stream, init, emit);
  }
}

// kBlock values of K of all panels, `stride` elements from one panel to the next.
template <typename T>
struct Block {
  const T* values;
  int64_t stride;
};

template <int R, int P, typename X, typename T, typename Emit>
static inline void tile_of_blocks(const X* x, int64_t ldx, int64_t row, const Block<T>* blocks,
                                  int64_t count, int64_t panel, Emit emit) {
  Stream stream(Ahead{0, false, true});
  F16 acc[R][P];
  clear(acc);
  for (int64_t d = 0; d < count; d++) {
    const int64_t stride = blocks[d].stride;
    dot_panels<R, P>(x + row * ldx + d * kBlock, ldx, blocks[d].values + panel * stride, stride,
                     kBlock, stream, acc);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) emit(row + r, panel + p, acc[r][p]);
}

// The same as `multiply_panels`, from zero, of panels whose blocks of K lie apart.
template <typename X, typename T, typename Emit>
static inline void multiply_blocks(const X* x, int64_t ldx, int64_t rows, const Block<T>* blocks,
                                   int64_t count, int64_t panels, Emit emit) {
  int64_t p = 0;
  if (rows > kFewRows && !(std::is_same_v<X, crossed> && rows > kMaxRows + 1))
    for (; panels - p >= kPanels; p += kPanels)
      in_tiles<kEight<X, kPanels>>(rows, [&]<int R>(int64_t r) {
        tile_of_blocks<R, kPanels>(x, ldx, r, blocks, count, p, emit);
      });
  for (; p < panels; p++)
    in_tiles<kEight<X, 1>>(rows, [&]<int R>(int64_t r) {
      tile_of_blocks<R, 1>(x, ldx, r, blocks, count, p, emit);
    });
}

}  // namespace penstock::PENSTOCK_ISA

// The inner loop that projections, scores and weighted values share: rows times panels.
#pragma once

#include "ahead.h"
#include "crossed.h"

namespace penstock::PENSTOCK_ISA {

constexpr int kBlock = 32;  // values of K whose even and odd products are summed apart

// Elements of a 64-byte panel line: v k-steps of 16 columns.
template <typename T>
constexpr int kVnni = 4 / static_cast<int>(sizeof(T));

// Shapes of the register tile. Few rows take one panel at a time, so that memory is one stream per
// thread, and the processor overlaps the K-blocks by itself: what AVX-512 machines like best.
#if defined(__AVX512F__)
constexpr int kMaxRows = 6, kPanels = 2;
#else
constexpr int kMaxRows = 4, kPanels = 1;
#endif

constexpr int64_t kCrossRows = 17;  // that pass over panels of bfloat16 often enough (crossed.h)
constexpr int64_t kMostBlocks = 8;  // of one sum

// So many sums of even products have room in registers beside as many of odd ones. FMAs of AVX2 need
// eight sums of 8 columns to hide their latency: of more rows, one half comes after the other.
#if defined(__AVX512F__)
constexpr int kTogether = 12;
#else
constexpr int kTogether = 2;
#endif

template <int R, int P>
static inline void clear(F16 (&sums)[R][P]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) sums[r][p] = zero();
}

// Even and odd products of one block of K.
template <int R, int P, typename Asks>
static inline void add_pairs(const float* x, int64_t ldx, const bf16* w, int64_t stride,
                             int64_t pairs, Asks& asks, F16 (&even)[R][P],
                             F16 (&odd)[R][P]) {
  for (int64_t j = 0; j < pairs; j++) {
    F16 we[P], wo[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) {
      const bf16* line = w + p * stride + j * 2 * kColumns;
      asks.line(line);
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
template <int R, int P, typename Asks>
static inline void dot_panels(const float* x, int64_t ldx, const bf16* w, int64_t stride, int64_t k,
                              Asks& asks, F16 (&acc)[R][P]) {
  for (int64_t k0 = 0; k0 < k; k0 += kBlock) {
    asks.block();
    const int64_t pairs = k - k0 < kBlock ? (k - k0) / 2 : kBlock / 2;
    const bf16* lines = w + k0 * kColumns;
    F16 even[R][P], odd[R][P];
    if constexpr (R * P <= kTogether) {
      clear(even);
      clear(odd);
      add_pairs(x + k0, ldx, lines, stride, pairs, asks, even, odd);
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

template <int R, int P, typename Asks>
static inline void dot_panels(const float* x, int64_t ldx, const float* w, int64_t stride,
                              int64_t k, Asks&, F16 (&acc)[R][P]) {
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
template <int R, int P, typename W, typename Asks>
[[gnu::always_inline]] static inline void dot_panels(const crossed* x, int64_t ldx, const W* w,
                                                     int64_t stride, int64_t k, Asks& asks,
                                                     F16 (&acc)[R][P]) {
  for (int64_t k0 = 0; k0 < k; k0 += kBlock) {
    asks.block();
    const int64_t end = k - k0 < kBlock ? k : k0 + kBlock;
    F16 even[R][P], odd[R][P];
    clear(even);
    clear(odd);
    for (int64_t j = k0; j < end; j += 4) {
      Crossed lines[P];
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) {
        const W* line = w + p * stride + j * kColumns;
        asks.line(line);
        asks.line(line + 2 * kColumns);
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

// R rows from `row` on times P panels from `panel` on, which lie at w. emit: takes all sums at once, or one
// after the other.
template <int R, int P, typename X, typename T, typename Asks, typename Init, typename Emit>
static inline void tile(const X* x, int64_t ldx, int64_t row, const T* w, int64_t stride,
                        int64_t panel, int64_t k, Asks&& asks, Init init, Emit emit) {
  F16 acc[R][P];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) acc[r][p] = init(row + r, panel + p);
  dot_panels<R, P>(x + row * ldx, ldx, w, stride, k, asks, acc);
  if constexpr (std::is_invocable_v<Emit, int64_t, int64_t, const F16(&)[R][P]>) {
    F16 sums[R][P];  // gcc keeps what others may look at in memory all along
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) sums[r][p] = acc[r][p];
    emit(row, panel, sums);
  } else {
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) emit(row + r, panel + p, acc[r][p]);
  }
}

// Rows of X that pass over P panels together: as many as have room for their sums in registers.
template <typename X, int P>
constexpr int kPass = std::is_same_v<X, crossed> && P == 1 ? 8 : kMaxRows;

// How often `rows` go over a panel, at most `most` at a time.
constexpr int64_t count_passes(int64_t rows, int64_t most) { return (rows + most - 1) / most; }

template <int Most, typename Body>
static inline void with_count(int64_t count, Body body) {
  if constexpr (Most > 1)
    if (count < Most) return with_count<Most - 1>(count, body);
  body.template operator()<Most>();
}

// one<R>(r) for all rows [first, last), R at a time, at most Most: in as few passes as there can be,
// each of as many rows as the next.
template <int Most, typename One>
static inline void in_passes(int64_t first, int64_t last, One one) {
  for (int64_t passes = count_passes(last - first, Most); passes > 0; passes--) {
    const int64_t count = count_passes(last - first, passes);
    with_count<Most>(count, [&]<int R>() { one.template operator()<R>(first); });
    first += count;
  }
}

template <int P, typename X, typename T, typename Asks, typename Init, typename Emit>
static inline void all_rows(const X* x, int64_t ldx, int64_t rows, const T* w, int64_t stride,
                            int64_t panel, int64_t k, Asks&& asks, Init init, Emit emit) {
  in_passes<kPass<X, P>>(0, rows, [&]<int R>(int64_t r) {
    tile<R, P>(x, ldx, r, w, stride, panel, k, asks, init, emit);
  });
}

// P panels that lie together, of bfloat16 by crossed rows: many rows cross the lines once before.
template <int P, typename X, typename T, typename Asks, typename Init, typename Emit>
static inline void all_passes(const X* x, int64_t ldx, int64_t rows, const T* w, int64_t stride,
                              int64_t panel, int64_t k, Asks&& asks, Init init, Emit emit) {
  if constexpr (std::is_same_v<X, crossed>) {
    if (rows >= kCrossRows) {
      const int64_t size = k * kColumns;
      X* lines = static_cast<X*>(
          scratch(Scratch::unpacked, static_cast<size_t>(P * size) * sizeof(X)));
      for (int p = 0; p < P; p++) cross_panel(w + p * stride, k, lines + p * size);
      return all_rows<P>(x, ldx, rows, lines, size, panel, k, asks, init, emit);
    }
  }
  all_rows<P>(x, ldx, rows, w, stride, panel, k, asks, init, emit);
}

// For every row r < rows and every panel p < panels:
// emit(r, p, init(r, p) + 16 columns of x [rows, k] · panel p). The order of additions along k is
// the same for every r, p, rows and panels. before(p, count): is called before panels from p on.
template <typename X, typename T, typename Asks, typename Init, typename Emit, typename Before>
static inline void multiply_panels(const X* x, int64_t ldx, int64_t rows, const T* w,
                                   int64_t stride, int64_t panels, int64_t k, Asks&& asks, Init init,
                                   Emit emit, Before before) {
  int64_t p = 0;
#if !defined(__AVX512F__)
  if (rows == 1)  // two streams: 0.80 of the bandwidth on Zen 3 instead of 0.76
    for (; panels - p >= 2; p += 2)
      tile<1, 2>(x, ldx, 0, w + p * stride, stride, p, k, asks, init, emit);
#endif
  if (rows > kFewRows && (!std::is_same_v<X, crossed> || rows >= kCrossRows))
    for (; panels - p >= kPanels; p += kPanels) {
      before(p, kPanels);
      all_passes<kPanels>(x, ldx, rows, w + p * stride, stride, p, k, asks, init, emit);
    }
  for (; p < panels; p++) {
    before(p, 1);
    all_passes<1>(x, ldx, rows, w + p * stride, stride, p, k, asks, init, emit);
  }
}

template <typename X, typename T, typename Asks, typename Init, typename Emit>
static inline void multiply_panels(const X* x, int64_t ldx, int64_t rows, const T* w,
                                   int64_t stride, int64_t panels, int64_t k, Asks&& asks, Init init,
                                   Emit emit) {
  multiply_panels(x, ldx, rows, w, stride, panels, k, asks, init, emit, [](int64_t, int64_t) {});
}

// The same of panels that lie one behind the other.
template <typename X, typename T, typename Init, typename Emit>
static inline void stream_panels(const X* x, int64_t ldx, int64_t rows, const T* w, int64_t stride,
                                 int64_t panels, int64_t k, const Ahead& ahead, Init init,
                                 Emit emit) {
  if (ahead.once)
    return multiply_panels(x, ldx, rows, w, stride, panels, k, Lines(ahead), init, emit);
  const auto comes_next = [&](int64_t p, int64_t count) {
    return ahead.bytes > 0 && panels - p - count >= count;
  };
  if constexpr (std::is_same_v<X, crossed>)
    if (rows < kCrossRows) {
      Spread spread;
      return multiply_panels(
          x, ldx, rows, w, stride, panels, k, spread, init, emit, [&](int64_t p, int64_t count) {
            spread = {};
            if (comes_next(p, count))
              spread = Spread(w + (p + count) * stride, count_passes(rows, kPass<X, 1>), ahead.near);
          });
    }
  Bursts bursts;
  multiply_panels(
      x, ldx, rows, w, stride, panels, k, bursts, init, emit, [&](int64_t p, int64_t count) {
        bursts = {};
        if (!comes_next(p, count)) return;
        const int64_t bytes = count * k * kColumns * static_cast<int64_t>(sizeof(T));
        bursts = Bursts(w + (p + count) * stride, bytes, count * kBlock / kVnni<T>,
                        count_passes(rows, kMaxRows), ahead.near);
      });
}

// Panels that lie apart from others, `stride` elements from one to the next.
template <typename T, typename Asks>
struct Block {
  const T* values;
  int64_t stride;
  Asks asks;
};

// P panels of a block, from `panel` on, as many rows take them: what comes next is asked for once, and
// their lines are crossed into `room` where rows are.
template <int P, typename X, typename T, typename Asks>
static inline auto taken(const Block<T, Asks>& block, int64_t panel, int64_t k,
                         [[maybe_unused]] X* room) {
  const T* from = block.values + panel * block.stride;
  for (int p = 0; p < P; p++)
    block.asks.all(from + p * block.stride, k * kColumns * static_cast<int64_t>(sizeof(T)));
  if constexpr (std::is_same_v<X, crossed>) {
    const int64_t size = k * kColumns;
    for (int p = 0; p < P; p++) cross_panel(from + p * block.stride, k, room + p * size);
    return Block<X, Quiet>{room, size, {}};
  } else {
    return Block<T, Quiet>{from, block.stride, {}};
  }
}

// For the lines of so many values of K of P panels.
template <int P, typename X>
static inline X* room_for_lines(int64_t k) {
  if constexpr (!std::is_same_v<X, crossed>) return nullptr;
  return static_cast<X*>(
      scratch(Scratch::unpacked, static_cast<size_t>(P * k * kColumns) * sizeof(X)));
}

// Whether so many rows take panels like that. Rows of floats on AVX-512 are faster when each line asks for
// what comes next (Zen 5: 39 ms of a prompt's attention, and 45).
template <typename X>
static inline bool take_once(int64_t rows) {
#if defined(__AVX512F__)
  return std::is_same_v<X, crossed> && rows >= kCrossRows;
#else
  return rows >= kCrossRows;
#endif
}

// Whether so many rows take such panels by twos. Of crossed ones, 5, 7 and 8 together have room for their
// sums of one panel only.
template <typename X>
static inline bool pairs_apart(int64_t rows) {
  return rows > kFewRows && (!std::is_same_v<X, crossed> || rows == 4 || rows == kMaxRows);
}

// R rows from `row` on times whole panels, Panels in each of the blocks [first, last).
template <int R, int P, int64_t Panels, typename X, typename B, typename Emit>
static inline void tiles_apart(const X* x, int64_t ldx, int64_t row, const B* blocks, int64_t first,
                               int64_t last, int64_t k, Emit emit) {
  for (int64_t d = first; d < last; d++)
    for (int64_t p = 0; p < Panels; p += P)
      tile<R, P>(x, ldx, row, blocks[d].values + p * blocks[d].stride, blocks[d].stride,
                 d * Panels + p, k, blocks[d].asks, [](int64_t, int64_t) { return zero(); }, emit);
}

// emit(r, p, 16 columns of x [rows, k] · panel p) of whole panels, Panels in each of `count` blocks.
template <int64_t Panels, typename X, typename B, typename Emit>
static inline void multiply_apart(const X* x, int64_t ldx, int64_t rows, const B* blocks,
                                  int64_t count, int64_t k, Emit emit) {
  if (take_once<X>(rows)) {
    X* room = room_for_lines<kPanels, X>(k);
    for (int64_t d = 0; d < count; d++)
      for (int64_t p = 0; p < Panels; p += kPanels) {
        const auto now = taken<kPanels>(blocks[d], p, k, room);
        all_rows<kPanels>(x, ldx, rows, now.values, now.stride, d * Panels + p, k, Quiet(),
                          [](int64_t, int64_t) { return zero(); }, emit);
      }
    return;
  }
  const int64_t together = rows > 8 ? 1 : count;  // rows that go over a block again find it in L1
  for (int64_t d = 0; d < count; d += together) {
    if (pairs_apart<X>(rows))
      in_passes<kPass<X, kPanels>>(0, rows, [&]<int R>(int64_t r) {
        tiles_apart<R, kPanels, Panels>(x, ldx, r, blocks, d, d + together, k, emit);
      });
    else
      in_passes<kPass<X, 1>>(0, rows, [&]<int R>(int64_t r) {
        tiles_apart<R, 1, Panels>(x, ldx, r, blocks, d, d + together, k, emit);
      });
  }
}

template <int R, int P, typename X, typename B, typename Emit>
static inline void tile_of_blocks(const X* x, int64_t ldx, int64_t row, const B* blocks,
                                  int64_t count, int64_t panel, Emit emit) {
  F16 acc[R][P];
  clear(acc);
  for (int64_t d = 0; d < count; d++) {
    const int64_t stride = blocks[d].stride;
    dot_panels<R, P>(x + row * ldx + d * kBlock, ldx, blocks[d].values + panel * stride, stride,
                     kBlock, blocks[d].asks, acc);
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) emit(row + r, panel + p, acc[r][p]);
}

// P panels from `panel` on of many rows.
template <int P, typename X, typename B, typename Emit>
static inline void panels_of_blocks(const X* x, int64_t ldx, int64_t rows, const B* blocks,
                                    int64_t count, int64_t panel, X* room, Emit emit) {
  constexpr int64_t size = P * kBlock * kColumns;
  decltype(taken<P>(blocks[0], panel, kBlock, room)) now[kMostBlocks];
  for (int64_t d = 0; d < count; d++) now[d] = taken<P>(blocks[d], panel, kBlock, room + d * size);
  in_passes<kPass<X, P>>(0, rows, [&]<int R>(int64_t r) {
    tile_of_blocks<R, P>(x, ldx, r, now, count, 0,
                         [&](int64_t i, int64_t p, F16 value) { emit(i, panel + p, value); });
  });
}

// The same of panels of which kBlock values of K lie in each block, of kMostBlocks at most.
template <typename X, typename B, typename Emit>
static inline void multiply_blocks(const X* x, int64_t ldx, int64_t rows, const B* blocks,
                                   int64_t count, int64_t panels, Emit emit) {
  int64_t p = 0;
  if (take_once<X>(rows)) {
    X* room = room_for_lines<kPanels, X>(count * kBlock);
    for (; panels - p >= kPanels; p += kPanels)
      panels_of_blocks<kPanels>(x, ldx, rows, blocks, count, p, room, emit);
    for (; p < panels; p++) panels_of_blocks<1>(x, ldx, rows, blocks, count, p, room, emit);
    return;
  }
  if (pairs_apart<X>(rows))
    for (; panels - p >= kPanels; p += kPanels)
      in_passes<kPass<X, kPanels>>(0, rows, [&]<int R>(int64_t r) {
        tile_of_blocks<R, kPanels>(x, ldx, r, blocks, count, p, emit);
      });
  for (; p < panels; p++)
    in_passes<kPass<X, 1>>(0, rows, [&]<int R>(int64_t r) {
      tile_of_blocks<R, 1>(x, ldx, r, blocks, count, p, emit);
    });
}

}  // namespace penstock::PENSTOCK_ISA

// Sums of tiles on their way to memory.
#pragma once

#include "many.h"
#include "tile_rows.h"

namespace penstock::PENSTOCK_ISA {

// What most results become, row by row beside the products: gate · up by silu, or sums as they are, written or
// added. Whole panels, bfloat16. Others are taken together, by `Columns`.
enum class Way { gates, writes, adds, other };
// and what their sums are: floats; those that wait for their row's scale; floats or integers of weights that have
// a scale for each column, the latter of rows with scales too
enum class Sum { floats, of_rows, scaled, ints };

static inline void prefetch_to_write(const void* p) { asm volatile("prefetchw (%0)" : : "r"(p)); }

// The sums of a pair of row tiles by two panels, [panel][row tile][16 × 16], that wait to become results: two rows or some at each step of the products that follow, since tiles and vectors are computed
// side by side. What they are written to is asked for a pair of row tiles before.
class Finish {
 public:
  Finish(const LinearArgs& a, const TileRows& x, const Columns& to)
      : a_(a), x_(x), to_(to), how_(taken(a, x)) {
    const bool usual = a.dtype == DType::bf16 && a.out_dtype == DType::bf16 &&
                       (a.groups > 1 || how_ == Taken::plain || how_ == Taken::ints);
    if (usual && a.gated && a.activation == Activation::silu && a.n % kColumns == 0)
      way_ = Way::gates;
    if (usual && !a.gated && a.activation == Activation::none && a.n % (2 * kColumns) == 0)
      way_ = a.adds ? Way::adds : Way::writes;
    stride_ = way_ == Way::adds ? a.residual_stride : a.y_stride;
  }

  Way way() const { return way_; }

  // The sums of rows [first, last) and of panels p and, if `two`, p + 1. Nearly all will be done after so many
  // calls of `some`.
  void begin(const float* sums, int64_t first, int64_t last, int64_t p, bool two, int64_t steps) {
    sums_ = sums;
    first_ = next_ = first;
    last_ = last;
    if (p != p_) open(p, two);
    if (way_ == Way::other) return take_rest();
    next_y_ = y_ + first * stride_;
    later_ = last < a_.rows ? 2 * kTileRows * stride_ : 0;
    left_ = each_ = (last - first) / 2;
    steps_ = steps;
    due_ = 0;
  }

  template <Way W, Sum S>
  [[gnu::always_inline]] void some() {
    if (left_ == 0) return;
    due_ += each_;
    for (; due_ >= steps_ && left_ > 0; due_ -= steps_, left_--) two_rows<W, S>();
  }
  // Of sums S, whatever their way is.
  template <Sum S>
  void all() {
    if (way_ == Way::gates) all<Way::gates, S>();
    if (way_ == Way::writes) all<Way::writes, S>();
    if (way_ == Way::adds) all<Way::adds, S>();
  }
  template <Way W, Sum S>
  void all() {
    for (; left_ > 0; left_--) two_rows<W, S>();
    take_rest();
  }

 private:
  void open(int64_t p, bool two) {
    p_ = p;
    two_ = two;
    if (a_.kind != Weight::dense)
      for (int i = 0; i < 1 + two; i++) {
        panel_[i] = quantized_panel(a_, p + i);
        if (a_.groups == 1) scales_[i] = panel_[i].scales(0);
      }
    if (way_ == Way::other) return;
    const int64_t column = p / (way_ == Way::gates ? 2 : 1) * kColumns;
    y_ = static_cast<bf16*>(way_ == Way::adds ? a_.residual : a_.y) + column;
    bias_ = a_.bias ? a_.bias + column : nullptr;
  }

  // The sums of row `row` and panel i, less all that is undone before the bias. Scaled: groups' scales have
  // been.
  template <bool Scaled, Taken How>
  F16 value(const float* sums, int64_t row, int i) const {
    F16 v = load(sums);
    if constexpr (!Scaled)
      v = fma(sum_of<How>(a_, x_, panel_[i], sums, row, 0), scales_[i], zero());
    if constexpr (How == Taken::ints || How == Taken::zeroed) v = v * set1(x_.scale[row]);
    return v;
  }

  template <bool Scaled, Taken How>
  [[gnu::noinline]] void take() {
    for (; next_ < last_; next_++)
      for (int i = 0; i < 1 + two_; i++)
        to_(next_, p_ + i, value<Scaled, How>(at(next_, i), next_, i));
  }

  void take_rest() {
    if (next_ == last_) return;
    if (a_.kind != Weight::dense && a_.groups == 1)
      with_taken(how_, [&]<Taken How>() { take<false, How>(); });
    else
      how_ == Taken::ints || how_ == Taken::zeroed ? take<true, Taken::ints>()
                                                   : take<true, Taken::plain>();
  }

  const float* at(int64_t row, int i) const { return sums_ + (row - first_) * kColumns + i * 2 * kSums; }

  // What `Columns` does, of whole panels in bfloat16: nothing is asked for each value again.
  template <Way W, Sum S>
  [[gnu::always_inline]] void two_rows() {
    const int64_t row = next_;
    next_ = row + 2;
    Many<2> v[2];  // of a panel
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
#pragma GCC unroll 2
      for (int r = 0; r < 2; r++) v[i].v[r] = result<S>(at(row + r, i), row + r, i);
      if (bias_) v[i] = v[i] + load(bias_ + i * (W == Way::gates ? a_.n : kColumns));
      if constexpr (W != Way::writes) round_both(v[i].v[0], v[i].v[1]);
    }
    bf16 *y = next_y_, *below = y + stride_;
    prefetch_to_write(y + later_);
    prefetch_to_write(below + later_);
    next_y_ = below + stride_;
    if constexpr (W == Way::gates) {
      const Many<2> gated = silu(v[0]) * v[1];
      return store_both(y, below, gated.v[0], gated.v[1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++, y += kColumns, below += kColumns) {
      if constexpr (W == Way::adds) {
        v[i].v[0] = load(y) + v[i].v[0];
        v[i].v[1] = load(below) + v[i].v[1];
      }
      store_both(y, below, v[i].v[0], v[i].v[1]);
    }
  }

  template <Sum S>
  [[gnu::always_inline]] F16 result(const float* sums, int64_t row, int i) const {
    if constexpr (S == Sum::floats) return load(sums);
    if constexpr (S == Sum::of_rows) return load(sums) * set1(x_.scale[row]);
    if constexpr (S == Sum::scaled) return fma(load(sums), scales_[i], zero());
    const F16 found = to_float(load_sums(reinterpret_cast<const int32_t*>(sums)));
    return fma(found, scales_[i], zero()) * set1(x_.scale[row]);
  }

  const LinearArgs& a_;
  const TileRows& x_;
  const Columns& to_;
  int64_t first_ = 0, last_ = 0, next_ = 0;  // rows
  int64_t left_ = 0, each_ = 0;              // pairs of rows: still to do, and in all
  int64_t steps_ = 1, due_ = 0;              // calls of `some`; pairs of rows times calls that are due
  const float* sums_ = nullptr;
  const float* bias_ = nullptr;
  bf16 *y_ = nullptr, *next_y_ = nullptr;    // of the first row and the next
  int64_t stride_ = 0, later_ = 0, p_ = -1;  // elements from a row to the next, and to those of the next tiles
  Taken how_;
  Way way_ = Way::other;
  bool two_ = false;
  Panel panel_[2] = {};
  F16 scales_[2] = {zero(), zero()};
};

// body(constants of its results and sums)
template <bool Ints, typename Body>
static inline void with_way(Way way, bool scaled, Body body) {
  const auto with_sum = [&]<Way W>() {
    if constexpr (Ints)
      body.template operator()<W, Sum::ints>();
    else
      scaled ? body.template operator()<W, Sum::scaled>() : body.template operator()<W, Sum::floats>();
  };
  switch (way) {
    case Way::gates: return with_sum.template operator()<Way::gates>();
    case Way::writes: return with_sum.template operator()<Way::writes>();
    case Way::adds: return with_sum.template operator()<Way::adds>();
    case Way::other: return with_sum.template operator()<Way::other>();
  }
}

}  // namespace penstock::PENSTOCK_ISA

// Sums of tiles on their way to memory.
#pragma once

#include "many.h"
#include "tile_rows.h"

namespace penstock::PENSTOCK_ISA {

// The sums of row tiles by two panels, [pair of row tiles][row tile][panel][16 × 16], that wait to become
// results: some rows at each step of the products that follow, since tiles and vectors are computed side
// by side.
class Finish {
 public:
  // of rows [first, last)
  Finish(const LinearArgs& a, const Packed& x, int64_t first, int64_t last, const Columns& to)
      : a_(a), x_(x), to_(to), first_(first), last_(last), next_(last), how_(taken(a, x)) {
    const bool usual = a.dtype == DType::bf16 && a.out_dtype == DType::bf16;
    gates_ = usual && a.gated && a.activation == Activation::silu;
    plain_ = usual && !a.gated && a.activation == Activation::none;
  }

  // The sums of panels p and, if `two`, p + 1. All will be done after so many calls of `some`.
  void begin(const float* sums, int64_t p, bool two, int64_t steps) {
    all();
    sums_ = sums;
    p_ = p;
    two_ = two;
    next_ = first_;
    each_ = static_cast<double>(last_ - first_) / static_cast<double>(kTogether * steps) + 1e-9;
    due_ = 0.0;
    if (a_.kind != Weight::dense)
      for (int64_t i = 0; i < 1 + two; i++) panel_[i] = quantized_panel(a_, p + i);
  }

  void some() {
    due_ += each_;
    if (due_ < 1.0) return;
    const int64_t count = static_cast<int64_t>(due_);
    due_ -= static_cast<double>(count);
    if (next_ < last_) advance(std::min(next_ + count * kTogether, last_));
  }
  void all() {
    if (next_ < last_) advance(last_);
  }

 private:
  static constexpr int64_t kTogether = 4;

  [[gnu::noinline]] void advance(int64_t end) {
    if (a_.kind != Weight::dense && a_.groups == 1)
      with_taken(how_, [&]<Taken How>() { take<false, How>(end); });
    else
      how_ == Taken::ints || how_ == Taken::zeroed ? take<true, Taken::ints>(end)
                                                   : take<true, Taken::plain>(end);
  }

  // The sums of row `row` and panel i, less all that is undone before the bias. Scaled: groups' scales have
  // been.
  template <bool Scaled, Taken How>
  F16 value(const float* sums, const F16 (&scales)[2], int64_t row, int i) const {
    F16 v = load(sums);
    if constexpr (!Scaled)
      v = fma(sum_of<How>(a_, x_, panel_[i], sums, row, 0), scales[i], zero());
    if constexpr (How == Taken::ints || How == Taken::zeroed) v = v * set1(x_.scale[row]);
    return v;
  }

  template <bool Scaled, Taken How>
  void take(int64_t end) {
    F16 scales[2] = {zero(), zero()};
    if constexpr (!Scaled)
      for (int i = 0; i < 1 + two_; i++) scales[i] = panel_[i].scales(0);
    const int64_t column = p_ / (a_.gated ? 2 : 1) * kColumns;
    const bool whole = two_ && column + (a_.gated ? 1 : 2) * kColumns <= a_.n;
    for (; next_ < end; next_ += kTogether) {
      const int64_t at = next_ - first_, count = std::min(kTogether, last_ - next_);
      const float* sums = sums_ + at / kTileRows * 2 * kSums + at % kTileRows * kColumns;
      const auto of = [&](int64_t r, int i) {
        return value<Scaled, How>(sums + r * kColumns + i * kSums, scales, next_ + r, i);
      };
      if (gates_ && whole && count == kTogether) {
        gated_rows(next_, column, of);
      } else if (plain_ && whole) {
        a_.adds ? plain_rows<true>(count, column, of) : plain_rows<false>(count, column, of);
      } else {
        for (int64_t r = 0; r < count; r++)
          for (int i = 0; i < 1 + two_; i++) to_(next_ + r, p_ + i, of(r, i));
      }
    }
  }

  // What `Columns` does, of whole panels in bfloat16: nothing is asked for each value again.
  template <typename Of>
  void gated_rows(int64_t row, int64_t column, Of of) const {
    Many<kTogether> gate, up;
#pragma GCC unroll 4
    for (int r = 0; r < kTogether; r++) {
      gate.v[r] = of(r, 0);
      up.v[r] = of(r, 1);
    }
    if (a_.bias) {
      gate = gate + load(a_.bias + column);
      up = up + load(a_.bias + a_.n + column);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kTogether; r++) round_both(gate.v[r], up.v[r]);
    const Many<kTogether> out = silu(gate) * up;
    bf16* y = static_cast<bf16*>(a_.y) + row * a_.y_stride + column;
#pragma GCC unroll 4
    for (int r = 0; r < kTogether; r++) store(y + r * a_.y_stride, out.v[r]);
  }

  template <bool Adds, typename Of>
  void plain_rows(int64_t count, int64_t column, Of of) const {
    const int64_t stride = Adds ? a_.residual_stride : a_.y_stride;
    bf16* y = static_cast<bf16*>(Adds ? a_.residual : a_.y) + next_ * stride + column;
    for (int64_t r = 0; r < count; r++, y += stride)
      for (int i = 0; i < 2; i++) {
        F16 v = of(r, i);
        if (a_.bias) v = v + load(a_.bias + column + i * kColumns);
        if constexpr (Adds) v = load(y + i * kColumns) + round_bf16(v);
        store(y + i * kColumns, v);
      }
  }

  const LinearArgs& a_;
  const Packed& x_;
  const Columns& to_;
  int64_t first_, last_, next_;  // rows
  Taken how_;
  bool gates_, plain_, two_ = false;
  Panel panel_[2] = {};
  const float* sums_ = nullptr;
  int64_t p_ = 0;
  double each_ = 0.0, due_ = 0.0;  // pieces of kTogether rows: at a call of `some`, and not yet
};

}  // namespace penstock::PENSTOCK_ISA

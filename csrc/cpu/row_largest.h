// Products of which only each row's largest column is wanted: results never leave a thread's cache.
#pragma once

#include "elementary.h"
#include "linear.h"
#include "maxima.h"

namespace penstock::PENSTOCK_ISA {

// Each part of the panels is multiplied as ever, into memory of the thread that does it, and looked
// through while it is there. What the parts have found is compared in their order.
class RowLargest {
 public:
  RowLargest(const LinearArgs& a, int64_t parts) : a_(a), parts_(parts) {
    if (a.largest)
      found_ = static_cast<Largest*>(
          scratch(Scratch::largest, static_cast<size_t>(parts * a.rows) * sizeof(Largest)));
  }

  // multiply(arguments) of part `i`, which are the panels [first, last).
  template <typename Multiply>
  void part(int64_t i, Range panels, Multiply multiply) const {
    if (!found_) return multiply(a_);
    const int64_t first = panels.first * kColumns, columns = (panels.last - panels.first) * kColumns;
    LinearArgs mine = a_;
    float* y = static_cast<float*>(
        scratch(Scratch::columns, static_cast<size_t>(a_.rows * columns) * sizeof(float)));
    mine.y = y - first;
    mine.y_stride = columns;
    multiply(mine);
    const int count = static_cast<int>(std::min(columns, a_.n - first));
    for (int64_t row = 0; row < a_.rows; row++)
      found_[i * a_.rows + row] = look(y + row * columns, count, first);
  }

  // After all parts.
  void finish() const {
    if (!found_) return;
    for (int64_t row = 0; row < a_.rows; row++) {
      Largest best = found_[row];
      for (int64_t i = 1; i < parts_; i++) {
        const Largest& other = found_[i * a_.rows + row];
        const bool is_nan = other.value != other.value && best.value == best.value;
        if (other.value > best.value || is_nan) best = other;
      }
      a_.largest[row] = best;
    }
  }

 private:
  // As `argmax` does it: the first of equals, and before all a NaN.
  Largest look(float* x, int count, int64_t first) const {
    if (a_.cap > 0.0f)
      for (int j = 0; j < count; j += kColumns) store(x + j, softcapped(load(x + j), a_.cap));
    F16 strange = zero();
    int at = place_of(x, count, block_max(x, count, strange));
    if (reduce_max(strange) > 0.0f) {
      int j = 0;
      while (j < count && x[j] == x[j]) j++;
      if (j < count) at = j;
    }
    return {x[at], first + at};
  }

  const LinearArgs& a_;
  int64_t parts_;
  Largest* found_ = nullptr;
};

}  // namespace penstock::PENSTOCK_ISA

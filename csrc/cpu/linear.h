// What the vector and the tile form of `linear` share.
#pragma once

#include <omp.h>

#include "vec.h"

namespace penstock::PENSTOCK_ISA {

struct Range {
  int64_t first, last;
};

// This thread's part of `count` things, contiguous.
static inline Range share(int64_t count) {
  const int64_t threads = omp_get_num_threads(), id = omp_get_thread_num();
  return {count * id / threads, count * (id + 1) / threads};
}

// Add the bias and store 16 columns, or as many as there are, of one row.
static inline void write_columns(const LinearArgs& a, int64_t row, int64_t column, F16 value) {
  const int64_t left = a.n - column;
  const int count = left < 16 ? static_cast<int>(left) : 16;
  if (a.bias) value = value + load_first(a.bias + column, count);
  if (a.out_dtype == DType::bf16)
    store_some(static_cast<bf16*>(a.y) + row * a.n + column, value, count);
  else
    store_some(static_cast<float*>(a.y) + row * a.n + column, value, count);
}

void linear(const LinearArgs& a);

}  // namespace penstock::PENSTOCK_ISA

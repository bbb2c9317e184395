// Rows that go through a product together, wherever they lie: of adapters, and of experts.
#pragma once

#include "kernels.h"

namespace penstock {

inline int64_t size_of(DType dtype) { return dtype == DType::bf16 ? 2 : 4; }

template <typename T>
T* kept(Scratch purpose, int64_t count) {
  return static_cast<T*>(scratch(purpose, static_cast<size_t>(count) * sizeof(T)));
}

// Makes rows `places` of x, in rising order, those of a product: copied where they don't lie side by side.
inline void take_rows(LinearArgs& a, const void* x, int64_t stride, const int32_t* places,
                      int64_t count) {
  const int64_t size = size_of(a.dtype), row_bytes = a.k * size;
  const char* from = static_cast<const char*>(x);
  a.rows = count;
  a.x = from + places[0] * stride * size;
  a.x_stride = stride;
  if (places[count - 1] - places[0] == count - 1) return;
  char* picked = kept<char>(Scratch::picked, count * row_bytes);
  for (int64_t i = 0; i < count; i++)
    __builtin_memcpy(picked + i * row_bytes, from + places[i] * stride * size,
                     static_cast<size_t>(row_bytes));
  a.x = picked;
  a.x_stride = a.k;
}

}  // namespace penstock

// What low-rank adapters add to a product, each row with its own adapter: ops/lora.py.
//
// Rows of one adapter are gathered, where they don't lie side by side, and go through its two
// matrices together, as any product does: a row's bits depend on no other row.
#include <algorithm>

#include "kernels.h"

namespace penstock {
namespace {

// Rows that go at a time: what the second product makes of them stays near.
constexpr int64_t kRows = 64;

int64_t size_of(DType dtype) { return dtype == DType::bf16 ? 2 : 4; }

void* kept(Scratch purpose, int64_t bytes) {
  return scratch(purpose, static_cast<size_t>(bytes));
}

// At most kRows rows, `places[i]` in x and y each, all of one adapter.
void add_some(const LoraArgs& a, int64_t adapter, const int32_t* places, int64_t count) {
  const int64_t row_bytes = a.down.k * size_of(a.down.dtype);
  const int64_t stride_bytes = a.x_stride * size_of(a.down.dtype);
  const char* x = static_cast<const char*>(a.x);
  LinearArgs down = a.down;
  down.weight = static_cast<const char*>(down.weight) + adapter * a.down_bytes;
  down.rows = count;
  down.threads = a.threads;
  if (places[count - 1] - places[0] == count - 1) {
    down.x = x + places[0] * stride_bytes;
    down.x_stride = a.x_stride;
  } else {
    char* picked = static_cast<char*>(kept(Scratch::picked, kRows * row_bytes));
    for (int64_t i = 0; i < count; i++)
      __builtin_memcpy(picked + i * row_bytes, x + places[i] * stride_bytes,
                       static_cast<size_t>(row_bytes));
    down.x = picked;
    down.x_stride = down.k;
  }
  down.y = kept(Scratch::hidden, kRows * down.n * size_of(down.out_dtype));
  down.y_stride = down.n;
  kernels().linear(down);
  LinearArgs up = a.up;
  up.weight = static_cast<const char*>(up.weight) + adapter * a.up_bytes;
  up.x = down.y;
  up.x_stride = down.n;
  up.rows = count;
  up.threads = a.threads;
  up.y = kept(Scratch::change, kRows * up.n * size_of(up.out_dtype));
  up.y_stride = up.n;
  kernels().linear(up);
  kernels().scaled_add({static_cast<const float*>(up.y), a.scaling[adapter], a.y, a.y_stride, places,
                        count, up.n, a.y_dtype, a.threads});
}

}  // namespace

void lora_add(const LoraArgs& a) {
  if (a.rows == 0) return;
  int32_t* places = static_cast<int32_t*>(kept(Scratch::places, a.rows * 4));
  for (int64_t adapter = 0; adapter < a.count; adapter++) {
    int64_t count = 0;
    for (int64_t row = 0; row < a.rows; row++)
      if (a.adapters[row] == adapter) places[count++] = static_cast<int32_t>(row);
    for (int64_t first = 0; first < count; first += kRows)
      add_some(a, adapter, places + first, std::min(kRows, count - first));
  }
}

}  // namespace penstock

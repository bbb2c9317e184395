// What low-rank adapters add to a product, each row with its own adapter: ops/lora.py.
//
// Rows of one adapter are gathered, where they don't lie side by side, and go through its two
// matrices together, as any product does: a row's bits depend on no other row.
#include <algorithm>

#include "gathered.h"

namespace penstock {
namespace {

// Rows that go at a time: what the second product makes of them stays near.
constexpr int64_t kRows = 64;

// At most kRows rows, `places[i]` in x and y each, all of one adapter.
void add_some(const LoraArgs& a, int64_t adapter, const int32_t* places, int64_t count) {
  LinearArgs down = a.down;
  down.weight = static_cast<const char*>(down.weight) + adapter * a.down_bytes;
  down.threads = a.threads;
  take_rows(down, a.x, a.x_stride, places, count);
  down.y = kept<char>(Scratch::hidden, kRows * down.n * size_of(down.out_dtype));
  down.y_stride = down.n;
  kernels().linear(down);
  LinearArgs up = a.up;
  up.weight = static_cast<const char*>(up.weight) + adapter * a.up_bytes;
  up.x = down.y;
  up.x_stride = down.n;
  up.rows = count;
  up.threads = a.threads;
  up.y = kept<char>(Scratch::change, kRows * up.n * size_of(up.out_dtype));
  up.y_stride = up.n;
  kernels().linear(up);
  kernels().scaled_add({static_cast<const float*>(up.y), a.scaling[adapter], a.y, a.y_stride, places,
                        count, up.n, a.y_dtype, a.threads});
}

}  // namespace

void lora_add(const LoraArgs& a) {
  if (a.rows == 0) return;
  int32_t* places = kept<int32_t>(Scratch::places, a.rows);
  for (int64_t adapter = 0; adapter < a.count; adapter++) {
    int64_t count = 0;
    for (int64_t row = 0; row < a.rows; row++)
      if (a.adapters[row] == adapter) places[count++] = static_cast<int32_t>(row);
    for (int64_t first = 0; first < count; first += kRows)
      add_some(a, adapter, places + first, std::min(kRows, count - first));
  }
}

}  // namespace penstock

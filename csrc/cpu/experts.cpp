// A mixture of experts: ops/experts.py.
//
// Rows are sorted by the experts that they chose; an expert takes its rows together through both of
// its matrices, as any product does, so that a row's bits depend on no other row.
#include <algorithm>

#include "gathered.h"
#include "mixture.h"
#include "parallel.h"

namespace penstock {
namespace {

// The rows of one expert: products first to first + count.
struct Group {
  int64_t expert, first, count;
};

// Which rows go where. All of it lies in scratch memory of the calling thread.
struct Routes {
  float* weights;   // [rows, k]
  int32_t* chosen;  // [rows, k]
  int32_t* places;  // [rows, k]: the product of each choice
  int32_t* rows;    // [rows · k]: the row of each product
  Group* groups;    // of experts that have rows, those with the most first
  int64_t active;
};

Routes allocate(const ExpertsArgs& a) {
  const int64_t choices = a.rows * a.by.k;
  // groups first: they are the widest
  char* at = kept<char>(Scratch::routed, a.count * static_cast<int64_t>(sizeof(Group)) + choices * 16);
  Routes r = {};
  r.groups = reinterpret_cast<Group*>(at);
  at += a.count * static_cast<int64_t>(sizeof(Group));
  r.weights = reinterpret_cast<float*>(at);
  r.chosen = reinterpret_cast<int32_t*>(at + choices * 4);
  r.places = r.chosen + choices;
  r.rows = r.places + choices;
  return r;
}

// Products in the order of experts, then of rows.
void sort_rows(const ExpertsArgs& a, Routes& r) {
  const int64_t choices = a.rows * a.by.k;
  int64_t* next = kept<int64_t>(Scratch::places, a.count);
  std::fill(next, next + a.count, 0);
  for (int64_t i = 0; i < choices; i++) next[r.chosen[i]]++;
  int64_t first = 0;
  for (int64_t e = 0; e < a.count; e++) {
    const int64_t count = next[e];
    if (count > 0) r.groups[r.active++] = {e, first, count};
    next[e] = first;
    first += count;
  }
  for (int64_t i = 0; i < choices; i++) {
    const int64_t place = next[r.chosen[i]]++;
    r.places[i] = static_cast<int32_t>(place);
    r.rows[place] = static_cast<int32_t>(i / a.by.k);
  }
  std::stable_sort(r.groups, r.groups + r.active,
                   [](const Group& x, const Group& y) { return x.count > y.count; });
}

LinearArgs of_expert(const LinearArgs& first, const Pitch& pitch, int64_t expert, int threads) {
  const auto move = [&](const void* from, int64_t bytes) -> const void* {
    return from ? static_cast<const char*>(from) + expert * bytes : nullptr;
  };
  LinearArgs a = first;
  a.weight = move(a.weight, pitch.weight);
  a.scale = move(a.scale, pitch.scale);
  a.zero = move(a.zero, pitch.zero);
  a.fine = static_cast<const uint8_t*>(move(a.fine, pitch.fine));
  a.bias = static_cast<const float*>(move(a.bias, pitch.bias));
  a.input_scale = a.input_scale ? a.input_scale + expert : nullptr;
  a.threads = threads;
  return a;
}

// The rows of one expert through the first of its matrices, to y.
void go_up(const ExpertsArgs& a, const Routes& r, const Group& g, void* y, int64_t stride, int threads) {
  LinearArgs up = of_expert(a.up, a.up_pitch, g.expert, threads);
  take_rows(up, a.x, a.x_stride, r.rows + g.first, g.count);
  up.y = y;
  up.y_stride = stride;
  kernels().linear(up);
}

// And from x through the second, into its products.
void go_down(const ExpertsArgs& a, const Group& g, const void* x, int64_t stride, char* products,
             int threads) {
  LinearArgs down = of_expert(a.down, a.down_pitch, g.expert, threads);
  down.rows = g.count;
  down.x = x;
  down.x_stride = stride;
  down.y = products + g.first * down.n * size_of(a.up.dtype);
  down.y_stride = down.n;
  kernels().linear(down);
}

void take(const ExpertsArgs& a, const Routes& r, const Group& g, char* products, int threads) {
  void* hidden = kept<char>(Scratch::hidden, g.count * a.up.n * size_of(a.up.dtype));
  go_up(a, r, g, hidden, a.up.n, threads);
  go_down(a, g, hidden, a.up.n, products, threads);
}

// body(group, threads) for all of them. All threads together for an expert with more rows than a thread's
// share, and a thread an expert for the others where that leaves none idle for long: each then reads what
// it has alone.
template <typename Body>
void over_groups(const ExpertsArgs& a, const Routes& r, Body&& body) {
  const int64_t choices = a.rows * a.by.k;
  int64_t shared = 0;
  while (shared < r.active && r.groups[shared].count * a.threads > choices) shared++;
  if (r.active - shared < 2 * a.threads) shared = r.active;
  for (int64_t i = 0; i < shared; i++) body(r.groups[i], a.threads);
  parallel(a.threads, r.active - shared, [&](int64_t i) { body(r.groups[shared + i], 1); });
}

void combine(const ExpertsArgs& a, const Routes& r, const void* products, void* y, int64_t stride) {
  kernels().combine({products, r.places, r.weights, y, stride, a.rows, a.by.k, a.down.n,
                     a.down.out_dtype, a.threads});
}

// Each rank has some columns of both matrices: hidden rows are put together, then results.
void take_columns(const ExpertsArgs& a, const Routes& r, char* products) {
  const SharedExperts& s = a.shared;
  const int64_t size = size_of(a.up.dtype), wide = s.up[s.at.size], out = s.down[s.at.size];
  char* hidden = place(s.at);
  over_groups(a, r, [&](const Group& g, int threads) {
    go_up(a, r, g, hidden + (g.first * wide + s.up[s.at.rank]) * size, wide, threads);
  });
  meet(s.at);
  over_groups(a, r, [&](const Group& g, int threads) {
    go_down(a, g, hidden + g.first * wide * size, wide, products, threads);
  });
  char* all = place(s.at);
  combine(a, r, products, all + s.down[s.at.rank] * size, out);
  meet(s.at);
  for (int64_t row = 0; row < a.rows; row++)
    __builtin_memcpy(static_cast<char*>(a.y) + row * a.y_stride * size, all + row * out * size,
                     static_cast<size_t>(out * size));
}

// Each rank has some experts: their products are put together.
void take_experts(const ExpertsArgs& a, Routes& r) {
  const SharedExperts& s = a.shared;
  const int32_t first = s.experts[s.at.rank], end = s.experts[s.at.rank + 1];
  int64_t own = 0;
  for (int64_t i = 0; i < r.active; i++)
    if (r.groups[i].expert >= first && r.groups[i].expert < end) {
      r.groups[own] = r.groups[i];
      r.groups[own++].expert -= first;  // as its banks count them
    }
  r.active = own;
  char* products = place(s.at);
  over_groups(a, r, [&](const Group& g, int threads) { take(a, r, g, products, threads); });
  meet(s.at);
  combine(a, r, products, a.y, a.y_stride);
}

void of_rows(const ExpertsArgs& a) {
  LinearArgs router = a.router;
  router.x = a.asked ? a.asked : a.x;
  router.x_stride = a.asked ? a.asked_stride : a.x_stride;
  router.rows = a.rows;
  router.threads = a.threads;
  router.y = kept<float>(Scratch::change, a.rows * a.count);
  router.y_stride = a.count;
  kernels().linear(router);
  Routes r = allocate(a);
  kernels().route({static_cast<const float*>(router.y), a.rows, a.count, a.by, r.weights,
                   r.chosen, a.threads});
  sort_rows(a, r);
  if (a.used) *a.used += r.active;
  if (a.shared.experts) return take_experts(a, r);
  char* products =
      kept<char>(Scratch::products, a.rows * a.by.k * a.down.n * size_of(a.down.out_dtype));
  if (a.shared.up) return take_columns(a, r, products);
  over_groups(a, r, [&](const Group& g, int threads) { take(a, r, g, products, threads); });
  combine(a, r, products, a.y, a.y_stride);
}

}  // namespace

void experts(const ExpertsArgs& a) {
  int64_t most = a.rows;  // that a meeting has room for
  if (const SharedExperts& s = a.shared; s.at.base) {
    const int64_t wide = s.up ? std::max<int64_t>(a.by.k * s.up[s.at.size], s.down[s.at.size])
                              : a.by.k * a.down.n;
    most = s.at.place_bytes / (wide * size_of(a.up.dtype));
  }
  const int64_t before = a.used ? *a.used : 0;
  for (int64_t first = 0; first < a.rows; first += most) {
    ExpertsArgs some = a;
    const int64_t size = size_of(a.up.dtype);
    some.rows = std::min(most, a.rows - first);
    some.x = static_cast<const char*>(a.x) + first * a.x_stride * size;
    if (a.asked) some.asked = static_cast<const char*>(a.asked) + first * a.asked_stride * size;
    some.y = static_cast<char*>(a.y) + first * a.y_stride * size;
    of_rows(some);
  }
  if (a.used) *a.used = std::min(*a.used, before + a.count);  // rounds may have asked the same ones
}

}  // namespace penstock

// Which experts rows go to, and the sum of what those make of them: ops/route.py.
#include "elementary.h"
#include "linear.h"
#include "mixture.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// Below this many elements a parallel region costs more than it saves.
constexpr int64_t kParallel = 32 * 1024;

// Whether a comes before an equal or smaller b that was found earlier; NaN is the largest.
bool before(float a, float b) { return a > b || (a != a && b == b); }

// The k largest of a row, by value and then by place.
void find_largest(const float* x, int64_t count, int64_t k, int32_t* chosen) {
  int64_t found = 0;
  for (int64_t j = 0; j < count; j++) {
    if (found == k && !before(x[j], x[chosen[k - 1]])) continue;
    int64_t at = found < k ? found++ : k - 1;
    for (; at > 0 && before(x[j], x[chosen[at - 1]]); at--) chosen[at] = chosen[at - 1];
    chosen[at] = static_cast<int32_t>(j);
  }
}

// e^(x − peak) of the listed, or of the first `count`, and their sum.
float exponentials(const float* x, int64_t count, float peak, float* out) {
  F16 sum = zero();
  for (int64_t j = 0; j < count; j += kColumns) {
    const int c = count - j < kColumns ? static_cast<int>(count - j) : kColumns;
    const F16 e = keep_first(exp(load_first(x + j, c) - set1(peak)), c, 0.0f);
    if (out) store_some(out + j, e, c);
    sum = sum + e;
  }
  return reduce_add(sum);
}

// Each logit's sigmoid.
void sigmoids(const float* x, int64_t count, float* out) {
  for (int64_t j = 0; j < count; j += kColumns) {
    const int c = count - j < kColumns ? static_cast<int>(count - j) : kColumns;
    const F16 e = exp(zero() - load_first(x + j, c));
    store_some(out + j, set1(1.0f) / (set1(1.0f) + e), c);
  }
}

float largest(const float* x, int64_t count) {
  float top = x[0];
  for (int64_t j = 1; j < count; j++)
    if (before(x[j], top)) top = x[j];
  return top;
}

// −∞ for the experts of all but the best groups: by their best expert, or with a correction by the
// sum of their two best.
void hide_groups(const RouteArgs& a, float* wish, float* best, int32_t* kept) {
  const int64_t size = a.experts / a.by.groups, pair = a.by.correction && size > 1 ? 2 : 1;
  for (int64_t g = 0; g < a.by.groups; g++) {
    int32_t top[2];
    find_largest(wish + g * size, size, pair, top);
    best[g] = wish[g * size + top[0]];
    if (pair == 2) best[g] += wish[g * size + top[1]];
  }
  find_largest(best, a.by.groups, a.by.top_groups, kept);
  for (int64_t g = 0; g < a.by.groups; g++) best[g] = 0.0f;
  for (int64_t i = 0; i < a.by.top_groups; i++) best[kept[i]] = 1.0f;
  for (int64_t j = 0; j < a.experts; j++)
    if (best[j / size] == 0.0f) wish[j] = -__builtin_inff();
}

// What the experts of a row are chosen by.
const float* wishes(const RouteArgs& a, const float* x) {
  if (!a.by.correction && a.by.groups == 1) return x;
  float* wish = static_cast<float*>(scratch(
      Scratch::row, static_cast<size_t>(a.experts + 2 * a.by.groups) * sizeof(float)));
  if (a.by.correction) {
    if (a.by.sigmoid) {
      sigmoids(x, a.experts, wish);
    } else {
      const float sum = exponentials(x, a.experts, largest(x, a.experts), wish);
      for (int64_t j = 0; j < a.experts; j++) wish[j] /= sum;
    }
    for (int64_t j = 0; j < a.experts; j++) wish[j] += a.by.correction[j];
  } else {
    __builtin_memcpy(wish, x, static_cast<size_t>(a.experts) * sizeof(float));
  }
  float* best = wish + a.experts;
  if (a.by.groups > 1) hide_groups(a, wish, best, reinterpret_cast<int32_t*>(best + a.by.groups));
  return wish;
}

void route_row(const RouteArgs& a, int64_t row) {
  const float* x = a.logits + row * a.experts;
  const int64_t k = a.by.k;
  int32_t* chosen = a.chosen + row * k;
  float* weights = a.weights + row * k;
  find_largest(wishes(a, x), a.experts, k, chosen);
  for (int64_t j = 0; j < k; j++) weights[j] = x[chosen[j]];
  float sum = 1.0f;
  if (a.by.sigmoid) {
    sigmoids(weights, k, weights);
    if (a.by.normalize) sum = a.by.eps;
    for (int64_t j = 0; a.by.normalize && j < k; j++) sum += weights[j];
  } else {
    const float peak = a.by.normalize ? largest(weights, k) : largest(x, a.experts);
    sum = exponentials(weights, k, peak, weights);
    if (!a.by.normalize) sum = exponentials(x, a.experts, peak, nullptr);
  }
  for (int64_t j = 0; j < k; j++) weights[j] = weights[j] / sum * a.by.scale;
  for (int64_t j = 0; a.by.each && j < k; j++) weights[j] *= a.by.each[chosen[j]];
}

template <typename T>
void combine_row(const CombineArgs& a, int64_t row) {
  const T* y = static_cast<const T*>(a.y);
  T* out = static_cast<T*>(a.out) + row * a.out_stride;
  const int32_t* places = a.places + row * a.k;
  const float* weights = a.weights + row * a.k;
  for (int64_t d = 0; d < a.dim; d += kColumns) {
    const int c = a.dim - d < kColumns ? static_cast<int>(a.dim - d) : kColumns;
    F16 sum = zero();
    for (int64_t j = 0; j < a.k; j++)
      sum = sum + load_some(y + places[j] * a.dim + d, c) * set1(weights[j]);
    store_some(out + d, sum, c);
  }
}

}  // namespace

void route(const RouteArgs& a) {
  over_rows(a.rows * a.experts > kParallel ? a.threads : 1, a.rows,
            [&](int64_t row) { route_row(a, row); });
}

void combine(const CombineArgs& a) {
  const auto row = a.dtype == DType::bf16 ? combine_row<bf16> : combine_row<float>;
  over_rows(a.rows * a.k * a.dim > kParallel ? a.threads : 1, a.rows,
            [&](int64_t r) { row(a, r); });
}

}  // namespace penstock::PENSTOCK_ISA

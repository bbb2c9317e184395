// Which experts rows go to, and the sum of what those make of them: ops/route.py.
#include "elementary.h"
#include "linear.h"

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

void route_row(const RouteArgs& a, int64_t row) {
  const float* x = a.logits + row * a.experts;
  int32_t* chosen = a.chosen + row * a.k;
  float* weights = a.weights + row * a.k;
  find_largest(x, a.experts, a.k, chosen);
  const float peak = x[chosen[0]];
  for (int64_t j = 0; j < a.k; j++) weights[j] = x[chosen[j]];
  float sum = exponentials(weights, a.k, peak, weights);
  if (!a.normalize) sum = exponentials(x, a.experts, peak, nullptr);
  for (int64_t j = 0; j < a.k; j++) weights[j] = weights[j] / sum;
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

// What a task of attention is made of: the ways to take a span, how spans are joined, and how rows end.
#pragma once

#include "attention_flow.h"
#include "linear.h"
#include "span.h"

namespace penstock::PENSTOCK_ISA {

// A task of more rows reads keys and values less often; but there should be so many for each thread.
constexpr int64_t kTasks = 8;
constexpr int64_t kParallelWork = 128 * 1024;  // below it, a second thread costs more than it saves

// Join what rows have of a span into what they had of those before.
static inline void join(const Part& total, const Part& span, int64_t rows, int64_t padded_dim) {
  for (int64_t first = 0; first < rows; first += 16) {
    const F16 a = load(total.top + first), b = load(span.top + first), top = max(a, b), none = set1(-__FLT_MAX__);
    const F16 keep = exp(a - top), add = exp(b - top), sum = load(total.sum + first), more = load(span.sum + first);
    float keeps[16], adds[16], had[16];
    store(keeps, keep);
    store(adds, add);
    store(had, a);
    store(total.top + first, where_less(b, none, a, top));
    store(total.sum + first,
          where_less(b, none, sum, where_less(a, none, more, fma(more, add, sum * keep))));
    for (int64_t i = 0; i < 16 && first + i < rows; i++) {
      const int64_t r = first + i;
      if (span.top[r] == kMinusInfinity) continue;
      float* to = total.values + r * padded_dim;
      const float* from = span.values + r * padded_dim;
      if (had[i] == kMinusInfinity)
        __builtin_memcpy(to, from, static_cast<size_t>(padded_dim) * sizeof(float));
      else
        for (int64_t j = 0; j < padded_dim; j += 16)
          store(to + j, fma(load(from + j), set1(adds[i]), load(to + j) * set1(keeps[i])));
    }
  }
}

// Divide by the sum, let the sink take its part, and store the row.
template <typename T>
void finish_row(const AttentionArgs& a, int64_t token, int64_t head, float top, float sum,
                float* values) {
  if (top == kMinusInfinity) {  // all scores are −∞
    sum = 0.0f;
    __builtin_memset(values, 0, static_cast<size_t>(a.padded_values) * sizeof(float));
  }
  F16 scale = set1(1.0f);
  if (a.sinks) {
    const float sink = a.sinks[head];
    const float highest = top > sink ? top : sink;
    float lanes[16];
    scale = exp(set1(top - highest));
    store(lanes, set1(sum) * scale + exp(set1(sink - highest)));
    sum = lanes[0];
  }
  const F16 share = scale / set1(sum);
  T* out = static_cast<T*>(a.out) + (token - a.first_token) * a.out_stride + head * a.value_dim;
  for (int64_t j = 0; j < a.value_dim; j += 16)
    store_some(out + j, load(values + j) * share,
               a.value_dim - j < 16 ? static_cast<int>(a.value_dim - j) : 16);
}

template <typename T>
void finish(const AttentionArgs& a, const Task& t, int64_t group, const Part& total) {
  int64_t token = a.query_start[t.sequence] + t.first_row / group, head = t.first_row % group;
  for (int64_t r = 0; r < t.rows; r++) {
    finish_row<T>(a, token, t.kv_head * group + head, total.top[r], total.sum[r],
                  total.values + r * a.padded_values);
    if (++head == group) {
      head = 0;
      token++;
    }
  }
}

// Multiplications by keys, about.
static inline int64_t work(const AttentionArgs& a) {
  int64_t pairs = 0;
  for (int64_t b = 0; b < a.sequences; b++)
    pairs += static_cast<int64_t>(a.query_start[b + 1] - a.query_start[b]) * a.context_len[b];
  return pairs * a.heads * a.padded_dim;
}

// Whether tasks of many rows flow.
template <typename T>
bool flows(const AttentionArgs& a) {
  return by_tiles<T>(a) && !a.recent.slots && !a.latent;
}

// Of a task. By vectors all rows pass over whatever one of them sees: those of few positions do, beside
// what a window leaves of them; and more rows are worth it only where they take panels once.
template <typename T>
int64_t most_rows(const AttentionArgs& a) {
  if (flows<T>(a)) return kMostRows;
  if (by_tiles<T>(a) || !take_once<RowOf<T>>(kMostRows)) return kSpanRows;
  const int64_t near = a.window > 0 && a.window / 16 < kGroup ? a.window / 16 : kGroup;
  int64_t rows = kMostRows;
  while (rows > kSpanRows && rows > near * (a.heads / a.kv_heads)) rows /= 2;
  return rows;
}

// body(what does a task). Few rows, that wait for memory, take it span by span.
template <typename T, typename S, typename Body>
void with_work(const AttentionArgs& a, const Task& t, int64_t group, Body body) {
#if defined(PENSTOCK_TILES)
  if constexpr (sizeof(T) == 2)
    if (flows<T>(a) && t.rows > kTileRows) {
      Flow<S> work(a, t, group);
      return body(work);
    }
#endif
  SpanWork<T, S> work(a, t, group);
  body(work);
}

// body<T, S>(), where T is multiplied and S is what the cache holds.
template <typename Body>
void with_types(const AttentionArgs& a, Body&& body) {
  if (a.dtype == DType::f32) return body.template operator()<float, float>();
  switch (a.stored) {
    case Stored::same:
      return body.template operator()<bf16, bf16>();
    case Stored::int8:
      return body.template operator()<bf16, int8_t>();
    case Stored::fp8:
      return body.template operator()<bf16, fp8>();
    case Stored::int4:
      return body.template operator()<bf16, nibbles>();
  }
}

}  // namespace penstock::PENSTOCK_ISA

// Attention over paged panels of keys and values, in fixed spans of 256 positions.
//
// A task is up to 32 query rows (token, head) of one sequence that share a key-value head. Scores
// are x · key panels and the output is weights · value panels: the inner loop of `linear`. A span
// gives (maximum, sum, weighted values) on its own; spans are joined in order. When there are too
// few tasks to keep the threads busy, the spans of one task go to different threads; the order of
// additions stays the same. Keys and values of one byte or less are widened to bfloat16, 32 positions
// at a time, where they are multiplied; the scales of int8 go into the scores and the weights, those
// of int4 into what is widened.
#include "linear.h"
#include "span.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int64_t kParallelWork = 128 * 1024;  // below it, a second thread costs more than it saves

// Join a span's partial into the running one.
void join(float* total, const float* span, int64_t padded_dim) {
  if (span[0] == kMinusInfinity) return;
  if (total[0] == kMinusInfinity) {
    __builtin_memcpy(total, span, static_cast<size_t>(2 + padded_dim) * sizeof(float));
    return;
  }
  const float highest = total[0] > span[0] ? total[0] : span[0];
  const F16 keep = exp(set1(total[0] - highest)), add = exp(set1(span[0] - highest));
  float lanes[16];
  store(lanes, set1(total[1]) * keep + set1(span[1]) * add);
  total[0] = highest;
  total[1] = lanes[0];
  for (int64_t j = 2; j < 2 + padded_dim; j += 16)
    store(total + j, load(total + j) * keep + load(span + j) * add);
}

// Divide by the sum, let the sink take its part, and store the row.
template <typename T>
void finish(const AttentionArgs& a, const Task& t, int64_t group, int64_t r, float* total) {
  const int64_t row = t.first_row + r;
  const int64_t head = t.kv_head * group + row % group;
  if (total[0] == kMinusInfinity)  // no span was joined: all scores are −∞
    __builtin_memset(total + 1, 0, static_cast<size_t>(1 + a.padded_dim) * sizeof(float));
  float sum = total[1];
  F16 scale = set1(1.0f);
  if (a.sinks) {
    const float sink = a.sinks[head];
    const float highest = total[0] > sink ? total[0] : sink;
    float lanes[16];
    scale = exp(set1(total[0] - highest));
    store(lanes, set1(sum) * scale + exp(set1(sink - highest)));
    sum = lanes[0];
  }
  T* out = static_cast<T*>(a.out) +
           ((a.query_start[t.sequence] + row / group) * a.heads + head) * a.dim;
  for (int64_t j = 0; j < a.dim; j += 16)
    store_some(out + j, load(total + 2 + j) * scale / set1(sum),
               a.dim - j < 16 ? static_cast<int>(a.dim - j) : 16);
}

// Fills `tasks` where given; returns their number, and how many partials all spans need.
int64_t list_tasks(const AttentionArgs& a, int64_t group, Task* tasks, int64_t& partials) {
  int64_t count = 0;
  partials = 0;
  for (int64_t b = 0; b < a.sequences; b++) {
    const int64_t rows = (a.query_start[b + 1] - a.query_start[b]) * group;
    for (int64_t h = 0; h < a.kv_heads; h++)
      for (int64_t first = 0; first < rows; first += kRows) {
        Task t = {b, h, first, rows - first < kRows ? rows - first : kRows, 0, 0, partials};
        t.first_span = visible(a, t, group, first).first / kSpan;
        t.last_span = (visible(a, t, group, first + t.rows - 1).last + kSpan - 1) / kSpan;
        partials += (t.last_span - t.first_span) * kRows;
        if (tasks) tasks[count] = t;
        count++;
      }
  }
  return count;
}

// Multiplications by keys, about.
int64_t work(const AttentionArgs& a) {
  int64_t pairs = 0;
  for (int64_t b = 0; b < a.sequences; b++)
    pairs += static_cast<int64_t>(a.query_start[b + 1] - a.query_start[b]) * a.context_len[b];
  return pairs * a.heads * a.padded_dim;
}

// next: the task that this thread is likely to do then, or null.
template <typename T, typename S>
void run_task(const AttentionArgs& a, const Task& t, const Task* next, const Shape& shape) {
  const size_t floats = static_cast<size_t>(kRows * shape.partial);
  float* total =
      static_cast<float*>(scratch(Scratch::partials, 2 * floats * sizeof(float)));
  float* one = total + floats;
  SpanWork<T, S> work(a, t, shape);
  for (int64_t r = 0; r < t.rows; r++) total[r * shape.partial] = kMinusInfinity;
  for (int64_t span = t.first_span; span < t.last_span; span++) {
    const bool last = span + 1 == t.last_span;
    work.run(span, last ? Place{next, next ? next->first_span : 0} : Place{&t, span + 1}, one);
    for (int64_t r = 0; r < t.rows; r++)
      join(total + r * shape.partial, one + r * shape.partial, a.padded_dim);
  }
  for (int64_t r = 0; r < t.rows; r++) finish<T>(a, t, shape.group, r, total + r * shape.partial);
}

template <typename T, typename S>
void run_spans(const AttentionArgs& a, const Task* tasks, int64_t count, int64_t rows,
               const Shape& shape, int threads) {
  float* partials = static_cast<float*>(
      scratch(Scratch::scores, static_cast<size_t>(rows * shape.partial) * sizeof(float)));
  // spans of all tasks in one row, so that they can be dealt
  const int64_t spans = rows / kRows;
  const auto place = [&](int64_t i) {
    if (i >= spans) return Place{};
    const Task* t = tasks;
    while (t + 1 < tasks + count && t[1].partial <= i * kRows) t++;
    return Place{t, t->first_span + i - t->partial / kRows};
  };
  parallel(threads, spans, [&](int64_t i) {
    const FlushDenormals flush;
    const TileSetup tiles;
    const Place now = place(i);
    SpanWork<T, S> work(a, *now.task, shape);
    work.run(now.span, place(i + threads), partials + i * kRows * shape.partial);
  });
  parallel(threads, count, [&](int64_t i) {
    const FlushDenormals flush;
    const Task& t = tasks[i];
    float* total = static_cast<float*>(
        scratch(Scratch::partials, static_cast<size_t>(shape.partial) * sizeof(float)));
    for (int64_t r = 0; r < t.rows; r++) {
      total[0] = kMinusInfinity;
      for (int64_t span = 0; span < t.last_span - t.first_span; span++)
        join(total, partials + (t.partial + span * kRows + r) * shape.partial, a.padded_dim);
      finish<T>(a, t, shape.group, r, total);
    }
  });
}

template <typename T, typename S>
void run(const AttentionArgs& a) {
  const Shape shape = {a.heads / a.kv_heads, (2 + a.padded_dim + 15) / 16 * 16};
  int64_t rows = 0;
  const int64_t count = list_tasks(a, shape.group, nullptr, rows);
  Task* tasks =
      static_cast<Task*>(scratch(Scratch::tasks, static_cast<size_t>(count) * sizeof(Task)));
  list_tasks(a, shape.group, tasks, rows);
  const bool single = rows == count * kRows;  // every task has one span
  const int threads = work(a) > kParallelWork ? a.threads : 1;
  if (count < 2 * threads && !single) return run_spans<T, S>(a, tasks, count, rows, shape, threads);
  parallel(threads, count, [&](int64_t i) {
    const FlushDenormals flush;
    const TileSetup tiles;
    // the last tasks of a chunk see the most: taken first, they even out the threads
    const Task* t = tasks + count - 1 - i;
    run_task<T, S>(a, *t, t - tasks >= threads ? t - threads : nullptr, shape);
  });
}

}  // namespace

void attention(const AttentionArgs& a) {
  if (a.dtype == DType::f32) return run<float, float>(a);
  switch (a.stored) {
    case Stored::same:
      return run<bf16, bf16>(a);
    case Stored::int8:
      return run<bf16, int8_t>(a);
    case Stored::fp8:
      return run<bf16, fp8>(a);
    case Stored::int4:
      return run<bf16, nibbles>(a);
  }
}

}  // namespace penstock::PENSTOCK_ISA

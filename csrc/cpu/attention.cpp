// Attention over paged panels of keys and values, in fixed spans of 256 positions.
//
// A task is up to 32 query rows (token, head) of one sequence that share a key-value head, or 128 where
// tiles multiply them. Scores are x · key panels and the output is weights · value panels: the inner
// loop of `linear`. A span gives (maximum, sum, weighted values) on its own; spans are joined in order,
// after what a sequence's first tokens give where queries of their own ask them.
// When there are too few tasks to keep the threads busy, the spans of one task go to different
// threads; the order of additions stays the same. Keys and values of one byte or less are widened to
// bfloat16, 32 positions at a time, where they are multiplied; the scales of int8 go into the scores
// and the weights, those of int4 into what is widened.
#include "attention_flow.h"
#include "linear.h"
#include "span.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// A task of more rows reads keys and values less often; but there should be so many for each thread.
constexpr int64_t kTasks = 8;
constexpr int64_t kParallelWork = 128 * 1024;  // below it, a second thread costs more than it saves

// Join what rows have of a span into what they had of those before.
void join(const Part& total, const Part& span, int64_t rows, int64_t padded_dim) {
  for (int64_t first = 0; first < rows; first += 16) {
    const F16 a = load(total.top + first), b = load(span.top + first), top = max(a, b);
    float highest[16], keeps[16], adds[16];
    store(highest, top);
    store(keeps, exp(a - top));
    store(adds, exp(b - top));
    for (int64_t i = 0; i < 16 && first + i < rows; i++) {
      const int64_t r = first + i;
      if (span.top[r] == kMinusInfinity) continue;
      float* to = total.values + r * padded_dim;
      const float* from = span.values + r * padded_dim;
      if (total.top[r] == kMinusInfinity) {
        total.top[r] = span.top[r];
        total.sum[r] = span.sum[r];
        __builtin_memcpy(to, from, static_cast<size_t>(padded_dim) * sizeof(float));
        continue;
      }
      const F16 keep = set1(keeps[i]), add = set1(adds[i]);
      total.top[r] = highest[i];
      total.sum[r] = total.sum[r] * keeps[i] + span.sum[r] * adds[i];
      for (int64_t j = 0; j < padded_dim; j += 16)
        store(to + j, load(to + j) * keep + load(from + j) * add);
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
  T* out = static_cast<T*>(a.out) + (token * a.heads + head) * a.value_dim;
  for (int64_t j = 0; j < a.value_dim; j += 16)
    store_some(out + j, load(values + j) * scale / set1(sum),
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

// Fills `tasks`, of up to `most` rows, where given; returns their number, and how many spans all have.
int64_t list_tasks(const AttentionArgs& a, int64_t group, int64_t most, Task* tasks,
                   int64_t& partials) {
  int64_t count = 0;
  partials = 0;
  for (int64_t b = 0; b < a.sequences; b++) {
    const int64_t tokens = a.query_start[b + 1] - a.query_start[b];
    const int64_t rows = tokens * group, start = a.context_len[b] - tokens;
    for (int64_t h = 0; h < a.kv_heads; h++)
      for (int64_t first = 0; first < rows; first += most) {
        Task t = {b, h, first, rows - first < most ? rows - first : most, 0, 0, partials, false};
        const int64_t last = start + (first + t.rows - 1) / group;
        t.first_span = visible(a, b, start + first / group).first / kSpan;
        t.last_span = (visible(a, b, last).last + kSpan - 1) / kSpan;
        t.at_sinks = a.sink_tokens > 0 && last >= a.sink_tokens + a.window;
        partials += t.parts();
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

// Whether tasks of many rows flow.
template <typename T>
bool flows(const AttentionArgs& a) {
  return kTiles && sizeof(T) == 2 && a.padded_dim % kGroup == 0 && !a.recent.slots && !a.latent;
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

// The same of the sinks.
AttentionArgs of_sinks(const AttentionArgs& a) {
  AttentionArgs found = a;
  found.at_sinks = true;
  return found;
}

// next: the task that this thread is likely to do then, or null.
template <typename T, typename S>
void run_task(const AttentionArgs& a, const Task& t, const Task* next, int64_t group) {
  const int64_t rows = whole_tiles(t.rows), floats = part_floats(rows, a.padded_values);
  float* memory = static_cast<float*>(
      scratch(Scratch::partials, static_cast<size_t>(2 * floats) * sizeof(float)));
  const Part total = Part::in(memory, rows), one = Part::in(memory + floats, rows);
  bool begun[kMostRows / kTileRows] = {};
  const auto of = [&](int64_t row) { return total.from(row, a.padded_values); };
  const auto where = [&](int64_t row) { return begun[row / kTileRows] ? one : of(row); };
  const auto done = [&](int64_t row, int64_t count) {
    bool& joins = begun[row / kTileRows];
    if (joins) join(of(row), one, count, a.padded_values);
    joins = true;
  };
  if (t.at_sinks)
    with_work<T, S>(of_sinks(a), t, group,
                    [&](auto& work) { work.run(0, 1, Place{&t, t.first_span}, where, done); });
  with_work<T, S>(a, t, group, [&](auto& work) {
    work.run(t.first_span, t.last_span, Place{next, next ? next->first_span : 0}, where, done);
  });
  finish<T>(a, t, group, total);
}

template <typename T, typename S>
void run_spans(const AttentionArgs& a, const Task* tasks, int64_t count, int64_t spans,
               int64_t group, int threads) {
  int64_t rows = 0;
  for (int64_t i = 0; i < count; i++) rows = tasks[i].rows > rows ? tasks[i].rows : rows;
  rows = whole_tiles(rows);
  const int64_t floats = part_floats(rows, a.padded_values);
  float* partials = static_cast<float*>(
      scratch(Scratch::scores, static_cast<size_t>(spans * floats) * sizeof(float)));
  // spans of all tasks in one row, so that they can be dealt
  const auto place = [&](int64_t i) {
    if (i >= spans) return Place{};
    const Task* t = tasks;
    while (t + 1 < tasks + count && t[1].partial <= i) t++;
    const int64_t part = i - t->partial;
    if (t->at_sinks && part == 0) return Place{t, 0, true};
    return Place{t, t->first_span + part - t->at_sinks};
  };
  parallel(threads, spans, [&](int64_t i) {
    const FlushDenormals flush;
    const TileSetup tiles;
    const Place now = place(i);
    const Part part = Part::in(partials + i * floats, rows);
    for (int64_t r = 0; r < rows; r++) part.top[r] = kMinusInfinity;  // of rows that see nothing
    const AttentionArgs args = now.at_sinks ? of_sinks(a) : a;
    with_work<T, S>(args, *now.task, group, [&](auto& work) {
      work.run(
          now.span, now.span + 1, place(i + threads),
          [&](int64_t row) { return part.from(row, a.padded_values); }, [](int64_t, int64_t) {});
    });
  });
  parallel(threads, count, [&](int64_t i) {
    const FlushDenormals flush;
    const Task& t = tasks[i];
    float* first = partials + t.partial * floats;
    const Part total = Part::in(first, rows);
    for (int64_t part = 1; part < t.parts(); part++)
      join(total, Part::in(first + part * floats, rows), t.rows, a.padded_values);
    finish<T>(a, t, group, total);
  });
}

template <typename T, typename S>
void run(const AttentionArgs& a) {
  const int64_t group = a.heads / a.kv_heads;
  int64_t most = flows<T>(a) ? kMostRows : kSpanRows, spans = 0;
  int64_t count = list_tasks(a, group, most, nullptr, spans);
  for (; most > kSpanRows && count < kTasks * a.threads; most /= 2)
    count = list_tasks(a, group, most / 2, nullptr, spans);
  Task* tasks =
      static_cast<Task*>(scratch(Scratch::tasks, static_cast<size_t>(count) * sizeof(Task)));
  list_tasks(a, group, most, tasks, spans);
  const bool single = spans == count;  // every task has one part
  const int threads = work(a) > kParallelWork ? a.threads : 1;
  if (count < 2 * threads && !single)
    return run_spans<T, S>(a, tasks, count, spans, group, threads);
  parallel(threads, count, [&](int64_t i) {
    const FlushDenormals flush;
    const TileSetup tiles;
    // the last tasks of a chunk see the most: taken first, they even out the threads
    const Task* t = tasks + count - 1 - i;
    run_task<T, S>(a, *t, t - tasks >= threads ? t - threads : nullptr, group);
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

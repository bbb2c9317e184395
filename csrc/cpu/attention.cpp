// Attention over paged panels of keys and values, in fixed spans of 256 positions.
//
// A task is up to 128 query rows (token, head) of one sequence that share a key-value head (most_rows), fewer
// where there would be too few tasks. Scores are x · key panels and the output is weights · value panels: the inner
// loop of `linear`. A span gives (maximum, sum, weighted values) on its own; spans are joined in order,
// after what a sequence's first tokens give where queries of their own ask them.
// When there are too few tasks to keep the threads busy, the spans of one task go to different
// threads; the order of additions stays the same. Keys and values of one byte or less are widened to
// bfloat16, 32 positions at a time, where they are multiplied; the scales of int8 go into the scores
// and the weights, those of int4 into what is widened.
#include "attention_tasks.h"

namespace penstock::PENSTOCK_ISA {
namespace {

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
    const Place now = place(i);
    const TileSetup tiles(now.task->rows);
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
  int64_t most = most_rows<T>(a), spans = 0;
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
    // the last tasks of a chunk see the most: taken first, they even out the threads
    const Task* t = tasks + count - 1 - i;
    const TileSetup tiles(t->rows);
    run_task<T, S>(a, *t, t - tasks >= threads ? t - threads : nullptr, group);
  });
}

}  // namespace

void attention(const AttentionArgs& a) {
  with_types(a, [&]<typename T, typename S>() { run<T, S>(a); });
}

}  // namespace penstock::PENSTOCK_ISA

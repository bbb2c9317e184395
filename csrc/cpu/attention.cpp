// Attention over paged panels of keys and values, in fixed spans of 256 positions.
//
// A task is up to 32 query rows (token, head) of one sequence that share a key-value head. Scores
// are x · key panels and the output is weights · value panels: the inner loop of `linear`. A span
// gives (maximum, sum, weighted values) on its own; spans are joined in order. When there are too
// few tasks to keep the threads busy, the spans of one task go to different threads; the order of
// additions stays the same. Keys and values of one byte are widened to bfloat16, 32 positions at a
// time, where they are multiplied; the scales of int8 go into the scores and the weights.
#include "linear.h"
#include "panels.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int64_t kSpan = 256;
constexpr int64_t kRows = 32;
constexpr int64_t kGroup = 32;  // positions whose weighted values are summed apart (= kBlock)
constexpr int64_t kParallelWork = 128 * 1024;  // below it, a second thread costs more than it saves
constexpr float kMinusInfinity = -__builtin_inff();

struct Task {
  int64_t sequence, kv_head;
  int64_t first_row, rows;  // of the sequence's tokens · group rows
  int64_t first_span, last_span;
  int64_t partial;  // where its spans' results start, when they are stored
};

struct Shape {
  int64_t group;    // query heads per key-value head
  int64_t partial;  // floats of one row's result in one span: maximum, sum, weighted values
};

struct Visible {
  int64_t first, last;  // positions [first, last)
};

// What row `row` of a sequence sees.
static Visible visible(const AttentionArgs& a, const Task& t, int64_t group, int64_t row) {
  const int64_t tokens = a.query_start[t.sequence + 1] - a.query_start[t.sequence];
  const int64_t at = a.context_len[t.sequence] - tokens + row / group;
  const int64_t first = a.window > 0 && at + 1 > a.window ? at + 1 - a.window : 0;
  return {first, at + 1};
}

// T: what is multiplied; S: what the cache holds.
template <typename T, typename S>
class SpanWork {
 public:
  SpanWork(const AttentionArgs& a, const Task& t, const Shape& shape)
      : a_(a), t_(t), shape_(shape), head_size_(a.block_size * a.padded_dim) {
    float* memory = static_cast<float*>(
        scratch(Scratch::rows, static_cast<size_t>(kRows * (a.padded_dim + kSpan) +
                                                   kGroup * a.padded_dim) *
                                   sizeof(float)));
    query_ = memory;
    weight_ = query_ + kRows * a.padded_dim;
    group_ = reinterpret_cast<T*>(weight_ + kRows * kSpan);
    const int64_t start = a.query_start[t.sequence];
    for (int64_t r = 0; r < t.rows; r++) {
      const int64_t row = t.first_row + r;
      const int64_t head = t.kv_head * shape.group + row % shape.group;
      const T* q = static_cast<const T*>(a.q) +
                   ((start + row / shape.group) * a.heads + head) * a.dim;
      float* out = query_ + r * a.padded_dim;
      for (int64_t j = 0; j < a.padded_dim; j++) out[j] = j < a.dim ? to_float(q[j]) : 0.0f;
      seen_[r] = visible(a, t, shape.group, row);
    }
  }

  // The span's partial of every row, `out` floats apart by shape.partial.
  void run(int64_t span, float* out) {
    // rows are in order of position: the first sees the earliest start, the last the latest end
    Visible any = {seen_[0].first, seen_[t_.rows - 1].last};
    const int64_t low = span * kSpan;
    if (any.first < low) any.first = low;
    if (any.last > low + kSpan) any.last = low + kSpan;
    const int64_t first = any.first / kGroup * kGroup;
    const int64_t last = (any.last + kGroup - 1) / kGroup * kGroup;
    scores(low, first, last);
    for (int64_t r = 0; r < t_.rows; r++) soften(r, low, first, last, out + r * shape_.partial);
    weigh(low, first, last, out);
  }

 private:
  static constexpr bool kWiden = sizeof(S) != sizeof(T);

  // The block of this head that holds `position`.
  int64_t block(int64_t position) const {
    const int64_t index = a_.block_table[t_.sequence * a_.table_stride + position / a_.block_size];
    return index * a_.kv_heads + t_.kv_head;
  }
  const S* block(const void* cache, int64_t position) const {
    return static_cast<const S*>(cache) + block(position) * head_size_;
  }
  // The float16 scales of the 16 positions from `position` on.
  F16 scales(const uint16_t* scale, int64_t position) const {
    return load_half(scale + block(position) * a_.block_size + position % a_.block_size);
  }

  static void widen(const S* from, int64_t count, T* to) {
    if constexpr (kWiden)
      for (int64_t j = 0; j < count; j += 16) store_exact(to + j, load(from + j));
  }

  // weight_[r][position − low] = q · k for positions [first, last)
  void scores(int64_t low, int64_t first, int64_t last) {
    const int64_t panel = a_.padded_dim * kColumns;
    for (int64_t position = first; position < last;) {
      const int64_t offset = position % a_.block_size;
      int64_t count = a_.block_size - offset;
      if (count > last - position) count = last - position;
      if (kWiden && count > kGroup) count = kGroup;
      const S* stored = block(a_.key_cache, position) + offset / kColumns * panel;
      const T* keys = group_;
      if constexpr (kWiden)
        widen(stored, count * a_.padded_dim, group_);
      else
        keys = stored;
      float* out = weight_ + (position - low);
      multiply_panels(
          query_, a_.padded_dim, t_.rows, keys, panel, count / kColumns, a_.padded_dim,
          [](int64_t, int64_t) { return zero(); },
          [&](int64_t r, int64_t p, F16 value) { store(out + r * kSpan + p * kColumns, value); });
      position += count;
    }
  }

  // Scores of one row → weights, their maximum and sum; what isn't visible becomes 0.
  void soften(int64_t r, int64_t low, int64_t first, int64_t last, float* out) {
    float* row = weight_ + r * kSpan;
    const int64_t from = seen_[r].first - low, to = seen_[r].last - low;
    F16 top = set1(kMinusInfinity);
    for (int64_t j = first - low; j < last - low; j += kColumns) {
      F16 s = load(row + j);
      if (a_.key_scale) s = s * scales(a_.key_scale, low + j);
      s = s * set1(a_.scale);
      if (a_.softcap > 0.0f) s = set1(a_.softcap) * tanh(s / set1(a_.softcap));
      if (to - j < kColumns) s = keep_first(s, clip(to - j), kMinusInfinity);
      if (from > j) s = drop_first(s, from - j < kColumns ? static_cast<int>(from - j) : kColumns);
      store(row + j, s);
      top = max(top, s);
    }
    const float highest = reduce_max(top);
    F16 sum = zero();
    for (int64_t j = first - low; j < last - low; j += kColumns) {
      F16 p = zero();
      if (highest != kMinusInfinity) p = exp(load(row + j) - set1(highest));
      sum = sum + p;
      if (a_.value_scale)  // beyond the last position a scale may be anything
        p = keep_first(p * scales(a_.value_scale, low + j), clip(to - j), 0.0f);
      store(row + j, round_to<T>(p));
    }
    out[0] = highest;
    out[1] = reduce_add(sum);
  }

  static int clip(int64_t count) {
    return count < 0 ? 0 : count > kColumns ? kColumns : static_cast<int>(count);
  }

  static F16 drop_first(F16 s, int count) {
    float lanes[16];
    store(lanes, s);
    for (int i = 0; i < count; i++) lanes[i] = kMinusInfinity;
    return load(lanes);
  }

  // out value[r] = weights · values, one group of 32 positions after another
  void weigh(int64_t low, int64_t first, int64_t last, float* out) {
    const int64_t panels = a_.padded_dim / kColumns;
    const int64_t end = a_.context_len[t_.sequence];
    for (int64_t position = first; position < last; position += kGroup) {
      const S* stored = block(a_.value_cache, position) + position % a_.block_size * kColumns;
      int64_t stride = a_.block_size * kColumns;
      const T* values = group_;
      if constexpr (kWiden) {
        for (int64_t p = 0; p < panels; p++)
          widen(stored + p * stride, kGroup * kColumns, group_ + p * kGroup * kColumns);
        stride = kGroup * kColumns;
      } else {
        values = stored;
      }
      if (position + kGroup > end) {  // what lies beyond was written by others, or never
        values = tail(values, stride, end - position);
        stride = kGroup * kColumns;
      }
      const bool fresh = position == first;
      multiply_panels(
          weight_ + (position - low), kSpan, t_.rows, values, stride, panels, kGroup,
          [&](int64_t r, int64_t p) {
            return fresh ? zero() : load(out + r * shape_.partial + 2 + p * kColumns);
          },
          [&](int64_t r, int64_t p, F16 value) {
            store(out + r * shape_.partial + 2 + p * kColumns, value);
          });
    }
  }

  // A copy of a group's value panels with zeros from position `count` on.
  const T* tail(const T* values, int64_t stride, int64_t count) {
    constexpr int64_t v = kVnni<T>, line = kColumns * v;
    for (int64_t p = 0; p < a_.padded_dim / kColumns; p++) {
      const T* from = values + p * stride;
      T* to = group_ + p * kGroup * kColumns;
      const int64_t whole = count / v * line;
      if (to != from) __builtin_memcpy(to, from, static_cast<size_t>(whole) * sizeof(T));
      for (int64_t j = whole; j < kGroup * kColumns; j++)
        to[j] = j < whole + line && j % v < count % v ? from[j] : T{};
    }
    return group_;
  }

  const AttentionArgs& a_;
  const Task& t_;
  const Shape& shape_;
  int64_t head_size_;
  float* query_;
  float* weight_;
  T* group_;  // 32 positions, widened or with their end cut off
  Visible seen_[kRows];
};

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
    pairs += (a.query_start[b + 1] - a.query_start[b]) * a.context_len[b];
  return pairs * a.heads * a.padded_dim;
}

template <typename T, typename S>
void run_task(const AttentionArgs& a, const Task& t, const Shape& shape) {
  const size_t floats = static_cast<size_t>(kRows * shape.partial);
  float* total =
      static_cast<float*>(scratch(Scratch::partials, 2 * floats * sizeof(float)));
  float* one = total + floats;
  SpanWork<T, S> work(a, t, shape);
  for (int64_t r = 0; r < t.rows; r++) total[r * shape.partial] = kMinusInfinity;
  for (int64_t span = t.first_span; span < t.last_span; span++) {
    work.run(span, one);
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
#pragma omp parallel num_threads(threads)
  {
    const FlushDenormals flush;
    for (int64_t i = 0; i < count; i++) {
      const Task& t = tasks[i];
#pragma omp for schedule(dynamic, 1) nowait
      for (int64_t span = t.first_span; span < t.last_span; span++) {
        SpanWork<T, S> work(a, t, shape);
        work.run(span, partials + (t.partial + (span - t.first_span) * kRows) * shape.partial);
      }
    }
#pragma omp barrier
#pragma omp for schedule(static)
    for (int64_t i = 0; i < count; i++) {
      const Task& t = tasks[i];
      float* total = static_cast<float*>(
          scratch(Scratch::partials, static_cast<size_t>(shape.partial) * sizeof(float)));
      for (int64_t r = 0; r < t.rows; r++) {
        total[0] = kMinusInfinity;
        for (int64_t span = 0; span < t.last_span - t.first_span; span++)
          join(total, partials + (t.partial + span * kRows + r) * shape.partial, a.padded_dim);
        finish<T>(a, t, shape.group, r, total);
      }
    }
  }
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
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t i = 0; i < count; i++) {
    const FlushDenormals flush;
    // the last tasks of a chunk see the most: taken first, they even out the threads
    run_task<T, S>(a, tasks[count - 1 - i], shape);
  }
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
  }
}

}  // namespace penstock::PENSTOCK_ISA

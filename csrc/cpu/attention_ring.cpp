// Attention where ranks have some spans each of every sequence's keys and values: ops/ring.py.
//
// Span s of a sequence lies in rank s % ranks, in the block that entry s / ranks of its table names.
// Each rank computes some rows. A sequence with few of them asks all ranks: each gives what all its rows
// have of its own spans (`ask`). Those with more have the keys and values of all ranks pass by, as many
// spans at once as have room in a meeting's place, and what rows have of the spans before is carried
// along (`pass`). A span's part is computed by the same code either way, and as one process does; parts
// are joined in the order of spans. So nobody's bits depend on which way was taken.
#include "attention_tasks.h"
#include "ring.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// The queries of a sequence that a rank computes: from `first` to `last`, counted in the sequence.
struct Queries {
  int64_t first, last;
};

Queries queries_of(const RingArgs& r, int64_t b, int rank) {
  const int64_t start = r.attention.query_start[b], end = r.attention.query_start[b + 1];
  const auto inside = [&](int64_t row) { return (row < start ? start : row > end ? end : row) - start; };
  return {inside(r.rows[rank]), inside(r.rows[rank + 1])};
}

// Bytes of a span's keys, values and scales, of all heads: a block of each.
struct Record {
  int64_t keys, values, key_scales, value_scales;

  template <typename T, typename S>
  static Record of(const AttentionArgs& a) {
    using Cache = CacheWork<T, S>;
    const int64_t tokens = a.kv_heads * a.block_size;
    const int64_t codes = tokens * a.padded_dim / Cache::kPerItem * static_cast<int64_t>(sizeof(S));
    const int64_t groups = (a.padded_dim + kCacheGroup - 1) / kCacheGroup;
    const int64_t scales = Cache::kNibbles ? 4 * groups * tokens : Cache::kScaled ? 2 * tokens : 0;
    return {codes, a.latent ? 0 : codes, scales, scales};
  }
  static int64_t lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }
  int64_t bytes() const {
    return lines(keys) + lines(values) + lines(key_scales) + lines(value_scales);
  }
};

// Whether what rows have of a span is fewer bytes than its keys and values. Of latents, which all heads
// share, it hardly ever is, and their queries stay where they are.
bool few(const AttentionArgs& a, int64_t b, const Record& record) {
  const int64_t tokens = a.query_start[b + 1] - a.query_start[b];
  if (a.latent) return tokens == 0;
  return tokens * a.heads * part_floats(1, a.padded_values) * 4 <= record.bytes();
}

// body(task, owner) for the rows of a sequence, in tasks of up to `most` that one rank has.
template <typename Body>
void each_task(const RingArgs& r, int64_t b, int64_t group, int64_t most, Body body) {
  const AttentionArgs& a = r.attention;
  const int64_t start = a.context_len[b] - (a.query_start[b + 1] - a.query_start[b]);
  for (int rank = 0; rank < r.at.size; rank++) {
    const Queries own = queries_of(r, b, rank);
    const int64_t end = own.last * group;
    for (int64_t h = 0; h < a.kv_heads; h++)
      for (int64_t first = own.first * group; first < end; first += most) {
        Task t = {b, h, first, end - first < most ? end - first : most, 0, 0, 0, false};
        t.first_span = visible(a, b, start + first / group).first / kSpan;
        const int64_t last = start + (first + t.rows - 1) / group;
        t.last_span = (visible(a, b, last).last + kSpan - 1) / kSpan;
        body(t, rank);
      }
  }
}

// Rows that ask all ranks.
struct Asking {
  Task task;
  int owner;
  int64_t at;      // floats before its parts
  int64_t before;  // parts of this rank before its own
};

// A rank's first span from `first` on.
int64_t own_span(const Meeting& at, int64_t first) {
  return first + ((at.rank - first) % at.size + at.size) % at.size;
}

int64_t own_parts(const Meeting& at, const Task& t) {
  const int64_t first = own_span(at, t.first_span);
  return first < t.last_span ? (t.last_span - 1 - first) / at.size + 1 : 0;
}

// Of some that have room together: each rank's spans, a meeting, then the owners' rows.
template <typename T, typename S>
void ask_round(const RingArgs& r, int64_t group, Asking* asking, int64_t count, int threads) {
  const AttentionArgs& a = r.attention;
  float* memory = reinterpret_cast<float*>(place(r.at));
  int64_t parts = 0;
  for (int64_t i = 0; i < count; i++) {
    asking[i].before = parts;
    parts += own_parts(r.at, asking[i].task);
  }
  const auto find = [&](int64_t part) {  // the last that begins no later
    int64_t low = 0, high = count;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (asking[middle].before <= part ? low : high) = middle;
    }
    return asking + low;
  };
  const auto place_of = [&](int64_t part) {
    if (part >= parts) return Place{};
    const Asking* found = find(part);
    const int64_t first = own_span(r.at, found->task.first_span);
    return Place{&found->task, first + (part - found->before) * r.at.size};
  };
  parallel(threads, parts, [&](int64_t i) {
    const FlushDenormals flush;
    const Asking& it = *find(i);
    const TileSetup tiles(it.task.rows);
    const Place now = place_of(i);
    const int64_t rows = whole_tiles(it.task.rows), floats = part_floats(rows, a.padded_values);
    const Part part = Part::in(memory + it.at + (now.span - it.task.first_span) * floats, rows);
    for (int64_t row = 0; row < rows; row++) part.top[row] = kMinusInfinity;  // of those that see nothing
    with_work<T, S>(a, it.task, group, [&](auto& work) {
      work.run(
          now.span, now.span + 1, place_of(i + threads),
          [&](int64_t row) { return part.from(row, a.padded_values); }, [](int64_t, int64_t) {});
    });
  });
  meet(r.at);
  parallel(threads, count, [&](int64_t i) {
    const Asking& it = asking[i];
    if (it.owner != r.at.rank) return;
    const FlushDenormals flush;
    const int64_t rows = whole_tiles(it.task.rows), floats = part_floats(rows, a.padded_values);
    const Part total = Part::in(memory + it.at, rows);
    for (int64_t part = 1; part < it.task.parts(); part++)
      join(total, Part::in(memory + it.at + part * floats, rows), it.task.rows, a.padded_values);
    finish<T>(a, it.task, group, total);
  });
}

template <typename T, typename S>
void ask(const RingArgs& r, int64_t group, const Record& record, int threads) {
  const AttentionArgs& a = r.attention;
  const auto each = [&](auto body) {
    for (int64_t b = 0; b < a.sequences; b++)
      if (few(a, b, record)) each_task(r, b, group, kSpanRows, body);
  };
  int64_t count = 0, last = 0;
  each([&](const Task&, int) { count++; });
  auto* asking = static_cast<Asking*>(
      scratch(Scratch::tasks, static_cast<size_t>(count) * sizeof(Asking)));
  each([&](const Task& t, int owner) { asking[last++] = {t, owner, 0, 0}; });
  const int64_t most = r.at.place_bytes / 4;
  for (int64_t first = 0; first < count; first = last) {
    int64_t floats = 0;
    for (last = first; last < count; last++) {
      const Task& t = asking[last].task;
      const int64_t need = t.parts() * part_floats(whole_tiles(t.rows), a.padded_values);
      if (last > first && floats + need > most) break;
      asking[last].at = floats;
      floats += need;
    }
    ask_round<T, S>(r, group, asking + first, last - first, threads);
  }
}

// A span that passes by.
struct Passing {
  int64_t sequence, span;
};

// This rank's rows that spans pass by.
struct Waiting {
  Task task;
  int64_t at;  // floats of the others' before its own, where it has to carry something
};

// Puts this rank's spans among those of a round where all read them.
void put_spans(const RingArgs& r, const Record& record, const Passing* passing, int64_t count,
               int threads) {
  const AttentionArgs& a = r.attention;
  char* memory = place(r.at);
  parallel(threads, count, [&](int64_t i) {
    if (passing[i].span % r.at.size != r.at.rank) return;
    const int64_t block =
        a.block_table[passing[i].sequence * a.table_stride + passing[i].span / r.at.size];
    char* to = memory + i * record.bytes();
    const auto put = [&](const void* from, int64_t pitch, int64_t bytes) {
      if (bytes > 0)
        __builtin_memcpy(to, static_cast<const char*>(from) + block * pitch,
                         static_cast<size_t>(bytes));
      to += Record::lines(bytes);
    };
    put(a.key_cache, a.pitch, record.keys);
    put(a.value_cache, a.pitch, record.values);
    put(a.key_scale.data, a.key_scale.pitch * 2, record.key_scales);
    put(a.value_scale.data, a.value_scale.pitch * 2, record.value_scales);
  });
}

// Attention over what was put there; `table` names the records of each sequence's spans.
AttentionArgs over_records(const RingArgs& r, const Record& record, char* memory,
                           const int32_t* table, int64_t width) {
  AttentionArgs a = r.attention;
  a.key_cache = memory;
  a.value_cache = memory + Record::lines(record.keys);
  a.pitch = record.bytes();
  char* scales = memory + Record::lines(record.keys) + Record::lines(record.values);
  a.key_scale = {reinterpret_cast<uint16_t*>(scales), record.bytes() / 2};
  a.value_scale = {reinterpret_cast<uint16_t*>(scales + Record::lines(record.key_scales)),
                   record.bytes() / 2};
  a.block_table = table;
  a.table_stride = width;
  a.table_tokens = a.block_size;
  return a;
}

// Spans [first, last) of those that pass by, for a task; carried: what it has of those before.
template <typename T, typename S>
void pass_task(const AttentionArgs& a, const Task& t, float* carried, int64_t first, int64_t last,
               const Place& next, int64_t group) {
  const int64_t rows = whole_tiles(t.rows), floats = part_floats(rows, a.padded_values);
  float* memory = static_cast<float*>(
      scratch(Scratch::partials, static_cast<size_t>(2 * floats) * sizeof(float)));
  const bool begins = t.first_span >= first, ends = t.last_span <= last;
  const Part total = Part::in(begins && ends ? memory + floats : carried, rows);
  const Part one = Part::in(memory, rows);
  if (begins)
    for (int64_t row = 0; row < rows; row++) total.top[row] = kMinusInfinity;
  with_work<T, S>(a, t, group, [&](auto& work) {
    work.run(
        begins ? t.first_span : first, ends ? t.last_span : last, next,
        [&](int64_t) { return one; },
        [&](int64_t row, int64_t count) {
          join(total.from(row, a.padded_values), one, count, a.padded_values);
        });
  });
  if (ends) finish<T>(a, t, group, total);
}

// Lists this rank's rows of the sequences that aren't few, in tasks of up to `most`; returns how many.
int64_t list_waiting(const RingArgs& r, int64_t group, const Record& record, int64_t most,
                     Waiting* waiting, int64_t& floats) {
  const AttentionArgs& a = r.attention;
  int64_t count = 0;
  floats = 0;
  for (int64_t b = 0; b < a.sequences; b++) {
    if (few(a, b, record)) continue;
    each_task(r, b, group, most, [&](const Task& t, int owner) {
      if (owner != r.at.rank) return;
      if (waiting) waiting[count] = {t, floats};
      floats += part_floats(whole_tiles(t.rows), a.padded_values);
      count++;
    });
  }
  return count;
}

// The next spans that have room together, from where the last ones ended. Returns their number.
struct Cursor {
  int64_t sequence = 0, span = -1;  // −1: the first that is seen

  int64_t take(const RingArgs& r, const Record& record, int64_t most, Passing* passing,
               int32_t* table, int64_t width) {
    const AttentionArgs& a = r.attention;
    int64_t count = 0;
    for (; sequence < a.sequences; sequence++, span = -1) {
      if (few(a, sequence, record)) continue;
      const int64_t tokens = a.query_start[sequence + 1] - a.query_start[sequence];
      const int64_t length = a.context_len[sequence], last = (length + kSpan - 1) / kSpan;
      if (span < 0) span = visible(a, sequence, length - tokens).first / kSpan;
      for (; span < last; span++) {
        if (count == most) return count;
        table[sequence * width + span] = static_cast<int32_t>(count);
        passing[count++] = {sequence, span};
      }
    }
    return count;
  }
};

template <typename T, typename S>
void pass(const RingArgs& r, int64_t group, const Record& record, int threads) {
  const AttentionArgs& a = r.attention;
  int64_t width = 0, spans = 0, floats = 0;
  for (int64_t b = 0; b < a.sequences; b++) {
    if (few(a, b, record)) continue;
    const int64_t needs = (a.context_len[b] + kSpan - 1) / kSpan;
    width = needs > width ? needs : width;
    spans += needs;
  }
  if (spans == 0) return;
  int64_t most = most_rows<T>(a);
  int64_t count = list_waiting(r, group, record, most, nullptr, floats);
  for (; most > kSpanRows && count < kTasks * threads; most /= 2)
    count = list_waiting(r, group, record, most / 2, nullptr, floats);
  const int64_t room = r.at.place_bytes / record.bytes(), together = spans < room ? spans : room;
  const size_t entries = static_cast<size_t>(a.sequences * width);
  char* memory = static_cast<char*>(
      scratch(Scratch::tasks, static_cast<size_t>(count) * sizeof(Waiting) +
                                  static_cast<size_t>(together) * sizeof(Passing) +
                                  entries * sizeof(int32_t)));
  auto* waiting = reinterpret_cast<Waiting*>(memory);
  auto* passing = reinterpret_cast<Passing*>(waiting + count);
  auto* table = reinterpret_cast<int32_t*>(passing + together);
  list_waiting(r, group, record, most, waiting, floats);
  float* carried = static_cast<float*>(
      scratch(Scratch::carried, static_cast<size_t>(floats) * sizeof(float)));
  __builtin_memset(table, 0, entries * sizeof(int32_t));
  Cursor cursor;
  int64_t begun = 0;  // tasks of sequences that have all passed by
  while (const int64_t here = cursor.take(r, record, together, passing, table, width)) {
    const AttentionArgs over = over_records(r, record, place(r.at), table, width);
    put_spans(r, record, passing, here, threads);
    meet(r.at);
    const Passing low = passing[0], high = passing[here - 1];
    const auto from = [&](const Task& t) { return t.sequence == low.sequence ? low.span : 0; };
    const auto to = [&](const Task& t) { return t.sequence == high.sequence ? high.span + 1 : width; };
    while (begun < count && waiting[begun].task.sequence < low.sequence) begun++;
    int64_t end = begun;
    while (end < count && waiting[end].task.sequence <= high.sequence) end++;
    // the last tasks of a chunk see the most: taken first, they even out the threads
    parallel(threads, end - begun, [&](int64_t i) {
      const Waiting* now = waiting + end - 1 - i;
      const Task& t = now->task;
      if (t.first_span >= to(t) || t.last_span <= from(t)) return;
      const FlushDenormals flush;
      const TileSetup tiles(t.rows);
      pass_task<T, S>(over, t, carried + now->at, from(t), to(t), Place{}, group);
    });
  }
}

template <typename T, typename S>
void run(const RingArgs& r) {
  const int64_t group = r.attention.heads / r.attention.kv_heads;
  const Record record = Record::of<T, S>(r.attention);
  const int threads = work(r.attention) > kParallelWork ? r.threads : 1;
  ask<T, S>(r, group, record, threads);
  pass<T, S>(r, group, record, threads);
}

}  // namespace

void ring_attention(const RingArgs& r) {
  with_types(r.attention, [&]<typename T, typename S>() { run<T, S>(r); });
}

}  // namespace penstock::PENSTOCK_ISA

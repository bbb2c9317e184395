// One span of 256 positions for up to 32 query rows: scores, weights, weighted values.
#pragma once

#include <type_traits>

#include "attention_softmax.h"
#include "attention_tiles.h"
#include "nibbles.h"

namespace penstock::PENSTOCK_ISA {

constexpr int64_t kSpan = 256;
constexpr int64_t kRows = 32;
constexpr int64_t kGroup = 32;  // positions whose weighted values are summed apart (= kBlock)

struct Task {
  int64_t sequence, kv_head;
  int64_t first_row, rows;  // of the sequence's tokens · group rows
  int64_t first_span, last_span;
  int64_t partial;  // where its spans' results start, when they are kept
};

// What rows have of one span, or of several that were joined: maxima, sums, weighted values.
struct Part {
  float* top;     // [kRows]
  float* sum;     // [kRows]
  float* values;  // [kRows, padded_dim]

  Part(float* memory) : top(memory), sum(top + kRows), values(sum + kRows) {}
  static constexpr int64_t floats(int64_t padded_dim) { return kRows * (2 + padded_dim); }
};

// A span of a task; of none where that is null.
struct Place {
  const Task* task;
  int64_t span;
};

struct Visible {
  int64_t first, last;  // positions [first, last)
};

// What the token at a position sees.
static Visible visible(const AttentionArgs& a, int64_t at) {
  const int64_t first = a.window > 0 && at + 1 > a.window ? at + 1 - a.window : 0;
  return {first, at + 1};
}

// T: what is multiplied; S: what the cache holds.
template <typename T, typename S>
class SpanWork {
 public:
  // group: query heads per key-value head
  SpanWork(const AttentionArgs& a, const Task& t, int64_t group)
      : a_(a), t_(t), head_size_(a.block_size * a.padded_dim) {
    // floats of rows and weights, the same packed into tiles, and a span's values
    const int64_t rows = kRows * (a.padded_dim + kSpan);
    float* memory = static_cast<float*>(scratch(
        Scratch::rows,
        static_cast<size_t>(rows + (kSpan + 2) * a.padded_dim + 2 * kSpan) * sizeof(float) +
            static_cast<size_t>(rows) * sizeof(T)));
    query_ = memory;
    weight_ = query_ + kRows * a.padded_dim;
    packed_query_ = reinterpret_cast<T*>(weight_ + kRows * kSpan);
    packed_weight_ = packed_query_ + kRows * a.padded_dim;
    values_ = packed_weight_ + kRows * kSpan;
    steps_ = reinterpret_cast<float*>(values_ + kSpan * a.padded_dim);
    key_steps_ = steps_ + 2 * a.padded_dim;
    value_steps_ = key_steps_ + kSpan;
    tiles_ = kByTiles && t.rows >= kTileMinRows && a.padded_dim % kGroup == 0;
    takes_scale_ = !kScaled && a.softcap <= 0.0f && a.scale > 0.0f;
    const int64_t start = a.query_start[t.sequence];
    const int64_t tokens = a.query_start[t.sequence + 1] - start;
    int64_t token = t.first_row / group, head = t.first_row % group;
    for (int64_t r = 0; r < t.rows; r++) {
      take_row(static_cast<const T*>(a.q) +
                   ((start + token) * a.heads + t.kv_head * group + head) * a.dim, r);
      seen_[r] = visible(a, a.context_len[t.sequence] - tokens + token);
      coded_[r] = a.recent.slots ? recent_from(seen_[r].last - 1, a.recent.window) : INT64_MAX;
      if (++head == group) {
        head = 0;
        token++;
      }
    }
  }

  // What every row has of the span. next: what this thread is likely to do then.
  void run(int64_t span, const Place& next, const Part& out) {
    next_ = next;
    // rows are in order of position: the first sees the earliest start, the last the latest end
    Visible any = {seen_[0].first, seen_[t_.rows - 1].last};
    const int64_t low = span * kSpan;
    if (any.first < low) any.first = low;
    if (any.last > low + kSpan) any.last = low + kSpan;
    const int64_t first = any.first / kGroup * kGroup;
    const int64_t last = (any.last + kGroup - 1) / kGroup * kGroup;
    scores(low, first, last);
    soften(low, first, last, out);
    weigh(low, first, last, out.values);
  }

 private:
  static constexpr bool kWiden = sizeof(S) != sizeof(T);
  static constexpr bool kScaled = std::is_same_v<S, int8_t>;
  static constexpr bool kNibbles = std::is_same_v<S, nibbles>;
  static constexpr int64_t kPerItem = kNibbles ? 2 : 1;  // values of an S
  static constexpr bool kByTiles = kTiles && sizeof(T) == 2;
  static constexpr bool kCrossed = std::is_same_v<RowOf<T>, crossed>;

  // Rows of queries and weights as they are multiplied.
  crossed* crossed_query() const { return reinterpret_cast<crossed*>(packed_query_); }
  crossed* crossed_weight() const { return reinterpret_cast<crossed*>(packed_weight_); }
  const RowOf<T>* query_rows() const {
    if constexpr (kCrossed)
      return crossed_query();
    else
      return query_;
  }
  const RowOf<T>* weight_rows() const {
    if constexpr (kCrossed)
      return crossed_weight();
    else
      return weight_;
  }

  // The block of a task's head that holds `position`.
  int64_t block(const Task& t, int64_t position) const {
    const int64_t index = a_.block_table[t.sequence * a_.table_stride + position / a_.block_size];
    return index * a_.kv_heads + t.kv_head;
  }
  int64_t block(int64_t position) const { return block(t_, position); }
  const S* block(const void* cache, int64_t position) const {
    return static_cast<const S*>(cache) + block(position) * head_size_ / kPerItem;
  }
  // The float16 scales of the 16 positions from `position` on.
  F16 scales(const uint16_t* scale, int64_t position) const {
    return load_half(scale + block(position) * a_.block_size + position % a_.block_size);
  }

  using Asks = std::conditional_t<kWiden, Quiet, Beside>;
  using Group = Block<T, Asks>;  // 32 positions' keys or values

  // What to ask for meanwhile, exactly so in blocks of kGroup positions, the default; in larger ones, by
  // the time that a block was read.
  //
  // While keys that lie at `from` are read: the values of the same positions.
  Beside values_beside(const S* from, int64_t position) const {
    return {from, block(a_.value_cache, position)};
  }

  // While values that lie at `from` are read: the keys of the next span's positions.
  Beside keys_beside(const S* from, int64_t position) const {
    if (!next_.task) return {};
    const int64_t at = next_.span * kSpan + position % kSpan;
    if (at >= a_.context_len[next_.task->sequence]) return {};
    const S* keys = static_cast<const S*>(a_.key_cache);
    return {from, keys + block(*next_.task, at) * head_size_ / kPerItem};
  }

  static void widen(const S* from, int64_t count, const Beside& asks, T* to) {
    if constexpr (kWiden)
      for (int64_t j = 0; j < count; j += 64) {
        asks.line(from + j);
        for (int64_t i = j; i < j + 64 && i < count; i += 16)
          store_exact(to + i, load(from + i));
      }
  }

  // A group's step of `position`; the minima lie a block's size behind.
  const uint16_t* steps(const uint16_t* scale, int64_t position, int64_t group) const {
    const int64_t groups = (a_.padded_dim + kCacheGroup - 1) / kCacheGroup;
    return scale + (block(position) * groups + group) * 2 * a_.block_size +
           position % a_.block_size;
  }

  // How many rows, the first ones, see the group at `position` as it was written.
  int64_t exact_rows(int64_t position) const {
    if constexpr (!kNibbles) return 0;
    int64_t rows = 0;
    while (rows < t_.rows && coded_[rows] <= position) rows++;
    return rows;
  }

  // The block of this head that holds `position` as it was written.
  const bf16* recent(const bf16* pool, int64_t position) const {
    const int64_t index = a_.block_table[t_.sequence * a_.table_stride + position / a_.block_size];
    return pool + (a_.recent.slots[index] * a_.kv_heads + t_.kv_head) * head_size_;
  }

  // Keys of the 32 positions from `position` on, each dimension with its own step, as panels.
  void widen_channels(const uint8_t* line, int64_t position, T* to) {
    const uint16_t* scale = a_.key_scale + (block(position) * a_.block_size +
                                            position % a_.block_size) / kKeyGroup * 2 *
                                               a_.padded_dim;
    for (int64_t j = 0; j < 2 * a_.padded_dim; j += 16) store(steps_ + j, load_half(scale + j));
    const float* low = steps_ + a_.padded_dim;
    for (int64_t panel = 0; panel < kKeyGroup; panel += kColumns)
      for (int64_t j = 0; j < a_.padded_dim; j += 2, line += kLineBytes, to += 2 * kColumns) {
        const F16 step[2] = {set1(steps_[j]), set1(steps_[j + 1])};
        const F16 minimum[2] = {set1(low[j]), set1(low[j + 1])};
        PENSTOCK_ISA::widen_keys(line, step, minimum, to);
      }
  }

  // The keys of a group of 32 positions as panels of bfloat16.
  void widen_keys(int64_t position, T* to) {
    constexpr int64_t count = kGroup;
    const int64_t offset = position % a_.block_size;
    const S* at = block(a_.key_cache, position);
    const S* from = at + offset * a_.padded_dim / kPerItem;
    const Beside asks = values_beside(at, position);
    if constexpr (!kNibbles) {
      widen(from, count * a_.padded_dim, asks, to);
    } else {
      asks.all(from, count * a_.padded_dim / 2);
      const uint8_t* line = reinterpret_cast<const uint8_t*>(from);
      if (a_.recent.slots) return widen_channels(line, position, to);
      for (int64_t done = 0; done < count; done += kColumns)
        for (int64_t j = 0; j < a_.padded_dim; j += kCacheGroup) {
          const uint16_t* scale = steps(a_.key_scale, position + done, j / kCacheGroup);
          const F16 size = load_half(scale), low = load_half(scale + a_.block_size);
          const F16 step[2] = {size, size}, minimum[2] = {low, low};
          const int64_t end = j + kCacheGroup < a_.padded_dim ? j + kCacheGroup : a_.padded_dim;
          for (int64_t k = j; k < end; k += 2, line += kLineBytes, to += 2 * kColumns)
            PENSTOCK_ISA::widen_keys(line, step, minimum, to);
        }
    }
  }

  // The values of a group of 32 positions as panels of bfloat16.
  void widen_values(int64_t position, T* to) const {
    const int64_t panels = a_.padded_dim / kColumns, pitch = a_.block_size * kColumns / kPerItem;
    const S* at = block(a_.value_cache, position);
    const S* from = at + position % a_.block_size * kColumns / kPerItem;
    const Beside asks = keys_beside(at, position);
    if constexpr (!kNibbles) {
      for (int64_t p = 0; p < panels; p++)
        widen(from + p * pitch, kGroup * kColumns, asks, to + p * kGroup * kColumns);
    } else {
      for (int64_t p = 0; p < panels; p++) asks.all(from + p * pitch, kGroup * kColumns / 2);
      float size[kGroup], low[kGroup];
      for (int64_t p = 0; p < panels; p++) {
        if (p * kColumns % kCacheGroup == 0) {
          const uint16_t* scale = steps(a_.value_scale, position, p * kColumns / kCacheGroup);
          for (int64_t i = 0; i < kGroup; i += 16) {
            store(size + i, load_half(scale + i));
            store(low + i, load_half(scale + a_.block_size + i));
          }
        }
        const uint8_t* line = reinterpret_cast<const uint8_t*>(from + p * pitch);
        for (int64_t i = 0; i < kGroup; i += 2, line += kLineBytes, to += 2 * kColumns) {
          const F16 step[2] = {set1(size[i]), set1(size[i + 1])};
          const F16 minimum[2] = {set1(low[i]), set1(low[i + 1])};
          PENSTOCK_ISA::widen_values(line, step, minimum, to);
        }
      }
    }
  }

  // The place of row r's 32 values from j on in tiles of T; count: values of a row.
  static T* in_tiles(T* tiles, int64_t r, int64_t j, int64_t count) {
    return tiles + ((r / 16 * (count / kGroup) + j / kGroup) * 16 + r % 16) * kGroup;
  }

  // Row r's query, as it is multiplied.
  void take_row(const T* q, int64_t r) {
    float* row = query_ + r * a_.padded_dim;
    if (tiles_)
      for (int64_t j = 0; j < a_.padded_dim; j += kGroup) {
        T* to = in_tiles(packed_query_, r, j, a_.padded_dim);
        for (int64_t i = 0; i < kGroup; i++) to[i] = j + i < a_.dim ? q[j + i] : T{};
      }
    if (tiles_ && !kNibbles) return;
    for (int64_t j = 0; j < a_.padded_dim; j += 16)
      store(row + j, j < a_.dim ? load_some(q + j, clip(a_.dim - j)) : zero());
    if constexpr (kCrossed) cross_row(row, a_.padded_dim, crossed_query() + r * a_.padded_dim);
  }

  // weight_[r][position − low] = q · k for positions [first, last)
  void scores(int64_t low, int64_t first, int64_t last) {
    Group groups[kSpan / kGroup];
    int64_t count = 0;
    for (int64_t position = first; position < last; position += kGroup) {
      const int64_t at = position % a_.block_size * a_.padded_dim;
      const int64_t panel = a_.padded_dim * kColumns;
      float* out = weight_ + (position - low);
      if constexpr (kWiden) {
        const int64_t exact = exact_rows(position);
        if constexpr (kNibbles)
          if (exact > 0) {
            const Group written = {recent(a_.recent.keys, position) + at, panel, {}};
            score(&written, 1, 0, exact, out);
          }
        if (exact == t_.rows) continue;
        widen_keys(position, values_);
        const Group widened = {values_, panel, {}};
        score(&widened, 1, exact, t_.rows, out);
      } else {
        const T* keys = block(a_.key_cache, position);
        groups[count++] = {keys + at, panel, values_beside(keys, position)};
      }
    }
    if (count > 0) score(groups, count, 0, t_.rows, weight_ + (first - low));
  }

  // A tile of keys or values, for which what comes next was asked for.
  static const T* asked(const T* tile, const Asks& asks) {
    asks.all(tile, kTileValues * static_cast<int64_t>(sizeof(T)));
    return tile;
  }

  // The scores of rows [from, to) with `count` groups of keys.
  void score(const Group* groups, int64_t count, int64_t from, int64_t to, float* out) {
    constexpr int64_t panels = kGroup / kColumns;  // of a group
    if constexpr (kByTiles) {
      if (tiles_ && to - from == t_.rows) {
        multiply_tiles(
            packed_query_, t_.rows, a_.padded_dim / kGroup, count * panels,
            [&](int64_t p, int64_t d) {
              const Group& g = groups[p / panels];
              return asked(g.values + p % panels * g.stride + d * kTileValues, g.asks);
            },
            out, kSpan);
        return;
      }
    }
    out += from * kSpan;
    multiply_apart<panels>(
        query_rows() + from * a_.padded_dim, a_.padded_dim, to - from, groups, count, a_.padded_dim,
        [&](int64_t r, int64_t p, F16 value) { store(out + r * kSpan + p * kColumns, value); });
  }

  // Scores → weights, their maxima and sums; what isn't visible becomes 0.
  void soften(int64_t low, int64_t first, int64_t last, const Part& out) {
    if constexpr (kScaled)
      for (int64_t position = first; position < last; position += kColumns) {
        store(key_steps_ + (position - low), scales(a_.key_scale, position));
        store(value_steps_ + (position - low), scales(a_.value_scale, position));
      }
    if (!takes_scale_)
      for (int64_t r = 0; r < t_.rows; r++) scale_row(weight_ + r * kSpan, first - low, last - low);
    for (int64_t r = 0; r < t_.rows; r++)
      hide(weight_ + r * kSpan, first - low, last - low, seen_[r].first - low, seen_[r].last - low);
    const bool packs = tiles_ && !divided(first, last);
    for (int64_t r = 0; r < t_.rows; r += 16)
      soften_rows(weight_ + r * kSpan + (first - low), kSpan, t_.rows - r < 16 ? t_.rows - r : 16,
                  last - first, takes_scale_ ? a_.scale : 1.0f, out.top + r, out.sum + r,
                  [&](int64_t i, int64_t j, F16 a, F16 b) {
                    put_weights(packs, r + i, first - low + j, seen_[r + i].last - low, a, b);
                  });
  }

  // The scores [first, last) of a row times their scales, where they wait in memory.
  void scale_row(float* row, int64_t first, int64_t last) const {
    for (int64_t j = first; j < last; j += kColumns) {
      F16 s = load(row + j);
      if constexpr (kScaled) s = s * load(key_steps_ + j);
      s = s * set1(a_.scale);
      if (a_.softcap > 0.0f) s = set1(a_.softcap) * tanh(s / set1(a_.softcap));
      store(row + j, s);
    }
  }

  // The scores [first, last) of a row but [from, to) become −∞.
  static void hide(float* row, int64_t first, int64_t last, int64_t from, int64_t to) {
    for (int64_t j = to > first ? to / kColumns * kColumns : first; j < last; j += kColumns)
      store(row + j, keep_first(load(row + j), clip(to - j), kMinusInfinity));
    for (int64_t j = first; j < last && j < from; j++) row[j] = kMinusInfinity;
  }

  // Row r's 32 weights from j on; of scaled values, those from `end` on may have any scale.
  void put_weights(bool packs, int64_t r, int64_t j, int64_t end, F16 a, F16 b) {
    if constexpr (kScaled) {
      a = a * load(value_steps_ + j);
      b = b * load(value_steps_ + j + kColumns);
      if (end < j + kGroup) {
        a = keep_first(a, clip(end - j), 0.0f);
        b = keep_first(b, clip(end - j - kColumns), 0.0f);
      }
    }
    if constexpr (kByTiles)
      if (packs) return store_group(in_tiles(packed_weight_, r, j, kSpan), a, b);
    if constexpr (kCrossed) {
      store_crossed(crossed_weight() + r * kSpan + j, a);
      store_crossed(crossed_weight() + r * kSpan + j + kColumns, b);
    } else {
      // a sum with 0 leaves no denormals, which could be rounded up
      store(weight_ + r * kSpan + j, round_to<T>(a + zero()));
      store(weight_ + r * kSpan + j + kColumns, round_to<T>(b + zero()));
    }
  }

  static int clip(int64_t count) {
    return count < 0 ? 0 : count > kColumns ? kColumns : static_cast<int>(count);
  }

  // The values from `position` on, `exact` as they were written, in `room` where they are widened
  // or their end is cut off.
  Group group(int64_t position, bool exact, T* room) const {
    const int64_t end = a_.context_len[t_.sequence];
    const int64_t at = position % a_.block_size * kColumns;
    const Group inside = {room, kGroup * kColumns, {}};
    Group found = inside;
    if constexpr (!kWiden) {
      const T* values = block(a_.value_cache, position);
      found = {values + at, a_.block_size * kColumns, keys_beside(values, position)};
    } else if (!exact) {
      widen_values(position, room);
    } else if constexpr (kNibbles) {
      found = {recent(a_.recent.values, position) + at, a_.block_size * kColumns, {}};
    }
    if (position + kGroup <= end) return found;
    cut(found, end - position, room);  // what lies beyond was written by others, or never
    return inside;
  }

  // out value[r] = weights · values, one group of 32 positions after another
  void weigh(int64_t low, int64_t first, int64_t last, float* out) {
    if (!divided(first, last)) return weigh_together(low, first, last, out);
    for (int64_t position = first; position < last; position += kGroup) {
      const RowOf<T>* weights = weight_rows() + (position - low);
      const bool fresh = position == first;
      const int64_t exact = exact_rows(position);
      if (exact > 0) add_group(group(position, true, values_), weights, 0, exact, fresh, out);
      if (exact < t_.rows)
        add_group(group(position, false, values_), weights, exact, t_.rows, fresh, out);
    }
  }

  // Whether some rows see a group of [first, last) as it was written and others as codes.
  bool divided(int64_t first, int64_t last) const {
    for (int64_t position = first; kNibbles && position < last; position += kGroup) {
      const int64_t exact = exact_rows(position);
      if (exact > 0 && exact < t_.rows) return true;
    }
    return false;
  }

  // out value[r] += weights · the group's values, for rows [from, to).
  void add_group(const Group& g, const RowOf<T>* weights, int64_t from, int64_t to, bool fresh,
                 float* out) {
    out += from * a_.padded_dim;
    multiply_panels(
        weights + from * kSpan, kSpan, to - from, g.values, g.stride, a_.padded_dim / kColumns,
        kGroup, Asks(),
        [&](int64_t r, int64_t p) {
          return fresh ? zero() : load(out + r * a_.padded_dim + p * kColumns);
        },
        [&](int64_t r, int64_t p, F16 value) {
          store(out + r * a_.padded_dim + p * kColumns, value);
        });
  }

  // The same of groups that all rows see alike.
  void weigh_together(int64_t low, int64_t first, int64_t last, float* out) {
    Group groups[kSpan / kGroup];
    const int64_t count = (last - first) / kGroup, skipped = (first - low) / kGroup;
    for (int64_t d = 0; d < count; d++) {
      const int64_t position = first + d * kGroup;
      groups[d] = group(position, exact_rows(position) > 0, values_ + d * kGroup * a_.padded_dim);
    }
    const int64_t panels = a_.padded_dim / kColumns;
    if constexpr (kByTiles)
      if (tiles_)
        return multiply_tiles(
            packed_weight_ + skipped * kTileValues, t_.rows, count, panels,
            [&](int64_t p, int64_t d) {
              return asked(groups[d].values + p * groups[d].stride, groups[d].asks);
            },
            out, a_.padded_dim, kSpan / kGroup);
    multiply_blocks(weight_rows() + (first - low), kSpan, t_.rows, groups, count, panels,
                    [&](int64_t r, int64_t p, F16 value) {
                      store(out + r * a_.padded_dim + p * kColumns, value);
                    });
  }

  // A copy of a group's panels with zeros from position `count` on.
  void cut(const Group& from, int64_t count, T* to) const {
    constexpr int64_t v = kVnni<T>, line = kColumns * v;
    const int64_t whole = count / v * line;
    for (int64_t p = 0; p < a_.padded_dim / kColumns; p++, to += kGroup * kColumns) {
      const T* panel = from.values + p * from.stride;
      if (to != panel) __builtin_memcpy(to, panel, static_cast<size_t>(whole) * sizeof(T));
      for (int64_t j = whole; j < kGroup * kColumns; j++)
        to[j] = j < whole + line && j % v < count % v ? panel[j] : T{};
    }
  }

  const AttentionArgs& a_;
  const Task& t_;
  int64_t head_size_;
  float* query_;
  float* weight_;
  bool tiles_;
  bool takes_scale_;  // exponentials do: scores wait without it
  T* packed_query_;   // query_ and weight_ in tiles, or crossed
  T* packed_weight_;
  T* values_;  // keys or values, widened or with their end cut off
  float* steps_;  // a group of keys' steps and minima
  float* key_steps_;  // a span's scales
  float* value_steps_;
  Place next_ = {};
  Visible seen_[kRows];
  int64_t coded_[kRows];  // what each row sees as codes lies before this
};

}  // namespace penstock::PENSTOCK_ISA

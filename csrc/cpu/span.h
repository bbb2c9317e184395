// One span of 256 positions for the query rows of a task: scores, weights, weighted values.
#pragma once

#include "attention_part.h"
#include "attention_softmax.h"
#include "attention_tiles.h"
#include "span_cache.h"

namespace penstock::PENSTOCK_ISA {

constexpr int64_t kWeightLines = 4;  // of the next keys, asked for meanwhile with each 32 weights

// T: what is multiplied; S: what the cache holds.
template <typename T, typename S>
class SpanWork {
 public:
  // group: query heads per key-value head
  SpanWork(const AttentionArgs& a, const Task& t, int64_t group)
      : a_(a), t_(t), cache_(a, t, room(a, t.rows > kSpanRows ? whole_tiles(t.rows) : kSpanRows)) {
    tiles_ = by_tiles<T>(a) && t.rows >= kTileMinRows;
    takes_scale_ = !kScaled && a.softcap <= 0.0f && a.scale > 0.0f;
    const int64_t start = a.query_start[t.sequence];
    const int64_t tokens = a.query_start[t.sequence + 1] - start;
    int64_t token = t.first_row / group, head = t.first_row % group;
    for (int64_t r = 0; r < t.rows; r++) {
      take_row(query_at<T>(a, start + token, t.kv_head * group + head), r);
      seen_[r] = visible(a, t.sequence, a.context_len[t.sequence] - tokens + token);
      coded_[r] = a.recent.slots ? recent_from(seen_[r].last - 1, a.recent.window) : INT64_MAX;
      if (++head == group) {
        head = 0;
        token++;
      }
    }
  }

  // Spans [first, last), one after another. next: what this thread is likely to do then.
  // where(0): the place of what the rows have of a span; done(0, rows): it is there.
  template <typename Where, typename Done>
  void run(int64_t first, int64_t last, const Place& next, Where where, Done done) {
    for (int64_t span = first; span < last; span++) {
      take(span, span + 1 < last ? Place{&t_, span + 1} : next, where(0));
      done(0, t_.rows);
    }
  }

 private:
  void take(int64_t span, const Place& next, const Part& out) {
    cache_.expect(next);
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

  using Cache = CacheWork<T, S>;
  using Asks = typename Cache::Asks;
  using Group = typename Cache::Group;
  static constexpr bool kWiden = Cache::kWiden, kScaled = Cache::kScaled, kNibbles = Cache::kNibbles;
  static constexpr bool kByTiles = kTiles && sizeof(T) == 2;
  static constexpr bool kCrossed = std::is_same_v<RowOf<T>, crossed>;

  // Lays out the thread's memory: floats of rows and weights, the same as they are multiplied, a
  // span's values, its scales. Returns room for steps.
  float* room(const AttentionArgs& a, int64_t rows) {
    const int64_t each = rows * (a.padded_dim + kSpan);
    query_ = static_cast<float*>(scratch(
        Scratch::rows,
        static_cast<size_t>(each + (kSpan + 2) * a.padded_dim + 2 * kSpan) * sizeof(float) +
            static_cast<size_t>(each) * sizeof(T)));
    weight_ = query_ + rows * a.padded_dim;
    packed_query_ = reinterpret_cast<T*>(weight_ + rows * kSpan);
    packed_weight_ = packed_query_ + rows * a.padded_dim;
    values_ = packed_weight_ + rows * kSpan;
    key_steps_ = reinterpret_cast<float*>(values_ + kSpan * a.padded_dim);
    value_steps_ = key_steps_ + kSpan;
    return value_steps_ + kSpan;
  }

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

  // How many rows, the first ones, see the group at `position` as it was written.
  int64_t exact_rows(int64_t position) const {
    if constexpr (!kNibbles) return 0;
    int64_t rows = 0;
    while (rows < t_.rows && coded_[rows] <= position) rows++;
    return rows;
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
    if constexpr (kTiles) cache_.ask_for_values(first, last);
    for (int64_t position = first; position < last; position += kGroup) {
      const int64_t at = position % a_.block_size * a_.padded_dim;
      const int64_t panel = a_.padded_dim * kColumns;
      float* out = weight_ + (position - low);
      if constexpr (kWiden) {
        const int64_t exact = exact_rows(position);
        if constexpr (kNibbles)
          if (exact > 0) {
            const Group written = {cache_.recent(a_.recent.keys, position) + at, panel, {}};
            score(&written, 1, 0, exact, out);
          }
        if (exact == t_.rows) continue;
        cache_.widen_keys(position, values_);
        const Group widened = {values_, panel, {}};
        score(&widened, 1, exact, t_.rows, out);
      } else {
        const T* keys = cache_.block(a_.key_cache, position);
        groups[count++] = {keys + at, panel, cache_.values_beside(keys, position)};
      }
    }
    if (count > 0) score(groups, count, 0, t_.rows, weight_ + (first - low));
  }

  // A tile of keys or values; a part of what comes next is asked for.
  const T* asked(const T* tile) {
    if constexpr (!kWiden) cache_.ask(kTileLines);
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
              return asked(g.values + p % panels * g.stride + d * kTileValues);
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
    if constexpr (kTiles && !kWiden) cache_.ask_for_keys(first, last);
    if constexpr (kScaled)
      for (int64_t position = first; position < last; position += kColumns) {
        store(key_steps_ + (position - low), cache_.scales(a_.key_scale, position));
        store(value_steps_ + (position - low), cache_.scales(a_.value_scale, position));
      }
    if (!takes_scale_)
      for (int64_t r = 0; r < t_.rows; r++) scale_row(weight_ + r * kSpan, first - low, last - low);
    for (int64_t r = 0; r < t_.rows; r++)
      hide(weight_ + r * kSpan, first - low, last - low, seen_[r].first - low, seen_[r].last - low);
    const bool packs = tiles_ && !divided(first, last);
    for (int64_t r = 0; r < t_.rows; r += 16)
      soften_rows<T>(weight_ + r * kSpan + (first - low), kSpan, t_.rows - r < 16 ? t_.rows - r : 16,
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
      if (a_.softcap > 0.0f) s = softcapped(s, a_.softcap);
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
      if (packs) {
        if constexpr (!kWiden) cache_.ask(kWeightLines);
        return store_group(in_tiles(packed_weight_, r, j, kSpan), a, b);
      }
    if constexpr (kCrossed) {
      store_crossed(crossed_weight() + r * kSpan + j, a);
      store_crossed(crossed_weight() + r * kSpan + j + kColumns, b);
    } else {
      // a sum with 0 leaves no denormals, which could be rounded up
      store(weight_ + r * kSpan + j, round_to<T>(a + zero()));
      store(weight_ + r * kSpan + j + kColumns, round_to<T>(b + zero()));
    }
  }

  // out value[r] = weights · values, one group of 32 positions after another
  void weigh(int64_t low, int64_t first, int64_t last, float* out) {
    if constexpr (kTiles && kWiden) cache_.ask_for_keys(first, last);
    if (!divided(first, last)) return weigh_together(low, first, last, out);
    for (int64_t position = first; position < last; position += kGroup) {
      const RowOf<T>* weights = weight_rows() + (position - low);
      const bool fresh = position == first;
      const int64_t exact = exact_rows(position);
      if (exact > 0) add_group(cache_.values(position, true, values_), weights, 0, exact, fresh, out);
      if (exact < t_.rows)
        add_group(cache_.values(position, false, values_), weights, exact, t_.rows, fresh, out);
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
    out += from * a_.padded_values;
    multiply_panels(
        weights + from * kSpan, kSpan, to - from, g.values, g.stride, a_.padded_values / kColumns,
        kGroup, Asks(),
        [&](int64_t r, int64_t p) {
          return fresh ? zero() : load(out + r * a_.padded_values + p * kColumns);
        },
        [&](int64_t r, int64_t p, F16 value) {
          store(out + r * a_.padded_values + p * kColumns, value);
        });
  }

  // The same of groups that all rows see alike.
  void weigh_together(int64_t low, int64_t first, int64_t last, float* out) {
    Group groups[kSpan / kGroup];
    const int64_t count = (last - first) / kGroup, skipped = (first - low) / kGroup;
    for (int64_t d = 0; d < count; d++) {
      const int64_t position = first + d * kGroup;
      groups[d] = cache_.values(position, exact_rows(position) > 0, values_ + d * kGroup * a_.padded_values);
    }
    const int64_t panels = a_.padded_values / kColumns;
    if constexpr (kByTiles)
      if (tiles_)
        return multiply_tiles(
            packed_weight_ + skipped * kTileValues, t_.rows, count, panels,
            [&](int64_t p, int64_t d) {
              return asked(groups[d].values + p * groups[d].stride);
            },
            out, a_.padded_values, kSpan / kGroup);
    multiply_blocks(weight_rows() + (first - low), kSpan, t_.rows, groups, count, panels,
                    [&](int64_t r, int64_t p, F16 value) {
                      store(out + r * a_.padded_values + p * kColumns, value);
                    });
  }

  const AttentionArgs& a_;
  const Task& t_;
  float* query_;
  float* weight_;
  bool tiles_;
  bool takes_scale_;  // exponentials do: scores wait without it
  T* packed_query_;   // query_ and weight_ in tiles, or crossed
  T* packed_weight_;
  T* values_;  // keys or values, widened or with their end cut off
  float* key_steps_;  // a span's scales
  float* value_steps_;
  Visible seen_[kMostRows];
  Cache cache_;
  int64_t coded_[kMostRows];  // what each row sees as codes lies before this
};

}  // namespace penstock::PENSTOCK_ISA

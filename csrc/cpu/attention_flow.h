// Attention by AMX tiles, for sixteen rows and a span at a time.
//
// Tiles multiply beside the vectors' work: while the exponentials of an item are taken, 32 positions
// after another, the weights of the positions before are multiplied by their values, and the scores of
// the next item are made in the place of those that were read. Scores lie in tiles of 16 rows × 16
// positions, two of them a group of 32 positions, and groups in a ring. Those, weights and queries stay in L1, which
// keys and values pass: they would not all have room there.
#pragma once

#include <utility>

#include "attention_part.h"
#include "attention_softmax.h"
#include "attention_tiles.h"
#include "span_cache.h"

namespace penstock::PENSTOCK_ISA {

#if defined(PENSTOCK_TILES)

constexpr int64_t kTileSums = kTileRows * kColumns;  // floats
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kSpanGroups = kSpan / kGroup;
constexpr int64_t kRing = kSpanGroups + 1;  // the next item's scores run one group behind

template <typename S>
class Flow {
 public:
  // group: query heads per key-value head
  Flow(const AttentionArgs& a, const Task& t, int64_t group)
      : a_(a), t_(t), group_(group), depth_(a.padded_dim / kGroup), cache_(a, t, room(a)),
        blocks_(whole_tiles(t.rows) / kTileRows),
        takes_scale_(!kScaled && a.softcap <= 0.0f && a.scale > 0.0f) {
    const int64_t start = a.query_start[t.sequence];
    const int64_t tokens = a.query_start[t.sequence + 1] - start;
    int64_t token = t.first_row / group, head = t.first_row % group;
    for (int64_t r = 0; r < t.rows; r++) {
      take_row(query_at<bf16>(a, start + token, t.kv_head * group + head), a.dim, r);
      seen_[r] = visible(a, t.sequence, a.context_len[t.sequence] - tokens + token);
      if (++head == group) {
        head = 0;
        token++;
      }
    }
    for (int64_t r = t.rows; r < whole_tiles(t.rows); r++) {
      take_row(nullptr, 0, r);
      seen_[r] = {0, 0};
    }
  }

  // Spans [first, last), one after another. next: what this thread is likely to do then.
  // where(row): the place of what sixteen rows from there on have of a span; done(row, rows): it is there.
  template <typename Where, typename Done>
  void run(int64_t first, int64_t last, const Place& next, Where where, Done done) {
    ahead_ = blocks_ > 1 || last - first == 1 ? 1 : 2;
    end_ = last;
    next_ = next;
    asked_ = next.task && next.task != &t_ ? next.task->first_row / group_ : INT64_MAX;
    Item now = {first, -1}, then;
    if (!advance(now)) return;
    begin_scores(now);
    finish_scores();
    for (bool more = true; more; now = then) {
      ring_ = score_ring_;
      then = now;
      more = advance(then);
      if (more) begin_scores(then);
      if (now.opens) take_values(now.span);
      ask_for_queries();
      soften(now, where(now.block * kTileRows));
      done(now.block * kTileRows, now.rows);
    }
  }

 private:
  using Cache = CacheWork<bf16, S>;
  using Group = typename Cache::Group;
  static constexpr bool kScaled = Cache::kScaled;

  // Sixteen rows and a span.
  struct Item {
    int64_t span, block;
    bool opens = false;           // the first of its span
    int64_t first = 0, last = 0;  // groups that some row sees
    int64_t rows = 0;
    const Visible* seen = nullptr;
  };

  // Lays out the thread's memory; returns room for steps.
  float* room(const AttentionArgs& a) {
    const int64_t floats = kRing * 2 * kTileSums + 2 * kSpan + 2 * a.padded_dim;
    const int64_t tiles = kSpanGroups * kTileValues + (kMostRows + 2 * kSpan) * a.padded_dim;
    scores_ = static_cast<float*>(
        scratch(Scratch::rows, static_cast<size_t>(floats) * sizeof(float) +
                                   static_cast<size_t>(tiles) * sizeof(bf16)));
    key_steps_ = scores_ + kRing * 2 * kTileSums;
    value_steps_ = key_steps_ + kSpan;
    float* steps = value_steps_ + kSpan;
    weights_ = reinterpret_cast<bf16*>(steps + 2 * a.padded_dim);
    queries_ = weights_ + kSpanGroups * kTileValues;
    wide_keys_ = queries_ + kMostRows * a.padded_dim;
    wide_values_ = wide_keys_ + kSpan * a.padded_dim;
    return steps;
  }

  // `dim` values of row r's query, and zeros, in their place in tiles.
  void take_row(const bf16* q, int64_t dim, int64_t r) {
    bf16* to = queries_ + (r / kTileRows * depth_ * kTileRows + r % kTileRows) * kGroup;
    for (int64_t j = 0; j < a_.padded_dim; j += kGroup, to += kTileValues)
      if (j + kGroup <= dim)
        __builtin_memcpy(to, q + j, kGroup * sizeof(bf16));
      else
        for (int64_t i = 0; i < kGroup; i++) to[i] = j + i < dim ? q[j + i] : bf16{};
  }

  // Some of those of the next task, which lie where another thread may have written them.
  void ask_for_queries() {
    if (asked_ == INT64_MAX) return;
    const Task& next = *next_.task;
    const int64_t end = asked_ + (2 * kTileRows + group_ - 1) / group_;
    for (; asked_ < end && asked_ * group_ < next.first_row + next.rows; asked_++) {
      const bf16* q = query_at<bf16>(a_, a_.query_start[next.sequence] + asked_, next.kv_head * group_);
      for (int64_t i = 0; i < group_ * a_.dim; i += 32) prefetch(reinterpret_cast<const char*>(q + i), false);
    }
  }

  // To the next rows that see a position of a span.
  bool advance(Item& item) {
    const int64_t span = item.span;
    const bool starts = item.block < 0;
    do {
      if (++item.block == blocks_) {
        item.block = 0;
        item.span++;
      }
      if (item.span >= end_) return false;
      const int64_t row = item.block * kTileRows, low = item.span * kSpan;
      item.rows = t_.rows - row < kTileRows ? t_.rows - row : kTileRows;
      item.seen = seen_ + row;
      const int64_t from = item.seen[0].first - low, to = item.seen[item.rows - 1].last - low;
      item.first = from > 0 ? from / kGroup : 0;
      item.last = to < kSpan ? (to + kGroup - 1) / kGroup : kSpanGroups;
    } while (item.first >= item.last);
    item.opens = starts || item.span != span;
    return true;
  }

  // The groups of a span that rows of the task see.
  template <typename One>
  void each_group(int64_t span, One one) const {
    const int64_t low = span * kSpan;
    const int64_t from = seen_[0].first - low, to = seen_[t_.rows - 1].last - low;
    for (int64_t g = from > 0 ? from / kGroup : 0; g < kSpanGroups && g * kGroup < to; g++)
      one(g, low + g * kGroup);
  }

  void take_keys(int64_t span) {
    cache_.ask_for_values(span * kSpan, (span + 1) * kSpan);
    each_group(span, [&](int64_t g, int64_t position) {
      if constexpr (Cache::kWiden) {
        bf16* to = wide_keys_ + g * kGroup * a_.padded_dim;
        cache_.widen_keys(position, to);
        keys_[g] = {to, a_.padded_dim * kColumns, {}};
      } else {
        const bf16* keys = cache_.block(a_.key_cache, position);
        keys_[g] = {keys + position % a_.block_size * a_.padded_dim, a_.padded_dim * kColumns,
                    cache_.values_beside(keys, position)};
      }
    });
  }

  // Asks for the keys of the span that is read after the next.
  void take_values(int64_t span) {
    const int64_t later = span + ahead_ - end_;
    if (later < 0)
      cache_.expect({&t_, span + ahead_});
    else if (next_.task && next_.span + later < next_.task->last_span)
      cache_.expect({next_.task, next_.span + later});
    else
      cache_.expect({});
    cache_.ask_for_keys(span * kSpan, (span + 1) * kSpan);
    each_group(span, [&](int64_t g, int64_t position) {
      values_[g] = cache_.values(position, false, wide_values_ + g * kGroup * a_.padded_dim);
      if constexpr (kScaled)
        for (int64_t j = 0; j < kGroup; j += kColumns) {
          store(key_steps_ + g * kGroup + j, cache_.scales(a_.key_scale, position + j));
          store(value_steps_ + g * kGroup + j, cache_.scales(a_.value_scale, position + j));
        }
    });
  }

  float* group_scores(int64_t ring, int64_t g) const {
    return scores_ + (ring + g) % kRing * 2 * kTileSums;
  }

  void begin_scores(const Item& item) {
    if (item.opens) take_keys(item.span);
    asks_for_values_ = item.opens;
    score_ring_ = (ring_ + kRing - 1) % kRing;
    score_ = stored_ = item.first;
    score_end_ = item.last;
    score_rows_ = queries_ + item.block * depth_ * kTileValues;
  }

  // Half of the products of a group's scores, of the next item. They stay in tiles 5 and 7 until they
  // are stored: it is tens of cycles before they can be.
  template <bool Second>
  [[gnu::always_inline]] void score_half() {
    const int64_t half = (depth_ + 1) / 2;
    const Group& group = keys_[score_];
    if constexpr (!Second) {
      TILE_ZERO(5);
      TILE_ZERO(7);
    }
    for (int64_t d = Second ? half : 0; d < (Second ? depth_ : half); d++) {
      const bf16* keys = group.values + d * kTileValues;
      if (asks_for_values_) {
        group.asks.all(keys, kTileBytes);
        group.asks.all(keys + group.stride, kTileBytes);
      }
      TILE_LOAD_ROWS(4, score_rows_ + d * kTileValues, 64);
      TILE_STREAM_WEIGHTS(6, keys);
      TILE_DOT(5, 4, 6);
      TILE_STREAM_WEIGHTS(6, keys + group.stride);
      TILE_DOT(7, 4, 6);
    }
  }
  template <int Panel>
  [[gnu::always_inline]] void store_scores() {
    float* to = group_scores(score_ring_, stored_) + Panel * kTileSums;
    if constexpr (Panel == 0)
      TILE_STORE(5, to, 64);
    else
      TILE_STORE(7, to, 64);
    stored_ += Panel;
  }

  void finish_scores() {
    for (; stored_ < score_end_;) {
      if (stored_ == score_) {
        score_half<false>();
        score_half<true>();
        score_++;
      }
      store_scores<0>();
      store_scores<1>();
    }
  }

  // Adds a group's weights times a panel of its values; the first panel of four loads the weights.
  template <int Sums>
  [[gnu::always_inline]] void weigh(int64_t g, int64_t panel, bool asks) {
    if (panel >= a_.padded_dim / kColumns) return;
    const bf16* values = values_[g].values + panel * values_[g].stride;
    if (asks) values_[g].asks.all(values, kTileBytes);
    if constexpr (Sums == 0) TILE_LOAD_ROWS(4, weights_ + g * kTileValues, 64);
    TILE_STREAM_WEIGHTS(6, values);
    if constexpr (Sums == 0) TILE_DOT(0, 4, 6);
    if constexpr (Sums == 1) TILE_DOT(1, 4, 6);
    if constexpr (Sums == 2) TILE_DOT(2, 4, 6);
    if constexpr (Sums == 3) TILE_DOT(3, 4, 6);
  }
  void weigh_four(int64_t g, int64_t panel, bool asks) {
    weigh<0>(g, panel, asks);
    weigh<1>(g, panel + 1, asks);
    weigh<2>(g, panel + 2, asks);
    weigh<3>(g, panel + 3, asks);
  }

  static void clear_sums() {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
  }
  void store_sums(float* out, int64_t panel) const {
    float* to = out + panel * kColumns;
    const int64_t left = a_.padded_dim / kColumns - panel, pitch = a_.padded_dim * 4;
    TILE_STORE(0, to, pitch);
    TILE_STORE(1, to + kColumns, pitch);
    if (left <= 2) return;
    TILE_STORE(2, to + 2 * kColumns, pitch);
    TILE_STORE(3, to + 3 * kColumns, pitch);
  }

  // Where scores don't wait for their scale only, or some rows don't see all.
  void prepare(const Item& item) const {
    const int64_t low = item.span * kSpan;
    const Visible all = {item.seen[item.rows - 1].first - low, item.seen[0].last - low};
    for (int64_t g = item.first; g < item.last; g++) {
      const int64_t at = g * kGroup;
      if (!takes_scale_)
        for (int64_t i = 0; i < 2 * kTileRows; i++) {
          float* s = group_scores(ring_, g) + i * kColumns;
          store(s, scaled(load(s), at + i / kTileRows * kColumns));
        }
      if (at >= all.first && at + kGroup <= all.last) continue;
      for (int64_t i = 0; i < 2 * item.rows; i++) {
        const int64_t r = i / 2, j = at + i % 2 * kColumns;
        hide(group_scores(ring_, g) + (i % 2 * kTileRows + r) * kColumns,
             clip(item.seen[r].first - low - j), clip(item.seen[r].last - low - j));
      }
    }
  }

  F16 scaled(F16 s, int64_t j) const {
    if constexpr (kScaled) s = s * load(key_steps_ + j);
    s = s * set1(a_.scale);
    if (a_.softcap > 0.0f) s = softcapped(s, a_.softcap);
    return s;
  }

  // Sixteen scores but [from, to) become −∞.
  static void hide(float* scores, int from, int to) {
    store(scores, keep_first(load(scores), to, kMinusInfinity));
    for (int i = 0; i < from; i++) scores[i] = kMinusInfinity;
  }

  float waiting_scale() const { return takes_scale_ ? a_.scale : 1.0f; }

  // Each row's largest score, without the scale that they wait for.
  F16 maxima(const Item& item) const {
    F16 most[kTileRows];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; r++) most[r] = set1(kMinusInfinity);
    for (int64_t g = item.first; g < item.last; g++) {
      const float* s = group_scores(ring_, g);
#pragma GCC unroll 16
      for (int r = 0; r < kTileRows; r++)
        most[r] = max(max(most[r], load(s + r * kColumns)), load(s + kTileSums + r * kColumns));
    }
    return reduce_rows(most, Max());
  }

  // What the rows have of the span; meanwhile, the next item's scores.
  void soften(const Item& item, const Part& out) {
    prepare(item);
    const float scale = waiting_scale();
    const F16 largest = maxima(item), highest = largest * set1(scale);
    float minus[kTileRows];
    store(minus, below<bf16>(largest, scale));
    F16 sums[kTileRows];
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; r++) sums[r] = zero();
    clear_sums();
    for (int64_t g = item.first; g < item.last; g++) step(item, g, power_scale<bf16>(scale), minus, sums);
    weigh_four(item.last - 1, 0, item.opens);
    finish_scores();
    const F16 sum = reduce_rows(sums, Add());
    store(out.sum, sum);
    store(out.top, highest + sum * zero());  // a maximum may have passed over NaN, the sum didn't
    store_sums(out.values, 0);
    for (int64_t panel = 4; panel < a_.padded_dim / kColumns; panel += 4) {
      clear_sums();
      for (int64_t g = item.first; g < item.last; g++) weigh_four(g, panel, item.opens);
      store_sums(out.values, panel);
    }
  }

  // A group's exponentials, two rows at a time, and a product or two of tiles after each.
  void step(const Item& item, int64_t g, float scale, const float* minus, F16* sums) {
    const float* scores = group_scores(ring_, g);
    const bool weighs = g > item.first, makes_scores = score_ < score_end_ && score_ <= g;
    const bool stores = stored_ < score_;
    const auto slot = [&]<int I>() __attribute__((always_inline)) {
      if constexpr (I % 2 == 0)
        if (2 * I < item.rows) exponentials<2 * I>(item, g, scores, scale, minus, sums);
      if constexpr (I < 4) {
        if (weighs) weigh<I>(g - 1, I, item.opens);
        if (I % 2 == 1 && stores) store_scores<I / 2>();
      } else {
        if (I % 2 == 0 && makes_scores) score_half<I == 6>();
      }
    };
    [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
      (slot.template operator()<I>(), ...);
    }(std::make_integer_sequence<int, 8>());
    score_ += makes_scores;
  }

  // Of the four rows from R on.
  template <int R>
  [[gnu::always_inline]] void exponentials(const Item& item, int64_t g, const float* scores,
                                           float scale, const float* minus, F16* sums) {
    Many<8> x;
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
      x.v[i] = load(scores + i % 2 * kTileSums + (R + i / 2) * kColumns) * set1(scale) + set1(minus[R + i / 2]);
    x = weight<bf16>(x);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      F16 &a = x.v[2 * i], &b = x.v[2 * i + 1];
      sums[R + i] = (sums[R + i] + a) + b;
      if constexpr (kScaled) {
        a = a * load(value_steps_ + g * kGroup);
        b = b * load(value_steps_ + g * kGroup + kColumns);
        // from its end on, a row may find any scale
        const int64_t end = item.seen[R + i].last - item.span * kSpan - g * kGroup;
        if (end < kGroup) {
          a = keep_first(a, clip(end), 0.0f);
          b = keep_first(b, clip(end - kColumns), 0.0f);
        }
      }
      store_group(weights_ + g * kTileValues + (R + i) * kGroup, a, b);
    }
  }

  const AttentionArgs& a_;
  const Task& t_;
  int64_t group_, depth_;  // depth: tiles of a row
  float* scores_;
  float* key_steps_;  // a span's scales
  float* value_steps_;
  bf16* weights_;  // tiles
  bf16* queries_;
  bf16* wide_keys_;  // a span's
  bf16* wide_values_;
  Cache cache_;
  int64_t blocks_;
  bool takes_scale_;  // exponentials do: scores wait without it
  int64_t ahead_ = 1, end_ = 0, asked_ = INT64_MAX;
  Place next_ = {};
  Group keys_[kSpanGroups], values_[kSpanGroups];
  int64_t ring_ = 0;  // where the item's scores begin
  int64_t score_ring_ = 0, score_ = 0, stored_ = 0, score_end_ = 0;  // of the next item's
  const bf16* score_rows_ = nullptr;
  bool asks_for_values_ = false;
  Visible seen_[kMostRows];
};

#endif

}  // namespace penstock::PENSTOCK_ISA

// Keys and values of one sequence and head, as attention takes them from a paged cache.
#pragma once

#include <type_traits>

#include "attention_tiles.h"
#include "nibbles.h"
#include "turned.h"

namespace penstock::PENSTOCK_ISA {

constexpr int64_t kSpan = 256;
constexpr int64_t kGroup = 32;  // positions whose weighted values are summed apart (= kBlock)
static_assert(kGroup == kBlock && kSpan / kGroup <= kMostBlocks);

struct Task {
  int64_t sequence, kv_head;
  int64_t first_row, rows;  // of the sequence's tokens · group rows
  int64_t first_span, last_span;
  int64_t partial;  // where its spans' results start, when they are kept
  bool at_sinks;    // before them comes what rows have of sinks by queries of their own

  int64_t parts() const { return last_span - first_span + at_sinks; }
};

// A span of a task, or of its sinks; of none where that is null.
struct Place {
  const Task* task;
  int64_t span;
  bool at_sinks = false;
};

struct Visible {
  int64_t first, last;  // positions [first, last)
};

// What the token at a position of a sequence sees.
static Visible visible(const AttentionArgs& a, int64_t sequence, int64_t at) {
  const bool apart = a.window > 0 && at >= a.sink_tokens + a.window;
  if (a.at_sinks) return {0, apart ? a.sink_tokens : 0};
  return {apart ? at + 1 - a.window : 0, a.whole ? a.context_len[sequence] : at + 1};
}

// A query of a step's token.
template <typename T>
const T* query_at(const AttentionArgs& a, int64_t token, int64_t head) {
  const int64_t heads = a.sink_tokens > 0 ? 2 * a.heads : a.heads;
  return static_cast<const T*>(a.q) + ((token - a.first_query) * heads + (a.at_sinks ? a.heads : 0) + head) * a.dim;
}

// Whether tiles multiply values of T, of rows enough.
template <typename T>
bool by_tiles(const AttentionArgs& a) {
  return kTiles && sizeof(T) == 2 && a.padded_dim % kGroup == 0;
}

// Asks for a span's blocks, a line of each in turn: of blocks of 4 KB here and there, memory gives one
// after another at two thirds of the speed of eight together (Granite Rapids, one thread: 10 GB/s,
// and 15).
class Blocks {
 public:
  void clear() { count_ = offset_ = left_ = 0; }
  void add(const void* block) { blocks_[count_++] = static_cast<const char*>(block); }
  // At least as many lines as all that were asked for so far. bytes: of a block
  void ask(int64_t lines, int64_t bytes) {
    for (left_ += lines; left_ > 0 && offset_ < bytes; left_ -= kMost, offset_ += 64)
      if (count_ == kMost)  // what a loop of so many costs is half of a span's time in L2
#pragma GCC unroll 8
        for (int64_t i = 0; i < kMost; i++) prefetch(blocks_[i] + offset_, false);
      else
        for (int64_t i = 0; i < count_; i++) prefetch(blocks_[i] + offset_, false);
  }

 private:
  static constexpr int64_t kMost = kSpan / kGroup;
  const char* blocks_[kMost];
  int64_t count_ = 0, offset_ = 0, left_ = 0;
};

static int clip(int64_t count) {
  return count < 0 ? 0 : count > kColumns ? kColumns : static_cast<int>(count);
}

// T: what is multiplied; S: what the cache holds.
template <typename T, typename S>
class CacheWork {
 public:
  static constexpr bool kWiden = sizeof(S) != sizeof(T);
  static constexpr bool kScaled = std::is_same_v<S, int8_t>;
  static constexpr bool kNibbles = std::is_same_v<S, nibbles>;
  static constexpr int64_t kPerItem = kNibbles ? 2 : 1;  // values of an S

  using Asks = std::conditional_t<kWiden, Quiet, Beside>;
  using Group = Block<T, Asks>;  // 32 positions' keys or values

  // steps: room for 2 · padded_dim
  CacheWork(const AttentionArgs& a, const Task& t, float* steps)
      : a_(a),
        t_(t),
        head_size_(a.block_size * a.padded_dim),
        head_bytes_(head_size_ * static_cast<int64_t>(sizeof(S)) / kPerItem),
        steps_(steps) {}

  // next: the span that this thread is likely to take after the one that it takes now
  void expect(const Place& next) { next_ = next; }

  // Of a task's head, what the block has that holds `position`.
  const S* block(const Task& t, const void* cache, int64_t position) const {
    const char* at = static_cast<const char*>(cache) + index(t, position) * a_.pitch;
    return reinterpret_cast<const S*>(at + t.kv_head * head_bytes_);
  }
  const S* block(const void* cache, int64_t position) const { return block(t_, cache, position); }
  // The scales of the 16 positions from `position` on.
  F16 scales(const Scales& scale, int64_t position) const {
    return load_half(scales_of(scale, position, a_.block_size) + position % a_.block_size);
  }

  // What to ask for meanwhile, exactly so in blocks of kGroup positions, the default; in larger ones, by
  // the time that a block was read.
  //
  // While keys that lie at `from` are read: the values of the same positions.
  Beside values_beside(const S* from, int64_t position) const {
    if (a_.latent) return {};
    return {from, block(a_.value_cache, position)};
  }

  // While values that lie at `from` are read: the keys of the next span's positions.
  Beside keys_beside(const S* from, int64_t position) const {
    if (!next_.task) return {};
    const int64_t at = next_.span * kSpan + position % kSpan;
    if (at >= a_.context_len[next_.task->sequence]) return {};
    return {from, block(*next_.task, a_.key_cache, at)};
  }

  // What `ask` asks for: the values of positions [first, last), or the next span's keys beside those.
  void ask_for_values(int64_t first, int64_t last) {
    blocks_.clear();
    if (a_.latent) return;
    const int64_t end = a_.context_len[t_.sequence];
    for (int64_t at = first; at < last && at < end; at += kGroup)
      blocks_.add(part(t_, a_.value_cache, at));
  }
  void ask_for_keys(int64_t first, int64_t last) {
    blocks_.clear();
    if (!next_.task) return;
    const int64_t low = next_.span * kSpan, end = a_.context_len[next_.task->sequence];
    for (int64_t at = low + first % kSpan; first < last && at < end; at += kGroup, first += kGroup)
      blocks_.add(part(*next_.task, a_.key_cache, at));
  }
  // Asks for some of those.
  void ask(int64_t lines) {
    blocks_.ask(lines, kGroup * a_.padded_dim / kPerItem * static_cast<int64_t>(sizeof(S)));
  }

  // The block of this head that holds `position` as it was written.
  const bf16* recent(const bf16* pool, int64_t position) const {
    const int64_t place = a_.recent.slots[index(t_, position)];
    return pool + (place * a_.kv_heads + t_.kv_head) * head_size_;
  }

  // Keys of the 32 positions from `position` on, each dimension with its own step, as panels.
  void widen_channels(const uint8_t* line, int64_t position, T* to) {
    const int64_t count = 2 * a_.padded_dim, groups = a_.block_size / kKeyGroup;
    const uint16_t* scale = scales_of(a_.key_scale, position, groups * count) +
                            position % a_.block_size / kKeyGroup * count;
    for (int64_t j = 0; j < count; j += 16) store(steps_ + j, load_half(scale + j));
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
      ask_beside(from, count * a_.padded_dim / 2, asks);
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
  void widen_values(int64_t position, T* to) {
    const int64_t panels = a_.padded_dim / kColumns, pitch = a_.block_size * kColumns / kPerItem;
    const S* at = block(a_.value_cache, position);
    const S* from = at + position % a_.block_size * kColumns / kPerItem;
    const Beside asks = keys_beside(at, position);
    if constexpr (!kNibbles) {
      for (int64_t p = 0; p < panels; p++)
        widen(from + p * pitch, kGroup * kColumns, asks, to + p * kGroup * kColumns);
    } else {
      for (int64_t p = 0; p < panels; p++) ask_beside(from + p * pitch, kGroup * kColumns / 2, asks);
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

  // The values from `position` on, `exact` as they were written, in `room` where they are widened
  // or their end is cut off.
  Group values(int64_t position, bool exact, T* room) {
    const int64_t end = a_.context_len[t_.sequence];
    const int64_t at = position % a_.block_size * kColumns;
    const Group inside = {room, kGroup * kColumns, {}};
    Group found = inside;
    if constexpr (!kWiden) {
      if (a_.latent) return latent_values(position, end, room);
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

  // The same of latents: the keys, turned.
  Group latent_values(int64_t position, int64_t end, T* room) {
    const T* keys = reinterpret_cast<const T*>(block(a_.key_cache, position));
    turn_keys(keys + position % a_.block_size * a_.padded_dim, a_.padded_dim, a_.padded_values, room);
    const Group turned = {room, kGroup * kColumns, {}};
    if (position + kGroup > end) cut(turned, end - position, room);
    return turned;
  }

 private:
  int64_t index(const Task& t, int64_t position) const {
    return a_.block_table[t.sequence * a_.table_stride + position / a_.table_tokens];
  }
  // Those of this head's block, which has `count` of them.
  const uint16_t* scales_of(const Scales& scale, int64_t position, int64_t count) const {
    return scale.data + index(t_, position) * scale.pitch + t_.kv_head * count;
  }

  // The 32 positions from `position` on in its block.
  const S* part(const Task& t, const void* cache, int64_t position) const {
    return block(t, cache, position) + position % a_.block_size * a_.padded_dim / kPerItem;
  }

  void widen(const S* from, int64_t count, const Beside& asks, T* to) {
    if constexpr (kWiden)
      for (int64_t j = 0; j < count; j += 64) {
        ask_beside(from + j, 64, asks);
        for (int64_t i = j; i < j + 64 && i < count; i += kGroup)
          store_group(to + i, load(from + i), load(from + i + kColumns));
      }
  }

  // While `bytes` are read: for what lies in other blocks beside them, or with tiles for all of those.
  void ask_beside(const S* from, int64_t bytes, const Beside& asks) {
    if constexpr (kTiles)
      ask(bytes / 64);
    else
      asks.all(from, bytes);
  }

  // A group's step of `position`; the minima lie a block's size behind.
  const uint16_t* steps(const Scales& scale, int64_t position, int64_t group) const {
    const int64_t groups = (a_.padded_dim + kCacheGroup - 1) / kCacheGroup;
    return scales_of(scale, position, groups * 2 * a_.block_size) + group * 2 * a_.block_size +
           position % a_.block_size;
  }

  // A copy of a group's panels with zeros from position `count` on.
  void cut(const Group& from, int64_t count, T* to) const {
    constexpr int64_t v = kVnni<T>, line = kColumns * v;
    const int64_t whole = count / v * line;
    for (int64_t p = 0; p < a_.padded_values / kColumns; p++, to += kGroup * kColumns) {
      const T* panel = from.values + p * from.stride;
      if (to != panel) __builtin_memcpy(to, panel, static_cast<size_t>(whole) * sizeof(T));
      for (int64_t j = whole; j < kGroup * kColumns; j++)
        to[j] = j < whole + line && j % v < count % v ? panel[j] : T{};
    }
  }

  const AttentionArgs& a_;
  const Task& t_;
  int64_t head_size_, head_bytes_;
  Blocks blocks_;
  float* steps_;  // a group of keys' steps and minima
  Place next_ = {};
};

}  // namespace penstock::PENSTOCK_ISA

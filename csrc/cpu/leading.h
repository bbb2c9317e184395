// The k largest logits of rows, without a sort of the vocabulary: one pass of block maxima, whose
// k-th largest is a threshold that at least k values reach; those that do are gathered and sorted.
#pragma once

#include "logits.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// Orders logits as unsigned numbers: larger first, NaN before all, the lower id among equals.
// Types of this file's own keep each instruction set's instances of std's templates apart.
struct Key {
  uint64_t bits;
  int64_t id() const { return static_cast<int64_t>(~static_cast<uint32_t>(bits)); }
};
struct KeyBefore {
  bool operator()(Key a, Key b) const { return a.bits > b.bits; }
};
struct Maximum {
  float value;
};
struct MaximumBefore {
  bool operator()(Maximum a, Maximum b) const { return a.value > b.value; }
};

static inline Key key_of(float x, int64_t id) {
  const float same = x == 0.0f ? 0.0f : x;  // -0 equals 0
  uint32_t u;
  __builtin_memcpy(&u, &same, 4);
  u = x != x ? 0xffffffffu : u >> 31 ? ~u : u | 0x80000000u;
  return {static_cast<uint64_t>(u) << 32 | static_cast<uint32_t>(~static_cast<uint32_t>(id))};
}

// At least k of a row's logits are ≥ this: k blocks have such a maximum.
static inline float threshold(const float* maxima, int64_t blocks, int64_t k, Maximum* copy) {
  if (blocks < k) return -kInfinity;
  for (int64_t b = 0; b < blocks; b++) copy[b].value = maxima[b];
  std::nth_element(copy, copy + (k - 1), copy + blocks, MaximumBefore{});
  return copy[k - 1].value;
}

// The k first of the keys offered, among at most `capacity`: when that is full, the k first stay,
// and from then on only those before the last of them are taken.
struct Leaders {
  Key* keys;
  int64_t k, capacity, count = 0;
  uint64_t floor = 0;

  void offer(Key key) {
    if (key.bits <= floor) return;
    if (count == capacity) compact();
    keys[count++] = key;
  }
  void compact() {
    std::nth_element(keys, keys + (k - 1), keys + count, KeyBefore{});
    floor = keys[k - 1].bits;
    count = k;
  }
};

// Offers those logits of a block that are ≥ least.
static inline void offer_block(const float* x, int64_t first, int length, float least,
                               Leaders& leaders) {
  for (int j = 0; j < length; j += 16) {
    unsigned lanes = not_less(load_logits(x + first + j, length - j), set1(least));
    if (length - j < 16) lanes &= (1u << (length - j)) - 1;
    for (; lanes; lanes &= lanes - 1) {
      const int64_t id = first + j + __builtin_ctz(lanes);
      leaders.offer(key_of(x[id], id));
    }
  }
}

// How many logits of a row have a maximum of their own where its k largest are wanted: so few that
// a threshold between the maxima lets hardly more than k pass.
static inline int64_t block_for(int64_t size, int64_t k) {
  int64_t block = kBlock;
  while (block > 16 && size < 3 * k * block) block /= 2;
  return block;
}

// The k first of a row in order, as keys in this thread's memory, which has `more` bytes behind
// them. maxima: of the row's blocks; strange: there may be a NaN.
static inline Key* leading(const float* x, int64_t size, int64_t k, const float* maxima,
                           bool strange, size_t more = 0) {
  const int64_t block = block_for(size, k), blocks = (size + block - 1) / block;
  const int64_t capacity = 4 * k + 256;
  const size_t bytes = static_cast<size_t>(capacity) * sizeof(Key);
  const size_t copy = static_cast<size_t>(blocks) * sizeof(Maximum);
  Key* keys = static_cast<Key*>(scratch(Scratch::select, bytes + std::max(copy, more)));
  Leaders leaders = {keys, k, capacity};
  if (strange) {  // a broken row: every logit takes part, NaN as the largest
    for (int64_t id = 0; id < size; id++) leaders.offer(key_of(x[id], id));
  } else {
    float least = threshold(maxima, blocks, k, reinterpret_cast<Maximum*>(keys + capacity));
    for (int64_t b = 0; b < blocks; b++) {
      if (maxima[b] < least) continue;
      offer_block(x, b * block, length_of(b * block, size, block), least, leaders);
      if (leaders.floor) least = x[Key{leaders.floor}.id()];
    }
  }
  if (leaders.count > k) leaders.compact();
  std::sort(keys, keys + k, KeyBefore{});
  return keys;
}

// What is read of every logit before a row's k largest are chosen.
struct Reading {
  float* maxima;   // [rows, blocks of block_for]
  float* strange;  // [rows, slices]: 1 where there may be a NaN
  float* sums;     // [rows, blocks of kBlock] of e^((x - peak) / temperature)
  int64_t blocks, slices, spans;

  const float* maxima_of(int64_t row) const { return maxima + row * blocks; }
  bool is_strange(int64_t row) const {
    bool found = false;
    for (int64_t i = 0; i < slices; i++) found |= strange[row * slices + i] > 0.0f;
    return found;
  }
  // The row's largest number, NaN and +inf aside.
  float peak(int64_t row) const {
    float best = -kInfinity;
    for (int64_t b = 0; b < blocks; b++) best = std::max(best, maxima_of(row)[b]);
    return best;
  }
  // The sum of a row's exponentials: blocks in order.
  double total(int64_t row) const {
    double sum = 0.0;
    for (int64_t b = 0; b < spans; b++) sum += static_cast<double>(sums[row * spans + b]);
    return sum;
  }
};

// The maxima of the blocks of a row from `first` to `last`; 1 where there may be a NaN.
static inline float see_maxima(const float* x, int64_t size, int64_t block, int64_t first,
                               int64_t last, float* maxima) {
  F16 strange = zero();
  for (; first < last; first += block)
    maxima[first / block] = block_max(x + first, length_of(first, size, block), strange);
  return reduce_max(strange);
}

static inline void see_sums(const LeadingArgs& a, const Reading& read, int64_t row,
                            int64_t first, int64_t last) {
  const float peak = read.peak(row), inverse = 1.0f / a.temperature[row];
  if (!(peak - peak == 0.0f)) return;  // nothing to weigh
  const FlushDenormals flush;
  const float* x = a.logits + row * a.stride;
  for (; first < last; first += kBlock)
    read.sums[row * read.spans + first / kBlock] =
        block_sum(x + first, length_of(first, a.size), peak, inverse);
}

// Reads all rows and lets finish(reading, row) choose; few rows are read by every thread.
template <typename Finish>
static inline void over_leading(const LeadingArgs& a, bool weighed, Finish finish) {
  const int threads = a.rows * a.size > kParallel ? a.threads : 1;
  const int64_t block = block_for(a.size, a.k);
  Reading read;
  read.blocks = (a.size + block - 1) / block;
  read.spans = (a.size + kBlock - 1) / kBlock;
  read.slices =
      threads == 1 || a.rows >= 4 * threads ? 1 : std::max<int64_t>(1, a.size / kSlice);
  const int64_t length = (a.size + read.slices * kBlock - 1) / (read.slices * kBlock) * kBlock;
  const int64_t floats = a.rows * (read.blocks + read.slices + read.spans);
  read.maxima = static_cast<float*>(
      scratch(Scratch::partials, static_cast<size_t>(floats) * sizeof(float)));
  read.strange = read.maxima + a.rows * read.blocks;
  read.sums = read.strange + a.rows * read.slices;
  const auto maxima = [&](int64_t row, int64_t slice) {
    read.strange[row * read.slices + slice] =
        see_maxima(a.logits + row * a.stride, a.size, block, std::min(slice * length, a.size),
                   std::min((slice + 1) * length, a.size), read.maxima + row * read.blocks);
  };
  const auto sums = [&](int64_t row, int64_t slice) {
    see_sums(a, read, row, std::min(slice * length, a.size),
             std::min((slice + 1) * length, a.size));
  };
  if (read.slices == 1) {
    parallel(threads, a.rows, [&](int64_t row) {
      maxima(row, 0);
      if (weighed) sums(row, 0);
      finish(read, row);
    });
    return;
  }
  const int64_t parts = a.rows * read.slices;
  parallel(threads, parts, [&](int64_t i) { maxima(i / read.slices, i % read.slices); });
  if (weighed)
    parallel(threads, parts, [&](int64_t i) { sums(i / read.slices, i % read.slices); });
  parallel(threads, a.rows, [&](int64_t row) { finish(read, row); });
}

// The share of the whole that each of the leading logits `values` [k] has; 0 in a row whose largest
// isn't a finite number.
static inline void weigh(const LeadingArgs& a, const Reading& read, int64_t row,
                         const float* values, float* weights) {
  const float peak = values[0], inverse = 1.0f / a.temperature[row];
  if (!(peak - peak == 0.0f)) {
    for (int64_t j = 0; j < a.k; j++) weights[j] = 0.0f;
    return;
  }
  const FlushDenormals flush;
  const F16 total = set1(static_cast<float>(read.total(row)));
  for (int64_t j = 0; j < a.k; j += 16) {
    const int count = a.k - j < 16 ? static_cast<int>(a.k - j) : 16;
    store_some(weights + j, weights_of(values + j, count, peak, inverse) / total, count);
  }
}

}  // namespace
}  // namespace penstock::PENSTOCK_ISA

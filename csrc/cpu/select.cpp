// Rows of logits: the largest, the k largest without a sort of the vocabulary, and draws by
// inverting a distribution. A row depends on no other row.
#include <algorithm>

#include "parallel.h"
#include "vec.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int64_t kBlock = 256;         // logits per maximum and per partial sum
constexpr int64_t kScan = 2048;         // logits per maximum where only the largest is wanted
constexpr int64_t kSlice = 16 * 1024;   // logits of a row that are worth a part of their own
constexpr int64_t kParallel = 64 * 1024;  // below this many logits one thread does it all
constexpr int kAhead = 1024;  // logits to prefetch ahead: memory answers late
constexpr float kInfinity = __builtin_inff();

// How much of a block that begins at `first` there is.
int length_of(int64_t first, int64_t size, int64_t block = kBlock) {
  return static_cast<int>(size - first < block ? size - first : block);
}

// Sixteen logits of which `count` exist; the others are -inf.
F16 load_logits(const float* x, int count) {
  return count >= 16 ? load(x) : keep_first(load_first(x, count), count, -kInfinity);
}

// A running maximum of numbers, NaN aside; `strange` is 1 where a lane saw NaN or +inf.
struct Running {
  F16 best = set1(-kInfinity), strange = zero();
  void see(F16 v) {
    best = max(v, best);  // in this order a NaN leaves `best` as it is
    strange = where_less(v, set1(kInfinity), strange, set1(1.0f));
  }
  void join(const Running& other) {
    best = max(best, other.best);
    strange = max(strange, other.strange);
  }
};

// The largest number of a block; `strange` as in Running.
float block_max(const float* x, int count, F16& strange) {
  Running a, b;  // two, so that neither waits for itself
  int j = 0;
  for (; j + 32 <= count; j += 32) {
    __builtin_prefetch(x + j + kAhead);
    __builtin_prefetch(x + j + 16 + kAhead);
    a.see(load(x + j));
    b.see(load(x + j + 16));
  }
  for (; j < count; j += 16) a.see(load_logits(x + j, count - j));
  a.join(b);
  strange = max(strange, a.strange);
  return reduce_max(a.best);
}

// What is known of some logits of a row once they have been read.
struct Peak {
  float best;
  int64_t at;    // where the block of kScan begins that holds the first of the largest
  bool strange;  // there may be a NaN
};

Peak scan(const float* x, int64_t first, int64_t last) {
  F16 strange = zero();
  Peak peak = {-kInfinity, first, false};
  for (; first < last; first += kScan) {
    const float found = block_max(x + first, length_of(first, last, kScan), strange);
    if (found > peak.best) peak.best = found, peak.at = first;
  }
  peak.strange = reduce_max(strange) > 0.0f;
  return peak;
}

// The place of a row's largest logit: the first of equals; the first NaN if there is one. `peaks`
// are those of the row's slices, in order.
int64_t largest(const float* x, int64_t size, const Peak* peaks, int64_t slices) {
  Peak peak = peaks[0];
  for (int64_t i = 1; i < slices; i++) {
    if (peaks[i].best > peak.best) peak.best = peaks[i].best, peak.at = peaks[i].at;
    peak.strange |= peaks[i].strange;
  }
  if (peak.strange)
    for (int64_t i = 0; i < size; i++)
      if (x[i] != x[i]) return i;
  while (x[peak.at] != peak.best) peak.at++;
  return peak.at;
}

int64_t largest(const float* x, int64_t size) {
  const Peak peak = scan(x, 0, size);
  return largest(x, size, &peak, 1);
}

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

Key key_of(float x, int64_t id) {
  const float same = x == 0.0f ? 0.0f : x;  // -0 equals 0
  uint32_t u;
  __builtin_memcpy(&u, &same, 4);
  u = x != x ? 0xffffffffu : u >> 31 ? ~u : u | 0x80000000u;
  return {static_cast<uint64_t>(u) << 32 | static_cast<uint32_t>(~static_cast<uint32_t>(id))};
}

// At least k of a row's logits are ≥ this: k blocks have such a maximum.
float threshold(const float* maxima, int64_t blocks, int64_t k, Maximum* copy) {
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
void offer_block(const float* x, int64_t first, int length, float least, Leaders& leaders) {
  for (int j = 0; j < length; j += 16) {
    unsigned lanes = not_less(load_logits(x + first + j, length - j), set1(least));
    if (length - j < 16) lanes &= (1u << (length - j)) - 1;
    for (; lanes; lanes &= lanes - 1) {
      const int64_t id = first + j + __builtin_ctz(lanes);
      leaders.offer(key_of(x[id], id));
    }
  }
}

// The k first of a row in order, as keys in this thread's memory.
const Key* leading(const float* x, int64_t size, int64_t k) {
  int64_t block = kBlock;  // enough of them for a threshold that few others reach
  while (block > 16 && size < 3 * k * block) block /= 2;
  const int64_t blocks = (size + block - 1) / block;
  const int64_t capacity = 4 * k + 256;
  const size_t bytes = static_cast<size_t>(capacity + blocks) * sizeof(Key);
  Key* keys = static_cast<Key*>(scratch(Scratch::select, bytes));
  float* maxima = reinterpret_cast<float*>(keys + capacity);
  F16 strange = zero();
  for (int64_t b = 0; b < blocks; b++)
    maxima[b] = block_max(x + b * block, length_of(b * block, size, block), strange);
  Leaders leaders = {keys, k, capacity};
  if (reduce_max(strange) > 0.0f) {  // a broken row: every logit takes part, NaN as the largest
    for (int64_t id = 0; id < size; id++) leaders.offer(key_of(x[id], id));
  } else {
    float least = threshold(maxima, blocks, k, reinterpret_cast<Maximum*>(maxima + blocks));
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

// e^((x - peak) · inverse) of up to sixteen logits, 0 for those that don't exist.
F16 weights_of(const float* x, int count, float peak, float inverse) {
  return exp((load_logits(x, count) - set1(peak)) * set1(inverse));
}

float block_sum(const float* x, int count, float peak, float inverse) {
  F16 sum = zero();
  for (int j = 0; j < count; j += 16) sum = sum + weights_of(x + j, count - j, peak, inverse);
  return reduce_add(sum);
}

// The place where the running sum of weights passes u of the total (-1: there is no weight), and
// how far into that weight u lies.
struct Place {
  int64_t at;
  double rest;
};

template <typename Weight>
Place invert(Weight weight, int64_t count, double u) {
  double total = 0.0;
  for (int64_t i = 0; i < count; i++) total += weight(i);
  if (!(total > 0.0 && total < __builtin_inf())) return {-1, 0.0};
  double target = u * total;
  if (!(target < total)) {  // just below, whatever the product rounds to: some place passes it
    uint64_t bits;
    __builtin_memcpy(&bits, &total, 8);
    bits--;
    __builtin_memcpy(&target, &bits, 8);
  }
  double below = 0.0;
  for (int64_t i = 0; i < count; i++) {
    const double upper = below + weight(i);
    if (upper > target) return {i, (target - below) / (upper - below)};
    below = upper;
  }
  return {-1, 0.0};  // u is NaN
}

void top_k_row(const TopKArgs& a, int64_t row) {
  const float* x = a.logits + row * a.stride;
  const Key* keys = leading(x, a.size, a.k);
  float* values = a.values + row * a.k;
  for (int64_t j = 0; j < a.k; j++) {
    a.ids[row * a.k + j] = keys[j].id();
    values[j] = x[keys[j].id()];
  }
  if (!a.weights) return;
  const float peak = values[0], inverse = 1.0f / a.temperature[row];
  float* weights = a.weights + row * a.k;
  if (!(peak - peak == 0.0f)) {  // not a finite number
    for (int64_t j = 0; j < a.k; j++) weights[j] = 0.0f;
    return;
  }
  const FlushDenormals flush;
  double sum = 0.0;
  for (int64_t first = 0; first < a.size; first += kBlock)
    sum += static_cast<double>(block_sum(x + first, length_of(first, a.size), peak, inverse));
  const F16 total = set1(static_cast<float>(sum));
  for (int64_t j = 0; j < a.k; j += 16) {
    const int count = a.k - j < 16 ? static_cast<int>(a.k - j) : 16;
    store_some(weights + j, weights_of(values + j, count, peak, inverse) / total, count);
  }
}

void draw_plain_row(const DrawPlainArgs& a, int64_t row) {
  const float* x = a.logits + row * a.stride;
  const float peak = x[largest(x, a.size)], inverse = 1.0f / a.temperature[row];
  a.peaks[row] = peak;
  a.ids[row] = -1;
  if (!(peak - peak == 0.0f)) return;  // not a finite number
  const FlushDenormals flush;
  const int64_t blocks = (a.size + kBlock - 1) / kBlock;
  float* sums = static_cast<float*>(
      scratch(Scratch::select, static_cast<size_t>(blocks + kBlock) * sizeof(float)));
  for (int64_t b = 0; b < blocks; b++)
    sums[b] = block_sum(x + b * kBlock, length_of(b * kBlock, a.size), peak, inverse);
  const Place outer = invert([=](int64_t b) { return static_cast<double>(sums[b]); }, blocks,
                             a.u[row]);
  if (outer.at < 0) return;
  float* inside = sums + blocks;
  const int64_t first = outer.at * kBlock;
  const int length = length_of(first, a.size);
  for (int j = 0; j < length; j += 16)
    store(inside + j, weights_of(x + first + j, length - j, peak, inverse));
  const Place inner = invert([=](int64_t i) { return static_cast<double>(inside[i]); }, length,
                             outer.rest);
  a.ids[row] = first + inner.at;
}

struct Candidate {
  int64_t id;
  float weight;
};
struct IdBefore {
  bool operator()(const Candidate& a, const Candidate& b) const { return a.id < b.id; }
};

void draw_from_row(const DrawFromArgs& a, int64_t row) {
  const int64_t* ids = a.ids + row * a.count;
  const float* weights = a.weights + row * a.count;
  Candidate* kept = static_cast<Candidate*>(
      scratch(Scratch::select, static_cast<size_t>(a.count) * sizeof(Candidate)));
  int64_t count = 0;
  for (int64_t j = 0; j < a.count; j++)
    if (!(weights[j] <= 0.0f)) kept[count++] = {ids[j], weights[j]};
  std::sort(kept, kept + count, IdBefore{});
  const Place place = invert([=](int64_t i) { return static_cast<double>(kept[i].weight); }, count,
                             a.u[row]);
  a.out[row] = place.at < 0 ? -1 : kept[place.at].id;
}

// Up to 32 logits: those without a bit become -inf. No branch looks at a bit of 32 that are there:
// they can't be predicted, and a store that changes nothing costs less than a wrong guess.
void mask_word(float* x, uint32_t allowed, int count) {
  if (count == 32) {
    put_lanes(x, ~allowed & 0xffff, set1(-kInfinity));
    put_lanes(x + 16, ~allowed >> 16, set1(-kInfinity));
    return;
  }
  for (int j = 0; j < count; j++)
    if (!(allowed >> j & 1)) x[j] = -kInfinity;
}

void mask_row(const MaskArgs& a, int64_t i) {
  float* x = a.logits + a.rows[i] * a.stride;
  const uint32_t* bits = a.bits + i * a.words;
  for (int64_t w = 0; w < a.words; w++)
    mask_word(x + 32 * w, bits[w], length_of(32 * w, a.size, 32));
}

template <typename Args>
void over_rows(const Args& a, int64_t rows, int64_t work, void (*row)(const Args&, int64_t)) {
  parallel(work > kParallel ? a.threads : 1, rows, [&](int64_t r) { row(a, r); });
}

}  // namespace

void argmax(const ArgmaxArgs& a) {
  const int threads = a.rows * a.size > kParallel ? a.threads : 1;
  // few rows are cut into slices, so that every thread has some
  const int64_t slices =
      threads == 1 || a.rows >= 4 * threads ? 1 : std::max<int64_t>(1, a.size / kSlice);
  const int64_t length = (a.size + slices * kScan - 1) / (slices * kScan) * kScan;
  Peak* peaks = static_cast<Peak*>(
      scratch(Scratch::partials, static_cast<size_t>(a.rows * slices) * sizeof(Peak)));
  parallel(threads, a.rows * slices, [&](int64_t i) {
    const int64_t first = i % slices * length;
    peaks[i] = scan(a.logits + i / slices * a.stride, std::min(first, a.size),
                    std::min(first + length, a.size));
  });
  for (int64_t row = 0; row < a.rows; row++) {
    const float* x = a.logits + row * a.stride;
    a.ids[row] = largest(x, a.size, peaks + row * slices, slices);
    a.values[row] = x[a.ids[row]];
  }
}

void mask(const MaskArgs& a) { over_rows(a, a.count, a.count * a.size, mask_row); }

void top_k(const TopKArgs& a) { over_rows(a, a.rows, a.rows * a.size, top_k_row); }

void draw_plain(const DrawPlainArgs& a) { over_rows(a, a.rows, a.rows * a.size, draw_plain_row); }

void draw_from(const DrawFromArgs& a) { over_rows(a, a.rows, a.rows * a.count, draw_from_row); }

}  // namespace penstock::PENSTOCK_ISA

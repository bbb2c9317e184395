// One token of each row, by inverting its distribution, and the random numbers behind them.
#include "leading.h"

namespace penstock::PENSTOCK_ISA {
namespace {

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

// The least weight that top_p keeps of `count` in falling order: sums in float64, each rounded.
float nucleus_floor(const float* weights, int64_t count, float top_p) {
  if (!(top_p < 1.0f)) return 0.0f;  // rounded sums may reach 1 before the last token
  double sum = 0.0;
  int64_t last = 0;
  for (; last < count - 1; last++) {
    sum += static_cast<double>(weights[last]);
    if (!(static_cast<float>(sum) < top_p)) break;
  }
  return weights[last];
}

struct Candidate {
  int64_t id;
  float weight;
};
struct IdBefore {
  bool operator()(const Candidate& a, const Candidate& b) const { return a.id < b.id; }
};

// One of the candidates, of any order; -1 if none has a weight.
int64_t draw_one(Candidate* kept, int64_t count, double u) {
  std::sort(kept, kept + count, IdBefore{});
  const Place place =
      invert([=](int64_t i) { return static_cast<double>(kept[i].weight); }, count, u);
  return place.at < 0 ? -1 : kept[place.at].id;
}

// A token of the nucleus if the k largest hold all of it. maxima: for that k.
int64_t draw_nucleus_of(const DrawNucleusArgs& a, const Reading& read, int64_t row,
                        const float* maxima) {
  const float* x = a.logits + row * a.stride;
  const size_t behind = static_cast<size_t>(a.k) * (2 * sizeof(float) + sizeof(Candidate));
  Key* keys = leading(x, a.size, a.k, maxima, read.is_strange(row), behind);
  Candidate* kept = reinterpret_cast<Candidate*>(keys + 4 * a.k + 256);
  float* values = reinterpret_cast<float*>(kept + a.k);
  float* weights = values + a.k;
  for (int64_t j = 0; j < a.k; j++) values[j] = x[keys[j].id()];
  weigh(a, read, row, values, weights);
  a.peaks[row] = values[0];
  const float floor = nucleus_floor(weights, a.k, a.top_p[row]);
  if (a.k < a.size && weights[a.k - 1] >= floor && weights[0] > 0.0f) return kBeyond;
  int64_t count = 0;
  for (int64_t j = 0; j < a.k; j++)
    if (!(weights[j] < floor) && !(weights[j] <= 0.0f)) kept[count++] = {keys[j].id(), weights[j]};
  return draw_one(kept, count, a.u[row]);
}

void draw_nucleus_row(const DrawNucleusArgs& a, const Reading& read, int64_t row) {
  a.out[row] = draw_nucleus_of(a, read, row, read.maxima_of(row));
  if (a.out[row] != kBeyond || a.wide <= a.k) return;
  DrawNucleusArgs wider = a;
  wider.k = a.wide;
  const int64_t block = block_for(a.size, wider.k);
  float* maxima = static_cast<float*>(scratch(
      Scratch::scores, static_cast<size_t>((a.size + block - 1) / block) * sizeof(float)));
  see_maxima(a.logits + row * a.stride, a.size, block, 0, a.size, maxima);
  a.out[row] = draw_nucleus_of(wider, read, row, maxima);
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

void draw_from_row(const DrawFromArgs& a, int64_t row) {
  const int64_t* ids = a.ids + row * a.count;
  const float* weights = a.weights + row * a.count;
  const float floor = a.top_p ? nucleus_floor(weights, a.count, a.top_p[row]) : 0.0f;
  Candidate* kept = static_cast<Candidate*>(
      scratch(Scratch::select, static_cast<size_t>(a.count) * sizeof(Candidate)));
  int64_t count = 0;
  for (int64_t j = 0; j < a.count; j++)
    if (!(weights[j] < floor) && !(weights[j] <= 0.0f)) kept[count++] = {ids[j], weights[j]};
  a.out[row] = draw_one(kept, count, a.u[row]);
}

// Philox4x32-10: a counter of four words and a key of two to four random words.
void philox(uint32_t counter[4], uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; round++) {
    const uint64_t even = uint64_t{0xD2511F53} * counter[0];
    const uint64_t odd = uint64_t{0xCD9E8D57} * counter[2];
    const uint32_t high = static_cast<uint32_t>(odd >> 32) ^ counter[1] ^ key0;
    const uint32_t low = static_cast<uint32_t>(even >> 32) ^ counter[3] ^ key1;
    counter[0] = high;
    counter[1] = static_cast<uint32_t>(odd);
    counter[2] = low;
    counter[3] = static_cast<uint32_t>(even);
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
}

}  // namespace

void draw_nucleus(const DrawNucleusArgs& a) {
  over_leading(a, true, [&](const Reading& read, int64_t row) { draw_nucleus_row(a, read, row); });
}

void draw_plain(const DrawPlainArgs& a) { over_rows(a, a.rows, a.rows * a.size, draw_plain_row); }

void draw_from(const DrawFromArgs& a) { over_rows(a, a.rows, a.rows * a.count, draw_from_row); }

void uniforms(const UniformsArgs& a) {
  for (int64_t i = 0; i < a.count; i++) {
    const uint64_t seed = static_cast<uint64_t>(a.seeds[i]);
    const uint64_t at = static_cast<uint64_t>(a.positions[i]);
    uint32_t words[4] = {static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32),
                         static_cast<uint32_t>(a.samples[i]), a.use};
    philox(words, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    const uint64_t bits = static_cast<uint64_t>(words[0] >> 5) << 26 | words[1] >> 6;
    a.out[i] = static_cast<double>(bits) * 0x1p-53;
  }
}

}  // namespace penstock::PENSTOCK_ISA

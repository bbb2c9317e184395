#include "ring.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "gathered.h"
#include "parallel.h"
#include "program.h"

namespace penstock {
namespace {

// This rank's rows among `count` from `first` on, into their place there.
void put_rows(const RingArgs& a, int64_t row_bytes, int64_t first, int64_t count, char* place) {
  const int64_t own = a.rows[a.at.rank];
  const int64_t from = std::max<int64_t>(own, first);
  const int64_t to = std::min<int64_t>(a.rows[a.at.rank + 1], first + count);
  const int64_t stride = a.qkv_stride * size_of(a.turned.dtype);
  const char* x = static_cast<const char*>(a.qkv);
  for (int64_t row = from; row < to; row++)
    std::memcpy(place + (row - first) * row_bytes, x + (row - own) * stride,
                static_cast<size_t>(row_bytes));
}

// All rows of queries, keys and values: where they were put if they have room there.
const char* all_rows(const RingArgs& a, int64_t row_bytes) {
  const int64_t most = a.at.place_bytes / row_bytes;
  if (a.total <= most) {
    char* all = place(a.at);
    put_rows(a, row_bytes, 0, a.total, all);
    meet(a.at);
    return all;
  }
  char* all = kept<char>(Scratch::all_rows, a.total * row_bytes);
  for (int64_t first = 0; first < a.total; first += most) {
    const int64_t count = std::min(most, a.total - first);
    char* some = place(a.at);
    put_rows(a, row_bytes, first, count, some);
    meet(a.at);
    std::memcpy(all + first * row_bytes, some, static_cast<size_t>(count * row_bytes));
  }
  return all;
}

// A task of attention, with what it has of all spans, and a span of keys and values.
void check_room(const RingArgs& a) {
  constexpr int64_t rows = 32, span = 256;
  const AttentionArgs& seen = a.attention;
  int64_t longest = 0;
  for (int64_t b = 0; b < seen.sequences; b++)
    longest = std::max<int64_t>(longest, seen.context_len[b]);
  const int64_t parts = (longest + span - 1) / span * rows * (2 + seen.padded_values) * 4;
  const int64_t block = seen.kv_heads * span * 4 * (2 * seen.padded_dim + 2);
  if (std::max(parts, block) > a.at.place_bytes)
    throw std::runtime_error("a context of " + std::to_string(longest) +
                             " tokens has no room in a meeting's place of " +
                             std::to_string(a.at.place_bytes) + " bytes");
}

}  // namespace

void ring_attention(const RingArgs& given) {
  if (given.total == 0) return;
  check_room(given);
  RingArgs a = given;
  RotaryCacheArgs& turned = a.turned;
  const char* all = all_rows(a, a.columns * size_of(turned.dtype));
  place_heads(turned, all, a.columns);
  turned.tokens = a.total;
  turned.threads = a.threads;
  turned.q_out = kept<char>(Scratch::queries,
                            a.total * turned.heads * turned.kept * size_of(turned.dtype));
  kernels().rotary_cache(turned);
  a.attention.q = turned.q_out;
  a.attention.out = a.out;
  a.attention.first_token = a.rows[a.at.rank];
  a.attention.threads = a.threads;
  kernels().ring_attention(a);
}

void gather_rows(const GatherRowsArgs& a) {
  const Meeting& m = a.at;
  const int64_t most = m.place_bytes / a.row_bytes, own = a.rows[m.rank];
  for (int64_t first = 0; first < a.count; first += most) {
    const int64_t count = std::min(most, a.count - first);
    char* all = place(m);
    for (int64_t i = 0; i < count; i++) {
      const int64_t row = a.wanted[first + i];
      if (row < own || row >= a.rows[m.rank + 1]) continue;
      std::memcpy(all + i * a.row_bytes, static_cast<const char*>(a.x) + (row - own) * a.row_bytes,
                  static_cast<size_t>(a.row_bytes));
    }
    meet(m);
    if (m.rank == 0)
      std::memcpy(static_cast<char*>(a.y) + first * a.row_bytes, all,
                  static_cast<size_t>(count * a.row_bytes));
  }
}

}  // namespace penstock

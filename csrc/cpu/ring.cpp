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

// Rows of which a rank has rows[rank] to rows[rank + 1] of `total`.
struct SharedRows {
  const Meeting& at;
  const int32_t* rows;
  const void* own;
  int64_t stride;  // bytes
  int64_t total, row_bytes;

  // Its own among `count` from `first` on, into their place there.
  void put(int64_t first, int64_t count, char* place) const {
    const int64_t begins = rows[at.rank];
    const int64_t from = std::max<int64_t>(begins, first);
    const int64_t to = std::min<int64_t>(rows[at.rank + 1], first + count);
    const char* x = static_cast<const char*>(own);
    for (int64_t row = from; row < to; row++)
      std::memcpy(place + (row - first) * row_bytes, x + (row - begins) * stride,
                  static_cast<size_t>(row_bytes));
  }
};

// All of them: where they were put if they have room there.
const char* all_rows(const SharedRows& r) {
  const int64_t most = r.at.place_bytes / r.row_bytes;
  if (r.total <= most) {
    char* all = place(r.at);
    r.put(0, r.total, all);
    meet(r.at);
    return all;
  }
  char* all = kept<char>(Scratch::all_rows, r.total * r.row_bytes);
  for (int64_t first = 0; first < r.total; first += most) {
    const int64_t count = std::min(most, r.total - first);
    char* some = place(r.at);
    r.put(first, count, some);
    meet(r.at);
    std::memcpy(all + first * r.row_bytes, some, static_cast<size_t>(count * r.row_bytes));
  }
  return all;
}

// A task of attention, with what it has of all spans, and a span of keys and values. Latents always pass
// by, so that nobody puts parts of them there.
void check_room(const RingArgs& a) {
  constexpr int64_t rows = 32, span = 256;
  const AttentionArgs& seen = a.attention;
  int64_t longest = 0;
  for (int64_t b = 0; b < seen.sequences; b++)
    longest = std::max<int64_t>(longest, seen.context_len[b]);
  const int64_t spans = seen.latent ? 0 : (longest + span - 1) / span;
  const int64_t parts = spans * rows * (2 + seen.padded_values) * 4;
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
  AttentionArgs& seen = a.attention;
  seen.out = a.out;
  seen.out_stride = seen.heads * seen.value_dim;
  seen.first_token = a.rows[a.at.rank];
  seen.threads = a.threads;
  if (seen.latent) {
    seen.q = a.qkv;
    seen.first_query = seen.first_token;
    return kernels().ring_attention(a);
  }
  RotaryCacheArgs& turned = a.turned;
  const int64_t item = size_of(turned.dtype);
  const char* all = all_rows(
      {a.at, a.rows, a.qkv, a.qkv_stride * item, a.total, a.columns * item});
  place_heads(turned, all, a.columns);
  turned.tokens = a.total;
  turned.threads = a.threads;
  turned.q_out = kept<char>(Scratch::queries, a.total * turned.heads * turned.kept * item);
  kernels().rotary_cache(turned);
  seen.q = turned.q_out;
  kernels().ring_attention(a);
}

void ring_latents(const RingLatentsArgs& given) {
  if (given.total == 0) return;
  LatentCacheArgs a = given.kept;
  const int64_t item = size_of(a.dtype);
  a.x = all_rows({given.at, given.rows, given.kv, given.kv_stride * item, given.total,
                  given.columns * item});
  a.stride = given.columns;
  a.tokens = given.total;
  a.threads = given.threads;
  kernels().latent_cache(a);
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

// Ranks that have a part of each sequence: its rows, and some spans of its keys and values. ops/ring.py.
#pragma once

#include "latent.h"
#include "ranks.h"

namespace penstock {

// Everything between the QKV projection and attention's result, of rows that ranks share. Over latents
// `qkv` are queries, and nothing is turned.
struct RingArgs {
  RotaryCacheArgs turned;   // of all rows, into this rank's cache
  AttentionArgs attention;  // over that: blocks of a span; an entry of a table has one of each rank
  Meeting at;
  const int32_t* rows;  // [size + 1]: rank r computes rows[r] to rows[r + 1]
  const void* qkv;      // its own
  int64_t qkv_stride;   // elements
  int64_t columns;      // of a row of it
  void* out;            // its own, [rows, heads · kept] contiguous
  int64_t total;        // rows of all ranks
  int threads;
};

// Latents of all ranks' rows, of which each keeps its own spans'.
struct RingLatentsArgs {
  LatentCacheArgs kept;  // of all rows
  Meeting at;
  const int32_t* rows;
  const void* kv;     // its own rows
  int64_t kv_stride;  // elements
  int64_t columns, total;
  int threads;
};

// Rows of all ranks' that the first one needs.
struct GatherRowsArgs {
  Meeting at;
  const int32_t* rows;    // as above
  const int32_t* wanted;  // [count]
  const void* x;          // its own, contiguous
  void* y;                // [count, …], contiguous; the first rank's
  int64_t count, row_bytes;
  int threads;
};

// All throw std::runtime_error where another rank has gone, or what is shared has no room.
void ring_attention(const RingArgs& a);
void ring_latents(const RingLatentsArgs& a);
void gather_rows(const GatherRowsArgs& a);

}  // namespace penstock

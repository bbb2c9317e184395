// Attention over latents: what its kernels are given. ops/mla.py.
//
// A token's key is its latent and a rotated part that all heads share; its value is the latent again. So a
// cache holds keys alone, in the layout of keys (rotary_cache.cpp), and attention turns what it reads of
// them into the layout of values (turned.h).
#pragma once

#include "kernels.h"

namespace penstock {

// Angles of positions.
struct Angles {
  const float* cos_sin;  // [count, dim]: cosines, then sines
  int64_t count, dim;
  bool interleaved;
  const int32_t* positions;  // [tokens]
  int64_t last = INT64_MAX;  // positions beyond it turn as it does
};

// The last `angles.dim` values of each head, rotated, from one matrix to another.
struct TurnArgs {
  const void* x;  // of the first head; x_head elements on is the next one's
  int64_t x_stride, x_head;
  void* y;
  int64_t y_stride, y_head;
  Angles angles;
  int64_t tokens, heads;
  DType dtype;
  int threads;
};

// Normalises latents, rotates what follows them, and writes both into the cache.
struct LatentCacheArgs {
  const void* x;  // [tokens, rank + angles.dim]
  int64_t stride;
  const float* norm;  // [rank]
  float eps;
  int64_t rank;
  Angles angles;
  const int32_t* slots;
  const int32_t* copies;  // as in RotaryCacheArgs
  int64_t copied;
  void* cache;
  int64_t pitch;  // bytes from a block to the next
  int64_t blocks, block_size, padded_dim;
  int64_t tokens;
  DType dtype;
  int threads;
};

// y[t, h] = W[h] · x[t, h].
struct HeadsArgs {
  LinearArgs first;      // the first head's product
  int64_t weight_pitch;  // bytes from a head's matrix to the next
  const void* x;
  int64_t x_stride, x_head;  // elements from a row, and from a head, to the next
  void* y;
  int64_t y_stride, y_head;
  int64_t rows, heads;
  int threads;
};

void head_linear(const HeadsArgs& a);

// Queries for latents: their first parts through a matrix each, their last parts rotated.
struct LatentQueryArgs {
  HeadsArgs heads;
  Angles angles;
  int64_t sink_reach;  // as in RotaryCacheArgs
  int threads;
};

void latent_query(const LatentQueryArgs& a);

}  // namespace penstock

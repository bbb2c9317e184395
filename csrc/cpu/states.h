// Layers with states: what their kernels are given. ops/delta.py, ops/mamba2.py and ops/short_conv.py have
// the formulas and the layouts.
#pragma once

#include "kernels.h"

namespace penstock {

struct DeltaArgs {
  const void* x;  // [tokens, 2 · key_heads · key_dim + 2 · heads · value_dim]
  int64_t x_stride;
  const float* gates;  // [tokens, 2 · heads]
  int64_t gates_stride;
  const float* conv;   // [width, turned()]
  int64_t width;
  const float* rates;  // [heads]
  const float* shift;  // [heads]
  const float* norm;   // [value_dim]
  float eps;
  const int32_t* query_start;
  int64_t sequences;
  const int32_t* states;  // [sequences]; null: each begins with the step
  const int32_t* kept;    // [kept_count, 2]: a row and a slot, by rising rows
  int64_t kept_count;
  float* state;  // [slots, heads, value_dim / 16, key_dim, 16]
  void* inputs;  // [slots, width − 1, turned()]
  int64_t state_pitch, inputs_pitch;  // elements from a slot to the next
  int64_t slots;
  void* y;  // [tokens, heads · value_dim] contiguous
  int64_t tokens, key_heads, heads, key_dim, value_dim;
  DType dtype;
  int threads;

  int64_t turned() const { return 2 * key_heads * key_dim + heads * value_dim; }
  int64_t turned_from() const { return 0; }
};

struct MambaArgs {
  const void* x;  // [tokens, 2 · inner() + 2 · groups · key_dim]
  int64_t x_stride;
  const float* steps;  // [tokens, heads]
  int64_t steps_stride;
  const float* conv;  // [width, turned()]
  const float* bias;  // [turned()], or null
  int64_t width;
  const float* rates;  // [heads]
  const float* shift;  // [heads]
  const float* skip;   // [heads]
  const float* norm;   // [inner()]
  float eps;
  const int32_t* query_start;
  int64_t sequences;
  const int32_t* states;  // as DeltaArgs'
  const int32_t* kept;
  int64_t kept_count;
  float* state;  // [slots, heads, value_dim / 16, key_dim, 16]
  void* inputs;  // [slots, width − 1, turned()]
  int64_t state_pitch, inputs_pitch;
  int64_t slots;
  void* y;  // [tokens, inner()] contiguous
  int64_t tokens, groups, heads, key_dim, value_dim;
  DType dtype;
  int threads;

  int64_t inner() const { return heads * value_dim; }
  int64_t turned() const { return inner() + 2 * groups * key_dim; }
  int64_t turned_from() const { return inner(); }
};

struct ShortConvArgs {
  const void* x;  // [tokens, 3 · dim]: the first gate, the second, and what goes through both
  int64_t x_stride;
  const float* conv;  // [width, dim]
  const float* bias;  // [dim], or null
  int64_t width;
  const int32_t* query_start;
  int64_t sequences;
  const int32_t* states;  // as DeltaArgs'
  const int32_t* kept;
  int64_t kept_count;
  void* inputs;          // [slots, width − 1, dim]
  int64_t inputs_pitch;  // elements from a slot to the next
  int64_t slots;
  void* y;  // [tokens, dim] contiguous
  int64_t tokens, dim;
  DType dtype;
  int threads;
};

// y *= σ(x). ops/gate_by.py.
struct GateByArgs {
  const void* x;
  int64_t x_stride;
  void* y;
  int64_t y_stride;
  int64_t rows, dim;
  DType dtype;  // of both
  int threads;
};

}  // namespace penstock

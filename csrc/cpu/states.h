// Layers with states: what their kernels are given. ops/delta.py, ops/mamba2.py and ops/short_conv.py have
// the formulas and the layouts.
#pragma once

#include "kernels.h"

namespace penstock {

// What all of them are given: rows of which some columns go through a convolution over the last few tokens.
struct StatesArgs {
  const void* x;  // [tokens, …]
  int64_t x_stride;
  const float* conv;  // [width, turned]
  const float* bias;  // [turned], or null
  int64_t width, turned;
  const int32_t* query_start;
  int64_t sequences;
  const int32_t* states;  // [sequences]; null: each begins with the step
  const int32_t* kept;    // [kept_count, 2]: a row and a slot, by rising rows
  int64_t kept_count;
  void* inputs;          // [slots, width − 1, turned]: what the convolution still needs
  int64_t inputs_pitch;  // elements from a slot to the next
  int64_t slots;
  void* y;  // [tokens, …] contiguous
  int64_t tokens;
  DType dtype;  // of x, inputs and y
  int threads;
};

// x: [tokens, 3 · turned], the first gate, the second, and what goes through both. y: [tokens, turned].
struct ShortConvArgs : StatesArgs {};

// And of those with a state of each head, which fades and is added to. y: [tokens, inner()].
struct RecurrentArgs : StatesArgs {
  const float* gates;  // [tokens, …]: of the delta rule what fades and what is added, of Mamba steps
  int64_t gates_stride;
  const float* rates;  // [heads]
  const float* shift;  // [heads]
  const float* norm;
  float eps;
  float* state;         // [slots, heads, value_dim / 16, key_dim, 16]
  int64_t state_pitch;  // elements from a slot to the next
  int64_t heads, key_heads, key_dim, value_dim;
  int64_t turned_from;  // the first column of x that goes through the convolution

  int64_t inner() const { return heads * value_dim; }
};

// x: queries, keys and values, which are turned, and a gate. gates: [tokens, 2 · heads]; norm: [value_dim].
struct DeltaArgs : RecurrentArgs {
  float strength;  // times the sigmoids that say how much is added
};

// x: a gate, then values, keys and queries, which are turned. gates: [tokens, heads]; norm: [inner()].
struct MambaArgs : RecurrentArgs {
  const float* skip;  // [heads]
};

// y *= σ(x). ops/gate_by.py. Or y *= x, or y *= number: ops/multiply.py.
struct GateByArgs {
  const void* x;
  int64_t x_stride;
  int64_t first;        // of x's columns that are taken
  bool plain;           // y *= x
  const float* number;  // y *= number, and there is no x; may be null
  void* y;
  int64_t y_stride;
  int64_t rows, dim;
  DType dtype;  // of both
  int threads;
};

}  // namespace penstock

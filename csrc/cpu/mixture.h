// Mixtures of experts: what their kernels are given.
#pragma once

#include "ranks.h"

namespace penstock {

// How a router chooses and weighs. ops/route.py.
struct Routing {
  int64_t k;
  bool normalize;
  const float* correction;     // [experts], may be null: is added to shares before the choice
  bool sigmoid;                // a logit's share is its sigmoid; otherwise of a softmax
  int64_t groups, top_groups;  // of experts, and how many of them can be chosen from; 1, 1: none
  float scale;                 // of the weights
  float eps;                   // beside the sum of sigmoids that are normalized
  const float* each;           // [experts], may be null: multiplies the weights of each
};

struct RouteArgs {
  const float* logits;  // [rows, experts] contiguous
  int64_t rows, experts;
  Routing by;
  float* weights;   // [rows, k]
  int32_t* chosen;  // [rows, k]
  int threads;
};

// out[t] = Σ weights[t, j] · y[places[t, j]], in the order of j, rounded once. ops/grouped_linear.py.
struct CombineArgs {
  const void* y;  // contiguous
  const int32_t* places;   // [rows, k]
  const float* weights;    // [rows, k]
  void* out;
  int64_t out_stride;
  int64_t rows, k, dim;
  DType dtype;  // of y and out
  int threads;
};

// How far behind one expert's tensors the next one's lie, in bytes.
struct Pitch {
  int64_t weight, scale, zero, fine, bias;
};

// How ranks share a mixture: by the columns of both of its matrices, or each has some experts. Bounds
// are of ranks, [size + 1].
struct SharedExperts {
  Meeting at;
  const int32_t* up;       // of hidden columns; null: experts are whole
  const int32_t* down;     // of the result's columns
  const int32_t* experts;  // null: each rank has a part of all
};

// Each row through the experts that a router chooses. ops/experts.py.
struct ExpertsArgs {
  const void* x;
  int64_t x_stride;
  const void* asked;  // what the router reads in place of x; may be null
  int64_t asked_stride;
  void* y;
  int64_t y_stride;
  int64_t rows, count;
  Routing by;
  LinearArgs router, up, down;  // up and down: of the first expert
  Pitch up_pitch, down_pitch;
  SharedExperts shared;  // of one process: no meeting
  int64_t* used;  // is raised by the experts that any row chose; may be null
  int threads;
};

void experts(const ExpertsArgs& a);

}  // namespace penstock

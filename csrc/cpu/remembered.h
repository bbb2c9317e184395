// What the layers with states that go token by token have in common: what a sequence goes on from, the rows
// that its convolution sees, and what is left for others.
#pragma once

#include <algorithm>
#include <cstring>

#include "linear.h"
#include "states.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int64_t kChunk = 32;            // tokens whose rows are made at a time
constexpr int64_t kParallel = 32 * 1024;  // values below which a second thread isn't worth it
constexpr int64_t kMostWidth = 16;        // of the convolution

// To 64 aligned bytes of memory that nobody reads soon, past the caches: no line is fetched to be written.
inline void stream(float* p, F16 a) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, a.v);
#else
  _mm256_stream_ps(p, a.lo);
  _mm256_stream_ps(p + 8, a.hi);
#endif
}

// log(1 + e^x) = max(x, 0) + 2 · atanh(u / (2 + u)) of u = e^−|x|, by its series: the rest is below 1e-9.
inline F16 softplus(F16 x) {
  const F16 u = exp(zero() - abs(x));
  const F16 s = u / (u + set1(2.0f)), squared = s * s;
  F16 sum = set1(1.0f / 17.0f);
  for (const float odd : {15.0f, 13.0f, 11.0f, 9.0f, 7.0f, 5.0f, 3.0f, 1.0f})
    sum = fma(sum, squared, set1(1.0f / odd));
  return fma(s * set1(2.0f), sum, max(x, zero()));
}

// One sequence of a step.
template <typename T>
class Sequence {
 public:
  Sequence(const RecurrentArgs& a, int64_t sequence)
      : first(a.query_start[sequence]),
        last(a.query_start[sequence + 1]),
        slot(a.states ? a.states[sequence] : -1),
        a_(a) {
    const auto below = [&](int64_t row) {
      int64_t low = 0, high = a.kept_count;
      while (low < high) {
        const int64_t mid = (low + high) / 2;
        if (a.kept[2 * mid] < row)
          low = mid + 1;
        else
          high = mid;
      }
      return low;
    };
    const int64_t begin = below(first);
    kept_ = a.kept + 2 * begin;
    keep_ = below(last) - begin;
  }

  bool is_empty() const { return first == last; }
  bool is_single() const { return last - first == 1; }

  float* state_of(int64_t slot, int64_t head) const {
    return a_.state + slot * a_.state_pitch + head * a_.key_dim * a_.value_dim;
  }

  // Where a head's state after the step is kept, or null.
  float* kept_last(int64_t head) const {
    const bool kept = keep_ > 0 && kept_[2 * (keep_ - 1)] == last - 1;
    return kept ? state_of(kept_[2 * keep_ - 1], head) : nullptr;
  }

  // Panels of a head's state after this row are kept where that is asked for, but for the slot that they
  // are made in.
  void keep_panels(int64_t head, int64_t panel, int64_t panels, int64_t row, const float* made) const {
    const int64_t size = 16 * a_.key_dim;
    for (int64_t i = 0; i < keep_; i++) {
      if (kept_[2 * i] != row) continue;
      float* at = state_of(kept_[2 * i + 1], head) + panel * size;
      if (at != made) std::memcpy(at, made, static_cast<size_t>(panels * size) * sizeof(float));
    }
  }

  // `dim` columns of the rows from t on, through the convolution and SiLU.
  void turn(int64_t t, int64_t count, int64_t column, int64_t dim, float* out) const {
    const T* rows[kChunk + kMostWidth];
    for (int64_t i = 0; i < count + a_.width - 1; i++) rows[i] = input(t - (a_.width - 1) + i);
    const int64_t turned = a_.turned;
    const float* bias = a_.bias;
    for (int64_t i = 0; i < count; i++)
      for (int64_t j = 0; j < dim; j += 16) {
        F16 sum = bias ? load(bias + column + j) : zero();
        for (int64_t w = 0; w < a_.width; w++)
          if (const T* row = rows[i + w])
            sum = fma(load(a_.conv + w * turned + column + j), load(row + column + j), sum);
        store(out + i * dim + j, silu(sum));
      }
  }

  // `dim` columns of what the convolution still needs, into every slot that something is kept in.
  void keep_inputs(int64_t column, int64_t dim) const {
    for (int64_t i = 0; i < keep_; i++) {
      const int64_t row = kept_[2 * i];
      T* at = static_cast<T*>(a_.inputs) + kept_[2 * i + 1] * a_.inputs_pitch + column;
      for (int64_t j = 0; j < a_.width - 1; j++, at += a_.turned) {
        const T* from = input(row - (a_.width - 2) + j);
        const auto bytes = static_cast<size_t>(dim) * sizeof(T);
        if (from)
          std::memcpy(at, from + column, bytes);
        else
          std::memset(at, 0, bytes);
      }
    }
  }

  const int64_t first, last, slot;

 private:
  // A row of inputs that lies at `row`, before the step's where that is negative; null: zeros.
  const T* input(int64_t row) const {
    if (row >= first) return static_cast<const T*>(a_.x) + row * a_.x_stride + a_.turned_from;
    if (slot < 0) return nullptr;
    const int64_t back = a_.width - 1 + row - first;
    return static_cast<const T*>(a_.inputs) + slot * a_.inputs_pitch + back * a_.turned;
  }

  const RecurrentArgs& a_;
  const int32_t* kept_;
  int64_t keep_;
};

}  // namespace
}  // namespace penstock::PENSTOCK_ISA

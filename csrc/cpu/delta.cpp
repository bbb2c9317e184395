// The gated delta rule, token after token: chunks of a prompt change no bit, and no form of it that takes
// many tokens at once is needed, since a state's panels stay in L1 meanwhile.
//
// With S as the token before left it, a column of a token is
//   known = α · Σ S·k,  change = β · (v − known),  o = α · Σ S·q + change · (k·q),  S ← k · change + α·S
// so that what is read of S for one token can be read as it is written for the token before.
#include "remembered.h"

namespace penstock::PENSTOCK_ISA {
namespace {

static inline F16 sigmoid(F16 x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }

// One head of one sequence.
template <typename T>
class Head {
 public:
  Head(const DeltaArgs& a, int64_t sequence, int64_t head)
      : a_(a), sequence_(a, sequence), head_(head) {
    const int64_t k = a.key_dim, v = a.value_dim;
    auto* at = static_cast<float*>(scratch(
        Scratch::delta, static_cast<size_t>(kChunk * (2 * k + 2 * v + 4) + k * v) * sizeof(float)));
    q_ = at;
    k_ = q_ + kChunk * k;
    v_ = k_ + kChunk * k;
    o_ = v_ + kChunk * v;
    fade_ = o_ + kChunk * v;
    beta_ = fade_ + kChunk;
    meet_ = beta_ + kChunk;
    spare_ = meet_ + 2 * kChunk;
    const int64_t shared = a.heads / a.key_heads, key = head / shared;
    brings_keys_ = head % shared == 0;
    query_at_ = key * k;
    key_at_ = (a.key_heads + key) * k;
    value_at_ = 2 * a.key_heads * k + head * v;
  }

  void run() {
    if (sequence_.is_empty()) return;
    const int64_t size = a_.key_dim * a_.value_dim;
    from_ = sequence_.slot >= 0 ? sequence_.state_of(sequence_.slot, head_) : nullptr;
    to_ = sequence_.kept_last(head_);
    if (!to_) to_ = spare_;
    if (!from_) {
      std::memset(to_, 0, static_cast<size_t>(size) * sizeof(float));
      from_ = to_;
    }
    for (int64_t t = sequence_.first; t < sequence_.last; t += kChunk) {
      const int64_t count = std::min(kChunk, sequence_.last - t);
      make_gates(t, count);
      make_rows(t, count);
      int64_t panel = 0;
      const int64_t panels = a_.value_dim / 16;
      for (; panel + 2 <= panels; panel += 2) pass<2>(panel, t, count);
      for (; panel < panels; panel++) pass<1>(panel, t, count);
      from_ = to_;
      finish(t, count);
    }
    sequence_.keep_inputs(value_at_, a_.value_dim);
    if (brings_keys_) {
      sequence_.keep_inputs(query_at_, a_.key_dim);
      sequence_.keep_inputs(key_at_, a_.key_dim);
    }
    _mm_sfence();  // of what went past the caches
  }

 private:
  void make_gates(int64_t t, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
      const float* row = a_.gates + (t + i) * a_.gates_stride;
      fade_[i] = row[head_];
      beta_[i] = row[a_.heads + head_];
    }
    const F16 rate = set1(-a_.rates[head_]), shift = set1(a_.shift[head_]);
    for (int64_t i = 0; i < kChunk; i += 16) {
      const int c = static_cast<int>(std::clamp<int64_t>(count - i, 0, 16));
      store(fade_ + i, exp(rate * softplus(keep_first(load(fade_ + i), c, 0.0f) + shift)));
      store(beta_ + i, set1(a_.strength) * sigmoid(keep_first(load(beta_ + i), c, 0.0f)));
    }
  }

  void make_rows(int64_t t, int64_t count) {
    const int64_t dim = a_.key_dim;
    sequence_.turn(t, count, query_at_, dim, q_);
    sequence_.turn(t, count, key_at_, dim, k_);
    sequence_.turn(t, count, value_at_, a_.value_dim, v_);
    const float share = 1.0f / __builtin_sqrtf(static_cast<float>(dim));
    for (int64_t i = 0; i < count; i++) {
      unit(q_ + i * dim, share);
      unit(k_ + i * dim, 1.0f);
      F16 sum = zero();
      for (int64_t j = 0; j < dim; j += 16)
        sum = fma(load(k_ + i * dim + j), load(q_ + i * dim + j), sum);
      meet_[i] = reduce_add(sum);
    }
  }

  void unit(float* x, float times) const {
    F16 squares = zero();
    for (int64_t j = 0; j < a_.key_dim; j += 16) squares = fma(load(x + j), load(x + j), squares);
    const F16 by = set1(times / __builtin_sqrtf(reduce_add(squares) + 1e-6f));
    for (int64_t j = 0; j < a_.key_dim; j += 16) store(x + j, load(x + j) * by);
  }

  // P panels of the state through the tokens of a chunk.
  template <int P>
  void pass(int64_t panel, int64_t t, int64_t count) {
    const int64_t dim = a_.key_dim, size = 16 * dim;
    const float* from = from_ + panel * size;
    float* to = to_ + panel * size;
    F16 known[P], seen[P], change[P];
    for (int p = 0; p < P; p++) known[p] = seen[p] = zero();
    for (int64_t k = 0; k < dim; k++) {
      const F16 by = set1(k_[k]), asked = set1(q_[k]);
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) {
        const F16 s = load(from + p * size + 16 * k);
        known[p] = fma(s, by, known[p]);
        seen[p] = fma(s, asked, seen[p]);
      }
    }
    for (int64_t i = 0; i < count; i++) {
      const F16 fade = set1(fade_[i]), beta = set1(beta_[i]), meet = set1(meet_[i]);
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) {
        const int64_t at = i * a_.value_dim + 16 * (panel + p);
        change[p] = beta * (load(v_ + at) - fade * known[p]);
        store(o_ + at, fma(change[p], meet, fade * seen[p]));
      }
      const float* keys = k_ + i * dim;
      if (i + 1 < count)
        go_on<P>(from, to, keys, fade, change, known, seen);
      else
        go_to<P>(from, to, keys, fade, change);
      from = to;
      sequence_.keep_panels(head_, panel, P, t + i, to);
    }
  }

  // The state after a token, and what the next one, whose key is behind `keys`, reads of it.
  template <int P>
  void go_on(const float* from, float* to, const float* keys, F16 fade, const F16 (&change)[P],
             F16 (&known)[P], F16 (&seen)[P]) const {
    const int64_t dim = a_.key_dim, size = 16 * dim;
    const float* next = keys + dim;
    const float* asked = q_ + (next - k_);
    for (int p = 0; p < P; p++) known[p] = seen[p] = zero();
    for (int64_t k = 0; k < dim; k++) {
      const F16 key = set1(keys[k]), by = set1(next[k]), ask = set1(asked[k]);
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) {
        const F16 s = fma(key, change[p], fade * load(from + p * size + 16 * k));
        store(to + p * size + 16 * k, s);
        known[p] = fma(s, by, known[p]);
        seen[p] = fma(s, ask, seen[p]);
      }
    }
  }

  template <int P>
  void go_to(const float* from, float* to, const float* keys, F16 fade, const F16 (&change)[P]) const {
    const int64_t dim = a_.key_dim, size = 16 * dim;
    // a single token's state, which the next step reads when all weights have gone through the caches
    const bool past = sequence_.is_single() && to_ != spare_ && reinterpret_cast<uintptr_t>(to) % 64 == 0;
    if (past) {
      for (int64_t k = 0; k < dim; k++) {
        const F16 key = set1(keys[k]);
#pragma GCC unroll 2
        for (int p = 0; p < P; p++)
          stream(to + p * size + 16 * k, fma(key, change[p], fade * load(from + p * size + 16 * k)));
      }
      return;
    }
    for (int64_t k = 0; k < dim; k++) {
      const F16 key = set1(keys[k]);
#pragma GCC unroll 2
      for (int p = 0; p < P; p++)
        store(to + p * size + 16 * k, fma(key, change[p], fade * load(from + p * size + 16 * k)));
    }
  }

  // The norm of what was seen, and the gate.
  void finish(int64_t t, int64_t count) const {
    const int64_t dim = a_.value_dim;
    for (int64_t i = 0; i < count; i++) {
      const float* o = o_ + i * dim;
      const T* z = static_cast<const T*>(a_.x) + (t + i) * a_.x_stride + a_.turned + head_ * dim;
      T* y = static_cast<T*>(a_.y) + (t + i) * a_.heads * dim + head_ * dim;
      const F16 scale = inverse_deviation(o, dim, 0.0f, a_.eps);
      for (int64_t j = 0; j < dim; j += 16)
        store(y + j, load(o + j) * scale * load(a_.norm + j) * silu(load(z + j)));
    }
  }

  const DeltaArgs& a_;
  const Sequence<T> sequence_;
  const int64_t head_;
  int64_t query_at_, key_at_, value_at_;  // columns
  bool brings_keys_;                      // of the value heads that share a key head, the first
  float *q_, *k_, *v_, *o_;               // [kChunk, …]
  float *fade_, *beta_, *meet_, *spare_;
  const float* from_ = nullptr;
  float* to_ = nullptr;
};

template <typename T>
void gate_row(const GateByArgs& a, int64_t row) {
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride + a.first;
  T* y = static_cast<T*>(a.y) + row * a.y_stride;
  for (int64_t j = 0; j < a.dim; j += 16) {
    const int c = a.dim - j < 16 ? static_cast<int>(a.dim - j) : 16;
    const F16 by = a.plain ? load_some(x + j, c) : sigmoid(load_some(x + j, c));
    store_some(y + j, load_some(y + j, c) * by, c);
  }
}

template <typename T>
void scale_row(const GateByArgs& a, int64_t row) {
  T* y = static_cast<T*>(a.y) + row * a.y_stride;
  const F16 by = set1(*a.number);
  for (int64_t j = 0; j < a.dim; j += 16) {
    const int c = a.dim - j < 16 ? static_cast<int>(a.dim - j) : 16;
    store_some(y + j, load_some(y + j, c) * by, c);
  }
}

}  // namespace

void delta_rule(const DeltaArgs& a) {
  const int64_t work = (a.tokens + a.sequences) * a.heads * a.key_dim * a.value_dim;
  parallel(work > kParallel ? a.threads : 1, a.sequences * a.heads, [&](int64_t part) {
    const FlushDenormals flush;
    if (a.dtype == DType::bf16)
      Head<bf16>(a, part / a.heads, part % a.heads).run();
    else
      Head<float>(a, part / a.heads, part % a.heads).run();
  });
}

void gate_by(const GateByArgs& a) {
  auto row = a.dtype == DType::bf16 ? gate_row<bf16> : gate_row<float>;
  if (a.number) row = a.dtype == DType::bf16 ? scale_row<bf16> : scale_row<float>;
  over_rows(a.rows * a.dim > kParallel ? a.threads : 1, a.rows, [&](int64_t r) { row(a, r); });
}

}  // namespace penstock::PENSTOCK_ISA

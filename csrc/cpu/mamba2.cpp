// Mamba 2, token after token: as of the delta rule, chunks of a prompt change no bit, and a state's panels
// stay in L1 while tokens go by.
#include "remembered.h"

namespace penstock::PENSTOCK_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kPanels = 4;  // of a state that go through the tokens together, as registers allow
#else
constexpr int64_t kPanels = 2;
#endif
constexpr int64_t kMostHeads = 8;  // that one thread takes through a chunk, by the same keys

// Some heads of one group of one sequence.
template <typename T>
class Heads {
 public:
  Heads(const MambaArgs& a, int64_t sequence, int64_t head, int64_t count)
      : a_(a), sequence_(a, sequence), head_(head), count_(count) {
    const int64_t k = a.key_dim, v = a.value_dim, each = a.heads / a.key_heads;
    auto* at = static_cast<float*>(scratch(
        Scratch::delta,
        static_cast<size_t>(kChunk * (2 * k + 2 * v + 2) + count * k * v) * sizeof(float)));
    keys_ = at;
    asks_ = keys_ + kChunk * k;
    x_ = asks_ + kChunk * k;
    seen_ = x_ + kChunk * v;
    step_ = seen_ + kChunk * v;
    fade_ = step_ + kChunk;
    spare_ = fade_ + kChunk;
    brings_keys_ = head % each == 0;
    keys_at_ = a.inner() + head / each * k;
    asks_at_ = keys_at_ + a.key_heads * k;
  }

  void run() {
    if (sequence_.is_empty()) return;
    const auto size = static_cast<size_t>(a_.key_dim * a_.value_dim);
    for (int64_t i = 0; i < count_; i++) {
      const int64_t head = head_ + i;
      from_[i] = sequence_.slot >= 0 ? sequence_.state_of(sequence_.slot, head) : nullptr;
      to_[i] = sequence_.kept_last(head);
      if (!to_[i]) to_[i] = spare_ + static_cast<size_t>(i) * size;
      if (from_[i]) continue;
      std::memset(to_[i], 0, size * sizeof(float));
      from_[i] = to_[i];
    }
    for (int64_t t = sequence_.first; t < sequence_.last; t += kChunk) {
      const int64_t count = std::min(kChunk, sequence_.last - t);
      sequence_.turn(t, count, keys_at_, a_.key_dim, keys_);
      sequence_.turn(t, count, asks_at_, a_.key_dim, asks_);
      for (int64_t i = 0; i < count_; i++) go_through(i, t, count);
    }
    sequence_.keep_inputs(head_ * a_.value_dim, count_ * a_.value_dim);
    if (brings_keys_) {
      sequence_.keep_inputs(keys_at_, a_.key_dim);
      sequence_.keep_inputs(asks_at_, a_.key_dim);
    }
    _mm_sfence();  // of what went past the caches
  }

 private:
  // A chunk of one head.
  void go_through(int64_t i, int64_t t, int64_t count) {
    make_steps(head_ + i, t, count);
    sequence_.turn(t, count, (head_ + i) * a_.value_dim, a_.value_dim, x_);
    const int64_t panels = a_.value_dim / 16;
    int64_t panel = 0;
    for (; panel + kPanels <= panels; panel += kPanels) pass<kPanels>(i, panel, t, count);
    for (; panel < panels; panel++) pass<1>(i, panel, t, count);
    from_[i] = to_[i];
    finish(head_ + i, t, count);
  }

  void make_steps(int64_t head, int64_t t, int64_t count) {
    for (int64_t i = 0; i < count; i++) step_[i] = a_.gates[(t + i) * a_.gates_stride + head];
    const F16 rate = set1(-a_.rates[head]), shift = set1(a_.shift[head]);
    for (int64_t i = 0; i < kChunk; i += 16) {
      const int c = static_cast<int>(std::clamp<int64_t>(count - i, 0, 16));
      const F16 step = softplus(keep_first(load(step_ + i), c, 0.0f) + shift);
      store(step_ + i, step);
      store(fade_ + i, exp(rate * step));
    }
  }

  // P panels of a head's state through the tokens of a chunk.
  template <int P>
  void pass(int64_t i, int64_t panel, int64_t t, int64_t count) {
    const int64_t size = 16 * a_.key_dim;
    const float* from = from_[i] + panel * size;
    float* to = to_[i] + panel * size;
    // a single token's state, which the next step reads when all weights have gone through the caches
    const bool past = sequence_.is_single() && sequence_.kept_last(head_ + i) &&
                      reinterpret_cast<uintptr_t>(to) % 64 == 0;
    for (int64_t row = 0; row < count; row++) {
      past ? token<P, true>(from, to, panel, row) : token<P, false>(from, to, panel, row);
      from = to;
      sequence_.keep_panels(head_ + i, panel, P, t + row, to);
    }
  }

  template <int P, bool Past>
  void token(const float* from, float* to, int64_t panel, int64_t row) {
    const int64_t dim = a_.key_dim, size = 16 * dim, at = row * a_.value_dim + 16 * panel;
    const float *keys = keys_ + row * dim, *asks = asks_ + row * dim;
    const F16 fade = set1(fade_[row]), step = set1(step_[row]);
    F16 value[P], seen[P];
    for (int p = 0; p < P; p++) {
      value[p] = step * load(x_ + at + 16 * p);
      seen[p] = zero();
    }
    for (int64_t k = 0; k < dim; k++) {
      const F16 key = set1(keys[k]), ask = set1(asks[k]);
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) {
        const F16 s = fma(key, value[p], fade * load(from + p * size + 16 * k));
        if constexpr (Past)
          stream(to + p * size + 16 * k, s);
        else
          store(to + p * size + 16 * k, s);
        seen[p] = fma(s, ask, seen[p]);
      }
    }
    for (int p = 0; p < P; p++) store(seen_ + at + 16 * p, seen[p]);
  }

  // What was seen, what goes past the state, and the gate.
  void finish(int64_t head, int64_t t, int64_t count) const {
    const int64_t dim = a_.value_dim, column = head * dim;
    const F16 skip = set1(a_.skip[head]);
    for (int64_t i = 0; i < count; i++) {
      const T* z = static_cast<const T*>(a_.x) + (t + i) * a_.x_stride + column;
      T* y = static_cast<T*>(a_.y) + (t + i) * a_.inner() + column;
      for (int64_t j = 0; j < dim; j += 16)
        store(y + j, fma(skip, load(x_ + i * dim + j), load(seen_ + i * dim + j)) * silu(load(z + j)));
    }
  }

  const MambaArgs& a_;
  const Sequence<T> sequence_;
  const int64_t head_, count_;
  int64_t keys_at_, asks_at_;  // columns
  bool brings_keys_;           // the first of its group
  float *keys_, *asks_, *x_, *seen_, *step_, *fade_, *spare_;
  const float* from_[kMostHeads];
  float* to_[kMostHeads];
};

// A group's columns of a row, normed.
template <typename T>
void norm_row(const MambaArgs& a, int64_t row) {
  const int64_t dim = a.inner() / a.key_heads;
  T* y = static_cast<T*>(a.y) + row * a.inner();
  for (int64_t at = 0; at < a.inner(); at += dim) {
    const F16 scale = inverse_deviation(y + at, dim, 0.0f, a.eps);
    for (int64_t j = at; j < at + dim; j += 16) store(y + j, load(y + j) * scale * load(a.norm + j));
  }
}

template <typename T>
void run(const MambaArgs& a) {
  const int64_t each = a.heads / a.key_heads, work = (a.tokens + a.sequences) * a.inner() * a.key_dim;
  const int threads = work > kParallel ? a.threads : 1;
  if (a.tokens == 0) return;
  const int64_t wanted = std::max<int64_t>(1, 2 * threads / (a.key_heads * a.sequences));
  const int64_t most = std::clamp<int64_t>(each / wanted, 1, kMostHeads);
  const int64_t parts = (each + most - 1) / most;  // of a group
  parallel(threads, a.sequences * a.key_heads * parts, [&](int64_t task) {
    const FlushDenormals flush;
    const int64_t part = task % parts, group = task / parts % a.key_heads;
    const int64_t head = part * most;
    Heads<T>(a, task / parts / a.key_heads, group * each + head, std::min(most, each - head)).run();
  });
  over_rows(a.tokens * a.inner() > kParallel ? a.threads : 1, a.tokens,
            [&](int64_t row) { norm_row<T>(a, row); });
}

}  // namespace

void mamba2(const MambaArgs& a) { a.dtype == DType::bf16 ? run<bf16>(a) : run<float>(a); }

}  // namespace penstock::PENSTOCK_ISA

// What memory is asked for before it is read.
#pragma once

#include "vec.h"

namespace penstock::PENSTOCK_ISA {

// So few rows read panels as fast as memory gives them.
#if defined(__AVX512F__)
constexpr int kFewRows = 3;
#else
constexpr int kFewRows = 1;
#endif

// How memory is asked for what rows that pass over panels need next.
struct Ahead {
  bool once;      // they pass once: each line asks for one that follows; else, for the panels after these
  int64_t bytes;  // lines: so far ahead; 0 leaves what comes next to the processor
  bool near;      // into L1, else into L2
};

static inline void prefetch(const char* at, bool near) {
  near ? _mm_prefetch(at, _MM_HINT_T0) : _mm_prefetch(at, _MM_HINT_T1);
}

// Each line asks for one that follows. What is asked into L2 comes into L1 later on (Emerald Rapids, int4 by two threads, of
// a plain read: 0.86, and 0.93).
class Lines {
 public:
  explicit Lines(const Ahead& ahead) : bytes_(ahead.bytes), near_(ahead.near || ahead.bytes == 0) {}

  void line(const void* at) const { lines<1>(at); }
  template <int Count>
  [[gnu::always_inline]] void lines(const void* at) const {
    const char* from = static_cast<const char*>(at);
    if (near_) {  // one decision for all
      ask<Count, _MM_HINT_T0>(from + bytes_);
    } else {
      ask<Count, _MM_HINT_T1>(from + bytes_);
      ask<Count, _MM_HINT_T0>(from + kNearBytes);
    }
  }
  // Scales of float16, of groups of 32 values of 4 bits.
  void scales(const uint16_t* at) const { prefetch(reinterpret_cast<const char*>(at) + kScaleBytes, true); }
  void block() const {}

 private:
  static constexpr int64_t kNearBytes = 2048, kScaleBytes = 1024;
  template <int Count, _mm_hint Hint>
  [[gnu::always_inline]] static void ask(const char* at) {
#pragma GCC unroll 8
    for (int i = 0; i < Count; i++) _mm_prefetch(at + i * 64, Hint);
  }
  int64_t bytes_;  // 0: the line itself, which is read right then
  bool near_;
};

// Every so many blocks of kBlock values of K ask for a part of the panels that come next.
class Bursts {
 public:
  Bursts() = default;  // of nothing
  // `bytes` from `next` on, `lines` of 64 at the start of every `every`-th block.
  Bursts(const void* next, int64_t bytes, int64_t lines, int64_t every, bool near)
      : next_(static_cast<const char*>(next)), left_(bytes / 64), lines_(lines), every_(every),
        near_(near) {}

  void line(const void*) const {}
  template <int>
  void lines(const void*) const {}
  void scales(const uint16_t*) const {}
  void block() {
    if (left_ <= 0 || --turn_ > 0) return;
    turn_ = every_;
    left_ -= lines_;
    for (int64_t i = 0; i < lines_; i++, next_ += 64) prefetch(next_, near_);
  }

 private:
  const char* next_ = nullptr;
  int64_t left_ = 0, lines_ = 0, every_ = 1, turn_ = 1;
  bool near_ = false;
};

// Every so many lines ask for one of the panels that come next: of rows that pass twice, whose bursts
// memory answers at half of its speed (Zen 5).
class Spread {
 public:
  Spread() = default;  // of nothing
  // What lies at `next`, while as much is read `passes` times.
  Spread(const void* next, int64_t passes, bool near)
      : next_(static_cast<const char*>(next)), every_(passes), turn_(passes), near_(near) {}

  void line(const void*) {
    if (next_ == nullptr || --turn_ > 0) return;
    turn_ = every_;
    prefetch(next_, near_);
    next_ += 64;
  }
  void block() const {}

 private:
  const char* next_ = nullptr;
  int64_t every_ = 1, turn_ = 1;
  bool near_ = false;
};

// Asks for other lines, so many bytes from those that are read, into L2: memory answers a program that
// reads blocks of 4 kB here and there at a third of its speed, and L1's buffers hold too few lines to
// wait for (Zen 4, one thread: 10.6 GB/s unasked, 12 into L1, 21 into L2; 29 of one stream).
class Beside {
 public:
  Beside() = default;
  // next: what is read after `now`
  Beside(const void* now, const void* next)
      : bytes_(static_cast<const char*>(next) - static_cast<const char*>(now)) {}

  void line(const void* at) const {
    prefetch(static_cast<const char*>(at) + bytes_, false);
  }
  void block() const {}

  // `bytes` of them at once.
  void all(const void* at, int64_t bytes) const {
    for (int64_t i = 0; i < bytes; i += 64) line(static_cast<const char*>(at) + i);
  }

 private:
  int64_t bytes_ = 0;
};

// Asks for nothing.
struct Quiet {
  void line(const void*) const {}
  template <int>
  void lines(const void*) const {}
  void scales(const uint16_t*) const {}
  void block() const {}
  void all(const void*, int64_t) const {}
};

}  // namespace penstock::PENSTOCK_ISA

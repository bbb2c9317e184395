// A float matrix's rows on their way to panels.
#pragma once

#include <cstring>

#include "parallel.h"
#include "vec.h"

namespace penstock::PENSTOCK_ISA {

struct half {
  uint16_t bits;
};
static inline F16 load(const half* p) { return load_half(&p->bits); }

constexpr int64_t kAheadBytes = 512;  // how far ahead of a row memory is asked for

// While it lives, this thread computes with denormals, whatever its caller has set.
class KeepDenormals {
 public:
  KeepDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~0x8040u); }
  ~KeepDenormals() { _mm_setcsr(saved_); }
  KeepDenormals(const KeepDenormals&) = delete;
  KeepDenormals& operator=(const KeepDenormals&) = delete;

 private:
  unsigned saved_;
};

// One panel of the result: where its 16 rows are, those beyond the matrix null, and where it goes.
template <typename T>
struct Job {
  const T* row[16];
  int64_t k, padded_k, index;

  Job(const PackArgs& a, int64_t panel) : k(a.k), padded_k(a.padded_k), index(panel) {
    const int64_t first = (a.gated ? panel / 2 : panel) * 16;
    const int64_t above = a.gated && panel % 2 ? a.n : 0;
    for (int64_t c = 0; c < 16; c++)
      row[c] = first + c < a.n ? static_cast<const T*>(a.weight) + (above + first + c) * a.stride
                               : nullptr;
  }

  // `count` values of row c from `at` on, zeros beyond its end; `space` holds them then.
  const T* values(int64_t c, int64_t at, int64_t count, T* space) const {
    if (row[c] && at + count <= k) {
      _mm_prefetch(reinterpret_cast<const char*>(row[c] + at) + kAheadBytes, _MM_HINT_T0);
      return row[c] + at;
    }
    std::memset(space, 0, static_cast<size_t>(count) * sizeof(T));
    if (row[c] && at < k)
      std::memcpy(space, row[c] + at, static_cast<size_t>(k - at) * sizeof(T));
    return space;
  }
};

// body(a null pointer of the type that the weights are stored in).
template <typename Body>
static inline void with_source(Float stored, Body body) {
  switch (stored) {
    case Float::f32:
      return body(static_cast<float*>(nullptr));
    case Float::bf16:
      return body(static_cast<bf16*>(nullptr));
    case Float::f16:
      return body(static_cast<half*>(nullptr));
  }
}

// one(panel) for every panel, a few at a time: rows that lie together are read together.
template <typename One>
static inline void over_panels(const PackArgs& a, One one) {
  const int64_t panels = (a.n + 15) / 16 * (a.gated ? 2 : 1);
  const int64_t parts = panels < 64 ? panels : 64;
  parallel(a.threads, parts, [&](int64_t part) {
    const KeepDenormals keep;
    for (int64_t p = panels * part / parts; p < panels * (part + 1) / parts; p++) one(p);
  });
}

}  // namespace penstock::PENSTOCK_ISA

// A short convolution between two gates. Rows know nothing of each other: each makes the inputs that it sees
// anew, which costs less than to wait for them.
#include <algorithm>
#include <cstring>

#include "linear.h"
#include "states.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int64_t kParallel = 16 * 1024;  // values below which a second thread isn't worth it
constexpr int64_t kMostWidth = 16;

// What the convolution sees of the token at `row`, some columns of it: a product of this step's, one that an
// earlier step has kept, or nothing.
template <typename T>
struct Input {
  const T* gate;
  const T* value;
  const T* known;

  Input at(int64_t column) const {
    return {gate ? gate + column : nullptr, value ? value + column : nullptr,
            known ? known + column : nullptr};
  }
  bool is_there() const { return gate || known; }
  F16 read(int count) const {
    if (known) return load_some(known, count);
    return round_to<T>(load_some(gate, count) * load_some(value, count));
  }
};

// One sequence of a step.
template <typename T>
struct Tokens {
  const ShortConvArgs& a;
  int64_t first, slot;

  Tokens(const ShortConvArgs& a, int64_t row) : a(a) {
    const int32_t* after = std::upper_bound(a.query_start, a.query_start + a.sequences + 1,
                                            static_cast<int32_t>(row));
    const int64_t sequence = after - a.query_start - 1;
    first = a.query_start[sequence];
    slot = a.states ? a.states[sequence] : -1;
  }

  Input<T> input(int64_t row) const {
    if (row >= first) {
      const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
      return {x, x + 2 * a.turned, nullptr};
    }
    if (slot < 0) return {};
    const int64_t back = a.width - 1 + row - first;
    return {nullptr, nullptr, static_cast<const T*>(a.inputs) + slot * a.inputs_pitch + back * a.turned};
  }
};

static inline int lanes(int64_t left) { return left < 16 ? static_cast<int>(left) : 16; }

template <typename T>
void convolve(const ShortConvArgs& a, int64_t row) {
  const Tokens<T> tokens(a, row);
  Input<T> seen[kMostWidth];
  for (int64_t w = 0; w < a.width; w++) seen[w] = tokens.input(row - (a.width - 1) + w);
  const T* gate = static_cast<const T*>(a.x) + row * a.x_stride + a.turned;
  T* y = static_cast<T*>(a.y) + row * a.turned;
  for (int64_t j = 0; j < a.turned; j += 16) {
    const int count = lanes(a.turned - j);
    F16 sum = a.bias ? load_some(a.bias + j, count) : zero();
    for (int64_t w = 0; w < a.width; w++)
      if (seen[w].is_there())
        sum = fma(load_some(a.conv + w * a.turned + j, count), seen[w].at(j).read(count), sum);
    store_some(y + j, load_some(gate + j, count) * sum, count);
  }
}

template <typename T>
void keep(const ShortConvArgs& a, int64_t row, int64_t slot) {
  const Tokens<T> tokens(a, row);
  T* to = static_cast<T*>(a.inputs) + slot * a.inputs_pitch;
  for (int64_t w = 1; w < a.width; w++, to += a.turned) {
    const Input<T> input = tokens.input(row - (a.width - 1) + w);
    for (int64_t j = 0; j < a.turned; j += 16) {
      const int count = lanes(a.turned - j);
      store_some(to + j, input.is_there() ? input.at(j).read(count) : zero(), count);
    }
  }
}

template <typename T>
void run(const ShortConvArgs& a) {
  const int threads = a.tokens * a.turned > kParallel ? a.threads : 1;
  over_rows(threads, a.tokens, [&](int64_t row) {
    const FlushDenormals flush;
    convolve<T>(a, row);
  });
  const FlushDenormals flush;  // what is kept is what was seen
  for (int64_t i = 0; i < a.kept_count; i++) keep<T>(a, a.kept[2 * i], a.kept[2 * i + 1]);
}

}  // namespace

void short_conv(const ShortConvArgs& a) { a.dtype == DType::bf16 ? run<bf16>(a) : run<float>(a); }

}  // namespace penstock::PENSTOCK_ISA

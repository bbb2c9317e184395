// Activation and gate of rows that lie in memory. Where a product takes them along: linear.h.
#include "linear.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// Below this many elements a parallel region costs more than it saves.
constexpr int64_t kParallel = 32 * 1024;

template <typename T, typename Out>
void gate_row(const GateArgs& a, int64_t row) {
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  Out* out = static_cast<Out*>(a.out) + row * a.dim;
  for (int64_t j = 0; j < a.dim; j += kColumns) {
    const int count = a.dim - j < kColumns ? static_cast<int>(a.dim - j) : kColumns;
    const T* from = x + (a.gated ? 2 * j : j);
    const F16 value = load_some(from, count);
    const F16 y = a.gated ? gated_by(value, load_some(from + kColumns, count), a.activation)
                          : activate(value, a.activation);
    store_some(out + j, y, count);
  }
}

template <typename T>
auto choose(const GateArgs& a) {
  return a.out_dtype == DType::bf16 ? gate_row<T, bf16> : gate_row<T, float>;
}

}  // namespace

void gate(const GateArgs& a) {
  const auto row = a.dtype == DType::bf16 ? choose<bf16>(a) : choose<float>(a);
  over_rows(a.rows * a.dim > kParallel ? a.threads : 1, a.rows, [&](int64_t r) { row(a, r); });
}

}  // namespace penstock::PENSTOCK_ISA

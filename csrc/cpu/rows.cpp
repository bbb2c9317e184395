// Kernels that go over rows once: norms, activations, the soft cap, embedding.
#include "linear.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// Below this many elements a parallel region costs more than it saves.
constexpr int64_t kParallel = 32 * 1024;

template <typename T>
void norm_row(const NormArgs& a, int64_t row) {
  const int64_t d = a.dim;
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  if (a.residual) {
    T* residual = static_cast<T*>(a.residual) + row * a.residual_stride;
    for (int64_t j = 0; j < d; j += 16) {
      const int c = d - j < 16 ? static_cast<int>(d - j) : 16;
      store_some(residual + j, load_some(residual + j, c) + load_some(x + j, c), c);
    }
    x = residual;
  }
  float mean = 0.0f;
  if (a.centre) {
    F16 sum = zero();
    for (int64_t j = 0; j < d; j += 16)
      sum = sum + load_some(x + j, d - j < 16 ? static_cast<int>(d - j) : 16);
    mean = reduce_add(sum) / static_cast<float>(d);
  }
  F16 squares = zero();
  for (int64_t j = 0; j < d; j += 16) {
    const int c = d - j < 16 ? static_cast<int>(d - j) : 16;
    const F16 v = keep_first(load_some(x + j, c) - set1(mean), c, 0.0f);
    squares = fma(v, v, squares);
  }
  const float variance = reduce_add(squares) / static_cast<float>(d);
  const F16 scale = set1(1.0f / __builtin_sqrtf(variance + a.eps));
  T* out = static_cast<T*>(a.out) + row * d;
  for (int64_t j = 0; j < d; j += 16) {
    const int c = d - j < 16 ? static_cast<int>(d - j) : 16;
    F16 v = (load_some(x + j, c) - set1(mean)) * scale * load_first(a.weight + j, c);
    if (a.bias) v = v + load_first(a.bias + j, c);
    store_some(out + j, v, c);
  }
}

static F16 activate(F16 x, Activation kind) {
  switch (kind) {
    case Activation::silu:
      return x / (set1(1.0f) + exp(zero() - x));
    case Activation::gelu:
      return set1(0.5f) * x * (set1(1.0f) + erf(x * set1(0.70710678118654752f)));
    case Activation::gelu_tanh: {
      const F16 cube = x * x * x;
      const F16 inner = set1(0.79788456080286536f) * fma(set1(0.044715f), cube, x);
      return set1(0.5f) * x * (set1(1.0f) + tanh(inner));
    }
  }
  return x;
}

template <typename T>
void activation_row(const ActivationArgs& a, int64_t row) {
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  T* out = static_cast<T*>(a.out) + row * a.dim;
  for (int64_t j = 0; j < a.dim; j += 16) {
    const int c = a.dim - j < 16 ? static_cast<int>(a.dim - j) : 16;
    F16 v = activate(load_some(x + j, c), a.kind);
    if (a.gated) v = v * load_some(x + a.dim + j, c);
    store_some(out + j, v, c);
  }
}

template <typename T>
void embed_row(const EmbeddingArgs& a, int64_t row) {
  T* out = static_cast<T*>(a.out) + row * a.dim;
  const int64_t id = a.tokens[row];
  const T* table = static_cast<const T*>(a.weight);
  if (a.panel_k == 0) {
    __builtin_memcpy(out, table + id * a.dim, static_cast<size_t>(a.dim) * sizeof(T));
  } else {
    constexpr int64_t v = 4 / static_cast<int64_t>(sizeof(T));
    const T* column = table + (id / 16) * a.panel_k * 16 + (id % 16) * v;
    for (int64_t j = 0; j < a.dim; j++) out[j] = column[j / v * 16 * v + j % v];
  }
  if (a.scale != 1.0f)
    for (int64_t j = 0; j < a.dim; j += 16) {
      const int c = a.dim - j < 16 ? static_cast<int>(a.dim - j) : 16;
      store_some(out + j, load_some(out + j, c) * set1(a.scale), c);
    }
}

template <typename Args>
void over_rows(const Args& a, int64_t rows, int64_t work, void (*row)(const Args&, int64_t)) {
#pragma omp parallel for num_threads(a.threads) if (work > kParallel) schedule(static)
  for (int64_t r = 0; r < rows; r++) {
    const FlushDenormals flush;
    row(a, r);
  }
}

}  // namespace

void norm(const NormArgs& a) {
  over_rows(a, a.rows, a.rows * a.dim, a.dtype == DType::bf16 ? norm_row<bf16> : norm_row<float>);
}

void activation(const ActivationArgs& a) {
  over_rows(a, a.rows, a.rows * a.dim * 4,
            a.dtype == DType::bf16 ? activation_row<bf16> : activation_row<float>);
}

void embedding(const EmbeddingArgs& a) {
  over_rows(a, a.count, a.count * a.dim,
            a.dtype == DType::bf16 ? embed_row<bf16> : embed_row<float>);
}

static void softcap_chunk(const SoftcapArgs& a, int64_t chunk) {
  const int64_t first = chunk * 1024;
  const int64_t last = first + 1024 < a.count ? first + 1024 : a.count;
  for (int64_t j = first; j < last; j += 16) {
    const int c = last - j < 16 ? static_cast<int>(last - j) : 16;
    store_some(a.x + j, set1(a.cap) * tanh(load_some(a.x + j, c) / set1(a.cap)), c);
  }
}

void softcap(const SoftcapArgs& a) {
  over_rows(a, (a.count + 1023) / 1024, a.count, softcap_chunk);
}

}  // namespace penstock::PENSTOCK_ISA

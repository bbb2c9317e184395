// Between a layer's projections and attention over latents: rotate queries, write the cache.
#include "latent.h"
#include "linear.h"
#include "rotary.h"

namespace penstock::PENSTOCK_ISA {
namespace {

constexpr int64_t kParallel = 16 * 1024;  // values below which a second thread isn't worth it

template <typename T>
void take(const T* x, int64_t count, float* out) {
  for (int64_t j = 0; j < count; j += 16)
    store(out + j, load_some(x + j, count - j < 16 ? static_cast<int>(count - j) : 16));
}

template <typename T>
void turn_row(const TurnArgs& a, int64_t t) {
  const Angles& by = a.angles;
  float* tail = static_cast<float*>(
      scratch(Scratch::partials, static_cast<size_t>(by.dim + 16) * sizeof(float)));
  const int64_t at = by.positions[t] < by.last ? by.positions[t] : by.last;
  const float* cos_sin = by.cos_sin + at * by.dim;
  for (int64_t h = 0; h < a.heads; h++) {
    take(static_cast<const T*>(a.x) + t * a.x_stride + h * a.x_head, by.dim, tail);
    rotate_head(tail, cos_sin, by.dim, by.interleaved);
    T* out = static_cast<T*>(a.y) + t * a.y_stride + h * a.y_head;
    for (int64_t j = 0; j < by.dim; j += 16)
      store_some(out + j, load(tail + j), by.dim - j < 16 ? static_cast<int>(by.dim - j) : 16);
  }
}

template <typename T>
void write_row(const LatentCacheArgs& a, int64_t t, int64_t slot) {
  if (slot < 0) return;
  const Angles& by = a.angles;
  const int64_t dim = a.rank + by.dim;
  float* head = static_cast<float*>(
      scratch(Scratch::partials, static_cast<size_t>(dim + 32) * sizeof(float)));
  const T* x = static_cast<const T*>(a.x) + t * a.stride;
  const F16 scale = inverse_deviation(x, a.rank, 0.0f, a.eps);
  for (int64_t j = 0; j < a.rank; j += 16) {
    const int c = a.rank - j < 16 ? static_cast<int>(a.rank - j) : 16;
    store(head + j, load_some(x + j, c) * scale * load_first(a.norm + j, c));
  }
  take(x + a.rank, by.dim, head + a.rank);
  rotate_head(head + a.rank, by.cos_sin + by.positions[t] * by.dim, by.dim, by.interleaved);
  T* block = reinterpret_cast<T*>(static_cast<char*>(a.cache) + slot / a.block_size * a.pitch);
  put_key(head, dim, a.padded_dim, slot % a.block_size, block);
}

// Tokens first, then the copies.
template <typename T>
void cache_row(const LatentCacheArgs& a, int64_t row) {
  if (row < a.tokens) return write_row<T>(a, row, a.slots[row]);
  const int32_t* copy = a.copies + 2 * (row - a.tokens);
  write_row<T>(a, copy[0], copy[1]);
}

}  // namespace

void turn(const TurnArgs& a) {
  const int threads = a.tokens * a.heads * a.angles.dim > kParallel ? a.threads : 1;
  const auto row = a.dtype == DType::bf16 ? turn_row<bf16> : turn_row<float>;
  over_rows(threads, a.tokens, [&](int64_t t) { row(a, t); });
}

void latent_cache(const LatentCacheArgs& a) {
  const int threads = a.tokens * (a.rank + a.angles.dim) > kParallel ? a.threads : 1;
  const auto row = a.dtype == DType::bf16 ? cache_row<bf16> : cache_row<float>;
  over_rows(threads, a.tokens + a.copied, [&](int64_t r) { row(a, r); });
}

}  // namespace penstock::PENSTOCK_ISA

// What the hardware can do, measured: read bandwidth and matrix peaks with all threads.
#include <omp.h>

#include <chrono>
#include <cstdlib>

#include "linear.h"
#include "panels.h"
#include "tiles.h"

namespace penstock::PENSTOCK_ISA {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Every thread sums its own slice, in four streams.
void read_slice(const float* data, int64_t count, float* sink) {
  const int64_t part = count / 4 / 64 * 64;
  F16 sum[4] = {zero(), zero(), zero(), zero()};
  for (int64_t i = 0; i < part; i += 64)
    for (int s = 0; s < 4; s++) {
      const float* p = data + s * part + i;
      for (int j = 0; j < 64; j += 16) {
        _mm_prefetch(reinterpret_cast<const char*>(p + j + 512), _MM_HINT_T0);
        sum[s] = max(sum[s], load(p + j));
      }
    }
  *sink = reduce_add((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

}  // namespace

// Bytes a second of one pass over `bytes` at `data`.
double read_bandwidth(const float* data, int64_t bytes, int threads) {
  float sinks[256] = {};
  const double start = now();
#pragma omp parallel num_threads(threads)
  {
    const Range mine = share(bytes / 4);
    read_slice(data + mine.first, mine.last - mine.first, sinks + omp_get_thread_num() % 256);
  }
  const double seconds = now() - start;
  const volatile float used = sinks[0];
  (void)used;
  return static_cast<double>(bytes) / seconds;
}

// FLOPs a second of float32 FMA, or of AMX bfloat16 tiles fed from L1.
double matrix_peak(int64_t rounds, int threads) {
  const double start = now();
#pragma omp parallel num_threads(threads)
  {
#if defined(PENSTOCK_TILES_PEAK)
    TILE_CONFIGURE();
    alignas(64) unsigned char buffer[4096] = {};
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t i = 0; i < rounds; i++) {
      TILE_LOAD(4, buffer);
      TILE_LOAD(5, buffer + 1024);
      TILE_LOAD(6, buffer + 2048);
      TILE_LOAD(7, buffer + 3072);
      TILE_DOT(0, 4, 6);
      TILE_DOT(1, 4, 7);
      TILE_DOT(2, 5, 6);
      TILE_DOT(3, 5, 7);
    }
    TILE_STORE(0, buffer);
    TILE_RELEASE();
#else
    float x[16] = {};
    F16 acc[10];
    for (F16& f : acc) f = zero();
    F16 a = load(x), b = load(x);
    for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 10
      for (int j = 0; j < 10; j++) acc[j] = fma(a, b, acc[j]);
      asm volatile("" : : : "memory");
    }
    for (F16& f : acc) a = a + f;
    volatile float used = reduce_add(a);
    (void)used;
#endif
  }
  const double seconds = now() - start;
#if defined(PENSTOCK_TILES_PEAK)
  const double flops = 4.0 * 2 * 16 * 16 * 32;
#else
  const double flops = 10.0 * 2 * 16;
#endif
  return flops * static_cast<double>(rounds) * threads / seconds;
}

}  // namespace penstock::PENSTOCK_ISA

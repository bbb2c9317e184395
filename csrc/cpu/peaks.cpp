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

// Written as assembly, so that nothing is merged, hoisted or kept in memory.
#if defined(__AVX512F__)
using Register = __m512;
inline void multiply_add(Register& c, const Register& a) {
  asm volatile("vfmadd231ps %1, %1, %0" : "+v"(c) : "v"(a));
}
#else
using Register = __m256;
inline void multiply_add(Register& c, const Register& a) {
  asm volatile("vfmadd231ps %1, %1, %0" : "+x"(c) : "x"(a));
}
#endif

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
    const Range mine = share(bytes / 4, omp_get_thread_num(), omp_get_num_threads());
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
#if defined(PENSTOCK_TILES)
    TILE_CONFIGURE(64);
    alignas(64) unsigned char buffer[4096] = {};
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    for (int64_t i = 0; i < rounds; i++) {
      TILE_LOAD_ROWS(4, buffer, 64);
      TILE_LOAD_ROWS(5, buffer + 1024, 64);
      TILE_LOAD_WEIGHTS(6, buffer + 2048);
      TILE_LOAD_WEIGHTS(7, buffer + 3072);
      TILE_DOT(0, 4, 6);
      TILE_DOT(1, 4, 7);
      TILE_DOT(2, 5, 6);
      TILE_DOT(3, 5, 7);
    }
    TILE_STORE(0, buffer, 64);
    TILE_RELEASE();
#else
    Register a = {}, c0 = a, c1 = a, c2 = a, c3 = a, c4 = a, c5 = a, c6 = a, c7 = a, c8 = a, c9 = a;
    for (int64_t i = 0; i < rounds; i++) {
      multiply_add(c0, a);
      multiply_add(c1, a);
      multiply_add(c2, a);
      multiply_add(c3, a);
      multiply_add(c4, a);
      multiply_add(c5, a);
      multiply_add(c6, a);
      multiply_add(c7, a);
      multiply_add(c8, a);
      multiply_add(c9, a);
    }
#endif
  }
  const double seconds = now() - start;
#if defined(PENSTOCK_TILES)
  const double flops = 4.0 * 2 * 16 * 16 * 32;
#else
  const double flops = 10.0 * 2 * (sizeof(Register) / sizeof(float));  // ten independent chains
#endif
  return flops * static_cast<double>(rounds) * threads / seconds;
}

}  // namespace penstock::PENSTOCK_ISA

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

// Operations a second of `threads` threads, each of which does `operations` in `body`.
template <typename Body>
double per_second(double operations, int threads, Body body) {
  const double start = now();
#pragma omp parallel num_threads(threads)
  body();
  return operations * threads / (now() - start);
}

#if defined(PENSTOCK_TILES)

// Rounds of four products of 2 × 2 tiles, which are loaded from L1 each time.
template <bool Ints>
void multiply_tiles(int64_t rounds) {
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
    if constexpr (Ints) {
      TILE_DOT_BYTES(0, 4, 6);
      TILE_DOT_BYTES(1, 4, 7);
      TILE_DOT_BYTES(2, 5, 6);
      TILE_DOT_BYTES(3, 5, 7);
    } else {
      TILE_DOT(0, 4, 6);
      TILE_DOT(1, 4, 7);
      TILE_DOT(2, 5, 6);
      TILE_DOT(3, 5, 7);
    }
  }
  TILE_STORE(0, buffer, 64);
  TILE_RELEASE();
}

#else

// Written as assembly, so that nothing is merged, hoisted or kept in memory.
#if defined(__AVX512F__)
using Register = __m512i;
inline void add_floats(Register& c, const Register& a) {
  asm volatile("vfmadd231ps %1, %1, %0" : "+v"(c) : "v"(a));
}
inline void add_bytes(Register& c, const Register& a) {
  asm volatile("vpdpbusd %1, %1, %0" : "+v"(c) : "v"(a));
}
#if defined(__AVX512BF16__)
inline void add_pairs(Register& c, const Register& a) {
  asm volatile("vdpbf16ps %1, %1, %0" : "+v"(c) : "v"(a));
}
#endif
#else
using Register = __m256i;
inline void add_floats(Register& c, const Register& a) {
  asm volatile("vfmadd231ps %1, %1, %0" : "+x"(c) : "x"(a));
}
// pairs in 16 bits, pairs of those in 32, added up; `a` stands for the ones too
inline void add_bytes(Register& c, const Register& a) {
  Register t;
  asm volatile("vpmaddubsw %2, %2, %1\n\tvpmaddwd %2, %1, %1\n\tvpaddd %1, %0, %0"
               : "+x"(c), "=&x"(t)
               : "x"(a));
}
// the same of bytes below 16: sums of them stay in 16 bits for a while
inline void add_nibbles(Register& c, const Register& a) {
  Register t;
  asm volatile("vpmaddubsw %2, %2, %1\n\tvpaddw %1, %0, %0" : "+x"(c), "=&x"(t) : "x"(a));
}
#endif

constexpr int kChains = 14;  // independent of each other: more than latency times throughput

template <void (*Add)(Register&, const Register&)>
void multiply_registers(int64_t rounds) {
  Register a = {}, chains[kChains] = {};
  for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 14
    for (Register& chain : chains) Add(chain, a);
  }
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
#if defined(PENSTOCK_TILES)
  const double flops = 4.0 * 2 * 16 * 16 * 32 * static_cast<double>(rounds);
  return per_second(flops, threads, [=] { multiply_tiles<false>(rounds); });
#else
  const double flops = 2.0 * kChains * (sizeof(Register) / 4) * static_cast<double>(rounds);
  return per_second(flops, threads, [=] { multiply_registers<add_floats>(rounds); });
#endif
}

#if defined(__AVX512BF16__)
// The same of bfloat16, two products an instruction, out of registers.
double dot_peak(int64_t rounds, int threads) {
  const double flops = 2.0 * kChains * (sizeof(Register) / 2) * static_cast<double>(rounds);
  return per_second(flops, threads, [=] { multiply_registers<add_pairs>(rounds); });
}
#endif

// The same of int8: two operations for each product that is added up.
double int8_peak(int64_t rounds, int threads) {
#if defined(PENSTOCK_TILES)
  const double operations = 4.0 * 2 * 16 * 16 * 64 * static_cast<double>(rounds);
  return per_second(operations, threads, [=] { multiply_tiles<true>(rounds); });
#else
  const double operations = 2.0 * kChains * sizeof(Register) * static_cast<double>(rounds);
  return per_second(operations, threads, [=] { multiply_registers<add_bytes>(rounds); });
#endif
}

// The same where one of the two is below 16. Only AVX2 has a shorter way.
double int4_peak(int64_t rounds, int threads) {
#if defined(PENSTOCK_TILES) || defined(__AVX512F__)
  return int8_peak(rounds, threads);
#else
  const double operations = 2.0 * kChains * sizeof(Register) * static_cast<double>(rounds);
  return per_second(operations, threads, [=] { multiply_registers<add_nibbles>(rounds); });
#endif
}

}  // namespace penstock::PENSTOCK_ISA

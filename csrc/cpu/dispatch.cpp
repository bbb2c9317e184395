// Which instruction set runs: found by cpuid once, or forced by PENSTOCK_ISA. Also scratch memory.
#include <cpuid.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include "latent.h"
#include "mixture.h"
#include "records.h"
#include "states.h"

namespace penstock {

#define PENSTOCK_DECLARE(isa)                     \
  namespace isa {                                 \
  void linear(const LinearArgs&);                 \
  void embedding(const EmbeddingArgs&);           \
  void norm(const NormArgs&);                     \
  void add(const AddArgs&);                       \
  void scaled_add(const ScaledAddArgs&);          \
  void gate_rows(const GateRowsArgs&);            \
  void route(const RouteArgs&);                   \
  void combine(const CombineArgs&);               \
  void softcap(const SoftcapArgs&);               \
  void gate(const GateArgs&);                     \
  void rotary_cache(const RotaryCacheArgs&);      \
  void turn(const TurnArgs&);                     \
  void latent_cache(const LatentCacheArgs&);      \
  void delta_rule(const DeltaArgs&);              \
  void mamba2(const MambaArgs&);                  \
  void short_conv(const ShortConvArgs&);          \
  void gate_by(const GateByArgs&);                \
  void attention(const AttentionArgs&);           \
  void ring_attention(const RingArgs&);           \
  void argmax(const ArgmaxArgs&);                 \
  void mask(const MaskArgs&);                     \
  void top_k(const TopKArgs&);                    \
  void scaled_top_k(const ScaledTopKArgs&);       \
  void draw_nucleus(const DrawNucleusArgs&);      \
  void draw_plain(const DrawPlainArgs&);          \
  void draw_from(const DrawFromArgs&);            \
  void uniforms(const UniformsArgs&);             \
  void pack(const PackArgs&);                     \
  void quantize(const QuantizeArgs&);             \
  void rotate(const PackArgs&);                   \
  void linear_tiles(const LinearArgs&);           \
  double dot_peak(int64_t, int);                  \
  double read_bandwidth(const float*, int64_t, int); \
  double matrix_peak(int64_t, int);               \
  double int8_peak(int64_t, int);                 \
  double int4_peak(int64_t, int);                 \
  }
PENSTOCK_DECLARE(avx2)
PENSTOCK_DECLARE(avx512)
PENSTOCK_DECLARE(avx512_bf16)
PENSTOCK_DECLARE(amx)
PENSTOCK_DECLARE(amx_emulated)

namespace {

// Below this, vectors read a panel as fast as tiles do; of records and int4 by int8, whose codes they need not
// widen, for more rows.
constexpr int64_t kTileMinRows = 4;
constexpr int64_t kTileMinRowsOfRecords = 8;
constexpr int64_t kTileMinRowsOfCodes = 9;

// int8 rows are the same sums in any order; float32 has no tiles.
bool by_tiles(const LinearArgs& a) {
  if (a.dtype != DType::bf16) return false;
  if (a.int8_rows && has_records(a.kind)) return a.rows >= kTileMinRowsOfRecords;
  return a.rows >= (a.int8_rows && a.kind == Weight::int4 ? kTileMinRowsOfCodes : kTileMinRows);
}

void linear_amx(const LinearArgs& a) {
  by_tiles(a) ? amx::linear_tiles(a) : avx512::linear(a);
}

void linear_amx_emulated(const LinearArgs& a) {
  by_tiles(a) ? amx_emulated::linear_tiles(a) : avx2::linear(a);
}

// `isa` has the vectors, `tiles` attention's products.
#define PENSTOCK_TABLE(name, isa, tiles, linear)                                   \
  {name,         linear,            isa::embedding,   isa::norm,   isa::add,        \
   isa::scaled_add, isa::gate_rows, isa::route, isa::combine, isa::softcap, isa::gate, isa::rotary_cache, isa::turn, \
   isa::latent_cache, isa::delta_rule, isa::mamba2, isa::short_conv, isa::gate_by, tiles::attention, tiles::ring_attention, isa::argmax, isa::mask, \
   isa::top_k, isa::scaled_top_k, isa::draw_nucleus, isa::draw_plain, isa::draw_from,          \
   isa::uniforms, isa::pack, isa::quantize, isa::rotate}

const Kernels tables[] = {
    PENSTOCK_TABLE("avx2", avx2, avx2, avx2::linear),
    PENSTOCK_TABLE("avx512", avx512, avx512, avx512::linear),
    PENSTOCK_TABLE("avx512-bf16", avx512, avx512_bf16, avx512_bf16::linear),
    PENSTOCK_TABLE("amx", avx512, amx, linear_amx),
    PENSTOCK_TABLE("amx-emulated", avx2, amx_emulated, linear_amx_emulated),
};
constexpr int kAvx2 = 0, kAvx512 = 1, kAvx512Bf16 = 2, kAmx = 3, kEmulated = 4;

// Linux gives a process the tile registers only when asked: arch_prctl(ARCH_REQ_XCOMP_PERM, 18).
bool ask_for_tiles() {
  static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return granted;
}

bool has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool bf16 = d & (1u << 22), tile = d & (1u << 24), int8 = d & (1u << 25);
  return bf16 && int8 && tile && ask_for_tiles();
}

bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
}

bool available(int index) {
  switch (index) {
    case kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vnni");
    case kAvx512Bf16:
      return available(kAvx512) && __builtin_cpu_supports("avx512bf16");
    case kAmx:
      return available(kAvx512Bf16) && has_amx();  // the tiles' files round by AVX512_BF16
    default:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  }
}

int best() {
  for (int index : {kAmx, kAvx512Bf16, kAvx512, kAvx2})
    if (available(index)) return index;
  return -1;
}

std::atomic<int> chosen{-2};

}  // namespace

const Kernels& kernels() {
  const int index = chosen.load(std::memory_order_relaxed);
  if (index < 0) throw std::runtime_error("penstock_select_isa hasn't chosen any kernels");
  return tables[index];
}

namespace {

constexpr size_t kLargePage = 2 * 1024 * 1024;

struct Memory {
  void* data[static_cast<int>(Scratch::count)] = {};
  size_t bytes[static_cast<int>(Scratch::count)] = {};
  ~Memory() {
    for (void* p : data) std::free(p);
  }
};
thread_local Memory memory;

}  // namespace

std::atomic<int64_t> allocations{0};

void* take_memory(size_t bytes) {
  const bool large = bytes >= kLargePage / 2;
  void* data = std::aligned_alloc(large ? kLargePage : 4096, bytes);
  if (!data) throw std::bad_alloc();
  if (large) madvise(data, bytes, MADV_HUGEPAGE);
  return data;
}

void* scratch(Scratch purpose, size_t bytes) {
  const int i = static_cast<int>(purpose);
  if (memory.bytes[i] < bytes) {
    std::free(memory.data[i]);
    allocations++;
    const size_t unit = bytes < kLargePage / 2 ? 4096 : kLargePage;
    const size_t rounded = (bytes + bytes / 4 + unit - 1) / unit * unit;
    memory.data[i] = nullptr;
    memory.bytes[i] = 0;
    memory.data[i] = take_memory(rounded);
    memory.bytes[i] = rounded;
  }
  return memory.data[i];
}

}  // namespace penstock

#pragma GCC visibility push(default)
extern "C" {

// Choose the instruction set by name, or the best for null or "". 0 on success, 1: no such name,
// 2: this machine lacks it.
int penstock_select_isa(const char* name) {
  using namespace penstock;
  if (!name || !*name) {
    chosen = best();
    return chosen < 0 ? 2 : 0;
  }
  for (int i = 0; i <= kEmulated; i++)
    if (!std::strcmp(name, tables[i].name)) {
      if (!available(i)) return 2;
      chosen = i;
      return 0;
    }
  return 1;
}

// The one in use, or null before `penstock_select_isa`.
const char* penstock_isa() {
  using namespace penstock;
  return chosen < 0 ? nullptr : tables[chosen].name;
}

// How often memory has been taken from the system since the library was loaded.
int64_t penstock_allocations() { return penstock::allocations.load(); }

// Whether this machine can run `name`.
int penstock_isa_available(const char* name) {
  using namespace penstock;
  for (int i = 0; i <= kEmulated; i++)
    if (!std::strcmp(name, tables[i].name)) return available(i);
  return 0;
}

// Bytes a second of one pass of all threads over `bytes` at `data`.
double penstock_read_bandwidth(const float* data, int64_t bytes, int threads) {
  using namespace penstock;
  return available(kAvx512) ? avx512::read_bandwidth(data, bytes, threads)
                            : avx2::read_bandwidth(data, bytes, threads);
}

// FLOPs a second of `threads` threads: float32 FMA, or with `tiles` bfloat16 AMX fed from L1
// (0 where there is no AMX).
double penstock_matrix_peak(int64_t rounds, int threads, int tiles) {
  using namespace penstock;
  if (tiles) return available(kAmx) ? amx::matrix_peak(rounds, threads) : 0.0;
  return available(kAvx512) ? avx512::matrix_peak(rounds, threads)
                            : avx2::matrix_peak(rounds, threads);
}

// FLOPs a second of vdpbf16ps (0 where there is none).
double penstock_dot_peak(int64_t rounds, int threads) {
  using namespace penstock;
  return available(kAvx512Bf16) ? avx512_bf16::dot_peak(rounds, threads) : 0.0;
}

// int8 operations a second, two for each product that is added up; otherwise the same.
double penstock_int8_peak(int64_t rounds, int threads, int tiles) {
  using namespace penstock;
  if (tiles) return available(kAmx) ? amx::int8_peak(rounds, threads) : 0.0;
  return available(kAvx512) ? avx512::int8_peak(rounds, threads)
                            : avx2::int8_peak(rounds, threads);
}

// The same of products of which one factor has 4 bits.
double penstock_int4_peak(int64_t rounds, int threads, int tiles) {
  using namespace penstock;
  if (tiles) return available(kAmx) ? amx::int4_peak(rounds, threads) : 0.0;
  return available(kAvx512) ? avx512::int4_peak(rounds, threads)
                            : avx2::int4_peak(rounds, threads);
}
}

// y = x · W over packed panels, by vectors. linear_amx.cpp does the same by tiles.
#include <algorithm>
#include <type_traits>

#include "row_largest.h"
#include "scaled.h"

#if !defined(__AVX512F__)
#include "ready.h"
#endif

namespace penstock::PENSTOCK_ISA {
namespace {

// What a LinearVariant leaves open. Rows that a thread goes over again: with AVX-512 they may come from
// L3, for what panels cost once a block then costs more; with AVX2, half of a small L2. Parts are larger
// for more rows: the first panel of each comes from memory while nothing is multiplied.
#if defined(__AVX512F__)
constexpr int64_t kRowsBytes = 8 * 1024 * 1024;
#else
constexpr int64_t kRowsBytes = 256 * 1024;
#endif
constexpr int64_t kPartBytes = 128 * 1024, kPartBytesOfRows = 512 * 1024;
constexpr int64_t kWidenRows = 2 * kFewRows;
constexpr int64_t kPairRows = 16;

// Rows that pass over a panel together: of integers, and of floats over codes. Of floats over a dense one
// kMaxRows do, but AVX2's do it best without asking for memory.
#if defined(__AVX512F__)
constexpr int kIntRows = 8, kFloatRows = 3, kOnceRows = kMaxRows;
#else
constexpr int kIntRows = 4, kFloatRows = 2, kOnceRows = 1;
#endif
template <typename X>
constexpr int kCodeRows = std::is_same_v<X, crossed> ? kPass<X, 1> : kFloatRows;

// Below this many bytes of weights times rows a second thread costs more than it saves.
constexpr int64_t kParallelBytes = 128 * 1024;

// Whether rows are made ready crossed.
bool crosses(const LinearArgs& a) {
  return kCrosses && a.dtype == DType::bf16 && !a.int8_rows;
}

bool widens(const LinearArgs& a, int64_t rows) {
  return rows > choice_or(a.variant.widen_rows, crosses(a) ? 2 * kCodeRows<crossed> : kWidenRows);
}

// So many rows pass over a panel once.
int64_t once_rows(const LinearArgs& a) {
  return a.int8_rows ? kIntRows : crosses(a) ? kPass<crossed, 1> : kOnceRows;
}

// Intel's L1 has too few buffers to wait for memory in, its L2 wants lines long before (Emerald Rapids, one
// row by two threads, of a plain read: bfloat16 0.79 when asked 2 KB ahead, 0.92 at 4, 0.95 at 8; int8 0.86, 0.94, 0.95).
constexpr int64_t kAheadIntoL2 = 8192;
bool into_l2() {
#if defined(__AVX512F__)
  static const bool intel = __builtin_cpu_is("intel") != 0;
  return intel;
#else
  return false;
#endif
}

// What rows that pass once read comes soonest into L1, on Intel's processors into L2. Where they pass more often, the panels that come
// next may be as large as L1. A few dense panels at a time AVX2's processors find by themselves.
Ahead ahead_of(const LinearArgs& a, int64_t rows) {
  const bool once = rows <= once_rows(a);
  const bool leaves_alone = a.kind == Weight::dense && rows <= kMaxRows;
  const int64_t cache =
      choice_or(a.variant.ahead_cache, once && !into_l2() ? 1 : leaves_alone && !once ? 3 : 2);
  const int64_t bytes = choice_or(a.variant.ahead_bytes, once && into_l2() ? kAheadIntoL2 : kAheadBytes);
  return {once, cache > 2 ? 0 : bytes, cache == 1};
}

// Rows made ready to be multiplied: floats, or crossed where bfloat16 holds them, those of E4M3 with
// the scales of each group; or int8 with their scales and what the sums of each group begin with, beside
// records with the scales of blocks and the sums of groups.
struct Rows {
  float* floats;
  crossed* crosses;
  int8_t* bytes;
  float* scale;
  int32_t* sums;
  int16_t* block_sums;
};

bool by_records(const LinearArgs& a) { return a.blocks && has_records(a.kind); }

template <typename X>
const X* row_of(const LinearArgs& a, const Rows& x, int64_t row) {
  if constexpr (std::is_same_v<X, crossed>)
    return x.crosses + row * a.padded_k;
  else
    return x.floats + row * a.padded_k;
}

Rows allocate(const LinearArgs& a) {
  Rows x = {};
  const size_t rows = static_cast<size_t>(a.rows), groups = static_cast<size_t>(a.groups);
  const size_t values = rows * static_cast<size_t>(a.padded_k);
  if (!a.int8_rows) {
    if (crosses(a))
      x.crosses = static_cast<crossed*>(scratch(Scratch::rows, values * sizeof(crossed)));
    else
      x.floats = static_cast<float*>(scratch(Scratch::rows, values * sizeof(float)));
    if (a.fp8_rows)
      x.scale = static_cast<float*>(scratch(Scratch::sums, rows * groups * sizeof(float)));
    return x;
  }
  x.bytes = static_cast<int8_t*>(scratch(Scratch::rows, values));
  if (by_records(a)) {
    const size_t sums = rows * static_cast<size_t>(row_sums(a));
    x.scale = static_cast<float*>(scratch(Scratch::sums, values / kRecord * 4 + sums * 2));
    x.block_sums = reinterpret_cast<int16_t*>(x.scale + values / kRecord);
    return x;
  }
  const size_t scales = rows * (a.blocks ? groups : 1);
  x.scale = static_cast<float*>(scratch(Scratch::sums, (scales + rows * groups) * 4));
  x.sums = reinterpret_cast<int32_t*>(x.scale + scales);
  return x;
}

void prepare_floats(const LinearArgs& a, const Rows& x, int64_t row) {
  float* out = x.crosses ? static_cast<float*>(scratch(
                               Scratch::row, static_cast<size_t>(a.padded_k) * sizeof(float)))
                         : x.floats + row * a.padded_k;
  a.fp8_rows ? fp8_row(a, row, out, x.scale + row * a.groups)
             : float_row(a, row, a.padded_k, out);
  if (x.crosses) cross_row(out, a.padded_k, x.crosses + row * a.padded_k);
}

void prepare(const LinearArgs& a, const Rows& x, int64_t row) {
  if (!a.int8_rows) return prepare_floats(a, x, row);
  int8_t* out = x.bytes + row * a.padded_k;
  if (by_records(a)) {
    int8_blocks(a, row, kRecord, out, x.scale + row * (a.padded_k / kRecord));
    return sum_groups(out, a.padded_k, x.block_sums + row * row_sums(a));
  }
  const int64_t group = a.padded_k / a.groups;
  if (a.blocks)
    int8_blocks(a, row, group, out, x.scale + row * a.groups);
  else
    x.scale[row] = int8_row(a, row, out);
  // of zero points, which the panel multiplies it by, or of what all codes are raised by
  const int32_t times = a.zero ? 1 : a.kind == Weight::int4 ? kRaised<4> : kRaised<8>;
  for (int64_t g = 0; g < a.groups; g++) {
    int32_t sum = 0;
    for (int64_t j = 0; j < group; j++) sum += out[g * group + j];
    x.sums[row * a.groups + g] = -times * sum;
  }
}

// So many panels are in one part: gate's and up's, and those that many rows take together.
int64_t stay_together(const LinearArgs& a) { return a.gated ? 2 : a.rows < kPairRows ? 1 : kPanels; }

// How many rows a thread takes through all its panels before the next ones.
int64_t row_block(const LinearArgs& a) {
  const int64_t value_bytes = a.int8_rows ? 1 : crosses(a) ? 2 : 4;
  const int64_t row_bytes = a.padded_k * value_bytes;
  const int64_t rows = choice_or(a.variant.rows_bytes, kRowsBytes) / row_bytes / 24 * 24;
  return rows < 24 ? 24 : rows;
}

template <typename T>
void dense_part(const LinearArgs& a, const Rows& x, Range rows, Range panels, const Columns& to) {
  const int64_t stride = a.padded_k * kColumns;  // elements of one panel
  stream_panels(
      row_of<RowOf<T>>(a, x, rows.first), a.padded_k, rows.last - rows.first,
      static_cast<const T*>(a.weight) + panels.first * stride, stride, panels.last - panels.first,
      a.padded_k, ahead_of(a, rows.last - rows.first), [](int64_t, int64_t) { return zero(); },
      [&]<int R, int P>(int64_t r, int64_t p, const F16 (&values)[R][P]) {
        to(rows.first + r, panels.first + p, values);
      });
}

// Of rows that go over `count` quantized panels in `passes`.
Bursts bursts_of(const LinearArgs& a, const Ahead& ahead, Range panels, int64_t p, int64_t count,
                 int64_t passes) {
  if (ahead.bytes == 0 || panels.last - p < 2 * count) return {};
  return {quantized_panel(a, p + count).data, count * panel_bytes(a), count * bits_of(a.kind), passes,
          ahead.near};
}

// R rows times P panels.
template <int R, int P, int Bits, typename Asks>
[[gnu::always_inline]] inline void int_rows(const LinearArgs& a, const Rows& x,
                                            const Panel (&w)[P], int64_t row, int64_t p,
                                            Asks& asks, const Columns& to) {
  F16 values[R][P];
  multiply_ints<R, P, Bits>(w, x.bytes + row * a.padded_k, a.padded_k, x.sums + row * a.groups,
                            a.groups, a.blocks ? x.scale + row * a.groups : nullptr, asks, values);
  if (!a.blocks)
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
      for (int i = 0; i < P; i++) values[r][i] = values[r][i] * set1(x.scale[row + r]);
  to(row, p, values);
}

// All rows times P panels, at most Most rows at a time.
template <int Most, int P, int Bits, typename Asks>
void int_panels(const LinearArgs& a, const Rows& x, Range rows, int64_t p, Asks asks,
                const Columns& to) {
  Panel w[P];
  for (int64_t i = 0; i < P; i++) w[i] = quantized_panel(a, p + i);
  in_passes<Most>(rows.first, rows.last, [&]<int R>(int64_t row) {
    int_rows<R, P, Bits>(a, x, w, row, p, asks, to);
  });
}

#if !defined(__AVX512F__)
template <int Bits>
constexpr int64_t kReadyRows = Bits == 8 ? 24 : 12;

// Many rows: the panel is made ready once.
template <int Bits, bool Zero>
void ready_panel(const LinearArgs& a, const Rows& x, Range rows, Range panels, int64_t p,
                 const Columns& to) {
  const int64_t count = rows.last - rows.first;
  Bursts bursts =
      bursts_of(a, ahead_of(a, count), panels, p, 1, count_passes(count, kMaxRows));
  const Ready w = make_ready<Bits>(
      quantized_panel(a, p), static_cast<uint8_t*>(scratch(
                                 Scratch::unpacked, ready_bytes<Bits>(a.padded_k, a.groups))));
  in_passes<kMaxRows>(rows.first, rows.last, [&]<int R>(int64_t row) {
    F16 values[R][1];
    multiply_ready<R, Bits, Zero>(w, x.bytes + row * a.padded_k, a.padded_k,
                                  x.sums + row * a.groups,
                                  a.blocks ? x.scale + row * a.groups : nullptr, bursts, values);
    if (!a.blocks)
      for (int r = 0; r < R; r++) values[r][0] = values[r][0] * set1(x.scale[row + r]);
    to(row, p, values);
  });
}
#endif

template <int Bits>
void int_part(const LinearArgs& a, const Rows& x, Range rows, Range panels, const Columns& to) {
  const int64_t count = rows.last - rows.first;
  const Ahead ahead = ahead_of(a, count);
  int64_t p = panels.first;
  if (ahead.once) {
    for (; p < panels.last; p++) int_panels<kIntRows, 1, Bits>(a, x, rows, p, Lines(ahead), to);
    return;
  }
  const auto bursts = [&](int64_t most, int64_t panels_at_once) {
    return bursts_of(a, ahead, panels, p, panels_at_once, count_passes(count, most));
  };
#if defined(__AVX512F__)
  if (count >= choice_or(a.variant.pair_rows, kPairRows))
    for (; panels.last - p >= 2; p += 2) int_panels<6, 2, Bits>(a, x, rows, p, bursts(6, 2), to);
#else
  if (count >= kReadyRows<Bits>)
    for (; p < panels.last; p++)
      a.zero ? ready_panel<Bits, true>(a, x, rows, panels, p, to)
             : ready_panel<Bits, false>(a, x, rows, panels, p, to);
#endif
  for (; p < panels.last; p++)
    int_panels<kIntRows, 1, Bits>(a, x, rows, p, bursts(kIntRows, 1), to);
}

// A panel's values for rows of X.
template <typename X>
using Wide = std::conditional_t<std::is_same_v<X, crossed>, crossed, bf16>;

// R rows times P panels that were widened to bfloat16 and lie `size` values apart: each group like a
// dense one. Not inlined, as `multiply` isn't.
template <typename X, int R, int P>
[[gnu::noinline]] void widened_rows(const LinearArgs& a, const Rows& x, const Panel (&w)[P],
                                    const Wide<X>* wide, int64_t size, int64_t row, int64_t p,
                                    Bursts& bursts, const Columns& to) {
  F16 total[R][P];
  clear(total);
  for (int64_t g = 0; g < w[0].groups; g++) {
    const int64_t first = g * w[0].group;
    F16 sum[R][P];
    clear(sum);
    dot_panels(row_of<X>(a, x, row) + first, a.padded_k, wide + first * kColumns, size, w[0].group,
               bursts, sum);
    if (x.scale)
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int i = 0; i < P; i++)
          sum[r][i] = sum[r][i] * set1(x.scale[(row + r) * a.groups + g]);
#pragma GCC unroll 2
    for (int i = 0; i < P; i++) {
      const F16 s = w[i].scales(g);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) total[r][i] = fma(sum[r][i], s, total[r][i]);
    }
  }
  to(row, p, total);
}

// Many rows: panels are widened once, P at a time.
template <typename X, int P>
void widened_panels(const LinearArgs& a, const Rows& x, Range rows, Range panels, int64_t p,
                    const Columns& to) {
  constexpr int most = kPass<X, P>;
  const int64_t count = rows.last - rows.first, size = a.padded_k * kColumns;
  Bursts bursts = bursts_of(a, ahead_of(a, count), panels, p, P, count_passes(count, most));
  Wide<X>* wide = static_cast<Wide<X>*>(
      scratch(Scratch::unpacked, static_cast<size_t>(P * size) * sizeof(Wide<X>)));
  Panel w[P];
  for (int i = 0; i < P; i++) {
    w[i] = quantized_panel(a, p + i);
    unpack_bf16(a.kind, w[i], 0, a.padded_k, wide + i * size);
  }
  in_passes<most>(rows.first, rows.last, [&]<int R>(int64_t row) {
    widened_rows<X, R>(a, x, w, wide, size, row, p, bursts, to);
  });
}

// R rows times a panel of codes. Not inlined, as `multiply` isn't.
template <int R, Weight W, typename X>
[[gnu::noinline]] void code_rows(const LinearArgs& a, const Rows& x, const Panel& w, int64_t row,
                                 int64_t p, const Lines& asks, const Columns& to) {
  F16 values[R][1];
  multiply_codes<R, W>(w, row_of<X>(a, x, row), a.padded_k,
                       x.scale ? x.scale + row * a.groups : nullptr, asks, values);
  to(row, p, values);
}

template <Weight W, typename X>
void code_part(const LinearArgs& a, const Rows& x, Range rows, Range panels, const Columns& to) {
  const int64_t count = rows.last - rows.first;
  const bool wide = widens(a, count);
  const Lines asks(ahead_of(a, 1));  // each pass reads codes anew
  int64_t p = panels.first;
  for (; wide && panels.last - p >= kPanels; p += kPanels)
    widened_panels<X, kPanels>(a, x, rows, panels, p, to);
  for (; wide && p < panels.last; p++) widened_panels<X, 1>(a, x, rows, panels, p, to);
  for (; p < panels.last; p++) {
    const Panel w = quantized_panel(a, p);
    in_passes<kCodeRows<X>>(rows.first, rows.last, [&]<int R>(int64_t row) {
      code_rows<R, W, X>(a, x, w, row, p, asks, to);
    });
  }
}

// R rows times a panel of records.
template <Weight W, int R>
[[gnu::noinline]] void record_rows(const Panel& w, int64_t records, ScaledRows x, const Lines& asks,
                                   F16 (&total)[R][1]) {
  F16 sums[R];
  for (int r = 0; r < R; r++) sums[r] = zero();
  const uint8_t* record = w.data;
  for (int64_t i = 0; i < records; i++, record += w.record_bytes) {
    add_record<W>(Direct<W, Lines>(record, asks), x, sums);
    x = x.template record<W>(1);
  }
  for (int r = 0; r < R; r++) total[r][0] = sums[r];
}

// All rows times a panel: a record after the other is put together for all of them, whose sums wait in
// `totals` [rows, 16].
template <Weight W>
[[gnu::noinline]] void assembled_panel(const Panel& w, int64_t records, const ScaledRows& x, Range rows,
                                       float* totals) {
  auto* memory = static_cast<uint8_t*>(scratch(Scratch::unpacked, Assembled<W>::bytes));
  for (int64_t i = 0; i < records; i++) {
    const uint8_t* record = w.data + i * w.record_bytes;
    for (int64_t at = 0; at < w.record_bytes; at += 64)
      prefetch_bytes(record + w.record_bytes + at);
    const Assembled<W> ready(record, memory);
    in_passes<kIntRows>(rows.first, rows.last, [&]<int R>(int64_t row) {
      const ScaledRows mine = x.at(row).template record<W>(i);
      float* at = totals + (row - rows.first) * kColumns;
      F16 sums[R];
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) sums[r] = i ? load(at + r * kColumns) : zero();
      add_record<W>(ready, mine, sums);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) store(at + r * kColumns, sums[r]);
    });
  }
}

template <Weight W>
void record_panel(const LinearArgs& a, const Rows& rows, Range range, int64_t p, const Columns& to) {
  const int64_t count = range.last - range.first, records = a.padded_k / kRecord;
  const ScaledRows x = scaled_rows<W>(a, rows.bytes, rows.scale, rows.block_sums);
  const Panel w = quantized_panel(a, p);
  if (count <= kIntRows)
    return with_count<kIntRows>(count, [&]<int R>() {
      F16 values[R][1];
      record_rows<W, R>(w, records, x.at(range.first), Lines(ahead_of(a, 1)), values);
      to(range.first, p, values);
    });
  float* totals = static_cast<float*>(
      scratch(Scratch::partials, static_cast<size_t>(count * kColumns) * sizeof(float)));
  assembled_panel<W>(w, records, x, range, totals);
  for (int64_t r = 0; r < count; r++) to(range.first + r, p, load(totals + r * kColumns));
}

void record_part(const LinearArgs& a, const Rows& x, Range rows, Range panels, const Columns& to) {
  for (int64_t p = panels.first; p < panels.last; p++)
    with_records(a.kind, quantized_panel(a, p).data,
                 [&]<Weight W>() { record_panel<W>(a, x, rows, p, to); });
}

// Rows of floats: records are widened to bfloat16, and multiplied as dense panels are.
template <typename X>
void widened_part(const LinearArgs& a, const Rows& x, Range rows, Range panels, const Columns& to) {
  int64_t p = panels.first;
  for (; panels.last - p >= kPanels; p += kPanels)
    widened_panels<X, kPanels>(a, x, rows, panels, p, to);
  for (; p < panels.last; p++) widened_panels<X, 1>(a, x, rows, panels, p, to);
}

using Part = void (*)(const LinearArgs&, const Rows&, Range rows, Range panels, const Columns&);

Part choose(const LinearArgs& a) {
  if (a.kind == Weight::dense) return a.dtype == DType::bf16 ? dense_part<bf16> : dense_part<float>;
  Part part = nullptr;
  if (by_records(a)) return record_part;
  if (a.int8_rows) return a.kind == Weight::int4 ? int_part<4> : int_part<8>;
  if (has_records(a.kind)) {
    part = widened_part<float>;
    if constexpr (kCrosses)
      if (crosses(a)) part = widened_part<crossed>;
    return part;
  }
  with_kind(a.kind, [&]<Weight W>() {
    part = code_part<W, float>;
    if constexpr (kCrosses)
      if (crosses(a)) part = code_part<W, crossed>;
  });
  return part;
}

// All rows times some panels. Not inlined: the compiler would read what the lambda captures from
// memory again and again.
[[gnu::noinline]] void multiply(const LinearArgs& a, const Rows& x, Range panels, Part part) {
  const int64_t block = row_block(a);
  for (int64_t row = 0; row < a.rows; row += block) {
    const int64_t last = a.rows - row < block ? a.rows : row + block;
    part(a, x, {row, last}, panels, Columns(a, row, last - row));
  }
}

}  // namespace

void linear(const LinearArgs& args) {
  LinearArgs a = args;
#if defined(__AVX512F__)
  // a table is sooner asked than a code made a float and its zero point taken off
  if (args.kind == Weight::int4 && !args.zero && !args.int8_rows) {
    static constexpr float table[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    a.kind = Weight::levels;
    a.table = table;
  }
#endif
  const Rows x = allocate(a);
  const Part part = choose(a);
  const int64_t panels = count_panels(a), unit = stay_together(a);
  const int64_t units = (panels + unit - 1) / unit, bytes = panel_bytes(a) * unit;
  const int threads = units * bytes * a.rows > kParallelBytes ? a.threads : 1;
  const int64_t least = a.rows > kFewRows ? kPartBytesOfRows : kPartBytes;
  const Deal parts = deal(units, bytes, choice_or(a.variant.part_bytes, least), threads);
  // few rows are sooner ready than another thread
  over_rows(a.rows <= 4 ? 1 : threads, a.rows, [&](int64_t row) { prepare(a, x, row); });
  const RowLargest largest(a, parts.parts);
  // Panels go to whichever thread is free, in parts large enough to stream: a core that is slower,
  // or busy with something else, then takes fewer.
  parallel(threads, parts.parts, [&](int64_t i) {
    const Range those = parts.part(i);
    const Range mine = {those.first * unit, std::min(those.last * unit, panels)};
    largest.part(i, mine, [&](const LinearArgs& args) {
      const FlushDenormals flush;
      multiply(args, x, mine, part);
    });
  });
  largest.finish();
}

}  // namespace penstock::PENSTOCK_ISA

// Kernels that go over rows once: norms, addition, the soft cap, embedding.
#include "elementary.h"
#include "linear.h"

namespace penstock::PENSTOCK_ISA {
namespace {

// Below this many elements a parallel region costs more than it saves.
constexpr int64_t kParallel = 32 * 1024;

template <typename T>
void norm_row(const NormArgs& a, int64_t row) {
  const int64_t d = a.dim;
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  float mean = 0.0f;
  if (a.centre) {
    F16 sum = zero();
    for (int64_t j = 0; j < d; j += 16)
      sum = sum + load_some(x + j, d - j < 16 ? static_cast<int>(d - j) : 16);
    mean = reduce_add(sum) / static_cast<float>(d);
  }
  const F16 scale = inverse_deviation(x, d, mean, a.eps);
  T* out = static_cast<T*>(a.out) + row * d;
  for (int64_t j = 0; j < d; j += 16) {
    const int c = d - j < 16 ? static_cast<int>(d - j) : 16;
    F16 v = (load_some(x + j, c) - set1(mean)) * scale * load_first(a.weight + j, c);
    if (a.bias) v = v + load_first(a.bias + j, c);
    store_some(out + j, v, c);
  }
}

template <typename T>
void add_row(const AddArgs& a, int64_t row) {
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  T* to = static_cast<T*>(a.residual) + row * a.residual_stride;
  for (int64_t j = 0; j < a.dim; j += 16) {
    const int c = a.dim - j < 16 ? static_cast<int>(a.dim - j) : 16;
    store_some(to + j, load_some(to + j, c) + load_some(x + j, c), c);
  }
}

template <typename T>
void scaled_add_row(const ScaledAddArgs& a, int64_t row) {
  const float* x = a.x + row * a.dim;
  T* to = static_cast<T*>(a.y) + a.places[row] * a.y_stride;
  const F16 scale = set1(a.scale);
  for (int64_t j = 0; j < a.dim; j += 16) {
    const int c = a.dim - j < 16 ? static_cast<int>(a.dim - j) : 16;
    store_some(to + j, load_some(to + j, c) + load_some(x + j, c) * scale, c);
  }
}

template <typename T>
void gate_row(const GateRowsArgs& a, int64_t row) {
  const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
  F16 sum = zero();
  for (int64_t j = 0; j < a.columns; j += 16) {
    const int c = a.columns - j < 16 ? static_cast<int>(a.columns - j) : 16;
    sum = sum + load_some(x + j, c) * load_first(a.weight + j, c);
  }
  const F16 share = set1(1.0f) / (set1(1.0f) + exp(set1(-reduce_add(sum))));
  T* y = static_cast<T*>(a.y) + row * a.y_stride;
  for (int64_t j = 0; j < a.dim; j += 16) {
    const int c = a.dim - j < 16 ? static_cast<int>(a.dim - j) : 16;
    store_some(y + j, load_some(y + j, c) * share, c);
  }
}

// One column of a dense panel.
template <typename T>
void dense_column(const EmbeddingArgs& a, int64_t id, T* out) {
  constexpr int64_t v = 4 / static_cast<int64_t>(sizeof(T));
  const T* column = static_cast<const T*>(a.weight) + (id / 16) * a.panel_k * 16 + (id % 16) * v;
  for (int64_t j = 0; j < a.dim; j++) out[j] = column[j / v * 16 * v + j % v];
}

// A byte of floating point with so many bits of mantissa (values.h: Fp8).
float widen_byte(uint8_t byte, int mantissa) {
  const int bias = 127 - ((1 << (6 - mantissa)) - 1);
  const uint32_t bits = ((byte & 0x7fu) << (23 - mantissa)) + (static_cast<uint32_t>(bias) << 23);
  const uint32_t least_bits = static_cast<uint32_t>(bias + 1) << 23;
  float f, least;
  __builtin_memcpy(&f, &bits, 4);
  __builtin_memcpy(&least, &least_bits, 4);
  if (f < least) f = 2.0f * f - least;
  return byte & 0x80 ? -f : f;
}

// Value k of a column: the code less its zero point, or what it stands for.
float column_value(const EmbeddingArgs& a, const uint8_t* column, int64_t k, int64_t meta,
                   int64_t fine) {
  const uint8_t byte = bits_of(a.kind) == 8 ? column[k / 4 * 64 + k % 4]
                                            : column[k / 8 * 64 + k % 4] >> (k % 8 < 4 ? 0 : 4);
  switch (a.kind) {
    case Weight::int8_zero:
      return static_cast<float>(static_cast<int8_t>(byte) -
                                static_cast<const int8_t*>(a.zero)[meta]);
    case Weight::int4:
      return static_cast<float>((byte & 15) -
                                (a.zero ? static_cast<const uint8_t*>(a.zero)[meta] : 8));
    case Weight::fp8_e4m3:
      return widen_byte(byte, 3);
    case Weight::fp8_e5m2:
      return widen_byte(byte, 2);
    case Weight::levels:
      return a.table[byte & 15];
    case Weight::nvfp4:
      return a.table[byte & 15] * widen_byte(a.fine[fine + k / 16 * 16], 3);
    default:
      return static_cast<float>(static_cast<int8_t>(byte));
  }
}

float from_half(const uint8_t* p) {
  uint16_t bits;
  __builtin_memcpy(&bits, p, 2);
  return _cvtsh_ss(bits);
}

// One column of a panel of records: code · step + start.
template <Weight W>
void record_column(const EmbeddingArgs& a, const uint8_t* record, int64_t lane, bf16* out) {
  using R = Record<W>;
  for (int64_t k = 0; k < a.dim; k++) {
    const int64_t at = k % kRecord, quad = at / 4, g = at / R::group, word = lane * 4 + at % 4;
    if (k > 0 && at == 0) record += record_lines(a.kind) * 64;
    const float step = from_half(record + R::d + lane * 2) *
                       static_cast<float>(static_cast<int8_t>(record[g * 16 + lane]));
    float start = step * -R::zero;
    if constexpr (R::zero == 0)
      start = -(from_half(record + R::d + 32 + lane * 2) *
                static_cast<float>(record[R::minima + g / 2 * 32 + lane * 2 + g % 2]));
    const uint8_t* unit = record + R::head + at / kUnit * R::unit + word;
    int code = unit[quad % 8 / 2 * 64] >> (quad % 2 * 4) & 15;
    if constexpr (R::bits > 4) {
      constexpr int64_t each = R::bits == 5 ? 8 : 4;
      const int high = unit[R::high + quad % 8 / each * 64];
      code |= (high >> (quad % each * (R::bits - 4)) & ((1 << (R::bits - 4)) - 1)) << 4;
    }
    from_float(__builtin_fmaf(static_cast<float>(code), step, start), out[k]);
  }
}

// One column of a quantized panel: value · scale.
void quantized_column(const EmbeddingArgs& a, int64_t id, bf16* out) {
  const int64_t bytes = a.panel_k * bits_of(a.kind) / 8, lane = id % 16;
  const uint8_t* column = static_cast<const uint8_t*>(a.weight) + (id / 16) * bytes * 16 + lane * 4;
  const int64_t group = a.panel_k / a.groups, fine = id / 16 * a.panel_k + lane;
  Panel panel = {};
  panel.scale = a.quantized_scale;
  panel.scale_type = a.scale_type;
  for (int64_t g = 0; g < a.groups; g++) {
    const int64_t line = (id / 16) * a.groups + g;
    float scales[16];
    store(scales, panel.scales(line));
    for (int64_t k = g * group; k < (g + 1) * group && k < a.dim; k++)
      from_float(column_value(a, column, k, line * 16 + lane, fine) * scales[lane], out[k]);
  }
}

template <typename T>
void embed_row(const EmbeddingArgs& a, int64_t row) {
  T* out = static_cast<T*>(a.out) + row * a.out_stride;
  const int64_t id = a.tokens[row];
  if (a.panel_k == 0)
    __builtin_memcpy(out, static_cast<const T*>(a.weight) + id * a.dim,
                     static_cast<size_t>(a.dim) * sizeof(T));
  else if (a.kind == Weight::dense)
    dense_column(a, id, out);
  else if constexpr (sizeof(T) == 2) {
    if (has_records(a.kind)) {
      const auto* panel = static_cast<const uint8_t*>(a.weight) +
                          id / 16 * (a.panel_k / kRecord) * record_lines(a.kind) * 64;
      with_records(a.kind, panel, [&]<Weight W>() { record_column<W>(a, panel, id % 16, out); });
    } else
      quantized_column(a, id, out);
  }
  if (a.scale != 1.0f)
    for (int64_t j = 0; j < a.dim; j += 16) {
      const int c = a.dim - j < 16 ? static_cast<int>(a.dim - j) : 16;
      store_some(out + j, load_some(out + j, c) * set1(a.scale), c);
    }
}

template <typename Args>
void run(const Args& a, int64_t rows, int64_t work, void (*row)(const Args&, int64_t)) {
  over_rows(work > kParallel ? a.threads : 1, rows, [&](int64_t r) { row(a, r); });
}

}  // namespace

void norm(const NormArgs& a) {
  run(a, a.rows, a.rows * a.dim, a.dtype == DType::bf16 ? norm_row<bf16> : norm_row<float>);
}

void add(const AddArgs& a) {
  run(a, a.rows, a.rows * a.dim, a.dtype == DType::bf16 ? add_row<bf16> : add_row<float>);
}

void scaled_add(const ScaledAddArgs& a) {
  run(a, a.rows, a.rows * a.dim,
      a.dtype == DType::bf16 ? scaled_add_row<bf16> : scaled_add_row<float>);
}

void gate_rows(const GateRowsArgs& a) {
  run(a, a.rows, a.rows * (a.columns + a.dim),
      a.dtype == DType::bf16 ? gate_row<bf16> : gate_row<float>);
}

void embedding(const EmbeddingArgs& a) {
  run(a, a.count, a.count * a.dim,
      a.dtype == DType::bf16 ? embed_row<bf16> : embed_row<float>);
}

static void softcap_chunk(const SoftcapArgs& a, int64_t chunk) {
  const int64_t first = chunk * 1024;
  const int64_t last = first + 1024 < a.count ? first + 1024 : a.count;
  for (int64_t j = first; j < last; j += 16) {
    const int c = last - j < 16 ? static_cast<int>(last - j) : 16;
    store_some(a.x + j, softcapped(load_some(a.x + j, c), a.cap), c);
  }
}

void softcap(const SoftcapArgs& a) {
  run(a, (a.count + 1023) / 1024, a.count, softcap_chunk);
}

}  // namespace penstock::PENSTOCK_ISA

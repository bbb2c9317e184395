// The native core's interface: plain pointers and strides, no torch.
//
// Every kernel exists once for each instruction set and all of them give the same bits: sums run
// over 16 virtual lanes in one defined order, additions along K follow AMX's, exponentials are
// polynomials, nothing depends on the number of rows or threads, and denormals are zero.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "types.h"

namespace penstock {

// How `linear` goes over a matrix. No choice changes a bit of the result; which is fastest depends on
// the machine, the shape and the rows. 0: what suits most.
struct LinearVariant {
  int32_t part_bytes;   // of weights that a thread takes at a time, at least
  int32_t rows_bytes;   // of rows that it takes through all of those before the next rows
  int32_t widen_rows;   // more rows than that: a panel is widened once, not for a few at a time
  int32_t pair_rows;    // from so many rows on that pass twice, two panels of integers at a time
  int32_t ahead_bytes;  // how far ahead of what rows that pass once read memory is asked for
  int32_t ahead_cache;  // into which cache: 1, 2, or 3 to leave it to the processor
};

constexpr int64_t choice_or(int32_t choice, int64_t otherwise) {
  return choice > 0 ? choice : otherwise;
}

// A row's largest column.
struct Largest {
  float value;
  int64_t column;
};

// y [rows, n] = x [rows, k] · panels, with what comes before and after it. ops/linear.py.
struct LinearArgs {
  const void* x;
  int64_t x_stride;   // elements between rows
  const float* norm;  // [k]: the rows' root-mean-square norm is taken first; may be null
  float eps;
  bool int8_rows;  // rows are rounded to int8, each with a scale of its own …
  bool blocks;     // … or with one for each of the weight's groups, or records
  bool rotated;    // blocks of 64 of their values are, before that
  bool fp8_rows;   // rows are rounded to E4M3, each with a scale for each of the weight's groups
  const float* input_scale;  // of all rows, where it isn't their own; may be null
  Weight kind;
  const void* weight;  // panels: ops/panels.py
  int64_t padded_k;
  const void* scale;  // [panels, groups, 16] of quantized weights
  Scale scale_type;
  const void* zero;     // [panels, groups, 16] of int4 (0 … 15; null: 8) and of int8_zero
  const uint8_t* fine;  // [panels, padded_k / 16, 16] E4M3 of nvfp4
  const float* table;   // [16] of levels and nvfp4: values that bfloat16 holds
  int64_t groups;
  const float* bias;  // [n], or gate's then up's when gated; may be null
  Activation activation;
  bool gated;          // panels alternate between gate and up: y = act(gate) · up
  bool adds;           // y is added to the residual instead of being written
  void* residual;
  int64_t residual_stride;
  void* y;  // rows of n, y_stride apart
  int64_t y_stride;
  Largest* largest;  // [rows], where nothing else is wanted of float32 results; y is null then
  float cap;         // their soft cap; 0: none
  int64_t rows, k, n;
  DType dtype;      // of x
  DType out_dtype;  // of y
  int threads;
  LinearVariant variant;
};

// out [tokens, dim] = rows of a table times scale.
struct EmbeddingArgs {
  const int32_t* tokens;
  const void* weight;
  void* out;
  int64_t out_stride;  // elements from a row to the next
  int64_t count, dim, vocab;
  int64_t panel_k;  // k of the panels, or 0 for a plain [vocab, dim] table
  Weight kind;
  const void* quantized_scale;  // as in LinearArgs, where the panels are quantized
  Scale scale_type;
  const void* zero;
  const uint8_t* fine;
  const float* table;
  int64_t groups;
  float scale;
  DType dtype;  // of out
  int threads;
};

// out = norm(x) · weight (+ bias).
struct NormArgs {
  const void* x;
  int64_t x_stride;
  const float* weight;
  const float* bias;  // may be null
  void* out;          // contiguous
  int64_t rows, dim;  // dim: of a group, each of which is normed by itself
  int64_t groups;     // of a row, side by side
  float eps;
  bool centre;  // layer norm
  DType dtype;
  int threads;
};

// residual += x.
struct AddArgs {
  const void* x;
  int64_t x_stride;
  void* residual;
  int64_t residual_stride;
  int64_t rows, dim;
  DType dtype;
  int threads;
};

// out = act(x), or act(gate) · up of columns that alternate by sixteen. ops/gate.py.
struct GateArgs {
  const void* x;
  int64_t x_stride;
  void* out;  // contiguous
  int64_t rows, dim;  // dim: columns of out
  Activation activation;
  bool gated;
  DType dtype;      // of x
  DType out_dtype;
  int threads;
};

// y[t] *= σ(x[t] · weight). ops/gate_rows.py.
struct GateRowsArgs {
  const void* x;
  int64_t x_stride, columns;
  const float* weight;  // [columns]
  void* y;
  int64_t y_stride;
  int64_t rows, dim;  // dim: columns of y
  DType dtype;        // of both
  int threads;
};

// y[places[i]] += x[i] · scale, rounded once.
struct ScaledAddArgs {
  const float* x;  // [rows, dim] contiguous
  float scale;
  void* y;
  int64_t y_stride;
  const int32_t* places;  // [rows]
  int64_t rows, dim;
  DType dtype;  // of y
  int threads;
};

struct SoftcapArgs {
  float* x;
  int64_t count;
  float cap;
  int threads;
};

// KIVI's window, beside an int4 cache whose keys have a step and a minimum for each dimension of 32
// positions: keys and values as bfloat16, in blocks of their own. ops/kivi.py.
struct Recent {
  bf16* keys;
  bf16* values;
  const int32_t* slots;  // [blocks] of the cache: where each one's lies, or −1; null: no window
  int64_t count;         // blocks in keys and values
  int64_t window;
};

constexpr int64_t kKeyGroup = 32;  // positions

// From where on a query at `position` sees what was written instead of codes.
constexpr int64_t recent_from(int64_t position, int64_t window) {
  return position > window ? (position - window) / kKeyGroup * kKeyGroup : 0;
}

// float16 scales of a cache, or null; `pitch` of them lie from one block's to the next's.
struct Scales {
  uint16_t* data;
  int64_t pitch;
};

// Layouts of the caches: ops/rotary_cache.py. A block is contiguous; the next may be anywhere behind it.
struct RotaryCacheArgs {
  const void* q;  // [tokens, heads · dim]; k [tokens, kv_heads · dim], v [tokens, kv_heads · kept]
  int64_t parts;  // 3: all of these; 2: k is v too; 1: q alone, and nothing is written
  const void* k;
  const void* v;
  int64_t stride;  // elements between the rows of each
  const float* q_norm;  // [dim], may be null
  const float* k_norm;
  bool norm_all;  // over all heads together: q_norm [heads · dim], k_norm [kv_heads · dim]
  bool weighs_turned;  // norms' weights multiply heads once they are rotated
  bool norm_values;    // each head of v, without weights
  float eps;
  const float* cos_sin;  // [positions, rotary_dim], may be null
  int64_t num_positions, rotary_dim;
  bool interleaved;
  const int32_t* positions;
  const int32_t* slots;
  const int32_t* copies;  // [copied, 2]: a token, and another slot for its key and value
  int64_t copied;
  void* key_cache;
  void* value_cache;
  int64_t pitch;     // bytes from a block to the next, of keys and of values
  Scales key_scale;  // [blocks, kv_heads, block_size] for int8,
                     // [blocks, kv_heads, groups, 2, block_size] for int4; keys beside a
                     // window [blocks, kv_heads, block_size / 32, 2, padded_dim]
  Scales value_scale;
  Stored stored;
  Recent recent;
  int64_t blocks, block_size, padded_dim;
  const float* bases;  // [2, kv_heads, dim, kept]: of queries, of keys; may be null, and kept is dim
  int64_t kept;        // dimensions of a head in the cache, of values before it, and of q_out
  void* q_out;         // [tokens, heads, kept] contiguous
  int64_t sink_reach;  // 0: none; else [tokens, 2 · heads, kept], each again as at a position below it
  int64_t tokens, heads, kv_heads, dim;
  DType dtype;
  int threads;
};

struct AttentionArgs {
  const void* q;  // [tokens, heads, dim]; with sink_tokens [tokens, 2 · heads, dim], theirs last
  const void* key_cache;
  const void* value_cache;
  int64_t pitch;  // as in RotaryCacheArgs
  Scales key_scale;
  Scales value_scale;
  Stored stored;
  Recent recent;
  const int32_t* query_start;
  const int32_t* context_len;
  const int32_t* block_table;
  int64_t table_stride;
  int64_t table_tokens;  // of an entry: block_size, or more where ranks share blocks (ring.h)
  void* out;             // [tokens, heads · value_dim]
  int64_t out_stride;    // elements from a token to the next
  int64_t first_query;   // the token whose query is q's first
  int64_t first_token;   // the one whose row is out's first
  int64_t sequences, heads, kv_heads, dim, padded_dim, blocks, block_size;
  int64_t value_dim, padded_values;  // dim and padded_dim, but for latents
  bool latent;  // values are the first value_dim of keys, and there is no value_cache (latent.h)
  float scale;
  int64_t window;       // 0: none
  int64_t sink_tokens;  // 0: none; seen from any distance, beside the window
  float softcap;        // 0: none
  const float* sinks;   // [heads], may be null
  bool whole;          // queries see what comes after them too; a window says how far back
  bool at_sinks;       // the kernel's own: of sink_tokens alone, by the queries that are theirs
  DType dtype;
  int threads;
};

// Rows from one matrix to another. ops/kept_rows.py.
struct RowsArgs {
  const void* from;
  void* to;
  int64_t rows, row_bytes;
  int64_t from_stride, to_stride;  // bytes
  bool keeps;  // a value's rows go to a store; otherwise the other way
  const int32_t* wanted;  // [rows]: not 0 where a row goes; null: all go
};

// The place and value of each row's largest logit.
struct ArgmaxArgs {
  const float* logits;
  int64_t stride;  // elements between rows
  int64_t* ids;
  float* values;
  int64_t rows, size;
  int threads;
};

// Logits of the listed rows become -inf where the row's mask has no bit.
struct MaskArgs {
  float* logits;
  int64_t stride;         // elements between rows
  const int64_t* rows;    // [count]
  const uint32_t* bits;   // [count, words]
  int64_t count, words, size;
  int threads;
};

// Rows of logits whose k ≤ size largest matter.
struct LeadingArgs {
  const float* logits;
  int64_t stride;            // elements between rows
  const float* temperature;  // [rows], null where none is asked for
  int64_t rows, size, k;
  int threads;
};

// Those; with weights: their share of softmax(logits / temperature).
struct TopKArgs : LeadingArgs {
  float* values;   // [rows, k]
  int64_t* ids;    // [rows, k]
  float* weights;  // [rows, k], may be null
};

// The same, scaled by the temperature, and -inf where top_k or min_p leave them out.
struct ScaledTopKArgs : LeadingArgs {
  const int64_t* top_k;    // [rows]
  const float* log_min_p;  // [rows]
  float* scaled;           // [rows, k]
  int64_t* ids;            // [rows, k]
  float* peaks;            // [rows]
  bool* more;              // [rows]: whether others may be left too
};

// Stands for the token of a row whose nucleus may hold more than its `wide` largest.
constexpr int64_t kBeyond = -2;

// One token of each row's nucleus, which is looked for in the k largest first.
struct DrawNucleusArgs : LeadingArgs {
  int64_t wide;        // k ≤ wide ≤ size
  const float* top_p;  // [rows]
  const double* u;     // [rows]
  int64_t* out;
  float* peaks;
};

// One token of each row of softmax(logits / temperature).
struct DrawPlainArgs {
  const float* logits;
  int64_t stride;
  const float* temperature;  // [rows]
  const double* u;           // [rows]
  int64_t* ids;
  float* peaks;
  int64_t rows, size;
  int threads;
};

// One of each row's few candidates.
struct DrawFromArgs {
  const int64_t* ids;    // [rows, count]
  const float* weights;  // [rows, count]; in falling order if there is a top_p
  const double* u;       // [rows]
  const float* top_p;    // [rows], may be null
  int64_t* out;
  int64_t rows, count;
  int threads;
};

// Random numbers in [0, 1), each a function of the numbers that it belongs to. ops/uniforms.py.
struct UniformsArgs {
  const int64_t* seeds;      // [count]
  const int64_t* samples;    // [count]
  const int64_t* positions;  // [count]
  uint32_t use;
  double* out;
  int64_t count;
};

enum class Float : int { f32, bf16, f16 };

// What a group's largest magnitude may be divided by for its scale: ops/quantize.py.
constexpr float kInt4Parts[4] = {8.0f, 8.5f, 7.5f, 9.0f};

// A float matrix [n, k], or [2·n, k] when gated, to dense panels: ops/pack.py. `rotate` writes
// float32 rows [n, padded_k] to `panels`: ops/rotate.py.
struct PackArgs {
  const void* weight;
  int64_t stride;  // elements between rows
  int64_t n, k, padded_k;
  bool gated;
  void* panels;
  Float dtype;
  DType to;  // of dense panels
  int threads;
};

// The same, rounded to int8 or int4 panels. ops/quantize.py.
struct QuantizeArgs : PackArgs {
  int64_t group;  // of int4: 32, 64 or 128; 0: int8
  bool symmetric;
  void* scale;    // [panels, groups, 16] float16 of int4, [panels, 1, 16] float32 of int8
  uint8_t* zero;  // [panels, groups, 16] where int4 isn't symmetric
};

// y[t] += scaling[a] · (x[t] · down[a]) · up[a], a = adapters[t]; rows with a negative one aren't
// touched. ops/lora.py.
struct LoraArgs {
  const void* x;
  int64_t x_stride;
  void* y;
  int64_t y_stride;
  int64_t rows;
  const int32_t* adapters;  // [rows], below `count`
  int64_t count;
  LinearArgs down, up;  // of the first adapter …
  int64_t down_bytes, up_bytes;  // … and how far behind it the next one's matrices lie
  const float* scaling;  // [count]
  DType y_dtype;
  int threads;
};

// The products of the kernels in use.
void lora_add(const LoraArgs& a);

// Mixtures of experts (mixture.h), attention over latents (latent.h), layers with states (states.h).
struct RouteArgs;
struct CombineArgs;
struct TurnArgs;
struct LatentCacheArgs;
struct DeltaArgs;
struct MambaArgs;
struct ShortConvArgs;
struct GateByArgs;

// One table for each instruction set.
struct RingArgs;  // ring.h

struct Kernels {
  const char* name;
  void (*linear)(const LinearArgs&);
  void (*embedding)(const EmbeddingArgs&);
  void (*norm)(const NormArgs&);
  void (*add)(const AddArgs&);
  void (*scaled_add)(const ScaledAddArgs&);
  void (*gate_rows)(const GateRowsArgs&);
  void (*route)(const RouteArgs&);
  void (*combine)(const CombineArgs&);
  void (*softcap)(const SoftcapArgs&);
  void (*gate)(const GateArgs&);
  void (*rotary_cache)(const RotaryCacheArgs&);
  void (*turn)(const TurnArgs&);
  void (*latent_cache)(const LatentCacheArgs&);
  void (*delta_rule)(const DeltaArgs&);
  void (*mamba2)(const MambaArgs&);
  void (*short_conv)(const ShortConvArgs&);
  void (*gate_by)(const GateByArgs&);
  void (*attention)(const AttentionArgs&);
  void (*ring_attention)(const RingArgs&);
  void (*argmax)(const ArgmaxArgs&);
  void (*mask)(const MaskArgs&);
  void (*top_k)(const TopKArgs&);
  void (*scaled_top_k)(const ScaledTopKArgs&);
  void (*draw_nucleus)(const DrawNucleusArgs&);
  void (*draw_plain)(const DrawPlainArgs&);
  void (*draw_from)(const DrawFromArgs&);
  void (*uniforms)(const UniformsArgs&);
  void (*pack)(const PackArgs&);
  void (*quantize)(const QuantizeArgs&);
  void (*rotate)(const PackArgs&);
};

// The table in use; chosen from cpuid, or by PENSTOCK_ISA.
const Kernels& kernels();

// Memory that a thread keeps for `purpose` until it ends, at least `bytes` long, 64-byte aligned.
enum class Scratch : int {
  rows, row, tiles, sums, partials, unpacked, gate, tasks, scores, select, columns, largest,
  places, picked, hidden, change, routed, products, found, all_rows, queries, carried, delta, count
};
void* scratch(Scratch purpose, size_t bytes);

// For std::free; from 1 MB on in pages of 2 MB, where the system has them: rows of activations lie on more
// small ones than a core remembers the places of. Throws bad_alloc.
void* take_memory(size_t bytes);

// How often scratch memory or a program's buffers have been taken from the system, by all threads.
extern std::atomic<int64_t> allocations;

}  // namespace penstock

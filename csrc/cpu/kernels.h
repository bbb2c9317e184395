// The native core's interface: plain pointers and strides, no torch.
//
// Every kernel exists once for each instruction set and all of them give the same bits: sums run
// over 16 virtual lanes in one defined order, additions along K follow AMX's, exp is one
// polynomial, nothing depends on the number of rows or threads, and denormals are zero.
#pragma once

#include <cstddef>
#include <cstdint>

namespace penstock {

enum class DType : int { f32 = 0, bf16 = 1 };

struct bf16 {
  uint16_t bits;
};

// y [rows, n] = x [rows, k] · panels + bias. Panels: ops/panels.py.
struct LinearArgs {
  const void* x;
  int64_t x_stride;  // elements between rows
  const void* weight;
  const float* bias;  // may be null
  void* y;            // contiguous
  int64_t rows, k, n;
  DType dtype;      // of x and weight
  DType out_dtype;  // of y
  int threads;
};

// out [tokens, dim] = rows of a table times scale.
struct EmbeddingArgs {
  const int32_t* tokens;
  const void* weight;
  void* out;
  int64_t count, dim, vocab;
  int64_t panel_k;  // k of the panels, or 0 for a plain [vocab, dim] table
  float scale;
  DType dtype;
  int threads;
};

// out = norm(x) · weight (+ bias); with residual: residual += x first, out = norm(residual).
struct NormArgs {
  const void* x;
  int64_t x_stride;
  void* residual;  // may be null
  int64_t residual_stride;
  const float* weight;
  const float* bias;  // may be null
  void* out;          // contiguous
  int64_t rows, dim;
  float eps;
  bool centre;  // layer norm
  DType dtype;
  int threads;
};

enum class Activation : int { silu, gelu, gelu_tanh };

// gated: out [rows, dim] = act(x[:, :dim]) · x[:, dim:]; else act(x).
struct ActivationArgs {
  const void* x;
  int64_t x_stride;
  void* out;  // contiguous
  int64_t rows, dim;
  Activation kind;
  bool gated;
  DType dtype;
  int threads;
};

struct SoftcapArgs {
  float* x;
  int64_t count;
  float cap;
  int threads;
};

struct HeadsView {
  const void* data;
  int64_t token_stride, head_stride;  // elements; the last dimension is contiguous
};

// Layouts of the caches: ops/rotary_cache.py.
struct RotaryCacheArgs {
  HeadsView q, k, v;
  const float* q_norm;  // may be null
  const float* k_norm;
  float eps;
  const float* cos_sin;  // [positions, rotary_dim], may be null
  int64_t num_positions, rotary_dim;
  bool interleaved;
  const int32_t* positions;
  const int32_t* slots;
  void* key_cache;
  void* value_cache;
  int64_t block_size, padded_dim;
  void* q_out;  // [tokens, heads, dim] contiguous
  int64_t tokens, heads, kv_heads, dim;
  DType dtype;
  int threads;
};

struct AttentionArgs {
  const void* q;  // [tokens, heads, dim] contiguous
  const void* key_cache;
  const void* value_cache;
  const int32_t* query_start;
  const int32_t* context_len;
  const int32_t* block_table;
  int64_t table_stride;
  void* out;  // [tokens, heads · dim] contiguous
  int64_t sequences, heads, kv_heads, dim, padded_dim, block_size;
  float scale;
  int64_t window;      // 0: none
  float softcap;       // 0: none
  const float* sinks;  // [heads], may be null
  DType dtype;
  int threads;
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

// The k ≤ size largest of each row; with weights: their share of softmax(logits / temperature).
struct TopKArgs {
  const float* logits;
  int64_t stride;
  const float* temperature;  // [rows], null without weights
  float* values;             // [rows, k]
  int64_t* ids;              // [rows, k]
  float* weights;            // [rows, k], may be null
  int64_t rows, size, k;
  int threads;
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
  const float* weights;  // [rows, count]
  const double* u;       // [rows]
  int64_t* out;
  int64_t rows, count;
  int threads;
};

// One table for each instruction set.
struct Kernels {
  const char* name;
  void (*linear)(const LinearArgs&);
  void (*embedding)(const EmbeddingArgs&);
  void (*norm)(const NormArgs&);
  void (*activation)(const ActivationArgs&);
  void (*softcap)(const SoftcapArgs&);
  void (*rotary_cache)(const RotaryCacheArgs&);
  void (*attention)(const AttentionArgs&);
  void (*argmax)(const ArgmaxArgs&);
  void (*top_k)(const TopKArgs&);
  void (*draw_plain)(const DrawPlainArgs&);
  void (*draw_from)(const DrawFromArgs&);
};

// The table in use; chosen from cpuid, or by PENSTOCK_ISA.
const Kernels& kernels();

// Memory that a thread keeps for `purpose` until it ends, at least `bytes` long, 64-byte aligned.
enum class Scratch : int { rows, tiles, partials, tasks, scores, select, count };
void* scratch(Scratch purpose, size_t bytes);

}  // namespace penstock

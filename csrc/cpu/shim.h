// What the operators bound to torch share: checks of tensors, and arguments made of them.
//
// An operator's arguments are made from what it is given once (weights, caches) and the form of the
// rows it reads. The operator itself adds the rows; a program (shim_program.cpp) adds them later.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <tuple>

#include "latent.h"
#include "mixture.h"
#include "states.h"

namespace penstock::shim {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Optional = std::optional<Tensor>;

inline int threads() { return static_cast<int>(torch::stable::get_num_threads()); }

inline DType dtype_of(const Tensor& t, const char* what) {
  const ScalarType type = t.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, what,
                  " must be float32 or bfloat16");
  return type == ScalarType::Float ? DType::f32 : DType::bf16;
}

// Rows may be strided; what lies in one row may not.
inline void check_rows(const Tensor& t, const char* what) {
  STD_TORCH_CHECK(t.dim() == 2 && (t.stride(1) == 1 || t.size(1) == 1), what,
                  " must be [rows, columns] with contiguous rows, dim ", t.dim());
}

// The form of a matrix of activations.
struct Form {
  DType dtype;
  int64_t columns;
};

inline Form form_of(const Tensor& x, const char* what) {
  check_rows(x, what);
  return {dtype_of(x, what), x.size(1)};
}

inline const float* floats(const Tensor& t, int64_t count, const char* what) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.numel() == count,
                  what, " must be ", count, " contiguous float32, has ", t.numel());
  return static_cast<const float*>(t.data_ptr());
}

inline const float* floats(const Optional& t, int64_t count, const char* what) {
  return t ? floats(*t, count, what) : nullptr;
}

inline const int32_t* integers(const Tensor& t, int64_t count, const char* what) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.is_contiguous() && t.numel() == count,
                  what, " must be ", count, " contiguous int32, has ", t.numel());
  return static_cast<const int32_t*>(t.data_ptr());
}

// ── shim_layers.cpp ──────────────────────────────────────────────────────────────────────────

// n: columns of the product. Those of `linear` that come before and after it stay empty.
LinearArgs linear_args(Form x, const Tensor& weight, const Optional& scale, const Optional& zero,
                       const Optional& bias, int64_t n, int64_t row_codes, bool gated,
                       int64_t levels, const Optional& outer, const Optional& input_scale);
void with_norm_and_activation(LinearArgs& a, const Optional& norm, double eps, int64_t activation);
EmbeddingArgs embedding_args(const Tensor& weight, int64_t dim, double scale,
                             const Optional& weight_scale, const Optional& zero, int64_t levels,
                             const Optional& outer);
NormArgs norm_args(Form x, const Tensor& weight, const Optional& bias, double eps, bool centre);

// columns: of the result.
GateArgs gate_args(Form x, int64_t activation, bool gated, int64_t columns,
                   std::optional<ScalarType> out_dtype);

// Every id is one of a table of `vocab` rows.
void check_ids(const int32_t* ids, int64_t count, int64_t vocab, const char* what);

Tensor linear(const Tensor& x, const Tensor& weight, Optional scale, Optional zero, Optional bias,
              int64_t out_features, int64_t row_codes, Optional norm, double eps,
              int64_t activation, bool gated, std::optional<ScalarType> out_dtype, int64_t levels,
              Optional outer, Optional input_scale);
void linear_add_(const Tensor& residual, const Tensor& x, const Tensor& weight, Optional scale,
                 Optional zero, Optional bias, int64_t row_codes, int64_t levels, Optional outer,
                 Optional input_scale);
Tensor embedding(const Tensor& tokens, const Tensor& weight, int64_t dim, double scale,
                 Optional weight_scale, Optional zero, int64_t levels, Optional outer);
Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps);
Tensor layer_norm(const Tensor& x, const Tensor& weight, Optional bias, double eps);
void add_(const Tensor& residual, const Tensor& x);
void softcap_(const Tensor& x, double cap);
GateRowsArgs gate_rows_args(Form y, Form x, const Tensor& weight);
void gate_rows_(const Tensor& y, const Tensor& x, const Tensor& weight);
Tensor gate(const Tensor& x, int64_t activation, bool gated, int64_t out_features,
            std::optional<ScalarType> out_dtype);
Tensor alternate(const Tensor& bias);

// ── shim_adapters.cpp ────────────────────────────────────────────────────────────────────────

LoraArgs lora_args(Form x, Form y, const Tensor& down, const Tensor& up, const Tensor& scaling);
// One for each of `rows`, below `count` or negative.
const int32_t* check_adapters(const Tensor& adapters, int64_t rows, int64_t count);
void lora_add_(const Tensor& y, const Tensor& x, const Tensor& down, const Tensor& up,
               const Tensor& adapters, const Tensor& scaling);

// ── shim_ranks.cpp ───────────────────────────────────────────────────────────────────────────

Meeting meeting_of(const Tensor& meeting, int64_t rank, int64_t size);
// Of as many ranks as they say.
const int32_t* bounds_of(const Tensor& bounds);
void check_room(const Meeting& at, int64_t row_bytes);
// [ranks + 1] int32, which rank has which of `total` rows; `rank` has `own`.
const int32_t* shared_rows(const Tensor& rows, int64_t rank, int64_t ranks, int64_t own,
                           int64_t total);

// ── shim_experts.cpp ─────────────────────────────────────────────────────────────────────────

// One matrix of each expert, as `linear` has them, with the experts first.
struct ExpertMatrices {
  const Tensor& weight;
  const Optional& scale;
  const Optional& zero;
  const Optional& outer;
  const Optional& input_scale;
  const Optional& bias;
  int64_t row_codes, levels;
};

// How a router chooses: ops/route.py.
struct Router {
  int64_t k;
  bool normalize;
  const Optional& correction;
  bool sigmoid;
  int64_t groups, top_groups;
  double scale, eps;
  const Optional& each;
};

// Which ranks share them, and how: SharedExperts.
struct SharedBy {
  const Optional& meeting;
  const Optional& up_bounds;
  const Optional& down_bounds;
  const Optional& expert_bounds;
  int64_t rank;
};

// intermediate, out_features: of the matrices that are given.
ExpertsArgs experts_args(Form x, Form asked, const Tensor& router, const Optional& router_bias,
                         const ExpertMatrices& up, const ExpertMatrices& down, const Router& by,
                         int64_t intermediate, int64_t out_features, int64_t activation,
                         bool gated, const SharedBy& shared);
// Of the result.
int64_t columns_of(const ExpertsArgs& a);
// What a router reads is like x, but for its width.
void check_asked(Form asked, Form x);
Tensor experts(const Tensor& x, const Tensor& router, Optional router_bias, const Tensor& up,
               Optional up_scale, Optional up_zero, Optional up_outer, Optional up_input_scale,
               Optional up_bias, const Tensor& down, Optional down_scale, Optional down_zero,
               Optional down_outer, Optional down_input_scale, Optional down_bias,
               int64_t k, bool normalize, int64_t intermediate,
               int64_t out_features, int64_t activation, int64_t up_row_codes, int64_t up_levels,
               int64_t down_row_codes, int64_t down_levels, Optional correction, bool sigmoid,
               int64_t groups, int64_t top_groups, double scale, Optional meeting,
               Optional up_bounds, Optional down_bounds, Optional expert_bounds, int64_t rank,
               double eps, bool gated, Optional asked, Optional each);

// ── shim_cache.cpp ───────────────────────────────────────────────────────────────────────────

// What a layer's cache consists of: ops/rotary_cache.py.
struct CacheTensors {
  const Tensor& keys;
  const Tensor& values;
  const Optional& key_scale;
  const Optional& value_scale;
  const Optional& recent_keys;
  const Optional& recent_values;
  const Optional& recent_slots;
  const Optional& recent_window;
};

RotaryCacheArgs rotary_cache_args(Form qkv, int64_t heads, const Optional& q_norm,
                                  const Optional& k_norm, double eps, const Optional& cos_sin,
                                  bool interleaved, const CacheTensors& cache, int64_t sink_reach,
                                  const Optional& bases, bool norm_values = false,
                                  int64_t parts = 3);
AttentionArgs attention_args(DType dtype, int64_t heads, int64_t dim, const CacheTensors& cache,
                             double scale, int64_t window, double softcap, const Optional& sinks,
                             bool causal, int64_t sink_tokens);
// Lets queries see the first tokens from any distance.
void see_sinks(AttentionArgs& a, int64_t window, int64_t sink_tokens, const char* what);

// Positions lie in a table of `table` rows and slots in a cache of `places`, for `count` tokens.
void check_places(const int32_t* positions, const int32_t* slots, int64_t count, int64_t table,
                  int64_t places, const char* what = "rotary_cache");

// [copied, 2] int32: one of `count` tokens, and a slot of a cache of `places`. Returns `copied`.
int64_t check_copies(const Optional& copies, int64_t count, int64_t places,
                     const char* what = "rotary_cache");

// A step's sequences and the blocks that each of them reads.
struct Sequences {
  const int32_t* query_start;
  const int32_t* context_len;
  const int32_t* block_table;
  int64_t count, table_stride, width;
};
Sequences sequences_of(const Tensor& query_start, const Tensor& context_len,
                       const Tensor& block_table, const char* what = "paged_attention");
// They cover `tokens` queries and have blocks in a cache of `blocks` of `block_size` tokens.
void check_sequences(const Sequences& s, int64_t tokens, int64_t blocks, int64_t block_size,
                     const char* what = "paged_attention");
// Every block that is written to, and every one that some query sees as it was written, has its
// place in the window.
void check_recent(const Recent& recent, const int32_t* slots, int64_t count, int64_t block_size);
void check_recent(const Recent& recent, const Sequences& s, int64_t block_size);

Tensor rotary_cache(const Tensor& qkv, int64_t heads, Optional q_norm, Optional k_norm, double eps,
                    Optional cos_sin, bool interleaved, const Tensor& positions,
                    const Tensor& slots, const Tensor& key_cache, const Tensor& value_cache,
                    Optional key_scale, Optional value_scale, Optional recent_keys,
                    Optional recent_values, Optional recent_slots, Optional recent_window,
                    Optional copies, int64_t sink_reach, Optional bases, bool norm_values,
                    int64_t parts);
Tensor paged_attention(const Tensor& q, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& query_start, const Tensor& context_len,
                       const Tensor& block_table, double scale, int64_t window, double softcap,
                       Optional sinks, Optional key_scale, Optional value_scale,
                       Optional recent_keys, Optional recent_values, Optional recent_slots,
                       Optional recent_window, bool causal, int64_t sink_tokens);

// Elements from a block of a cache to the next. Each block is contiguous.
int64_t pitch_of(const Tensor& part, const char* what);

// ── shim_latent.cpp ──────────────────────────────────────────────────────────────────────────

// in, out: values of a head that are multiplied, and that come; x_head, y_head: from a head to the next.
HeadsArgs heads_args(Form x, const Tensor& weight, int64_t in, int64_t x_head, int64_t out,
                     int64_t y_head);
HeadsArgs head_linear_args(Form x, const Tensor& weight, int64_t out_features);
LatentQueryArgs latent_query_args(Form q, const Tensor& key_up, const Tensor& cos_sin,
                                  bool interleaved, int64_t rank, int64_t sink_reach);
LatentCacheArgs latent_cache_args(Form kv, const Tensor& norm, double eps, const Tensor& cos_sin,
                                  bool interleaved, const Tensor& cache);
AttentionArgs latent_attention_args(DType dtype, int64_t heads, int64_t dim, const Tensor& cache,
                                    double scale, int64_t rank,
                                    int64_t window, int64_t sink_tokens);

Tensor head_linear(const Tensor& x, const Tensor& weight, int64_t out_features);
Tensor mla_query(const Tensor& q, const Tensor& key_up, const Tensor& cos_sin, bool interleaved,
                 const Tensor& positions, int64_t rank, int64_t sink_reach);
void mla_cache(const Tensor& kv, const Tensor& norm, double eps, const Tensor& cos_sin,
               bool interleaved, const Tensor& positions, const Tensor& slots,
               const Tensor& cache, Optional copies);
Tensor mla_attention(const Tensor& q, const Tensor& cache, const Tensor& query_start,
                     const Tensor& context_len, const Tensor& block_table, double scale,
                     int64_t rank, int64_t window, int64_t sink_tokens);

// ── shim_states.cpp ──────────────────────────────────────────────────────────────────────────

// Each takes what it is about into `a`, after a check. Of the states: shapes, and what is turned.
// gates: `each` numbers of each head, by the name that the op gives them.
void take_states(RecurrentArgs& a, Form x, Form gates, int64_t each, const std::string& name,
                 const Tensor& state, const std::string& what);
void take_rates(RecurrentArgs& a, const Tensor& rates, const Tensor& shift, const Tensor& norm,
                int64_t normed, double eps, const std::string& what);
// After turned, slots and dtype.
void take_convolution(StatesArgs& a, const Tensor& conv, const Optional& bias, const Tensor& inputs,
                      const std::string& what);
// A step's rows and sequences, and memory for what comes of them.
Tensor take_step(StatesArgs& a, const Tensor& mixed, int64_t columns, const Tensor& query_start,
                 const Tensor& context_len, const Optional& states, const Optional& kept,
                 const char* what);
void take_gates(RecurrentArgs& a, const Tensor& gates, const std::string& name, const char* what);
// The sequences of a step without a cache's blocks.
Sequences sequences_of_states(const Tensor& query_start, const Tensor& context_len, int64_t tokens,
                              const char* what);
// What sequences go on from and what is kept of them, in `slots`. Returns how much is kept.
int64_t check_states(const Sequences& s, const Optional& states, const Optional& kept, int64_t slots,
                     const char* what);

// ── shim_select.cpp ──────────────────────────────────────────────────────────────────────────

std::tuple<Tensor, Tensor> argmax(const Tensor& logits);
void mask_(const Tensor& logits, const Tensor& rows, const Tensor& bits);
std::tuple<Tensor, Tensor> top_k(const Tensor& logits, int64_t k);
std::tuple<Tensor, Tensor, Tensor> softmax_top_k(const Tensor& logits, const Tensor& temperature,
                                                 int64_t k);
std::tuple<Tensor, Tensor, Tensor, Tensor> scaled_top_k(const Tensor& logits,
                                                        const Tensor& temperature,
                                                        const Tensor& top_k,
                                                        const Tensor& log_min_p, int64_t k);
std::tuple<Tensor, Tensor> draw_nucleus(const Tensor& logits, const Tensor& temperature,
                                        const Tensor& top_p, const Tensor& u, int64_t narrow,
                                        int64_t wide);
std::tuple<Tensor, Tensor> draw_plain(const Tensor& logits, const Tensor& temperature,
                                      const Tensor& u);
Tensor draw_from(const Tensor& ids, const Tensor& weights, const Tensor& u, Optional top_p);
Tensor uniforms(const Tensor& seeds, const Tensor& samples, const Tensor& positions, int64_t use);

// ── shim_weights.cpp ────────────────────────────────────────────────────────────────────────

Tensor pack(const Tensor& weight, ScalarType dtype, bool gated);
std::tuple<Tensor, Tensor> quantize_int8(const Tensor& weight, bool gated);
std::tuple<Tensor, Tensor, Tensor> quantize_int4(const Tensor& weight, int64_t group,
                                                 bool symmetric, bool gated);
Tensor pack_records(const Tensor& blocks, int64_t bits, bool gated);
Tensor rotate(const Tensor& x);

}  // namespace penstock::shim

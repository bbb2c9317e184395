// Programs, bound to torch: made operator by operator, then run as a whole.
//
// Each `program_<operator>` takes what <operator> takes, with values (numbers that earlier ones
// returned) for the activations; arrays of the step are understood.
#include "held.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace penstock::shim {
namespace {

std::mutex guard;
std::map<int64_t, std::shared_ptr<Held>> programs;
int64_t latest = 0;

}  // namespace

std::shared_ptr<Held> held(int64_t id) {
  const std::lock_guard<std::mutex> lock(guard);
  const auto found = programs.find(id);
  STD_TORCH_CHECK(found != programs.end(), "There is no program ", id);
  return found->second;
}

namespace {

class Release {
 public:
  explicit Release(std::atomic<bool>& held) : held_(held) {}
  ~Release() { held_.store(false); }
  Release(const Release&) = delete;
  Release& operator=(const Release&) = delete;

 private:
  std::atomic<bool>& held_;
};

int64_t program_new() {
  const std::lock_guard<std::mutex> lock(guard);
  programs[++latest] = std::make_shared<Held>();
  return latest;
}

void program_free(int64_t id) {
  const std::lock_guard<std::mutex> lock(guard);
  programs.erase(id);
}

int64_t program_linear(int64_t id, int64_t x, const Tensor& weight, Optional scale, Optional zero,
                       Optional bias, int64_t out_features, int64_t row_codes, Optional norm,
                       double eps, int64_t activation, bool gated,
                       std::optional<ScalarType> out_dtype, int64_t levels, Optional outer,
                       Optional input_scale) {
  const auto p = held(id);
  LinearArgs a = linear_args(p->form(x), weight, scale, zero, bias, out_features, row_codes, gated,
                             levels, outer, input_scale);
  with_norm_and_activation(a, norm, eps, activation);
  if (out_dtype) {
    STD_TORCH_CHECK(*out_dtype == ScalarType::Float || *out_dtype == ScalarType::BFloat16,
                    "linear: out_dtype must be float32 or bfloat16");
    a.out_dtype = *out_dtype == ScalarType::Float ? DType::f32 : DType::bf16;
  }
  p->keep_all(weight, scale, zero, bias, norm, outer, input_scale);
  const int64_t y = p->result({a.out_dtype, a.n}, x);
  p->add(a, x, y);
  return y;
}

void program_linear_add_(int64_t id, int64_t residual, int64_t x, const Tensor& weight,
                         Optional scale, Optional zero, Optional bias, int64_t row_codes,
                         int64_t levels, Optional outer, Optional input_scale) {
  const auto p = held(id);
  LinearArgs a = linear_args(p->form(x), weight, scale, zero, bias, p->form(residual).columns,
                             row_codes, false, levels, outer, input_scale);
  p->check_like(residual, x, "linear_add_");
  a.adds = true;
  p->keep_all(weight, scale, zero, bias, outer, input_scale);
  p->add(a, x, residual);
}

// tokens: 0 the step's tokens, 1 its positions.
int64_t program_embedding(int64_t id, int64_t tokens, const Tensor& weight, int64_t dim,
                          double scale, Optional weight_scale, Optional zero, int64_t levels,
                          Optional outer) {
  const auto p = held(id);
  STD_TORCH_CHECK(tokens == 0 || tokens == 1,
                  "embedding: tokens must be 0, the step's tokens, or 1, its positions, not ", tokens);
  const EmbeddingArgs a = embedding_args(weight, dim, scale, weight_scale, zero, levels, outer);
  int64_t& limit = tokens == 0 ? p->tokens : p->positions;
  limit = std::min(limit, a.vocab);
  p->keep_all(weight, weight_scale, zero, outer);
  const int64_t y = p->result({a.dtype, dim}, -1);
  p->add(a, -1, y, static_cast<Ids>(tokens));
  return y;
}

// The rows of x that the step samples.
int64_t program_sampled_rows(int64_t id, int64_t x) {
  const auto p = held(id);
  EmbeddingArgs a = {};
  a.dtype = p->form(x).dtype;
  a.dim = p->form(x).columns;
  a.scale = 1.0f;
  const int64_t y = p->program.value({a.dim, a.dtype, true, 0});
  p->add(a, x, y, Ids::sample_at);
  return y;
}

int64_t program_rms_norm(int64_t id, int64_t x, const Tensor& weight, double eps) {
  const auto p = held(id);
  p->keep(weight);
  const int64_t y = p->result(p->form(x), x);
  p->add(norm_args(p->form(x), weight, std::nullopt, eps, false), x, y);
  return y;
}

int64_t program_layer_norm(int64_t id, int64_t x, const Tensor& weight, Optional bias, double eps) {
  const auto p = held(id);
  p->keep_all(weight, bias);
  const int64_t y = p->result(p->form(x), x);
  p->add(norm_args(p->form(x), weight, bias, eps, true), x, y);
  return y;
}

void program_add_(int64_t id, int64_t residual, int64_t x) {
  const auto p = held(id);
  const Form to = p->form(residual);
  STD_TORCH_CHECK(to.columns == p->form(x).columns, "add_: residual has ", to.columns,
                  " columns, x ", p->form(x).columns);
  p->check_like(residual, x, "add_");
  AddArgs a = {};
  a.dtype = to.dtype;
  a.dim = to.columns;
  p->add(a, x, residual);
}

void program_softcap_(int64_t id, int64_t x, double cap) {
  const auto p = held(id);
  STD_TORCH_CHECK(p->form(x).dtype == DType::f32, "softcap_: x must be float32");
  SoftcapArgs a = {};
  a.cap = static_cast<float>(cap);
  p->add(a, -1, x);
}

int64_t program_gate(int64_t id, int64_t x, int64_t activation, bool gated, int64_t out_features,
                     std::optional<ScalarType> out_dtype) {
  const auto p = held(id);
  const GateArgs a = gate_args(p->form(x), activation, gated, out_features, out_dtype);
  const int64_t y = p->result({a.out_dtype, a.dim}, x);
  p->add(a, x, y);
  return y;
}

void program_lora_add_(int64_t id, int64_t y, int64_t x, const Tensor& down, const Tensor& up,
                       const Tensor& scaling) {
  const auto p = held(id);
  p->check_all_rows(y, "lora_add_");
  p->check_all_rows(x, "lora_add_");
  const LoraArgs a = lora_args(p->form(x), p->form(y), down, up, scaling);
  p->adapters = std::min(p->adapters, a.count);
  p->keep_all(down, up, scaling);
  p->add(a, x, y);
}

int64_t program_rotary_cache(int64_t id, int64_t qkv, int64_t heads, Optional q_norm,
                             Optional k_norm, double eps, Optional cos_sin, bool interleaved,
                             const Tensor& key_cache, const Tensor& value_cache,
                             Optional key_scale, Optional value_scale, Optional recent_keys,
                             Optional recent_values, Optional recent_slots,
                             Optional recent_window, int64_t sink_reach, Optional bases,
                             bool norm_values, int64_t parts) {
  const auto p = held(id);
  p->check_all_rows(qkv, "rotary_cache");
  const RotaryCacheArgs a =
      rotary_cache_args(p->form(qkv), heads, q_norm, k_norm, eps, cos_sin, interleaved,
                        {key_cache, value_cache, key_scale, value_scale, recent_keys,
                         recent_values, recent_slots, recent_window},
                        sink_reach, bases, norm_values, parts);
  if (a.cos_sin) p->positions = std::min(p->positions, a.num_positions);
  p->take_blocks(a.blocks, a.block_size, a.recent);
  if (parts > 1)  // another layer's cache is copied with that
    p->take_parts({&key_cache, &value_cache, key_scale ? &*key_scale : nullptr,
                   value_scale ? &*value_scale : nullptr});
  p->keep_all(q_norm, k_norm, cos_sin, key_cache, value_cache, key_scale, value_scale, recent_keys,
              recent_values, recent_slots, recent_window, bases);
  const int64_t y = p->result({a.dtype, heads * (sink_reach > 0 ? 2 : 1) * a.kept}, qkv, a.kept);
  p->add(a, qkv, y);
  return y;
}

int64_t program_paged_attention(int64_t id, int64_t q, const Tensor& key_cache,
                                const Tensor& value_cache, double scale, int64_t window,
                                double softcap, Optional sinks, Optional key_scale,
                                Optional value_scale, Optional recent_keys, Optional recent_values,
                                Optional recent_slots, Optional recent_window, bool causal,
                                int64_t sink_tokens) {
  const auto p = held(id);
  const Program::Value& v = p->program.at(static_cast<int>(q));
  p->check_all_rows(q, "paged_attention");
  STD_TORCH_CHECK(v.dim > 0, "paged_attention: value ", q, " isn't what rotary_cache returned");
  const int64_t heads = v.columns / v.dim / (sink_tokens > 0 ? 2 : 1);
  const AttentionArgs a =
      attention_args(v.dtype, heads, v.dim,
                     {key_cache, value_cache, key_scale, value_scale, recent_keys, recent_values,
                      recent_slots, recent_window},
                     scale, window, softcap, sinks, causal, sink_tokens);
  p->take_blocks(a.blocks, a.block_size, a.recent);
  p->keep_all(key_cache, value_cache, sinks, key_scale, value_scale, recent_keys, recent_values,
              recent_slots, recent_window);
  const int64_t y = p->result({v.dtype, heads * v.dim}, q);
  p->add(a, q, y);
  return y;
}

// `logits` is the value that a run writes for its caller. Returns the number of operators.
int64_t program_finish(int64_t id, int64_t logits) {
  const auto p = held(id);
  STD_TORCH_CHECK(p->program.logits() < 0, "Program ", id, " is finished already");
  STD_TORCH_CHECK(p->program.at(static_cast<int>(logits)).sampled &&
                      p->form(logits).dtype == DType::f32,
                  "A program ends with float32 logits of the sampled rows");
  p->program.finish(static_cast<int>(logits));
  return static_cast<int64_t>(p->program.size());
}

bool program_finds_largest(int64_t id) { return held(id)->program.finds_largest(); }

// Before or between runs. Returns the bytes of all buffers.
int64_t program_reserve(int64_t id, int64_t rows) {
  const auto p = held(id);
  STD_TORCH_CHECK(p->program.logits() >= 0, "Program ", id, " isn't finished");
  STD_TORCH_CHECK(rows >= 0 && rows <= INT32_MAX, "rows must be from 0 to ", INT32_MAX, ", not ",
                  rows);
  STD_TORCH_CHECK(!p->running.exchange(true), "Program ", id, " is running");
  const Release release(p->running);
  p->program.reserve(rows);
  return static_cast<int64_t>(p->program.bytes());
}

int64_t program_touched(int64_t id, int64_t tokens, int64_t sampled) {
  const auto p = held(id);
  STD_TORCH_CHECK(p->program.logits() >= 0, "Program ", id, " isn't finished");
  for (int64_t rows : {tokens, sampled})
    STD_TORCH_CHECK(rows >= 0 && rows <= INT32_MAX, "rows must be from 0 to ", INT32_MAX, ", not ",
                    rows);
  return p->program.touched(tokens, sampled);
}

// table [n, 2] int32: steps of up to table[i, 0] tokens run on table[i, 1] threads, larger ones on
// all.
void program_threads(int64_t id, const Tensor& table) {
  const auto p = held(id);
  STD_TORCH_CHECK(table.dim() == 2 && table.size(1) == 2, "table must be [n, 2]");
  const int32_t* entries = integers(table, table.numel(), "table");
  STD_TORCH_CHECK(!p->running.exchange(true), "Program ", id, " is running");
  const Release release(p->running);
  p->threads.clear();
  for (int64_t i = 0; i < table.size(0); i++) {
    STD_TORCH_CHECK(entries[2 * i + 1] > 0, "A step needs a thread");
    p->threads.emplace_back(entries[2 * i], entries[2 * i + 1]);
  }
}

// table [n, 8] int32, in the order of rows: an operator's number, rows, and its LinearVariant for up
// to so many. Replaces what was chosen before.
void program_variants(int64_t id, const Tensor& table) {
  const auto p = held(id);
  STD_TORCH_CHECK(table.dim() == 2 && table.size(1) == 8, "table must be [n, 8]");
  const int32_t* entry = integers(table, table.numel(), "table");
  STD_TORCH_CHECK(!p->running.exchange(true), "Program ", id, " is running");
  const Release release(p->running);
  const auto size = static_cast<int64_t>(p->program.size());
  for (int64_t i = 0; i < size; i++) p->program.node(static_cast<size_t>(i)).variants.clear();
  for (int64_t i = 0; i < table.size(0); i++, entry += 8) {
    STD_TORCH_CHECK(entry[0] >= 0 && entry[0] < size, "There is no operator ", entry[0]);
    Program::Node& node = p->program.node(static_cast<size_t>(entry[0]));
    STD_TORCH_CHECK(std::holds_alternative<LinearArgs>(node.args), "Operator ", entry[0],
                    " is no product");
    const auto negative = [](int32_t value) { return value < 0; };
    STD_TORCH_CHECK(std::none_of(entry + 2, entry + 8, negative) && entry[7] <= 3,
                    "A variant's numbers aren't negative, and its cache is 3 at most");
    node.variants.emplace_back(entry[1], LinearVariant{entry[2], entry[3], entry[4], entry[5],
                                                       entry[6], entry[7]});
  }
}

// pairs [n, 2] int32: blocks of every cache, from and to; none is both.
void program_copy_blocks(int64_t id, const Tensor& pairs) {
  const auto p = held(id);
  STD_TORCH_CHECK(pairs.dim() == 2 && pairs.size(1) == 2, "pairs must be [n, 2]");
  const int32_t* pair = integers(pairs, pairs.numel(), "pairs");
  for (int64_t i = 0; i < pairs.numel(); i++)
    STD_TORCH_CHECK(pair[i] >= 0 && pair[i] < p->blocks, "block ", pair[i],
                    " is outside the cache of ", p->blocks);
  STD_TORCH_CHECK(!p->running.exchange(true), "Program ", id, " is running");
  const Release release(p->running);
  for (const auto& [data, bytes, pitch] : p->parts)
    for (int64_t i = 0; i < pairs.size(0); i++)
      __builtin_memcpy(data + static_cast<size_t>(pair[2 * i + 1]) * pitch,
                       data + static_cast<size_t>(pair[2 * i]) * pitch, bytes);
}

// Where a run's logits [rows, columns] float32 go, or their largest: [rows, 2] int64, of each row the
// bits of the value, below, and its column.
Program::Output output_of(const Program& program, const Tensor& out, int64_t rows) {
  const bool largest = out.scalar_type() == ScalarType::Long;
  const int64_t columns =
      largest ? 2 : program.at(program.logits()).columns;
  STD_TORCH_CHECK((largest || out.scalar_type() == ScalarType::Float) && out.is_contiguous() &&
                      out.dim() == 2 && out.size(0) == rows && out.size(1) == columns,
                  largest ? "the largest" : "logits", " must be contiguous ",
                  largest ? "int64" : "float32", " [", rows, ", ", columns, "]");
  if (!largest) return {out.data_ptr(), nullptr};
  STD_TORCH_CHECK(program.finds_largest(), "This program's logits aren't a product's");
  return {nullptr, static_cast<Largest*>(out.data_ptr())};
}

void program_run(int64_t id, const Tensor& tokens, const Tensor& positions, const Tensor& slots,
                 const Tensor& query_start, const Tensor& context_len, const Tensor& block_table,
                 const Tensor& sample_at, Optional copies, Optional adapters, Optional all_positions,
                 Optional rows, Optional states, Optional kept, const Tensor& out, Optional times) {
  const auto p = held(id);
  Program& program = p->program;
  STD_TORCH_CHECK(program.logits() >= 0, "Program ", id, " isn't finished");
  // held by another thread, or by one that a fork has left behind
  STD_TORCH_CHECK(!p->running.exchange(true), "Program ", id,
                  " is running already: a program is one thread's, in one process");
  const Release release(p->running);
  StepArrays step = {};
  step.count = tokens.numel();
  step.sampled = sample_at.numel();
  step.tokens = integers(tokens, step.count, "tokens");
  step.positions = integers(positions, step.count, "positions");
  take_shared_rows(step, *p, all_positions, rows);
  step.slots = integers(slots, step.total, "slots");
  step.sample_at = integers(sample_at, step.sampled, "sample_at");
  const Sequences s = sequences_of(query_start, context_len, block_table);
  step.query_start = s.query_start;
  step.context_len = s.context_len;
  step.block_table = s.block_table;
  step.table_stride = s.table_stride;
  step.sequences = s.count;
  check_ids(step.tokens, step.count, p->tokens, "token");
  check_ids(step.sample_at, step.sampled, step.total, "row");
  check_places(step.all_positions, step.slots, step.total, p->positions,
               p->block_size > 0 ? p->blocks * p->block_size : INT64_MAX);
  if (p->block_size > 0) {
    check_sequences(s, step.total, p->blocks, p->block_size * p->ranks);
    check_recent(p->recent, step.slots, step.total, p->block_size);
    check_recent(p->recent, s, p->block_size);
  }
  step.copied = check_copies(copies, step.total, p->blocks * p->block_size);
  STD_TORCH_CHECK(step.copied == 0 || !p->recent.slots, "There are no copies beside a window");
  if (step.copied > 0) step.copies = static_cast<const int32_t*>(copies->data_ptr());
  if (p->slots > 0) {
    step.kept_count = check_states(s, states, kept, p->slots, "states");
    if (states) step.states = static_cast<const int32_t*>(states->data_ptr());
    if (step.kept_count > 0) step.kept = static_cast<const int32_t*>(kept->data_ptr());
  }
  if (adapters) step.adapters = check_adapters(*adapters, step.count, p->adapters);
  STD_TORCH_CHECK(std::max(step.count, step.sampled) <= p->kept_rows, "A step of ", step.count,
                  " tokens whose rows are kept has room for ", p->kept_rows);
  const Program::Output wanted = output_of(program, out, step.sampled);
  double* clock = nullptr;
  if (times) {
    const auto places = static_cast<int64_t>(program.size()) + 1;
    STD_TORCH_CHECK(times->scalar_type() == ScalarType::Double && times->is_contiguous() &&
                        times->numel() == places,
                    "times must be ", places, " contiguous float64");
    clock = static_cast<double*>(times->data_ptr());
  }
  program.run(step, wanted, p->threads_for(step.count), clock);
}

}  // namespace
}  // namespace penstock::shim

using namespace penstock::shim;

STABLE_TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("program_new() -> int");
  m.def("program_free(int program) -> ()");
  m.def(
      "program_linear(int program, int x, Tensor weight, Tensor? scale, Tensor? zero, "
      "Tensor? bias, int out_features, int row_codes, Tensor? norm, float eps, int activation, "
      "bool gated, ScalarType? out_dtype, int levels=0, Tensor? outer=None, "
      "Tensor? input_scale=None) -> int");
  m.def(
      "program_linear_add_(int program, int residual, int x, Tensor weight, Tensor? scale, "
      "Tensor? zero, Tensor? bias, int row_codes, int levels=0, Tensor? outer=None, "
      "Tensor? input_scale=None) -> ()");
  m.def(
      "program_embedding(int program, int tokens, Tensor weight, int dim, float scale, "
      "Tensor? weight_scale, Tensor? zero, int levels=0, Tensor? outer=None) -> int");
  m.def("program_sampled_rows(int program, int x) -> int");
  m.def("program_rms_norm(int program, int x, Tensor weight, float eps) -> int");
  m.def("program_layer_norm(int program, int x, Tensor weight, Tensor? bias, float eps) -> int");
  m.def("program_add_(int program, int residual, int x) -> ()");
  m.def("program_softcap_(int program, int x, float cap) -> ()");
  m.def(
      "program_gate(int program, int x, int activation, bool gated, int out_features, "
      "ScalarType? out_dtype) -> int");
  m.def(
      "program_lora_add_(int program, int y, int x, Tensor down, Tensor up, Tensor scaling) -> ()");
  m.def(
      "program_rotary_cache(int program, int qkv, int heads, Tensor? q_norm, Tensor? k_norm, "
      "float eps, Tensor? cos_sin, bool interleaved, Tensor key_cache, Tensor value_cache, "
      "Tensor? key_scale, Tensor? value_scale, Tensor? recent_keys, Tensor? recent_values, "
      "Tensor? recent_slots, Tensor? recent_window, int sink_reach=0, Tensor? bases=None, "
      "bool norm_values=False, int parts=3) -> int");
  m.def(
      "program_paged_attention(int program, int q, Tensor key_cache, Tensor value_cache, "
      "float scale, int window, float softcap, Tensor? sinks, Tensor? key_scale, "
      "Tensor? value_scale, Tensor? recent_keys, Tensor? recent_values, Tensor? recent_slots, "
      "Tensor? recent_window, bool causal=True, int sink_tokens=0) -> int");
  m.def("program_finish(int program, int logits) -> int");
  m.def("program_finds_largest(int program) -> bool");
  m.def("program_reserve(int program, int rows) -> int");
  m.def("program_touched(int program, int tokens, int sampled) -> int");
  m.def("program_threads(int program, Tensor table) -> ()");
  m.def("program_variants(int program, Tensor table) -> ()");
  m.def("program_copy_blocks(int program, Tensor pairs) -> ()");
  m.def(
      "program_run(int program, Tensor tokens, Tensor positions, Tensor slots, "
      "Tensor query_start, Tensor context_len, Tensor block_table, Tensor sample_at, "
      "Tensor? copies, Tensor? adapters, Tensor? all_positions, Tensor? rows, Tensor? states, "
      "Tensor? kept, Tensor(a!) out, Tensor? times) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(penstock, CompositeExplicitAutograd, m) {
  m.impl("program_new", TORCH_BOX(&program_new));
  m.impl("program_free", TORCH_BOX(&program_free));
  m.impl("program_linear", TORCH_BOX(&program_linear));
  m.impl("program_linear_add_", TORCH_BOX(&program_linear_add_));
  m.impl("program_embedding", TORCH_BOX(&program_embedding));
  m.impl("program_sampled_rows", TORCH_BOX(&program_sampled_rows));
  m.impl("program_rms_norm", TORCH_BOX(&program_rms_norm));
  m.impl("program_layer_norm", TORCH_BOX(&program_layer_norm));
  m.impl("program_add_", TORCH_BOX(&program_add_));
  m.impl("program_softcap_", TORCH_BOX(&program_softcap_));
  m.impl("program_gate", TORCH_BOX(&program_gate));
  m.impl("program_lora_add_", TORCH_BOX(&program_lora_add_));
  m.impl("program_rotary_cache", TORCH_BOX(&program_rotary_cache));
  m.impl("program_paged_attention", TORCH_BOX(&program_paged_attention));
  m.impl("program_finish", TORCH_BOX(&program_finish));
  m.impl("program_finds_largest", TORCH_BOX(&program_finds_largest));
  m.impl("program_reserve", TORCH_BOX(&program_reserve));
  m.impl("program_touched", TORCH_BOX(&program_touched));
  m.impl("program_threads", TORCH_BOX(&program_threads));
  m.impl("program_variants", TORCH_BOX(&program_variants));
  m.impl("program_copy_blocks", TORCH_BOX(&program_copy_blocks));
  m.impl("program_run", TORCH_BOX(&program_run));
}

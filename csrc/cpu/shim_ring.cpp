// What ranks do that have a part of each sequence: ops/ring.py, bound to torch and made part of programs.
#include "held.h"

#include <torch/csrc/stable/library.h>

namespace penstock::shim {

const int32_t* shared_rows(const Tensor& rows, int64_t rank, int64_t ranks, int64_t own,
                           int64_t total) {
  STD_TORCH_CHECK(rows.numel() == ranks + 1, "rows must be those of ", ranks, " ranks, not of ",
                  rows.numel() - 1);
  const int32_t* found = bounds_of(rows);
  STD_TORCH_CHECK(found[ranks] == total, "rows are ", found[ranks], ", and tokens ", total);
  STD_TORCH_CHECK(found[rank + 1] - found[rank] == own, "rank ", rank, " has ",
                  found[rank + 1] - found[rank], " rows, and was given ", own);
  return found;
}

void take_shared_rows(StepArrays& step, const Held& held, const Optional& all_positions,
                      const Optional& rows) {
  STD_TORCH_CHECK(held.shares_rows == (rows && all_positions),
                  "A step has all_positions and rows where ranks share them, and only there");
  step.total = step.count;
  step.all_positions = step.positions;
  if (!held.shares_rows) return;
  step.total = all_positions->numel();
  step.all_positions = integers(*all_positions, step.total, "all_positions");
  step.rows = shared_rows(*rows, held.rank, held.ranks, step.count, step.total);
}

namespace {

constexpr int64_t kSpan = 256;

// What a layer normalises, turns and sees: the arguments that no step changes.
struct RingLayer {
  int64_t heads;
  const Optional &q_norm, &k_norm;
  double eps;
  const Optional& cos_sin;
  bool interleaved;
  const Tensor &key_cache, &value_cache;
  const Optional &key_scale, &value_scale;
  double scale;
  int64_t window;
  double softcap;
  const Optional &sinks, &bases;
};

RingArgs ring_args(Form qkv, const RingLayer& l, const Tensor& meeting, int64_t rank,
                   int64_t ranks) {
  const Optional none;
  const CacheTensors cache = {l.key_cache, l.value_cache, l.key_scale, l.value_scale,
                              none,        none,          none,        none};
  RingArgs a = {};
  a.turned = rotary_cache_args(qkv, l.heads, l.q_norm, l.k_norm, l.eps, l.cos_sin, l.interleaved,
                               cache, 0, l.bases);
  a.columns = qkv.columns;
  a.attention = attention_args(qkv.dtype, l.heads, a.turned.kept, cache, l.scale, l.window,
                               l.softcap, l.sinks, true, 0);
  STD_TORCH_CHECK(a.attention.block_size == kSpan, "ring_attention: blocks of ", kSpan,
                  " tokens, not of ", a.attention.block_size);
  a.attention.table_tokens = kSpan * ranks;
  a.at = meeting_of(meeting, rank, ranks);
  check_room(a.at, qkv.columns * (qkv.dtype == DType::bf16 ? 2 : 4));
  return a;
}

Tensor ring_attention(const Tensor& qkv, int64_t heads, Optional q_norm, Optional k_norm,
                      double eps, Optional cos_sin, bool interleaved, const Tensor& all_positions,
                      const Tensor& slots, const Tensor& key_cache, const Tensor& value_cache,
                      Optional key_scale, Optional value_scale, const Tensor& query_start,
                      const Tensor& context_len, const Tensor& block_table, double scale,
                      int64_t window, double softcap, Optional sinks, Optional copies,
                      const Tensor& meeting, const Tensor& rows, int64_t rank, int64_t ranks,
                      Optional bases) {
  const RingLayer layer = {heads,     q_norm,    k_norm,      eps,   cos_sin, interleaved, key_cache,
                           value_cache, key_scale, value_scale, scale, window, softcap, sinks, bases};
  RingArgs a = ring_args(form_of(qkv, "ring_attention: qkv"), layer, meeting, rank, ranks);
  RotaryCacheArgs& turned = a.turned;
  a.total = all_positions.numel();
  a.rows = shared_rows(rows, rank, ranks, qkv.size(0), a.total);
  turned.positions = integers(all_positions, a.total, "ring_attention: all_positions");
  turned.slots = integers(slots, a.total, "ring_attention: slots");
  const int64_t places = turned.blocks * turned.block_size;
  check_places(turned.positions, turned.slots, a.total,
               turned.cos_sin ? turned.num_positions : INT64_MAX, places, "ring_attention");
  turned.copied = check_copies(copies, a.total, places, "ring_attention");
  if (turned.copied > 0) turned.copies = static_cast<const int32_t*>(copies->data_ptr());
  const Sequences s = sequences_of(query_start, context_len, block_table, "ring_attention");
  check_sequences(s, a.total, turned.blocks, a.attention.table_tokens, "ring_attention");
  a.attention.query_start = s.query_start;
  a.attention.context_len = s.context_len;
  a.attention.block_table = s.block_table;
  a.attention.table_stride = s.table_stride;
  a.attention.sequences = s.count;
  Tensor out = torch::stable::new_empty(qkv, {qkv.size(0), heads * turned.kept});
  a.qkv = qkv.data_ptr();
  a.qkv_stride = qkv.stride(0);
  a.out = out.data_ptr();
  a.threads = threads();
  penstock::ring_attention(a);
  return out;
}

// The first rank is given the rows; what others get has no columns.
Tensor gather_rows(const Tensor& x, const Tensor& sample_at, const Tensor& meeting,
                   const Tensor& rows, int64_t rank, int64_t ranks) {
  const Form form = form_of(x, "gather_rows: x");
  STD_TORCH_CHECK(x.is_contiguous(), "gather_rows: x must be contiguous");
  GatherRowsArgs a = {};
  a.at = meeting_of(meeting, rank, ranks);
  a.row_bytes = form.columns * (form.dtype == DType::bf16 ? 2 : 4);
  check_room(a.at, a.row_bytes);
  const int64_t total = bounds_of(rows)[rows.numel() - 1];
  a.rows = shared_rows(rows, rank, ranks, x.size(0), total);
  a.count = sample_at.numel();
  a.wanted = integers(sample_at, a.count, "gather_rows: sample_at");
  check_ids(a.wanted, a.count, total, "row");
  Tensor y = rank == 0 ? torch::stable::new_empty(x, {a.count, form.columns})
                       : torch::stable::new_empty(x, {a.count, 0}, ScalarType::Float);
  a.x = x.data_ptr();
  a.y = y.data_ptr();
  a.threads = 1;
  penstock::gather_rows(a);
  return y;
}

int64_t program_ring_attention(int64_t id, int64_t qkv, int64_t heads, Optional q_norm,
                               Optional k_norm, double eps, Optional cos_sin, bool interleaved,
                               const Tensor& key_cache, const Tensor& value_cache,
                               Optional key_scale, Optional value_scale, double scale,
                               int64_t window, double softcap, Optional sinks,
                               const Tensor& meeting, int64_t rank, int64_t ranks, Optional bases) {
  const auto p = held(id);
  p->check_all_rows(qkv, "ring_attention");
  const RingLayer layer = {heads,     q_norm,    k_norm,      eps,   cos_sin, interleaved, key_cache,
                           value_cache, key_scale, value_scale, scale, window, softcap, sinks, bases};
  const RingArgs a = ring_args(p->form(qkv), layer, meeting, rank, ranks);
  p->share_rows(rank, ranks);
  if (a.turned.cos_sin) p->positions = std::min(p->positions, a.turned.num_positions);
  p->take_blocks(a.turned.blocks, a.turned.block_size, a.turned.recent);
  p->take_parts({&key_cache, &value_cache, key_scale ? &*key_scale : nullptr,
                 value_scale ? &*value_scale : nullptr});
  p->keep_all(q_norm, k_norm, cos_sin, key_cache, value_cache, key_scale, value_scale, sinks,
              meeting, bases);
  const int64_t y = p->result({a.turned.dtype, heads * a.turned.kept}, qkv);
  p->add(a, qkv, y);
  return y;
}

int64_t program_gather_rows(int64_t id, int64_t x, const Tensor& meeting, int64_t rank,
                            int64_t ranks) {
  const auto p = held(id);
  p->check_all_rows(x, "gather_rows");
  const Form form = p->form(x);
  GatherRowsArgs a = {};
  a.at = meeting_of(meeting, rank, ranks);
  a.row_bytes = form.columns * (form.dtype == DType::bf16 ? 2 : 4);
  check_room(a.at, a.row_bytes);
  p->share_rows(rank, ranks);
  p->keep(meeting);
  const int64_t y =
      rank == 0 ? p->program.value({form.columns, form.dtype, true, 0})
                : p->program.value({0, DType::f32, true, 0});
  p->add(a, x, y);
  return y;
}

}  // namespace
}  // namespace penstock::shim

using namespace penstock::shim;

STABLE_TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("ring_attention", TORCH_BOX(&ring_attention));
  m.impl("gather_rows", TORCH_BOX(&gather_rows));
}

STABLE_TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def(
      "program_ring_attention(int program, int qkv, int heads, Tensor? q_norm, Tensor? k_norm, "
      "float eps, Tensor? cos_sin, bool interleaved, Tensor key_cache, Tensor value_cache, "
      "Tensor? key_scale, Tensor? value_scale, float scale, int window, float softcap, "
      "Tensor? sinks, Tensor meeting, int rank, int ranks, Tensor? bases=None) -> int");
  m.def("program_gather_rows(int program, int x, Tensor meeting, int rank, int ranks) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(penstock, CompositeExplicitAutograd, m) {
  m.impl("program_ring_attention", TORCH_BOX(&program_ring_attention));
  m.impl("program_gather_rows", TORCH_BOX(&program_gather_rows));
}

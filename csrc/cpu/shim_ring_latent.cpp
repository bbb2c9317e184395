// The same over latents: ops/ring_mla.py.
#include "held.h"

#include <torch/csrc/stable/library.h>

namespace penstock::shim {
namespace {

constexpr int64_t kSpan = 256;

RingLatentsArgs latents_args(Form kv, const Tensor& norm, double eps, const Tensor& cos_sin,
                             bool interleaved, const Tensor& cache, const Tensor& meeting,
                             int64_t rank, int64_t ranks) {
  RingLatentsArgs a = {};
  a.kept = latent_cache_args(kv, norm, eps, cos_sin, interleaved, cache);
  a.columns = kv.columns;
  a.at = meeting_of(meeting, rank, ranks);
  check_room(a.at, kv.columns * (kv.dtype == DType::bf16 ? 2 : 4));
  return a;
}

void ring_mla_cache(const Tensor& kv, const Tensor& norm, double eps, const Tensor& cos_sin,
                    bool interleaved, const Tensor& all_positions, const Tensor& slots,
                    const Tensor& cache, Optional copies, const Tensor& meeting,
                    const Tensor& rows, int64_t rank, int64_t ranks) {
  RingLatentsArgs a = latents_args(form_of(kv, "ring_mla_cache: kv"), norm, eps, cos_sin,
                                   interleaved, cache, meeting, rank, ranks);
  LatentCacheArgs& kept = a.kept;
  a.total = all_positions.numel();
  a.rows = shared_rows(rows, rank, ranks, kv.size(0), a.total);
  kept.angles.positions = integers(all_positions, a.total, "ring_mla_cache: all_positions");
  kept.slots = integers(slots, a.total, "ring_mla_cache: slots");
  const int64_t places = kept.blocks * kept.block_size;
  check_places(kept.angles.positions, kept.slots, a.total, kept.angles.count, places,
               "ring_mla_cache");
  kept.copied = check_copies(copies, a.total, places, "ring_mla_cache");
  if (kept.copied > 0) kept.copies = static_cast<const int32_t*>(copies->data_ptr());
  a.kv = kv.data_ptr();
  a.kv_stride = kv.stride(0);
  a.threads = threads();
  ring_latents(a);
}

RingArgs attention_of(DType dtype, int64_t heads, int64_t dim, const Tensor& cache, double scale,
                      int64_t latent_rank, int64_t window, const Tensor& meeting, int64_t rank,
                      int64_t ranks) {
  RingArgs a = {};
  a.attention = latent_attention_args(dtype, heads, dim, cache, scale, latent_rank, window, 0);
  STD_TORCH_CHECK(a.attention.block_size == kSpan, "ring_mla_attention: blocks of ", kSpan,
                  " tokens, not of ", a.attention.block_size);
  a.attention.table_tokens = kSpan * ranks;
  a.at = meeting_of(meeting, rank, ranks);
  return a;
}

Tensor ring_mla_attention(const Tensor& q, const Tensor& cache, const Tensor& query_start,
                          const Tensor& context_len, const Tensor& block_table, double scale,
                          int64_t latent_rank, int64_t window, const Tensor& meeting,
                          const Tensor& rows, int64_t rank, int64_t ranks) {
  STD_TORCH_CHECK(q.dim() == 3 && q.is_contiguous(),
                  "ring_mla_attention: q must be [tokens, heads, dim], contiguous");
  RingArgs a = attention_of(dtype_of(q, "ring_mla_attention: q"), q.size(1), q.size(2), cache,
                            scale, latent_rank, window, meeting, rank, ranks);
  a.total = bounds_of(rows)[rows.numel() - 1];
  a.rows = shared_rows(rows, rank, ranks, q.size(0), a.total);
  const Sequences s = sequences_of(query_start, context_len, block_table, "ring_mla_attention");
  check_sequences(s, a.total, a.attention.blocks, a.attention.table_tokens, "ring_mla_attention");
  a.attention.query_start = s.query_start;
  a.attention.context_len = s.context_len;
  a.attention.block_table = s.block_table;
  a.attention.table_stride = s.table_stride;
  a.attention.sequences = s.count;
  Tensor out = torch::stable::new_empty(q, {q.size(0), q.size(1) * latent_rank});
  a.qkv = q.data_ptr();
  a.out = out.data_ptr();
  a.threads = threads();
  penstock::ring_attention(a);
  return out;
}

void program_ring_mla_cache(int64_t id, int64_t kv, const Tensor& norm, double eps,
                            const Tensor& cos_sin, bool interleaved, const Tensor& cache,
                            const Tensor& meeting, int64_t rank, int64_t ranks) {
  const auto p = held(id);
  p->check_all_rows(kv, "ring_mla_cache");
  const RingLatentsArgs a = latents_args(p->form(kv), norm, eps, cos_sin, interleaved, cache,
                                         meeting, rank, ranks);
  p->share_rows(rank, ranks);
  p->positions = std::min(p->positions, a.kept.angles.count);
  p->take_blocks(a.kept.blocks, a.kept.block_size, {});
  p->take_parts({&cache});
  p->keep_all(norm, cos_sin, cache, meeting);
  p->add(a, -1, kv);
}

int64_t program_ring_mla_attention(int64_t id, int64_t q, const Tensor& cache, double scale,
                                   int64_t latent_rank, int64_t window, const Tensor& meeting,
                                   int64_t rank, int64_t ranks) {
  const auto p = held(id);
  const Program::Value& v = p->program.at(static_cast<int>(q));
  p->check_all_rows(q, "ring_mla_attention");
  STD_TORCH_CHECK(v.dim > 0, "ring_mla_attention: value ", q, " isn't what mla_query returned");
  const RingArgs a = attention_of(v.dtype, v.columns / v.dim, v.dim, cache, scale, latent_rank,
                                  window, meeting, rank, ranks);
  p->share_rows(rank, ranks);
  p->take_blocks(a.attention.blocks, a.attention.block_size, {});
  p->keep_all(cache, meeting);
  const int64_t y = p->result({v.dtype, a.attention.heads * latent_rank}, q);
  p->add(a, q, y);
  return y;
}

}  // namespace
}  // namespace penstock::shim

using namespace penstock::shim;

STABLE_TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("ring_mla_cache", TORCH_BOX(&ring_mla_cache));
  m.impl("ring_mla_attention", TORCH_BOX(&ring_mla_attention));
}

STABLE_TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def(
      "program_ring_mla_cache(int program, int kv, Tensor norm, float eps, Tensor cos_sin, "
      "bool interleaved, Tensor cache, Tensor meeting, int rank, int ranks) -> ()");
  m.def(
      "program_ring_mla_attention(int program, int q, Tensor cache, float scale, "
      "int latent_rank, int window, Tensor meeting, int rank, int ranks) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(penstock, CompositeExplicitAutograd, m) {
  m.impl("program_ring_mla_cache", TORCH_BOX(&program_ring_mla_cache));
  m.impl("program_ring_mla_attention", TORCH_BOX(&program_ring_mla_attention));
}

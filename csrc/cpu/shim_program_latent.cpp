// The operators over latents, made part of a program.
#include "held.h"

#include <torch/csrc/stable/library.h>

namespace {

using namespace penstock;
using namespace penstock::shim;

int64_t program_mla_query(int64_t id, int64_t q, const Tensor& key_up, const Tensor& cos_sin,
                          bool interleaved, int64_t rank, int64_t sink_reach) {
  const auto p = held(id);
  p->check_all_rows(q, "mla_query");
  const LatentQueryArgs a = latent_query_args(p->form(q), key_up, cos_sin, interleaved, rank, sink_reach);
  p->positions = std::min(p->positions, a.angles.count);
  p->keep_all(key_up, cos_sin);
  const int64_t dim = rank + a.angles.dim;
  const int64_t y = p->result({p->form(q).dtype, a.heads.y_stride}, q, dim);
  p->add(a, q, y);
  return y;
}

void program_mla_cache(int64_t id, int64_t kv, const Tensor& norm, double eps,
                       const Tensor& cos_sin, bool interleaved, const Tensor& cache) {
  const auto p = held(id);
  p->check_all_rows(kv, "mla_cache");
  const LatentCacheArgs a =
      latent_cache_args(p->form(kv), norm, eps, cos_sin, interleaved, cache);
  p->positions = std::min(p->positions, a.angles.count);
  p->take_blocks(a.blocks, a.block_size, {});
  p->take_parts({&cache});
  p->keep_all(norm, cos_sin, cache);
  p->add(a, -1, kv);
}

int64_t program_mla_attention(int64_t id, int64_t q, const Tensor& cache, double scale,
                              int64_t rank, int64_t window, int64_t sink_tokens) {
  const auto p = held(id);
  const Program::Value& v = p->program.at(static_cast<int>(q));
  p->check_all_rows(q, "mla_attention");
  STD_TORCH_CHECK(v.dim > 0, "mla_attention: value ", q, " isn't what mla_query returned");
  const AttentionArgs a =
      latent_attention_args(v.dtype, v.columns / v.dim / (sink_tokens > 0 ? 2 : 1), v.dim, cache,
                            scale, rank, window, sink_tokens);
  p->take_blocks(a.blocks, a.block_size, {});
  p->keep_all(cache);
  const int64_t y = p->result({v.dtype, a.heads * rank}, q);
  p->add(a, q, y);
  return y;
}

int64_t program_head_linear(int64_t id, int64_t x, const Tensor& weight, int64_t out_features) {
  const auto p = held(id);
  const HeadsArgs a = head_linear_args(p->form(x), weight, out_features);
  p->keep_all(weight);
  const int64_t y = p->result({p->form(x).dtype, a.heads * out_features}, x);
  p->add(a, x, y);
  return y;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def(
      "program_mla_query(int program, int q, Tensor key_up, Tensor cos_sin, bool interleaved, "
      "int rank, int sink_reach=0) -> int");
  m.def(
      "program_mla_cache(int program, int kv, Tensor norm, float eps, Tensor cos_sin, "
      "bool interleaved, Tensor cache) -> ()");
  m.def(
      "program_mla_attention(int program, int q, Tensor cache, float scale, int rank, "
      "int window=0, int sink_tokens=0) -> int");
  m.def("program_head_linear(int program, int x, Tensor weight, int out_features) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(penstock, CompositeExplicitAutograd, m) {
  m.impl("program_mla_query", TORCH_BOX(&program_mla_query));
  m.impl("program_mla_cache", TORCH_BOX(&program_mla_cache));
  m.impl("program_mla_attention", TORCH_BOX(&program_mla_attention));
  m.impl("program_head_linear", TORCH_BOX(&program_head_linear));
}

// What ranks put together: ops/ranks.py, bound to torch and made part of programs.
#include "held.h"

#include <torch/csrc/stable/library.h>

namespace penstock::shim {

Meeting meeting_of(const Tensor& meeting, int64_t rank, int64_t size) {
  STD_TORCH_CHECK(meeting.scalar_type() == ScalarType::Byte && meeting.is_contiguous(),
                  "meeting must be contiguous uint8");
  STD_TORCH_CHECK(size >= 1 && size <= kMostRanks && rank >= 0 && rank < size, "rank ", rank,
                  " of ", size, "; there are 1 to ", kMostRanks);
  const int64_t bytes = (meeting.numel() - kMeetingHeader) / 2 / 64 * 64;
  STD_TORCH_CHECK(bytes > 0, "a meeting of ", meeting.numel(), " bytes has no room");
  return {static_cast<char*>(meeting.data_ptr()), bytes, static_cast<int>(rank),
          static_cast<int>(size)};
}

const int32_t* bounds_of(const Tensor& bounds) {
  const int32_t* found = integers(bounds, bounds.numel(), "bounds");
  STD_TORCH_CHECK(bounds.numel() >= 2 && found[0] == 0, "bounds must be 0, …, the sum");
  for (int64_t i = 1; i < bounds.numel(); i++)
    STD_TORCH_CHECK(found[i - 1] <= found[i], "bounds must not fall");
  return found;
}

void check_room(const Meeting& at, int64_t row_bytes) {
  STD_TORCH_CHECK(row_bytes <= at.place_bytes, "a row of ", row_bytes,
                  " bytes doesn't fit in a meeting's place of ", at.place_bytes);
}

namespace {

GatherColumnsArgs columns_args(Form x, const Tensor& meeting, const Tensor& bounds, int64_t rank,
                               int64_t reader) {
  GatherColumnsArgs a = {};
  const int64_t size = bounds.numel() - 1;
  a.at = meeting_of(meeting, rank, size);
  a.bounds = bounds_of(bounds);
  a.item = x.dtype == DType::bf16 ? 2 : 4;
  STD_TORCH_CHECK(x.columns == a.bounds[rank + 1] - a.bounds[rank], "gather_columns: rank ", rank,
                  " has ", a.bounds[rank + 1] - a.bounds[rank], " columns, x ", x.columns);
  STD_TORCH_CHECK(reader >= -1 && reader < size, "gather_columns: there is no rank ", reader);
  a.reader = static_cast<int>(reader);
  check_room(a.at, a.bounds[size] * a.item);
  return a;
}

Tensor gather_columns(const Tensor& x, const Tensor& meeting, const Tensor& bounds, int64_t rank,
                      int64_t reader) {
  GatherColumnsArgs a = columns_args(form_of(x, "gather_columns: x"), meeting, bounds, rank, reader);
  Tensor y = torch::stable::new_empty(x, {x.size(0), a.bounds[a.at.size]});
  a.x = x.data_ptr();
  a.x_stride = x.stride(0);
  a.y = y.data_ptr();
  a.rows = x.size(0);
  a.threads = threads();
  penstock::gather_columns(a);
  return y;
}

GatherEmbeddingArgs rows_args(const Tensor& weight, int64_t dim, double scale, Optional weight_scale,
                              Optional zero, int64_t levels, Optional outer, const Tensor& meeting,
                              const Tensor& bounds, int64_t rank) {
  GatherEmbeddingArgs a = {};
  a.at = meeting_of(meeting, rank, bounds.numel() - 1);
  a.bounds = bounds_of(bounds);
  a.table = embedding_args(weight, dim, scale, weight_scale, zero, levels, outer);
  STD_TORCH_CHECK(a.bounds[rank + 1] - a.bounds[rank] <= a.table.vocab, "gather_embedding: rank ", rank,
                  " has ", a.bounds[rank + 1] - a.bounds[rank], " rows, its table ", a.table.vocab);
  check_room(a.at, dim * (a.table.dtype == DType::bf16 ? 2 : 4));
  return a;
}

Tensor gather_embedding(const Tensor& tokens, const Tensor& weight, int64_t dim, double scale,
                        Optional weight_scale, Optional zero, int64_t levels, Optional outer,
                        const Tensor& meeting, const Tensor& bounds, int64_t rank) {
  GatherEmbeddingArgs a =
      rows_args(weight, dim, scale, weight_scale, zero, levels, outer, meeting, bounds, rank);
  a.rows = tokens.numel();
  a.ids = integers(tokens, a.rows, "gather_embedding: tokens");
  check_ids(a.ids, a.rows, a.bounds[a.at.size], "token");
  Tensor y = torch::stable::new_empty(
      weight, {a.rows, dim},
      a.table.kind == Weight::dense ? weight.scalar_type() : ScalarType::BFloat16);
  a.y = y.data_ptr();
  a.threads = threads();
  penstock::gather_embedding(a);
  return y;
}

int64_t program_gather_columns(int64_t id, int64_t x, const Tensor& meeting, const Tensor& bounds,
                               int64_t rank, int64_t reader) {
  const auto p = held(id);
  const GatherColumnsArgs a = columns_args(p->form(x), meeting, bounds, rank, reader);
  p->keep_all(meeting, bounds);
  const int64_t y = p->result({p->form(x).dtype, a.bounds[a.at.size]}, x);
  p->add(a, x, y);
  return y;
}

int64_t program_gather_embedding(int64_t id, const Tensor& weight, int64_t dim, double scale,
                                 Optional weight_scale, Optional zero, int64_t levels, Optional outer,
                                 const Tensor& meeting, const Tensor& bounds, int64_t rank) {
  const auto p = held(id);
  const GatherEmbeddingArgs a =
      rows_args(weight, dim, scale, weight_scale, zero, levels, outer, meeting, bounds, rank);
  p->tokens = std::min<int64_t>(p->tokens, a.bounds[a.at.size]);
  p->keep_all(weight, weight_scale, zero, outer, meeting, bounds);
  const int64_t y = p->result({a.table.dtype, dim}, -1);
  p->add(a, -1, y);
  return y;
}

}  // namespace
}  // namespace penstock::shim

using namespace penstock::shim;

STABLE_TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("gather_columns", TORCH_BOX(&gather_columns));
  m.impl("gather_embedding", TORCH_BOX(&gather_embedding));
}

STABLE_TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def(
      "program_gather_columns(int program, int x, Tensor meeting, Tensor bounds, int rank, "
      "int reader=-1) -> int");
  m.def(
      "program_gather_embedding(int program, Tensor weight, int dim, float scale, "
      "Tensor? weight_scale, Tensor? zero, int levels, Tensor? outer, Tensor meeting, "
      "Tensor bounds, int rank) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(penstock, CompositeExplicitAutograd, m) {
  m.impl("program_gather_columns", TORCH_BOX(&program_gather_columns));
  m.impl("program_gather_embedding", TORCH_BOX(&program_gather_embedding));
}

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

int file_of(int64_t file) {
  STD_TORCH_CHECK(file >= 0 && file <= INT32_MAX, "file must be a socket's number, not ", file);
  return static_cast<int>(file);
}

int64_t item_of(DType dtype) { return dtype == DType::bf16 ? 2 : 4; }

Tensor hand_on(const Tensor& x, const Tensor& sample_at, int64_t file) {
  const Form form = form_of(x, "hand_on: x");
  STD_TORCH_CHECK(x.is_contiguous(), "hand_on: x must be contiguous");
  pass({file_of(file), true, x.data_ptr(), x.size(0) * form.columns * item_of(form.dtype), 1});
  return torch::stable::new_empty(x, {sample_at.numel(), 0}, ScalarType::Float);
}

Tensor take_over(const Tensor& tokens, int64_t columns, ScalarType dtype, int64_t file) {
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16,
                  "take_over: dtype must be float32 or bfloat16");
  Tensor x = torch::stable::new_empty(tokens, {tokens.numel(), columns}, dtype);
  const int64_t item = dtype == ScalarType::Float ? 4 : 2;
  pass({file_of(file), false, x.data_ptr(), tokens.numel() * columns * item, 1});
  return x;
}

// Gives a value of no columns: a program ends with something of the sampled rows.
int64_t program_hand_on(int64_t id, int64_t x, int64_t file) {
  const auto p = held(id);
  p->check_all_rows(x, "hand_on");
  PassArgs a = {};
  a.file = file_of(file);
  a.gives = true;
  const int64_t y = p->program.value({0, DType::f32, true, 0});
  p->add(a, x, y);
  return y;
}

int64_t program_take_over(int64_t id, int64_t columns, ScalarType dtype, int64_t file) {
  const auto p = held(id);
  PassArgs a = {};
  a.file = file_of(file);
  const DType of = dtype == ScalarType::Float ? DType::f32 : DType::bf16;
  const int64_t y = p->result({of, columns}, -1);
  p->add(a, -1, y);
  return y;
}

}  // namespace
}  // namespace penstock::shim

using namespace penstock::shim;

STABLE_TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("gather_columns", TORCH_BOX(&gather_columns));
  m.impl("gather_embedding", TORCH_BOX(&gather_embedding));
  m.impl("hand_on", TORCH_BOX(&hand_on));
  m.impl("take_over", TORCH_BOX(&take_over));
}

STABLE_TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def(
      "program_gather_columns(int program, int x, Tensor meeting, Tensor bounds, int rank, "
      "int reader=-1) -> int");
  m.def(
      "program_gather_embedding(int program, Tensor weight, int dim, float scale, "
      "Tensor? weight_scale, Tensor? zero, int levels, Tensor? outer, Tensor meeting, "
      "Tensor bounds, int rank) -> int");
  m.def("program_hand_on(int program, int x, int file) -> int");
  m.def("program_take_over(int program, int columns, ScalarType dtype, int file) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(penstock, CompositeExplicitAutograd, m) {
  m.impl("program_gather_columns", TORCH_BOX(&program_gather_columns));
  m.impl("program_gather_embedding", TORCH_BOX(&program_gather_embedding));
  m.impl("program_hand_on", TORCH_BOX(&program_hand_on));
  m.impl("program_take_over", TORCH_BOX(&program_take_over));
}

// The operators that keep rows for later steps or take them from a store, made part of a program.
#include "held.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>

namespace {

using namespace penstock;
using namespace penstock::shim;

// The form of a store of rows, and where a column of it lies.
RowsArgs rows_args(Held& p, const Tensor& store, int64_t column, int64_t columns, bool keeps) {
  const Form form = form_of(store, "store");
  STD_TORCH_CHECK(store.is_contiguous() && column >= 0 && column + columns <= form.columns,
                  "columns ", column, " to ", column + columns, " of a store of ", form.columns);
  const int64_t bytes = form.dtype == DType::bf16 ? 2 : 4;
  RowsArgs a = {};
  a.keeps = keeps;
  a.row_bytes = columns * bytes;
  (keeps ? a.to_stride : a.from_stride) = form.columns * bytes;
  char* at = static_cast<char*>(store.data_ptr()) + column * bytes;
  a.from = at;
  a.to = at;
  p.kept_rows = std::min(p.kept_rows, store.size(0));
  p.keep(store);
  return a;
}

void program_keep_rows(int64_t id, int64_t x, const Tensor& store, int64_t column) {
  const auto p = held(id);
  const Form form = p->form(x);
  STD_TORCH_CHECK(form.dtype == dtype_of(store, "store"), "keep_rows: x and store have two dtypes");
  p->add(rows_args(*p, store, column, form.columns, true), -1, x);
}

int64_t program_kept_rows(int64_t id, const Tensor& store) {
  const auto p = held(id);
  const Form form = form_of(store, "store");
  const int64_t y = p->result(form, -1);
  p->add(rows_args(*p, store, 0, form.columns, false), -1, y);
  return y;
}

// x: a value whose rows are replaced by those of the store that are wanted.
void program_place_rows_(int64_t id, int64_t x, const Tensor& store, const Tensor& wanted) {
  const auto p = held(id);
  const Form form = p->form(x);
  p->check_all_rows(x, "place_rows_");
  STD_TORCH_CHECK(form_of(store, "store").columns == form.columns &&
                      form.dtype == dtype_of(store, "store"),
                  "place_rows_: x and store differ in dtype or columns");
  RowsArgs a = rows_args(*p, store, 0, form.columns, false);
  a.wanted = integers(wanted, store.size(0), "place_rows_: wanted");
  p->keep(wanted);
  p->add(a, -1, x);
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("program_keep_rows(int program, int x, Tensor store, int column) -> ()");
  m.def("program_kept_rows(int program, Tensor store) -> int");
  m.def("program_place_rows_(int program, int x, Tensor store, Tensor wanted) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(penstock, CompositeExplicitAutograd, m) {
  m.impl("program_keep_rows", TORCH_BOX(&program_keep_rows));
  m.impl("program_kept_rows", TORCH_BOX(&program_kept_rows));
  m.impl("program_place_rows_", TORCH_BOX(&program_place_rows_));
}

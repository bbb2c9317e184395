// Functions of other packages, called by torch and in programs.
#include "held.h"

#include <torch/csrc/stable/library.h>

namespace penstock::shim {
namespace {

ForeignRowsArgs foreign_args(Form x, int64_t function, int64_t out_columns) {
  STD_TORCH_CHECK(function != 0 && out_columns > 0, "foreign_rows: no function, or no columns");
  ForeignRowsArgs a = {};
  a.columns = x.columns;
  a.out_columns = out_columns;
  a.dtype = x.dtype;
  a.function = reinterpret_cast<penstock_rows>(function);
  return a;
}

// function: its address, as long as whoever calls this keeps its library.
Tensor run_foreign_rows(const Tensor& x, int64_t function, int64_t out_columns) {
  STD_TORCH_CHECK(x.dim() == 2 && x.is_contiguous(), "foreign_rows: x must be [T, N], contiguous");
  ForeignRowsArgs a = foreign_args(form_of(x, "foreign_rows: x"), function, out_columns);
  Tensor y = torch::stable::new_empty(x, {x.size(0), out_columns});
  a.x = x.data_ptr();
  a.y = y.data_ptr();
  a.rows = x.size(0);
  a.threads = threads();
  foreign_rows(a);
  return y;
}

int64_t program_foreign_rows(int64_t id, int64_t x, int64_t function, int64_t out_columns) {
  const auto p = held(id);
  const ForeignRowsArgs a = foreign_args(p->form(x), function, out_columns);
  const int64_t y = p->result({a.dtype, out_columns}, x);
  p->add(a, x, y);
  return y;
}

}  // namespace
}  // namespace penstock::shim

using namespace penstock::shim;

STABLE_TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("run_foreign_rows(Tensor x, int function, int out_columns) -> Tensor");
  m.def("program_foreign_rows(int program, int x, int function, int out_columns) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("run_foreign_rows", TORCH_BOX(&run_foreign_rows));
}

STABLE_TORCH_LIBRARY_IMPL(penstock, CompositeExplicitAutograd, m) {
  m.impl("program_foreign_rows", TORCH_BOX(&program_foreign_rows));
}

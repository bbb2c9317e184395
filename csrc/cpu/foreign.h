// Functions of rows that packages beside Penstock bring along. ops/foreign.py.
#pragma once

#include "../../src/penstock/include/penstock_rows.h"
#include "kernels.h"

namespace penstock {

struct ForeignRowsArgs {
  const void* x;  // [rows, columns] contiguous
  void* y;        // [rows, out_columns] contiguous
  int64_t rows, columns, out_columns;
  DType dtype;
  penstock_rows function;
  int threads;
};

void foreign_rows(const ForeignRowsArgs& a);

}  // namespace penstock

#include "foreign.h"

#include "parallel.h"

namespace penstock {

void foreign_rows(const ForeignRowsArgs& a) {
  constexpr int64_t kWork = 16 * 1024;  // values, below which a second thread costs more than it saves
  const int64_t item = a.dtype == DType::bf16 ? 2 : 4;
  const int32_t dtype = a.dtype == DType::bf16 ? PENSTOCK_BFLOAT16 : PENSTOCK_FLOAT32;
  const int threads = a.rows * (a.columns + a.out_columns) > kWork ? a.threads : 1;
  const int64_t parts = a.rows < threads ? a.rows : threads;
  parallel(threads, parts, [&](int64_t part) {
    const int64_t first = a.rows * part / parts, last = a.rows * (part + 1) / parts;
    a.function(static_cast<const char*>(a.x) + first * a.columns * item,
               static_cast<char*>(a.y) + first * a.out_columns * item, last - first, a.columns,
               a.out_columns, dtype);
  });
}

}  // namespace penstock

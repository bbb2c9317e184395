/* What a package beside Penstock gives it: a function of rows, that runs within its steps.
 *
 * docs/plugins.md has an example, which is built and tested. The function is called by several
 * threads at once, each with some of a step's rows. A row's result must depend on that row alone, or
 * it won't be the same in another batch.
 */
#ifndef PENSTOCK_ROWS_H
#define PENSTOCK_ROWS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum penstock_dtype { PENSTOCK_FLOAT32 = 0, PENSTOCK_BFLOAT16 = 1 };

/* x [rows, columns] → y [rows, out_columns], both contiguous and of `dtype`. They don't overlap. */
typedef void (*penstock_rows)(const void* x, void* y, int64_t rows, int64_t columns,
                              int64_t out_columns, int32_t dtype);

#ifdef __cplusplus
}
#endif

#endif

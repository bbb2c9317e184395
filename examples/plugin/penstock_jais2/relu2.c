/* max(x, 0)², in float32 and rounded once: So et al. 2021, arXiv:2109.08668 (Primer). */
#include <penstock_rows.h>
#include <string.h>

static float widened(uint16_t bits) {
  const uint32_t whole = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &whole, sizeof value);
  return value;
}

static uint16_t rounded(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if (value != value) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static float relu2(float x) {
  const float positive = x > 0.0f || x != x ? x : 0.0f; /* NaN stays */
  return positive * positive;
}

__attribute__((visibility("default"))) void relu2_rows(const void* x, void* y, int64_t rows,
                                                       int64_t columns, int64_t out_columns,
                                                       int32_t dtype) {
  (void)out_columns;
  const int64_t count = rows * columns;
  if (dtype == PENSTOCK_BFLOAT16) {
    const uint16_t* from = x;
    uint16_t* to = y;
    for (int64_t i = 0; i < count; i++) to[i] = rounded(relu2(widened(from[i])));
  } else {
    const float* from = x;
    float* to = y;
    for (int64_t i = 0; i < count; i++) to[i] = relu2(from[i]);
  }
}

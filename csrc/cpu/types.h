// What numbers are stored as, and the choices that kernels' arguments name.
#pragma once

#include <cstdint>

namespace penstock {

enum class DType : int { f32 = 0, bf16 = 1 };

struct bf16 {
  uint16_t bits;
};

// What keys and values are stored as: DType, one byte, or half of one. int8 has a float16 scale for
// each token and head; fp8 is OCP's E4M3 without infinities; int4 has a float16 step and minimum for
// each group of kCacheGroup dimensions of a token and head.
enum class Stored : int { same, int8, fp8, int4 };

constexpr int64_t kCacheGroup = 32;

struct fp8 {
  uint8_t bits;
};

struct nibbles {  // two values
  uint8_t bits;
};

// swiglu_oai has a gate only: gpt-oss clamps both of its sides. ops/linear.py.
enum class Activation : int { none, silu, gelu, gelu_tanh, swiglu_oai, quick_gelu, relu2 };

// What a weight's panels hold. int8_zero: int8 whose groups have zero points. levels: four bits that
// index a table; nvfp4: the same, each 16 values with a fine scale of E4M3. q4_k, q5_k, q6_k: records
// of K-quants (ops/records.py), which have their scales in them; mixed_k: each panel is of one of them.
enum class Weight : int {
  dense, int8, int8_zero, int4, fp8_e4m3, fp8_e5m2, levels, nvfp4, q4_k, q5_k, q6_k, mixed_k
};

// A group's scale: a float, or the exponent of a power of two (OCP's E8M0).
enum class Scale : int { f32, f16, e8m0 };

// What rows are rounded to before they are multiplied: ROW_CODES in ops/linear.py.
enum class RowCodes : int { none, int8, e4m3, int8_rotated, int8_blocks };

constexpr bool is_integer(Weight kind) {
  return kind == Weight::int8 || kind == Weight::int8_zero || kind == Weight::int4;
}
constexpr int bits_of(Weight kind) {
  return kind == Weight::int4 || kind == Weight::levels || kind == Weight::nvfp4 ? 4 : 8;
}

}  // namespace penstock

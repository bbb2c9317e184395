// What rows have of one span, or of several that were joined.
#pragma once

#include <cstdint>

namespace penstock::PENSTOCK_ISA {

constexpr int64_t kTileRows = 16;
constexpr int64_t kSpanRows = 32;   // of a task, where more would leave threads idle, or tiles don't flow
constexpr int64_t kMostRows = 128;  // of any other

struct Part {
  float* top;     // maxima
  float* sum;     // of weights
  float* values;  // weighted: padded_dim of each row

  // In memory of part_floats. rows: a multiple of kTileRows.
  static Part in(float* memory, int64_t rows) { return {memory, memory + rows, memory + 2 * rows}; }
  // Of the rows from `row` on.
  Part from(int64_t row, int64_t padded_dim) const {
    return {top + row, sum + row, values + row * padded_dim};
  }
};

constexpr int64_t part_floats(int64_t rows, int64_t padded_dim) { return rows * (2 + padded_dim); }
constexpr int64_t whole_tiles(int64_t rows) { return (rows + kTileRows - 1) / kTileRows * kTileRows; }

}  // namespace penstock::PENSTOCK_ISA

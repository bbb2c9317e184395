// K-quants: what their records and blocks measure, and how one is made of the other.
#pragma once

#include "kernels.h"

namespace penstock {

constexpr int64_t kRecord = 256;  // values of K in a record, which rows share a scale for too
constexpr bool has_records(Weight kind) { return kind >= Weight::q4_k; }
// Lines of 64 bytes in a record of 16 columns; a mixed one has those of the longest, and says in its
// last byte how many bits its codes have.
constexpr int64_t record_lines(Weight kind) {
  return kind == Weight::q4_k ? 37 : kind == Weight::q5_k ? 45 : kind == Weight::q6_k ? 53 : 54;
}
constexpr Weight record_kind(int64_t bits) {
  return bits == 4 ? Weight::q4_k : bits == 5 ? Weight::q5_k : Weight::q6_k;
}
// What a panel's records are, the first of which is given.
inline Weight record_kind(Weight kind, const void* record) {
  if (kind != Weight::mixed_k) return kind;
  const auto* bytes = static_cast<const uint8_t*>(record);
  return record_kind(bytes[record_lines(kind) * 64 - 1]);
}

// Rows of ggml's blocks to panels of records: ops/records.py.
struct PackRecordsArgs {
  const uint8_t* blocks;  // [n, records, block_bytes], or [2·n, …] when gated
  uint8_t* panels;
  int64_t n, records;
  bool gated;
  Weight kind;
  int threads;
};

// Bytes of a block of kRecord values; a mixed one is as long as the longest and says its bits behind that.
constexpr int64_t block_bytes(Weight kind) {
  return kind == Weight::q4_k ? 144 : kind == Weight::q5_k ? 176 : kind == Weight::q6_k ? 210 : 211;
}

void pack_records(const PackRecordsArgs& a);

}  // namespace penstock

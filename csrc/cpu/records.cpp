// Rows of ggml's blocks to the records of kquants.h. ops/records.py says both layouts.
#include <cstring>

#include "records.h"
#include "parallel.h"

namespace penstock {
namespace {

// One row's block: its 256 codes, and what they are scaled by.
struct Block {
  uint8_t codes[kRecord];
  int8_t factors[16];
  uint8_t minima[8];
  uint16_t d, least;
};

// 12 bytes: 8 factors and 8 minima of 6 bits, four of each whole, the rest's top bits above those.
void read_six_bits(const uint8_t* p, Block& b) {
  for (int i = 0; i < 4; i++) {
    b.factors[i] = static_cast<int8_t>(p[i] & 63);
    b.minima[i] = p[i + 4] & 63;
    b.factors[i + 4] = static_cast<int8_t>((p[i + 8] & 15) | (p[i] >> 6) << 4);
    b.minima[i + 4] = static_cast<uint8_t>(p[i + 8] >> 4 | (p[i + 4] >> 6) << 4);
  }
}

// Q4_K: d, dmin, 12 bytes, 128 of codes. Q5_K: 32 bytes of fifth bits before the codes.
void read_with_minima(const uint8_t* p, bool fifth, Block& b) {
  std::memcpy(&b.d, p, 2);
  std::memcpy(&b.least, p + 2, 2);
  read_six_bits(p + 4, b);
  const uint8_t *high = p + 16, *low = p + (fifth ? 48 : 16);
  for (int unit = 0; unit < 8; unit++)
    for (int i = 0; i < 32; i++) {
      const uint8_t two = low[unit / 2 * 32 + i];
      uint8_t code = unit % 2 ? two >> 4 : two & 15;
      if (fifth) code |= static_cast<uint8_t>((high[i] >> unit & 1) << 4);
      b.codes[unit * 32 + i] = code;
    }
}

// Q6_K: 128 bytes of low bits, 64 of the two high ones, 16 int8 factors, d.
void read_six(const uint8_t* p, Block& b) {
  std::memcpy(b.factors, p + 192, 16);
  std::memcpy(&b.d, p + 208, 2);
  for (int unit = 0; unit < 8; unit++) {
    const uint8_t* low = p + unit / 4 * 64 + unit % 2 * 32;
    const uint8_t* high = p + 128 + unit / 4 * 32;
    const int part = unit % 4;
    for (int i = 0; i < 32; i++) {
      const int four = part < 2 ? low[i] & 15 : low[i] >> 4;
      b.codes[unit * 32 + i] = static_cast<uint8_t>(four | (high[i] >> 2 * part & 3) << 4);
    }
  }
}

void put(uint8_t* to, uint32_t four) { std::memcpy(to, &four, 4); }

void put_column(const Block& b, Weight kind, int c, uint8_t* record) {
  const bool six = kind == Weight::q6_k;
  const int bits = kind == Weight::q4_k ? 4 : six ? 6 : 5, groups = six ? 16 : 8;
  uint8_t* line = record + 5 * 64 + c * 4;
  for (const uint8_t* codes = b.codes; codes < b.codes + kRecord; codes += 32) {
    uint32_t quads[8];  // four codes each
    std::memcpy(quads, codes, 32);
    for (int i = 0; i < 8; i += 2, line += 64)
      put(line, (quads[i] & 0x0f0f0f0f) | (quads[i + 1] & 0x0f0f0f0f) << 4);
    const int each = six ? 4 : 8;  // quads whose upper bits share a line
    for (int i = 0; bits > 4 && i < 8; i += each, line += 64) {
      uint32_t high = 0;
      for (int j = 0; j < each; j++)
        high |= (quads[i + j] >> 4 & (six ? 0x03030303u : 0x01010101u)) << (bits - 4) * j;
      put(line, high);
    }
  }
  uint8_t* at = record;
  for (int g = 0; g < groups; g++) at[g * 16 + c] = static_cast<uint8_t>(b.factors[g]);
  at += groups * 16;
  if (!six) {
    for (int g = 0; g < 8; g++) at[g / 2 * 32 + c * 2 + g % 2] = b.minima[g];
    at += 128;
    std::memcpy(at + 32 + c * 2, &b.least, 2);
  }
  std::memcpy(at + c * 2, &b.d, 2);
}

}  // namespace

void pack_records(const PackRecordsArgs& a) {
  const int64_t panels = (a.n + 15) / 16 * (a.gated ? 2 : 1), lines = record_lines(a.kind);
  const int64_t parts = panels < 64 ? panels : 64, size = block_bytes(a.kind);
  parallel(a.threads, parts, [&](int64_t part) {
    for (int64_t p = panels * part / parts; p < panels * (part + 1) / parts; p++) {
      uint8_t* record = a.panels + p * a.records * lines * 64;
      const int64_t first = (a.gated ? p / 2 : p) * 16, above = a.gated && p % 2 ? a.n : 0;
      for (int64_t i = 0; i < a.records; i++, record += lines * 64) {
        std::memset(record, 0, static_cast<size_t>(lines * 64));
        for (int c = 0; c < 16 && first + c < a.n; c++) {
          const uint8_t* from = a.blocks + ((above + first + c) * a.records + i) * size;
          const Weight kind = a.kind == Weight::mixed_k ? record_kind(from[size - 1]) : a.kind;
          if (a.kind == Weight::mixed_k) record[lines * 64 - 1] = from[size - 1];
          Block b = {};
          if (kind == Weight::q6_k)
            read_six(from, b);
          else
            read_with_minima(from, kind == Weight::q5_k, b);
          put_column(b, kind, c, record);
        }
      }
    }
  });
}

}  // namespace penstock

// Processes that compute one step together: how they put rows together that each has a part of.
//
// They meet in memory that all of them map: ops/ranks.py has its layout. A rank writes its part into one
// of two places, in turns, says so, waits for the others, and reads theirs. Whoever writes to a place
// again has been at the meeting in between, which everybody enters after reading; so one meeting each
// is enough, and nothing is ever added up: a column's bits don't depend on how many ranks there are.
#pragma once

#include "kernels.h"

namespace penstock {

struct Meeting {
  char* base;
  int64_t place_bytes;  // of each of the two
  int rank, size;
};

constexpr int64_t kMeetingHeader = 8192;
constexpr int kMostRanks = 64;

// Every rank has columns bounds[r] to bounds[r + 1] of rows, and gets all of them. ops/ranks.py.
struct GatherColumnsArgs {
  Meeting at;
  const int32_t* bounds;  // [size + 1]
  const void* x;          // [rows, own columns]
  int64_t x_stride;       // of items
  void* y;                // [rows, all columns], contiguous
  int64_t rows, item;     // item: bytes
  int reader;             // the only rank that gets them; −1: all do
  int threads;
};

// Every rank has rows bounds[r] to bounds[r + 1] of a table; all get the rows of `ids`. ops/ranks.py.
struct GatherEmbeddingArgs {
  Meeting at;
  const int32_t* bounds;  // [size + 1]
  EmbeddingArgs table;    // its own rows; tokens and out stay empty
  const int32_t* ids;
  void* y;  // [rows, dim], contiguous
  int64_t rows;
  int threads;
};

// Each row's largest column of all ranks' columns. ops/argmax.py says which of equals, or of NaNs.
struct GatherLargestArgs {
  Meeting at;
  const int32_t* bounds;
  const Largest* own;  // [rows], of its own columns, which count from 0
  Largest* all;        // [rows]
  int64_t rows;
  int reader;
};

// Where ranks go one after another: rows that go to the next by a socket, or come from the one before.
struct PassArgs {
  int file;
  bool gives;     // else it takes
  void* rows;     // contiguous; read or written
  int64_t bytes;  // of all
  int threads;
};

// All throw std::runtime_error where another rank has gone: whoever watches them says so in the header.
void gather_columns(const GatherColumnsArgs& a);
void gather_embedding(const GatherEmbeddingArgs& a);
void gather_largest(const GatherLargestArgs& a);
void pass(const PassArgs& a);

// For those who write their columns where they are read: the place of the next meeting, and that meeting.
// What lies there stays until two meetings later.
char* place(const Meeting& m);
void meet(const Meeting& m);

}  // namespace penstock

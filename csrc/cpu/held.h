// What a program holds beside its operators, for whoever runs it.
#pragma once

#include <algorithm>
#include <atomic>
#include <initializer_list>
#include <memory>
#include <utility>
#include <vector>

#include "program.h"
#include "shim.h"

namespace penstock::shim {

// A program, the tensors that it points into, and what a step may name in them.
struct Held {
  Program program;
  std::vector<Tensor> kept;
  int64_t tokens = INT64_MAX, positions = INT64_MAX;  // rows of the tables that are looked up
  int64_t adapters = INT64_MAX;        // of every product that has some
  int64_t kept_rows = INT64_MAX;       // of the stores that rows are kept in
  int64_t blocks = 0, block_size = 0;  // of every cache, or none
  int64_t slots = 0;                   // of states, in every layer that has some
  int64_t ranks = 1, rank = 0;         // that have a part each of every block, and rows of a step (ring.h)
  bool shares_rows = false;
  Recent recent = {};                  // of every cache, or none: its places are the same
  struct Part {  // of a cache's blocks
    char* data;
    size_t bytes, pitch;
  };
  std::vector<Part> parts;  // of every cache; those that lie side by side are one
  std::atomic<bool> running{false};
  std::vector<std::pair<int64_t, int>> threads;  // (steps of up to so many tokens, threads)

  // Block tables are checked against the first cache, so all of a program's must be like it.
  void take_blocks(int64_t its_blocks, int64_t its_size, const Recent& its_recent) {
    STD_TORCH_CHECK(block_size == 0 || (blocks == its_blocks && block_size == its_size),
                    "The caches of one program must have the same blocks");
    STD_TORCH_CHECK(block_size == 0 ||
                        (recent.slots == its_recent.slots && recent.count == its_recent.count &&
                         recent.window == its_recent.window),
                    "The caches of one program must have the same window and places in it");
    recent = its_recent;
    blocks = its_blocks;
    block_size = its_size;
  }

  void take_slots(int64_t its_slots) {
    STD_TORCH_CHECK(slots == 0 || slots == its_slots,
                    "The states of one program must be as many in each layer");
    slots = its_slots;
  }

  // The program is this rank's of so many.
  void share_rows(int64_t its_rank, int64_t its_ranks) {
    STD_TORCH_CHECK(!shares_rows || (rank == its_rank && ranks == its_ranks),
                    "A program is one rank's of one number of them");
    shares_rows = true;
    rank = its_rank;
    ranks = its_ranks;
  }

  // What of a cache is copied with its blocks; null: nothing.
  void take_parts(std::initializer_list<const Tensor*> tensors) {
    for (const Tensor* part : tensors) {
      if (part == nullptr || part->numel() == 0) continue;
      const int64_t item = static_cast<int64_t>(part->element_size());
      auto* data = static_cast<char*>(part->data_ptr());
      const auto bytes = static_cast<size_t>(part->numel() / part->size(0) * item);
      const auto pitch = static_cast<size_t>(part->stride(0) * item);
      const bool beside = !parts.empty() && pitch == parts.back().pitch &&
                          data == parts.back().data + parts.back().bytes &&
                          parts.back().bytes + bytes <= pitch;
      if (beside)
        parts.back().bytes += bytes;
      else
        parts.push_back({data, bytes, pitch});
    }
  }

  // As many threads as were chosen for steps of `tokens`, of those that there are.
  int threads_for(int64_t tokens) const {
    const int all = shim::threads();
    for (const auto& [most, chosen] : threads)
      if (tokens <= most) return std::min(chosen, all);
    return all;
  }

  void keep(const Tensor& tensor) { kept.push_back(tensor); }
  void keep(const Optional& tensor) {
    if (tensor) kept.push_back(*tensor);
  }
  template <typename... Tensors>
  void keep_all(const Tensors&... tensors) {
    (keep(tensors), ...);
  }

  Form form(int64_t value) const {
    const Program::Value& v = program.at(static_cast<int>(value));
    return {v.dtype, v.columns};
  }
  // One dtype, and all rows or the sampled ones in both.
  void check_like(int64_t residual, int64_t x, const char* what) const {
    const Program::Value& a = program.at(static_cast<int>(residual));
    const Program::Value& b = program.at(static_cast<int>(x));
    STD_TORCH_CHECK(a.dtype == b.dtype && a.sampled == b.sampled, what,
                    ": residual and x must have the same rows and dtype");
  }
  void check_all_rows(int64_t value, const char* what) const {
    STD_TORCH_CHECK(!program.at(static_cast<int>(value)).sampled, what, ": value ", value,
                    " has the sampled rows only");
  }
  int64_t result(Form form, int64_t like, int64_t dim = 0) {
    return program.value(
        {form.columns, form.dtype, like >= 0 && program.at(static_cast<int>(like)).sampled, dim});
  }
  template <typename Args>
  void add(const Args& args, int64_t x, int64_t y, Ids ids = Ids::tokens) {
    program.add({args, static_cast<int>(x), static_cast<int>(y), ids});
  }
};

// Where ranks have some rows each: all of them, and who has which (shim_ring.cpp).
void take_shared_rows(StepArrays& step, const Held& held, const Optional& all_positions,
                      const Optional& rows);

// The program of that number. Throws where there is none.
std::shared_ptr<Held> held(int64_t id);

}  // namespace penstock::shim

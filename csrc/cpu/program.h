// The operators of a decoder in the order in which they run: a whole step in one call.
//
// What lies between two of them is then a branch instead of Python, and activations live in buffers
// that are kept. Weights and caches are fixed when a program is made; `run` gets a step's arrays.
#pragma once

#include <cstdlib>
#include <memory>
#include <utility>
#include <variant>
#include <vector>

#include "foreign.h"
#include "latent.h"
#include "mixture.h"
#include "ring.h"
#include "states.h"

namespace penstock {

// The arrays of a step: step.py.
struct StepArrays {
  const int32_t* tokens;
  const int32_t* positions;
  const int32_t* slots;
  const int32_t* query_start;
  const int32_t* context_len;
  const int32_t* block_table;
  const int32_t* sample_at;
  const int32_t* copies;    // [copied, 2]
  const int32_t* adapters;  // [count]; null: no row has one
  const int32_t* states;    // [sequences], of layers with states; null: each begins with the step
  const int32_t* kept;      // [kept_count, 2], of those
  int64_t table_stride, count, sequences, sampled, copied, kept_count;
  // Where ranks have some rows each (ring.h): those arrays are this one's tokens and positions, and else
  // of all rows.
  const int32_t* rows;           // [ranks + 1]
  const int32_t* all_positions;  // [total]
  int64_t total;                 // of slots: count, but there
};

// Which of a step's arrays an embedding looks up.
enum class Ids : int { tokens, positions, sample_at };

// Where the heads of q, k and v lie in rows of one projection.
inline void place_heads(RotaryCacheArgs& a, const void* qkv, int64_t stride) {
  const char* data = static_cast<const char*>(qkv);
  const int64_t head = a.dim * (a.dtype == DType::bf16 ? 2 : 4);
  a.q = data;
  a.k = data + a.heads * head;
  a.v = data + (a.heads + (a.parts == 2 ? 0 : a.kv_heads)) * head;
  a.stride = stride;
}

class Program {
 public:
  // A matrix that some node writes: [tokens or sampled rows, columns].
  struct Value {
    int64_t columns;
    DType dtype;
    bool sampled;
    int64_t dim;  // of each head, for queries
  };

  // x: the value that is read, and z beside it; y: the one that is written, or changed in place. −1: none.
  struct Node {
    std::variant<LinearArgs, EmbeddingArgs, NormArgs, AddArgs, SoftcapArgs, GateArgs, LoraArgs,
                 ExpertsArgs, GateRowsArgs, RotaryCacheArgs, LatentQueryArgs, LatentCacheArgs, AttentionArgs, HeadsArgs,
                 RowsArgs, GatherColumnsArgs, GatherEmbeddingArgs, PassArgs,
                 ForeignRowsArgs, RingArgs, RingLatentsArgs, GatherRowsArgs, DeltaArgs,
                 MambaArgs, ShortConvArgs, GateByArgs>
        args;
    int x, y;
    Ids ids;
    int z = -1;
    // (up to so many rows, how), in order; more rows go as the last
    std::vector<std::pair<int64_t, LinearVariant>> variants = {};
  };

  int value(Value value) {
    values_.push_back(value);
    return static_cast<int>(values_.size()) - 1;
  }
  const Value& at(int value) const { return values_.at(static_cast<size_t>(value)); }
  void add(const Node& node) { nodes_.push_back(node); }
  size_t size() const { return nodes_.size(); }
  Node& node(size_t index) { return nodes_.at(index); }

  // `logits` is what `run` writes for its caller. Gives every other value a buffer, shared by those
  // that are never needed at the same time.
  void finish(int logits);
  int logits() const { return logits_; }

  // Elements from a row of a value to its next one.
  int64_t stride(int value) const { return strides_.at(static_cast<size_t>(value)); }

  // Gives buffers the size that steps of up to `rows` tokens, or sampled rows, need, so that those
  // allocate nothing.
  void reserve(int64_t rows);
  // What all buffers hold now.
  size_t bytes() const;
  // Of buffers, what steps of so many tokens and sampled rows write to: less than is reserved where a
  // sampled value shares one with others, or ranks read a product where it was written.
  int64_t touched(int64_t tokens, int64_t sampled) const;

  // Whether `run` can find each row's largest logit alone: logits are a product's, soft cap aside, or
  // put together of several ranks'.
  bool finds_largest() const;

  // The experts that any token of the last run chose, of all layers together.
  int64_t experts_used() const { return experts_used_; }

  // What is wanted of a step: logits [sampled, columns], or only each row's largest [sampled].
  struct Output {
    void* logits;
    Largest* largest;
  };

  // times, where given, has size() + 1 places: CLOCK_MONOTONIC seconds before each node and after
  // the last.
  void run(const StepArrays& step, const Output& output, int threads, double* times);

 private:
  struct Buffer {
    int64_t row_bytes = 0;
    size_t bytes = 0;
    std::unique_ptr<void, decltype(&std::free)> data{nullptr, std::free};
  };

  void* data(int value, const Output& output) const;
  void find_strides();
  // Which products ranks put together without copying them, and where their parts are read.
  void find_direct();
  void write_direct(LinearArgs& a, const Node& node, const Output& output);
  void gather(const GatherColumnsArgs& a, const Node& node, const Output& output);
  template <typename Args>
  void bind(Args& args, const Node& node, const StepArrays& step, const Output& output);
  const SoftcapArgs* last_cap() const;

  std::vector<Value> values_;
  std::vector<Node> nodes_;
  std::vector<int> buffer_of_;
  std::vector<int64_t> strides_;
  // Of a product's value, whose columns a rank writes where all will read them: the node that says when
  // they may; −1 of others. And where what that node gives lies in this run, if it is there.
  std::vector<int> gathered_by_;
  std::vector<char*> place_;
  std::vector<Buffer> buffers_;
  int logits_ = -1;
  int64_t experts_used_ = 0;
};

}  // namespace penstock

#include "program.h"

#include <algorithm>
#include <chrono>
#include <new>
#include <type_traits>

#include "gathered.h"
#include "parallel.h"

namespace penstock {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void call(const LinearArgs& a) {
  if (a.rows > 0) kernels().linear(a);
}
void call(const EmbeddingArgs& a) { kernels().embedding(a); }
void call(const NormArgs& a) { kernels().norm(a); }
void call(const AddArgs& a) { kernels().add(a); }
void call(const SoftcapArgs& a) { kernels().softcap(a); }
void call(const GateArgs& a) { kernels().gate(a); }
void call(const LoraArgs& a) {
  if (a.adapters) lora_add(a);
}
void call(const ExpertsArgs& a) { experts(a); }
void call(const GateRowsArgs& a) { kernels().gate_rows(a); }
void call(const RotaryCacheArgs& a) { kernels().rotary_cache(a); }
void call(const LatentQueryArgs& a) { latent_query(a); }
void call(const LatentCacheArgs& a) { kernels().latent_cache(a); }
void call(const AttentionArgs& a) { kernels().attention(a); }
void call(const HeadsArgs& a) { head_linear(a); }
void call(const GatherEmbeddingArgs& a) { gather_embedding(a); }
void call(const PassArgs& a) { pass(a); }
void call(const ForeignRowsArgs& a) { foreign_rows(a); }
void call(const RingArgs& a) { ring_attention(a); }
void call(const RingLatentsArgs& a) { ring_latents(a); }
void call(const GatherRowsArgs& a) { gather_rows(a); }
void call(const DeltaArgs& a) { kernels().delta_rule(a); }
void call(const MambaArgs& a) { kernels().mamba2(a); }
void call(const ShortConvArgs& a) { kernels().short_conv(a); }
void call(const GateByArgs& a) { kernels().gate_by(a); }
void call(const RowsArgs& a) {
  for (int64_t row = 0; row < a.rows; row++)
    if (!a.wanted || a.wanted[row] != 0)
      __builtin_memcpy(static_cast<char*>(a.to) + row * a.to_stride,
                       static_cast<const char*>(a.from) + row * a.from_stride,
                       static_cast<size_t>(a.row_bytes));
}

template <typename T, typename... Ts>
constexpr bool is_one_of = (std::is_same_v<T, Ts> || ...);

LinearVariant variant_for(const Program::Node& node, int64_t rows) {
  for (const auto& [most, variant] : node.variants)
    if (rows <= most) return variant;
  return node.variants.empty() ? LinearVariant{} : node.variants.back().second;
}

}  // namespace

// Rows lie an odd number of lines apart, where all that read and write a value can do with it: products by tiles
// read and write sixteen and more of them side by side, which would meet in a few sets of the caches.
void Program::find_strides() {
  constexpr int64_t line = 64;
  std::vector<bool> can(values_.size(), true);
  for (const Node& node : nodes_)
    std::visit(
        [&]<typename Args>(const Args&) {
          constexpr bool reads = is_one_of<Args, LinearArgs, AddArgs, LoraArgs, GateArgs, ExpertsArgs, GateRowsArgs,
                                           GateByArgs, RotaryCacheArgs>;
          constexpr bool writes = is_one_of<Args, LinearArgs, AddArgs, LoraArgs, EmbeddingArgs, ExpertsArgs,
                                            AttentionArgs, GateRowsArgs, GateByArgs>;
          const auto rule_out = [&](int value) {
            if (value >= 0) can[static_cast<size_t>(value)] = false;
          };
          bool may_read = reads;
          if (const auto* norm = std::get_if<NormArgs>(&node.args)) may_read = norm->groups == 1;
          if (!may_read) rule_out(node.x);
          if (!writes) rule_out(node.y);
          rule_out(node.z);
        },
        node.args);
  strides_.resize(values_.size());
  for (size_t i = 0; i < values_.size(); i++) {
    const Value& value = values_[i];
    const int64_t size = size_of(value.dtype), lines = (value.columns * size + line - 1) / line;
    const bool free = can[i] && static_cast<int>(i) != logits_;
    strides_[i] = free ? (lines | 1) * line / size : value.columns;
  }
}

void Program::finish(int logits) {
  logits_ = logits;
  find_strides();
  std::vector<size_t> last(values_.size(), 0);
  for (size_t i = 0; i < nodes_.size(); i++)
    for (int value : {nodes_[i].x, nodes_[i].y, nodes_[i].z})
      if (value >= 0) last[static_cast<size_t>(value)] = i;
  buffer_of_.assign(values_.size(), -1);
  std::vector<int> free;
  for (size_t i = 0; i < nodes_.size(); i++) {
    const int y = nodes_[i].y;
    if (y != logits && buffer_of_[static_cast<size_t>(y)] < 0) {
      if (free.empty()) {
        free.push_back(static_cast<int>(buffers_.size()));
        buffers_.emplace_back();
      }
      Buffer& buffer = buffers_[static_cast<size_t>(free.back())];
      buffer.row_bytes = std::max(buffer.row_bytes, stride(y) * size_of(at(y).dtype));
      buffer_of_[static_cast<size_t>(y)] = free.back();
      free.pop_back();
    }
    for (int value : {nodes_[i].x, y, nodes_[i].z})
      if (value >= 0 && value != logits && last[static_cast<size_t>(value)] == i)
        free.push_back(buffer_of_[static_cast<size_t>(value)]);
  }
  find_direct();
}

// A product whose only reader is a meeting, and what the meeting gives: nobody changes that, and it was
// read before the next meeting, after which others may write there (ranks.h).
void Program::find_direct() {
  gathered_by_.assign(values_.size(), -1);
  place_.assign(values_.size(), nullptr);
  const auto meets = [](const Node& node) {
    return std::holds_alternative<GatherColumnsArgs>(node.args) ||
           std::holds_alternative<GatherEmbeddingArgs>(node.args) ||
           std::holds_alternative<ExpertsArgs>(node.args);
  };
  const auto uses = [&](int value) {
    std::vector<size_t> found;
    for (size_t i = 0; i < nodes_.size(); i++)
      if (nodes_[i].x == value || nodes_[i].y == value || nodes_[i].z == value) found.push_back(i);
    return found;
  };
  for (size_t i = 0; i < nodes_.size(); i++) {
    const auto* gather = std::get_if<GatherColumnsArgs>(&nodes_[i].args);
    if (!gather) continue;
    const std::vector<size_t> made = uses(nodes_[i].x), read = uses(nodes_[i].y);
    const auto* product = std::get_if<LinearArgs>(&nodes_[made.front()].args);
    if (made.size() != 2 || made.front() + 1 != i || !product || product->adds) continue;
    size_t next = i + 1;
    while (next < nodes_.size() && !meets(nodes_[next])) next++;
    const bool changed = std::count_if(read.begin(), read.end(), [&](size_t node) {
                           return nodes_[node].y == nodes_[i].y;
                         }) > 1;
    if (nodes_[i].y == logits_ || (!changed && read.back() < next))
      gathered_by_[static_cast<size_t>(nodes_[i].x)] = static_cast<int>(i);
  }
}

// The soft cap that the logits go through at last.
const SoftcapArgs* Program::last_cap() const {
  const Node& last = nodes_.back();
  return last.y == logits_ ? std::get_if<SoftcapArgs>(&last.args) : nullptr;
}

bool Program::finds_largest() const {
  const size_t count = nodes_.size() - (last_cap() != nullptr);
  const auto writes = [&](const Node& node) { return node.y == logits_; };
  const auto end = nodes_.begin() + static_cast<std::ptrdiff_t>(count);
  if (count == 0 || std::count_if(nodes_.begin(), end, writes) != 1 || !writes(nodes_[count - 1]))
    return false;
  const auto last = static_cast<int>(count) - 1;
  const Node* node = &nodes_[count - 1];
  if (std::holds_alternative<GatherColumnsArgs>(node->args)) {
    if (gathered_by_[static_cast<size_t>(node->x)] != last) return false;
    node = &*std::find_if(nodes_.begin(), end, [&](const Node& made) { return made.y == node->x; });
  }
  const LinearArgs* product = std::get_if<LinearArgs>(&node->args);
  return product && !product->gated && !product->adds;
}

// Let a product write its columns into the place of the meeting that follows, or find their largest.
void Program::write_direct(LinearArgs& a, const Node& node, const Output& output) {
  const int by = gathered_by_[static_cast<size_t>(node.y)];
  if (by < 0) return;
  const Node& meeting = nodes_[static_cast<size_t>(by)];
  const auto& gather = std::get<GatherColumnsArgs>(meeting.args);
  char*& all = place_[static_cast<size_t>(meeting.y)];
  all = nullptr;
  if (output.largest && meeting.y == logits_) {
    a.largest = kept<Largest>(Scratch::found, a.rows);
    if (const SoftcapArgs* after = last_cap()) a.cap = after->cap;
    return;
  }
  const int64_t columns = at(meeting.y).columns;
  if (a.rows * columns * gather.item > gather.at.place_bytes) return;
  all = place(gather.at);
  a.y = all + gather.bounds[gather.at.rank] * gather.item;
  a.y_stride = columns;
}

void Program::gather(const GatherColumnsArgs& a, const Node& node, const Output& output) {
  const bool last = node.y == logits_;
  if (last && output.largest) {
    gather_largest({a.at, a.bounds, kept<Largest>(Scratch::found, a.rows), output.largest, a.rows,
                    a.reader});
    return;
  }
  const char* all = place_[static_cast<size_t>(node.y)];
  if (!all) return gather_columns(a);
  meet(a.at);
  if (!last || (a.reader >= 0 && a.reader != a.at.rank)) return;
  const auto bytes = static_cast<size_t>(at(node.y).columns * a.item);
  parallel(a.threads, a.rows, [&](int64_t row) {
    __builtin_memcpy(static_cast<char*>(a.y) + static_cast<size_t>(row) * bytes,
                     all + static_cast<size_t>(row) * bytes, bytes);
  });
}

void* Program::data(int value, const Output& output) const {
  if (value < 0) return nullptr;
  if (value == logits_) return output.logits;
  if (char* all = place_[static_cast<size_t>(value)]) return all;
  return buffers_[static_cast<size_t>(buffer_of_[static_cast<size_t>(value)])].data.get();
}

namespace {

void take_sequences(AttentionArgs& a, const StepArrays& step) {
  a.query_start = step.query_start;
  a.context_len = step.context_len;
  a.block_table = step.block_table;
  a.table_stride = step.table_stride;
  a.sequences = step.sequences;
}

}  // namespace

template <typename Args>
void Program::bind(Args& a, const Node& node, const StepArrays& step, const Output& output) {
  void* y = data(node.y, output);
  const Value& out = at(node.y);
  const int64_t rows = out.sampled ? step.sampled : step.count;
  const void* x = data(node.x, output);
  const int64_t stride = node.x < 0 ? 0 : this->stride(node.x), y_stride = this->stride(node.y);
  if constexpr (std::is_same_v<Args, LinearArgs>) {
    a.x = x;
    a.x_stride = stride;
    a.rows = rows;
    a.variant = variant_for(node, rows);
    if (a.adds) {
      a.residual = y;
      a.residual_stride = y_stride;
    } else {
      a.y = y;
      a.y_stride = y_stride;
    }
    if (output.largest && node.y == logits_) {
      a.largest = output.largest;
      if (const SoftcapArgs* after = last_cap()) a.cap = after->cap;
    }
    write_direct(a, node, output);
  } else if constexpr (std::is_same_v<Args, EmbeddingArgs>) {
    a.tokens = node.ids == Ids::tokens      ? step.tokens
               : node.ids == Ids::positions ? step.positions
                                            : step.sample_at;
    a.count = rows;
    if (node.x >= 0) a.weight = x;
    a.out = y;
    a.out_stride = y_stride;
  } else if constexpr (std::is_same_v<Args, NormArgs>) {
    a.x = x;
    a.x_stride = stride / a.groups;
    a.rows = rows * a.groups;
    a.out = y;
  } else if constexpr (std::is_same_v<Args, AddArgs>) {
    a.x = x;
    a.x_stride = stride;
    a.rows = rows;
    a.residual = y;
    a.residual_stride = y_stride;
  } else if constexpr (std::is_same_v<Args, SoftcapArgs>) {
    a.x = static_cast<float*>(y);
    a.count = rows * out.columns;
  } else if constexpr (std::is_same_v<Args, GateArgs>) {
    a.x = x;
    a.x_stride = stride;
    a.rows = rows;
    a.out = y;
  } else if constexpr (std::is_same_v<Args, LoraArgs>) {
    a.x = x;
    a.x_stride = stride;
    a.rows = rows;
    a.adapters = step.adapters;
    a.y = y;
    a.y_stride = y_stride;
  } else if constexpr (std::is_same_v<Args, ExpertsArgs>) {
    a.x = x;
    a.x_stride = stride;
    a.rows = rows;
    a.y = y;
    a.y_stride = y_stride;
    a.used = &experts_used_;
    if (node.z >= 0) {
      a.asked = data(node.z, output);
      a.asked_stride = this->stride(node.z);
    }
  } else if constexpr (std::is_same_v<Args, RotaryCacheArgs>) {
    place_heads(a, x, stride);
    a.positions = step.positions;
    a.slots = step.slots;
    a.tokens = rows;
    a.copies = step.copies;
    a.copied = step.copied;
    a.q_out = y;
  } else if constexpr (std::is_same_v<Args, LatentQueryArgs>) {
    a.heads.x = x;
    a.heads.x_stride = stride;
    a.heads.y = y;
    a.heads.rows = rows;
    a.angles.positions = step.positions;
  } else if constexpr (std::is_same_v<Args, GateRowsArgs> || std::is_same_v<Args, GateByArgs>) {
    a.x = x;
    a.x_stride = stride;
    a.y = y;
    a.y_stride = y_stride;
    a.rows = rows;
  } else if constexpr (std::is_same_v<Args, LatentCacheArgs>) {
    a.x = y;  // which nobody writes
    a.stride = out.columns;
    a.tokens = rows;
    a.angles.positions = step.positions;
    a.slots = step.slots;
    a.copies = step.copies;
    a.copied = step.copied;
  } else if constexpr (std::is_base_of_v<StatesArgs, Args>) {
    a.x = x;
    a.x_stride = stride;
    if constexpr (std::is_base_of_v<RecurrentArgs, Args>) {
      a.gates = static_cast<const float*>(data(node.z, output));
      a.gates_stride = at(node.z).columns;
    }
    a.query_start = step.query_start;
    a.sequences = step.sequences;
    a.states = step.states;
    a.kept = step.kept;
    a.kept_count = step.kept_count;
    a.tokens = rows;
    a.y = y;
  } else if constexpr (std::is_same_v<Args, HeadsArgs>) {
    a.x = x;
    a.x_stride = stride;
    a.y = y;
    a.rows = rows;
  } else if constexpr (std::is_same_v<Args, GatherColumnsArgs>) {
    a.x = x;
    a.x_stride = stride;
    a.y = y;
    a.rows = rows;
  } else if constexpr (std::is_same_v<Args, GatherEmbeddingArgs>) {
    a.ids = step.tokens;
    a.y = y;
    a.rows = rows;
  } else if constexpr (std::is_same_v<Args, ForeignRowsArgs>) {
    a.x = x;
    a.y = y;
    a.rows = rows;
  } else if constexpr (std::is_same_v<Args, RingArgs>) {
    a.qkv = x;
    a.qkv_stride = stride;
    a.rows = step.rows;
    a.total = step.total;
    a.turned.positions = step.all_positions;
    a.turned.slots = step.slots;
    a.turned.copies = step.copies;
    a.turned.copied = step.copied;
    take_sequences(a.attention, step);
    a.out = y;
  } else if constexpr (std::is_same_v<Args, RingLatentsArgs>) {
    a.kv = y;  // which nobody writes
    a.kv_stride = out.columns;
    a.rows = step.rows;
    a.total = step.total;
    a.kept.angles.positions = step.all_positions;
    a.kept.slots = step.slots;
    a.kept.copies = step.copies;
    a.kept.copied = step.copied;
  } else if constexpr (std::is_same_v<Args, GatherRowsArgs>) {
    a.rows = step.rows;
    a.wanted = step.sample_at;
    a.count = step.sampled;
    a.x = x;
    a.y = y;
  } else if constexpr (std::is_same_v<Args, PassArgs>) {
    const int from = a.gives ? node.x : node.y;
    a.rows = data(from, output);
    a.bytes = step.count * at(from).columns * (at(from).dtype == DType::bf16 ? 2 : 4);
  } else if constexpr (std::is_same_v<Args, RowsArgs>) {
    a.rows = rows;
    (a.keeps ? a.from_stride : a.to_stride) = a.row_bytes;
    if (a.keeps)
      a.from = y;
    else
      a.to = y;
  } else {
    static_assert(std::is_same_v<Args, AttentionArgs>);
    a.q = x;
    take_sequences(a, step);
    a.out = y;
    a.out_stride = y_stride;
  }
}

void Program::reserve(int64_t rows) {
  for (Buffer& buffer : buffers_) {
    const size_t need = static_cast<size_t>(buffer.row_bytes * rows);
    if (need <= buffer.bytes) continue;
    const size_t bytes = (need + 4095) / 4096 * 4096;
    buffer.data.reset();
    buffer.bytes = 0;
    allocations++;
    buffer.data.reset(take_memory(bytes));
    buffer.bytes = bytes;
  }
}

size_t Program::bytes() const {
  size_t sum = 0;
  for (const Buffer& buffer : buffers_) sum += buffer.bytes;
  return sum;
}

int64_t Program::touched(int64_t tokens, int64_t sampled) const {
  std::vector<int64_t> used(buffers_.size(), 0);
  const auto bytes = [&](int value) {
    const Value& v = at(value);
    return stride(value) * (v.sampled ? sampled : tokens) * size_of(v.dtype);
  };
  std::vector<bool> elsewhere(values_.size(), false);  // where ranks meet
  for (size_t x = 0; x < values_.size(); x++) {
    if (gathered_by_[x] < 0) continue;
    const Node& meeting = nodes_[static_cast<size_t>(gathered_by_[x])];
    const auto& gather = std::get<GatherColumnsArgs>(meeting.args);
    const bool fits = bytes(meeting.y) <= gather.at.place_bytes;
    elsewhere[x] = elsewhere[static_cast<size_t>(meeting.y)] = fits;
  }
  for (size_t y = 0; y < values_.size(); y++) {
    if (buffer_of_[y] < 0 || elsewhere[y]) continue;
    int64_t& most = used[static_cast<size_t>(buffer_of_[y])];
    most = std::max(most, bytes(static_cast<int>(y)));
  }
  int64_t sum = 0;
  for (int64_t one : used) sum += (one + 4095) / 4096 * 4096;
  return sum;
}

void Program::run(const StepArrays& step, const Output& output, int threads, double* times) {
  const int64_t rows = std::max(step.count, step.sampled);
  const auto too_small = [&](const Buffer& buffer) {
    return static_cast<size_t>(buffer.row_bytes * rows) > buffer.bytes;
  };
  if (std::any_of(buffers_.begin(), buffers_.end(), too_small)) reserve(rows + rows / 4);
  experts_used_ = 0;
  for (const Node& node : nodes_) {
    if (times) *times++ = now();
    if (output.largest && std::holds_alternative<SoftcapArgs>(node.args) && node.y == logits_)
      continue;  // the product has seen to it
    std::visit(
        [&](auto args) {
          bind(args, node, step, output);
          if constexpr (!std::is_same_v<decltype(args), RowsArgs>) args.threads = threads;
          if constexpr (std::is_same_v<decltype(args), GatherColumnsArgs>)
            gather(args, node, output);
          else
            call(args);
        },
        node.args);
  }
  if (times) *times = now();
}

}  // namespace penstock

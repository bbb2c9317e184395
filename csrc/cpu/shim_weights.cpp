// Rounding and packing weights, bound to torch.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>

#include "records.h"
#include "shim.h"

namespace penstock::shim {
namespace {

// What packing and quantizing share; K is padded to a multiple of `multiple`.
void read_weight(PackArgs& a, const Tensor& weight, int64_t multiple, bool gated,
                 const char* what) {
  check_rows(weight, what);
  const ScalarType type = weight.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 ||
                      type == ScalarType::Half,
                  what, " must be float32, bfloat16 or float16");
  STD_TORCH_CHECK(!gated || weight.size(0) % 2 == 0, what, " with a gate has two halves, this one ",
                  weight.size(0), " rows");
  a.dtype = type == ScalarType::Float      ? Float::f32
            : type == ScalarType::BFloat16 ? Float::bf16
                                           : Float::f16;
  a.weight = weight.data_ptr();
  a.stride = weight.stride(0);
  a.gated = gated;
  a.n = gated ? weight.size(0) / 2 : weight.size(0);
  a.k = weight.size(1);
  a.padded_k = (a.k + multiple - 1) / multiple * multiple;
  a.threads = threads();
}

constexpr size_t kPage = 2 * 1024 * 1024, kChunkBytes = 64 * kPage;  // each ends within a page
constexpr size_t kSmall = 256 * 1024;  // what is smaller is left to torch

// Memory in pages of 2 MB, where the system has them, for one tensor after the other: one row reads weights
// as fast as memory answers, but for the places of pages, which have to be looked up. Pages that nobody has
// touched take no memory, and all is given back when the last of its tensors is.
class Chunk {
 public:
  explicit Chunk(size_t bytes)
      : size_((bytes + kPage - 1) / kPage * kPage), data_(std::aligned_alloc(kPage, size_)) {
    if (!data_) throw std::bad_alloc();
    madvise(data_, size_, MADV_DONTNEED);  // memory that was in use before would keep its small pages
    madvise(data_, size_, MADV_HUGEPAGE);
  }
  ~Chunk() { std::free(data_); }
  Chunk(const Chunk&) = delete;
  Chunk& operator=(const Chunk&) = delete;

  bool holds(size_t bytes) const { return bytes <= size_ - used_; }
  void* take(size_t bytes) {
    void* at = static_cast<char*>(data_) + used_;
    used_ += (bytes + 4095) / 4096 * 4096;
    if (used_ > size_) used_ = size_;
    return at;
  }

 private:
  size_t size_, used_ = 0;
  void* data_;
};

std::mutex chunk_lock;
std::shared_ptr<Chunk> chunk;

// Bytes [panels, lines, across, v], 64 in `across · v` elements.
Tensor new_panels(const Tensor& like, int64_t panels, int64_t lines, int64_t across, int64_t v,
                  ScalarType type, int64_t line_bytes = 64) {
  const size_t bytes = static_cast<size_t>(panels * lines * line_bytes);
  if (bytes < kSmall) return torch::stable::new_empty(like, {panels, lines, across, v}, type);
  std::shared_ptr<Chunk> mine;
  void* at;
  {
    const std::lock_guard<std::mutex> held(chunk_lock);
    if (!chunk || !chunk->holds(bytes)) chunk = std::make_shared<Chunk>(std::max(bytes, kChunkBytes));
    mine = chunk;
    at = mine->take(bytes);
    if (!mine->holds(kSmall)) chunk.reset();
  }
  return torch::stable::from_blob(at, {panels, lines, across, v}, {lines * across * v, across * v, v, 1},
                                  like.device(), type, [mine](void*) {});
}

int64_t count_panels(const PackArgs& a) { return (a.n + 15) / 16 * (a.gated ? 2 : 1); }

// What `quantize_int8` (group 0) and `quantize_int4` share; the caller adds scale and zero.
QuantizeArgs quantize_args(const Tensor& weight, int64_t group, bool gated) {
  QuantizeArgs a = {};
  read_weight(a, weight, group > 64 ? group : 64, gated, "quantize: weight");
  a.group = group;
  return a;
}

}  // namespace

Tensor pack(const Tensor& weight, ScalarType dtype, bool gated) {
  PackArgs a = {};
  read_weight(a, weight, 32, gated, "pack: weight");
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16,
                  "pack: dtype must be float32 or bfloat16");
  a.to = dtype == ScalarType::Float ? DType::f32 : DType::bf16;
  const int64_t v = dtype == ScalarType::Float ? 1 : 2;
  Tensor panels = new_panels(weight, count_panels(a), a.padded_k / v, 16, v, dtype);
  a.panels = panels.data_ptr();
  kernels().pack(a);
  return panels;
}

std::tuple<Tensor, Tensor> quantize_int8(const Tensor& weight, bool gated) {
  QuantizeArgs a = quantize_args(weight, 0, gated);
  const int64_t panels = count_panels(a);
  Tensor q = new_panels(weight, panels, a.padded_k / 4, 16, 4, ScalarType::Char);
  Tensor scale = torch::stable::new_empty(weight, {panels, 1, 16}, ScalarType::Float);
  a.panels = q.data_ptr();
  a.scale = scale.data_ptr();
  kernels().quantize(a);
  return {q, scale};
}

std::tuple<Tensor, Tensor, Tensor> quantize_int4(const Tensor& weight, int64_t group,
                                                 bool symmetric, bool gated) {
  STD_TORCH_CHECK(group == 32 || group == 64 || group == 128, "quantize_int4: group ", group,
                  " isn't 32, 64 or 128");
  QuantizeArgs a = quantize_args(weight, group, gated);
  const int64_t panels = count_panels(a), groups = a.padded_k / group;
  Tensor q = new_panels(weight, panels, a.padded_k / 8, 16, 4, ScalarType::Byte);
  Tensor scale = torch::stable::new_empty(weight, {panels, groups, 16}, ScalarType::Half);
  Tensor zero = torch::stable::new_empty(weight, {symmetric ? 0 : panels, groups, 16},
                                         ScalarType::Byte);
  a.symmetric = symmetric;
  a.panels = q.data_ptr();
  a.scale = scale.data_ptr();
  a.zero = static_cast<uint8_t*>(zero.data_ptr());
  kernels().quantize(a);
  return {q, scale, zero};
}

Tensor pack_records(const Tensor& blocks, int64_t bits, bool gated) {
  PackRecordsArgs a = {};
  STD_TORCH_CHECK(bits == 0 || (bits >= 4 && bits <= 6), "pack_records: K-quants of ", bits,
                  " bits aren't built; those of 4, 5 and 6, or mixed (0), are");
  a.kind = bits == 0 ? Weight::mixed_k : record_kind(bits);
  const int64_t size = block_bytes(a.kind);
  STD_TORCH_CHECK(blocks.scalar_type() == ScalarType::Byte && blocks.dim() == 2 &&
                      blocks.is_contiguous() && blocks.size(1) % size == 0,
                  "pack_records: blocks must be contiguous uint8 [N, blocks of ", size, " bytes]");
  STD_TORCH_CHECK(!gated || blocks.size(0) % 2 == 0, "pack_records: a gate's matrix has two halves, "
                  "this one ", blocks.size(0), " rows");
  a.n = gated ? blocks.size(0) / 2 : blocks.size(0);
  a.records = blocks.size(1) / size;
  a.gated = gated;
  a.threads = threads();
  const int64_t panels = (a.n + 15) / 16 * (gated ? 2 : 1), lines = record_lines(a.kind);
  Tensor made = new_panels(blocks, panels, a.records, lines, 64, ScalarType::Byte, lines * 64);
  a.blocks = static_cast<const uint8_t*>(blocks.data_ptr());
  a.panels = static_cast<uint8_t*>(made.data_ptr());
  pack_records(a);
  return made;
}

Tensor rotate(const Tensor& x) {
  PackArgs a = {};
  read_weight(a, x, 64, false, "rotate: x");
  Tensor made = torch::stable::new_empty(x, {a.n, a.padded_k}, ScalarType::Float);
  a.panels = made.data_ptr();
  if (a.n > 0) kernels().rotate(a);
  return made;
}

}  // namespace penstock::shim

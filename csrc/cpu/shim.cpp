// Binds the torch-free core to torch's dispatcher through the stable ABI: one library for every
// Python and every torch ≥ 2.11.
#include "shim.h"

#include <torch/csrc/stable/library.h>

using namespace penstock::shim;

STABLE_TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("linear_add_", TORCH_BOX(&linear_add_));
  m.impl("embedding", TORCH_BOX(&embedding));
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("layer_norm", TORCH_BOX(&layer_norm));
  m.impl("add_", TORCH_BOX(&add_));
  m.impl("softcap_", TORCH_BOX(&softcap_));
  m.impl("gate_rows_", TORCH_BOX(&gate_rows_));
  m.impl("alternate", TORCH_BOX(&alternate));
  m.impl("gate", TORCH_BOX(&gate));
  m.impl("lora_add_", TORCH_BOX(&lora_add_));
  m.impl("experts", TORCH_BOX(&experts));
  m.impl("rotary_cache", TORCH_BOX(&rotary_cache));
  m.impl("paged_attention", TORCH_BOX(&paged_attention));
  m.impl("mla_query", TORCH_BOX(&mla_query));
  m.impl("mla_cache", TORCH_BOX(&mla_cache));
  m.impl("mla_attention", TORCH_BOX(&mla_attention));
  m.impl("head_linear", TORCH_BOX(&head_linear));
  m.impl("argmax", TORCH_BOX(&argmax));
  m.impl("mask_", TORCH_BOX(&mask_));
  m.impl("top_k", TORCH_BOX(&top_k));
  m.impl("softmax_top_k", TORCH_BOX(&softmax_top_k));
  m.impl("scaled_top_k", TORCH_BOX(&scaled_top_k));
  m.impl("draw_nucleus", TORCH_BOX(&draw_nucleus));
  m.impl("draw_plain", TORCH_BOX(&draw_plain));
  m.impl("draw_from", TORCH_BOX(&draw_from));
  m.impl("uniforms", TORCH_BOX(&uniforms));
  m.impl("pack", TORCH_BOX(&pack));
  m.impl("quantize_int8", TORCH_BOX(&quantize_int8));
  m.impl("quantize_int4", TORCH_BOX(&quantize_int4));
  m.impl("pack_records", TORCH_BOX(&pack_records));
  m.impl("rotate", TORCH_BOX(&rotate));
}

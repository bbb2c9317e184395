"""Models that see as two GGUF files, made with the `gguf` package as llama.cpp's converters do.

Towers' names come from the package's own table (for LLaVA's, whose converter is older, from here),
metadata is written by its writer's methods.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_writing import Choose, quantize, write_model
from safetensors.torch import load_file
from tests.models.seeing import IMAGE, SeeingModel
from torch import Tensor

KINDS = {
    "idefics3": "idefics3",
    "smolvlm": "idefics3",
    "llava": "mlp",
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "qwen3_5": "qwen3vl_merger",
    "qwen3_5_moe": "qwen3vl_merger",
    "internvl": "internvl",
    "lfm2_vl": "lfm2",
    "gemma3": "gemma3",
}
"""Types of projectors by the model type of the whole."""
TOKENS = dict.fromkeys(KINDS.values(), "<image>") | {"internvl": "<IMG_CONTEXT>"}
TOKENS["gemma3"] = "<start_of_image>"
TOKENS |= {kind: "<|image_pad|>" for kind in TOKENS if "merger" in kind}
"""What stands for a row of a picture."""
LANGUAGES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "qwen2_vl_text": "Qwen2VLText",
    "qwen2_5_vl_text": "Qwen2VLText",
    "qwen3_vl_text": "Qwen3VLText",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
}
CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
HALF = ([0.5] * 3, [0.5] * 3)

Piece = tuple[str, Tensor]
"""A tensor's name in a file, and its values."""
Restore = Callable[[list[Tensor]], Tensor]


def whole(kind: Kind) -> Choose:
    """Matrices in one type, as far as its blocks fill rows; what converters keep in F32 in that."""

    def choose(name: str, values: Any) -> Kind:
        if values.ndim == 1 or "position_embd" in name or "class_embd" in name:
            return Kind.F32
        if kind is Kind.Q8_0 and (values.shape[-1] % 32 or values.ndim != 2):
            return Kind.F16
        return kind

    return choose


def write_pair(
    made: SeeingModel, folder: Path, choose: Choose, **more: Any
) -> tuple[Path, Path, dict[str, Tensor]]:
    """(language model, projector, tensors of a checkpoint as they are after the round trip)."""
    model, mmproj = folder / "model.gguf", folder / "mmproj-model.gguf"
    back = write_language(made, model, choose)
    return model, mmproj, back | write_mmproj(made, mmproj, choose, **more)


def write_language(
    made: SeeingModel, path: Path, choose: Choose, token: str | None = None
) -> dict[str, Tensor]:
    """The text model by itself; the picture's token has this name, or what its family gives it."""
    config = deepcopy(made.reference.config.text_config)
    config.tie_word_embeddings = bool(made.reference.config.tie_word_embeddings)
    config.deep = len(deep_of(made.reference.config.vision_config))
    tensors = {
        re.sub(r"^(model\.)?(text|language)_model\.(model\.)?", "model.", name): tensor
        for name, tensor in made.reference.state_dict().items()
        if "_model.layers" in name or name.endswith(("norm.weight", "embed_tokens.weight"))
    }
    tensors = {n: t for n, t in tensors.items() if not n.startswith(("model.vis", "model.mul"))}
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = made.reference.lm_head.weight.detach()
    kind = type(LANGUAGES[config.model_type], (), {})
    model = kind()
    model.config, model.state_dict = config, lambda: tensors
    name = token or TOKENS[KINDS[made.reference.config.model_type]]

    def vocab(writer: gguf.GGUFWriter, size: int) -> None:
        write_letters(writer, size, made, name)

    return write_model(model, path, choose, vocab=vocab)


def write_letters(writer: gguf.GGUFWriter, size: int, made: SeeingModel, token: str) -> None:
    """The tokenizer of `made`, with a merge that no text has: a file has some."""
    names = json.loads((made.folder / "tokenizer.json").read_text())
    tokens = sorted(names["model"]["vocab"], key=names["model"]["vocab"].get)
    kinds = [1] * len(tokens)
    added = [each["content"] for each in names["added_tokens"]]
    tokens += [token if i == IMAGE else name for i, name in enumerate(added, len(tokens))]
    renamed = {"<soft>": "<image_soft_token>", "<ends>": "<end_of_image>"}
    tokens = [renamed.get(name, name) for name in tokens]
    kinds += [3] * len(added)
    a, b = tokens[-len(added) - 2 : -len(added)]
    tokens.append(a + b)
    kinds.append(1)
    while len(tokens) < size:
        tokens.append(f"[PAD{len(tokens)}]")
        kinds.append(5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([f"{a} {b}"])
    writer.add_eos_token_id(tokens.index("<end>"))
    template = json.loads((made.folder / "tokenizer_config.json").read_text()).get("chat_template")
    file = made.folder / "chat_template.jinja"
    template = template or file.read_text()
    writer.add_chat_template(template.replace("<image>", token))


def deep_of(vision: Any) -> list[int]:
    return list(getattr(vision, "deepstack_visual_indexes", None) or [])


def write_mmproj(
    made: SeeingModel,
    path: Path,
    choose: Choose,
    *,
    swapped: bool = True,
    left_out: str | None = None,
    **changes: Any,
) -> dict[str, Tensor]:
    """A tower and its projector. swapped: LLaVA's names of up and down, as its converter has them.

    left_out: a tensor by its name in the file. changes: of metadata by whole keys; None leaves one
    out.
    """
    config = made.reference.config
    kind = KINDS[config.model_type]
    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    _write_facts(writer, made, kind)
    for key, value in changes.items():
        for shard in writer.kv_data:
            shard.pop(key, None)
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    back = {}
    for name, tensor in load_file(made.folder / "model.safetensors").items():
        if kind == "mlp":
            pieces, restore = _of_llava(made, name, tensor, swapped)
        else:
            pieces, restore = _pieces(made, kind, name, tensor)
        stored = []
        for there, part in pieces:
            values = part.float().contiguous().numpy()
            if there == left_out:
                continue
            chosen = choose(there, values)
            data = quantize(values, chosen)
            writer.add_tensor(there, data, raw_dtype=chosen)
            found = gguf.quants.dequantize(data, chosen).copy()
            stored.append(torch.from_numpy(found).view(values.shape))
        if len(stored) == len(pieces) > 0:
            back[name] = restore(stored).reshape(tensor.shape).contiguous()
        elif "visual" in name or "vision" in name:
            back[name] = tensor  # of layers that aren't computed
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return back


def _write_facts(writer: gguf.GGUFWriter, made: SeeingModel, kind: str) -> None:
    config = made.reference.config
    c = config.vision_config
    own = json.loads((made.folder / "preprocessor_config.json").read_text())
    clip = kind == "internvl" or getattr(c, "model_type", "") == "clip_vision_model"
    mean, std = CLIP if clip or kind in ("qwen2vl_merger", "qwen2.5vl_merger") else HALF
    side, patch = (_one(getattr(c, key, 0)) for key in ("image_size", "patch_size"))
    layers = getattr(c, "depth", None) or c.num_hidden_layers
    if kind == "mlp":
        layers += config.vision_feature_layer + 1 if config.vision_feature_layer < 0 else 0
        writer.add_bool("clip.has_text_encoder", False)
        writer.add_bool("clip.has_llava_projector", True)
        writer.add_array("clip.vision.feature_layer", [layers])
    if kind == "lfm2":
        side = 256
    if "merger" in kind:
        side = 560
    hidden = getattr(c, "embed_dim", None) or c.hidden_size
    inner = getattr(c, "intermediate_size", None) or c.hidden_size  # Qwen2-VL's, a converter's slip
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(768 if kind == "mlp" else config.text_config.hidden_size)
    writer.add_vision_image_size(side)
    writer.add_vision_patch_size(patch)
    writer.add_vision_embedding_length(hidden)
    writer.add_vision_feed_forward_length(inner)
    writer.add_vision_block_count(layers)
    writer.add_vision_head_count(getattr(c, "num_heads", None) or c.num_attention_heads)
    writer.add_vision_image_mean(mean)
    writer.add_vision_image_std(std)
    writer.add_clip_projector_type(kind)
    epsilon = 1e-6 if "merger" in kind else c.layer_norm_eps
    writer.add_vision_attention_layernorm_eps(epsilon)
    if kind == "gemma3":
        fold = side // patch // int(config.mm_tokens_per_image**0.5)
        if fold != 4:
            writer.add_vision_projector_scale_factor(fold)
    if kind in ("idefics3", "internvl", "lfm2", "qwen3vl_merger", "gemma3"):
        writer.add_vision_use_gelu(True)
    if kind == "mlp":
        writer.add_vision_use_gelu(c.hidden_act == "gelu")
    if kind == "idefics3":
        writer.add_vision_projector_scale_factor(config.scale_factor)
        writer.add_vision_preproc_image_size(own["size"]["longest_edge"])
    if kind == "internvl":
        writer.add_vision_projector_scale_factor(int(1.0 / config.downsample_ratio))
        writer.add_vision_preproc_min_tiles(1)
        writer.add_vision_preproc_max_tiles(own["max_patches"])
    if kind == "lfm2":
        writer.add_vision_projector_scale_factor(config.downsample_factor)
    if kind == "qwen2.5vl_merger":
        writer.add_vision_use_silu(True)
        writer.add_vision_n_wa_pattern(c.fullatt_block_indexes[0] + 1)
        writer.add_vision_window_size(c.window_size)
    if kind == "qwen3vl_merger":
        writer.add_vision_spatial_merge_size(c.spatial_merge_size)
        writer.add_vision_is_deepstack_layers([i in deep_of(c) for i in range(layers)])


def _one(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)


def _first(parts: list[Tensor]) -> Tensor:
    return parts[0]


def _pieces(made: SeeingModel, kind: str, name: str, tensor: Tensor) -> tuple[list[Piece], Restore]:
    """What a converter makes of a checkpoint's tensor, and how a reader undoes it."""
    c = made.reference.config.vision_config
    name = re.sub(r"^model\.(visual|vision_tower|multi_modal)", r"\1", name)
    seen = ("visual.", "vision_tower.", "multi_modal_projector.", "model.vision_model.")
    if not name.startswith((*seen, "model.connector.")) or ".head." in name:
        return [], _first
    if kind == "internvl":
        name = _of_intern(name)
    if kind == "gemma3" and "soft_emb_norm" in name:
        return [(_mapped(name), tensor + 1)], lambda parts: parts[0] - 1
    if kind == "gemma3":
        name = name.replace("_weight", ".weight")
    if kind in ("lfm2", "gemma3"):
        name = re.sub(r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name)
    if kind in ("qwen2vl_merger", "qwen2.5vl_merger") and ".qkv." in name:
        each = [name.replace("qkv", x) for x in "qkv"]
        return [(_mapped(n), t) for n, t in zip(each, tensor.chunk(3), strict=True)], torch.cat
    if name == "visual.patch_embed.proj.weight":
        frames = [tensor[:, :, i].contiguous() for i in range(2)]
        names = "v.patch_embd.weight", "v.patch_embd.weight.1"
        return list(zip(names, frames, strict=True)), lambda parts: torch.stack(parts, 2)
    if kind == "lfm2" and "patch_embedding.weight" in name:
        size = c.patch_size
        changed = tensor.view(-1, size, size, 3).permute(0, 3, 1, 2)
        return [(_mapped(name), changed)], lambda parts: parts[0].permute(0, 2, 3, 1).flatten(1)
    match = re.fullmatch(r"visual\.deepstack_merger_list\.(\d+)\.(linear_)?(\w+)\.(\w+)", name)
    if match:
        layer = deep_of(c)[int(match[1])]
        return [(f"v.deepstack.{layer}.{match[3]}.{match[4]}", tensor)], _first
    if kind == "qwen3vl_merger":
        name = name.replace("merger.linear_fc1", "merger.mlp.0")
        name = name.replace("merger.linear_fc2", "merger.mlp.2").replace(
            "merger.norm", "merger.ln_q"
        )
    return [(_mapped(name), tensor)], _first


def _of_intern(name: str) -> str:
    if not name.startswith("multi_modal"):
        name = f"model.{name}"
    for theirs, ours in (("layer_norm", "0"), ("linear_1", "1"), ("linear_2", "3")):
        name = name.replace(f"multi_modal_projector.{theirs}", f"mlp1.{ours}")
    bare = ".lambda_" in name or "position_embedding" in name
    return f"{name}.weight" if bare else name


def _mapped(name: str) -> str:
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 32)
    found = table.get_name(name, (".weight", ".bias"))
    assert found is not None, name
    return str(found)


def _of_llava(
    made: SeeingModel, name: str, tensor: Tensor, swapped: bool
) -> tuple[list[Piece], Restore]:
    """As its first and only converter has it: what isn't computed is left out."""
    up, down = ("ffn_down", "ffn_up") if swapped else ("ffn_up", "ffn_down")
    layer = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.out_proj": "attn_out", "layer_norm1": "ln1", "layer_norm2": "ln2",
        "mlp.fc1": up, "mlp.fc2": down,
    }  # fmt: skip
    outer = {
        "multi_modal_projector.linear_1": "mm.0", "multi_modal_projector.linear_2": "mm.2",
        "vision_tower.embeddings.class_embedding": "v.class_embd",
        "vision_tower.embeddings.patch_embedding": "v.patch_embd",
        "vision_tower.embeddings.position_embedding": "v.position_embd",
        "vision_tower.pre_layrnorm": "v.pre_ln",
    }  # fmt: skip
    config = made.reference.config
    match = re.fullmatch(r"vision_tower\.encoder\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if match:
        last = config.vision_config.num_hidden_layers
        last += config.vision_feature_layer + 1 if config.vision_feature_layer < 0 else 0
        if int(match[1]) >= last:
            return [], _first
        return [(f"v.blk.{match[1]}.{layer[match[2]]}.{match[3]}", tensor)], _first
    stem, _, last_part = name.rpartition(".")
    if name in outer:
        return [(outer[name], tensor)], _first
    if stem in outer:
        return [(f"{outer[stem]}.{last_part}", tensor)], _first
    return [], _first

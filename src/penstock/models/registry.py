"""Architectures by name, and from a checkpoint's folder to a loaded model."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.errors import ModelNotFoundError, UnsupportedModelError, kind_of, nearest
from penstock.models.computable import check_spec
from penstock.models.config_reader import ConfigReader
from penstock.models.gguf.config import read_gguf_config
from penstock.models.gguf.container import is_gguf, read_container
from penstock.models.low_rank import with_rank
from penstock.models.plugins import left_out, load_plugins
from penstock.models.spec import ModelSpec

Reader = Callable[[ConfigReader], ModelSpec]

_FAMILIES = (
    "afmoe",
    "arcee",
    "bamba",
    "cohere",
    "cohere2_moe",
    "cwm",
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5",
    "exaone4",
    "exaone_moe",
    "falcon",
    "falcon_h1",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma4",
    "glm4",
    "glm4_moe",
    "gpt2",
    "gpt_neox",
    "gpt_oss",
    "gptj",
    "granite",
    "granite_moe",
    "granite_swa",
    "helium",
    "hunyuan",
    "idefics3",
    "internvl",
    "lfm2",
    "lfm2_vl",
    "llama",
    "llava",
    "mellum",
    "minimax_m2",
    "mistral",
    "mistral3",
    "mixtral",
    "nanochat",
    "nemotron",
    "nemotron_h",
    "olmo",
    "olmo2",
    "olmo_hybrid",
    "olmoe",
    "phi",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen2_vl",
    "qwen3",
    "qwen3_5",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_vl",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
    "youtu",
)
_readers: dict[str, Reader] = {}

_MODEL_TYPES = {
    "afmoe": "AfmoeForCausalLM",
    "arcee": "ArceeForCausalLM",
    "bamba": "BambaForCausalLM",
    "codegen": "CodeGenForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "cohere2_moe": "Cohere2MoeForCausalLM",
    "cwm": "CwmForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "falcon": "FalconForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gptj": "GPTJForCausalLM",
    "granite": "GraniteForCausalLM",
    "granite_swa": "GraniteSWAForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoe_swa": "GraniteMoeSWAForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "helium": "HeliumForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "idefics3": "Idefics3ForConditionalGeneration",
    "internvl": "InternVLForConditionalGeneration",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "lfm2_vl": "Lfm2VlForConditionalGeneration",
    "llama": "LlamaForCausalLM",
    "llava": "LlavaForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "mellum": "MellumForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "mixtral": "MixtralForCausalLM",
    "nanochat": "NanoChatForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "smolvlm": "SmolVLMForConditionalGeneration",
    "solar_open": "SolarOpenForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "vaultgemma": "VaultGemmaForCausalLM",
    "youtu": "YoutuForCausalLM",
}
"""What a config without `architectures` describes, by its `model_type`."""


def register(*architectures: str) -> Callable[[Reader], Reader]:
    """Make the decorated function the reader of these `architectures`."""

    def add(reader: Reader) -> Reader:
        for name in architectures:
            if _readers.setdefault(name, reader) is not reader:
                raise UnsupportedModelError(
                    f"{name} is read by {_readers[name].__module__} already: another reader would "
                    "never be called."
                )
        return reader

    return add


ADAPTER = "adapter_config.json"
"""What a folder has that PEFT wrote."""


def architectures() -> list[str]:
    """Every architecture that can be loaded, sorted; those that plugins bring among them."""
    for family in _FAMILIES:
        importlib.import_module(f"penstock.models.{family}")
    load_plugins()
    return sorted(_readers)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file of a checkpoint."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if (file.parent / ADAPTER).is_file():
            raise ModelNotFoundError(
                f"{file.parent} is an adapter, which needs its model: penstock export MODEL -o "
                f"FOLDER --merge-lora {file.parent}"
            ) from error
        raise ModelNotFoundError(
            f"{file.parent} has no {file.name}, so it isn't a model. Give a folder with that and "
            "safetensors, a .gguf file, or an embedded model's name."
        ) from error
    except (ValueError, RecursionError, OSError) as error:  # too many digits, nested too deep
        raise UnsupportedModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise UnsupportedModelError(f"{file} holds {kind_of(data)}, not an object.")
    return data


def read_config(path: Path) -> dict[str, Any]:
    """The config of the checkpoint in `path`, a folder or a GGUF file."""
    if is_gguf(path):
        return read_gguf_config(read_container(path))
    return read_json(path / "config.json")


def check_blind(path: Path, what: str, mmproj: Path | None = None) -> None:
    """Raises UnsupportedModelError for a model that sees pictures; what: isn't built for those.
    mmproj: the file that one in GGUF sees through.
    """
    if mmproj is not None or read_config(path).get("vision_config"):
        raise UnsupportedModelError(
            f"{path} sees pictures, and {what} isn't built for such models. Run the checkpoint "
            "itself; quantization=… rounds its decoder's weights as they are read."
        )


def read_spec(path: Path, *, strict: bool = False) -> ModelSpec:
    """The `ModelSpec` of the checkpoint in `path`.

    strict: a config key that nothing reads is an error instead of a warning.
    """
    return spec_of(read_config(path), str(path), strict=strict)


def read_part(
    c: ConfigReader,
    key: str,
    known: tuple[str, ...],
    *,
    unused: tuple[str, ...] = (),
    **defaults: Any,
) -> ModelSpec:
    """The text model that the object `key` of a config describes, one of the model types `known`.

    unused: keys that change nothing. defaults: the kind's own of keys that are absent, as published
    configs leave them out.
    """
    part = c.part(key)
    for name in unused:
        part.get(name)
    kind = part.only("model_type", known, known[0])
    part.assume(**defaults)
    name = _MODEL_TYPES[kind]
    architectures()
    return _readers[name](part)


def _check_kind(kind: Any, name: str, where: str) -> None:
    """Warn of a `model_type` that is another architecture's."""
    of_kind = _MODEL_TYPES.get(kind, name) if isinstance(kind, str) else name
    if of_kind != name:
        warnings.warn(
            f"{where}: its config.json says architectures={name}, but model_type={kind!r}, which "
            f"is {of_kind}'s. It is read as {name}; if it is the other one, its output is wrong.",
            UserWarning,
            stacklevel=3,
        )


def spec_of(config: dict[str, Any], where: str, *, strict: bool = False) -> ModelSpec:
    """What `config`, found in `where`, describes."""
    known = architectures()
    names = config.get("architectures") or []
    if not isinstance(names, list):
        raise UnsupportedModelError(f"{where}: architectures must be a list of names: {names!r}")
    names = names or [
        name for kind, name in _MODEL_TYPES.items() if kind == config.get("model_type")
    ]
    for name in names:
        if isinstance(name, str) and name in _readers:
            _check_kind(config.get("model_type"), name, where)
            reader = ConfigReader(config)
            try:
                spec = with_rank(_readers[name](reader), reader)
            except ArithmeticError as error:
                raise UnsupportedModelError(
                    f"{where}: a number of config.json is too large or too small to compute with: "
                    f"{error}."
                ) from error
            reader.refuse_unbuilt()
            check_spec(spec, where)
            reader.finish(strict=strict)
            return spec
    if not names and config.get("model_type") is None:
        raise UnsupportedModelError(
            f"{where}: its config.json names neither architectures nor a model_type, so nobody "
            "knows what it holds."
        )
    wanted = names[0] if names else f"model_type {config.get('model_type')!r}"
    raise UnsupportedModelError(
        f"{where} holds {wanted}, which isn't built.{nearest(str(wanted), known)} "
        f"Built: {', '.join(known)}. Packages may bring others (docs/plugins.md){left_out()}."
    )

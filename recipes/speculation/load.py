"""From a folder that a recipe wrote back to a guesser, to measure what is stored."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from penstock.errors import ConfigError
from recipes.speculation import medusa
from recipes.speculation.draft import Draft
from recipes.speculation.eagle import Eagle
from recipes.speculation.eagle3 import Eagle3
from recipes.speculation.guesser import Guesser
from recipes.speculation.target import Target


def load_guesser(folder: Path, target: Target) -> Guesser:
    """The guesser in `folder`, in float32. Which kind it is, its files say."""
    name = medusa.WEIGHTS if (folder / medusa.WEIGHTS).exists() else "model.safetensors"
    for wanted in ("config.json", name):
        if not (folder / wanted).is_file():
            raise ConfigError(
                f"{folder} has no {wanted}: give a folder that this recipe has written."
            )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = {
        name: tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in load_file(folder / name).items()
        if name != "embed_tokens.weight"  # the target's
    }
    try:
        return _load(config, tensors, target).to(target.device)
    except (RuntimeError, KeyError) as error:
        raise ConfigError(
            f"{folder} doesn't hold what guesses for {target.folder}: {error}"
        ) from error


def _load(config: dict[str, Any], tensors: dict[str, Tensor], target: Target) -> Guesser:
    found: Guesser
    if "medusa_num_heads" in config:
        blocks = config["medusa_num_layers"]
        shared = config.get("medusa_shared_lm_head", False)
        found = medusa.Medusa(target, config["medusa_num_heads"], blocks, shared_head=shared)
        found.load_state_dict({_of_medusa(name, blocks): t for name, t in tensors.items()})
        return found
    if "d2t" in tensors:
        counts = torch.zeros(target.vocab_size)
        found = Eagle3(
            target,
            counts,
            draft_vocab_size=config["draft_vocab_size"],
            layers=config["eagle_aux_hidden_state_layer_ids"],
            intermediate_size=config["intermediate_size"],
        )
    elif "fc.weight" in tensors:
        found = Eagle(
            target, intermediate_size=config["intermediate_size"], fc_bias="fc.bias" in tensors
        )
    else:
        found = Draft(
            target,
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            intermediate_size=config["intermediate_size"],
        )
        tensors = {f"model.{name}": tensor for name, tensor in tensors.items()}
        if config.get("tie_word_embeddings"):
            tensors["model.lm_head.weight"] = tensors["model.model.embed_tokens.weight"]
    found.load_state_dict(tensors)
    return found


def _of_medusa(name: str, blocks: int) -> str:
    head, rest = name.split(".", 1)
    return f"lm_heads.{head}" if rest == f"{blocks}.weight" else f"heads.{head}.{rest}"

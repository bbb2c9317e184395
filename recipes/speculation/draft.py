"""A small model of the target's family that learns what the target would say.

Source: Hinton et al. 2015, arXiv:1503.02531, at temperature 1: a draft is to agree with what the
target samples. As a draft for speculation: Leviathan et al. 2023, arXiv:2211.17192.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.errors import ConfigError
from recipes.speculation.guesser import Guesser, write_folder
from recipes.speculation.target import Seen, Target

KL_SHARE = 0.9  # of the loss; the rest is cross-entropy with the text's own tokens
WEIGHTS = "model.safetensors"
BESIDE = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip
"""What of the target's folder a draft's has too, where it is there."""


class Draft(Guesser):
    """A model with the target's config.json but for its dimensions."""

    def __init__(
        self,
        target: Target,
        *,
        hidden_size: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        intermediate_size: int = 256,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if hidden_size % num_heads or num_heads % num_kv_heads:
            raise ConfigError(
                f"hidden size {hidden_size} must be a multiple of {num_heads} heads, and these of "
                f"{num_kv_heads} key heads."
            )
        self.target = (target,)
        self.changes: dict[str, Any] = {
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": hidden_size // num_heads,
        }
        saved = target.saved_config()
        missing = [key for key in self.changes if key not in saved and key != "head_dim"]
        if missing:
            raise ConfigError(
                f"config.json of {target.folder} has no {', '.join(missing)}: this recipe changes "
                "the dimensions of models whose configuration says them in a Llama's words."
            )
        if saved.get("layer_types"):
            self.changes["layer_types"] = saved["layer_types"][:num_layers]
        config = AutoConfig.from_pretrained(target.folder)
        for key, value in self.changes.items():
            setattr(config, key, value)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        self._begin_with(target)

    @torch.no_grad()
    def _begin_with(self, target: Target) -> None:
        """The target's tables in as many dimensions as keep most of them."""
        tables = [(self.model.get_input_embeddings().weight, target.embedding)]
        if self.model.get_output_embeddings().weight is not tables[0][0]:
            tables.append((self.model.get_output_embeddings().weight, target.head))
        for own, full in tables:
            # the largest eigenvectors of EᵀE: E's principal directions
            _, directions = torch.linalg.eigh(full.T @ full)
            if own.shape[1] <= full.shape[1]:
                own.copy_(full @ directions[:, -own.shape[1] :])

    def logits(self, tokens: Tensor) -> Tensor:
        """[B, T, V]."""
        found: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return found

    def loss(self, seen: Seen, weights: Tensor) -> Tensor:
        found = self.logits(seen.tokens[:, :-1]).float().log_softmax(-1)
        true = seen.logits[:, :-1].float().log_softmax(-1)
        divergence = (true.exp() * (true - found)).sum(-1)
        chosen = F.nll_loss(found.mT, seen.tokens[:, 1:], reduction="none")
        return ((KL_SHARE * divergence + (1 - KL_SHARE) * chosen) * weights).sum()

    def guesses(self, seen: Seen, depth: int) -> Iterator[Tensor]:
        logits = self.logits(seen.tokens)
        for d in range(min(depth, seen.tokens.shape[1] - 2)):
            yield logits[:, 1 + d : -1]

    def save(self, folder: Path) -> None:
        target = self.target[0]
        saved = target.saved_config()
        dtype = "dtype" if "dtype" in saved else "torch_dtype"
        tied = saved.get("tie_word_embeddings", False)
        tensors = {
            name: tensor
            for name, tensor in self.model.state_dict().items()
            if not (tied and name == "lm_head.weight")
        }
        folder.mkdir(parents=True, exist_ok=True)
        for name in BESIDE:
            if (target.folder / name).exists():
                shutil.copyfile(target.folder / name, folder / name)
        write_folder(folder, saved | self.changes | {dtype: "bfloat16"}, tensors, WEIGHTS)

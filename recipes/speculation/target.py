"""The model that is guessed for: loaded by transformers, frozen, and what of it guessers read."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging

from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Seen:
    """What the target makes of rows of tokens, in float32 where it is computed in float32.

    Row t of `features`, `streams` and `logits` has seen tokens 0 to t.
    """

    tokens: Tensor  # [B, T] int64
    features: Tensor  # [B, T, D]: the last hidden state, after the final norm
    streams: Tensor | None  # [B, T, n · D]: inputs of the layers that were asked for
    logits: Tensor  # [B, T, V]


def load_config(folder: Path) -> Any:
    """The configuration of the model in a folder: read at once, unlike its weights."""
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} has no config.json: --model takes a folder with config.json, "
            "model.safetensors and tokenizer.json, as Hugging Face's transformers writes it."
        )
    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError(f"transformers can't read the model in {folder}: {error}") from error


class Target:
    """A causal language model from a folder in Hugging Face's layout, and its tokenizer."""

    def __init__(self, folder: Path, device: torch.device | None = None) -> None:
        self.folder = folder
        self.device = device or torch.device("cpu")
        self.config = load_config(folder)
        logging.disable_progress_bar()
        try:
            self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise ConfigError(f"transformers can't read the model in {folder}: {error}") from error
        self.model = model.eval().requires_grad_(False).to(self.device)
        self._check_head()

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.head.shape[0])

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def context(self) -> int:
        """Tokens that the model was made for."""
        return int(self.config.max_position_embeddings)

    @property
    def head(self) -> Tensor:
        """[V, D]: what turns a feature into logits; a tied model's is its embedding."""
        found: Tensor = self.model.get_output_embeddings().weight
        return found

    @property
    def embedding(self) -> Tensor:
        """[V, D]."""
        found: Tensor = self.model.get_input_embeddings().weight
        return found

    def num_weights(self) -> int:
        """Weights, a tied head counted once."""
        return sum(weight.numel() for weight in self.model.parameters())

    def saved_config(self) -> dict[str, Any]:
        """config.json as it stands in the folder."""
        found: dict[str, Any] = json.loads(
            (self.folder / "config.json").read_text(encoding="utf-8")
        )
        return found

    @torch.no_grad()
    def look(self, tokens: Tensor, stream_ids: Sequence[int] = ()) -> Seen:
        """Run the model over rows of tokens [B, T], each from its own start.

        stream_ids: layers whose inputs (the residual stream) are wanted; 0 is the embedding.
        """
        found = self.model.base_model(
            input_ids=tokens, output_hidden_states=bool(stream_ids), use_cache=False
        )
        features = found.last_hidden_state
        streams = None
        if stream_ids:
            streams = torch.cat([found.hidden_states[i] for i in stream_ids], -1)
        return Seen(tokens, features, streams, nn.functional.linear(features, self.head))

    @torch.no_grad()
    def _check_head(self) -> None:
        """Guessers take the head for a matrix: no bias, scale or cap behind it."""
        head = self.model.get_output_embeddings()
        if head is None or not isinstance(getattr(head, "weight", None), Tensor):
            raise ConfigError(
                f"The model in {self.folder} ({type(self.model).__name__}) has no output head, "
                "neither tied nor its own: a causal language model is needed."
            )
        tokens = torch.arange(4, device=self.device)[None] % self.head.shape[0]
        logits = self.model(input_ids=tokens, use_cache=False).logits
        found = self.look(tokens).logits
        if not torch.allclose(logits, found, rtol=1e-4, atol=1e-4):
            raise ConfigError(
                f"The logits of the model in {self.folder} aren't its head times its last hidden "
                f"state (they differ by {float((logits - found).abs().max()):.3g}): heads with a "
                "bias, a scale or a soft cap aren't known here."
            )

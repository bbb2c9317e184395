"""What all that guess have in common: a loss, guesses at every place, a folder."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recipes.model import write_weights
from recipes.speculation.target import Seen


class Guesser(nn.Module, ABC):
    """Guesses tokens from what the target has computed.

    A place is a row t of the target's output: token t + 1 has been chosen from its logits, and
    guess d (from 0) is token t + 2 + d. `stream_ids` names the layers whose inputs it reads.
    """

    stream_ids: Sequence[int] = ()

    @abstractmethod
    def loss(self, seen: Seen, weights: Tensor) -> Tensor:
        """The sum over a batch; weights [B, T - 1] say how much each token but the first counts."""

    @abstractmethod
    def guesses(self, seen: Seen, depth: int) -> Iterator[Tensor]:
        """Logits [B, T - 2 - d, V] of guess d, for d = 0 … depth - 1, at places 0 … T - 3 - d.

        Those of guess d know the text's own tokens up to t + 1 + d, where the guesser reads tokens,
        and of the target nothing that lies beyond place t.
        """

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write a folder that Penstock and others load."""

    def weight_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """(matrices for Muon, everything else)."""
        inner, rest = [], []
        for name, weight in self.named_parameters():
            if weight.requires_grad:
                table = "lm_head" in name or "embed" in name
                (inner if weight.dim() == 2 and not table else rest).append(weight)
        return inner, rest

    def num_weights(self) -> int:
        return sum(p.numel() for p in self.parameters() if p.requires_grad)


class _CrossEntropy(torch.autograd.Function):
    """Σ −p log softmax(x), whose gradient softmax(x) − p takes the place of what was kept for it.

    Of a vocabulary each pass counts: of heads over a small model, this is most of the time.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probabilities: Tensor) -> Tensor:
        found = logits.log_softmax(-1, dtype=torch.float32)
        ctx.save_for_backward(found, probabilities)
        ctx.dtype = logits.dtype
        return -torch.linalg.vecdot(probabilities, found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        found, probabilities = ctx.saved_tensors
        wanted = found.exp_().sub_(probabilities).mul_(gradients[0][..., None])
        return wanted.to(ctx.dtype), None


def distribution_loss(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Cross-entropy with a distribution, a number for each row: its least value is its entropy.

    logits [..., V]; probabilities [..., V] in float32, which sum to one. Backward runs once.
    """
    found: Tensor = _CrossEntropy.apply(logits, probabilities)
    return found


def write_folder(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], name: str
) -> None:
    """config.json and the weights, floating-point ones in bfloat16.

    The weights come last and under a temporary name first: a folder that has them is whole.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
    write_weights(tensors, folder / name)

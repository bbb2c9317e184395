"""Medusa heads: each guesses another one of the next tokens, all from the same feature.

Source: Cai et al. 2024, arXiv:2401.10774 (Medusa-1: the model stays as it is). The layout is that
of github.com/FasterDecoding/Medusa: `{head}.{block}.linear.weight`, `.bias`, and
`{head}.{blocks}.weight`, the projection.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.errors import ConfigError
from recipes.speculation.guesser import Guesser, distribution_loss, write_folder
from recipes.speculation.target import Seen, Target

DECAY = 0.8  # each head's loss counts so much of the one's before: λ_k of the paper
WEIGHTS = "medusa_lm_head.safetensors"


class ResBlock(nn.Module):
    """x + silu(W x + b); at the beginning W is zero and b random and small, as in Medusa's code."""

    def __init__(self, size: int, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.uniform_(self.linear.bias, -(size**-0.5), size**-0.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class Medusa(Guesser):
    """Heads over the target's last hidden state.

    shared_head: guesses go through the target's own head, else each has a projection of its own.
    text_labels: learn from the text's tokens alone, as the paper does; else from the distributions
    that the target gives them, which say more for the same text.
    """

    def __init__(
        self,
        target: Target,
        num_heads: int = 4,
        num_layers: int = 1,
        *,
        shared_head: bool = False,
        text_labels: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if num_heads < 1 or num_layers < 0 or (shared_head and num_layers < 1):
            raise ConfigError(
                f"{num_heads} heads of {num_layers} blocks guess nothing: there must be at least "
                "one head, and with the target's own head (--shared-head) at least one block."
            )
        self.target, self.shared_head, self.text_labels = (target,), shared_head, text_labels
        self.num_layers = num_layers
        size, generator = target.hidden_size, torch.Generator().manual_seed(seed)
        self.heads = nn.ModuleList(
            nn.Sequential(*(ResBlock(size, generator) for _ in range(num_layers)))
            for _ in range(num_heads)
        )
        self.lm_heads = nn.ParameterList(
            [] if shared_head else [target.head.detach().clone() for _ in range(num_heads)]
        )

    def loss(self, seen: Seen, weights: Tensor) -> Tensor:
        total = weights.new_zeros(())
        wanted = None if self.text_labels else seen.logits.float().softmax(-1)
        for d, logits in enumerate(self.guesses(seen, min(len(self.heads), seen.tokens.shape[1]))):
            if wanted is None:
                labels = seen.tokens[:, 2 + d :]
                losses = F.cross_entropy(logits.float().mT, labels, reduction="none")
            else:
                losses = distribution_loss(logits, wanted[:, 1 + d : -1])
            total = total + DECAY**d * (losses * weights[:, 1 + d :]).sum()
        return total

    def guesses(self, seen: Seen, depth: int) -> Iterator[Tensor]:
        for d, head in enumerate(self.heads[:depth]):
            places = seen.tokens.shape[1] - 2 - d
            if places < 1:
                return
            projection = self.target[0].head if self.shared_head else self.lm_heads[d]
            yield F.linear(head(seen.features[:, :places]), projection)

    def save(self, folder: Path) -> None:
        target = self.target[0]
        config = {
            "model_type": "medusa",
            "medusa_num_heads": len(self.heads),
            "medusa_num_layers": self.num_layers,
            "base_model_name_or_path": target.folder.name,
            "hidden_size": target.hidden_size,
            "vocab_size": target.vocab_size,
            "medusa_shared_lm_head": self.shared_head,
            "torch_dtype": "bfloat16",
        }
        tensors: dict[str, Tensor] = {}
        for d, head in enumerate(self.heads):
            tensors |= {f"{d}.{name}": tensor for name, tensor in head.state_dict().items()}
            if not self.shared_head:
                tensors[f"{d}.{self.num_layers}.weight"] = self.lm_heads[d]
        write_folder(folder, config, tensors, WEIGHTS)

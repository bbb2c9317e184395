"""EAGLE: one layer that goes on from the target's last feature and guesses the next feature.

Source: Li et al. 2024, arXiv:2401.15077, and for drafts as trees arXiv:2406.16858, which has the
same head. The layout is that of github.com/SafeAILab/EAGLE: `fc.weight` [D, 2D] over the embedding
of token t + 1 and the feature of t, `layers.0.…` without an input_layernorm.
"""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.errors import ConfigError
from recipes.speculation.guesser import Guesser, distribution_loss, write_folder
from recipes.speculation.layer import HeadLayer, Keys, LayerShape, initialise, tables
from recipes.speculation.target import Seen, Target

NOISE = 0.1  # features are moved by up to so much in training: its own are never exact
TOKEN_SHARE = 0.1  # of the cross-entropy, beside the distance of features
WEIGHTS = "model.safetensors"


class Eagle(Guesser):
    """An EAGLE-1 and EAGLE-2 head.

    steps: how often it is fed with its own features in training; 1 is the paper's. More is
    HASS (Zhang et al. 2024, arXiv:2408.15766).
    """

    def __init__(
        self,
        target: Target,
        *,
        intermediate_size: int | None = None,
        fc_bias: bool = False,
        steps: int = 1,
        save_embedding: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if steps < 1:
            raise ConfigError(f"--self-fed must be at least 1, not {steps}.")
        self.target, self.steps, self.save_embedding = (target,), steps, save_embedding
        self.shape = LayerShape.of(target, intermediate_size)
        self.fc = nn.Linear(2 * target.hidden_size, target.hidden_size, bias=fc_bias)
        self.layers = nn.ModuleList([HeadLayer(self.shape)])
        initialise(self, torch.Generator().manual_seed(seed))
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.cos, self.sin = tables(self.shape, 32)

    def features(self, seen: Seen, steps: int, noise: float = 0.0) -> Iterator[Tensor]:
        """Guessed features [B, T - 1 - d, D] of places 1 + d …, step after step."""
        target = self.target[0]
        x = seen.features[:, :-1]
        if noise:
            x = x + torch.empty_like(x).uniform_(-noise, noise)
        past = Keys()
        for d in range(steps):
            length = seen.tokens.shape[1] - 1 - d
            if length < 1:
                return
            embedded = F.embedding(seen.tokens[:, 1 + d :], target.embedding)
            mixed = self.fc(torch.cat((embedded.to(x.dtype), x[:, :length]), -1))
            x = self.layers[0](mixed, (self.cos, self.sin), past)
            yield x

    def loss(self, seen: Seen, weights: Tensor) -> Tensor:
        wanted = seen.logits.float().softmax(-1)
        total = weights.new_zeros(())
        for d, x in enumerate(self.features(seen, self.steps, NOISE if self.training else 0.0)):
            counted = weights[:, d:]
            true = seen.features[:, 1 + d :].float()
            distance = F.smooth_l1_loss(x.float(), true, reduction="none").mean(-1)
            tokens = distribution_loss(F.linear(x, self.target[0].head), wanted[:, 1 + d :])
            total = total + ((distance + TOKEN_SHARE * tokens) * counted).sum()
        return total / self.steps

    def guesses(self, seen: Seen, depth: int) -> Iterator[Tensor]:
        for x in self.features(seen, depth):
            if x.shape[1] > 1:  # the last one guesses what no text is left for
                yield F.linear(x[:, :-1], self.target[0].head)

    def save(self, folder: Path) -> None:
        target = self.target[0]
        config = {
            "architectures": ["LlamaForCausalLM"],
            **self.shape.config(target),
            "bias": self.fc.bias is not None,
        }
        tensors = dict(self.state_dict())
        if self.save_embedding:
            tensors["embed_tokens.weight"] = target.embedding
        write_folder(folder, config, tensors, WEIGHTS)

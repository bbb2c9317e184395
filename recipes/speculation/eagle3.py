"""EAGLE-3: one layer over features of three of the target's layers, with a head of its own.

Source: Li et al. 2025, arXiv:2503.01840. The layout is that of github.com/SafeAILab/EAGLE: `fc`
[D, 3D], `midlayer.…`, `norm`, `lm_head` over a draft vocabulary, `d2t` (what to add to a row's
number for its token) and `t2d` (whether a token has a row). Which states are read stands there
twice: `eagle_aux_hidden_state_layer_ids` names the layers that they enter, as vLLM and speculators
have it, and within `eagle_config` those that they leave, as SpecForge, ModelOpt and SGLang have it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.errors import ConfigError
from recipes.model import RMSNorm
from recipes.speculation.guesser import Guesser, distribution_loss, write_folder
from recipes.speculation.layer import FusingLayer, Keys, LayerShape, initialise, tables
from recipes.speculation.target import Seen, Target

DECAY = 0.8  # each step's loss counts so much of the one's before
WEIGHTS = "model.safetensors"


def stream_layers(num_layers: int) -> tuple[int, int, int]:
    """Layers whose inputs are read: the public choice, or for few layers three far apart."""
    if num_layers < 3:
        raise ConfigError(
            f"EAGLE-3 reads three layers' inputs, and the target has {num_layers} layers: train an "
            "EAGLE head or Medusa heads instead."
        )
    if num_layers < 8:
        return num_layers // 4, num_layers // 2, num_layers - 1
    return 2, num_layers // 2, num_layers - 3


class Eagle3(Guesser):
    """An EAGLE-3 head.

    counts [V]: how often each token stands in the training text; the `draft_vocab_size` most
    frequent ones can be guessed. steps: how often it is fed with its own features in training.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self,
        target: Target,
        counts: Tensor,
        *,
        draft_vocab_size: int | None = None,
        layers: Sequence[int] | None = None,
        intermediate_size: int | None = None,
        steps: int = 4,
        save_embedding: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if steps < 1:
            raise ConfigError(f"--self-fed must be at least 1, not {steps}.")
        self.target, self.steps, self.save_embedding = (target,), steps, save_embedding
        self.stream_ids = _checked(layers or stream_layers(target.num_layers), target)
        self.shape = LayerShape.of(target, intermediate_size)
        size = target.hidden_size
        kept = _most_frequent(counts, draft_vocab_size or target.vocab_size)
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.midlayer = FusingLayer(self.shape)
        self.norm = RMSNorm(size, self.shape.norm_eps)
        initialise(self, torch.Generator().manual_seed(seed))
        self.lm_head = nn.Linear(size, len(kept), bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(target.head[kept])
        mask = torch.zeros(target.vocab_size, dtype=torch.bool)
        mask[kept] = True
        self.register_buffer("d2t", kept - torch.arange(len(kept)))
        self.register_buffer("t2d", mask)
        self.register_buffer("cos", torch.empty(0), persistent=False)
        self.register_buffer("sin", torch.empty(0), persistent=False)
        self.cos, self.sin = tables(self.shape, 32)

    @property
    def kept(self) -> Tensor:
        """The token of each row of the head."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def rows(self, seen: Seen, steps: int) -> Iterator[Tensor]:
        """Logits of the head's rows [B, T - 1 - d, draft vocabulary], step after step."""
        assert seen.streams is not None
        target = self.target[0]
        x = self.fc(seen.streams[:, :-1])
        past = Keys()
        for d in range(steps):
            length = seen.tokens.shape[1] - 1 - d
            if length < 1:
                return
            embedded = F.embedding(seen.tokens[:, 1 + d :], target.embedding)
            x = self.midlayer(embedded, x[:, :length], (self.cos, self.sin), past)
            yield self.lm_head(self.norm(x))

    def loss(self, seen: Seen, weights: Tensor) -> Tensor:
        """Places whose likeliest token can't be guessed count nothing."""
        possible = self.t2d[seen.logits.argmax(-1)].float()
        wanted = seen.logits[..., self.kept].float().softmax(-1)
        total = weights.new_zeros(())
        for d, logits in enumerate(self.rows(seen, self.steps)):
            losses = distribution_loss(logits, wanted[:, 1 + d :])
            total = total + DECAY**d * (losses * possible[:, 1 + d :] * weights[:, d:]).sum()
        return total

    def guesses(self, seen: Seen, depth: int) -> Iterator[Tensor]:
        for rows in self.rows(seen, depth):
            if rows.shape[1] > 1:
                shape = (*rows.shape[:1], rows.shape[1] - 1, self.target[0].vocab_size)
                logits = rows.new_full(shape, -torch.inf)
                logits[..., self.kept] = rows[:, :-1]
                yield logits

    def save(self, folder: Path) -> None:
        target = self.target[0]
        written = {}
        if min(self.stream_ids) > 0:  # what enters the first layer is no layer's output
            written["eagle_aux_hidden_state_layer_ids"] = [i - 1 for i in self.stream_ids]
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            **self.shape.config(target),
            "draft_vocab_size": len(self.d2t),
            "target_hidden_size": target.hidden_size,
            "eagle_aux_hidden_state_layer_ids": list(self.stream_ids),
            "eagle_config": {"use_aux_hidden_state": True, **written},
        }
        tensors = dict(self.state_dict())
        if self.save_embedding:
            tensors["embed_tokens.weight"] = target.embedding
        write_folder(folder, config, tensors, WEIGHTS)


def _checked(layers: Sequence[int], target: Target) -> tuple[int, ...]:
    if len(set(layers)) != 3 or not all(0 <= i < target.num_layers for i in layers):
        raise ConfigError(
            f"EAGLE-3 reads the inputs of three layers from 0 to {target.num_layers - 1}, not "
            f"{', '.join(map(str, layers))}."
        )
    return tuple(sorted(layers))


def _most_frequent(counts: Tensor, size: int) -> Tensor:
    """Ids of the `size` most frequent tokens, in the order of their ids."""
    if not 0 < size <= len(counts):
        raise ConfigError(
            f"--draft-vocab must be between 1 and the target's {len(counts)} tokens, not {size}."
        )
    return counts.argsort(descending=True, stable=True)[:size].sort().values

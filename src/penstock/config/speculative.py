"""How tokens are guessed ahead."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from penstock.config.checks import flags, one_of, positive
from penstock.errors import ConfigError, nearest

SpeculativeMethod = Literal["ngram", "suffix", "draft_model", "self", "medusa", "eagle", "eagle3"]
"""Who guesses; `speculate/` has a file for each."""

_SPECULATION: dict[str, tuple[int | None, set[str]]] = {
    "ngram": (16, {"prompt_lookup_min", "prompt_lookup_max"}),
    "suffix": (
        16,
        {
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_tokens",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        },
    ),
    "draft_model": (8, {"model", "revision", "quantization", "max_model_len"}),
    "self": (6, {"draft_layers"}),
    "medusa": (None, {"model", "revision", "quantization", "tree_width", "tree_tokens"}),
    "eagle": (5, {"model", "revision", "quantization", "tree_width", "tree_tokens"}),
    "eagle3": (5, {"model", "revision", "quantization", "tree_width", "tree_tokens"}),
}
"""Of each method: the default of num_speculative_tokens (None: as many as there are heads), and the
options that it alone reads.
"""

MOST_TREE_TOKENS = 256
"""Of a tree whose size is given, or isn't."""

_MOST = {
    "num_speculative_tokens": 1024,
    "prompt_lookup_min": 1024,
    "prompt_lookup_max": 1024,
    "suffix_decoding_max_tree_depth": 1024,
    "suffix_decoding_max_cached_tokens": 100_000_000,
    "tree_width": 64,
    "tree_tokens": MOST_TREE_TOKENS,
    "suffix_decoding_max_cached_requests": 100_000_000,
    "suffix_decoding_max_spec_factor": 1024,
    "suffix_decoding_min_token_prob": 1,
}
"""What some options may be: beyond it they take time or memory and find nothing more."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How tokens are guessed ahead; vLLM's names where it has them."""

    method: SpeculativeMethod | None = None  # None: draft_model where a model is given
    num_speculative_tokens: int | None = None  # the most one after another; None: the method's own
    model: str | Path | None = None  # that guesses: a draft model, or heads; of the same vocabulary
    revision: str | None = None  # of a model that is fetched from the hub; None: its main branch
    quantization: str | None = None  # of its weights as they are loaded
    max_model_len: int | None = None  # draft_model: tokens of a sequence that it drafts for
    tree_width: int | None = None  # of heads: guesses that may follow one; 1: no trees; None: 4
    tree_tokens: int | None = None  # guesses in a tree; None: twice the depth
    draft_layers: int | None = None  # self: the first so many guess; None: a quarter
    prompt_lookup_min: int | None = None  # ngram: tokens that must match; None: 2
    prompt_lookup_max: int | None = None  # ngram: tokens that are looked at; None: 16
    suffix_decoding_max_tree_depth: int | None = None  # tokens that are looked at; None: 24
    suffix_decoding_max_cached_tokens: int | None = None  # of past outputs; None: 1,000,000
    suffix_decoding_max_cached_requests: int | None = None  # of past outputs; 0: none are kept
    suffix_decoding_max_spec_factor: float | None = None  # guessed for each that matches; None: 1
    suffix_decoding_min_token_prob: float | None = None  # the least of a whole guess; None: 0.1
    disable_by_batch_size: int | None = None  # no drafts where more sequences than that decode
    draft_tensor_parallel_size: int | None = None  # vLLM's; 1 is all there is
    adaptive: bool = True  # drafts are as long as they are predicted to pay, or there are none

    def __post_init__(self) -> None:
        if self.method is None and self.model in ("ngram", "[ngram]"):  # as vLLM takes it
            object.__setattr__(self, "method", "ngram")
            object.__setattr__(self, "model", None)
        if self.method is None:
            if self.model is None:
                raise ConfigError(
                    "A speculative_config needs a method: one of "
                    f"{', '.join(get_args(SpeculativeMethod))}."
                )
            object.__setattr__(self, "method", "draft_model")
        one_of(self, "method", get_args(SpeculativeMethod))
        assert self.method is not None  # checked
        most, own = _SPECULATION[self.method]
        for name in set().union(*(names for _, names in _SPECULATION.values())) - own:
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"method={self.method!r} has no use for {name}={getattr(self, name)!r}. Leave "
                    "it out."
                )
        if not isinstance(self.model, str | Path | None):
            raise ConfigError(f"model must be a folder, a hub id or a name, not {self.model!r}.")
        if self.model is not None and not str(self.model).strip():
            raise ConfigError(
                f"model={self.model!r} names nothing. Give a folder, or leave it out."
            )
        for name in ("revision", "quantization"):
            if not isinstance(getattr(self, name), str | None):
                raise ConfigError(f"{name} must be a name, not {getattr(self, name)!r}.")
        if self.revision is not None and self.model is None:
            raise ConfigError(
                f"revision={self.revision!r} is of no model. Give one, or leave it out."
            )
        if self.num_speculative_tokens is None:
            object.__setattr__(self, "num_speculative_tokens", most)
        flags(self, "adaptive")
        positive(
            self,
            "num_speculative_tokens", "draft_layers", "prompt_lookup_min", "prompt_lookup_max",
            "suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_tokens",
            "tree_width", "tree_tokens",
            "max_model_len", "disable_by_batch_size", "draft_tensor_parallel_size",
        )  # fmt: skip
        _at_least_zero(self)
        if self.draft_tensor_parallel_size not in (None, 1):
            raise ConfigError(
                f"draft_tensor_parallel_size={self.draft_tensor_parallel_size} isn't possible: a "
                "model runs in one process, on all its cores. Leave it out."
            )
        for name, most in _MOST.items():
            if (getattr(self, name) or 0) > most:
                raise ConfigError(f"{name} must be {most:,} at most, not {getattr(self, name):,}.")
        self._check_tree()
        if self.max_model_len == 1:
            raise ConfigError(
                "max_model_len=1 lets no sequence have a draft: one that decodes has 2 tokens at "
                "least. Raise it or leave it out."
            )
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is not None and high is not None and low > high:
            raise ConfigError(f"prompt_lookup_min={low} is above prompt_lookup_max={high}.")

    def _check_tree(self) -> None:
        """Raises ConfigError for a size that would have no effect."""
        depth, most = self.num_speculative_tokens, self.tree_tokens
        if most is None and depth is None:  # known when the heads are
            return
        if self.tree_width is not None and 1 < self.tree_width > (most or 2 * (depth or 0)):
            told = f"tree_tokens={most}" if most else f"num_speculative_tokens={depth}"
            twice = "" if most else f", which are {2 * (depth or 0)} unless tree_tokens is given"
            raise ConfigError(
                f"tree_width={self.tree_width} is more than all guesses of a tree with {told}"
                f"{twice}: so many can't follow one. Lower it or raise tree_tokens."
            )
        if most is None:
            return
        if self.tree_width == 1:
            raise ConfigError(
                f"tree_tokens={most} has no effect with tree_width=1, which makes chains: their "
                "length is num_speculative_tokens. Leave one of them out."
            )
        if depth is not None and most < depth:
            raise ConfigError(
                f"tree_tokens={most} is less than num_speculative_tokens={depth}: a tree so deep "
                "has at least as many guesses. Raise the one or lower the other."
            )

    @property
    def reads_predictions(self) -> bool:
        """Whether who guesses does so by a request's `prediction`, where it has one."""
        return self.method in ("ngram", "suffix")

    @property
    def width(self) -> int:
        """Guesses that may follow one another's place: 1 where drafts are no trees."""
        heads = self.method in ("medusa", "eagle", "eagle3")
        return (self.tree_width or 4) if heads else 1

    @property
    def most_tokens(self) -> int:
        """Tokens in a draft, tree or not."""
        depth = self.num_speculative_tokens
        assert depth is not None  # filled in
        if self.width == 1:
            return depth
        return max(self.tree_tokens or min(2 * depth, MOST_TREE_TOKENS), depth)

    @classmethod
    def of(cls, value: object) -> SpeculativeConfig | None:
        """From what a caller gave: a dictionary, one of these, or None for no speculation."""
        if value is None or isinstance(value, SpeculativeConfig):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"speculative_config must be a dictionary, not {type(value).__name__}: "
                '{"method": "ngram"} is one.'
            )
        names = [f.name for f in fields(cls)]
        for name in value:
            if name not in names:
                raise ConfigError(
                    f"{name!r} isn't in a speculative_config.{nearest(str(name), names)} It may "
                    f"have {', '.join(names)}."
                )
        return cls(**value)


def _at_least_zero(config: SpeculativeConfig) -> None:
    """Raises ConfigError for what isn't the number that it must be, where it may be 0 or between
    whole ones."""
    for name, kinds in (
        ("suffix_decoding_max_cached_requests", int),
        ("suffix_decoding_max_spec_factor", int | float),
        ("suffix_decoding_min_token_prob", int | float),
    ):
        value = getattr(config, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < math.inf:
            kind = "an integer" if kinds is int else "a number"
            raise ConfigError(f"{name} must be {kind} of at least 0, not {value!r}.")
    if config.suffix_decoding_max_spec_factor == 0:
        raise ConfigError(
            "suffix_decoding_max_spec_factor=0 lets no guess have a token. Leave out the "
            "speculative_config instead."
        )

"""How many processes compute each step together."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.checks import flags, positive
from penstock.errors import ConfigError

MOST_RANKS = 64

SPAN_TOKENS = 256
"""Of a sequence, that one rank keeps where ranks share its tokens: what attention takes at once."""

_GUESSING = ("self", "medusa", "eagle", "eagle3")
"""Methods of guessing that read a model's own layers, of which a rank has a part."""


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Among how many processes (ranks) a model is divided."""

    tensor_parallel_size: int = 1  # each has so much of every matrix and of the cache
    pipeline_parallel_size: int = 1  # stages of so many each, which have some of the layers
    context_parallel_size: int = 1  # each has all weights, and some tokens of every sequence
    enable_expert_parallel: bool = False  # of mixtures each has some experts instead
    stage_addresses: tuple[str, ...] = ()  # where stages after the first wait, on other machines

    def __post_init__(self) -> None:
        positive(self, "tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")
        flags(self, "enable_expert_parallel")
        self._check_addresses()
        self._check_context()
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(
                "enable_expert_parallel has no effect without a tensor_parallel_size above 1: that "
                "many processes share the experts. Set it, or leave this out."
            )
        if self.size > MOST_RANKS:
            raise ConfigError(
                f"{self.described} are {self.size} processes, and {MOST_RANKS} is the most."
            )

    def check_beside(self, asked: dict[str, bool]) -> None:
        """Raises ConfigError for the first of what was asked for that ranks don't have.

        asked: what, as its user writes it, and whether it was.
        """
        first = next((name for name, given in asked.items() if given), None)
        if self.size > 1 and first is not None:
            raise ConfigError(
                f"{self.described} isn't built together with {first}. Leave one of them out."
            )

    def _check_context(self) -> None:
        divided = self.tensor_parallel_size * self.pipeline_parallel_size > 1
        if self.context_parallel_size > 1 and divided:
            raise ConfigError(
                f"{self.described} isn't built: ranks share the tokens of a sequence or the "
                "weights of a model. Leave context_parallel_size or the others out."
            )

    def _check_addresses(self) -> None:
        """Raises ConfigError; so many addresses are a pipeline of one stage more."""
        given: object = self.stage_addresses
        if not isinstance(given, list | tuple) or not all(isinstance(a, str) for a in given):
            raise ConfigError(
                f"stage_addresses must be a list such as ['10.0.0.2:7433'], not {given!r}."
            )
        object.__setattr__(self, "stage_addresses", tuple(given))
        for address in given:
            parse_address(address)
        if len(set(given)) < len(given):
            raise ConfigError("stage_addresses has one twice: a stage is one process's.")
        if not given:
            return
        if self.pipeline_parallel_size == 1:
            object.__setattr__(self, "pipeline_parallel_size", len(given) + 1)
        if self.pipeline_parallel_size != len(given) + 1 or self.width > 1:
            raise ConfigError(
                f"{len(given)} stage_addresses are those of {len(given) + 1} stages of one process "
                "each, the first here; leave tensor_parallel_size, pipeline_parallel_size and "
                "context_parallel_size out."
            )

    @property
    def size(self) -> int:
        """Processes, of all stages together."""
        return self.width * self.pipeline_parallel_size

    @property
    def width(self) -> int:
        """Processes that compute the same layers together."""
        return self.tensor_parallel_size * self.context_parallel_size

    @property
    def block_size(self) -> int | None:
        """Tokens of a block of the cache; None: any."""
        shared = self.context_parallel_size
        return SPAN_TOKENS * shared if shared > 1 else None

    @property
    def described(self) -> str:
        """What was asked for, as its user writes it."""
        asked = {
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "context_parallel_size": self.context_parallel_size,
        }
        return " with ".join(f"{name}={size}" for name, size in asked.items() if size > 1)


def parse_address(address: str) -> tuple[str, int]:
    """`host:port`. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(f"{address!r} isn't an address: write it like 10.0.0.2:7433.")
    return host.strip("[]"), int(port)


def guesses_by_layers(method: str | None) -> bool:
    """Whether guesses are made by the layers of the model itself, or by what they compute."""
    return method in _GUESSING

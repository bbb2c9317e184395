"""What a request may ask of beam search: vLLM's and transformers' names, checked at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

from penstock.errors import InvalidSamplingError
from penstock.sampling.checks import Checked, texts, token_ids
from penstock.sampling.params import MAX_LOGPROBS
from penstock.sampling.structured import StructuredOutputs

_LOWEST_TEMPERATURE: Final = 1e-5
_HIGHEST_TEMPERATURE: Final = 1e4
_HIGHEST_LENGTH_PENALTY: Final = 10.0
_HIGHEST_DIVERSITY: Final = 1e3

EarlyStopping = Literal["never"] | bool


@dataclass(frozen=True, slots=True)
class BeamSearchParams(Checked):
    """How widely a request is searched, how its hypotheses are ranked, and when the search ends.

    A hypothesis's score is the sum of its tokens' log-probabilities ÷ tokens ** length_penalty,
    the end token counted. Sequences are copied into tuples, as in `SamplingParams`.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # 0 or 1: the model's own distribution is searched
    length_penalty: float = 1.0  # above 0 favours long hypotheses, below 0 short ones
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True  # in the text
    early_stopping: EarlyStopping = False  # True: at beam_width hypotheses, whatever may follow
    num_beam_groups: int = 1  # > 1: diverse beam search
    diversity_penalty: float = 0.0  # for each beam of an earlier group that took the token
    n: int | None = None  # how many of the best come back; None = beam_width
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    logprobs: int | None = None  # 0..20 beside each chosen token; -1 = the whole vocabulary

    def __post_init__(self) -> None:
        self._whole("beam_width", 1, None, "1 searches greedily.")
        self._whole("max_tokens", 1, None, "Say how long a hypothesis may become.")
        self._check_score()
        self._check_groups()
        if self.n is not None:
            hint = f"At most beam_width ({self.beam_width}) hypotheses are kept."
            self._whole("n", 1, self.beam_width, hint)
        self._set("stop", texts("stop", self.stop))
        self._set("stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids or ()))
        if self.structured_outputs is not None:
            self._set("structured_outputs", StructuredOutputs.of(self.structured_outputs))
            if self.ignore_eos:
                raise InvalidSamplingError(
                    "ignore_eos is set beside structured_outputs, whose output ends when its form "
                    "is complete. Leave out one of them."
                )
        if self.logprobs is not None:
            hint = "0 gives the chosen token's only, -1 the whole vocabulary's, None none."
            self._whole("logprobs", -1, MAX_LOGPROBS, hint)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InvalidSamplingError(f"{name} is {value!r}. Use True or False.")

    @property
    def num_returned(self) -> int:
        """``n``, or the width where none is given."""
        return self.beam_width if self.n is None else self.n

    @property
    def group_width(self) -> int:
        """Beams of one group."""
        return self.beam_width // self.num_beam_groups

    @property
    def divisor(self) -> float:
        """What logits are divided by before the log-softmax."""
        return 1.0 if self.temperature == 0.0 else self.temperature

    @property
    def structure(self) -> StructuredOutputs | None:
        """``structured_outputs`` as it is stored."""
        return cast("StructuredOutputs | None", self.structured_outputs)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as it is stored."""
        return cast("tuple[str, ...]", self.stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """``stop_token_ids`` as it is stored."""
        return cast("tuple[int, ...]", self.stop_token_ids)

    def _check_score(self) -> None:
        self._real("temperature", 0.0, _HIGHEST_TEMPERATURE, "0 is the model's own distribution.")
        if 0.0 < self.temperature < _LOWEST_TEMPERATURE:
            raise InvalidSamplingError(
                f"temperature is {self.temperature}: logits divided by less than "
                f"{_LOWEST_TEMPERATURE:g} overflow. Use 0 for the model's own distribution."
            )
        high = _HIGHEST_LENGTH_PENALTY
        self._real("length_penalty", -high, high, "0.0 ranks by the sum, 1.0 by the mean.")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise InvalidSamplingError(
                f"early_stopping is {self.early_stopping!r}. Use True, False or 'never'."
            )

    def _check_groups(self) -> None:
        width, groups = self.beam_width, "num_beam_groups"
        self._whole(groups, 1, width, f"Each group has one of the {width} beams at least.")
        count = self.num_beam_groups
        if width % count:
            raise InvalidSamplingError(
                f"{groups} is {count}, which doesn't divide beam_width ({width}). "
                f"Use a beam_width of {width // count * count} or {-(-width // count) * count}."
            )
        hint = "Useful values are about 0.5."
        self._real("diversity_penalty", 0.0, _HIGHEST_DIVERSITY, hint)
        if count > 1 and self.diversity_penalty == 0.0:
            raise InvalidSamplingError(
                f"{groups} is {count} with a diversity_penalty of 0.0, so all groups would find "
                f"the same. Raise diversity_penalty, or leave {groups} out."
            )
        if count == 1 and self.diversity_penalty:
            raise InvalidSamplingError(
                f"diversity_penalty is {self.diversity_penalty}, but there is one group, and "
                f"nothing to differ from. Raise {groups}, or leave it out."
            )

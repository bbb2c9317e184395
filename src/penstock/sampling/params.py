"""What a request may ask of the sampler: vLLM's names and defaults, checked at once.

Every value is checked when the object is made, so a bad request fails before it costs a token:
an :class:`~penstock.errors.InvalidSamplingError` says what is wrong, with the number, and the
way out.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, cast

from penstock.errors import InvalidSamplingError, nearest

MAX_LOGPROBS: Final = 20
"""The most top logprobs per token that may be asked for short of -1 (all), as in the OpenAI API."""

_GREEDY_BELOW: Final = 1e-5
"""A temperature under this is greedy, as in vLLM; logits divided by less overflow float32."""

_HIGHEST_TEMPERATURE: Final = 1e4
_HIGHEST_REPETITION: Final = 1e4
_HIGHEST_BIAS: Final = 100.0
_SEEDS: Final = 2**64


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it stops.

    Sequences and mappings are copied into tuples and a dict of plain ints and floats, so the
    object can't change under a running request; ``stop`` is always a ``tuple[str, ...]``
    afterwards (:attr:`stop_strings` says so to a type checker).
    """

    n: int = 1
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1 = off
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # > 1 discourages tokens of the prompt and the output
    presence_penalty: float = 0.0  # once per distinct output token
    frequency_penalty: float = 0.0  # once per occurrence in the output
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None  # texts that the output must not hold as tokens
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    max_tokens: int | None = 16  # None = up to the context length
    min_tokens: int = 0  # no end or stop token before this many
    ignore_eos: bool = False
    logprobs: int | None = None  # 0..20 beside the chosen token; -1 = the whole vocabulary
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    detokenize: bool = True

    def __post_init__(self) -> None:
        self._check_truncation()
        self._check_penalties()
        self._check_tokens()
        self._check_output()
        self._check_together()

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> SamplingParams:
        """Make one from loose arguments, naming the nearest known one for an unknown name."""
        known = [one.name for one in fields(cls)]
        for name in kwargs:
            if name not in known:
                raise InvalidSamplingError(
                    f"Unknown sampling argument {name!r}.{nearest(name, known)} "
                    f"The {len(known)} known ones are: {', '.join(known)}."
                )
        return cls(**kwargs)

    @property
    def is_greedy(self) -> bool:
        """Whether each token is simply the most likely one."""
        return self.temperature < _GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as it is stored."""
        return cast("tuple[str, ...]", self.stop)

    @property
    def banned_texts(self) -> tuple[str, ...]:
        """``bad_words`` as it is stored."""
        return cast("tuple[str, ...]", self.bad_words)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """``stop_token_ids`` as it is stored."""
        return cast("tuple[int, ...]", self.stop_token_ids)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _whole(self, name: str, low: int, high: int | None, hint: str) -> None:
        self._set(name, _integer(name, getattr(self, name), low, high, hint))

    def _check_truncation(self) -> None:
        self._whole("n", 1, None, "Ask for at least one sample.")
        self._set(
            "temperature",
            _real("temperature", self.temperature, 0.0, _HIGHEST_TEMPERATURE, "0 is greedy."),
        )
        top_p = _real("top_p", self.top_p, 0.0, 1.0, "1.0 keeps every token.")
        if top_p == 0.0:
            raise InvalidSamplingError(
                "top_p is 0.0, which keeps no token; it must be in (0, 1]. "
                "For the most likely token use temperature=0."
            )
        self._set("top_p", top_p)
        self._whole("top_k", -1, None, "0 or -1 keeps every token.")
        if self.top_k == -1:
            self._set("top_k", 0)
        self._set("min_p", _real("min_p", self.min_p, 0.0, 1.0, "0.0 keeps every token."))

    def _check_penalties(self) -> None:
        low = 1 / _HIGHEST_REPETITION
        self._set(
            "repetition_penalty",
            _real(
                "repetition_penalty",
                self.repetition_penalty,
                low,
                _HIGHEST_REPETITION,
                "1.0 is no penalty.",
            ),
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = _real(name, getattr(self, name), -2.0, 2.0, "0.0 is no penalty.")
            self._set(name, value)
        if self.logit_bias is not None:
            self._set("logit_bias", _bias(self.logit_bias))

    def _check_tokens(self) -> None:
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidSamplingError(
                    "allowed_token_ids is empty (0 ids), so no token could be chosen. "
                    "Use None to allow every token."
                )
            self._set("allowed_token_ids", allowed)
        self._set("stop", _texts("stop", self.stop))
        self._set("bad_words", _texts("bad_words", self.bad_words))
        self._set("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids or ()))
        if self.seed is not None:
            self._whole("seed", 0, _SEEDS - 1, "Use None for a fresh one per request.")
        if self.max_tokens is not None:
            self._whole("max_tokens", 1, None, "Use None for as many as the context holds.")
        self._whole("min_tokens", 0, None, "0 sets no minimum.")

    def _check_output(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                hint = "0 gives the chosen token's only, -1 the whole vocabulary's, None none."
                self._whole(name, -1, MAX_LOGPROBS, hint)
        for name in (
            "ignore_eos",
            "skip_special_tokens",
            "include_stop_str_in_output",
            "detokenize",
        ):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise InvalidSamplingError(f"{name} is {value!r}. Use True or False.")

    def _check_together(self) -> None:
        if self.is_greedy and self.n > 1:
            raise InvalidSamplingError(
                f"n is {self.n} with temperature {self.temperature}: {self.n} greedy samples "
                "would be identical. Use n=1, or a temperature above 0."
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidSamplingError(
                f"min_tokens is {self.min_tokens} but max_tokens is {self.max_tokens}. "
                "Lower min_tokens or raise max_tokens."
            )
        if self.stop and not self.detokenize:
            raise InvalidSamplingError(
                f"stop holds {len(self.stop)} strings but detokenize is False, so they could "
                "never be found. Use stop_token_ids, or detokenize=True."
            )


def _integer(name: str, value: object, low: int, high: int | None, hint: str) -> int:
    """``value`` as a plain int in [low, high]; numpy's integers pass, bools and floats don't."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise InvalidSamplingError(
            f"{name} is {value!r}, a {type(value).__name__}; it must be an integer. {hint}"
        )
    number = int(value)
    if number < low or (high is not None and number > high):
        span = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidSamplingError(f"{name} is {number}; it must be {span}. {hint}")
    return number


def _real(name: str, value: object, low: float, high: float, hint: str) -> float:
    """``value`` as a plain finite float in [low, high]; bools and strings don't pass."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidSamplingError(
            f"{name} is {value!r}, a {type(value).__name__}; it must be a number. {hint}"
        )
    # Compared before converting: a huge int doesn't fit a float. NaN fails the comparison.
    number = cast("float", value)
    if not low <= number <= high:
        raise InvalidSamplingError(f"{name} is {number}; it must be in [{low:g}, {high:g}]. {hint}")
    return float(number)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    """A tuple of non-negative ids; whether they exist is known once the vocabulary is."""
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
        raise InvalidSamplingError(
            f"{name} is {value!r}, a {type(value).__name__}. Pass a list of token ids."
        )
    return tuple(
        _integer(f"{name}[{i}]", one, 0, None, "Pass token ids.") for i, one in enumerate(value)
    )


def _bias(value: object) -> dict[int, float]:
    """``logit_bias`` as plain ints and floats."""
    if not isinstance(value, Mapping):
        raise InvalidSamplingError(
            f"logit_bias is {value!r}, a {type(value).__name__}. "
            "Pass a mapping of token id to bias, such as {50256: -100}."
        )
    checked: dict[int, float] = {}
    for token, bias in value.items():
        token_id = _integer("a key of logit_bias", token, 0, None, "Pass token ids, not strings.")
        hint = "To forbid or force a token use allowed_token_ids."
        checked[token_id] = _real(
            f"logit_bias[{token_id}]", bias, -_HIGHEST_BIAS, _HIGHEST_BIAS, hint
        )
    return checked


def _texts(name: str, value: object) -> tuple[str, ...]:
    """``stop`` or ``bad_words`` as a tuple: a single string stands for a list of one."""
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Sequence):
        raise InvalidSamplingError(
            f"{name} is {value!r}, a {type(value).__name__}. Pass a string or a list of strings."
        )
    for i, one in enumerate(value):
        if not isinstance(one, str):
            raise InvalidSamplingError(
                f"{name}[{i}] is {one!r}, a {type(one).__name__}. Pass strings here, and ids in "
                "stop_token_ids or logit_bias."
            )
        if not one:
            raise InvalidSamplingError(
                f"{name}[{i}] is an empty string, which is everywhere. Leave it out."
            )
    return tuple(value)

"""What the requests of all endpoints have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from penstock.sampling import SamplingParams
from penstock.server.errors import ApiError, unsupported

_EMPTY: tuple[Any, ...] = (None, False, "", [], {})
_SEEDS = 1 << 64
_TOKENS = 1 << 31
T = TypeVar("T")

Some = Annotated[list[T], Field(fail_fast=True)]
"""A list that is read up to its first mistake: a million of them take a minute to report."""

Probability = Annotated[float, Field(ge=0, le=1)]
TokenId = Annotated[int, Field(ge=0, lt=_TOKENS)]


class Body(BaseModel):
    """A request's body: types as they are written, and no field that nobody reads.

    unsupported: fields that the API has and Penstock lacks, with the values that ask for nothing
    beside None, False and what is empty.
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        unknown = data.keys() - cls.model_fields.keys()
        if not unknown and not cls.unsupported.keys() & data.keys():  # some are inherited
            return data
        kept = dict(data)
        for field, harmless in cls.unsupported.items():
            if field not in kept:
                continue
            value = kept.pop(field)
            if not any(value is x or value == x for x in (*_EMPTY, *harmless)):
                raise unsupported(field)
        for field in sorted(unknown - cls.unsupported.keys())[1:]:
            del kept[field]  # one is enough to refuse the body
        return kept


class StreamOptions(Body):
    """`stream_options` of the completions."""

    include_usage: bool = False  # a last chunk with the tokens that were used
    continuous_usage_stats: bool = False  # … and the tokens so far in every chunk, as in vLLM
    include_obfuscation: bool = False

    @model_validator(mode="after")
    def _no_obfuscation(self) -> StreamOptions:
        if self.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation")
        return self


class CacheControl(Body):
    """Keep the prompt up to here in the prefix cache."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: str | None = None  # "5m", "1h", "90s"; five minutes where it isn't said

    @property
    def seconds(self) -> float:
        """Of `ttl`. Raises ApiError for one that can't be read."""
        text = self.ttl or "5m"
        units = {"s": 1.0, "m": 60.0, "h": 3600.0}
        number = text[:-1]
        if text[-1] not in units or not number.isdecimal() or not 0 < int(number) < 10_000:
            raise ApiError(
                400,
                f"ttl is {text[:40]!r}; write a number and s, m or h, such as '5m'.",
                param="cache_control.ttl",
            )
        return int(number) * units[text[-1]]


def _biases(data: Any) -> Any:
    """Stop at the first value that isn't a number."""
    if isinstance(data, dict):
        for token, bias in data.items():
            if isinstance(bias, bool) or not isinstance(bias, int | float):
                raise ValueError(f"the bias of token {token[:40]!r} must be a number")
    return data


class SamplingFields(Body):
    """OpenAI's fields for choosing tokens, and vLLM's beside them."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_biases)] | None = None
    allowed_token_ids: Some[TokenId] | None = None
    bad_words: Some[str] | None = None
    seed: int | None = None
    stop: str | Some[str] | None = None
    stop_token_ids: Some[TokenId] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None

    def sampling(self, defaults: SamplingParams, **chosen: Any) -> SamplingParams:
        """Sampling parameters: these fields, over the model's own suggestions.

        chosen: what an endpoint sets. Raises InvalidSamplingError.
        """
        given = {
            name: value
            for name in SamplingFields.model_fields
            if (value := getattr(self, name)) is not None
        }
        if "logit_bias" in given:
            given["logit_bias"] = {_token(k): v for k, v in given["logit_bias"].items()}
        if "seed" in given:
            given["seed"] %= _SEEDS  # the API's seeds may be negative
        suggested = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        base = {name: getattr(defaults, name) for name in suggested}
        return SamplingParams(**{**base, **given, **chosen})


class EngineFields(Body):
    """What a request may ask of the queue and the cache, beyond the APIs' own fields."""

    priority: int | None = None  # vLLM's: the lower, the sooner
    cache_salt: str | None = None  # vLLM's: prefixes are shared only between equal salts
    ttft_slo_ms: float | None = None  # Penstock's: the first token is wanted within this time
    tpot_slo_ms: float | None = None  # … and each further one within this


def _token(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) < _TOKENS):
        raise ApiError(
            400,
            f"logit_bias has the key {text[:40]!r}; its keys are token ids.",
            param="logit_bias",
        )
    return int(text)

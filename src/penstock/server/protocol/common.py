"""What the requests of all endpoints have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from penstock.errors import InvalidSamplingError
from penstock.sampling import CUTS, SUGGESTED, SamplingParams
from penstock.server.answers import unheeded
from penstock.server.config import LEAST_THRESHOLD
from penstock.server.errors import ApiError, as_api_error
from penstock.server.validation import refusal

MOST_MESSAGES = 16_384
_MOST_NAME_CHARACTERS = 4096
_MOST_SALT_CHARACTERS = 512
_EMPTY: tuple[Any, ...] = (None, False, "", [], {})
# Fields that ask for something even when they are empty: {} is a schema that takes any JSON.
STRICT = frozenset(
    "format guided_choice guided_grammar guided_json guided_regex output_format response_format "
    "structural_tag structured_outputs".split()
)
_TOKENS = 1 << 31
T = TypeVar("T")

Some = Annotated[list[T], Field(fail_fast=True)]
"""A list that is read up to its first mistake: a million of them take a minute to report."""

Probability = Annotated[float, Field(ge=0, le=1)]
TokenId = Annotated[int, Field(ge=0, lt=_TOKENS)]
UserName = Annotated[str, Field(max_length=_MOST_NAME_CHARACTERS)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""How much a model shall reason: OpenAI's and Anthropic's words."""
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Body(BaseModel):
    """A request's body: types as they are written, and no field that nobody reads.

    null for a field that may be left out means that it is. unsupported: fields that the API has and
    Penstock lacks, with the values that ask for nothing beside None, False and what is empty (of
    those in `STRICT` None alone). hints: fields that ask for what an answer can do without, and
    what they are called from the body's root, by which the answer says so; "" says nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    hints: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        unknown = {x for x in data.keys() - fields.keys() if data[x] is not None}
        nulls = any(value is None for value in data.values())
        if not unknown and not nulls and not cls.unsupported.keys() & data.keys():  # or inherited
            return data
        kept = {
            name: value
            for name, value in data.items()
            if value is not None or (name in fields and fields[name].is_required())
        }
        for field, harmless in cls.unsupported.items():
            if field not in kept:
                continue
            value = kept.pop(field)
            nothing = (None,) if field in STRICT else _EMPTY
            if not any(value is x or value == x for x in (*nothing, *harmless)):
                raise refusal(field)
        for field, name in cls.hints.items():
            if kept.pop(field, None) not in _EMPTY and name:
                unheeded(name)
        for field in sorted(unknown - cls.unsupported.keys() - cls.hints.keys())[1:]:
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
            raise refusal("include_obfuscation")
        return self


class ContextManagement(Body):
    """An entry of `context_management`."""

    type: Literal["compaction"]
    compact_threshold: Annotated[int, Field(ge=LEAST_THRESHOLD)] | None = None


ContextManagements = Annotated[list[ContextManagement], Field(max_length=1)]


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
        if (
            text[-1] not in units
            or not (number.isdecimal() and len(number) <= 4)
            or int(number) == 0
        ):
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
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    top_n_sigma: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Some[str] | None = None
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
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    guidance_scale: float | None = None
    negative_prompt: str | Some[TokenId] | None = None

    def sampling(
        self, defaults: SamplingParams, names: Mapping[str, str] | None = None, **chosen: Any
    ) -> SamplingParams:
        """Sampling parameters: these fields, over the model's own suggestions.

        names: what the endpoint calls some of the parameters; chosen: what it sets. Raises ApiError
        naming the field.
        """
        given = {
            name: value
            for name in SamplingFields.model_fields
            if (value := getattr(self, name)) is not None
        }
        if "logit_bias" in given:
            given["logit_bias"] = {_token(k): v for k, v in given["logit_bias"].items()}
        base = {name: getattr(defaults, name) for name in SUGGESTED}
        if self.mirostat:  # which takes the place of cuts that nobody has asked for
            base = {name: value for name, value in base.items() if name not in CUTS}
        try:
            return SamplingParams(**{**base, **given, **chosen})
        except InvalidSamplingError as error:
            raise as_api_error(error, names) from error


class Transfer(Body):
    """vLLM's `kv_transfer_params`: who computes a prompt, and who goes on with it.

    Blocks go from one to the other by a folder that both have; so nobody needs to be named.
    """

    do_remote_decode: bool = False  # the prompt's blocks are there when this request ends
    do_remote_prefill: bool = False  # they were put there
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "remote_block_ids": (),
        "remote_engine_id": (),
        "remote_host": (),
        "remote_port": (),
    }


class EngineFields(Body):
    """What a request may ask of the queue and the cache, beyond the APIs' own fields."""

    priority: int | None = None  # vLLM's: the lower, the sooner
    cache_salt: Annotated[str, Field(max_length=_MOST_SALT_CHARACTERS)] | None = None  # vLLM's
    ttft_slo_ms: Milliseconds | None = None  # Penstock's: the first token is wanted within this
    tpot_slo_ms: Milliseconds | None = None  # … and each further one within this
    kv_transfer_params: Transfer | None = None  # vLLM's

    @property
    def handed_over(self) -> dict[str, Any]:
        """What an answer has for whoever goes on with the prompt, where one shall."""
        asked = self.kv_transfer_params
        if asked is None or not asked.do_remote_decode:
            return {}
        told = {"do_remote_decode": False, "do_remote_prefill": True}
        return {"kv_transfer_params": told}


def _token(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) < _TOKENS):
        raise ApiError(
            400,
            f"logit_bias has the key {text[:40]!r}; its keys are token ids.",
            param="logit_bias",
        )
    return int(text)

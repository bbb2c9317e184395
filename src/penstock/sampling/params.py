"""What a request may ask of the sampler: vLLM's names and defaults, checked at once.

Every value is checked when the object is made, so a bad request fails before it costs a token:
an :class:`~penstock.errors.InvalidSamplingError` says what is wrong, with the number, and the
way out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, cast

from penstock.errors import InvalidSamplingError, nearest
from penstock.sampling.checks import Checked, bias, real, texts, token_ids
from penstock.sampling.processors import LogitsProcessor, processors
from penstock.sampling.structured import StructuredOutputs

MAX_LOGPROBS: Final = 20
"""The most top logprobs per token that may be asked for short of -1 (all), as in the OpenAI API."""

_GREEDY_BELOW: Final = 1e-5
"""A temperature under this is greedy, as in vLLM; logits divided by less overflow float32."""

_HIGHEST_TEMPERATURE: Final = 1e4
_HIGHEST_REPETITION: Final = 1e4
_HIGHEST_STRENGTH: Final = 1e3

DRY_BREAKERS: Final = ("\n", ":", '"', "*")
"""What repetitions end at unless told otherwise, as in llama.cpp."""

SUGGESTED: Final = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty",
)  # fmt: skip
"""What a model's generation_config.json may suggest."""

CUTS: Final = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "top_n_sigma": 0.0, "xtc_probability": 0.0,
}  # fmt: skip
"""What drops tokens, and the value that drops none: not beside mirostat, which does it itself."""

SWITCHES: Final = {
    "xtc_threshold": "xtc_probability", "dynatemp_exponent": "dynatemp_range",
    "mirostat_tau": "mirostat", "mirostat_eta": "mirostat", "dry_base": "dry_multiplier",
    "dry_allowed_length": "dry_multiplier", "dry_penalty_last_n": "dry_multiplier",
    "dry_sequence_breakers": "dry_multiplier",
}  # fmt: skip
"""What nothing looks at unless another parameter isn't 0."""
_SEEDS: Final = 2**64


@dataclass(frozen=True, slots=True)
class SamplingParams(Checked):
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
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    top_n_sigma: float = 0.0  # 0 or -1 = off
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0  # temperature ± this, by the entropy
    dynatemp_exponent: float = 1.0
    mirostat: int = 0  # 1 or 2: instead of the cuts above
    mirostat_tau: float = 5.0  # bits
    mirostat_eta: float = 0.1
    repetition_penalty: float = 1.0  # > 1 discourages tokens of the prompt and the output
    presence_penalty: float = 0.0  # once per distinct output token
    frequency_penalty: float = 0.0  # once per occurrence in the output
    dry_multiplier: float = 0.0  # > 0 discourages what would prolong a repetition
    dry_base: float = 1.75
    dry_allowed_length: int = 2  # tokens
    dry_penalty_last_n: int = -1  # tokens that are looked at; -1 = all
    dry_sequence_breakers: str | Sequence[str] = DRY_BREAKERS
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None  # texts that the output must not hold as tokens
    logits_processors: Sequence[LogitsProcessor] | None = None  # in this process only
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    guidance_scale: float = 1.0  # away from the negative prompt; 1 is off
    negative_prompt: str | Sequence[int] | None = None  # None: the prompt's last token
    token_healing: bool = False  # the prompt's last tokens are chosen anew; of completions
    seed: int | None = None  # None or -1: a fresh one; other negative ones count from 2^64 down
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
        self._check_samplers()
        self._check_penalties()
        self._check_tokens()
        self._check_output()
        self._check_together()

    @classmethod
    def from_kwargs(cls, /, **kwargs: Any) -> SamplingParams:
        """Make one from loose arguments, naming the nearest known one for an unknown name."""
        known = [one.name for one in fields(cls)]
        for name in kwargs:
            if name not in known:
                raise InvalidSamplingError(
                    f"Unknown sampling argument {name!r}.{nearest(name, known)} "
                    f"The {len(known)} known ones are: {', '.join(known)}."
                )
        return cls(**kwargs)

    def over(self, /, **chosen: Any) -> SamplingParams:
        """These parameters with the chosen ones over them.

        Cuts that only stand here give way to a chosen mirostat, which takes their place, and what
        only a sampler looks at that is switched off goes with it.
        """
        way: dict[str, Any] = dict(CUTS) if chosen.get("mirostat") else {}
        for name, switch in SWITCHES.items():
            if chosen.get(switch, True) == 0:
                way[name] = self.__dataclass_fields__[name].default
        return replace(self, **{**way, **chosen})

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
    def structure(self) -> StructuredOutputs | None:
        """``structured_outputs`` as it is stored."""
        return cast("StructuredOutputs | None", self.structured_outputs)

    @property
    def breakers(self) -> tuple[str, ...]:
        """``dry_sequence_breakers`` as it is stored."""
        return cast("tuple[str, ...]", self.dry_sequence_breakers)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """``stop_token_ids`` as it is stored."""
        return cast("tuple[int, ...]", self.stop_token_ids)

    def _check_truncation(self) -> None:
        self._whole("n", 1, None, "Ask for at least one sample.")
        self._set(
            "temperature",
            real("temperature", self.temperature, 0.0, _HIGHEST_TEMPERATURE, "0 is greedy."),
        )
        hint = "1.0 keeps every token; for the most likely one use temperature=0."
        top_p = real("top_p", self.top_p, 0.0, 1.0, hint, above=True)
        self._set("top_p", top_p)
        self._whole("top_k", -1, None, "0 or -1 keeps every token.")
        if self.top_k == -1:
            self._set("top_k", 0)
        self._set("min_p", real("min_p", self.min_p, 0.0, 1.0, "0.0 keeps every token."))

    def _check_samplers(self) -> None:
        self._real("typical_p", 0.0, 1.0, "1.0 keeps every token.")
        if self.typical_p == 0.0:
            raise InvalidSamplingError(
                "typical_p is 0.0, which keeps no token; it must be in (0, 1]. 1.0 is off."
            )
        for name in ("epsilon_cutoff", "eta_cutoff"):
            self._real(name, 0.0, 1.0, "0.0 keeps every token; useful values are about 0.0003.")
        self._real("top_n_sigma", -1.0, _HIGHEST_STRENGTH, "0 or -1 keeps every token.")
        self._set("top_n_sigma", max(self.top_n_sigma, 0.0))
        self._real("xtc_probability", 0.0, 1.0, "0.0 is off.")
        self._real("xtc_threshold", 0.0, 1.0, "Useful values are about 0.1.")
        self._real("dynatemp_range", 0.0, _HIGHEST_TEMPERATURE, "0.0 is off.")
        self._real("dynatemp_exponent", 1e-3, _HIGHEST_STRENGTH, "1.0 is linear.")
        self._whole("mirostat", 0, 2, "0 is off.")
        self._real("mirostat_tau", 1e-3, _HIGHEST_STRENGTH, "Bits; useful values are about 5.")
        self._real("mirostat_eta", 1e-6, 1.0, "Useful values are about 0.1.")

    def _check_penalties(self) -> None:
        low = 1 / _HIGHEST_REPETITION
        self._set(
            "repetition_penalty",
            real(
                "repetition_penalty",
                self.repetition_penalty,
                low,
                _HIGHEST_REPETITION,
                "1.0 is no penalty.",
            ),
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = real(name, getattr(self, name), -2.0, 2.0, "0.0 is no penalty.")
            self._set(name, value)
        self._real("dry_multiplier", 0.0, _HIGHEST_STRENGTH, "0.0 is no penalty.")
        self._real("dry_base", 1.0, _HIGHEST_STRENGTH, "1.0 punishes every length alike.")
        self._whole("dry_allowed_length", 1, 1 << 30, "Tokens that may repeat.")
        self._whole("dry_penalty_last_n", -1, None, "-1 looks at the whole text, 0 at none.")
        self._set("dry_sequence_breakers", texts("dry_sequence_breakers", self.breakers))
        if self.logit_bias is not None:
            self._set("logit_bias", bias(self.logit_bias))
        if self.structured_outputs is not None:
            self._set("structured_outputs", StructuredOutputs.of(self.structured_outputs))

    def _check_tokens(self) -> None:
        if self.allowed_token_ids is not None:
            allowed = token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidSamplingError(
                    "allowed_token_ids is empty (0 ids), so no token could be chosen. "
                    "Use None to allow every token."
                )
            self._set("allowed_token_ids", allowed)
        self._real("guidance_scale", 0.0, _HIGHEST_STRENGTH, "1.0 is off.")
        if self.negative_prompt is not None and not isinstance(self.negative_prompt, str):
            self._set("negative_prompt", token_ids("negative_prompt", self.negative_prompt))
        self._set("stop", texts("stop", self.stop))
        self._set("bad_words", texts("bad_words", self.bad_words))
        self._set("logits_processors", processors(self.logits_processors))
        self._set("stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids or ()))
        if self.seed is not None:
            hint = "Use None, or -1, for a fresh one per request."
            self._whole("seed", -_SEEDS // 2, _SEEDS - 1, hint)
            self._set("seed", None if self.seed == -1 else self.seed % _SEEDS)
        if self.max_tokens is not None:
            self._whole("max_tokens", 1, None, "Use None for as many as the context holds.")
        self._whole("min_tokens", 0, None, "0 sets no minimum.")

    def _check_output(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                hint = "0 gives the chosen token's only, -1 the whole vocabulary's, None none."
                self._whole(name, -1, MAX_LOGPROBS, hint)
        for name in (
            "token_healing",
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
                "would be identical. Use n=1, or a higher temperature."
            )
        for name, off in (("mirostat", 0), ("xtc_probability", 0.0), ("dynatemp_range", 0.0)):
            if self.is_greedy and getattr(self, name) != off:
                raise InvalidSamplingError(
                    f"{name} is {getattr(self, name)} with temperature {self.temperature}, which "
                    "always takes the likeliest token. Raise the temperature, or leave it out."
                )
        if self.guidance_scale == 1.0 and self.negative_prompt is not None:
            raise InvalidSamplingError(
                "negative_prompt is given but guidance_scale is 1.0, which doesn't look at it. "
                "Raise the scale, 1.5 say, or leave the prompt out."
            )
        if not self.negative_prompt and self.negative_prompt is not None:
            raise InvalidSamplingError("negative_prompt is empty. Leave it out.")
        if self.structured_outputs is not None and self.ignore_eos:
            raise InvalidSamplingError(
                "ignore_eos is set beside structured_outputs, whose output ends when its form is "
                "complete. Leave out one of them."
            )
        used = [name for name, off in CUTS.items() if getattr(self, name) != off]
        if self.mirostat and used:
            raise InvalidSamplingError(
                f"mirostat is {self.mirostat} and {used[0]} {getattr(self, used[0])}, but mirostat "
                f"decides by itself what is dropped. Leave out {' and '.join(used)}, or mirostat."
            )
        for name, switch in SWITCHES.items():
            value = getattr(self, name)
            if not getattr(self, switch) and value != self.__dataclass_fields__[name].default:
                raise InvalidSamplingError(
                    f"{name} is {value!r} but {switch} is {getattr(self, switch)}, so that "
                    f"nothing looks at it. Set {switch}, or leave {name} out."
                )
        if self.xtc_probability and self.xtc_threshold > 0.5:
            raise InvalidSamplingError(
                f"xtc_threshold is {self.xtc_threshold}: two tokens can't both be likelier than "
                "0.5, so xtc_probability would do nothing. Lower the threshold."
            )
        self._check_healing()
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

    def _check_healing(self) -> None:
        if not self.token_healing:
            return
        if self.structure is not None:
            raise InvalidSamplingError(
                "token_healing chooses the prompt's last tokens anew, but structured_outputs holds "
                "the output to a form from its first token on. Leave out one of the two."
            )
        if self.prompt_logprobs is not None:
            raise InvalidSamplingError(
                f"prompt_logprobs (and echo with logprobs) is {self.prompt_logprobs}, but with "
                "token_healing the prompt's last tokens aren't a part of what the model reads. "
                "Leave out one of the two."
            )

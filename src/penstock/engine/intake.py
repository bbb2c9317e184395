"""From a request to its sequences: what is checked, and what each sequence starts with."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np

from penstock.engine.breakers import Breakers
from penstock.engine.options import RequestOptions
from penstock.engine.outputs import RequestMetrics
from penstock.engine.pictures import Seen
from penstock.engine.request import Request, Sequence
from penstock.errors import InvalidPromptError, InvalidSamplingError, ModelOutputError, RequestError
from penstock.grammar import Grammars
from penstock.grammar.healing import Healer
from penstock.models.finite import why_not_finite
from penstock.models.load import LoadedModel
from penstock.runtime.vision import Sight
from penstock.sampling import (
    BeamSearchParams,
    Constraint,
    SamplingParams,
    SequenceSampling,
    StructuredOutputs,
    num_words,
)
from penstock.sampling.healing import Healed, PrefixConstraint
from penstock.sampling.pending import MASKED, NOT_FINITE
from penstock.speculate import Expected, Prediction
from penstock.tokenizer import IncrementalDetokenizer, Tokenizer, VocabMap

BANS = -100.0
"""A bias that bans a token, as in OpenAI's API."""

CHARACTERS_PER_TOKEN = 128
"""A token of more is possible; a prompt made of nothing else is not a text."""


@dataclass(frozen=True, slots=True)
class Start:
    """Who a request is, and when it came."""

    request_id: str
    arrival: int  # counts requests
    time_s: float
    stream: bool
    options: RequestOptions


class Intake:
    """Checks prompts and makes sequences, for one model and its tokenizer."""

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: Tokenizer | None,
        vocab_map: VocabMap | None = None,
        sight: Sight | None = None,
    ) -> None:
        """vocab_map: of a model with a reduced vocabulary; ids are those of the whole one."""
        self.tokenizer = tokenizer
        self._vocab_map = vocab_map
        whole = model.spec.decoder.vocab_size
        self.vocab_size = whole if vocab_map is None else vocab_map.original_size
        self.max_len = model.max_model_len
        self._model = model
        self._why_not_finite: str | None = None  # known once it was asked
        self._sight = sight
        self.eos = frozenset(model.eos_token_ids)
        self._healer = None if tokenizer is None else Healer(tokenizer, self.vocab_size)
        self._grammars: Grammars | None = None  # made when a request asks for a form
        self._making = Lock()
        self._breakers_in = None if tokenizer is None else Breakers(tokenizer)

    def prepare(
        self, params: SamplingParams | BeamSearchParams
    ) -> SamplingParams | BeamSearchParams:
        """Do what takes long of what a request will need; may be called in any thread.

        Returns parameters that need it no more. Raises InvalidSamplingError for a form that can't
        be followed, or a negative prompt that can't be computed, RequestError for what needs a
        tokenizer that isn't there.
        """
        if params.structure is not None:
            self.compile(params.structure)
        if isinstance(params, BeamSearchParams):
            return params
        if params.token_healing and self._healer is not None:
            self._healer.prepare()
        self._breakers(params)
        if isinstance(params.negative_prompt, str):
            return params.over(negative_prompt=self.negative(params, []))
        return params

    def expecting(self, options: RequestOptions) -> RequestOptions:
        """The same with a prediction's text as tokens; may be called in any thread.

        Raises RequestError for a text that is too long, or without a tokenizer.
        """
        given = options.prediction
        if not isinstance(given, str):
            return options
        if self.tokenizer is None:
            raise RequestError(
                "A prediction as text needs a tokenizer, but skip_tokenizer_init is set."
            )
        self._check_length("prediction", given)
        try:
            tokens = self.tokenizer.encode(given, add_special_tokens=False)
        except InvalidPromptError as error:
            raise RequestError(f"prediction is refused: {error}") from error
        return replace(options, prediction=tuple(tokens))

    def compile(self, structure: StructuredOutputs) -> None:
        """Prepare what an output's form needs; may take long, and be called in any thread.

        Raises InvalidSamplingError for a form that can't be followed.
        """
        self._compiler().compile(structure)

    def _compiler(self) -> Grammars:
        if self.tokenizer is None:
            raise RequestError(
                "structured_outputs need a tokenizer, but skip_tokenizer_init is set."
            )
        with self._making:
            if self._grammars is None:
                self._grammars = Grammars(
                    self.tokenizer, self.vocab_size, self.eos, self._vocab_map
                )
        return self._grammars

    def grammar_stats(self) -> dict[str, Any]:
        """Counters of forms that were compiled."""
        if self._grammars is None:
            return {"grammar_hits": 0, "grammar_misses": 0, "grammars": 0}
        found = self._grammars.stats()
        return {
            "grammar_hits": found.hits,
            "grammar_misses": found.misses,
            "grammars": found.entries,
        }

    def negative(self, params: SamplingParams, prompt: list[int]) -> list[int]:
        """The tokens of a negative prompt; without one the prompt's last, as in transformers."""
        given = params.negative_prompt
        if given is None:
            return prompt[-1:]
        if isinstance(given, str):
            if self.tokenizer is None:
                raise RequestError(
                    "A negative_prompt as text needs a tokenizer, but skip_tokenizer_init is set."
                )
            self._check_length("negative_prompt", given)
            given = self.tokenizer.encode(given)
        try:
            tokens = self.checked(given)
            self.seen(tokens, RequestOptions())  # none of it stands for a picture
        except InvalidPromptError as error:
            raise InvalidSamplingError(f"negative_prompt is refused: {error}") from error
        return tokens

    def _check_length(self, name: str, text: str) -> None:
        """Raises InvalidSamplingError for a text that nobody should wait for to be encoded."""
        most = self.max_len * CHARACTERS_PER_TOKEN
        if len(text) > most:
            raise InvalidSamplingError(
                f"{name} has {len(text):,} characters; the model takes {self.max_len:,} tokens, "
                f"and at most {most:,} characters are read."
            )

    def bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """The tokens of each bad word, at the start of a text and after a space, as in vLLM."""
        if not params.banned_texts:
            return []
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise RequestError("bad_words need a tokenizer, but skip_tokenizer_init is set.")
        words: dict[tuple[int, ...], None] = {}  # each once, in their order
        for text in params.banned_texts:
            for form in (text, f" {text.lstrip()}"):
                ids = tokenizer.encode(form, add_special_tokens=False)
                if ids:
                    words[tuple(ids)] = None
        return list(words)

    def heal(self, prompt: list[int], params: SamplingParams) -> Healed:
        """A checked prompt; where its end is to be chosen anew, without it."""
        if not params.token_healing:
            return Healed(prompt, b"")
        if self._healer is None:
            raise RequestError("token_healing needs a tokenizer, but skip_tokenizer_init is set.")
        return self._healer.heal(prompt)

    def prefix_constraint(self, request: Request) -> PrefixConstraint | None:
        """What holds one sample to the end of its prompt; None where nothing was taken back."""
        if self._healer is None or not request.prefix:
            return None
        return self._healer.constraint(request.prefix)

    def request(
        self,
        start: Start,
        prompt: str | None,
        tokens: list[int],
        params: SamplingParams,
        seed: int,
    ) -> Request:
        """A request with all of its samples. Raises RequestError."""
        seen = self.seen(tokens, start.options)
        if seen is not None and params.token_healing:
            raise InvalidSamplingError(
                "token_healing isn't built for prompts with pictures. Leave it out."
            )
        healed = self.heal(tokens, params)
        request = Request(
            request_id=start.request_id,
            prompt=prompt,
            prompt_token_ids=healed.kept,
            params=params,
            arrival=start.arrival,
            stream=start.stream,
            metrics=RequestMetrics(start.time_s),
            options=start.options,
            expected=self._expected(start.options),
            taken_back=tokens[len(healed.kept) :],
            prefix=healed.prefix,
            seen=seen,
        )
        if params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        bad_words = self.bad_words(params)
        constraint = self._constraint(request)
        if constraint is not None:
            self._check_beginning(params, constraint, bad_words)
        request.sequences = [
            self.sequence(request, i, seed, bad_words, constraint) for i in range(params.n)
        ]
        request.live = params.n
        return request

    def seen(self, tokens: list[int], options: RequestOptions) -> Seen | None:
        """A request's pictures in its prompt; None where it has none. Raises InvalidPromptError."""
        if self._sight is None:
            if options.pictures:
                raise InvalidPromptError("This model sees no pictures. Leave them out.")
            return None
        sight = self._sight
        token_id, turns = sight.pictures.token_id, sight.spare > 0
        return Seen.of(tokens, options.pictures, token_id, turns, sight.together > 0)

    def sequence(
        self,
        request: Request,
        index: int,
        seed: int,
        bad_words: Seq[Seq[int]] = (),
        constraint: Constraint | None = None,
    ) -> Sequence:
        """Sample number `index` of a request; constraint: what limits each of its samples."""
        params, tokens = request.params, request.prompt_token_ids
        if index == 0:
            self._check_kept(params)
        text = list(tokens)
        return Sequence(
            request=request,
            index=index,
            tokens=text,
            sampling=SequenceSampling(
                params,
                tokens,
                self.vocab_size,
                seed,
                self.eos,
                index,
                bad_words,
                self._breakers(params),
                text,
                constraint.fork() if index and constraint is not None else constraint,
            ),
            detokenizer=self._detokenizer(request),
            logprobs=None if params.logprobs is None else [],
            expected=None
            if request.expected is None
            else Prediction(request.expected, len(tokens)),
        )

    def _expected(self, options: RequestOptions) -> Expected | None:
        """An expected output, as much of it as could come. Raises RequestError for no tokens."""
        given = self.expecting(options).prediction
        if given is None:
            return None
        assert not isinstance(given, str)  # by now
        tokens: tuple[Any, ...] = given[: self.max_len]
        try:
            return Expected(self.checked(tokens, generates=False))
        except InvalidPromptError as error:
            for token in tokens:
                if not isinstance(token, int | np.integer):
                    wrong = f"prediction holds {token!r:.60}, which isn't a token id."
                    raise RequestError(wrong) from error
            raise RequestError(f"prediction is refused: {error}") from error

    def _constraint(self, request: Request) -> Constraint | None:
        """What limits the tokens of a request's samples."""
        structure = request.params.structure
        if structure is not None:
            return self._compiler().start(structure)
        return self.prefix_constraint(request)

    def _breakers(self, params: SamplingParams) -> frozenset[int]:
        """The tokens that hold one of DRY's sequence breakers."""
        if not params.dry_multiplier or not params.breakers:
            return frozenset()
        if self._breakers_in is None:
            raise RequestError(
                "dry_sequence_breakers need a tokenizer, but skip_tokenizer_init is set. Pass none "
                "of them."
            )
        return self._breakers_in.find(params.breakers)

    def _detokenizer(self, request: Request) -> IncrementalDetokenizer | None:
        """For one sample's output; `min_tokens` come before stop strings count."""
        params = request.params
        if self.tokenizer is None or not params.detokenize:
            return None
        return IncrementalDetokenizer(
            self.tokenizer,
            prompt_ids=request.given,
            skip_special_tokens=params.skip_special_tokens,
            stop=() if params.min_tokens else params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_bytes=len(request.prefix),
        )

    def checked(self, prompt: Seq[int], generates: bool = True) -> list[int]:
        """A prompt as plain ids. Raises InvalidPromptError for one that can't be computed."""
        try:
            tokens = np.asarray(prompt)
        except (ValueError, OverflowError) as error:
            raise InvalidPromptError(f"A prompt must be a list of token ids: {error}.") from error
        if tokens.size == 0:
            raise InvalidPromptError("The prompt is empty. Give at least one token.")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise InvalidPromptError(
                f"A prompt must be a flat list of integer token ids, not {tokens.dtype} of shape "
                f"{list(tokens.shape)}."
            )
        outside = tokens[(tokens < 0) | (tokens >= self.vocab_size)]
        if len(outside):
            raise InvalidPromptError(
                f"Token id {outside[0]} is outside the vocabulary of {self.vocab_size}."
            )
        ids: list[int] = tokens.tolist()
        if self._vocab_map is not None:
            ids = self._vocab_map.write(ids, self._named)
        limit = self.max_len - generates
        if len(ids) > limit:
            raise InvalidPromptError(
                f"The prompt has {len(ids)} tokens, but "
                f"{'with at least one to generate ' if generates else ''}only {limit} fit into "
                f"max_model_len={self.max_len}. Shorten it."
            )
        return ids

    def _check_kept(self, params: SamplingParams) -> None:
        """Raises InvalidSamplingError for a token that the model can't give."""
        if self._vocab_map is None:
            return
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token in getattr(params, name) or ():
                if token < self.vocab_size and not self._vocab_map.has(token):
                    raise InvalidSamplingError(
                        f"{name} holds token id {token}{self._named(token)}, which isn't among the "
                        f"{len(self._vocab_map):,} of {self.vocab_size:,} that this model's "
                        "reduced vocabulary has, so it could never come. Leave it out, or keep "
                        "the token when the vocabulary is reduced."
                    )

    def _check_beginning(
        self, params: SamplingParams, constraint: Constraint, bad_words: Seq[Seq[int]]
    ) -> None:
        """Raises InvalidSamplingError where all with which the output may begin is banned."""
        banned: dict[str, set[int]] = {
            "allowed_token_ids": set(),
            "logit_bias": {t for t, x in (params.logit_bias or {}).items() if x <= BANS},
            "bad_words": {word[0] for word in bad_words if len(word) == 1},
        }
        allowed = params.allowed_token_ids
        if allowed is None and not any(banned.values()):
            return
        may = self._may_come(constraint)
        if allowed is not None:
            banned["allowed_token_ids"] = may - set(allowed)
        left = may
        for name, tokens in banned.items():
            left = left - tokens
            if not left:
                first = min(may)
                what = "token_healing" if params.token_healing else "its form"
                raise InvalidSamplingError(
                    f"{name} has no room for an output: {what} lets it begin with {len(may):,} "
                    f"tokens, such as {first}{self._named(first)}, and none of them is left. Allow "
                    "some."
                )

    def failure(self, sequence: Sequence, message: str) -> RequestError:
        """Why no token could be chosen; where a form met bans, which and where."""
        constraint, params = sequence.sampling.constraint, sequence.request.params
        if message.startswith(NOT_FINITE):
            return ModelOutputError(message)
        if constraint is None or not message.startswith(MASKED):
            return RequestError(message)
        try:
            may = self._may_come(constraint)
        except RequestError as error:
            return error
        above = sequence.num_output >= params.min_tokens
        given = {
            "allowed_token_ids": params.allowed_token_ids,
            "bad_words": params.banned_texts,
            "min_tokens": () if above else (params.min_tokens,),
            "logits_processors": params.logits_processors,
        }
        names = " and ".join(name for name, value in given.items() if value)
        first = min(may, default=0)
        such = f", such as {first}{self._named(first)}" if may else ""
        what = "its prompt's end" if sequence.request.prefix else "its form"
        return RequestError(
            f"Nothing is left for token {sequence.num_output + 1} of the output: {what} lets "
            f"{len(may):,} come there{such}, and {names or 'what else is asked'} bans them. "
            "Ban less, or loosen the form."
        )

    def explained(self, error: Exception, adapter: str | None = None) -> Exception:
        """What a request with this adapter failed of; numbers that aren't finite with where they
        come from.

        The first such request reads all weights for that, which takes about as long as a step.
        """
        if not isinstance(error, ModelOutputError):
            return error
        if self._why_not_finite is None:
            self._why_not_finite = why_not_finite(self._model.model, self._model.tensors)
        beside = "" if adapter is None else f" The request has the adapter {adapter!r}."
        return ModelOutputError(f"{error}{beside} {self._why_not_finite}")

    def _may_come(self, constraint: Constraint) -> set[int]:
        """The tokens that a constraint lets come next."""
        bits = np.zeros(num_words(self.vocab_size), dtype=np.int32)
        constraint.fill(bits)
        flags = np.unpackbits(bits.view(np.uint8), bitorder="little", count=self.vocab_size)
        return set(np.flatnonzero(flags).tolist())

    def _named(self, token: int) -> str:
        """What it looks like, where that is known."""
        return "" if self.tokenizer is None else self.tokenizer.quoted(token)

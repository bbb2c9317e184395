"""What could never run is refused before it is queued."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from penstock.cache import Pins
from penstock.cache.disk import DiskStore
from penstock.config import SchedulerConfig, SpeculativeConfig
from penstock.engine.options import RequestOptions
from penstock.errors import ConfigError, OutOfCacheError, RequestError
from penstock.sampling import BeamSearchParams, SamplingParams


class Refusals:
    """For one cache and one configuration."""

    def __init__(
        self,
        config: SchedulerConfig,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        longest: int,
    ) -> None:
        """longest: blocks of the longest sequence. Raises ConfigError where it wouldn't fit."""
        self._config = config
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._longest = longest
        what = f"max_model_len to {num_blocks * block_size}"
        if longest < -(-max_model_len // block_size):
            what = "the window (max_attention_window) or max_num_batched_tokens"
        if num_blocks < longest:  # it would give way to itself for ever
            raise OutOfCacheError(
                f"One sequence of max_model_len={max_model_len} needs {longest} blocks of "
                f"{block_size} tokens, but the cache holds {num_blocks}. Lower {what}, or give the "
                "cache more blocks."
            )
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"Without chunked prefill a prompt of max_model_len ({max_model_len}) must fit in "
                f"max_num_batched_tokens ({config.max_num_batched_tokens}). Raise the second, or "
                "lower the first."
            )

    def check_samples(self, n: int) -> None:
        """Raises RequestError for more samples of a prompt than can run at once."""
        if n > self._config.max_num_seqs:
            raise RequestError(
                f"n={n} samples can't run at once: max_num_seqs is {self._config.max_num_seqs}. "
                "Raise it, or send several requests."
            )

    def check_together(self, n: int, lengths: Seq[int], max_tokens: int | None) -> None:
        """Raises RequestError for samples made of several sequences that can't all run at once.

        n: samples; lengths: of the prompt of each of a sample's sequences.
        """
        most, seqs = self._config.max_num_batched_tokens, self._config.max_num_seqs
        if len(lengths) * n > seqs or len(lengths) > most:
            raise RequestError(
                f"{n} samples of {len(lengths)} sequences each can't run at once: "
                f"max_num_seqs is {seqs}, max_num_batched_tokens {most}. Raise them, or ask for "
                "fewer."
            )
        room = self._max_model_len
        ends = [min(length + (max_tokens or room), room) for length in lengths]
        # whoever starts leaves a block for each that runs
        most_blocks = [min(-(-end // self._block_size), self._longest) for end in ends]
        blocks = n * sum(count + 1 for count in most_blocks)
        if blocks > self._num_blocks:
            raise RequestError(
                f"{n * len(lengths)} sequences that run together may need {blocks} blocks "
                f"of {self._block_size} tokens, but the cache holds {self._num_blocks}. Lower "
                "max_tokens, or give the cache more blocks."
            )


def check_options(
    options: object,
    tokens: list[int],
    pins: Pins | None,
    disk: DiskStore | None,
    generates: bool = True,
) -> None:
    """Raises RequestError for options that aren't any, or one that can't take effect.

    tokens: the prompt's; pins: None where no prefix is cached; disk: None where none is kept there.
    """
    if not isinstance(options, RequestOptions):
        raise RequestError(f"Options must be RequestOptions, not {type(options).__name__}.")
    if options.hand_over and disk is None:
        raise RequestError(
            "hand_over can't take effect: nothing is kept on disk. Start with prefix_cache_dir."
        )
    if options.hand_over and not generates:
        raise RequestError("hand_over can't take effect: nobody goes on with an embedding.")
    if options.hand_over and options.adapter is not None:
        raise RequestError(
            "hand_over can't take effect: blocks of adapters aren't kept on disk. Leave one out."
        )
    most = max((pin.tokens for pin in options.pins), default=0)
    if not most:
        return
    if pins is None:
        raise RequestError(
            f"A pin of {most} tokens can't take effect: enable_prefix_caching is off."
        )
    pins.check(min(most, len(tokens)))


def check_prediction(
    options: RequestOptions, params: object, speculative: SpeculativeConfig | None
) -> None:
    """Raises RequestError for a prediction by which nobody would guess."""
    if options.prediction is None:
        return
    if speculative is None or not speculative.reads_predictions:
        by = "no drafts" if speculative is None else f"drafts by {speculative.method}"
        raise RequestError(
            f"prediction has no effect: there are {by} here. Leave it out, or start with the "
            'speculative_config {"method": "ngram"}, or "suffix".'
        )
    why = None
    if not isinstance(params, SamplingParams):
        what = "a beam search" if isinstance(params, BeamSearchParams) else "an embedding"
        why = f"{what} has no drafts"
    elif params.guidance_scale != 1.0:
        why = "guidance_scale samples from two sequences at once"
    elif params.mirostat or params.logits_processors:
        name = "mirostat" if params.mirostat else "logits_processors"
        why = f"with {name} what comes depends on more than the tokens before it"
    if why is not None:
        raise RequestError(f"prediction has no effect: {why}. Leave one of them out.")

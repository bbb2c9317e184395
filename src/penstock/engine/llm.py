"""`LLM`: generate for lists of prompts, in the calling thread."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.config import DEFAULT_MODEL, EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.lora import (
    Hold,
    LoRARequest,
    adapters_of,
    load_adapter,
    naming,
)
from penstock.engine.options import RequestOptions
from penstock.engine.outputs import BeamSearchOutput, RequestOutput
from penstock.engine.pooling import EmbeddingRequestOutput, PoolingParams
from penstock.engine.prompts import (
    Prompt,
    check_chat,
    default_params,
    encode,
    encode_chat,
    split,
    split_chats,
)
from penstock.engine.remembering import HANDS_OVER_S, LOOKS_S, Keeping
from penstock.errors import ConfigError, InvalidSamplingError, RequestError, TokenizerError
from penstock.models.vision.pictures import Pictures
from penstock.models.weights import Progress
from penstock.runtime import load_runtime
from penstock.sampling import BeamSearchParams, SamplingParams
from penstock.tokenizer import Tokenizer


class LLM:
    """A model and its engine.

    model: a folder, a .gguf file, a hub id, an engine folder that `penstock build` has made, or
    nothing for the embedded model. Further arguments are those of `penstock.config` by name: dtype,
    max_model_len, max_num_seqs, max_num_batched_tokens, block_size, num_gpu_blocks_override,
    enable_prefix_caching, skip_tokenizer_init, seed, … An unknown one is an error.
    """

    def __init__(
        self,
        /,
        model: str | Path = DEFAULT_MODEL,
        *,
        progress: Progress | None = None,
        **kwargs: Any,
    ) -> None:
        config = EngineConfig.of(model=model, **kwargs)
        self.runtime = load_runtime(config, progress)
        self.engine = Engine(config, self.runtime)
        self.config = self.engine.config
        self._count = 0
        self._running = threading.Lock()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete one prompt or several; outputs in their order.

        A prompt is a text, a list of token ids, or a dictionary with `prompt` or
        `prompt_token_ids`, and for models that see `multi_modal_data`: {"image": …}. Every prompt
        is checked before any is run. Ctrl-C ends the requests and leaves the engine ready for
        others. lora_request: of all, or one for each.
        """
        items = split(prompts)
        params = self._params_for(sampling_params, len(items))
        return self._serve(items, params, options, self.engine.add_request, use_tqdm, lora_request)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of one prompt or several, as `generate` takes them.

        All searches run in one batch. Raises what a prompt's search failed of.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidSamplingError(
                f"A beam search's parameters must be BeamSearchParams, not {type(params).__name__}."
            )
        items = split(prompts)
        each = [params] * len(items)
        add = self.engine.add_request
        found = self._serve(items, each, options, add, use_tqdm, lora_request)
        outputs = []
        for output in found:
            if output.error is not None:
                raise output.error
            text = output.prompt
            if text is None and self.runtime.tokenizer is not None:
                text = self.runtime.tokenizer.decode(output.prompt_token_ids)
            outputs.append(BeamSearchOutput.of(output, text or ""))
        return outputs

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = False,
    ) -> list[EmbeddingRequestOutput]:
        """Embed one prompt or several, as `generate` takes them; outputs in their order.

        `output.outputs.embedding` is the vector. Raises what a prompt's pass failed of.
        """
        items = split(prompts)
        params = _for_each(pooling_params, len(items), "pooling parameters")
        add = self.engine.add_pooling_request
        outputs = self._serve(items, params, options, add, use_tqdm, lora_request)
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    def _serve(
        self,
        items: list[Prompt],
        params: list[Any],
        options: RequestOptions | Sequence[RequestOptions] | None,
        add: Callable[..., None],
        use_tqdm: bool,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None,
    ) -> list[RequestOutput]:
        """Run one request for each item; `add` queues one."""
        if not self._running.acquire(blocking=False):
            raise RequestError(
                "Another thread is in this LLM, which runs one call at a time. Give it all prompts "
                "at once, or use AsyncLLM."
            )
        ids: list[str] = []
        try:
            tokenizer = self.runtime.tokenizer
            encoded = [encode(item, tokenizer, self._pictures) for item in items]
            wishes = _for_each(options, len(items), "options")
            adapters = _for_each(lora_request, len(items), "lora_requests")
            ids += (str(self._count + i) for i in range(len(items)))
            self._count += len(items)
            with interrupt_between_steps() as check:
                given = zip(ids, encoded, params, wishes, adapters, strict=True)
                for name, one, p, o, lora in given:
                    with self._adapting(one.options(o), lora) as wish:
                        add(name, one.tokens, p, prompt=one.text, options=wish)
                    check()
                found = self._run(ids, check, use_tqdm)
            for one, wish in zip(encoded, wishes, strict=True):
                if wish is not None and wish.hand_over:
                    _hand_over(Keeping.of(self.engine, one.tokens, one.options(wish) or wish))
            return found
        except BaseException:
            for request_id in ids:
                self.engine.abort(request_id, report=False)
            raise
        finally:
            self._running.release()

    @property
    def _pictures(self) -> Pictures | None:
        """How this model's pictures are cut, where it sees some."""
        return None if self.runtime.sight is None else self.runtime.sight.pictures

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template.

        A message is a mapping with a role and a content, or calls of tools instead. Every one is
        checked before any is answered: InvalidPromptError.
        """
        check_chat(sampling_params)
        prompts: list[Prompt] = [
            encode_chat(
                conversation,
                self.get_tokenizer(),
                self._pictures,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                **(chat_template_kwargs or {}),
            )
            for conversation in split_chats(messages)
        ]
        return self.generate(
            prompts,
            sampling_params,
            options=options,
            lora_request=lora_request,
            use_tqdm=use_tqdm,
        )

    @contextmanager
    def _adapting(
        self, options: RequestOptions | None, asked: LoRARequest | None
    ) -> Iterator[RequestOptions | None]:
        """Options that name the adapter that is asked for; it keeps its slot meanwhile."""
        if asked is None:
            yield options
            return
        hold = Hold(self.runtime, asked)
        try:
            yield naming(options, hold.take())
        finally:
            hold.let_go()

    def load_lora(self, name: str, path: str | Path) -> None:
        """Load the adapter in the folder `path`, in PEFT's layout, or an embedded one.

        Requests name it by `RequestOptions(adapter=name)` until `unload_lora`. Raises AdapterError
        where there is no slot for it, ModelError for one that doesn't fit the model.
        """
        load_adapter(self.runtime, name, path)

    def unload_lora(self, name: str) -> None:
        """Let nobody name an adapter any more. Raises AdapterError where there is none."""
        adapters_of(self.runtime).unload(name)

    def list_loras(self) -> list[str]:
        """The names of the adapters that are loaded, in the order in which they were."""
        return adapters_of(self.runtime).names

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer; an error where `skip_tokenizer_init` is set."""
        if self.runtime.tokenizer is None:
            raise TokenizerError("There is no tokenizer: skip_tokenizer_init is set.")
        return self.runtime.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses without sampling parameters: the checkpoint's own suggestion."""
        return default_params(self.runtime.model.generation)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix that no request uses, pinned or not."""
        self.engine.reset_prefix_cache()

    def stats(self) -> dict[str, Any]:
        """Blocks, prefix hit rate, preemptions, steps."""
        return self.engine.stats()

    def _params_for(self, given: Any, count: int) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        return _for_each(given, count, "sampling parameters")

    def _run(self, ids: list[str], check: Callable[[], None], show: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        missing = set(ids)
        with _bar(len(ids), show) as advance:
            while missing:
                for output in self.engine.step():
                    if output.request_id in missing:
                        missing.remove(output.request_id)
                        done[output.request_id] = output
                        advance()
                check()
        return [done[request_id] for request_id in ids]


def _hand_over(keep: Keeping) -> None:
    """Wait until a prompt's blocks are on disk, as far as that can be in time."""
    end = time.monotonic() + HANDS_OVER_S
    while keep.left and time.monotonic() < end:
        keep.queue()
        while not keep.settled and time.monotonic() < end:
            time.sleep(LOOKS_S)


def _for_each(given: Any, count: int, name: str) -> list[Any]:
    """One for each of `count` prompts; types are checked with the requests."""
    if not isinstance(given, list | tuple):
        return [given] * count
    if len(given) != count:
        raise ConfigError(
            f"{len(given)} {name} for {count} prompts. Give one for each, or one for all."
        )
    return list(given)


@contextmanager
def interrupt_between_steps() -> Iterator[Callable[[], None]]:
    """Let Ctrl-C wait for the end of a step: the yielded function raises KeyboardInterrupt then.

    A second Ctrl-C doesn't wait.
    """
    pressed = False

    def note(number: int, frame: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield check  # somebody else's handler stays
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _bar(total: int, show: bool) -> Iterator[Callable[[], None]]:
    if not show:
        yield lambda: None
        return
    from rich.progress import Progress as Bars

    with Bars(transient=True) as bars:
        task = bars.add_task("Requests", total=total)
        yield lambda: bars.advance(task)

"""`penstock serve`: an OpenAI-compatible server over one model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from penstock.cli.device_options import (
    PLACED,
    MmProcessor,
    Mmproj,
    NoMmproj,
    Placed,
    how_to_cut,
    through,
)
from penstock.cli.disk_options import PrefixCacheDir, PrefixCacheDiskSpace, on_disk
from penstock.cli.loading import settle_heap
from penstock.cli.lora_options import ADAPTERS, ServedAdapters
from penstock.cli.options import (
    CHAT_MODEL,
    Dtype,
    KvCacheDtype,
    MaxModelLen,
    Model,
    Quantization,
    SpeculativeConfig,
    given,
    grouped,
    speculation,
)
from penstock.cli.reach_options import MaxAttentionWindow, SinkTokenLength, reaching
from penstock.cli.server_options import (
    FRONT,
    NAMES,
    FrontOptions,
    check_extra,
    named,
    one_of,
    option,
)
from penstock.cli.stats import machine_peaks
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.engine import AsyncLLM

STEP_TOKENS = 512
"""A server's default: others wait for a prompt a quarter as long as with `LLM`'s 2,048 tokens, and
matrices are still computed at full speed."""
_SERVER, _SECURITY, _LIMITS, _ENGINE, _LOGS = "Server", "Security", "Limits", "Engine", "Logs"


T = TypeVar("T")

# What the configuration calls an option, where its messages name it.
_OPTIONS = NAMES | {
    "served_model_names": "--served-model-name",
    "truncation_retention": "--truncation-retention",
    "compaction_threshold": "--compaction-threshold",
    "response_store_mib": "--response-store-mib",
    "response_store_hours": "--response-store-hours",
    "max_stop_strings": "--max-stop-strings",
    "stall_timeout_s": "--stall-timeout",
    "starvation_s": "--starvation-time",
    "max_model_len": "--max-model-len",
    "max_attention_window": "--max-attention-window",
    "sink_token_length": "--sink-token-length",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "block_size": "--block-size",
    "num_blocks": "--num-gpu-blocks-override",
    "memory_fraction": "--gpu-memory-utilization",
    "preemption_mode": "--preemption-mode",
    "swap_space": "--swap-space",
    "tool_call_parser": "--tool-call-parser",
    "reasoning_parser": "--reasoning-parser",
    "policy(?==)": "--scheduling-policy",
    "^kv_cache_dtype": "--kv-cache-dtype",
    "^dtype": "--dtype",
    "^device": "--device",
    "^seed": "--seed",
}


@grouped
def serve(
    model: Model = CHAT_MODEL,
    front: FrontOptions = FRONT,
    served_model_name: Annotated[
        list[str] | None,
        option(help="Name for requests and answers; may be repeated.", panel=_SERVER),
    ] = None,
    chat_template: Annotated[
        Path | None, option(help="A template's file, instead of the model's own.", panel=_SERVER)
    ] = None,
    truncation: Annotated[
        str,
        option(
            help="Conversations that are too long: disabled refuses them, auto leaves out their "
            "oldest turns.",
            panel=_SERVER,
        ),
    ] = "disabled",
    truncation_retention: Annotated[
        float,
        option(
            help="auto: leave out turns until this share of what fits is left, so that the next "
            "requests begin alike and are found in the cache: 0.8.",
            panel=_SERVER,
        ),
    ] = 1.0,
    compaction_threshold: Annotated[
        int | None,
        option(
            help="Conversations whose prompt has more tokens than this: the model is asked for a "
            "summary of their older turns, which stands for them. Default: none are.",
            panel=_SERVER,
        ),
    ] = None,
    response_store_mib: Annotated[
        float,
        option(
            help="MiB for responses that are kept, so that requests can go on from them; 0: none "
            "are.",
            panel=_SERVER,
        ),
    ] = 64.0,
    response_store_hours: Annotated[
        float, option(help="Hours until one that nobody uses is forgotten.", panel=_SERVER)
    ] = 24.0,
    tool_call_parser: Annotated[
        str,
        option(
            help="How the model writes calls of tools; auto: as its chat template says.",
            panel=_SERVER,
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str,
        option(
            help="How the model marks its reasoning; auto: as its chat template says; none: it "
            "stays in the answer.",
            panel=_SERVER,
        ),
    ] = "auto",
    enable_auto_tool_choice: Annotated[
        bool,
        option(
            "--enable-auto-tool-choice/--no-enable-auto-tool-choice",
            help="Let the model choose whether to call a tool.",
            panel=_SERVER,
        ),
    ] = True,
    trust_request_chat_template: Annotated[
        bool,
        option(
            "--trust-request-chat-template",
            help="Take a chat template from a request.",
            panel=_SECURITY,
        ),
    ] = False,
    enable_tokenizer_info_endpoint: Annotated[
        bool,
        option(
            "--enable-tokenizer-info-endpoint",
            help="GET /tokenizer_info tells the tokenizer's configuration and the chat template.",
            panel=_SECURITY,
        ),
    ] = False,
    stall_timeout: Annotated[
        float,
        option(help="Seconds without a step until /ready says so.", panel=_LIMITS),
    ] = 120.0,
    max_stop_strings: Annotated[
        int, option(help="Stop strings, and bad words, of a request.", panel=_LIMITS)
    ] = 64,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    max_model_len: MaxModelLen = None,
    tokenizer: Annotated[
        str | None, option(help="A folder or hub id, where not the model's.", panel=_ENGINE)
    ] = None,
    max_num_seqs: Annotated[
        int | None, option(help="Sequences in one step.", panel=_ENGINE)
    ] = None,
    max_num_batched_tokens: Annotated[
        int,
        option(help="Tokens in one step: how long a prompt may hold up the others.", panel=_ENGINE),
    ] = STEP_TOKENS,
    block_size: Annotated[
        int | None, option(help="Tokens of a block of the cache.", panel=_ENGINE)
    ] = None,
    num_gpu_blocks_override: Annotated[
        int | None, option(help="Blocks of the cache.", panel=_ENGINE)
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        option(help="Share of the free memory that the cache may have.", panel=_ENGINE),
    ] = None,
    prefix_caching: Annotated[
        bool | None,
        option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Find prompts' beginnings in the cache.",
            panel=_ENGINE,
        ),
    ] = None,
    chunked_prefill: Annotated[
        bool,
        option(
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
            help="Compute long prompts in pieces, between others' tokens.",
            panel=_ENGINE,
        ),
    ] = True,
    jump_forward: Annotated[
        bool,
        option(
            "--enable-jump-forward/--no-enable-jump-forward",
            help="Tokens that a grammar forces take no step of their own.",
            panel=_ENGINE,
        ),
    ] = True,
    scheduling_policy: Annotated[
        str,
        option(
            help="Who goes first: fcfs, priority, sjf (shortest prompt) or edf (deadlines).",
            panel=_ENGINE,
        ),
    ] = "fcfs",
    ttft_slo_ms: Annotated[
        float | None, option(help="edf: to the first token, for all.", panel=_ENGINE)
    ] = None,
    tpot_slo_ms: Annotated[
        float | None, option(help="edf: to each further token, for all.", panel=_ENGINE)
    ] = None,
    starvation_time: Annotated[
        float | None,
        option(
            help="Seconds after which who waits goes first, whatever the policy.", panel=_ENGINE
        ),
    ] = None,
    preemption_mode: Annotated[
        str, option(help="Giving way: auto, recompute or swap.", panel=_ENGINE)
    ] = "auto",
    swap_space: Annotated[
        float | None, option(help="GiB for what is swapped out.", panel=_ENGINE)
    ] = None,
    adapters: ServedAdapters = ADAPTERS,
    placed: Placed = PLACED,
    speculative_config: SpeculativeConfig = None,
    mm_processor_kwargs: MmProcessor = None,
    mmproj: Mmproj = None,
    no_mmproj: NoMmproj = False,
    prefix_cache_dir: PrefixCacheDir = None,
    prefix_cache_disk_space: PrefixCacheDiskSpace = None,
    max_attention_window: MaxAttentionWindow = None,
    sink_token_length: SinkTokenLength = None,
    seed: Annotated[
        int | None, option(help="For requests without their own.", panel=_ENGINE)
    ] = None,
    log_prompts: Annotated[
        bool, option("--log-prompts", help="With what was said.", panel=_LOGS)
    ] = False,
    otlp_traces_endpoint: Annotated[
        str | None, option(help="OpenTelemetry collector (HTTP).", panel=_LOGS)
    ] = None,
) -> None:
    """Serve a model to OpenAI's and Anthropic's clients, and on a page at /.

    SIGTERM and Ctrl-C let running requests end.
    """
    check_extra()
    from penstock.config import EngineConfig
    from penstock.server import ServerConfig
    from penstock.server.lifecycle import serve as run
    from penstock.server.logs import configure

    one_of("--truncation", truncation, "disabled", "auto")
    _check_slos(scheduling_policy, {"ttft": ttft_slo_ms, "tpot": tpot_slo_ms})
    config = named(
        _OPTIONS,
        ServerConfig,
        **front.chosen(),
        served_model_names=tuple(served_model_name or ()),
        stall_timeout_s=stall_timeout,
        max_stop_strings=max_stop_strings,
        truncation="auto" if truncation == "auto" else "disabled",
        truncation_retention=truncation_retention,
        compaction_threshold=compaction_threshold,
        response_store_mib=response_store_mib,
        response_store_hours=response_store_hours,
        trust_request_chat_template=trust_request_chat_template,
        enable_tokenizer_info_endpoint=enable_tokenizer_info_endpoint,
        log_prompts=log_prompts,
        chat_template=None if chat_template is None else _read(chat_template),
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        enable_auto_tool_choice=enable_auto_tool_choice,
        otlp_endpoint=otlp_traces_endpoint,
        allow_runtime_lora_updating=adapters.allow_runtime_lora_updating,
    )
    modules = adapters.modules(served_model_name or [model])
    engine = named(
        _OPTIONS,
        EngineConfig.of,
        model=model,
        enable_prefix_caching=prefix_caching,
        enable_chunked_prefill=chunked_prefill,
        enable_jump_forward=jump_forward,
        policy=scheduling_policy,
        preemption_mode=preemption_mode,
        **placed.chosen(),
        **adapters.chosen(modules),
        **on_disk(prefix_cache_dir, prefix_cache_disk_space),
        **reaching(max_attention_window, sink_token_length),
        **through(mmproj, no_mmproj),
        **given(
            ttft_slo_s=None if ttft_slo_ms is None else ttft_slo_ms / 1000,
            tpot_slo_s=None if tpot_slo_ms is None else tpot_slo_ms / 1000,
            starvation_s=starvation_time,
            swap_space=swap_space,
            speculative_config=speculation(speculative_config),
            mm_processor_kwargs=how_to_cut(mm_processor_kwargs),
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
            tokenizer=tokenizer,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=_step_tokens(
                max_num_batched_tokens, chunked_prefill, max_num_seqs, model
            ),
            block_size=block_size,
            num_gpu_blocks_override=num_gpu_blocks_override,
            gpu_memory_utilization=gpu_memory_utilization,
            seed=seed,
        ),
    )
    _check_device(engine.model.device)
    configure(config.log_format)
    run(config, _loader(engine, modules))


def _check_device(name: str) -> None:
    """Raises ConfigError for a GPU that can't be used, before anybody could connect."""
    if name != "auto":
        from penstock.runtime.device import device_of

        device_of(name)


def _loader(config: EngineConfig, modules: dict[str, Path]) -> Callable[[], tuple[AsyncLLM, str]]:
    def load() -> tuple[AsyncLLM, str]:
        from penstock.engine import AsyncLLM
        from penstock.engine.lora import load_adapter
        from penstock.runtime.device import device_of

        device = device_of(config.model.device).torch
        if device.type == "cuda":
            machine_peaks(device)  # while it has memory to measure in
        llm = AsyncLLM.of(config)  # which refuses what can't be loaded before anything is measured
        llm.engine.ledger.peaks = machine_peaks(device)  # so that the engine knows its floor
        for name, folder in modules.items():
            load_adapter(llm.runtime, name, folder)
        settle_heap()
        return llm, str(config.model.model)

    return load


def _step_tokens(asked: int, chunked: bool, max_num_seqs: int | None, model: str) -> int | None:
    """The engine's own default where prompts aren't to be computed in pieces, or where it was
    built with one.
    """
    from penstock.runtime.engine_folder import is_engine

    if asked == STEP_TOKENS and (not chunked or is_engine(Path(model))):
        return None
    return max(asked, max_num_seqs or 0) if asked == STEP_TOKENS else asked


def _check_slos(policy: str, wanted_ms: dict[str, float | None]) -> None:
    for name, value in wanted_ms.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name}-slo-ms is {value:g}; it must be a time above 0.")
        if value is not None and policy != "edf":
            raise ConfigError(
                f"--{name}-slo-ms is for --scheduling-policy edf; {policy} doesn't heed it."
            )


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The chat template {path} can't be read: {error}.") from error

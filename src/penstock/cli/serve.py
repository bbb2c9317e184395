"""`penstock serve`: an OpenAI-compatible server over one model."""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock.cli.device_options import PLACED, MmProcessor, Placed, how_to_cut
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
from penstock.cli.stats import machine_peaks
from penstock.errors import ConfigError, MissingExtraError, get_extra

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.engine import AsyncLLM
    from penstock.server import Key, Limits

KEY_VARIABLE = "PENSTOCK_API_KEY"
STEP_TOKENS = 512
"""A server's default: others wait for a prompt a quarter as long as with `LLM`'s 2,048 tokens, and
matrices are still computed at full speed."""
_NEEDED = ("fastapi", "uvicorn", "prometheus_client")
_SERVER, _SECURITY, _LIMITS, _ENGINE, _LOGS = "Server", "Security", "Limits", "Engine", "Logs"


T = TypeVar("T")

# What the configuration calls an option, where its messages name it.
_OPTIONS = {
    "served_model_names": "--served-model-name",
    "allowed_hosts": "--allowed-host",
    "allowed_origins": "--allowed-origin",
    "max_queue_size": "--max-queue-size",
    "max_body_bytes": "--max-body-size",
    "max_stop_strings": "--max-stop-strings",
    "body_timeout_s": "--body-timeout",
    "request_timeout_s": "--request-timeout",
    "write_timeout_s": "--write-timeout",
    "shutdown_timeout_s": "--shutdown-timeout",
    "stall_timeout_s": "--stall-timeout",
    "starvation_s": "--starvation-time",
    "requests_per_minute": "--requests-per-minute",
    "tokens_per_minute": "--tokens-per-minute",
    "max_concurrency": "--max-concurrency",
    "max_model_len": "--max-model-len",
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
    "^port": "--port",
    "^host=": "--host ",
}


def _option(*names: str, help: str, panel: str) -> Any:  # noqa: A002
    return typer.Option(*names, help=help, rich_help_panel=panel)


@grouped
def serve(
    model: Model = CHAT_MODEL,
    host: Annotated[str, _option(help="Address to listen on.", panel=_SERVER)] = "127.0.0.1",
    port: Annotated[int, _option(help="Port; 0 is any free one.", panel=_SERVER)] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        _option(help="Name for requests and answers; may be repeated.", panel=_SERVER),
    ] = None,
    chat_template: Annotated[
        Path | None, _option(help="A template's file, instead of the model's own.", panel=_SERVER)
    ] = None,
    truncation: Annotated[
        str,
        _option(
            help="Conversations that are too long: disabled refuses them, auto leaves out their "
            "oldest turns.",
            panel=_SERVER,
        ),
    ] = "disabled",
    tool_call_parser: Annotated[
        str,
        _option(
            help="How the model writes calls of tools; auto: as its chat template says.",
            panel=_SERVER,
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str,
        _option(
            help="How the model marks its reasoning; auto: as its chat template says; none: it "
            "stays in the answer.",
            panel=_SERVER,
        ),
    ] = "auto",
    enable_auto_tool_choice: Annotated[
        bool,
        _option(
            "--enable-auto-tool-choice/--no-enable-auto-tool-choice",
            help="Let the model choose whether to call a tool.",
            panel=_SERVER,
        ),
    ] = True,
    shutdown_timeout: Annotated[
        float, _option(help="Seconds for running requests after SIGTERM.", panel=_SERVER)
    ] = 60.0,
    page: Annotated[bool, _option("--page/--no-page", help="The page at /.", panel=_SERVER)] = True,
    api_key: Annotated[
        list[str] | None,
        _option(
            help=f"Who knows one is let in; may be repeated. Or {KEY_VARIABLE}.", panel=_SECURITY
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        _option(help="TOML with a table \\[\\[key]] each: name, sha256, limits.", panel=_SECURITY),
    ] = None,
    allow_unauthenticated: Annotated[
        bool,
        _option(
            "--allow-unauthenticated",
            help="Listen beyond this machine without a key.",
            panel=_SECURITY,
        ),
    ] = False,
    allowed_host: Annotated[
        list[str] | None,
        _option(help="Host headers that are answered; may be repeated.", panel=_SECURITY),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        _option(
            "--allowed-origin",
            "--allowed-origins",
            help="Web sites whose scripts may call (CORS); may be repeated. * is all.",
            panel=_SECURITY,
        ),
    ] = None,
    trust_request_chat_template: Annotated[
        bool,
        _option(
            "--trust-request-chat-template",
            help="Take a chat template from a request.",
            panel=_SECURITY,
        ),
    ] = False,
    max_queue_size: Annotated[
        int, _option(help="Requests that may wait; beyond, 429.", panel=_LIMITS)
    ] = 2048,
    requests_per_minute: Annotated[int | None, _option(help="Of each key.", panel=_LIMITS)] = None,
    tokens_per_minute: Annotated[
        int | None, _option(help="Of each key: prompts and answers.", panel=_LIMITS)
    ] = None,
    max_concurrency: Annotated[
        int | None, _option(help="Requests of each key at once.", panel=_LIMITS)
    ] = None,
    request_timeout: Annotated[
        float | None, _option(help="Seconds to a request's end; 408.", panel=_LIMITS)
    ] = None,
    max_body_size: Annotated[
        int, _option(help="Bytes of a request's body; 413.", panel=_LIMITS)
    ] = 32 << 20,
    write_timeout: Annotated[
        float, _option(help="Seconds for a client to read what was sent.", panel=_LIMITS)
    ] = 60.0,
    body_timeout: Annotated[
        float, _option(help="Seconds for a request's headers, and then its body.", panel=_LIMITS)
    ] = 30.0,
    stall_timeout: Annotated[
        float,
        _option(help="Seconds without a step until /ready says so.", panel=_LIMITS),
    ] = 120.0,
    max_stop_strings: Annotated[
        int, _option(help="Stop strings, and bad words, of a request.", panel=_LIMITS)
    ] = 64,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    max_model_len: MaxModelLen = None,
    tokenizer: Annotated[
        str | None, _option(help="A folder or hub id, where not the model's.", panel=_ENGINE)
    ] = None,
    max_num_seqs: Annotated[
        int | None, _option(help="Sequences in one step.", panel=_ENGINE)
    ] = None,
    max_num_batched_tokens: Annotated[
        int,
        _option(
            help="Tokens in one step: how long a prompt may hold up the others.", panel=_ENGINE
        ),
    ] = STEP_TOKENS,
    block_size: Annotated[
        int | None, _option(help="Tokens of a block of the cache.", panel=_ENGINE)
    ] = None,
    num_gpu_blocks_override: Annotated[
        int | None, _option(help="Blocks of the cache.", panel=_ENGINE)
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        _option(help="Share of the free memory that the cache may have.", panel=_ENGINE),
    ] = None,
    prefix_caching: Annotated[
        bool | None,
        _option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Find prompts' beginnings in the cache.",
            panel=_ENGINE,
        ),
    ] = None,
    chunked_prefill: Annotated[
        bool,
        _option(
            "--enable-chunked-prefill/--no-enable-chunked-prefill",
            help="Compute long prompts in pieces, between others' tokens.",
            panel=_ENGINE,
        ),
    ] = True,
    jump_forward: Annotated[
        bool,
        _option(
            "--enable-jump-forward/--no-enable-jump-forward",
            help="Tokens that a grammar forces take no step of their own.",
            panel=_ENGINE,
        ),
    ] = True,
    scheduling_policy: Annotated[
        str,
        _option(
            help="Who goes first: fcfs, priority, sjf (shortest prompt) or edf (deadlines).",
            panel=_ENGINE,
        ),
    ] = "fcfs",
    ttft_slo_ms: Annotated[
        float | None, _option(help="edf: to the first token, for all.", panel=_ENGINE)
    ] = None,
    tpot_slo_ms: Annotated[
        float | None, _option(help="edf: to each further token, for all.", panel=_ENGINE)
    ] = None,
    starvation_time: Annotated[
        float | None,
        _option(
            help="Seconds after which who waits goes first, whatever the policy.", panel=_ENGINE
        ),
    ] = None,
    preemption_mode: Annotated[
        str, _option(help="Giving way: auto, recompute or swap.", panel=_ENGINE)
    ] = "auto",
    swap_space: Annotated[
        float | None, _option(help="GiB for what is swapped out.", panel=_ENGINE)
    ] = None,
    adapters: ServedAdapters = ADAPTERS,
    placed: Placed = PLACED,
    speculative_config: SpeculativeConfig = None,
    mm_processor_kwargs: MmProcessor = None,
    prefix_cache_dir: PrefixCacheDir = None,
    prefix_cache_disk_space: PrefixCacheDiskSpace = None,
    seed: Annotated[
        int | None, _option(help="For requests without their own.", panel=_ENGINE)
    ] = None,
    log_format: Annotated[str, _option(help="text or json.", panel=_LOGS)] = "text",
    log_requests: Annotated[
        bool, _option("--log-requests/--no-log-requests", help="A line each.", panel=_LOGS)
    ] = True,
    log_prompts: Annotated[
        bool, _option("--log-prompts", help="With what was said.", panel=_LOGS)
    ] = False,
    otlp_traces_endpoint: Annotated[
        str | None, _option(help="OpenTelemetry collector (HTTP).", panel=_LOGS)
    ] = None,
) -> None:
    """Serve a model to OpenAI's and Anthropic's clients, and on a page at /.

    SIGTERM and Ctrl-C let running requests end.
    """
    _check_extra()
    from penstock.config import EngineConfig
    from penstock.server import Limits, ServerConfig
    from penstock.server.lifecycle import serve as run
    from penstock.server.logs import configure

    limits = _named(Limits, requests_per_minute, tokens_per_minute, max_concurrency)
    _one_of("--truncation", truncation, "disabled", "auto")
    _one_of("--log-format", log_format, "text", "json")
    _check_slos(scheduling_policy, {"ttft": ttft_slo_ms, "tpot": tpot_slo_ms})
    config = _named(
        ServerConfig,
        host=host,
        port=port,
        served_model_names=tuple(served_model_name or ()),
        keys=_keys(api_key, api_key_file, limits),
        limits=limits,
        allow_unauthenticated=allow_unauthenticated,
        allowed_hosts=tuple(name.lower() for name in allowed_host or ()),
        allowed_origins=tuple(allowed_origin or ()),
        max_queue_size=max_queue_size,
        max_body_bytes=max_body_size,
        request_timeout_s=request_timeout,
        write_timeout_s=write_timeout,
        body_timeout_s=body_timeout,
        stall_timeout_s=stall_timeout,
        max_stop_strings=max_stop_strings,
        shutdown_timeout_s=shutdown_timeout,
        truncation="auto" if truncation == "auto" else "disabled",
        trust_request_chat_template=trust_request_chat_template,
        log_requests=log_requests,
        log_prompts=log_prompts,
        log_format="json" if log_format == "json" else "text",
        chat_template=None if chat_template is None else _read(chat_template),
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        enable_auto_tool_choice=enable_auto_tool_choice,
        otlp_endpoint=otlp_traces_endpoint,
        page=page,
        allow_runtime_lora_updating=adapters.allow_runtime_lora_updating,
    )
    modules = adapters.modules(served_model_name or [model])
    engine = _named(
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

        machine_peaks(device_of(config.model.device).torch)  # so that the engine knows its floor
        llm = AsyncLLM.of(config)
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


def _check_extra() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(f"The server needs {', '.join(missing)}; {get_extra('server')}.")


def _keys(texts: list[str] | None, file: Path | None, limits: Limits) -> tuple[Key, ...]:
    from penstock.server import keys_of, read_keys

    variable = os.environ.get(KEY_VARIABLE)
    if variable == "":  # a secret that wasn't set would let everybody in
        raise ConfigError(f"{KEY_VARIABLE} is empty. Unset it, or put the key there.")
    given_texts = texts or ([] if variable is None else [variable])
    found = keys_of(given_texts, limits)
    return tuple(found + (read_keys(file, limits) if file is not None else []))


def _check_slos(policy: str, wanted_ms: dict[str, float | None]) -> None:
    for name, value in wanted_ms.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name}-slo-ms is {value:g}; it must be a time above 0.")
        if value is not None and policy != "edf":
            raise ConfigError(
                f"--{name}-slo-ms is for --scheduling-policy edf; {policy} doesn't heed it."
            )


def _named(make: Callable[..., T], *values: Any, **fields: Any) -> T:
    """What `make` makes. Raises ConfigError in the words of the command line."""
    try:
        return make(*values, **fields)
    except ConfigError as error:
        message = str(error)
        for field, option in _OPTIONS.items():
            message = re.sub(rf"\b{field}\b", option, message)
        raise ConfigError(message) from error


def _one_of(name: str, value: str, *allowed: str) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} is {value!r}; it must be {' or '.join(allowed)}.")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The chat template {path} can't be read: {error}.") from error

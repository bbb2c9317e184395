"""`penstock plan`: the memory, the floor and the price of a model, without loading it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import MODEL, Dtype, KvCacheDtype, Model, Quantization, given, grouped
from penstock.cli.reach_options import MaxAttentionWindow, SinkTokenLength, reaching
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.hardware import AnyPeaks, Compute
    from penstock.roofline.outlook import Load, Outlook
    from penstock.runtime.device import Device as Placed
    from penstock.runtime.footprint import Footprint

_MACHINE = "Another machine"
_CACHED = 256 << 20
"""Bytes beyond which even large caches are no faster than memory."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One that isn't this one, or what of this one a model may have."""

    device: Annotated[
        str,
        typer.Option(
            metavar="auto|cpu|cuda",
            help="auto: a GPU where one can be used, else the CPU. cuda: a GPU, here or not.",
            rich_help_panel=_MACHINE,
        ),
    ] = "auto"
    memory: Annotated[
        float | None,
        typer.Option(
            metavar="GIB",
            help="Memory. Default: what is free here; nothing where --bandwidth and --tflops name "
            "another machine.",
            rich_help_panel=_MACHINE,
        ),
    ] = None
    bandwidth: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S",
            help="Read from memory. Default: as measured here.",
            rich_help_panel=_MACHINE,
        ),
    ] = None
    tflops: Annotated[
        float | None,
        typer.Option(
            metavar="TFLOP/S",
            help="Of dense products in bfloat16; 8 bits count twice, float32 as much. Default: as "
            "measured here.",
            rich_help_panel=_MACHINE,
        ),
    ] = None

    @property
    def is_named(self) -> bool:
        """Whether everything is said that would else be measured here."""
        return self.bandwidth is not None and self.tflops is not None

    def check(self) -> None:
        """Raises ConfigError for figures that no machine has."""
        for name in ("memory", "bandwidth", "tflops"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1e9:
                raise ConfigError(f"--{name} must be above 0 and below 1e9, not {value:g}.")
        if (self.bandwidth is None) != (self.tflops is None):
            raise ConfigError(
                "--bandwidth and --tflops describe one machine: give both, or neither for this one."
            )


MACHINE = Machine()


@grouped
def plan(
    model: Model = MODEL,
    input_len: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a prompt. Default: 512, or what the model has."),
    ] = None,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="Sequences at once.")] = 1,
    cached: Annotated[
        float, typer.Option(min=0, max=1, help="Share of a prompt that is found in the cache.")
    ] = 0.0,
    usd_hour: Annotated[
        float | None, typer.Option(help="What the machine costs an hour: gives prices of tokens.")
    ] = None,
    share: Annotated[
        float,
        typer.Option(
            help="Share of the floor that is reached (penstock bench latency measures it). "
            "1: times are the least."
        ),
    ] = 1.0,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that one step takes. Default: 2048.")
    ] = None,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    max_attention_window: MaxAttentionWindow = None,
    sink_token_length: SinkTokenLength = None,
    machine: Machine = MACHINE,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a model takes of memory, how fast it can be at most, and what its tokens cost.

    Nothing is loaded: headers are enough, or config.json alone (docs/plan.md).
    """
    from penstock.config import EngineConfig
    from penstock.roofline.outlook import Load

    machine.check()
    _check(concurrency, max_num_batched_tokens, share, usd_hour)
    prompt = _prompt(model, input_len, output_len, max_attention_window is None)
    config = EngineConfig.of(
        model=model,
        max_model_len=prompt + output_len,
        max_num_seqs=concurrency,
        skip_tokenizer_init=True,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        **given(max_num_batched_tokens=max_num_batched_tokens),
        **reaching(max_attention_window, sink_token_length),
    )
    load = Load(
        prompt,
        output_len,
        concurrency,
        _hit(cached, prompt, config.cache.block_size),
        config.scheduler.max_num_batched_tokens,
    )
    planned = _planned(config, load, machine, share, usd_hour)
    if as_json:
        typer.echo(json.dumps({"model": model, **planned.as_dict()}, indent=2))
    else:
        _print(model, planned)


def _check(
    concurrency: int, max_num_batched_tokens: int | None, share: float, usd_hour: float | None
) -> None:
    """Raises ConfigError for a load or a price that can't be."""
    from penstock.config.parts import MAX_NUM_BATCHED_TOKENS

    if usd_hour is not None and not 0 < usd_hour < 1e9:
        raise ConfigError(f"--usd-hour must be above 0 and below 1e9, not {usd_hour:g}.")
    if not 0 < share <= 1:
        raise ConfigError(f"--share must be above 0 and at most 1, not {share:g}.")
    if concurrency > (max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS):
        raise ConfigError(
            f"--concurrency {concurrency:,} needs --max-num-batched-tokens {concurrency} or more: "
            "a step that decodes has a token of each sequence."
        )


def _planned(
    config: EngineConfig, load: Load, machine: Machine, share: float, usd_hour: float | None
) -> Planned:
    from penstock.roofline.cost import CostModel
    from penstock.roofline.outlook import outlook
    from penstock.runtime.footprint import footprint

    device = _device(machine)
    found = footprint(config, device, load.concurrency * load.input_len)
    peaks = _peaks(machine, device)
    costs = CostModel(found.decoder, found.described.formats, found.layout, found.described.dtype)
    seen = outlook(costs, peaks, load)
    process = _process(device)
    available = _available(machine, device, process)
    most = None if available is None else _most(found, load, available - process)
    return Planned(found, load, seen, peaks, process, available, most, share, usd_hour)


@dataclass(frozen=True, slots=True)
class Planned:
    """All that is told."""

    found: Footprint
    load: Load
    outlook: Outlook
    peaks: AnyPeaks
    process: int  # bytes that Python and torch take of the same memory
    available: int | None  # bytes; None: nobody said
    most: int | None  # sequences of the load that fit at once
    share: float
    usd_hour: float | None

    @property
    def computes(self) -> Compute:
        """What products of activations as they are run in."""
        return "float32" if self.found.described.dtype.itemsize == 4 else "bfloat16"

    @property
    def may_stay_in_cache(self) -> bool:
        """Whether a CPU's cache may hold all that a step reads, which it then gets sooner."""
        return not self.found.device.is_gpu and self.found.weights + self.cache < _CACHED

    @property
    def cache(self) -> int:
        """Bytes of the load's keys and values."""
        return self.found.cache_bytes(self.load.concurrency, self.load.tokens)

    @property
    def total(self) -> int:
        return self.found.total(self.load.concurrency, self.load.tokens) + self.process

    @property
    def num_blocks(self) -> int:
        """That hold the load, with one for each to grow into, as the scheduler wants it."""
        load = self.load
        return self.found.blocks(load.concurrency, load.tokens) + load.concurrency

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints: bytes, seconds and dollars."""
        found, seen, share = self.found, self.outlook, self.share
        data: dict[str, Any] = {
            "family": found.described.spec.family,
            "dtype": str(found.described.dtype).removeprefix("torch."),
            "weight_formats": found.described.formats.described,
            "load": asdict(self.load),
            "memory": {
                "weights_bytes": found.weights,
                "kv_cache_dtype": found.layout.stored,
                "kv_bytes_per_token": found.kv_bytes_per_token,
                "kv_cache_bytes": self.cache,
                "num_blocks": self.num_blocks,
                "workspace_bytes": found.workspace,
                "process_bytes": self.process,
                "total_bytes": self.total,
                "available_bytes": self.available,
                "fits": None if self.available is None else self.total <= self.available,
                "max_sequences": self.most,
            },
            "speed": {
                "read_bytes_per_s": self.peaks.read_bytes_per_s,
                "share_of_floor": share,
                "prefill_s": seen.prefill_s / share,
                "prefill_bound": seen.prefill_bound,
                "decode_step_s": seen.decode_s / share,
                "decode_bound": seen.decode_bound,
                "requests_per_s": seen.requests_per_s * share,
                "output_tokens_per_s": seen.output_tokens_per_s * share,
            },
        }
        if self.usd_hour is not None:
            data["cost"] = {"usd_hour": self.usd_hour, **self.prices(self.usd_hour)}
        return data

    def prices(self, usd_hour: float) -> dict[str, float]:
        """Dollars of a million tokens, and of a thousand requests."""
        seen, dear = self.outlook, usd_hour / self.share
        return {
            "usd_per_million_input_tokens": seen.usd_per_million_input(dear),
            "usd_per_million_output_tokens": seen.usd_per_million_output(dear),
            "usd_per_thousand_requests": dear / 3600 * seen.request_s * 1000,
        }


def _prompt(model: str, asked: int | None, output_len: int, sees_all: bool) -> int:
    """Tokens of a prompt. Raises ConfigError for more than the model has positions, of which it
    sees all.
    """
    from penstock.bench.workload import check_length, longest

    prompt = asked or max(1, min(512, longest(model) - output_len))
    if sees_all:
        check_length(model, prompt, output_len, "--input-len or --output-len")
    return prompt


def _device(machine: Machine) -> Placed:
    import torch

    from penstock.runtime.device import Device, device_of

    if machine.device.partition(":")[0] != "cuda":
        return device_of(machine.device)
    if machine.is_named:  # needn't be here
        return Device(torch.device("cuda"), by_triton=True)
    try:
        return device_of(machine.device)
    except ConfigError as error:
        raise ConfigError(
            f"{error} To plan for a GPU that isn't here, give --memory, --bandwidth and --tflops."
        ) from error


def _process(device: Placed) -> int:
    """What a process has that has imported what an engine imports: this one."""
    if device.is_gpu:
        return 0
    from importlib import import_module

    from penstock.hardware import resident_bytes

    import_module("penstock.engine")
    return resident_bytes()


def _available(machine: Machine, device: Placed, process: int) -> int | None:
    """Bytes; of this machine those that are free, and what this process has of them."""
    if machine.memory is not None:
        return int(machine.memory * (1 << 30))
    return None if machine.is_named else device.available_bytes + process


def _most(found: Footprint, load: Load, room: int) -> int:
    """The most sequences of the load that `room` bytes hold, and that one step decodes."""
    from bisect import bisect_right

    def total(sequences: int) -> int:
        of_these = found.of_more(sequences, sequences * load.input_len)
        return of_these.total(sequences, load.tokens)

    return bisect_right(range(1, load.chunk + 1), room, key=total)


def _hit(cached: float, prompt: int, block_size: int) -> int:
    """Tokens of a prompt that are found: whole blocks, and never its last token."""
    hit = min(int(cached * prompt), prompt - 1) // block_size * block_size
    if cached and not hit:
        raise ConfigError(
            f"--cached {cached:g} of {prompt:,} tokens is less than a block of {block_size}, and "
            "whole blocks are found. Raise it, or leave it out."
        )
    return hit


def _peaks(machine: Machine, device: Placed) -> AnyPeaks:
    from penstock.hardware import GpuPeaks, Peaks
    from penstock.roofline import peaks_on

    if machine.bandwidth is None or machine.tflops is None:
        return peaks_on(device.torch)
    read, flops = machine.bandwidth * 1e9, machine.tflops * 1e12
    if not device.is_gpu:
        return Peaks(read, flops, 0.0, 0, "", int8_ops=2 * flops)
    twice = 2 * flops
    return GpuPeaks(read, read, flops, flops, flops, flops, twice, twice, 0.0, "", "")


def _print(model: str, planned: Planned) -> None:
    from rich.console import Console

    from penstock.bench.report import rate
    from penstock.cli.doctor import pairs

    found, console = planned.found, Console(highlight=False, soft_wrap=True)
    described, decoder, peaks = found.described, found.decoder, planned.peaks
    rows = [
        (
            "Model",
            f"{model}: {described.spec.family}, {len(decoder.layers)} layers of {decoder.hidden}, "
            f"{described.formats.name}" + ("" if described.source else ", without its weights"),
        ),
        *_memory(planned),
        (
            "Peaks",
            f"{peaks.read_bytes_per_s / 1e9:.1f} GB/s, {rate(peaks.of(planned.computes))} in "
            f"{planned.computes}, {rate(peaks.of('int8'))} in int8"
            + (f"; measured {peaks.measured_at[:16]}" if peaks.measured_at else ", as given"),
        ),
        *_speed(planned),
    ]
    console.print(pairs(rows))


def _memory(planned: Planned) -> list[tuple[str, str]]:
    from penstock.bench.report import amount

    found, load, total = planned.found, planned.load, amount(planned.total, "B")
    sequences = f"{load.concurrency:,} × {load.tokens:,} tokens"
    horizon = found.horizon
    window = f", the last {horizon.window:,} of each" if horizon else ""
    if horizon.sink_tokens:
        window += f" and the first {horizon.sink_tokens}"
    fits = ", compared with nothing: --memory says what there is"
    if planned.available is not None:
        free = amount(planned.available, "B")
        fits = f"; {'fits' if planned.total <= planned.available else 'DOES NOT FIT'} in {free}"
        fits += f", which hold up to {planned.most:,} such sequences"
    return [
        ("Weights", amount(found.weights, "B")),
        (
            "Keys and values",
            f"{amount(planned.cache, 'B')}: {sequences} of {found.kv_bytes_per_token:,} B in "
            f"{found.layout.stored}{window} (num_blocks={planned.num_blocks:,})",
        ),
        (
            "Workspace",
            f"{amount(found.workspace, 'B')}, of steps of up to {found.workspace_tokens:,} tokens",
        ),
        *([("Process", amount(planned.process, "B"))] if planned.process else []),
        ("In all", f"{total}{fits}"),
    ]


def _speed(planned: Planned) -> list[tuple[str, str]]:
    from penstock.bench.report import percent, seconds

    load, seen, share = planned.load, planned.outlook, planned.share
    bounds = share == 1 and not planned.may_stay_in_cache
    least, most = ("at least ", "at most ") if bounds else ("", "")
    together = f" of {load.concurrency:,} sequences" if load.concurrency > 1 else ""
    hit = f", {load.cached_len:,} of them cached" if load.cached_len else ""
    rows = [
        (
            "A prompt",
            f"of {load.input_len:,} tokens{hit}: {least}{seconds(seen.prefill_s / share)}, bound "
            f"by {seen.prefill_bound}",
        ),
        (
            "A token",
            f"{least}{seconds(seen.decode_s / share)}, bound by {seen.decode_bound}: "
            f"{most}{seen.decode_tokens_per_s * share:,.1f} tokens/s{together}",
        ),
        (
            "Requests",
            f"{seen.requests_per_s * 3600 * share:,.1f} an hour, "
            f"{seen.output_tokens_per_s * share:,.1f} tokens/s, each prompt in steps of its own",
        ),
    ]
    if planned.may_stay_in_cache:
        rows.append(
            ("Beyond", "a CPU's cache may hold all that a step reads: then tokens come sooner")
        )
    if share < 1:
        rows.append(("Share", f"{percent(share)} of the floor, as was asked for"))
    if planned.usd_hour is not None:
        prices = planned.prices(planned.usd_hour)
        answers = prices["usd_per_million_output_tokens"]
        of_answers = f"${answers:.4g} a million output tokens, " if load.output_len > 1 else ""
        rows.append(
            (
                "Price",
                f"${prices['usd_per_million_input_tokens']:.4g} a million input tokens, "
                f"{of_answers}"
                f"${prices['usd_per_thousand_requests']:.4g} a thousand requests",
            )
        )
    return rows

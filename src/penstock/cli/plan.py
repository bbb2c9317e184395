"""`penstock plan`: the memory, the floor and the price of a model, without loading it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.device_options import (
    EnableExpertParallel,
    PipelineParallelSize,
    TensorParallelSize,
)
from penstock.cli.options import MODEL, Dtype, KvCacheDtype, Model, Quantization, given, grouped
from penstock.cli.planned import Planned, Processes, noted_bytes, show
from penstock.cli.reach_options import MaxAttentionWindow, SinkTokenLength, reaching
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.config import EngineConfig
    from penstock.hardware import AnyPeaks
    from penstock.roofline.outlook import Load
    from penstock.runtime.device import Device as Placed
    from penstock.runtime.footprint import Footprint

_MACHINE = "Another machine"


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
    tensor_parallel_size: TensorParallelSize = None,
    pipeline_parallel_size: PipelineParallelSize = None,
    enable_expert_parallel: EnableExpertParallel = False,
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
        **given(
            max_num_batched_tokens=max_num_batched_tokens,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            enable_expert_parallel=enable_expert_parallel or None,
        ),
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
        show(model, planned)


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
    from penstock.runtime.footprint import footprints
    from penstock.runtime.sizing import layout_of

    device = _device(machine)
    parts = footprints(config, device, load.concurrency * load.input_len)
    found = parts[0]
    peaks = _peaks(machine, device)
    whole = layout_of(config, found.model, device)
    costs = CostModel(found.decoder, found.described.formats, whole, found.described.dtype)
    seen = outlook(costs, peaks, load)
    processes = _processes(device, len(parts))
    available = _available(machine, device, processes.own)
    most = None if available is None else _most(parts, load, available - processes.total)
    return Planned(parts, load, seen, peaks, processes, available, most, share, usd_hour)


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


def _processes(device: Placed, count: int) -> Processes:
    """What a process has that has imported what an engine imports: this one; and those of ranks."""
    if device.is_gpu:
        return Processes(0)
    from importlib import import_module

    from penstock.hardware import resident_bytes, resident_file_bytes
    from penstock.runtime.rank import empty_bytes

    import_module("penstock.engine")
    own = resident_bytes()
    if count == 1:
        return Processes(own)
    return Processes(own, empty_bytes(), resident_file_bytes(), count - 1)


def _available(machine: Machine, device: Placed, process: int) -> int | None:
    """Bytes; of this machine those that are free, and what this process has of them."""
    if machine.memory is not None:
        return int(machine.memory * (1 << 30))
    return None if machine.is_named else device.available_bytes + process


def _most(parts: Sequence[Footprint], load: Load, room: int) -> int:
    """The most sequences of the load that `room` bytes hold, and that one step decodes."""
    from bisect import bisect_right

    from penstock.runtime.footprint import total_of

    def total(sequences: int) -> int:
        of_these = [part.of_more(sequences, sequences * load.input_len) for part in parts]
        noted = noted_bytes(parts[0], sequences, load.tokens)
        return total_of(of_these, sequences, load.tokens) + noted

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

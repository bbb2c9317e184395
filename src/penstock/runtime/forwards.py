"""How a loaded decoder's steps run over a cache: as one native call, a package, or one by one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from penstock.config import CompilationConfig, ModelConfig
from penstock.errors import ConfigError, KernelError, OutOfCacheError, WeightsError
from penstock.kernels import native
from penstock.nn import Decoder
from penstock.runtime.device import Device, lacks_memory
from penstock.runtime.engine_folder import PACKAGE, EngineFolder
from penstock.runtime.graphs import GraphForward, StepLimits
from penstock.runtime.package import PackageForward
from penstock.runtime.plan import Plan, fixed_tensors, record
from penstock.runtime.program import MOST_TOKENS, Program
from penstock.runtime.runner import Forward
from penstock.step import KV

logger = logging.getLogger("penstock")


def forward_of(
    decoder: nn.Module,
    kv: KV,
    eager: bool,
    what: str = "A step",
    *,
    adapted: bool = False,
    threads: int | None = None,
) -> Forward:
    """The whole decoder as one native call, unless its operators are to be called one by one.

    adapted: of steps with adapters. threads: for a native call, where others have the other cores.
    """
    if eager or native.handle is None:
        reason = "enforce_eager is set" if eager else native.reason
        logger.info("Operators are called one by one: %s.", reason)
        return decoder
    program = Program(decoder, kv, adapted=adapted)
    if threads is not None:
        program.use_threads([(MOST_TOKENS, threads)])
    logger.info("%s is one native call of %d operators.", what, len(program.calls))
    return program


def compilation_of(model: ModelConfig) -> CompilationConfig:
    """How a GPU's steps are put together."""
    if model.enforce_eager:
        return CompilationConfig(cudagraph_mode="none")
    return model.compilation or CompilationConfig()


def workspace_bytes(device: Device, model: ModelConfig) -> int:
    """What one decoder's attention may take beside a step: graphs keep theirs, as others do."""
    graphs = compilation_of(model).cudagraph_mode != "none"
    return device.workspace_bytes * (1 + graphs)


def forward_on(
    device: Device, decoder: nn.Module, kv: KV, limits: StepLimits, model: ModelConfig
) -> Forward:
    """The decoder on a GPU: by graphs, by compiled code, or kernel by kernel."""
    forward = GraphForward(decoder, kv, device, limits, compilation_of(model))
    if device.is_gpu:
        begun = time.perf_counter()
        with _room_on(device):
            forward.warm_up()
        logger.info("Kernels compiled, graphs recorded in %.1f s.", time.perf_counter() - begun)
    return forward


def forward_beside(
    device: Device, module: nn.Module, kv: KV, eager: bool, what: str, sizes: tuple[int, int]
) -> Forward:
    """That of heads beside a decoder; on a GPU it runs kernel by kernel.

    sizes: the most rows of one step, and how many tokens of a row's logits are looked at.
    """
    if not device.by_triton:
        return forward_of(module, kv, eager, what)
    limits = StepLimits(sequences=1, tokens=sizes[0], width=1)
    forward = GraphForward(module, kv, device, limits, CompilationConfig(cudagraph_mode="none"))
    if device.is_gpu:
        with _room_on(device):
            forward.warm_up_heads(sizes[1])
    return forward


@contextmanager
def _room_on(device: Device) -> Iterator[None]:
    """Raises OutOfCacheError, with the way out, where a GPU's memory is used up."""
    try:
        yield
    except RuntimeError as error:
        if not lacks_memory(error):
            raise
        raise OutOfCacheError(
            f"The cache left too little of {device.torch} for graphs and activations: {error} "
            "Lower memory_fraction (gpu_memory_utilization), max_num_seqs or max_model_len."
        ) from error


def forward_of_engine(
    engine: EngineFolder, decoder: Decoder, kv: KV, eager: bool
) -> tuple[Forward, Callable[[], Plan] | None]:
    """That of an engine folder, and what gives the plan of hidden states where it has one."""
    if engine.forward == "package" and not eager:
        return _package(engine, kv), None
    if eager or native.handle is None:
        return forward_of(decoder, kv, eager), None
    step, hidden = engine.plans()
    tensors = fixed_tensors(decoder)
    if decoder.kept is None and decoder.placed is None:
        return _program(engine, step, tensors, kv), hidden
    # which the plan knows nothing of; nor has the decoder's own all products that were timed, where
    # the engine was built with fewer passes
    step, tensors = record(decoder, kv, tensors)
    seen = decoder.placed is not None
    return _program(engine, step, tensors, kv, recorded=True), None if seen else hidden


def _package(engine: EngineFolder, kv: KV) -> PackageForward:
    try:
        found = PackageForward(engine.folder / PACKAGE, engine.tensors())
    except (ConfigError, WeightsError) as error:
        raise engine.broken(str(error)) from error
    found.inputs.check_cache(kv)
    logger.info("A step is a call of a compiled package.")
    return found


def _program(
    engine: EngineFolder, plan: Plan, tensors: Mapping[str, Tensor], kv: KV, recorded: bool = False
) -> Program:
    """recorded: the plan was made now, so that what was timed need not be a part of it."""
    try:
        program = Program.of_plan(plan, tensors, kv)
    except (KernelError, RuntimeError, IndexError, ValueError, TypeError) as error:
        raise engine.broken(f"its plan and its weights disagree: {error}") from error
    program.reserve(engine.limits.profile[2], engine.limits.max_num_seqs)
    tuned = engine.tuned.among(program.products) if recorded else engine.tuned
    try:
        tuned.apply(program)
    except KernelError as error:
        raise engine.broken(f"what was timed isn't of its plan: {error}") from error
    return program

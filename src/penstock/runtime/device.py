"""Where a model runs: which memory, and how weights, keys and values lie in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.cache import PagedLatents, PagedLayout, PagedRows
from penstock.config import EngineConfig, ModelConfig
from penstock.errors import ConfigError, RankError
from penstock.hardware import detect
from penstock.kernels import interpreting, use_triton, why_not_on
from penstock.kernels.gpu import WORKSPACE
from penstock.nn import LayerSpec
from penstock.quant import PANELS, ROWS, UNORDERED_ROWS, Storage

_Dtype = torch.dtype  # a device has a `torch` of its own


@dataclass(frozen=True, slots=True)
class Device:
    """A CPU with its own kernels, or a GPU (a CPU that interprets its kernels) with Triton's."""

    torch: torch.device
    by_triton: bool

    def storage(self, ordered: bool = True) -> Storage:
        """How weights lie; ordered: and are multiplied in one order for any number of rows."""
        if not self.by_triton:
            return PANELS
        return ROWS if ordered else UNORDERED_ROWS

    def described(self, ordered: bool) -> str:
        """What decides the bits that are computed: any CPU's kernels give the same."""
        if not self.by_triton:
            return "cpu"
        name = torch.cuda.get_device_name(self.torch) if self.is_gpu else "interpreted"
        return f"{name}, {'ordered' if ordered else 'unordered'}"

    def layout(self, layers: Sequence[LayerSpec], stored: _Dtype, block_size: int) -> PagedLayout:
        """How the keys and values of these layers lie."""
        heads = tuple(layer.attention.cached for layer in layers)
        if any(layer.attention.latent is not None for layer in layers):
            return PagedLatents(heads, stored, block_size)
        return (PagedRows if self.by_triton else PagedLayout)(heads, stored, block_size)

    @property
    def is_gpu(self) -> bool:
        """Whether its memory is apart from the CPU's."""
        return self.torch.type == "cuda"

    @property
    def workspace_bytes(self) -> int:
        """That a kernel may take beside a step's tensors."""
        return WORKSPACE if self.by_triton else 0

    @property
    def few_rows(self) -> int:
        """Up to which kernels are launched in another way than beyond."""
        if not self.by_triton:
            return 0
        from penstock.kernels.triton.launch import FEW_ROWS  # needs Triton

        return FEW_ROWS

    @property
    def available_bytes(self) -> int:
        """Of its memory that is free."""
        if self.is_gpu:
            free, _ = torch.cuda.mem_get_info(self.torch)
            return (
                free
                + torch.cuda.memory_reserved(self.torch)
                - torch.cuda.memory_allocated(self.torch)
            )
        return detect().available_bytes


def lacks_memory(error: Exception) -> bool:
    """Whether a GPU had too little memory, or its host: for torch, its driver or Triton."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error).lower()


def is_fatal(error: Exception) -> bool:
    """Whether nothing can go on in this process after such an error: of a GPU, but for a lack of
    memory, or of another process that has a part of the model.
    """
    if isinstance(error, RankError):
        return True
    return isinstance(error, torch.AcceleratorError) and not lacks_memory(error)


CPU = Device(torch.device("cpu"), by_triton=False)


def check_device(config: EngineConfig, device: Device) -> None:
    """Raises ConfigError for what was chosen and isn't built for that device."""
    model = config.model
    if not device.is_gpu:
        _check_none_of_gpu(model, device)
    if not device.by_triton:
        return
    if config.cache.layout == "linear":
        raise ConfigError("layout='linear' is built for CPUs only. Leave it out.")
    if config.cache.kv_cache_dtype in ("int4", "kivi"):
        raise ConfigError(
            f"kv_cache_dtype={config.cache.kv_cache_dtype!r} is built for CPUs only. On a GPU "
            "choose fp8 or int8; or choose device='cpu'."
        )


def _check_none_of_gpu(model: ModelConfig, device: Device) -> None:
    """Raises ConfigError for what a GPU alone heeds."""
    asked = {"nvtx": model.nvtx}
    if not device.by_triton:
        asked["deterministic=False"] = model.deterministic is False
        asked["compilation_config"] = model.compilation is not None
    for name, given in asked.items():
        if given:
            reason = why_not_on(torch.device("cuda")) or "that was chosen, or an engine folder"
            raise ConfigError(
                f"{name} is for GPUs, and this model runs on the CPU: {reason}. Leave it out."
            )


def device_of(name: str) -> Device:
    """The device called auto, cpu, cuda or cuda:N; auto: a GPU where one can be used.

    Raises ConfigError, with the reason, for one that can't be.
    """
    if interpreting():
        if name not in ("auto", "cpu"):
            raise ConfigError(
                f"PENSTOCK_KERNELS=triton interprets the kernels on the CPU, so device={name!r} "
                "can't take effect. Leave one of them out."
            )
        use_triton(torch.device("cpu"))
        return Device(torch.device("cpu"), by_triton=True)
    if name.partition(":")[0] not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device={name!r} isn't one of auto, cpu, cuda, cuda:N.")
    found = torch.device("cuda" if name == "auto" else name)
    if found.type == "cuda":
        reason = why_not_on(found)
        if reason is None:
            use_triton(found)
            chosen = torch.device("cuda", found.index or 0)
            torch.cuda.set_device(chosen)  # this thread's: kernels are launched on the current one
            return Device(chosen, by_triton=True)
        if name != "auto":
            raise ConfigError(
                f"device={name!r} can't be used: {reason}. Leave it out to run on the CPU."
            )
    return CPU

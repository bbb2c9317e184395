"""Sizing the cache: as much as fits and helps, or an error with the numbers and the way out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from penstock.cache import PagedLayout
from penstock.config import CacheConfig, EngineConfig, SchedulerConfig
from penstock.errors import ConfigError, OutOfCacheError
from penstock.models.hub import resolve
from penstock.models.load import load_model
from penstock.nn import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec
from penstock.runtime import plan_blocks, plan_swap
from penstock.runtime.device import Device
from penstock.runtime.memory import COMFORTABLE_BYTES, SWAP_BYTES, activation_bytes
from penstock.runtime.sizing import layout_of, sized_cache

LAYOUT = PagedLayout(((4, 64),), torch.bfloat16, 32)  # 32 KiB a block, 1 KiB a token
KIB, MIB = 1 << 10, 1 << 20


def plan(
    available: int, length: int = 1024, seqs: int = 8, *, layout: PagedLayout = LAYOUT, **cache: int
) -> int:
    return plan_blocks(layout, CacheConfig(**cache), length, seqs, available)


def test_what_the_largest_step_holds() -> None:
    """Llama-3.1-8B's shape, 2,048 tokens of 64 sequences: from its published config.json."""
    layer = LayerSpec(AttentionSpec(32, 8, 128, 128**-0.5, None), MlpSpec(14336))
    decoder = DecoderSpec(128_256, 4096, (layer,) * 32, NormSpec(), 0)
    config = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=64)
    of_token = 2 * 4096 + (32 + 8 + 8) * 128 + 32 * 128 + 3 * 14336
    assert (
        activation_bytes(decoder, 2, config) == 2 * 2048 * of_token + 3 * (64 + 256) * 128_256 * 4
    )
    four = activation_bytes(decoder, 2, config, guesses=4)
    assert four == 2 * 2048 * of_token + 3 * (320 + 256) * 128_256 * 4
    many = activation_bytes(decoder, 2, config, guesses=40)
    assert many == 2 * 2048 * of_token + 3 * 2048 * 128_256 * 4  # a step has no more tokens


@dataclass(frozen=True, slots=True)
class _Gpu(Device):
    """One that has as much memory as is said."""

    free: int = 0

    @property
    def is_gpu(self) -> bool:
        return True

    @property
    def available_bytes(self) -> int:
        return self.free


def test_a_gpu_keeps_room_for_the_largest_step() -> None:
    config = EngineConfig.of(model="stories", max_num_seqs=4, max_num_batched_tokens=256)
    loaded = load_model(resolve("stories"))
    pytest.importorskip("triton", reason="Triton isn't installed")
    gpu = _Gpu(torch.device("cpu"), True)
    beside = activation_bytes(loaded.spec.decoder, 2, config.scheduler) + 2 * (512 << 20)
    layout = layout_of(config, loaded, gpu)
    one = layout.nbytes(layout.blocks_for(loaded.max_model_len))
    share = config.cache.memory_fraction
    enough = int(one / share) + layout.bytes_per_block
    _, blocks = sized_cache(config, loaded, None, device=replace(gpu, free=beside + enough))
    assert blocks == layout.blocks_for(loaded.max_model_len)
    for free, num_blocks in ((enough, None), (beside + one // 2, blocks)):
        few = replace(config, cache=replace(config.cache, num_blocks=num_blocks))
        with pytest.raises(OutOfCacheError, match=r"beside .* of the largest step"):
            sized_cache(few, loaded, None, device=replace(gpu, free=free))


def test_a_block_is_what_the_test_thinks() -> None:
    assert LAYOUT.bytes_per_block == 32 * KIB


def test_as_much_as_can_be_used() -> None:
    assert (
        plan(1 << 40, length=1000, seqs=8) == 8 * 33
    )  # 1,000 tokens need 32, and one to grow into


def test_as_much_as_fits() -> None:
    assert plan(2 * MIB) == int(2 * MIB * 0.9) // (32 * KIB) == 57


def test_never_more_than_comfortable_unless_one_sequence_needs_it() -> None:
    wide = PagedLayout(((64, 128),) * 8, torch.float32, 32)  # 16 MiB a block
    assert plan(1 << 40, length=4096, seqs=64, layout=wide) == COMFORTABLE_BYTES // (16 * MIB)
    assert plan(1 << 40, length=65536, seqs=64, layout=wide) == 65536 // 32


def test_exactly_one_sequence() -> None:
    need = 32 * 32 * KIB  # blocks of 1,024 tokens
    assert plan(need, memory_fraction=1.0) == 32
    with pytest.raises(OutOfCacheError):
        plan(need - 1, memory_fraction=1.0)


def test_too_little_memory_for_one_sequence() -> None:
    with pytest.raises(OutOfCacheError) as caught:
        plan(MIB)
    text = str(caught.value)
    assert "max_model_len=1024 needs 1.0 MiB" in text
    assert "921.6 KiB may be used (90% of what is free)" in text
    assert "Lower max_model_len to 896." in text  # 28 blocks fit
    assert plan(MIB, length=896) == 28  # the advice holds
    assert isinstance(caught.value, ConfigError)


def test_no_memory_for_a_single_block() -> None:
    with pytest.raises(OutOfCacheError) as caught:
        plan(30 * KIB)
    assert "Not even one block (32.0 KiB) fits: free some memory, or raise gpu_mem" in str(
        caught.value
    )
    with pytest.raises(OutOfCacheError, match="Not even one block"):
        plan(0)


def test_num_blocks_is_taken_as_it_is() -> None:
    assert plan(1 << 40, num_blocks=32) == 32
    assert plan(1 << 40, num_blocks=9999) == 9999
    assert plan(32 * 32 * KIB, num_blocks=32) == 32  # memory_fraction is for the automatic size


def test_num_blocks_below_one_sequence() -> None:
    with pytest.raises(OutOfCacheError) as caught:
        plan(1 << 40, num_blocks=31)
    text = str(caught.value)
    assert "needs 32 blocks of 32 tokens, but num_blocks is 31" in text
    assert "lower max_model_len to 992" in text
    assert plan(1 << 40, length=992, num_blocks=31) == 31


def test_num_blocks_beyond_the_memory() -> None:
    with pytest.raises(OutOfCacheError) as caught:
        plan(2 * MIB, num_blocks=65)
    text = str(caught.value)
    assert "num_blocks=65 need 2.0 MiB, but 2.0 MiB are free. At most 64 fit." in text
    assert plan(2 * MIB, num_blocks=64) == 64


# ── the swap space ───────────────────────────────────────────────────────────────────────────────


def swap(available: int, **scheduler: object) -> int:
    return plan_swap(LAYOUT, SchedulerConfig(**scheduler), available)  # type: ignore[arg-type]


def test_a_tenth_of_the_free_memory_up_to_a_gib() -> None:
    assert swap(100 * MIB) == 10 * MIB // (32 * KIB)
    assert swap(1 << 40) == SWAP_BYTES // (32 * KIB)


def test_as_much_swap_space_as_is_asked_for() -> None:
    assert swap(1 << 40, swap_space=4) == (4 << 30) // (32 * KIB)
    assert swap(1 << 30, swap_space=0.5, preemption_mode="swap") == (1 << 29) // (32 * KIB)
    with pytest.raises(OutOfCacheError, match=r"swap_space=2 is 2,048.0 MiB, but 1,024.0 MiB are"):
        swap(1 << 30, swap_space=2)


def test_no_swap_space() -> None:
    assert swap(1 << 40, swap_space=0) == 0
    assert swap(1 << 40, preemption_mode="recompute") == 0
    assert swap(100 * KIB) == 0  # auto: it will always be recompute
    with pytest.raises(OutOfCacheError, match=r"room for a block of 32.0 KiB .* has 10.0 KiB"):
        swap(100 * KIB, preemption_mode="swap")

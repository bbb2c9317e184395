"""What warming up launches is all that requests then want: none waits for a compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from penstock import SamplingParams
from tests.interpreted.test_engine import engine, make_llama

OF_SAMPLER = {"penstock.kernels.triton.argmax"}
"""Modules of kernels that a sampler warms up."""

Launch = tuple[str, ...]


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose sequences have more than one span of keys."""
    return make_llama(tmp_path_factory.mktemp("long"), layers=1, length=512)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[Launch]]:
    """Gives the kinds of launches since it was last called, as a compiler tells them apart:
    dtypes of tensors, and what is fixed when a kernel is compiled."""
    kinds: set[Launch] = set()
    run = InterpretedFunction.run

    def seen(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        fixed = [f"{name}={value}" for name, value in options.items() if name.isupper()]
        fixed += [f"{n}={options.get(n)}" for n in ("num_warps", "launch_pdl", "num_stages")]
        dtypes = [str(a.dtype) for a in args if isinstance(a, torch.Tensor)]
        kinds.add((self.fn.__module__, self.__name__, *sorted(fixed), *dtypes))
        return run(self, *args, grid=grid, warmup=warmup, **options)

    monkeypatch.setattr(InterpretedFunction, "run", seen)

    def taken() -> set[Launch]:
        found = set(kinds)
        kinds.clear()
        return found

    return taken


@pytest.mark.parametrize(
    "graphs", ["none", pytest.param("full_decode_only", marks=pytest.mark.slow)]
)
def test_requests_want_no_other_kernels(
    long: Path, graphs: str, launched: Callable[[], set[Launch]]
) -> None:
    llm = engine(
        long, max_num_seqs=3, max_num_batched_tokens=100, max_model_len=300, num_blocks=60,
        compilation_config={"cudagraph_mode": graphs}, enable_prefix_caching=False,
    )  # fmt: skip
    forward = llm.runtime.runner.graphs
    assert forward is not None
    launched()
    forward.warm_up()
    warm = launched()
    for counts in ((1,), (40,), (280, 3, 90)):
        given = [{"prompt_token_ids": [5 + i % 200 for i in range(n)]} for n in counts]
        llm.generate(given, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    missing = launched() - warm
    assert not {launch for launch in missing if launch[0] not in OF_SAMPLER}

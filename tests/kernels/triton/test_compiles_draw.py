"""What samples, compiled for a GPU by what would start it."""

from __future__ import annotations

import pytest

from tests.kernels.triton.compiled import compiled, in_fresh_process, registers

READS = ("_block_best", "_survey", "_gather", "_part_sums", "_settle", "_draw_beyond")
"""Kernels that read a vocabulary: by 16 bytes a thread."""


@pytest.mark.slow
def test_sampling() -> None:
    in_fresh_process(__name__)


def test_argmax_and_a_plain_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILE_FEW", "1")
    in_fresh_process(__name__)


def main(size: int, most: int, few: bool) -> None:
    import torch

    from penstock.kernels.triton import launchers

    op = launchers()
    logits, row = torch.empty(most, size), torch.empty(most)
    whole, u = row.long(), row.double()
    ids, weights = torch.empty(most, 128, dtype=torch.int64), torch.empty(most, 128)
    launches = [
        lambda: op["argmax"](logits),
        lambda: op["uniforms"](whole, whole, whole, 1),
        lambda: op["draw_plain"](logits, row, u),
    ]
    if not few:
        launches += [
            lambda: op["argmax"](logits[:2]),
            lambda: op["top_k"](logits, 1),
            lambda: op["top_k"](logits, 64),
            lambda: op["scaled_top_k"](logits, row, whole, row, 128),
            lambda: op["draw_from"](ids, weights, u),
            lambda: op["draw_from"](ids, weights, u, row),
            lambda: op["draw_nucleus"](logits, row, row, u, 128, 1024),
            lambda: op["draw_beyond"](whole, logits, row, whole, row, row, u),
        ]
    for kernel in [one for launch in launches for one in compiled(launch)]:
        name, (count, spilled) = kernel.metadata.name, registers(kernel)
        print(f"{name:14} {count:4} registers, {spilled} bytes spilled")
        assert spilled == 0, f"{name}: {count} registers, {spilled} bytes spilled"
        if name in READS and size % 16 == 0:
            assert ".v4" in kernel.asm["ptx"], f"{name}: no vectors"


if __name__ == "__main__":
    import os

    for size in (151_936,) if "COMPILE_FEW" in os.environ else (151_936, 50_257, 300):
        main(size, 16, "COMPILE_FEW" in os.environ)

"""Reading memory, compiled for a GPU: nothing else may bound what bounds every floor."""

from __future__ import annotations

from tests.kernels.triton.compiled import compiled, in_fresh_process, registers


def test_read_sum() -> None:
    in_fresh_process(__name__)


def main() -> None:
    """Loads of 16 bytes, four a thread on their way before any is added; enough threads fit."""
    import torch

    from penstock.kernels.triton.bandwidth import PROGRAMS, read_sum

    [kernel] = compiled(lambda: read_sum(torch.zeros(1 << 16), 132 * PROGRAMS))
    code = kernel.asm["ptx"]
    loop = code[: code.index("add.f32")]
    assert loop.count("ld.global.v4") == 4, code
    used, spilled = registers(kernel)
    assert spilled == 0
    assert 65536 // used >= 1024, f"{used} registers a thread"


if __name__ == "__main__":
    main()

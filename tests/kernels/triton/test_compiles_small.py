"""Norms, rows and the other small kernels, compiled for a GPU by what would start them."""

from __future__ import annotations

from tests.kernels.triton.compiled import compiled, in_fresh_process, registers


def test_norms_and_rows() -> None:
    in_fresh_process(__name__)


def main() -> None:
    import torch

    from penstock.kernels.triton.norm import layer_norm, rms_norm
    from penstock.kernels.triton.rows import e4m3_rows, int8_rows

    x, weight, one = torch.empty(3, 896).bfloat16(), torch.empty(896), torch.empty(1)
    for launch in (
        lambda: rms_norm(x, weight, 1e-5),
        lambda: layer_norm(x, weight, weight, 1e-5),
        lambda: int8_rows(x, weight, 1e-5),
        lambda: int8_rows(x, None, 0.0, one),
        lambda: e4m3_rows(x, weight, 1e-5, 1, 896),
        lambda: e4m3_rows(x, None, 0.0, 7, 896),
    ):
        [kernel] = compiled(launch)
        code, (count, spilled) = kernel.asm["ptx"], registers(kernel)
        name = kernel.metadata.name
        assert "ld.global.v4" in code and "st.global.v4" in code, f"{name}: no vectors"
        assert spilled == 0 and count <= 64, f"{name}: {count} registers, {spilled} bytes spilled"
    odd = torch.empty(3, 25)
    [kernel] = compiled(lambda: rms_norm(odd, weight[:25], 1e-5))
    assert "ld.global.v4" not in kernel.asm["ptx"]  # whatever the row begins on


if __name__ == "__main__":
    main()

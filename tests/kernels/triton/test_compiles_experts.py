"""Experts' and adapters' kernels, compiled for a GPU by what would start them."""

from __future__ import annotations

import sys

import pytest

from tests.kernels.triton.compiled import compiled, in_fresh_process, registers


def test_a_few() -> None:
    in_fresh_process(__name__)


@pytest.mark.slow
def test_all() -> None:
    in_fresh_process(__name__, "all")


def main(everything: bool) -> None:
    import torch

    from penstock.kernels.triton.grouped_linear import combine, grouped_linear
    from penstock.kernels.triton.lora import lora_add_
    from penstock.kernels.triton.route import route, sort_tokens

    half, single, integer = torch.bfloat16, torch.float32, torch.int32

    def multiply(dtype: torch.dtype, products: int, gated: bool, e: int = 8, n: int = 256) -> None:
        rows, starts = (torch.empty(each, dtype=integer) for each in (products, e + 1))
        x = torch.empty(products, n, dtype=single if dtype is single else half)
        weight = torch.empty(e, 2 * n if gated else n, n, dtype=dtype)
        scale = torch.empty(e, weight.shape[1], 1) if dtype is not x.dtype else None
        grouped_linear(x, weight, scale, None, None, rows, starts, n, 0, 1, gated)

    def adapt(dtype: torch.dtype, tokens: int, rank: int, n: int = 1024) -> None:
        down, up = torch.empty(4, rank, n, dtype=dtype), torch.empty(4, n, rank, dtype=dtype)
        x, adapters = torch.empty(tokens, n, dtype=dtype), torch.empty(tokens, dtype=integer)
        lora_add_(x.clone(), x, down, up, adapters, torch.empty(4))

    def small(n: int) -> None:
        experts = torch.empty(n, n, dtype=integer)
        combine(torch.empty(n, n).bfloat16(), experts, torch.empty(n, n))
        route(torch.empty(n, n).bfloat16(), n, True)
        groups = min(n, 2)
        more = torch.empty(n), True, groups, groups, 1.5
        route(torch.empty(n, n).bfloat16(), n, True, *more)
        sort_tokens(experts, n)

    kinds = [half, torch.int8, torch.float8_e4m3fn, single] if everything else [half]
    counts, ranks = ([8, 64, 512, 4096], [8, 16, 64, 128]) if everything else ([8, 4096], [64])
    started = [
        *((multiply, dtype, count, gated) for dtype in kinds for count in counts
          for gated in (False, True)),
        *((adapt, dtype, tokens, rank) for dtype in (kinds[0], kinds[-1]) for rank in ranks
          for tokens in (1, 1000)),
        (multiply, half, 1, False, 1, 1), (adapt, half, 1, 1, 1), (small, 8), (small, 1),
    ]  # fmt: skip
    for call, *arguments in started:
        for kernel in compiled(lambda call=call, given=arguments: call(*given)):
            code, (count, spilled) = kernel.asm["ptx"], registers(kernel, waits=False)
            name = f"{kernel.metadata.name} {arguments}"
            most = 16 if single in arguments else 0  # of vectors' sums, a few numbers
            assert spilled <= most, f"{name}: {count} registers, {spilled} bytes spilled"
            if arguments[0] in kinds and kernel.metadata.name == "_grouped_linear":
                assert ("wgmma.mma_async" in code) == (arguments[0] is not single), name
                assert arguments[-1] == 1 or "cp.async.c" in code, name


if __name__ == "__main__":
    main(sys.argv[1:] == ["all"])

"""A matrix's panels are dealt to threads in parts: every panel once, however many there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from penstock.kernels import native
from penstock.ops import Activation
from penstock.quant import Dense, WeightFormat, format_of, parse_scheme

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")

FORMATS: dict[str, WeightFormat] = {
    "bfloat16": Dense(torch.bfloat16),
    **{name: format_of(parse_scheme(name)) for name in ("w8a8", "w4a8", "w8a16")},
}
K = 2048
"""So that even one panel of 4 bits times 20 rows is worth a second thread."""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def columns(panels: int, seed: int) -> Tensor:
    made = torch.randn(16 * panels, K, generator=torch.Generator().manual_seed(seed))
    return made / K**0.5


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 5, 20])
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.usefixtures("isa")
def test_every_panel_once(name: str, rows: int, activation: Activation) -> None:
    """Of two and more threads: the bits of one."""
    x, gated = columns(2, seed=0)[:rows].bfloat16(), activation == "silu"
    for panels in (1, 2, 3, 7, 16, 19):
        w = columns(panels, seed=panels)
        packed = FORMATS[name].pack(torch.cat([w, w.flip(0)]) if gated else w, gated)
        found = []
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            found.append(
                FORMATS[name].matmul(
                    x, packed, None, 16 * panels, activation=activation, gated=gated
                )
            )
        assert (found[0] != 0).all()
        assert all(torch.equal(other, found[0]) for other in found[1:])

"""The worker threads: several callers at once, a forked child, and more threads than cores."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from penstock.kernels import native
from penstock.quant import Dense

pytestmark = pytest.mark.skipif(native.handle is None, reason=f"no native kernels: {native.reason}")

FORMAT = Dense(torch.bfloat16)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def operands() -> tuple[Tensor, dict[str, Tensor]]:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(2048, 512, generator=random)
    return torch.randn(7, 512, generator=random).to(torch.bfloat16), FORMAT.pack(weight)


def multiply(operands: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
    return FORMAT.matmul(operands[0], operands[1], None, 2048)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("count", [1, 2, 5])
def test_callers_at_once(operands: tuple[Tensor, dict[str, Tensor]], count: int) -> None:
    torch.set_num_threads(1)
    want, wrong = multiply(operands), []

    def call() -> None:
        torch.set_num_threads(count)
        wrong.extend(1 for _ in range(50) if not torch.equal(multiply(operands), want))

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.usefixtures("threads")
def test_a_forked_child_has_threads_of_its_own(
    operands: tuple[Tensor, dict[str, Tensor]],
) -> None:
    torch.set_num_threads(2)
    want = multiply(operands)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(multiply(operands), want) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(multiply(operands), want)


FEWER = """
import resource, sys
import torch
from penstock.kernels import native
from penstock.quant import Dense
torch.set_num_threads(1)  # torch's own threads can't do without
form = Dense(torch.bfloat16)
weight = form.pack(torch.ones(2048, 512))
x = torch.ones(7, 512, dtype=torch.bfloat16)
want = torch.full((7, 2048), 512.0).bfloat16()
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
if int(sys.argv[1]):
    import os
    os.setuid(65534)  # of root, nothing is counted
for _ in range(3):
    torch.set_num_threads(16)
    found = form.matmul(x, weight, None, 2048)
    torch.set_num_threads(1)
    assert torch.equal(found, want)
print("right")
"""


def test_it_goes_on_with_the_threads_there_are() -> None:
    """Where a limit of processes allows no more, the first step must not fail."""
    found = subprocess.run(
        [sys.executable, "-c", FEWER, str(int(os.geteuid() == 0))],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert found.stdout.strip() == "right", found.stderr

"""What a client is told of errors."""

from __future__ import annotations

import pytest

from penstock.errors import (
    BusyError,
    EngineDeadError,
    InvalidSamplingError,
    ModelOutputError,
    RequestTimeoutError,
)
from penstock.server.errors import as_api_error
from penstock.server.protocol.structure import structure_error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (BusyError("the compiler is busy"), 503),
        (EngineDeadError("gone"), 503),
        (RequestTimeoutError("late"), 408),
        (InvalidSamplingError("wrong"), 400),
        (ModelOutputError("NaN"), 500),
        (ZeroDivisionError(), 500),
    ],
)
def test_each_error_has_its_status(error: Exception, status: int) -> None:
    assert as_api_error(error).status == status


def test_who_finds_something_busy_may_come_again() -> None:
    assert int(as_api_error(BusyError("busy")).headers["Retry-After"]) >= 1


def test_a_form_is_blamed_in_the_words_of_its_field() -> None:
    error = structure_error(
        InvalidSamplingError("structured_outputs.json can't be followed"), "response_format"
    )
    assert (error.status, error.param) == (400, "response_format")
    assert error.message == "response_format can't be followed"

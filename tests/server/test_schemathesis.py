"""Schemathesis against the server's own OpenAPI document: no 5xx, and nothing undocumented."""

from __future__ import annotations

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.server.conftest import Running

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]
SETTINGS = {
    "deadline": None,
    "derandomize": True,  # a fixed seed
    "database": None,
    "suppress_health_check": list(hypothesis.HealthCheck),
}


def check(server: Running, examples: int) -> None:
    """Every operation of the document, with so many requests."""
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 15
    for operation in operations:

        @hypothesis.settings(max_examples=examples, **SETTINGS)
        @hypothesis.given(case=operation.as_strategy())
        def ask(case: schemathesis.Case) -> None:
            case.call_and_validate(checks=CHECKS, timeout=30)

        ask()


def test_the_document_holds(server: Running) -> None:
    check(server, examples=12)


@pytest.mark.slow
def test_the_document_holds_at_length(server: Running) -> None:
    check(server, examples=300)

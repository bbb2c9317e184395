"""Bodies: what is counted before they are read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.server import body as module
from penstock.server.body import read_json
from penstock.server.errors import ApiError

TEXT = st.text(st.sampled_from('ab"\\[]{},:é\n'), max_size=6)
VALUES = st.recursive(
    st.one_of(st.none(), st.integers(-9, 9), TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)),
    max_leaves=20,
)


def _counts(value: Any) -> tuple[int, int, int]:
    """(lists and objects, members, commas)."""
    if not isinstance(value, list | dict):
        return (0, 0, 0)
    inner = list(value.values()) if isinstance(value, dict) else value
    sums = [sum(x) for x in zip(*map(_counts, inner), strict=True)] or [0, 0, 0]
    members = len(inner) if isinstance(value, dict) else 0
    return (1 + sums[0], members + sums[1], max(len(inner) - 1, 0) + sums[2])


@given(VALUES, st.booleans())
def test_exactly_what_is_there_is_counted(value: Any, escaped: bool) -> None:
    """Whatever texts hold; each limit is tried at the count itself and one below."""
    content = json.dumps(value, ensure_ascii=escaped).encode()
    names = ("MAX_CONTAINERS", "MAX_MEMBERS", "MAX_VALUES")
    with pytest.MonkeyPatch.context() as patch:
        for name, count in zip(names, _counts(value), strict=True):
            patch.setattr(module, name, count)
        assert read_json(content) == value
        for name, count in zip(names, _counts(value), strict=True):
            if count:
                patch.setattr(module, name, count - 1)
                with pytest.raises(ApiError) as error:
                    read_json(content)
                assert (error.value.status, error.value.code) == (413, "request_too_large")
                patch.setattr(module, name, count)


def test_a_long_text_of_brackets_is_a_text() -> None:
    text = '[{,:"\\' * 2_000_000
    assert read_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}


def test_a_number_beyond_all_is_refused() -> None:
    assert read_json(b'{"a": 1e308}') == {"a": 1e308}
    with pytest.raises(ApiError, match="-1e999 is more than a number can be"):
        read_json(b'{"a": [-1e999]}')

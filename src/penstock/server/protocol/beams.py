"""Beam search over HTTP: vLLM's `use_beam_search`, and what is said of its search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

from penstock.errors import InvalidSamplingError
from penstock.sampling import BeamSearchParams, SamplingParams
from penstock.server.errors import ApiError, as_api_error
from penstock.server.protocol.common import SamplingFields

_HEEDED: Final = frozenset(
    "temperature stop stop_token_ids ignore_eos skip_special_tokens "
    "include_stop_str_in_output".split()
)
"""Of the fields for choosing tokens, those that a search looks at."""

_OFF: Final[Mapping[str, tuple[Any, ...]]] = {
    one.name: (one.default, -1) if one.name in ("top_k", "top_n_sigma") else (one.default,)
    for one in fields(SamplingParams)
}
"""The values that ask for nothing."""

_SEARCH: Final[Mapping[str, Any]] = {
    "length_penalty": 1.0,
    "early_stopping": False,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
}
"""What only a search looks at, and the values that ask for nothing."""


class BeamFields(SamplingFields):
    """Fields for choosing tokens, or for a search of the likeliest texts in their place.

    `n` is the width of the beam: as many texts are kept, and come back, the best first.
    """

    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None  # true, false or "never"
    num_beam_groups: int | None = None  # that search apart, …
    diversity_penalty: float | None = None  # … and shun what earlier ones took

    def check_search(self, **beside: Any) -> None:
        """Raises ApiError for fields that could have no effect on a search, or without one.

        beside: the endpoint's own that can't go with it, where they ask for something.
        """
        if not self.use_beam_search:
            for name, off in _SEARCH.items():
                if getattr(self, name) not in (None, off):
                    raise ApiError(
                        400,
                        f"{name} is {_shown(getattr(self, name))}, but is for a beam search "
                        "only. Set use_beam_search, or leave it out.",
                        param=name,
                    )
            return
        if beside.get("stream"):
            raise ApiError(
                400,
                "use_beam_search can't be streamed: which text is the best is known at the end. "
                "Leave out stream, or use_beam_search.",
                param="stream",
            )
        ignored = {name: value for name, value in beside.items() if value}
        for name in SamplingFields.model_fields:
            if name not in _HEEDED and not _is_off(name, getattr(self, name)):
                ignored[name] = getattr(self, name)
        for name, value in ignored.items():
            raise ApiError(
                400,
                f"{name} is {_shown(value)}, but use_beam_search looks for the likeliest texts "
                "and doesn't heed it. Leave out one of the two.",
                param=name,
            )

    def parameters(
        self, defaults: SamplingParams, names: Mapping[str, str] | None = None, **chosen: Any
    ) -> SamplingParams | BeamSearchParams:
        """What the engine is to do; arguments as for `sampling`. Raises ApiError.

        What the model suggests for sampling doesn't change which texts are likely.
        """
        if not self.use_beam_search:
            return self.sampling(defaults, names, **chosen)
        given = {
            name: value
            for name in (*_HEEDED, *_SEARCH)
            if (value := getattr(self, name)) is not None
        }
        width = chosen.pop("n")
        try:
            return BeamSearchParams(**{**given, "beam_width": width, **chosen})
        except InvalidSamplingError as error:
            raise as_api_error(error, {"beam_width": "n", **(names or {})}) from error


def _is_off(name: str, value: Any) -> bool:
    if value is None:
        return True
    off = _OFF[name]
    if isinstance(value, list):
        return not value or tuple(value) in off
    return value in off or value == {}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value!r:.60}"

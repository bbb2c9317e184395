"""`/v1/embeddings`: the request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from penstock.server.protocol.common import EngineFields, UserName
from penstock.server.protocol.completions import PromptField


class EmbeddingRequest(EngineFields):
    """`POST /v1/embeddings`."""

    model: str | None = None
    input: PromptField
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    pooling_type: Literal["last", "mean", "cls"] | None = None  # Penstock's
    normalize: bool | None = None  # vLLM's
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    add_special_tokens: bool | None = None
    user: UserName | None = None
    request_id: str | None = None
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "kv_transfer_params": (),  # nobody goes on with it
        "tpot_slo_ms": (),  # there is no token after another
    }

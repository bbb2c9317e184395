"""What vLLM's endpoints for adapters take."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from penstock.server.protocol.common import Body

Text = Annotated[str, Field(min_length=1, max_length=4096)]


class UnloadLoraRequest(Body):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: Text
    lora_int_id: int | None = None  # vLLM's, which nothing here needs


class LoadLoraRequest(Body):
    """`POST /v1/load_lora_adapter`."""

    lora_name: Text
    lora_path: Text
    lora_int_id: int | None = None

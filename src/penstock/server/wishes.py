"""What a request, or else its key, asks of the queue and the cache."""

from __future__ import annotations

from penstock.engine import RequestOptions
from penstock.server.errors import ApiError
from penstock.server.keys import Limits
from penstock.server.prompt import PromptText
from penstock.server.protocol.common import EngineFields


def wishes_of(limits: Limits, body: EngineFields, prompt: PromptText) -> RequestOptions:
    """As the engine has them. limits: of the key."""
    transfer = body.kv_transfer_params
    ttft = limits.ttft_slo_ms if body.ttft_slo_ms is None else body.ttft_slo_ms
    tpot = limits.tpot_slo_ms if body.tpot_slo_ms is None else body.tpot_slo_ms
    return RequestOptions(
        priority=limits.priority if body.priority is None else body.priority,
        ttft_slo_s=None if ttft is None else ttft / 1000,
        tpot_slo_s=None if tpot is None else tpot / 1000,
        cache_salt=body.cache_salt,
        pins=prompt.pins,
        pictures=prompt.pictures,
        hand_over=transfer is not None and transfer.do_remote_decode,
    )


def check_transfer(body: EngineFields, *, has_disk: bool, is_adapter: bool) -> None:
    """Raises ApiError where blocks can't go from one process to another."""
    if body.kv_transfer_params is None or (has_disk and not is_adapter):
        return
    why = "Start the server with --prefix-cache-dir, a folder that both have."
    if has_disk:
        why = "Blocks of adapters aren't kept on disk. Leave it out."
    raise ApiError(
        400, f"kv_transfer_params can't take effect. {why}", param="kv_transfer_params"
    )  # fmt: skip

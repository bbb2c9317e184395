"""Adapters by request, as vLLM's callers ask for them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.engine.options import RequestOptions
from penstock.errors import ConfigError, RequestError
from penstock.models.hub import adapter_folder
from penstock.runtime import Runtime
from penstock.runtime.adapters import Adapter, Adapters


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter that is loaded when it is first asked for, and stays while there is a slot.

    Source: vLLM's class of that name. Adapters are told apart by `lora_name`.
    """

    lora_name: str
    lora_int_id: int = 1  # vLLM's number of it, which nothing here needs
    lora_path: str | Path = ""  # default: what is loaded by that name, or an embedded adapter

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name.strip():
            raise RequestError(f"lora_name must be a text, not {self.lora_name!r:.80}.")
        number = self.lora_int_id
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise RequestError(f"lora_int_id must be a positive integer, not {number!r:.80}.")
        if not isinstance(self.lora_path, str | Path):
            raise RequestError(f"lora_path must be a folder, not {self.lora_path!r:.80}.")


def adapters_of(runtime: Runtime) -> Adapters:
    """The slots of a model. Raises ConfigError where it has none."""
    if runtime.adapters is None:
        raise ConfigError(
            "The model was loaded without room for adapters. Load it with enable_lora=True."
        )
    return runtime.adapters


def load_adapter(runtime: Runtime, name: str, path: str | Path) -> Adapter:
    """Load an adapter, which stays until it is unloaded."""
    return adapters_of(runtime).load(name, adapter_folder(path))


class Hold:
    """An adapter that is asked for keeps its slot until `let_go`, whichever thread loads it."""

    def __init__(self, runtime: Runtime, asked: LoRARequest) -> None:
        """Raises RequestError for what isn't a LoRARequest."""
        if not isinstance(asked, LoRARequest):
            raise RequestError(f"lora_request must be a LoRARequest, not {type(asked).__name__}.")
        self._adapters = adapters_of(runtime)
        self._asked = asked
        self._lock = threading.Lock()
        self._held: Adapter | None = None
        self._wanted = True

    def take(self) -> Adapter:
        """The adapter, loaded if it wasn't. Raises what `Adapters.load` does."""
        asked = self._asked
        found = None if asked.lora_path else self._adapters.held(asked.lora_name)
        if found is None:
            folder = adapter_folder(asked.lora_path or asked.lora_name)
            found = self._adapters.load(asked.lora_name, folder, keep=False, hold=True)
        with self._lock:
            if self._wanted:
                self._held = found
                return found
        self._adapters.release(found)  # nobody has waited for it
        return found

    def let_go(self) -> None:
        """It needs no slot any more."""
        with self._lock:
            self._wanted, held, self._held = False, self._held, None
        if held is not None:
            self._adapters.release(held)


def naming(options: RequestOptions | None, adapter: Adapter) -> RequestOptions:
    """The same options, with an adapter that is held. Raises RequestError for others' names."""
    options = RequestOptions() if options is None else options
    if not isinstance(options, RequestOptions):
        raise RequestError(f"options must be RequestOptions, not {type(options).__name__}.")
    if options.adapter is not None and options.adapter != adapter.name:
        raise RequestError(
            f"options name the adapter {options.adapter!r}, lora_request {adapter.name!r}. Give "
            "one of them."
        )
    return replace(options, adapter=adapter)

"""An OpenAI-compatible server over `AsyncLLM`; it needs the extra `server`."""

from penstock.server.app import create_app
from penstock.server.config import ServerConfig
from penstock.server.keys import Key, Limits, keys_of, read_keys
from penstock.server.service import Service

__all__ = [
    "Key",
    "Limits",
    "ServerConfig",
    "Service",
    "create_app",
    "keys_of",
    "read_keys",
]

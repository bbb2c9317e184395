"""One short, declarative file for each model family."""

from penstock.models.checkpoint import Checkpoint
from penstock.models.hub import resolve
from penstock.models.load import LoadedModel, load_model
from penstock.models.registry import architectures, read_spec
from penstock.models.spec import Ignore, ModelSpec, Rename, Stack
from penstock.models.weights import load_weights

__all__ = [
    "Checkpoint",
    "Ignore",
    "LoadedModel",
    "ModelSpec",
    "Rename",
    "Stack",
    "architectures",
    "load_model",
    "load_weights",
    "read_spec",
    "resolve",
]

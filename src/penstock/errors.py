"""Every error that Penstock raises on purpose.

    PenstockError
    ├── ConfigError (ValueError)          an argument or a combination of them can't work
    │   └── OutOfCacheError               the KV cache can't hold what is asked of it
    ├── ModelError                        something is wrong with a checkpoint
    │   ├── ModelNotFoundError            no folder, no file, or the hub can't be reached
    │   ├── UnsupportedModelError         an architecture or a config value that isn't built
    │   ├── WeightsError                  missing, unused, misshapen or corrupt tensors
    │   └── EngineFolderError             an engine is half-written, damaged or of elsewhere
    ├── TokenizerError                    no tokenizer, a broken one, or one that disagrees
    │   └── ChatTemplateError             a template that is missing, fails or is unsafe
    ├── RequestError (ValueError)         one request is wrong; the engine goes on
    │   ├── InvalidPromptError            empty, too long, or with token ids out of range
    │   ├── BusyError                     others take what it needs: it may come again
    │   ├── InvalidSamplingError          sampling parameters out of their range
    │   └── RequestTimeoutError           it took longer than its caller allowed
    ├── KernelError (RuntimeError)        the native library is broken or was misused
    ├── MissingExtraError (ImportError)   an optional dependency isn't installed
    ├── RankError (RuntimeError)          another process of a divided model has ended
    └── EngineDeadError (RuntimeError)    the engine's thread has stopped

A message says what happened, gives the numbers, and names the way out.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class PenstockError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(PenstockError, ValueError):
    """An argument, or a combination of arguments, can't work."""


class OutOfCacheError(ConfigError):
    """The KV cache can't hold what is asked of it."""


class ModelError(PenstockError):
    """Something is wrong with a checkpoint."""


class ModelNotFoundError(ModelError):
    """No such folder or file, or the hub can't be reached."""


class UnsupportedModelError(ModelError):
    """An architecture, or a value in its config, that isn't built."""


class WeightsError(ModelError):
    """Tensors are missing, unused, misshapen or corrupt."""


class EngineFolderError(ModelError):
    """An engine folder is half-written, damaged, or made for another machine or version."""


class TokenizerError(PenstockError):
    """There is no tokenizer, it is broken, or it disagrees with the model."""


class ChatTemplateError(TokenizerError):
    """A chat template is missing, fails, or does something unsafe."""


class RequestError(PenstockError, ValueError):
    """One request is wrong; the engine goes on serving the others."""


class InvalidPromptError(RequestError):
    """A prompt that is empty, too long, or holds token ids out of range."""


class InvalidSamplingError(RequestError):
    """Sampling parameters out of their range."""


class ModelOutputError(RequestError):
    """The model gave no finite numbers: its weights are to blame, not the request."""


class BusyError(RequestError):
    """What a request needs is taken by others for now."""


class RequestTimeoutError(RequestError):
    """The request took longer than its caller allowed."""


class AdapterError(PenstockError, ValueError):
    """An adapter that isn't there, or that there is no slot for."""


class KernelError(PenstockError, RuntimeError):
    """The native library is broken or was misused."""


class MissingExtraError(PenstockError, ImportError):
    """An optional dependency isn't installed."""


class RankError(PenstockError, RuntimeError):
    """Another of the processes that compute a model together has ended, or couldn't begin."""


class EngineDeadError(PenstockError, RuntimeError):
    """The engine's thread has stopped; its cause is chained."""


def get_extra(extra: str) -> str:
    """How an optional part is installed, for an error message: on the package index another project
    has this one's name.
    """
    return f"in Penstock's clone: pip install --no-build-isolation -e '.[{extra}]'"


def nearest(name: str, known: Iterable[str]) -> str:
    """A phrase for an error message: `` Did you mean 'x'?`` or nothing."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {match[0]!r}?" if match else ""


def listed(names: Sequence[str], most: int = 5) -> str:
    """Names for an error message: `a, b and 7 more`."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more:,} more" if more > 0 else "")


def kind_of(value: object) -> str:
    """A value's type, for an error message: `an int`, `a list`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeio' else 'a'} {name}"

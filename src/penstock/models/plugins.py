"""Packages beside Penstock that bring families of models or operators along.

A package names a function in the entry point group `penstock.plugins`; it is called once, before
the first model is looked at. PENSTOCK_PLUGINS lists those that are wanted, names with commas
between; all are where it isn't set, none where it is empty.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import entry_points

from penstock.errors import ConfigError, nearest

GROUP = "penstock.plugins"
VARIABLE = "PENSTOCK_PLUGINS"

logger = logging.getLogger("penstock")
_done = [False]
_failed: list[ConfigError] = []


def left_out() -> str:
    """In an error's words, the plugins that are installed and not wanted."""
    wanted = os.environ.get(VARIABLE)
    if wanted is None:
        return ""
    names = [one.name for one in entry_points(group=GROUP)]
    missing = [name for name in names if name not in map(str.strip, wanted.split(","))]
    return f"; {VARIABLE} leaves out {', '.join(missing)}" if missing else ""


def load_plugins() -> None:
    """Call every wanted package's function that hasn't been. Raises ConfigError, with its name, for
    one that fails, and for a name that no package has.
    """
    if _failed:
        raise _failed[0]  # what it had registered by then is half of it
    if _done[0]:
        return
    found = {one.name: one for one in entry_points(group=GROUP)}
    wanted = os.environ.get(VARIABLE)
    names = list(found)
    if wanted is not None:
        names = [name.strip() for name in wanted.split(",") if name.strip()]
    for name in names:
        if name not in found:
            raise ConfigError(
                f"{VARIABLE} names {name!r}, which no package brings.{nearest(name, found)}"
            )
    _done[0] = True  # before they are called: they may ask what there is
    for name in names:
        where = found[name].value
        try:
            found[name].load()()
        except (Exception, SystemExit) as error:
            said = str(error).rstrip(".")
            failed = ConfigError(
                f"The plugin {name} ({where}) failed: {type(error).__name__}: {said}. Mend it, "
                f"uninstall it, or leave it out of {VARIABLE}."
            )
            _failed.append(failed)
            raise failed from error
        logger.info("The plugin %s (%s) is loaded.", name, where)

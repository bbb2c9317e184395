"""What a chat template may use up, and how much each of its operations would take.

Every call, filter and loop pass costs a step, every text and every walk through nested values
costs steps by its length, and there is a deadline for what neither counts. What could make
something huge in one go, or take exponential time, is measured here before it runs.
"""

from __future__ import annotations

import re
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Undefined
from jinja2.utils import Namespace

MAX_TEXT_CHARACTERS = 1 << 23  # of one string, and of the output: some two million tokens
MAX_STEPS = 2_000_000
MAX_SECONDS = 5.0
_CHARACTERS_PER_STEP = 256
_MAX_INTEGER_BITS = 4096
_MAX_FORMAT_CHARACTERS = 1 << 16
_MAX_SLOW_CHARACTERS = 1 << 16  # of what some filters take quadratic time for
_BITS_PER_DIGIT = 6  # at most, in base 36
_MAX_INDENT = 64
_MAX_DIGITS = 400  # of a rounded number: no float has more


@dataclass(slots=True)
class Budget:
    """What one rendering may still do."""

    steps: int = MAX_STEPS
    deadline: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)

    def spend(self, steps: int) -> None:
        """Use up steps, or raise."""
        self.steps -= steps
        if self.steps < 0:
            raise SecurityError(f"it took more than {MAX_STEPS:,} steps; it may loop without end")
        if time.monotonic() > self.deadline:
            raise SecurityError(f"it took more than {MAX_SECONDS:g} s; it may loop without end")


budget: ContextVar[Budget | None] = ContextVar("penstock_template_budget", default=None)


def spend(steps: int) -> None:
    """Use up steps of the rendering that runs, or raise."""
    current = budget.get()
    # None while compiling: constant expressions run then, and source length bounds them.
    if current is not None:
        current.spend(steps)


def check_size(size: int) -> None:
    """Refuse to make something of more than the largest size, and charge for it otherwise."""
    if size > MAX_TEXT_CHARACTERS:
        raise SecurityError(
            f"it would make a text or list of {size:,} elements; "
            f"{MAX_TEXT_CHARACTERS:,} are allowed"
        )
    spend(1 + max(size, 0) // _CHARACTERS_PER_STEP)


# --- nested values, as long as they spell out -----------------------------------------------------

_HOLDERS = (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView, Namespace)
"""What has other values in it; a list that holds a list many times spells out to any length."""
_PLAIN = (str, bytes, int, float, complex, range, Undefined, type(None))
"""What has a text of its own, no longer than it is large."""
_END = object()


def text_of(value: Any) -> str:
    """`str(value)`, bounded. Raises SecurityError for functions, generators and their like."""
    if isinstance(value, str):
        return value
    weigh(value)
    return str(value)


def join_pieces(pieces: Iterable[Any]) -> str:
    """`"".join(str(piece) …)`, bounded; what `~`, macros and `{% set %}` blocks make."""
    texts = [text_of(piece) for piece in pieces]
    check_size(sum(map(len, texts)))
    return "".join(texts)


def charged(part: Any) -> Any:
    """What a slice has made, paid for."""
    check_size(_size(part))
    return part


def weigh(value: Any, indent: int = 0) -> None:
    """Walk a nested value as spelling it out would, within the largest size.

    indent: characters before an element for each level that it is deep.
    """
    _charge(_sum_within(_weights(value, indent)))


def weigh_both(left: Any, right: Any) -> None:
    """Walk two nested values as comparing them would: until the smaller one ends."""
    pairs = zip(_weights(left), _weights(right), strict=False)
    _charge(_sum_within(a + b for a, b in pairs))


def _sum_within(weights: Iterable[int]) -> int:
    """The sum of `weights`; SecurityError where it passes the largest size."""
    total = 0
    for weight in weights:
        total += weight
        if total > MAX_TEXT_CHARACTERS:
            check_size(total)
    return total


def _charge(total: int) -> None:
    spend(total // _CHARACTERS_PER_STEP)


def _weights(value: Any, indent: int = 0) -> Iterator[int]:
    """What each of the values in `value` adds to its text, as often as it would be written."""
    levels: list[Iterator[Any]] = [iter((value,))]
    while levels:
        item = next(levels[-1], _END)
        if item is _END:
            levels.pop()
            continue
        size = len(item) if isinstance(item, (str, bytes)) else 0
        digits = item.bit_length() // 3 if isinstance(item, int) else 0
        yield size + digits + 4 + len(levels) * indent  # 4: brackets, a comma and a space
        if isinstance(item, Namespace):
            item = item._Namespace__attrs
        if isinstance(item, dict):
            levels.append(chain(item, item.values()))
        elif isinstance(item, _HOLDERS):
            levels.append(iter(item))
        elif not isinstance(item, _PLAIN):
            raise SecurityError(f"a {type(item).__name__} has no text")


def hashed(key: Any) -> Any:
    """A key of a dictionary, paid for: a tuple's hash walks through all that is in it."""
    if isinstance(key, _HOLDERS):
        weigh(key)
    return key


def weigh_comparison(operator: str, left: Any, right: Any) -> None:
    """Before `left operator right`, the name in jinja2's syntax tree or its tests."""
    if operator not in ("in", "notin"):
        if isinstance(left, _HOLDERS) and isinstance(right, _HOLDERS):
            weigh_both(left, right)
    elif isinstance(left, _HOLDERS):
        weigh(left)
        if isinstance(right, _HOLDERS):
            weigh(right)
    elif isinstance(right, (list, tuple, str, bytes)):
        spend(len(right) // _CHARACTERS_PER_STEP)


# --- operations whose result can be much larger than their operands -------------------------------

# Filters that keep the elements they are given as they are, and one that measures them itself.
_ELEMENT_FILTERS = frozenset(
    "attr batch count d default first items last length list map random reject rejectattr reverse "
    "select selectattr slice sum tojson".split()
)
COMPARING_FILTERS = frozenset("dictsort groupby max min sort unique".split())
"""They keep elements as they are, too, and compare them."""
_SLOW_FILTERS = frozenset("pprint striptags urlize wordwrap".split())
_COMPARING_TESTS = frozenset(
    "== != < <= > >= eq equalto ne lt lessthan le gt greaterthan ge in".split()
)
_PERCENT = re.compile(r"[%)]([-+ #.*0-9]*)")
_BRACE = re.compile(r"\{([^{}]*)")
_WIDE = re.compile(r"[0-9]{5}")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _integer(value: Any) -> int:
    return int(value) if isinstance(value, int) else 0


def _has_large_width(text: str) -> bool:
    """Whether a directive of `%` or of `str.format` has five digits, or takes its width itself.

    No two matches overlap, so that this takes linear time.
    """
    for match in _PERCENT.finditer(text):
        if match[0][0] == ")" and "%(" not in text:
            continue
        if "*" in match[1] or _WIDE.search(match[1]):
            return True
    for match in _BRACE.finditer(text):
        _, colon, spec = match[1].partition(":")
        if colon and (_WIDE.search(spec) or text.startswith("{", match.end())):
            return True
    return False


def _check_format(template: Any, values: Iterable[Any]) -> None:
    """`%` and `str.format`: no widths from arguments or of many digits."""
    text = text_of(template)
    if len(text) > _MAX_FORMAT_CHARACTERS:
        raise SecurityError(
            f"a format of {len(text):,} characters; {_MAX_FORMAT_CHARACTERS:,} are allowed"
        )
    if _has_large_width(text):
        raise SecurityError(f"the format {text[:40]!r} has a width that is too large or computed")
    longest = max((len(text_of(value)) for value in values), default=0)
    check_size(len(text) + (text.count("%") + text.count("{")) * longest)


def check_binary(operator: str, left: Any, right: Any) -> None:
    """Before `left operator right`, of `+ * ** %`."""
    if operator == "+":
        check_size(_size(left) + _size(right))
    elif operator == "%" and isinstance(left, (str, bytes)):
        _check_format(left, right if isinstance(right, tuple) else (right,))
    elif operator == "*":
        check_size(max(_size(left) * _integer(right), _size(right) * _integer(left)))
        _check_bits(_integer(left).bit_length() + _integer(right).bit_length())
    elif operator == "**":
        _check_bits(_integer(left).bit_length() * max(_integer(right), 1))


def _check_bits(bits: int) -> None:
    if bits > _MAX_INTEGER_BITS:
        raise SecurityError(f"it would compute an integer of {bits:,} bits")


def check_growth(
    name: str, subject: Any, args: tuple[Any, ...], options: Mapping[str, Any]
) -> None:
    """Before the filter or string method `name` runs on `subject`."""
    values = [*args, *options.values()]
    longest = max(map(_size, values), default=0)
    widest = max(map(_integer, values), default=0)
    if name in COMPARING_FILTERS or (name not in _ELEMENT_FILTERS and not isinstance(subject, str)):
        weigh(subject)
    if name in _SLOW_FILTERS:
        _check_slow(name, subject)
    if name in {"center", "ljust", "rjust", "zfill", "truncate"}:
        check_size(max(_size(subject), widest) + longest)
    elif name in {"batch", "slice"}:
        check_size(widest)
    elif name in {"indent", "expandtabs"}:
        lines = text_of(subject).count("\n" if name == "indent" else "\t") + 1
        check_size(_size(subject) + lines * max(widest, longest, 8))
    elif name == "wordwrap":
        check_size(_size(subject) * (1 + longest))
    elif name == "replace" and values:
        count = text_of(subject).count(text_of(values[0]))
        check_size(_size(subject) + count * longest)
    elif name == "join":
        check_size(sum(len(text_of(item)) for item in subject) + len(subject) * longest)
    elif name in {"format", "format_map"}:
        _check_format(subject, values)
    elif name == "sum":
        start = args[1] if len(args) > 1 else options.get("start", 0)
        if not isinstance(start, (int, float)):
            raise SecurityError("the filter sum only adds numbers")
    elif name == "int" and (len(args) > 1 or "base" in options):
        _check_bits(_BITS_PER_DIGIT * _size(subject))
    elif name == "round" and any(abs(_integer(value)) > _MAX_DIGITS for value in values):
        raise SecurityError(f"the filter round keeps at most {_MAX_DIGITS} digits")
    else:
        check_size(_size(subject))


def _check_slow(name: str, subject: Any) -> None:
    """Before a filter that takes quadratic time."""
    total = len(subject) if isinstance(subject, str) else _sum_within(_weights(subject, 1))
    if total > _MAX_SLOW_CHARACTERS:
        raise SecurityError(
            f"the filter {name} of {total:,} characters; {_MAX_SLOW_CHARACTERS:,} are allowed"
        )


def check_json(value: Any, indent: Any, separators: Any) -> None:
    """Before `tojson`: each element stands in a line of its own, after its indent."""
    for part in (indent, *(separators or ())):
        if _integer(part) > _MAX_INDENT or _size(part) > _MAX_INDENT:
            raise SecurityError(f"tojson's indent or separator is more than {_MAX_INDENT}")
    weigh(value, 0 if indent is None else max(_integer(indent), _size(indent), 1))


def check_method(subject: Any, name: str, args: tuple[Any, ...]) -> None:
    """Before the method `name` of a value that isn't a text: some compare, some take hashes."""
    if isinstance(subject, bytes) or name in {"to_bytes", "from_bytes"}:
        raise SecurityError(f"{name} is of bytes, which no template needs")
    if isinstance(subject, dict):
        for key in args[:1]:
            hashed(key)
    elif subject is dict:  # dict.fromkeys, under another name
        for keys in args[:1]:
            weigh(keys)
    elif isinstance(subject, _HOLDERS) or name == "changed":  # of a loop: from what it was before
        for value in args:
            weigh_comparison("in", value, subject)


def check_test(name: str, value: Any, args: tuple[Any, ...]) -> None:
    """Before the test `value is name(args)`."""
    if name in {"even", "odd", "divisibleby"}:  # by %
        check_binary("%", value, args[0] if args else 2)
    elif name in {"lower", "upper"}:
        weigh(value)
    elif name in {"filter", "test"}:
        hashed(value)
    elif name in _COMPARING_TESTS and args:
        weigh_comparison(name, value, args[0])

"""Where chat templates run: jinja2's sandbox, with bounds on work and memory.

A template is a program that comes with a checkpoint or a request. jinja2's sandbox keeps it from
reaching Python; this adds that it can't hang the server or fill its memory. Every call, filter
and loop pass costs a step, every string made costs steps by its length, and there is a deadline
for what neither counts. Operations that could make something huge in one go are checked before
they run.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SOURCE_CHARACTERS = 1 << 20
MAX_TEXT_CHARACTERS = 1 << 23  # of one string, and of the output: some two million tokens
MAX_STEPS = 2_000_000
MAX_SECONDS = 5.0
_CHARACTERS_PER_STEP = 256
_MAX_INTEGER_BITS = 4096
_MAX_INDENT = 64


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


def _spend(steps: int) -> None:
    current = budget.get()
    # None while compiling: constant expressions run then, and source length bounds them.
    if current is not None:
        current.spend(steps)


def _check_size(size: int) -> None:
    """Refuse to make something of more than the largest size, and charge for it otherwise."""
    if size > MAX_TEXT_CHARACTERS:
        raise SecurityError(
            f"it would make a text or list of {size:,} elements; "
            f"{MAX_TEXT_CHARACTERS:,} are allowed"
        )
    _spend(1 + max(size, 0) // _CHARACTERS_PER_STEP)


def text_of(value: Any) -> str:
    """`str(value)`, bounded: lists that hold a list many times spell out to any length."""
    if isinstance(value, str):
        return value
    _weigh(value)
    return str(value)


def join_pieces(pieces: Iterable[Any]) -> str:
    """`"".join(str(piece) …)`, bounded; what `~`, macros and `{% set %}` blocks make."""
    texts = [text_of(piece) for piece in pieces]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def charged(part: Any) -> Any:
    """What a slice has made, paid for."""
    _check_size(_size(part))
    return part


def _weigh(value: Any) -> None:
    """Walk a nested value as spelling it out would, within the largest size."""
    total, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, (str, list, tuple, dict, set)):
            total += len(item)
        total += 4  # brackets, a comma and a space
        if total > MAX_TEXT_CHARACTERS:
            _check_size(total)
        if isinstance(item, dict):
            waiting.extend(item.keys())
            waiting.extend(item.values())
        elif isinstance(item, (list, tuple, set)):
            waiting.extend(item)
    _spend(total // _CHARACTERS_PER_STEP)


# --- operations whose result can be much larger than their operands -------------------------------

# Filters that keep the elements they are given as they are.
_ELEMENT_FILTERS = frozenset(
    "attr batch count d default dictsort first groupby items last length list map max min random "
    "reject rejectattr reverse select selectattr slice sort sum unique".split()
)
_LARGE_WIDTH = re.compile(r"[%{][^{}a-zA-Z]*[0-9]{5}|%[^a-zA-Z%]*\*|\{[^{}]*:[^{}]*(\{|[0-9]{5})")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _integer(value: Any) -> int:
    return int(value) if isinstance(value, int) else 0


def _check_format(template: Any, values: Iterable[Any]) -> None:
    """`%` and `str.format`: no widths from arguments or of many digits."""
    text = text_of(template)
    if _LARGE_WIDTH.search(text):
        raise SecurityError(f"the format {text[:40]!r} has a width that is too large or computed")
    longest = max((len(text_of(value)) for value in values), default=0)
    _check_size(len(text) + (text.count("%") + text.count("{")) * longest)


def _check_binary(operator: str, left: Any, right: Any) -> None:
    if operator == "+":
        _check_size(_size(left) + _size(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left, right if isinstance(right, tuple) else (right,))
    elif operator == "*":
        _check_size(max(_size(left) * _integer(right), _size(right) * _integer(left)))
        _check_bits(_integer(left).bit_length() + _integer(right).bit_length())
    elif operator == "**":
        _check_bits(_integer(left).bit_length() * max(_integer(right), 1))


def _check_bits(bits: int) -> None:
    if bits > _MAX_INTEGER_BITS:
        raise SecurityError(f"it would compute an integer of {bits:,} bits")


def _check_growth(
    name: str, subject: Any, args: tuple[Any, ...], options: Mapping[str, Any]
) -> None:
    """Before the filter or string method `name` runs on `subject`."""
    values = [*args, *options.values()]
    longest = max(map(_size, values), default=0)
    widest = max(map(_integer, values), default=0)
    if name not in _ELEMENT_FILTERS and not isinstance(subject, str):
        _weigh(subject)
    if name in {"center", "ljust", "rjust", "zfill", "truncate"}:
        _check_size(max(_size(subject), widest) + longest)
    elif name in {"batch", "slice"}:
        _check_size(widest)
    elif name in {"indent", "expandtabs"}:
        lines = text_of(subject).count("\n" if name == "indent" else "\t") + 1
        _check_size(_size(subject) + lines * max(widest, longest, 8))
    elif name == "wordwrap":
        _check_size(_size(subject) * (1 + longest))
    elif name == "replace" and values:
        count = text_of(subject).count(text_of(values[0]))
        _check_size(_size(subject) + count * longest)
    elif name == "join":
        _check_size(sum(len(text_of(item)) for item in subject) + len(subject) * longest)
    elif name in {"format", "format_map"}:
        _check_format(subject, values)
    elif name == "sum":
        start = args[1] if len(args) > 1 else options.get("start", 0)
        if not isinstance(start, (int, float)):
            raise SecurityError("the filter sum only adds numbers")
    else:
        _check_size(_size(subject))


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, with the size of its result bounded."""
    # jinja2 passes some filters their context, environment or evaluation context first.
    position = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def guarded(*args: Any, **options: Any) -> Any:
        if len(args) > position:
            subject = args[position]
            if name == "join":  # measured and then joined, so a generator won't do
                subject = list(subject)
                args = (*args[:position], subject, *args[position + 1 :])
            _check_growth(name, subject, args[position + 1 :], options)
        return function(*args, **options)

    return guarded


# --- the environment ------------------------------------------------------------------------------


class _BoundedCode(CodeGenerator):
    """Compiles loops to count their passes and `~` to check its length."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        tick.set_environment(self.environment)
        super().visit_For(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        if not isinstance(node.arg, nodes.Slice):  # which jinja2 writes as it stands
            super().visit_Getitem(node, frame)
            return
        self.write("environment.charged(")
        super().visit_Getitem(node, frame)
        self.write(")")

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.join_pieces((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it shows its body."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        """The body, in a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Namespace(Namespace):
    """`namespace()` without underscored names, which the sandbox would let a template write."""

    def __init__(*args: Any, **values: Any) -> None:
        # Like jinja2's own, so that `namespace(self=…)` is allowed.
        self, *positional = args
        attributes = dict(*positional, **values)
        for name in attributes:
            _Namespace._check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check_name(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check_name(name: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace can't have the attribute {name!r}")


class _Dict:
    """`dict(…)` and `dict.fromkeys(…)` without the type, whose methods change any dictionary."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        return dict(*args, **items)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """`dict.fromkeys`."""
        return dict.fromkeys(keys, value)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2 as `transformers` sets it up for chat templates, with bounds."""

    code_generator_class = _BoundedCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(join_pieces)
    join_pieces = staticmethod(join_pieces)
    charged = staticmethod(charged)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=text_of,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        for name in ("lipsum", "cycler", "joiner"):
            # jinja2's demonstration helpers; no chat template uses them.
            del self.globals[name]
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            namespace=_Namespace,
            dict=_Dict(),
        )
        self.filters["tojson"] = _to_json
        for name, function in self.filters.items():
            self.filters[name] = _guarded_filter(name, function)

    def tick(self) -> None:
        """One pass of a loop: `call` counts it."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As in jinja2's sandbox, and without str.translate, whose result has no bound."""
        return attr != "translate" and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`+ * ** %`, refused where the result would be huge."""
        _check_binary(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **options: Any) -> Any:  # noqa: N805
        """Any call in a template: counted, and string methods are measured first."""
        _spend(1)
        # str.format comes wrapped by the sandbox.
        subject = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(subject, str):
            name = getattr(__obj, "__name__", "")
            if name == "join" and args:
                items = list(args[0])
                _check_growth("join", items, (subject,), {})
                args = (items,)
            else:
                _check_growth(name, subject, args, options)
        return super().call(__context, __obj, *args, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes HTML characters, which a prompt shouldn't have.
    if _integer(indent) > _MAX_INDENT or _size(indent) > _MAX_INDENT:
        raise SecurityError(f"tojson's indent is more than {_MAX_INDENT}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.cache
def environment() -> BoundedEnvironment:
    """The one environment; it holds no state of a rendering."""
    return BoundedEnvironment()


@functools.lru_cache(maxsize=64)
def variables_of(source: str) -> frozenset[str]:
    """The names that a template may look up. Raises what jinja2 raises.

    A template has no other way to a variable than its name.
    """
    _check_source(source)
    env = environment()
    return frozenset(meta.find_undeclared_variables(env.parse(source))) | env.globals.keys()


@functools.lru_cache(maxsize=64)
def compile_template(source: str) -> jinja2.Template:
    """A template ready to render. Raises what jinja2 raises."""
    _check_source(source)
    return environment().from_string(source)


def _check_source(source: str) -> None:
    if len(source) > MAX_SOURCE_CHARACTERS:
        raise SecurityError(
            f"its source has {len(source):,} characters; {MAX_SOURCE_CHARACTERS:,} are allowed"
        )

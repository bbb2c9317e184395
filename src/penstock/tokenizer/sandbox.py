"""Where chat templates run: jinja2's sandbox, with bounds on work and memory.

A template is a program that comes with a checkpoint or a request. jinja2's sandbox keeps it from
reaching Python; this adds that it can't hang the server or fill its memory: `bounds` measures
operations before they run.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Iterable, Mapping
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

from penstock.tokenizer.bounds import (
    COMPARING_FILTERS,
    MAX_TEXT_CHARACTERS,
    Budget,
    budget,
    charged,
    check_binary,
    check_growth,
    check_json,
    check_method,
    check_size,
    check_test,
    hashed,
    join_pieces,
    spend,
    text_of,
    weigh_comparison,
)

MAX_SOURCE_CHARACTERS = 1 << 20
_TIME_GROWTH = 256  # characters that strftime may write for one

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda left, right: left in right,
    "notin": lambda left, right: left not in right,
}
"""By their names in jinja2's syntax tree."""


def _guarded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, with the size of its result bounded."""
    # jinja2 passes some filters their context, environment or evaluation context first.
    position = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def guarded(*args: Any, **options: Any) -> Any:
        if len(args) > position:
            subject = args[position]
            whole = isinstance(subject, (str, list, tuple, Mapping))
            if name == "join" or (name in COMPARING_FILTERS and not whole):
                subject = list(subject)  # measured and then used, so a generator won't do
                args = (*args[:position], subject, *args[position + 1 :])
            check_growth(name, subject, args[position + 1 :], options)
        return function(*args, **options)

    return guarded


def _guarded_test(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The test, with the work that it does bounded."""
    position = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def guarded(*args: Any) -> Any:
        check_test(name, args[position], args[position + 1 :])
        return function(*args)

    return guarded


# --- the environment ------------------------------------------------------------------------------


class _BoundedCode(CodeGenerator):
    """Compiles loops to count their passes, and what has no hook to be measured before it runs."""

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

    def visit_Compare(self, node: nodes.Compare, frame: Frame) -> None:  # noqa: N802
        self.write("environment.compared(")
        self.visit(node.expr, frame)
        for i, operand in enumerate(node.ops):
            # of `a < b < c`, c is looked at only where a < b
            self.write(f", {operand.op!r}, {'lambda: ' if i else ''}")
            self.visit(operand.expr, frame)
        self.write(")")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self.write("{")
        for pair in node.items:
            self.write("environment.hashed(")
            self.visit(pair.key, frame)
            self.write("): ")
            self.visit(pair.value, frame)
            self.write(", ")
        self.write("}")


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
        if not isinstance(name, str) or name.startswith("_"):
            hashed(name)
            raise SecurityError(f"a namespace can't have the attribute {name!r}")


class _Dict:
    """`dict(…)` and `dict.fromkeys(…)` without the type, whose methods change any dictionary."""

    def __call__(self, *args: Any, **items: Any) -> dict[Any, Any]:
        if args and not isinstance(args[0], Mapping):
            args = ([(hashed(key), value) for key, value in args[0]], *args[1:])
        return dict(*args, **items)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """`dict.fromkeys`."""
        return dict.fromkeys(map(hashed, keys), value)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """jinja2 as `transformers` sets it up for chat templates, with bounds."""

    code_generator_class = _BoundedCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    concat = staticmethod(join_pieces)
    join_pieces = staticmethod(join_pieces)
    charged = staticmethod(charged)
    hashed = staticmethod(hashed)

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
        tests: dict[str, Any] = self.tests
        for name, function in tests.items():
            tests[name] = _guarded_test(name, function)

    def tick(self) -> None:
        """One pass of a loop: `call` counts it."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """As in jinja2's sandbox, and without str.translate, whose result has no bound."""
        return attr != "translate" and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`+ * ** %`, refused where the result would be huge."""
        check_binary(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """`obj[argument]`, whose hash and whose text in an error are paid for."""
        return super().getitem(obj, hashed(argument))

    def compared(self, left: Any, name: str, right: Any, *more: Any) -> Any:
        """`left == right` and its like; more: further operators and functions for their operands.

        Nested lists that share their parts take exponential time, so they are measured first.
        """
        weigh_comparison(name, left, right)
        found = _COMPARISONS[name](left, right)
        if not more or not found:
            return found
        return self.compared(right, more[0], more[1](), *more[2:])

    def call(__self, __context: Context, __obj: Any, *args: Any, **options: Any) -> Any:  # noqa: N805
        """Any call in a template: counted, and string methods are measured first."""
        spend(1)
        # str.format comes wrapped by the sandbox.
        subject = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(subject, str):
            name = getattr(__obj, "__name__", "")
            if name == "join" and args:
                items = list(args[0])
                check_growth("join", items, (subject,), {})
                args = (items,)
            else:
                check_growth(name, subject, args, options)
        elif subject is not None:
            check_method(subject, getattr(__obj, "__name__", ""), args)
        return super().call(__context, __obj, *args, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(text_of(message))


def _strftime_now(form: str) -> str:
    check_size(len(form) * _TIME_GROWTH)
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes HTML characters, which a prompt shouldn't have.
    check_json(value, indent, separators)
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


__all__ = [
    "MAX_TEXT_CHARACTERS",
    "BoundedEnvironment",
    "Budget",
    "budget",
    "compile_template",
    "environment",
    "join_pieces",
    "variables_of",
]

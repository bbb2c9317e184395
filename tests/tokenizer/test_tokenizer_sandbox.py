"""A template can neither reach Python, nor hang, nor fill the memory."""

from __future__ import annotations

import functools
import time

import pytest

from penstock.errors import ChatTemplateError
from penstock.tokenizer import chat
from penstock.tokenizer.chat import render_chat
from penstock.tokenizer.sandbox import Budget

MESSAGES = [{"role": "user", "content": "hi", "n": 10**10}]

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ (''|attr('__class__')).__mro__ }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ '{0.__class__.__mro__}'.format(1).x.y }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__.x }}",
    "{{ self.__dict__.x }}",
    "{{ dict.update(messages[0], {}) }}",
    "{{ dict.mro() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'a': 1}) }}",
    "{{ lipsum.__globals__ }}",
    "{{ namespace(__class__=1) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% from 'os' import system %}",
    "{% extends 'base' %}",
]

LONG = "{% set x = 'a' * 8000000 %}"
DOUBLE = (
    "{%% set ns = namespace(s=%s) %%}{%% for i in range(60) %%}{%% set ns.s = %s %%}{%% endfor %%}"
)
BOMBS = [
    "{% for i in range(10**9) %}{% endfor %}",
    "{{ 'a' * 10**10 }}",
    "{{ 'a' * messages[0].n }}",
    "{{ [0] * 10**10 }}",
    "{{ 9**(9**9) }}",
    DOUBLE % ("2", "ns.s * ns.s"),
    DOUBLE % ("'aaaa'", "ns.s ~ ns.s"),
    DOUBLE % ("'aaaa'", "ns.s + ns.s"),
    DOUBLE % ("[1]", "ns.s + ns.s"),
    DOUBLE % ("[1]", "[ns.s, ns.s]|sum(start=[])"),
    DOUBLE % ("[1]", "[ns.s, ns.s]") + "{{ ns.s }}",
    DOUBLE % ("[1]", "[ns.s, ns.s]") + "{{ ns.s|tojson }}",
    DOUBLE % ("[1]", "{'a': ns.s, 'b': ns.s}") + "{{ ns.s|string }}",
    LONG + "{% set ns = namespace(l=[]) %}{% for i in range(3000) %}"
    "{% set ns.l = ns.l + [x[i:]] %}{% endfor %}",
    "{{ 'a'|center(10**10) }}",
    "{{ 'a'.center(10**10) }}",
    "{{ 'a'.ljust(10**10) }}",
    "{{ 'a'.zfill(10**10) }}",
    "{{ '\t'.expandtabs(10**10) }}",
    "{{ 'a\nb'|indent(10**10) }}",
    "{{ [1]|batch(10**10, 0)|list }}",
    "{{ [1]|slice(10**10)|list }}",
    "{{ '%10000000000d'|format(1) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10**10, 1) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**10) }}",
    "{{ ('a' * 100)|wordwrap(1, true, 'b' * 8000000) }}",
    "{{ [1]|tojson(indent=10**9) }}",
    LONG + "{{ x.replace('a', x) }}",
    LONG + "{{ x|replace('a', x) }}",
    LONG + "{{ [x, x]|join(x) }}",
    LONG + "{{ x.join([x, x]) }}",
    LONG + "{{ x.translate({97: x}) }}",
    LONG + "{% for i in range(90) %}{{ x }}{% endfor %}",
    LONG + "{% set y %}{% for i in range(90) %}{{ x }}{% endfor %}{% endset %}",
    LONG + "{% macro f() %}{{ x }}{{ x }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% for i in range(9) %}" * 30 + "{% endfor %}" * 30,
    "{#" + "x" * 2_000_000 + "#}",
]

ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    LONG + "{% for i in range(99999) %}{% set y = x.upper() %}{% endfor %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_escapes_fail(template: str) -> None:
    with pytest.raises(ChatTemplateError, match="The chat template failed"):
        render_chat(template, MESSAGES)


@pytest.mark.parametrize("template", BOMBS, ids=[bomb[-70:] for bomb in BOMBS])
def test_bombs_are_refused_at_once(template: str) -> None:
    started = time.process_time()
    with pytest.raises(ChatTemplateError, match="The chat template failed"):
        render_chat(template, MESSAGES)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("template", ENDLESS)
def test_endless_templates_run_out_of_steps(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "Budget", functools.partial(Budget, steps=100_000))
    with pytest.raises(ChatTemplateError, match="it may loop without end"):
        render_chat(template, MESSAGES)


def test_the_deadline_ends_what_steps_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = functools.partial(Budget, deadline=time.monotonic() - 1)
    monkeypatch.setattr(chat, "Budget", passed)
    with pytest.raises(ChatTemplateError, match="it took more than 5 s"):
        render_chat("{% for m in messages %}{% endfor %}", MESSAGES)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ 'a' * 3 ~ 1 ~ none }}", "aaa1None"),
        ("{{ '%s-%03d' % ('a', 7) }} {{ '{:>4}'.format('b') }} {{ '%s'|format(12345) }}", None),
        ("{{ [1, 'a', none]|join(', ') }} {{ ', '.join(['a', 'b']) }}", "1, a, None a, b"),
        ("{{ {'é': '<&>'}|tojson }}{{ [1]|tojson(indent=2) }}", '{"é": "<&>"}[\n  1\n]'),
        ("{{ range(3)|list }} {{ dict(a=1) }} {{ [1, 2]|sum }}", "[0, 1, 2] {'a': 1} 3"),
        ("{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% generation %}x{% endgeneration %}{{ undefined_name }}", "x"),
        (
            "{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}",
            "user\n",
        ),
        (
            "{{ 'a b'|replace(' ', '_') }} {{ 'ab'.replace('b', 'c') }} {{ ' x '.strip() }}",
            "a_b ac x",
        ),
        ("{{ messages|map(attribute='role')|join }} {{ 2**10 }} {{ 7 % 4 }}", "user 1024 3"),
        ("{{ dict.fromkeys(['a'], 1)['a'] }}{{ strftime_now('%%') }}", "1%"),
    ],
)
def test_ordinary_templates_are_left_alone(template: str, expected: str | None) -> None:
    assert render_chat(template, MESSAGES) == (expected or "a-007    b 12345")

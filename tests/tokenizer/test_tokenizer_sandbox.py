"""A template can neither reach Python, nor hang, nor fill the memory."""

from __future__ import annotations

import functools
import time

import pytest

from penstock.errors import ChatTemplateError
from penstock.tokenizer import bounds, chat
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
SHARED = (
    "{% set ns = namespace(a=[], b=[], t=()) %}{% for i in range(40) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% set ns.t = (ns.t, ns.t) %}"
    "{% endfor %}"
)
"""Two lists and a tuple that take 2^40 steps to walk through."""
DEEP = (
    "{% set ns = namespace(a=[1] * 99999) %}"
    "{% for i in range(99) %}{% set ns.a = {'a': ns.a} %}{% endfor %}"
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
    "{{ [9 ** 1290] * 1000000 }}",
    "{{ '%'.join([''] * 1000000) % () }}",
    "{{ ('{' ~ ':' * 1000000).format() }}",
    "{{ ('%' ~ '0' * 40 ~ '99999999999d') % 1 }}",
    "{{ '%(a)10000000000d' % {'a': 1} }}",
    "{{ '%10000000000s' is even }}",
    "{{ '%10000000000d'.encode() % 1 }}",
    "{{ 'a'.encode().center(10**10) }}",
    "{{ (1).to_bytes(10**10, 'big') }}",
    "{{ ('f' * 4000000)|int(base=16) // ('f' * 2000000)|int(base=16) }}",
    "{{ 5|round(-10**10) }}",
    "{{ 5|round(10**10, 'ceil') }}",
    "{{ ('a' * 4000000)|wordwrap(1) }}",
    "{{ ('<!---->' * 1000000)|striptags }}",
    "{{ ('a/' ~ '(' * 2000000 ~ ')' * 2000000)|urlize }}",
    DEEP + "{{ ns.a|pprint }}",
    DEEP + "{{ ns.a|tojson(indent=4) }}",
    DEEP + "{{ ns.a|tojson(indent='    ') }}",
    "{{ ([1] * 100000)|tojson(separators=['a' * 100000, '']) }}",
    "{{ strftime_now('%c' * 1000000) }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% for i in range(9) %}" * 30 + "{% endfor %}" * 30,
    "{#" + "x" * 2_000_000 + "#}",
]

NESTED = [
    "{{ ns.a == ns.b }}",
    "{{ 1 == 1 != ns.a < ns.b }}",
    "{{ {'a': ns.a} != {'a': ns.b} }}",
    "{{ ns.a in [ns.b] }}",
    "{{ ns.a is eq ns.b }}",
    "{{ [ns.a]|select('in', [ns.b])|list }}",
    "{{ [ns.a].index(ns.b) }}",
    "{{ [ns.t, ns.t]|unique|list }}",
    "{{ [ns.a, ns.b]|map('list')|sort }}",
    "{{ [[ns.a], [ns.b]]|min }}",
    "{{ [{'x': ns.a}, {'x': ns.b}]|groupby('x') }}",
    "{{ {'a': ns.a, 'b': ns.b}|dictsort(by='value') }}",
    "{{ {ns.t: 1} }}",
    "{{ {}[ns.t] }}",
    "{{ {}.get(ns.t) }}",
    "{{ {}.fromkeys([ns.t]) }}",
    "{{ dict([(ns.t, 1)]) }}",
    "{{ dict.fromkeys([ns.t]) }}",
    "{% for i in [ns.a, ns.b] %}{{ loop.changed(i) }}{% endfor %}",
    "{{ ns.a is lower }}",
    "{{ ns ~ '' }}",
    "{{ {'a': ns.a}.values() ~ '' }}",
    "{{ {'a': ns.a}.items()|string }}",
    "{% for i in [ns.a, 1] %}{{ '{0.previtem}'.format(loop) }}{% endfor %}",
    "{{ raise_exception(ns.a) }}",
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


@pytest.mark.parametrize("template", NESTED)
def test_nested_values_are_measured_first(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MAX_TEXT_CHARACTERS", 1 << 18)
    with pytest.raises(ChatTemplateError, match=r"it would make a text or list|has no text"):
        render_chat(SHARED + template, MESSAGES)


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
        ("{{ dict([('a', 1)]) }} {{ namespace(a=[1]) }}", "{'a': 1} <Namespace {'a': [1]}>"),
        ("{{ {1: 'a', (2, 3): 'b'}[(2, 3)] }} {{ {'a': 1}.get('b', []) }}", "b []"),
        ("{{ [1] == [1.0] }} {{ 1 < 2 <= 2 > 3 }} {{ 3 < 2 < none }}", "True False False"),
        (
            "{{ 'a' in 'ba' }} {{ 3 not in [1] }} {{ 'a' != none }} {{ [2] > [1] }}",
            "True True True True",
        ),
        (
            "{{ none == x }} {{ x == [] }} {{ [1, 2].index(2) }} {{ 3 is in [3] }}",
            "False " * 2 + "1 True",
        ),
        (
            "{{ '100%% of 12345: %s' % 'a' }} {{ '{0}: 12345'.format(1) }}",
            "100% of 12345: a 1: 12345",
        ),
        (
            "{{ [2, 1, 2]|unique|sort }} {{ 'b,a'.split(',')|map('upper')|sort }}",
            "[1, 2] ['A', 'B']",
        ),
        (
            "{{ 4 is even }} {{ 'A' is upper }} {{ 'f'|int(base=16) }} {{ 1.25|round(1) }}",
            "True True 15 1.2",
        ),
        ("{% for i in [1, 1, 2] %}{{ loop.changed(i) ~ ' ' }}{% endfor %}", "True False True "),
        (
            "{{ {'a': [1]}.values() ~ '' }} {{ {'a': 1}.items()|list }}",
            "dict_values([[1]]) [('a', 1)]",
        ),
    ],
)
def test_ordinary_templates_are_left_alone(template: str, expected: str | None) -> None:
    assert render_chat(template, MESSAGES) == (expected or "a-007    b 12345")

"""The formats of JSON Schema as regular expressions.

What a format's text must be is more than a regex says for a few of them, so these are narrower: a
text that is written is always right, and a few right ones (a leap second, a host name of more than
three long labels) can't be written. A name that JSON Schema doesn't define says nothing, there as
here (2020-12 Validation, 7.2.3), unless it is one of these, misspelt.

Sources: RFC 3339 (dates and times, durations in its appendix A), RFC 1123 (host names), RFC 5321
(mail), RFC 4291 (IPv6), RFC 9562 (UUID), RFC 3986 (URI), RFC 6901 (JSON pointers).
"""

from __future__ import annotations

from typing import Final

from penstock.grammar.refusal import Refusal

_LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    r"(?:(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})-(?:"
    r"(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    rf"|{_LEAP_YEAR}-02-29)"
)
_ZONE = r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{{1,9}})?{_ZONE}"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9]|-[A-Za-z0-9]){0,29}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = "[0-9A-Fa-f]{1,4}"
_DURATION_TIME = r"T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION_DATE = r"(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_ATEXT = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_SEGMENT = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_QUERY = rf"(?:\?(?:{_SEGMENT}|[/?])*)?(?:#(?:{_SEGMENT}|[/?])*)?"
_AUTHORITY = rf"//(?:[A-Za-z0-9._~-]{{1,32}}@)?{_HOST}(?::[0-9]{{1,4}})?"


def _ipv6() -> str:
    """Eight groups, or fewer around one "::"."""
    forms = [rf"(?:{_GROUP}:){{7}}{_GROUP}"]
    for before in range(8):
        left = rf"{_GROUP}(?::{_GROUP}){{{before - 1}}}" if before else ""
        after = 7 - before
        right = rf"(?:{_GROUP}(?::{_GROUP}){{0,{after - 1}}})?" if after else ""
        forms.append(f"{left}::{right}")
    return "|".join(forms)


_PATTERNS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": rf"P(?:[0-9]+W|{_DURATION_TIME}|{_DURATION_DATE}(?:{_DURATION_TIME})?)",
    "hostname": _HOST,
    "email": rf"{_ATEXT}{{1,30}}(?:\.{_ATEXT}{{1,30}})?@{_HOST}",
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "ipv6": _ipv6(),
    "uuid": r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": (
        rf"[A-Za-z][A-Za-z0-9+.-]*:(?:{_AUTHORITY}(?:/{_SEGMENT}*)*"
        rf"|/?(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)){_QUERY}"
    ),
    "uri-reference": rf"(?:{_AUTHORITY})?(?:/(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?)?{_QUERY}",
    "json-pointer": r"(?:/(?:[^/~\x00-\x1f]|~[01])*)*",
    "relative-json-pointer": r"(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^/~\x00-\x1f]|~[01])*)*)",
}
_WIDER: Final = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri"}
_WIDER_TOO: Final = {"iri-reference": "uri-reference", "uri-template": "uri-reference"}
_REFUSED: Final = ("regex",)
_PLAIN: Final = {"host-name": "hostname", "ip-address": "ipv4", "url": "uri", "mail": "email"}


def pattern_of(name: str) -> str | None:
    """A format's regex in Rust's syntax; None for a name that JSON Schema doesn't define.

    Raises Refusal for one that no regex can hold to, and for one that is misspelt.
    """
    known = {**_WIDER, **_WIDER_TOO}.get(name, name)
    if known in _PATTERNS:
        return f"^(?:{_PATTERNS[known]})$"
    if name in _REFUSED:
        raise Refusal(f"the format {name!r} can't be held to while a text is written")
    plain = name.lower().replace("_", "-")
    plain = _PLAIN.get(plain, plain)
    joined = {one.replace("-", ""): one for one in _PATTERNS}
    meant = plain if plain in _PATTERNS else joined.get(plain.replace("-", ""))
    if meant is not None:
        raise Refusal(f"JSON Schema has no format {name!r}; it calls it {meant!r}")
    return None

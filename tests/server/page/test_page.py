"""What the server serves of the page."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from penstock.server import page
from penstock.server.page import HEADERS, files

from .fake import FakeServer

SOURCES = {
    path for path in Path(page.__file__).parent.iterdir() if path.suffix in {".html", ".css", ".js"}
}


def test_every_file_has_an_address_a_type_and_an_etag() -> None:
    served = files()
    assert len(served) == len(SOURCES)
    assert served is files()  # read once
    assert served["/"].content_type == "text/html; charset=utf-8"
    for source in SOURCES - {Path(page.__file__).parent / "index.html"}:
        file = served[f"/page/{source.name}"]
        assert file.body == source.read_bytes()
        assert file.content_type.startswith(
            {".css": "text/css", ".js": "text/javascript"}[source.suffix]
        )
        assert file.etag == f'W/"{hashlib.sha256(file.body).hexdigest()[:32]}"'
        assert gzip.decompress(file.gzipped) == file.body


def test_the_page_is_small() -> None:
    assert sum(len(file.body) for file in files().values()) <= 80 * 1024
    assert sum(len(file.gzipped) for file in files().values()) <= 32 * 1024  # as it is sent
    for path, file in files().items():
        assert file.body.count(b"\n") <= 500, path


class Tags(HTMLParser):
    """Every tag with its attributes, and text inside scripts and styles."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def tags() -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(files()["/"].body.decode())
    return parser.tags


def test_the_content_security_policy_forbids_nothing_the_page_does(
    tags: list[tuple[str, dict[str, str | None]]],
) -> None:
    assert "default-src 'none'" in HEADERS["Content-Security-Policy"]
    for tag, attributes in tags:
        assert not any(name == "style" or name.startswith("on") for name in attributes), tag
        assert tag != "style" and (tag != "script" or attributes["src"])


def test_files_name_only_files_that_are_there(
    tags: list[tuple[str, dict[str, str | None]]],
) -> None:
    named = {a.get("src") or a.get("href") for t, a in tags if t in {"script", "link"}}
    assert {f"/{name}" for name in named if name and not name.startswith("data:")} <= set(files())
    for path, file in files().items():
        text = file.body.decode()
        for name in re.findall(r'from "\./([^"]+)"', text):
            assert f"/page/{name}" in files(), path
        # No address but an SVG's namespace: nothing is loaded from elsewhere.
        assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}, path


def test_every_id_that_a_script_asks_for_is_in_the_page(
    tags: list[tuple[str, dict[str, str | None]]],
) -> None:
    there = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(there) == len(set(there))
    for path, file in files().items():
        for name in re.findall(r'byId\("([^"]+)"\)', file.body.decode()):
            assert name in there, path


def test_no_script_makes_html_or_code_of_text() -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function"
    for path, file in files().items():
        assert not re.search(forbidden, file.body.decode()), path


def test_a_file_that_is_known_already_isnt_sent_again() -> None:
    with FakeServer() as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
        connection.request("GET", "/", headers={"If-None-Match": files()["/"].etag})
        assert connection.getresponse().status == 304
        connection.close()


def test_a_file_is_sent_compressed_to_those_who_accept_it() -> None:
    with FakeServer() as server:
        for accepted, body in {"gzip": files()["/"].gzipped, "identity": files()["/"].body}.items():
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
            connection.request("GET", "/", headers={"Accept-Encoding": accepted})
            assert connection.getresponse().read() == body
            connection.close()

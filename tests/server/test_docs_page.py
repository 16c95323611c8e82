"""The page at /docs: whole, without a network, without a key."""

from __future__ import annotations

import html
from html.parser import HTMLParser
from typing import Any

import pytest

VOID = {"meta", "br"}


class Reader(HTMLParser):
    """What is open at the end, what is linked, and what there is to link to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: set[str] = set()
        self.ids: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            self.attributes.add(name)
            if name == "href":
                self.links.add(str(value))
            if name == "id":
                self.ids.add(str(value))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_every_route_and_field_without_a_network_or_a_key(client: Any, new_client: Any, path: str) -> None:
    answer = new_client(api_key=("sesame",), ui=False).get(path)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    reader = Reader()
    reader.feed(answer.text)
    assert not reader.open and reader.links == {f"#{name}" for name in reader.ids} & reader.links
    assert not reader.tags & {"script", "link", "img", "iframe"} and "src" not in reader.attributes
    assert "url(" not in answer.text and "@import" not in answer.text
    document = client.get("/openapi.json").json()
    text = html.unescape(answer.text)
    for route, methods in document["paths"].items():
        for method, operation in methods.items():
            assert f"<b>{method.upper()}</b> <code>{route}</code>" in text
            assert (operation.get("description") or operation["summary"]) in text
    for name, schema in document["components"]["schemas"].items():
        assert name in reader.ids
        for field, described in schema.get("properties", {}).items():
            assert f"<code>{field}" in text and described.get("description", "") in text


def test_what_it_describes_keeps_its_lock(new_client: Any) -> None:
    client = new_client(api_key=("sesame",))
    assert client.get("/openapi.json").status_code == 401
    assert client.post("/docs").status_code == 401
    assert client.get("/docs").status_code == 200

"""The files of the page over HTTP: headers, caching, locks, and no way to any other file (row 27 of the attacks)."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace

import httpx
import pytest

from vserve.server.http.front_door import FrontDoor
from vserve.server.http.page import FOLDER, load_page

OUTSIDE = [
    "/ui/../page.py", "/ui/%2e%2e/page.py", "/ui/..%2fpage.py", "/ui/%2e%2e%2fpage.py", "/ui/..%5cpage.py",
    "/ui//etc/passwd", "/ui/%2fetc%2fpasswd", "/ui/vendor/../../page.py", "/ui/vendor%2f..%2f..%2fpage.py",
    "/ui/app.js%00.html", "/ui/./../../__init__.py", "/ui/....//page.py", "/ui/index.html", "/ui/vendor", "/ui/",
    "/ui/APP.JS",
]  # fmt: skip


def test_every_file_is_served_with_its_type_and_its_security_headers(client):
    assert (
        "/" in load_page().paths
        and "/ui/app.js" in load_page().paths
        and "/ui/vendor/markdown-it.js" in load_page().paths
    )
    for path in load_page().paths:
        answer = client.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
        assert "script-src 'self';" in policy and "connect-src 'self';" in policy
        assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["x-frame-options"] == "DENY"
        kind = answer.headers["content-type"]
        assert kind == {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}.get(
            path.rpartition(".")[2], kind
        )


def test_the_page_names_nothing_outside_and_nothing_inline():
    html = (FOLDER / "index.html").read_text()
    assert "//" not in html and not re.search(r"""\s(style|on\w+)=""", html) and "<style" not in html
    assert re.findall(r"<script[^>]*>(.*?)</script>", html) == ["", ""]
    for script in FOLDER.glob("*.js"):
        text = script.read_text()
        for dangerous in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
            "http://",
        ):
            assert dangerous not in text, (script.name, dangerous)


def test_a_file_that_is_known_is_not_sent_again(client):
    first = client.get("/")
    assert first.headers["cache-control"] == "no-cache"
    again = client.get("/", headers={"if-none-match": f'"other", W/{first.headers["etag"]}'})
    assert again.status_code == 304 and not again.content and again.headers["etag"] == first.headers["etag"]
    assert client.get("/", headers={"if-none-match": '"other"'}).content == first.content
    head = client.request("HEAD", "/ui/app.js")
    assert head.status_code == 200 and head.headers["etag"] == client.get("/ui/app.js").headers["etag"]
    assert client.post("/").status_code == 405


@pytest.mark.parametrize("path", OUTSIDE)
def test_row_27_no_other_file_is_served(client, path):
    url = httpx.URL("http://test").copy_with(raw_path=path.encode())
    answer = client.get(url)
    # A path that leads out is refused before anything is looked for.
    assert answer.status_code in (400, 404) and "message" in answer.json()["error"], path


def test_no_ui(new_client):
    client = new_client(ui=False)
    for path in ("/", "/ui/app.js", "/ui/events"):
        assert client.get(path).status_code == 404


def test_with_a_key_the_files_are_open_and_what_they_show_is_not(new_client):
    client = new_client(api_key=("secret",), root_path="/proxy")
    for path in load_page().paths:
        assert client.get(path).status_code == 200 and client.request("HEAD", path).status_code == 200
        assert client.post(path).status_code == 401
    for path in ("/ui/events", "/ui/nowhere.js", "//ui/app.js", "/ui/../v1/models", "/ui/%61pp.js", "/metrics"):
        url = httpx.URL("http://test").copy_with(raw_path=path.encode())
        assert client.get(url).status_code == 401, path
    without = new_client(api_key=("secret",), ui=False)
    assert without.get("/").status_code == 401


def test_while_the_model_loads_the_page_is_there_already():
    loading = SimpleNamespace(
        dead=None, down=None, ready=False, retry_after=1, phase=SimpleNamespace(phase="weights", done=1, total=2)
    )

    async def ask(front: FrontDoor, method: str, path: str) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://test") as client:
            return await client.request(method, path)

    front = FrontDoor(loading, "", load_page())  # type: ignore[arg-type]
    assert asyncio.run(ask(front, "GET", "/")).status_code == 200
    assert asyncio.run(ask(front, "GET", "/ui/app.js")).status_code == 200
    assert asyncio.run(ask(front, "POST", "/")).status_code == 405
    assert asyncio.run(ask(front, "GET", "/ui/nowhere")).status_code == 503
    assert asyncio.run(ask(front, "GET", "/health")).json()["progress"] == 0.5
    without = FrontDoor(loading)  # type: ignore[arg-type]
    assert asyncio.run(ask(without, "GET", "/")).status_code == 503
    # The engine is ready a moment before the application is: no probe may send requests that would be turned away.
    loading.ready, loading.stalled = True, None
    for path in ("/health", "/readyz", "/ping"):
        assert asyncio.run(ask(without, "GET", path)).json()["status"] == "loading"
    assert asyncio.run(ask(without, "GET", "/livez")).status_code == 200

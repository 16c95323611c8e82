"""The files of the page that GET / opens: read once and kept in memory, so that no path on disk is made of a URL."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path

from starlette.responses import Response

FOLDER = Path(__file__).parents[1] / "web"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
# Nothing from elsewhere, nothing inline, and no string ever becomes markup or code: what a model says stays text.
SECURITY = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Page:
    def __init__(self, folder: Path) -> None:
        self._files: dict[str, tuple[bytes, dict[str, str]]] = {}  # URL path → (body, headers)
        for file in sorted(folder.rglob("*")):
            if file.suffix in MEDIA_TYPES:
                body = file.read_bytes()
                headers = {
                    "content-type": MEDIA_TYPES[file.suffix],
                    "etag": f'"{sha256(body).hexdigest()[:32]}"',
                    "cache-control": "no-cache",  # may be kept, but is asked for: another version may be served by now
                    **SECURITY,
                }
                name = file.relative_to(folder).as_posix()
                self._files["/" if name == "index.html" else f"/ui/{name}"] = body, headers

    @property
    def paths(self) -> list[str]:
        return list(self._files)

    def answer(self, path: str, headers: Mapping[str, str]) -> Response | None:
        """None: there is no such file."""
        if path not in self._files:
            return None
        body, own = self._files[path]
        known = {tag.strip().removeprefix("W/") for tag in headers.get("if-none-match", "").split(",")}
        if own["etag"] in known:
            return Response(None, 304, {name: value for name, value in own.items() if name != "content-type"})
        return Response(body, headers=own)


@cache
def load_page() -> Page:
    return Page(FOLDER)

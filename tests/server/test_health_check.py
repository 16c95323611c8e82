"""`vserve doctor --health`: a container's health check, which finds out by itself where and how the server answers."""

from __future__ import annotations

import http.server
import os
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vserve.server.cli import health, main
from vserve.server.cli.health import Place

# Called vserve, it listens on argv[1]: tcp, tcp6 or the path of a socket, and answers /readyz with argv[2].
SERVER = """
import http.server, socket, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        assert self.path == "/readyz"
        self.send_response(int(sys.argv[2])); self.send_header("content-length", "4"); self.end_headers()
        self.wfile.write(b"busy")
    def log_message(self, *_): pass
    def address_string(self): return ""
class Server(http.server.HTTPServer):
    address_family = {"tcp": socket.AF_INET, "tcp6": socket.AF_INET6}.get(sys.argv[1], socket.AF_UNIX)
    def server_bind(self): socket.socket.bind(self.socket, self.server_address)
server = Server(("", 0) if sys.argv[1].startswith("tcp") else sys.argv[1], Handler)
print("listens", flush=True)
server.serve_forever()
"""


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[int]:
    (folder / "vserve").write_text(SERVER)
    command = [sys.executable, str(folder / "vserve"), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "listens\n"
            yield process.pid
        finally:
            process.kill()


@pytest.mark.parametrize("place", ["tcp", "tcp6", "socket"])
def test_a_server_is_found_wherever_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, place: str
) -> None:
    path = str(tmp_path / "a socket") if place == "socket" else place
    with running(tmp_path, path, "200") as pid:
        (found,) = health.listening(pid)
        assert found.host == {"tcp": "127.0.0.1", "tcp6": "::1"}.get(place, path)
        assert (found.port > 0) == (place != "socket")
        assert health.is_vserve(pid) and not health.is_vserve(os.getpid())
        monkeypatch.setattr(health, "is_vserve", lambda candidate: candidate == pid)  # others may run here
        assert main.main(["doctor", "--health"]) == 0
        assert capsys.readouterr().out == f"{found} is ready\n"
    assert main.main(["doctor", "--health"]) == 1
    assert "no vserve listens here" in capsys.readouterr().out


def test_a_server_that_loads_is_not_healthy(tmp_path: Path, capsys: Any) -> None:
    with running(tmp_path, "tcp", "503") as pid:
        (place,) = health.listening(pid)
        assert main.main(["doctor", "--health", "--port", str(place.port)]) == 1
        assert "is not ready: 503 busy" in capsys.readouterr().out
    assert main.main(["doctor", "--health", "--uds", str(tmp_path / "none")]) == 1
    assert "does not answer" in capsys.readouterr().out


class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None: ...


@pytest.mark.parametrize("asks_for_certificate", [False, True])
def test_tls_is_found_out(tmp_path: Path, asks_for_certificate: bool) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=elsewhere", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    if asks_for_certificate:
        context.load_verify_locations(cert)
        context.verify_mode = ssl.CERT_REQUIRED

    class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
        def get_request(self) -> Any:
            sock, address = super().get_request()
            return context.wrap_socket(sock, server_side=True), address

        def handle_error(self, *_: Any) -> None: ...

    server = Server(("127.0.0.1", 0), Ready)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        ready, line = health.check([Place("127.0.0.1", server.server_port)])
        assert ready and ("only to clients with a certificate" in line) == asks_for_certificate
    finally:
        server.shutdown()
        server.server_close()


def test_what_answers_something_else_is_not_healthy() -> None:
    def babble(sock: socket.socket) -> None:
        for _ in range(2):
            connection, _ = sock.accept()
            connection.sendall(b"SSH-2.0-nothing\r\n")
            connection.close()

    with socket.create_server(("127.0.0.1", 0)) as sock:
        threading.Thread(target=babble, args=[sock], daemon=True).start()
        ready, line = health.check([Place("127.0.0.1", sock.getsockname()[1])])
    assert not ready and "does not answer" in line

"""Locks on a real server: keys, TLS, Unix socket, root path; rows 25 and 26 of the attacks."""

from __future__ import annotations

import signal
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

KEYS = {"option": "key-option", "file": "key-file-ü", "environment": "key-env", "vllm": "key-vllm"}
ADMIN = "key-admin"


@pytest.fixture(scope="module")
def locked(serve, tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# keys\n\n  {KEYS['file']}  \n", encoding="utf-8")
    environment = {"VSERVE_API_KEY": KEYS["environment"] + "\n", "VLLM_API_KEY": KEYS["vllm"]}
    with serve(
        "--api-key", KEYS["option"], "--api-key-file", str(file), "--admin-api-key", ADMIN, "--root-path", "/proxy",
        "--log-level", "debug", "--enable-log-requests", env=environment,
    ) as server:  # fmt: skip
        yield server


def bearer(key: str, scheme: str = "Bearer") -> dict[str, bytes]:
    return {"authorization": f"{scheme} {key}".encode()}


@pytest.mark.parametrize("key", [*KEYS.values(), ADMIN])
def test_every_key_opens(locked, key):
    assert httpx.get(f"{locked.url}/v1/models", headers=bearer(key)).status_code == 200
    assert httpx.get(f"{locked.url}/v1/models", headers=bearer(key, "bearer")).status_code == 200


VARIANTS = [
    "/v1/models", "/v1/models/", "//v1/models", "/v1//models", "/v1%2fmodels", "/v1/%6dodels",
    "/v1/models?x=/health", "/v1/models#/health", "/v1/models;/health",
    "/health//", "/health%2f", "//health",
    "/health?/../v1/models", "/health/v1/models", "/HEALTH", "/%68ealth",
    "/health.", "/health..",
    "/livez%00", "/v1/models%00/health", "http://x/v1/models", "http://health/v1/models", "/proxy/v1/models",
    "/proxy//v1/models",
    "/v1/completions", "/v1/chat/completions", "/metrics", "/version", "/docs/x", "/openapi.json",
    "/nowhere", "/ui/events", "/ui/", "/ui/%61pp.js", "//ui/app.js",
    "/server_info", "/v1/requests/x/cancel", "/tokenize", "/detokenize", "/load", "*",
]  # fmt: skip


@pytest.mark.parametrize("path", VARIANTS)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_row_25_every_variant_of_a_protected_route_is_401(locked, attacks, path, method):
    if path == "/health?/../v1/models":
        return  # is /health with a query
    request = f"{method} {path} HTTP/1.1\r\nhost: x/health?\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode()
    ((status, error),) = attacks.exchange(locked.url, request)
    assert status == 401 or (path == "*" and status == 400), (path, error)
    if status == 401:
        assert error["code"] == "invalid_api_key" and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "path", ["/./v1/models", "/a/../v1/models", "/v1/models/.", "/health/../v1/models", "/health%2f..%2fv1%2fmodels",
             "/ui/../v1/models", "/ui/app.js/../../v1/models", "/health/%2e%2e/v1/models",
             "/health/%252e%252e/v1/models",
             "/proxy/../v1/models", "http://x/health/../v1/models"]
)  # fmt: skip
@pytest.mark.parametrize("key", [None, KEYS["option"], ADMIN])
def test_a_path_with_dots_is_refused_to_all(locked, attacks, path, key):
    head = "" if key is None else f"authorization: Bearer {key}\r\n"
    request = f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{head}\r\n".encode()
    ((status, error),) = attacks.exchange(locked.url, request)
    assert status == 400 and error["code"] == "invalid_path"


@pytest.mark.parametrize(
    "path", ["/health", "/livez", "/readyz", "/health?x=1", "/proxy/health", "/health/", "/proxy/health/"]
)
def test_probes_need_no_key(locked, path):
    assert httpx.get(f"{locked.url}{path}").status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        [], [(b"authorization", b"")], [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer wrong")], [(b"authorization", b"Bearer key-optio")],
        [(b"authorization", b"Bearer key-option2")], [(b"authorization", b"key-option")],
        [(b"authorization", b"Basic key-option")], [(b"authorization", b"Bearer " + b"x" * 60_000)],
        [(b"authorization", b"Bearer \xff\xfe\xe4")], [(b"authorization", b"Bearer key-file-u")],
        [(b"authorization", b"Bearer key-option"), (b"authorization", b"Bearer key-option")],
        [(b"authorization", b"Bearer key-option,key-env")], [(b"cookie", b"authorization=Bearer key-option")],
        [(b"proxy-authorization", b"Bearer key-option")],
    ],
    ids=lambda headers: repr(headers)[:60],
)  # fmt: skip
def test_row_26_any_other_authorization_is_401(locked, attacks, headers):
    answer = httpx.get(f"{locked.url}/v1/models", headers=headers)
    error = attacks.is_error(answer, 401)
    assert answer.headers["www-authenticate"] == "Bearer" and answer.headers["x-request-id"]
    assert "key-option" not in error["message"]


def test_who_is_not_known_starts_no_engines(demo_server, attacks):
    """Each would take gigabytes: no server scales for anybody, also where there are no keys."""
    for path, field in (("scale_data_parallel", "data_parallel_size"), ("scale_elastic_ep", "new_data_parallel_size")):
        error = attacks.is_error(httpx.post(f"{demo_server.url}/{path}", json={field: 2}), 403)
        assert error["code"] == "admin_key_required" and "--admin-api-key" in error["message"]


def test_control_routes_need_the_admin_key(locked, attacks):
    path = f"{locked.url}/server_info"
    attacks.is_error(httpx.get(path), 401)
    assert attacks.is_error(httpx.get(path, headers=bearer(KEYS["option"])), 403)["code"] == "admin_key_required"
    assert attacks.is_error(httpx.get(f"{path}?steps=5", headers=bearer(KEYS["option"])), 403)
    assert "steps" in httpx.get(f"{path}?steps=5", headers=bearer(ADMIN)).json()
    answer = httpx.get(path, headers=bearer(ADMIN))
    assert answer.status_code == 200 and "steps" not in answer.json()
    for key in (*KEYS.values(), ADMIN):
        assert key not in answer.text
    for variant in (
        "/v1/requests/x/cancel",
        "/v1%2frequests/x/cancel",
        "/proxy/v1/requests/x/cancel",
        "/%73erver_info",
    ):
        attacks.is_error(httpx.post(locked.url + variant, headers=bearer(KEYS["option"])), 403)


def test_browsers_may_ask_first_without_a_key(locked):
    ask = {"origin": "http://page.example", "access-control-request-method": "POST"}
    assert httpx.request("OPTIONS", f"{locked.url}/v1/chat/completions", headers=ask).status_code == 200
    refused = httpx.get(f"{locked.url}/v1/models", headers={"origin": "http://page.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "*"


def test_a_locked_server_refuses_unread(locked, attacks):
    """Whoever has no key cannot make the server read, parse or tokenise."""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 9000000\r\n\r\n"
    )
    ((status, _),) = attacks.exchange(locked.url, head)
    assert status == 401


def test_keys_are_never_logged(locked):
    for key in (*KEYS.values(), ADMIN, "wrong-key-of-somebody"):
        body = {"model": "demo", "prompt": "Hi", "max_tokens": 1}
        httpx.post(f"{locked.url}/v1/completions", json=body, headers=bearer(key))
        httpx.get(f"{locked.url}/nowhere", headers=bearer(key))
    log = "".join(locked.stderr)
    assert "/v1/completions" in log
    for key in (*KEYS.values(), ADMIN, "wrong-key-of-somebody"):
        assert key not in log and key.encode().decode("latin-1") not in log


def certify(folder):
    """(Its certificate, its key), in files of always the same names."""
    names = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost,IP:127.0.0.1", "-passout", "pass:secret", "-out", names[0], "-keyout", names[1]],
        check=True, capture_output=True,
    )  # fmt: skip
    return tuple(map(str, names))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return certify(tmp_path_factory.mktemp("tls"))


def test_tls(serve, tmp_path, until):
    cert, key = certify(tmp_path)
    with serve("--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-keyfile-password", "secret") as server:
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=cert)
        with httpx.Client(base_url=server.url, verify=trusting) as http:
            body = {"model": "demo", "prompt": "Hi", "max_tokens": 3, "stream": True}
            assert http.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
            assert http.post("/v1/completions", content=b" " * (17 << 20)).status_code == 413
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")  # nobody vouches for it
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{server.url}/health".replace("https", "http"))
        with httpx.Client(base_url=server.url, verify=trusting) as http:
            assert http.get("/health").status_code == 200
            first = Path(cert).read_text()
            Path(cert).write_text("broken")
            server.process.send_signal(signal.SIGUSR2)
            until(lambda: any("SIGUSR2: --ssl-certfile" in line for line in server.stderr))
            certify(Path(cert).parent)
            assert served(server.url) == first
            server.process.send_signal(signal.SIGUSR2)
            until(lambda: any("read again: certificates" in line for line in server.stderr))
            assert served(server.url) == Path(cert).read_text() != first
            assert http.get("/health").status_code == 200  # a connection that was open stays


def served(url):
    """The certificate that a new connection meets, PEM."""
    return ssl.get_server_certificate(("127.0.0.1", int(url.rpartition(":")[2])))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ssl-certfile", "{cert}", "--ssl-keyfile", "{key}"], ["--ssl-certfile", "password"]),
        (["--ssl-certfile", "{key}"], ["--ssl-certfile"]),
        (["--ssl-keyfile", "{key}"], ["--ssl-certfile", "missing"]),
        (["--ssl-certfile", "/nowhere.pem"], ["/nowhere.pem", "no file"]),
        (["--api-key-file", "/nowhere"], ["--api-key-file", "/nowhere"]),
        (["--api-key", ""], ["--api-key", "empty"]),
        (["--allowed-origins", "*"], ["--allowed-origins", "JSON list"]),
        (["--header-timeout", "0"], ["--header-timeout", "0.1"]),
        (["--max-num-queued-reqs", "-1"], ["--max-num-queued-reqs", "-1"]),
        (["--max-body-size", "0"], ["--max-body-size", "at least 1"]),
    ],
)
def test_settings_that_cannot_work_are_said_at_once(start_server, certificate, arguments, words):
    import sys

    cert, key = certificate
    arguments = [argument.format(cert=cert, key=key) for argument in arguments]
    done = subprocess.run(
        [sys.executable, "-m", "vserve.server.cli.main", *arguments, "--port", "0", "--device", "cpu"],
        capture_output=True, text=True, timeout=240, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert all(word in last for word in words) and "Traceback" not in done.stderr, last

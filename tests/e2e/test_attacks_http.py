"""Attacks on the HTTP layer, rows 19 to 28 of the checklist, over raw sockets; after each the server is as before."""

from __future__ import annotations

import gzip
import socket
import subprocess
import time

import httpx
import pytest

pytestmark = pytest.mark.usefixtures("unharmed")

POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"
BODY = b'{"model": "demo", "prompt": "Hi", "max_tokens": 1}'


DEEP = 100_000


@pytest.mark.parametrize(
    "body",
    [
        b"", b"no json", BODY[:-1], b"null", b"[]", b'"text"', b'{"prompt": NaN}',
        b'{"prompt": "Hi", "temperature": 1e999}',
        b'{"prompt": "Hi", "prompt": "Ho"}', b'{"prompt": "a\\":", "n": 1, "n": 1}',
        b'{"prompt": [{"a": 1, "a": 2}]}', b"[" * DEEP, b'{"prompt": ' + b"[" * DEEP + b"]" * DEEP + b"}",
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000, b'{"prompt": "Hi", "seed": 1' + b"0" * 900_000 + b"}",
        b'{"prompt": "\xff\xfe"}', b'{"prompt": "\\ud800"}', b'{"prompt": "\\ud800 tail"}',
        b'{"prompt": "\\udc00\\ud800"}',
        b"\xef\xbb\xbf\xef\xbb\xbf" + BODY,
        '{"prompt": "Hi"}'.encode("utf-16"), b'{"prompt": "a\x00b"}', BODY + b" trailing",
    ],
    ids=lambda body: repr(body[:24]) + str(len(body)),
)  # fmt: skip
def test_row_19_bodies_that_are_not_good_json(url, attacks, body):
    response = httpx.post(
        f"{url}/v1/completions", content=body, headers={"content-type": "application/json"}, timeout=240
    )
    attacks.is_error(response, 400)


def test_row_19_a_colon_in_a_text_is_no_second_key(url):
    text = '{"prompt": "x", "prompt": [{"a": 1}]}'
    body = {"model": "demo", "prompt": text, "max_tokens": 1, "stop": ['":']}
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200


def test_row_19_a_byte_order_mark_before_the_body_is_passed_over(url):
    headers = {"content-type": "application/json"}
    assert httpx.post(f"{url}/v1/completions", content=b"\xef\xbb\xbf" + BODY, headers=headers).status_code == 200


def test_row_20_a_declared_length_over_the_limit_is_refused_unread(url, attacks):
    head = POST + b"content-length: 999999999\r\n\r\n"
    ((status, error),) = attacks.exchange(url, head)  # not a byte of the body, and no 408 for that
    assert (status, error["code"]) == (413, "body_too_large")
    assert "1000000" in error["message"]


def test_row_20_the_refusal_is_read_by_a_client_that_is_still_sending(url, attacks):
    assert httpx.post(f"{url}/v1/completions", content=b" " * 2_000_000, timeout=240).status_code == 413
    with attacks.connect(url) as sock:
        sock.sendall(attacks.post(b" " * 2_000_000))
        status, headers, _ = attacks.read_answer(sock)
        assert status == 413 and headers["x-request-id"]


def test_row_20_a_chunked_body_over_the_limit_is_refused_when_it_has_come_so_far(url, attacks):
    head = POST + b"transfer-encoding: chunked\r\n\r\n"
    chunk = b"%x\r\n" % (1 << 16) + b" " * (1 << 16) + b"\r\n"
    ((status, error),) = attacks.exchange(url, head, *[chunk] * 40)
    assert (status, error["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("extra", [b"x" * 100, b"GET /health HTTP/1.1\r\n\r\n", b"\x00\x01"])
def test_row_20_more_than_the_declared_length_is_another_and_bad_request(url, attacks, extra):
    (first, second) = attacks.exchange(url, attacks.post(BODY) + extra)
    assert first[0] == 200 and second[0] == 400


def test_row_20_less_than_the_declared_length_runs_out_of_time(url, attacks):
    ((status, error),) = attacks.exchange(url, attacks.post(BODY)[:-3])
    assert (status, error["code"]) == (408, "slow_request")


def test_row_20_a_compressed_body_is_not_unpacked(url, attacks):
    bomb = gzip.compress(b" " * 50_000_000)
    for encoding in ("gzip", "deflate", "br", "zstd"):
        headers = {"content-type": "application/json", "content-encoding": encoding}
        attacks.is_error(httpx.post(f"{url}/v1/completions", content=bomb, headers=headers, timeout=240), 415)


@pytest.mark.parametrize(
    "head",
    [
        b"x-big: " + b"a" * 70_000 + b"\r\n\r\n",
        b"".join(b"x-%d: a\r\n" % i for i in range(150)) + b"\r\n",
        b"".join(b"x-%d: %s\r\n" % (i, b"a" * 7000) for i in range(12)) + b"\r\n",
        b"x-endless: " + b"a" * 400_000,
        b"x" * 400_000,
    ],
    ids=["one", "many", "sum", "value", "name"],
)
def test_row_21_headers_too_large(url, attacks, head):
    pieces = [GET, *(head[i : i + 5000] for i in range(0, len(head), 5000))]
    ((status, error),) = attacks.exchange(url, *pieces)
    assert (status, error["code"]) == (431, "headers_too_large")


def test_row_21_large_headers_within_the_limit(url):
    headers = {f"x-{i}": "a" * 1000 for i in range(50)}
    assert httpx.get(f"{url}/health", headers=headers).status_code == 200


@pytest.mark.parametrize("length", [9_000, 500_000])
def test_row_21_request_line_too_long(url, attacks, length):
    ((status, error),) = attacks.exchange(url, b"GET /" + b"a" * length + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (status, error["code"]) == (414, "uri_too_long")


def test_row_22_wrong_method_path_and_type(url, attacks):
    error = attacks.is_error(httpx.get(f"{url}/v1/completions"), 405)
    assert "POST" in error["message"]
    assert httpx.delete(f"{url}/v1/models").headers["allow"] == "GET"
    attacks.is_error(httpx.post(f"{url}/v1/nothing"), 404)
    assert "did you mean /v1/models" in attacks.is_error(httpx.get(f"{url}/v1/model"), 404)["message"]
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/json2", "\xff"):
        headers = {"content-type": kind.encode("latin-1")}
        attacks.is_error(httpx.post(f"{url}/v1/completions", content=BODY, headers=headers), 415)
    attacks.is_error(httpx.request("OPTIONS", f"{url}/v1/completions"), 405)


def test_row_22_browsers_may_ask_first(url, attacks):
    """From this machine; without keys, pages of others change and read nothing."""
    home, foreign = {"origin": "http://localhost:3000"}, {"origin": "http://page.example"}
    asks = {"access-control-request-method": "POST"}
    answer = httpx.request("OPTIONS", f"{url}/v1/chat/completions", headers=home | asks)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == home["origin"]
    answer = httpx.get(f"{url}/v1/models", headers=home)
    assert answer.headers["access-control-allow-origin"] == home["origin"]
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert httpx.request("OPTIONS", f"{url}/v1/chat/completions", headers=foreign | asks).status_code == 400
    assert "access-control-allow-origin" not in httpx.get(f"{url}/v1/models", headers=foreign).headers
    refused = attacks.is_error(httpx.post(f"{url}/reload", headers=foreign), 403)
    assert refused["code"] == "origin_not_allowed"
    assert httpx.post(f"{url}/reload", headers={"origin": url}).status_code == 200


SMUGGLED = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 4\r\n" + CHUNKED, CHUNKED + b"content-length: 4\r\n",
        b"content-length: 4\r\ncontent-length: 5\r\n", b"content-length: 4\r\ncontent-length: 4\r\n",
        b"content-length: 4, 4\r\n", b"content-length: +4\r\n", b"content-length: -4\r\n", b"content-length: 0x4\r\n",
        b"content-length: 4 4\r\n", b"content-length: 99999999999999999999999\r\n", b"content-length: \r\n",
        b"transfer-encoding: xchunked\r\n", b"transfer-encoding: chunked, identity\r\n", CHUNKED + CHUNKED,
        b"transfer-encoding: identity\r\n", b"transfer-encoding : chunked\r\n", b"transfer-encoding:\x0bchunked\r\n",
        b"transfer-encoding: gzip, chunked\r\n", b"x: a\r\n folded: b\r\n", b"x: a\r\n\tb\r\n", b"x: a\nb: c\r\n",
        b"x: a\rb\r\n", b"x\x00y: a\r\n", b"x: a\x00b\r\n", b" x: a\r\n", b": a\r\n", b"no colon\r\n",
    ],
)  # fmt: skip
def test_row_24_a_request_that_two_servers_could_read_differently(url, attacks, head):
    found = attacks.exchange(url, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n0\r\n\r\n" + SMUGGLED)
    assert [status for status, _ in found] == [400], found  # and what was smuggled got no answer
    assert found[0][1]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /health HTTP/1.1\nhost: x\n\n", b"GET /health HTTP/1.1\r\nhost: x\n\r\n", b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", b"GET /health HTTP/3.0\r\nhost: x\r\n\r\n",
        b"GET /health\r\n\r\n", b"GE\xffT /health HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /he\x00alth HTTP/1.1\r\nhost: x\r\n\r\n", b"GET health HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"CONNECT evil:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n\r\n",
        b"POST /v1/completions HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    ],
)  # fmt: skip
def test_row_24_what_is_not_http_is_400_and_closed(url, attacks, request_bytes):
    found = attacks.exchange(url, request_bytes)
    assert [status for status, _ in found] == [400], found


def test_row_24_a_flood_of_pipelined_requests_is_cut_off(url, attacks):
    found = attacks.exchange(url, (GET + b"\r\n") * 5000)
    assert len(found) < 200


def test_row_24_a_few_pipelined_requests_are_answered_in_order(url, attacks):
    last = b"GET /nowhere HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    found = attacks.exchange(url, (GET + b"\r\n") * 3 + last)
    assert [status for status, _ in found] == [200, 200, 200, 404]


@pytest.mark.parametrize("num_whole", [0, 1, 3])
@pytest.mark.parametrize("broken", [b"28onnection", b"zz\r\n", b"5\r\nhelloo\r\n0\r\n\r\n"])
def test_row_24_a_broken_body_behind_whole_requests_does_not_hold_the_connection(url, attacks, num_whole, broken):
    """It comes while the first of them is being answered."""
    found = attacks.exchange(url, (GET + b"\r\n") * num_whole + POST + CHUNKED + b"\r\n" + broken)
    assert [status for status, _ in found] == [200] * num_whole + [400], found


def test_row_24_an_upgrade_that_is_not_offered_is_an_ordinary_request(url, attacks):
    upgrade = GET + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n"
    upgrade += POST + b"connection: upgrade, close\r\nupgrade: h2c\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)
    assert [status for status, _ in attacks.exchange(url, upgrade)] == [200, 200]


@pytest.mark.parametrize(
    "path", ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/static/../../etc/passwd",
    "/v1/models/../../etc/passwd", "/v1/models/%252e%252e/%252e%252e/etc/passwd",
             "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "//etc/passwd", "/docs/../../../etc/passwd"]
)  # fmt: skip
def test_row_27_no_path_leads_out(url, attacks, path):
    ((status, error),) = attacks.exchange(url, f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    assert status == (404 if path == "//etc/passwd" else 400) and error["message"]


@pytest.mark.parametrize("host", ["x/health?", "a/../", "x:99999", "", "[::1", "\x7f", "a b"])
def test_row_25_a_strange_host_changes_nothing(url, attacks, host):
    request = f"GET /v1/nothing HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode("latin-1")
    ((status, error),) = attacks.exchange(url, request)
    assert status in (400, 404)
    if status == 404:
        assert "/v1/nothing" in error["message"]


@pytest.mark.parametrize(
    "given, back",
    [
        ("abc-123", "abc-123"), ("a\tb", "ab"), ("<script>alert(1)</script>", "scriptalert1script"),
        ("x" * 5000, "x" * 128), ("\x1b[31mred", "31mred"), ("ünïcode", "ncode"),
    ],
)  # fmt: skip
def test_row_16_the_request_id_comes_back_safe(url, given, back):
    answer = httpx.get(f"{url}/v1/models", headers={"x-request-id": given.encode("utf-8")})
    if "\x1b" in given:  # a control character in a header is no HTTP
        assert answer.status_code == 400
    else:
        assert answer.headers["x-request-id"] == back


def test_row_16_a_line_break_in_the_request_id_injects_nothing(url, attacks):
    with attacks.connect(url) as sock:
        sock.sendall(GET + b"x-request-id: a\r\nset-cookie: evil\r\nconnection: close\r\n\r\n")
        assert b"evil" not in attacks.read_all(sock)
    body = {"model": "demo", "prompt": "Hi", "max_tokens": 1, "request_id": "a\r\nset-cookie: evil\x1b[31m\n"}
    answer = httpx.post(f"{url}/v1/completions", json=body)
    assert "set-cookie" not in answer.headers
    assert not set("\r\n\x1b ") & set(answer.headers["x-request-id"])


def test_row_28_errors_say_nothing_of_the_machine(url, attacks):
    odd = [
        {"model": "demo", "messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"tokenize": 1}},
        {"model": "demo", "messages": "x"}, {"model": "demo"}, {"model": "/etc/passwd", "prompt": "Hi"},
        {"model": "demo", "prompt": "Hi", "logit_bias": {"a": 1}}, {"model": "demo", "prompt": ["x"] * 2000},
    ]  # fmt: skip
    for body in odd:
        for path in ("completions", "chat/completions"):
            response = httpx.post(f"{url}/v1/{path}", json=body, timeout=240)
            assert 400 <= response.status_code < 500
            if body["model"] == "demo":
                attacks.tells_nothing(response.text)


def test_row_48_only_one_port_is_open(guarded_server):
    """Of the server and its engine."""
    pids = {guarded_server.process.pid, *guarded_server.engine_pids()}
    try:
        lines = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    except FileNotFoundError:
        pytest.skip("ss is not installed (Debian: iproute2)")
    ours = [line for line in lines if any(f"pid={pid}," in line for pid in pids)]
    assert len(ours) == 1 and guarded_server.url.rsplit(":", 1)[1] in ours[0]


def test_row_24_unread_empty_lines_do_not_keep_a_connection(url, attacks):
    with attacks.connect(url) as sock, pytest.raises((BrokenPipeError, ConnectionResetError)):
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            sock.sendall(b"\r\n")
            time.sleep(0.1)
    with attacks.connect(url) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert attacks.read_answer(sock)[0] == 200
        sock.settimeout(0.3)
        with pytest.raises(socket.timeout):
            sock.recv(1)  # kept alive

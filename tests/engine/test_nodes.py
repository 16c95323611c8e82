"""Nodes that dial in: who is let in and who is not, and what each end says then. No rank computes anything here."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from vserve.engine.errors import ConfigError
from vserve.engine.link.connection import LENGTH
from vserve.engine.options.config import EngineConfig
from vserve.engine.ranks import handshake, nodes
from vserve.engine.ranks.handshake import Hello, Stranger, check_secret, dial, difference, facts
from vserve.engine.ranks.messages import Beat
from vserve.engine.ranks.node import Node
from vserve.engine.ranks.nodes import Nodes

FACTS = {"torch": "2.13.0", "--max-model-len": "4096"}


def hello(node: int = 1, rank: int = 0, facts: dict[str, str] = FACTS) -> Hello:
    return Hello(b"", b"", node, rank, facts)


class Gathering:
    """Node 0 that waits for others, on a thread; `outcome` is None, or why it has given up."""

    def __init__(self, seconds: int = 30, **wanted: tuple[int, ...]) -> None:
        config = EngineConfig("m", distributed_timeout_seconds=seconds)
        ranks = {int(name.removeprefix("node")): ranks for name, ranks in wanted.items()}
        self.nodes = Nodes(config, "127.0.0.1", 0, "open sesame", FACTS, ranks)
        self.outcome: str | None = None
        self._thread = threading.Thread(target=self._gather, daemon=True)
        self._thread.start()

    def _gather(self) -> None:
        try:
            self.nodes.gather()
        except ConfigError as error:
            self.outcome = str(error)

    def join(self) -> str | None:
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.outcome


@contextmanager
def gathering(seconds: int = 30, **wanted: tuple[int, ...]) -> Iterator[Gathering]:
    made = Gathering(seconds, **wanted)
    try:
        yield made
    finally:
        made.nodes.close(in_order=False)


def test_who_knows_the_secret_is_let_in() -> None:
    with gathering(node1=(2, 3), node2=(4,)) as first:
        controls = [dial(first.nodes.address, "open sesame", hello(node)) for node in (1, 2)]
        ranks = [dial(first.nodes.address, "open sesame", hello(node, rank)) for node, rank in ((2, 4), (1, 3), (1, 2))]
        assert first.join() is None
        assert sorted(first.nodes.sockets) == [2, 3, 4]
        first.nodes.sockets[3].sendall(b"for rank 3")
        assert ranks[1].recv(20) == b"for rank 3"
        for sock in (*controls, *ranks):
            sock.close()


def test_who_does_not_is_refused() -> None:
    with gathering(node1=(1,)) as first:
        for other in ("open barley", ""):
            with pytest.raises(Stranger, match="it does not know the secret"):
                dial(first.nodes.address, other, hello())
        node = Node(1, first.nodes.address, "open barley", FACTS, 5.0)
        with pytest.raises(ConfigError, match="check --master-port, and that VSERVE_CLUSTER_SECRET is the same on all"):
            node.serve()
        assert not first.nodes.nodes


@contextmanager
def impostor(*answers: Any, challenge: bytes = b"n" * 16) -> Iterator[tuple[str, int]]:
    """Who says these to one node after the other, whatever that says."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pose() -> None:
            for answer in answers:
                sock, _ = listener.accept()
                with sock:
                    handshake.send(sock, handshake.Challenge(challenge))
                    handshake.receive(sock, Hello)
                    handshake.send(sock, answer)
                    sock.recv(1)

        threading.Thread(target=pose, daemon=True).start()
        yield listener.getsockname()


@pytest.mark.parametrize(
    "answer", [handshake.Welcome(b"p" * 32), handshake.Refusal("run this as root", b"p" * 32)], ids=["in", "out"]
)
def test_a_node_believes_nobody_who_does_not_know_the_secret(answer: Any) -> None:
    with impostor(answer) as address, pytest.raises(Stranger, match="it does not know the secret"):
        dial(address, "open sesame", hello())


class Recorded(threading.Thread):
    """Passes on what a node and node 0 say, and keeps it: (to the node, to node 0)."""

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(daemon=True)
        self._target = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self.said: list[Any] = []
        self.start()

    def run(self) -> None:
        node, _ = self._listener.accept()
        with self._listener, node, socket.create_connection(self._target) as engine:
            for source, target in ((engine, node), (node, engine), (engine, node)):
                message = handshake.receive(source, handshake.Challenge | Hello | handshake.Welcome | handshake.Refusal)
                self.said.append(message)
                handshake.send(target, message)


def test_what_was_said_once_proves_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A welcome, a refusal and a hello of an honest start, said again by somebody who has listened. The node's nonce is
    the same one again: that must not be what everything hangs on."""
    real = handshake.secrets.token_bytes
    on_node = threading.current_thread()
    fixed = SimpleNamespace(
        token_bytes=lambda size: b"f" * size if threading.current_thread() is on_node else real(size)
    )
    monkeypatch.setattr(handshake, "secrets", fixed)
    with gathering(node1=(1,), node2=(2,)) as first:
        welcomed, refused = Recorded(first.nodes.address), Recorded(first.nodes.address)
        with dial(welcomed.address, "open sesame", hello(1)):
            with pytest.raises(ConfigError, match="node 9 is none of the 3"):
                dial(refused.address, "open sesame", hello(9))
            for record, who in ((welcomed, 1), (refused, 9)):
                challenge, old, answer = record.said
                with impostor(answer) as address, pytest.raises(Stranger):
                    dial(address, "open sesame", hello(who))
                # Only where both nonces are the same, which they never are, is it what was said then.
                with impostor(answer, challenge=challenge.nonce) as address, contextlib.suppress(ConfigError):
                    dial(address, "open sesame", hello(who)).close()
                with socket.create_connection(first.nodes.address) as again:
                    assert handshake.receive(again, handshake.Challenge) != challenge
                    handshake.send(again, old)
                    assert handshake.receive(again, handshake.Refusal).message == ""
                    assert again.recv(1) == b""


@pytest.mark.parametrize(
    "words",
    [
        b"", b"GET / HTTP/1.1\r\n\r\n", LENGTH.pack(1 << 60), LENGTH.pack(3) + b"\xff\xff\xff",
        LENGTH.pack(9000) + b"\x91" * 9000,
    ],
    ids=["nothing", "http", "long", "broken", "nested"],
)  # fmt: skip
def test_strangers_keep_nobody_waiting(words: bytes) -> None:
    with gathering(node1=(1,)) as first, socket.create_connection(first.nodes.address) as stranger:
        stranger.sendall(words)
        control = dial(first.nodes.address, "open sesame", hello())
        rank = dial(first.nodes.address, "open sesame", hello(1, 1))
        assert first.join() is None
        control.close()
        rank.close()


def test_silent_strangers_keep_no_node_out() -> None:
    """More of them than may be about to say something, again and again: who has waited longest gives way."""
    with gathering(node1=(1,)) as first, contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection(first.nodes.address)) for _ in range(nodes.STRANGERS + 8)
        ]
        for sock in silent:  # all have come as far as to the first word, and the first ones are closed
            sock.settimeout(30)
            with contextlib.suppress(OSError):
                sock.recv(64)
        control = dial(first.nodes.address, "open sesame", hello())
        rank = dial(first.nodes.address, "open sesame", hello(1, 1))
        assert first.join() is None
        assert [sock.recv(1) for sock in silent[:8]] == [b""] * 8
        control.close()
        rank.close()


def flood(stack: contextlib.ExitStack, address: tuple[str, int], host: str) -> None:
    """Returns when all have come as far as to the first word."""
    for _ in range(nodes.STRANGERS + 8):
        sock = stack.enter_context(socket.create_connection(address, 30, source_address=(host, 0)))
        with contextlib.suppress(OSError):
            sock.recv(64)


def test_strangers_of_one_address_keep_out_no_node_of_another_that_is_shaking_hands() -> None:
    with gathering(node1=(1,)) as first, contextlib.ExitStack() as stack:
        node = stack.enter_context(socket.create_connection(first.nodes.address))
        challenge = handshake.receive(node, handshake.Challenge)
        flood(stack, first.nodes.address, "127.0.0.2")
        said = handshake.transcript(challenge.nonce, hello())
        proof = handshake.proof("open sesame", b"node", said)
        handshake.send(node, msgspec.structs.replace(hello(), proof=proof))
        handshake.receive(node, handshake.Welcome)
        rank = stack.enter_context(dial(first.nodes.address, "open sesame", hello(1, 1)))
        assert first.join() is None and rank


def test_who_has_proved_the_secret_gives_way_to_nobody() -> None:
    with gathering(node1=(1,)) as first, contextlib.ExitStack() as stack:
        arrivals, proved, go_on = first.nodes._arrivals, threading.Event(), threading.Event()
        ordinary = arrivals.put

        def put(arrival: Any) -> None:
            proved.set()
            assert go_on.wait(60)
            ordinary(arrival)

        arrivals.put = put  # type: ignore[method-assign, assignment]
        dialled: list[socket.socket] = []
        node = threading.Thread(target=lambda: dialled.append(dial(first.nodes.address, "open sesame", hello())))
        node.start()
        assert proved.wait(60)
        arrivals.put = ordinary  # type: ignore[method-assign]
        flood(stack, first.nodes.address, "127.0.0.1")
        go_on.set()
        node.join(60)
        stack.enter_context(dialled[0])
        stack.enter_context(dial(first.nodes.address, "open sesame", hello(1, 1)))
        assert first.join() is None


def test_who_has_proved_nothing_gets_nothing_to_guess_by() -> None:
    """No proof over words of a stranger's choice, by which secrets could be tried without asking again."""
    with gathering(node1=(1,)) as first, socket.create_connection(first.nodes.address) as stranger:
        handshake.receive(stranger, handshake.Challenge)
        handshake.send(stranger, hello())
        answer = handshake.receive(stranger, handshake.Refusal)
        assert (answer.message, answer.proof) == ("", b"")


def test_a_guess_at_the_secret_takes_its_time() -> None:
    """Even by somebody on the way, who has heard a node's proof."""
    with unittest.mock.patch.object(hashlib, "pbkdf2_hmac", wraps=hashlib.pbkdf2_hmac) as stretched:
        handshake.proof("never tried before", b"node", b"")
        handshake.proof("never tried before", b"node", b"again")
    assert [call.args[3] for call in stretched.call_args_list] == [handshake.STRETCH] and handshake.STRETCH >= 100_000


def test_a_node_that_is_none_or_there_already() -> None:
    with gathering(node1=(1,), node2=(2,)) as first:
        with dial(first.nodes.address, "open sesame", hello(1)):
            with pytest.raises(ConfigError, match="node 1 is there already, from"):
                dial(first.nodes.address, "open sesame", hello(1))
            with pytest.raises(ConfigError, match="node 3 is none of the 3: give"):
                dial(first.nodes.address, "open sesame", hello(3))
            with pytest.raises(ConfigError, match="rank 7 is not awaited"):
                dial(first.nodes.address, "open sesame", hello(1, 7))
        end = time.monotonic() + 30
        while first.nodes.nodes[1].is_there:
            assert time.monotonic() < end
            time.sleep(0.01)
        dial(first.nodes.address, "open sesame", hello(1)).close()  # one that was started again is welcome


def test_who_comes_early_hears_that_node_0_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not lost itself, while it says that it is there."""
    monkeypatch.setattr(nodes, "SILENCE", 3.0)
    monkeypatch.setattr(nodes, "BEAT", 0.1)
    with gathering(node1=(1,), node2=(2,)) as first:
        early = dial(first.nodes.address, "open sesame", hello(1))
        early.settimeout(20)
        for _ in range(10):  # longer than silence may last
            early.sendall(LENGTH.pack(len(frame := msgspec.msgpack.encode([Beat()]))) + frame)
            assert early.recv(64)
            time.sleep(0.4)
        others = [dial(first.nodes.address, "open sesame", hello(*who)) for who in ((2,), (1, 1), (2, 2))]
        assert first.join() is None
        for sock in (early, *others):
            sock.close()


def test_a_proof_counts_for_what_was_said_alone() -> None:
    hellos = [hello(1), hello(2), hello(2, 2), hello(1, 0, {"torch": "2.11.0"}), Hello(b"", b"n", 1, 0, FACTS)]
    said = {handshake.transcript(challenge, one) for one in hellos for challenge in (b"", b"c")}
    proofs = {
        handshake.proof("open sesame", role, one, refusal)
        for one in said for role in (b"node", b"engine") for refusal in (None, "", "no")
    }  # fmt: skip
    assert len(said) == 10 and len(proofs) == 60


def test_when_all_are_there_nobody_else_is_let_in() -> None:
    with gathering(node1=(1,)) as first:
        address = first.nodes.address
        socks = [dial(address, "open sesame", hello(*who)) for who in ((1,), (1, 1))]
        assert first.join() is None
        first.nodes.no_more()
        with pytest.raises(OSError):
            dial(address, "open sesame", hello(1, 1))
        socket.create_server(address).close()  # the port is free again
        for sock in socks:
            sock.close()


def test_who_does_not_come_is_named() -> None:
    with gathering(1, node1=(1,), node3=(3,)) as first:
        found = first.join()
        assert found is not None and found.startswith("nodes 1, 3 of 3 have not come to 127.0.0.1:"), found
        assert "within 1 s (--distributed-timeout-seconds): start the same command there" in found


def test_a_silent_host_is_lost(monkeypatch: pytest.MonkeyPatch, awake: Callable[[], float]) -> None:
    monkeypatch.setattr(nodes, "SILENCE", 2.0)
    with gathering(node1=(1,)) as first:
        control = dial(first.nodes.address, "open sesame", hello())
        rank = dial(first.nodes.address, "open sesame", hello(1, 1))
        assert first.join() is None
        begun = awake()
        assert "its host has been silent" in str(first.nodes.nodes[1].wait(1, 30))
        assert awake() - begun < 5
        control.close()
        rank.close()


# ---- what must be the same ----


def test_a_difference_is_named_in_one_line() -> None:
    assert difference(FACTS, dict(reversed(FACTS.items())), "node 1") is None
    assert difference(FACTS, FACTS | {"--max-model-len": "8192"}, "node 1 (10.0.0.2)") == (
        "node 1 (10.0.0.2) has --max-model-len 8192, and node 0 has 4096: start the same command on every node"
    )
    assert difference(FACTS, FACTS | {"torch": "2.12.0"}, "node 1") == (
        "node 1 has torch 2.12.0, and node 0 has 2.13.0: install and set the same on both"
    )
    with gathering(node1=(1,)) as first, pytest.raises(ConfigError, match=r"node 1 .* has torch 2\.12\.0, and"):
        dial(first.nodes.address, "open sesame", hello(facts=FACTS | {"torch": "2.12.0"}))


def test_hosts_may_differ_in_what_is_theirs(tiny_model: Any) -> None:
    folder = str(tiny_model("llama"))
    options: dict[str, Any] = {"tensor_parallel_size": 2, "nnodes": 2, "cluster_secret": "s", "prefix_cache_seed": "p"}
    one = facts(EngineConfig(folder, **options))
    other = EngineConfig(folder, node_rank=1, host_ip="10.0.0.2", cpu_threads=3, **options)
    assert facts(other) == one and "the model's config.json" in one
    assert not [name for name in one if "secret" in name or name == "--prefix-cache-seed"]
    assert difference(one, facts(EngineConfig(folder, **options, dtype="float32")), "node 1") is not None


def test_no_secret_is_needed_on_this_host_alone() -> None:
    options: dict[str, Any] = {"tensor_parallel_size": 2, "nnodes": 2}
    for address in ("127.0.0.1", "localhost", "127.0.0.9", "::1"):
        check_secret(EngineConfig("m", master_addr=address, **options))
    for address in ("10.0.0.1", "node-0.cluster", "0.0.0.0", "::"):
        for short, problem in ((None, "there is no secret"), ("15 characters !", "15 characters of .* can be guessed")):
            with pytest.raises(ConfigError, match=f"{problem}: set VSERVE_CLUSTER_SECRET to the same random text on"):
                check_secret(EngineConfig("m", master_addr=address, cluster_secret=short, **options))
        check_secret(EngineConfig("m", master_addr=address, cluster_secret="sixteen of them!", **options))


# ---- the network ----


def test_the_interface_of_an_address() -> None:
    assert handshake.interface_of("127.0.0.1") == "lo"
    assert handshake.interface_of("203.0.113.9") is None
    environment = {"NCCL_SOCKET_IFNAME": "ib0"}
    handshake.use_interface(environment, "127.0.0.1")
    assert environment == {"NCCL_SOCKET_IFNAME": "ib0"}, "ranks of one host are told by their group"


def test_the_interface_is_named_unless_somebody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "interface_of", lambda _: "eth7")
    environment = {"NCCL_SOCKET_IFNAME": "ib0"}
    handshake.use_interface(environment, "10.0.0.1")
    assert environment == {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "eth7"}


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--master-port {port}: nodes cannot dial in there .* on all nodes"):
            nodes.listen("127.0.0.1", port)

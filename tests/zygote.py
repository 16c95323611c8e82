"""A process that has imported what `vserve` imports, and forks its commands when asked: seconds become milliseconds.

`fork_through` makes `subprocess.Popen` start `python -m vserve.…` this way. What it starts is a child of whoever
asked, as ever (CLONE_PARENT), with the descriptors, environment, folder and session that were asked for, so that
waiting, signals, pipes and the death of a parent are the kernel's own and nothing in vserve knows of it. A server that
was forked has a zygote of its own, for its engines and API processes.

What decides before a program's first line is left to a start of the usual kind: another interpreter, `-c`, a shell, a
`preexec_fn`, and every environment that differs from this one in more than modules read when they are asked. So is
everything once the zygote has died, or where the system cannot do it; a warning says so. Tests that are marked
`true_start` start nothing through it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

# What is forked, and whether it may start others of these.
MODULES = {
    "vserve": True,
    "vserve.server.cli.main": True,
    "vserve.engine.start.process": True,
    "vserve.engine.start.rank_process": False,
    "vserve.server.api_process": False,
}
PACKAGES = ("vserve.engine", "vserve.server")  # all of their modules are imported, but for those below:
LEFT_OUT = ("ray", "bench", "worker", "foreign")  # by a part of their name: what most servers have no use for
LIBRARIES = ("vserve.__main__", "uvloop", "uvicorn.lifespan.on", "uvicorn.protocols.http.h11_impl", "tokenizers")

ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # read when a library is loaded
READ_LATE = (
    "VSERVE_", "GLOO_", "TORCH_NCCL_", "TORCHINDUCTOR_", "OTEL_", "PYTEST_", "TEST_", "NO_COLOR", "TERM", "COLUMNS",
    "LINES", "XDG_STATE_HOME",
)  # fmt: skip

START = 180.0  # seconds for its imports, on a machine that has much to do
ROOM = 16_000  # bytes for the command line of what it forks
NUMBERS = {"x86_64": 56, "aarch64": 220}  # of clone(2)
CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
PR_SET_PDEATHSIG, PR_GET_TID_ADDRESS = 1, 40
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


class Command(NamedTuple):
    """What a child is to become. Its descriptors travel beside it, in the order of `numbers`, which they get."""

    arguments: list[str]  # interpreter, -m, module, …
    environment: dict[str, str]
    folder: str
    numbers: list[int]
    session: bool  # of its own
    group: int  # of processes; 0: of its own, -1: that of who asks
    ignored: list[int]  # signals

    @property
    def program(self) -> Any:
        """The module that is run."""
        return sys.modules[{"vserve": "vserve.__main__"}.get(self.arguments[2], self.arguments[2])]


# ---- who asks ----


class Zygote:
    """The asking end. `control` and `environment`: of a process that runs, or is forked just now; without them it is
    started when it is first needed."""

    def __init__(self, control: socket.socket | None = None, environment: Mapping[str, str] = {}) -> None:
        self._control = control
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self.resting = False  # all starts are usual ones
        self.dead = False

    def takes(self, call: Mapping[str, Any]) -> bool:
        """Whether a start is one that may be forked. `call`: the arguments of Popen._execute_child."""
        return not (self.resting or self.dead) and _is_usual(call) and self._is_alike(_environment(call))

    def _is_alike(self, environment: Mapping[str, str]) -> bool:
        mine = os.environ if self._control is None else self._environment
        return all(
            name.startswith(READ_LATE) or (name in ONE_THREAD and environment.get(name, "1") == "1")
            for name in mine.keys() | environment.keys()
            if mine.get(name) != environment.get(name)
        )

    def fork(self, call: Mapping[str, Any]) -> int:
        """→ pid. Raises OSError, where it cannot, and never again will."""
        streams = [call["p2cread"], call["c2pwrite"], call["errwrite"]]
        command = Command(
            list(call["args"]), dict(_environment(call)), str(Path(call["cwd"] or ".").absolute()),
            [0, 1, 2, *call["pass_fds"]], call["start_new_session"], call["process_group"],
            [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN],
        )  # fmt: skip
        descriptors = [given if given != -1 else number for number, given in enumerate(streams)] + [*call["pass_fds"]]
        body = json.dumps(command).encode()
        with self._lock:
            try:
                control = self._started()
                socket.send_fds(control, [len(body).to_bytes(8, "little")], descriptors)
                control.sendall(body)
                answer = control.recv(8, socket.MSG_WAITALL)
                if len(answer) < 8:
                    raise ConnectionError("it has ended")
            except OSError:
                self.dead = True
                raise
        return int.from_bytes(answer, "little")

    def _started(self) -> socket.socket:
        """What leads to it; it may still import."""
        if self._control is None:
            self._environment = dict(os.environ)
            self._control, theirs = socket.socketpair()
            self._control.settimeout(START)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, os.path.abspath(__file__), str(theirs.fileno()), " " * ROOM],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                    env=os.environ | dict.fromkeys(ONE_THREAD, "1"),
                )  # fmt: skip
        return self._control

    def close(self) -> None:
        """It ends; what it has forked lives on."""
        self.dead = True
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _environment(call: Mapping[str, Any]) -> Mapping[str, str]:
    return os.environ if call["env"] is None else call["env"]  # type: ignore[no-any-return]


def _is_usual(call: Mapping[str, Any]) -> bool:
    """`python -m` with one of MODULES, and nothing that needs a hand between fork and exec."""
    command, none = call["args"], ("executable", "preexec_fn", "gid", "gids", "uid")
    return (
        isinstance(command, list | tuple)
        and all(isinstance(word, str) for word in command)
        and list(command[:2]) == [sys.executable, "-m"]
        and len(command) > 2
        and command[2] in MODULES
        and sum(len(os.fsencode(word)) + 1 for word in command) < ROOM
        and all(call[name] is None for name in none)
        and call["close_fds"]
        and not call["shell"]
        and call["umask"] == -1
    )


def fork_through(zygote: Zygote) -> None:
    """From now on in this process, `subprocess.Popen` forks what the zygote takes."""
    execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    parameters = inspect.signature(execute)

    @functools.wraps(execute)
    def fork_or_execute(process: Any, *arguments: Any) -> None:
        call = parameters.bind(process, *arguments).arguments
        if zygote.takes(call):
            try:
                pid = zygote.fork(call)
            except OSError as error:
                warnings.warn(f"servers start slowly from now on, for their zygote: {error}", stacklevel=3)
            else:
                process.pid, process._child_created = pid, True
                pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
                process._close_pipe_fds(*(call[name] for name in pipes))
                return
        execute(process, *arguments)

    subprocess.Popen._execute_child = fork_or_execute  # type: ignore[attr-defined]


# ---- the process itself ----


def serve(control: socket.socket) -> tuple[Command, list[int]]:
    """Forks for who asks, until nobody does any more; that ends the process. Returns in every child: what it is to
    become, and the descriptors for it."""
    while True:
        head, descriptors, _, _ = socket.recv_fds(control, 8, 64)
        if len(head) < 8:
            os._exit(0)
        size = int.from_bytes(head, "little")
        body = b""
        while len(body) < size:
            if not (more := control.recv(size - len(body))):
                os._exit(0)
            body += more
        if (pid := clone_beside()) == 0:
            control.close()
            return Command(*json.loads(body)), descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        control.sendall(pid.to_bytes(8, "little"))


def clone_beside() -> int:
    """fork(), whose child is not one of this process but of this one's parent. Ends this process where the system has
    no such thing."""
    python, libc = ctypes.pythonapi, ctypes.PyDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    address = ctypes.c_void_p()  # where the C library keeps the id of this thread
    machine = os.uname().machine
    if machine not in NUMBERS or libc.prctl(PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) or not address.value:
        os._exit(1)
    flags = CLONE_PARENT | CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID | signal.SIGCHLD
    nothing = ctypes.c_void_p()
    last = (address, nothing) if machine == "x86_64" else (nothing, address)
    python.PyOS_BeforeFork()
    pid: int = libc.syscall(ctypes.c_long(NUMBERS[machine]), ctypes.c_long(flags), nothing, nothing, *last)
    if pid == 0:
        python.PyOS_AfterFork_Child()
    else:
        python.PyOS_AfterFork_Parent()
    if pid < 0:
        os._exit(1)
    return pid


def become(command: Command, descriptors: list[int]) -> None:
    """What an interpreter would find that had been started so."""
    for number in SIGNALS:
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in command.ignored else usual)
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 500) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(high, command.numbers, strict=True):
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
    if command.session:
        os.setsid()
    elif command.group != -1:
        os.setpgid(0, command.group)
    os.chdir(command.folder)
    sys.path[0] = command.folder
    os.environ.clear()
    os.environ.update(command.environment)
    sys.orig_argv[:] = command.arguments
    sys.argv[:] = [str(command.program.__file__), *command.arguments[3:]]
    call_itself(command.arguments)


def call_itself(arguments: Sequence[str]) -> None:
    """So that /proc/PID/cmdline has them, and zeros after them."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    line = b"".join(word.encode(errors="surrogateescape") + b"\0" for word in arguments)[: end - begin - 1]
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, line, len(line))


def nursery(control: socket.socket, parent: int) -> socket.socket:
    """This process, forked from one that is to start others, is the zygote for them, and ends with it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    quiet = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(quiet, number)
    kept = control.fileno()
    os.closerange(3, kept)
    os.closerange(kept + 1, 500)
    call_itself(["zygote"])
    return control


def preload() -> None:
    for package in PACKAGES:
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not any(part in module.name for part in LEFT_OUT):
                importlib.import_module(module.name)
    for name in (*MODULES, *LIBRARIES):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    parent = os.getppid()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # who asks decides
    sys.path[0] = os.getcwd()
    preload()
    if len(os.listdir("/proc/self/task")) > 1 or os.getppid() != parent:
        sys.exit(1)  # locks that another thread holds would be held for ever in what is forked
    gc.collect()
    gc.freeze()
    while True:
        command, descriptors = serve(control)
        become(command, descriptors)
        if not MODULES[command.arguments[2]]:
            break
        ours, theirs = socket.socketpair()
        own = os.getpid()
        if os.fork():
            theirs.close()
            fork_through(Zygote(ours, command.environment))
            break
        ours.close()
        control = nursery(theirs, own)
    leave(command.program.main)


def leave(run: Callable[[], int | None]) -> NoReturn:
    """Ends this process as an interpreter ends after run(), but for what that takes down of itself: nobody sees it, and
    with these libraries it takes most of a second."""
    code: object = 1
    try:
        code = run()
    except SystemExit as end:
        code = end.code
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    if isinstance(code, int | None):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for those that are no daemons
        atexit._run_exitfuncs()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code or 0)
    sys.exit(code)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()

"""What a process does first that another one has started, or that may have to show its stacks."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys


def die_with_parent(parent: int) -> None:
    """Asks Linux to kill this process when process `parent`, which started it, ends, however it ends."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before
            os._exit(0)


def dump_stacks_on_signal() -> None:
    """SIGUSR1 and fatal signals write the stacks of all threads to stderr, also while the GIL is held."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)

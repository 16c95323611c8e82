"""Profiles the ranks beside rank 0, whose processes are not profile_load.py's own: it puts this folder on their path,
and Python runs this file as each of them starts. The file READY says that there is a model, and GO that a second is to
be profiled, into a file of the rank's own."""

import os
import sys
import threading
import time
from pathlib import Path

FOLDER = "PROFILE_RANKS_INTO"  # the variable that says where


def _profile(folder: Path, rank: str) -> None:
    while not (folder / "READY").exists():
        time.sleep(0.05)
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]):  # the first takes seconds to begin
        torch.cuda.synchronize()
    while not (folder / "GO").exists():
        time.sleep(0.01)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        time.sleep(1.0)
    whole = folder / f"{rank}.part"
    profiled.export_chrome_trace(str(whole))
    whole.rename(folder / f"{rank}.json")


if FOLDER in os.environ and "vserve.engine.start.rank_process" in sys.orig_argv:
    number = sys.orig_argv[sys.orig_argv.index("--rank") + 1]
    threading.Thread(target=_profile, args=(Path(os.environ[FOLDER]), number), daemon=True).start()

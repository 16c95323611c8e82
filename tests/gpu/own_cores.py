"""A plugin of pytest: each of the workers that run side by side keeps to a few cores, as many as TEST_CORES says behind
the first one's first (`8:2`). Where all are taken, it begins again.

Else each engine in them starts as many compilers, and each library as many threads, as there are cores: families,
foreign models and experts' kernels, which take 102 seconds on 16 cores, had not ended after 400.
"""

import os

worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if worker and hasattr(os, "sched_setaffinity"):
    first, each = map(int, os.environ.get("TEST_CORES", "0:2").split(":"))
    first += int(worker.removeprefix("gw")) * each
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[i % len(cores)] for i in range(first, first + each)})

"""Programmatic dependent launch: on Hopper a kernel may start while the one before it on the stream still runs.

A kernel that takes part begins with gdc_launch_dependents(), which lets the next one start as soon as every program of
this one has started, and calls gdc_wait() before it reads or writes anything that an earlier kernel may have written or
read: it returns once the kernel before has completed. What is saved is the launch and the start-up of the programs,
a microsecond or two of a kernel that may itself run for no longer. Every program must call gdc_wait() before it ends,
however early: the kernel after next knows only that this kernel has completed, and infers that all before it have.

Only what no kernel writes (weights), or what was written before some kernel that was launched plainly (the lengths and
block tables of a step, which precede the embedding), may be read before gdc_wait().
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import torch


@lru_cache
def pdl_available(device: torch.device) -> bool:
    """Whether kernels on this device take part: on NVIDIA GPUs of compute capability 9.x (griddepcontrol is an
    instruction of sm_90, and other generations are untested).

    The environment variable VSERVE_NO_PDL=1, read once a device, switches it off: for debugging, and to time the
    difference.
    """
    if device.type != "cuda" or torch.version.cuda is None or os.environ.get("VSERVE_NO_PDL") == "1":
        return False
    return torch.cuda.get_device_capability(device)[0] == 9


# Kernels for more rows than this run alone: they fill the card for longer than a launch takes, and the programs of the
# next kernel, resident before their time, would only take room from them (measured on an H200: 2 % of a decode step
# with 64 rows; with one row the overlap and the products made for it save 7 %).
MAX_ROWS = 16


def pdl_options(tensor: torch.Tensor, rows: int = 1) -> dict[str, Any]:
    """What a launch on tensor's device passes on: the kernel's constexpr PDL, and Triton's launch attribute.

    `rows`: tokens or requests that the kernel works on; left out where it pays for any number, as between the rotation
    and decode attention, which has lengths and tables to read before it needs what was rotated.
    """
    # The attribute goes along only where it is known: Triton's interpreter and other backends refuse it.
    if rows <= MAX_ROWS and pdl_available(tensor.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}

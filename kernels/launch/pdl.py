"""Programmatic dependent launch: on Hopper a kernel may start while the one before it on the stream still runs.

A kernel that takes part begins with gdc_launch_dependents(), which lets the next one start as soon as every program of
this one has started, and calls gdc_wait() before it reads or writes anything that an earlier kernel may have written or
read: it returns once the kernel before has completed. (quant_few, and small_linear where it is to be `late`, wait
first and then let the next one start.) What is saved is the launch and the start-up of the programs,
a microsecond or two of a kernel that may itself run for no longer. Every program must call gdc_wait() before it ends,
however early: the kernel after next knows only that this kernel has completed, and infers that all before it have.

Three places break this on purpose. A x of an adapter (lora.py, `beside`), launched right behind one of these products,
reads the x of both before it waits: whoever made x had completed when the product let others start. It writes only what
the product does not touch, waits before each of its ends, and reads x past L1, which may not have seen it made.

A gated product with adapters' shares (linear_hopper.py, Share.runs), launched right behind A x of the same x, reads x
before it waits as well. A x (lora.py, `leads`) is launched plainly for that: x is there before it lets others start.

attend_beside (attention_beside.py) launches kernels of which none waits for the one before, so that the last may have
completed while the others still run. A kernel that takes part may not be the next one after it, for its gdc_wait() is
for the last alone. The next one is launched plainly, which waits for all; after it the inference holds again.
`pdl_options` sees to it.

Everybody else reads before gdc_wait() only what no kernel writes (weights), or what was written before some kernel that
was launched plainly (the lengths and block tables of a step, which precede the embedding; recurrent states and their
rings, which only a layer's own kernel of the step before wrote, or a plain copy of slots).
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


_overlapping: set[torch.device] = set()  # where the last Triton launches were those of attend_beside


def next_launch_is_plain(device: torch.device) -> None:
    """Say that kernels on this device still run which no one has waited for: the next Triton launch must be plain."""
    _overlapping.add(device)


def launched_plainly(device: torch.device) -> None:
    """Say that a launch on this device, which asks `pdl_options` for nothing, waits for all before it."""
    _overlapping.discard(device)


# Kernels for more rows than this run alone (adapters' have limits of their own, in lora.py): they fill the card for
# longer than a launch takes, and the programs of the next kernel, resident before their time, would only take room from
# them (measured on an H200: 2 % of a decode step with 64 rows; with one row the overlap and the products made for it
# save 7 %).
MAX_ROWS = 16


def pdl_options(tensor: torch.Tensor, rows: int = 1, yields: bool = False) -> dict[str, Any]:
    """What a launch on tensor's device passes on: the kernel's constexpr PDL, and Triton's launch attribute.

    `rows`: tokens or requests that the kernel works on; left out where it pays for any number, as between the rotation
    and decode attention, which has lengths and tables to read before it needs what was rotated. Raises RuntimeError for
    a kernel that would take part as the next one after attend_beside: give it its number of rows, or launch it plainly,
    or with `yields`, which does so just then.
    """
    takes_part = rows <= MAX_ROWS and pdl_available(tensor.device)
    if tensor.device in _overlapping:
        _overlapping.discard(tensor.device)
        if takes_part and yields:
            return {"PDL": False}
        if takes_part:
            raise RuntimeError(
                f"a kernel for {rows} rows takes part in programmatic dependent launch right after attend_beside, of "
                "whose three launches it would wait for the last alone: launch it plainly"
            )
    # The attribute goes along only where it is known: Triton's interpreter and other backends refuse it.
    if takes_part:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}

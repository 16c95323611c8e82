"""How the ranks of an engine find each other, and what they must have in common before they step."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

from ..errors import ConfigError
from ..options.config import EngineConfig
from ..parallel.group import LOCAL, Group, gather
from ..parallel.join import Rendezvous, join
from .handshake import advice
from .messages import Seat

if TYPE_CHECKING:
    from ..planning.settings import Settings

logger = logging.getLogger(__name__)

GRAPHS_ACROSS_HOSTS = (2, 30, 4)  # NCCL's version
# What decides how many steps, collectives and graphs there are, and how large.
DECISIVE = (
    "dtype", "max_model_len", "block_size", "max_num_batched_tokens", "max_num_seqs", "max_mixed_tokens",
    "large_mixed_tokens", "enforce_eager", "max_cudagraph_capture_size", "pipeline_parallel_size",
    "pipeline_layer_partition",
)  # fmt: skip


def union(group: Group, device: torch.device, numbers: Collection[int]) -> list[int]:
    """What any rank has given, in order; numbers: from 0 on. Every rank has to call it."""
    if group.size == 1:
        return sorted(set(numbers))
    if not (most := max(count for (count,) in gather(group, device, [len(numbers)]))):
        return []
    padded = gather(group, device, [*numbers, *[-1] * (most - len(numbers))])
    return sorted({number for found in padded for number in found if number >= 0})


def check_equal(group: Group, settings: Settings) -> None:
    """Raises ConfigError where another rank has resolved the options otherwise: it would wait for steps that never
    come. Cards of different sizes do."""
    values = {**vars(settings.config), **vars(settings)}
    lines = [*(f"{name} {values[name]}" for name in DECISIVE), version("torch"), version("triton")]
    mine = int.from_bytes(hashlib.sha256("\n".join(lines).encode()).digest()[:7], "big")
    found = [numbers[0] for numbers in gather(group, settings.device, [mine])]
    if others := [rank for rank, number in enumerate(found) if number != found[0]]:
        raise ConfigError(
            f"rank {others[0]} has come to other limits than rank 0, as cards of different sizes make it: name "
            "--max-model-len, --max-num-batched-tokens and --max-num-seqs, or use cards of one kind"
        )


def find_rendezvous(seat: Seat, patience: timedelta) -> Rendezvous | None:
    """Before the model's files are looked for: a network that leads nowhere is said before they are downloaded. Raises
    ConfigError."""
    if seat.size == 1:
        return None
    with finding(seat):
        return Rendezvous(seat.rank, seat.size, seat.rendezvous, patience, seat.listener)


def wait_for_ranks(rendezvous: Rendezvous | None, what: str) -> None:
    """Until all have these: how long hosts download or read may differ by more than a collective waits."""
    if rendezvous is not None:
        rendezvous.wait_for_all(what, lambda missing: logger.info(
            "waiting for the model's %s of rank %s of %d", what, ", ".join(map(str, missing)), rendezvous.size
        ))  # fmt: skip


def meet(
    seat: Seat, device: torch.device, symmetric: bool, num_stages: int, patience: timedelta,
    rendezvous: Rendezvous | None,
) -> Group:  # fmt: skip
    """The group of all ranks. `patience`: also of each collective, which may be a long prompt's. Raises ConfigError
    where those of other hosts are not found."""
    with finding(seat):
        return join(seat.rank, seat.size, seat.rendezvous, device, symmetric, num_stages, patience, rendezvous)


class RanksApartError(ConfigError, RuntimeError):
    """Ranks of several hosts do not find each other, because of their network. Or one of them is gone: whoever watches
    their processes waits for that news, as after any RuntimeError of a rank."""


@contextmanager
def finding(seat: Seat) -> Iterator[None]:
    """Raises RanksApartError."""
    try:
        yield
    except RuntimeError as error:
        if seat.rendezvous.startswith(LOCAL):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise RanksApartError(f"rank {seat.rank} does not find the others ({lines[0]}): {advice()}") from error


def eager_across_hosts(config: EngineConfig, seat: Seat, device: torch.device) -> EngineConfig:
    """Without graphs where NCCL stops for ever in those that reach over a network (2.28.9 has)."""
    if seat.size == 1 or seat.rendezvous.startswith(LOCAL) or device.type != "cuda" or config.enforce_eager:
        return config
    if (found := torch.cuda.nccl.version()) >= GRAPHS_ACROSS_HOSTS:
        return config
    logger.warning(
        "steps are launched kernel by kernel: ranks are on several hosts, and CUDA graphs reach over a network with "
        "NCCL %s; it is %s", *(".".join(map(str, version)) for version in (GRAPHS_ACROSS_HOSTS, found)),
    )  # fmt: skip
    return dataclasses.replace(config, enforce_eager=True)

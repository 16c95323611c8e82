"""Slots of recurrent states: of which numbers, and how a cache's memory is divided between them and blocks."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

import torch

from ...kernels.state.scan_decode import has_tiles
from ..cache.states import CHUNK
from ..describe.model_config import ModelConfig
from ..errors import ConfigError
from ..families.layer_spec import DeltaSpec
from ..options.config import EngineConfig
from ..options.scheduler_config import SchedulerConfig
from .host_memory import gib

RUNNING_SHARE = 1 / 3  # of the cache, that running requests' states take at most where their number was left open


@dataclass(frozen=True)
class StateSlots:
    """The null slot, one for each running request, and those that keep snapshots for later ones."""

    slot_bytes: int
    running: int
    snapshots: int

    @property
    def count(self) -> int:
        return 1 + self.running + self.snapshots

    @property
    def num_bytes(self) -> int:
        return self.count * self.slot_bytes

    def describe(self) -> str:
        mib = self.slot_bytes / (1 << 20)
        size = f"{mib:.1f} MiB" if mib >= 0.1 else f"{self.slot_bytes / 1024:.1f} KiB"
        return f"{gib(self.num_bytes)} = {self.running} requests at once and {self.snapshots} snapshots of {size} each"


def divide_cache(
    available: int, slot_bytes: int, block_bytes: int, config: EngineConfig, max_num_seqs: int, advice: str
) -> StateSlots:
    """Of `available` bytes for blocks and slots. Raises ConfigError where they hold no state of each request beside a
    block of each, with what is missing and what would bring it."""
    named = config.max_num_seqs is not None
    most = max_num_seqs if named else max(1, int(available * RUNNING_SHARE) // slot_bytes)
    running = min(max_num_seqs, most)
    needed = (1 + running) * (slot_bytes + block_bytes)
    if needed > available:
        fits = max(0, available) // (slot_bytes + block_bytes) - 1
        fewer = f"set --max-num-seqs {fits} or less, or " if named and fits > 0 else ""
        raise ConfigError(
            f"no memory is left for recurrent states: {running} running requests need {gib(needed)} for a state of "
            f"{gib(slot_bytes)} and a block each, and {gib(max(0, available))} are there, {gib(needed - available)} "
            f"too little; {fewer}{advice}, or use --mamba-ssm-cache-dtype float16"
        )
    left = available - (1 + running) * slot_bytes
    return StateSlots(slot_bytes, running, _snapshots(left, slot_bytes, block_bytes, config))


def beside_blocks(
    num_blocks: int, slot_bytes: int, block_bytes: int, config: EngineConfig, max_num_seqs: int
) -> StateSlots:
    """Where the number of blocks was named."""
    share = config.state_cache_fraction
    left = int(num_blocks * block_bytes / (1 - share))
    return StateSlots(slot_bytes, max_num_seqs, _snapshots(left, slot_bytes, block_bytes, config))


def wanted_bytes(blocks: int, slot_bytes: int, config: EngineConfig, max_num_seqs: int) -> int:
    """For so many bytes of blocks, and slots beside them. blocks: bytes."""
    running = (1 + max_num_seqs) * slot_bytes
    return max(int(running / RUNNING_SHARE) + slot_bytes, running + int(blocks / (1 - config.state_cache_fraction)))


def _snapshots(left: int, slot_bytes: int, block_bytes: int, config: EngineConfig) -> int:
    """left: bytes for blocks and snapshots. There is no more than one for each CHUNK tokens of the blocks."""
    if not config.enable_prefix_caching:
        return 0
    share = int(left * config.state_cache_fraction)
    useful = (left - share) // block_bytes * config.block_size // CHUNK
    return max(0, min(share // slot_bytes, useful))


def state_chunk(config: EngineConfig) -> int:
    """Tokens at multiples of which prompts are cut where there are recurrent states."""
    return lcm(SchedulerConfig.state_snapshot_tokens, config.block_size)


def seqs_beside_chunk(config: EngineConfig, tokens: int, seqs: int) -> int:
    """How many requests may run where steps have so many tokens: of recurrent states, prompts in chunks would else wait
    for those who decode to end. Raises ConfigError where more were named."""
    chunk = state_chunk(config)
    if config.max_num_seqs is None and tokens >= chunk:
        return min(seqs, tokens - chunk + 1)
    if tokens < (needed := seqs - 1 + chunk):
        fewer = f" or lower the second to {tokens - chunk + 1}" if tokens >= chunk else ""
        raise ConfigError(
            f"--max-num-batched-tokens is {tokens}: beside {seqs} running requests (--max-num-seqs) a step must have "
            f"room for {chunk} tokens of a prompt, as recurrent states are kept at multiples of that; raise the first "
            f"to {needed}{fewer}"
        )
    return seqs


def check_state_heads(model: ModelConfig) -> None:
    """Raises ConfigError where a GPU's kernels have no tiles for a head's matrix."""
    for layer in model.layers:
        if (spec := layer.state) is None or not spec.elements:
            continue
        taken, wanted = has_tiles(spec.rows, spec.columns), "a power of two, and a multiple of 16"
        if isinstance(layer.mixer, DeltaSpec):
            taken, wanted = taken and not spec.columns & (spec.columns - 1), "powers of two"
        if not taken:
            raise ConfigError(
                f"{model.architecture} has recurrent states of {spec.rows} x {spec.columns} a head, and on a GPU "
                f"{wanted} of at least 16 are computed: add --device cpu"
            )


def choose_state_dtype(config: EngineConfig, model: ModelConfig) -> str:
    """Of the states' matrices. Raises ConfigError where one is named for a model without."""
    asked = next((spec.dtype for spec in model.state_specs() if spec.elements), None)
    if asked is None and config.mamba_ssm_cache_dtype != "auto":
        kept = "no recurrent state but inputs of convolutions" if model.has_state else "no recurrent state"
        raise ConfigError(
            f"--mamba-ssm-cache-dtype {config.mamba_ssm_cache_dtype}: {model.architecture} keeps {kept}: leave it out"
        )
    return (asked or "float32") if config.mamba_ssm_cache_dtype == "auto" else config.mamba_ssm_cache_dtype


def state_dtype(name: str) -> torch.dtype:
    """name: choose_state_dtype's."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype

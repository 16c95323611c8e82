"""The machine that an engine runs on, as settings go by it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Machine:
    """What the options depend on beside the model."""

    device: torch.device
    name: str  # of the card; cpu
    card_bytes: int  # of the card's memory; 0 on the CPU
    cpu_threads: int  # of torch
    card_free: int = 0  # of card_bytes, when the engine began
    codes: bool = False  # quantised weights stay codes on this card

"""How evenly a mixture's router loads ranks that hold whole experts each: the slowest one sets the pace of all."""

from __future__ import annotations

import torch
from torch import Tensor

from .layers.experts import Experts
from .models.model import Model
from .parallel.group import Group

EVERY = 64  # steps between two looks at all ranks


class ExpertLoad:
    """Counted on the device. What CUDA graphs run is left out: prompts tell enough, and there it costs nothing."""

    def __init__(self, experts: list[Experts], group: Group, device: torch.device) -> None:
        self._group = group
        self._count = torch.zeros(1, dtype=torch.int64, device=device)  # tokens that this rank's experts got
        for one in experts:
            one.load_count = self._count

    @classmethod
    def of(cls, model: Model) -> ExpertLoad | None:
        """None where ranks hold slices of every expert, whose load is the same."""
        group = model.place.group
        found = [m for m in model.modules() if isinstance(m, Experts) and len(m.mine) < m.num_experts]
        return cls(found, group, model.place.device) if found and group.size > 1 else None

    def reset(self) -> None:
        """After steps that were no requests."""
        self._count.zero_()

    def look(self, step: int) -> Tensor | None:
        """int64 [ranks], so far; None in most steps. Every rank has to call it, in the same steps."""
        return None if step % EVERY else self._group.all_gather(self._count, 0)

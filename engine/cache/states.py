"""The memory of recurrent states: slots, each with room for those of all layers, of one request or of a snapshot.

Slot 0 is nobody's: rows without a state point to it, and it is neither read nor written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.state.slots import copy_slots
from ..families.layer_spec import StateSpec
from ..layers.state import StateLayer

CHUNK = 64  # tokens: snapshots are made at multiples of it, where kernels cut prompts


@dataclass(frozen=True)
class StateLayout:
    """What a slot holds: of each layer the matrices, and a ring of the newest inputs."""

    specs: tuple[StateSpec, ...]  # of the layers of this rank that keep a state
    ring: int  # positions in it
    dtype: torch.dtype  # of the matrices

    @classmethod
    def of(cls, specs: Sequence[StateSpec], num_drafts: int, dtype: torch.dtype) -> StateLayout | None:
        """num_drafts: of a request in a step, at most. None: no layer keeps a state."""
        if not specs:
            return None
        # What a step may write must not be what the next one, or a fold of it, has still to read.
        needed = max(spec.conv_width for spec in specs) - 1 + 2 * (1 + num_drafts)
        return cls(tuple(specs), 1 << (needed - 1).bit_length(), dtype)

    def slot_bytes(self, item: int) -> int:
        """item: bytes of an activation."""
        rings = sum(self.ring * (spec.channels + spec.gates) for spec in self.specs)
        return rings * item + sum(spec.elements for spec in self.specs) * self.dtype.itemsize

    def allocate(self, num_slots: int, dtype: torch.dtype, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Of each layer: the ring [num_slots, R, C + G] in `dtype`, the activations', and matrices [num_slots, H, rows,
        columns]. Whatever is in them is never read before it was written."""
        return [
            (
                torch.zeros(num_slots, self.ring, spec.channels + spec.gates, dtype=dtype, device=device),
                torch.zeros(num_slots, spec.num_heads, spec.rows, spec.columns, dtype=self.dtype, device=device),
            )
            for spec in self.specs
        ]


class StateStorage:
    """The slots of all layers, once they are allocated."""

    def __init__(
        self,
        layout: StateLayout,
        layers: Sequence[StateLayer],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """dtype: of the activations. The layers are bound to it."""
        self.num_slots, self.tensors = num_slots, []
        for layer, (ring, matrices) in zip(layers, layout.allocate(num_slots, dtype, device), strict=True):
            layer.bind(ring, matrices)
            self.tensors += [tensor for tensor in (ring, matrices) if tensor.numel()]
        nowhere = torch.zeros(1, dtype=torch.int32, device=device)
        copy_slots(self.tensors, nowhere, nowhere)  # copies nothing: the first hit is not to wait for a compiler

"""What a format makes of the tensors of a matrix: codes, of which every number is finite."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import ModelError
from .codes import Codes
from .format import Format


def decoded(
    format: Format, tensors: Mapping[str, Tensor], rows: int, columns: int, device: torch.device, cut: bool = False
) -> Codes:
    """What `format` makes of a matrix's tensors, on that device. Raises ModelError for wrong values.

    cut: only a part of it is wanted. Where the codes are what the file has, they stay there, of which no more is read
    than is taken (`Codes.to`).
    """
    if not (cut and getattr(format, "as_stored", False)):
        tensors = {suffix: tensor.to(device) for suffix, tensor in tensors.items()}
    return finite(format.decode(tensors, rows, columns), tensors)


def finite(codes: Codes, tensors: Mapping[str, Tensor]) -> Codes:
    """Itself. Raises ModelError where what makes numbers of the codes is none itself: in 16 bits such a weight would be
    a NaN that every answer shows, behind a code it may be any number. Every format comes through here, a GPU waits once
    a matrix. `tensors`: that they were made of, one of which is named."""
    made = [values for values in (codes.scales, codes.zeros, codes.minima, codes.table) if values is not None]
    if bool(torch.stack([torch.isfinite(values).all() for values in made]).all()):
        return codes
    by_size = sorted(tensors, key=lambda suffix: tensors[suffix].numel())  # codes come last: they may be floats too
    for suffix in by_size:
        if (found := _not_finite(tensors[suffix])) is not None:
            raise ModelError(f"{suffix} holds {found}, finite numbers belong there: download the checkpoint again")
    # Bytes that stand for powers of two, scales within blocks, a product of two that is too large.
    suffix = next((suffix for suffix in tensors if "scale" in suffix), next(iter(tensors)))
    found = next(text for values in made if (text := _not_finite(values)) is not None)
    raise ModelError(
        f"{suffix} makes scales of which one is {found}, they have to be finite: download the checkpoint again"
    )


def _not_finite(values: Tensor) -> str | None:
    """The first that is no finite number, and where it is; None: all are."""
    wrong = ~torch.isfinite(values.float()) if values.is_floating_point() else torch.zeros(0)
    if not bool(wrong.any()):
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    return f"{float(values[at].float())} at {list(at)}"

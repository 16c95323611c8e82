"""What the grammars of a step's requests allow: a mask made while the forward runs, and the tokens sampled under it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TokenMask:
    rows: list[int]  # indexes into plan.sampled
    bits: np.ndarray  # int32 [len(rows), ceil(V / 32)], bit 1 = allowed


def make_mask(sampled: Sequence[Request | None], vocab_size: int) -> tuple[TokenMask | None, list[tuple[Request, str]]]:
    """For the samples of a step all of whose predecessors have been taken in; None when no live row is constrained.

    Also returns the requests whose grammar raised, and what to tell them: their rows are not in the mask.
    """
    rows: list[int] = []
    errors: list[tuple[Request, str]] = []
    constrained = [
        (index, request)
        for index, request in enumerate(sampled)
        if request is not None and request.grammar is not None and not request.finished
    ]
    bits = np.empty((len(constrained), -(-vocab_size // 32)), dtype=np.int32)
    for index, request in constrained:
        assert request.grammar is not None
        try:
            request.grammar.fill(bits[len(rows)])
            rows.append(index)
        except Exception as error:
            logger.warning("the grammar of request %d raised", request.id, exc_info=error)
            errors.append((request, f"the grammar of this request failed: {type(error).__name__}: {error}"))
    return (TokenMask(rows, bits[: len(rows)]) if rows else None), errors


def refusal(request: Request, token: int) -> str:
    """Why the request's grammar does not go on with this token; "" when it does, and has taken it in."""
    assert request.grammar is not None
    try:
        if request.grammar.accept(token):
            return ""
    except Exception as error:
        logger.warning("the grammar of request %d raised", request.id, exc_info=error)
        return f"the grammar of this request failed: {type(error).__name__}: {error}"
    return f"the grammar of this request does not allow the token {token} that was sampled"

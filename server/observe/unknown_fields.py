"""Fields of requests that nobody knows: counted, and each told once in the log with the one that is probably meant."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...engine.link.logs import escape
from ..errors import shorten
from ..options.hint import did_you_mean

logger = logging.getLogger("vserve.request")

MOST = 100  # names that are told; clients may name as many as they like


class UnknownFields:
    def __init__(self) -> None:
        self.num_requests = 0  # that had some
        self._told: set[str] = set()

    def take(self, names: Sequence[str], known: Sequence[str]) -> None:
        """`names`: what a request has that changes nothing; `known`: what it might have."""
        self.num_requests += 1
        for name in names:
            if len(self._told) == MOST:
                return
            if (short := shorten(name)) not in self._told:
                self._told.add(short)
                hint = did_you_mean(short, known) or "; nothing has that name"
                logger.warning(
                    "a request has the field %s, which changes nothing%s (told once; answers name it in "
                    "x-vserve-ignored-params, and --strict-params refuses it)", escape(short), hint,
                )  # fmt: skip

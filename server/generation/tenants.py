"""What each tenant has let in and not finished, over all API processes: see http/tenant.py for who tenants are."""

from __future__ import annotations

from collections import Counter

from ..client.board import Board


class Tenants:
    def __init__(self, board: Board | None = None) -> None:
        """`board`: of several API processes. What others have let in is known by group: of the few tenants that share
        one, each counts as having what all have."""
        self._requests: Counter[int] = Counter()  # by tenant; those with none have no entry
        self._tokens: Counter[int] = Counter()
        self._board = board

    def count(self, tenant: int, num_requests: int, num_tokens: int) -> None:
        for held, amount in ((self._requests, num_requests), (self._tokens, num_tokens)):
            held[tenant] += amount
            if not held[tenant]:
                del held[tenant]
        if self._board is not None:
            self._board.count_share(tenant, num_requests, num_tokens)

    def held(self, tenant: int) -> tuple[int, int]:
        """(Requests, tokens of their prompts.)"""
        requests, tokens = (0, 0) if self._board is None else self._board.other_share(tenant)
        return self._requests[tenant] + requests, self._tokens[tenant] + tokens

    def number_with(self, tenant: int) -> int:
        """Of tenants that have something open, this one counted among them."""
        if self._board is not None:
            return self._board.num_shares(tenant)
        return len(self._requests) + (tenant not in self._requests)

"""What drafts did during a measurement, of the counters that vserve and vLLM have on /metrics."""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass
from typing import Any

from .client import Target

_SAMPLE = re.compile(r"^\w+:spec_decode_(num_\w+?)_total(?:\{(.*)\})? (\S+)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class DraftCounts:
    """Totals, of all engines."""

    drafts: float = 0.0
    tokens: float = 0.0
    accepted: tuple[float, ...] = ()  # by their position in what was drafted

    def since(self, before: DraftCounts) -> DraftCounts:
        padded = before.accepted + (0.0,) * len(self.accepted)
        accepted = tuple(now - then for now, then in zip(self.accepted, padded, strict=False))
        return DraftCounts(self.drafts - before.drafts, self.tokens - before.tokens, accepted)

    @property
    def acceptance_length(self) -> float:
        """Tokens that a request gets in a step with drafts."""
        return 1 + sum(self.accepted) / self.drafts

    def report(self) -> None:
        """In vLLM's words."""
        print(f"{'Speculative Decoding':-^50}")
        for label, value in (
            ("Acceptance rate (%):", 100 * sum(self.accepted) / max(1.0, self.tokens)),
            ("Acceptance length:", self.acceptance_length),
        ):
            print(f"{label:<40} {value:<10.2f}")
        for label, count in (("Drafts:", self.drafts), ("Draft tokens:", self.tokens)):
            print(f"{label:<40} {int(count):<10}")
        print(f"{'Accepted tokens:':<40} {int(sum(self.accepted)):<10}")
        for position, count in enumerate(self.accepted):
            print(f"{f'  Position {position}, of its drafts (%):':<40} {100 * count / self.drafts:<10.2f}")

    def to_json(self) -> dict[str, Any]:
        """vLLM's keys."""
        return {
            "spec_decode_acceptance_rate": 100 * sum(self.accepted) / max(1.0, self.tokens),
            "spec_decode_acceptance_length": self.acceptance_length,
            "spec_decode_num_drafts": int(self.drafts),
            "spec_decode_draft_tokens": int(self.tokens),
            "spec_decode_accepted_tokens": int(sum(self.accepted)),
            "spec_decode_per_position_acceptance_rates": [count / self.drafts for count in self.accepted],
        }


def parse(page: str) -> DraftCounts:
    """Of the text of /metrics; zeros where the server does not draft."""
    totals = {"num_drafts": 0.0, "num_draft_tokens": 0.0}
    accepted: dict[int, float] = {}
    for name, labels, value in _SAMPLE.findall(page):
        if name in totals:
            totals[name] += float(value)
        elif name == "num_accepted_tokens_per_pos" and (found := _POSITION.search(labels)):
            accepted[int(found[1])] = accepted.get(int(found[1]), 0.0) + float(value)
    by_position = tuple(accepted.get(place, 0.0) for place in range(max(accepted, default=-1) + 1))
    return DraftCounts(totals["num_drafts"], totals["num_draft_tokens"], by_position)


def read_counts(target: Target) -> DraftCounts:
    """Zeros where there is no such page: not every server that is measured has one."""
    prefix = target.path.partition("/v1/")[0] if "/v1/" in target.path else ""
    host = f"[{target.host}]" if ":" in target.host else target.host
    url = f"{'https' if target.tls else 'http'}://{host}:{target.port}{prefix}/metrics"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, headers=target.headers), timeout=10) as response:
            return parse(response.read().decode("utf-8", "replace"))
    except (OSError, ValueError):
        return DraftCounts()

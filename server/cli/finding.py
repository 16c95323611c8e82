"""What was found out about one thing that serving needs."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, FAIL = "ok", "warn", "FAIL"


@dataclass(frozen=True)
class Finding:
    status: str
    name: str
    text: str
    remedy: str = ""

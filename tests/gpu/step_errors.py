"""How far a step is from fp32: launched as it is, which is the measure, and padded as for its graph."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

FIRST = 128  # tokens of prompts that are judged by themselves: padding rows of the decodes stand where they are
# The padded step's error may be so many times that of the bare one; the floor is for what is nearly exact, as fp32.
TOLERANCE, FLOOR = 1.5, 2e-5
# And both are below SANE, that of each token below LONE times as much: three times what was measured.
SANE, LONE = {torch.bfloat16: 0.03, torch.float16: 0.003, torch.float32: 2e-5}, 4

Error = tuple[float, float]  # of a group of tokens: norm of the error over norm of the values; that of the worst token


class Result(NamedTuple):
    """hidden: of the sampled tokens [S, ·]; kv: by layer, keys and values of all tokens [T, ·]."""

    hidden: Tensor
    kv: list[Tensor]


@dataclass
class Judged:
    """One step's errors, by group of tokens."""

    name: str
    bare: dict[str, Error]
    padded: dict[str, Error]


@dataclass
class Errors:
    """Of many steps of one model in `dtype`."""

    dtype: torch.dtype
    judged: list[Judged] = field(default_factory=list)

    def add(self, name: str, decodes: int, sampled_decodes: int, bare: Result, padded: Result, exact: Result) -> None:
        """The first `decodes` of T tokens, and `sampled_decodes` of those that are sampled, are no prompt's."""
        groups: dict[str, list[Tensor]] = {}  # bare, padded, exact
        first, others = decodes, decodes + FIRST
        parts = {"decodes": slice(0, first), "first of prompts": slice(first, others), "prompts": slice(others, None)}
        for layer in range(len(exact.kv)):
            for part, tokens in parts.items():
                groups[f"layer {layer} {part}"] = [rows.kv[layer][tokens] for rows in (bare, padded, exact)]
        for part, tokens in (("decodes", slice(0, sampled_decodes)), ("prompts", slice(sampled_decodes, None))):
            groups[f"hidden states {part}"] = [rows.hidden[tokens] for rows in (bare, padded, exact)]
        groups = {group: rows for group, rows in groups.items() if len(rows[2])}
        found = torch.stack([torch.stack((_error(a, want), _error(b, want))) for a, b, want in groups.values()])
        pairs = dict(zip(groups, found.tolist(), strict=True))
        both = ({group: (pair[i][0], pair[i][1]) for group, pair in pairs.items()} for i in range(2))
        self.judged.append(Judged(name, *both))

    def verdict(self) -> list[str]:
        """What is wrong, judged by all steps together.

        A lone token's error is a matter of luck, twice as large here as there: so at least what is usual for its group.
        """
        usual: dict[str, Error] = {}
        for group in sorted({group for step in self.judged for group in step.bare}):
            errors = [step.bare[group] for step in self.judged if group in step.bare]
            usual[group] = median(error for error, _ in errors), max(worst for _, worst in errors)
            print(f"{group}: error {usual[group][0]:.2e}, of the worst token of all {usual[group][1]:.2e}")
        found, sane = [], SANE[self.dtype]
        for step in self.judged:
            for group, (error, worst) in step.padded.items():
                bare, bare_worst = step.bare[group]
                numbers = f"padded {error:.2e} (worst token {worst:.2e}), bare {bare:.2e} (worst {bare_worst:.2e})"
                common, top = usual[group]
                # so put that NaN is wrong too
                if not (error < sane and bare < sane and worst < LONE * sane and bare_worst < LONE * sane):
                    found.append(f"{step.name}: {group}: errors {numbers}, limit {sane} (worst token {LONE * sane})")
                elif error > TOLERANCE * max(bare, common) + FLOOR or worst > TOLERANCE * top + FLOOR:
                    found.append(f"{step.name}: {group}: errors {numbers}, usual bare {common:.2e} (worst {top:.2e})")
        return found


def _error(got: Tensor, want: Tensor) -> Tensor:
    difference, size = (got.float() - want).norm(dim=1), want.norm(dim=1)
    return torch.stack((difference.norm() / size.norm(), (difference / size).max()))

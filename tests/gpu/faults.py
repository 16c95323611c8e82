"""`vserve` with a planted fault, which the noticing model has to notice: python faults.py FAULT [options of vserve].

cell: in each chunk of a prompt, the key and the value of its first token are zero in one layer;
table: one entry in 64 of the block tables names the block after the one it should;
stale: one request in 32 begins with the count of computed tokens of whoever had its row before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import msgspec

from vserve.engine.cache import rows
from vserve.engine.layers import attention
from vserve.engine.link.plan import BlockWrite, StepPlan
from vserve.server.cli.main import main

LAYER = 1


def cell() -> None:
    real_forward, real_write = attention.Attention.forward, attention.rope_write_kv
    now: list[tuple[attention.Attention, attention.AttentionBatch]] = []

    def forward(self, query, key, value, positions, batch, last_only=False):
        now[:] = [(self, batch)]
        return real_forward(self, query, key, value, positions, batch, last_only)

    def write(query, key, value, positions, angles, key_cache, value_cache, slots, *norms):
        real_write(query, key, value, positions, angles, key_cache, value_cache, slots, *norms)
        layer, batch = now[0]
        if layer.layer == LAYER and batch.max_query_len:
            first = batch.prompts.query_start[:1].long().clamp(max=len(slots) - 1)
            slot = slots.index_select(0, first).long().clamp(min=0)
            for cache in (key_cache, value_cache):
                cache.flatten(0, 1).index_fill_(0, slot, 0.0)

    attention.Attention.forward, attention.rope_write_kv = forward, write  # type: ignore[method-assign]


def change_plans(change: Callable[[StepPlan], dict[str, Any]]) -> None:
    """`change`: gives fields of a plan other values, before they reach the device."""
    real = rows.RowTables.stage

    def stage(self: rows.RowTables, plan: StepPlan, upload: rows.Upload) -> Any:
        return real(self, msgspec.structs.replace(plan, **change(plan)) if plan.step >= 0 else plan, upload)

    rows.RowTables.stage = stage  # type: ignore[method-assign]


def table() -> None:
    count = 0

    def change(plan: StepPlan) -> dict[str, Any]:
        nonlocal count
        changed: list[list[BlockWrite]] = []
        for writes in plan.new_blocks:
            changed.append([])
            for write in writes:
                blocks = list(write.block_ids)
                for i in range(len(blocks)):
                    count += 1
                    blocks[i] += count % 64 == 0 and blocks[i] > 1
                changed[-1].append(BlockWrite(write.row, write.start, blocks))
        return {"new_blocks": changed}

    change_plans(change)


def stale() -> None:
    count, before = 0, {}

    def change(plan: StepPlan) -> dict[str, Any]:
        nonlocal count
        changed = []
        for new in plan.new_rows:
            count += 1
            computed = new.num_computed_tokens
            if count % 32 == 0:
                computed = before.get(new.row, 0) % new.num_prompt_tokens
            changed.append(msgspec.structs.replace(new, num_computed_tokens=computed))
        before.update(zip(plan.rows, plan.num_computed, strict=True))
        return {"new_rows": changed}

    change_plans(change)


if __name__ == "__main__":
    {"cell": cell, "table": table, "stale": stale}[sys.argv[1]]()
    sys.exit(main([*sys.argv[2:], "--engine-in-process"]))

"""Ranks that share tiny models on the CPU, for test_ranks.py, in processes that last: `python rank_process.py NUM`.

A case a line of JSON comes in (folder, size, whole_experts, quantization, implementation, out), and a line goes out
when it has been run: the logits are in the files `out`.RANK. Rank 0 is this process, the others are forked of it once
everything is imported, and none has computed anything.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from vserve.engine.describe.reading import read_folder
from vserve.engine.parallel.group import Group, ProcessGroup
from vserve.engine.parallel.join import join
from vserve.engine.weights.loader import load_model
from vserve.kernels.sampling.argmax import argmax

LENGTHS = (17, 13)
SCHEDULE = [["|", (0, 5), (1, 3)], [(0, 1), "|", (1, 8)], ["|", (0, 9)], [(1, 1), "|"]]  # as test_model_parity.py's


def parity() -> Any:
    """test_model_parity.py, which runs models by hand."""
    spec = importlib.util.spec_from_file_location("parity", Path(__file__).with_name("test_model_parity.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["parity"] = module
    spec.loader.exec_module(module)
    return module


def run(tests: Any, case: dict[str, Any], group: Group) -> list[torch.Tensor]:
    """Logits of two sequences, computed in chunks, in company and one by one; of each row, their greatest."""
    config = read_folder(Path(case["folder"]), quantization=case["quantization"], implementation=case["implementation"])
    model = load_model(
        Path(case["folder"]), config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64, group=group,
        whole_experts=case["whole_experts"],
    )  # fmt: skip
    sequences = [sequence[:length] for sequence, length in zip(tests.sequences(), LENGTHS, strict=True)]
    sequences = [sequence % model.config.vocab_size for sequence in sequences]
    logits = model.logits

    def checked(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        setattr(model, "logits", logits)  # noqa: B010  (which `greatest` may ask)
        tokens, finite = model.greatest(hidden)
        setattr(model, "logits", checked)  # noqa: B010
        assert torch.equal(tokens, argmax(found)) and finite.all(), "greatest is not what argmax says of logits"
        return found

    setattr(model, "logits", checked)  # noqa: B010
    return list(tests.PagedRunner(model, sequences).run(SCHEDULE))


def serve(tests: Any, rank: int, world: ProcessGroup) -> None:
    """Until rank 0 reads no more cases."""
    pairs = dist.new_group([0, 1])
    groups = {world.size: world, 2: ProcessGroup(pairs) if rank < 2 else None}
    while True:
        told = [sys.stdin.readline() if rank == 0 else ""]
        dist.broadcast_object_list(told)
        if not told[0]:
            return
        case = json.loads(told[0])
        try:
            if (group := groups[case["size"]]) is not None:
                torch.save(run(tests, case, group), f"{case['out']}.{rank}")
        except Exception:
            traceback.print_exc()
            os._exit(1)  # the others notice, and end too
        dist.barrier()
        if rank == 0:
            print("done", flush=True)


def main() -> None:
    size = int(sys.argv[1])
    torch.set_num_threads(1)
    tests = parity()
    meeting = Path(tempfile.mkdtemp()) / "store"
    rank = next((number for number in range(1, size) if os.fork() == 0), 0)
    world = join(rank, size, f"file://{meeting}", torch.device("cpu"))
    assert isinstance(world, ProcessGroup)
    try:
        serve(tests, rank, world)
    finally:
        os._exit(0)  # threads of gloo may not outlive the others


if __name__ == "__main__":
    main()

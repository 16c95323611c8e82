"""Times a tower of Qwen3-VL 8B's shape on a GPU: python tools/kernels/bench_tower.py [patches a side, by default 64]

Prints milliseconds a picture, of one alone and of four at once, and the kernels that took longest.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
from model_folder import write_seeing_model

from vserve.engine.describe.reading import read_folder
from vserve.engine.link.media import MediaItem
from vserve.engine.quant.weights import Placement
from vserve.engine.vision.towers import make_tower


def main() -> None:
    side = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    with tempfile.TemporaryDirectory() as scratch:
        config = read_folder(write_seeing_model(Path(scratch) / "model", "qwen3-vl-8b"))
    place = Placement(torch.bfloat16, torch.device("cuda"))
    tower = make_tower(config.vision, place)
    generator = torch.Generator("cuda").manual_seed(0)
    for holder in {id(holder): holder for holder, _ in tower.weight_map().values()}.values():
        holder.choose({})
        holder.create()
        holder.randomize(generator)
        holder.finish()
    size = side * config.vision.patch
    pixels = torch.randint(0, 256, (1, size, size, 3), dtype=torch.uint8, device="cuda")
    item = MediaItem(b"", 0, side**2 // 4, (1, side, side), (1, size, size), (size, size), b"")

    def once(count: int) -> None:
        tower.encode([(pixels, item)] * count)

    with torch.inference_mode():
        for count in (1, 4):
            for _ in range(3):
                once(count)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(10):
                once(count)
            end.record()
            torch.cuda.synchronize()
            print(f"{count} of {side}² patches: {start.elapsed_time(end) / 10 / count:.2f} ms a picture", flush=True)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            once(1)
            torch.cuda.synchronize()
    print(found.key_averages().table(sort_by="cuda_time_total", row_limit=24, max_name_column_width=70))


if __name__ == "__main__":
    main()

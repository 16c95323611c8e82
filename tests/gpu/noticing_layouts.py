"""The noticing model in the layouts of quantised checkpoints, each beside its twin of plain numbers.

    python tests/gpu/noticing_layouts.py                       # all; prints a table
    python tests/gpu/noticing_layouts.py --kinds awq,nf4
    python tests/gpu/noticing_layouts.py --device cpu --kinds fp8 --streams 4 --answers 40     # does it run?

Both are asked the same. As right as its twin is right; how much the format itself costs, the loss says: of the answers'
tokens, in nats, beside that of the model in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
import noticing
from noticing import Score, measure
from processes import Server, VServe
from quant.checkpoints import KINDS, write

PLAIN = "bfloat16"  # the model as it is: no twin
FEWER_RIGHT = 0.01  # of the answers: more is a fault. Where a format has lost much, ties are near
NUM_SCORED = 90  # questions, for the loss


def loss(server: Server) -> float:
    """Of answers' tokens, behind all that come before them."""
    random, total, count = Random(7), 0.0, 0
    for index in range(NUM_SCORED):
        question = list(noticing.tasks.KINDS.values())[index % 3](random, random.randint(3, 600))
        asked = {"prompt": question.prompt + question.answer, "max_tokens": 1, "prompt_logprobs": 0}
        answer = json.loads(server.get("/v1/completions", asked))
        found = answer["choices"][0]["prompt_logprobs"][-len(question.answer) :]
        total -= sum(place[str(token)]["logprob"] for place, token in zip(found, question.answer, strict=True))
        count += len(question.answer)
    return total / count


def serve(vserve: VServe, model: Path, args: argparse.Namespace) -> tuple[float, list[Score]]:
    """Its loss, and what it answers."""
    server = Server(vserve, model, [*noticing.options_on(args.device), *noticing.room_on(args.device)])
    try:
        server.wait_until_ready()
        scores = [
            measure(server, f"{streams} streams", streams, min(args.answers, 40 * streams), args.seed + streams)
            for streams in map(int, args.streams.split(","))
        ]
        return loss(server), scores
    finally:
        server.stop()


def compare(kind: str, scratch: Path, args: argparse.Namespace) -> tuple[list[str], list[str]]:
    """→ a row of the table, and faults."""
    (folder := scratch / kind).mkdir()
    vserve = VServe(folder, 300)
    if kind == PLAIN:
        found, scores = serve(vserve, noticing.MODEL, args)
        return [kind, f"{found:.1e}", "", *(f"{100 * score.share:.2f} %" for score in scores)], []
    write(noticing.MODEL, folder, kind)
    twins_loss, twins = serve(vserve, folder / "twin", args)
    found, scores = serve(vserve, folder / "quantized", args)
    faults = [
        f"{kind}, {fault}"
        for score, twin in zip(scores, twins, strict=True)
        for fault in noticing.faults(score, twin.share - FEWER_RIGHT + noticing.DROP, small=False)
    ]
    shares = [f"{100 * score.share:.2f} %; {100 * twin.share:.2f} %" for score, twin in zip(scores, twins, strict=True)]
    return [kind, f"{found:.1e}", f"{twins_loss:.1e}", *shares], faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--kinds", default=",".join((PLAIN, *KINDS)), metavar="KIND,...", help="(default: %(default)s)")
    add("--streams", default="1,100,400", metavar="N,...", help="settings (default: %(default)s)")
    add("--answers", type=int, default=400, help="a setting, and 40 a stream at most (default: 400)")
    add("--at-once", type=int, default=3, metavar="N", help="servers on the card (default: 3)")
    add("--device", default="auto", help="as of vserve")
    add("--seed", type=int, default=1)
    args = parser.parse_args()
    kinds = args.kinds.split(",")
    if unknown := set(kinds) - {PLAIN, *KINDS}:
        parser.error(f"--kinds {', '.join(sorted(unknown))}: there are {', '.join((PLAIN, *KINDS))}")
    with tempfile.TemporaryDirectory(prefix="vserve-noticing-") as scratch, ThreadPoolExecutor(args.at_once) as pool:
        found = list(pool.map(lambda kind: compare(kind, Path(scratch), args), kinds))
    twins = (f"{streams} streams; its twin" for streams in args.streams.split(","))
    noticing.show([row for row, _ in found], ["setting", "loss", "of its twin", *twins])
    faults = [fault for _, more in found for fault in more]
    for fault in faults:
        print(f"FAULT {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

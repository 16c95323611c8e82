"""The warp-specialised prefill kernel: compiled anywhere, run on a Hopper GPU only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.kernels.attention.attention import (
    DecodeWorkspace,
    PrefillWork,
    decode_attention,
    prefill_attention,
    prefill_attention_torch,
)
from vserve.kernels.attention.attention_beside import attend_beside
from vserve.kernels.attention.attention_parts import PagedCache, Scoring, UniformBatch
from vserve.kernels.attention.attention_prefill import prefill_attention_triton
from vserve.kernels.attention.attention_prefill_hopper import prefill_attention_hopper, supports

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
requires_hopper = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs an NVIDIA GPU of the Hopper family")]
DTYPES = [torch.bfloat16, torch.float16]

# (context lengths, query lengths); the rest as in test_attention.py. Blocks are of 128 // group tokens, tiles of 128
# keys, chunks of 16.
CASES: dict[str, dict[str, Any]] = {
    "one_token": {"lengths": [1], "query_lens": [1]},
    "shorter_than_a_chunk": {"lengths": [7], "query_lens": [7]},
    "one_tile": {"lengths": [128], "query_lens": [128]},
    "one_more_than_a_tile": {"lengths": [129], "query_lens": [129]},
    "chunk_edges": {"lengths": [15, 16, 17, 112, 113], "query_lens": [15, 16, 17, 112, 113]},
    "fresh": {"lengths": [391], "query_lens": [391]},
    "ragged": {"lengths": [37, 200, 3, 128, 77], "query_lens": [37, 200, 3, 128, 77]},
    "chunks": {"lengths": [700, 300, 513, 90], "query_lens": [20, 130, 1, 64]},
    "diagonal_over_two_tiles": {"lengths": [150, 270], "query_lens": [40, 30]},
    "padding_rows": {"lengths": [0, 50, 0, 33, 0], "query_lens": [0, 50, 0, 33, 0]},
    "mixed_batch": {"lengths": [130, 64], "query_lens": [70, 8], "before": 3, "behind": 40},
    "more_tokens_than_context": {"lengths": [20, 90], "query_lens": [45, 90]},
    "page_32": {"lengths": [49, 210, 160], "query_lens": [49, 90, 160], "page": 32},
    "page_48": {"lengths": [49, 210], "query_lens": [49, 90], "page": 48},
    "mha": {"lengths": [300, 40], "query_lens": [200, 40], "heads": 2},
    "gqa2": {"lengths": [290, 40], "query_lens": [201, 40], "heads": 4},
    "gqa8": {"lengths": [290, 40], "query_lens": [201, 40], "heads": 8, "kv_heads": 1},
    "gqa16": {"lengths": [290, 40], "query_lens": [61, 40], "heads": 16, "kv_heads": 1},
    "large_scores": {"lengths": [200], "query_lens": [200], "spread": 3.0},
    "scale": {"lengths": [70], "query_lens": [70], "scale": 0.5},
}


@pytest.fixture(scope="module")
def paged(load_module: Callable[[Path], Any]) -> Any:
    return load_module(Path(__file__).with_name("test_attention.py"))


def make(paged: Any, rng: torch.Generator, dtype: torch.dtype, case: dict[str, Any]) -> Any:
    options = {"heads": 8, **case}
    return paged.make_batch(rng, "cuda", dtype, options.pop("lengths"), options.pop("query_lens"), size=128, **options)


def check(paged: Any, batch: Any, out: Tensor, dtype: torch.dtype) -> None:
    owned = slice(int(batch.requests.query_start[0]), int(batch.requests.query_start[-1]))
    paged.assert_close(out[owned], paged.reference_attention(batch)[owned], dtype)
    out[owned] = float("nan")
    assert torch.isnan(out).all(), "wrote rows that belong to no request"


class TestOnHopper:
    pytestmark = requires_hopper

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("case", CASES)
    def test_reference(self, case: str, dtype: torch.dtype, paged: Any, rng: torch.Generator) -> None:
        batch = make(paged, rng, dtype, CASES[case])
        assert supports(batch.query, batch.cache, batch.scoring)
        out = batch.poisoned_out
        result = prefill_attention_hopper(*batch.prefill, out=out)
        assert result is out
        check(paged, batch, out, dtype)

    @pytest.mark.parametrize("programs", [1, 3, 1000])
    def test_any_number_of_programs(self, programs: int, paged: Any, rng: torch.Generator) -> None:
        """Twice with one work table, whose counters the first call leaves as it found them."""
        batch = make(paged, rng, torch.bfloat16, {"lengths": [700, 33, 129, 400], "query_lens": [300, 33, 129, 5]})
        work = PrefillWork(batch.requests)
        for _ in range(2):
            out = batch.poisoned_out
            prefill_attention_hopper(*batch.prefill, out=out, work=work, programs=programs)
            check(paged, batch, out, torch.bfloat16)

    def test_last_blocks_only(self, paged: Any, rng: torch.Generator) -> None:
        """The last token of each request is as in the whole; of others, at most those of its block are written."""
        lengths, query_lens = [700, 33, 129, 400, 40], [300, 33, 129, 5, 1]
        batch = make(paged, rng, torch.bfloat16, {"lengths": lengths, "query_lens": query_lens})
        whole = prefill_attention_hopper(*batch.prefill)
        out = batch.poisoned_out
        work = PrefillWork(batch.requests, last_only=True)
        prefill_attention_hopper(*batch.prefill, out=out, work=work)
        last = batch.requests.query_start[1:].long() - 1
        torch.testing.assert_close(out[last], whole[last], rtol=0, atol=0)
        assert out[:256].isnan().all(), "blocks that nobody wants were computed"

    @pytest.mark.parametrize(
        ("decodes", "padded"), [(33, 33), (100, 100), (250, 250), (100, 128), (28, 32), (130, 256)]
    )
    @pytest.mark.parametrize("prompts", [[(300, 300), (900, 90)], [(5000, 4000)], [(1, 1), (0, 0)]], ids=str)
    def test_beside_decodes(
        self, decodes: int, padded: int, prompts: list[tuple[int, int]], paged: Any, rng: torch.Generator
    ) -> None:
        """In a graph of several layers, replayed: bit for bit what one after the other gives.

        Padded as by the engine: rows without a token, whose places in the result are the prompts' first tokens.
        """
        lengths = [1 + 37 * i % 1500 for i in range(decodes)] + [length for length, _ in prompts]
        query_lens = [1] * decodes + [tokens for _, tokens in prompts]
        case = {"lengths": lengths, "query_lens": query_lens, "heads": 32, "kv_heads": 8, "behind": 260}
        batch = make(paged, rng, torch.bfloat16, case)
        query, cache, scoring = batch.query, batch.cache, batch.scoring
        rows, lens = batch.requests.rows, batch.requests.seq_lens
        nobody = rows.new_zeros(padded - decodes)
        ours = UniformBatch(torch.cat((rows[:decodes], nobody)), torch.cat((lens[:decodes], nobody)))
        theirs = batch.prompts(decodes)
        expected = batch.poisoned_out
        alone = batch.poisoned_out  # with as many rows, or they would be split in another way
        decode_attention(query[:padded], cache, ours, scoring, out=alone[:padded])
        expected[:decodes] = alone[:decodes]
        prefill_attention(query, cache, theirs, scoring, out=expected)
        outs = [batch.poisoned_out for _ in range(3)]
        workspace = DecodeWorkspace.create(512, 32, 128, "cuda")

        def layers() -> None:
            work = PrefillWork(theirs)
            for out in outs:
                attend_beside(query, cache, ours, theirs, scoring, workspace=workspace, work=work, out=out)

        layers()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers()
        for _ in range(20):
            for out in outs:
                out.fill_(float("nan"))
            graph.replay()
            for out in outs:
                torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)

    @pytest.mark.parametrize(
        ("lengths", "query_lens"),
        [([8192], [8192]), ([1024] * 8, [1024] * 8), ([960], [960]), ([5000, 3001, 64, 700], [2000, 3001, 1, 699])],
        ids=str,
    )
    def test_large(self, lengths: list[int], query_lens: list[int], paged: Any, rng: torch.Generator) -> None:
        """As the Triton kernel and as torch in float64, through the public function, and the same every time."""
        case = {"lengths": lengths, "query_lens": query_lens, "heads": 32, "kv_heads": 8}
        batch = make(paged, rng, torch.bfloat16, case)
        out = prefill_attention(*batch.prefill)
        triton = prefill_attention_triton(*batch.prefill)
        error = (out.double() - triton.double()).norm() / triton.double().norm()
        assert error < 4e-3, f"differs from the Triton kernel by {error:.1e}"
        for _ in range(3):
            again = prefill_attention(*batch.prefill)
            torch.testing.assert_close(again, out, rtol=0, atol=0)
        if max(lengths) <= 5000:
            exact = prefill_attention_torch(*batch.exact, *batch.prefill[2:])
            paged.assert_close(out, exact.cpu(), torch.bfloat16)

    def test_in_a_cuda_graph(self, paged: Any, rng: torch.Generator) -> None:
        """Captured with rows of no token, replayed with some; the layers share one work table."""
        batch = make(
            paged, rng, torch.bfloat16, {"lengths": [0, 300, 90, 0], "query_lens": [0, 200, 90, 0], "behind": 30}
        )
        requests = replace(batch.requests, max_query_len=320)
        lengths, starts = requests.seq_lens.clone(), requests.query_start.clone()
        outs = [batch.poisoned_out, batch.poisoned_out]

        def layers() -> None:
            work = PrefillWork(requests)
            for out in outs:
                prefill_attention(batch.query, batch.cache, requests, batch.scoring, work=work, out=out)

        layers()
        requests.seq_lens.zero_()
        requests.query_start.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layers()
        requests.seq_lens.copy_(lengths)
        requests.query_start.copy_(starts)
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for out in outs:
            check(paged, batch, out, torch.bfloat16)


_COMPILE = """
import subprocess
import triton
from vserve.kernels.attention import prefill_work
from vserve.kernels.attention.attention_parts import PagedCache, RaggedBatch, Scoring
from vserve.kernels.attention.attention_prefill_hopper import prefill_attention_hopper

prefill_work.prefill_work = prefill_work.prefill_work_triton

def run(heads, requests, tokens, blocks, dtype, **options):
    query = torch.empty(tokens, heads * 128 + 2 * 8 * 128, dtype=dtype)[:, :heads * 128].view(tokens, heads, 128)
    keys = torch.empty(2, 16, 8, 128, dtype=dtype)
    cache = PagedCache(keys, keys, torch.zeros(4, blocks, dtype=torch.int32))
    ints = torch.zeros(requests + 9, dtype=torch.int32)[requests % 8:]
    batch = RaggedBatch(ints[:requests], ints[:requests], ints[:requests + 1], tokens)
    prefill_attention_hopper(query, cache, batch, Scoring(0.1), programs=132, **options)

for requests, tokens, blocks in ((1, 999, 64), (2, 16, 65), (16, 1024, 1)):
    run(int(sys.argv[1]), requests, tokens, blocks, getattr(torch, sys.argv[2]))

def assembled(ptx):
    # What ptxas says, and the machine code.
    tools = triton.knobs.nvidia
    with open(sys.argv[3] + ".ptx", "w") as file:
        file.write(ptx)
    assemble = [tools.ptxas.path, "-v", "--gpu-name", "sm_90a", sys.argv[3] + ".ptx", "-o", sys.argv[3] + ".cubin"]
    done = subprocess.run(assemble, capture_output=True, text=True, check=True)
    code = subprocess.check_output([tools.nvdisasm.path, "-c", sys.argv[3] + ".cubin"], text=True)
    return done.stdout + done.stderr, code

def exponentials_beside_products(sass):
    # Of each loop: how many stand between the wait for the scores and that for the product issued with them.
    parts = re.split(r"WARPGROUP\\.DEPBAR\\.LE gsb0, 0x1", sass)[1:]
    return [re.split(r"WARPGROUP\\.DEPBAR", part)[0].count("MUFU.EX2") for part in parts]

def report(name, kernel):
    ptx = kernel.asm["ptx"]
    said, code = assembled(ptx)
    return {
        "kernel": name,
        "shared": kernel.metadata.shared,
        "assembler": said,
        "copies": ptx.count("cp.async.bulk.tensor.2d"),
        "products": ptx.count("wgmma.mma_async"),
        "beside": exponentials_beside_products(code),
    }

print(json.dumps([report(name, kernel) for name, kernel in kernels.values()]))
"""


@pytest.mark.skipif(HOPPER, reason="the other tests compile for this GPU")
@pytest.mark.parametrize(
    ("heads", "dtype"),
    [
        (32, "bfloat16"),
        pytest.param(8, "float16", marks=pytest.mark.slow),
        pytest.param(128, "bfloat16", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_compiles_for_hopper(heads: int, dtype: str, tmp_path: Path, run_for_hopper: Callable[..., Any]) -> None:
    """Fits shared memory and registers, keeps its products asynchronous, and is compiled once for all batch sizes."""
    report = run_for_hopper(_COMPILE, str(heads), dtype, str(tmp_path / "kernel"))
    kernels = {kernel["kernel"]: kernel for kernel in report}
    assert len(report) == 2, "compiled again for another batch size"
    attention = kernels["prefill_hopper_kernel"]
    assert attention["shared"] <= 227 * 1024
    assert "0 bytes spill stores, 0 bytes spill loads" in attention["assembler"]
    assert "warning" not in attention["assembler"], "wgmma instructions are serialised"
    assert attention["copies"] >= 36
    # Scores of the last tile, of a masked and of a whole one, and three products with values, for each consumer.
    assert attention["products"] == 2 * 6 * 8
    assert len(attention["beside"]) == 4
    assert min(attention["beside"]) >= 64, "the softmax waits for the product that it should run beside"
    assert "0 bytes spill stores" in kernels["_prefill_work_kernel"]["assembler"]


@pytest.mark.skipif(HOPPER, reason="tests what other machines answer")
def test_other_devices_are_not_supported(device: str) -> None:
    query = torch.zeros(4, 8, 128, dtype=torch.bfloat16, device=device)
    keys = torch.zeros(2, 16, 2, 128, dtype=torch.bfloat16, device=device)
    table = torch.zeros(1, 2, dtype=torch.int32, device=device)
    assert not supports(query, PagedCache(keys, keys, table), Scoring(1.0))

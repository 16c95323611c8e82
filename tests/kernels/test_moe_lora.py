"""Adapters of experts: the kernels and their twins against merged weights, a token at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vserve.kernels.experts.expert_codes import ExpertCodes
from vserve.kernels.experts.moe import ExpertWeights, experts_torch
from vserve.kernels.experts.moe_codes import CodesTile, experts_codes_torch, experts_codes_triton
from vserve.kernels.experts.moe_lora import ExpertLora, ExpertPairs, low_rows
from vserve.kernels.experts.moe_triton import MoeTile, experts_triton, order_pairs
from vserve.kernels.linear.planes import pack

CUDA = torch.cuda.is_available()
requires_cuda = pytest.mark.skipif(not CUDA, reason="needs an NVIDIA GPU")
RANK, NUM_SLOTS = 16, 4
RANKS = (16, 3, 8, 1)  # of the adapters in the slots; that of slot 1 has nothing here


def random(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng) / shape[-1] ** 0.5


def pairs_of(rng: torch.Generator, parts: int, num_experts: int, n: int, k: int, rank: int, device: str) -> ExpertPairs:
    """In slots that lie apart. The matrices of the slot that is not used are no numbers."""
    size_a, size_b = num_experts * parts * rank * k, num_experts * parts * n * rank
    memory = torch.zeros(NUM_SLOTS, size_a + size_b + 16)
    a = memory[:, :size_a].unflatten(1, (num_experts, parts * rank, k))
    b = memory[:, size_a : size_a + size_b].unflatten(1, (num_experts, parts * n, rank))
    for slot, own in enumerate(RANKS):
        for part in range(parts):
            a[slot, :, part * rank : part * rank + own] = random(rng, num_experts, own, k)
        b[slot, :, :, :own] = random(rng, num_experts, parts * n, own)
    a[1] = b[1] = float("nan")
    used = torch.tensor([1, 0, 1, 1], dtype=torch.int32, device=device)
    memory = memory.to(device)
    return ExpertPairs(
        memory[:, :size_a].unflatten(1, a.shape[1:]),
        memory[:, size_a : size_a + size_b].unflatten(1, b.shape[1:]),
        used,
    )


def merged(weight: Tensor, pairs: ExpertPairs, slot: int) -> Tensor:
    """[E, N, K] fp64, the adapter of a slot added."""
    a, b = pairs.a[slot].double(), pairs.b[slot].double()
    parts = a.shape[1] // b.shape[2]
    delta = [torch.bmm(*both) for both in zip(b.chunk(parts, 1), a.chunk(parts, 1), strict=True)]
    return weight.double() + torch.cat(delta, dim=1)


def by_token(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    matrices: ExpertWeights,
    lora: ExpertLora,
    limit: float,
    beside: Tensor | None,
) -> Tensor:
    found = []
    for token, slot in enumerate(lora.slots.tolist()):
        one = slice(token, token + 1)
        plain = [None if matrix is None else matrix.double() for matrix in matrices]
        if slot >= 0 and lora.gate_up.used[slot]:
            plain[:2] = merged(matrices.gate_up, lora.gate_up, slot), merged(matrices.down, lora.down, slot)
        added = None if beside is None else beside[one].double()
        mixed = experts_torch(x[one].double(), ids[one], weights[one], ExpertWeights(*plain), limit, added)  # type: ignore[arg-type]
        found.append(mixed.float())
    return torch.cat(found)


def routed(rng: torch.Generator, device: str, num_tokens: int, top_k: int, num_experts: int) -> tuple[Tensor, Tensor]:
    ids = torch.rand(num_tokens, num_experts, generator=rng).topk(top_k).indices.int()
    return ids.to(device), torch.rand(num_tokens, top_k, generator=rng).to(device)


def lora_of(
    rng: torch.Generator, device: str, num_experts: int, hidden: int, inner: int, slots: list[int], rank: int = RANK
) -> ExpertLora:
    return ExpertLora(
        pairs_of(rng, 2, num_experts, inner, hidden, rank, device),
        pairs_of(rng, 1, num_experts, hidden, inner, rank, device),
        torch.tensor(slots, dtype=torch.int32, device=device),
    )


# Slots of tokens; k, experts, hidden and inner width, and the slots' rank.
CASES = [
    ([2], 2, 4, 32, 24, 16),
    ([-1, 0, 1], 1, 3, 48, 40, 16),
    ([0, 2, -1, 3, 0, 2, 1, -1, 3, 3, 0], 2, 3, 40, 32, 48),
]


@pytest.mark.parametrize("case", CASES)
def test_kernels_and_twins_equal_merged_weights(
    rng: torch.Generator, device: str, case: tuple[list[int], int, int, int, int, int]
) -> None:
    """Of several ranks in one block of rows, biases, the clamped activation, tails of N and K; sorted or not. Whoever
    has no adapter, or one that does nothing here, keeps the bits of a step without adapters."""
    slots, top_k, num_experts, hidden, inner, rank = case
    tiles = MoeTile(16, 16, 32, 4, 2), MoeTile(16, 32, 16, 4, 2, group=3)
    ids, weights = routed(rng, device, len(slots), top_k, num_experts)
    lora = lora_of(rng, device, num_experts, hidden, inner, slots, rank)
    x = random(rng, len(slots), hidden).to(device)
    base = [token for token, slot in enumerate(slots) if slot in (-1, 1)]
    for limit in (0.0, 0.5):
        matrices = ExpertWeights(
            random(rng, num_experts, 2 * inner, hidden).to(device), random(rng, num_experts, hidden, inner).to(device),
            *((random(rng, num_experts, n).to(device) for n in (2 * inner, hidden)) if limit else (None, None)),
        )  # fmt: skip
        beside = x if limit else None
        wanted = by_token(x, ids, weights, matrices, lora, limit, beside)
        plain = experts_torch(x, ids, weights, matrices, limit, beside)
        found = experts_torch(x, ids, weights, matrices, limit, beside, lora)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
        assert torch.equal(found[base], plain[base])
        adapted = [token for token in range(len(slots)) if token not in base]
        assert (found - plain)[adapted].abs().amax(dim=1).min() > 1e-3, "adapters must differ from none"
        for sort in (True, False):
            plain = experts_triton(x, ids, weights, *matrices, limit=limit, beside=beside, tiles=tiles, sort=sort)
            found = experts_triton(
                x, ids, weights, *matrices, limit=limit, beside=beside, tiles=tiles, sort=sort, lora=lora
            )
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
            assert torch.equal(found[base], plain[base])


def test_a_token_alone_and_in_company(rng: torch.Generator, device: str) -> None:
    slots = [0, 2, 3, -1, 0]
    ids, weights = routed(rng, device, 5, 2, 3)
    lora = lora_of(rng, device, 3, 32, 16, slots)
    matrices = ExpertWeights(random(rng, 3, 32, 32).to(device), random(rng, 3, 32, 16).to(device))
    x = random(rng, 5, 32).to(device)
    tiles = MoeTile(16, 16, 32, 4, 2), MoeTile(16, 32, 16, 4, 2)
    found = experts_triton(x, ids, weights, *matrices, tiles=tiles, sort=True, lora=lora)
    for token in range(5):
        one, alone = slice(token, token + 1), lora._replace(slots=lora.slots[token : token + 1])
        single = experts_triton(x[one], ids[one], weights[one], *matrices, tiles=tiles, sort=True, lora=alone)
        assert torch.equal(single, found[one])


def codes_of(rng: torch.Generator, device: str, num_experts: int, parts: int, n: int, k: int) -> ExpertCodes:
    """int8, a scale a row."""
    matrices = []
    for _ in range(num_experts * parts):
        codes = torch.randint(0, 256, (n, k), generator=rng).to(device, torch.uint8)
        scales = (torch.rand(n, 1, generator=rng) + 0.5) / 74 / k**0.5
        matrices.append(pack(codes, scales.half().to(device), "int8", 0, None, ()))
    found = ExpertCodes.empty(num_experts, parts, matrices[0])
    for index, matrix in enumerate(matrices):
        mine = found.of(index // parts, index % parts)
        mine.words.copy_(matrix.words)
        mine.scales.copy_(matrix.scales)
    return found


def test_on_codes(rng: torch.Generator, device: str) -> None:
    """In fp16, on experts that are stored as int8."""
    slots = [0, 2, -1, 3, 1]
    lora = lora_of(rng, device, 3, 64, 70, slots)
    gate_up, down = codes_of(rng, device, 3, 2, 70, 64), codes_of(rng, device, 3, 1, 64, 70)
    numbers = ExpertWeights(*(torch.stack([m.numbers(e) for e in range(3)]) for m in (gate_up, down)))
    biases = random(rng, 3, 140).to(device, torch.float16), random(rng, 3, 64).to(device, torch.float16)
    ids, weights = routed(rng, device, 5, 2, 3)
    x = torch.randn(5, 64, generator=rng).to(device, torch.float16)
    wanted = by_token(x, ids, weights, numbers._replace(gate_up_bias=biases[0], down_bias=biases[1]), lora, 0.5, None)
    tiles = CodesTile(16, 64, 4, 2), CodesTile(16, 64, 4, 2)
    for sort in (True, False):
        plain, found = (
            experts_codes_triton(
                x, ids, weights, gate_up, down, *biases, limit=0.5, tiles=tiles, sort=sort, lora=one
            )
            for one in (None, lora)
        )  # fmt: skip
        torch.testing.assert_close(found.float(), wanted, atol=4e-3 * float(wanted.abs().max()), rtol=4e-3)
        assert torch.equal(found[[2, 4]], plain[[2, 4]]) and not torch.equal(found[0], plain[0])
    found = experts_codes_torch(x, ids, weights, gate_up, down, *biases, limit=0.5, lora=lora)
    torch.testing.assert_close(found.float(), wanted, atol=4e-3 * float(wanted.abs().max()), rtol=4e-3)


def test_experts_of_other_ranks_are_not_read(rng: torch.Generator, device: str) -> None:
    """They have the id behind the last one here, and the weight 0."""
    lora = lora_of(rng, device, 2, 32, 16, [0, 2, -1])
    matrices = ExpertWeights(random(rng, 2, 32, 32).to(device), random(rng, 2, 32, 16).to(device))
    x = random(rng, 3, 32).to(device)
    ids = torch.tensor([[2, 1], [0, 2], [2, 2]], dtype=torch.int32, device=device)
    weights = torch.tensor([[0.0, 0.5], [0.25, 0.0], [0.0, 0.0]], device=device)
    wanted = by_token(x, ids, weights, matrices, lora, 0.0, None)
    tiles = MoeTile(16, 16, 32, 4, 2), MoeTile(16, 32, 16, 4, 2)
    for sort in (True, False):
        found = experts_triton(x, ids, weights, *matrices, tiles=tiles, sort=sort, lora=lora)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(experts_torch(x, ids, weights, matrices, lora=lora), wanted, atol=1e-5, rtol=1e-5)


def test_what_is_no_number_stays_with_its_adapter(rng: torch.Generator, device: str) -> None:
    """Though rows of others share its blocks."""
    slots = [0, 2, -1, 2, 0]
    lora = lora_of(rng, device, 1, 32, 16, slots)
    ids, weights = routed(rng, device, 5, 1, 1)
    matrices = ExpertWeights(random(rng, 1, 32, 32).to(device), random(rng, 1, 32, 16).to(device))
    x = random(rng, 5, 32).to(device)
    tiles = MoeTile(16, 16, 32, 4, 2), MoeTile(16, 32, 16, 4, 2)
    right = experts_triton(x, ids, weights, *matrices, tiles=tiles, sort=True, lora=lora)
    for pairs in (lora.gate_up, lora.down):
        pairs.a[2] = pairs.b[2] = float("nan")
    found = experts_triton(x, ids, weights, *matrices, tiles=tiles, sort=True, lora=lora)
    others = [0, 2, 4]
    assert torch.equal(found[others], right[others]) and found[[1, 3]].isnan().all()


def test_what_is_refused(rng: torch.Generator) -> None:
    lora, ids = lora_of(rng, "cpu", 2, 32, 16, [0, 2]), torch.zeros(2, 1, dtype=torch.int32)
    order = order_pairs(ids, 2, 16, False)
    with pytest.raises(ValueError, match="3 rows for gate_up of 2 tokens that go to 1 experts each"):
        low_rows(torch.ones(3, 32), lora, "gate_up", order, 1, 16)
    narrow = lora._replace(gate_up=lora.gate_up._replace(b=lora.gate_up.b[..., :8].contiguous()))
    with pytest.raises(ValueError, match="the rank a multiple of 16"):
        low_rows(torch.ones(2, 32), narrow, "gate_up", order, 1, 16)


_COMPILE = """
from vserve.kernels.launch import pdl
pdl.pdl_available = lambda device: sys.argv[1] == "pdl"
from vserve.kernels.experts.moe_lora import ExpertLora, ExpertPairs
from vserve.kernels.experts.moe_triton import experts_triton

hidden, inner, num_experts, top_k, rank = map(int, sys.argv[2:7])

def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

used = empty(4, dtype=torch.int32)
first = ExpertPairs(empty(4, num_experts, 2 * rank, hidden), empty(4, num_experts, 2 * inner, rank), used)
second = ExpertPairs(empty(4, num_experts, rank, inner), empty(4, num_experts, hidden, rank), used)
for rows in map(int, sys.argv[7].split(",")):
    ids, weights = empty(rows, top_k, dtype=torch.int32), empty(rows, top_k, dtype=torch.float32)
    lora = ExpertLora(first, second, empty(rows, dtype=torch.int32))
    gate_up, down = empty(num_experts, 2 * inner, hidden), empty(num_experts, hidden, inner)
    experts_triton(empty(rows, hidden), ids, weights, gate_up, down, lora=lora)
report = []
for name, kernel in kernels.values():
    if name in ("_low_kernel", "_expert_kernel"):
        body = kernel.asm["ptx"]
        body = body[body.index(".entry"):]
        before, waits, after = body.partition("griddepcontrol.wait")
        touched = len(re.findall(r"(ld|st|atom)\\.global|\\bret;|\\bexit;", before)) if waits else 0
        report.append({"kernel": name, "shared": kernel.metadata.shared, "touched_before": touched,
                       "atomics": "atom." in body, **resources(kernel)})
print(json.dumps(report))
"""


@pytest.mark.slow
@pytest.mark.skipif(CUDA, reason="the other tests compile for this GPU")
def test_compiles_for_hopper(run_for_hopper: Callable[..., Any]) -> None:
    """Without atomics or, but for one tile, spilt registers, in the shapes of Qwen3-30B-A3B."""
    if not Path(pytest.importorskip("triton.knobs").nvidia.cuobjdump.path).exists():
        pytest.skip("triton without cuobjdump")
    kernels = run_for_hopper(_COMPILE, "pdl", "2048", "768", "128", "8", "16", "1,64,256,512,2048")
    assert {kernel["kernel"] for kernel in kernels} == {"_low_kernel", "_expert_kernel"}
    for kernel in kernels:
        assert kernel["shared"] <= 227 * 1024 and kernel["touched_before"] == 0 and not kernel["atomics"]
        # The largest tile of gate and up has what is added beside both sums, and spills two registers for it.
        assert kernel["local"] == 0 and kernel["stack"] <= 8 * (kernel["shared"] > 128 * 1024), f"{kernel} spills"


@pytest.mark.gpu
@requires_cuda
@pytest.mark.parametrize("rank", [16, 64])
@pytest.mark.parametrize(
    ("hidden", "inner", "num_experts", "top_k"), [(2048, 768, 128, 8), (2880, 2880, 32, 4), (1024, 3584, 8, 2)]
)
def test_real_shapes(
    rng: torch.Generator, device: str, hidden: int, inner: int, num_experts: int, top_k: int, rank: int
) -> None:
    """Every tile: near the twin, rows without an adapter bit by bit as without any, twice the same, and in a graph
    that is replayed with other slots and another routing."""

    def normal(*shape: int) -> Tensor:
        generator = torch.Generator(device).manual_seed(sum(shape))
        return (torch.randn(shape, generator=generator, device=device) / shape[-1] ** 0.5).bfloat16()

    matrices = ExpertWeights(normal(num_experts, 2 * inner, hidden), normal(num_experts, hidden, inner))
    used = torch.tensor([1, 0, 1], dtype=torch.int32, device=device)
    first = ExpertPairs(normal(3, num_experts, 2 * rank, hidden), normal(3, num_experts, 2 * inner, rank), used)
    second = ExpertPairs(normal(3, num_experts, rank, inner), normal(3, num_experts, hidden, rank), used)
    for num_tokens in (1, 2, 17, 64, 300, 1000, 3000):
        x = torch.randn(num_tokens, hidden, generator=rng).to(device, torch.bfloat16)
        ids, weights = routed(rng, device, num_tokens, top_k, num_experts)
        slots = torch.randint(-1, 3, (num_tokens,), generator=rng).to(device, torch.int32)
        slots[0] = 2
        lora = ExpertLora(first, second, slots)
        plain = experts_triton(x, ids, weights, *matrices)
        found = experts_triton(x, ids, weights, *matrices, lora=lora)
        base = (slots < 0) | (slots == 1)
        assert torch.equal(found[base], plain[base]) and not torch.equal(found[0], plain[0])
        wanted = experts_torch(x, ids, weights, matrices, lora=lora).float()
        assert (found.float() - wanted).norm() < 8e-3 * wanted.norm() < 0.2 * (wanted - plain.float()).norm()
        assert torch.equal(experts_triton(x, ids, weights, *matrices, lora=lora), found)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = experts_triton(x, ids, weights, *matrices, lora=lora)
        for other in (slots.flip(0), torch.full_like(slots, -1)):
            slots.copy_(other.clone())
            ids.copy_(routed(rng, device, num_tokens, top_k, num_experts)[0])
            graph.replay()
            assert torch.equal(replayed, experts_triton(x, ids, weights, *matrices, lora=lora))
        assert torch.equal(replayed, experts_triton(x, ids, weights, *matrices))

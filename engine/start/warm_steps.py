"""Steps that a start makes up, so that every kernel a request can meet has been compiled: sizes and ways of sampling,
as arguments of ModelRunner.dummy_step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...kernels.experts.moe_codes import tokens_of_codes
from ...kernels.experts.moe_triton import tokens_of_tiles
from ...kernels.linear.quant_many import rows_of_tiles
from ...kernels.lora.lora import ROWS_BESIDE, TILINGS
from ..families.layer_spec import MoESpec
from ..link.sampling_params import SamplingParams
from ..models.model import Model
from ..planning.memory import WORST_SAMPLING
from ..quant.experts import PackedExperts
from ..quant.matrix import PackedMatrix
from ..step.compilations import FEW, SHORT
from ..step.graph_table import MIXED_DECODE_ROWS, draft_sizes

if TYPE_CHECKING:
    from ..speculation.model_drafter import Network
    from ..step.runner import ModelRunner

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


def prompt_steps(runner: ModelRunner, max_num_batched_tokens: int) -> list[int]:
    """Tokens of prompts that are met one at a time: each tile's, and as many as one context holds where latents are
    expanded, which a prompt gets that is alone in its step."""
    drafter = runner.model_drafter
    found = tile_steps(runner.model, *([] if drafter is None else [drafter.network]))
    if runner.latent_prompts is not None:
        found.append(min(max_num_batched_tokens, runner.max_model_len))
    return sorted(set(found))


def tile_steps(model: Model, *others: Network) -> list[int]:
    """Numbers of tokens that meet every tile of the products of experts and of those with codes: prompts have any
    number, however few requests there may be. others: who drafts beside the model, by whose experts nobody goes."""
    networks: list[Model | Network] = [model, *others]
    parts = [part for network in networks for part in network.modules()]
    matrices = [part for part in parts if isinstance(part, PackedMatrix)]
    found = {
        rows for part in matrices for rows in rows_of_tiles(part.matrix.rows, part.matrix.kind) if rows <= part.few_rows
    }
    return sorted({*expert_steps(model), *found})


def expert_steps(model: Model) -> list[int]:
    """Numbers of tokens that meet every tile of the experts' products."""
    routings = [layer.mlp.routing for layer in model.config.layers if isinstance(layer.mlp, MoESpec)]
    sizes = {(how.top_k, how.num_experts) for how in routings} | getattr(model, "experts", set())
    found = {tokens for size in sizes for tokens in tokens_of_tiles(*size)}
    if kinds := {kind for part in model.modules() if isinstance(part, PackedExperts) for kind in part.kinds}:
        found |= {tokens for top_k, experts in sizes for tokens in tokens_of_codes(top_k, experts, kinds)}
    return sorted(found)


def draft_steps(depths: Sequence[tuple[int, int]], max_num_seqs: int) -> list[tuple[int, int, SamplingParams, int]]:
    """Arguments of dummy_step with drafts: of every size that gets a graph, and as many as there may be beside a
    prompt."""
    beside = [
        (rows, rows * (1 + drafts) + 2, GREEDY, drafts)
        for most, drafts in depths
        if drafts and (rows := min(most, max_num_seqs - 1))
    ]
    return beside + [
        (rows, rows * (1 + drafts), kind, drafts)
        for most, drafts in depths
        if drafts
        for rows in draft_sizes(most)
        for kind in ((GREEDY, WORST_SAMPLING) if rows in (1, most) else (GREEDY,))
    ]


def adapter_prompts(runner: ModelRunner) -> list[int]:
    """Tokens of prompts with adapters that meet the kernels of experts' adapters, where there are any."""
    has_experts = runner.adapters is not None and runner.adapters.layout.experts
    return expert_steps(runner.model) if has_experts else []


def adapter_steps(max_num_seqs: int, max_num_batched_tokens: int, more: Sequence[int] = ()) -> list[tuple[int, int]]:
    """(requests, tokens) that meet every variant of the kernels of adapters. more: tokens of further prompts."""
    bounds = sorted({*(tiling.tokens for tiling in TILINGS[:-1]), ROWS_BESIDE})
    # First those whose gated products add what adapters do themselves: these take longest to compile (precompile.py).
    steps = [(1, tokens) for tokens in (64, 128, 1024, 2048, max_num_batched_tokens, 1, bounds[-1])] + [(16, 16)]
    steps += [(1, tokens + 1) for tokens in bounds]
    steps += [(tokens + 1, tokens + 1) for tokens in bounds]  # of the head
    steps += [(1, tokens) for tokens in more]
    return [step for step in steps if step[0] <= max_num_seqs and step[1] <= max_num_batched_tokens]


def warm_up_steps(
    max_num_seqs: int, max_num_batched_tokens: int, more: Sequence[int] = ()
) -> list[tuple[int, int, SamplingParams]]:
    """Arguments of dummy_step (requests, tokens, sampling) that together meet every variant of every kernel.

    more: tokens of further prompts.
    """
    # decodes beside a prompt, as many as the graphs of such steps have
    beside = [(rows + 1, rows + 2, GREEDY) for rows in MIXED_DECODE_ROWS if rows < max_num_seqs]
    # With precompile.py, each of the first steps has a process of its own. The kernels that take longest to compile
    # (prefill attention beside decodes, sampling, prefill attention) are therefore met in one of these each; helpers
    # take other steps that need them when they are ready.
    steps = [beside[-1], (64, 64, WORST_SAMPLING), (1, max_num_batched_tokens, GREEDY)]
    # The splits of decode attention and the tile of a product depend on how many decode.
    decodes = [(num_seqs, num_seqs) for num_seqs in (max_num_seqs, 128, 64, 1, 2, 96, 4, 8, 16, 17, 32)]
    prompts = [(4, min(2048, max_num_batched_tokens)), (1, 16), (1, 17), (2, 256)]
    prompts += [(num, max_num_batched_tokens) for num in (1, max_num_seqs)]
    others = [(*size, kind) for sizes in (decodes, prompts) for kind in (GREEDY, WORST_SAMPLING) for size in sizes]
    others += [(1, tokens, GREEDY) for tokens in (4, *more)]
    # Attention chooses by the longest prompt, and has other kernels for many: short ones, one of 33 tokens, a long one.
    many = [*(tokens * (FEW + 1) for tokens in (2, 4, SHORT, SHORT + 1)), max_num_batched_tokens]
    others += [(FEW + 1, tokens, GREEDY) for tokens in many]
    steps += [step for step in others + beside if step not in steps]
    return [step for step in steps if step[1] <= max_num_batched_tokens]

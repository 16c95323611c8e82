"""Our models against transformers: same logits at every position, through a paged cache, in chunks and in company."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING

from vserve.engine.cache.states import StateLayout, StateStorage
from vserve.engine.describe.reading import read_folder
from vserve.engine.layers import routing
from vserve.engine.layers.attention import AttentionBatch
from vserve.engine.models.blocks import CausalLM
from vserve.engine.models.mlp import MLP
from vserve.engine.models.scan_block import PairBlock
from vserve.engine.quant.unquantized import Unquantized
from vserve.engine.weights.loader import load_model
from vserve.kernels.attention.attention_parts import PagedCache
from vserve.kernels.state.step import StateStep
from vserve.tests.tiny_models import reference

PAGE = 4
LENGTHS = (45, 30)
# A step: (sequence, tokens) in order; those before "|" go to the decode kernel. The rest is decoded one by one.
WHOLE = [["|", (0, 40), (1, 21)]]
CHUNKED = [["|", (0, 3)], ["|", (1, 14), (0, 9)], [(1, 1), "|", (0, 17)], [(1, 1), "|", (0, 1)], ["|", (0, 5), (1, 2)]]
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn untruncated": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "truncate": False},
    "yarn of all": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7,
        "mscale_all_dim": 0.9},
}  # fmt: skip
LAYERED = {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}  # fmt: skip
LONGROPE = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.7 * i for i in range(8)]}  # fmt: skip
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "llama": {
        "gqa": {},
        "biases": {"attention_bias": True, "mlp_bias": True},
        "tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
        "head_dim": {"head_dim": 24, "num_key_value_heads": 1},
    },
    "mistral": {
        "gqa": {},
        "tied": {"tie_word_embeddings": True},
        "head_dim": {"head_dim": 24},
        "window": {"sliding_window": 8},
    },
    "ministral3": {"gqa": {}, "window": {"sliding_window": 8}},
    "mistral4": {
        "gqa": {},
        "groups": {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "first_k_dense_replace": 0},
        "plain queries": {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "attention_bias": True},
    },
    "internlm3": {"gqa": {}, "biases": {"attention_bias": True, "mlp_bias": True}},
    "mixtral": {
        "gqa": {},
        "window": {"sliding_window": 8},
        "one": {"num_local_experts": 4, "num_experts_per_tok": 1},
    },
    "qwen2": {
        "gqa": {},
        "tied": {"tie_word_embeddings": True},
        "head_dim": {"head_dim": 24},
        "window": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 3},
    },
    "qwen2_moe": {
        "gqa": {},
        "renormalized": {"norm_topk_prob": True, "initializer_range": 0.25},
        "dense": {"mlp_only_layers": [1], "num_hidden_layers": 3, "qkv_bias": False},
        "window": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "num_hidden_layers": 3},
    },
    "olmoe": {
        "gqa": {"head_dim": 16},
        "clipped": {"clip_qkv": 0.7, "norm_topk_prob": True, "attention_bias": True},
    },
    "minimax_m2": {"gqa": {}, "all": {"rope_parameters": {"rope_type": "default"}, "tie_word_embeddings": True}},
    "mimo_v2_flash": {
        "gqa": {},
        "groups": {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "attention_value_scale": None,
            "norm_topk_prob": False, "attention_bias": True, "routed_scaling_factor": 1.5},
        "sparse": {"mlp_layer_types": ["sparse", "dense", "sparse"], "v_head_dim": 32},
    },
    "llama4_text": {
        "gqa": {},
        "plain": {"use_qk_norm": False, "attn_temperature_tuning": False, "attention_bias": True,
            "attention_chunk_size": 12, "moe_layers": [0]},
        "whole": {"layer_types": ["full_attention"] * 3, "moe_layers": [0, 1, 2]},
    },
    "hy_v3": {"gqa": {}, "biases": {"attention_bias": True, "mlp_layer_types": ["sparse", "dense"],
        "num_shared_experts": 2, "tie_word_embeddings": True}},
    "laguna": {
        "gqa": {},
        "elements": {"gating": "per-element", "attention_bias": True, "moe_router_logit_softcapping": 0.7},
    },
    "granitemoe": {"gqa": {}, "biases": {"attention_bias": True, "tie_word_embeddings": True}},
    "granitemoeshared": {"gqa": {}, "none": {"shared_intermediate_size": 0}},
    "qwen3_moe": {
        "gqa": {},
        "renormalized": {"norm_topk_prob": True},
        "dense": {"mlp_only_layers": [0], "num_hidden_layers": 3, "attention_bias": True},
        "step": {"decoder_sparse_step": 2, "num_hidden_layers": 3, "tie_word_embeddings": True},
        "window": {"use_sliding_window": True, "sliding_window": 8},
    },
    "qwen3": {
        "gqa": {},
        "biases": {"attention_bias": True},
        "tied": {"tie_word_embeddings": True},
        "head_dim": {"head_dim": 24},
        "window": {"use_sliding_window": True, "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"]},
    },
    "glm4_moe_lite": {"gqa": {}, "halves": {"rope_interleave": False}},
    "minicpm3": {"gqa": {}, "plain queries": {"q_lora_rank": None, "v_head_dim": None, "tie_word_embeddings": True}},
    "gpt_oss": {
        "gqa": {},
        "one in four": {"num_local_experts": 4, "num_experts_per_tok": 1, "num_key_value_heads": 1},
        "windows": {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 3},
        "clamped": {"swiglu_limit": 0.5, "attention_bias": False},
    },
    "deepseek_v2": {
        "gqa": {},
        "plain queries": {"q_lora_rank": None},
        "groups": {"topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0, "attention_bias": True},
        "dense": {"first_k_dense_replace": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    },
    "deepseek_v3": {
        "gqa": {},
        "coarse": {"rms_norm_eps": 0.05},  # not that of the norms of what is compressed
        "plain queries": {"q_lora_rank": None, "first_k_dense_replace": 0},
        "halves": {"rope_interleave": False, "attention_bias": True, "norm_topk_prob": False},
        "wide values": {"v_head_dim": 40, "kv_lora_rank": 48, "n_group": 1, "topk_group": 1},
    },
    "gemma": {
        "gqa": {},
        "tied": {"tie_word_embeddings": True, "attention_bias": True},
        "yarn": {"rope_parameters": ROPES["yarn"]},
    },
    "gemma2": {"gqa": {}, "uncapped": {"attn_logit_softcapping": None, "final_logit_softcapping": None}},
    "gemma3_text": {
        "gqa": {"rope_parameters": LAYERED},
        "capped": {"rope_parameters": LAYERED, "final_logit_softcapping": 4.0},
        "tied": {"tie_word_embeddings": True, "rope_parameters": LAYERED},
    },
    "gemma3": {"gqa": {"rope_parameters": LAYERED}, "tied": {"tie_word_embeddings": True}},
    "gemma4_text": {
        "gqa": {},
        "dense": {"enable_moe_block": False, "attention_k_eq_v": False, "tie_word_embeddings": True},
        "biases": {"attention_bias": True, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
            "final_logit_softcapping": None},
    },
    "phi3": {
        "gqa": {},
        "part": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}},
        "window": {"sliding_window": 8},
        # Below the original length of 64, of which the model serves no more.
        "short": {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE},
    },
    "glm": {"gqa": {}, "unbiased": {"attention_bias": False, "head_dim": 24}},
    "glm4": {"gqa": {}, "all": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}},
    "glm4_moe": {
        "gqa": {},
        "norms": {"use_qk_norm": True, "attention_bias": False, "norm_topk_prob": False},
        "groups": {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "num_hidden_layers": 3},
        "all experts": {"first_k_dense_replace": 0, "tie_word_embeddings": True},
    },
    "granite": {"gqa": {}, "biases": {"attention_bias": True, "mlp_bias": True}},
    "cohere": {"gqa": {}, "each": {"use_qk_norm": True}, "biases": {"attention_bias": True}},
    "cohere2": {"gqa": {}, "tied": {"tie_word_embeddings": True}},
    "olmo2": {"gqa": {}, "biases": {"attention_bias": True, "num_key_value_heads": 4}},
    "olmo3": {
        "gqa": {},
        "yarn": {"rope_parameters": {"full_attention": ROPES["yarn"], "sliding_attention": ROPES["default"]}},
    },
    "smollm3": {"gqa": {}, "window": {"use_sliding_window": True, "sliding_window": 8}},
    "seed_oss": {
        "gqa": {},
        "biases": {"attention_out_bias": True},
        "unbiased": {"attention_bias": False, "mlp_bias": True},
    },
    "lfm2": {
        "gqa": {},
        "tied": {"tie_word_embeddings": True, "conv_bias": True, "block_auto_adjust_ff_dim": False},
        "wide": {"conv_L_cache": 4, "layer_types": ["full_attention", "conv"], "num_hidden_layers": 2},
    },
    "lfm2_moe": {"gqa": {}, "unbiased": {"use_expert_bias": False, "norm_topk_prob": False,
        "routed_scaling_factor": 1.5, "num_dense_layers": 0}},
    "granitemoehybrid": {
        "gqa": {},
        "dense": {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 1,
            "mamba_conv_bias": False, "mamba_proj_bias": True, "tie_word_embeddings": True, "attention_bias": True},
    },
    "bamba": {"gqa": {}, "at the end": {"attn_layer_indices": [0], "num_hidden_layers": 2, "attention_bias": True,
        "time_step_limit": [0.3, 0.9]}},
    "falcon_h1": {
        "gqa": {},
        "norm first": {"mamba_rms_norm": True},
        "gate first": {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 1},
    },
    "nemotron_h": {
        "gqa": {},
        "experts at the end": {"layers_block_type": ["linear_attention", "full_attention", "moe"], "n_group": 1,
            "topk_group": 1, "moe_latent_size": None, "norm_topk_prob": False},
        "an MLP at the end": {"layers_block_type": ["full_attention", "linear_attention", "mlp"], "mlp_bias": True,
            "use_bias": True, "use_conv_bias": False},
    },
    "qwen3_5_text": {
        "gqa": {},
        "tied": {"tie_word_embeddings": True, "attention_bias": True},
        "a state at the end": {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2},
        "wide": {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3, "rope_parameters": {"rope_type": "default",
            "rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1], "mrope_interleaved": True}},
    },
    "qwen3_5": {"gqa": {}},
    "qwen3_5_moe_text": {"gqa": {}},
    "qwen3_5_moe": {"gqa": {}},
    "qwen3_next": {
        "gqa": {},
        "dense": {"mlp_only_layers": [1], "norm_topk_prob": False},
        "whole groups": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
    },
    "exaone4": {"gqa": {}, "full": {"sliding_window": None, "layer_types": ["full_attention"] * 2}},
}  # fmt: skip
FEW_ROPES = {
    "deepseek_v2": ("default", "yarn of all"),
    "deepseek_v3": ("default", "yarn of all"),
    "gpt_oss": ("default", "yarn untruncated"),
}
# Those that are tried with every kind of rotation; others need not repeat what does not depend on the family.
ROTATED = ("llama", "mistral", "qwen2", "qwen3")
KINDS = ("default", "linear", "llama3", "yarn", "dynamic")
CASES = [
    (family, rope, variant)
    for family in VARIANTS
    for rope in FEW_ROPES.get(family, KINDS if family in ROTATED else ("default",))
    for variant in VARIANTS[family]
]


class PagedRunner:
    """Feeds a model by hand: a cache of shuffled pages, one row of the block table a sequence, no scheduler."""

    def __init__(self, model: CausalLM, sequences: list[Tensor], seed: int = 1) -> None:
        self.model, self.sequences = model, sequences
        generator = torch.Generator().manual_seed(seed)
        pages = [-(-len(sequence) // PAGE) for sequence in sequences]
        order = (torch.randperm(sum(pages) + 3, generator=generator) + 1).tolist()  # page 0 is nobody's
        self.rows = [2, 0, 3][: len(sequences)]
        self.table = torch.zeros(4, max(pages) + 1, dtype=torch.int32)
        for row, count in zip(self.rows, pages, strict=True):
            self.table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        for layer in model.attention_layers():
            shape = (sum(pages) + 4, PAGE, layer.spec.num_kv_heads)
            # NaN: a key that is read without having been written must show.
            keys = torch.full((*shape, layer.spec.head_dim), torch.nan, dtype=model.place.dtype)
            values = torch.full((*shape, layer.spec.value_dim), torch.nan, dtype=model.place.dtype)
            if layer.spec.shared:
                values = keys[..., : layer.spec.value_dim]
            layer.bind(PagedCache(keys, values, self.table))
        self.computed = [0] * len(sequences)
        self.folded = [0] * len(sequences)  # tokens of each state
        if (layout := StateLayout.of([layer.spec for layer in model.state_layers()], 2, torch.float32)) is not None:
            dtype, device = model.place.dtype, torch.device("cpu")
            for tensor in StateStorage(layout, model.state_layers(), len(sequences) + 1, dtype, device).tensors:
                tensor.fill_(torch.nan)
        self.position_shift = 0  # a mutation: of decoded tokens

    @torch.inference_mode()
    def step(
        self, plan: list[Any], decode_query_len: int = 1, embeddings: bool = False, last_only: bool = False
    ) -> list[tuple[int, int, Tensor]]:
        """plan: [(sequence, tokens) …, "|", (sequence, tokens) …] → (sequence, first position, logits [tokens, V]).

        With last_only, of each sequence's last token in this step.
        """
        num_decodes = plan.index("|")
        work = [item for item in plan if item != "|"]
        ids, positions, slots, lens, starts = [], [], [], [], [0]
        for index, (which, count) in enumerate(work):
            first = self.computed[which]
            span = torch.arange(first, first + count)
            ids.append(self.sequences[which][first : first + count])
            positions.append(span + (self.position_shift if index < num_decodes else 0))
            slots.append(self.table[self.rows[which], span // PAGE] * PAGE + span % PAGE)
            lens.append(first + count)
            starts.append(starts[-1] + count)
        batch = AttentionBatch(
            num_decodes=num_decodes,
            decode_query_len=decode_query_len,
            max_query_len=max((count for _, count in work[num_decodes:]), default=0),
            rows=torch.tensor([self.rows[which] for which, _ in work], dtype=torch.int32),
            seq_lens=torch.tensor(lens, dtype=torch.int32),
            query_start=torch.tensor(starts, dtype=torch.int32),
            slots=[torch.cat(slots).int()],
            state=self._state_step(work, num_decodes, decode_query_len, starts),
        )
        tokens = torch.cat(ids).int()
        given = self.model.embedding(tokens) if embeddings else None
        before = None if given is None else given.clone()
        inputs = torch.zeros_like(tokens) if embeddings else tokens
        wanted = torch.tensor(starts[1:], dtype=torch.int32) - 1 if last_only else None
        hidden = self.model(inputs, torch.cat(positions).int(), batch, given, wanted)
        assert given is None or torch.equal(given, before), "the caller's embeddings were overwritten"
        logits = self.model.logits(hidden)
        if last_only:
            for which, count in work:
                self.computed[which] += count
            return [(which, self.computed[which] - 1, row[None]) for (which, _), row in zip(work, logits, strict=True)]
        results = []
        for (which, count), start in zip(work, starts, strict=False):
            results.append((which, self.computed[which], logits[start : start + count]))
            self.computed[which] += count
        return results

    def _state_step(self, work: list[Any], num_decodes: int, query_len: int, starts: list[int]) -> StateStep:
        """What may be taken back is not folded: of every second prompt the last token."""
        first = [self.computed[which] for which, _ in work]
        ends = [self.computed[which] + count - which % 2 for which, count in work]
        fold_to = first[:num_decodes] + ends[num_decodes:]
        slots = [which + 1 for which, _ in work]
        columns = (slots, first, [self.folded[which] for which, _ in work], fold_to, [0] * len(work), [0] * len(work))
        for (which, _), folded in zip(work, fold_to, strict=True):
            self.folded[which] = folded
        tensors = [torch.tensor(column, dtype=torch.int32) for column in (*columns, starts)]
        return StateStep(*tensors, num_decodes, query_len)

    def run(self, schedule: list[list[Any]]) -> list[Tensor]:
        """The schedule, then decode steps until all sequences are computed → logits [tokens, V] of each."""
        found = [torch.full((len(s), self.model.config.vocab_size), torch.nan) for s in self.sequences]

        def record(results: list[tuple[int, int, Tensor]]) -> None:
            for which, first, logits in results:
                assert logits.dtype is torch.float32
                found[which][first : first + len(logits)] = logits

        for plan in schedule:
            record(self.step(plan))
        while todo := [(i, 1) for i, s in enumerate(self.sequences) if self.computed[i] < len(s)]:
            record(self.step([*todo, "|"]))
        return found


def sequences(vocab: int = 300) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab, (length,), generator=generator) for length in LENGTHS]


@lru_cache(maxsize=128)
def oracle(folder: Path) -> list[Tensor]:
    model = reference(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.inference_mode():
        return [model(sequence[None]).logits[0] for sequence in sequences()]


def load(folder: Path, **changes: Any) -> CausalLM:
    config = read_folder(folder)
    values = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": config.max_position_embeddings}
    return load_model(folder, config, **(values | changes))


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    gap = max((ours - theirs).abs().max().item() for ours, theirs in zip(found, expected, strict=True))
    return gap if gap == gap else float("inf")  # NaN: a position was not computed


@pytest.mark.parametrize(("family", "rope", "variant"), CASES, ids=["-".join(case) for case in CASES])
def test_logits_equal_transformers(tiny_model: Callable[..., Path], family: str, rope: str, variant: str) -> None:
    folder = make(tiny_model, family, rope, variant)
    model, expected = load(folder), oracle(folder)
    for schedule in (WHOLE, CHUNKED):
        assert difference(PagedRunner(model, sequences()).run(schedule), expected) < 2e-4


def make(tiny_model: Callable[..., Path], family: str, rope: str = "default", variant: str = "gqa") -> Path:
    # Dynamic RoPE is compared within the original length only: beyond, transformers' depends on its earlier calls.
    values = {"max_position_embeddings": 64, **VARIANTS[family][variant]}
    if family in ROTATED or family in FEW_ROPES:
        values["rope_parameters"] = ROPES[rope]
    if "swiglu_limit" in values and not hasattr(CONFIG_MAPPING[family](), "swiglu_limit"):
        pytest.skip(f"transformers {transformers.__version__} clamps at 7, whatever config.json says")
    return tiny_model(family, **values)


@pytest.mark.parametrize("family", VARIANTS)
def test_several_tokens_a_decode(tiny_model: Callable[..., Path], family: str) -> None:
    """Drafts: decode steps with three tokens a request, beside a prefill."""
    folder = make(tiny_model, family, variant="window" if "window" in VARIANTS[family] else "gqa")
    runner = PagedRunner(load(folder), [*sequences(), sequences()[0]])
    expected = [*oracle(folder), oracle(folder)[0]]
    runner.step(["|", (0, 10), (1, 17)])
    for _ in range(3):
        for which, first, logits in runner.step([(0, 3), (1, 3), "|", (2, 7)], decode_query_len=3):
            assert difference([logits], [expected[which][first : first + len(logits)]]) < 2e-4


@pytest.mark.parametrize("family", VARIANTS)
def test_only_wanted_tokens_leave_the_last_layer(tiny_model: Callable[..., Path], family: str) -> None:
    """And what the others leave in the cache is right: the tokens after them see it."""
    folder = make(tiny_model, family)
    runner, compared = PagedRunner(load(folder), sequences()), 0
    for plan in [["|", (1, 9), (0, 12)], [(0, 1), "|", (1, 7)], [(1, 1), (0, 1), "|"]]:
        for which, position, logits in runner.step(plan, last_only=True):
            assert difference([logits], [oracle(folder)[which][position : position + 1]]) < 2e-4
            compared += 1
    assert compared == 6


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("family", VARIANTS)
def test_products_that_add_to_the_residual(
    tiny_model: Callable[..., Path], family: str, last_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU from some number of rows on, here from 9: steps with more and with fewer take turns."""
    folder = make(tiny_model, family, variant="clamped" if family == "gpt_oss" else "gqa")  # without biases
    model = load(folder)
    dense = [layer for layer in model.layers if isinstance(layer.mlp, MLP)]  # experts add in every step
    mixing = [layer for layer in model.layers if layer.mixer is not None and not isinstance(layer.mixer, PairBlock)]
    outputs = [layer for layer in mixing if layer.mixer.output.method.bias is None]  # no product adds both
    for product in (*(layer.mixer.output for layer in outputs), *(layer.mlp.down for layer in dense)):
        product.method.add_rows = 9
    multiply, seen = Unquantized.multiply, []

    def spy(method: Unquantized, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is not None:
            seen.append(len(x))
        return multiply(method, x, residual)

    monkeypatch.setattr(Unquantized, "multiply", spy)
    runner = PagedRunner(model, sequences())
    for plan in [["|", (1, 9), (0, 12)], [(0, 1), "|", (1, 7)], [(1, 1), "|", (0, 8)], [(1, 1), (0, 1), "|"]]:
        for which, first, logits in runner.step(plan, last_only=last_only):
            assert difference([logits], [oracle(folder)[which][first : first + len(logits)]]) < 2e-4
    # The last layer goes on with two rows. What is normed or scaled before it is added, no product adds.
    adds = [((layer in outputs) + (layer in dense)) * layer.adds_to_residual for layer in model.layers]
    adding = sum(adds[:-1] if last_only else adds)
    assert seen == [21] * adding + [9] * adding


@pytest.mark.parametrize(
    ("family", "variant"),
    [
        ("qwen3_moe", "gqa"),
        ("qwen2_moe", "gqa"),  # a shared expert with a gate
        ("granitemoeshared", "gqa"),  # one without; what is added is scaled: the norm adds it
        ("deepseek_v2", "gqa"),
        ("deepseek_v3", "gqa"),  # with a correction
        ("gpt_oss", "clamped"),  # a router with a bias
    ],
)
def test_routers_that_norm_what_they_read(
    tiny_model: Callable[..., Path], family: str, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU up to some number of rows, here up to 8; attention's products add to the residual there."""
    folder = make(tiny_model, family, variant=variant)
    model, plain = load(folder), load(folder)
    mixtures = [layer for layer in model.layers if not isinstance(layer.mlp, MLP)]
    for layer in mixtures:
        layer.mlp.router.norm_rows = layer.mixer.output.method.add_up_to = 8
    for layer in plain.layers:
        layer.adds_to_residual = False  # all is added by norms
    routed, seen = routing.norm_router, []
    monkeypatch.setattr(routing, "norm_router", lambda x, *more: (seen.append(len(x.rows)), routed(x, *more))[1])
    runners = PagedRunner(model, sequences()), PagedRunner(plain, sequences())
    for plan in [["|", (1, 9), (0, 12)], [(0, 1), "|", (1, 7)], [(1, 1), (0, 1), "|"], [(1, 1), "|"]]:
        found, wanted = (runner.step(plan) for runner in runners)
        for (which, first, logits), (_, _, others) in zip(found, wanted, strict=True):
            assert torch.equal(logits.argmax(-1), others.argmax(-1))
            assert difference([logits], [others]) < 2e-5
            assert difference([logits], [oracle(folder)[which][first : first + len(logits)]]) < 2e-4
    norming = sum(layer.adds_to_residual for layer in mixtures)
    assert seen == [rows for rows in (8, 2, 1) for _ in range(norming)]


def test_embeddings_in_place_of_ids(tiny_model: Callable[..., Path]) -> None:
    folder = make(tiny_model, "llama")
    (_, _, logits), _ = PagedRunner(load(folder), sequences()).step(WHOLE[0], embeddings=True)
    assert difference([logits], [oracle(folder)[0][:40]]) < 2e-4


@pytest.mark.parametrize(("family", "variant"), [("qwen3", "gqa"), ("deepseek_v2", "dense")])
def test_bfloat16_is_near_and_gives_fp32_logits(tiny_model: Callable[..., Path], family: str, variant: str) -> None:
    folder = make(tiny_model, family, variant=variant)
    found = PagedRunner(load(folder, dtype=torch.bfloat16), sequences()).run(CHUNKED)
    error = torch.cat(found) - torch.cat(oracle(folder))
    assert error.square().mean().sqrt() / torch.cat(oracle(folder)).std() < 0.05


def test_without_a_cache_shapes_are_right(tiny_model: Callable[..., Path]) -> None:
    """The memory profiling run happens before there is a cache."""
    model = load(make(tiny_model, "llama", variant="head_dim"))
    runner = PagedRunner(model, sequences())
    for layer in model.attention_layers():
        layer.bind(None)
    (_, _, logits), _ = runner.step(WHOLE[0])
    assert logits.shape == (40, 300) and logits.isfinite().all()


# ---- what is left out must show: otherwise the tests above would pass without it ----
def _no_rope(runner: PagedRunner) -> None:
    (rotary,) = runner.model.rotary.values()
    table = rotary.cos_sin
    half = table.shape[1] // 2
    table[:, :half], table[:, half:] = 1.0, 0.0


def _no_window(runner: PagedRunner) -> None:
    for layer in runner.model.attention_layers():
        layer.scoring = replace(layer.scoring, window=0)


def _window_off_by_one(runner: PagedRunner) -> None:
    for layer in runner.model.attention_layers():
        window = layer.scoring.window
        layer.scoring = replace(layer.scoring, window=window + (window > 0))


def _no_qk_norm(runner: PagedRunner) -> None:
    for layer in runner.model.layers:
        layer.mixer.attention.q_norm = layer.mixer.attention.k_norm = None


def _positions_off_by_one(runner: PagedRunner) -> None:
    runner.position_shift = 1


def _wrong_page(runner: PagedRunner) -> None:
    step = runner.step

    def mix_up_before_decoding(plan: list[Any]) -> list[tuple[int, int, Tensor]]:
        if plan.index("|"):
            # The other sequence's page: two pages of its own may change places, their keys are already rotated.
            runner.table[runner.rows[0], 1] = runner.table[runner.rows[1], 1]
        return step(plan)

    runner.step = mix_up_before_decoding  # type: ignore[method-assign,assignment]


def _no_bias(runner: PagedRunner) -> None:
    for layer in runner.model.layers:
        layer.mixer.qkv.method.__dict__["bias"] = None  # where keep_at_hand has put it


def _other_pairs(runner: PagedRunner) -> None:
    for layer in runner.model.layers:
        layer.mixer.spec = replace(layer.mixer.spec, interleaved=False)


def _no_temperature(runner: PagedRunner) -> None:
    for layer in runner.model.attention_layers():
        layer.scoring = replace(layer.scoring, scale=24**-0.5)


def _no_sinks(runner: PagedRunner) -> None:
    for layer in runner.model.attention_layers():
        layer.scoring = replace(layer.scoring, sinks=None)


def _no_correction(runner: PagedRunner) -> None:
    runner.model.layers[1].mlp.router.correction.zero_()


def _no_latent_norm(runner: PagedRunner) -> None:
    for layer in runner.model.layers:
        layer.mixer.kv_norm.weight.fill_(1.0)


def _other_sums(runner: PagedRunner) -> None:
    for layer in runner.model.layers:
        how = layer.mlp.router.how
        layer.mlp.router.how = how._replace(renormalize=not how.renormalize, softmax_chosen=False)


def _no_shared_gate(runner: PagedRunner) -> None:
    for layer in runner.model.layers:
        layer.mlp.shared_gate = None


def _another_expert(runner: PagedRunner) -> None:
    experts = runner.model.layers[1].mlp.experts.method
    experts.down[[2, 3]] = experts.down[[3, 2]].clone()


def _untied(runner: PagedRunner) -> None:
    head = runner.model.lm_head.method
    head.weight = torch.nn.Parameter(head.weight.roll(1, 0), requires_grad=False)


@pytest.mark.parametrize(
    ("family", "rope", "variant", "mutate"),
    [
        *((family, rope, "gqa", _no_rope) for family in ("llama", "qwen3") for rope in KINDS),
        ("mistral", "default", "window", _no_window),
        ("qwen2", "default", "window", _no_window),
        ("qwen3", "default", "window", _window_off_by_one),
        ("qwen3", "default", "gqa", _no_qk_norm),
        ("llama", "default", "gqa", _positions_off_by_one),
        ("qwen3", "yarn", "gqa", _positions_off_by_one),
        ("llama", "default", "gqa", _wrong_page),
        ("qwen2", "default", "gqa", _no_bias),
        ("qwen3", "default", "biases", _no_bias),
        ("llama", "default", "tied", _untied),
        ("qwen3_moe", "default", "gqa", _other_sums),
        ("qwen3_moe", "default", "renormalized", _other_sums),
        ("granitemoe", "default", "gqa", _other_sums),
        ("mixtral", "default", "gqa", _another_expert),
        ("qwen2_moe", "default", "gqa", _no_shared_gate),
        ("glm4_moe", "default", "gqa", _no_correction),
        ("deepseek_v2", "default", "gqa", _no_rope),
        ("deepseek_v3", "default", "gqa", _other_pairs),
        ("deepseek_v3", "yarn of all", "gqa", _no_temperature),
        ("deepseek_v3", "default", "gqa", _no_latent_norm),
        ("deepseek_v3", "default", "wide values", _no_correction),
        ("gpt_oss", "default", "gqa", _no_sinks),
        ("gpt_oss", "default", "gqa", _window_off_by_one),
    ],
)
def test_mutations_are_noticed(
    tiny_model: Callable[..., Path], family: str, rope: str, variant: str, mutate: Callable[[PagedRunner], None]
) -> None:
    folder = make(tiny_model, family, rope, variant)
    runner = PagedRunner(load(folder), sequences())
    mutate(runner)
    assert difference(runner.run(WHOLE), oracle(folder)) > 1e-2

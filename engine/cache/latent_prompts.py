"""Which steps expand the latents of their prompts, and the workspace where they do.

The kernels: kernels/attention/latent_prompts.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.attention.attention_parts import RaggedBatch
from ...kernels.attention.latent_prompts import ExpandedPrompts, LatentSizes
from ..describe.model_config import ModelConfig
from ..families.layer_spec import LatentAttentionSpec
from ..link.plan import StepPlan
from ..models.model import Model

# Of DeepSeek V3 on eight cards: 47,000 tokens of context with all heads, or 128,000 with four.
WORKSPACE_BYTES = 1 << 29
FULL_REQUESTS = 8  # of which there is no need for more: further ones take their turn
# Products of a rank's layer that a GPU makes while the host launches its kernels, some 0.3 ms that a CUDA graph saves:
# steps that have a graph expand where they spare more, the rest as soon as they spare any.
LAUNCHING_PRODUCTS = 1 << 35
# Of the warm-up's steps, one prompt of more tokens than this is expanded and all others are not: both are compiled.
DUMMY_TOKENS = 64


class LatentPrompts:
    def __init__(self, sizes: LatentSizes) -> None:
        """sizes: of this rank's heads."""
        self.sizes = sizes
        self.numbers: Tensor | None = None

    @classmethod
    def planned(cls, config: ModelConfig, ranks: int = 1) -> LatentPrompts | None:
        """Of a card that has its share of the heads, before there is a model; None for one without latent attention."""
        specs = (layer.attention for layer in config.layers)
        sizes = {
            LatentSizes(spec.kv_rank, spec.rope_dim, spec.nope_dim, spec.value_dim, spec.num_heads // ranks)
            for spec in specs
            if isinstance(spec, LatentAttentionSpec)
        }
        return cls(*sizes) if sizes else None

    @classmethod
    def of(cls, model: Model) -> LatentPrompts | None:
        """None for a model without latent attention."""
        specs = {layer.attention for layer in model.config.layers if isinstance(layer.attention, LatentAttentionSpec)}
        if not specs:
            return None
        sizes = {
            LatentSizes(spec.kv_rank, spec.rope_dim, spec.nope_dim, spec.value_dim, layer.num_heads)
            for spec in specs
            for layer in model.attention_layers()
        }
        assert len(sizes) == 1, "one workspace for layers that are all alike"
        return cls(*sizes)

    def elements(self, max_num_seqs: int, longest: int, item: int) -> int:
        """Of the workspace. longest: tokens of whole pages that a request has at most; item: bytes of a number."""
        tokens = min(max_num_seqs, FULL_REQUESTS) * longest
        return self.sizes.workspace_elements(tokens, WORKSPACE_BYTES // item, longest)

    def allocate(self, elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numbers = torch.empty(elements, dtype=dtype, device=device)

    def expands(self, plan: StepPlan, has_graph: bool) -> bool:
        """Whether it spares this step products, or, where it might be replayed, more of them than launching costs."""
        if self.numbers is None or len(plan.rows) == plan.num_decodes:
            return False
        if plan.step < 0:
            return len(plan.rows) == 1 and plan.total_tokens > DUMMY_TOKENS
        first = plan.num_decodes
        saved = self.sizes.saved(plan.num_tokens[first:], self._contexts(plan)) * self.sizes.heads
        return saved > (LAUNCHING_PRODUCTS if has_graph else 0)

    def prompts(self, plan: StepPlan, batch: RaggedBatch, max_model_len: int) -> ExpandedPrompts:
        """batch: those of the plan, on the device."""
        assert self.numbers is not None
        contexts = [min(context, max_model_len) for context in self._contexts(plan)]
        return ExpandedPrompts(batch, plan.rows[plan.num_decodes :], contexts, self.numbers)

    def _contexts(self, plan: StepPlan) -> list[int]:
        """Upper bounds, where drafts may have failed."""
        pairs = zip(plan.num_computed[plan.num_decodes :], plan.num_tokens[plan.num_decodes :], strict=True)
        return [computed + tokens for computed, tokens in pairs]

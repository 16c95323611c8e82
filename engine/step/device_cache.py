"""What the layers of a rank cache: its bytes while memory is planned, then tensors that the layers are bound to."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...kernels.attention.attention_parts import PagedCache
from ...kernels.attention.kv_fp8 import fixed_scales
from ...kernels.attention.kv_unpack import PromptPages
from ..cache.kv_format import KVFormat
from ..cache.kv_layout import kv_layout
from ..cache.kv_storage import allocate, allocate_scales
from ..cache.latent_prompts import LatentPrompts
from ..cache.rows import RowTables
from ..cache.states import StateLayout, StateStorage
from ..models.model import Model
from ..speculation.model_drafter import ModelDrafter

PROMPT_PAGE_TOKENS = 1 << 17


class DeviceCache:
    def __init__(
        self,
        model: Model,
        model_drafter: ModelDrafter | None,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        kv_format: KVFormat,
        device: torch.device,
        num_drafts: int = 0,
        state_dtype: torch.dtype = torch.float32,
    ) -> None:
        """`num_drafts`: of a request in a step, at most. `max_model_len` may shrink once memory has been planned."""
        self.model_drafter = model_drafter
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.device = device
        self.dtype = model.place.dtype  # of activations
        drafting = [] if model_drafter is None else model_drafter.layers
        self.layers = model.attention_layers() + drafting
        self.layout = kv_layout(model, block_size, max_model_len, kv_format, [layer.spec for layer in drafting])
        self.latent_prompts = LatentPrompts.of(model)
        self.state_layers = model.state_layers()
        self.states = StateLayout.of([layer.spec for layer in self.state_layers], num_drafts, state_dtype)

    def bind_states(self, num_slots: int) -> StateStorage | None:
        """Allocates slots for recurrent states; None: no layer keeps one."""
        if self.states is None:
            return None
        return StateStorage(self.states, self.state_layers, num_slots, self.dtype, self.device)

    def bind(self, tables: RowTables, num_blocks: int, dtype: torch.dtype) -> PromptPages | None:
        """Allocates the paged cache, and pages for the tokens of its blocks; each layer's comes with the block tables
        that the rows have now. → where codes of prompts are unpacked, if they are."""
        tables.make_pages(num_blocks)
        more = self._scratch_blocks()
        caches = allocate(self.layout, num_blocks, dtype, self.device, more)
        scales = self._scales(num_blocks, more)
        for index, group in enumerate(self.layout.groups):
            for layer in group.layers:
                cache = PagedCache(*caches[layer], tables.block_tables[index], *scales[layer])
                self.layers[layer].bind(cache, index)
        if self.model_drafter is not None:
            self.model_drafter.bind(num_blocks)
        pages = None
        if size := self._prompt_page_elements:
            pages = PromptPages.create(self._prompt_page_tokens, self.block_size, size, dtype, self.device)
        if self.latent_prompts is not None:
            self.latent_prompts.allocate(self._latent_elements(dtype.itemsize), dtype, self.device)
        return pages

    def unbind(self) -> None:
        """The layers lose their caches, which come with block tables, and their states."""
        for layer in self.layers:
            layer.bind(None)
        for state in self.state_layers:
            state.bind(None, None)

    def row_bytes(self, max_model_len: int) -> int:
        """Bytes of the row tables that grow with the context."""
        return (self.max_num_seqs + 1) * self.layout.row_bytes(max_model_len)

    def prompt_page_bytes(self, item: int) -> int:
        """Where prompts' codes become numbers, one layer's at a time; item: bytes of a number."""
        return self._prompt_page_tokens * self._prompt_page_elements * item

    def scratch_bytes(self, item: int) -> int:
        """Of blocks behind the cache's, and where latents are expanded; item: bytes of a number. Layers at one place
        share memory, whose pages are the largest's."""
        layout, more, found = self.layout, self._scratch_blocks(), self._latent_elements(item) * item
        for place in layout.places:
            specs = [layout.specs[layer] for layer in place]
            token = max(spec.token_elements for spec in specs) * layout.format.item_bytes(item)
            token += max(layout.format.scale_bytes(spec) for spec in specs)
            found += max(more.get(layer, 0) for layer in place) * self.block_size * token
        return found

    @property
    def _prompt_page_tokens(self) -> int:
        """Of which the codes of a step's prompts are unpacked at once; with more, they are read by a slower kernel."""
        return min(PROMPT_PAGE_TOKENS, self.max_num_seqs * self.max_model_len)

    @property
    def _prompt_page_elements(self) -> int:
        """Of a token, keys and values, in the layer with most of those whose codes are unpacked; 0: there is none."""
        if not self.layout.format.code or self.device.type != "cuda" or self.dtype.itemsize > 2:
            return 0
        return max(
            (layer.spec.token_elements for layer in self.layers if layer.reads_numbers(self.block_size)), default=0
        )

    def _latent_elements(self, item: int) -> int:
        """Of the workspace where latents of prompts are expanded; item: bytes of a number."""
        if self.latent_prompts is None:
            return 0
        longest = -(-self.max_model_len // self.block_size) * self.block_size
        return self.latent_prompts.elements(self.max_num_seqs, longest, item)

    def _scratch_blocks(self) -> dict[int, int]:
        """Layer → blocks behind the cache's, where drafts of drafts go."""
        if self.model_drafter is None:
            return {}
        first = len(self.layers) - len(self.model_drafter.layers)
        groups = sum(max(group.layers) >= first for group in self.layout.groups)
        return dict.fromkeys(range(first, len(self.layers)), groups * self.model_drafter.num_scratch_blocks)

    def _scales(self, num_blocks: int, more: Mapping[int, int]) -> list[tuple[Tensor | None, Tensor | None]]:
        """Of keys and values of each layer, None where these are no codes."""
        layers, format = self.layers, self.layout.format
        if not format.code:
            return [(None, None)] * len(layers)
        if format.token_scales:
            return list(allocate_scales(self.layout, num_blocks, self.device, more))
        found: list[tuple[Tensor | None, Tensor | None]] = []
        for index, layer in enumerate(layers):
            ones, blocks = torch.ones(layer.spec.num_kv_heads, device=self.device), num_blocks + more.get(index, 0)
            keys, values = layer.code_scales or (ones, ones)
            found.append((fixed_scales(keys, blocks, self.block_size), fixed_scales(values, blocks, self.block_size)))
        return found

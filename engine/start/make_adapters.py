"""The slots of a runner, as the options want them."""

from __future__ import annotations

import torch

from ..adapters.layout import SlotLayout
from ..adapters.store import AdapterStore
from ..adapters.tables import AdapterTables
from ..models.model import Model
from ..planning.settings import Settings
from ..schedule.planner import FEW_DECODES
from ..weights.loader import whole_of


def make_tables(model: Model, settings: Settings, download_dir: str | None) -> AdapterTables | None:
    """None where no adapter is served. Raises ConfigError for target modules that the model does not have."""
    if not settings.max_loras:
        return None
    layout = SlotLayout(model, settings.config.max_lora_rank, settings.config.lora_target_modules, whole_of(model))
    device: torch.device = settings.device
    store = AdapterStore(layout, settings.lora_dtype, device.type == "cuda", download_dir)
    return AdapterTables(store, settings.max_loras, device, most_tokens(settings), settings.max_num_seqs)


def most_tokens(settings: Settings) -> int:
    """Of a step, padding included: graphs pad by less than there may be rows, or have room for a few decodes more."""
    return settings.max_num_batched_tokens + max(settings.max_num_seqs, FEW_DECODES)

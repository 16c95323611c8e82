"""From what --speculative-config names to who drafts: found, told apart, held against the target, loaded."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from ..checkpoint import Checkpoint, open_checkpoint
from ..config import ConfigError
from ..loader import load_beside, load_model, resolve_model_path
from ..model_config import ModelConfig
from ..model_file import ModelError, read_config
from ..models.blocks import CausalLM
from ..models.model import Model
from .draft_config import check_vocabulary, infer_method, read_head
from .draft_model import DraftModel
from .heads import EagleHead
from .model_drafter import ModelDrafter, Network
from .settings import NAME, Speculation

logger = logging.getLogger(__name__)


def load_drafter(target: Model, settings: Speculation, max_model_len: int, download_dir: str | None) -> ModelDrafter:
    """max_model_len: of the target. Raises ConfigError, one line, where what is there cannot draft for the target."""
    assert isinstance(target, CausalLM), "resolve() refuses others"
    try:
        folder = resolve_model_path(settings.model, settings.revision, download_dir)
        network, told = _load(folder, target, settings, max_model_len)
    except ModelError as error:
        raise ConfigError(f"{NAME}: {error}") from None
    target.features = network.features
    logger.info("drafts: %s of %s, up to %d tokens", told, folder, settings.num_drafts)
    return ModelDrafter(network, settings)


def _load(folder: Path, target: CausalLM, settings: Speculation, max_model_len: int) -> tuple[Network, str]:
    """→ it, and what to call it."""
    checkpoint = open_checkpoint(folder)
    found = infer_method(folder, read_config(folder), checkpoint.headers)
    if settings.method and settings.method != found:
        raise ModelError(f"its method is {settings.method!r}, but {folder} is of the method {found!r}: leave it out")
    if found == "draft_model":
        return _load_model(folder, target, settings, max_model_len), "a model"
    head = EagleHead(
        read_head(folder, checkpoint.headers, found, target.config, settings.quantization), target, max_model_len
    )
    load_beside(head, checkpoint)
    head.token_ids = _token_ids(checkpoint, head)
    head.finish()
    return head, "the EAGLE-3 head" if head.head.is_third else "the EAGLE head"


def _load_model(folder: Path, target: CausalLM, settings: Speculation, max_model_len: int) -> DraftModel:
    config = ModelConfig.from_folder(folder, quantization=settings.quantization)
    check_vocabulary(folder, config, target.config)
    if config.foreign is not None or not config.causal or not config.generates:
        raise ModelError(
            f"{folder}: {config.architecture} does not draft: use a model of a family that vserve has itself"
        )
    place = target.place
    model = load_model(folder, config, dtype=place.dtype, device=place.device, max_model_len=max_model_len)
    assert isinstance(model, CausalLM)
    return DraftModel(model)


def _token_ids(checkpoint: Checkpoint, head: EagleHead) -> torch.Tensor | None:
    """Which tokens of the target the rows of the head's output matrix are; the file says how far on each is."""
    count, vocab = head.head.draft_vocab, head.target.config.vocab_size
    if not count or "d2t" not in checkpoint.headers:
        return None
    offsets = checkpoint.read("d2t")
    if tuple(offsets.shape) != (count,) or offsets.is_floating_point():
        raise ModelError(
            f"d2t is {offsets.dtype} {list(offsets.shape)}, config.json makes it integers [{count}]: use the head of "
            "this model"
        )
    token_ids = torch.arange(count) + offsets.long()
    if int(token_ids.min()) < 0 or int(token_ids.max()) >= vocab:
        raise ModelError(
            f"d2t names the token {int(token_ids.max())}, the model has tokens 0 to {vocab - 1}: use the head of this "
            "model"
        )
    return token_ids.to(head.place.device)

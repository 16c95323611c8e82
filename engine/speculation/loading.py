"""From what --speculative-config names to a drafter: found, told apart, held against the target, loaded."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..describe.divide import fault
from ..describe.model_config import ModelConfig, few_layers
from ..describe.model_source import resolve_model_path
from ..describe.reading import read_folder
from ..errors import ConfigError, ModelError
from ..files.checkpoint import Checkpoint, open_checkpoint
from ..files.model_file import read_config
from ..models.blocks import CausalLM
from ..models.model import Model
from ..options.speculation import NAME, Speculation
from ..parallel.group import ALONE
from ..quant.format import TensorInfo
from ..quant.weights import Placement
from ..weights.loader import load_beside, load_model, make_beside
from .draft_config import HeadConfig, check_draft_model, infer_method, read_head
from .model_drafter import ModelDrafter, Network
from .networks import DraftModel, EagleHead, MTPHead, check_has_layer

logger = logging.getLogger(__name__)
_CALLED = {
    "eagle": "the EAGLE head of %s", "eagle3": "the EAGLE-3 head of %s", "draft_model": "the model of %s",
    "mtp": "the layer for multi-token prediction of %s",
}  # fmt: skip


@dataclass(frozen=True)
class Draft:
    """A checkpoint that fits the target, as far as config.json and the headers say."""

    folder: Path
    settings: Speculation  # its method is one of settings.MODELS
    described: HeadConfig | ModelConfig | None  # of a head, of a model; None: the target's config.json has it all
    tensors: dict[str, TensorInfo]  # what is read of it


def find_draft(
    settings: Speculation, path: Path, target: ModelConfig, download_dir: str | None, num_ranks: int = 1,
    expert_parallel: bool = False,
) -> Draft:  # fmt: skip
    """path: of the target, which so many ranks share. Reads headers, no weights. Raises ConfigError, one line, for what
    cannot draft for it."""
    try:
        folder = resolve_model_path(settings.model, settings.revision, download_dir) if settings.model else path
        draft = _find(folder, settings, target)
        _check_divides(draft, 1 if settings.num_ranks == 1 else num_ranks, expert_parallel)
    except ModelError as error:
        raise ConfigError(f"{NAME}: {error}") from None
    return draft


def _check_divides(draft: Draft, num_ranks: int, expert_parallel: bool) -> None:
    """Raises ModelError. A layer behind the target's last is as that one is, which has been looked at."""
    if draft.described is None or num_ranks == 1:
        return
    config = draft.described
    if isinstance(config, HeadConfig):
        config = replace(config.config, vocab_size=config.draft_vocab or config.config.vocab_size)
    if why := fault(config, num_ranks, expert_parallel):
        raise ModelError(
            f'{draft.folder}: {why} cannot be divided over {num_ranks} ranks: say "draft_tensor_parallel_size": 1, '
            "and every rank has all of what drafts"
        )


def _find(folder: Path, settings: Speculation, target: ModelConfig) -> Draft:
    raw, headers = read_config(folder), open_checkpoint(folder).headers
    if settings.method == "mtp":
        check_has_layer(folder, headers, target)
        prefix = f"model.layers.{len(target.layers)}."
        return Draft(folder, settings, None, {name: info for name, info in headers.items() if name.startswith(prefix)})
    found = infer_method(folder, raw, headers)
    if settings.method and settings.method != found:
        raise ModelError(f"its method is {settings.method!r}, but {folder} is of the method {found!r}: leave it out")
    settings = replace(settings, method=found)
    if found != "draft_model":
        head = read_head(folder, headers, found, target, settings.quantization)
        return Draft(folder, settings, head, {name: headers[name] for name in headers.keys() - {"d2t", "t2d"}})
    config = replace(read_folder(folder, quantization=settings.quantization), vision=None)
    check_draft_model(folder, config, target)
    settings = replace(settings, max_model_len=settings.max_model_len or config.max_model_len)
    return Draft(folder, settings, config, headers)


def load_drafter(draft: Draft, target: Model, max_model_len: int, few: ModelConfig | None = None) -> ModelDrafter:
    """max_model_len: of the target. `few`: the target's config where it has but some of its layers, to see what is
    launched: so has a model that drafts, and weights are made up. Raises ConfigError where the weights do not fit."""
    assert isinstance(target, CausalLM), "resolve() refuses others"
    try:
        network = _load(draft, target, max_model_len) if few is None else _make_up(draft, target, max_model_len, few)
    except ModelError as error:
        raise ConfigError(f"{NAME}: {error}") from None
    target.features = network.features
    settings = draft.settings
    logger.info(f"drafts: {_CALLED[settings.method]}, up to %d tokens", draft.folder, settings.num_drafts)
    return ModelDrafter(network, settings, target.place.group)


def _place(draft: Draft, target: CausalLM) -> Placement:
    """The ranks that share the drafter."""
    return replace(target.place, group=ALONE, whole_experts=False) if draft.settings.num_ranks == 1 else target.place


def _make_up(draft: Draft, target: CausalLM, max_model_len: int, whole: ModelConfig) -> Network:
    described, place = draft.described, _place(draft, target)
    if isinstance(described, ModelConfig):
        model = load_model(
            draft.folder, few_layers(described), dtype=place.dtype, device=place.device, load_format="dummy",
            max_model_len=max_model_len, group=place.group, whole_experts=place.whole_experts,
        )  # fmt: skip
        assert isinstance(model, CausalLM)
        return DraftModel(model)
    if described is None:
        layer = MTPHead(whole, target, draft.tensors, place)
        make_beside(layer)
        return layer
    head = EagleHead(described, target, max_model_len, place)
    make_beside(head)
    if described.draft_vocab and described.draft_vocab != whole.vocab_size:
        head.token_ids = torch.arange(described.draft_vocab, device=place.device)
    return head


def _load(draft: Draft, target: CausalLM, max_model_len: int) -> Network:
    described, place = draft.described, _place(draft, target)
    if isinstance(described, ModelConfig):
        model = load_model(
            draft.folder, described, dtype=place.dtype, device=place.device, max_model_len=max_model_len,
            group=place.group, whole_experts=place.whole_experts,
        )  # fmt: skip
        assert isinstance(model, CausalLM)
        return DraftModel(model)
    checkpoint = open_checkpoint(draft.folder)
    if described is None:
        layer = MTPHead(target.config, target, checkpoint.headers, place)
        load_beside(layer, checkpoint)  # a layer of plain numbers beside codes is what many checkpoints have
        layer.finish()
        return layer
    head = EagleHead(described, target, max_model_len, place)
    if note := load_beside(head, checkpoint):
        logger.warning("%s: %s", draft.folder, note)
    head.token_ids = _token_ids(checkpoint, head)
    head.finish()
    return head


def _token_ids(checkpoint: Checkpoint, head: EagleHead) -> torch.Tensor | None:
    """Which tokens of the target the rows of the head's output matrix are; the file says how far on each is."""
    count, vocab = head.head.draft_vocab, head.target.config.vocab_size
    if not count or "d2t" not in checkpoint.headers:
        return None
    offsets = checkpoint.read("d2t")
    remedy = "use the head that was trained for this model"
    if tuple(offsets.shape) != (count,) or offsets.is_floating_point():
        raise ModelError(f"d2t is {offsets.dtype} {list(offsets.shape)}, it must be int64 [{count}]: {remedy}")
    token_ids = torch.arange(count) + offsets.long()
    wrong = token_ids[(token_ids < 0) | (token_ids >= vocab)]
    if len(wrong):
        raise ModelError(f"d2t names the token {int(wrong[0])}, the model has tokens 0 to {vocab - 1}: {remedy}")
    return token_ids.to(head.place.device)

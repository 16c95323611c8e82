"""A checkpoint's tensors under the names, and in the form, that transformers' modules have them."""

from __future__ import annotations

import copy
import dataclasses
import logging
import re
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..describe.model_config import ModelConfig
from ..errors import ModelError, one_line
from ..files.checkpoint import FLOAT_TYPES, Checkpoint, has_own_head
from ..quant.format import TensorInfo
from .build import build

logger = logging.getLogger(__name__)


def converted(checkpoint: Checkpoint, config: ModelConfig) -> tuple[Checkpoint, ModelConfig]:
    """The checkpoint of a foreign model with its converted names, and the config with what they tell of its head."""
    assert config.foreign is not None
    model = build(config.foreign, config.dtype, torch.device("meta"), 1)
    found = ConvertedCheckpoint(checkpoint, model)
    if found.coded_experts:
        config = dataclasses.replace(config, foreign=dataclasses.replace(config.foreign, coded_experts=True))
    head = model.get_output_embeddings()
    (path,) = (path for path, module in model.named_modules() if module is head)
    if not config.tie_word_embeddings and not any(name.startswith(f"{path}.") for name in found.headers):
        logger.warning("the checkpoint has no output matrix: embeddings are fine, but generated text means nothing")
        return found, dataclasses.replace(config, tie_word_embeddings=True)
    if config.tie_word_embeddings:
        table = model.get_input_embeddings()
        (tied,) = (path for path, module in model.named_modules() if module is table)
        if has_own_head(found, f"{tied}.weight", f"{path}.weight"):
            return found, dataclasses.replace(config, tie_word_embeddings=False)
    return found, config


@dataclass
class _Merge:
    """Tensors of the files that become one of the model, or several."""

    converter: WeightConverter
    target: str
    sources: dict[str, list[str]] = field(default_factory=dict)  # pattern → names, in their order

    def run(self, tensors: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        converter: Any = copy.deepcopy(self.converter)  # it takes tensors, though it says that it wants futures
        for pattern, names in self.sources.items():
            for name in names:
                converter.add_tensor(self.target, name, pattern, tensors[name])
        found: dict[str, Any] = converter.convert(self.target, model=model, config=model.config)
        return {name: t[0] if isinstance(t, list) else t for name, t in found.items()}


class ConvertedCheckpoint:
    """As Checkpoint. transformers renames tensors, and keeps a layer's experts in one: what it does on loading.

    Experts that are quantised stay one each, as "…experts.3.gate_proj", "up_proj" and "down_proj".
    """

    def __init__(self, checkpoint: Checkpoint, model: PreTrainedModel) -> None:
        """`model`: on meta. Raises ModelError for what cannot be converted."""
        self._checkpoint, self._model = checkpoint, model
        self._plain: dict[str, str] = {}  # name here → in the files
        self._merged: dict[str, _Merge] = {}
        self.headers: dict[str, TensorInfo] = {}
        transforms = get_model_conversion_mapping(model)
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        expected = model.state_dict()
        merges: dict[str, _Merge] = {}
        self.coded_experts = any(
            info.dtype not in FLOAT_TYPES and _EXPERT.fullmatch(name) for name, info in checkpoint.headers.items()
        )
        for name in sorted(checkpoint.headers, key=_natural):
            one = _EXPERT.fullmatch(name) if self.coded_experts else None
            source = name if one is None else f"{one[1]}.weight"
            target, pattern = rename_source_key(source, renamings, converters, model.base_model_prefix, expected)
            if one is not None and pattern is not None and target in expected:
                part = _part(by_pattern[pattern], pattern)
                self._plain[f"{target.rpartition('.')[0]}.{one[2]}.{part}_proj.{one[3]}"] = name
                continue
            if pattern is None or target not in expected:
                # a module's other tensors (scales of its codes) go where its weight goes
                where = target if target in expected or pattern is not None else self._beside(target, expected)
                self._plain[where if pattern is None else name] = name
                continue
            merge = merges.setdefault(target, _Merge(by_pattern[pattern], target))
            merge.sources.setdefault(pattern, []).append(name)
        for target, name in self._plain.items():
            self.headers[target] = checkpoint.headers[name]
        for merge in merges.values():
            self._describe(merge)

    def _beside(self, target: str, expected: dict[str, Any]) -> str:
        prefix = f"{self._model.base_model_prefix}."
        if target.startswith(prefix):
            return target
        module = target.rpartition(".")[0]
        return prefix + target if any(name.startswith(f"{prefix}{module}.") for name in expected) else target

    def _describe(self, merge: _Merge) -> None:
        infos = {name: self._checkpoint.headers[name] for names in merge.sources.values() for name in names}
        first = next(iter(infos.values()))
        for name, info in infos.items():
            if info.dtype not in FLOAT_TYPES:
                raise ModelError(
                    f"{name} is stored as {info.dtype}, and transformers' model joins it with others: of these, only "
                    "experts with a tensor each are read as codes, use the model in 16 bit"
                )
        empty = {
            name: torch.empty(info.shape, dtype=FLOAT_TYPES[info.dtype], device="meta") for name, info in infos.items()
        }
        try:
            found = merge.run(empty, self._model)
        except Exception as error:
            raise ModelError(
                f"{next(iter(infos))} and {len(infos) - 1} more cannot be joined to {merge.target} "
                f"({type(error).__name__}: {one_line(error)}): the weights do not fit config.json, download both again"
            ) from error
        for name, tensor in found.items():
            size = prod(tensor.shape) * FLOAT_TYPES[first.dtype].itemsize
            self.headers[name] = TensorInfo(first.file, first.dtype, tuple(tensor.shape), size)
            self._merged[name] = merge

    def read(self, name: str) -> Tensor:
        if (merge := self._merged.get(name)) is None:
            return self._checkpoint.read(self._plain[name])
        sources = (source for names in merge.sources.values() for source in names)
        return merge.run({source: self._checkpoint.read(source) for source in sources}, self._model)[name]


_EXPERT = re.compile(r"(.*\.experts\.(\d+)\.\w+)\.(\w+)")  # path of a matrix, its expert, and what of it


def _part(converter: WeightConverter, pattern: str) -> str:
    """Which matrix of an expert it is: of two that are joined, gate is the first."""
    patterns = list(converter.source_patterns)
    return ("gate", "up")[patterns.index(pattern)] if len(patterns) == 2 else "down"


def _natural(name: str) -> list[tuple[int, str]]:
    """Expert 10 comes after expert 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]

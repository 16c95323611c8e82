"""A GGUF file as a checkpoint: tensors under transformers' names, rows in transformers' order."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError, unreadable
from ..quant.format import TensorInfo
from ..quant.ggml_types import BLOCKS, CODE_BOOKS, FLOATS
from .gguf_config import read_config, read_generation_config
from .gguf_families import BARE, FAMILIES, GGUFFamily, shapes_of
from .gguf_file import GGUFTensor, read_gguf

if TYPE_CHECKING:  # what cannot be served is refused before torch is imported
    from torch import Tensor

logger = logging.getLogger(__name__)

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_PERMUTED = {"self_attn.q_proj": "num_attention_heads", "self_attn.k_proj": "num_key_value_heads"}
_CONFIGURED = (
    "rope_freqs.weight",
    "rope_factors_long.weight",
    "rope_factors_short.weight",
)  # in the configuration already
_AGAIN = "download it again"


class GGUFCheckpoint:
    """The weights of a GGUF file, split or not. Safe to read from several threads."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError naming file and tensor for what is broken or cannot be served."""
        self.file = read_gguf(path)

    @cached_property
    def config(self) -> dict[str, Any]:
        """As config.json has it."""
        return read_config(self.file)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """As generation_config.json has it."""
        return read_generation_config(self.file)

    @property
    def family(self) -> GGUFFamily:
        """Known once the configuration has been read."""
        return FAMILIES[self.file.metadata["general.architecture"]]

    @cached_property
    def tensors(self) -> dict[str, GGUFTensor]:
        """By transformers' names, all of which can be loaded. Raises ModelError for one that has no place in the model,
        another shape, or a type that is not served."""
        expected = shapes_of(self.config)
        found: dict[str, GGUFTensor] = {}
        for tensor in self.file.tensors.values():
            if tensor.name in _CONFIGURED or self._drafts(tensor.name):
                continue
            name = self._huggingface_name(tensor.name)
            if name is None:
                raise ModelError(
                    f"{tensor.file} has the tensor {tensor.name}, for which {self.config['architectures'][0]} has no "
                    "place: use another model"
                )
            shape = expected[tensor.name.removeprefix("blk.").lstrip("0123456789.")]
            if tensor.shape != shape and (1, *tensor.shape) != shape:
                raise ModelError(
                    f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}, the file's keys make it "
                    f"{list(shape)}: {_AGAIN}"
                )
            _check_type(tensor)
            found |= _by_expert(name, tensor) if ".experts." in name else {name: replace(tensor, shape=shape)}
        return found

    @cached_property
    def headers(self) -> dict[str, TensorInfo]:
        """What `read` returns: packed blocks under the name of their type ("Q4_K") as [N, bytes of a row]."""
        found = {}
        expanded: dict[str, int] = {}
        for name, tensor in self.tensors.items():
            kind, shape, size = tensor.type.name, tensor.shape, tensor.num_bytes
            if kind in BLOCKS:
                shape = (shape[0], tensor.type.row_bytes(shape[1])) if len(shape) == 2 else (size,)
            elif kind in CODE_BOOKS:
                expanded[kind] = expanded.get(kind, 0) + 1
                kind, size = "F32", 4 * prod(shape)
            found[name] = TensorInfo(tensor.file, kind, shape, size)
        if expanded:
            logger.warning(
                "%s of the tensors have a type that no kernel reads (%s): they are dequantised while they are loaded, "
                "and take the memory of an unquantised model; get the model in Q4_K for a smaller one",
                sum(expanded.values()), ", ".join(expanded),
            )  # fmt: skip
        return found

    def read(self, name: str) -> Tensor:
        """On the CPU: F32, F16 and BF16 tensors as they are, blocks as uint8 [N, bytes of a row], code books as fp32
        [N, K], dequantised. Raises ModelError."""
        import torch

        from ..quant.gguf_blocks import dequantized

        tensor = self.tensors[name]
        raw = torch.empty(tensor.num_bytes, dtype=torch.uint8)
        try:
            with tensor.file.open("rb", buffering=0) as file:
                file.seek(tensor.start)
                view, done = raw.numpy().data, 0
                while done < tensor.num_bytes and (got := file.readinto(view[done:])):
                    done += got
        except PermissionError:
            raise unreadable(tensor.file) from None
        except OSError as error:
            raise ModelError(f"cannot read {tensor.name} from {tensor.file} ({error}): {_AGAIN}") from None
        if done < tensor.num_bytes:
            raise ModelError(
                f"{tensor.file} is truncated: tensor {tensor.name} has {done} of {tensor.num_bytes} bytes: {_AGAIN}"
            )
        kind = tensor.type.name
        if kind in FLOATS:
            dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[kind]
            return self._ordered(name, raw.view(dtype).view(tensor.shape))
        packed = self._ordered(name, raw.view(*tensor.shape[:-1], -1))
        if kind not in CODE_BOOKS:
            return packed
        numbers = dequantized(packed, tensor.type)
        if not bool(torch.isfinite(numbers).all()):  # of others, `finite` looks at what they are decoded to
            raise ModelError(f"{tensor.file}: tensor {tensor.name} holds a scale that is no finite number: {_AGAIN}")
        return numbers

    def _ordered(self, name: str, rows: Tensor) -> Tensor:
        """Numbers as transformers has them.

        Of "llama" and its kin the converter permutes the rows of query and key: pairs of dimensions that rotate
        together are i and i + d/2 there, here 2i and 2i + 1: within each head [2, d/2] was transposed. A packed row
        moves as a whole. To the norms of Gemma it adds the 1 that is left out in a folder.
        """
        layer = _without_layer(name).rpartition(".")[0]
        if self.family.raised_norms and layer.endswith("norm"):
            return rows - 1
        if layer not in _PERMUTED or not self.family.permuted:
            return rows
        heads = self.config[_PERMUTED[layer]]
        return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()

    def _drafts(self, name: str) -> bool:
        """Whether it is of a layer behind the last one, which drafts."""
        layer = name.partition(".")[2].partition(".")[0] if self.config.get("num_nextn_predict_layers") else ""
        return layer.isdigit() and int(layer) >= self.config["num_hidden_layers"]

    def _huggingface_name(self, name: str) -> str | None:
        """None for what the model does not have."""
        if (match := _NAME.fullmatch(name)) is None:
            return None
        layer, part, kind = match.groups()
        path = (_OUTSIDE if layer is None else self.family.names).get(part)
        if path is None or (".experts" in path and "num_experts" not in self.config):
            return None
        name = path if path.endswith(BARE) else f"{path}.{kind}"
        return name if layer is None else f"model.layers.{int(layer)}.{name}"


def _by_expert(name: str, tensor: GGUFTensor) -> dict[str, GGUFTensor]:
    """A tensor of all experts, as one each."""
    count, *shape = tensor.shape
    size = tensor.num_bytes // count
    layer, _, rest = name.partition(".experts.")
    return {
        f"{layer}.experts.{expert}.{rest}": replace(
            tensor, shape=tuple(shape), start=tensor.start + expert * size, num_bytes=size
        )
        for expert in range(count)
    }


def _check_type(tensor: GGUFTensor) -> None:
    kind, where, others = tensor.type.name, f"{tensor.file}: tensor {tensor.name}", ", ".join((*FLOATS, *BLOCKS))
    if kind not in (*FLOATS, *BLOCKS, *CODE_BOOKS):
        raise ModelError(f"{where} has type {kind}, which is not served: get the model in one of {others}")
    if kind in CODE_BOOKS and find_spec("gguf") is None:
        raise ModelError(
            f"{where} has type {kind}, which the package gguf decodes: pip install gguf, or get the model in one of "
            f"{others}"
        )


def _without_layer(name: str) -> str:
    return re.sub(r"^model\.layers\.\d+\.", "", name)

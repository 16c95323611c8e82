"""A GGUF file as a checkpoint: tensors under transformers' names, rows in transformers' order."""

from __future__ import annotations

import logging
import re
from functools import cached_property
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .ggml_types import BLOCKS, CODE_BOOKS, FLOATS
from .gguf_config import read_config, read_generation_config
from .gguf_file import GGUFTensor, read_gguf
from .model_file import ModelError, unreadable

if TYPE_CHECKING:  # what cannot be served is refused before torch is imported
    from torch import Tensor

    from .checkpoint import TensorInfo

logger = logging.getLogger(__name__)

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INSIDE = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_PERMUTED = ("self_attn.q_proj", "self_attn.k_proj")
_CONFIGURED = ("rope_freqs.weight",)  # in the configuration already
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

    @cached_property
    def tensors(self) -> dict[str, GGUFTensor]:
        """By transformers' names, all of which can be loaded. Raises ModelError for one that has no place in the model,
        another shape, or a type that is not served."""
        expected = self._shapes()
        found = {}
        for tensor in self.file.tensors.values():
            if tensor.name in _CONFIGURED:
                continue
            name = _huggingface_name(tensor.name)
            if name is None or (layer := _without_layer(name)) not in expected:
                raise ModelError(
                    f"{tensor.file} has the tensor {tensor.name}, for which {self.config['architectures'][0]} has no "
                    "place: use another model"
                )
            if tensor.shape != expected[layer]:
                raise ModelError(
                    f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}, the file's keys make it "
                    f"{list(expected[layer])}: {_AGAIN}"
                )
            _check_type(tensor)
            found[name] = tensor
        return found

    @cached_property
    def headers(self) -> dict[str, TensorInfo]:
        """What `read` returns: packed blocks under the name of their type ("Q4_K") as [N, bytes of a row]."""
        from .checkpoint import TensorInfo

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

        from .quant.gguf_blocks import dequantized

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
        return dequantized(packed, tensor.type) if kind in CODE_BOOKS else packed

    def _ordered(self, name: str, rows: Tensor) -> Tensor:
        """Rows of query and key, which llama.cpp's converter permutes for "llama", as transformers has them.

        There pairs of dimensions that rotate together are i and i + d/2, here 2i and 2i + 1: within each head [2, d/2]
        was transposed. A packed row moves as a whole.
        """
        layer = _without_layer(name).rpartition(".")[0]
        if layer not in _PERMUTED or self.file.metadata["general.architecture"] != "llama":
            return rows
        heads = self.config["num_attention_heads" if layer == _PERMUTED[0] else "num_key_value_heads"]
        return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Name without the layer's number → shape [out, in]."""
        config = self.config
        hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
        head_dim = config["head_dim"]
        query, key = head_dim * config["num_attention_heads"], head_dim * config["num_key_value_heads"]
        matrices = {
            "self_attn.q_proj": (query, hidden),
            "self_attn.k_proj": (key, hidden),
            "self_attn.v_proj": (key, hidden),
            "self_attn.o_proj": (hidden, query),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (vocabulary, hidden),
            "lm_head.weight": (vocabulary, hidden),
            "model.norm.weight": (hidden,),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_norm.weight": (head_dim,),
            "self_attn.k_norm.weight": (head_dim,),
        }
        for path, shape in matrices.items():
            shapes |= {f"{path}.weight": shape, f"{path}.bias": shape[:1]}
        return shapes


def _check_type(tensor: GGUFTensor) -> None:
    kind, where, others = tensor.type.name, f"{tensor.file}: tensor {tensor.name}", ", ".join((*FLOATS, *BLOCKS))
    if kind not in (*FLOATS, *BLOCKS, *CODE_BOOKS):
        raise ModelError(f"{where} has type {kind}, which is not served: get the model in one of {others}")
    if kind in CODE_BOOKS and find_spec("gguf") is None:
        raise ModelError(
            f"{where} has type {kind}, which the package gguf decodes: pip install gguf, or get the model in one of "
            f"{others}"
        )


def _huggingface_name(name: str) -> str | None:
    """None for what no model here has."""
    if (match := _NAME.fullmatch(name)) is None:
        return None
    layer, part, kind = match.groups()
    path = (_OUTSIDE if layer is None else _INSIDE).get(part)
    if path is None:
        return None
    return f"{path}.{kind}" if layer is None else f"model.layers.{int(layer)}.{path}.{kind}"


def _without_layer(name: str) -> str:
    return re.sub(r"^model\.layers\.\d+\.", "", name)

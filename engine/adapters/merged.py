"""A checkpoint with one adapter merged into it, tensor by tensor as it is read: served as if trained whole."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checkpoint import FLOAT_TYPES, Checkpoint, TensorInfo
from ..model_config import ModelConfig
from .adapter import Adapter, Pair
from .peft_config import AdapterError


class MergedCheckpoint:
    """A Checkpoint: W + scale · B A, of DoRA (Liu et al., arXiv 2402.09353) with rows of the lengths that it has
    learnt, and in the place of modules that were trained whole those. Sums are fp32, rounded once."""

    def __init__(self, base: Checkpoint, adapter: Adapter, config: ModelConfig) -> None:
        """Raises AdapterError where the base has no such weights, or not as floats."""
        self._base, self._adapter = base, adapter
        self._table = f"{config.named('model.embed_tokens')}.weight"
        self._head = f"{config.named('lm_head')}.weight"
        self.headers: dict[str, TensorInfo] = dict(base.headers)
        changed = {*adapter.whole, *(f"{module}.weight" for module in adapter.pairs)}
        # One matrix for the embedding and the head becomes two as soon as one of them changes.
        self.unties = config.tie_word_embeddings and any(
            name.endswith(("embed_tokens.weight", "lm_head.weight")) for name in changed
        )
        if self.unties and self._table in self.headers:
            self.headers.setdefault(self._head, self.headers[self._table])
        self._pairs = {self._find(f"{module}.weight"): pair for module, pair in adapter.pairs.items()}
        self._whole = {self._find(name): tensor for name, tensor in adapter.whole.items()}
        for name, pair in self._pairs.items():
            self._check(name, pair)
        for name, tensor in self._whole.items():
            found, wanted = adapter.files.headers[tensor], self.headers[name]
            if found.shape != wanted.shape:
                raise AdapterError(
                    f"{adapter.folder} has {name} of shape {list(found.shape)}, and the base of {list(wanted.shape)}: "
                    "it is of another base, or has more tokens: merge it with PEFT"
                )
            self.headers[name] = found

    def read(self, name: str) -> Tensor:
        if (tensor := self._whole.get(name)) is not None:
            return self._adapter.read(tensor)
        from_table = name == self._head and name not in self._base.headers
        stored = self._base.read(self._table if from_table else name)
        pair = self._pairs.get(name)
        return stored if pair is None else self._merged(stored, pair)

    def _merged(self, stored: Tensor, pair: Pair) -> Tensor:
        a, b = (self._adapter.read(matrix).float() for matrix in (pair.a, pair.b))
        delta = pair.scale * (b @ a)
        weight = stored.float() + (delta.T if pair.is_embedding else delta)
        if pair.magnitude:
            length = torch.linalg.vector_norm(weight, dim=1)
            weight *= (self._adapter.read(pair.magnitude).float() / length)[:, None]
        return weight.to(stored.dtype)

    def _find(self, name: str) -> str:
        """The base's name of a parameter, with or without a head around it."""
        for candidate in (name, f"model.{name}", name.removeprefix("model.")):
            if candidate in self.headers:
                return candidate
        raise AdapterError(
            f"{self._adapter.folder} changes {name}, which the base model does not have as numbers: it is of another "
            "base, or this one is quantized (serve it beside others then, with --enable-lora)"
        )

    def _check(self, name: str, pair: Pair) -> None:
        info, headers, folder = self.headers[name], self._adapter.files.headers, self._adapter.folder
        if info.dtype not in FLOAT_TYPES:
            raise AdapterError(f"{folder} changes {name}, which is stored as {info.dtype}: use --enable-lora")
        if pair.is_embedding and pair.magnitude:
            raise AdapterError(f"{folder} is DoRA of an embedding, which is not merged here: merge it with PEFT")
        self._adapter.check_copy(pair.module, info.shape)
        made = headers[pair.b].shape[0], headers[pair.a].shape[1]
        if (made[::-1] if pair.is_embedding else made) != info.shape:
            raise AdapterError(
                f"{folder} has {list(made)} for {name}, which is {list(info.shape)}: it is of another base"
            )

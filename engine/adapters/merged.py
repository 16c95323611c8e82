"""A checkpoint with one adapter merged into it, tensor by tensor as it is read: served as if trained whole."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..describe.model_config import ModelConfig
from ..files.checkpoint import FLOAT_TYPES, Checkpoint
from ..quant.format import TensorInfo
from .adapter import Adapter, Pair, names_in_base
from .experts import ExpertsPlaces, Place, Term
from .peft_files import AdapterError


class MergedCheckpoint:
    """A Checkpoint: W + scale · B A, of DoRA (Liu et al., arXiv 2402.09353) with rows of the lengths that it has
    learnt, and in the place of modules that were trained whole those. Sums are fp32, rounded once."""

    def __init__(self, base: Checkpoint, adapter: Adapter, config: ModelConfig) -> None:
        """Raises AdapterError where the base has no such weights, or not as floats."""
        self._base, self._adapter = base, adapter
        self._table = f"{config.named('model.embed_tokens')}.weight"
        self._head = f"{config.named('lm_head')}.weight"
        self.headers: dict[str, TensorInfo] = dict(base.headers)
        changed = {*adapter.whole, *(f"{path}.weight" for path in adapter.pairs)}
        # One matrix for the embedding and the head becomes two as soon as one of them changes.
        self.unties = config.tie_word_embeddings and any(
            name.endswith(("embed_tokens.weight", "lm_head.weight")) for name in changed
        )
        if self.unties and self._table in self.headers:
            self.headers.setdefault(self._head, self.headers[self._table])
        self._experts = ExpertsPlaces(config, self.headers)
        self._terms: dict[str, list[Term]] = {}  # by tensor of the base
        for pair in adapter.pairs.values():
            for term in self._terms_of(pair):
                self._terms.setdefault(term.place.tensor, []).append(term)
        self._whole = {self._find(name): tensor for name, tensor in adapter.whole.items()}
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
        terms = self._terms.get(name)
        if terms is None:
            return stored
        merged, read = stored.clone(), functools.cache(self._adapter.read)
        for term in terms:
            matrix = term.place.of(merged)
            matrix.copy_(self._merged(matrix.float(), term, read))
        return merged

    def _merged(self, weight: Tensor, term: Term, read: Callable[[str], Tensor]) -> Tensor:
        pair = term.pair
        weight = weight + term.delta(read(pair.a), read(pair.b))
        if pair.magnitude:
            length = torch.linalg.vector_norm(weight, dim=1)
            weight *= (read(pair.magnitude).float() / length)[:, None]
        return weight

    def _terms_of(self, pair: Pair) -> list[Term]:
        """Raises AdapterError."""
        if pair.parameter:
            if pair.magnitude:
                raise AdapterError(f"{self._adapter.folder} is DoRA of {pair.path}, which PEFT does not know")
            terms = self._experts.terms(self._adapter, pair)
        else:
            name = f"{pair.module}.weight"
            place = self._experts.find(name) or Place(self._find(name))
            self._check(place, pair)
            terms = [Term(pair, place, flipped=pair.is_embedding)]
        for tensor in {term.place.tensor for term in terms}:
            if (dtype := self.headers[tensor].dtype) not in FLOAT_TYPES:
                raise AdapterError(
                    f"{self._adapter.folder} changes {tensor}, which is stored as {dtype}: {_instead(tensor)}"
                )
        return terms

    def _find(self, name: str) -> str:
        """The base's name of a parameter."""
        for candidate in names_in_base(name):
            if candidate in self.headers:
                return candidate
        raise AdapterError(
            f"{self._adapter.folder} changes {name}, which the base model does not have as numbers: it is of another "
            f"base, or this one is quantized ({_instead(name)})"
        )

    def _check(self, place: Place, pair: Pair) -> None:
        info, headers, folder = self.headers[place.tensor], self._adapter.files.headers, self._adapter.folder
        if pair.is_embedding and pair.magnitude:
            raise AdapterError(f"{folder} is DoRA of an embedding, which is not merged here: merge it with PEFT")
        shape = tuple(place.of(torch.empty(info.shape, device="meta")).shape)
        self._adapter.check_copy(pair.module, shape)
        made = headers[pair.b].shape[0], headers[pair.a].shape[1]
        if (made[::-1] if pair.is_embedding else made) != shape:
            raise AdapterError(
                f"{folder} has {list(made)} for {pair.module}, which is {list(shape)}: it is of another base"
            )


def _instead(name: str) -> str:
    """What to do where a base's tensor is no numbers to add to."""
    if ".experts." in name:
        return "merge into the model that it was made of, with --quantization if need be"
    return "serve it beside others, with --enable-lora"

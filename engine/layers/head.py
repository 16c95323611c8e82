"""Products behind the pooled hidden state, in fp32 whatever the model's type: classifiers, rewards, Dense modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ModelError
from ..families.head_spec import HeadSpec, ProjectionSpec
from ..files.checkpoint import open_checkpoint
from ..quant.format import DUMMY_STD, FLOATS, Format, Stored
from ..quant.weights import Placement, WeightMap, frozen
from .embedding import Embedding
from .norm import LayerNorm

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh, "relu": torch.relu, "gelu": functional.gelu, "sigmoid": torch.sigmoid, "silu": functional.silu,
}  # fmt: skip


class Projection(nn.Module):
    """act(x Wᵀ + b), a WeightHolder whose tensors are small enough to be kept in fp32."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, spec: ProjectionSpec, device: torch.device) -> None:
        super().__init__()
        self.spec, self.device = spec, device

    def choose(self, formats: Mapping[str, Format]) -> None:
        pass  # floats, or `expected` refuses them

    def expected(self, part: str) -> dict[str, Stored]:
        spec = self.spec
        found = {"weight": Stored((spec.rows, spec.columns), FLOATS)}
        return found | {"bias": Stored((spec.rows,), FLOATS)} if spec.bias else found

    def create(self) -> None:
        spec = self.spec
        self.weight = frozen(torch.empty(spec.rows, spec.columns, dtype=torch.float32, device=self.device))
        self.bias = frozen(torch.empty(spec.rows, dtype=torch.float32, device=self.device)) if spec.bias else None

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        self.weight.copy_(tensors["weight"])
        if self.bias is not None:
            self.bias.copy_(tensors["bias"])

    def finish(self) -> None:
        pass

    def randomize(self, generator: torch.Generator) -> None:
        for tensor in self.parameters():
            tensor.normal_(0.0, DUMMY_STD, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        """fp32 [N, columns] → fp32 [N, rows]"""
        y = functional.linear(x, self.weight, self.bias)
        activation = _ACTIVATIONS.get(self.spec.activation)
        return y if activation is None else activation(y)


class TokenRows(Projection):
    """Rows of the output matrix: a model that answers with one of two tokens is a classifier. The probability of the
    second against the first is the sigmoid of their logits' difference, hence of one row."""

    def __init__(
        self, spec: ProjectionSpec, token_ids: tuple[int, ...], size: tuple[int, int], device: torch.device,
        tied: Embedding | None,
    ) -> None:  # fmt: skip
        """size: of the output matrix, (vocab, hidden); tied: the embedding whose table it is."""
        super().__init__(spec, device)
        self._token_ids, self._size = token_ids, size
        self._tied = (lambda: tied.weight) if tied is not None else None  # not a module of this one

    def expected(self, part: str) -> dict[str, Stored]:
        return {"weight": Stored(self._size, FLOATS)} if self._tied is None else {}

    def load(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        if self._tied is None:
            self._take(tensors["weight"])

    def finish(self) -> None:
        if self._tied is not None:
            self._take(self._tied())

    def _take(self, table: Tensor) -> None:
        ids = self._token_ids
        rows = table[torch.tensor(ids, device=table.device)].float()
        self.weight.copy_(rows if self.spec.rows == len(ids) else rows[1:] - rows[:1])


class Head(nn.Module):
    """The products of a HeadSpec, one after the other."""

    def __init__(self, spec: HeadSpec, vocab_size: int, place: Placement, tied: Embedding | None) -> None:
        """Raises ModelError for a token that the model does not have."""
        super().__init__()
        self.spec = spec
        if any(token >= vocab_size for token in spec.token_ids):
            raise ModelError(
                f"classifier_from_token has the token id {max(spec.token_ids)}, and the vocabulary ends at "
                f"{vocab_size - 1}: the tokenizer is not the model's, download both again"
            )
        layers: list[Projection] = []
        for one in spec.layers:
            if spec.token_ids:
                layers.append(TokenRows(one, spec.token_ids, (vocab_size, one.columns), place.device, tied))
            else:
                layers.append(Projection(one, place.device))
        self.layers = nn.ModuleList(layers)
        place = Placement(torch.float32, place.device)
        self.norms = nn.ModuleDict(  # by the index of the layer that they follow
            {
                str(i): LayerNorm((one.rows,), one.norm_eps, place, bias=one.norm_bias)
                for i, one in enumerate(spec.layers) if one.norm
            }
        )  # fmt: skip

    @property
    def projections(self) -> list[Projection]:
        return [layer for layer in self.layers if isinstance(layer, Projection)]

    def weight_map(self) -> WeightMap:
        """Of what the checkpoint has; what lies in folders of its own, `load_modules` reads."""
        part = "out" if self.spec.token_ids else ""
        found: WeightMap = {layer.spec.path: (layer, part) for layer in self.projections if layer.spec.folder is None}
        for index, norm in self.norms.items():
            assert isinstance(norm, LayerNorm)
            found[self.spec.layers[int(index)].norm] = (norm, "")
        return found

    def load_modules(self, generator: torch.Generator | None) -> None:
        """Dense modules, each of its folder; `generator`: or random ones. Raises ModelError."""
        for layer in self.projections:
            if layer.spec.folder is None:
                continue
            layer.create()
            if generator is not None:
                layer.randomize(generator)
                continue
            checkpoint = open_checkpoint(layer.spec.folder)
            tensors = {}
            for suffix, stored in layer.expected("").items():
                name = f"{layer.spec.path}.{suffix}"
                info = checkpoint.headers.get(name)
                if info is None or info.shape != stored.shape or info.dtype not in stored.dtypes:
                    found = "nothing" if info is None else f"{info.dtype} {list(info.shape)}"
                    raise ModelError(
                        f"{layer.spec.folder} has {found} as {name}, its config.json makes it floats "
                        f"{list(stored.shape)}: download the folder again"
                    )
                tensors[suffix] = checkpoint.read(name)
            layer.load("", tensors)

    def forward(self, x: Tensor) -> Tensor:
        """fp32 [N, hidden] → fp32 [N, width]"""
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if (norm := self.norms._modules.get(str(index))) is not None:
                norm.in_place(x)  # type: ignore[operator]
        return x

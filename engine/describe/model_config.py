"""What a checkpoint's config.json says of its model, with transformers' defaults for what it leaves out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..families.encoders import EncoderSpec
from ..families.family import Names
from ..families.head_spec import HeadSpec
from ..families.layer_spec import FrameSpec, LayerSpec
from .choice import Foreign

if TYPE_CHECKING:
    import torch  # at run time where a dtype is made: who only looks at the file should not wait for it

    from ..quant.format import Scheme


@dataclass(frozen=True)
class ModelConfig:
    """A transformer as its config.json describes it: what its layers are, and what is around them."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: torch.dtype  # of the checkpoint
    eos_token_ids: tuple[int, ...]
    frame: FrameSpec = field(default_factory=FrameSpec)
    names: Names = ()  # of the checkpoint, where they are not llama's
    other_names: tuple[Names, ...] = ()  # that checkpoints of the same architecture have, too
    ignored: tuple[str, ...] = ()  # beginnings of names in the checkpoint that nothing needs
    longest: int = 0  # tokens that a context may have at most, 0: as many as the positions allow
    quantization: Scheme | None = None  # how the checkpoint stores what it has quantised
    head: HeadSpec | None = None  # what is behind the pooled hidden state
    generates: bool = True  # it has an output matrix
    foreign: Foreign | None = None  # a model that transformers' code computes; None: one of vserve's own families
    causal: bool = True  # a token sees those before it alone; else the whole text: nothing is cached or generated
    encoder: EncoderSpec | None = None  # a model of BERT's shape; None: a decoder

    @property
    def max_model_len(self) -> int:
        """Tokens the model can handle by its own word: linear and dynamic RoPE stretch max_position_embeddings, yarn
        stretches the original length; llama3 and longrope configs already name the stretched one. Of layers that are
        stretched in several ways, the least counts."""
        ropes = {layer.attention.rope for layer in self.layers}
        stretched = [int(rope.original_length * rope.factor) for rope in ropes if rope is not None and rope.stretches]
        length = min(stretched, default=self.max_position_embeddings)
        return min(length, self.longest or length)

    def named(self, path: str) -> str:
        """A path, in llama's names, as the checkpoint names it."""
        for ours, theirs in self.names:
            path = path.replace(ours, theirs)
        return path


def few_layers(config: ModelConfig) -> ModelConfig:
    """The same with a layer of each kind, and the last one again, which does less than others."""
    return replace(config, layers=(*dict.fromkeys(config.layers), config.layers[-1]))

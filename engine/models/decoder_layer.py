"""A layer of a decoder: what stands around mixer and MLP, as its spec says."""

from __future__ import annotations

from torch import Tensor, nn

from ..describe.model_config import ModelConfig
from ..families.layer_spec import (
    ConvSpec,
    DeltaSpec,
    LatentAttentionSpec,
    LayerSpec,
    MLPSpec,
    MoESpec,
    PairSpec,
    ScanSpec,
)
from ..families.rope_config import RopeConfig
from ..layers.attention import Attention, AttentionBatch
from ..layers.norm import NoNorm, Norm, make_norm
from ..layers.rope import RotaryEmbedding
from ..layers.state import StateLayer
from ..parallel.group import ALONE, Group
from ..quant.weights import Placement, WeightMap, keep_at_hand
from .attention_block import AttentionBlock
from .conv_block import ConvBlock
from .delta_block import DeltaBlock
from .latent_attention import LatentAttentionBlock
from .mixture_apart import ApartMixture
from .mlp import MLP, Mixture
from .scan_block import PairBlock, ScanBlock
from .state_block import StateBlock
from .token_vectors import LayerEnd

Mixer = AttentionBlock | LatentAttentionBlock | StateBlock | PairBlock
_AFTER = ("post", "both")  # places of norms, where what is added to the residual stream is normed first


Rotations = dict[tuple[RopeConfig | None, int], RotaryEmbedding]  # by how, and how many elements of a head


def make_mixer(
    spec: LayerSpec, config: ModelConfig, layer: int, rotations: Rotations, place: Placement
) -> Mixer | None:
    mixer = spec.mixer
    if mixer is None:
        return None
    if isinstance(mixer, DeltaSpec):
        return DeltaBlock(mixer, config, place)
    if isinstance(mixer, ConvSpec):
        return ConvBlock(mixer, config, place)
    if isinstance(mixer, ScanSpec):
        return ScanBlock(mixer, config, place)
    assert spec.attention is not None
    rotary = rotations[spec.attention.rope, spec.attention.rotary_dim]
    if isinstance(mixer, PairSpec):
        return PairBlock(mixer, config, layer, rotary, place)
    if isinstance(mixer, LatentAttentionSpec):
        return LatentAttentionBlock(mixer, config, layer, rotary, place)
    return AttentionBlock(mixer, config, layer, rotary, place)


def make_mlp(
    spec: MLPSpec | MoESpec | None, config: ModelConfig, place: Placement
) -> MLP | Mixture | ApartMixture | None:
    if spec is None:
        return None
    if isinstance(spec, MLPSpec):
        return MLP(spec, config.hidden_size, place)
    return ApartMixture(spec, config, place) if spec.apart else Mixture(spec, config.hidden_size, place)


class DecoderLayer(nn.Module):
    """Mixer, then MLP, each added to the residual stream, which travels beside the activations: so each addition
    is fused with the norm that follows it, or with the product before where no norm comes between."""

    def __init__(
        self, spec: LayerSpec, config: ModelConfig, layer: int, rotations: Rotations, place: Placement
    ) -> None:
        super().__init__()
        before = config.layers[layer - 1].residual_scale if layer else 1.0  # of what comes in to be added

        def norm(wanted: bool, scale: float, group: Group) -> Norm | NoNorm:
            return layer_norm(config, place, scale, group) if wanted else NoNorm(scale, group)

        scale, parallel = spec.residual_scale, spec.norms == "parallel"
        first, after = spec.norms != "post", spec.norms in _AFTER
        alone = None in (spec.mixer, spec.mlp)  # a mixer without an MLP, or the reverse: one norm, of the layer before
        assert not alone or (spec.norms == "pre" and scale == 1.0), "no model has it so"
        # A product may add to the residual stream itself, where it is no summand of this rank.
        self.adds_to_residual = not after and scale == 1.0 and place.tp_size == 1
        self.index, self.group = layer, place.group if after else ALONE
        self.mixer_norm = norm(first, before, summands(config, layer - 1, place))
        self.mixer = make_mixer(spec, config, layer, rotations, place)
        self.mixer_after = layer_norm(config, place) if after else None
        self.mlp_norm = None if parallel or alone else norm(first, scale, summands(config, layer, place))
        self.mlp = make_mlp(spec.mlp, config, place)
        self.mlp_after = layer_norm(config, place) if after else None
        self.apart = isinstance(self.mlp, ApartMixture)  # which reads the residual stream, and sums over the ranks
        self.mlp_group = ALONE if self.apart else self.group
        self.end = LayerEnd(spec, config, place) if spec.token_vector or spec.scaled else None
        self.token_vector = bool(spec.token_vector)
        # A router norms what it reads where nothing is left to be added before.
        mixer = self.mixer
        if mixer is not None and not isinstance(mixer, PairBlock):
            mixer.output.adds_few_rows = isinstance(self.mlp, Mixture)
        # The modules that alone, or first, read what each norm makes.
        of_mixer = mixer.qkv if isinstance(mixer, AttentionBlock) and mixer.gate is None and not parallel else None
        dense = self.mlp.shared if isinstance(self.mlp, ApartMixture) else self.mlp
        of_mlp = None if dense is None else dense.gate_up if isinstance(dense, MLP) else dense.router
        self._readers = (of_mlp if mixer is None else of_mixer, of_mlp)
        keep_at_hand(self)

    @property
    def attention(self) -> Attention | None:
        return None if self.mixer is None or isinstance(self.mixer, StateBlock) else self.mixer.attention

    @property
    def state(self) -> StateLayer | None:
        return self.mixer.state if isinstance(self.mixer, StateBlock | PairBlock) else None

    def weight_map(self, prefix: str) -> WeightMap:
        norms = {
            "input_layernorm": self.mixer_norm,
            "post_self_attn_layernorm": self.mixer_after,
            "post_attention_layernorm": self.mlp_norm,
            "post_mlp_layernorm": self.mlp_after,
        }
        return {
            **{f"{prefix}.{name}": (norm, "") for name, norm in norms.items() if isinstance(norm, Norm)},
            **({} if self.mixer is None else self.mixer.weight_map(f"{prefix}.{self.mixer.name}")),
            **({} if self.mlp is None else self.mlp.weight_map(f"{prefix}.mlp")),
            **({} if self.end is None else self.end.weight_map(prefix)),
        }

    def forward(
        self, x: Tensor | None, residual: Tensor, positions: Tensor, batch: AttentionBatch, wanted: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """x: what is still to be added to residual [T, hidden], which is updated in place; → the same of the next.
        Where ranks share the model, x is a summand of what is added, until a norm comes.

        `wanted` int32 [N], last tokens of requests: only they go on once the cache, or the state, has all tokens.
        """
        of_mixer, of_mlp = self._readers
        if self.mixer is None and wanted is not None:
            x, residual = None if x is None else x.index_select(0, wanted), residual.index_select(0, wanted)
        normed, residual = self.mixer_norm(x, residual, of_mixer)
        if self.mixer is None:
            assert self.mlp is not None
            return self.mlp(normed, residual if self.adds_to_residual else None), residual
        x = self.mixer(normed, residual if self.adds_to_residual else None, positions, batch, wanted)
        if self.mixer_after is not None:
            x = self.group.all_reduce(x)
            self.mixer_after.in_place(x)
        if wanted is not None:
            residual = residual.index_select(0, wanted)
        if self.mlp is None:
            return x, residual
        if self.mlp_norm is None:  # of what the mixer has seen, too
            normed = normed if wanted is None else normed.index_select(0, wanted)
        else:
            normed, residual = self.mlp_norm(x, residual, of_mlp)
            x = None
        y = self.mlp(normed, residual if self.adds_to_residual or self.apart else None)
        if self.mlp_after is not None:
            y = self.mlp_group.all_reduce(y)
            self.mlp_after.in_place(y)
        if self.end is not None:
            residual.add_(y)
            vectors = batch.token_vectors
            vector = vectors[:, self.index] if self.token_vector and vectors is not None else None
            self.end(residual, vector if wanted is None or vector is None else vector.index_select(0, wanted))
            return None, residual
        return (x if y is None else y if x is None else x + y), residual


def layer_norm(config: ModelConfig, place: Placement, scale: float = 1.0, group: Group = ALONE) -> Norm:
    return make_norm(config.frame.norm, (config.hidden_size,), config.norm_eps, place, scale=scale, group=group)


def summands(config: ModelConfig, layer: int, place: Placement) -> Group:
    """The ranks that each have a summand of what this layer's mixer or MLP adds to the residual stream, where it
    has not been normed, and therefore summed, before."""
    return ALONE if config.layers[layer].norms in _AFTER else place.group

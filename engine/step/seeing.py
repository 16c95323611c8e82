"""What a step with pictures has beside others: features that its tower makes or has made before, where they go, and
positions that have three axes."""

from __future__ import annotations

import logging
from itertools import accumulate
from math import isqrt

import numpy as np
import torch
from torch import Tensor

from ..cache.batch import Batch
from ..cache.rows import Upload
from ..families.vision_spec import VisionSpec
from ..layers.picture_tokens import PictureTokens
from ..layers.rope import RotaryEmbedding
from ..link.media import MediaItem
from ..link.plan import Encode, StepPlan
from ..models.model import Model
from ..schedule.encoder_cache import STEP_PATCHES
from ..vision.positions import pair_axes
from ..vision.tower import Tower

logger = logging.getLogger(__name__)

NOT_ENCODED = "a picture of this request could not be encoded"


class Seeing:
    """The encoder cache on the device: features by entry, which plans make and forget. One that could not be made, or
    that a failed step has not made, is NaN: whoever reads it ends with an error, and nobody else."""

    def __init__(self, spec: VisionSpec, tower: Tower | None, rotary: RotaryEmbedding, device: torch.device) -> None:
        """tower: None in stages that have no embedding. rotary: of all layers, where positions have three axes."""
        self.spec, self.tower, self.rotary, self.device = spec, tower, rotary, device
        self.features: dict[int, Tensor] = {}  # [tokens, hidden · (1 + layers of deepstack)]
        self.unseen: dict[int, str] = {}  # entries that there are no features of → why
        self.num_tokens = self.largest = 0
        self.axes = None
        if spec.mrope is not None:
            axes = pair_axes(spec.mrope, spec.interleaved, rotary.head_dim // 2)
            self.axes = torch.tensor(axes, dtype=torch.int64, device=device)

    @classmethod
    def of(cls, model: Model, device: torch.device) -> Seeing | None:
        """None: the model sees nothing."""
        spec = model.config.vision
        if spec is None:
            return None
        (rotary, *others) = {layer.rotary for layer in model.attention_layers()}
        assert spec.mrope is None or not others, "one table is composed for all layers"
        return cls(spec, getattr(model, "tower", None), rotary, device)

    def begin(self, plan: StepPlan) -> bool:
        """Before the step runs: forgets, then makes features. Returns whether it has tokens of pictures or before them,
        which `place` is for: no graph has inputs for such."""
        for entry in plan.forget:
            self.features.pop(entry, None)
        if plan.encode and self.tower is not None:
            self._encode(self.tower, plan.encode)
        return bool(plan.embeds or plan.axes)

    def take_unseen(self) -> dict[int, str]:
        """Why there are no features of entries, told once."""
        found, self.unseen = self.unseen, {}
        return found

    def place(self, plan: StepPlan, batch: Batch) -> None:
        """Puts what the plan says of pictures into the inputs of the step, which is not padded."""
        starts = [0, *accumulate(plan.num_tokens)]
        upload = Upload()
        tokens = [
            np.arange(first := starts[embed.index] + embed.first_token, first + embed.count) for embed in plan.embeds
        ]
        if tokens:
            upload.add(np.concatenate(tokens))
        owners = [np.arange(starts[row.index], starts[row.index + 1]) for row in plan.axes]
        if owners:
            upload.add(np.concatenate(owners))
            axes = [np.frombuffer(row.positions, np.int32).reshape(3, -1) for row in plan.axes]
            upload.add(np.concatenate(axes, axis=1).ravel())
        sent = upload.send(self.device)
        if tokens and self.tower is not None:
            batch.attention.pictures = PictureTokens(sent[0].long(), self._rows(plan, batch))
        if owners:
            *_, indexes, positions = sent
            self._turn(batch, indexes.long(), positions.view(3, -1))

    # ---- memory ----

    def reserve(self, num_tokens: int, largest: int) -> None:
        """num_tokens: of features that are kept at most. largest: patches of the largest picture."""
        self.num_tokens, self.largest = num_tokens, largest

    @property
    def cache_bytes(self) -> int:
        """Of the features that are kept at most."""
        return 0 if self.tower is None else self.num_tokens * self.tower.feature_size * self.tower.place.dtype.itemsize

    @property
    def step_bytes(self) -> int:
        """Of the activations of a step's largest pictures, about."""
        blocks = self.spec.blocks
        return 0 if self.tower is None else 4 * self._most * (8 * blocks.hidden + 2 * blocks.inner)

    @property
    def _most(self) -> int:
        """Patches of a step."""
        return max(STEP_PATCHES, self.largest)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Encodes the largest picture, or as many as a step does, and one of a few patches: gray ones."""
        if self.tower is not None:
            for patches in (self._most, self.spec.merge**2):
                side = isqrt(patches) // self.spec.merge * self.spec.merge
                item = self._gray(side, side)
                self.tower.encode([(self._pixels(item), item)])

    def _gray(self, rows: int, columns: int) -> MediaItem:
        """Of so many patches."""
        height, width = rows * self.spec.patch, columns * self.spec.patch
        length, gray = rows * columns // self.spec.merge**2, bytes([128]) * (height * width * 3)
        return MediaItem(b"", 0, length, (1, rows, columns), (1, height, width), (height, width), gray)

    # ---- a step ----

    def _encode(self, tower: Tower, encodes: list[Encode]) -> None:
        try:
            found = tower.encode([(self._pixels(encode.item), encode.item) for encode in encodes])
        except Exception as error:
            if len(encodes) > 1:  # whose fault it is, the tower says when they come one by one
                for encode in encodes:
                    self._encode(tower, [encode])
                return
            logger.error("a picture of %s could not be encoded", encodes[0].item.size, exc_info=error)
            self.unseen[encodes[0].entry] = NOT_ENCODED
            return
        for encode, features in zip(encodes, found, strict=True):
            if len(features) != encode.num_features:
                logger.error("%d tokens stand for %d features", encode.num_features, len(features))
                self.unseen[encode.entry] = NOT_ENCODED
                continue
            # Of its own, lest the longest-lived one keeps all of them.
            self.features[encode.entry] = features.clone() if len(encodes) > 1 else features

    def _pixels(self, item: MediaItem) -> Tensor:
        """uint8 [frames, height, width, 3] on the device, without waiting for what runs there."""
        host = torch.empty(len(item.pixels), dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        host.numpy()[:] = np.frombuffer(item.pixels, np.uint8)
        return host.to(self.device, non_blocking=True).view(*item.size, 3)

    def _rows(self, plan: StepPlan, batch: Batch) -> Tensor:
        """[N, features], of plan.embeds."""
        assert self.tower is not None
        parts = []
        for embed in plan.embeds:
            features = self.features.get(embed.entry)
            if features is None:
                nothing = torch.full((), torch.nan, dtype=self.tower.place.dtype, device=self.device)
                parts.append(nothing.expand(embed.count, self.tower.feature_size))
            else:
                parts.append(features[embed.first_feature : embed.first_feature + embed.count])
        return torch.cat(parts)

    def _turn(self, batch: Batch, tokens: Tensor, positions: Tensor) -> None:
        """These tokens, int64 [N], are at positions int32 [3, N]; the others at their own, on every axis."""
        assert self.axes is not None
        every = batch.rope_positions.repeat(3, 1)
        every[:, tokens] = positions
        batch.attention.cos_sin = self.rotary.composed(every, self.axes)
        batch.rope_positions = torch.arange(every.shape[1], dtype=torch.int32, device=self.device)

"""A device that looks at pictures: it keeps features as plans say, and reads for a token of a picture what the plan has
put there. What it should have read, the prompts of requests tell, in which such tokens are numbers of their own."""

from __future__ import annotations

import random
from dataclasses import replace
from hashlib import sha256
from math import prod

import numpy as np

from vserve.engine.link.media import MediaItem
from vserve.engine.link.messages import RequestOutput
from vserve.engine.link.plan import Encode, NewRow, StepPlan, StepResult
from vserve.engine.options.scheduler_config import SchedulerConfig
from vserve.engine.schedule.request import Request
from vserve.engine.step.mask import TokenMask
from vserve.engine.vision.positions import axis_positions, rope_delta

from .test_scheduler_properties import GARBAGE, VOCAB, Device, Row, Simulation, most_held

PICTURE, MOVIE = VOCAB - 1, VOCAB - 2  # tokens that features stand for; both are in texts as well
LONGEST = 7  # tokens of a picture, separators among them
STEP, BESIDE = 16, 4  # patches that a step may encode, and beside decodes
NAN = -2  # states computed of features that there are not: whoever reads one is told
UNSEEN = "the tower has raised"


def feature(key: bytes, index: int) -> int:
    """In the place of a token: none of the vocabulary."""
    return int.from_bytes(sha256(key + bytes([index])).digest()[:6], "little") + VOCAB


def places(ids: list[int], item: MediaItem) -> list[int]:
    """Indexes of the tokens that its features stand for."""
    wanted = MOVIE if item.is_video else PICTURE
    return [index for index in range(item.start, item.start + item.length) if ids[index] == wanted]


class MediaRow(Row):
    def __init__(self, new: NewRow, salt: str | None, num_groups: int) -> None:
        self.number, self.delta = new.row, new.rope_delta
        self.is_blind = self.was_postponed = False
        super().__init__(new, salt, num_groups)

    def pictured(self, seen: list[int]) -> None:
        """Its prompt is what the model sees of it."""
        outputs = len(self.states) - len(seen)
        tokens, self.states = [*seen, *self.tokens[len(seen) :]], []
        assert outputs >= 0
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> None:
        if not self.states:
            self.tokens: list[int] = []
        del self.tokens[len(self.states) :]
        self.tokens.append(token)
        super().push(token)


class MediaDevice(Device):
    row_type = MediaRow

    def __init__(self, config: SchedulerConfig, salts: dict[int, str | None]) -> None:
        super().__init__(config, salts)
        self.media: dict[int, tuple[list[int], list[int], tuple[MediaItem, ...]]] = {}  # ids, what is seen, pictures
        self.entries: dict[int, Encode] = {}
        self.told: set[int] = set()
        self.unseen: dict[int, str] = {}
        self.broken: set[int] = set()  # entries that the tower has raised for
        self.may_lack = False  # a step has failed: not all plans have arrived
        self.blind_rate = self.luck.choice([0, 0, 0.1])
        self.num_encoded = self.num_embeds = self.num_cut = self.num_blind = 0

    def apply_diffs(self, plan: StepPlan) -> None:
        super().apply_diffs(plan)
        for new in plan.new_rows:
            _, seen, media = self.media[new.request_id]
            row = self.rows[new.row]
            assert isinstance(row, MediaRow)
            row.pictured(seen)
            axes = self.config.media_axes
            assert new.rope_delta == (rope_delta(media, self.config.media_merge) if axes else 0)
        for number in plan.forget:
            assert self.may_lack or number in self.told, "forgets what it never had"
            self.entries.pop(number, None)
        for encode in plan.encode:
            assert encode.entry not in self.told, "a number twice"
            self.told.add(encode.entry)
            self.num_encoded += 1
            if self.luck.random() < self.blind_rate:
                self.unseen[encode.entry] = UNSEEN
                self.broken.add(encode.entry)
            else:
                self.entries[encode.entry] = encode
        patches = sum(prod(encode.item.grid) for encode in plan.encode)
        assert patches <= STEP or len(plan.encode) <= 1 or not self.config.enable_chunked_prefill, "too much at once"
        kept = sum(encode.num_features for encode in self.entries.values())
        assert kept <= self.config.encoder_cache_tokens or self.may_lack, "more features than there is room for"

    def check_shape(self, plan: StepPlan) -> None:
        super().check_shape(plan)
        found: dict[tuple[int, int], int | None] = {}  # (row, position) → what the plan puts there
        for embed in plan.embeds:
            row, encode = self.rows[plan.rows[embed.index]], self.entries.get(embed.entry)
            assert embed.first_token >= 0 and embed.first_token + embed.count <= plan.num_tokens[embed.index]
            assert encode is not None or embed.entry in self.broken, "features that nobody has made"
            assert encode is None or embed.first_feature + embed.count <= encode.num_features
            for place in range(embed.count):
                at = row.number, row.computed + embed.first_token + place
                assert at not in found, "two features in one place"
                found[at] = None if encode is None else feature(encode.item.key, embed.first_feature + place)
        axes = {plan.rows[row.index]: row.positions for row in plan.axes}
        sees = {plan.rows[row.index]: row.positions for row in plan.seen}
        assert len(axes) == len(plan.axes)
        for number, num_new in zip(plan.rows, plan.num_tokens, strict=True):
            row = self.rows[number]
            assert isinstance(row, MediaRow)
            _, seen, media = self.media[row.request_id]
            start, end = row.computed, row.computed + num_new
            for position in range(start, min(end, len(seen))):
                put = found.pop((number, position), -1)
                if put is None:
                    row.tainted = row.is_blind = True
                    self.num_blind += 1
                    continue
                self.num_embeds += seen[position] >= VOCAB
                assert put == (seen[position] if seen[position] >= VOCAB else -1), (
                    "another picture, or none, or too many"
                )
            behind = media[-1].start + media[-1].length if media else 0
            self.num_cut += any(item.start < end < item.start + item.length for item in media)
            wanted = None
            if self.config.media_axes and start < behind:
                wanted = axis_positions(media, self.config.media_merge, start, end).tobytes()
            assert axes.pop(number, None) == wanted
            last = None
            if self.config.media_whole and start < behind:
                inside = [item for item in media if item.start < start < item.start + item.length]
                assert not inside or (num_new == 1 and row.was_postponed), "begins within a picture"
                assert not any(item.start < end < item.start + item.length for item in media), "ends within a picture"
                last = np.array([self.last_seen(row, position) for position in range(start, end)], np.int32).tobytes()
            assert sees.pop(number, None) == last
        assert not found and not axes and not sees, "something of a picture where there is none"

    def last_seen(self, row: Row, position: int) -> int:
        ids, _, media = self.media[row.request_id]
        for item in media:
            if position in (inside := places(ids, item)):
                while position + 1 in inside:
                    position += 1
        return position

    def write(self, row: Row, num_new: int, fails: bool) -> None:
        super().write(row, num_new, fails)
        if isinstance(row, MediaRow) and row.is_blind and not fails:
            size = self.config.block_size
            for table in row.tables:
                for position in range(row.computed, row.computed + num_new):
                    self.cache[table[position // size]][position % size] = NAN

    def attend(self, row: Row, end: int) -> None:
        assert isinstance(row, MediaRow)
        size = self.config.block_size
        for group, table in enumerate(row.tables):
            window = self.config.windows[group]
            first = max(0, row.computed - window + 1) if window else 0
            for index in range(first // size, -(-end // size)):
                begin, stop = max(0, first - index * size), min(size, end - index * size)
                if NAN in self.cache[table[index]][begin:stop]:
                    row.tainted = row.is_blind = True
        super().attend(row, end)

    def sample(
        self, plan: StepPlan, rng: random.Random, nan_rate: float, fails: bool, mask: TokenMask | None
    ) -> StepResult | None:
        result = super().sample(plan, rng, nan_rate, fails, mask)
        if result is None:
            return None
        unseen, self.unseen = self.unseen, {}
        errors = dict(result.errors)
        for place, index in enumerate(plan.sampled):
            row = self.batch[index]
            assert isinstance(row, MediaRow)
            postponed = mask is not None and place in mask.postponed
            row.was_postponed = postponed
            if row.is_blind and not postponed:
                assert result.token_ids[place] == GARBAGE
                errors[place] = "NaN"
        embeddings = [None if e == b"garbage" else e for e in result.embeddings]
        return StepResult(
            result.step, result.token_ids, None, errors, 0.0, result.prompt_logprobs, embeddings, unseen=unseen
        )


def with_media(config: SchedulerConfig, rng: random.Random) -> SchedulerConfig:
    """Prompts are longer, so that pictures are of several blocks and chunks."""
    context = config.max_model_len * rng.choice([1, 2])
    blocks = config.num_blocks * context // config.max_model_len
    whole = rng.random() < 0.3
    budget = max(config.max_num_batched_tokens, config.max_num_seqs - 1 + LONGEST if whole else 0)
    if any(config.windows):
        alone = sum(most_held(context, window, budget, config.block_size) for window in config.windows)
        blocks = max(blocks, 1 + alone)
    return replace(
        config, max_model_len=context, num_blocks=blocks, encoder_cache_tokens=rng.choice([6, 8, 12, 24, 60]),
        media_tokens=(PICTURE, MOVIE), media_merge=rng.choice([1, 2]), media_axes=rng.random() < 0.5,
        patch_cost=rng.choice([0.0, 0.5, 3.0]),
        media_whole=whole, longest_media=LONGEST if whole else 0, max_num_batched_tokens=budget,
    )  # fmt: skip


class MediaSimulation(Simulation):
    """`device.media` tells the device what requests are about; it reads of them no more than a tower would see."""

    def __init__(self, seed: int, **options) -> None:
        super().__init__(seed, device=MediaDevice, adapt=with_media, **options)
        self.fresh = random.Random(seed + 9)
        self.keys = [bytes([number]) * 32 for number in range(self.fresh.choice([2, 5, 40]))]
        self.has_media: set[int] = set()

    def pictured(self, prompt: list[int]) -> tuple[list[int], tuple[MediaItem, ...]]:
        """The same beginning mostly has the same pictures, in the same places."""
        config, merge = self.config, self.config.media_merge
        luck = random.Random(sum(prompt[:2]) + 100 * self.fresh.choice([0, 0, 0, 1, 2]))
        ids, media, at = list(prompt), [], luck.randrange(4)
        while luck.random() < 0.8:
            rows, columns = luck.choice([(1, 1), (1, 2), (2, 2), (1, 5), (2, 3)])
            separated = not config.media_axes and luck.random() < 0.3
            length, is_video = rows * columns + (rows - 1 if separated else 0), luck.random() < 0.2
            key = luck.choice(self.keys)
            if at + length > len(ids):
                break
            ids[at : at + length] = [MOVIE if is_video else PICTURE] * length
            if separated:
                for row in range(1, rows):
                    ids[at + row * (columns + 1) - 1] = 0
            grid = (1, rows * merge, columns * merge)
            media.append(MediaItem(key + bytes([rows, columns]), at, length, grid, (1, 1, 1), (1, 1), b"rgb", is_video))
            at += length + luck.choice([0, 1, 3])
        most = config.encoder_cache_tokens
        if not config.enable_chunked_prefill:
            while sum(prod(item.grid) // merge**2 for item in media) > most:
                media.pop()
        return ids, tuple(media)

    def seen_by_model(self, prompt: list[int], media: tuple[MediaItem, ...]) -> list[int]:
        encoder, id = self.scheduler.kv.encoder, len(self.clients) + 1000
        assert encoder is not None and isinstance(self.device, MediaDevice)
        assert encoder.problem(prompt, media) is None
        seen = list(prompt)
        for item in media:
            for number, index in enumerate(places(prompt, item)):
                seen[index] = feature(item.key, number)
        self.device.media[id] = prompt, seen, media
        if media:
            self.has_media.add(id)
        self.seen["pictures"] += len(media)
        return seen

    def is_ready(self, request: Request) -> bool:
        return super().is_ready(request) and request.num_computed_tokens >= request.media_end

    def may_fail_too(self, ended: set[int]) -> set[int]:
        assert isinstance(self.device, MediaDevice)
        self.device.may_lack = True
        others = ended & self.has_media
        for id in others:
            self.clients[id].spoilt = True
        return others

    def receive(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.error == UNSEEN:
                assert output.id in self.has_media
                self.clients[output.id].spoilt = True
                self.seen["unseen"] += 1
        super().receive(outputs)

    def check_end(self) -> None:
        super().check_end()
        encoder = self.scheduler.kv.encoder
        assert encoder is not None and isinstance(self.device, MediaDevice)
        encoder.begin(False)
        assert not encoder.held and not encoder.orphans, "idle, but features are held"
        gone = set(encoder.forgotten)
        known = {entry.number for entry in encoder.entries.values()}
        if not self.device.may_lack:
            assert known | gone == self.device.entries.keys() | (gone - self.device.entries.keys())
        self.seen["encoded"] += self.device.num_encoded
        self.seen["embeds"] += self.device.num_embeds
        self.seen["cut within a picture"] += self.device.num_cut
        self.seen["blind"] += self.device.num_blind
        self.seen["encoder hit"] += encoder.num_hits


def reference_positions(media: tuple[MediaItem, ...], merge: int, length: int) -> np.ndarray:
    """int32 [3, length], token by token."""
    found: list[tuple[int, int, int]] = []
    place, items = 0, {item.start: item for item in media}
    while len(found) < length:
        item = items.get(len(found))
        if item is None:
            found.append((place, place, place))
            place += 1
            continue
        frames, rows, columns = item.grid[0], item.grid[1] // merge, item.grid[2] // merge
        found += [(place + f, place + r, place + c) for f in range(frames) for r in range(rows) for c in range(columns)]
        place += max(frames, rows, columns)
    return np.array(found[:length], np.int32).T

"""The tokens that stand for pictures, in the place of the one that a rendered prompt has for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from ...engine.link.media import MediaItem
from ..errors import bad_request

if TYPE_CHECKING:
    from ...engine.vision.processor import Processor


def check_places(token_ids: list[int], num_pictures: int, processor: Processor, param: str = "messages") -> None:
    """Raises ApiError (400) where the prompt has not one place for each picture."""
    if (num_places := token_ids.count(processor.placeholder)) != num_pictures:
        raise bad_request(
            f"The prompt has {num_places} places for {num_pictures} pictures: the chat template shows no pictures in "
            "one of these messages, or a text spells the token of one. Put pictures into messages of the user.",
            param,
            "pictures_mismatch",
        )


def expanded(
    token_ids: list[int], items: Sequence[MediaItem], processor: Processor, param: str = "messages"
) -> tuple[list[int], tuple[MediaItem, ...]]:
    """(the prompt, its pictures with their places in it). Raises ApiError (400) as `check_places` does."""
    check_places(token_ids, len(items), processor, param)
    found: list[int] = []
    placed = []
    start = 0
    for item in items:
        at = token_ids.index(processor.placeholder, start)
        found += token_ids[start:at]
        placed.append(msgspec.structs.replace(item, start=len(found)))
        found += processor.expansion(item.grid)
        start = at + 1
    return found + token_ids[start:], tuple(placed)

"""Pictures in the prompts of `LLM`: given as they are, or named in the messages of a chat."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.link.media import MediaItem
from ..errors import ApiError
from ..media.expansion import expanded
from ..media.fetch import FetchError
from ..media.source import Source, taken_out
from ..options.config import ServerConfig
from ..options.keywords import in_keywords
from .prompt_like import PromptLike

if TYPE_CHECKING:
    from ...engine.vision.processor import Processor

KEY = "multi_modal_data"
Media = tuple[MediaItem, ...]


class Pictures:
    """Decoded in this process: whoever gives them trusts them."""

    def __init__(self, processor: Processor | None, config: ServerConfig, fetch: Callable[[str], bytes]) -> None:
        """`processor`: None where the model sees none. `fetch` raises FetchError."""
        self._processor = processor
        self._most = config.most_pictures()
        self._fetch = fetch

    def beside(self, prompts: PromptLike | Sequence[PromptLike]) -> tuple[Any, list[list[MediaItem]]]:
        """(The prompts without their pictures, those of each). Raises ValueError."""
        if isinstance(prompts, Mapping):
            (plain,), found = self.beside([prompts])
            return plain, found
        if isinstance(prompts, str) or not isinstance(prompts, Sequence):
            return prompts, []
        if not any(isinstance(one, Mapping) and KEY in one for one in prompts):
            return prompts, []
        plain, pictures = [], []
        for i, one in enumerate(prompts):
            given: Any = one.get(KEY) if isinstance(one, Mapping) else None
            if given is not None and self._processor is None:
                raise ValueError(f"prompt {i}: '{KEY}' is not supported: this model sees no pictures")
            plain.append({k: v for k, v in one.items() if k != KEY} if isinstance(one, Mapping) else one)
            pictures.append([self._given(picture, f"prompt {i}") for picture in _listed(given, i)])
            self._check_number(len(pictures[-1]), f"prompt {i}")
        return plain, pictures

    def named(self, messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Source]]:
        """(The messages with a mark for each picture, the pictures.) Raises ApiError."""
        changed, sources = taken_out(list(messages))
        if sources:
            self._check_number(len(sources), "a conversation")
        return changed, sources

    def items(self, sources: Sequence[Source]) -> list[MediaItem]:
        """Raises ValueError."""
        return [self._item(self._bytes(source), source.where, source.detail) for source in sources]

    def placed(self, token_ids: list[int], items: Sequence[MediaItem], where: str) -> tuple[list[int], Media]:
        """The tokens with those of the pictures. Raises ValueError."""
        if not items:
            return token_ids, ()
        assert self._processor is not None
        try:
            return expanded(token_ids, items, self._processor)
        except ApiError as error:
            raise ValueError(f"{where}: {in_keywords(error.message)}") from None

    def _check_number(self, count: int, where: str) -> None:
        if self._processor is None and count:
            raise ValueError(f"{where} has pictures, and this model sees none: leave them out")
        if count > self._most:
            raise ValueError(f"{where} has {count} pictures; at most {self._most} are allowed (limit_mm_per_prompt)")

    def _bytes(self, source: Source) -> bytes:
        if source.start:
            from ..media.decode import unpacked

            try:
                return unpacked(source.encoded)
            except ValueError as error:
                raise ValueError(f"the picture '{source.where}' cannot be read: {error}") from None
        try:
            return self._fetch(source.url)
        except FetchError as error:
            raise ValueError(f"the picture '{source.where}' {in_keywords(str(error))}") from None

    def _given(self, picture: Any, where: str) -> MediaItem:
        """Of Pillow, an array [height, width, 3] of bytes, a file's path or its bytes."""
        import numpy as np

        assert self._processor is not None
        if isinstance(picture, str | os.PathLike):
            try:
                picture = Path(picture).read_bytes()
            except OSError as error:
                raise ValueError(f"{where}: the picture {os.fspath(picture)!r} cannot be read ({error})") from None
        if isinstance(picture, bytes):
            return self._item(picture, where)
        if hasattr(picture, "convert"):
            from ..media.decode import as_colours

            picture = as_colours(picture.copy())
        if not isinstance(picture, np.ndarray) or picture.dtype != np.uint8 or picture.shape[2:] != (3,):
            raise ValueError(
                f"{where}: {picture!r:.60} is no picture: give one of Pillow's, an array [height, width, 3] of uint8, "
                "the path of a file, or its bytes"
            )
        try:
            pixels, grid = self._processor.pixels(picture)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        height, width, _ = picture.shape
        return self._processor.item(pixels, grid, (height, width), 0)

    def _item(self, data: bytes, where: str, detail: str = "auto") -> MediaItem:
        from ..media.decode import item_of  # with Pillow, which text needs not

        assert self._processor is not None
        try:
            return item_of(data, self._processor, detail)
        except ValueError as error:
            raise ValueError(f"{where}: a picture cannot be read: {error}") from None


def as_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with pictures of Pillow's ("image_pil", as vLLM has them) as data URLs."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    parts = []
    for part in content:
        image = part.get("image_pil") if isinstance(part, Mapping) and part.get("type") == "image_pil" else None
        if image is not None:
            file = io.BytesIO()
            image.save(file, "PNG")
            encoded = base64.b64encode(file.getvalue()).decode()
            part = {"type": "image_url", "image_url": f"data:image/png;base64,{encoded}"}
        parts.append(part)
    return {**message, "content": parts}


def _listed(given: Any, index: int) -> list[Any]:
    """Of one prompt's pictures. Raises ValueError."""
    if given is None:
        return []
    if not isinstance(given, Mapping) or (unknown := set(given) - {"image"}):
        what = f"has {min(map(str, unknown))!r}" if isinstance(given, Mapping) else f"is {given!r:.60}"
        raise ValueError(f"prompt {index}: '{KEY}' {what}: give {{'image': …}}, a picture or a list of them")
    pictures = given.get("image")
    if pictures is None:
        return []
    return list(pictures) if isinstance(pictures, list | tuple) else [pictures]

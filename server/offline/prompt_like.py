"""What the offline API takes for a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast

from ..errors import ApiError
from ..options.keywords import in_keywords
from ..text.tokenizer import Tokenizer
from ..wire.fields import are_integers


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class PicturesPrompt(TypedDict):
    """A prompt with pictures: text or token ids, in which each picture has one token of its own."""

    prompt: NotRequired[str]
    prompt_token_ids: NotRequired[list[int]]
    multi_modal_data: dict[str, Any]  # image: one or a list, of Pillow, arrays, paths or bytes


class TokensPrompt(TypedDict):
    """A prompt as token ids; they count, a text beside them is only shown."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]


PromptLike = str | list[int] | TextPrompt | TokensPrompt | PicturesPrompt | Mapping[str, Any]


def tokenised(
    prompts: PromptLike | Sequence[PromptLike], tokenizer: Tokenizer, prefix: str = ""
) -> list[tuple[str | None, list[int]]]:
    """(text where there is one, token ids) of each prompt; `prefix`: stands before each text. Raises ValueError."""
    parsed = [_parse_prompt(prompt, i) for i, prompt in enumerate(_as_list(prompts))]
    texts = [prefix + text for text, token_ids in parsed if token_ids is None and text is not None]
    try:
        encoded = iter(tokenizer.encode_prompts(texts))
    except ApiError as error:
        raise ValueError(in_keywords(error.message)) from None
    return [(text, next(encoded) if token_ids is None else token_ids) for text, token_ids in parsed]


def _as_list(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """One prompt is a list of one; token ids are one prompt."""
    if not isinstance(prompts, str | Mapping | Sequence):
        raise ValueError(
            f"prompts is {prompts!r:.60}: give text, token ids, {{'prompt': text}}, {{'prompt_token_ids': ids}}, or a "
            "list of these"
        )
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [cast(PromptLike, prompts)]
    return list(cast(Sequence[PromptLike], prompts))


def _parse_prompt(prompt: PromptLike, index: int) -> tuple[str | None, list[int] | None]:
    """(text, token ids); where there are ids, they count. Raises ValueError."""
    text: Any = None
    token_ids: Any = None
    if isinstance(prompt, Mapping):
        if unknown := set(prompt) - {"prompt", "prompt_token_ids"}:
            raise ValueError(f"prompt {index}: {min(unknown)!r} is not supported; give prompt or prompt_token_ids")
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    elif isinstance(prompt, str):
        text = prompt
    else:
        token_ids = list(prompt) if isinstance(prompt, Sequence) else prompt
    if not (are_integers(token_ids) if token_ids is not None else isinstance(text, str)):
        raise ValueError(f"prompt {index} is neither a string nor a list of token ids.")
    return text, token_ids

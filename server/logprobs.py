"""Log-probabilities as chat and as completions write them."""

from __future__ import annotations

from typing import Any

from .generation import Delta
from .tokenizer import Tokenizer

LOWEST = -9999.0  # instead of minus infinity, which JSON does not have


def chat_logprobs(tokenizer: Tokenizer, delta: Delta, num_top: int) -> dict[str, Any]:
    """`choices[].logprobs` of chat: one entry a token, each with the `num_top` most likely ones."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": _text(raw, ""), "logprob": max(logprob, LOWEST), "bytes": list(raw)}

    content = []
    for token_id, at in zip(delta.token_ids, delta.logprobs or (), strict=True):
        top = zip(at.top_ids[:num_top], at.top_logprobs, strict=False)
        content.append({**entry(token_id, at.logprob), "top_logprobs": [entry(*candidate) for candidate in top]})
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, delta: Delta, num_top: int) -> dict[str, Any]:
    """`choices[].logprobs` of completions: parallel lists. The top dicts hold the sampled token too, so up to k + 1."""
    tokens, values, tops = [], [], []
    for token_id, at in zip(delta.token_ids, delta.logprobs or (), strict=True):
        name = _text(tokenizer.token_bytes(token_id), "bytes:")
        logprob = max(at.logprob, LOWEST)
        tokens.append(name)
        values.append(logprob)
        top = {
            _text(tokenizer.token_bytes(candidate), "bytes:"): max(value, LOWEST)
            for candidate, value in zip(at.top_ids[:num_top], at.top_logprobs, strict=False)
        }
        top.setdefault(name, logprob)
        tops.append(top)
    return {"text_offset": delta.offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


def _text(raw: bytes, prefix: str) -> str:
    """A token's text; where it is only part of a character, its bytes as OpenAI writes them."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)

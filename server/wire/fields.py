"""What single fields of a request may hold, where a type does not say it: each function returns the clean value."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import bad_request, shorten

MAX_PROMPTS = 1024  # in one completions request
MAX_STOPS = 128
MAX_STOP_LENGTH = 1024  # characters; the tail of every stream is held back by the longest one
MAX_BAD_WORDS = 256
MAX_TOKEN_ENTRIES = 4096  # in stop_token_ids and logit_bias
AT_ONCE = 1 << 16  # entries of a list that are looked at in one go
MAX_ALLOWED_TOKENS = 1 << 20  # larger than any vocabulary


def stop_strings(value: Any) -> list[str] | None:
    return strings([value] if isinstance(value, str) else value, "stop", "a string or a list of strings", MAX_STOPS)


def bad_words(value: Any) -> list[str] | None:
    return strings(value, "bad_words", "a list of strings", MAX_BAD_WORDS)


def strings(value: Any, name: str, what: str, most: int) -> list[str] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise bad_request(f"'{name}' must be {what}.", name, "invalid_type")
    if len(value) > most:
        raise bad_request(f"'{name}' has {len(value)} strings; at most {most} are allowed.", name)
    if "" in value:
        raise bad_request(f"'{name}' must not contain an empty string.", name)
    if (longest := max(map(len, value), default=0)) > MAX_STOP_LENGTH:
        raise bad_request(
            f"'{name}' has a string of {longest} characters; at most {MAX_STOP_LENGTH} are allowed.", name
        )
    return value


def token_ids(value: Any, name: str, most: int = MAX_TOKEN_ENTRIES) -> list[int] | None:
    """Whether the model has these tokens is checked later, with the model at hand."""
    if value is None:
        return None
    if not are_integers(value):
        raise bad_request(f"'{name}' must be a list of token ids.", name, "invalid_type")
    if len(value) > most:
        raise bad_request(f"'{name}' has {len(value)} entries; at most {most} are allowed.", name)
    return value


def logit_bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise bad_request("'logit_bias' must be an object of token ids and numbers.", "logit_bias", "invalid_type")
    if len(value) > MAX_TOKEN_ENTRIES:
        raise bad_request(
            f"'logit_bias' has {len(value)} entries; at most {MAX_TOKEN_ENTRIES} are allowed.", "logit_bias"
        )
    biases = {}
    for key, bias in value.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise bad_request(f"'logit_bias' has the key {shorten(key)!r}, which is no token id.", "logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise bad_request(f"'logit_bias' of token {key} must be a number.", "logit_bias", "invalid_type")
        biases[int(key)] = float(min(100, max(-100, bias)))
    return biases


def prompts(value: Any, name: str = "prompt", most: int = MAX_PROMPTS) -> list[str] | list[list[int]]:
    """One prompt or many, as text or token ids: a list of them in any case."""
    several = value
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        several = [value]
    if not isinstance(several, list):
        raise bad_request(f"'{name}' must be a string, token ids, or a list of either.", name, "invalid_type")
    if len(several) > most:
        raise bad_request(f"'{name}' has {len(several)} entries; at most {most} are allowed.", name)
    if not several or not all(several):
        raise bad_request(f"'{name}' must not be empty.", name, "empty_array")
    texts = all(isinstance(prompt, str) for prompt in several)
    if not texts and not all(map(are_integers, several)):
        raise bad_request(f"'{name}' must be a string, token ids, or a list of either.", name, "invalid_type")
    return several


def texts(value: Any, name: str, most: int) -> list[str]:
    """One text or many, each a string or an object with one under `text`: a list of them in any case."""
    several = [value] if isinstance(value, str | dict) else value
    if not isinstance(several, list):
        raise bad_request(f"'{name}' must be a text or a list of texts.", name, "invalid_type")
    if len(several) > most:
        raise bad_request(f"'{name}' has {len(several)} entries; at most {most} are allowed.", name)
    found = [one.get("text") if isinstance(one, dict) else one for one in several]
    if not all(isinstance(text, str) for text in found):
        raise bad_request(f"'{name}' must be a text or a list of texts.", name, "invalid_type")
    if not found or not all(found):
        raise bad_request(f"'{name}' must not be empty.", name, "empty_array")
    return [str(text) for text in found]


def are_integers(value: Any) -> bool:
    """Whether it is a list of integers, of which none is a boolean."""
    if not isinstance(value, list):
        return False
    try:
        for start in range(0, len(value), AT_ONCE):  # other threads may run in between
            msgspec.convert(value if len(value) <= AT_ONCE else value[start : start + AT_ONCE], list[int])
    except msgspec.ValidationError:
        return False
    return True


def metadata(value: dict[str, str] | None) -> dict[str, str] | None:
    for name, text in (value or {}).items():
        if len(value or ()) > 16 or len(name) > 64 or len(text) > 512:
            raise bad_request(
                "'metadata' may have 16 entries, with names of 64 and values of 512 characters.", "metadata"
            )
    return value


def documents(value: Any) -> list[dict[str, Any]] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(document, dict) for document in value):
        raise bad_request("'documents' must be a list of objects.", "documents", "invalid_type")
    return value

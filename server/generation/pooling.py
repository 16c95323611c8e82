"""What /pooling and LLM.encode want of a model, in vLLM's words, and what becomes of the engine's answer."""

from __future__ import annotations

from collections.abc import Sequence

from ...engine.link.messages import EngineInfo
from ...engine.link.sampling_params import ALL, LAST, Pooling
from ..errors import bad_request
from ..text.model import TextModel
from ..text.pooling import PoolingDefaults
from .choice import Prompt
from .embedding import embedding, numbers
from .scores import activated
from .tasks import CLASSIFY, EMBED, REWARD, check_task

MAX_NUMBERS = 1 << 22  # of an answer, where every token has some


def pooling_of(
    task: str | None, model: TextModel, info: EngineInfo, *, normalize: bool | None, dimensions: int | None
) -> Pooling:
    """Raises ApiError (400) for what this model does not do."""
    if task in (None, "encode"):
        task = model.pooling.task
    if task in (None, "encode"):
        by_token = info.by_token or REWARD in info.tasks
        task = "embed" if EMBED in info.tasks else "token_classify" if by_token else "classify"
    check_task(info, *((EMBED,) if task in ("embed", "token_embed") else (CLASSIFY, REWARD)))
    if task == "embed":
        return embedding(model, info, model.pooling.normalize if normalize is None else normalize, dimensions)
    if dimensions is not None:
        raise bad_request(f"'dimensions' is for embeddings, and the task is {task}: leave it out.", "dimensions")
    if task == "token_embed":
        return Pooling(ALL, normalize=False)
    if task in ("reward", "token_classify"):
        return Pooling(ALL, normalize=False, head=True)
    if info.by_token and CLASSIFY in info.tasks:
        raise bad_request("This model classifies each token: 'task' is token_classify.", "task", "unsupported_task")
    return Pooling(LAST, normalize=False, head=True)


def check_numbers(prompts: Sequence[Prompt], pooling: Pooling, info: EngineInfo, param: str) -> None:
    """Raises ApiError (400) for an answer that would be too large."""
    width = len(info.labels) if pooling.head else info.hidden_size
    found = sum(len(prompt.token_ids) for prompt in prompts) * width
    if pooling.kind == ALL and found > MAX_NUMBERS:
        raise bad_request(
            f"'{param}' would be answered with {found} numbers, {width} for each token; at most {MAX_NUMBERS} are "
            "allowed: send fewer or shorter texts.",
            param,
        )


def pooled_values(
    values: bytes, token_ids: Sequence[int], pooling: Pooling, info: EngineInfo, defaults: PoolingDefaults,
    activation: str, normalize: bool | None,
) -> list[float] | list[list[float]]:  # fmt: skip
    """Of a prompt; lists of a token each where `pooling` wants all, or of each that ends a step of reasoning."""
    flat = numbers(values)
    if pooling.kind != ALL:
        return activated(flat, activation) if info.labels else flat
    width = len(flat) // len(token_ids)
    rows = [flat[start : start + width] for start in range(0, len(flat), width)]
    if info.steps and defaults.step_tag is not None:
        rows = [row for row, token in zip(rows, token_ids, strict=True) if token == defaults.step_tag]
    if info.labels:
        return [activated(row, activation) for row in rows]
    return [_unit(row) for row in rows] if normalize else rows


def _unit(row: list[float]) -> list[float]:
    length = sum(value * value for value in row) ** 0.5
    return [value / length for value in row] if length else row

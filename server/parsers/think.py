"""DeepSeek-R1, QwQ, Qwen 3 and many others: <think> … </think>, which the template may have opened or closed."""

from __future__ import annotations

from .formats import Detection, ReasoningFormat

FORMATS = (
    ReasoningFormat(
        name="think",
        aliases=("deepseek_r1", "deepseek_v3", "qwen3", "glm45", "step3"),
        begin="<think>",
        end="</think>",
        detection=Detection(any=("</think>",)),
    ),
)

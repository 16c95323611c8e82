"""Thoughts before an answer, which the template may have opened or closed: <think> … </think> (DeepSeek-R1, Qwen 3, GLM
4.5 and many others), and what Granite and Hunyuan write instead, or around their answers."""

from __future__ import annotations

from .formats import Detection, ReasoningFormat

FORMATS = (
    ReasoningFormat(
        name="granite",
        begin="Here is my thought process:",
        end="Here is my response:",
        also=(("Here's my thought process:", "Here's my response:"),),
        detection=Detection(any=("Here is my thought process:",)),
    ),
    ReasoningFormat(
        name="granite_tags",
        begin="<think>",
        end="</think>",
        answer=("<response>", "</response>"),
        detection=Detection(any=("<response>",)),
    ),
    ReasoningFormat(
        name="hunyuan_a13b",
        begin="<think>",
        end="</think>",
        answer=("<answer>", "</answer>"),
        aliases=("hunyuan",),
        detection=Detection(any=("<answer>",)),
    ),
    ReasoningFormat(
        name="think",
        aliases=("deepseek_r1", "deepseek_v3", "qwen3", "glm45", "kimi_k2", "step3"),
        begin="<think>",
        end="</think>",
        detection=Detection(any=("</think>",)),
    ),
)

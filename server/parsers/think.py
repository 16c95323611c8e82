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
        detection=Detection(any=("<response></response>",)),
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
        name="seed_oss", begin="<seed:think>", end="</seed:think>", detection=Detection(any=("<seed:think>",))
    ),
    ReasoningFormat(name="minimax_m3", begin="<mm:think>", end="</mm:think>", detection=Detection(any=("<mm:think>",))),
    ReasoningFormat(
        name="hunyuan_v3",
        begin="<think:opensource>",
        end="</think:opensource>",
        aliases=("hy_v3",),
        detection=Detection(any=("<think:opensource>", "'<think{}>'.format(")),
    ),
    ReasoningFormat(
        name="cohere",
        begin="<|START_THINKING|>",
        end="<|END_THINKING|>",
        answer=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        aliases=("command_r7b", "command_a", "cohere_command3"),
        detection=Detection(any=("<|START_RESPONSE|>",)),
    ),
    ReasoningFormat(
        name="cohere_text",  # of newer ones
        begin="<|START_THINKING|>",
        end="<|END_THINKING|>",
        answer=("<|START_TEXT|>", "<|END_TEXT|>"),
        detection=Detection(any=("<|START_THINKING|>",)),
    ),
    ReasoningFormat(
        name="apertus",
        begin="<|inner_prefix|>",
        end="<|inner_suffix|>",
        detection=Detection(any=("<|inner_prefix|>",)),
    ),
    ReasoningFormat(
        name="solar_open",
        begin="<|think|>",
        end="<|end|>",
        between="<|begin|>assistant",
        answer=("<|content|>", "<|end|>"),
        detection=Detection(any=("<|begin|>assistant<|think|>",)),
        special=("<|begin|>",),
    ),
    ReasoningFormat(
        name="gemma4",
        begin="<|channel>thought",
        end="<channel|>",
        detection=Detection(any=("<|channel>thought",)),
        special=("<|channel>",),
    ),
    ReasoningFormat(
        name="think",
        aliases=("deepseek_r1", "deepseek_v3", "qwen3", "glm45", "kimi_k2", "step3", "minimax_m2"),
        begin="<think>",
        end="</think>",
        detection=Detection(any=("</think>",)),
    ),
)

"""Many embeddings: the engine is kept busy, and no more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..generation.choice import Prompt
from ..generation.embedding import EmbeddingChoice, EmbeddingOptions, numbers
from ..generation.window import Window
from .outputs import EmbeddingOutput, EmbeddingRequestOutput
from .patient import Call, PatientGeneration
from .progress_bar import Progress

Output = TypeVar("Output")


def embedded(id: str, choice: EmbeddingChoice, vector: bytes) -> EmbeddingRequestOutput:
    return EmbeddingRequestOutput(
        id, EmbeddingOutput(numbers(vector)), list(choice.prompt.token_ids), choice.num_cached_tokens or 0
    )


async def embed_all(
    call: Call, prompts: Sequence[Prompt], ids: Sequence[str], progress: Progress,
    output: Callable[[str, EmbeddingChoice, bytes], Output],
) -> list[Output]:  # fmt: skip
    """`output`: what becomes of the vector of a prompt's id.

    Raises RuntimeError, and ends the others, when the engine fails on one.
    """
    window = Window(call.client, one_engine=False)
    begun: deque[PatientGeneration] = deque()
    num_sent = 0
    outputs: list[Output] = []
    try:
        for prompt in prompts:
            while num_sent < len(prompts) and not window.is_full():
                sent = prompts[num_sent]
                begun.append(PatientGeneration(call, ids[num_sent], sent, EmbeddingOptions()))
                await begun[-1].submit()
                window.opened(len(sent.token_ids))
                num_sent += 1
            generation = begun[0]
            async for _ in generation.deltas():
                pass
            begun.popleft()
            window.closed(len(prompt.token_ids))
            (choice,) = generation.choices
            assert isinstance(choice, EmbeddingChoice)
            if choice.embedding is None:
                raise RuntimeError(f"request {generation.id} failed: {choice.stop_reason}")
            outputs.append(output(generation.id, choice, choice.embedding))
            progress.finished(len(prompt.token_ids), 0)
        return outputs
    finally:
        for generation in begun:
            generation.close()

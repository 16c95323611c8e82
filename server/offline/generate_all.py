"""Many answers: all prompts are submitted, and the engine batches them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from ...engine.link.plan import TokenLogprobs
from ..client.client import Client
from ..generation.answer import collect
from ..generation.choice import Prompt, TextOptions
from ..text.tokenizer import Tokenizer
from .outputs import Logprob, RequestMetrics, RequestOutput
from .patient import PatientGeneration
from .progress_bar import Progress


async def generate_all(
    client: Client,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    texts: Sequence[TextOptions],
    priorities: Sequence[int],
    outputs: Sequence[RequestOutput],
    progress: Progress,
) -> None:
    """Fills `outputs`, which have a place for each answer; whatever is unfinished when it ends is aborted."""
    begun: list[PatientGeneration] = []
    tasks: list[asyncio.Task[None]] = []
    num_unsent = 0  # tokens
    try:
        for prompt, text, priority, output in zip(prompts, texts, priorities, outputs, strict=True):
            n, id = len(output.outputs), output.request_id
            generation = PatientGeneration(client, tokenizer, id, prompt, text, n, priority)
            begun.append(generation)
            await generation.submit()
            num_unsent += len(prompt.token_ids)
            if num_unsent >= client.info.max_num_batched_tokens:
                await asyncio.sleep(0)  # what fills a step leaves: the engine begins with it while the rest follows
                num_unsent = 0
        for generation, output in zip(begun, outputs, strict=True):
            tasks.append(asyncio.create_task(_complete(generation, output, tokenizer, progress)))
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        for generation in begun:
            generation.close()


async def _complete(
    generation: PatientGeneration, output: RequestOutput, tokenizer: Tokenizer, progress: Progress
) -> None:
    answers = await collect(generation.choices, generation.deltas())
    first, sampling = generation.choices[0], generation.prompt.sampling
    output.metrics = RequestMetrics(generation.arrival, first.first_scheduled, first.first_token, first.last_token)
    if first.first_token is not None:
        output.num_cached_tokens = first.num_cached_tokens
    if (entries := generation.prompt_logprobs[0]) is not None:
        output.prompt_logprobs = [None, *_logprobs(tokenizer, output.prompt_token_ids[1:], entries)]
    for answer, completion in zip(answers, output.outputs, strict=True):
        completion.text, completion.token_ids = answer.text, answer.token_ids
        completion.finish_reason, completion.stop_reason = answer.choice.finish_reason, answer.choice.stop_reason
        if sampling.logprobs is not None:
            named = sampling.logprob_token_ids
            completion.logprobs = _logprobs(
                tokenizer, answer.token_ids, answer.logprobs, sampling.logprobs, bool(named)
            )
            completion.cumulative_logprob = sum(at.logprob for at in answer.logprobs)
    output.finished = True
    progress.finished(len(output.prompt_token_ids), sum(len(answer.token_ids) for answer in answers))


def _logprobs(
    tokenizer: Tokenizer, token_ids: Iterable[int], logprobs: Iterable[TokenLogprobs], most: int | None = None,
    named: bool = False,
) -> list[dict[int, Logprob]]:  # fmt: skip
    """`most`: of each place so many beside the token itself; `named`: they are no likeliest ones, and have no rank."""

    def text(token_id: int) -> str:
        return tokenizer.token_bytes(token_id).decode(errors="replace")

    table = []
    for token_id, at in zip(token_ids, logprobs, strict=True):
        entries = {token_id: Logprob(at.logprob, at.rank, text(token_id))}
        for rank, (candidate, value) in enumerate(zip(at.top_ids[:most], at.top_logprobs, strict=False), 1):
            entries.setdefault(candidate, Logprob(value, None if named else rank, text(candidate)))
        table.append(entries)
    return table

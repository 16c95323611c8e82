"""Many answers: all prompts are submitted, and the engine batches them. Or one, as it grows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...engine.link.plan import TokenLogprobs
from ..generation.answer import Answer, Collected, collect
from ..generation.choice import Prompt, TextOptions
from ..text.tokenizer import Tokenizer
from .adapters import LoRARequest
from .outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from .patient import Call, PatientGeneration
from .progress_bar import Progress

if TYPE_CHECKING:
    from ..grammar.constraint import Constraint


class Job(NamedTuple):
    """Prompts on their way to the engine, with all that was settled for each, and the places of their answers."""

    prompts: Sequence[Prompt]
    texts: Sequence[TextOptions]
    constraints: Sequence[tuple[str, Constraint] | None]
    adapters: Sequence[LoRARequest | None]
    priorities: Sequence[int]
    outputs: Sequence[RequestOutput]


async def generate_all(call: Call, job: Job, progress: Progress) -> None:
    """Fills the job's outputs; whatever is unfinished when it ends is aborted."""
    begun: list[PatientGeneration] = []
    tasks: list[asyncio.Task[None]] = []
    num_unsent = 0  # tokens
    try:
        for prompt, text, priority, output in zip(job.prompts, job.texts, job.priorities, job.outputs, strict=True):
            generation = PatientGeneration(call, output.request_id, prompt, text, len(output.outputs), priority)
            begun.append(generation)
            await generation.submit()
            num_unsent += len(prompt.token_ids)
            if num_unsent >= call.client.info.max_num_batched_tokens:
                await asyncio.sleep(0)  # what fills a step leaves: the engine begins with it while the rest follows
                num_unsent = 0
        for generation, output in zip(begun, job.outputs, strict=True):
            tasks.append(asyncio.create_task(_complete(generation, output, call.tokenizer, progress)))
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        for generation in begun:
            generation.close()


async def generate_growing(call: Call, job: Job, tell: Callable[[RequestOutput], None], *, deltas: bool) -> None:
    """Tells the output of a job's one prompt with each step that adds to it: as it is so far, or what was added. The
    last one is whole (of `deltas`: the last addition) and finished."""
    (output,) = job.outputs
    (prompt,), (text,), (priority,) = job.prompts, job.texts, job.priorities
    generation = PatientGeneration(call, output.request_id, prompt, text, len(output.outputs), priority)
    try:
        await generation.submit()
        collected = Collected(generation.choices)
        async for choice, delta in generation.deltas():
            collected.add(choice, delta)
            one = output.outputs[choice.index]
            one.text += delta.text
            one.token_ids += delta.token_ids
            one.finish_reason, one.stop_reason = choice.finish_reason, choice.stop_reason
            if not all(other.finish_reason for other in generation.choices):
                tell(_as_it_is(output, [one] if deltas else output.outputs))
                if deltas:
                    one.text, one.token_ids = "", []
        last = [CompletionOutput(one.index, one.text, one.token_ids) for one in output.outputs]
        _fill(generation, collected.answers(), output, call.tokenizer)
        if deltas:
            for one, added in zip(output.outputs, last, strict=True):
                one.text, one.token_ids = added.text, added.token_ids
        tell(output)
    finally:
        generation.close()


def _as_it_is(output: RequestOutput, choices: Iterable[CompletionOutput]) -> RequestOutput:
    """A copy, which does not grow."""
    copies = [
        CompletionOutput(one.index, one.text, list(one.token_ids), None, None, one.finish_reason, one.stop_reason,
                         one.lora_request)
        for one in choices
    ]  # fmt: skip
    return RequestOutput(
        output.request_id, output.prompt, output.prompt_token_ids, copies, lora_request=output.lora_request
    )


async def _complete(
    generation: PatientGeneration, output: RequestOutput, tokenizer: Tokenizer, progress: Progress
) -> None:
    answers = await collect(generation.choices, generation.deltas())
    _fill(generation, answers, output, tokenizer)
    progress.finished(len(output.prompt_token_ids), sum(len(answer.token_ids) for answer in answers))


def _fill(
    generation: PatientGeneration, answers: Sequence[Answer], output: RequestOutput, tokenizer: Tokenizer
) -> None:
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

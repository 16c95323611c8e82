"""Prompts and their parameters, made into what the engine gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ...engine.link.messages import EngineInfo
from ..client.thread import EngineThread
from ..errors import ApiError
from ..generation.adapters import Adapters
from ..generation.choice import Prompt, TextOptions
from ..generation.sampling import resolve, text_options
from ..generation.tasks import GENERATE
from ..media.fetch import Fetcher
from ..options.config import ServerConfig
from ..options.keywords import in_keywords
from ..text.model import TextModel
from ..wire.requests import CompletionRequest
from .adapters import AdapterChoice, one_each, with_adapters
from .generate_all import Job
from .outputs import CompletionOutput, RequestOutput
from .pictures import Media, Pictures
from .prompt_like import PromptLike, tokenised
from .sampling_params import SamplingParams

if TYPE_CHECKING:
    from ..grammar.constraint import Constraint
    from ..grammar.service import GrammarService


class Jobs:
    """Of an LLM, which has the engine's thread and the model."""

    model: TextModel
    _config: ServerConfig
    _engine: EngineThread
    _request_ids: Iterator[int]

    @property
    def info(self) -> EngineInfo:
        raise NotImplementedError

    def _check_task(self, *tasks: str) -> None:
        raise NotImplementedError

    def get_default_sampling_params(self) -> SamplingParams:
        raise NotImplementedError

    def _given(
        self, prompts: PromptLike | Sequence[PromptLike]
    ) -> tuple[list[tuple[str | None, list[int]]], list[Media]]:
        """(text, token ids) of each prompt; the pictures of each, where any has some. Raises ValueError."""
        plain, pictures = self._pictures.beside(prompts)
        given, media = tokenised(plain, self.model.tokenizer), []
        for i, items in enumerate(pictures):
            text, ids = given[i]
            ids, placed = self._pictures.placed(ids, items, f"prompt {i}")
            given[i] = text, ids
            media.append(placed)
        return given, media

    def _job(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        lora_request: AdapterChoice,
        priority: Sequence[int] | None = None,
        media: Sequence[Media] = (),
        ids: Sequence[str] | None = None,
    ) -> Job:
        """`media`: pictures of each prompt, where any has some; `ids`: of the requests, None: the next numbers. Raises
        ValueError."""
        self._check_task(GENERATE)
        adapters = one_each(lora_request, len(prompts))
        priorities = self._priorities(priority, len(prompts))
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        if isinstance(sampling_params, SamplingParams):
            params = [sampling_params] * len(prompts)
        else:
            params = list(sampling_params)
            if len(params) != len(prompts):
                raise ValueError(
                    f"{len(params)} sampling_params for {len(prompts)} prompts: give one for all, or one each"
                )
        requests = self._requests(params)
        resolved = self._resolve([token_ids for _, token_ids in prompts], requests)
        if any(media):
            if any(one.truncate_prompt_tokens for one in params):
                raise ValueError("'truncate_prompt_tokens' is not supported with pictures: leave it out")
            resolved = [dataclasses.replace(prompt, media=seen) for prompt, seen in zip(resolved, media, strict=True)]
        ids = ids or [str(next(self._request_ids)) for _ in prompts]
        outputs = [
            RequestOutput(
                id,
                text,
                list(cut.token_ids) if one.truncate_prompt_tokens else token_ids,
                [CompletionOutput(index, lora_request=adapter) for index in range(one.n or 1)],
                lora_request=adapter,
            )
            for id, (text, token_ids), cut, one, adapter in zip(ids, prompts, resolved, params, adapters, strict=True)
        ]
        texts = [_text_options(request, one) for request, one in zip(requests, params, strict=True)]
        constraints = [request.constraint for request in requests]
        return Job(resolved, texts, constraints, adapters, priorities, outputs)

    def _priorities(self, given: Sequence[int] | None, count: int) -> list[int]:
        """Raises ValueError."""
        found = [0] * count if given is None else list(given)
        if len(found) != count:
            raise ValueError(f"{len(found)} priorities for {count} prompts: give one each")
        if any(found) and self.info.scheduling_policy != "priority":
            raise ValueError("'priority' is not supported (without scheduling_policy='priority').")
        return found

    def _requests(self, params: Sequence[SamplingParams]) -> list[CompletionRequest]:
        """As a server would get them; those who share parameters share the request. Raises ValueError."""
        requests = {key: one.request() for key, one in {id(one): one for one in params}.items()}
        return [requests[id(one)] for one in params]

    def _resolve(self, prompts: Sequence[list[int]], requests: Sequence[CompletionRequest]) -> list[Prompt]:
        """Raises ValueError."""
        resolved = []
        for i, (token_ids, request) in enumerate(zip(prompts, requests, strict=True)):
            keep = request.truncate_prompt_tokens or len(token_ids)
            left = self.info.max_model_len - min(len(token_ids), keep if keep > 0 else self.info.max_model_len)
            if request.max_tokens is not None and 0 < left < request.max_tokens:
                # One setting for prompts of many lengths: the context ends those that reach it.
                request = request.model_copy(update={"max_tokens": left})
            try:
                resolved += resolve(request, [token_ids], self.model, self.info, None)
            except ApiError as error:
                raise ValueError(f"prompt {i}: {in_keywords(error.message)}") from None
        return resolved

    async def _prepared(self, job: Job, work: Callable[[Job], Coroutine[Any, Any, None]]) -> None:
        """On the engine's thread: `work` with the job's adapters and grammars, which are let go when it has ended."""
        keys: list[str] = []  # of the grammars in use
        releases: list[Callable[[], None]] = []
        prompts = job.prompts
        try:
            if any(job.adapters):
                prompts, releases = await with_adapters(self._adapters, prompts, job.adapters)
            prompts = [
                await self._constrained(i, prompt, constraint, keys)
                for i, (prompt, constraint) in enumerate(zip(prompts, job.constraints, strict=True))
            ]
            await work(job._replace(prompts=prompts))
        finally:
            for key in keys:
                self._grammars.release(key)
            for release in releases:
                release()

    async def _constrained(
        self, index: int, prompt: Prompt, constraint: tuple[str, Constraint] | None, keys: list[str]
    ) -> Prompt:
        """The prompt with its grammar, whose key is added to `keys`. Raises ValueError."""
        if constraint is None:
            return prompt
        try:
            keys.append(await self._grammars.acquire(constraint[1], constraint[0]))
        except ApiError as error:
            raise ValueError(f"prompt {index}: {in_keywords(error.message)}") from None
        return prompt.with_grammar(keys[-1])

    @cached_property
    def _pictures(self) -> Pictures:
        fetcher = Fetcher(self._config)
        sees = self.info.settings.get("mm_encoder_cache_tokens") != 0
        return Pictures(
            self.model.processor if sees else None, self._config, lambda url: self._engine.begin(fetcher.fetch(url))()
        )

    @cached_property
    def _adapters(self) -> Adapters:
        client = self._engine.client
        return Adapters(client, (client.config.model,), enabled=client.config.enable_lora)

    @cached_property
    def _grammars(self) -> GrammarService:
        from ..grammar.service import GrammarService

        service = GrammarService(self._engine.client, self.model)
        self._engine.closing.append(service.close)
        return service


def _text_options(request: CompletionRequest, params: SamplingParams) -> TextOptions:
    return dataclasses.replace(text_options(request), detokenize=params.detokenize is not False)

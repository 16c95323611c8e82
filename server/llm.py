"""The offline API: `LLM(model).generate(prompts, SamplingParams(...))`, no server and no HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from ..engine.config import ConfigError, EngineConfig
from ..engine.messages import EngineInfo
from ..engine.plan import TokenLogprobs
from .choice import Choice, Prompt, TextOptions
from .config import ServerConfig
from .embedding import embed_all, resolve_embeddings
from .engine_client import Mailbox
from .engine_thread import EngineThread
from .errors import ApiError
from .outputs import CompletionOutput, EmbeddingRequestOutput, Logprob, RequestMetrics, RequestOutput
from .progress_bar import Progress, progress_bar
from .prompt_like import PromptLike, tokenised
from .protocol import ChatRequest, CompletionRequest
from .sampling import resolve, text_options
from .sampling_params import PoolingParams, SamplingParams, validate
from .tokenizer import TextModel, load_text_model
from .tools import definitions
from .vllm_options import vllm_options

if TYPE_CHECKING:
    from .constraint import Constraint
    from .grammar import GrammarService

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
BACKLOG_STEPS = 1  # nobody watches the tokens come: while prompts wait, steps are as large as they can be


class LLM:
    """A model in an engine process of its own. Use as a context manager, or call `close`, to end that process early."""

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        chat_template: str | None = None,
        pooling: str = "auto",
        **engine_options: Any,
    ) -> None:
        """`model`: folder or hub name; `chat_template`: file with a Jinja template; `pooling`: what `embed` does, auto,
        last, mean or cls; `engine_options`: as the flags of `vserve serve`, with underscores
        (`max_model_len=4096`, `engine_in_process=True`).

        Raises ConfigError (a ValueError) for options that cannot work, EngineDeadError with the cause when the engine
        does not start.
        """
        known = {spec.name for spec in dataclasses.fields(EngineConfig)}
        for name in [name for name in engine_options if name not in known and name in vllm_options()]:
            if line := vllm_options()[name].judge(engine_options.pop(name), name):
                logger.info(line)
        if unknown := [name for name in engine_options if name not in known]:
            near = difflib.get_close_matches(unknown[0], known, n=1)
            raise TypeError(f"LLM has no option {unknown[0]!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        if not model:
            raise ConfigError("no model is named: give the folder of a Hugging Face model, or its name on the hub")
        config = EngineConfig(model=model, **engine_options)
        if config.backlog_steps is None:
            config = dataclasses.replace(config, backlog_steps=BACKLOG_STEPS)
        self._engine = EngineThread(config)
        self._finalizer = weakref.finalize(self, self._engine.close)  # when collected, or when the interpreter ends
        try:
            starting = self._engine.begin(self._engine.client.start())
            text = ServerConfig(tokenizer=tokenizer, chat_template=chat_template, pooling=pooling)
            self.model: TextModel = load_text_model(model, text, config.revision)
            starting()
        except BaseException:
            self.close()
            raise
        self._request_ids = itertools.count()

    @property
    def info(self) -> EngineInfo:
        """The engine's effective settings."""
        return self._engine.client.info

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
    ) -> list[RequestOutput]:
        """Answers all prompts, in their order; all are submitted at once and the engine batches them.

        `prompts`: text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a sequence of these.
        `sampling_params`: one for all, or one each; None = the model's defaults. `use_tqdm`: a progress bar, or what
        makes one. Raises ValueError before anything is submitted; a request that fails in the engine does not end the
        others: its answer has the finish reason "error".
        """
        return self._run(tokenised(prompts, self.model.tokenizer), sampling_params, use_tqdm)

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """An embedding of each prompt, in their order; see `generate`.

        Raises ValueError before anything is submitted, RuntimeError when the engine fails on a prompt.
        """
        self._check_open()
        inputs = [token_ids for _, token_ids in tokenised(prompts, self.model.tokenizer)]
        try:
            resolved = resolve_embeddings((pooling_params or PoolingParams()).request(), inputs, self.model, self.info)
        except ApiError as error:
            raise ValueError(error.message) from None
        ids = [str(next(self._request_ids)) for _ in resolved]
        with progress_bar(use_tqdm, len(resolved)) as bar:
            return self._engine.begin(embed_all(self._engine.client, resolved, ids, Progress(bar)))()

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several; see `generate`. `chat_template`: Jinja text instead of the model's;
        `tools`: what the template offers. Calls and reasoning stay text."""
        if not messages:
            raise ValueError("'messages' must not be empty.")
        several = not isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Messages], messages if several else [messages])
        tokenizer = self.model.tokenizer
        if chat_template is not None:
            tokenizer = tokenizer.with_template(chat_template)
        options = dict(chat_template_kwargs or {})
        pairs = []
        try:
            tokenizer.check_template_kwargs(options)
            options["continue_final_message"] = continue_final_message
            options["tools"] = definitions(tools)
            options["add_generation_prompt"] = add_generation_prompt and not continue_final_message
            for conversation in conversations:
                request = validate(ChatRequest, {"messages": [dict(message) for message in conversation]})
                text = tokenizer.render(request.messages, options)
                # The template writes its own special tokens.
                pairs.append((text, tokenizer.encode(text, add_special_tokens=False)))
        except ApiError as error:
            raise ValueError(error.message) from error
        return self._run(pairs, sampling_params, use_tqdm)

    def get_tokenizer(self) -> Any:
        """The tokenizer of transformers."""
        return self.model.tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json sets, and our defaults for the rest."""
        defaults: dict[str, Any] = dict(self.model.defaults)
        if "top_k" in defaults:
            defaults["top_k"] = int(defaults["top_k"])
        return SamplingParams(**defaults)

    def close(self) -> None:
        """Ends the engine. Idempotent."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise RuntimeError("this LLM is closed: make another")

    # ---- one call of generate ----

    def _run(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[RequestOutput]:
        self._check_open()
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
        outputs = [
            RequestOutput(
                str(next(self._request_ids)), text, token_ids, [CompletionOutput(index) for index in range(one.n or 1)]
            )
            for (text, token_ids), one in zip(prompts, params, strict=True)
        ]
        with progress_bar(use_tqdm, len(outputs)) as bar:
            texts = [_text_options(request, one) for request, one in zip(requests, params, strict=True)]
            constraints = [request.constraint for request in requests]
            self._engine.begin(self._generate(resolved, texts, constraints, outputs, Progress(bar)))()
        return outputs

    def _requests(self, params: Sequence[SamplingParams]) -> list[CompletionRequest]:
        """As a server would get them; those who share parameters share the request. Raises ValueError."""
        requests = {key: one.request() for key, one in {id(one): one for one in params}.items()}
        return [requests[id(one)] for one in params]

    def _resolve(self, prompts: Sequence[list[int]], requests: Sequence[CompletionRequest]) -> list[Prompt]:
        """Raises ValueError."""
        resolved = []
        for i, (token_ids, request) in enumerate(zip(prompts, requests, strict=True)):
            left = self.info.max_model_len - len(token_ids)
            if request.max_tokens is not None and 0 < left < request.max_tokens:
                # One setting for prompts of many lengths: the context ends those that reach it.
                request = request.model_copy(update={"max_tokens": left})
            try:
                resolved += resolve(request, [token_ids], self.model, self.info, None)
            except ApiError as error:
                raise ValueError(f"prompt {i}: {error.message}") from None
        return resolved

    async def _generate(
        self,
        prompts: Sequence[Prompt],
        texts: Sequence[TextOptions],
        constraints: Sequence[tuple[str, Constraint] | None],
        outputs: Sequence[RequestOutput],
        progress: Progress,
    ) -> None:
        """On the engine's thread. Fills `outputs`; whatever is unfinished when it ends is aborted."""
        answers: list[tuple[RequestOutput, CompletionOutput, Choice]] = []
        tasks: list[asyncio.Task[None]] = []
        keys: list[str] = []  # of the grammars in use
        try:
            prompts = [
                await self._constrained(i, prompt, constraint, keys)
                for i, (prompt, constraint) in enumerate(zip(prompts, constraints, strict=True))
            ]
            num_unsent = 0  # tokens
            for prompt, text, output in zip(prompts, texts, outputs, strict=True):
                output.metrics = RequestMetrics(time.monotonic())
                for completion in output.outputs:
                    answers.append((output, completion, self._submit(prompt, text, completion.index)))
                num_unsent += len(prompt.token_ids)
                if num_unsent >= self.info.max_num_batched_tokens:
                    await asyncio.sleep(0)  # what fills a step leaves: the engine begins with it while the rest follows
                    num_unsent = 0
            tasks += [asyncio.create_task(self._complete(*answer, progress)) for answer in answers]
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            unfinished = [choice.mailbox for _, _, choice in answers if choice.finish_reason is None]
            self._engine.client.abort(cast(list[Mailbox], unfinished))
            for key in keys:
                self._grammars.release(key)

    async def _constrained(
        self, index: int, prompt: Prompt, constraint: tuple[str, Constraint] | None, keys: list[str]
    ) -> Prompt:
        """The prompt with its grammar, whose key is added to `keys`. Raises ValueError."""
        if constraint is None:
            return prompt
        try:
            keys.append(await self._grammars.acquire(constraint[1], constraint[0]))
        except ApiError as error:
            raise ValueError(f"prompt {index}: {error.message}") from None
        return prompt.with_grammar(keys[-1])

    @cached_property
    def _grammars(self) -> GrammarService:
        from .grammar import GrammarService

        service = GrammarService(self._engine.client, self.model)
        self._engine.closing.append(service.close)
        return service

    def _submit(self, prompt: Prompt, text: TextOptions, index: int) -> Choice:
        mailbox = self._engine.client.submit(prompt.token_ids, prompt.sampling_of(index))
        return text.choice(index, prompt, mailbox, self.model.tokenizer)

    async def _complete(
        self, output: RequestOutput, completion: CompletionOutput, choice: Choice, progress: Progress
    ) -> None:
        texts: list[str] = []
        logprobs: list[TokenLogprobs] = []
        metrics = output.metrics
        assert metrics is not None
        while choice.finish_reason is None:
            message = await choice.mailbox.get()
            if message.finish_reason in ("error", "abort"):
                choice.finish_reason, choice.stop_reason = "error", message.error or "the engine aborted this request"
                logger.error("request %s failed: %s", output.request_id, choice.stop_reason)
                break
            if message.prompt_logprobs is not None:
                told = self._logprobs(output.prompt_token_ids[1:], message.prompt_logprobs)
                output.prompt_logprobs = [None, *told]
            delta = choice.feed(message)
            texts.append(delta.text)
            completion.token_ids += delta.token_ids
            logprobs += delta.logprobs or ()
            if completion.index == 0:
                metrics.last_token = time.monotonic()
                metrics.first_token = metrics.first_token or metrics.last_token
                if message.first_scheduled is not None:
                    metrics.first_scheduled = message.first_scheduled
                if message.num_cached_tokens is not None:
                    output.num_cached_tokens = message.num_cached_tokens
            if choice.finish_reason != message.finish_reason:
                self._engine.client.abort([cast(Mailbox, choice.mailbox)])  # a stop string: the engine does not know it
        completion.text = "".join(texts)
        completion.finish_reason, completion.stop_reason = choice.finish_reason, choice.stop_reason
        if choice.prompt.sampling.logprobs is not None:
            completion.logprobs = self._logprobs(completion.token_ids, logprobs)
            completion.cumulative_logprob = sum(at.logprob for at in logprobs)
        if all(each.finished for each in output.outputs):
            output.finished = True
            num_output = sum(len(each.token_ids) for each in output.outputs)
            progress.finished(len(output.prompt_token_ids), num_output)

    def _logprobs(self, token_ids: Iterable[int], logprobs: Iterable[TokenLogprobs]) -> list[dict[int, Logprob]]:
        def text(token_id: int) -> str:
            return self.model.tokenizer.token_bytes(token_id).decode(errors="replace")

        table = []
        for token_id, at in zip(token_ids, logprobs, strict=True):
            entries = {token_id: Logprob(at.logprob, at.rank, text(token_id))}
            for rank, (candidate, value) in enumerate(zip(at.top_ids, at.top_logprobs, strict=True), 1):
                entries.setdefault(candidate, Logprob(value, rank, text(candidate)))
            table.append(entries)
        return table


def _text_options(request: CompletionRequest, params: SamplingParams) -> TextOptions:
    return dataclasses.replace(text_options(request), detokenize=params.detokenize is not False)

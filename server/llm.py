"""The offline API: `LLM(model).generate(prompts, SamplingParams(...))`, no server and no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import difflib
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from ..engine.config import ConfigError, EngineConfig
from ..engine.messages import EngineInfo
from ..engine.plan import TokenLogprobs
from .config import ServerConfig
from .detokenizer import Detokenizer, StopStrings
from .engine_client import Mailbox
from .engine_thread import EngineThread
from .errors import ApiError
from .generation import Choice
from .outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from .protocol import ChatRequest
from .sampling import Prompt, resolve
from .sampling_params import SamplingParams, validate
from .tokenizer import TextModel, Tokenizer, load_text_model

logger = logging.getLogger(__name__)

PromptLike = str | list[int] | Mapping[str, Any]  # a mapping has "prompt" or "prompt_token_ids"
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model in an engine process of its own. Use as a context manager, or call `close`, to end that process early."""

    def __init__(
        self, model: str, *, tokenizer: str | None = None, chat_template: str | None = None, **engine_options: Any
    ) -> None:
        """`model`: folder or hub name; `chat_template`: file with a Jinja template; `engine_options`: as the flags of
        `vserve serve`, with underscores (`max_model_len=4096`, `engine_in_process=True`).

        Raises ConfigError (a ValueError) for options that cannot work, EngineDeadError with the cause when the engine
        does not start.
        """
        known = {spec.name for spec in dataclasses.fields(EngineConfig)}
        if unknown := [name for name in engine_options if name not in known]:
            near = difflib.get_close_matches(unknown[0], known, n=1)
            raise TypeError(f"LLM has no option {unknown[0]!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        if not model:
            raise ConfigError("no model is named: give the folder of a Hugging Face model, or its name on the hub")
        config = EngineConfig(model=model, **engine_options)
        self._engine = EngineThread(config)
        self._finalizer = weakref.finalize(self, self._engine.close)  # when collected, or when the interpreter ends
        try:
            starting = self._engine.begin(self._engine.client.start())
            text = ServerConfig(tokenizer=tokenizer, chat_template=chat_template)
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
        parsed = [_parse_prompt(prompt, i) for i, prompt in enumerate(_as_list(prompts))]
        texts = [text for text, token_ids in parsed if token_ids is None and text is not None]
        encoded = iter(self.model.tokenizer.core.encode_batch_fast(texts, add_special_tokens=True))
        pairs = [(text, next(encoded).ids if token_ids is None else token_ids) for text, token_ids in parsed]
        return self._run(pairs, sampling_params, use_tqdm)

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
    ) -> list[RequestOutput]:
        """Answers one conversation or several; see `generate`. `chat_template`: Jinja text instead of the model's."""
        if not messages:
            raise ValueError("'messages' must not be empty.")
        several = not isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Messages], messages if several else [messages])
        tokenizer = self.model.tokenizer
        if chat_template is not None:
            tokenizer = Tokenizer(tokenizer.hf, chat_template)
        options = dict(chat_template_kwargs or {})
        pairs = []
        try:
            tokenizer.check_template_kwargs(options)
            options["continue_final_message"] = continue_final_message
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

    # ---- one call of generate ----

    def _run(
        self,
        prompts: Sequence[tuple[str | None, list[int]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool | Callable[..., Any],
    ) -> list[RequestOutput]:
        if not self._finalizer.alive:
            raise RuntimeError("this LLM is closed: make another")
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
        resolved = self._resolve([token_ids for _, token_ids in prompts], params)
        outputs = [
            RequestOutput(
                str(next(self._request_ids)), text, token_ids, [CompletionOutput(index) for index in range(one.n or 1)]
            )
            for (text, token_ids), one in zip(prompts, params, strict=True)
        ]
        with _progress_bar(use_tqdm, len(outputs)) as bar:
            self._engine.begin(self._generate(resolved, params, outputs, _Progress(bar)))()
        return outputs

    def _resolve(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[Prompt]:
        """Raises ValueError."""
        requests = {id(one): one.request() for one in params}
        resolved = []
        for i, (token_ids, one) in enumerate(zip(prompts, params, strict=True)):
            request = requests[id(one)]
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
        params: Sequence[SamplingParams],
        outputs: Sequence[RequestOutput],
        progress: _Progress,
    ) -> None:
        """On the engine's thread. Fills `outputs`; whatever is unfinished when it ends is aborted."""
        answers: list[tuple[RequestOutput, CompletionOutput, Choice]] = []
        tasks: list[asyncio.Task[None]] = []
        try:
            for prompt, one, output in zip(prompts, params, outputs, strict=True):
                output.metrics = RequestMetrics(time.monotonic())
                for completion in output.outputs:
                    answers.append((output, completion, self._submit(prompt, one, completion.index)))
            tasks += [asyncio.create_task(self._complete(*answer, progress)) for answer in answers]
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            unfinished = [choice.mailbox for _, _, choice in answers if choice.finish_reason is None]
            self._engine.client.abort(cast(list[Mailbox], unfinished))

    def _submit(self, prompt: Prompt, params: SamplingParams, index: int) -> Choice:
        mailbox = self._engine.client.submit(prompt.token_ids, prompt.sampling_of(index))
        tokenizer = self.model.tokenizer
        if params.detokenize is False:
            detokenizer = cast(Detokenizer, _NoText())
        else:
            detokenizer = Detokenizer(tokenizer, prompt.token_ids, params.skip_special_tokens is not False)
        stops = [params.stop] if isinstance(params.stop, str) else params.stop
        include = bool(params.include_stop_str_in_output)
        return Choice(index, prompt, mailbox, detokenizer, StopStrings(stops, include) if stops else None, include)

    async def _complete(
        self, output: RequestOutput, completion: CompletionOutput, choice: Choice, progress: _Progress
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
            progress.finished(output)

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


class _NoText:
    """A Detokenizer for those who want token ids only."""

    def feed(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


class _Progress:
    """The bar and the rates beside it."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._start = time.monotonic()
        self._num_input = self._num_output = 0

    def finished(self, output: RequestOutput) -> None:
        if self._bar is None:
            return
        self._num_input += len(output.prompt_token_ids)
        self._num_output += sum(len(completion.token_ids) for completion in output.outputs)
        seconds = max(time.monotonic() - self._start, 1e-9)
        self._bar.set_postfix_str(
            f"input {self._num_input / seconds:.1f} tok/s, output {self._num_output / seconds:.1f} tok/s", refresh=False
        )
        self._bar.update(1)


@contextlib.contextmanager
def _progress_bar(use_tqdm: bool | Callable[..., Any], total: int) -> Iterator[Any]:
    if not use_tqdm or not total:
        yield None
        return
    from tqdm import tqdm  # type: ignore[import-untyped]

    make = use_tqdm if callable(use_tqdm) else tqdm
    with make(total=total, desc="Processed prompts", dynamic_ncols=True) as bar:
        yield bar


def _as_list(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """One prompt is a list of one; token ids are one prompt."""
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [cast(PromptLike, prompts)]
    return list(cast(Sequence[PromptLike], prompts))


def _parse_prompt(prompt: PromptLike, index: int) -> tuple[str | None, list[int] | None]:
    """(text, token ids); where there are ids, they count. Raises ValueError."""
    text: Any = None
    token_ids: Any = None
    if isinstance(prompt, Mapping):
        if unknown := set(prompt) - {"prompt", "prompt_token_ids"}:
            raise ValueError(f"prompt {index}: {min(unknown)!r} is not supported; give prompt or prompt_token_ids")
        text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    elif isinstance(prompt, str):
        text = prompt
    else:
        token_ids = list(prompt) if isinstance(prompt, Sequence) else prompt
    valid_ids = isinstance(token_ids, list) and all(type(token) is int for token in token_ids)
    if not (valid_ids if token_ids is not None else isinstance(text, str)):
        raise ValueError(f"prompt {index} is neither a string nor a list of token ids.")
    return text, token_ids

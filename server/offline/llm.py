"""The offline API: `LLM(model).generate(prompts, SamplingParams(...))`, no server and no HTTP."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from ...engine.errors import ConfigError
from ...engine.link.messages import EngineInfo
from ..client.engine_client import EngineDeadError
from ..client.thread import EngineThread
from ..errors import ApiError
from ..generation.adapters import Adapters
from ..generation.choice import Prompt, TextOptions
from ..generation.embedding import check_dimensions
from ..generation.sampling import resolve, text_options
from ..generation.tasks import GENERATE
from ..grammar.tools import definitions
from ..media.fetch import Fetcher
from ..observe.preemptions import Preemptions
from ..options.keywords import from_keywords, in_keywords
from ..text.model import TextModel, load_text_model
from ..text.spelled import unmarked
from ..wire.requests import ChatRequest, CompletionRequest
from .adapters import AdapterChoice, LoRARequest, one_each, with_adapters
from .generate_all import generate_all
from .outputs import CompletionOutput, RequestOutput
from .pictures import Media, Pictures, as_parts
from .pooled import PooledCalls
from .progress_bar import Progress, loading_bar, progress_bar
from .prompt_like import PromptLike, tokenised
from .sampling_params import SamplingParams, validate
from .torchrun import launched

if TYPE_CHECKING:
    from ..grammar.constraint import Constraint
    from ..grammar.service import GrammarService

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
BACKLOG_STEPS = 1  # nobody watches the tokens come: while prompts wait, steps are as large as they can be


class LLM(PooledCalls):
    """A model in an engine process of its own. Use as a context manager, or call `close`, to end that process early."""

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        chat_template: str | None = None,
        pooling: str | None = None,
        generation_config: str | None = None,
        hf_token: bool | str | None = None,
        use_tqdm_on_load: bool = True,
        **options: Any,
    ) -> None:
        """`model`: folder or hub name; `chat_template`: Jinja template, or a file that has it; `pooling`: what `embed`
        does, auto, last, mean or cls; `generation_config`: auto, vserve or a file, the defaults of sampling;
        `hf_token`: for the hub, in this process's environment from here on (None and True: HF_TOKEN, or who has logged
        in); `use_tqdm_on_load`: a line that shows how far loading is, where somebody sees it; `options`: as the flags
        of `vserve serve`, with underscores (`max_model_len=4096`, `config="options.yaml"`).

        Raises ConfigError (a ValueError) for options that cannot work, TypeError for such as do not exist,
        EngineDeadError with the cause when the engine does not start.
        """
        if isinstance(hf_token, str):
            os.environ["HF_TOKEN"] = hf_token
        named = {"tokenizer": tokenizer, "chat_template": chat_template, "pooling": pooling}
        options |= {"model": model or None, "generation_config": generation_config, **named}
        try:
            config, text, notices = from_keywords(options)
        except ConfigError as error:
            raise ConfigError(in_keywords(str(error))) from None
        if text.embed_limit() is not None:
            raise ConfigError("pooler_config has enable_chunked_processing, which is for the server: leave it out")
        for line in notices:
            logger.info(in_keywords(line))
        if not config.model:
            raise ConfigError("no model is named: give the folder of a Hugging Face model, or its name on the hub")
        if config.backlog_steps is None:
            config = dataclasses.replace(config, backlog_steps=BACKLOG_STEPS)
        environment: dict[str, str] = {}
        if config.distributed_executor_backend == "external_launcher":
            try:
                config, environment = launched(config)
            except ConfigError as error:
                raise ConfigError(in_keywords(str(error))) from None
        self._config = text
        self._engine = EngineThread(config, environment)
        self._finalizer = weakref.finalize(self, self._engine.close)  # when collected, or when the interpreter ends
        try:
            with loading_bar(use_tqdm_on_load) as report:
                self._engine.client.progress_listeners.append(report)
                starting = self._engine.begin(self._engine.client.start())
                self.model: TextModel = load_text_model(config.model, text, config)
                starting()
                check_dimensions(self.model.pooling, self._engine.client.info)
                self._engine.client.progress_listeners.remove(report)
        except (ConfigError, EngineDeadError) as error:
            self.close()
            raise type(error)(in_keywords(str(error))) from None
        except BaseException:
            self.close()
            raise
        self._preemptions = Preemptions(self._engine.client)
        self._request_ids = itertools.count()

    def __repr__(self) -> str:
        name = self._engine.client.config.model
        if not self._finalizer.alive:
            return f"LLM({name!r}, closed)"
        return f"LLM({name!r}, {self.info.dtype} on {self.info.device}, context {self.info.max_model_len} tokens)"

    @property
    def info(self) -> EngineInfo:
        """The engine's effective settings."""
        return self._engine.client.info

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        lora_request: AdapterChoice = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answers all prompts, in their order; all are submitted at once and the engine batches them.

        `prompts`: text, token ids, {"prompt": text}, {"prompt_token_ids": ids}, or a sequence of these; pictures stand
        beside the latter, as "multi_modal_data": {"image": picture or list}, for each of which the prompt has a token.
        `sampling_params`: one for all, or one each; None = the model's defaults. `use_tqdm`: a progress bar, or what
        makes one. `prompt_token_ids`: an older name of `prompts`, where these are ids. `lora_request`: the adapter of
        all, or one each (with `enable_lora=True`). `priority`: one each, lower ones run sooner (with
        `scheduling_policy="priority"`). Raises ValueError before anything is submitted; a request that fails in the
        engine does not end the others: its answer has the finish reason "error".
        """
        if (prompts is None) == (prompt_token_ids is None):
            raise ValueError("give prompts, as text or token ids" + ("" if prompts is None else ", once"))
        plain, pictures = self._pictures.beside(cast(PromptLike, prompts or prompt_token_ids or []))
        given, media = tokenised(plain, self.model.tokenizer), []
        for i, items in enumerate(pictures):
            text, ids = given[i]
            ids, placed = self._pictures.placed(ids, items, f"prompt {i}")
            given[i] = text, ids
            media.append(placed)
        return self._run(given, sampling_params, use_tqdm, lora_request, priority, media)

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
        lora_request: AdapterChoice = None,
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
        pairs: list[tuple[str | None, list[int]]] = []
        media = []
        try:
            tokenizer.check_template_kwargs(options)
            options = {**tokenizer.template_kwargs, **options}
            options["continue_final_message"] = continue_final_message
            options["tools"] = definitions(tools)
            options["add_generation_prompt"] = add_generation_prompt and not continue_final_message
            for conversation in conversations:
                request = validate(ChatRequest, {"messages": [as_parts(message) for message in conversation]})
                shown, sources = self._pictures.named(request.messages)
                order: list[int] = []
                text = tokenizer.render(shown, options, order)
                # The template writes its own special tokens.
                ids = tokenizer.encode_rendered(text, add_special_tokens=False)
                items = self._pictures.items([sources[i] for i in order])
                ids, placed = self._pictures.placed(ids, items, "the conversation")
                pairs.append((unmarked(text), ids))
                media.append(placed)
        except ApiError as error:
            raise ValueError(in_keywords(error.message)) from error
        return self._run(pairs, sampling_params, use_tqdm, lora_request, media=media)

    def get_tokenizer(self) -> Any:
        """The tokenizer of transformers. Raises ValueError where there is none."""
        try:
            return self.model.tokenizer.hf
        except ApiError as error:
            raise ValueError(in_keywords(error.message)) from None

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
        lora_request: AdapterChoice,
        priority: Sequence[int] | None = None,
        media: Sequence[Media] = (),
    ) -> list[RequestOutput]:
        """`media`: pictures of each prompt, where any has some."""
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
        outputs = [
            RequestOutput(
                str(next(self._request_ids)),
                text,
                list(cut.token_ids) if one.truncate_prompt_tokens else token_ids,
                [CompletionOutput(index, lora_request=adapter) for index in range(one.n or 1)],
                lora_request=adapter,
            )
            for (text, token_ids), cut, one, adapter in zip(prompts, resolved, params, adapters, strict=True)
        ]
        with progress_bar(use_tqdm, len(outputs)) as bar:
            texts = [_text_options(request, one) for request, one in zip(requests, params, strict=True)]
            constraints = [request.constraint for request in requests]
            self._engine.begin(
                self._generate(resolved, texts, constraints, adapters, priorities, outputs, Progress(bar))
            )()
        return outputs

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

    async def _generate(
        self,
        prompts: Sequence[Prompt],
        texts: Sequence[TextOptions],
        constraints: Sequence[tuple[str, Constraint] | None],
        adapters: Sequence[LoRARequest | None],
        priorities: Sequence[int],
        outputs: Sequence[RequestOutput],
        progress: Progress,
    ) -> None:
        """On the engine's thread. Fills `outputs`."""
        keys: list[str] = []  # of the grammars in use
        releases: list[Callable[[], None]] = []
        try:
            if any(adapters):
                prompts, releases = await with_adapters(self._adapters, prompts, adapters)
            prompts = [
                await self._constrained(i, prompt, constraint, keys)
                for i, (prompt, constraint) in enumerate(zip(prompts, constraints, strict=True))
            ]
            await generate_all(self._engine.client, self.model.tokenizer, prompts, texts, priorities, outputs, progress)
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

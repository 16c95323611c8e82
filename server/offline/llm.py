"""The offline API: `LLM(model).generate(prompts, SamplingParams(...))`, no server and no HTTP."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from ...engine.errors import ConfigError
from ...engine.link.messages import EngineInfo
from ..client.mailbox import EngineDeadError, EngineRefusedError
from ..client.thread import EngineThread
from ..errors import ApiError
from ..generation.embedding import check_dimensions
from ..grammar.tools import definitions
from ..observe.metrics import Metrics
from ..options.config import ServerConfig
from ..options.keywords import from_keywords, in_keywords
from ..text.model import TextModel, load_text_model
from ..text.spelled import unmarked
from ..wire.requests import ChatRequest
from .absent import absent
from .adapters import AdapterChoice
from .engine_args import EngineArgs
from .generate_all import Job, generate_all
from .jobs import Jobs
from .outputs import RequestOutput
from .patient import Call
from .pictures import Media, as_parts
from .pooled import PooledCalls
from .progress_bar import Progress, loading_bar, progress_bar
from .prompt_like import PromptLike, TokensPrompt
from .sampling_params import SamplingParams, validate
from .torchrun import launched

if TYPE_CHECKING:
    from .counters import Metric

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, Any]]
BACKLOG_STEPS = 1  # nobody watches the tokens come: while prompts wait, steps are as large as they can be


class LLM(PooledCalls, Jobs):
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
        disable_log_stats: bool = True,
        **options: Any,
    ) -> None:
        """`model`: folder or hub name; `chat_template`: Jinja template, or a file that has it; `pooling`: what `embed`
        does, auto, last, mean or cls; `generation_config`: auto, vserve or a file, the defaults of sampling;
        `hf_token`: for the hub, in this process's environment from here on (None and True: HF_TOKEN, or who has logged
        in); `use_tqdm_on_load`: a line that shows how far loading is, where somebody sees it; `disable_log_stats`:
        False: a log line on throughput, queue and cache while it is busy; `options`: as the flags of `vserve serve`,
        with underscores (`max_model_len=4096`, `config="options.yaml"`).

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
            kind = ConfigError if isinstance(error, ConfigError | EngineRefusedError) else EngineDeadError
            raise kind(in_keywords(str(error))) from None
        except BaseException:
            self.close()
            raise
        self._counts = Metrics(self._engine.client, ServerConfig(disable_log_stats=disable_log_stats))
        self._request_ids = itertools.count()
        self._queued: list[tuple[Sequence[RequestOutput], Callable[[], None]]] = []  # what enqueue has begun
        self._cache_salt: str | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        return cls(**engine_args.options)

    def __getattr__(self, name: str) -> Any:
        raise absent("LLM", name)

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
        given, media = self._given(cast(PromptLike, prompts or prompt_token_ids or []))
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
        pairs, media = self._rendered(messages, chat_template, add_generation_prompt, continue_final_message,
                                      chat_template_kwargs, tools)  # fmt: skip
        return self._run(pairs, sampling_params, use_tqdm, lora_request, media=media)

    def preprocess_chat(
        self,
        messages: Messages | Sequence[Messages],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[TokensPrompt]:
        """The prompts that `chat` makes of the conversations, for `generate`. Raises ValueError, also for pictures."""
        pairs, media = self._rendered(messages, chat_template, add_generation_prompt, continue_final_message,
                                      chat_template_kwargs, tools)  # fmt: skip
        if any(media):
            raise ValueError("token ids of pictures mean nothing without them: give the messages to chat()")
        return [TokensPrompt(prompt=text or "", prompt_token_ids=token_ids) for text, token_ids in pairs]

    def enqueue(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: AdapterChoice = None,
        priority: Sequence[int] | None = None,
    ) -> list[str]:
        """As `generate`, but returns at once, with the ids of the requests; wait_for_completion() has the answers."""
        given, media = self._given(prompts)
        job = self._job(given, sampling_params, lora_request, priority, media)
        self._queued.append((job.outputs, self._engine.begin(self._carry_out(job, Progress(None)))))
        return [output.request_id for output in job.outputs]

    def wait_for_completion(self, *, use_tqdm: bool | Callable[..., Any] = True) -> list[RequestOutput]:
        """The answers to all that was enqueued, in its order."""
        queued, self._queued = self._queued, []
        with progress_bar(use_tqdm, len(queued)) as bar:
            for _, wait in queued:
                wait()
                if bar is not None:
                    bar.update(1)
        return [output for outputs, _ in queued for output in outputs]

    def get_metrics(self) -> list[Metric]:
        """What /metrics of a server would say: Counter, Gauge and Histogram of counters.py, with name and labels."""
        from ..observe.exposition import EngineCollector
        from .counters import read

        return list(read(EngineCollector(self._counts, self._engine.client, self.model.names[0], "vllm:")))

    def reset_prefix_cache(self) -> bool:
        """What is cached so far is not hit any more; its blocks are taken as others are needed."""
        self._cache_salt = f"reset {next(self._request_ids)}"
        return True

    def get_tokenizer(self) -> Any:
        """The tokenizer of transformers. Raises ValueError where there is none."""
        try:
            return self.model.tokenizer.hf
        except ApiError as error:
            raise ValueError(in_keywords(error.message)) from None

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json sets, its `max_new_tokens` as max_tokens, and our defaults for the
        rest."""
        defaults: dict[str, Any] = dict(self.model.defaults)
        if self.model.max_new_tokens is not None:
            defaults["max_tokens"] = self.model.max_new_tokens
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

    def _rendered(
        self, messages: Messages | Sequence[Messages], chat_template: str | None, add_generation_prompt: bool,
        continue_final_message: bool, chat_template_kwargs: dict[str, Any] | None, tools: list[dict[str, Any]] | None,
    ) -> tuple[list[tuple[str | None, list[int]]], list[Media]]:  # fmt: skip
        """(text, token ids) of each conversation, and its pictures. Raises ValueError."""
        if not messages:
            raise ValueError("'messages' must not be empty.")
        several = not isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Messages], messages if several else [messages])
        tokenizer = self.model.tokenizer
        if chat_template is not None:
            tokenizer = tokenizer.with_template(chat_template)
        options = dict(chat_template_kwargs or {})
        pairs: list[tuple[str | None, list[int]]] = []
        media: list[Media] = []
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
        return pairs, media

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
        job = self._job(prompts, sampling_params, lora_request, priority, media)
        with progress_bar(use_tqdm, len(job.outputs)) as bar:
            self._engine.begin(self._carry_out(job, Progress(bar)))()
        return list(job.outputs)

    def _call(self) -> Call:
        self._check_open()
        return Call(self._engine.client, self.model.tokenizer, self._counts, self._cache_salt)

    def _carry_out(self, job: Job, progress: Progress) -> Coroutine[Any, Any, None]:
        """For the engine's thread. Fills the job's outputs."""
        call = self._call()
        return self._prepared(job, lambda ready: generate_all(call, ready, progress))

"""`LLM.embed`, `encode`, `classify`, `reward` and `score`: of texts comes no text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

from ...engine.link.messages import EngineInfo
from ...engine.link.sampling_params import LAST, Pooling
from ..client.thread import EngineThread
from ..errors import ApiError
from ..generation.choice import Prompt
from ..generation.embedding import (
    EmbeddingChoice,
    embedding,
    numbers,
    of_embeddings,
    resolve_embeddings,
    resolve_pooled,
)
from ..generation.pooling import pooled_values, pooling_of
from ..generation.scores import activated, activation_of, check_scores_pairs, cosine, encode_pair, score
from ..generation.tasks import CLASSIFY, EMBED, REWARD, check_task
from ..options.keywords import in_keywords
from ..options.text import POOLING_TASKS
from ..text.model import TextModel
from ..text.pairs import PairEncoder
from ..wire.scores import ScoreRequest
from .embed_all import embed_all, embedded
from .outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from .patient import Call
from .progress_bar import Progress, progress_bar
from .prompt_like import PromptLike, tokenised
from .sampling_params import PoolingParams, validate

Bar = bool | Callable[..., Any]
Texts = str | Iterable[str]
Output = TypeVar("Output")


class PooledCalls:
    """What `LLM` can do beside generating. All submit all prompts and answer in their order; each raises ValueError
    before anything is submitted, RuntimeError when the engine fails on a prompt."""

    model: TextModel
    _engine: EngineThread
    _request_ids: Iterator[int]

    @property
    def info(self) -> EngineInfo:
        raise NotImplementedError

    def _check_open(self) -> None:
        raise NotImplementedError

    def _call(self) -> Call:
        raise NotImplementedError

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        use_tqdm: Bar = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """An embedding of each prompt; see `generate`."""
        self._check_task(EMBED)
        request = (pooling_params or PoolingParams()).request()
        inputs = self._inputs(prompts, self.model.pooling.prefix)
        found = self._checked(lambda: resolve_embeddings(request, inputs, self.model, self.info))
        return self._pool([prompt for (prompt,) in found], use_tqdm, embedded)

    def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: Bar = True,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput]:
        """What /pooling has: numbers of each prompt, or of each of its tokens. `pooling_task`: embed, classify,
        token_embed or token_classify; None: what the model is for."""
        self._check_task(EMBED, CLASSIFY, REWARD)
        params, info, model = pooling_params or PoolingParams(), self.info, self.model
        request = params.request()
        if pooling_task not in (None, *POOLING_TASKS):
            raise ValueError(f"pooling_task is {pooling_task!r}: choose embed, classify, token_embed or token_classify")
        if None not in (pooling_task, params.task) and pooling_task != params.task:
            raise ValueError(
                f"pooling_task is {pooling_task!r}, and pooling_params have {params.task!r}: leave one out"
            )
        task = pooling_task or params.task

        def resolved() -> tuple[Pooling, list[Prompt]]:
            normalize, dimensions = request.is_normalized, request.dimensions
            pooling = pooling_of(task, model, info, normalize=normalize, dimensions=dimensions)
            limited = of_embeddings(model, info) if EMBED in info.tasks else info
            inputs = self._inputs(prompts, model.pooling.prefix if EMBED in info.tasks else "")
            return pooling, resolve_pooled(request, inputs, pooling, model, limited, param="input", is_text=False)

        pooling, found = self._checked(resolved)

        def output(id: str, choice: EmbeddingChoice, vector: bytes) -> PoolingRequestOutput:
            import torch  # slow

            token_ids = list(choice.prompt.token_ids)
            values = pooled_values(
                vector, token_ids, pooling, info, model.pooling,
                activation=activation_of(params.use_activation, model, info), normalize=request.is_normalized,
            )  # fmt: skip
            data = PoolingOutput(torch.tensor(values, dtype=torch.float32))
            return PoolingRequestOutput(id, data, token_ids, choice.num_cached_tokens)

        return self._pool(found, use_tqdm, output)

    def reward(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: Bar = True,
    ) -> list[PoolingRequestOutput]:
        """How good each token leaves a prompt, or each step of it."""
        self._check_task(REWARD, CLASSIFY)
        return self.encode(prompts, pooling_params, use_tqdm=use_tqdm, pooling_task="token_classify")

    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        use_tqdm: Bar = True,
        pooling_params: PoolingParams | None = None,
    ) -> list[ClassificationRequestOutput]:
        """How likely each class is."""
        self._check_task(CLASSIFY, REWARD)
        params, info = pooling_params or PoolingParams(), self.info
        request = params.request()

        def resolved() -> list[Prompt]:
            pooling = pooling_of("classify", self.model, info, normalize=None, dimensions=params.dimensions)
            return resolve_pooled(
                request, self._inputs(prompts), pooling, self.model, info, param="input", is_text=False
            )

        def output(id: str, choice: EmbeddingChoice, vector: bytes) -> ClassificationRequestOutput:
            activation = activation_of(params.use_activation, self.model, info)
            classes = ClassificationOutput(activated(numbers(vector), activation))
            given = list(choice.prompt.token_ids), choice.num_cached_tokens
            return ClassificationRequestOutput(id, classes, *given)

        return self._pool(self._checked(resolved), use_tqdm, output)

    def score(
        self,
        data_1: Texts,
        data_2: Texts,
        /,
        *,
        use_tqdm: Bar = True,
        pooling_params: PoolingParams | None = None,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts go with others: of one and many, or of as many pairs. `instruction`: what the first wants;
        `chat_template`: of pairs, in place of the model's."""
        self._check_task(CLASSIFY, EMBED)
        params, model = pooling_params or PoolingParams(), self.model
        keep = params.truncate_prompt_tokens if truncate_prompt_tokens is None else truncate_prompt_tokens
        body = {"data_1": _texts(data_1), "data_2": _texts(data_2), "truncate_prompt_tokens": keep,
                "instruction": instruction, "use_activation": params.use_activation}  # fmt: skip
        request = validate(ScoreRequest, body)
        queries, documents = request.queries_and_documents
        info, pairs = self.info, self._pairs
        if chat_template is not None:
            pairs = self._checked(
                lambda: PairEncoder(
                    model.tokenizer.with_template(chat_template), reranks=False, prefix=model.pooling.prefix
                )
            )
            if not pairs.takes_instructions:
                raise ValueError(
                    "chat_template is none of pairs: it must read messages of the roles query and document"
                )
        joined = CLASSIFY in info.tasks

        def resolved() -> list[Prompt]:
            check_scores_pairs(info)
            if joined:
                firsts = queries * len(documents) if len(queries) < len(documents) else queries
                ids = [encode_pair(pairs, request, info, *pair) for pair in zip(firsts, documents, strict=True)]
                return resolve_pooled(request, ids, Pooling(LAST, False, head=True), model, info, param="data_2")
            ids = [encode_pair(pairs, request, info, text, None) for text in (*queries, *documents)]
            limited = of_embeddings(model, info)
            return resolve_pooled(request, ids, embedding(model, info, False), model, limited, param="data_2")

        prompts = self._checked(resolved)
        found = self._pool(prompts, use_tqdm, lambda id, choice, vector: (id, choice, vector))
        count = len(documents)
        if joined:
            activation = activation_of(params.use_activation, model, info)
            scores = [score(vector, activation) for _, _, vector in found]
            firsts = found
        else:
            firsts = found[:-count] * (count if len(queries) == 1 else 1)
            found = found[-count:]
            scores = [cosine(one, other) for (_, _, one), (_, _, other) in zip(firsts, found, strict=True)]
        outputs = []
        for value, first, (id, choice, _) in zip(scores, firsts, found, strict=True):
            token_ids = list(choice.prompt.token_ids)
            token_ids = token_ids if joined else [*first[1].prompt.token_ids, *token_ids]
            outputs.append(ScoringRequestOutput(id, ScoringOutput(value), token_ids, choice.num_cached_tokens))
        return outputs

    @cached_property
    def _pairs(self) -> PairEncoder:
        return PairEncoder(self.model.tokenizer, self.info.reranks, self.model.pooling.prefix)

    def _pool(
        self, prompts: Sequence[Prompt], use_tqdm: Bar, output: Callable[[str, EmbeddingChoice, bytes], Output]
    ) -> list[Output]:
        ids = [str(next(self._request_ids)) for _ in prompts]
        with progress_bar(use_tqdm, len(prompts)) as bar:
            work = embed_all(self._call(), prompts, ids, Progress(bar), output)
            return self._engine.begin(work)()

    def _inputs(self, prompts: PromptLike | Sequence[PromptLike], prefix: str = "") -> list[list[int]]:
        return [token_ids for _, token_ids in tokenised(prompts, self.model.tokenizer, prefix)]

    def _check_task(self, *tasks: str) -> None:
        """Raises ValueError for a model that does none of these, RuntimeError when closed."""
        self._check_open()
        self._checked(lambda: check_task(self.info, *tasks))

    def _checked(self, work: Callable[[], Output]) -> Output:
        try:
            return work()
        except ApiError as error:
            raise ValueError(in_keywords(error.message)) from None


def _texts(given: Texts) -> Any:
    """Columns of tables and arrays are lists, too."""
    return list(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping) else given

"""A scripted engine behind the real server: every token, delay and death is the test's choice."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from fastapi import FastAPI
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from vserve.engine.link.media import MediaItem
from vserve.engine.link.messages import AdapterLoaded, EngineInfo, EngineStats, LoadAdapter, RequestOutput, StepOutputs
from vserve.engine.link.plan import TokenLogprobs
from vserve.engine.link.sampling_params import SamplingParams
from vserve.engine.options.config import EngineConfig
from vserve.server.app import create_app
from vserve.server.client.engine_client import EngineDeadError, Mailbox
from vserve.server.client.routing import ANYWHERE, Route
from vserve.server.options.config import ServerConfig
from vserve.server.text.model import TextModel, load_text_model

TEMPLATE = (
    "{% for message in messages %}{% if message.name == 'nobody' %}{{ raise_exception('nobody is here') }}"
    "{% endif %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if style %}[{{ style }}]{% endif %}{% endif %}"
)
CORPUS = "Hello world! How are you today? The answer is 42. Say it again, slowly. STOP now."
MAX_MODEL_LEN = 128


def save_tokenizer(folder: Path, core: FastTokenizer, template: str | None = TEMPLATE, **special: str) -> Path:
    core.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "TokenizersBackend", "model_max_length": 10**6, **special}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def byte_level_tokenizer() -> FastTokenizer:
    core = FastTokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator([CORPUS] * 3, trainer)
    return core


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tokenizer(tmp_path_factory.mktemp("model"), byte_level_tokenizer(), eos_token="<|im_end|>")
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 0], "temperature": 0.7, "top_k": 20, "do_sample": True})
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 1}))
    return folder


@pytest.fixture(scope="session")
def text_model(model_folder: Path) -> TextModel:
    return load_text_model(str(model_folder), ServerConfig(served_model_name=("test", "alias")))


@dataclasses.dataclass
class Submitted:
    id: int
    token_ids: list[int]
    sampling: SamplingParams
    priority: int
    cache_salt: str | None
    tenant: int = 0
    media: tuple[MediaItem, ...] = ()


class ScriptedEngine:
    """EngineClient's face. `script` says what a request generates: lists of token ids, one list an engine output."""

    def __init__(
        self, script: Callable[[Submitted], Iterable[Sequence[int]]], eos: int = 2, delay: float = 0.0
    ) -> None:
        self.config = EngineConfig(model="test")
        self.info = EngineInfo(
            max_model_len=MAX_MODEL_LEN, vocab_size=320, max_num_seqs=64, max_num_batched_tokens=512, block_size=16,
            num_blocks=100, num_kv_tokens=1600, enable_prefix_caching=True, scheduling_policy="fcfs", max_logprobs=20,
            dtype="float32", device="cpu", memory={"weights": 10, "kv_cache": 20}, startup_seconds={"load": 1.5},
            settings={"max_model_len": MAX_MODEL_LEN},
        )  # fmt: skip
        self.ready = True
        self.phase: Any = None
        self.down: str | None = None
        self.dead: str | None = None
        self.stalled: float | None = None
        self.retry_after = 1
        self.epoch = 1
        self.num_restarts = self.num_stalls = 0
        self.stats = EngineStats(num_blocks=100, num_free_blocks=100)
        self.stats_listeners: list[Callable[[StepOutputs], None]] = []
        self.engines = [self]
        self.past_stats = EngineStats()
        self.script = script
        self.eos = eos
        self.delay = delay  # seconds before each output; negative: all outputs pile up in the mailbox at once
        self.paced = True  # wait until the last output was read
        self.submitted: list[Submitted] = []
        self.adapters: dict[int, str] = {}  # id → path
        self.aborted: list[int] = []
        self.die_after: int | None = None  # outputs of all requests together
        self.fail_with: str | None = None  # ends each request with an error after its script
        self.num_outputs = 0
        self._open: dict[int, Mailbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(
        self,
        token_ids: list[int],
        sampling: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: int = 0,
        route: Route = ANYWHERE,
        media: tuple[MediaItem, ...] = (),
    ) -> Mailbox:
        if self.dead is not None:
            raise EngineDeadError(self.dead)
        request = Submitted(len(self.submitted), list(token_ids), sampling, priority, cache_salt, tenant, media)
        self.submitted.append(request)
        mailbox = Mailbox(request.id, time.monotonic())
        self._open[request.id] = mailbox
        task = asyncio.get_running_loop().create_task(self._run(request, mailbox))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return mailbox

    def submit_choices(self, n: int, token_ids: list[int], sampling: SamplingParams, **options: Any) -> list[Mailbox]:
        return [self.submit(token_ids, sampling.of_choice(i), **options) for i in range(n)]

    async def load_adapter(self, message: LoadAdapter) -> AdapterLoaded:
        await asyncio.sleep(self.delay)
        if "broken" in message.path:
            return AdapterLoaded(message.id, error=f"{message.path} is broken: mend it")
        self.adapters[message.id] = message.path
        return AdapterLoaded(message.id, 8, "base")

    def drop_adapter(self, id: int) -> None:
        del self.adapters[id]

    def abort(self, mailboxes: Iterable[Mailbox]) -> None:
        self.aborted += [m.id for m in mailboxes if self._open.pop(m.id, None) is not None]

    def die(self, cause: str) -> None:
        self.dead, self.ready = cause, False
        mailboxes, self._open = self._open, {}
        for mailbox in mailboxes.values():
            mailbox.fail(cause)

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def _run(self, request: Submitted, mailbox: Mailbox) -> None:
        outputs = [list(ids) for ids in self.script(request)]
        left = request.sampling.max_tokens
        for position, ids in enumerate(outputs):
            await self._pace(mailbox)
            if request.id not in self._open:
                return
            ids = ids[:left]
            left -= len(ids)
            finish = "stop" if ids and ids[-1] == self.eos else "length" if left == 0 else None
            first = position == 0
            output = RequestOutput(
                request.id,
                ids,
                finish,
                None,
                None if request.sampling.logprobs is None else [self._logprobs(i, request.sampling) for i in ids],
                4 if first else None,
                mailbox.arrival if first else None,
                prompt_logprobs=self._prompt_logprobs(request) if first else None,
            )
            self._put(mailbox, output)
            if finish:
                return
            if self.num_outputs == self.die_after:
                self.die("out of luck")
                return
        await self._pace(mailbox)
        if self.fail_with is not None and request.id in self._open:
            self._put(mailbox, RequestOutput(request.id, [], "error", error=self.fail_with))

    async def _pace(self, mailbox: Mailbox) -> None:
        if self.delay >= 0:
            await asyncio.sleep(self.delay)
            while self.paced and mailbox._output is not None:  # one output an event: transcripts are the same each time
                await asyncio.sleep(0)

    def _put(self, mailbox: Mailbox, output: RequestOutput) -> None:
        self.num_outputs += 1
        if output.finish_reason:
            del self._open[output.id]
        mailbox.put(output)
        self.stats = EngineStats(
            num_running=len(self._open), num_blocks=100, num_free_blocks=100 - len(self._open),
            num_steps=self.num_outputs, step_tokens=len(output.token_ids), num_preemptions=3, prefix_queries=50,
            prefix_hits=20, device_seconds=1.25, host_seconds=0.5,
        )  # fmt: skip
        for listener in self.stats_listeners:
            listener(StepOutputs([output], self.stats))

    @staticmethod
    def _prompt_logprobs(request: Submitted) -> list[TokenLogprobs] | None:
        """Of token i: -i, and token 5, a "#", is the likeliest at each place."""
        k = request.sampling.prompt_logprobs
        if k is None:
            return None
        return [TokenLogprobs(-1.0 * i, 2, [5, 6][:k], [-0.25, -0.75][:k]) for i in range(1, len(request.token_ids))]

    @staticmethod
    def _logprobs(token_id: int, sampling: SamplingParams) -> TokenLogprobs:
        k = sampling.logprobs or 0
        return TokenLogprobs(-0.5, 1, [token_id, *range(10, 10 + k)][:k], [-0.5, *(-1.0 - i for i in range(k))][:k])


@pytest.fixture
def engine(text_model: TextModel) -> ScriptedEngine:
    """Says "Hello world!" to everybody, a token an output, and ends with EOS."""
    return ScriptedEngine(script_of(text_model, "Hello world!"))


def script_of(model: TextModel, text: str, ends: bool = True) -> Callable[[Submitted], list[list[int]]]:
    ids = model.tokenizer.encode(text, False)
    return lambda request: [[token] for token in [*ids, *([2] if ends else [])]]


@pytest.fixture
def say(text_model: TextModel) -> Callable[..., Callable[[Submitted], list[list[int]]]]:
    return lambda text, ends=True: script_of(text_model, text, ends)


@pytest.fixture
def app(engine: ScriptedEngine, text_model: TextModel) -> FastAPI:
    return create_app(engine, ServerConfig(), text_model)


@pytest.fixture
def client(app: FastAPI) -> Iterable[Client]:
    client = Client(app)
    yield client
    client.close()


SPEAKING_TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }};{% endfor %}as <tool_call> json </tool_call>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


class Grammars:
    """Stands for the compiler of grammars: remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.held = 0

    async def acquire(self, constraint: Any, param: str, owner: str) -> str:
        self.asked.append((param, constraint))
        self.held += 1
        return "key"

    def release(self, key: str) -> None:
        self.held -= 1

    async def close(self) -> None: ...


@pytest.fixture(scope="session")
def thinker(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """A model that thinks in <think> and calls tools in <tool_call>."""
    folder = tmp_path_factory.mktemp("thinker")
    for file in model_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": SPEAKING_TEMPLATE}))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in ("<think>", "</think>"):
        entry = {"id": 320 + (token[1] == "/"), "content": token, "special": False, "normalized": False}
        tokenizer["added_tokens"].append(entry | {"single_word": False, "lstrip": False, "rstrip": False})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return load_text_model(str(folder), ServerConfig(served_model_name=("test",)))


class Thinking:
    """A server of the thinker, what its engine is asked, and what its grammars are."""

    def __init__(self, engine: ScriptedEngine, model: TextModel, **options: Any) -> None:
        self.engine, self.model, self.grammars = engine, model, Grammars()
        engine.info = msgspec.structs.replace(engine.info, max_model_len=2000, vocab_size=322)
        self.app = create_app(engine, ServerConfig(**options), model)
        self.state = self.app.state.server
        self.state.grammars = self.grammars
        self.client = Client(self.app)

    def says(self, text: str, size: int = 1, ends: bool = True) -> int:
        """From now on this, so many tokens an output. Returns how many there are."""
        ids = [*self.model.tokenizer.encode(text, False), *([2] if ends else [])]
        self.engine.script = lambda request: [ids[at : at + size] for at in range(0, len(ids), size)]
        return len(ids)

    @property
    def prompt(self) -> str:
        """What the engine read last."""
        return self.model.tokenizer.core.decode(self.engine.submitted[-1].token_ids, skip_special_tokens=False)


@pytest.fixture
def new_thinking(engine: ScriptedEngine, thinker: TextModel) -> Iterable[Callable[..., Thinking]]:
    """new_thinking(**options) → a server with these options, and of another `model`."""
    made: list[Thinking] = []

    def make(model: TextModel = thinker, **options: Any) -> Thinking:
        made.append(Thinking(engine, model, **options))
        return made[-1]

    yield make
    for thinking in made:
        thinking.client.close()


@pytest.fixture
def thinking(new_thinking: Callable[..., Thinking]) -> Thinking:
    return new_thinking()


@pytest.fixture
def new_client(engine: ScriptedEngine, text_model: TextModel) -> Iterable[Callable[..., Client]]:
    """new_client(**options) → the same of a server with these options, and of another `model`."""
    clients: list[Client] = []

    def make(model: TextModel = text_model, **options: Any) -> Client:
        clients.append(Client(create_app(engine, ServerConfig(**options), model)))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


class Client:
    """Requests without a socket; one event loop for the life of a test."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self._runner = asyncio.Runner()
        self._http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self._runner.run(self._http.request(method, path, **options))

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        if json is not None:
            options["json"] = json
        return self.request("POST", path, **options)

    def chat(self, **body: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], **body})

    def complete(self, **body: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "Hello", **body})

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(work)

    def close(self) -> None:
        self._runner.run(self._http.aclose())
        self._runner.close()


@contextlib.asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[int]:
    """The app behind uvicorn on a free port of the loopback, in this event loop."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none", timeout_graceful_shutdown=1))
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # a reader that stops is noticed soon
    sock.bind(("127.0.0.1", 0))
    server.install_signal_handlers = lambda: None  # type: ignore[method-assign, attr-defined]
    task = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        await task


@pytest.fixture
def serve(app: FastAPI) -> Callable[..., Any]:
    """serve(test, other=app) runs `await test(port)` against a real server of this application."""

    def run(test: Callable[[int], Coroutine[Any, Any, Any]], other: FastAPI = app) -> Any:
        async def main() -> Any:
            async with serving(other) as port:
                return await asyncio.wait_for(test(port), 120)

        return asyncio.run(main())

    return run

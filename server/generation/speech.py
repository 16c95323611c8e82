"""How the answers to a chat are to be read, and what they must look like: reasoning first, then text or tool calls."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from ...engine.link.sampling_params import Thinking
from ..errors import ApiError, bad_request, unsupported
from ..grammar.constraint import Constraint
from ..grammar.tools import ToolUse
from ..parsers.formats import ReasoningFormat, ToolFormat
from ..parsers.json_list import GENERIC
from ..parsers.reader import Reader, new_id
from ..parsers.text_reader import Reading
from ..text.model import TextModel
from ..text.shape import text_of
from ..text.tokenizer import Tokenizer
from ..wire.requests import ChatRequest
from .choice import Prompt, ReadOptions, TextOptions
from .prompt import turns_off_thinking

if TYPE_CHECKING:
    from ..grammar.service import GrammarService

SLOW_TOOLS = 64 << 10  # characters of schemas that are read on a thread
TAIL = 32  # tokens of a prompt's end that show whether the template has opened or closed the reasoning


@dataclass(frozen=True)
class Speech:
    use: ToolUse | None  # which tools may be called
    calls: ToolFormat | None  # how that is written; with `use`
    reasoning: ReasoningFormat | None
    include_reasoning: bool
    budget: int | None  # tokens of reasoning
    content: tuple[str, Constraint] | None  # what text must look like, and which parameter says so
    continued: str  # the message that the answer goes on from
    silent: bool = False  # the request turns reasoning off

    @staticmethod
    def of(request: ChatRequest, model: TextModel) -> Speech | None:
        """None: text is all that is expected. Raises ApiError (400) for what this model cannot do."""
        use, formats, content = request.tool_use, model.formats, request.constraint
        budget = request.thinking_token_budget
        if budget is not None and formats.reasoning is None:
            name = "thinking_token_budget"
            raise unsupported(name, f"'{name}' (the model is not known to reason: see --reasoning-parser)")
        if use is None and formats.reasoning is None:
            return None
        calls = formats.tools
        if use is not None and calls is None:
            if use.mode == "auto":
                raise unsupported(
                    "tools", "'tools' with 'tool_choice' auto (the model's chat template has no known format of tool "
                    "calls: see --tool-call-parser)",
                )  # fmt: skip
            calls = GENERIC
        if use is not None and use.mode == "auto" and content is not None and content[1].kind[:4] != "json":
            raise bad_request(
                f"'{content[0]}' of this kind cannot be combined with 'tools'; ask for JSON, or for no tools.",
                content[0],
            )
        if budget is not None and use is not None and calls is not None and calls.lead is not None:
            raise unsupported("thinking_token_budget", "'thinking_token_budget' with 'tools' of this model")
        final = request.messages[-1]
        continued = text_of(final["content"]) if request.continue_final_message and final["role"] == "assistant" else ""
        include = request.include_reasoning is not False
        constrained = use is not None or content is not None
        silent = constrained and turns_off_thinking(request, model.tokenizer)
        return Speech(use, calls, formats.reasoning, include, budget, content, continued, silent)

    async def prepare(
        self,
        grammars: GrammarService | None,
        owner: Hashable,
        prompts: Sequence[Prompt],
        text: TextOptions,
        tokenizer: Tokenizer,
    ) -> tuple[list[Prompt], TextOptions, str | None]:
        """Prompts and text options for this speech, and the key of a grammar, which the caller must release.

        `grammars`: where `is_constrained`; `owner`: for whom. Raises ApiError for what cannot be compiled, and where
        some prompts open the reasoning and others do not; no key is held then.
        """
        key, guarded = (None, False) if grammars is None else await self._constrain(grammars, owner)
        try:
            if len({self._opened(prompt, tokenizer) for prompt in prompts}) > 1:
                raise bad_request("The chat template begins these answers differently: ask for each alone.", "messages")
            applied = [self._applied(prompt, text, tokenizer, key, guarded) for prompt in prompts]
            return [prompt for prompt, _ in applied], applied[0][1], key
        except BaseException:
            if key is not None and grammars is not None:
                grammars.release(key)
            raise

    def _applied(
        self, prompt: Prompt, text: TextOptions, tokenizer: Tokenizer, key: str | None, guarded: bool
    ) -> tuple[Prompt, TextOptions]:
        if key is not None:
            prompt = prompt.with_grammar(key)
        opened = self._opened(prompt, tokenizer)
        if opened is None and self.silent and key is not None:
            # A mask that allows one word beside the grammar's makes that word likely: it would make the model think.
            opened = False
        thinking = self._thinking(opened, tokenizer) if key is not None or self.budget is not None else None
        if thinking is not None:
            prompt = replace(prompt, sampling=msgspec.structs.replace(prompt.sampling, thinking=thinking))
        if self.use is None and opened is False and self._ends_in_text:
            return prompt, text  # the template has closed the reasoning: only text follows
        return prompt, replace(text, read=self._read_options(opened, guarded))

    @property
    def is_constrained(self) -> bool:
        return self.use is not None or self.content is not None

    @property
    def _thinks_in_grammar(self) -> bool:
        return self.use is not None and self.calls is not None and self.calls.lead is not None

    async def _constrain(self, grammars: GrammarService, owner: Hashable) -> tuple[str | None, bool]:
        """(the key of a grammar, whether it guards the arguments of calls)"""
        if self.use is None:
            assert self.content is not None
            return await grammars.acquire(self.content[1], self.content[0], owner), False
        assert self.calls is not None
        work = partial(self.use.constraints, self.calls, None if self.content is None else self.content[1])
        attempts = await asyncio.to_thread(work) if self.use.size > SLOW_TOOLS else work()
        may_be_free = self.use.mode == "auto" and self.content is None and not any(t.strict for t in self.use.callable)
        for attempt in attempts:
            try:
                return await grammars.acquire(attempt, "tools", owner), True
            except ApiError as error:
                # Where there is no room for it now, nobody is answered without it: that would be told to no one.
                if error.status != 400 or (attempt is attempts[-1] and not may_be_free):
                    raise
        return None, False

    def _opened(self, prompt: Prompt, tokenizer: Tokenizer) -> bool | None:
        """Whether the answer begins within the reasoning (True), after it (False), or may begin with it (None)."""
        if self.reasoning is None:
            return None
        begin, end = self.reasoning.begin, self.reasoning.end
        if begin in self.continued or end in self.continued:
            return self.continued.rfind(begin) > self.continued.rfind(end)
        tail = tokenizer.core.decode(list(prompt.token_ids[-TAIL:]), skip_special_tokens=False).rstrip()
        opened = True if tail.endswith(begin) else False if tail.endswith(end) else None
        return True if opened is None and self.reasoning.at_once else opened

    def _thinking(self, opened: bool | None, tokenizer: Tokenizer) -> Thinking | None:
        """What the engine must know. Where the beginning has no token of its own, it cannot tell it from text."""
        if self.reasoning is None or opened is False or self._thinks_in_grammar:
            return None
        begin = tokenizer.core.token_to_id(self.reasoning.begin)
        if begin is None and not opened:
            return None
        ending = self.reasoning.end + self.reasoning.between
        end = tokenizer.core.token_to_id(ending)
        tokens = tokenizer.encode(ending, False) if end is None else [end]
        return Thinking(-1 if begin is None else begin, tuple(tokens), bool(opened), self.budget)

    @property
    def _ends_in_text(self) -> bool:
        return self.reasoning is not None and self.reasoning.answer is None and self.reasoning.channels is None

    def _read_options(self, open: bool | None, guarded: bool) -> ReadOptions:
        use, calls, reasoning = self.use, self.calls, self.reasoning
        tools = {tool.name: tool.schema for tool in use.callable} if use is not None else {}

        def read(reader: Reader) -> Reading[None]:
            if reasoning is not None:
                yield from reasoning.read(reader, open, None if use is None else calls)
            if use is not None and calls is not None:
                yield from calls.read(reader)

        def reader() -> Reader:
            return Reader(read, tools, streams=guarded, new_id=new_id if calls is None else calls.new_id)

        markers: Sequence[str] = () if calls is None or use is None else calls.markers
        if reasoning is not None:
            markers = (*markers, *reasoning.markers)
        return ReadOptions(
            reader,
            frozenset(markers),
            self.include_reasoning,
            max_calls=1 if use is not None and not use.parallel else None,
            ending="stop" if use is not None and use.mode == "named" else "tool_calls",
        )

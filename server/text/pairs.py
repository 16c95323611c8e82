"""A query and a document as one prompt: by a template of pairs, where the model has one, or as its tokenizer joins two
texts."""

from __future__ import annotations

from typing import Any

from ..errors import bad_request
from .encoding import MOST
from .tokenizer import Pair, Tokenizer

# Qwen3-Reranker's own format, from its model card: the answer is "yes" or "no".
QWEN3_RERANKER = """<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer \
can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ instruction or 'Given a web search query, retrieve relevant passages that answer the query' }}
<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}
<Document>: {{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>
<|im_start|>assistant
<think>

</think>

{{ '' }}"""


def joins_pairs(template: str) -> bool:
    """Whether it is a template of pairs, as vLLM has them: of messages whose roles are query and document."""
    return all(f"'{role}'" in template or f'"{role}"' in template for role in ("query", "document"))


class PairEncoder:
    """Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, reranks: bool, prefix: str = "") -> None:
        """reranks: the model is Qwen3-Reranker, or one like it; prefix: of texts that are embedded, not joined."""
        self.tokenizer = tokenizer
        self._prefix = prefix
        self._template: Tokenizer | None = None
        if tokenizer.has_chat_template and joins_pairs(tokenizer.template().source):
            self._template = tokenizer
        elif reranks:
            self._template = tokenizer.with_template(QWEN3_RERANKER)

    @property
    def takes_instructions(self) -> bool:
        return self._template is not None

    def alone(self, text: str) -> Pair:
        """A text that is embedded."""
        return Pair(self.tokenizer.encode(self._prefix + text, True))

    def cut(self, text: str, most: int | None) -> str:
        """Its first `most` tokens; None and 0: all."""
        return self.tokenizer.cut(text[: most * MOST], most) if most else text

    def encode(self, query: str, document: str, instruction: str | None, most: int | None) -> Pair:
        """most: tokens of the prompt, to which the document is cut where it has more; None: it is not cut.

        Raises ApiError (400), also where no document at all would fit.
        """
        pair = self._encode(query, document, instruction)
        if most is None or len(pair.token_ids) <= most:
            return pair
        document = document[: most * MOST]
        beyond = len(self._encode(query, document, instruction).token_ids) - most
        left = self.tokenizer.count(document) - max(0, beyond)
        for room in (left, left - 4, left - 16):  # cut, a word may become more tokens than it was
            if room < 1:
                break
            pair = self._encode(query, self.tokenizer.cut(document, room), instruction)
            if len(pair.token_ids) <= most:
                return pair
        raise bad_request(
            f"'truncate_prompt_tokens' is {most}, and without its document this pair has more tokens: raise it, or "
            "shorten the query.",
            "truncate_prompt_tokens",
        )

    def _encode(self, query: str, document: str, instruction: str | None) -> Pair:
        if self._template is None:
            if instruction is not None:
                raise bad_request(
                    "'instruction' needs a template of pairs, and this model has none: leave it out, or start the "
                    "server with --chat-template.",
                    "instruction",
                )
            return self.tokenizer.encode_pair(query, document)
        messages: list[dict[str, Any]] = [
            {"role": "query", "content": query},
            {"role": "document", "content": document},
        ]
        if instruction is not None:
            messages.insert(0, {"role": "system", "content": instruction})
        text = self._template.render(messages, {"instruction": instruction, "add_generation_prompt": True})
        return Pair(self._template.encode_rendered(text, add_special_tokens=False))

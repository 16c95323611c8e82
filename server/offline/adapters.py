"""Adapters of the offline API: `llm.generate(prompts, lora_request=LoRARequest("sql", 1, "./sql-adapter"))`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import ApiError
from ..generation.adapters import Adapters
from ..generation.choice import Prompt
from ..options.keywords import in_keywords


@dataclass(frozen=True)
class LoRARequest:
    """As vLLM has it. The name says which adapter: another path under a name that is known is loaded in its place."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False  # read it anew though name and path are known

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise ValueError(f"lora_int_id is {self.lora_int_id}: it must be at least 1")
        if not self.lora_name or not self.lora_path:
            raise ValueError("a LoRARequest needs a lora_name and a lora_path")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path


AdapterChoice = LoRARequest | Sequence[LoRARequest | None] | None


def one_each(choice: AdapterChoice, count: int) -> list[LoRARequest | None]:
    """Of each prompt. Raises ValueError."""
    if choice is None or isinstance(choice, LoRARequest):
        return [choice] * count
    if not isinstance(choice, Sequence) or not all(isinstance(one, LoRARequest | None) for one in choice):
        raise ValueError(f"lora_request is {choice!r:.60}: give a LoRARequest, or one (or None) each")
    if len(choice) != count:
        raise ValueError(f"{len(choice)} lora_requests for {count} prompts: give one for all, or one each")
    return list(choice)


async def with_adapters(
    adapters: Adapters, prompts: Sequence[Prompt], requests: Sequence[LoRARequest | None]
) -> tuple[list[Prompt], list[Callable[[], None]]]:
    """The prompts under their adapters, which are loaded where they are not; and what lets go of these. Raises
    ValueError."""
    found: list[Prompt] = []
    releases: list[Callable[[], None]] = []
    for prompt, request in zip(prompts, requests, strict=True):
        if request is None:
            found.append(prompt)
            continue
        try:
            adapter = await adapters.ensure(request.lora_name, request.lora_path, anew=request.load_inplace)
        except BaseException as error:
            for release in releases:
                release()
            if isinstance(error, ApiError):
                raise ValueError(f"lora_request {request.lora_name!r}: {in_keywords(error.message)}") from None
            raise
        releases.append(adapter.use())
        found.append(prompt.with_adapter(adapter.id))
    return found, releases

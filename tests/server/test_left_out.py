"""What clients name as often as they like: the work for it grows with the request, not with its square."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vserve.server.dialects.as_chat import SamplingFields
from vserve.server.dialects.messages.blocks import BILLING, system_text
from vserve.server.dialects.responses.tools import Offer
from vserve.server.errors import ApiError
from vserve.server.grammar.tools import MAX_NAME, MAX_TOOLS

MANY = 1000
FUNCTION = {"type": "function", "name": "f"}
BUILT_IN = {"type": "web_search"}


class Counted(str):
    """A text that counts how often it is compared, and how much of it is copied."""

    compared = copied = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__

    def _part(self, text: str) -> Counted:
        Counted.copied += len(text)
        return Counted(text)

    def __getitem__(self, index: Any) -> Counted:
        return self._part(str.__getitem__(self, index))

    def partition(self, separator: str) -> Any:
        return tuple(self._part(part) for part in str.partition(self, separator))


@pytest.fixture(autouse=True)
def none_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counted, "compared", 0)
    monkeypatch.setattr(Counted, "copied", 0)


def leave_out(names: list[str]) -> list[str]:
    fields = SamplingFields()
    for name in names:
        fields.leave_out(name)
    return fields.ignored


@pytest.mark.parametrize("kept", [leave_out, lambda names: list(Offer.of([{"type": name} for name in names]).left_out)])
def test_what_is_left_out_is_not_compared_with_all_before(kept: Callable[[list[str]], list[str]]) -> None:
    names = [Counted(f"t{number}") for number in range(MANY)]
    found = kept([*names, *names[: MAX_TOOLS - MANY]])
    assert Counted.compared < 10 * MANY
    assert found == names, "each once, in their order"


def test_lines_before_a_system_message_are_cut_off_at_once() -> None:
    text = f"{BILLING} x\n" * MANY + "Be kind.\nAnd brief."
    assert system_text(Counted(text)) == "Be kind.\nAnd brief."
    assert Counted.copied <= len(text)
    assert system_text(f"{BILLING} x\n{BILLING} y") == system_text(f"{BILLING} x\n") == ""
    assert system_text(f"\n{BILLING} x") == f"\n{BILLING} x"


def test_functions_that_are_allowed_twice_are_allowed_once() -> None:
    space = {"type": "namespace", "name": "s", "tools": [{**FUNCTION, "name": f"f{i}"} for i in range(MANY)]}
    offer = Offer.of([space, FUNCTION])
    named = [{"type": "namespace", "name": "s"}, FUNCTION, {**FUNCTION, "name": "f7", "namespace": "s"}]
    choice = offer.choice({"type": "allowed_tools", "tools": named * 30})
    names = [tool["function"]["name"] for tool in choice["allowed_tools"]["tools"]]
    assert names == [*(f"s__f{i}" for i in range(MANY)), "f"]


@pytest.mark.parametrize(
    "tools, allowed, param",
    [
        ([BUILT_IN] * (MAX_TOOLS + 1), [], "tools"),
        ([{"type": "namespace", "name": "s", "tools": [BUILT_IN] * (MAX_TOOLS + 1)}], [], "tools[0].tools"),
        ([{"type": "namespace", "name": "s", "tools": [FUNCTION] * MANY}] * 2, [], "tools"),
        ([{"type": "namespace", "name": "s" * (MAX_NAME + 1), "tools": [FUNCTION]}], [], "tools[0].name"),
        ([FUNCTION], [FUNCTION] * (MAX_TOOLS + 1), "tool_choice.tools"),
        ([BUILT_IN, {"type": "function", "name": []}], [{"type": []}], "tool_choice.tools[0].name"),
    ],
)
def test_tools_have_an_end(tools: list[Any], allowed: list[Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        Offer.of(tools).choice({"type": "allowed_tools", "tools": allowed})
    assert refused.value.status == 400 and refused.value.param == param


def test_too_many_tools_are_a_400(thinking: Any) -> None:
    answer = thinking.client.post("/v1/responses", {"input": "Hi", "tools": [BUILT_IN] * (MAX_TOOLS + 1)})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "'tools' has 1025 entries; at most 1024 are allowed."

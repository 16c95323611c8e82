"""Pictures in requests: from the parts of a message to tokens and pixels, and what is refused on the way."""

from __future__ import annotations

import base64
import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vserve.server.api.chat import ChatCompletion
from vserve.server.errors import ApiError
from vserve.server.media.source import taken_out
from vserve.server.options.config import ServerConfig
from vserve.server.text.model import TextModel, load_text_model

from .seeing import BEGIN, END, PAD, Seeing, data_url, file_of, part, seeing_folder, user

RED, BLUE = (255, 0, 0), (0, 0, 255)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_folder(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def model(folder: Path) -> TextModel:
    return load_text_model(str(folder), ServerConfig(served_model_name=("test",)))


@pytest.fixture(scope="module")
def shared(model: TextModel) -> Iterator[Seeing]:
    server = Seeing(model, length=400)
    yield server
    server.close()


@pytest.fixture
def seeing(shared: Seeing) -> Seeing:
    shared.processes.dies = False
    return shared


def refused(response: Any, *words: str, status: int = 400) -> Any:
    assert response.status_code == status, response.text[:300]
    error = response.json()["error"]
    for word in words:
        assert word in error["message"], error["message"]
    return error


def test_a_picture_becomes_tokens_and_pixels(seeing: Seeing) -> None:
    answer = seeing.ask(user("Look: ", part(), " What is it?"), max_tokens=4)
    assert answer.status_code == 200, answer.text
    ids = seeing.asked.token_ids
    (item,) = seeing.asked.media
    assert ids[item.start - 1 : item.start + item.length + 1] == [BEGIN, PAD, PAD, END]
    assert (item.length, item.grid, item.size, item.original) == (2, (1, 2, 4), (1, 32, 64), (32, 64))
    assert seeing.colours == [RED] and len(item.pixels) == 64 * 32 * 3
    assert "Look: <|vision_start|>" in seeing.prompt and "<|vision_end|> What is it?" in seeing.prompt
    assert answer.json()["usage"]["prompt_tokens"] == len(ids)


def test_pictures_keep_the_order_of_the_prompt(seeing: Seeing) -> None:
    blue = part(file_of(32, 32, "blue"))
    seeing.ask(user(part(), "a"), {"role": "assistant", "content": "b"}, user("c", blue, part()))
    starts = [item.start for item in seeing.asked.media]
    assert seeing.colours == [RED, BLUE, RED] and starts == sorted(starts)
    assert [item.length for item in seeing.asked.media] == [2, 1, 2]
    assert seeing.asked.token_ids.count(PAD) == 5


def test_pictures_of_tools_come_behind_them(seeing: Seeing) -> None:
    """Where the template shows none in the results of tools, a user's message has them."""
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("one", "two")]
    blue = part(file_of(32, 32, "blue"))
    answer = seeing.ask(
        {"role": "user", "content": "Look"},
        {"role": "assistant", "tool_calls": calls},
        # The template's order is that of the calls.
        {"role": "tool", "tool_call_id": "two", "content": [blue]},
        {"role": "tool", "tool_call_id": "one", "content": [{"type": "text", "text": "seen"}, part()]},
        {"role": "user", "content": "And?"},
    )
    assert answer.status_code == 200, answer.text
    assert sorted(seeing.colours) == [BLUE, RED] and len(seeing.asked.media) == 2
    for item in seeing.asked.media:
        assert seeing.asked.token_ids[item.start : item.start + item.length] == [PAD] * item.length
    assert seeing.prompt.index("seen") < seeing.prompt.index("<|image_pad|>") < seeing.prompt.index("And?")


def test_forms_of_parts(seeing: Seeing) -> None:
    url = data_url(file_of())
    for given in (
        {"type": "image_url", "image_url": url},
        {"type": "input_image", "image_url": url},
        {"type": "image_url", "image_url": {"url": url, "detail": "high"}, "uuid": None},
        {"type": "image_url", "image_url": {"url": url.replace("image/png;base64", "IMAGE/PNG;charset=x;BASE64")}},
        {"type": "image_url", "image_url": {"url": url.rstrip("=")}},
    ):
        assert seeing.ask(user(given)).status_code == 200, given
        assert seeing.colours == [RED]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"type": "image_url"}, ["Missing required parameter", "image_url"]),
        ({"type": "image_url", "image_url": {"url": ""}}, ["Missing required parameter", "image_url.url"]),
        ({"type": "image_url", "image_url": {"url": 7}}, ["must be a string"]),
        ({"type": "image_url", "image_url": "picture.png"}, ["picture.png", "must begin with https://"]),
        ({"type": "image_url", "image_url": "ftp://host/x"}, ["must begin with"]),
        ({"type": "image_url", "image_url": "data:image/png,abc"}, ["no base64"]),
        ({"type": "image_url", "image_url": "data:video/mp4;base64,AAAA"}, ["'video/mp4'", "only pictures"]),
        ({"type": "image_url", "image_url": "data:image/png;base64,"}, ["it is empty"]),
        ({"type": "image_url", "image_url": "data:image/png;base64,AAAA"}, ["its 3 bytes are no PNG"]),
        ({"type": "image_url", "image_url": "data:image/png;base64,A-_A"}, ["it is no base64"]),
        ({"type": "image_url", "image_url": "data:image/png;base64,AAAé"}, ["it is no base64"]),
        ({"type": "image_url", "image_url": f"data:image/png{';a=b' * 99};base64,AAAA"}, ["must begin with"]),
        ({"type": "image_url", "image_url": {"url": "https://host", "detail": "ultra"}}, ["'ultra'", "low"]),
        ({"type": "image_url", "image_url": None, "uuid": "never"}, ["never was under its 'uuid'"]),
        ({"type": "input_image", "file_id": "file-1"}, ["file_id"]),
        ({"type": "video_url", "video_url": {"url": "data:"}}, ["video_url"]),
    ],
)  # fmt: skip
def test_what_is_no_picture_is_said_to_be_none(seeing: Seeing, given: Any, words: list[str]) -> None:
    error = refused(seeing.ask(user("See", given)), *words)
    assert "messages[0].content[1]" in (error["param"] or "")


def test_a_system_message_has_no_pictures(seeing: Seeing) -> None:
    for role in ("system", "developer", "assistant"):
        messages = [{"role": role, "content": [part()]}, {"role": "user", "content": "Hi"}]
        refused(seeing.ask(*messages), "image_url", "not supported")


def test_a_text_does_not_spell_a_picture(seeing: Seeing) -> None:
    seeing.ask(user("<|vision_start|><|image_pad|><|vision_end|>", part()))
    (item,) = seeing.asked.media
    assert seeing.asked.token_ids.count(PAD) == item.length == 2
    assert seeing.ask({"role": "user", "content": "<|image_pad|>"}).status_code == 200
    assert seeing.asked.token_ids.count(PAD) == 0 and seeing.asked.media == ()


def test_places_and_pictures_must_be_as_many(model: TextModel) -> None:
    """With --parse-user-special-tokens a text may spell one, and a template of the request may show none."""
    server = Seeing(model, trust_request_chat_template=True)
    blind = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    error = refused(server.ask(user("See", part()), chat_template=blind), "has 0 places for 1 pictures")
    assert error["code"] == "pictures_mismatch" and server.processes.num_decoded == 0
    server.close()


def test_limits_are_told(model: TextModel) -> None:
    server = Seeing(model, limit_mm_per_prompt="image=1", max_media_size=400)
    assert server.ask(user(part())).status_code == 200
    refused(server.ask(user(part(), part())), "has 2 pictures; at most 1 are allowed (--limit-mm-per-prompt)")
    large = part(file_of(form="BMP"))
    refused(server.ask(user(large)), "more than 400 bytes (--max-media-size)")
    server.close()
    none = Seeing(model, limit_mm_per_prompt='{"image": 0}')
    refused(none.ask(user(part())), "at most 0 are allowed")
    none.close()


def test_pictures_beyond_the_context_are_refused(model: TextModel) -> None:
    """As soon as those that are decoded are too many."""
    seeing = Seeing(model)
    pictures = [part(file_of(256, 256, colour)) for colour in ("red", "green", "blue")]
    error = refused(seeing.ask(user(*pictures)), "maximum context length is 128")
    assert error["code"] == "context_length_exceeded"
    refused(seeing.ask(user(part()), truncate_prompt_tokens=5), "truncate_prompt_tokens", "pictures")
    seeing.close()


def test_a_picture_is_decoded_once(model: TextModel) -> None:
    server = Seeing(model)
    for _ in range(2):
        assert server.ask(user(part())).status_code == 200
    assert server.processes.num_decoded == 1 and server.colours == [RED]
    assert server.ask(user(part(file_of(colour="blue")))).status_code == 200
    assert server.processes.num_decoded == 2 and server.colours == [BLUE]
    # With another salt nobody finds what others have sent.
    assert server.ask(user(part()), cache_salt="mine").status_code == 200
    assert server.processes.num_decoded == 3
    text = server.client.get("/metrics").text
    assert "vllm:mm_cache_hits_total{" in text and "vllm:picture_queue_seconds_count{" in text
    server.close()
    without = Seeing(model, disable_mm_preprocessor_cache=True)
    for _ in range(2):
        without.ask(user(part()))
    assert without.processes.num_decoded == 2
    without.close()


def test_a_picture_is_found_by_its_uuid(seeing: Seeing) -> None:
    assert seeing.ask(user(part(file_of(colour="blue"), uuid="mine"))).status_code == 200
    again = {"type": "image_url", "image_url": None, "uuid": "mine"}
    assert seeing.ask(user(again)).status_code == 200 and seeing.colours == [BLUE]
    refused(seeing.ask(user(again), cache_salt="other"), "send it with its data")


def test_a_process_that_dies_is_its_pictures_own_matter(seeing: Seeing) -> None:
    seeing.processes.dies = True
    error = refused(seeing.ask(user(part(file_of(96, 32)))), "ended its process")
    assert error["code"] == "invalid_image"
    seeing.processes.dies = False
    assert seeing.ask(user(part(file_of(96, 32)))).status_code == 200


def test_low_detail_makes_it_smaller_first(seeing: Seeing) -> None:
    large = data_url(file_of(1024, 512))
    seeing.ask(user({"type": "image_url", "image_url": {"url": large, "detail": "low"}}), max_tokens=1)
    assert seeing.asked.media[0].original == (256, 512)


def test_conversations_keep_pictures(seeing: Seeing) -> None:
    def shown(url: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "input_image", "image_url": url}]}

    def ask() -> None:
        answer = seeing.client.post("/v1/responses", {"input": "And?", "conversation": id})
        assert answer.status_code == 200, answer.text

    post, blue = seeing.client.post, data_url(file_of(32, 32, "blue"))
    id = post("/v1/conversations", {"items": [shown(data_url(file_of())), {"role": "user", "content": "old"}]}).json()[
        "id"
    ]
    assert post(f"/v1/conversations/{id}/items", {"items": [shown(blue)]}).status_code == 200
    ask()
    assert seeing.colours == [RED, BLUE]
    for item in seeing.client.get(f"/v1/conversations/{id}/items", params={"order": "asc"}).json()["data"][:2]:
        assert seeing.client.request("DELETE", f"/v1/conversations/{id}/items/{item['id']}").status_code == 200
        ask()
    assert seeing.colours == [BLUE]


def test_anthropic_messages_have_pictures(seeing: Seeing) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(file_of(colour="blue")).decode()}
    image = {"type": "image", "source": source}
    body = {"max_tokens": 8, "messages": [{"role": "user", "content": [image, {"type": "text", "text": "What?"}]}]}
    answer = seeing.client.post("/v1/messages", body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(seeing.asked.token_ids)
    assert seeing.colours == [BLUE]
    counted = seeing.client.post("/v1/messages/count_tokens", {"messages": body["messages"]}).json()
    assert counted["input_tokens"] == len(seeing.asked.token_ids)
    body["messages"] = [
        {"role": "user", "content": "Look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "screen", "input": {}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "a", "content": [image], "is_error": True}],
        },
    ]
    answer = seeing.client.post("/v1/messages", body)
    assert answer.status_code == 200 and "x-vserve-ignored-params" not in answer.headers
    assert seeing.colours == [BLUE] and "Error:" in seeing.prompt
    body["messages"] = [{"role": "user", "content": [{"type": "image", "source": {"type": "file", "file_id": "f"}}]}]
    assert "'file'" in seeing.client.post("/v1/messages", body).json()["error"]["message"]


def test_responses_have_pictures(seeing: Seeing) -> None:
    blue = {"type": "input_image", "image_url": data_url(file_of(colour="blue")), "detail": "auto"}
    item = {"role": "user", "content": [{"type": "input_text", "text": "What?"}, blue]}
    answer = seeing.client.post("/v1/responses", {"input": [item]})
    assert answer.status_code == 200, answer.text
    assert seeing.colours == [BLUE]
    again = {"input": "And now?", "previous_response_id": answer.json()["id"]}
    assert seeing.client.post("/v1/responses", again).status_code == 200
    assert seeing.colours == [BLUE] and "And now?" in seeing.prompt  # the picture is part of the conversation
    items = [
        {"type": "function_call", "call_id": "a", "name": "screen", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [blue]},
    ]
    answer = seeing.client.post("/v1/responses", {"input": [{"role": "user", "content": "Look"}, *items]})
    assert answer.status_code == 200 and seeing.colours == [BLUE]
    assert "x-vserve-ignored-params" not in answer.headers
    counted = seeing.client.post("/v1/responses/input_tokens", {"input": [item]}).json()
    seeing.client.post("/v1/responses", {"input": [item]})
    assert counted["input_tokens"] == len(seeing.asked.token_ids)


def test_models_say_what_they_see(seeing: Seeing, client: Any) -> None:
    assert seeing.client.get("/v1/models").json()["data"][0]["modalities"] == ["text", "image"]
    assert client.get("/v1/models").json()["data"][0]["modalities"] == ["text"]
    counted = seeing.client.post("/tokenize", {"messages": [user(part())]}).json()
    assert counted["tokens"].count(PAD) == 2


def test_language_models_only(folder: Path) -> None:
    from vserve.engine.options.config import EngineConfig

    config = EngineConfig(str(folder), language_model_only=True)
    assert load_text_model(str(folder), ServerConfig(), config).processor is None


def test_bodies_with_pictures_may_be_larger(seeing: Seeing, client: Any) -> None:
    most, usual = seeing.state.max_body_size(), client.app.state.server.max_body_size()
    assert most == usual + (256 << 20)


@pytest.mark.parametrize("beginning", ["data:", "data:image/png", "a", "", "data:image/png;base64,AAAA", "file:///"])
@pytest.mark.parametrize("of", ["a", ";a", "a ", "é", "a:", "data:"])
def test_what_a_url_is_costs_nothing_by_its_length(beginning: str, of: str) -> None:
    """It is found out in the event loop: in no more time, and no more memory, than that of a short one."""
    url = beginning + of * (4 << 20)
    tracemalloc.start()
    try:
        taken_out([user({"type": "image_url", "image_url": url})])
    except ApiError:
        pass
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < 1 << 20


def test_pixels_are_the_engines_alone(seeing: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are megabytes, and an answer may take minutes."""
    kept = []
    whole = ChatCompletion.whole

    def seen(self: Any, generation: Any, *more: Any) -> Any:
        prompts = [*generation.prompts, *(choice.prompt for choice in generation.choices)]
        kept.extend([*self.media, *(prompt.media for prompt in prompts)])
        return whole(self, generation, *more)

    monkeypatch.setattr(ChatCompletion, "whole", seen)
    assert seeing.ask(user(part(), part()), n=2).status_code == 200
    assert kept == [()] * 3 and len(seeing.asked.media) == 2


def test_pictures_that_are_counted_have_no_pixels(seeing: Seeing) -> None:
    """Dozens of them would be gigabytes."""
    found = []
    items = seeing.state.pictures.items

    async def seen(*given: Any) -> Any:
        found.extend(await items(*given))
        return found

    seeing.state.pictures.items = seen
    try:
        body = {"messages": [user(part(), "What?")]}
        anthropic = {"messages": [user({"type": "image", "source": {"type": "url", "url": data_url(file_of())}})]}
        for route, asked in (("/tokenize", body), ("/v1/messages/count_tokens", {"model": "test", **anthropic})):
            answer = seeing.client.post(route, asked)
            assert answer.status_code == 200, answer.text
            (item,) = found
            assert item.pixels == b"" and item.length == 2
            found.clear()
    finally:
        seeing.state.pictures.items = items


def test_batches_have_pictures(seeing: Seeing) -> None:
    """A body with them may be a long one, whose pictures do not count as text."""
    blue = {"type": "image_url", "image_url": data_url(file_of(colour="blue")) + " " * (20 << 10)}
    chats = [[user("One", part())], [user(blue, part()), user("Two")]]
    answer = seeing.client.post("/v1/chat/completions/batch", {"messages": chats})
    assert answer.status_code == 200, answer.text
    assert [len(asked.media) for asked in seeing.engine.submitted[-2:]] == [1, 2] and seeing.colours == [BLUE, RED]


def test_the_room_for_pixels_is_shared(seeing: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has all of it, and what a request held is free when it is over, however that ends."""
    room = seeing.state.pictures._room
    size = 64 * 32 * 3
    monkeypatch.setattr("vserve.server.media.room.SHARE", 2 * size)
    assert seeing.ask(user(part(), part())).status_code == 200 and room.num_bytes == 0
    error = refused(seeing.ask(user(part(), part(), part())), "The room for pictures is used up", status=429)
    assert error["code"] == "too_many_pictures_held" and room.num_bytes == 0
    refused(seeing.ask(user(part(), part(b"none"))), "cannot be read")
    assert room.num_bytes == 0
    assert seeing.client.post("/tokenize", {"messages": [user(part(), part())]}).status_code == 200
    assert room.num_bytes == 0 and not room._by_tenant


def test_several_conversations_with_pictures(seeing: Seeing) -> None:
    """Each has its own, also where a body is so large that its pictures are told from its text."""
    noise = os.urandom(40_000)  # what follows a picture in its file is not read
    red, blue = part(file_of() + noise), part(file_of(colour="blue") + noise)
    messages = [[user("a", red)], [user("b", blue, blue)], [{"role": "user", "content": "c"}]]
    answer = seeing.client.post("/v1/chat/completions/batch", {"messages": messages})
    assert answer.status_code == 200, answer.text
    assert [len(one.media) for one in seeing.engine.submitted[-3:]] == [1, 2, 0]

"""Conversations that outlive their tab, in a real browser: the list, branches, files, tools and prompts."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = pytest.mark.slow


def conversations(page: Any) -> Any:
    """The list of them, opened."""
    toggle = page.get_by_role("button", name="Conversations", exact=True)
    if toggle.get_attribute("aria-expanded") == "false":
        toggle.click()
    return page.get_by_role("navigation", name="Conversations")


def says(talk: Any, text: str, finish: str = "stop") -> str:
    return talk.event_stream({"content": text}, finish=finish)


def delete(page: Any, name: str) -> None:
    page.get_by_role("button", name=name).click()
    page.get_by_role("dialog", name="Delete?").get_by_role("button", name="Delete").click()


def test_conversations_are_found_again_renamed_and_deleted(
    demo_server: Any, open_page: Any, talk: Any, picture: Any
) -> None:
    page = open_page(demo_server.url)
    with talk.scripted(page, says(talk, "A *tabby*."), says(talk, "Rex.")):
        talk.answered(page, "Name a cat.\nPlease.")
        page.get_by_role("button", name="New chat").click()
        expect(page.locator("article")).to_have_count(0)
        talk.answered(page, "Name a dog.")
    page.close()
    page = page.context.new_page()  # another tab, and as well another day
    page.goto(demo_server.url)
    panel = conversations(page)
    titles = panel.locator("li .title")
    expect(titles).to_have_text(["Name a dog.", "Name a cat."])
    panel.get_by_label("Search conversations").fill("TABBY")
    expect(titles).to_have_text(["Name a cat."])
    panel.get_by_role("button", name="Name a cat.").first.click()
    expect(page.locator("article em")).to_have_text("tabby")
    panel.get_by_label("Search conversations").fill("wolf")
    expect(panel.get_by_role("status")).to_have_text("Nothing was found.")
    panel.get_by_label("Search conversations").fill("")
    expect(titles).to_have_count(2)
    picture(page, "conversations")
    panel.get_by_role("button", name="Rename Name a cat.").click()
    panel.get_by_label("Title").fill("Cats")
    page.keyboard.press("Enter")
    expect(titles).to_have_text(["Name a dog.", "Cats"])
    delete(page, "Delete Cats")
    expect(titles).to_have_text(["Name a dog."])
    expect(page.locator("article")).to_have_count(0)  # the one that was shown
    page.reload()
    expect(conversations(page).locator("li .title")).to_have_text(["Name a dog."])
    delete(page, "Delete all")
    expect(conversations(page).get_by_role("status")).to_have_text("None yet.")


def test_another_answer_is_a_branch(demo_server: Any, open_page: Any, talk: Any) -> None:
    page = open_page(demo_server.url)
    prose = page.locator("article.assistant .prose")
    with talk.scripted(page, *(says(talk, text) for text in ("one", "two", "three", "four", "five"))) as bodies:
        talk.answered(page, "first")
        talk.answered(page, "second")
        page.locator("article.assistant").first.get_by_role("button", name="Regenerate").click()
        expect(prose).to_have_text(["three"])
        expect(page.locator("article.assistant .versions")).to_contain_text("2 / 2")
        page.get_by_role("button", name="The version before").click()
        expect(prose).to_have_text(["one", "two"])  # and what had followed it
        page.locator("article.user").last.get_by_role("button", name="Edit").click()
        page.get_by_label("Edit your message").fill("other")
        page.keyboard.press("Enter")
        expect(prose).to_have_text(["one", "four"])
        page.reload()
        expect(prose).to_have_text(["one", "four"])
        expect(page.locator("article.user").last.locator(".versions")).to_contain_text("2 / 2")
        page.locator("article.user").last.get_by_role("button", name="Delete with what follows").click()
        expect(prose).to_have_text(["one", "two"])
        page.locator("article.assistant").last.get_by_role("button", name="Delete with what follows").click()
        expect(prose).to_have_text(["one"])
        page.locator("article.user").last.get_by_role("button", name="Delete with what follows").click()
        talk.answered(page, "third")
    asked = [[message["content"] for message in body["messages"]] for body in bodies]
    assert asked == [
        ["first"],
        ["first", "one", "second"],
        ["first"],
        ["first", "one", "other"],
        ["first", "one", "third"],
    ]


def test_what_is_exported_can_be_imported(demo_server: Any, open_page: Any, talk: Any, tmp_path: Path) -> None:
    page = open_page(demo_server.url)
    with talk.scripted(page, says(talk, "One."), says(talk, "Two.")):
        talk.answered(page, "Count.")
        page.get_by_role("button", name="Regenerate").click()
        expect(page.locator(".versions").last).to_contain_text("2 / 2")
    panel = conversations(page)
    with page.expect_download() as download:
        panel.get_by_role("button", name="Export Count.").click()
    assert download.value.suggested_filename == "Count-.json"
    file = tmp_path / "one.json"
    download.value.save_as(file)
    kept = json.loads(file.read_text())
    (one,) = kept["conversations"]
    assert kept["format"] == "vserve.conversations" and [turn["content"] for turn in one["turns"]] == [
        "Count.", "One.", "Two."
    ]  # fmt: skip
    delete(page, "Delete Count.")
    panel.get_by_label("File of conversations").set_input_files(file)
    expect(panel.get_by_role("status")).to_have_text("1 imported.")
    expect(page.locator("article.assistant .prose")).to_have_text(["Two."])
    expect(page.locator(".versions").last).to_contain_text("2 / 2")
    panel.get_by_label("File of conversations").set_input_files(file)  # beside the first, not over it
    expect(panel.locator("li")).to_have_count(2)
    for wrong, message in (
        ("{", "no JSON"),
        ('{"format": "other", "conversations": []}', "not one of conversations"),
        (json.dumps(kept | {"conversations": [one | {"turns": one["turns"][1:]}]}), "follows none before it"),
        *(
            (json.dumps(kept | {"conversations": [one | {"turns": [one["turns"][0] | field]}]}), "another shape")
            for field in ({"files": [1]}, {"rate": "fast"}, {"usage": {}}, {"asked": None}, {"error": {}})
        ),
    ):
        file.write_text(wrong)
        panel.get_by_label("File of conversations").set_input_files(file)
        expect(panel.get_by_role("status")).to_contain_text(message)
    expect(panel.locator("li")).to_have_count(2)
    torn = one["turns"][0] | {"images": [{"name": "torn.png", "url": "data:image/png"}]}
    file.write_text(json.dumps(kept | {"conversations": [one | {"title": "Odd", "updated": 1e300, "turns": [torn]}]}))
    panel.get_by_label("File of conversations").set_input_files(file)
    expect(panel.locator("li")).to_have_count(3)
    page.reload()  # and neither its date nor its picture is in the way of anything
    expect(conversations(page).locator("li .title")).to_contain_text(["Odd"])
    expect(page.get_by_role("img", name="torn.png")).to_have_text("torn.png")
    with talk.scripted(page, says(talk, "Still here.")):
        talk.answered(page, "And now?")


def test_an_answer_goes_on_while_another_conversation_is_read(demo_server: Any, open_page: Any, talk: Any) -> None:
    page = open_page(demo_server.url)
    page.get_by_label("More parameters (JSON)").fill('{"ignore_eos": true, "max_tokens": 200}')
    first = talk.ask(page, "Count from 1 to 10.")
    expect(first.locator(".prose")).to_contain_text("1, 2")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    conversations(page).get_by_role("button", name="Count from 1 to 10.").first.click()
    answer = page.locator("article.assistant")
    expect(answer).to_have_attribute("aria-busy", "false")
    expect(answer.locator(".tokens")).to_have_text("200 tokens")
    expect(page.locator("#meter")).to_contain_text("tokens")


def test_an_answer_that_was_cut_off_goes_on(demo_server: Any, open_page: Any, talk: Any) -> None:
    page = open_page(demo_server.url)
    with talk.scripted(page, says(talk, "1, 2,", "length"), says(talk, " 3.")) as bodies:
        answer = talk.answered(page, "Count.")
        expect(answer.locator(".finish")).to_contain_text("cut off")
        answer.get_by_role("button", name="Continue").click()
        expect(answer.locator(".prose")).to_have_text("1, 2, 3.")
        expect(answer.locator(".finish")).to_have_count(0)
    expect(page.locator("article")).to_have_count(2)
    expect(answer.get_by_role("button", name="Continue")).to_have_count(0)
    assert bodies[1]["continue_final_message"] is True and bodies[1]["add_generation_prompt"] is False
    assert bodies[1]["messages"][-1] == {"role": "assistant", "content": "1, 2,"}


def test_text_files_are_read_and_pictures_only_by_models_that_see(
    demo_server: Any, open_page: Any, talk: Any, tmp_path: Path
) -> None:
    page = open_page(demo_server.url)
    notes, binary, drawing = tmp_path / "notes.md", tmp_path / "data.bin", tmp_path / "dot.png"
    notes.write_text("# Notes\n```\ncode\n```\n")
    binary.write_bytes(b"\0\xff")
    pixel = page.evaluate("document.createElement('canvas').toDataURL('image/png')")
    drawing.write_bytes(base64.b64decode(pixel.partition(",")[2]))
    page.get_by_label("Files", exact=True).set_input_files([notes, binary])
    expect(page.locator("#attached")).to_contain_text("notes.md")
    expect(page.locator("#problem")).to_have_text("data.bin is no text file in UTF-8.")
    more = page.get_by_label("More parameters")
    more.fill('{"tools": {}}')
    page.get_by_label("Message", exact=True).fill("Read it.")
    page.keyboard.press("Enter")
    expect(page.locator("#settings-error")).to_contain_text('"tools" must be a list')
    expect(page.locator("#attached")).to_contain_text("notes.md")  # nothing was sent, and nothing is lost
    more.fill("")
    with talk.scripted(page, says(talk, "Fine."), says(talk, "A dot.")) as bodies:
        talk.answered(page, "Read it.")
        expect(page.locator("#attached")).to_be_hidden()
        expect(page.locator("article.user details.file")).to_contain_text("notes.md")
        page.get_by_label("Files", exact=True).set_input_files(drawing)
        expect(page.locator("#problem")).to_have_text("dot.png: this model reads no pictures.")
    assert bodies[0]["messages"][0]["content"] == "notes.md:\n````\n# Notes\n```\ncode\n```\n````\n\nRead it."


def test_pictures_are_sent_to_a_model_that_sees(demo_server: Any, open_page: Any, talk: Any, tmp_path: Path) -> None:
    page = open_page("about:blank")

    def sees(route: Any) -> None:
        answer = route.fetch()
        cards = answer.json()
        cards["data"][0]["modalities"] = ["text", "image"]
        route.fulfill(response=answer, json=cards)

    page.route("**/v1/models", sees)
    page.goto(demo_server.url)
    expect(page.locator("#served")).to_have_text(demo_server.model)
    drop = """() => {
      const canvas = document.createElement("canvas");
      canvas.width = 3000; canvas.height = 1500;
      canvas.toBlob((blob) => {
        const transfer = new DataTransfer();
        transfer.items.add(new File([blob], "dot.png", { type: "image/png" }));
        const event = new DragEvent("drop", { dataTransfer: transfer, bubbles: true });
        document.getElementById("view-chat").dispatchEvent(event);
      });
    }"""
    page.evaluate(drop)
    expect(page.locator("#attached")).to_contain_text("dot.png")
    with talk.scripted(page, says(talk, "A dot.")) as bodies:
        talk.answered(page, "What is it?")
    picture, text = bodies[0]["messages"][0]["content"]
    assert picture["type"] == "image_url" and picture["image_url"]["url"].startswith("data:image/png;base64,")
    assert text == {"type": "text", "text": "What is it?"}
    page.reload()  # kept with the conversation, and drawn again
    expect(page.get_by_role("img", name="dot.png").locator("canvas")).to_be_visible()
    assert page.locator("figure canvas").evaluate("(canvas) => [canvas.width, canvas.height]") == [320, 160]


def test_a_tool_by_form(demo_server: Any, open_page: Any, talk: Any) -> None:
    page = open_page(demo_server.url)
    page.get_by_role("button", name="Add a tool").click()
    form = page.get_by_role("dialog", name="A new tool")
    form.get_by_label("Name", exact=True).fill("get_weather")
    form.get_by_label("What it does, for the model").fill("Weather of a city")
    form.get_by_role("button", name="Add a parameter").click()
    form.get_by_label("Parameter", exact=True).fill("city")
    form.get_by_label("Description").fill("its name")
    form.get_by_role("button", name="Keep it").click()
    page.reload()
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
    stream = talk.event_stream({"tool_calls": [call]}, finish="tool_calls")
    with talk.scripted(page, stream, says(talk, "Warm."), says(talk, "Hm."), stream, says(talk, "Well.")) as bodies:
        answer = talk.answered(page, "Weather?")
        answer.get_by_label("Result of get_weather").fill("30")
        answer.get_by_role("button", name="Send results").click()
        expect(page.locator("article.assistant").last.locator(".prose")).to_have_text("Warm.")
        page.get_by_role("checkbox", name="get_weather").uncheck()
        talk.answered(page, "And now?")
        expect(talk.answered(page, "And there?").locator(".results")).to_be_visible()
        talk.answered(page, "Never mind.")  # in the place of its results, which would come too late now
        expect(page.locator(".results")).to_have_count(0)
    city = {"type": "string", "description": "its name"}
    assert bodies[0]["tools"] == [{"type": "function", "function": {
        "name": "get_weather", "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": city}, "required": ["city"]},
    }}]  # fmt: skip
    assert "tools" in bodies[1] and "tools" not in bodies[2]


def test_system_prompts_and_settings_are_kept(demo_server: Any, open_page: Any, talk: Any) -> None:
    page = open_page(demo_server.url)
    system = page.get_by_label("System prompt")
    system.fill("Answer like a pirate.")
    page.get_by_role("button", name="Keep", exact=True).click()
    system.fill("Be brief.")
    page.get_by_label("Seed").fill("7")
    page = page.context.new_page()
    page.goto(demo_server.url)
    expect(page.get_by_label("System prompt")).to_have_value("Be brief.")
    page.get_by_label("Prompts kept here").select_option("Answer like a pirate.")
    with talk.scripted(page, says(talk, "Arr.")) as bodies:
        talk.answered(page, "Hello!")
    assert bodies[0]["seed"] == 7
    assert bodies[0]["messages"][0] == {"role": "system", "content": "Answer like a pirate."}
    page.get_by_role("button", name="Forget").click()
    expect(page.get_by_label("Prompts kept here").locator("option")).to_have_count(1)
    newer = """() => new Promise((found) => {
      const request = indexedDB.open("vserve", 99);
      request.onblocked = () => found("blocked");
      request.onsuccess = () => found("opened");
    })"""
    assert page.evaluate(newer) == "opened"  # by a newer server's page, which waits for no tab of this one's


def test_the_card_says_what_is_served(demo_server: Any, open_page: Any) -> None:
    page = open_page(demo_server.url)
    page.get_by_role("button", name="About the model").click()
    card = page.get_by_role("dialog", name="What is served")
    expect(card).to_contain_text(demo_server.model)
    expect(card).to_contain_text("tokens")
    expect(card.locator("dt").last).to_have_text("vserve")


def test_a_phone_has_a_row_of_icons(demo_server: Any, open_page: Any, talk: Any, picture: Any) -> None:
    page = open_page(demo_server.url, viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    with talk.scripted(page, says(talk, "one"), says(talk, "two", "length")):
        talk.answered(page, "A question that is long enough to be a title, and more than that.")
        page.get_by_role("button", name="Regenerate").click()
        expect(page.locator("article.assistant .versions")).to_contain_text("2 / 2")
    buttons = page.locator("article.assistant .actions button")
    boxes = [button.bounding_box() for button in buttons.all()]
    assert len(boxes) == 8 and len({round(box["y"]) for box in boxes}) == 1, "one row"
    assert min(min(box["width"], box["height"]) for box in boxes) >= 24
    row = [button.bounding_box()["y"] for button in page.locator(".tools > button").all()]
    assert max(row) - min(row) < 8, "the row under the message"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    panel = conversations(page)
    picture(page, "phone-conversations")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    panel.locator("li .choose").click()
    expect(panel).to_be_hidden()

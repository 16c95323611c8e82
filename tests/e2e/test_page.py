"""The page's chat in a real browser: headless Chromium against the demo model. Pictures go to build/screenshots."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

expect = pytest.importorskip("playwright.sync_api").expect
pytestmark = pytest.mark.slow


def watch(page: Any, selector: str) -> None:
    """Every text of these elements from now on is put into `window.seen`: some are gone before one could ask."""
    script = """(selector) => {
      window.seen = new Set();
      new MutationObserver(() => document.querySelectorAll(selector).forEach((e) => window.seen.add(e.textContent)))
        .observe(document.body, { childList: true, subtree: true, characterData: true });
    }"""
    page.evaluate(script, selector)


def more(page: Any, **parameters: Any) -> None:
    page.get_by_label("More parameters (JSON)").fill(json.dumps(parameters) if parameters else "")


# ---- chat ----


def test_chat_answers_and_remembers(demo_server: Any, open_page: Any, talk: Any, picture: Any) -> None:
    page = open_page(demo_server.url)
    expect(page.locator("#served")).to_have_text(demo_server.model)
    answer = talk.answered(page, "Count from 1 to 10.")
    expect(answer.locator(".prose")).to_have_text("1, 2, 3, 4, 5, 6, 7, 8, 9, 10")
    footer = answer.locator("footer")
    expect(footer.locator(".tokens")).to_have_text(re.compile(r"^\d\d tokens$"))
    assert "ms" in footer.locator(".ttft").inner_text() or " s" in footer.locator(".ttft").inner_text()
    assert float(footer.locator(".rate").inner_text().split()[0]) > 0
    talk.answered(page, "My name is Ada.")
    expect(talk.answered(page, "What is my name?").locator(".prose")).to_contain_text("Ada")
    expect(talk.answered(page, "What is the capital of France? Answer in JSON.").locator(".code pre")).to_have_text(
        '{\n  "capital": "Paris"\n}'
    )
    picture(page, "chat-light")
    page.reload()
    expect(page.locator("article")).to_have_count(8)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)


def test_chat_streams_and_stop_stops_the_engine_too(demo_server: Any, open_page: Any, talk: Any, until: Any) -> None:
    def aborted() -> float:
        lines = httpx.get(f"{demo_server.url}/metrics").text.splitlines()
        return sum(float(x.split()[-1]) for x in lines if "requests_aborted_total{" in x and '"disconnect"' in x)

    page = open_page(demo_server.url)
    before = aborted()
    more(page, ignore_eos=True, max_tokens=1900, logprobs=True, top_logprobs=20)  # which takes its time
    watch(page, "article.assistant .prose")
    answer = talk.ask(page, "Count from 1 to 10.")
    page.wait_for_function("() => window.seen.size > 4")  # it comes in pieces
    expect(answer.locator(".prose")).to_contain_text("1, 2")
    page.keyboard.press("Escape")
    expect(answer.locator(".finish")).to_have_text("stopped")
    until(lambda: httpx.get(f"{demo_server.url}/load").json()["server_load"] == 0)
    assert aborted() == before + 1
    answer = talk.ask(page, "Again.")
    page.get_by_role("button", name="Stop").click()
    expect(answer.locator(".finish")).to_have_text("stopped")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    more(page)
    expect(talk.answered(page, "Hello!").locator(".prose")).not_to_be_empty()


def test_an_adapter_is_chosen_beside_new_chat(
    serve: Any, open_page: Any, talk: Any, tiny_model: Any, adapter_files: Any, tmp_path: Path
) -> None:
    """Other names of the model are no choice; without adapters there is none."""
    base = tiny_model("qwen3")
    adapter = adapter_files.write_adapter(tmp_path / "sql", base)
    options = ("--served-model-name", "tiny", "alias", "--enable-lora", "--lora-modules", f"sql={adapter}")
    with serve(str(base), *options) as server:
        page = open_page(server.url)
        choice = page.get_by_role("combobox", name="Model", exact=True)
        expect(choice).to_be_visible()
        assert choice.locator("option").all_inner_texts() == ["tiny", "sql"]
        with talk.scripted(page, talk.event_stream({"content": "a"}), talk.event_stream({"content": "b"})) as bodies:
            talk.answered(page, "Hello!")
            choice.select_option("sql")
            expect(page.get_by_label("Message", exact=True)).to_have_attribute("placeholder", "Message sql")
            talk.answered(page, "Hello!")
        assert [body["model"] for body in bodies] == ["tiny", "sql"]
        page.close()


HOSTILE = (
    "<script>window.hacked=1</script> <img src=x onerror=window.hacked=2> **bold**\n\n"
    "[a](javascript:window.hacked=3) ![b](/leak?secret) <iframe srcdoc='<script>parent.hacked=4</script>'></iframe>\n\n"
    "```html\n<script>window.hacked=5</script>\n```\n\n<svg/onload=window.hacked=6>"
)


def test_a_script_in_an_answer_does_not_run(demo_server: Any, open_page: Any, talk: Any) -> None:
    page = open_page(demo_server.url)
    addresses: list[str] = []
    page.on("request", lambda request: addresses.append(request.url))
    more(page, structured_outputs={"choice": [HOSTILE]})  # the demo model has to say just this
    answer = talk.answered(page, "Hello!")
    expect(answer.locator(".prose")).to_contain_text("<script>window.hacked=1</script>")
    expect(answer.locator(".code pre")).to_have_text("<script>window.hacked=5</script>")
    expect(answer.locator("strong")).to_have_text("bold")
    assert answer.locator("script, img, iframe, svg, [onerror], [onload]").count() == 0
    assert answer.locator("a").count() == 0, "neither javascript: nor an address of this server is worth a link"
    page.reload()  # what was kept is no less harmless
    expect(page.locator("article.assistant .prose")).to_contain_text("window.hacked=6")
    assert page.evaluate("window.hacked") is None
    assert not [address for address in addresses if "leak" in address]
    # Even where a way in were found: the browser lets no such script run.
    blocked = page.evaluate("""() => {
      const tries = [() => { document.body.innerHTML = "<img src=x onerror=window.hacked=7>"; },
                     () => { document.createElement("script").textContent = "window.hacked=8"; },
                     () => {
                       const button = document.createElement("button");
                       button.setAttribute("onclick", "window.hacked=9");
                       button.click();
                       if (!window.hacked) throw new Error("not run");
                     }];
      return tries.map((attempt) => { try { attempt(); return false; } catch { return true; } });
    }""")
    assert blocked == [True, True, True] and page.evaluate("window.hacked") is None
    page.complaints.clear()  # the browser has reported those


def test_reasoning_and_tool_calls(demo_server: Any, open_page: Any, talk: Any, picture: Any) -> None:
    page = open_page(demo_server.url)
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": '}}
    rest = {"index": 0, "function": {"arguments": '"Rome"}'}}
    first = talk.event_stream(
        {"role": "assistant", "content": ""}, {"reasoning": "Rome is a city."}, {"reasoning_content": " I ask."},
        {"tool_calls": [call]}, {"tool_calls": [rest]}, finish="tool_calls",
    )  # fmt: skip
    with talk.scripted(page, first, talk.event_stream({"content": "It is "}, {"content": "**warm**."})) as bodies:
        answer = talk.answered(page, "Weather in Rome?")
        thoughts = answer.locator("details.reasoning")
        assert not thoughts.evaluate("element => element.open"), "folded"
        expect(thoughts.locator("summary")).to_contain_text("Thought")
        thoughts.locator("summary").click()
        expect(thoughts.locator("pre")).to_have_text("Rome is a city. I ask.")
        expect(answer.locator(".call code").first).to_have_text("weather")
        expect(answer.locator(".call pre")).to_have_text('{\n  "city": "Rome"\n}')
        expect(answer.locator(".finish")).to_have_text("wants a tool")
        picture(page, "tools-light")
        answer.get_by_label("Result of weather").fill('{"celsius": 30}')
        answer.get_by_role("button", name="Send results").click()
        expect(page.locator("article.assistant").last.locator("strong")).to_have_text("warm")
    assert bodies[1]["messages"][1:] == [
        {
            "role": "assistant", "content": "", "reasoning": "Rome is a city. I ask.",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": '{"celsius": 30}'},
    ]  # fmt: skip


TOOL = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def test_the_model_itself_thinks_and_calls(demo_server: Any, open_page: Any, talk: Any, picture: Any) -> None:
    page = open_page(demo_server.url)
    page.get_by_label("Reasoning").select_option("high")
    answer = talk.answered(page, "What is 57 + 68?")
    expect(answer.locator(".prose")).to_contain_text("125")
    answer.locator("summary").click()
    expect(answer.locator(".reasoning pre")).to_contain_text("57 + 68 = 125")
    page.get_by_label("Reasoning").select_option("default")
    page.get_by_role("button", name="New chat").click()
    more(page, tools=[{"type": "function", "function": TOOL}])
    answer = talk.answered(page, "What is the weather in Paris?")
    expect(answer.locator(".call .code pre")).to_have_text('{\n  "city": "Paris"\n}')
    answer.get_by_label("Result of get_weather").fill('{"temperature": 21, "sky": "sunny"}')
    answer.get_by_role("button", name="Send results").click()
    expect(page.locator("article.assistant").last.locator(".prose")).to_contain_text("21")
    expect(page.locator("article.assistant").last).to_have_attribute("aria-busy", "false")
    picture(page, "tools-of-the-model")


def test_edit_regenerate_and_errors(demo_server: Any, open_page: Any, talk: Any) -> None:
    page = open_page(demo_server.url)
    talk.answered(page, "What is 12 + 30?")
    talk.answered(page, "Hello!")
    page.locator("article.user").first.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit your message").fill("What is 5 + 6?")
    page.keyboard.press("Enter")
    expect(page.locator("article")).to_have_count(2)
    answer = page.locator("article.assistant")
    expect(answer.locator(".prose")).to_have_text("11")
    expect(answer).to_have_attribute("aria-busy", "false")
    answer.get_by_role("button", name="Regenerate").click()
    expect(page.locator("article.assistant[aria-busy=false] .prose")).to_have_text("11")
    expect(page.locator("article")).to_have_count(2)
    page.get_by_label("Temperature").fill("7")
    talk.ask(page, "Hello!")
    expect(page.locator("#settings-error")).to_contain_text("Temperature")
    page.get_by_label("Temperature").fill("")
    page.get_by_label("System prompt").fill("Be brief.")
    more(page, n=0)
    failed = talk.answered(page, "Hello!")
    expect(failed.get_by_role("alert")).to_contain_text("'n'")
    assert any("400" in text for text in page.complaints)
    page.complaints.clear()  # Chromium reports every 400


def test_answers_that_never_came_are_no_history(demo_server: Any, open_page: Any, talk: Any) -> None:
    page = open_page(demo_server.url)
    error = 'data: {"error": {"message": "The engine died."}}\n\n'
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"ci'}}
    torn = (
        talk.event_stream({"content": "I look."}, {"tool_calls": [call]}).partition('data: {"choices": [], ')[0] + error
    )
    with talk.scripted(page, error, torn, talk.event_stream({"content": "Fine."})) as bodies:
        expect(talk.answered(page, "one").get_by_role("alert")).to_have_text("The engine died.")
        answer = talk.answered(page, "two")
        expect(answer.get_by_role("alert")).to_have_text("The engine died.")
        expect(answer.locator(".call")).to_be_visible()
        expect(answer.get_by_role("button", name="Send results")).to_have_count(0)
        page.route("**/v1/chat/completions", lambda route: None)  # says nothing
        stopped = talk.ask(page, "three")
        expect(stopped).to_have_attribute("aria-busy", "true")
        page.keyboard.press("Escape")
        expect(stopped.locator(".finish")).to_have_text("stopped")
    page.reload()
    with talk.scripted(page, talk.event_stream({"content": "Fine."})) as later:
        talk.answered(page, "four")
    assert [[message["content"] for message in body["messages"]] for body in (*bodies, *later)] == [
        ["one"], ["two"], ["two", "I look.", "four"]
    ]  # fmt: skip
    assert not any("tool_calls" in message for message in later[0]["messages"])


def test_what_is_copied_runs(demo_server: Any, open_page: Any, talk: Any) -> None:
    page = open_page(demo_server.url)
    page.get_by_label("Seed").fill("1")
    page.get_by_label("Top k", exact=True).fill("1")
    page.get_by_label("System prompt").fill('It\'s "quoted" $HOME `x` \\ ü 🙂')
    more(page, structured_outputs={"choice": ["Paris", "Rome"]}, ignore_eos=False)
    answer = talk.answered(page, "What is the capital of France?")
    expect(answer.locator(".prose")).to_have_text("Paris")
    watch(page, "article.assistant button")
    answer.get_by_role("button", name="Copy as curl").click()
    page.wait_for_function("() => window.seen.has('Copied')")  # for a second
    curl = page.evaluate("navigator.clipboard.readText()")
    output = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=240, check=True).stdout
    events = [json.loads(line[6:]) for line in output.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == "Paris", output
    answer.get_by_role("button", name="Copy as Python").click()
    page.wait_for_function("() => navigator.clipboard.readText().then((text) => text.startsWith('from openai'))")
    python = page.evaluate("navigator.clipboard.readText()")
    done = subprocess.run([sys.executable, "-c", python], capture_output=True, text=True, timeout=240)
    assert done.stdout == "Paris\n", done.stderr


# ---- everybody can use it ----


def test_by_keyboard_and_by_ear(demo_server: Any, open_page: Any, talk: Any) -> None:
    page = open_page(demo_server.url)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_role("tab", name="Chat")).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Engine")).to_be_focused()
    expect(page.get_by_role("tabpanel", name="Engine")).to_be_visible()
    expect(page.get_by_role("tabpanel", name="Chat")).to_be_hidden()
    engine = names(page)
    page.keyboard.press("Home")
    expect(page.get_by_role("tabpanel", name="Chat")).to_be_visible()
    answer = talk.answered(page, "Hello!")
    expect(page.locator("#spoken")).to_have_text(re.compile(r"^Answered, \d+ tokens\.$"))
    expect(page.get_by_role("log", name="Conversation")).to_have_attribute("aria-live", "polite")
    expect(answer).to_have_attribute("aria-label", demo_server.model)  # who spoke
    for role, name in [*engine, *names(page)]:
        assert name, f"a {role} has no name"
    headings = page.evaluate("[...document.querySelectorAll('h1,h2,h3')].map((h) => h.tagName)")
    assert headings[0] == "H1" and headings.count("H1") == 1
    assert page.evaluate("document.documentElement.lang") == "en"
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((element) => element.id)")
    assert len(ids) == len(set(ids))


ROLES = frozenset({
    "button", "link", "textbox", "spinbutton", "combobox", "slider", "tab", "tabpanel", "image", "img", "log",
    "complementary", "dialog", "region",
})  # fmt: skip


def names(page: Any) -> list[tuple[str, str]]:
    """(role, name) of all that can be used or seen, as the browser tells screen readers."""
    session = page.context.new_cdp_session(page)
    found = []
    for node in session.send("Accessibility.getFullAXTree")["nodes"]:
        role = node.get("role", {}).get("value")
        if not node["ignored"] and role in ROLES:
            found.append((role, node.get("name", {}).get("value", "")))
    session.detach()
    assert len(found) > 5
    return found


CONTRAST = """() => {
  const channel = (value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const read = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r / 255) + 0.7152 * channel(g / 255) + 0.0722 * channel(b / 255);
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = read(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const says = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!says || !element.checkVisibility() || element.closest("noscript, .hidden-label, .skip")) continue;
    const [a, b] = [light(read(getComputedStyle(element).color)), light(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${element.tagName}.${element.className} ${element.textContent.slice(0, 20)}: ${ratio}`);
  }
  return poor;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out(demo_server: Any, open_page: Any, talk: Any, picture: Any, scheme: str) -> None:
    page = open_page(demo_server.url, color_scheme=scheme)
    text = "# T\n\n> quote\n\n`code` [x](https://example.org)\n\n```python\nif x == 1:  # why\n    print('a')\n```"
    with talk.scripted(page, talk.event_stream({"reasoning": "Hm."}, {"content": text}, finish="length")):
        talk.answered(page, "Hello!")
    assert page.evaluate(CONTRAST) == []
    picture(page, f"markdown-{scheme}")
    page.get_by_role("tab", name="Engine").click()
    expect(page.locator(".tile .value").first).not_to_have_text("–")
    assert page.evaluate(CONTRAST) == []


FORMULAS = (
    r"The sum $a_1 + b_1 * c_1$ and \(x_2 * y_2\), of \[ \sum_{i} x_i \] or $$u_1 \\ u_2$$; it costs $5 and $6."
    "\n\n$$\n- x_1\n+ y_1 \\\\ *z*\n$$\n\nAnd **bold**, and `$code$`."
)


def test_formulas_are_drawn_and_keep_their_source(demo_server: Any, open_page: Any, talk: Any, picture: Any) -> None:
    page = open_page(demo_server.url)
    wrong = "\n\nNot one: $\\nonsense{x$ and \\(\\href{https://example.org}{x}\\)."
    with talk.scripted(page, talk.event_stream({"content": FORMULAS + wrong})):
        answer = talk.answered(page, "Formulas, please.")
    expect(answer.locator(".math.drawn")).to_have_count(5)
    sources = answer.locator("annotation[encoding='application/x-tex']").all_text_contents()
    assert [source.strip() for source in sources] == [
        "a_1 + b_1 * c_1", "x_2 * y_2", r"\sum_{i} x_i", r"u_1 \\ u_2", "- x_1\n+ y_1 \\\\ *z*",
    ]  # fmt: skip
    assert answer.locator("math[display=block]").count() == 3
    # What is no TeX, or would lead elsewhere, stays as it was written.
    assert answer.locator(".math:not(.drawn)").all_text_contents() == [
        r"$\nonsense{x$", r"\(\href{https://example.org}{x}\)"
    ]  # fmt: skip
    assert answer.locator("a").count() == 0
    expect(answer.locator("strong")).to_have_text("bold")
    expect(answer.locator("code")).to_have_text("$code$")
    expect(answer.locator(".prose")).to_contain_text("it costs $5 and $6.")
    assert answer.locator("li, em").count() == 0
    picture(page, "formulas")
    with talk.scripted(page, talk.event_stream({"content": r"$\rule{9000em}{9000em}$"})):
        rule = talk.answered(page, "A large one, please.").locator(".math.drawn")
    expect(rule).to_have_count(1)
    assert page.locator("#log").evaluate("(log) => log.scrollHeight") < 5000


def test_lists_of_tasks_have_boxes(demo_server: Any, open_page: Any, talk: Any) -> None:
    page = open_page(demo_server.url)
    with talk.scripted(page, talk.event_stream({"content": "- [x] **bread**\n- [ ] milk\n- [y] none\n\n[ ] no list"})):
        answer = talk.answered(page, "A list, please.")
    boxes = answer.get_by_role("checkbox")
    assert [box.is_checked() for box in boxes.all()] == [True, False]
    assert answer.locator("li").all_inner_texts() == ["bread", "milk", "[y] none"]
    assert answer.locator("li.task").count() == 2


def test_tables_can_be_read_on_a_narrow_screen(demo_server: Any, open_page: Any, talk: Any) -> None:
    """Words stay whole; what is too wide is scrolled within the table."""
    page = open_page(demo_server.url, viewport={"width": 390, "height": 740})
    names = ("Quantisation", "Throughput", "Latency", "Temperature", "Remarks")
    rows = [names, ["-" * 3] * 5, ["interesting", "considerable", "milliseconds", "comfortable", "none whatsoever"]]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    with talk.scripted(page, talk.event_stream({"content": table})):
        talk.answered(page, "A table, please.")
    heights = page.locator(".prose th").evaluate_all("cells => cells.map((cell) => cell.clientHeight)")
    assert max(heights) < 45, "one line each"
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_wrong_parameter_is_told_where_it_is_seen(demo_server: Any, open_page: Any) -> None:
    page = open_page(demo_server.url, viewport={"width": 390, "height": 600})
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("More parameters (JSON)").fill("{nonsense")
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("More parameters (JSON)")).not_to_be_visible()
    page.get_by_label("Message", exact=True).fill("Hello!")
    page.keyboard.press("Enter")
    expect(page.locator("#settings-error")).to_contain_text("More parameters:")
    expect(page.locator("#settings-error")).to_be_in_viewport()
    expect(page.get_by_label("More parameters (JSON)")).to_be_focused()


def test_on_a_phone(demo_server: Any, open_page: Any, talk: Any, picture: Any) -> None:
    page = open_page(demo_server.url, viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    wide = "| a | b |\n|---|---|\n| " + "x" * 200 + " | y |\n\n```\n" + "y" * 300 + "\n```\n\n" + "z" * 400
    with talk.scripted(page, talk.event_stream({"content": wide})):
        talk.answered(page, "w" * 300)
    narrow = (
        "document.documentElement.scrollWidth <= innerWidth && document.getElementById('log').scrollWidth <= innerWidth"
    )
    assert page.evaluate(narrow)
    picture(page, "phone-chat")
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("System prompt")).to_be_in_viewport()
    assert page.evaluate(narrow)
    page.get_by_role("tab", name="Engine").click()
    expect(page.locator(".tile .value").first).not_to_have_text("–")
    assert page.evaluate(narrow) and page.evaluate("document.getElementById('view-engine').scrollWidth <= innerWidth")
    picture(page, "phone-engine")

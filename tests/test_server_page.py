"""The page at ``/`` in a real browser, against real servers with the embedded model or a simulated one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import Browser, Tab, find_chromium, running_browser
from server_support import FLIGHT_TOOL, RunningServer, build_tokenizer, running_server

from bireme.local_server import running_server as running_bireme
from bireme.pocket import MODEL_DIR
from bireme.server.page import HEADERS

CHROMIUM = find_chromium()
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (or BIREME_CHROMIUM)")

LAST = "#messages > li:last-child"
FINISHED = f"document.querySelector('{LAST} footer')?.innerText"
REFUSED = "the server responded with a status of"
"""What the console says of a response that is an error, which some tests provoke."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with running_browser(CHROMIUM) as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def sim(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A simulated model that takes its time."""
    with running_server(folder, tmp_path_factory.mktemp("sim"), step_seconds=0.01) as server:
        yield server


@pytest.fixture(scope="module")
def pocket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the embedded model is served."""
    log = tmp_path_factory.mktemp("pocket") / "server.log"
    with (
        log.open("wb") as out,
        running_bireme(MODEL_DIR, "--dtype", "float32", "--served-model-name", "pocket", log=out) as server,
    ):
        yield server.url


@pytest.fixture
def tab(browser: Browser) -> Iterator[Tab]:
    """A tab; whatever a test does in it, nothing is asked of another server, and nothing is wrong in the console."""
    with browser.tab() as opened:
        yield opened
        origin = opened.run("location.origin")
        assert [url for url in opened.requested if not url.startswith(origin + "/")] == []
        assert [text for text in opened.complaints if REFUSED not in text] == []


def ask(tab: Tab, text: str) -> None:
    """Write a question and send it."""
    tab.focus("#question")
    tab.type(text)
    tab.press("Enter")


def say(text: str) -> str:
    """A question that the simulated model answers so."""
    return f"<|say|>{text}<|said|>"


LONG = say("one two three four five six seven eight " * 100)
"""A question whose answer takes longer than a test."""


def set_parameters(tab: Tab, **values: Any) -> None:
    """Fill in the fields beside the question."""
    tab.run("document.getElementById('parameters').open = true")
    for name, value in values.items():
        if name == "thinking":
            tab.run(
                f"(() => {{ const it = document.getElementById('thinking'); it.value = {json.dumps(value)};"
                "it.dispatchEvent(new Event('input', { bubbles: true })); })()"
            )
        else:
            tab.run(f"document.getElementById('{name}').select()")
            tab.type(str(value))


def answered(tab: Tab) -> str:
    """Wait for the end of the last answer; its text."""
    tab.wait(FINISHED)
    return tab.text(f"{LAST} .body")


@in_browser
def test_an_answer_of_the_embedded_model_streams_in_and_is_right(tab: Tab, pocket: str) -> None:
    tab.open(pocket)
    tab.wait("document.getElementById('model').value === 'pocket'")
    tab.run(
        "globalThis.seen = []; new MutationObserver(() => seen.push("
        f"document.querySelector('{LAST} .body')?.innerText))"
        ".observe(document.getElementById('messages'), { childList: true, subtree: true })"
    )
    set_parameters(tab, thinking="off", temperature=0)
    ask(tab, "Sort these numbers from smallest to largest: 41, 7, 88, 23")
    assert answered(tab) == "7, 23, 41, 88"
    partial = {text for text in tab.run("seen") if text}
    assert len(partial) > 1, "the answer came in one piece"
    assert all("7, 23, 41, 88".startswith(text) for text in partial)
    assert "tokens/s" in tab.text(f"{LAST} footer")
    ask(tab, "What is the opposite of good?")
    assert answered(tab) == "bad"
    assert len(tab.posted[-1]["messages"]) == 3


@in_browser
def test_thinking_is_folded_until_somebody_opens_it(tab: Tab, pocket: str) -> None:
    tab.open(pocket)
    set_parameters(tab, thinking="on", temperature=0)
    ask(tab, "Add 55 and 6.")
    assert answered(tab) == "61"
    assert tab.posted[-1]["chat_template_kwargs"] == {"enable_thinking": True}
    assert tab.run(f"document.querySelector('{LAST} details.thought').open") is False
    assert tab.text(f"{LAST} .thought summary").startswith("Thought for ")
    assert not tab.run(f"document.querySelector('{LAST} .thought-body').checkVisibility()")
    tab.click(f"{LAST} .thought summary")
    tab.wait(f"document.querySelector('{LAST} .thought-body').checkVisibility()")
    assert "carry" in tab.text(f"{LAST} .thought-body")
    ask(tab, "And what is the opposite of good?")
    answered(tab)
    assert "carry" not in json.dumps(tab.posted[-1]["messages"]), "the thought was sent back as an answer"


@in_browser
def test_a_tool_call_is_shown_and_its_result_goes_back_to_the_model(tab: Tab, pocket: str) -> None:
    tab.open(pocket)
    set_parameters(tab, thinking="off", temperature=0, tools=json.dumps([FLIGHT_TOOL]))
    ask(tab, "Find a flight from Delhi to Lisbon.")
    tab.wait(f"document.querySelector('{LAST} .results') !== null")
    assert tab.text(f"{LAST} .tool h4") == "calls find_flight"
    assert json.loads(tab.text(f"{LAST} .tool pre")) == {"origin": "Delhi", "destination": "Lisbon"}
    tab.focus(f"{LAST} .tool textarea")
    tab.type('{"flight": "BA 117"}')
    tab.click(f"{LAST} .results")
    tab.wait("document.querySelectorAll('#messages > li.answer').length === 2")
    assert answered(tab)
    *_, said, told = tab.posted[-1]["messages"]
    assert said["tool_calls"][0]["function"]["name"] == "find_flight"
    assert told == {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": '{"flight": "BA 117"}'}


@in_browser
@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_ends_the_answer_and_frees_its_slot(tab: Tab, sim: RunningServer, how: str) -> None:
    tab.open(sim.url)
    ask(tab, LONG)
    tab.wait(f"document.querySelector('{LAST} .thought')?.checkVisibility()")
    assert sim.metric("vllm:num_requests_running") == 1
    if how == "button":
        tab.click("#stop")
    else:
        tab.press(how)
    tab.wait(FINISHED)
    assert "stopped" in tab.text(f"{LAST} footer")
    sim.wait_for("vllm:num_requests_running", 0, seconds=3)
    assert sim.metric("bireme_state_slots_free") == sim.metric("bireme_state_slots_total")
    assert tab.run("document.getElementById('stop').hidden && !document.getElementById('send').hidden")


@in_browser
def test_parameters_are_sent_as_they_are_set_and_not_otherwise(tab: Tab, sim: RunningServer) -> None:
    tab.open(sim.url)
    tab.wait("document.getElementById('model').value !== ''")
    ask(tab, say("hello"))
    answered(tab)
    plain = {"model", "messages", "stream", "stream_options"}
    assert set(tab.posted[-1]) == plain
    values = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "max_tokens": 3, "seed": 11}
    set_parameters(tab, **values, thinking="off", system="Be brief.")
    assert tab.text("#parameters-set") == "7 set"
    ask(tab, say("one two three four five six seven eight"))
    answered(tab)
    sent = tab.posted[-1]
    assert {name: sent[name] for name in values} == values
    assert sent["chat_template_kwargs"] == {"enable_thinking": False}
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert set(sent) == plain | set(values) | {"chat_template_kwargs"}
    assert "3 tokens" in tab.text(f"{LAST} footer")
    assert "cut off at max tokens" in tab.text(f"{LAST} footer")


@in_browser
def test_what_cannot_be_sent_is_said_in_words_and_not_sent(tab: Tab, sim: RunningServer) -> None:
    tab.open(sim.url)
    set_parameters(tab, tools="[{")
    ask(tab, say("hello"))
    tab.wait("document.querySelector('.failure') !== null")
    assert tab.text(".failure").startswith("Tools: ")
    assert tab.run("document.getElementById('question').value") == say("hello"), "what was written is gone"
    set_parameters(tab, tools="[]", temperature=9)
    tab.run("document.getElementById('parameters').open = false")
    tab.focus("#question")
    tab.press("Enter")
    tab.wait("document.querySelector('.failure')?.innerText.startsWith('Temperature: ')")
    assert tab.run("document.activeElement.id") == "temperature"
    assert tab.posted == []
    set_parameters(tab, temperature=1)
    tab.focus("#question")
    tab.press("Enter")
    answered(tab)
    assert [message["role"] for message in tab.posted[-1]["messages"]] == ["user"]
    assert tab.run("document.querySelector('.failure')") is None


@in_browser
def test_the_figures_of_the_engine_move_while_it_answers_and_return(tab: Tab, sim: RunningServer) -> None:
    tab.open(sim.url)
    tab.wait("document.getElementById('state').innerText === 'serving'")
    quiet = {name: tab.text(f"#{name}") for name in ("running", "slots-text", "blocks-text", "output-rate")}
    assert quiet == {"running": "0", "slots-text": "0 of 64", "blocks-text": "0 of 4,096", "output-rate": "0"}
    ask(tab, LONG)
    tab.wait("document.getElementById('running').innerText === '1'")
    tab.wait("document.getElementById('slots-text').innerText === '1 of 64'")
    tab.wait("parseInt(document.getElementById('output-rate').innerText) > 5", seconds=10)
    tab.wait("document.getElementById('step-text').innerText.includes('1 row of decode')")
    tab.wait("document.querySelector('#ranks .meter span + span')?.innerText.endsWith(' ms')")
    painted = """(() => {
        const { width, height } = document.getElementById('steps');
        const data = document.getElementById('steps').getContext('2d').getImageData(0, 0, width, height * 0.6).data;
        return data.reduce((count, value, at) => count + (at % 4 === 3 && value > 0), 0);
    })()"""
    assert tab.run(painted) > 500, "no oar is drawn above the waterline"
    tab.press("Escape")
    for name, text in quiet.items():
        tab.wait(f"document.getElementById('{name}').innerText === {json.dumps(text)}", seconds=10)


@in_browser
def test_every_part_is_reached_and_used_by_keyboard_alone(tab: Tab, sim: RunningServer) -> None:
    tab.open(sim.url)
    assert tab.run("document.activeElement.id") == "question", "the cursor is not where one writes"
    tab.press("Tab", shift=True)
    assert tab.run("document.activeElement.tagName") == "SUMMARY"
    assert tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid", "the focus is not seen"
    tab.press("Enter")
    assert tab.run("document.getElementById('parameters').open")
    reached = []
    for _ in range(40):
        tab.press("Tab")
        reached.append(tab.run("document.activeElement.id || document.activeElement.tagName"))
    wanted = {"temperature", "top_p", "top_k", "max_tokens", "seed", "thinking", "system", "tools", "question", "send"}
    assert wanted | {"model", "new-chat", "BUTTON", "SUMMARY"} <= set(reached)
    tab.focus("#question")
    tab.type("<|say|>first line")
    tab.press("Enter", shift=True)
    tab.type("second line<|said|>")
    tab.press("Tab")
    assert tab.run("document.activeElement.id") == "send"
    tab.press("Enter")
    assert tab.run("document.activeElement.id") == "stop", "the button that ends the answer has no focus"
    tab.wait(FINISHED)
    assert tab.run("document.activeElement.id") == "send"
    assert tab.posted[-1]["messages"][-1]["content"] == "<|say|>first line\nsecond line<|said|>"
    for _ in range(40):
        tab.press("Tab")
        if tab.run("document.activeElement.className") == "again":
            break
    tab.press("Enter")
    tab.wait("document.querySelectorAll('.answer').length === 1 && !document.body.classList.contains('busy')")
    tab.wait(FINISHED)
    assert len(tab.posted) == 2 and tab.posted[0] == tab.posted[1], "an answer could not be asked for again"
    assert tab.run("document.activeElement.id") == "scroll", "the focus is lost"


@in_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_everything_without_sideways_scrolling(tab: Tab, sim: RunningServer, scheme: str) -> None:
    overflow = "document.documentElement.scrollWidth - innerWidth"
    beyond = """[...document.querySelectorAll('body *')].filter((each) => each.checkVisibility()
        && !each.closest('pre, .table, .hidden') && each.getBoundingClientRect().right > innerWidth + 0.5
        ).map((each) => each.id || each.className || each.tagName)"""
    tab.resize(390, 844, is_phone=True)
    tab.prefer(scheme)
    tab.open(sim.url)
    assert tab.run("innerWidth") == 390 and tab.run(overflow) <= 0
    set_parameters(tab, thinking="off")
    assert tab.run(overflow) <= 0 and tab.run(beyond) == []
    tab.run("document.getElementById('parameters').open = false")
    for text in ("w" * 80, "```\n" + "code " * 20 + "\n```", "| a | b |\n| - | - |\n| " + "c " * 20 + " | d |"):
        ask(tab, say(text))
        answered(tab)
    assert tab.run(overflow) <= 0 and tab.run(beyond) == []
    box = tab.run("JSON.stringify(document.getElementById('question').getBoundingClientRect())")
    assert json.loads(box)["bottom"] <= 844, "the question is below the screen"
    tab.click("#engine-tab")
    tab.wait("document.getElementById('state').innerText === 'serving'")
    assert not tab.run("document.getElementById('chat').checkVisibility()")
    assert tab.run(overflow) <= 0 and tab.run(beyond) == []
    tab.press("ArrowRight")
    tab.wait("document.getElementById('chat').checkVisibility()")


@in_browser
def test_a_key_is_asked_for_and_kept_in_the_tab_alone(browser: Browser, folder: Path, tmp_path: Path) -> None:
    stored = "JSON.stringify([Object.values(sessionStorage), Object.values(localStorage), document.cookie])"

    def enter(tab: Tab, key: str) -> None:
        tab.wait("document.getElementById('key-dialog').open")
        tab.focus("#key")
        tab.type(key)
        tab.press("Enter")

    with running_server(folder, tmp_path, ready=False, settings={"api_keys": ["k-right"]}) as server:
        server.wait_ready()
        with browser.tab() as tab:
            tab.open(server.url)
            enter(tab, "k-wrong")
            tab.wait("document.getElementById('key-why').innerText.includes('does not know')")
            enter(tab, "k-right")
            tab.wait("document.getElementById('model').value === 'tiny'")
            tab.wait("document.getElementById('state').innerText === 'serving'")
            assert json.loads(tab.run(stored)) == [["k-right"], [], ""]
            assert tab.run("document.getElementById('key').value") == ""
            ask(tab, say("hello"))
            tab.wait(FINISHED)
            assert not any("k-right" in url for url in tab.requested)
            tab.open(server.url)
            tab.wait("document.getElementById('model').value === 'tiny'")
            assert not tab.run("document.getElementById('key-dialog').open")
        with browser.tab() as other:
            other.open(server.url)
            other.wait("document.getElementById('key-dialog').open")
            assert json.loads(other.run(stored)) == [[], [], ""]


@in_browser
def test_an_error_of_the_server_is_shown_as_its_words(tab: Tab, sim: RunningServer) -> None:
    tab.open(sim.url)
    set_parameters(tab, max_tokens=99999)
    ask(tab, say("hello"))
    tab.wait(FINISHED)
    shown = tab.text(f"{LAST} footer")
    assert "max_tokens" in shown and "99999" in shown
    assert tab.run(f"document.querySelector('{LAST} footer').classList.contains('error')")
    assert tab.text("#status").startswith("It failed: ")
    set_parameters(tab, max_tokens=50, tools='[{"type": "<img src=x>"}]')
    ask(tab, say("hello"))
    tab.wait(f"({FINISHED} ?? '').includes('<img src=x>')")
    assert tab.run("document.querySelectorAll('#messages img').length") == 0


@in_browser
def test_an_engine_that_dies_is_shown_and_the_question_can_be_asked_again(
    browser: Browser, folder: Path, tmp_path: Path
) -> None:
    trip = tmp_path / "trip"
    options: dict[str, Any] = {"step_seconds": 0.01, "trip": str(trip), "settings": {"death_notice": 3.0}}
    with running_server(folder, tmp_path, **options) as server, browser.tab() as tab:
        tab.open(server.url)
        ask(tab, LONG)
        tab.wait(f"document.querySelector('{LAST} .thought')?.checkVisibility()")
        trip.write_text("fail")
        tab.wait(FINISHED)
        assert "rank 1 died" in tab.text(f"{LAST} footer")
        assert tab.run(f"document.querySelector('{LAST} .again') !== null")
        tab.wait("['dead', 'offline'].includes(document.getElementById('state').innerText)")


@in_browser
@pytest.mark.parametrize("where", ["answer", "thought", "code", "tool"])
def test_markup_from_the_model_is_text_and_never_becomes_elements(tab: Tab, sim: RunningServer, where: str) -> None:
    evil = "<img src=x onerror=globalThis.ran=1><script>globalThis.ran=1</script>[go](javascript:globalThis.ran=1)"
    tab.open(sim.url)
    set_parameters(tab, thinking="on" if where == "thought" else "off")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
    if where == "tool":
        set_parameters(tab, tools=json.dumps(tools))
    call = f"<tool_call>\n<function=f>\n<parameter=a>\n{evil}\n</parameter>\n</function>\n</tool_call>"
    text = {"thought": f"{evil}</think>done", "code": f"```html\n{evil}\n```\n**{evil}**", "tool": call}.get(
        where, evil
    )
    ask(tab, say(text))
    tab.wait(FINISHED)
    shown = tab.run(f"document.querySelector('{LAST}').textContent")
    assert "<img src=x onerror=globalThis.ran=1><script>globalThis.ran=1</script>" in shown
    assert tab.run(f"document.querySelectorAll('{LAST} :is(img, script, iframe, a)').length") == 0
    assert tab.run("globalThis.ran") is None


@in_browser
def test_links_of_an_answer_lead_to_http_alone_and_tell_no_referrer(tab: Tab, sim: RunningServer) -> None:
    tab.open(sim.url)
    set_parameters(tab, thinking="off")
    ask(tab, say("[a](https://a.example/x) [b](javascript:1) [c](data:text/html,1)"))
    answered(tab)
    links = f"[...document.querySelectorAll('{LAST} .body a')].map((each) => [each.href, each.rel, each.target])"
    assert tab.run(links) == [["https://a.example/x", "noopener noreferrer", "_blank"]]


@in_browser
def test_the_policy_stops_what_the_page_itself_would_never_do(browser: Browser, sim: RunningServer) -> None:
    with browser.tab() as tab:
        tab.open(sim.url)
        markup = "(() => { try { document.body.innerHTML = '<b>x</b>' } catch (error) { return error.name } })()"
        assert tab.run(markup) == "TypeError"
        away = "fetch('http://127.0.0.1:9/').then(() => 'let through', (error) => error.name)"
        assert tab.run(away) == "TypeError"
        assert any("Content Security Policy" in text for text in tab.complaints)


@in_browser
def test_a_chat_asks_nothing_of_other_servers_and_the_console_is_silent(browser: Browser, sim: RunningServer) -> None:
    with browser.tab() as tab:
        tab.open(sim.url)
        ask(tab, say("hello **there**"))
        answered(tab)
        tab.click("#new-chat")
        tab.wait("document.getElementById('welcome').checkVisibility()")
        paths = {url.removeprefix(sim.url) for url in tab.requested}
        assert {"/", "/v1/models", "/v1/chat/completions", "/live", "/static/page.js"} <= paths
        assert all(path.startswith("/") for path in paths)
        assert tab.complaints == []


def test_each_file_of_the_page_carries_the_policy_and_a_stable_etag(sim: RunningServer) -> None:
    names = [path.name for path in files("bireme.server").joinpath("static").iterdir()]
    for path in ("/", *(f"/static/{name}" for name in names)):
        response = sim.get(path)
        assert response.status_code == 200, path
        assert {name: response.headers[name] for name in HEADERS} == HEADERS
        again = httpx.get(sim.url + path, headers={"if-none-match": response.headers["etag"]}, verify=False)
        assert (again.status_code, again.content) == (304, b"")
    policy = dict(part.split(" ", 1) for part in HEADERS["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    for missing in ("/static/none.js", "/static/..%2Fpage.py", "/static/"):
        assert sim.get(missing).status_code == 404


def test_without_the_page_its_address_is_a_404_in_openais_form(folder: Path, tmp_path: Path) -> None:
    with running_server(folder, tmp_path, settings={"page": False}) as server:
        for path in ("/", "/static/page.js"):
            response = server.get(path)
            assert response.status_code == 404
            error = response.json()["error"]
            assert error["type"] == "not_found_error" and path in error["message"]
            assert "content-security-policy" not in response.headers
        assert server.get("/v1/models").status_code == 200

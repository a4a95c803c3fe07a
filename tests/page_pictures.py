"""``python tests/page_pictures.py`` takes docs/page.png and docs/page-phone.png anew: the embedded model at work."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from browser import Tab, find_chromium, running_browser
from server_support import FLIGHT_TOOL

from bireme.local_server import running_server
from bireme.pocket import MODEL_DIR, NAME

DOCS = Path(__file__).resolve().parents[1] / "docs"
FLAGS = ("--tp", "2", "--device", "cpu", "--dtype", "float32", "--served-model-name", NAME, "--max-num-seqs", "16")
LAST = "#messages > li:last-child"
STREAMS = 10
WATCH_SECONDS = 25.0


@contextlib.contextmanager
def others(url: str) -> Iterator[None]:
    """Other clients, who come and go."""
    is_over = threading.Event()

    def work(number: int) -> None:
        question = {"role": "user", "content": "Tell me a short story about a lighthouse."}
        body = {"model": NAME, "messages": [question], "max_tokens": 60 + 25 * number, "ignore_eos": True}
        while not is_over.wait(0.15 * number):
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, verify=False)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(STREAMS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def ask(tab: Tab, text: str, *, thinking: str, tools: str = "") -> None:
    """One question with its parameters, and the wait for its answer."""
    for name, value in (("thinking", thinking), ("tools", tools), ("temperature", "0")):
        script = f"it.value = {json.dumps(value)}; it.dispatchEvent(new Event('input', {{ bubbles: true }}))"
        tab.run(f"(() => {{ const it = document.getElementById('{name}'); {script} }})()")
    tab.focus("#question")
    tab.type(text)
    tab.press("Enter")
    tab.wait(f"document.querySelector('{LAST} footer')?.innerText")


def main() -> None:
    """Take both."""
    program = find_chromium()
    if program is None:
        sys.exit("there is no Chromium (or BIREME_CHROMIUM)")
    with running_server(MODEL_DIR, *FLAGS) as server, running_browser(program) as browser:
        with browser.tab() as tab:
            tab.resize(1280, 860, scale=1.5)
            tab.prefer("light")
            with others(server.url):
                tab.open(server.url)
                time.sleep(WATCH_SECONDS)
                ask(tab, "Add 345 and 678.", thinking="on")
                tab.click(f"{LAST} summary")
                ask(tab, "Find a flight from Delhi to Lisbon.", thinking="off", tools=json.dumps([FLIGHT_TOOL]))
                tab.screenshot(DOCS / "page.png")
        with browser.tab() as tab:
            tab.resize(390, 844, is_phone=True, scale=2)
            tab.prefer("dark")
            tab.open(server.url)
            ask(tab, "Add 345 and 678.", thinking="on")
            ask(tab, "Find a flight from Delhi to Lisbon.", thinking="off", tools=json.dumps([FLIGHT_TOOL]))
            tab.screenshot(DOCS / "page-phone.png")


if __name__ == "__main__":
    main()

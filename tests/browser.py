"""A headless Chromium for tests, driven over its DevTools protocol. No page that it opens may reach anything else."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

START_SECONDS = 60.0


def find_chromium() -> str | None:
    """Chromium or Chrome; the environment's BIREME_CHROMIUM comes first."""
    names = (os.environ.get("BIREME_CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    return next((path for name in names if name and (path := shutil.which(name))), None)


class Tab:
    """One page in the browser.

    Attributes:
        requested: every URL that the page has asked for.
        posted: the JSON bodies that it has sent.
        complaints: what the browser wrote to the console as an error, broken content policies too.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.requested: list[str] = []
        self.posted: list[Any] = []
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol; its result."""
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=START_SECONDS))
            self._note(message)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
                if "postData" in params["request"]:
                    self.posted.append(json.loads(params["request"]["postData"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.complaints.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(params["exceptionDetails"])[:500])

    def open(self, url: str) -> None:
        """Go there."""
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        done = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def wait(self, script: str, seconds: float = 20.0) -> Any:
        """Wait until an expression is truthy; its value."""
        deadline = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < deadline, f"never true: {script}\n{self.run('document.body.innerText')}"
            time.sleep(0.03)
        return value

    def text(self, selector: str) -> str:
        """The text of the first element that matches, as it is shown; empty if there is none."""
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def focus(self, selector: str) -> None:
        """Put the cursor there."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")

    def click(self, selector: str) -> None:
        """Click in the middle of the first element that matches, wherever that is on the screen."""
        script = f"""(() => {{
            const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()"""
        x, y = self.run(script)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, text: str) -> None:
        """Write where the cursor is."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key by its name: Enter, Escape, Tab, ArrowRight."""
        codes = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowRight": 39}
        common = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key], "modifiers": 8 if shift else 0}
        text = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def resize(self, width: int, height: int, *, is_phone: bool = False, scale: float = 1.0) -> None:
        """Make the screen so large, in CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=is_phone
        )

    def prefer(self, scheme: str) -> None:
        """light or dark."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        """Write what is shown as a PNG."""
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))


class Browser:
    """A running Chromium with a profile of its own."""

    def __init__(self, port: int) -> None:
        self._port = port

    @contextlib.contextmanager
    def tab(self) -> Iterator[Tab]:
        """A new page, which is closed at the end."""
        target = httpx.put(f"http://127.0.0.1:{self._port}/json/new?about:blank").json()
        with connect(target["webSocketDebuggerUrl"], max_size=None) as socket:
            yield Tab(socket)
            socket.send(json.dumps({"id": 0, "method": "Page.close"}))


@contextlib.contextmanager
def running_browser(program: str) -> Iterator[Browser]:
    """Chromium at ``program``, for the length of a block."""
    profile = Path(tempfile.mkdtemp(prefix="browser-"))
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += [
        "--disable-background-networking",
        "--disable-component-update",
        "--hide-scrollbars",
        "--window-size=1280,900",
    ]
    flags += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        told = profile / "DevToolsActivePort"
        deadline = time.monotonic() + START_SECONDS
        while not (told.exists() and told.read_text().strip()):
            assert process.poll() is None, f"{program} ended with {process.returncode}"
            assert time.monotonic() < deadline, f"{program} did not start"
            time.sleep(0.05)
        yield Browser(int(told.read_text().splitlines()[0]))
    finally:
        process.terminate()
        process.wait(30)
        shutil.rmtree(profile, ignore_errors=True)

"""A headless Chromium that tests drive over its debugging pipe."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)

WHEN_DRAWN = """(async () => {
  const wait = (ms) => new Promise((done) => setTimeout(done, ms));
  const isDrawn = () => document.readyState === "complete" && document.getElementById("failure")
    && (document.body.dataset.ready || !$("failure").hidden);
  while (!isDrawn() && performance.now() < 60000) await wait(50);
  const pause = async () => {  // until nothing changes any more
    let changes = 1;
    const watch = new MutationObserver(() => { changes += 1; });
    watch.observe(document, { subtree: true, childList: true, attributes: true });
    while (changes) { changes = 0; await wait(300); }
    watch.disconnect();
  };
  const choose = async (id, value) => {
    $(id).value = value;
    $(id).dispatchEvent(new Event(id === "filter" ? "input" : "change"));
    await pause();
  };
  const names = (selected = false) => [...$("rows").tBodies[0].rows]
    .filter((row) => !selected || row.hasAttribute("aria-selected"))
    .map((row) => row.cells[0].textContent);
  const marks = (id) => $(id).querySelectorAll("svg path, svg text").length;
  SCRIPT
})()"""


class Seen(NamedTuple):
    """Result of opening a page."""

    found: Any
    """Value that the script returned."""
    console: list[str]
    """Messages that the browser logged, such as what the content security policy forbade."""


@contextmanager
def started() -> Iterator["Browser"]:
    """Start a browser, which reads requests from its file 3 and writes replies to its file 4."""
    (read, requests), (replies, write) = os.pipe(), os.pipe()
    assert BROWSER is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        options.append(f"--user-data-dir={profile}")
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{read} 4>&{write}', "bash", BROWSER, *options],
            pass_fds=(read, write),
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        with os.fdopen(requests, "wb", 0), os.fdopen(replies, "rb") as received:
            yield Browser(requests, received)
            process.terminate()
            process.wait(30)


class Browser:
    """Browser whose pages have any width, unlike a window, which has at least 500 px."""

    def __init__(self, requests: int, replies: Any) -> None:
        self._requests, self._replies = requests, replies
        self._number = 0
        self._console: list[str] = []

    def opened(
        self, page: Path, script: str, width: int = 1200, scheme: str = "light", media: str = ""
    ) -> Seen:
        """Open a page, run the body of an async function after drawing, and return its result.

        Args:
            scheme: `light` or `dark`.
            media: `print` for the layout on paper.
        """
        self._console = []
        target = self._ask("Target.createTarget", url="about:blank")
        session = self._ask("Target.attachToTarget", **target, flatten=True)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        size = {"width": width, "height": 2000, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Runtime.enable", session)
        self._ask("Log.enable", session)
        self._ask("Emulation.setDeviceMetricsOverride", session, **size)
        self._ask("Emulation.setEmulatedMedia", session, media=media, features=features)
        self._ask("Page.navigate", session, url=page.as_uri())
        code = WHEN_DRAWN.replace("SCRIPT", script)
        options = {"awaitPromise": True, "returnByValue": True}
        reply = self._ask("Runtime.evaluate", session, expression=code, **options)
        self._ask("Target.closeTarget", **target)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return Seen(reply["result"].get("value"), self._console)

    def _ask(
        self, method: str, session: dict[str, str] | None = None, **parameters: Any
    ) -> dict[str, Any]:
        """Send a request, and return the result of its reply."""
        self._number += 1
        request = {"id": self._number, "method": method, "params": parameters, **(session or {})}
        os.write(self._requests, json.dumps(request).encode() + b"\0")
        while (reply := self._read()).get("id") != self._number:
            if reply["method"] in (
                *("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"),
            ):
                self._console.append(json.dumps(reply["params"]))
        assert "error" not in reply, (method, reply)
        result: dict[str, Any] = reply["result"]
        return result

    def _read(self) -> dict[str, Any]:
        message = bytearray()
        while (byte := self._replies.read(1)) != b"\0":
            assert byte, "the browser has ended"
            message += byte
        reply: dict[str, Any] = json.loads(message)
        return reply

"""The dashboard in headless Chromium, driven through chromedriver's HTTP (WebDriver) by httpx alone."""

import asyncio
import json
import os
import re
import shutil
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from msgspec.structs import replace

from kvtide.stack import Stack, running_stack
from shared.config import Gateway
from tests.integration.harness import READY_TIMEOUT_S, ask_each, small_config

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
MISSING = [str(path) for path in (CHROMIUM, DRIVER) if not path.exists()]

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.integration,
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} missing: apt-get install chromium-driver"),
]

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage", "--hide-scrollbars",
)  # fmt: skip
START_S = 30.0  # of chromedriver on a busy machine
WAIT_S = 40.0  # for a page that follows a stack whose processes start anew
POLL_S = 0.1
WIDTHS = (1280, 400)
QUESTION = "Why does the tide come twice a day? " * 8  # several pages, so that the second turn hits
OVERFLOW = """return [...document.querySelectorAll('body *')].filter(e => {
    const box = e.getBoundingClientRect();
    return box.width && getComputedStyle(e).clipPath === 'none' && box.right > innerWidth + 1;
}).map(e => e.outerHTML.slice(0, 80))"""


class Browser:
    """One window. Its methods are the WebDriver commands that the tests need."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def open(self, url: str) -> None:
        """Load a page."""
        await self._http.post("url", json={"url": url})

    async def run(self, script: str) -> Any:
        """The value that a script returns."""
        answer = await self._http.post("execute/sync", json={"script": script, "args": []})
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    async def text(self, selector: str = "body") -> str:
        """What a reader sees of an element; empty when there is none."""
        return await self.run(f"return document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    async def until(self, selector: str, wanted: str, timeout_s: float = WAIT_S) -> str:
        """Wait until an element's text has a match of the regular expression; returns all of the text."""
        deadline = time.monotonic() + timeout_s
        while not re.search(wanted, found := await self.text(selector)):
            assert time.monotonic() < deadline, f"{selector} never says {wanted!r}: {found!r}"
            await asyncio.sleep(POLL_S)
        return found

    async def chat(self, question: str) -> None:
        """Type a message and send it with the Enter key."""
        await self.type("#chat-text", question + "\ue007")

    async def type(self, selector: str, keys: str) -> None:
        """Type into an element."""
        found = await self._http.post("element", json={"using": "css selector", "value": selector})
        (element,) = found.json()["value"].values()
        typed = await self._http.post(f"element/{element}/value", json={"text": keys})
        assert typed.status_code == 200, typed.text

    async def shape(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Size of the page, and its colours."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self._cdp("Emulation.setEmulatedMedia", features=[scheme])
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self._cdp("Emulation.setDeviceMetricsOverride", **metrics)

    async def picture(self) -> str:
        """What is seen, as a PNG in base64."""
        return str((await self._http.get("screenshot")).json()["value"])

    async def console(self) -> list[str]:
        """What the page has complained about: errors of its scripts, refused or failed loads."""
        found = (await self._http.post("se/log", json={"type": "browser"})).json()["value"]
        return [entry["message"] for entry in found if entry["level"] == "SEVERE"]

    async def _cdp(self, command: str, **parameters: Any) -> None:
        done = await self._http.post("goog/cdp/execute", json={"cmd": command, "params": parameters})
        assert done.status_code == 200, done.text


@asynccontextmanager
async def running_browser(folder: Path) -> AsyncIterator[Browser]:
    """chromedriver on a free port, and one session whose profile lies in `folder`."""
    driver = await asyncio.create_subprocess_exec(
        DRIVER, "--port=0", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True
    )
    try:
        port = await asyncio.wait_for(_port(driver), START_S)
        options = {"binary": str(CHROMIUM), "args": [*FLAGS, f"--user-data-dir={folder}/profile"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        base = f"http://127.0.0.1:{port}/session"
        async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
            made = await http.post(base, json={"capabilities": {"alwaysMatch": wanted}})
            assert made.status_code == 200, made.text
            http.base_url = httpx.URL(f"{base}/{made.json()['value']['sessionId']}/")
            try:
                yield Browser(http)
            finally:
                await http.delete("")
    finally:
        os.killpg(driver.pid, signal.SIGKILL)  # with the browser, if the session couldn't end it
        await driver.communicate()
        shutil.rmtree(folder / "profile", ignore_errors=True)


async def _port(driver: asyncio.subprocess.Process) -> int:
    assert driver.stdout is not None
    async for line in driver.stdout:
        if b"started successfully on port" in line:
            return int(line.rstrip(b".\n").rpartition(b" ")[2])
    raise AssertionError("chromedriver ended before it had a port")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def browser(module_folder: Path) -> AsyncIterator[Browser]:
    """One browser for the tests of this module."""
    async with running_browser(module_folder) as made:
        yield made


async def test_the_page_shows_the_stack_and_follows_it(browser: Browser, stack: Stack) -> None:
    await browser.shape(1280)
    await browser.open(stack.url)
    await browser.until("#state", "ready")
    await browser.until("#model", stack.config.model.name)
    for name in ("L1 device", "write_backup", "L2 host", "archive", "L3 storage"):
        await browser.until("#tiers", name)
    for identity in ("scheduler", "gpu_worker-0", "storage-0", "gateway-0"):
        await browser.until("#processes", identity)
    await browser.until("#tiles", "no prompt yet")

    await ask_each(stack, [0, 0])
    await browser.until("#tiles", "prompt tokens")
    await browser.until("#tiers .tier.device", "cached")
    await browser.until("#tiers .tier.storage", "stored")
    await browser.until("#chart-note", r"device [1-9]\d* %")
    assert await browser.run("return document.querySelectorAll('#chart rect.device').length") > 0
    assert await browser.console() == []


async def test_a_chat_says_which_tier_had_its_prompt(browser: Browser, stack: Stack) -> None:
    await browser.open(stack.url)
    await browser.until("#model", stack.config.model.name)
    await browser.run("document.getElementById('chat-max').value = 12")
    await browser.chat(QUESTION)
    first = await browser.until("#chat-log", "First token after")
    assert "Prompt of" in first
    await browser.chat("And where is it highest?")
    second = await browser.until("#chat-log .origin:last-child", "First token after")
    assert "from device" in second
    await browser.run("document.querySelectorAll('.why').forEach(each => { each.open = true })")
    reasons = await browser.text("#chat-log .origin:last-child .why")
    assert re.search(r"0–\d+ from device", reasons)
    assert "computed device: never seen; host: never seen; storage: " in reasons
    assert "always computed" in reasons
    assert re.search(r"[0-9a-f]{8}\s.*device", await browser.until("#prefixes", "device"), re.DOTALL)
    assert await browser.run("return document.querySelectorAll('.said').length") == 4
    assert await browser.console() == []


@pytest.mark.parametrize("width", WIDTHS)
async def test_nothing_is_cut_off(browser: Browser, stack: Stack, width: int) -> None:
    await browser.shape(width)
    await browser.open(stack.url)
    await browser.until("#state", "ready")
    assert await browser.run(OVERFLOW) == []
    unnamed = """return [...document.querySelectorAll('input, textarea, button, [role=img], section')].filter(e =>
        !(e.labels?.length || e.textContent.trim() || e.ariaLabel || e.getAttribute('aria-labelledby'))).length"""
    assert await browser.run(unnamed) == 0


async def test_a_storage_that_dies_is_seen(browser: Browser, folder: Path) -> None:
    async with running_stack(small_config(folder)) as stack:
        await stack.wait_ready(READY_TIMEOUT_S)
        await browser.open(stack.url)
        await browser.until("#state", "ready")
        stack.kill("storage-0", signal.SIGSTOP)
        await browser.until("#notices", "storage-0 is silent")
        await browser.until("#processes", "silent for")
        assert await browser.run("return document.querySelector('.tier.host').classList.contains('gone')")
        stack.kill("storage-0", signal.SIGKILL)
        await browser.until("#events", "storage-0 started anew")
        await browser.until("#state", "ready")

        stack.kill("scheduler-0", signal.SIGSTOP)
        await browser.until("#state", "scheduler gone")
        await browser.until("#notices", "scheduler")
        stack.kill("scheduler-0", signal.SIGKILL)
        await browser.until("#events", "the scheduler answers again")
        await browser.until("#state", "ready")
        assert await browser.run(
            "return [...document.querySelectorAll('#events li')].every(e => e.querySelector('time'))"
        )


async def test_a_key_is_asked_for_and_forgotten(browser: Browser, folder: Path) -> None:
    config = small_config(folder)
    async with running_stack(replace(config, gateway=Gateway(port=0, api_keys=("secret",)))) as stack:
        await stack.wait_ready(READY_TIMEOUT_S)
        await browser.open(stack.url)
        await browser.until("#state", "key wanted")
        await browser.type("#key", "wrong\ue007")
        await browser.until("#key-wrong", "not one of the gateway's")
        await browser.type("#key", "secret\ue007")
        await browser.until("#state", "ready")
        await browser.until("#model", stack.config.model.name)
        assert await browser.run("return sessionStorage.length") == 1
        await browser.run("document.getElementById('forget').click()")
        assert await browser.run("return sessionStorage.length") == 0
        assert "key wanted" in await browser.text("#state")

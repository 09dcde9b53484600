"""Takes the pictures of docs/dashboard.md anew: `python -m tests.integration.screenshots`, some minutes."""

import asyncio
import base64
import io
import signal
from pathlib import Path

from PIL import Image

from kvtide.private_folder import private_folder
from kvtide.stack import CHECKOUT, running_stack
from tests.integration.harness import READY_TIMEOUT_S, ask, ask_each, prompt, small_config
from tests.integration.test_dashboard import Browser, running_browser

IMAGES = CHECKOUT / "docs" / "images"
ASKED = [number for turn in range(12) for number in (0, turn % 7, 1, turn % 5, 2, turn % 3)]  # some come back often
QUESTIONS = ("Why does the tide come twice a day?", "And where is it highest?")
OPEN = "document.querySelectorAll('.why').forEach(each => { each.open = true })"
HEIGHT = "return document.documentElement.scrollHeight"
FOLD = 900  # pixels


async def take(browser: Browser, name: str, width: int, height: int | None = FOLD, dark: bool = False) -> None:
    """The page as it is now; without a height all of it."""
    await browser.shape(width, dark=dark)
    if height is None:
        await browser.shape(width, int(await browser.run(HEIGHT)), dark)
    await browser.run("document.activeElement.blur()")
    picture = Image.open(io.BytesIO(base64.b64decode(await browser.picture())))
    picture.convert("RGB").quantize(256).save(IMAGES / f"{name}.png", optimize=True)


async def main(folder: Path) -> None:
    """A small stack under load, with a chat, and then with a storage that is silent."""
    async with running_stack(small_config(folder)) as stack, running_browser(folder) as browser:
        await stack.wait_ready(READY_TIMEOUT_S)
        await browser.shape(1280)
        await browser.open(stack.url)
        await browser.until("#state", "ready")
        await ask_each(stack, ASKED)
        await browser.run("document.getElementById('chat-max').value = 24")
        for count, question in enumerate(QUESTIONS, 1):
            await browser.chat(question)
            await browser.until("#chat-log", rf"(?s)(First token after.*){{{count}}}")
            await ask(stack, prompt(len(question) % 7))
        await browser.run(OPEN)
        await take(browser, "dashboard-1280", 1280, height=None)
        await take(browser, "dashboard-400", 400, height=None, dark=True)
        stack.kill("storage-0", signal.SIGSTOP)
        await browser.until("#notices", "storage-0 is silent")
        await browser.run("scrollTo(0, 0)")
        await take(browser, "dashboard-storage-silent", 1280)
        stack.kill("storage-0", signal.SIGCONT)


if __name__ == "__main__":
    with private_folder("kvtide-pictures-") as made:
        asyncio.run(main(made))

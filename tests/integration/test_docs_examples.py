"""The documents' examples that ask a stack, run as they are written, but for the address of the stack."""

import asyncio
import json
import re
import shutil
import subprocess
import sys

import pytest

from kvtide.stack import Stack
from tests.docs.examples import Example, all_commands, examples

pytestmark = pytest.mark.asyncio(loop_scope="session")

WRITTEN = "http://127.0.0.1:8000"  # the address in the documents
RUN_S = 60.0
ASKING = [(example, words) for example, words in all_commands("kvtide") if words[1] == "status"]


async def run(words: list[str]) -> str:
    """Run a command to its end; returns its stdout."""
    process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE)
    out, _ = await asyncio.wait_for(process.communicate(), RUN_S)
    assert process.returncode == 0, words
    return out.decode()


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
@pytest.mark.parametrize(("example", "words"), all_commands("curl"), ids=str)
async def test_curl_gets_an_answer(stack: Stack, example: Example, words: list[str]) -> None:
    given = [word.replace(WRITTEN, stack.url) for word in words]
    answer = json.loads(await run([*given, "--silent", "--fail-with-body", "--noproxy", "*"]))
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["prompt_tokens_details"]


@pytest.mark.parametrize(("example", "words"), ASKING, ids=str)
async def test_status_is_told(stack: Stack, example: Example, words: list[str]) -> None:
    settings = [f"run.name={stack.config.run.name}", f"run.folder={stack.config.run_folder}"]
    sets = [word for setting in settings for word in ("--set", setting)]
    assert "gpu_worker-0" in await run([sys.executable, "-m", "kvtide.cli", *words[1:], *sets])


@pytest.mark.parametrize("example", [each for each in examples("python") if "from openai" in each.text], ids=str)
async def test_openai_s_client_asks_twice_and_the_second_time_the_device_has_it(stack: Stack, example: Example) -> None:
    printed = await run([sys.executable, "-c", example.text.replace(WRITTEN, stack.url)])
    first, second = (int(tokens) for tokens in re.findall(r"device_tokens=(\d+)", printed))
    assert second > first
    sets = ["--set", f"run.folder={stack.config.run_folder}"]
    told = await run([sys.executable, "-m", "kvtide.cli", "why", printed.splitlines()[1].split()[0], *sets])
    assert f"0-{second}" in told

"""`kvtide why` and `kvtide_explain` with real processes: hits and reasons that a client can bring about."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from kvtide import cli
from kvtide.chat_client import client
from kvtide.stack import CHECKOUT, Stack, running_stack
from tests.integration.harness import MAX_TOKENS, PAGE_TOKENS, READY_TIMEOUT_S, ask_each, prompt, settle, small_config

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.integration]

OTHERS = range(1, 6)  # prompts of about 200 tokens: more than the device's 768


async def explained(stack: Stack, number: int, **options: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Ask a prompt; returns the answer's id, its explanation and its usage."""
    body = {"model": stack.config.model.name, "prompt": prompt(number), "max_tokens": MAX_TOKENS, "temperature": 0}
    async with client(stack.url) as http:
        answer = (await http.post("/v1/completions", json={**body, "kvtide_explain": True, **options})).json()
    (explanation,) = answer["kvtide"]["explanation"]
    return answer["id"], explanation, answer["usage"]


def missed(explanation: dict[str, Any], segment: int = 0) -> dict[str, str]:
    """Reason by tier."""
    return {tier: fate["reason"] for tier, fate in explanation["segments"][segment]["missed"].items()}


def tokens_from(explanation: dict[str, Any], tier: str) -> int:
    """How many tokens the tier gave."""
    return sum(each["to_token"] - each["from_token"] for each in explanation["segments"] if each["tier"] == tier)


async def test_why_from_never_seen_to_host_and_the_usage_agrees(stack: Stack) -> None:
    _, first, _ = await explained(stack, 0)
    assert missed(first) == dict.fromkeys(("device", "host", "storage"), "never_seen")
    _, again, usage = await explained(stack, 0)
    assert tokens_from(again, "device") == usage["prompt_tokens_details"]["device_tokens"] > 0
    await ask_each(stack, OTHERS)
    await settle(stack)
    _, back, usage = await explained(stack, 0)
    assert tokens_from(back, "host") == usage["prompt_tokens_details"]["host_tokens"] > 0
    host = next(each for each in back["segments"] if each["tier"] == "host")
    fate = host["missed"]["device"]
    assert (fate["reason"], fate["cause"]) == ("evicted", "admission")
    async with client(stack.url) as http:
        taker = await http.get(f"/kvtide/why/{fate['request_id']}")
    assert taker.status_code == httpx.codes.OK


async def test_why_other_tenants_are_never_spoken_of(stack: Stack) -> None:
    await explained(stack, 10, cache_salt="alice")
    _, mine, _ = await explained(stack, 10, cache_salt="bob")
    assert missed(mine) == dict.fromkeys(("device", "host", "storage"), "never_seen")


async def test_why_below_the_threshold_and_the_command_line_says_so(stack: Stack) -> None:
    request, about, _ = await explained(stack, 0, prompt=list(range(1000, 1000 + 2 * PAGE_TOKENS)))
    assert missed(about)["storage"] == "below_threshold"
    arguments = ["--set", f"run.folder={stack.config.run_folder}"]
    ended = await asyncio.to_thread(command, "why", request, "--json", *arguments)
    (choice,) = json.loads(ended.stdout)["choices"]
    assert choice == about
    refused = await asyncio.to_thread(command, "why", "cmpl-0", *arguments)
    assert refused.returncode == cli.FAILED
    assert "nothing is known of the request 'cmpl-0'" in refused.stderr


async def test_why_flushed_and_then_l3_gives_the_pages_back(stack: Stack) -> None:
    await explained(stack, 0)
    await settle(stack)
    arguments = ["--json", "--set", f"run.folder={stack.config.run_folder}"]
    ended = await asyncio.to_thread(command, "flush", *arguments)
    figures = json.loads(ended.stdout)
    assert (figures["action"], figures["kept_pages"]) == ("flush", 0)
    assert figures["device_pages"] > 0
    assert figures["host_pages"] > 0
    _, about, _ = await explained(stack, 0)
    assert tokens_from(about, "storage") > 0
    fates = about["segments"][0]["missed"]
    assert [fates[tier]["text"].endswith("by an administrator's flush") for tier in ("device", "host")] == [True] * 2
    refused = await asyncio.to_thread(command, "drain", "storage-9", *arguments)
    assert refused.returncode == cli.FAILED
    assert "there is no storage 'storage-9'; there are: storage-0" in refused.stderr


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    argv = [sys.executable, "-m", "kvtide.cli", *arguments]
    return subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, timeout=30, check=False)


async def test_why_a_page_that_changed_on_disk_is_corrupted(folder: Path) -> None:
    config = small_config(folder)
    async with running_stack(config) as stack:
        await stack.wait_ready(READY_TIMEOUT_S)
        await explained(stack, 0)
        await settle(stack)
    for page in (folder / "l3").rglob("*.page"):
        data = bytearray(page.read_bytes())
        data[-1] ^= 1
        page.write_bytes(data)
    async with running_stack(config) as stack:
        await stack.wait_ready(READY_TIMEOUT_S)
        _, about, _ = await explained(stack, 0)
        assert missed(about)["storage"] == "corrupted"


async def test_why_without_an_l3_it_is_off(folder: Path) -> None:
    config = small_config(folder)
    async with running_stack(replace(config, storage=replace(config.storage, backend="none"))) as stack:
        await stack.wait_ready(READY_TIMEOUT_S)
        _, about, _ = await explained(stack, 0)
        assert missed(about) == {"device": "never_seen", "host": "never_seen", "storage": "off"}

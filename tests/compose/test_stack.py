"""compose.yaml: what a user does on the first day, and what each restart leaves of the cache."""

import asyncio
import contextlib
import itertools

import pytest

from kvtide.chat_client import Answer, RequestError
from kvtide.oracle_process import Oracle
from tests.compose.harness import READY_S, SERVICES, Compose, run
from tests.integration.harness import PAGE_TOKENS, prompt

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(1800)]

LOAD_PROMPTS = 6
LOAD_CLIENTS = 4
LOAD_S = 120.0  # for eight answers of a busy machine


async def test_up_wait_serves_a_completion(mapped: Compose) -> None:
    answer = await mapped.ask(prompt(0))
    assert answer.tokens
    assert (answer.device_tokens, answer.host_tokens, answer.storage_tokens) == (0, 0, 0)
    await mapped.settle()


async def test_a_restarted_worker_finds_its_pages_on_the_host(mapped: Compose) -> None:
    await mapped.settle()
    await mapped.restart("gpu_worker")
    answer = await mapped.ask(prompt(0))
    assert answer.host_tokens >= 8 * PAGE_TOKENS
    assert answer.device_tokens == answer.storage_tokens == 0


async def test_after_all_restarts_pages_come_from_storage(mapped: Compose, oracle: Oracle) -> None:
    first = await mapped.ask(prompt(1))
    await mapped.settle()
    await mapped.restart("scheduler", "gpu_worker", "storage")
    again = await mapped.ask(prompt(1))
    assert again.storage_tokens >= 8 * PAGE_TOKENS
    assert again.tokens == first.tokens
    verdict = await oracle.check([first.emitted, again.emitted])
    assert (verdict.wrong, verdict.checked) == (0, len(first.tokens) + len(again.tokens))


async def test_scaling_storage_under_load_fails_no_request(mapped: Compose) -> None:
    stop, answered = asyncio.Event(), asyncio.Queue[int]()

    async def load(first: int) -> None:
        for number in itertools.count(first):
            if stop.is_set():
                return
            await mapped.ask(prompt(2 + number % LOAD_PROMPTS))
            answered.put_nowait(number)

    clients = [asyncio.create_task(load(first)) for first in range(LOAD_CLIENTS)]
    try:
        await mapped.up("--no-recreate", "--scale", "storage=3")
        async with asyncio.timeout(LOAD_S):
            for _ in range(answered.qsize() + 2 * LOAD_CLIENTS):  # some after the new storages have come
                await answered.get()
    finally:
        stop.set()
        await asyncio.gather(*clients)
    status = await mapped.settle()
    pools = {name: pool["usable"] for name, pool in status["host"].items()}
    assert pools == {"storage-1": 1, "storage-2": 1, "storage-3": 1}


async def test_a_killed_worker_comes_back_by_itself(mapped: Compose) -> None:
    with contextlib.suppress(AssertionError):  # the command dies with its container
        await mapped.compose("exec", "gpu_worker", "sh", "-c", "kill -9 $(pidof python)")
    assert (await _ask_again(mapped, prompt(2))).tokens
    await mapped.wait_ready()
    assert (await mapped.ask(prompt(3))).host_tokens > 0  # of the load above


async def _ask_again(stack: Compose, text: str) -> Answer:
    """Ask as a client does that obeys Retry-After."""
    async with asyncio.timeout(READY_S):
        while True:
            try:
                return await stack.ask(text)
            except RequestError as error:
                if not error.retryable:
                    raise
                await asyncio.sleep(1)


async def test_containers_are_not_root_and_only_this_machine_reaches_them(mapped: Compose) -> None:
    for service in SERVICES:
        name = (await mapped.compose("ps", "-q", service)).split()[0]
        shown = await run(
            "docker",
            "inspect",
            "--format",
            "{{.Config.User}} {{.HostConfig.ReadonlyRootfs}} {{.HostConfig.Memory}} {{json .NetworkSettings.Ports}}",
            name,
        )
        user, read_only, memory, ports = shown.split(maxsplit=3)
        assert (user, read_only) == ("1000:1000", "true")
        assert int(memory) > 0
        assert "0.0.0.0" not in ports
        assert ("127.0.0.1" in ports) == (service == "gateway")


async def test_down_v_leaves_nothing(mapped: Compose) -> None:
    assert await mapped.left()
    await mapped.compose("down", "-v", "--timeout", "15")
    assert await mapped.left() == []

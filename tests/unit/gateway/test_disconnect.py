"""A client that goes away takes its request with it, in every state."""

import asyncio
import contextlib
import socket

import httpx
import pytest

from tests.unit.gateway.harness import Stack, until


async def leave(asking: "asyncio.Task[httpx.Response]") -> None:
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking


@pytest.mark.parametrize("stream", [False, True])
async def test_while_the_request_waits(stack: Stack, stream: bool) -> None:
    asking = asyncio.create_task(stack.complete(stream=stream, n=2))
    await stack.scheduler.submitted(2)
    await leave(asking)
    await until(lambda: len(stack.scheduler.aborts) == 2)
    assert sorted(stack.scheduler.aborts) == sorted(submit.request_id for submit in stack.scheduler.submits)
    await assert_nothing_is_open(stack)


@pytest.mark.parametrize("stream", [False, True])
async def test_after_the_first_token(stack: Stack, stream: bool) -> None:
    asking = asyncio.create_task(stack.chat(stream=stream))
    submit = await stack.scheduler.submitted()
    stack.scheduler.emit(submit, stack.words.ids("a"))
    await asyncio.sleep(0.1)
    await leave(asking)
    await until(lambda: stack.scheduler.aborts == [submit.request_id])
    stack.scheduler.emit(submit, stack.words.ids("b"))  # late: nobody is there any more
    stack.scheduler.finish(submit, 2)
    await assert_nothing_is_open(stack)


async def test_while_no_scheduler_is_there(stack: Stack) -> None:
    await stack.stop_scheduler()
    asking = asyncio.create_task(stack.complete())
    await asyncio.sleep(0.2)
    await leave(asking)
    await asyncio.sleep(0.2)
    scheduler = await stack.start_scheduler()
    stack.says("a")
    assert (await stack.complete()).status_code == 200
    assert len(scheduler.submits) == 1


async def test_a_client_that_stops_reading_is_given_up(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.generate.REQUEST_MARGIN_S", -599.5)
    monkeypatch.setattr("services.gateway.generate.FLUSH_S", 0.0)
    host, port = stack.url.removeprefix("http://").split(":")
    body = b'{"model":"tiny","prompt":"a","stream":true,"max_tokens":60,"logprobs":5}'
    with socket.socket() as narrow:
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.connect((host, int(port)))
        narrow.setblocking(False)
        narrow.send(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        submit = await stack.scheduler.submitted()
        for _ in range(2):  # megabytes of log-probabilities: more than the sockets' buffers hold
            stack.scheduler.emit(submit, [1] * 20_000)
        await until(lambda: stack.scheduler.aborts == [submit.request_id])
    await assert_nothing_is_open(stack)


async def assert_nothing_is_open(stack: Stack) -> None:
    async with stack.client() as client:

        async def open_requests() -> float:
            text = (await client.get("/metrics")).text
            return next(
                float(line.split()[1]) for line in text.splitlines() if line.startswith("kvtide:num_requests_open ")
            )

        for _ in range(100):
            if not await open_requests():
                return
            await asyncio.sleep(0.02)
    raise AssertionError("a request is still open")

"""A lost scheduler costs time; a stream that has begun ends with an error that says so."""

import asyncio
import json

import pytest

from shared.messages.common import Missed
from tests.unit.gateway.harness import Stack, events, run_stack, until


@pytest.fixture(autouse=True)
def quick_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.link.BUSY_INTERVAL_S", 0.1)
    monkeypatch.setattr("shared.link.IDLE_INTERVAL_S", 0.1)


async def replace(stack: Stack, **options: float) -> None:
    await stack.stop_scheduler()
    await stack.start_scheduler(**options)


@pytest.mark.parametrize("stream", [False, True])
async def test_replaced_before_the_first_token(stack: Stack, stream: bool) -> None:
    asking = asyncio.create_task(stack.complete(stream=stream, seed=5))
    first = await stack.scheduler.submitted()
    await replace(stack)
    second = await stack.scheduler.submitted()
    assert second.request_id != first.request_id
    assert (second.tokens, second.sampling) == (first.tokens, first.sampling)
    assert second.timeout_s < first.timeout_s
    stack.scheduler.emit(second, stack.words.ids("ok"))
    stack.scheduler.finish(second, 2)
    response = await asking
    texts = [event["choices"][0] for event in events(response.text)] if stream else response.json()["choices"]
    assert "".join(choice["text"] for choice in texts) == "ok"


async def test_replaced_in_the_middle_of_an_answer_that_is_not_streamed(stack: Stack) -> None:
    asking = asyncio.create_task(stack.complete(n=2))
    await stack.scheduler.submitted(2)
    stack.scheduler.emit(stack.scheduler.submits[0], stack.words.ids("old"))
    stack.scheduler.emit(stack.scheduler.submits[1], stack.words.ids("done"))
    stack.scheduler.finish(stack.scheduler.submits[1], 4)
    await asyncio.sleep(0.1)
    await replace(stack)
    again = await stack.scheduler.submitted()
    assert again.sampling.choice == 0
    stack.scheduler.emit(again, stack.words.ids("new"))
    stack.scheduler.finish(again, 3)
    body = (await asking).json()
    assert [choice["text"] for choice in body["choices"]] == ["new", "done"]
    assert body["usage"]["completion_tokens"] == 7
    assert len(stack.scheduler.submits) == 1


async def test_replaced_in_the_middle_of_a_stream(stack: Stack) -> None:
    asking = asyncio.create_task(stack.chat(stream=True))
    stack.scheduler.emit(await stack.scheduler.submitted(), stack.words.ids("a"))
    await asyncio.sleep(0.1)
    await replace(stack)
    response = await asking
    assert response.status_code == 200
    last = json.loads(response.text.splitlines()[-2].removeprefix("data: "))
    assert last["error"]["code"] == "unavailable"
    assert "[DONE]" not in response.text
    await asyncio.sleep(0.2)
    assert not stack.scheduler.submits


async def test_tokens_that_were_held_back_do_not_prevent_a_resubmission(stack: Stack) -> None:
    asking = asyncio.create_task(stack.complete(stream=True, stop="END"))
    stack.scheduler.emit(await stack.scheduler.submitted(), stack.words.ids("E"))
    await asyncio.sleep(0.1)
    await replace(stack)
    again = await stack.scheduler.submitted()
    stack.scheduler.emit(again, stack.words.ids("ND"))
    stack.scheduler.finish(again, 2)
    assert "".join(event["choices"][0]["text"] for event in events((await asking).text)) == "ND"


async def test_silent_and_back_with_the_same_epoch(stack: Stack) -> None:
    scheduler = stack.scheduler
    scheduler.interval_s = 0.1
    await asyncio.sleep(1.2)  # until the gateway has heard the new interval
    asking = asyncio.create_task(stack.complete())
    first = await scheduler.submitted()
    scheduler.silent = True
    await asyncio.sleep(0.8)
    scheduler.silent = False
    second = await scheduler.submitted(2)
    await until(lambda: scheduler.aborts == [first.request_id])  # it may still be at work on the first attempt
    scheduler.emit(first, stack.words.ids("late"))
    scheduler.emit(second, stack.words.ids("ok"))
    scheduler.finish(first, 4)
    scheduler.finish(second, 2)
    assert (await asking).json()["choices"][0]["text"] == "ok"


async def test_after_a_loss_on_the_way_the_request_is_submitted_anew_and_the_old_attempt_ended(stack: Stack) -> None:
    asking = asyncio.create_task(stack.complete())
    first = await stack.scheduler.submitted()
    stack.scheduler.send(Missed())
    second = await stack.scheduler.submitted(2)
    await until(lambda: stack.scheduler.aborts == [first.request_id])
    stack.scheduler.emit(first, stack.words.ids("late"))
    stack.scheduler.emit(second, stack.words.ids("ok"))
    stack.scheduler.finish(second, 2)
    assert (await asking).json()["choices"][0]["text"] == "ok"


async def test_a_request_that_comes_after_the_scheduler_has_given_the_gateway_up_is_not_lost(stack: Stack) -> None:
    """The gateway's process stood still, and doesn't know yet that nobody knows it."""
    hellos = stack.scheduler.hellos
    stack.scheduler.forget_gateways()
    asking = asyncio.create_task(stack.complete())
    submit = await stack.scheduler.submitted()
    assert stack.scheduler.hellos > hellos
    stack.scheduler.emit(submit, stack.words.ids("ok"))
    stack.scheduler.finish(submit, 2)
    assert (await asking).json()["choices"][0]["text"] == "ok"


async def test_a_stream_that_may_lack_tokens_ends_with_a_retryable_error(stack: Stack) -> None:
    asking = asyncio.create_task(stack.chat(stream=True))
    first = await stack.scheduler.submitted()
    stack.scheduler.emit(first, stack.words.ids("a"))
    await asyncio.sleep(0.1)
    stack.scheduler.send(Missed())
    last = json.loads((await asking).text.splitlines()[-2].removeprefix("data: "))
    assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "unavailable")
    await until(lambda: stack.scheduler.aborts == [first.request_id])


async def test_an_abort_that_may_be_lost_is_repeated_until_its_request_has_ended(stack: Stack) -> None:
    stack.scheduler.status = b"{}"
    asking = asyncio.create_task(stack.complete(stream=True))
    submit = await stack.scheduler.submitted()
    asking.cancel()
    await until(lambda: stack.scheduler.aborts == [submit.request_id])
    stack.scheduler.send(Missed())
    await until(lambda: stack.scheduler.aborts == 2 * [submit.request_id])
    stack.scheduler.finish(submit, 0, "abort")
    stack.scheduler.send(Missed())
    async with stack.client() as client:
        for _ in range(2):
            assert (await client.get("/status")).status_code == 200  # answered after what was sent before
    assert stack.scheduler.aborts == 2 * [submit.request_id]


async def test_the_fourth_scheduler_gets_no_resubmission(stack: Stack) -> None:
    asking = asyncio.create_task(stack.complete())
    for _ in range(3):
        await stack.scheduler.submitted()
        await replace(stack)
    await stack.scheduler.submitted()
    await replace(stack)
    response = await asking
    assert response.status_code == 503
    assert response.headers["retry-after"] == "2"
    assert not stack.scheduler.submits


async def test_requests_wait_for_a_scheduler_that_starts_later(run_folder, model_folder) -> None:
    async with run_stack(run_folder, model_folder, scheduler=False) as stack:
        asking = asyncio.create_task(stack.complete())
        await asyncio.sleep(0.2)
        await stack.start_scheduler()
        stack.says("ok")
        assert (await asking).json()["choices"][0]["text"] == "ok"


@pytest.mark.parametrize("stream", [False, True])
async def test_no_scheduler_comes(run_folder, model_folder, stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.scheduler_client.NO_SCHEDULER_S", 0.3)
    async with run_stack(run_folder, model_folder, scheduler=False) as stack:
        response = await stack.complete(stream=stream)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "2"
        assert "no scheduler" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_scheduler_that_never_answers(
    run_folder, model_folder, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.session.REQUEST_MARGIN_S", 0.1)
    async with run_stack(run_folder, model_folder, timeout_s=0.3) as stack:
        response = await stack.complete(stream=stream)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "timeout")
        await until(lambda: len(stack.scheduler.aborts) == 1)

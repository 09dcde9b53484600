"""How the service starts, says where it is, and stops."""

import asyncio
import json
import socket

import pytest
import uvicorn

from services.gateway.server import serve
from shared.config import Config, Gateway, Model, Run
from shared.errors import ConfigError, ModelError, ProtocolError
from shared.messages.common import Refused
from tests.unit.gateway.harness import Stack, run_stack, until


async def test_the_address_is_written_and_removed(run_folder, model_folder) -> None:
    async with run_stack(run_folder, model_folder) as stack:  # its end checks that the file is gone
        assert json.loads((run_folder / "gateway.json").read_bytes()) == {"url": stack.url}
        assert [file.name for file in run_folder.iterdir() if file.name.startswith(".")] == []


async def test_a_port_in_use(run_folder, model_folder) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = Config(run=Run(str(run_folder)), model=Model(str(model_folder)), gateway=Gateway(port=port))
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*set gateway\.port"):
            await serve(config, "gateway-0", asyncio.Event())


async def test_any_port_is_the_port_of_a_gateway_that_was_killed_here(run_folder, model_folder) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (run_folder / "gateway.json").write_text(json.dumps({"url": f"http://127.0.0.1:{port}"}))
    async with run_stack(run_folder, model_folder) as stack:
        assert stack.url.endswith(f":{port}")


async def test_no_model(run_folder) -> None:
    with pytest.raises(ModelError, match=r"set model\.path"):
        await serve(Config(run=Run(str(run_folder))), "gateway-0", asyncio.Event())


async def test_a_running_request_is_finished_before_the_stop(stack: Stack) -> None:
    asking = asyncio.create_task(stack.complete(stream=True))
    submit = await stack.scheduler.submitted()
    stack.stop.set()
    await asyncio.sleep(0.3)
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", int(stack.url.rpartition(":")[2]))
    stack.scheduler.emit(submit, stack.words.ids("a"))
    stack.scheduler.finish(submit, 1)
    assert (await asking).text.endswith("[DONE]\n\n")
    assert stack.scheduler.aborts == []


@pytest.mark.parametrize("stream", [False, True])
async def test_after_the_drain_requests_end_with_an_error(
    stack: Stack, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.server.DRAIN_S", 0.2)
    asking = asyncio.create_task(stack.complete(stream=stream))
    submit = await stack.scheduler.submitted()
    stack.stop.set()
    response = await asking
    assert response.status_code == 503
    assert "stopping" in response.json()["error"]["message"]
    await asyncio.sleep(0.1)
    assert stack.scheduler.aborts == [submit.request_id]


async def test_a_request_that_comes_while_the_stop_closes_the_door_ends_with_an_error_too(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.server.DRAIN_S", 0.5)
    came, on_tick = asyncio.Event(), uvicorn.Server.on_tick

    async def on_last_tick(server: uvicorn.Server, counter: int) -> bool:
        if server.should_exit:
            await came.wait()
        return await on_tick(server, counter)

    monkeypatch.setattr(uvicorn.Server, "on_tick", on_last_tick)
    stack.stop.set()
    asking = asyncio.create_task(stack.complete())
    await stack.scheduler.submitted()
    came.set()
    response = await asking
    assert response.status_code == 503
    assert "stopping" in response.json()["error"]["message"]


async def test_a_scheduler_that_refuses_for_good_ends_the_service(run_folder, model_folder) -> None:
    with pytest.raises(ProtocolError, match="no such model"):
        async with run_stack(run_folder, model_folder, scheduler=False) as stack:
            scheduler = await stack.start_scheduler()
            await until(lambda: scheduler.hellos)
            scheduler.send(Refused("no such model", False))
            await asyncio.sleep(0.2)

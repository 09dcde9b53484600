"""`kvtide record` with a real scheduler's shell: what it writes is a trace."""

import asyncio
from pathlib import Path

import pytest

from kvtide import cli
from kvtide.child import StackError
from kvtide.replay import record as recording
from kvtide.replay.trace import read_trace
from services.scheduler.core.events import PeerKey
from services.scheduler.service import SchedulerService
from shared.config import Config, Run
from shared.errors import TraceError
from shared.messages.gateway import Finish, Namespace, Submit, Usage
from shared.messages.worker import Sampling
from shared.packed import pack

GATEWAY = PeerKey("gateway", 1)
TRIES = 100  # of 10 ms: the scheduler has taken the wish long before


@pytest.mark.parametrize("name", ["live.jsonl", "live.jsonl.gz"])
async def test_a_recording_is_a_trace_without_tokens(name: str, tmp_path: Path) -> None:
    config = Config(run=Run(folder=str(tmp_path)))
    service = SchedulerService(config)
    stop = asyncio.Event()
    running = asyncio.create_task(service.run(stop))
    path = tmp_path / name
    said: asyncio.Queue[str] = asyncio.Queue()
    task = asyncio.create_task(recording.record(config.scheduler_endpoint, path, 2.0, said.put_nowait))
    try:
        assert "recording to" in await said.get()
        for _ in range(TRIES):
            if service._recorder._salts:
                break
            await asyncio.sleep(0.01)
        tokens = list(range(7_000, 7_150))  # two pages of 64 tokens and a part of one
        for number in range(2):
            sampling = Sampling(0.0, 1.0, 0, 0.0, 0, 0, 0)
            submit = Submit(str(number), pack(tokens), 5, [], sampling, Namespace(), 0, 9.0)
            service._recorder.submitted(GATEWAY, submit)
            for peer, message in service._recorder.ended(
                GATEWAY, Finish(str(number), "length", Usage(150, 5, 0, 0, 0, 0, 0.0))
            ):
                service._send(peer, message)
        assert await task == 2
    finally:
        stop.set()
        await running
    first, second = read_trace(path).requests
    assert (first.input_tokens, first.output_tokens, len(first.ids)) == (150, 5, 2)
    assert first.ids.tolist() == second.ids.tolist()
    assert 0 <= first.timestamp_ms <= second.timestamp_ms < 60_000
    assert not set(first.ids.tolist()) & set(tokens)


async def test_a_file_that_is_there_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    path.write_text("old")
    with pytest.raises(TraceError, match="is there already"):
        await recording.record(f"ipc://{tmp_path}/none.sock", path, 1.0, print)
    assert path.read_text() == "old"


async def test_without_a_stack_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "ANSWER_TIMEOUT_S", 0.2)
    with pytest.raises(StackError, match="no scheduler answers"):
        await recording.record(f"ipc://{tmp_path}/none.sock", tmp_path / "new.jsonl", 1.0, print)
    assert not (tmp_path / "new.jsonl").exists()


def test_record_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["record", "--help"])
    assert "salted hashes, no text" in " ".join(capsys.readouterr().out.split())

"""WritePages and LoadPages: bytes, checksums, names, and what a step sees of a load."""

import threading
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest

from kernels.checksum import crc32c
from services.gpu_worker import stepper
from shared import test_hooks
from shared.config import Config
from shared.geometry import HostLayout
from shared.host_layout import units_of
from shared.messages.common import OperationFailed
from shared.messages.worker import LoadDone, RunStep, StepDone, StepFailed, WriteDone
from shared.packed import pack, unpack
from tests.unit.gpu_worker.service.fake_scheduler import LAYERS, WAIT_S, Stack, digest, item
from tests.unit.gpu_worker.service.gate import Gate

PROMPT = [5, 17, 3, 88, 41, 60, 2, 9, 33, 70]


@pytest.fixture(params=get_args(HostLayout))
def layout(request: pytest.FixtureRequest) -> HostLayout:
    """HOST-01: each test holds for all of them."""
    found: HostLayout = request.param
    return found


def flip(stack: Stack, page: int, layer: int, part: int = 1) -> None:
    """Damage one byte of a host page behind the name's back."""
    host = stack.segment.host_pages
    unit = next(each for each in units_of(host.geometry) if (each.layer, each.part) == (layer, part))
    start, stride = host.place(unit)
    host.memory.reshape(-1)[start + page * stride + 5] ^= 0x10


async def test_a_write_puts_the_bytes_and_their_checksums_on_the_host(stack: Stack) -> None:
    stack.fill([3, 9])
    done = await stack.scheduler.ask(stack.write([9, 3], [1, 30]))
    assert isinstance(done, WriteDone)
    geometry = stack.engine.geometry
    checksums = np.frombuffer(done.checksums, "<u4").reshape(2, geometry.units)
    for row, (device, host) in enumerate([(9, 1), (3, 30)]):
        page = stack.segment.host_pages.get(host)
        for index, unit in enumerate(units_of(geometry)):
            buffer = stack.engine.pool.layer_buffers(unit.layer)[unit.part]
            slots = buffer[device * geometry.page_size : (device + 1) * geometry.page_size].numpy().tobytes()
            there, here = (
                b"".join(data[start + run * stride :][: unit.run_bytes] for run in range(unit.runs))
                for data, start, stride in (
                    (slots, unit.device_start, unit.device_stride),
                    (page.tobytes(), unit.start, unit.stride),
                )
            )
            assert here == there
            assert checksums[row, index] == crc32c(there)


async def test_a_load_brings_the_bytes_back_into_other_pages(stack: Stack) -> None:
    stack.fill([3, 9])
    await stack.back_up([3, 9], [1, 2])
    done = await stack.scheduler.ask(stack.load([2, 1], [20, 21]))
    assert isinstance(done, LoadDone)
    assert (stack.bytes_of(20), stack.bytes_of(21)) == (stack.bytes_of(9), stack.bytes_of(3))


async def test_the_next_token_is_the_same_after_write_and_load(stack: Stack) -> None:
    cold = await stack.step([item(0, PROMPT[:8], [1, 2], sample=False)])
    assert cold.sampled == []
    [resident] = (await stack.step([item(8, PROMPT[8:], [3], first_page=2)])).sampled
    await stack.back_up([1, 2], [5, 6])
    stack.fill([1, 2, 3])
    load = stack.load([5, 6], [11, 10])
    stack.scheduler.tell(load)
    [loaded] = (await stack.step([item(8, PROMPT[8:], [11, 10, 12], row=2)], [load.op_id])).sampled
    assert isinstance(await stack.scheduler.answer(load.op_id), LoadDone)
    assert loaded.token == resident.token
    assert (loaded.top_ids, loaded.top_logprobs) == (resident.top_ids, resident.top_logprobs)


async def test_a_step_finds_a_load_that_ended_before_it_came(stack: Stack) -> None:
    await stack.step([item(0, PROMPT[:8], [1, 2], sample=False)])
    await stack.back_up([1, 2], [5, 6])
    load = stack.load([5, 6], [11, 10])
    assert isinstance(await stack.scheduler.ask(load), LoadDone)
    await stack.step([item(8, PROMPT[8:], [11, 10, 12])], [load.op_id])


async def test_a_damaged_page_fails_the_load_and_the_step_that_waits(stack: Stack) -> None:
    stack.fill([1, 2, 3])
    await stack.back_up([1, 2, 3], [5, 6, 7])
    flip(stack, 6, layer=1)
    flip(stack, 7, layer=1, part=0)
    flip(stack, 5, layer=2)
    scheduler, load = stack.scheduler, stack.load([5, 6, 7], [10, 11, 12])
    step = RunStep(scheduler.op(), [item(12, PROMPT, [10, 11, 12, 13, 14, 15])], [load.op_id])
    scheduler.tell(load)
    scheduler.tell(step)
    failed = await scheduler.answer(load.op_id)
    assert failed == OperationFailed(load.op_id, 0, "checksum", 1, pack([1, 2]))
    assert await scheduler.answer(step.op_id) == StepFailed(step.op_id, 0, "load", [load.op_id])
    late = await scheduler.ask(RunStep(scheduler.op(), step.items, [load.op_id]))
    assert late == StepFailed(late.op_id, 0, "load", [load.op_id])


async def test_a_page_with_another_name_or_none_fails_the_load(stack: Stack) -> None:
    stack.fill([1, 2])
    await stack.back_up([1, 2], [5, 6])
    load = stack.load([5, 7], [10, 11])
    assert await stack.scheduler.ask(load) == OperationFailed(load.op_id, 0, "name", -1, pack([1]))
    load = msgspec.structs.replace(stack.load([5, 6], [10, 11]), digests=digest(5) + digest(7))
    assert await stack.scheduler.ask(load) == OperationFailed(load.op_id, 0, "name", -1, pack([1]))
    stack.segment.clear_names(np.array([5], np.int32))
    load = stack.load([5, 6], [10, 11])
    assert await stack.scheduler.ask(load) == OperationFailed(load.op_id, 0, "name", -1, pack([0]))


async def test_a_step_that_waits_for_a_load_nobody_knows_fails(stack: Stack) -> None:
    scheduler = stack.scheduler
    failed = await scheduler.ask(RunStep(scheduler.op(), [item(0, PROMPT, [1, 2, 3])], [999]))
    assert failed == StepFailed(failed.op_id, 0, "load", [999])


async def test_ctrl_02_a_step_computes_a_layer_before_the_last_one_is_loaded(
    stack: Stack, monkeypatch: pytest.MonkeyPatch, host_path: str
) -> None:
    stack.fill([1, 2])
    await stack.back_up([1, 2], [5, 6])
    computing = threading.Event()
    copies = LAYERS if host_path == "map" else 2 * LAYERS  # of both pages at once, or one page after the other

    def reach(point: str) -> str:
        visits.append(point)
        if point == "worker_load" and visits.count(point) == copies:
            assert computing.wait(WAIT_S)  # the last layer's copy begins when all others have been computed
        if point == "worker_step" and visits.count(point) == LAYERS:
            computing.set()
        return ""

    visits: list[str] = []
    monkeypatch.setattr(test_hooks, "reach", reach)
    load = stack.load([5, 6], [10, 11])
    stack.scheduler.tell(load)
    await stack.step([item(8, PROMPT[8:], [10, 11, 12])], [load.op_id])
    assert computing.is_set()
    assert isinstance(await stack.scheduler.answer(load.op_id), LoadDone)


async def test_sc_16_a_write_waits_for_the_step_that_fills_its_pages(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(monkeypatch, "worker_step", visit=LAYERS)  # before the last layer
    scheduler = stack.scheduler
    step = RunStep(scheduler.op(), [item(0, PROMPT[:8], [1, 2])], [])
    scheduler.tell(step)
    other, same = stack.write([3], [4]), stack.write([2], [5])
    assert isinstance(await scheduler.ask(other), WriteDone)
    scheduler.tell(same)
    assert await scheduler.silence(same.op_id)
    gate.open.set()
    assert isinstance(await scheduler.answer(step.op_id), StepDone)
    stack.name([5], await scheduler.answer(same.op_id))
    assert isinstance(await scheduler.ask(stack.load([5], [9])), LoadDone)
    assert stack.bytes_of(9) == stack.bytes_of(2)


@pytest.mark.parametrize(
    ("device", "host"), [([0], [1]), ([1], [0]), ([1, 2], [1]), ([], []), ([66], [1]), ([1], [32]), ([-1], [1])]
)
async def test_page_lists_that_make_no_sense_are_refused(stack: Stack, device: list[int], host: list[int]) -> None:
    header = stack.segment.pages_array[0].copy()
    for command in (stack.write(device, host), stack.load(host, device)):
        failed = await stack.scheduler.ask(command)
        assert failed == OperationFailed(command.op_id, 0, "error", -1, b"")
    np.testing.assert_array_equal(stack.segment.pages_array[0], header)


class TestWithoutChecks:
    """cache.checksums = false exists to show what the oracle catches."""

    @pytest.fixture
    def config(self, config: Config) -> Config:
        from shared.config import decode_config, encode_config

        return decode_config(encode_config(config).replace('"checksums":true', '"checksums":false'))

    async def test_a_damaged_page_is_loaded(self, stack: Stack) -> None:
        stack.fill([1])
        await stack.back_up([1], [5])
        flip(stack, 5, layer=0)
        load = stack.load([5], [10])
        assert isinstance(await stack.scheduler.ask(load), LoadDone)
        assert stack.bytes_of(10) != stack.bytes_of(1)


async def test_heartbeat_counts_what_was_done(stack: Stack) -> None:
    stack.fill([1, 2])
    await stack.back_up([1, 2], [5, 6])
    await stack.scheduler.ask(stack.load([5, 6], [10, 11]))
    for page in (5, 6):
        flip(stack, page, layer=0)
    failed = await stack.scheduler.ask(stack.load([5, 6], [10, 11]))
    assert list(unpack(failed.positions)) == [0, 1]
    await stack.step([item(0, PROMPT, [1, 2, 3])])
    await stack.step([item(10, [], [])])
    stack.scheduler.heartbeats.clear()
    await stack.scheduler.receive(lambda _: bool(stack.scheduler.heartbeats))
    stats, page_bytes = stack.scheduler.heartbeats[-1].stats, stack.engine.geometry.page_bytes
    expected = {"steps": 2, "prompt_tokens": 10, "decode_tokens": 1, "write_pages": 2, "write_bytes": 2 * page_bytes}
    expected |= {"load_pages": 2, "load_bytes": 2 * page_bytes, "load_failed": 1, "checksum_failed": 2}
    assert {name: stats[name] for name in expected} == expected
    assert stats["device_bytes"] == page_bytes * stack.hello.device_pages
    assert all(stats[name] > 0 for name in ("step_seconds", "write_seconds", "load_seconds"))


async def test_a_skipped_layer_is_announced_and_not_copied(stack: Stack, hooks: Path) -> None:
    """The fault that only an oracle on logits notices."""
    stack.fill([1])
    stack.fill([10], seed=7)
    await stack.back_up([1], [5])
    kept = stack.bytes_of(10)
    test_hooks.arm(hooks, "worker_skip_layer", "skip")
    assert isinstance(await stack.scheduler.ask(stack.load([5], [10])), LoadDone)
    layer = len(kept) // LAYERS
    assert stack.bytes_of(10) == kept[:layer] + stack.bytes_of(1)[layer:]


async def test_a_step_gives_up_a_load_that_takes_too_long(
    stack: Stack, hooks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stepper, "LOAD_WAIT_S", 0.1)
    await stack.back_up([1], [5])
    test_hooks.arm(hooks, "worker_load", "sleep 0.5")
    load = stack.load([5], [10])
    stack.scheduler.tell(load)
    failed = await stack.scheduler.ask(RunStep(stack.scheduler.op(), [item(4, [1], [10, 11])], [load.op_id]))
    assert failed == StepFailed(failed.op_id, 0, "load", [load.op_id])
    assert isinstance(await stack.scheduler.answer(load.op_id), LoadDone)


async def test_a_write_of_pages_that_a_failed_step_left_is_refused(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(*_: object) -> None:
        gate.wait(WAIT_S)
        raise ValueError("on purpose")

    gate = threading.Event()
    monkeypatch.setattr(stack.engine.stepper._model, "forward", forward)
    scheduler = stack.scheduler
    step, write = RunStep(scheduler.op(), [item(0, PROMPT[:4], [1])], []), stack.write([1], [5])
    scheduler.tell(step)
    scheduler.tell(write)
    assert await scheduler.silence(write.op_id)
    gate.set()
    assert await scheduler.answer(step.op_id) == StepFailed(step.op_id, 0, "error", [])
    failed = await scheduler.answer(write.op_id)
    assert failed == OperationFailed(write.op_id, 0, "error", -1, b"")

"""Copies between device pages and host pages: write_backup page by page, load_back layer by layer.

Each function runs on its stream's thread and returns the answer to its command; it raises nothing. A copy goes in
batches, so that a cancel is obeyed within milliseconds.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np

from kernels.page_copy import PageCopier, PageCopy
from services.gpu_worker.host_segment import BadPages, Chunk
from services.gpu_worker.kv_pool import KVPool
from services.gpu_worker.operations import Load, OperationCancelled, Write
from shared import test_hooks
from shared.geometry import PageGeometry
from shared.messages.common import Cancelled, Message, OperationFailed
from shared.messages.worker import LoadDone, WriteDone
from shared.packed import pack

BATCH_BYTES = 8 * 2**20  # one copy call: 2 to 4 ms, far above the cost of the call, far below a step
STEP_WAIT_S = 120.0  # a write waits for the step that fills its pages: above any step with its loads
PACE = 1.0  # while a step or a load runs, a write rests this part of each batch's time: they compete for memory
MAX_REST_S = 0.05  # a batch takes 2 to 4 ms; one that took seconds was stopped with its process, and rested enough
RANK = 0  # tp_size is 1
ALL_LAYERS = slice(None)

log = logging.getLogger("kvtide.transfers")


class Transfers:
    """The copies of one worker."""

    def __init__(
        self, pool: KVPool, geometry: PageGeometry, checksums: bool, others_run: Callable[[], bool] = lambda: False
    ) -> None:
        """checksums: compare names and checksums on a load. others_run: is a step or a load running?"""
        self._geometry = geometry
        self._checksums = checksums
        self._others_run = others_run
        self._copier = PageCopier([pool.layer_buffers(layer) for layer in range(geometry.layers)], geometry)
        self._units = np.array(self._copier.units)
        self._layers = np.array([unit.layer for unit in self._copier.ordered])

    def write(self, write: Write) -> Message:
        """Copy device pages into host pages. WriteDone once all bytes are there, Cancelled or OperationFailed."""
        started = time.perf_counter()
        try:
            _wait_for_writers(write)
            checksums = self._write(write)
        except OperationCancelled:
            return Cancelled(write.op_id, RANK, b"")
        except BadPages as error:
            log.warning("write_failed op_id=%d reason=%s", write.op_id, error.reason)
            return OperationFailed(write.op_id, RANK, error.reason, error.layer, pack(error.positions))
        except Exception as error:
            return _failed(write.op_id, error)
        return WriteDone(write.op_id, RANK, checksums.tobytes(), time.perf_counter() - started)

    def load(self, load: Load) -> Message:
        """Copy host pages into device pages; after each layer its event. LoadDone, Cancelled or OperationFailed: the
        last two after the events of the layers that aren't in have failed."""
        started = time.perf_counter()
        try:
            self._load(load)
        except OperationCancelled:
            load.fail("cancelled")
            return Cancelled(load.op_id, RANK, b"")
        except BadPages as error:
            log.warning("load_failed op_id=%d reason=%s layer=%d", load.op_id, error.reason, error.layer)
            load.fail(error.reason)
            return OperationFailed(load.op_id, RANK, error.reason, error.layer, pack(error.positions))
        except Exception as error:
            load.fail("error")
            return _failed(load.op_id, error)
        return LoadDone(load.op_id, RANK, time.perf_counter() - started)

    def _write(self, write: Write) -> np.ndarray:
        checksums = np.empty((len(write.host_pages), self._geometry.units), dtype="<u4")
        with closing(write.segment.write(write.host_pages, checksums, write.check)) as chunks:
            for chunk in chunks:
                copy = self._copier.to_host(write.device_pages[chunk.positions], chunk.pages, chunk.rows)
                filled = checksums[chunk.positions]
                for batch in _batches(chunk, self._geometry.page_bytes):
                    write.check()
                    test_hooks.reach("worker_write")
                    begun = time.perf_counter()
                    filled[batch, self._units] = copy.run(ALL_LAYERS, batch)
                    if self._others_run():
                        time.sleep(rest_after(time.perf_counter() - begun))
        return checksums

    def _load(self, load: Load) -> None:
        """Only the last chunk goes layer by layer: no layer is in before it, and none once a page was bad."""
        bad: defaultdict[int, list[int]] = defaultdict(list)  # positions by layer
        read = load.segment.read(load.host_pages, load.digests, load.check, verify=self._checksums)
        layers = self._geometry.layers
        with closing(read) as chunks:
            for chunk in chunks:
                by_layer = chunk.positions.stop == len(load.host_pages) and not bad
                copy = self._copier.to_device(load.device_pages[chunk.positions], chunk.pages, chunk.rows)
                for group in [slice(at, at + 1) for at in range(layers)] if by_layer else [ALL_LAYERS]:
                    skipped = test_hooks.reach("worker_skip_layer") == "skip"
                    for row, layer in () if skipped else self._load_layers(load, chunk, copy, group):
                        bad[int(layer)].append(chunk.positions.start + int(row))
                    if bad:
                        break
                    if by_layer:
                        load.layers[group.start].record()
        for layer in sorted(bad):
            raise BadPages("checksum", layer, np.array(bad[layer], dtype=np.int64))

    def _load_layers(self, load: Load, chunk: Chunk, copy: PageCopy, layers: slice) -> np.ndarray:
        """Returns (row of the chunk, layer) of each that has another checksum than its name says: int64 [n, 2]."""
        found = []
        for batch in _batches(chunk, self._geometry.page_bytes // self._geometry.layers):
            load.check()
            test_hooks.reach("worker_load")
            found.append(copy.run(layers, batch))
        if chunk.expected is None:
            return np.empty((0, 2), dtype=np.int64)
        units = self._copier.of_layers(layers)
        rows, columns = np.nonzero(np.concatenate(found) != chunk.expected[:, self._units[units]])
        return np.unique(np.stack((rows, self._layers[units][columns]), axis=1), axis=0)


def _batches(chunk: Chunk, row_bytes: int) -> Iterator[slice]:
    """Positions in the chunk of one copy call after the other: `row_bytes` of each are copied."""
    count, rows = max(1, BATCH_BYTES // row_bytes), len(chunk.rows)
    return (slice(start, min(start + count, rows)) for start in range(0, rows, count))


def rest_after(batch_s: float) -> float:
    """Seconds that a write rests after a batch of `batch_s` seconds, for the sake of the forward pass."""
    return min(PACE * batch_s, MAX_REST_S)


def _wait_for_writers(write: Write) -> None:
    """Wait for the steps before this write that fill one of its pages. Raises such a step's error."""
    for step in write.steps:
        step.begun.wait(STEP_WAIT_S)
        if np.isin(write.device_pages, step.written).any():
            step.ended.wait(STEP_WAIT_S)


def _failed(op_id: int, error: Exception) -> OperationFailed:
    log.error("transfer_failed op_id=%d", op_id, exc_info=error)
    return OperationFailed(op_id, RANK, "error", -1, b"")

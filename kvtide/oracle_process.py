"""The oracle in a process of its own: torch stays out of the caller, which stays free for its event loop."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from kvtide.child import StackError
from kvtide.oracle import Emitted, Scores, Verdict, judge
from kvtide.stack import CHECKOUT

LINE_BYTES = 2**20  # of an answer; a verdict has some 100


class Progress(msgspec.Struct, tag=True):
    """Child -> parent: how far it is."""

    read: int  # tokens
    total: int  # tokens


class Done(msgspec.Struct, tag=True):
    """Child -> parent: the end of one check."""

    verdict: Verdict


class Oracle:
    """A loaded model that checks. One check at a time. Made by `running_oracle`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lines = msgspec.json.Decoder(Progress | Done)

    async def check(
        self, requests: Sequence[Emitted], progress: Callable[[int, int], None] = lambda read, total: None
    ) -> Verdict:
        """Check every emitted token of greedy float32 requests. Raises StackError when the process ends."""
        source, answers = self._process.stdin, self._process.stdout
        assert source is not None
        assert answers is not None
        source.write(msgspec.json.encode(requests) + b"\n")
        await source.drain()
        while line := await answers.readline():
            message = self._lines.decode(line)
            if isinstance(message, Done):
                return message.verdict
            progress(message.read, message.total)
        raise StackError(f"the oracle's process ended with status {await self._process.wait()}; it said why on stderr")


@asynccontextmanager
async def running_oracle(model: Path) -> AsyncIterator[Oracle]:
    """Start the process; it loads the model, in float32, at its first check."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        __name__,
        str(model),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_BYTES,
        cwd=CHECKOUT,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        start_new_session=True,
    )
    try:
        yield Oracle(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def main(model: Path) -> int:
    """Answer one check a line until stdin ends: the caller is gone then."""
    score = load_scorer(model)
    decoder, encode = msgspec.json.Decoder(list[Emitted]), msgspec.json.encode

    def say(message: Progress | Done) -> None:
        sys.stdout.buffer.write(encode(message) + b"\n")
        sys.stdout.buffer.flush()

    for line in sys.stdin.buffer:
        say(Done(judge(decoder.decode(line), score, lambda read, total: say(Progress(read, total)))))
    return 0


def load_scorer(model: Path) -> Callable[[list[int], int], Scores]:
    """The model in float32 as a function (token ids, first position) -> scores."""
    from services.gpu_worker.model.load import load_model
    from services.gpu_worker.model.score import score_tokens

    loaded = load_model(model, "float32")

    def score(ids: list[int], first: int) -> Scores:
        gaps, logprobs = score_tokens(loaded, ids, first)
        return Scores(gaps.tolist(), logprobs.tolist())

    return score


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

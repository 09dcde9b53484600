"""What the demo asks, and how large its tiers are."""

from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from kvtide.tiers import geometry_of
from shared.config import Config

FOLDER = Path(__file__).parent
TURNS = 4  # before the restart; one more follows it
MAX_TOKENS = 16  # of an answer: the 72 answers of all phases make some 1,100 tokens for the oracle
WAITING = 2  # chats that wait for an answer at a time, as many as the device pool holds: TTFT is to be no queueing

PAGE_TOKENS = 32  # a turn adds about 70 tokens: half of the default, so that less of a hit's tail is computed anew
# Eight chats share 430 tokens and have 700 of their own after the first turn, 830 after the fourth: 7,000 live tokens.
DEVICE_TOKENS = 2112  # the shared part and two chats
HOST_TOKENS = 6400  # too small from the second turn on: the oldest chat loses its end, which then comes from L3
STORAGE_BYTES = 2 * 2**30  # every page of the demo, several times
PREFETCH_THRESHOLD = 64  # tokens; L3 gives back what the host pool dropped, often less than the default's 256

QUESTIONS = (
    "Give the main point of this text in two sentences.",
    "Which numbers in the text matter most, and what does each of them measure?",
    "Name one person or one group in the text and say what they did.",
    "How did things change over time, according to the text?",
    "What would you ask the author next, and why?",
)


class Document(NamedTuple):
    """A text that one chat is about."""

    name: str
    text: str


def documents() -> list[Document]:
    """The texts that ship with the project, in the order of their names."""
    return [Document(path.stem, path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("documents/*.md"))]


def opening(document: Document) -> list[dict[str, str]]:
    """The messages before the first question's answer: the shared system prompt, then the text with the question."""
    return [
        {"role": "system", "content": (FOLDER / "system_prompt.md").read_text(encoding="utf-8")},
        {"role": "user", "content": f"{document.text}\n{QUESTIONS[0]}"},
    ]


def demo_config(base: Config, folder: Path, tiered: bool) -> Config:
    """A private stack in `folder`: the base's model and threads, the demo's own tiers. `tiered` False = device only."""
    config = replace(
        base,
        model=replace(base.model, dtype="float32"),
        cache=replace(
            base.cache,
            page_size=PAGE_TOKENS,
            device_tokens=DEVICE_TOKENS,
            write_policy="write_through",
            prefetch_threshold=PREFETCH_THRESHOLD,
            prefetch_policy="wait_complete",
            checksums=True,
        ),
        storage=replace(base.storage, folder=str(folder / "l3"), quota_bytes=STORAGE_BYTES),
        gateway=replace(base.gateway, host="127.0.0.1", port=0, api_keys=()),
        run=replace(base.run, name=folder.name.lower(), folder=str(folder / "run"), scheduler_endpoint=""),
    )
    host_bytes = HOST_TOKENS * geometry_of(config).token_bytes if tiered else 0
    return replace(config, cache=replace(config.cache, host_bytes=host_bytes))

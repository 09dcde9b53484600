"""What `kvtide bench serve` asks, and how much memory each side gets for its cache."""

import random
from typing import NamedTuple

from kvtide.child import StackError
from kvtide.demo.plan import QUESTIONS, documents

MAX_TOKENS = 32  # of an answer
QUESTION_TOKENS = 32  # at most, of a question and the chat template around it and its answer
DEVICE_PART = 4  # one of so many contexts fits on the device
MOST_SESSIONS = 32  # each is about two texts of its own, of eight

Messages = list[dict[str, str]]


class Budget(NamedTuple):
    """The memory of one side's cache: ours on device and host, a peer's in its process."""

    context_tokens: int  # of one session at its end, whole pages
    device_tokens: int
    host_bytes: int
    total_bytes: int  # device and host


def budget(opening_tokens: int, sessions: int, turns: int, memory: float, page_size: int, token_bytes: int) -> Budget:
    """Room for `memory` of the sessions' contexts, a quarter of the contexts of it on the device.

    opening_tokens: of the longest first prompt. turns: including the one after the restart. page_size: tokens.
    Raises StackError when nothing is left for the host.
    """
    longest = opening_tokens + MAX_TOKENS + (turns - 1) * (MAX_TOKENS + QUESTION_TOKENS)
    context_tokens = -(-longest // page_size) * page_size
    device_tokens = sessions * context_tokens // DEVICE_PART // page_size * page_size
    total_bytes = int(memory * sessions * context_tokens) * token_bytes
    host_bytes = total_bytes - device_tokens * token_bytes
    if host_bytes <= 0:
        raise StackError(f"--memory {memory:g} leaves nothing for the host pool: give more than {1 / DEVICE_PART:g}")
    return Budget(context_tokens, device_tokens, host_bytes, total_bytes)


def order(sessions: int, turn: int) -> list[int]:
    """Who asks when in a turn: each session once. Another order each time, since always the same one is the worst
    case of a cache that drops the least recently used."""
    numbers = list(range(sessions))
    random.Random(turn).shuffle(numbers)
    return numbers


class Chat:
    """One session with one engine: it sends all that was said so far, the engine's own answers included."""

    def __init__(self, number: int) -> None:
        # The number comes first, so that no session finds another's pages.
        texts = [document.text for document in documents()]
        first, step = number % len(texts), 1 + number // len(texts)
        chosen = texts[first], texts[(first + step) % len(texts)]  # some 1,400 tokens; the turns make them 1,600
        self.number = number
        self.messages: Messages = [
            {"role": "system", "content": f"Reader {number} asks you about texts. Answer in plain words."},
            {"role": "user", "content": "\n".join((*chosen, QUESTIONS[0]))},
        ]
        self._turn = 0

    def go_on(self, answer: str) -> None:
        """Add an answer and the next question."""
        self._turn += 1
        self.messages.append({"role": "assistant", "content": answer})
        self.messages.append({"role": "user", "content": QUESTIONS[self._turn % len(QUESTIONS)]})

"""The prompts that both sides get, from seeds: arrays of int64 tokens in whole 64-token pages."""

from array import array
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Prompt: TypeAlias = "array[int]"
UNIT = 64  # tokens
VOCABULARY = 128_000
REQUESTS = 2_000


def shared_prefixes() -> list[Prompt]:
    """A: 100 groups with a common prefix of 1k to 8k tokens; each request adds 192 to 576 of its own."""
    rng = np.random.default_rng(0)
    groups = [_tokens(rng, int(rng.integers(16, 129))) for _ in range(100)]
    return [_prompt(groups[int(rng.integers(0, 100))], _tokens(rng, int(rng.integers(3, 10)))) for _ in range(REQUESTS)]


def chats() -> list[Prompt]:
    """B: up to 40 open chats of 8 turns over 8 system prompts (zipf); a turn adds 512 to 1,024 tokens."""
    rng = np.random.default_rng(1)
    systems = [_tokens(rng, 32) for _ in range(8)]
    weights = 1 / np.arange(1, 9)
    weights /= weights.sum()
    open_chats: list[tuple[npt.NDArray[np.int64], int]] = []
    prompts: list[Prompt] = []
    while len(prompts) < REQUESTS:
        if len(open_chats) < 40:
            open_chats.append((systems[int(rng.choice(8, p=weights))], 0))
            continue
        at = int(rng.integers(0, len(open_chats)))
        text, turns = open_chats[at]
        text = np.concatenate([text, _tokens(rng, int(rng.integers(8, 17)))])
        prompts.append(_prompt(text))
        open_chats[at] = (text, turns + 1)
        if turns + 1 == 8:
            del open_chats[at]
    return prompts


def leaves(count: int, first: int = 0) -> list[Prompt]:
    """Prompts of 64 tokens, numbered from `first` in their first token: no two begin alike."""
    rng = np.random.default_rng(2)
    prompts = [_tokens(rng, 1) for _ in range(count)]
    for number, prompt in enumerate(prompts, first):
        prompt[0] = number
    return [_prompt(prompt) for prompt in prompts]


def one_long(tokens: int) -> list[Prompt]:
    """One prompt."""
    return [_prompt(_tokens(np.random.default_rng(3), tokens // UNIT))]


def _tokens(rng: np.random.Generator, units: int) -> npt.NDArray[np.int64]:
    return rng.integers(0, VOCABULARY, size=units * UNIT)


def _prompt(*parts: npt.NDArray[np.int64]) -> Prompt:
    return array("q", np.concatenate(parts).tobytes())

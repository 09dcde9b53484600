"""`kvtide bench tenants`: can a tenant (`cache_salt`) tell from the time to the first token what another one has asked?

It probes a neighbour's prompts and prompts that nobody has sent, in a shuffled order, all with its own salt. The
Mann-Whitney U test says how probable such times are if there is no difference. A control shows that the probe works:
with the neighbour's salt its prompts are told from fresh ones.
"""

import asyncio
import math
import random
import statistics
from collections.abc import Callable, Sequence

import httpx
import msgspec
from msgspec.structs import replace

from kvtide.chat_client import client, complete
from kvtide.private_folder import private_folder
from kvtide.progress import console, reporter
from kvtide.stack import Stack, running_stack, with_model
from kvtide.tiers import geometry_of
from shared.config import Config

PROBES = 200  # half of them of the neighbour's prompts
CONTROLS = 100  # half of them again
LEAST_P = 0.01  # below it the times differ
PROMPT_TOKENS = 257  # sixteen pages and a token: a hit saves most of a prefill, the longest part of a probe
TOKEN_IDS = range(1000, 40_000)  # of ordinary words, as most vocabularies have them
PAGE_TOKENS = 16
DEVICE_TOKENS = 16_384  # half of what the neighbour has sent: the other half is in host memory
HOST_TOKENS = 131_072  # all of it
READY_TIMEOUT_S = 120.0
NEIGHBOUR, PROBER = "neighbour", "prober"


class Result(msgspec.Struct, frozen=True):
    """The line of JSON."""

    bench: str
    probes: int
    hit_tokens: int  # that the prober's salt gave for the neighbour's prompts, in any tier
    p: float  # of the probes' times, two-sided
    neighbour_ttft_ms: float  # medians
    fresh_ttft_ms: float
    control_hit_tokens: int  # the same with the neighbour's salt
    control_p: float


async def run_tenants(config: Config, seed: int, as_json: bool) -> int:
    """Run the probes; returns the exit status: 0 when they tell nothing, and the control does."""
    screen = console(stderr=as_json)
    with private_folder("kvtide-tenants-") as folder, reporter(screen) as progress:
        config = await asyncio.to_thread(with_model, config, progress.say)
        config = replace(
            config,
            cache=replace(config.cache, page_size=PAGE_TOKENS, device_tokens=DEVICE_TOKENS, prefetch_threshold=32),
            storage=replace(config.storage, folder=str(folder / "l3")),
            gateway=replace(config.gateway, host="127.0.0.1", port=0, api_keys=()),
            run=replace(config.run, name=folder.name.lower(), folder=str(folder / "run"), scheduler_endpoint=""),
        )
        host_bytes = HOST_TOKENS * geometry_of(config).token_bytes
        config = replace(config, cache=replace(config.cache, host_bytes=host_bytes))
        async with running_stack(config, report=progress.say) as stack:
            await stack.wait_ready(READY_TIMEOUT_S)
            progress.step("requests", PROBES // 2 + CONTROLS // 2 + PROBES + CONTROLS)
            async with client(stack.url) as http:
                result = await _measure(stack, http, random.Random(seed), progress.advance)
    told = result.hit_tokens > 0 or result.p <= LEAST_P
    screen.print(
        f"{result.probes} probes: the neighbour's prompts {result.neighbour_ttft_ms:.1f} ms, fresh ones "
        f"{result.fresh_ttft_ms:.1f} ms, p = {result.p:.3f}, {result.hit_tokens} tokens hit; with the neighbour's salt "
        f"p = {result.control_p:.1e}, {result.control_hit_tokens} tokens hit",
        highlight=False,
    )
    if as_json:
        print(msgspec.json.encode(result).decode(), flush=True)
    return 1 if told or result.control_p > LEAST_P else 0


async def _measure(stack: Stack, http: httpx.AsyncClient, chance: random.Random, advance: Callable[[], None]) -> Result:
    def prompts(count: int) -> list[list[int]]:
        return [chance.choices(TOKEN_IDS, k=PROMPT_TOKENS) for _ in range(count)]

    async def ask(prompt: list[int], salt: str) -> tuple[float, int]:
        answer = await complete(http, stack.config.model.name, prompt, max_tokens=1, ignore_eos=True, cache_salt=salt)
        advance()
        return answer.ttft_s, answer.device_tokens + answer.host_tokens + answer.storage_tokens

    async def probe(known: list[list[int]], salt: str) -> tuple[list[float], list[float], int]:
        """Seconds for the neighbour's prompts, for fresh ones, and tokens that the former hit."""
        order = [(prompt, True) for prompt in known] + [(prompt, False) for prompt in prompts(len(known))]
        chance.shuffle(order)  # what changes with time changes for both
        found: dict[bool, list[tuple[float, int]]] = {True: [], False: []}
        for prompt, is_known in order:
            found[is_known].append(await ask(prompt, salt))
        return [s for s, _ in found[True]], [s for s, _ in found[False]], sum(hits for _, hits in found[True])

    sent = prompts(PROBES // 2 + CONTROLS // 2)
    for prompt in sent:
        await ask(prompt, NEIGHBOUR)
    known, fresh, hits = await probe(sent[: PROBES // 2], PROBER)
    control, control_fresh, control_hits = await probe(sent[PROBES // 2 :], NEIGHBOUR)
    return Result(
        bench="tenants",
        probes=len(known) + len(fresh),
        hit_tokens=hits,
        p=round(mann_whitney(known, fresh), 4),
        neighbour_ttft_ms=round(1000 * statistics.median(known), 1),
        fresh_ttft_ms=round(1000 * statistics.median(fresh), 1),
        control_hit_tokens=control_hits,
        control_p=mann_whitney(control, control_fresh),
    )


def mann_whitney(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p of the Mann-Whitney U test, by the normal approximation with ties: good from 20 values each on."""
    values = sorted((value, which) for which, group in enumerate((first, second)) for value in group)
    n, m, total = len(first), len(second), len(values)
    ranks, ties, at = 0.0, 0.0, 0
    while at < total:
        end = at
        while end < total and values[end][0] == values[at][0]:
            end += 1
        ranks += (at + 1 + end) / 2 * sum(which == 0 for _, which in values[at:end])
        ties += (end - at) ** 3 - (end - at)
        at = end
    u = ranks - n * (n + 1) / 2
    variance = n * m / 12 * (total + 1 - ties / (total * (total - 1)))
    distance = max(0.0, abs(u - n * m / 2) - 0.5)  # corrected for continuity
    return math.erfc(distance / math.sqrt(2 * variance)) if variance else 1.0

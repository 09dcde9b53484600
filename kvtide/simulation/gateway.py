"""A simulated gateway: asks, aborts, follows up, and knows what every answer must be."""

import random
from typing import TYPE_CHECKING, Any

from kvtide.simulation.content import VOCABULARY, follow, next_token, root
from kvtide.simulation.process import Process
from shared.messages.common import Message
from shared.messages.gateway import Abort, EmitTokens, Finish, GatewayHello, Namespace, Reject, Submit
from shared.messages.worker import Sampling
from shared.packed import pack, unpack_list
from shared.page_hash import namespace_seed

if TYPE_CHECKING:
    from kvtide.simulation.world import World

GREEDY = Sampling(0.0, 1.0, 0, 0.0, 0, 0, 0)
NAMESPACES = (Namespace(), Namespace("a", "bc"), Namespace("ab", "c"))
ROOTS = {each: root(namespace_seed(each.tenant, each.lora_id, each.extra_key)) for each in NAMESPACES}
MAX_ATTEMPTS = 3
RETRY_S = 6.0  # at most, after a 503


class Ask:
    """One request and what has come of it."""

    request_id: str = ""
    attempts: int = 0
    ended: str = ""  # how

    def __init__(
        self, prompt: list[int], max_tokens: int, stops: list[int], namespace: Namespace, priority: int, turns: int
    ) -> None:
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.stops = stops
        self.namespace = namespace
        self.priority = priority
        self.turns = turns  # follow-ups that may come
        self.got: list[int] = []
        self.expected: list[int] = []
        self.root = ROOTS[namespace]  # hash that sequences of its namespace start from
        after = self.root
        for token in prompt:
            after = follow(after, token)
        while len(self.expected) < self.max_tokens:
            token = next_token(after)
            self.expected.append(token)
            if token in self.stops:
                return
            after = follow(after, token)


class Traffic:
    """Draws requests whose prompts share prefixes."""

    def __init__(self, world: "World") -> None:
        self._plan = world.plan
        self._rng = rng = random.Random(f"traffic {world.plan.seed}")
        size = self._plan.settings.page_size
        longest = max(1, min(self._plan.max_context, (self._plan.device_pages - 1) * size) - 4)
        self._longest = longest
        lengths = [rng.randint(longest // 3, longest) for _ in range(self._plan.families)]
        self._families = [[rng.randint(1, VOCABULARY) for _ in range(max(1, length))] for length in lengths]
        if world.first is not world:  # the same conversations come to both replicas
            self._families = [family[:longest] for family in world.first.traffic._families]

    def stored_families(self) -> list[list[int]]:
        """Those that L3 has from an earlier life of the stack."""
        return [family for family in self._families if self._rng.random() < self._plan.stored]

    def draw(self) -> Ask:
        """A new conversation."""
        rng = self._rng
        base = rng.choice(self._families)
        cut = rng.choice([len(base), rng.randint(0, len(base))])
        prompt = base[:cut] + [rng.randint(1, VOCABULARY) for _ in range(rng.choice([0, 1, 1, 2, 5, 9]))]
        return self._ask(
            prompt[: self._longest] or [1], rng.choice(NAMESPACES[: rng.choice([1, 1, 3])]), rng.choice([0, 0, 2])
        )

    def follow_up(self, ask: Ask) -> Ask:
        """The next turn of a conversation."""
        more = [self._rng.randint(1, VOCABULARY) for _ in range(self._rng.randint(1, 4))]
        prompt = ask.prompt + ask.got + more
        return self._ask(prompt[: self._longest], ask.namespace, ask.turns - 1)

    def _ask(self, prompt: list[int], namespace: Namespace, turns: int) -> Ask:
        rng = self._rng
        stops = [rng.randint(1, VOCABULARY)] if rng.random() < 0.3 else []
        room = self._longest + 4 - len(prompt) if rng.random() < 0.95 else 8
        output = max(1, min(rng.choice([1, 1, 2, 3, 5, 8]), room))
        return Ask(prompt, output, stops, namespace, rng.choice([0, 0, 0, 1, 5]), turns)


class SimGateway(Process):
    """One gateway process."""

    def __init__(self, world: "World", identity: str) -> None:
        super().__init__(world, identity)
        self._rng = random.Random(f"gateway {self.key.epoch} {world.plan.seed}")
        self.open: dict[str, Ask] = {}
        self._epoch = 0
        self._number = 0
        self._unplaced: list[Ask] = []
        self._owed: list[str] = []  # requests that a scheduler must forget when it is heard again

    def hello(self) -> Message:
        """See GatewayHello."""
        return GatewayHello(self.key.identity)

    def ask(self, ask: Ask) -> None:
        """Submit a request, now or when a scheduler is there."""
        if not self.alive:
            self._end(ask, "gateway lost")
            return
        self._number += 1
        ask.attempts += 1
        ask.request_id = f"r{self.key.epoch}.{self._number}"
        self.open[ask.request_id] = ask
        self.world.roots[ask.request_id] = ask.root
        self._unplaced.append(ask)
        self._place()

    def _place(self) -> None:
        while self.up and self._unplaced:
            ask = self._unplaced.pop(0)
            if self.open.get(ask.request_id) is ask:
                self._submit(ask)

    def _submit(self, ask: Ask) -> None:
        self.world.seen["request of a namespace"] += ask.namespace != NAMESPACES[0]
        self.world.seen["request with priority"] += ask.priority > 0
        self.send(
            Submit(
                ask.request_id,
                pack(ask.prompt),
                ask.max_tokens,
                ask.stops,
                GREEDY,
                ask.namespace,
                ask.priority,
                self.world.plan.settings.request_timeout_s,
            )
        )
        if self._rng.random() < self.world.plan.abort_share:
            request_id = ask.request_id
            self.later(self._rng.choice([0.0, 0.02, 0.2, 2.0]) * self._rng.random(), lambda: self._abort(request_id))

    def _abort(self, request_id: str) -> None:
        ask = self.open.pop(request_id, None)
        if ask is not None:
            if self.up:
                self.send(Abort(request_id))
            else:
                self._owed.append(request_id)
            self._end(ask, "aborted")

    def kill(self) -> None:
        """Its clients lose their answers."""
        super().kill()
        for ask in self.open.values():
            self._end(ask, "gateway lost")
        self.open.clear()

    def on_scheduler(self) -> None:
        """Hand it what is open."""
        if self.scheduler_epoch != self._epoch:
            self._owed.clear()
            self._epoch = self.scheduler_epoch
            self._restart_placed()
        for request_id in self._owed:
            self.send(Abort(request_id))
        self._owed.clear()
        self._place()

    def on_lost(self) -> None:
        """Should it come back, it must forget the old attempts."""
        self._owed += [ask.request_id for ask in self.open.values() if ask not in self._unplaced]
        self._restart_placed()

    def _restart_placed(self) -> None:
        for request_id, ask in list(self.open.items()):
            if ask in self._unplaced:
                continue
            del self.open[request_id]
            if ask.got or ask.attempts >= MAX_ATTEMPTS:
                self._end(ask, "scheduler lost")
            else:
                self.ask(ask)

    def on_message(self, message: Any) -> None:
        """Compare what comes with what must come."""
        match message:
            case EmitTokens(emissions):
                for emission in emissions:
                    ask = self.open.get(emission.request_id)
                    if ask is not None:
                        self._take(ask, unpack_list(emission.tokens))
            case Finish(request_id, reason, usage):
                ask = self.open.pop(request_id, None)
                if ask is not None:
                    self._finish(ask, reason)
                    hits = usage.device_hit_tokens + usage.host_hit_tokens + usage.storage_hit_tokens
                    if usage.completion_tokens != len(ask.got) or not 0 <= hits < usage.prompt_tokens:
                        self.world.fail(f"{request_id} ended with {usage}")
                    self.world.count_hits(usage)
            case Reject(request_id, code, text, retry):
                ask = self.open.pop(request_id, None)
                if ask is not None and code == 503 and retry and not ask.got and ask.attempts < MAX_ATTEMPTS:
                    self.world.seen["request tried again"] += 1
                    self.world.clock.after(RETRY_S * self._rng.random(), lambda: self.world.gateway.ask(ask))
                elif ask is not None:
                    self._reject(ask, code, text)

    def _take(self, ask: Ask, tokens: list[int]) -> None:
        at = len(ask.got)
        if ask.expected[at : at + len(tokens)] != tokens:
            self.world.fail(f"wrong token: {ask.request_id} got {tokens} at {at}, {ask.expected} were expected")
        ask.got += tokens

    def _finish(self, ask: Ask, reason: str) -> None:
        wanted = "stop" if ask.expected[-1] in ask.stops else "length"
        if ask.got != ask.expected or reason != wanted:
            self.world.fail(f"{ask.request_id} ended with {reason} and {ask.got}, not {wanted} and {ask.expected}")
        self._end(ask, "finished")
        if ask.turns > 0:
            self.world.seen["request of a later turn"] += 1
            again = self.world.traffic.follow_up(ask)
            self.world.asks.append(again)
            self.world.clock.after(self._rng.random() * 0.2, lambda: self.world.gateway.ask(again))

    def _reject(self, ask: Ask, code: int, text: str) -> None:
        self._end(ask, f"rejected {code}: {text}")
        if not text or code not in (400, 429, 503):
            self.world.fail(f"{ask.request_id} was rejected with {code} {text!r}")

    def _end(self, ask: Ask, how: str) -> None:
        self.world.ended += not ask.ended
        ask.ended = how
        self.world.seen[f"request {how.split(':')[0]}"] += 1

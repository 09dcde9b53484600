"""What a hostile or broken peer sends: seeded, so that a failing run repeats."""

import random
from collections.abc import Iterator

from shared.messages.common import Heartbeat, Message
from shared.transport import encode, seal

MAX_RANDOM_BYTES = 300
HUGE_BYTES = 2**20
HUGE_EVERY = 500  # one message in so many is HUGE_BYTES long
WRONG_COUNTS = (1, 4, 9)  # frames


def hostile(seed: int, count: int, samples: list[Message], sender: int, receiver: int) -> Iterator[list[bytes]]:
    """The frames of `count` messages. samples: well-formed ones of this link; sender, receiver: the right epochs.

    Half of the wrong bodies come with the checksum that fits them: who lies knows how to seal.
    """
    dice = random.Random(seed)
    for number in range(count):
        envelope, body = encode(sender, receiver, dice.choice(samples))
        if number % HUGE_EVERY == HUGE_EVERY - 1:
            yield seal(sender, receiver, dice.randbytes(HUGE_BYTES))
            continue

        def with_body(wrong: bytes, envelope: bytes = envelope) -> list[bytes]:
            return seal(sender, receiver, wrong) if dice.random() < 0.5 else [envelope, wrong]

        match dice.randrange(6):
            case 0:
                yield [dice.randbytes(dice.randrange(MAX_RANDOM_BYTES)) for _ in range(2)]
            case 1:
                yield with_body(dice.randbytes(dice.randrange(MAX_RANDOM_BYTES)))
            case 2:
                yield with_body(_cut(dice, body))
            case 3:
                yield with_body(body[:2] + b"Nope" + body[6:])
            case 4:
                yield encode(*dice.choice([(sender, receiver - 1), (sender - 1, receiver), (0, 0)]), Heartbeat(1.0, {}))
            case 5:
                yield [envelope, *[body] * dice.choice(WRONG_COUNTS)][1:]


def _cut(dice: random.Random, body: bytes) -> bytes:
    return body[: dice.randrange(len(body))] if dice.random() < 0.5 else body + dice.randbytes(3)

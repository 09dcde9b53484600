"""TCP links with keys: who has them talks, who hasn't isn't connected, and nothing readable goes over the wire."""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtide import cli
from shared import transport
from shared.errors import ConfigError
from shared.keys import Z85_BYTES, make_keys, read_keys
from shared.transport import Dealer, Router, use_keys
from tests.faults.proxy import TcpProxy

SECRET = b"the prompt of a tenant"
DENIED_S = 0.5  # far above what a connection over the loopback takes


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    make_keys(tmp_path / "keys")
    use_keys(str(tmp_path / "keys"))
    yield tmp_path / "keys"
    use_keys("")


def bound() -> tuple[Router, str]:
    """A router on a free port."""
    router = Router("tcp://127.0.0.1:*")
    return router, router._socket.getsockopt_string(transport.zmq.LAST_ENDPOINT)


async def sent(dealer: Dealer) -> bool:
    """Could the message be handed to a connection? It can't before there is one."""
    for _ in range(500):
        if dealer.send([b"envelope", SECRET]):
            return True
        await asyncio.sleep(0.02)
    return False


async def hears_nothing(router: Router, dealer: Dealer) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DENIED_S):
            while True:
                if dealer.send([b"envelope", SECRET]):
                    await router.receive()
                    return False
                await asyncio.sleep(0.02)
    return True


async def test_peers_of_one_stack_talk_both_ways(folder: Path) -> None:
    router, endpoint = bound()
    dealer = Dealer(endpoint, "worker-0")
    try:
        assert await sent(dealer)
        assert await router.receive() == ("worker-0", [b"envelope", SECRET])
        assert router.send("worker-0", [b"answer"])
        assert await dealer.receive() == [b"answer"]
        assert router.denied == 0
    finally:
        dealer.close()
        router.close()


@pytest.mark.parametrize("who", ["no keys", "another stack's peer", "right server, wrong peer"])
async def test_who_has_other_keys_or_none_is_not_heard(folder: Path, tmp_path: Path, who: str) -> None:
    router, endpoint = bound()
    make_keys(tmp_path / "other")
    if who == "right server, wrong peer":
        (tmp_path / "other" / "server.pub").write_bytes((folder / "server.pub").read_bytes())
    use_keys("" if who == "no keys" else str(tmp_path / "other"))
    dealer = Dealer(endpoint, "worker-0")
    try:
        assert await hears_nothing(router, dealer)
        assert (router.denied > 0) == (who == "right server, wrong peer")  # the others fail before a key is shown
    finally:
        dealer.close()
        router.close()


async def test_a_peer_does_not_talk_to_a_server_without_the_key(folder: Path) -> None:
    use_keys("")
    router, endpoint = bound()
    use_keys(str(folder))
    dealer = Dealer(endpoint, "worker-0")
    try:
        assert await hears_nothing(router, dealer)
    finally:
        dealer.close()
        router.close()


@pytest.mark.parametrize("keys", [True, False])
async def test_the_wire_shows_a_message_only_without_keys(folder: Path, keys: bool) -> None:
    if not keys:
        use_keys("")
    router, endpoint = bound()
    async with TcpProxy(endpoint) as wire:
        wire.record = True
        dealer = Dealer(wire.endpoint, "worker-0")
        assert await sent(dealer)
        assert (await router.receive())[1][1] == SECRET
        assert (SECRET in wire.passed) != keys
        dealer.close()
    router.close()


async def test_ipc_needs_no_keys(folder: Path, tmp_path: Path) -> None:
    router = Router(f"ipc://{tmp_path}/s")
    use_keys("")
    dealer = Dealer(f"ipc://{tmp_path}/s", "worker-0")
    try:
        assert await sent(dealer)
        assert (await router.receive())[0] == "worker-0"
    finally:
        dealer.close()
        router.close()


async def test_a_host_that_only_connects_needs_no_server_secret(folder: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    few.mkdir()
    for name in ("peer.key", "server.pub"):
        (few / name).write_bytes((folder / name).read_bytes())
    (few / "peer.key").chmod(0o600)
    router, endpoint = bound()
    use_keys(str(few))
    dealer = Dealer(endpoint, "gateway-0")
    try:
        assert await sent(dealer)
        with pytest.raises(ConfigError, match=r"has no (server\.key|peer\.pub)"):
            Router("tcp://127.0.0.1:*")
    finally:
        dealer.close()
        router.close()


def test_keys_are_made_once_and_private(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "keys"
    assert cli.main(["keys", str(folder)]) == 0
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {
        "server.key": "0o600",
        "server.pub": "0o644",
        "peer.key": "0o600",
        "peer.pub": "0o644",
    }
    assert folder.stat().st_mode & 0o777 == 0o700
    before = (folder / "server.key").read_bytes()
    assert cli.main(["keys", str(folder)]) == 1
    assert "isn't empty" in capsys.readouterr().err
    assert (folder / "server.key").read_bytes() == before


def test_bad_keys_are_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    with pytest.raises(ConfigError, match="kvtide keys"):
        read_keys(folder)
    make_keys(folder)
    (folder / "peer.key").chmod(0o640)
    with pytest.raises(ConfigError, match=r"chmod 600 .*peer\.key"):
        read_keys(folder)
    (folder / "peer.key").chmod(0o600)
    for damaged in (b"short", b" " * Z85_BYTES, b"\x00" * Z85_BYTES):
        (folder / "server.pub").write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"server\.pub"):
            read_keys(folder)

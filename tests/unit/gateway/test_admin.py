"""POST /kvtide/admin/{action}: who may, what it asks of the scheduler, what it answers."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvtide.admin import ANSWER_TIMEOUT_S
from services.gateway.limits import ADMIN_TIMEOUT_S
from services.scheduler.core.settings import MAX_SENDS, TRANSFER_TIMEOUT_S
from shared.packed import unpack
from tests.unit.gateway.harness import Stack, run_stack

ADMIN = {"authorization": "Bearer boss"}


@pytest.fixture
async def guarded(run_folder: Path, model_folder: Path) -> AsyncIterator[Stack]:
    async with run_stack(run_folder, model_folder, keys=("user",), admin_keys=("boss", "deputy")) as stack:
        yield stack


@pytest.mark.parametrize("action", ["flush", "drain", "undrain", "attach", "detach", "clear"])
async def test_an_action_reaches_the_scheduler_and_its_figures_the_client(guarded: Stack, action: str) -> None:
    body = {} if action == "flush" else {"storage": "storage-1"}
    response = await guarded.post(f"/kvtide/admin/{action}", body, headers=ADMIN)
    assert response.status_code == 200
    assert response.json() == {"action": action, "storage": body.get("storage", ""), "pages": 3}
    assert guarded.scheduler.wishes == [(action, body.get("storage", ""))]


async def test_a_refusal_of_the_scheduler_is_409_with_its_words(guarded: Stack) -> None:
    guarded.scheduler.refusal = "there is no storage 'x'"
    response = await guarded.post("/kvtide/admin/drain", {"storage": "x"}, headers=ADMIN)
    assert response.status_code == 409
    assert response.json()["error"]["message"] == "there is no storage 'x'"


@pytest.mark.parametrize("header", ["", "Bearer user", "Bearer bos", "Basic boss", "boss"])
async def test_only_an_admin_key_opens_it(guarded: Stack, header: str) -> None:
    headers = {"authorization": header} if header else {}
    assert (await guarded.post("/kvtide/admin/flush", {}, headers=headers)).status_code == 401
    assert guarded.scheduler.wishes == []


async def test_an_admin_key_is_no_api_key(guarded: Stack) -> None:
    assert (await guarded.post("/tokenize", {"prompt": "a"}, headers=ADMIN)).status_code == 401


async def test_without_admin_keys_it_is_closed_even_where_the_api_is_open(stack: Stack) -> None:
    response = await stack.post("/kvtide/admin/flush", {}, headers=ADMIN)
    assert response.status_code == 403
    assert "gateway.admin_keys" in response.json()["error"]["message"]
    assert stack.scheduler.wishes == []


async def test_an_unknown_action_and_an_unknown_parameter_are_refused_by_name(guarded: Stack) -> None:
    response = await guarded.post("/kvtide/admin/explode", {}, headers=ADMIN)
    assert response.status_code == 404
    assert "explode" in response.json()["error"]["message"]
    response = await guarded.post("/kvtide/admin/flush", {"storages": "x"}, headers=ADMIN)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "storages")


async def test_a_scheduler_that_does_not_answer_is_503(run_folder: Path, model_folder: Path) -> None:
    async with run_stack(run_folder, model_folder, scheduler=False, admin_keys=("boss",)) as stack:
        response = await stack.post("/kvtide/admin/flush", {}, headers=ADMIN)
        assert response.status_code == 503


def test_who_asks_waits_longer_than_the_scheduler_does_for_a_silent_storage() -> None:
    patience_s = MAX_SENDS * TRANSFER_TIMEOUT_S
    assert min(ADMIN_TIMEOUT_S, ANSWER_TIMEOUT_S) > patience_s  # so that its answer, which names the storage, is seen


async def test_a_pin_is_of_the_tokens_that_a_request_has(guarded: Stack) -> None:
    ids = guarded.words.ids("a b c")
    for prompt in ("a b c", ids):
        body = {"prompt": prompt, "cache_salt": "alice", "ttl_s": 5}
        assert (await guarded.post("/kvtide/admin/pin", body, headers=ADMIN)).status_code == 200
        wish = guarded.scheduler.last_wish
        assert unpack(wish.tokens).tolist() == ids
        assert (wish.namespace.tenant, wish.ttl_s) == ("alice", 5.0)
    body = {"messages": [{"role": "user", "content": "a"}]}
    assert (await guarded.post("/kvtide/admin/pin", body, headers=ADMIN)).status_code == 200
    assert len(unpack(guarded.scheduler.last_wish.tokens)) > 1
    assert (await guarded.post("/kvtide/admin/unpin", {"pin": 7}, headers=ADMIN)).status_code == 200
    assert guarded.scheduler.last_wish.pin == 7


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "a", "ttl_s": 0}, "ttl_s"),
        ({"prompt": "a", "ttl_s": 1e9}, "ttl_s"),
    ],
)
async def test_a_pin_of_nothing_or_for_ever_is_refused_by_name(guarded: Stack, body: dict, param: str) -> None:
    response = await guarded.post("/kvtide/admin/pin", body, headers=ADMIN)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)

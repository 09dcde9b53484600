"""POST /tokenize and /detokenize."""

import pytest

from tests.unit.gateway.harness import CONTEXT, Stack, run_stack


async def test_there_and_back(stack: Stack) -> None:
    body = (await stack.post("/tokenize", {"model": "tiny", "prompt": "hé", "return_token_strs": True})).json()
    assert body["tokens"] == stack.words.ids("hé")
    assert body["count"] == 3
    assert body["max_model_len"] == CONTEXT
    assert body["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    back = await stack.post("/detokenize", {"tokens": [*body["tokens"], stack.words.end]})
    assert back.json() == {"prompt": "hé<|im_end|>"}


async def test_a_chat_is_tokenized_as_it_would_be_sent(stack: Stack) -> None:
    stack.says("ok")
    messages = [{"role": "user", "content": "x"}]
    body = (await stack.post("/tokenize", {"messages": messages})).json()
    answer = await stack.chat("x", return_token_ids=True)
    assert body["tokens"] == answer.json()["prompt_token_ids"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "x"}]}, 400, "prompt"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": [{"role": "user", "content": "forbidden"}]}, 422, "messages"),
        ("/detokenize", {"tokens": [260]}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
async def test_refusals(stack: Stack, path: str, body: dict, status: int, param: str) -> None:
    response = await stack.post(path, body)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


async def test_a_key_is_asked_for(run_folder, model_folder) -> None:
    async with run_stack(run_folder, model_folder, keys=("secret",)) as stack:
        assert (await stack.post("/tokenize", {"prompt": "a"})).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert (await stack.post("/tokenize", {"prompt": "a"}, headers=headers)).status_code == 200
        async with stack.client() as client:
            assert (await client.get("/openapi.json")).status_code == 401
            page = (await client.get("/openapi.json", headers=headers)).json()
        assert page["paths"]["/tokenize"]["post"]["security"] == [{"key": []}]
        assert page["paths"]["/kvtide/admin/{action}"]["post"]["security"] == [{"admin_key": []}]
        assert "security" not in page["paths"]["/health"]["get"]

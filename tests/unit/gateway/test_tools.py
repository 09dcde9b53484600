"""Tools: what the model reads, what it must write, and its calls in any cut of the text."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from services.gateway.tool_calls import HERMES, LLAMA, MISTRAL, CallParser, Notation
from shared.packed import unpack
from tests.unit.gateway.harness import Stack, events, run_stack, write_model

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
OTHER = {"type": "function", "function": {"name": "stop"}}
CALL = '{"name": "add", "arguments": {"a": 1}}'
TAGGED = f"<tool_call>\n{CALL}\n</tool_call>"
CONTEXT = 4096
NATIVE = (
    "{% if tools %}{% for t in tools %}TOOL {{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% for c in m.tool_calls %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}"
)


def parse(pieces: list[str], notation: Notation = HERMES) -> tuple[str, list[tuple[int, str, str]]]:
    parser = CallParser(notation, frozenset({"add", "stop"}))
    found = [*map(parser.feed, pieces), parser.flush()]
    calls = [call for each in found for call in each.calls]
    assert parser.found == len(calls)
    return "".join(each.text for each in found), [(call.index, call.name, call.arguments) for call in calls]


ADD = (0, "add", '{"a": 1}')


@pytest.mark.parametrize(
    ("notation", "text", "expected"),
    [
        (HERMES, TAGGED, ("", [ADD])),
        (HERMES, f"Well.\n{TAGGED}\n{TAGGED}\n", ("Well.", [ADD, (1, *ADD[1:])])),
        (HERMES, f"<tool_call>{CALL}", ("", [ADD])),
        (HERMES, "a < b <tool", ("a < b <tool", [])),
        (HERMES, "x <tool_call>{}</tool_call> y", ("x <tool_call>{}</tool_call> y", [])),
        (HERMES, '<tool_call>{"name": "rm", "arguments": {}}</tool_call>', None),
        (HERMES, '<tool_call>{"name": ["add"], "arguments": {}}</tool_call>', None),
        (HERMES, '<tool_call>{"name": "add", "arguments": 3}</tool_call>', None),
        (HERMES, f"<tool_call>[{CALL}, {CALL}]</tool_call>", ("", [ADD, (1, *ADD[1:])])),
        (LLAMA, '{"name": "add", "parameters": {"a": 1}}', ("", [ADD])),
        (LLAMA, '{"temperature": 3}', None),
        (LLAMA, "no call {", None),
        (MISTRAL, f"[TOOL_CALLS] [{CALL}]", ("", [ADD])),
        (MISTRAL, f"[{CALL}, {CALL}]", ("", [ADD, (1, *ADD[1:])])),
    ],
)
def test_calls_in_a_text(notation: Notation, text: str, expected: Any) -> None:
    expected = expected or (text, [])
    assert parse([text], notation) == expected
    assert parse(list(text), notation) == expected


PARTS = st.sampled_from([TAGGED, "<tool_call>", "</tool_call>", CALL, "<tool", "x", " \n", "{", "[", "}", "é"])


@given(parts=st.lists(PARTS, max_size=8), cuts=st.lists(st.integers(1, 9), max_size=40), which=st.integers(0, 2))
def test_the_cut_does_not_matter(parts: list[str], cuts: list[int], which: int) -> None:
    text, pieces = "".join(parts), []
    rest = text
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    assert parse([*pieces, rest], (HERMES, LLAMA, MISTRAL)[which]) == parse([text], (HERMES, LLAMA, MISTRAL)[which])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", context=CONTEXT)


async def test_a_template_without_tools_gets_them_in_the_system_message(run_folder: Path, folder: Path) -> None:
    async with run_stack(run_folder, folder) as stack:
        stack.says(f"I add.{TAGGED}")
        answer = (await stack.chat(tools=[TOOL, OTHER])).json()["choices"][0]
        assert answer["finish_reason"] == "tool_calls"
        assert answer["message"]["content"] == "I add."
        (call,) = answer["message"]["tool_calls"]
        assert call["id"].startswith("call_")
        assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
        prompt = stack.words.text(unpack(stack.scheduler.submits[0].tokens))
        assert prompt.startswith("<|im_start|>system\nYou can call functions.")
        assert json.dumps(TOOL["function"]) in prompt
        assert stack.scheduler.submits[0].sampling.guide is None
        # The conversation goes on with the call and its result.
        messages = [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "1?"},
            answer["message"],
            {"role": "tool", "tool_call_id": call["id"], "content": "2"},
        ]
        body = {"model": "tiny", "messages": messages, "tools": [TOOL]}
        assert (await stack.post("/v1/chat/completions", body)).status_code == 200
        prompt = stack.words.text(unpack(stack.scheduler.submits[1].tokens))
        assert prompt.startswith("<|im_start|>system\nBe kind.\n\nYou can call")
        assert 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in prompt
        assert "user\n<tool_response>\n2\n</tool_response>" in prompt
        # With tool_choice none the model hears of nothing and its text stays text.
        answer = (await stack.chat(tools=[TOOL], tool_choice="none")).json()["choices"][0]
        assert answer["message"]["content"] == f"I add.{TAGGED}"
        assert "functions" not in stack.words.text(unpack(stack.scheduler.submits[2].tokens))


async def test_a_template_with_tools_renders_them(run_folder: Path, folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(NATIVE)
    async with run_stack(run_folder, folder) as stack:
        stack.says("ok")
        call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
        messages = [{"role": "user", "content": "u"}, {"role": "assistant", "tool_calls": [call]}]
        body = {"model": "tiny", "messages": messages, "tools": [TOOL]}
        assert (await stack.post("/v1/chat/completions", body)).status_code == 200
        prompt = stack.words.text(unpack(stack.scheduler.submits[0].tokens))
        assert prompt == f"TOOL {json.dumps(TOOL)}\nuser:u;assistant:;<tool_call>{CALL}</tool_call>"


async def test_streamed_calls(run_folder: Path, folder: Path) -> None:
    async with run_stack(run_folder, folder) as stack:
        stack.says(f"Hm. {TAGGED}\n{TAGGED}")
        response = await stack.chat(tools=[TOOL], stream=True, logprobs=True, return_token_ids=True)
        choices = [event["choices"][0] for event in events(response.text)]
        deltas = [choice["delta"] for choice in choices]
        assert "".join(delta.get("content", "") for delta in deltas) == "Hm."
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert [call["index"] for call in calls] == [0, 1]
        assert [call["function"]["arguments"] for call in calls] == ['{"a": 1}'] * 2
        assert choices[-1]["finish_reason"] == "tool_calls"
        ids = [token for choice in choices for token in choice.get("token_ids", [])]
        assert ids == [*stack.words.ids(f"Hm. {TAGGED}\n{TAGGED}"), stack.words.end]


def accepts(folder: Path, grammar: str, text: str) -> bool:
    tokenizer = LLTokenizer((folder / "tokenizer.json").read_text(), n_vocab=260, eos_token=257)
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


async def test_forced_calls_have_a_grammar(run_folder: Path, folder: Path) -> None:
    async with run_stack(run_folder, folder) as stack:
        stack.says(TAGGED)

        async def grammar(**body: Any) -> str:
            assert (await stack.chat(tools=[TOOL, OTHER], **body)).status_code == 200
            guide = stack.scheduler.submits[-1].sampling.guide
            assert unpack(guide.end_tokens).tolist() == [stack.words.end]
            return guide.grammar

        stop = TAGGED.replace("add", "stop")
        required = await grammar(tool_choice="required")
        assert accepts(folder, required, TAGGED)
        assert accepts(folder, required, f"{TAGGED}\n{stop}")
        assert not accepts(folder, required, "text")
        assert not accepts(folder, required, TAGGED.replace("1", '"1"'))
        single = await grammar(tool_choice="required", parallel_tool_calls=False)
        assert not accepts(folder, single, f"{TAGGED}\n{stop}")
        named = await grammar(tool_choice={"type": "function", "function": {"name": "stop"}})
        assert accepts(folder, named, stop)
        assert not accepts(folder, named, TAGGED)
        either = await grammar(response_format={"type": "json_object"})
        assert accepts(folder, either, TAGGED)
        assert accepts(folder, either, '{"a": 1}')


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ({"tools": [TOOL, TOOL]}, "tools", "same name"),
        ({"tools": [TOOL], "tool_choice": "must"}, "tool_choice", "must"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "regex"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "objekt"}}}],
                "tool_choice": "required",
            },
            "tools",
            "objekt",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "tool_call_id"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content", "tool_calls"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "a", "arguments": "{"}}]}
                ]
            },
            "messages",
            "not JSON",
        ),
    ],
)
async def test_refusals(stack: Stack, body: dict, param: str, words: str) -> None:
    response = await stack.chat(**body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert not stack.scheduler.submits

"""Every example of the documents is one that works: each is taken by what would take it. Those that ask a stack are
run in tests/integration/test_docs_examples.py, those of containers in tests/compose."""

import argparse
import ast
import itertools
import json
import re
from pathlib import Path

import jsonschema_rs
import pytest
import yaml
from msgspec.structs import replace

from kvtide.cli import _parser
from services.gateway.chat import ChatRequest
from services.gateway.model import Model
from services.gateway.openapi import document
from services.gateway.parameters import decode
from services.gateway.tools import FALLBACK
from shared.config import Config, load_config
from tests.compose.harness import SERVICES
from tests.compose.test_files import Loader
from tests.docs.examples import PAGES, ROOT, Example, all_commands, commands, examples
from tests.unit.gateway.harness import write_model

CHECKED = {"sh", "toml", "json", "python"}  # languages that a test here or elsewhere reads
PLAIN = "text"  # pictures and output
OTHERS = {"pip", "python", "guidellm", "schemathesis", "curl"}  # beside ours; curl's are checked by what they send
FILES = {"py", "toml", "safetensors"}  # endings of file names
KEYS = {section: set(type(getattr(Config(), section)).__struct_fields__) for section in Config.__struct_fields__}


def shown(value: Example | list[str]) -> str:
    """A test's name."""
    return str(value) if isinstance(value, Example) else " ".join(value[:3])


def test_every_example_says_what_it_is() -> None:
    assert [str(each) for each in examples() if each.language not in {*CHECKED, PLAIN}] == []


@pytest.mark.parametrize("example", examples("sh"), ids=shown)
def test_programs_of_shell_examples_are_ours_or_known(example: Example) -> None:
    for words in commands(example):
        assert Path(words[0]).name in {"kvtide", "make", "docker", *OTHERS}, words


def takes(words: list[str]) -> argparse.Namespace | None:
    """What the command line makes of a command; None when it doesn't take it."""
    try:
        return _parser().parse_args(words)
    except SystemExit:
        return None


@pytest.mark.parametrize(("example", "words"), all_commands("kvtide"), ids=shown)
def test_kvtide_takes_its_commands_and_their_settings(example: Example, words: list[str]) -> None:
    options = takes(words[1:])
    assert options is not None, words
    assert isinstance(load_config(None, getattr(options, "set", [])), Config)


def inline(pattern: str) -> list[tuple[str, str]]:
    """(page, match) of everything between backquotes that matches."""
    return [
        (page.name, code)
        for page in PAGES
        for code in re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
        if re.fullmatch(pattern, code)
    ]


@pytest.mark.parametrize(("page", "code"), inline("kvtide .*"))
def test_kvtide_has_the_commands_that_the_text_names(page: str, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    names, *options = re.sub(r"[\[\]\\]", "", code.removeprefix("kvtide ")).partition(" -")[::2]
    for name in alternatives(names.split()):
        with pytest.raises(SystemExit, match=r"^0$"):
            _parser().parse_args([*name, "--help"])
        known = capsys.readouterr().out
        for option in re.findall(r"-[a-z-]+", f" -{options[0]}"):
            assert option in known, f"{page} names {code}"


def alternatives(names: list[str]) -> list[list[str]]:
    """The commands that words such as "bench copy|step" name."""
    if names[0] != "bench" or len(names) == 1:
        return [names[:1]]
    return [["bench", name] for name in names[1].replace("NAME", "copy").split("|")]


@pytest.mark.parametrize(("example", "words"), all_commands("make"), ids=shown)
def test_make_has_the_verbs(example: Example, words: list[str]) -> None:
    verbs = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert words[1] in verbs


@pytest.mark.parametrize(("example", "words"), all_commands("docker"), ids=shown)
def test_compose_has_the_files_services_and_profiles(example: Example, words: list[str]) -> None:
    assert words[1] == "compose"
    compose = yaml.load((ROOT / "compose.yaml").read_text(encoding="utf-8"), Loader)
    profiles = {profile for about in compose["services"].values() for profile in about.get("profiles", [])}
    for option, value in itertools.pairwise(words):
        assert option != "-f" or (ROOT / value).exists()
        assert option != "--profile" or value in profiles
        assert option not in ("--scale", "exec", "restart") or value.partition("=")[0] in SERVICES
    if "exec" in words:
        assert takes(words[words.index("kvtide") + 1 :]) is not None


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """/openapi.json."""
    folder = write_model(tmp_path_factory.mktemp("model"))
    model = replace(Config().model, path=str(folder), name="SmolLM2-135M-Instruct")
    return document(Model(replace(Config(), model=model)), keys=False)


def follows(api: dict[str, dict], kind: str, text: str) -> None:
    """Fails unless the JSON text follows one of the API's schemas."""
    schema = {"$ref": f"#/components/schemas/{kind}", "components": api["components"]}
    jsonschema_rs.validator_for(schema).validate(json.loads(text))


@pytest.mark.parametrize(("example", "words"), all_commands("curl"), ids=shown)
def test_curl_sends_what_the_api_takes(example: Example, words: list[str], api: dict[str, dict]) -> None:
    assert words[1] == "http://127.0.0.1:8000/v1/chat/completions"
    body = words[words.index("-d") + 1]
    follows(api, "ChatRequest", body)
    assert decode(body.encode(), ChatRequest).messages


@pytest.mark.parametrize("example", examples("json"), ids=shown)
def test_json_is_what_the_api_answers(example: Example, api: dict[str, dict]) -> None:
    follows(api, "Explanation", example.text)


def test_the_words_about_tools_are_the_gateway_s() -> None:
    assert FALLBACK.splitlines()[0] in [each.text.splitlines()[0] for each in examples(PLAIN)]


@pytest.mark.parametrize(("page", "code"), inline(r"(GET|POST) /.*"))
def test_the_gateway_has_the_routes_that_the_text_names(page: str, code: str, api: dict[str, dict]) -> None:
    method, path = code.split()
    assert path.endswith("...") or method.lower() in api["paths"][path]


@pytest.mark.parametrize("example", examples("toml"), ids=shown)
def test_toml_is_a_configuration(example: Example, tmp_path: Path) -> None:
    (tmp_path / "kvtide.toml").write_text(example.text)
    assert load_config(tmp_path / "kvtide.toml", environment={}) != Config()


def test_the_text_names_configuration_keys_that_exist() -> None:
    for page, code in inline(rf"({'|'.join(KEYS)})\.\w+( ?= ?.*)?"):
        section, key = re.split(r"[ =]", code)[0].split(".")
        assert key in KEYS[section] or key in FILES, f"{page} names {code}"
    for page, code in inline(r"KVTIDE_[A-Z_]+(=.*)?"):
        name = code.partition("=")[0].removeprefix("KVTIDE_").lower()
        section, _, key = name.partition("_")
        assert name in ("cache", "compiled") or key in KEYS[section], f"{page} names {code}"


@pytest.mark.parametrize(("example", "words"), all_commands("python"), ids=shown)
def test_python_in_a_shell_example_is_python(example: Example, words: list[str]) -> None:
    ast.parse(words[words.index("-c") + 1])

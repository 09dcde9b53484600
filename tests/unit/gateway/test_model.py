"""What the gateway reads from a model's folder."""

import json
from pathlib import Path

import pytest

from services.gateway.errors import ApiError
from services.gateway.model import Model
from shared import config as configuration
from shared.config import Config
from shared.errors import ModelError
from tests.unit.gateway.harness import CONTEXT, write_model


def load(folder: Path, **options: object) -> Model:
    return Model(Config(model=configuration.Model(path=str(folder), **options)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "some-model")


def change(folder: Path, name: str, **values: object) -> None:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_names_numbers_and_end_tokens(folder: Path) -> None:
    model = load(folder)
    assert (model.name, model.context, model.vocab_size) == ("some-model", CONTEXT, 260)
    assert model.stop_token_ids == [model.tokenizer.token_to_id("<|im_end|>")]
    assert load(folder, name="other", max_context=32).context == 32
    assert load(folder, max_context=10_000).context == CONTEXT


def test_end_tokens_without_a_generation_config(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    change(folder, "config.json", eos_token_id=[1, 2])
    assert load(folder).stop_token_ids == [1, 2]


def test_sampling_defaults(folder: Path) -> None:
    change(folder, "generation_config.json", temperature=0.2, top_k=7)
    assert (load(folder).defaults.temperature, load(folder).defaults.top_k) == (0.2, 7)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ModelError, match=name):
        load(folder)


def test_a_damaged_file_is_named(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        load(folder)
    change_to = {"vocab_size": 3}
    (folder / "config.json").write_text(json.dumps(change_to))
    with pytest.raises(ModelError, match=r"set model\.max_context"):
        load(folder)


def test_a_template_in_its_own_file_comes_first(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}{{ eos_token }}{{ messages | tojson }}")
    template = load(folder).chat_template
    assert template.render([{"role": "user", "content": "é"}]) == 'é<|im_end|>[{"role": "user", "content": "é"}]'


def test_named_templates(folder: Path) -> None:
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    change(folder, "tokenizer_config.json", chat_template=named, bos_token={"content": "<s>"})
    assert load(folder).chat_template.render([]) == "yes"


def test_templates_that_are_missing_broken_or_refuse(folder: Path) -> None:
    with pytest.raises(ApiError, match="not that"):
        load(folder).chat_template.render([{"role": "user", "content": "forbidden"}])
    change(folder, "tokenizer_config.json", chat_template=None)
    assert load(folder).chat_template is None
    change(folder, "tokenizer_config.json", chat_template="{% if %}")
    with pytest.raises(ModelError, match="chat template is broken"):
        load(folder)


def test_a_template_runs_in_a_sandbox(folder: Path) -> None:
    change(folder, "tokenizer_config.json", chat_template="{{ ''.__class__.__mro__ }}")
    with pytest.raises(ApiError):
        load(folder).chat_template.render([{"role": "user", "content": "x"}])

"""Unknown keys and bad values are refused by name, with what is allowed."""

from pathlib import Path

import pytest

from shared.config import Config, decode_config, encode_config, load_config
from shared.errors import ConfigError


def test_a_file_and_overrides_are_read_in_that_order(tmp_path: Path) -> None:
    file = tmp_path / "kvtide.toml"
    file.write_text('[cache]\npage_size = 32\n[gateway]\napi_keys = ["a", "b"]\n')
    config = load_config(file, ["cache.page_size=16", "model.name=tiny", "run.folder=/tmp/x"])
    assert (config.cache.page_size, config.model.name, config.gateway.api_keys) == (16, "tiny", ("a", "b"))
    assert config.scheduler_endpoint == "ipc:///tmp/x/scheduler.sock"


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("cach.page_size=16", ["cach", "cache", "gateway"]),
        ("cache.pagesize=16", ["cache.pagesize", "page_size", "device_tokens"]),
        ("cache.page_size=48", ["cache.page_size", "48", "power of two"]),
        ("cache.page_size=many", ["cache.page_size", "int"]),
        ("model.dtype=int8", ["model.dtype", "int8"]),
        ("gateway.port=70000", ["gateway.port", "65535"]),
        ('gateway.admin_keys=["a", ""]', ["gateway.admin_keys", "length"]),
        ('gateway.api_keys=[""]', ["gateway.api_keys", "length"]),
        ("scheduler.request_timeout_s=0", ["scheduler.request_timeout_s", "> 0"]),
        ("run.name=Two Words", ["run.name"]),
        ("cache", ["section.key=value"]),
        ("cache.=3", ["section.key=value"]),
    ],
)
def test_a_bad_override_is_refused_by_name(override: str, names: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, [override])
    for name in names:
        assert name in str(refused.value)


def test_a_file_that_is_missing_or_no_toml_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_config(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[cache\n")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load_config(broken)
    table = tmp_path / "table.toml"
    table.write_text("cache = 3\n")
    with pytest.raises(ConfigError, match="cache"):
        load_config(table)


def test_a_configuration_survives_the_way_to_a_child_process() -> None:
    config = load_config(None, ["cache.host_bytes=12345678", "gateway.port=0"])
    assert decode_config(encode_config(config)) == config != Config()

"""Every key is an environment variable: file < environment < --set."""

from pathlib import Path

import pytest

from shared.config import Config, environment_variable, load_config
from shared.errors import ConfigError


def test_the_order_of_precedence(tmp_path: Path) -> None:
    file = tmp_path / "kvtide.toml"
    file.write_text("[cache]\npage_size = 8\ndevice_tokens = 100\n[gateway]\nport = 1\n")
    environment = {
        "KVTIDE_CACHE_PAGE_SIZE": "16",
        "KVTIDE_CACHE_DEVICE_TOKENS": "200",
        "KVTIDE_GATEWAY_API_KEYS": '["k"]',
    }
    config = load_config(file, ["cache.page_size=32"], environment)
    assert (config.cache.page_size, config.cache.device_tokens, config.gateway.port) == (32, 200, 1)
    assert config.gateway.api_keys == ("k",)


def test_every_key_has_its_variable() -> None:
    for section in Config.__struct_fields__:
        values = getattr(Config(), section)
        for key in values.__struct_fields__:
            with pytest.raises(ConfigError, match=f"{section}[.]{key}|is not"):
                load_config(None, [], {environment_variable(section, key): "[[1]]"})


def test_a_variable_that_names_no_key_is_refused_and_others_are_left_alone() -> None:
    with pytest.raises(ConfigError, match=r"KVTIDE_CACHE_PAGESIZE.*KVTIDE_CACHE_PAGE_SIZE"):
        load_config(None, [], {"KVTIDE_CACHE_PAGESIZE": "16"})
    others = {"KVTIDE_CACHE": "/tmp/x", "KVTIDE_TEST_HOOKS": "a", "KVTIDE_CONFIG_JSON": "{}", "HOME": "/"}
    assert load_config(None, [], others) == Config()

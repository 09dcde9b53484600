"""What can be said of the container files without an engine. Part of `make test`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.gateway.metrics import FAMILIES
from shared.config import Config, load_config
from shared.test_hooks import VARIABLE
from tests.compose.harness import ROOT, SERVICES
from tests.faults.links_service import CONTROL_PORT, PORTS
from tests.faults.matrix.cells import PAGE_LINK
from tests.faults.matrix.requests import END_S

OVERRIDES = ("compose.remote.yaml", "compose.gpu.yaml")
SUFFIXES = ("_bucket", "_sum", "_count")  # of a histogram's samples


class Loader(yaml.SafeLoader):
    """Knows compose's own tags."""


Loader.add_constructor("!override", lambda loader, node: loader.construct_sequence(node, deep=True))


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.load((ROOT / name).read_text(encoding="utf-8"), Loader)
    return found


STORES = ("storage_lmcache", "lmcache", "storage_mooncake", "mooncake_node", "mooncake")  # of the profiles


@pytest.mark.parametrize("service", STORES)
def test_stores_without_authentication_are_on_the_closed_network_only(service: str) -> None:
    about = read("compose.yaml")
    assert about["services"][service]["networks"] == ["stack"]
    assert about["networks"]["stack"]["internal"]
    assert "ports" not in about["services"][service]


@pytest.mark.parametrize("service", [*SERVICES, *STORES])
def test_a_service_is_checked_limited_restarted_and_not_root(service: str) -> None:
    about = read("compose.yaml")["services"][service]
    assert about["user"] == "1000:1000"
    assert about["read_only"]
    assert about["cap_drop"] == ["ALL"]
    assert about["restart"] == "on-failure"
    assert {"mem_limit", "pids_limit", "healthcheck"} <= about.keys()


def test_ports_are_open_on_this_machine_only() -> None:
    ports = [port for about in read("compose.yaml")["services"].values() for port in about.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_without_the_shared_volume_no_two_services_share_a_pool() -> None:
    services = read("compose.remote.yaml")["services"]
    volumes = [volume for about in services.values() for volume in about["volumes"]]
    assert not [volume for volume in volumes if volume.startswith("pool")]


@pytest.mark.parametrize("name", ["compose.yaml", *OVERRIDES])
def test_variables_of_services_are_configuration_keys(name: str) -> None:
    for about in read(name)["services"].values():
        given = {key: value for key, value in about.get("environment", {}).items() if key.startswith("KVTIDE_")}
        plain = {key: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for key, value in given.items()}
        assert isinstance(load_config(None, environment=plain), Config)


@pytest.mark.parametrize("files", [("faults.yaml",), ("../../compose.remote.yaml", "faults.yaml", "links.yaml")])
def test_variables_of_the_fault_matrix_are_configuration_keys(files: tuple[str, ...]) -> None:
    services = [read(f"tests/compose/{name}")["services"] for name in files]
    for service in SERVICES:
        given = {key: value for each in services for key, value in each.get(service, {}).get("environment", {}).items()}
        assert load_config(None, environment=given).scheduler.request_timeout_s < END_S
        assert (VARIABLE in given) == (service in ("gpu_worker", "storage"))


def test_every_link_of_the_fault_matrix_runs_through_its_proxy() -> None:
    services = read("tests/compose/links.yaml")["services"]
    assert services["links"]["ports"] == [f"127.0.0.1:${{KV_LINKS_PORT:-{CONTROL_PORT}}}:{CONTROL_PORT}"]
    for service in ("gateway", "gpu_worker", "storage"):
        port = PORTS[f"{service}-scheduler"]
        assert services[service]["environment"]["KVTIDE_RUN_SCHEDULER_ENDPOINT"] == f"tcp://links:{port}"
        if service != "gateway":  # whose check asks /health
            assert f":{port:04X} 01 " in services[service]["healthcheck"]["test"][1]
    assert services["storage"]["environment"]["KVTIDE_STORAGE_PAGES_ADVERTISE"] == f"tcp://links:{PORTS[PAGE_LINK]}"
    assert f":{CONTROL_PORT:04X} " in services["links"]["healthcheck"]["test"][1]


def test_the_configuration_file_is_one() -> None:
    config = load_config(ROOT / "deploy" / "kvtide.toml", environment={})
    limit = read("compose.yaml")["services"]["storage"]["mem_limit"]
    assert config.cache.host_bytes < int(limit.removesuffix("g")) * 2**30


def test_the_board_shows_metrics_that_exist() -> None:
    board = json.loads((ROOT / "deploy/grafana/dashboards/kvtide.json").read_text(encoding="utf-8"))
    source = "".join(path.read_text(encoding="utf-8") for path in _sources())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        for target in panel["targets"]:
            names = re.findall(r"kvtide[:_]\w+", target["expr"])
            assert names, target
            for name in names:
                family = _base(name).removeprefix("kvtide:")
                assert family in FAMILIES or _written(name) in source, f"{panel['title']} shows {name}"


def _sources() -> list[Path]:
    return [*(ROOT / "services/gateway").glob("*.py"), *(ROOT / "services/scheduler/core").glob("*.py")]


def _written(metric: str) -> str:
    """The string that makes a metric: the scheduler's counters get their prefix from the gateway."""
    return f'"{_base(metric).removeprefix("kvtide_scheduler_")}"'


def _base(metric: str) -> str:
    """A histogram's name without its samples' endings."""
    for suffix in SUFFIXES:
        metric = metric.removesuffix(suffix)
    return metric

"""Schemathesis reads /openapi.json, sends what it allows and what it forbids, and checks every answer against it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.unit.gateway.harness import run_stack, write_model

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed: make setup installs it")

EXAMPLES = 40  # bodies for each route, as many good as bad: about 15 s in all
CONTEXT = 4096  # tokens: room for what is made up
TIMEOUT_S = 20.0  # of one request
KEY = "boss"  # opens the API and the admin route
HEADERS = {"authorization": f"Bearer {KEY}"}


@pytest.mark.slow
async def test_the_api_is_what_its_own_page_says(run_folder: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", context=CONTEXT)
    async with run_stack(run_folder, model, keys=(KEY,), admin_keys=(KEY,)) as stack:
        stack.says("{}")
        async with stack.client() as client:
            page = (await client.get("/openapi.json", headers=HEADERS)).json()
        await asyncio.to_thread(_fuzz, page, stack.url)
        assert len(stack.scheduler.submits) > EXAMPLES / 4, "nearly everything was refused: the page allows too much"
        assert len(stack.scheduler.wishes) > EXAMPLES / 4


def _fuzz(page: dict[str, Any], url: str) -> None:
    from schemathesis.checks import not_a_server_error
    from schemathesis.generation import GenerationMode
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        negative_data_rejection,
        response_headers_conformance,
        response_schema_conformance,
        status_code_conformance,
        unsupported_method,
    )

    checks = [
        not_a_server_error,
        content_type_conformance,
        response_headers_conformance,
        response_schema_conformance,
        status_code_conformance,
        unsupported_method,
        negative_data_rejection,
    ]
    schema = schemathesis.openapi.from_dict(page)
    seen = set()
    for result in schema.get_all_operations():
        operation = result.ok()
        seen.add(operation.path)
        # A request without a body can't be wrong.
        modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE] if operation.body else [GenerationMode.POSITIVE]
        for mode in modes:

            @settings(
                max_examples=EXAMPLES,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def send(case: Any) -> None:
                case.call_and_validate(base_url=url, checks=checks, timeout=TIMEOUT_S, headers=HEADERS)

            send()
    assert seen == set(page["paths"]), json.dumps(sorted(seen))

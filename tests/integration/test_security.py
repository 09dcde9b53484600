"""A stack whose links go over TCP with keys; and what its logs say of what it was asked."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from kvtide.child import StackError
from kvtide.run_folder import LOGS_NAME
from kvtide.stack import running_stack
from kvtide.status import fetch_status
from shared.keys import make_keys
from shared.transport import use_keys
from tests.integration.harness import READY_TIMEOUT_S, ask, prompt, settle, small_config

MARK = "Zanzibar quince marmalade"  # in no log line


async def test_links_with_keys_serve_and_no_prompt_is_in_a_log(folder: Path, unused_tcp_port: int) -> None:
    make_keys(folder / "keys")
    config = small_config(folder)
    run = replace(
        config.run,
        scheduler_endpoint=f"tcp://127.0.0.1:{unused_tcp_port}",
        keys_folder=str(folder / "keys"),
        log_level="debug",
    )
    use_keys(run.keys_folder)  # this process asks for the status
    try:
        async with running_stack(replace(config, run=run)) as stack:
            await stack.wait_ready(READY_TIMEOUT_S)
            answers = [await ask(stack, f"{MARK}. {prompt(1)}", logprobs=1) for _ in range(2)]
            await settle(stack)
            use_keys("")
            with pytest.raises(StackError, match="no scheduler answers"):
                await fetch_status(run.scheduler_endpoint, timeout_s=1.0)
            use_keys(run.keys_folder)
    finally:
        use_keys("")
    logs = "".join(path.read_text(encoding="utf-8") for path in (Path(run.folder) / LOGS_NAME).iterdir())
    assert "finish=length" in logs
    said = [MARK, "quince", prompt(1)[:40], *{answer.text.strip() for answer in answers if len(answer.text) > 6}]
    assert [text for text in said if text in logs] == []

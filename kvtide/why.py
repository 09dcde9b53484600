"""`kvtide why REQUEST_ID`: ask the gateway where an answer's prompt came from, and show it."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvtide.child import StackError
from kvtide.run_folder import GATEWAY_NAME
from shared.config import Config

ANSWER_TIMEOUT_S = 5.0  # the gateway gives the scheduler two seconds
TIERS = ("device", "host", "storage")


async def fetch_why(config: Config, request_id: str, url: str = "") -> dict[str, Any]:
    """The explanation as decoded JSON. Raises StackError, with the gateway's own words where it refuses."""
    return await ask_gateway(config, "GET", f"/kvtide/why/{request_id}", url, config.gateway.api_keys)


async def ask_gateway(
    config: Config, method: str, path: str, url: str, keys: Sequence[str], content: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One answer of the gateway, with the first of `keys`. Raises StackError with its own words where it refuses."""
    url = url or _gateway(config)
    headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
    try:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=ANSWER_TIMEOUT_S, headers=headers) as http:
            answer = await http.request(method, path, json=content)
            body: dict[str, Any] = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise StackError(f"the gateway at {url} does not answer ({error!r}); is the stack running?") from None
    if answer.status_code != httpx.codes.OK:
        raise StackError(body.get("error", {}).get("message") or f"the gateway answers {answer.status_code}")
    return body


def _gateway(config: Config) -> str:
    try:
        return str(json.loads((config.run_folder / GATEWAY_NAME).read_bytes())["url"])
    except (OSError, ValueError, KeyError):
        raise StackError(
            f"no gateway has left its address in {config.run_folder}; is the stack running (kvtide serve), with the "
            "same --config and --set? For one in a container give --url http://127.0.0.1:8000"
        ) from None


def print_why(answer: dict[str, Any], console: Console) -> None:
    """A table for each choice."""
    for choice in answer["choices"]:
        again = choice["recomputed_tokens"]["any"]
        known = f"; {again} of those computed were in a tier before" if again else ""
        tokens = f"{choice['prompt_tokens']} prompt tokens{known}"
        console.print(f"[bold]{escape(answer['id'])}[/] choice {choice['choice']}: {tokens}", soft_wrap=True)
        table = Table("tokens", "from", "why not from a tier above", box=None, pad_edge=False)
        for segment in choice["segments"]:
            lines = [
                escape(f"{tier}: {missed['text']}" if tier in TIERS else missed["text"])
                for tier, missed in segment["missed"].items()
            ]
            table.add_row(f"{segment['from_token']}-{segment['to_token']}", segment["tier"], "\n".join(lines))
        console.print(table)

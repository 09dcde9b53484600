"""GET /kvtide/why/{id}, and the same for an answer that asks for it: where its prompts' tokens came from."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from services.gateway.errors import ApiError, json_response, unavailable
from services.gateway.limits import MAX_CHOICES, MAX_ID_CHARS, MAX_RESUBMISSIONS
from services.gateway.scheduler_client import SchedulerClient
from services.gateway.session import Ticket, answer_id, request_id
from services.gateway.why_words import words


class Why:
    """The route."""

    def __init__(self, client: SchedulerClient) -> None:
        self._client = client

    async def page(self, request: Request) -> Response:
        """One entry for each choice. 404 for an id that the scheduler doesn't know, or not any more."""
        asked = request.path_params["id"][:MAX_ID_CHARS]
        attempts = range(MAX_RESUBMISSIONS + 1)
        ids = [request_id(asked, choice, attempt) for choice in range(MAX_CHOICES) for attempt in attempts]
        found = await self._client.why(ids)
        if found is None:
            raise unavailable("the scheduler does not answer: check that it runs (kvtide status)")
        if not found:
            raise ApiError(
                404,
                f"nothing is known of the request {asked!r}: give the id of one of the last 1,024 answers (its "
                "x-request-id) since the scheduler started, with cache.explain on",
                code="unknown_request",
            )
        return json_response({"id": asked, "choices": shaped(found)})


async def explain(client: SchedulerClient, tickets: list[Ticket]) -> list[dict[str, Any]] | None:
    """The explanations of an answer's choices; None when the scheduler doesn't say."""
    found = await client.why([ticket.request_id for ticket in tickets])
    return shaped(found) if found else None


def shaped(explanations: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One for each choice, the last attempt's; ids are those of answers."""
    by_choice: dict[int, dict[str, Any]] = {}
    for each in explanations:
        _, choice, _ = each["request_id"].rsplit("-", 2)
        rest = {name: value for name, value in each.items() if name != "request_id"}
        by_choice[int(choice)] = {"choice": int(choice)} | rest
        for segment in rest["segments"]:
            for fate in segment["missed"].values():
                if "request_id" in fate:
                    fate["request_id"] = answer_id(fate["request_id"])
                fate["text"] = words(fate)
    return [by_choice[choice] for choice in sorted(by_choice)]

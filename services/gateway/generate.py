"""The life of one generation request, from its body to the last byte of its answer."""

import asyncio
from dataclasses import replace
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from services.gateway.answer import Answer, usage_body
from services.gateway.choice import join
from services.gateway.errors import ApiError, ClientGone, json_response
from services.gateway.http import read_body, until_gone
from services.gateway.job import Job
from services.gateway.limits import FLUSH_S, REQUEST_MARGIN_S
from services.gateway.model import Model
from services.gateway.records import CLIENT_GONE, Record, Records
from services.gateway.scheduler_client import SchedulerClient
from services.gateway.shape import Shape
from services.gateway.sse import EventStream
from shared.tracing import RequestSpan


class Generate:
    """ASGI application of one POST route."""

    def __init__(self, shape: Shape, model: Model, client: SchedulerClient, records: Records) -> None:
        self._shape = shape
        self._model = model
        self._client = client
        self._records = records

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Whatever ends it, nothing of the request stays here or in the scheduler."""
        with self._records.begin(scope["path"]) as record:
            span = RequestSpan(f"POST {record.route}", Headers(scope=scope).get("traceparent", ""))
            try:
                job = await self._shape.job(await read_body(scope, receive))
                job = replace(job, id=span.request_id(job.id))
                record.id = job.id
                record.prompt_tokens = sum(map(len, job.prompts))
                await until_gone(receive, self._answer(job, record, scope, receive, send))
            except (ClientGone, TimeoutError):  # the timeout: a client that stopped reading
                record.status = CLIENT_GONE
            except ApiError as error:
                record.status = error.status
                raise
            finally:
                span.end(record.attributes())

    async def _answer(self, job: Job, record: Record, scope: Scope, receive: Receive, send: Send) -> None:
        with self._client.open(job) as session:
            answer = Answer(session, self._client, self._model, record)
            # The session's own deadline comes first and has words; this one is for a client that stopped reading.
            async with asyncio.timeout(session.timeout_s + REQUEST_MARGIN_S + FLUSH_S):
                try:
                    if job.stream:
                        await self._stream(job, answer, record, EventStream(send, job.id))
                    else:
                        body = await self._whole(job, answer, record)
                        record.status = 200
                        await json_response(body, headers={"x-request-id": job.id})(scope, receive, send)
                finally:
                    answer.note()

    async def _whole(self, job: Job, answer: Answer, record: Record) -> dict[str, Any]:
        while not answer.done:
            await answer.next()
        await answer.settle()
        choices = [self._shape.choice(job, index, join(choice.pieces)) for index, choice in enumerate(answer.choices)]
        body = _head(job, self._shape.whole) | {"choices": choices, "usage": usage_body(record)}
        return body | {"kvtide": answer.extras()} | _prompt_ids(job)

    async def _stream(self, job: Job, answer: Answer, record: Record, stream: EventStream) -> None:
        head: dict[str, Any] = _head(job, self._shape.chunk) | ({"usage": None} if job.include_usage else {})
        opened: set[int] = set()
        try:
            while not answer.done:
                growth = await answer.next()
                if growth is None:
                    await stream.keep_alive()
                    continue
                choices = self._shape.delta(job, growth.choice, growth.piece)
                if growth.choice not in opened and (opening := self._shape.opening(growth.choice)):
                    choices.insert(0, opening)
                if job.continuous_usage:
                    answer.note()
                    head["usage"] = usage_body(record)
                chunks = [head | {"choices": [choice]} for choice in choices]
                if not opened:
                    chunks[0] |= _prompt_ids(job)
                opened.add(growth.choice)
                await stream.events(chunks)
            await answer.settle()
            last = {"usage": usage_body(record)} if job.include_usage else {}
            last |= {"kvtide": answer.extras()} if job.explain else {}
            if last:
                await stream.events([head | {"choices": []} | last])
            record.status = 200
            await stream.end(complete=True)
        except ApiError as error:
            if not stream.started:
                raise
            record.status = error.status
            await stream.events([error.body()])
            await stream.end(complete=False)


def _head(job: Job, kind: str) -> dict[str, Any]:
    return {"id": job.id, "object": kind, "created": job.created, "model": job.model}


def _prompt_ids(job: Job) -> dict[str, Any]:
    """The extension `return_token_ids`: one list, or a list of lists when there are several prompts."""
    if not job.return_token_ids:
        return {}
    return {"prompt_token_ids": job.prompts[0] if len(job.prompts) == 1 else job.prompts}

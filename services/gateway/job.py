"""A request made ready for the scheduler: its prompts as tokens, its sampling, its limits."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from services.gateway.errors import ApiError, invalid
from services.gateway.guides import GuideParts, guide_parts
from services.gateway.limits import MAX_CHOICES, MAX_STOP_CHARS, MAX_STOPS, THREAD_CHARS
from services.gateway.model import OPENAI_TEMPERATURE, Model
from services.gateway.requests import GenerateRequest, StreamOptions
from services.gateway.tools import CallRules
from shared.messages.gateway import Namespace, Submit
from shared.messages.worker import Sampling
from shared.packed import pack

T = TypeVar("T")

UNLIMITED = 0  # max_tokens in Submit: the scheduler knows whether context or device pool ends first
SEED_MASK = 2**63 - 1  # seeds are sent as non-negative 64-bit integers


@dataclass(frozen=True)
class Job:
    """One HTTP request. Choice i of the answer is choice i % n of prompt i // n."""

    id: str
    created: int  # s since 1970
    model: str
    prompts: list[list[int]]
    max_tokens: list[int]  # for each prompt; UNLIMITED = all that fit
    n: int
    sampling: Sampling  # of choice 0, without its guide
    guide: GuideParts
    calls: CallRules | None  # None = the answer is text and nothing else
    logprobs: int | None  # how many top log-probabilities are shown; None = no log-probabilities at all
    stops: list[str]
    stop_token_ids: list[int]
    namespace: Namespace
    priority: int
    stream: bool
    include_usage: bool
    continuous_usage: bool  # in every event, not only in the last
    return_token_ids: bool
    explain: bool

    @property
    def choices(self) -> int:
        """How many scheduler requests it takes."""
        return len(self.prompts) * self.n

    def submit(self, choice: int, request_id: str, timeout_s: float) -> Submit:
        """The message for one choice."""
        prompt, sample = divmod(choice, self.n)
        tokens = self.prompts[prompt]
        return Submit(
            request_id=request_id,
            tokens=pack(tokens),
            max_tokens=self.max_tokens[prompt],
            stop_token_ids=self.stop_token_ids,
            sampling=replace(self.sampling, choice=sample, guide=self.guide.guide(len(tokens))),
            namespace=self.namespace,
            priority=self.priority,
            timeout_s=timeout_s,
        )


def make_job(
    request: GenerateRequest,
    model: Model,
    prompts: list[list[int]],
    *,
    prefix: str,
    logprobs: int | None,
    max_tokens: int | None,
    grammar: str = "",
    calls: CallRules | None = None,
) -> Job:
    """Check a request against the model. `prefix` begins its id; `max_tokens` None = all that fit; `grammar` and
    `calls`: what the answer must and may look like.

    Raises ApiError 400 naming the parameter, 404 for another model.
    """
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options is only for streams: set stream to true or remove it", "stream_options")
    if len(prompts) * request.n > MAX_CHOICES:
        raise invalid(f"{len(prompts)} prompts x n={request.n} is more than {MAX_CHOICES} choices: send fewer", "n")
    stream_options = request.stream_options or StreamOptions()
    return Job(
        id=f"{prefix}-{secrets.token_hex(12)}",
        created=int(time.time()),
        model=model.name,
        prompts=prompts,
        max_tokens=[_room(len(prompt), max_tokens, model.context) for prompt in prompts],
        n=request.n,
        sampling=_sampling(request, model, logprobs or 0),
        guide=guide_parts(request, model, grammar),
        calls=calls,
        logprobs=logprobs,
        stops=_stops(request.stop),
        stop_token_ids=[] if request.ignore_eos else model.stop_token_ids,
        namespace=Namespace(tenant=request.cache_salt),
        priority=request.priority,
        stream=request.stream,
        include_usage=stream_options.include_usage,
        continuous_usage=stream_options.include_usage and stream_options.continuous_usage_stats,
        return_token_ids=request.return_token_ids,
        explain=request.kvtide_explain,
    )


def check_model(request: GenerateRequest, model: Model) -> None:
    """Raises ApiError 404 unless the request is for the served model."""
    if request.model != model.name:
        raise unknown_model(request.model, model.name)


def unknown_model(asked: str, served: str) -> ApiError:
    """404: this gateway serves one model."""
    message = f"the model {asked!r} does not exist: use {served!r}"
    return ApiError(404, message, param="model", code="model_not_found")


def check_tokens(tokens: Sequence[object], model: Model, param: str = "prompt") -> list[int]:
    """A text given as token ids. Raises ApiError 400 for what is no token of the model."""
    for token in tokens:
        if type(token) is not int or not 0 <= token < model.vocab_size:
            raise invalid(
                f"{token!r} in {param} is no token id: those are integers from 0 to {model.vocab_size - 1}", param
            )
    return list(tokens)  # type: ignore[arg-type]


async def tokenize(text: str, model: Model, add_special_tokens: bool) -> list[int]:
    """Token ids; a long text is tokenized in a thread so that other requests' streams go on."""
    return await offload(len(text), lambda: model.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


async def offload(size: int, work: Callable[[], T]) -> T:
    """Do `work` on a text of `size` characters where it doesn't hold up the event loop for long."""
    return work() if size < THREAD_CHARS else await asyncio.to_thread(work)


def _room(prompt: int, max_tokens: int | None, context: int) -> int:
    if not prompt:
        raise invalid("the prompt has no tokens: send some text", "prompt")
    if prompt >= context:
        raise invalid(
            f"the prompt has {prompt} tokens and the model's context is {context} tokens, answer included: shorten it",
            "prompt",
            "context_length_exceeded",
        )
    if max_tokens is None:
        return UNLIMITED
    if prompt + max_tokens > context:
        raise invalid(
            f"the prompt's {prompt} tokens and max_tokens={max_tokens} are {prompt + max_tokens} tokens, the model's "
            f"context is {context}: ask for at most {context - prompt}",
            "max_tokens",
            "context_length_exceeded",
        )
    return max_tokens


def _sampling(request: GenerateRequest, model: Model, logprobs: int) -> Sampling:
    def chosen(asked: T | None, default: T | None, otherwise: T) -> T:
        return next(value for value in (asked, default, otherwise) if value is not None)

    defaults = model.defaults
    seed = secrets.randbits(63) if request.seed is None else request.seed & SEED_MASK
    return Sampling(
        temperature=chosen(request.temperature, defaults.temperature, OPENAI_TEMPERATURE),
        top_p=chosen(request.top_p, defaults.top_p, 1.0),
        top_k=max(0, chosen(request.top_k, defaults.top_k, 0)),
        min_p=chosen(request.min_p, defaults.min_p, 0.0),
        seed=seed,
        choice=0,
        logprobs=logprobs,
    )


def _stops(stop: str | list[str]) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop
    if len(stops) > MAX_STOPS:
        raise invalid(f"{len(stops)} stop strings are more than {MAX_STOPS}: send fewer", "stop")
    for text in stops:
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise invalid(f"a stop string of {len(text)} characters: they have 1 to {MAX_STOP_CHARS}", "stop")
    return stops

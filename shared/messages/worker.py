"""Scheduler <-> GPU worker."""

from shared.geometry import PageGeometry
from shared.messages.common import Message
from shared.messages.storage import SegmentInfo


class WorkerHello(Message, tag=True):
    """Worker -> scheduler, first message; again when the scheduler is silent, and when a segment was lost."""

    identity: str  # unique among workers, kept over restarts
    rank: int  # TP rank
    geometry: PageGeometry  # of its pages
    model_fingerprint: bytes  # 32 bytes
    device_pages: int  # pages in the KV pool, page 0 included
    max_requests: int  # rows in req_to_token, row 0 excluded
    max_context: int  # tokens in a row of req_to_token
    max_steps: int  # RunStep commands that may be in flight
    credits: int  # other operations that may be in flight
    mapped: list[int]  # epochs of the segments that it can use: those of its MapSegments that it didn't lose since


class MapSegment(Message, tag=True):
    """Scheduler -> worker: map a storage's host pool."""

    op_id: int  # rises within the scheduler's epoch
    segment: SegmentInfo  # to map


class SegmentMapped(Message, tag=True):
    """Worker -> scheduler: ack of MapSegment."""

    op_id: int  # of the MapSegment
    rank: int  # TP rank
    session: int = 0  # of the page server; 0 = the segment is mapped


class DropSegment(Message, tag=True):
    """Scheduler -> worker: unmap a segment once no operation uses it."""

    op_id: int  # rises within the scheduler's epoch
    storage_id: str  # identity of the storage
    segment_epoch: int  # ns since 1970


class SegmentDropped(Message, tag=True):
    """Worker -> scheduler: ack of DropSegment."""

    op_id: int  # of the DropSegment
    rank: int  # TP rank


class Guide(Message):
    """What moves the choice of a token beside its logits: it depends on the request's tokens so far alone."""

    looks_from: int  # position of the first token that the choice depends on, tokens
    output_start: int  # position of the first output token, tokens
    presence_penalty: float  # logits; taken off each token that is in the output
    frequency_penalty: float  # logits; taken off a token for each time that it is in the output
    repetition_penalty: float  # factor; logits of tokens in prompt and output shrink by it; 1 = none
    biased_tokens: bytes  # packed int32 token ids
    biases: bytes  # float32 each, logits; added to those of `biased_tokens`
    grammar: str  # llguidance grammar (JSON or Lark) that the output follows; "" = none
    end_tokens: bytes  # packed int32 token ids that may follow where the grammar may end


class Sampling(Message):
    """How one token is chosen. The random number is a hash of (seed, choice, position)."""

    temperature: float  # 0 = greedy
    top_p: float  # 0..1
    top_k: int  # 0 = all
    min_p: float  # 0..1
    seed: int  # 64 bits
    choice: int  # index of the choice within its request
    logprobs: int  # number of top log-probabilities wanted, 0 = only the chosen token's
    guide: Guide | None = None  # penalties, biases and a grammar; None = the logits as they are


class StepItem(Message):
    """One request's part of a step."""

    row: int  # of req_to_token, 1-based
    start: int  # position of the first token to compute, tokens
    tokens: bytes  # packed int32; empty = one token, the one that the row sampled in the step before
    first_page: int  # index in the row's page list of the first page of `pages`
    pages: bytes  # packed int32 device pages that the row gets from `first_page` on
    sampling: Sampling | None  # None = no token is sampled (a chunk before the last)
    history: bytes = b""  # packed int32 tokens from the guide's `looks_from` up to `start`; empty without a guide
    request_id: str = ""  # of the Submit, for log lines


class RunStep(Message, tag=True):
    """Scheduler -> worker: one forward pass. Layer i waits for layer i of every load in `wait_for`."""

    op_id: int  # rises within the scheduler's epoch
    items: list[StepItem]  # one for each request of the step
    wait_for: list[int]  # op_ids of LoadPages
    after: int = 0  # op_id of the RunStep that this one builds on; who missed it or failed in it refuses; 0 = none


class Sampled(Message):
    """One sampled token."""

    row: int  # of req_to_token
    token: int  # token id
    logprob: float  # natural log, of the raw logits
    top_ids: bytes  # packed int32 token ids, best first
    top_logprobs: bytes  # float32 each, natural log


class StepDone(Message, tag=True):
    """Worker -> scheduler: ack of RunStep."""

    op_id: int  # of the RunStep
    rank: int  # TP rank
    sampled: list[Sampled]  # one for each item with sampling, in order
    compute_s: float  # seconds on the compute stream


class StepFailed(Message, tag=True):
    """Worker -> scheduler: the step ended without result. Its slots may hold anything."""

    op_id: int  # of the RunStep
    rank: int  # TP rank
    reason: str  # "load", "memory", "error", "order": the step in `after` was missed or failed, nothing was done
    failed_loads: list[int]  # op_ids of loads that failed


class WritePages(Message, tag=True):
    """Scheduler -> worker: copy device pages into host pages (write_backup)."""

    op_id: int  # rises within the scheduler's epoch
    storage_id: str  # identity of the storage
    segment_epoch: int  # ns since 1970
    device_pages: bytes  # packed int32
    host_pages: bytes  # packed int32, same length


class WriteDone(Message, tag=True):
    """Worker -> scheduler: the bytes are in host memory."""

    op_id: int  # of the WritePages
    rank: int  # TP rank
    checksums: bytes  # uint32 CRC32C each: pages x units
    seconds: float  # duration of the copy


class LoadPages(Message, tag=True):
    """Scheduler -> worker: copy host pages into device pages, layer by layer (load_back)."""

    op_id: int  # rises within the scheduler's epoch
    storage_id: str  # identity of the storage
    segment_epoch: int  # ns since 1970
    host_pages: bytes  # packed int32
    device_pages: bytes  # packed int32, same length
    digests: bytes  # 32 bytes a page


class LoadDone(Message, tag=True):
    """Worker -> scheduler: all layers are in and every checksum was right."""

    op_id: int  # of the LoadPages
    rank: int  # TP rank
    seconds: float  # duration of the copy

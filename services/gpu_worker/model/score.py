"""Teacher-forced scores: the oracle that says whether emitted tokens were right."""

import numpy as np
import numpy.typing as npt
import torch

from services.gpu_worker.kv_pool import KVPool
from services.gpu_worker.model.batch import ForwardBatch, Segment
from services.gpu_worker.model.llama import Llama

PAGE_SIZE = 64  # of the private pool; it changes nothing in the result
LOGITS_ROWS = 64  # logits at a time: 64 x 128k x 4 bytes is 32 MB, all positions at once may be gigabytes

Scores = npt.NDArray[np.float32]


@torch.inference_mode()
def score_tokens(model: Llama, ids: list[int], first: int) -> tuple[Scores, Scores]:
    """(gap, logprob), float32 [len(ids) - first] each, of the tokens from `first` on, in one cold prefill.

    For position p, under the prediction from tokens 0 .. p - 1: gap = highest logit - logit of ids[p] (0 for the
    greedy token); logprob = log-softmax of ids[p]. Raises ValueError unless 1 <= first <= len(ids).
    """
    if not 1 <= first <= len(ids):
        raise ValueError(f"first is {first}; with {len(ids)} tokens it must be in 1..{len(ids)}")
    hidden = _cold_prefill(model, ids)[first - 1 : -1]
    gaps, logprobs = [np.empty(0, np.float32)], [np.empty(0, np.float32)]
    targets = torch.tensor(ids[first:], dtype=torch.int64)
    for rows, wanted in zip(hidden.split(LOGITS_ROWS), targets.split(LOGITS_ROWS), strict=True):
        logits = model.logits(rows)
        chosen = logits.gather(1, wanted[:, None])[:, 0]
        gaps.append((logits.amax(1) - chosen).numpy())
        logprobs.append((chosen - logits.logsumexp(1)).numpy())
    return np.concatenate(gaps), np.concatenate(logprobs)


def _cold_prefill(model: Llama, ids: list[int]) -> torch.Tensor:
    tokens = len(ids)
    dtype = str(model.dtype).removeprefix("torch.")
    pages = -(-tokens // PAGE_SIZE)
    pool = KVPool(model.config.page_geometry(PAGE_SIZE, dtype), pages + 1)
    positions = torch.arange(tokens)
    segment = Segment(start=0, tokens=tokens, prefix_len=0, page_table=torch.arange(1, pages + 1))
    none = torch.empty(0, dtype=torch.int64)
    return model.hidden_states(ForwardBatch(torch.tensor(ids), positions, positions + PAGE_SIZE, [segment], none), pool)

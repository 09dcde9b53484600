"""Runs SGLang's side of `kvtide bench core`: sglang_jobs.py WHEEL PROMPTS

PROMPTS is a folder with one .npz per workload: `tokens` (int64, all prompts joined) and `lengths`. A job is a line of
JSON on stdin, ["function", workload, {arguments}]; the answer is a line with what it returns: its seconds first.
"""

import importlib
import json
import os
import sys
import warnings
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import sglang_imports

MODULES = {"s14": "sglang_tiers", "s23": "sglang_trees"}  # that have the jobs, by the name of the wheel's folder


def prompts(file: Path) -> list[Any]:
    """The prompts of a workload, as SGLang's scheduler has them: arrays of int64."""
    loaded = np.load(file)
    borders = np.cumsum(loaded["lengths"])[:-1]
    return [array("q", part.tobytes()) for part in np.split(loaded["tokens"], borders)]


def main() -> None:
    """Answer jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the imports print is no answer
    warnings.filterwarnings("ignore")
    wheel, folder = sys.argv[1:]
    sglang_imports.prepare(wheel)
    jobs = importlib.import_module(MODULES[Path(wheel).name])
    import torch

    torch.set_num_threads(1)
    known: dict[str, list[Any]] = {}
    print(json.dumps("ready"), file=answers, flush=True)
    for line in sys.stdin:
        function, workload, arguments = json.loads(line)
        if workload not in known:
            known[workload] = prompts(Path(folder) / f"{workload}.npz")
        answer = getattr(jobs, function)(known[workload], **arguments)
        print(json.dumps(answer), file=answers, flush=True)


main()

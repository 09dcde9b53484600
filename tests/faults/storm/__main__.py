"""`python -m tests.faults.storm --seconds 1800 --seed 1`: random traffic on the real stack under random faults.

At the end every request was answered or told to try again and then answered, every token that reached a client passes
the oracle, nothing hangs or stays locked, the integrity check is clean, memory and disk haven't grown.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import asdict

from kvtide.default_model import ensure_default_model
from kvtide.oracle_process import running_oracle
from tests.faults.storm.storm import storm


async def main() -> int:
    """0 when all is well."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.storm", description="Random faults, random traffic.")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long it storms (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of faults and traffic (default %(default)s)")
    parser.add_argument("--remote", action="store_true", help="the worker gets its host pages over the network")
    options = parser.parse_args()
    async with running_oracle(ensure_default_model()) as oracle:
        result = await storm(
            oracle, options.seconds, options.seed, options.remote, lambda line: print(line, flush=True)
        )
    for line in result.failures:
        print(f"FAILED {line}", flush=True)
    print(json.dumps({"test": "storm", **asdict(result)}))
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

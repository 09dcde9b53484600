"""`python -m kvtide.default_model` makes the default model's folder if need be and prints its path."""

import sys

from kvtide.default_model import ensure_default_model
from shared.errors import KvtideError


def main() -> int:
    """Print the folder on stdout, progress and errors on stderr; return the exit code."""
    try:
        print(ensure_default_model(lambda line: print(line, file=sys.stderr)))
    except KvtideError as error:
        print(f"kvtide: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

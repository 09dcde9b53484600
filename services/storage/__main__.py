"""Starts a storage service: `python -m services.storage --config FILE --identity storage-0`."""

import os
import sys
import threading

from services.storage.service import serve
from shared.service import run_service

if __name__ == "__main__":
    status = run_service("storage", serve)
    if threading.active_count() > 1:
        # A page read that hangs in its disk would keep the interpreter for ever; nothing is left to be saved.
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)

"""`python -m services.gateway`: see `shared.service` for the arguments."""

import sys

from services.gateway.server import serve
from shared.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("gateway", serve))

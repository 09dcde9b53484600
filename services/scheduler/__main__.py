"""python -m services.scheduler"""

import sys

from services.scheduler.service import serve
from shared.service import run_service

if __name__ == "__main__":
    sys.exit(run_service("scheduler", serve))

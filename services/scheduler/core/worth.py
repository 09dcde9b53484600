"""Is a copy worth it, or are its pages computed again? By length, and by measured speeds too (TIER-06, TIER-12)."""

from services.scheduler.core.ghosts import Fate
from services.scheduler.core.request import Request
from services.scheduler.core.settings import MAX_LOAD_FAILURES
from services.scheduler.core.state import State
from services.scheduler.core.tree import Match

TOO_SHORT_A_LOAD, TOO_SHORT_A_FETCH = (
    Fate("below_threshold", bound) for bound in ("load_back_threshold", "prefetch_threshold")
)
SLOW_LOAD, SLOW_FETCH, GAVE_UP = Fate("slower", "load_back"), Fate("slower", "prefetch"), Fate("failed", "load_back")


def load_refusal(state: State, request: Request, match: Match) -> Fate | None:
    """Why the host part of a request's path is not loaded; None = it is."""
    page_size, pages = state.settings.page_size, match.host_pages
    if not pages or pages * page_size < state.settings.load_back_threshold:
        return TOO_SHORT_A_LOAD
    if request.load_failures >= MAX_LOAD_FAILURES:
        return GAVE_UP
    missing = request.length - match.device_pages * page_size
    return SLOW_LOAD if _measures(state) and state.speeds.load_is_slower(pages, missing) else None


def is_long_enough(state: State, pages: int) -> bool:
    """Of pages that L3 has or may have."""
    return pages * state.settings.page_size >= max(1, state.settings.prefetch_threshold)


def fetch_refusal(state: State, pages: int, tokens: int) -> Fate | None:
    """Why `pages` pages that L3 has, of `tokens` tokens that host and device lack, are not fetched; None = they are."""
    if not is_long_enough(state, pages):
        return TOO_SHORT_A_FETCH
    return SLOW_FETCH if _measures(state) and state.speeds.fetch_is_slower(pages, tokens) else None


def _measures(state: State) -> bool:
    return state.settings.load_policy == "auto"

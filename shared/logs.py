"""Log lines: an event's name, then key=value pairs, as text or as one JSON object a line."""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, Literal

Format = Literal["text", "json"]

_KEY = re.compile(r"(?:^| )(\w+)=")
_INTEGER = re.compile(r"-?[0-9]{1,19}")
_DECIMAL = re.compile(r"-?[0-9]+\.[0-9]+(e[-+][0-9]+)?")


def set_up_logging(level: str, identity: str, style: Format = "text") -> None:
    """One line per event on stderr: time, level, process, logger, then the event."""
    handler = logging.StreamHandler(sys.stderr)
    if style == "json":
        handler.setFormatter(JsonFormatter(identity))
    else:
        handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {identity} %(name)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


class JsonFormatter(logging.Formatter):
    """{"time", "level", "process", "logger", "event"}, the line's own keys, and "exception" where there is one."""

    def __init__(self, identity: str) -> None:
        super().__init__()
        self._identity = identity

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        event, pairs = split_line(record.getMessage())
        line = pairs | {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._identity,
            "logger": record.name,
            "event": event,
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def split_line(text: str) -> tuple[str, dict[str, Any]]:
    """The event's name and its pairs. A value goes on to the next key: the last one may hold spaces."""
    keys = list(_KEY.finditer(text))
    ends = [*(key.start() for key in keys), len(text)][1:]
    pairs = {key[1]: _value(text[key.end() : end]) for key, end in zip(keys, ends, strict=True)}
    return text[: keys[0].start()] if keys else text, pairs


def _value(text: str) -> Any:
    if _INTEGER.fullmatch(text):
        return int(text)
    if _DECIMAL.fullmatch(text):
        return float(text)
    return None if text == "-" else text

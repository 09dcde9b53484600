"""Integer lists on the wire: little-endian int32, one after the other."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from shared.errors import ProtocolError

Ints = npt.NDArray[np.int32]
WIRE = np.dtype("<i4")


def pack(values: Iterable[int] | Ints) -> bytes:
    """Pack page ids or tokens as int32. Raises OverflowError for a value that doesn't fit."""
    if isinstance(values, np.ndarray) and values.dtype == WIRE:
        return values.tobytes()
    array = values if isinstance(values, np.ndarray) else np.array(list(values), dtype=np.int64)
    if array.size and (array.max() > 2**31 - 1 or array.min() < -(2**31)):
        raise OverflowError(f"{array.max()} does not fit in int32")
    return array.astype("<i4").tobytes()


def unpack(data: bytes) -> Ints:
    """The int32 array that `pack` made (read-only). Raises ProtocolError when the length is not a multiple of 4."""
    if len(data) % 4:
        raise ProtocolError(f"a packed int32 list can't have {len(data)} bytes")
    return np.frombuffer(data, dtype="<i4")

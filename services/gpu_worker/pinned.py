"""Host memory pinned for a GPU: without it, a copy isn't asynchronous and goes through the driver's own buffer."""

import torch

from services.gpu_worker.cuda_streams import cuda_device
from shared.errors import CapacityError
from shared.host_layout import Bytes

PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process


class Pinned:
    """Memory that stays pinned until `close`, which must come before it is unmapped."""

    def __init__(self, memory: Bytes) -> None:
        """memory: uint8, contiguous and writable, as a mapped segment is.

        Raises ConfigError without CUDA, CapacityError when the driver refuses.
        """
        cuda_device("cuda")
        self._address, self._cudart = memory.ctypes.data, torch.cuda.cudart()
        status = self._cudart.cudaHostRegister(self._address, memory.nbytes, PORTABLE)
        if status != self._cudart.cudaError.success:
            raise CapacityError(
                f"{memory.nbytes} bytes of host memory can't be pinned ({status}); make the host pool smaller"
            )
        self.tensor = torch.from_numpy(memory)  # the same memory; copies from and to it may be non_blocking

    def close(self) -> None:
        """Unpin it. No copy uses it any more."""
        if self._address:
            address, self._address = self._address, 0
            status = self._cudart.cudaHostUnregister(address)
            if status != self._cudart.cudaError.success:
                raise CapacityError(f"host memory can't be unpinned ({status}); end the process before it is unmapped")

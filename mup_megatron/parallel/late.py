"""Numbers and times of a device, read behind work that it was given since, so that it never waits for the host.

Public names: `Late`, `Stopwatch`. A CPU does what it is given at once, and there both are plain numbers.
"""

from __future__ import annotations

import time

import torch


class Late:
    """Scalars on their way to the host.

    Args:
        values: scalars of one device, in any floating type; numbers of the host may be among them.
    """

    def __init__(self, *values: torch.Tensor | float) -> None:
        device = next((value.device for value in values if torch.is_tensor(value)), torch.device("cpu"))
        found = torch.stack([_scalar(value, device) for value in values])
        self._arrived: torch.cuda.Event | None = None
        if found.is_cuda:
            # Behind later work a plain copy would wait for that too.
            self._values = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            self._values.copy_(found, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._values = found

    def read(self) -> list[float]:
        """Waits until the device has them, and for nothing that it was given since."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()


def _scalar(value: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """In float64. A kernel fills in a number of the host; to copy it from the host is to wait."""
    if torch.is_tensor(value):
        return value.detach().to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)


class Stopwatch:
    """Seconds that a device takes for what it is given between the making of this and `stop`.

    Args:
        device: this process's.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self._mark()

    def stop(self) -> None:
        """Behind the last work."""
        self._mark()

    def seconds(self) -> float:
        """Waits until the device is that far."""
        if not self._is_cuda:
            return self._times[1] - self._times[0]
        began, ended = self._events
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1000.0

    def _mark(self) -> None:
        if self._is_cuda:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._times.append(time.perf_counter())

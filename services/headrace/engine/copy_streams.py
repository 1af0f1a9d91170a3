"""Waiting for a device, and copies between its pool and the host that wait for no step.

On CUDA everybody's work goes into one stream by default: a block would be copied after the steps that were asked for
before it. So a thread that copies blocks has a stream of its own, and waits there for its own copies. Nothing else
orders the two, and nothing else need: a block is copied by whoever holds it, and changes hands when the step that
touched it has been waited for (`ModelRunner.run_step`); a step that reads what was copied is asked for afterwards.

On a CPU all of this is nothing: operators return when they are done.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class CopyStreams:
    """Of one pool: a stream for each thread that copies."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """What the calling thread copies inside is done at the end, also by an error. On a CUDA device, buffers that
        are made inside are for use inside."""
        if self._device.type != "cuda":
            yield
            return
        stream = getattr(self._own, "stream", None)
        if stream is None:
            stream = self._own.stream = torch.cuda.Stream(self._device)
            self._own.done = torch.cuda.Event(blocking=True)  # waits asleep: the step thread needs the core
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            self._own.done.record(stream)
            self._own.done.synchronize()


def finish_stream(device: torch.device) -> None:
    """Wait until the device has done what the calling thread asked it for, but for `copying`."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()

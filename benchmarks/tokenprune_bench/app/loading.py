# SPDX-License-Identifier: Apache-2.0
"""A model that is on its way, and the folder of a page's files: the page is there before the one, and takes the other
with it."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenprune.errors import TokenPruneError

if TYPE_CHECKING:
    from tokenprune_bench.profiling.model import Model


AT_REST = 10  # seconds that the end of a page waits for the model


class Loading:
    """A model that another thread loads. name: as `--model` takes it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()  # a model is patched for everybody: held while one works with it
        self._subject: Model | None = None
        self._over = threading.Event()

    @property
    def over(self) -> bool:
        """True once loading has ended, with a model or with an error."""
        return self._over.is_set()

    def give(self, subject: Model) -> None:
        """Hand the model to all who wait for it."""
        self._subject = subject
        self._over.set()

    def fail(self) -> None:
        """Tell all who wait that there will be none, and let nobody work with one that is there: a process that ends
        while a thread computes is aborted."""
        self._over.set()
        self.lock.acquire(timeout=AT_REST)

    def get(self) -> Model:
        """Return the model as soon as it is there; raises TokenPruneError where it could not be loaded."""
        self._over.wait()
        if self._subject is None:
            raise TokenPruneError(f"{self.name} could not be loaded: see what `tokenprune app` printed")
        return self._subject


@contextmanager
def own_folder() -> Iterator[Path]:
    """Have gradio keep all files of a page, dropped ones too, in a folder that goes with the process, also at
    SIGTERM. To be entered before gradio is imported."""
    before = os.environ.get("GRADIO_TEMP_DIR")
    main = threading.current_thread() is threading.main_thread()
    ended = signal.signal(signal.SIGTERM, _end) if main else None
    try:
        with tempfile.TemporaryDirectory(prefix="tokenprune-", ignore_cleanup_errors=True) as folder:
            os.environ["GRADIO_TEMP_DIR"] = folder
            yield Path(folder)
    finally:
        os.environ.pop("GRADIO_TEMP_DIR")
        if before is not None:
            os.environ["GRADIO_TEMP_DIR"] = before
        if main:
            signal.signal(signal.SIGTERM, ended)


def _end(*_: Any) -> None:
    raise SystemExit(0)

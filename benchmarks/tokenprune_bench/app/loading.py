# SPDX-License-Identifier: Apache-2.0
"""Model that loads in the background, and the temporary folder of a page. The page opens before the model is loaded."""

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


AT_REST = 10  # maximum wait for the model at exit, in seconds


class Loading:
    """A model that another thread loads. `name` is a value of `--model`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()  # held while a patched model is in use, because all visitors share it
        self._subject: Model | None = None
        self._over = threading.Event()

    @property
    def is_over(self) -> bool:
        """True once loading ended, with a model or an error."""
        return self._over.is_set()

    def set_model(self, subject: Model) -> None:
        """Provide the model to all waiting threads."""
        self._subject = subject
        self._over.set()

    def fail(self) -> None:
        """End waiting without a model, and block further use of the model.

        A process is aborted if it ends while a thread computes.
        """
        self._over.set()
        self.lock.acquire(timeout=AT_REST)

    def get(self) -> Model:
        """Wait for the model and return it.

        Raises:
            TokenPruneError: If the model could not be loaded.
        """
        self._over.wait()
        if self._subject is None:
            raise TokenPruneError(f"{self.name} could not be loaded. See the output of `tokenprune app`.")
        return self._subject


@contextmanager
def use_temp_folder() -> Iterator[Path]:
    """Store all files of gradio in a temporary folder, which is removed at exit, also at SIGTERM.

    Enter the context before importing gradio.
    """
    before = os.environ.get("GRADIO_TEMP_DIR")
    is_main = threading.current_thread() is threading.main_thread()
    ended = signal.signal(signal.SIGTERM, _end) if is_main else None
    try:
        with tempfile.TemporaryDirectory(prefix="tokenprune-", ignore_cleanup_errors=True) as folder:
            os.environ["GRADIO_TEMP_DIR"] = folder
            yield Path(folder)
    finally:
        os.environ.pop("GRADIO_TEMP_DIR")
        if before is not None:
            os.environ["GRADIO_TEMP_DIR"] = before
        if is_main:
            signal.signal(signal.SIGTERM, ended)


def _end(*_: Any) -> None:
    raise SystemExit(0)

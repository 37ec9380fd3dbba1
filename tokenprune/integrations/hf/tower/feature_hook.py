# SPDX-License-Identifier: Apache-2.0
"""Notice what a model's vision encoder returns: it tells images apart, and `generate` calls it before any forward."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

_thread = threading.local()


class FeatureRecorder:
    """Stands in for a model's `get_image_features` or `get_video_features`, and notes what it was given and returned.

    ahead: called with the arguments before anything is encoded; what it returns is handed to `note`, with the output.
    A class, not a closure, so that a deep copy of the model gets a recorder of its own.
    """

    def __init__(self, original: Callable, ahead: Callable, note: Callable[[Any, Any], None]) -> None:
        self.original, self.ahead, self.note = original, ahead, note
        # generate() reads the signature to know which of its arguments to hand over.
        self.__signature__ = inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Qwen3-VL's get_video_features calls get_image_features: only the outermost call tells what was encoded.
        nested, _thread.encoding = getattr(_thread, "encoding", False), True
        try:
            if not nested:
                arguments = self.__signature__.bind(*args, **kwargs).arguments
                told = self.ahead(arguments | arguments.get("kwargs", {}))
            output = self.original(*args, **kwargs)
        finally:
            _thread.encoding = nested
        if not nested:
            self.note(told, output)
        return output

    def adopt(self, output: Any, arguments: dict[str, Any]) -> Any:
        """Return `output`, which another model of the same weights made of `arguments`, noted like one of its own."""
        self.note(self.ahead(arguments), output)
        return output

# SPDX-License-Identifier: Apache-2.0
"""Notice what a model's vision encoder returns: it tells images apart, and `generate` calls it before any forward."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_thread = threading.local()
Encoder = Callable[[dict[str, Any]], Any]


class FeatureRecorder:
    """Stands in for a model's `get_image_features` or `get_video_features`: has `encode` answer, which is called with
    the arguments, and with what encodes them.

    A class, not a closure, so that a deep copy of the model gets a recorder of its own.
    """

    def __init__(self, original: Callable, encode: Callable[[dict[str, Any], Encoder], Any]) -> None:
        self.original, self.encode = original, encode
        # generate() reads the signature to know which of its arguments to hand over.
        self.__signature__ = inspect.signature(original)

    @torch.compiler.disable(reason="tokenprune notes what the tower encodes")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Qwen3-VL's get_video_features calls get_image_features: only the outermost call tells what was encoded.
        if getattr(_thread, "encoding", False):
            return self.original(*args, **kwargs)
        arguments = dict(zip(self.__signature__.parameters, args, strict=False)) | kwargs
        output = self.encode(arguments, partial(self._run, args, kwargs))
        # A cached output skips the wrapped encoder, so record its inputs here.
        note = getattr(self.original, "note", None)
        return output if note is None else note(output, args, kwargs)

    def _run(self, args: tuple, kwargs: dict[str, Any], changed: dict[str, Any]) -> Any:
        """Call the original, with some arguments `changed` that may have come by place or by name."""
        placed = [changed.get(name, value) for name, value in zip(self.__signature__.parameters, args, strict=False)]
        named = {name: changed.get(name, value) for name, value in kwargs.items()}
        _thread.encoding = True
        try:
            return self.original(*placed, **named)
        finally:
            _thread.encoding = False

    def adopt(self, output: Any, arguments: dict[str, Any]) -> Any:
        """Return `output`, which another model of the same weights made of `arguments`, noted like one of its own."""
        return self.encode(arguments, lambda changed: output)

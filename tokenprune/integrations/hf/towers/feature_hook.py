# SPDX-License-Identifier: Apache-2.0
"""Wrap a model's `get_image_features` and `get_video_features`, and record their inputs and outputs.

The encoder's output shows where each image ends, and `generate` encodes images before the first forward.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.call import Call
from tokenprune.integrations.hf.forward.part import Encode, Encoding, Part, select_moments
from tokenprune.integrations.hf.sequence.record import start_record
from tokenprune.integrations.shared.attachable import Attachable
from tokenprune.integrations.shared.eager import run_eagerly

MODALITIES = ("image", "video")
_thread = threading.local()


def copy_sizes_to_host(modality: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the encoder's arguments with image sizes on the host, so that later reads do not synchronise."""
    name = f"{modality}_grid_thw"
    sizes = arguments.get(name)
    return arguments if sizes is None else arguments | {name: torch.as_tensor(sizes, device="cpu")}


class FeatureRecorder:
    """Wrapper of `get_image_features` or `get_video_features` that passes each call to `encode`.

    A class instead of a closure, so that a deep copy of the model gets a separate recorder.

    Args:
        original: The wrapped function.
        encode: Called with the arguments by name and with a function that runs `original`.
    """

    def __init__(self, original: Callable, encode: Callable[[dict[str, Any], Encode], Any]) -> None:
        self.original, self.encode = original, encode
        # generate() reads the signature to select the arguments that it passes.
        self.__signature__ = inspect.signature(original)
        self._names = tuple(self.__signature__.parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_eagerly(self._answer, args, kwargs)

    def _answer(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        # Qwen3-VL's get_video_features calls get_image_features. Only the outermost call has the right modality.
        if getattr(_thread, "encoding", False):
            return self.original(*args, **kwargs)
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        output = self.encode(arguments, partial(self._run, args, kwargs))
        # A cached output skips the wrapped encoder, so record its inputs here.
        record = getattr(self.original, "record", None)
        return output if record is None else record(output, args, kwargs)

    def _run(self, args: tuple, kwargs: dict[str, Any], encoding: Encoding) -> Any:
        """Call the original with the arguments of `encoding`, each passed by position or by name as in the call."""
        changed = encoding.arguments
        positional = [changed.get(name, value) for name, value in zip(self._names, args, strict=False)]
        named = kwargs | {name: value for name, value in changed.items() if name in kwargs}
        _thread.encoding = True
        try:
            return self.original(*positional, **named)
        finally:
            _thread.encoding = False

    def adopt(self, output: Any, arguments: dict[str, Any]) -> Any:
        """Record `output` as the encoder's output for `arguments`, and return it, without running the encoder.

        A draft model calls it with the output of its target if both encoders have the same weights.
        """
        return self.encode(arguments, lambda encoding: output)


class EncoderHook(Attachable):
    """Wraps the functions that encode images and videos, lets parts act around them, and records their outputs.

    Args:
        adapter: Adapter of the model.
        parts: Parts of the patch.
        current: Returns the running `Call` of this thread.
        receive: Receives a call, a modality and the encoder's output.
        check: Raises if hooked modules were replaced. Only called outside of a forward, which checks itself.
        acts_on: Returns False for arguments that run as in the unpatched model.
    """

    def __init__(
        self, adapter: Adapter, parts: Sequence[Part], current: Callable[[], Call | None],
        receive: Callable[[Call, str, Any], None], check: Callable[[], None],
        acts_on: Callable[[dict[str, Any]], bool],
    ) -> None:  # fmt: skip
        super().__init__()
        self.adapter, self.current, self.receive, self.check = adapter, current, receive, check
        self.acts_on = acts_on
        self._around = select_moments(part.around_encode for part in parts)

    def _attach(self) -> None:
        base = self.adapter.base
        for modality in MODALITIES:
            name = f"get_{modality}_features"
            if getattr(base, name, None) is not None and modality in self.adapter.placeholders:
                self.wrap(base, name, partial(FeatureRecorder, encode=partial(self._encode, modality)))

    def _encode(self, modality: str, arguments: dict[str, Any], encode: Encode) -> Any:
        """Run `encode` inside the `around_encode` hooks of the parts, and record its output."""
        if not self.acts_on(arguments):
            return encode(Encoding(modality, arguments, arguments))
        if (call := self.current()) is None:
            self.check()
        else:
            modality = self.adapter.modality(modality, arguments, call.arguments)
        host_args = copy_sizes_to_host(modality, arguments)
        frames = self.adapter.video_frames(host_args) if modality == "video" else None
        if 0 in (frames or ()):
            raise UnsupportedSetupError("A video of this call has 0 frames. Pass its frames, or leave the video out.")
        for around in self._around:
            encode = partial(around, encode)
        output = encode(Encoding(modality, arguments, host_args))
        if hasattr(output, "pooler_output"):
            start_record(output, self.adapter.grids(modality, host_args), frames)
        if call is not None:
            self.receive(call, modality, output)
        return output

# SPDX-License-Identifier: Apache-2.0
"""Notice what a model's vision encoder returns: it tells images apart, and `generate` calls it before any forward."""

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
from tokenprune.integrations.hf.forward.part import Encode, Encoding, Part, acting
from tokenprune.integrations.hf.sequence.record import start_record
from tokenprune.integrations.shared.attachable import Attachable
from tokenprune.integrations.shared.eager import run_eagerly

MODALITIES = ("image", "video")
_thread = threading.local()


def shapes_on_host(modality: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Copy the sizes of images among the encoder's `arguments` to the host once, so that later reads do not wait."""
    name = f"{modality}_grid_thw"
    sizes = arguments.get(name)
    return arguments if sizes is None else arguments | {name: torch.as_tensor(sizes, device="cpu")}


class FeatureRecorder:
    """Stands in for a model's `get_image_features` or `get_video_features`: has `encode` answer, which is called with
    the arguments, and with what encodes them.

    A class, not a closure, so that a deep copy of the model gets a recorder of its own.
    """

    def __init__(self, original: Callable, encode: Callable[[dict[str, Any], Encode], Any]) -> None:
        self.original, self.encode = original, encode
        # generate() reads the signature to know which of its arguments to hand over.
        self.__signature__ = inspect.signature(original)
        self._names = tuple(self.__signature__.parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_eagerly(self._answer, args, kwargs)

    def _answer(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        # Qwen3-VL's get_video_features calls get_image_features: only the outermost call tells what was encoded.
        if getattr(_thread, "encoding", False):
            return self.original(*args, **kwargs)
        arguments = dict(zip(self._names, args, strict=False)) | kwargs
        output = self.encode(arguments, partial(self._run, args, kwargs))
        # A cached output skips the wrapped encoder, so record its inputs here.
        note = getattr(self.original, "record", None)
        return output if note is None else note(output, args, kwargs)

    def _run(self, args: tuple, kwargs: dict[str, Any], encoding: Encoding) -> Any:
        """Call the original with the arguments of `encoding`, which may have come by place or by name."""
        changed = encoding.arguments
        placed = [changed.get(name, value) for name, value in zip(self._names, args, strict=False)]
        named = kwargs | {name: value for name, value in changed.items() if name in kwargs}
        _thread.encoding = True
        try:
            return self.original(*placed, **named)
        finally:
            _thread.encoding = False

    def adopt(self, output: Any, arguments: dict[str, Any]) -> Any:
        """Return `output`, which another model of the same weights made of `arguments`, noted like one of its own."""
        return self.encode(arguments, lambda encoding: output)


class EncoderHook(Attachable):
    """Stands at the functions by which a model encodes images: parts act around them, and outputs get a record, since
    `generate` hands them to a later forward.

    parts: of the patch. current: returns the running `Call` of this thread. receive: gets a call, a modality and the
    output that belongs to them. check: raises where the model is not as it was patched; every call did so already.
    acts_on: returns False for arguments that run as in the unpatched model.
    """

    def __init__(
        self, adapter: Adapter, parts: Sequence[Part], current: Callable[[], Call | None],
        receive: Callable[[Call, str, Any], None], check: Callable[[], None],
        acts_on: Callable[[dict[str, Any]], bool],
    ) -> None:  # fmt: skip
        super().__init__()
        self.adapter, self.current, self.receive, self.check = adapter, current, receive, check
        self.acts_on = acts_on
        self._around = acting(part.around_encode for part in parts)

    def _attach(self) -> None:
        base = self.adapter.base
        for modality in MODALITIES:
            name = f"get_{modality}_features"
            if getattr(base, name, None) is not None and modality in self.adapter.placeholders:
                self.wrap(base, name, partial(FeatureRecorder, encode=partial(self._encode, modality)))

    def _encode(self, modality: str, arguments: dict[str, Any], encode: Encode) -> Any:
        """Return the output for `arguments`, which `encode` makes of them."""
        if not self.acts_on(arguments):
            return encode(Encoding(modality, arguments, arguments))
        if (call := self.current()) is None:
            self.check()
        else:
            modality = self.adapter.modality(modality, arguments, call.arguments)
        host_args = shapes_on_host(modality, arguments)
        frames = self.adapter.video_frames(host_args) if modality == "video" else None
        if 0 in (frames or ()):
            raise UnsupportedSetupError("A video of this call has no frames. Leave it out, or pass its frames.")
        for around in self._around:
            encode = partial(around, encode)
        output = encode(Encoding(modality, arguments, host_args))
        if hasattr(output, "pooler_output"):
            start_record(output, self.adapter.grids(modality, host_args), frames)
        if call is not None:
            self.receive(call, modality, output)
        return output

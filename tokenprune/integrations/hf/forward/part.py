# SPDX-License-Identifier: Apache-2.0
"""What the engine tells the parts of a patch that do more than cut tokens inside the decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tokenprune.integrations.shared.attachable import Attachable
from tokenprune.integrations.shared.eager import in_call

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.context import Call
    from tokenprune.integrations.hf.forward.plan import Step


class Part(Attachable):
    """Attached with the engine. `current`, set by it, returns the `Call` that this thread is in; a subclass overrides
    what it wants to know of."""

    current: Callable[[], Call | None]
    line = ""  # of `print(model)`, for a part of which the user should know
    reads_text = False  # whether it reads the ids of a prompt with images (`Call.host`)

    def hook_in_call(self, register: Callable[..., Any], function: Callable, **options: Any) -> None:
        """Register a hook like `hook`, of a function that does nothing where this thread is in no call."""
        self.hook(register, partial(in_call, self.current, function), eager=False, **options)

    def before_encode(self, modality: str, arguments: dict[str, Any]) -> None:
        """Images are about to be encoded; see `after_encode`."""

    def after_encode(self, modality: str, arguments: dict[str, Any], output: Any) -> None:
        """Images were encoded. What is to be known of them later is left on `output`: `generate` encodes images
        before any forward.

        modality: "image" or "video". arguments, output: of `get_image_features` or `get_video_features`.
        """

    def encoded(self, modality: str, output: Any) -> None:
        """Encoded images are handed to the model, whether they were encoded now (`after_encode`) or before."""

    def before_decoder(self, call: Call, kwargs: dict[str, Any]) -> None:
        """A decoder that is handed `kwargs` is entered; they may be changed. What is to be done in it is left in
        `call.state`; its segments and report are there if it brings images."""

    def at_least(self, call: Call, step: Step, arrived: Sequence[int], wanted: Sequence[int]) -> list[int]:
        """Return how many tokens of each segment `step` is to keep of those that `arrived`, where its budget asks for
        `wanted`: not less."""
        return list(wanted)

    def planned(self, call: Call) -> None:
        """All cuts of a call are planned: `call.plan` is there."""

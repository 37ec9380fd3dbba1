# SPDX-License-Identifier: Apache-2.0
"""Base of the parts of a patch: the engine calls each of them at named moments of a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from tokenprune.integrations.shared.attachable import Attachable
from tokenprune.integrations.shared.eager import in_call

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.context import Call
    from tokenprune.integrations.hf.forward.decoder_inputs import DecoderInputs
    from tokenprune.integrations.hf.forward.observed import Observed
    from tokenprune.integrations.hf.forward.plan import Step
    from tokenprune.statistics import Stats

# Moments of a call, named as the methods of `Part`, at which the engine asks those that act there alone.
MOMENTS = (
    "before_encode", "after_encode", "on_features", "skips", "before_decoder", "raise_budget", "on_plan",
    "before_cut", "after_cut", "on_layer", "after_call",
)  # fmt: skip
T = TypeVar("T")

# Encodes images, with some of the encoder's arguments changed.
Encode = Callable[[dict[str, Any]], Any]


class PerCall(WeakKeyDictionary["Call", T]):
    """The state that a part keeps of each call under way: it ends with the call. A copy, as one of the model has, is
    empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> PerCall[T]:
        return type(self)()


class Part(Attachable):
    """Base of everything in a patch beside the cuts themselves. A subclass overrides the moments that it needs, in the
    order in which a call reaches them here; each does nothing by default.

    current: returns the `Call` that this thread is in; the engine sets it before it attaches the part.
    reads_text: True if the part reads the ids of a prompt with images (`Call.host`).
    """

    current: Callable[[], Call | None]
    line = ""  # of `print(model)`, for a part that the user should know of
    reads_text = False

    def _attach(self) -> None:
        """Put further hooks on the model; none, where the moments below are enough."""

    def hook_in_call(self, register: Callable[..., Any], function: Callable, **options: Any) -> None:
        """Register a hook like `hook`, of a function that does nothing where this thread is in no call."""
        self.hook(register, partial(in_call, self.current, function), eager=False, **options)

    # -- encoding: `generate` encodes images before any call, so notes for later are left on the encoder's output

    def find_features(self, modality: str, arguments: dict[str, Any], host_args: dict[str, Any], encode: Encode) -> Any:
        """Return the encoder's output, from `encode` or from an earlier call. The model's encoder runs in `encode`.

        modality: "image" or "video". arguments: of `get_image_features` or `get_video_features`; host_args: the same,
        with the shapes of images on the host.
        """
        return encode({})

    def before_encode(self, modality: str, arguments: dict[str, Any]) -> None:
        """React before images are encoded; for the arguments see `after_encode`."""

    def after_encode(self, modality: str, arguments: dict[str, Any], output: Any) -> None:
        """React after images were encoded.

        modality: "image" or "video". arguments, output: of `get_image_features` or `get_video_features`.
        """

    def on_features(self, modality: str, output: Any) -> None:
        """React to features that the model receives, encoded now (`after_encode`) or in an earlier call."""

    # -- a call

    def skips(self, arguments: dict[str, Any]) -> bool:
        """Return True if a forward with `arguments` needs no `Call`: the part handles it by hooks of its own.
        torch.compile traces this method."""
        return False

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> DecoderInputs | None:
        """Return changed inputs of the decoder, or None for the same. Segments and report exist if the call has
        images."""
        return None

    def raise_budget(self, call: Call, step: Step, arrived: Sequence[int], wanted: Sequence[int]) -> list[int]:
        """Return the number of tokens of each segment that `step` keeps, at least the number that its budget wants.

        arrived: tokens of each segment that reach the step. wanted: the numbers of the budget.
        """
        return list(wanted)

    def on_plan(self, call: Call) -> None:
        """React to the plan of all cuts, `call.plan`."""

    def before_cut(self, call: Call, step: Step, observed: Observed, args: tuple, kwargs: dict[str, Any]) -> None:
        """Add to `observed` what the method of `step` may read, before it cuts inside the decoder, or would: called
        where `call` cuts nothing there too. args, kwargs: of the layer, for the tokens that arrive."""

    def after_cut(self, call: Call, layer: int, hidden: Any) -> None:
        """React after tokens left at the input of `layer`; `call` holds the state after it. For 0, the decoder's entry,
        this is called whether any left or not. hidden: `[B, W, D]`, in the call's layout."""

    def on_layer(self, call: Call, layer: int, args: tuple, kwargs: dict[str, Any]) -> None:
        """React to the final arguments of `layer`, which runs next and is the last before a step of the patch, or has
        one at its input."""

    def after_call(self, call: Call) -> None:
        """React to the end of the call, after an error too."""

    def add_stats(self, stats: Stats) -> None:
        """Add to the statistics that a user asks for."""


def acting(parts: Iterable[Part], moment: str) -> list[Part]:
    """Return the parts that act at a moment, named as the method of `Part`."""
    return [part for part in parts if getattr(type(part), moment) is not getattr(Part, moment)]

# SPDX-License-Identifier: Apache-2.0
"""Base of the parts of a patch: the engine calls each of them at named moments of a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from tokenprune.integrations.shared.attachable import Attachable
from tokenprune.integrations.shared.eager import run_in_call
from tokenprune.selection.observable import ObservedAt

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.call import Call, RestoreOutput
    from tokenprune.integrations.hf.forward.decoder_inputs import DecoderInputs
    from tokenprune.integrations.hf.forward.plan import Plan, Step
    from tokenprune.statistics import Stats

T = TypeVar("T")
# Values that a method may read at a cut inside the decoder, by the `ObservedAt` of their observables.
Observations = dict[ObservedAt, Any]


@dataclass(frozen=True)
class Encoding:
    """A call of the model's encoder.

    modality: "image" or "video". arguments: of `get_image_features` or `get_video_features`, by name. on_host: the
    same, with the shapes of images on the host.
    """

    modality: str
    arguments: dict[str, Any]
    on_host: dict[str, Any]


# Returns the encoder's output.
Encode = Callable[[Encoding], Any]


class PerCall(WeakKeyDictionary["Call", T]):
    """The state that a part keeps of each call under way: it ends with the call. A copy, as one of the model has, is
    empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> PerCall[T]:
        return type(self)()


class Part(Attachable):
    """Base of everything in a patch beside the cuts themselves. A subclass defines, as methods, the moments at which it
    acts; at all others it is None, and is not called.

    current: returns the `Call` that this thread is in; the engine sets it before it attaches the part.
    reads_text: True if the part reads the ids of a prompt with images (`PromptInfo.input_ids`).
    """

    current: Callable[[], Call | None]
    line = ""  # of `print(model)`, for a part that the user should know of
    reads_text = False

    # -- the moments, in the order in which a call reaches them

    # Returns the encoder's output; it calls `encode`, which runs the parts before it and then the encoder, or does
    # without. `generate` encodes images before any call, so notes for later are left on the output.
    around_encode: Callable[[Encode, Encoding], Any] | None = None
    # Called for a decoding step with a reduced static cache, which is no call. torch.compile traces this.
    on_static_step: Callable[[], None] | None = None
    # Returns changed arguments of the base model for a call with images, and a function that maps its output back to
    # the caller's rows; or None. One part of a patch may do so.
    before_call: Callable[[Call, dict[str, Any]], tuple[dict[str, Any], RestoreOutput] | None] | None = None
    # Returns changed inputs of the decoder, or None for the same. Segments and trace exist if the call has images.
    before_decoder: Callable[[Call, DecoderInputs], DecoderInputs | None] | None = None
    # Returns the plan of all cuts of a call with images, or another one: see `Plan.raised`.
    on_plan: Callable[[Call, Plan], Plan] | None = None
    # Adds to what the method of a step may read, before it cuts inside the decoder, or would: called where the call
    # cuts nothing there, too. Last the layer's arguments, for the tokens that arrive.
    before_cut: Callable[[Call, Step, Observations, tuple, dict[str, Any]], None] | None = None
    # Reacts after tokens left at the input of a layer; for 0, the decoder's entry, called whether any left or not. Last
    # the hidden states, `[B, W, D]`, in the call's layout.
    after_cut: Callable[[Call, int, Any], None] | None = None
    # Reacts to the final arguments of a layer, which runs next and is the last before a step, or has one at its input.
    on_layer: Callable[[Call, int, tuple, dict[str, Any]], None] | None = None
    # Adds to the statistics that a user asks for.
    add_stats: Callable[[Stats], None] | None = None

    def _attach(self) -> None:
        """Put further hooks on the model; none, where the moments are enough."""

    def hook_in_call(self, register: Callable[..., Any], function: Callable, **options: Any) -> None:
        """Register a hook like `hook`, of a function that does nothing where this thread is in no call."""
        self.hook(register, partial(run_in_call, self.current, function), eager=False, **options)


def acting(moments: Iterable[T | None]) -> list[T]:
    """Return the moments of parts that are not None."""
    return [moment for moment in moments if moment is not None]

# SPDX-License-Identifier: Apache-2.0
"""Base class of the parts of a patch. The engine calls each part at named moments of a forward."""

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
    from tokenprune.integrations.hf.forward.layer_inputs import DecoderInputs
    from tokenprune.integrations.hf.forward.plan import Plan, Step
    from tokenprune.statistics import Stats

T = TypeVar("T")
# Values that a method may read at a cut inside the decoder, by the `ObservedAt` of their observables.
Observations = dict[ObservedAt, Any]


@dataclass(frozen=True)
class Encoding:
    """A call of the model's encoder.

    Attributes:
        modality: "image" or "video".
        arguments: Keyword arguments of `get_image_features` or `get_video_features`.
        on_host: `arguments` with the shapes of images on the host.
    """

    modality: str
    arguments: dict[str, Any]
    on_host: dict[str, Any]


# Returns the encoder's output.
Encode = Callable[[Encoding], Any]


class PerCall(WeakKeyDictionary["Call", T]):
    """State of a part for each active call. It ends with the call. Copies (of a model) start empty."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def __deepcopy__(self, memo: dict[int, Any]) -> PerCall[T]:
        return type(self)()


class Part(Attachable):
    """Base class of everything in a patch except the cuts.

    A subclass defines a method for each moment that it uses. All other moments are None, and are not called.

    Attributes:
        current: Returns the active `Call` of this thread. The engine sets it before it attaches the part.
        line: Line for `print(model)`, or an empty string.
        reads_text: Whether the part reads the token ids of prompts with images (`PromptInfo.input_ids`).
    """

    current: Callable[[], Call | None]
    line = ""
    reads_text = False

    # -- the moments, in the order of a call

    # Returns the encoder's output. It calls `encode`, which runs earlier parts and the encoder, or replaces it.
    # `generate` encodes images before any call, so values for later moments are stored on the output.
    around_encode: Callable[[Encode, Encoding], Any] | None = None
    # Called for a decoding step with a reduced static cache, which starts no call. torch.compile traces it.
    on_static_step: Callable[[], None] | None = None
    # Called for calls with images. Returns None, or changed arguments of the base model and a function that maps its
    # output back to the caller's rows. Only one part of a patch may change them.
    before_call: Callable[[Call, dict[str, Any]], tuple[dict[str, Any], RestoreOutput] | None] | None = None
    # Returns changed inputs of the decoder, or None. Segments and trace exist if the call has images.
    before_decoder: Callable[[Call, DecoderInputs], DecoderInputs | None] | None = None
    # Returns the plan of a call with images, or a changed plan: see `Plan.with_floor`.
    on_plan: Callable[[Call, Plan], Plan] | None = None
    # Adds observations for the method of a step inside the decoder. Called also without a cut there. The last
    # two arguments are the layer's arguments.
    before_cut: Callable[[Call, Step, Observations, tuple, dict[str, Any]], None] | None = None
    # Called after a cut at the input of a layer, and always at the decoder's entry (layer 0). The last argument is the
    # hidden states, shape (batch, width, channels), in the call's layout.
    after_cut: Callable[[Call, int, Any], None] | None = None
    # Called with the final arguments of a layer that has a step at its input, or that is the last layer before a step.
    on_layer: Callable[[Call, int, tuple, dict[str, Any]], None] | None = None
    # Adds values to the statistics when the user reads them.
    add_stats: Callable[[Stats], None] | None = None

    def _attach(self) -> None:
        """Add further hooks to the model."""

    def hook_in_call(self, register: Callable[..., Any], function: Callable, **options: Any) -> None:
        """Register a hook that runs only while this thread has an active call."""
        self.hook(register, partial(run_in_call, self.current, function), eager=False, **options)


def select_moments(moments: Iterable[T | None]) -> list[T]:
    """Return the moments that are defined."""
    return [moment for moment in moments if moment is not None]

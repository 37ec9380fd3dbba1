# SPDX-License-Identifier: Apache-2.0
"""Pass the images of a prompt to the draft.

`generate` encodes images first, drops the pixels, and passes the features to an assistant. The assistant's `generate`
ignores them, because it treats its first forward as a later one, and the draft would read only placeholders. Therefore
the target records the arguments of its encoder, and the draft's first forward is marked as the first.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.generation import GenerationMixin
from transformers.utils import ModelOutput

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.drafting.checks import find_generator
from tokenprune.integrations.hf.engine.drafts import Drafts
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.integrations.hf.sequence.record import KEY
from tokenprune.integrations.hf.towers.attention_scores import BlockReader
from tokenprune.integrations.hf.towers.base import TowerPart
from tokenprune.integrations.hf.towers.feature_hook import FeatureRecorder
from tokenprune.integrations.shared.attachable import Attachable

_ARGUMENTS = "tokenprune_encoder_arguments"
_PIXELS = ("pixel_values", "image_patches")  # Fuyu uses image_patches
_ENCODERS = ("get_image_features", "get_video_features")


class _EncoderArguments(dict):
    """Arguments of an encoder, by name. Not copied when `generate` copies the inputs of an assistant."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _EncoderArguments:
        return self


class _RecordingEncoder:
    """Replaces a target's `get_image_features` or `get_video_features`, and stores the arguments on the output.

    It is a class and not a closure, so that `deepcopy(model)` copies it.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original, self.__signature__ = original, inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.record(self.original(*args, **kwargs), args, kwargs)

    def record(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Store the arguments of a call on its output, and return the output."""
        if isinstance(output, ModelOutput):
            arguments = dict(self.__signature__.bind(*args, **kwargs).arguments)
            output[_ARGUMENTS] = _EncoderArguments(arguments | arguments.pop("kwargs", {}))
        return output


class Target(Attachable):
    """Prepares a target model for its draft, for the lifetime of the draft.

    The encoder's arguments are recorded. Draft tokens are kept out of the prefill, where they would change the outputs
    of families with masks or experts for parts of a prompt.

    Args:
        model: The target.
        draft: The draft.

    Raises:
        UnsupportedSetupError: If this version of transformers drafts in an unknown way.
    """

    def __init__(self, model: nn.Module, draft: nn.Module) -> None:
        super().__init__()
        self.base, self.drafts = get_adapter(model).base, Drafts(model)
        self._draft = weakref.ref(draft)

    def _attach(self) -> None:
        self.attach_part(self.drafts)
        if self.drafts.unknown:
            raise UnsupportedSetupError(
                "This version of transformers drafts in an unknown way. Install a version that the README lists."
            )
        for name in _ENCODERS:
            if getattr(self.base, name, None) is not None:
                self.wrap(self.base, name, _RecordingEncoder)
        # Detach also if the draft is garbage collected without being unpatched.
        finalizer = weakref.finalize(self._draft(), self.detach)
        finalizer.atexit = False
        self.on_detach(finalizer.detach)


def needs_tower(part: Any) -> bool:
    """Return whether a part acts in or reads the vision tower, so that features of another tower are not enough."""
    return isinstance(part, (TowerPart, BlockReader))


class DraftImages(Attachable):
    """Makes the first forward of a draft in each assisted `generate` read the prompt with its images.

    Args:
        draft: The draft.
        shares: Whether the draft uses the features of the target's tower. Otherwise it encodes the images again.
    """

    def __init__(self, draft: nn.Module, shares: bool) -> None:
        super().__init__()
        self.adapter, self.draft, self.shares = get_adapter(draft), find_generator(draft), shares

    def _attach(self) -> None:
        for module in self.draft.modules():
            if isinstance(module, GenerationMixin):
                self.wrap(module, "prepare_inputs_for_generation", partial(_PrepareInputs, self))

    def prepare_first(self, input_ids: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `prepare_inputs_for_generation` for a first forward with images."""
        if kwargs.get("inputs_embeds") is not None:
            raise UnsupportedSetupError("A draft needs token ids. Pass input_ids instead of inputs_embeds.")
        kwargs = kwargs | {"is_first_iteration": True}
        if outputs := kwargs.get("mm_encoder_outputs"):
            kwargs["mm_encoder_outputs"] = {name: self._encode(name, output) for name, output in outputs.items()}
        elif not any(name.startswith(_PIXELS) for name, value in kwargs.items() if value is not None):
            masks = self.adapter.visual_mask(self.adapter.arguments(kwargs | {"input_ids": input_ids}))
            if any(bool(mask.any()) for mask in masks.values()):
                raise UnsupportedSetupError(
                    "A draft needs the full prompt, and this prompt came without its images. Pass all images again "
                    "without a cache, or leave out assistant_model=."
                )
        return kwargs

    def _encode(self, modality: str, output: Any) -> Any:
        """Return the draft's encoder output for the images or videos that the target encoded."""
        arguments = getattr(output, _ARGUMENTS, None)
        if arguments is None:
            raise UnsupportedSetupError(
                "A draft needs the pixels of the prompt. Pass pixels instead of mm_encoder_outputs, to the model that "
                "the assistant was made for."
            )
        encode = getattr(self.adapter.base, f"get_{modality}_features")
        if not self.shares:
            return encode(**{name: self._move(value) for name, value in arguments.items()})
        copy = type(output)(**{name: value for name, value in output.items() if name not in (KEY, _ARGUMENTS)})
        return encode.adopt(copy, arguments) if isinstance(encode, FeatureRecorder) else copy

    def _move(self, value: Any) -> Any:
        """Move an argument of the target's encoder to the draft's device and dtype."""
        if not isinstance(value, Tensor):
            return value
        return value.to(self.draft.device, self.draft.dtype if value.is_floating_point() else None)


class _PrepareInputs:
    """Replaces a draft's `prepare_inputs_for_generation`."""

    def __init__(self, images: DraftImages, original: Callable[..., Any]) -> None:
        self.images, self.original = images, original
        # generate() inspects the signature for the arguments of the model.
        self.__signature__ = inspect.signature(original)

    def __call__(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = compat.get_cache(kwargs)
        # Only an assistant has an empty cache in a forward that is not marked as the first.
        if cache is not None and not kwargs.get("is_first_iteration") and cache.get_seq_length() == 0:
            kwargs = self.images.prepare_first(input_ids, kwargs)
        return self.original(input_ids, *args, **kwargs)

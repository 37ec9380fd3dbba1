# SPDX-License-Identifier: Apache-2.0
"""Let a draft see the images of a prompt.

`generate` encodes images first, drops the pixels, and hands an assistant the features; the assistant's own `generate`
then leaves these out, since it takes its first forward for a later one. A draft would read bare placeholders. So the
target notes what its images were encoded from, and the draft's first forward is made a first one.
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
from tokenprune.integrations.hf.drafting.checks import writer
from tokenprune.integrations.hf.engine.drafts import Drafts
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.integrations.hf.sequence.record import KEY
from tokenprune.integrations.hf.towers.attention_scores import BlockReader
from tokenprune.integrations.hf.towers.base import TowerPart
from tokenprune.integrations.hf.towers.feature_hook import FeatureRecorder
from tokenprune.integrations.shared.attachable import Attachable

_GIVEN = "tokenprune_given"
_PIXELS = ("pixel_values", "image_patches")  # Fuyu's are patches
_ENCODERS = ("get_image_features", "get_video_features")


class _Given(dict):
    """The arguments that images were encoded from, by name. It is never copied: `generate` copies what it hands to an
    assistant."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Given:
        return self


class _NotingEncoder:
    """Stands in for a target's `get_image_features` or `get_video_features`, and leaves the arguments on the output.

    A class, not a closure, so that a deep copy of the model gets one of its own.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original, self.__signature__ = original, inspect.signature(original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.note(self.original(*args, **kwargs), args, kwargs)

    def note(self, output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return an output of the encoder, wherever it came from, with the arguments that it answers."""
        if isinstance(output, ModelOutput):
            arguments = dict(self.__signature__.bind(*args, **kwargs).arguments)
            output[_GIVEN] = _Given(arguments | arguments.pop("kwargs", {}))
        return output


class Target(Attachable):
    """Prepares `model` to be helped by `draft`, for as long as there is the draft: what its images were encoded from
    stays known, and nothing drafted stands behind a prompt that is read, which in families with masks or experts for
    parts of a prompt would change what the model makes of it.

    Raises UnsupportedSetupError where this version of transformers makes drafts elsewhere.
    """

    def __init__(self, model: nn.Module, draft: nn.Module) -> None:
        super().__init__()
        self.base, self.drafts = get_adapter(model).base, Drafts(model)
        self._draft = weakref.ref(draft)

    def _attach(self) -> None:
        self.attach_part(self.drafts)
        if self.drafts.unknown:
            raise UnsupportedSetupError(
                "this version of transformers makes drafts in a way that is not known: use one that the README names"
            )
        for name in _ENCODERS:
            if getattr(self.base, name, None) is not None:
                self.wrap(self.base, name, _NotingEncoder)
        # A draft that is dropped, not unpatched, leaves nothing after either.
        dropped = weakref.finalize(self._draft(), self.detach)
        dropped.atexit = False
        self.on_detach(dropped.detach)


def needs_tower(part: Any) -> bool:
    """Return whether a part of a patch acts in the vision tower, or reads it: features that another tower made are
    then not enough."""
    return isinstance(part, (TowerPart, BlockReader))


class DraftImages(Attachable):
    """Makes the first forward of `draft` in each assisted `generate` one that reads the prompt with its images.

    shares: whether what the target's tower made is what the draft's tower would make; else the draft encodes the images
    itself.
    """

    def __init__(self, draft: nn.Module, shares: bool) -> None:
        super().__init__()
        self.adapter, self.draft, self.shares = get_adapter(draft), writer(draft), shares

    def _attach(self) -> None:
        for module in self.draft.modules():
            if isinstance(module, GenerationMixin):
                self.wrap(module, "prepare_inputs_for_generation", partial(_FirstInputs, self))

    def first(self, input_ids: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return `kwargs` of `prepare_inputs_for_generation` as those of a first forward that has the images."""
        if kwargs.get("inputs_embeds") is not None:
            raise UnsupportedSetupError("a draft reads the ids of a prompt: pass input_ids, not inputs_embeds")
        kwargs = kwargs | {"is_first_iteration": True}
        if ahead := kwargs.get("mm_encoder_outputs"):
            kwargs["mm_encoder_outputs"] = {name: self._encoded(name, output) for name, output in ahead.items()}
        elif not any(name.startswith(_PIXELS) for name, value in kwargs.items() if value is not None):
            masks = self.adapter.visual_mask(self.adapter.arguments(kwargs | {"input_ids": input_ids}))
            if any(bool(mask.any()) for mask in masks.values()):
                raise UnsupportedSetupError(
                    "a draft reads the whole prompt, and this one came without its images: pass all of them again, "
                    "and leave out the cache of earlier turns, or leave out assistant_model="
                )
        return kwargs

    def _encoded(self, modality: str, output: Any) -> Any:
        """Return the images or videos that the target encoded, as the draft's own encoder would give them."""
        given = getattr(output, _GIVEN, None)
        if given is None:
            raise UnsupportedSetupError(
                "a draft needs the pixels of a prompt: pass these, not mm_encoder_outputs, and make the assistant for "
                "the very model whose generate() it helps"
            )
        encode = getattr(self.adapter.base, f"get_{modality}_features")
        if not self.shares:
            return encode(**{name: self._moved(value) for name, value in given.items()})
        own = type(output)(**{name: value for name, value in output.items() if name not in (KEY, _GIVEN)})
        return encode.adopt(own, given) if isinstance(encode, FeatureRecorder) else own

    def _moved(self, value: Any) -> Any:
        """Return an argument of the target's encoder on the draft's device, and in its number format."""
        if not isinstance(value, Tensor):
            return value
        return value.to(self.draft.device, self.draft.dtype if value.is_floating_point() else None)


class _FirstInputs:
    """Stands in for a draft's `prepare_inputs_for_generation`."""

    def __init__(self, images: DraftImages, original: Callable[..., Any]) -> None:
        self.images, self.original = images, original
        # generate() reads the signature to know which arguments a model takes.
        self.__signature__ = inspect.signature(original)

    def __call__(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = compat.get_cache(kwargs)
        # Only an assistant is handed a first forward as a later one.
        if cache is not None and not kwargs.get("is_first_iteration") and cache.get_seq_length() == 0:
            kwargs = self.images.first(input_ids, kwargs)
        return self.original(input_ids, *args, **kwargs)

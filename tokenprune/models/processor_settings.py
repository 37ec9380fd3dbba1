# SPDX-License-Identifier: Apache-2.0
"""Settings of image processors, as a call of the processor uses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenprune.errors import OptionError


@dataclass(frozen=True)
class SettingsReader:
    """Reads settings as a processor call would: first the call's keyword arguments, then the image processor.

    Args:
        processor: A processor or image processor.
        overrides: Keyword arguments of the call.
    """

    processor: Any
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def image(self) -> Any:
        return get_image_processor(self.processor)

    def __call__(self, name: str) -> Any:
        value = self.overrides.get(name)
        return getattr(self.image, name, None) if value is None else value

    def size(self, name: str = "size") -> dict[str, int]:
        value = self(name) or {}
        if isinstance(value, (int, list, tuple)):
            from transformers.image_processing_utils import get_size_dict

            square = name == "crop_size" or bool(self("default_to_square"))
            value = get_size_dict(value, default_to_square=square, param_name=name)
        return {edge: length for edge, length in dict(value).items() if length}

    def get_processor_setting(self, name: str) -> Any:
        """Return a setting that only a full processor has. Raises OptionError for an image processor."""
        value = getattr(self.processor, name, None)
        if value is None:
            raise OptionError(
                f"{type(self.processor).__name__} has no setting {name}. Pass the model's processor, "
                "not its image processor."
            )
        return value


def get_image_processor(processor: Any) -> Any:
    """Return the image processor of a processor, or the argument itself."""
    return getattr(processor, "image_processor", processor)

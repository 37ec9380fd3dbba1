# SPDX-License-Identifier: Apache-2.0
"""Record at which size JPEG files are decoded."""

from __future__ import annotations

from typing import Any

import pytest
from PIL.JpegImagePlugin import JpegImageFile


def record_decodes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(width, height) of each decode, from here on."""
    sizes: list[tuple[int, int]] = []
    load = JpegImageFile.load

    def record(image: Any) -> Any:
        if image.tile:  # not decoded yet
            sizes.append(image.size)
        return load(image)

    monkeypatch.setattr(JpegImageFile, "load", record)
    return sizes

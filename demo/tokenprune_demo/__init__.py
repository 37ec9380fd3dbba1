# SPDX-License-Identifier: Apache-2.0
"""Models of a few million parameters, questions that they were not trained on, and drawn images and videos."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"

_HERE = Path(__file__).resolve().parent
MODELS = {name: _HERE / "models" / name for name in ("demo_vlm", "demo_qwen")}

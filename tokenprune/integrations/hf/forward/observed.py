# SPDX-License-Identifier: Apache-2.0
"""The observations of one cut inside the decoder."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tokenprune.integrations.hf.sequence.layout import Layout
from tokenprune.kernels.observation import Observation
from tokenprune.selection.segments import LayerInput


@dataclass
class Observed:
    """Everything that a method may read of the layers around its cut, as far as it asks for it.

    before: attention in the layer before the cut. after: in the layer after it, as it would be if nothing was cut.
    unrotated: what the layer before would attend to without rotation; input_before: what it was called with. entry:
    `[B, W, D]`, what entered the decoder, and the layout of its slots. recorded: of each observable with a place of its
    own, the value of each module, None where it did not run.
    """

    before: Observation | None = None
    after: Observation | None = None
    unrotated: Observation | None = None
    input_before: LayerInput | None = None
    entry: tuple[Tensor, Layout] | None = None
    recorded: dict[str, list[Any]] = field(default_factory=dict)

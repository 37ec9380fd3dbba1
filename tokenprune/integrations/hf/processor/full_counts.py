# SPDX-License-Identifier: Apache-2.0
"""Tell how many visual tokens a prompt would have had without the method that acted on its pixels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenprune.integrations.hf.forward.part import Part

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.context import Call
    from tokenprune.integrations.hf.forward.decoder_inputs import DecoderInputs


class FullCounts(Part):
    """Puts what methods on pixels know of a prompt into its statistics. patches: those that have `counts`."""

    def __init__(self, patches: Sequence[Any]) -> None:
        super().__init__()
        self.patches = patches

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        if not call.has_images:
            return
        rows = [0] * (max(call.held.segments.row) + 1)
        for row, count in zip(call.held.segments.row, call.held.segments.counts, strict=True):
            rows[row] += count
        for patch in self.patches:
            call.report.stats.visual_tokens_full = patch.counts.full(rows)

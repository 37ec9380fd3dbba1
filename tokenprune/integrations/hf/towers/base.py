# SPDX-License-Identifier: Apache-2.0
"""Base of the parts that reduce tokens in vision towers: from the tower's output to the decoder's entry.

The tower returns a feature for each patch, as always; the patches of a merged token share one feature. The groups are
attached to the tower's output, because `generate` encodes images before any forward. At the decoder's entry the first
visual token of each group is kept.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from tokenprune.budgets import Budget
from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.call import Call
from tokenprune.integrations.hf.forward.layer_inputs import DecoderInputs
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.hf.forward.plan import Step
from tokenprune.integrations.hf.sequence.record import get_record, open_record
from tokenprune.integrations.hf.towers.merge_map import keep_one_per_group, keep_units
from tokenprune.integrations.shared.towers.reducer import TowerReducer
from tokenprune.selection.method import Selection
from tokenprune.selection.sites.encoder import TowerMethod


class ThreadKey:
    """Key of a thread's facts about images that their tower does not get."""


class TowerPart(Part):
    """Base of the parts that reduce visual tokens in a vision tower.

    A subclass owns a reducer and records in the tower's output (`EncoderRecord`) the groups of merged features, or the
    kept ones. At the decoder's entry one token of each group is kept.

    Attributes:
        step: The step in which the engine reports the cut.
        modalities: The modalities that the tower reduces.
        merges: Whether tokens are merged; if not, they are dropped.
        leaves: The field of the record that the cut reads.
        reads_processor: Whether the part reads the processor given to `patch`.
        reducer: The reducer of the tower's blocks.
    """

    modalities: tuple[str, ...] = ("image", "video")
    merges = True
    leaves: Literal["groups", "kept"] = "groups"
    reads_processor = False
    reducer: TowerReducer

    def __init__(self, adapter: Adapter, method: Any, budget: Budget) -> None:
        super().__init__()
        self.adapter, self.method, self.budget, self.step = adapter, method, budget, Step(method, budget)

    def leave_tokens(
        self, output: Any, block_tokens: list[int], owners: Tensor | list[Tensor] | None = None,
        kept: list[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Record in a tower's output where its tokens went; see `EncoderRecord`."""
        record = open_record(output)
        record.block_tokens, record.owners, record.kept = block_tokens, owners, kept

    def leave_groups(self, output: Any, groups: list[Tensor] | None) -> None:
        """Record in an encoder's output the groups of merged features; see `EncoderRecord`."""
        open_record(output).groups = groups

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        if not call.has_images:
            return
        left: dict[str, list[Tensor]] = {}
        counts = []  # tokens that entered each block of the tower
        for modality, output in call.outputs.items():
            record = get_record(output)
            counts.append(record.block_tokens)
            if modality not in self.modalities:
                continue
            if (of_images := getattr(record, self.leaves)) is None:
                raise UnsupportedSetupError(
                    f"{self.method.name}: these {modality} features were not encoded by the patched model. Pass pixels."
                )
            left[modality] = of_images
        selection = self._select(call, inputs.embeds.device, left) if left else None
        call.trace.stats.encoder_tokens_per_layer = [sum(block) for block in zip(*filter(None, counts), strict=True)]
        if selection is not None:
            call.merged = self.step, selection

    def _select(self, call: Call, device: torch.device, left: dict[str, list[Tensor]]) -> Selection | None:
        """Return the selection of a call's visual tokens, or None if all are kept.

        Args:
            call: The call.
            device: Device of the selection.
            left: For each modality, the recorded field that `leaves` names.
        """
        if self.leaves == "groups":
            return keep_one_per_group(
                call.state.segments.to(device), call.prompt.placeholders, left, merges=self.merges
            )
        return (
            keep_units(call.state.segments.to(device), call.prompt.placeholders, left) if self.method.removes else None
        )


def check_bias(method: TowerMethod, config: Any, uneven: bool) -> None:
    """Raise UnsupportedSetupError if the method needs an attention bias that the configured attention cannot take.

    Args:
        method: The method.
        config: Config of the tower's attention.
        uneven: Whether rows may keep different numbers of tokens, and are then padded.
    """
    attention = config._attn_implementation or "eager"
    if attention in ("eager", "sdpa") or not (method.proportional or uneven):
        return
    why = "the padding of images that are left with fewer tokens" if uneven else "proportional attention"
    way_out = "" if uneven else ", or pass proportional=False"
    raise UnsupportedSetupError(
        f"{method.name}: attention {attention!r} of the vision tower takes no bias, which {why} needs. Load "
        f'the model with attn_implementation={{"vision_config": "sdpa", ...}}{way_out}.'
    )


def not_traced(method: TowerMethod, adapter: Adapter, modality: str) -> UnsupportedSetupError:
    """Return the error for features that cannot be matched to tokens of the tower."""
    return UnsupportedSetupError(
        f"{method.name}: the {modality} features of {adapter.config.model_type!r} cannot be traced to "
        "patches. Leave them out of the prompt, or use a method that acts after the tower."
    )

# SPDX-License-Identifier: Apache-2.0
"""The base of all merging inside vision towers: the way of the merged tokens from the tower to the decoder.

The tower returns a feature for each patch, as always; the patches of a merged token have the same one. The groups
travel with the tower's output, since `generate` encodes images before any forward. At the decoder's entry the first
visual token of each group is kept.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from tokenprune.budgets import Budget
from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.context import Call
from tokenprune.integrations.hf.forward.decoder_inputs import DecoderInputs
from tokenprune.integrations.hf.forward.part import Encode, Encoding, Part
from tokenprune.integrations.hf.forward.plan import Merged, Step
from tokenprune.integrations.hf.sequence.record import open_record, record_of
from tokenprune.integrations.hf.towers.merge_map import keep_one_per_group
from tokenprune.selection.method import Selection


class InTower(Part):
    """Base of the parts that act in a vision tower, or ahead of it, so that fewer visual tokens come out of it.

    step: what the engine reports the cut as.
    """

    adapter: Adapter
    method: Any
    budget: Budget
    step: Step

    def belong(self, adapter: Adapter, method: Any, budget: Budget) -> None:
        """Note the model that the part is for, and what it carries out."""
        self.adapter, self.method, self.budget, self.step = adapter, method, budget, Step(method, budget)


class ThreadKey:
    """Under which a thread keeps what a part found out about images before their tower runs."""


class GroupedTokens(InTower):
    """Base of those that leave in the `EncoderRecord` which features are one; of each group one token is kept at the
    decoder's entry.

    modalities: of which the tower changes anything. merges: whether tokens joined others; if not, they were dropped.
    leaves: the field of the record that tells what is left.
    """

    modalities: tuple[str, ...] = ("image", "video")
    merges = True
    leaves: Literal["groups", "kept"] = "groups"

    def leave_tokens(
        self, output: Any, block_tokens: list[int], owners: Tensor | list[Tensor] | None = None,
        kept: list[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Write to a tower's output what became of its tokens; see `EncoderRecord`."""
        record = open_record(output)
        record.block_tokens, record.owners, record.kept = block_tokens, owners, kept

    def leave_groups(self, output: Any, groups: list[Tensor] | None) -> None:
        """Write to an encoder's output which features are one, see `EncoderRecord`."""
        open_record(output).groups = groups

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        if not call.has_images:
            return
        left: dict[str, list[Tensor]] = {}
        counts = []  # tokens that entered each block of the tower
        for modality, output in call.outputs.items():
            record = record_of(output)
            counts.append(record.block_tokens)
            if modality not in self.modalities:
                continue
            if (of_images := getattr(record, self.leaves)) is None:
                raise UnsupportedSetupError(
                    f"{self.method.name}: these {modality} features were not encoded by the patched model. Pass pixels."
                )
            left[modality] = of_images
        selection = self.select(call, inputs.embeds.device, left) if left else None
        call.report.stats.encoder_tokens_per_layer = [sum(block) for block in zip(*filter(None, counts), strict=True)]
        if selection is not None:
            call.merged = Merged(self.step, selection)

    def select(self, call: Call, device: torch.device, left: dict[str, list[Tensor]]) -> Selection | None:
        """Return which of a call's visual tokens stay, on `device`; None where all do. left: of each modality what
        `leaves` names."""
        return keep_one_per_group(call.held.segments.to(device), call.host.masks, left, merges=self.merges)


class TowerPatch(GroupedTokens):
    """Base of all merging inside a tower: it brings the provenance of merged tokens to the decoder's entry.

    As the tower ends, a subclass calls `leave_tokens` with the owner of each token. After the tower, `groups_of`
    returns which features are one. Both are kept in the `EncoderRecord` of the output.

    traced: modalities whose features can be traced to tokens of the tower; others are refused before the tower runs.
    """

    traced: tuple[str, ...] = ("image", "video")

    @property
    def uneven(self) -> bool:
        """True if some rows may be left with fewer tokens than others, and are then padded."""
        return self.method.ragged

    def check_bias(self, config: Any) -> None:
        """Raise UnsupportedSetupError if the attention named by `config` takes no bias and the method needs one."""
        attention = config._attn_implementation or "eager"
        if attention in ("eager", "sdpa") or not (self.method.proportional or self.uneven):
            return
        why = "the padding of images that are left with fewer tokens" if self.uneven else "proportional attention"
        way_out = "" if self.uneven else ", or pass proportional=False"
        raise UnsupportedSetupError(
            f"{self.method.name}: attention {attention!r} of the vision tower takes no bias, which {why} needs. Load "
            f'the model with attn_implementation={{"vision_config": "sdpa", ...}}{way_out}'
        )

    def around_encode(self, encode: Encode, encoding: Encoding) -> Any:
        if encoding.modality not in self.traced:
            raise self.not_traced(encoding.modality)
        output = encode(encoding)
        self.leave_groups(output, self.groups_of(encoding.modality, encoding.on_host, output))
        return output

    def not_traced(self, modality: str) -> UnsupportedSetupError:
        """Return the error for features that cannot be traced to tokens of the tower."""
        return UnsupportedSetupError(
            f"{self.method.name}: the {modality} features of {self.adapter.config.model_type!r} cannot be traced to "
            "patches. Leave them out of the prompt, or use a method that acts after the tower."
        )

    def groups_of(self, modality: str, arguments: dict[str, Any], output: Any) -> list[Tensor] | None:
        """Return the groups of an `EncoderRecord`, of the output of an `Encoding` with `arguments` on the host; None
        where the tower did not leave its tokens."""
        raise NotImplementedError

# SPDX-License-Identifier: Apache-2.0
"""Worker: drop units of patches ahead of the first block of towers that pack the patches of all images into one
sequence. The front end chose the units by their pixels; see front/units.py.

All patches are embedded, and the places of the full grid computed; then the tower goes on with those of the kept units.
What attends to itself (an image, a frame, a window) shrinks to what is left of it. The tower's result gets back the
length that the model cuts it by, with zeros at dropped units. Everything is attached for one call only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.shared.attachable import Attachable
from tokenprune.integrations.vllm.setting.plan import Plan

# Entries of a tower's metadata with a row for each patch.
_OF_PATCHES = ("pos_embeds", "rotary_pos_emb_cos", "rotary_pos_emb_sin")
# Borders of what attends to itself, and the length of the longest, under the names that towers give them.
_BORDERS = {"cu_seqlens": ("max_seqlen", "max_seqlen_full"), "cu_window_seqlens": ("max_seqlen_window",)}


def dropping(plan: Plan) -> bool:
    return plan.kept is not None and plan.reduces


class UnitRestriction(Attachable):
    """Restricts `tower` to the kept units between `attach` and `detach`.

    plans: of the items of one call, in the order in which their patches stand in the tower's sequence.
    """

    def __init__(self, tower: Any, plans: Sequence[Plan]) -> None:
        super().__init__()
        self.tower = tower
        self.unit: int = tower.spatial_merge_size**2  # patches that become one visual token
        whole = (torch.ones(sum(plan.counts), dtype=torch.bool, device="cpu") for plan in plans)
        kept = [every if plan.kept is None else plan.mask for plan, every in zip(plans, whole, strict=True)]
        self.kept = torch.cat(kept)

    def _attach(self) -> None:
        self.wrap(self.tower.patch_embed, "forward", self._embed)
        self.wrap(self.tower, "prepare_encoder_metadata", self._describe)
        self.wrap(self.tower, "forward", self._encode)

    def _embed(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: self._cut(forward(*args, **kwargs), self.kept.nonzero()[:, 0])

    def _encode(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def encode(*args: Any, **kwargs: Any) -> Tensor:
            rows = forward(*args, **kwargs)
            full = rows.new_zeros(len(self.kept), *rows.shape[1:])
            return full.index_copy(0, self.kept.nonzero()[:, 0].to(rows.device), rows)

        return encode

    def _describe(self, prepare: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def describe(*args: Any, **kwargs: Any) -> dict[str, Any]:
            return self._shrunk(prepare(*args, **kwargs))

        return describe

    def _shrunk(self, known: dict[str, Any]) -> dict[str, Any]:
        """Return the tower's metadata of its sequence for the kept units. known: that of all units."""
        check_lengths(known, "units cannot be dropped ahead of")
        window = known.get("window_index")  # Qwen2.5-VL: units stand window by window
        in_order = self.kept if window is None else self.kept[window.cpu()]
        places = in_order.nonzero()[:, 0]
        made = dict(known)
        for name in _OF_PATCHES:
            if name in known:
                made[name] = self._cut(known[name], places)
        for name, lengths in _BORDERS.items():
            if name in known:
                made[name] = borders = self._pieces(known[name], places)
                made |= {one: longest(known[one], borders) for one in lengths if one in known}
        if window is not None:
            ranks = self.kept.cumsum(0) - 1
            order = ranks[window.cpu()[places]]
            made["window_index"] = order.to(window.device)
            made["reverse_indices"] = order.argsort().to(known["reverse_indices"])
        return made

    def _cut(self, x: Tensor, places: Tensor) -> Tensor:
        """`[N * unit, D]` -> `[n * unit, D]`. places: where the n kept units stand."""
        return x.view(-1, self.unit, x.shape[-1])[places.to(x.device)].flatten(0, 1)

    def _pieces(self, borders: Tensor, places: Tensor) -> Tensor:
        """Return the borders of what attends to itself, in patches of kept units; what is empty disappears."""
        left = torch.searchsorted(places, borders.cpu().long() // self.unit)  # kept units before each border
        return (left * self.unit).unique_consecutive().to(borders)


def check_lengths(known: dict[str, Any], refused: str) -> None:
    """Raise UnsupportedSetupError where a tower's attention takes lengths that do not follow from borders. known: what
    the tower knows of its sequence. refused: what then cannot be done, up to the tower."""
    if any(known.get(f"sequence_lengths{which}") is not None for which in ("", "_full", "_window")):
        raise UnsupportedSetupError(
            f"{refused} a vision tower that attends by FlashInfer, which takes lengths in a form of its own: start "
            "with --mm-encoder-attn-backend FLASH_ATTN, or use a method after the tower, such as divprune"
        )


def longest(before: Tensor | None, borders: Tensor) -> Tensor | None:
    """Return the length of the longest piece; None or 0 where the tower's attention does not ask for it."""
    if before is None or not int(before):
        return before
    return borders.diff().max().to(before)

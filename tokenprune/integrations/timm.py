# SPDX-License-Identifier: Apache-2.0
"""Merging inside the plain vision transformers of timm: classifiers and other models without a language model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from tokenprune.budgets import Budget
from tokenprune.errors import OptionError, UnsupportedModelError, UnsupportedSetupError
from tokenprune.integrations.shared.attachable import Attachable
from tokenprune.integrations.shared.towers.reducer import Host, TowerReducer
from tokenprune.integrations.shared.towers.rows import RowLayout
from tokenprune.integrations.shared.towers.run import Block
from tokenprune.selection.method import Method
from tokenprune.selection.sites import check_sites
from tokenprune.selection.sites.encoder import EncoderMethod, Tower
from tokenprune.statistics import Stats


def is_timm(model: Any) -> bool:
    """Return whether `model` comes from timm, without importing timm."""
    return any(cls.__module__.split(".")[0] == "timm" for cls in type(model).__mro__)


def timm_patch(model: nn.Module, methods: Sequence[Method], budgets: Sequence[Budget]) -> TimmPatch:
    """Return the patch of a timm model; raises UnsupportedModelError for anything but merging in a plain one."""
    if unmerging := [method.name for method in methods if isinstance(method, EncoderMethod) and method.vtu != "off"]:
        raise OptionError(f"{unmerging[0]}: a model of timm has no language model to unmerge tokens in: no vtu=")
    check_sites(methods)
    others = [method.name for method in methods if not isinstance(method, EncoderMethod)]
    if others:
        raise UnsupportedModelError(
            f"{type(model).__name__} of timm has no language model, nor grids of any size, which {', '.join(others)} "
            "acts on: only methods that merge inside the tower (tome, dymu) fit it"
        )
    vit: Any = sys.modules.get("timm.models.vision_transformer")
    blocks: Any = getattr(model, "blocks", None)
    plain = vit is not None and isinstance(model, vit.VisionTransformer) and isinstance(blocks, nn.Sequential)
    if not plain or any(type(b) is not vit.Block or type(b.attn) is not vit.Attention for b in blocks):
        raise UnsupportedModelError(
            f"{type(model).__name__} is no plain vision transformer of timm (VisionTransformer with blocks of the kind "
            "Block and attention of the kind Attention): what windows, pooling or rotary places do to merged tokens is "
            "not worked out"
        )
    if "attn_mask" not in inspect.signature(vit.Block.forward).parameters:
        raise UnsupportedModelError("this version of timm has blocks without attn_mask: upgrade timm")
    (method,) = (one for one in methods[:1] if isinstance(one, EncoderMethod))
    if method.drops and model.global_pool != "token":
        raise UnsupportedModelError(
            f"{method.name} drops patches, and this model pools them all: only one that reads its class token fits it "
            '(global_pool="token"); use tome'
        )
    method.is_identity(budgets[0])  # raises for options that contradict the budget
    return TimmPatch(model, method, budgets[0])


class TimmHost(Host):
    """timm, whose blocks take a bias as `attn_mask`. `name` is the name of the method, for errors."""

    takes_bias = True

    def __init__(self, name: str) -> None:
        self.name = name

    def pass_bias(self, bias: Tensor | None, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if bias is None:
            return args, kwargs
        hidden, *given = args
        if any(one is not None for one in (*given[:1], kwargs.get("attn_mask"))):
            raise UnsupportedSetupError(f"{self.name}: the tower's blocks got an attention mask of their own")
        return (hidden, bias, *given[1:]), {name: value for name, value in kwargs.items() if name != "attn_mask"}


class TimmPatch(Attachable):
    """Merges in the blocks of `model`. After the last one each patch gets the feature of its merged token, so that
    every kind of pooling weighs a merged token by its size."""

    def __init__(self, model: Any, method: EncoderMethod, budget: Budget) -> None:
        blocks = [Block(block, block.norm2, block.drop_path2) for block in model.blocks]
        protected = model.num_prefix_tokens
        tokens = model.patch_embed.num_patches + protected
        super().__init__()
        self.method = method
        self.layout = RowLayout(method, budget, blocks, Tower(tokens, protected, len(blocks), len(blocks), model))
        self.reducer = TowerReducer(self.layout, TimmHost(method.name))
        self.model = self.owner = model
        self.stats = Stats()

    def _attach(self) -> None:
        self.hook(self.model.blocks[0].register_forward_pre_hook, self._check_mode)
        self.attach_part(self.reducer)
        for index, block in enumerate(self.model.blocks):
            self.hook(block.attn.k_norm.register_forward_hook, partial(self._see_keys, index))
        self.hook(self.model.blocks[-1].register_forward_hook, self._leave)

    def _check_mode(self, module: nn.Module, args: tuple) -> None:
        if self.model.grad_checkpointing:
            raise UnsupportedSetupError(
                f"{self.method.name}: gradient checkpointing runs blocks a second time, when what they merged is "
                "forgotten; call model.set_grad_checkpointing(False)"
            )

    def _see_keys(self, index: int, module: nn.Module, args: tuple, output: Tensor) -> None:
        run = self.reducer.get_run()
        if run is not None and run.plan[index] is not None:
            run.keys = output

    def _leave(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        run = self.reducer.pop_run()
        assert run is not None  # the first block of this forward made it
        counts, protected = [*run.counts, run.units.num_units], self.layout.shape.protected
        patches = [sum(n - protected for n in rows) for rows in counts]
        flops, full = self._flops(counts), self._flops([counts[0]] * len(counts))
        self.stats = Stats(
            visual_tokens_in=patches[0],
            visual_tokens_out=patches[-1],
            visual_tokens_per_layer=patches[:-1],
            keep_ratio=patches[-1] / patches[0],
            prefill_flops=flops,
            prefill_flops_full=full,
            prefill_flops_ratio=flops / full,
            encoder_tokens_per_layer=[sum(rows) for rows in counts[:-1]],
        )
        return run.units.expand(output)

    def _flops(self, counts: list[list[int]]) -> float:
        """Multiply-adds x 2 of all blocks: attention on the tokens that enter a block, the MLP on those it leaves.
        counts: tokens of each row before each block, and after the last."""
        total = 0.0
        for block, before, after in zip(self.model.blocks, counts[:-1], counts[1:], strict=True):
            attention, mlp = (
                sum(p.numel() for p in part.parameters() if p.ndim == 2) for part in (block.attn, block.mlp)
            )
            total += 2 * attention * sum(before) + 4 * block.attn.proj.in_features * sum(n * n for n in before)
            total += 2 * mlp * sum(after)
        return total

# SPDX-License-Identifier: Apache-2.0
"""Merge tokens inside the vision transformers of timm (classifiers and other models without a language model)."""

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
    """Return whether `model` is a timm model, without importing timm."""
    return any(cls.__module__.split(".")[0] == "timm" for cls in type(model).__mro__)


def build_timm_patch(model: nn.Module, methods: Sequence[Method], budgets: Sequence[Budget]) -> TimmPatch:
    """Return the patch of a timm model.

    Args:
        model: A plain `VisionTransformer` of timm.
        methods: One method that merges or drops tokens inside the encoder.
        budgets: Its budget.

    Raises:
        UnsupportedModelError: If the model or the method is not supported.
        OptionError: If an option of the method needs a language model.
    """
    if unmerging := [method.name for method in methods if isinstance(method, EncoderMethod) and method.vtu != "off"]:
        raise OptionError(f"{unmerging[0]}: vtu= needs a language model, and a timm model has none. Leave out vtu=.")
    check_sites(methods)
    others = [method.name for method in methods if not isinstance(method, EncoderMethod)]
    if others:
        raise UnsupportedModelError(
            f"{', '.join(others)} is not supported for the timm model {type(model).__name__}, which has only a tower. "
            "Use a method inside the tower, such as tome or dymu."
        )
    vit: Any = sys.modules.get("timm.models.vision_transformer")
    blocks: Any = getattr(model, "blocks", None)
    plain = vit is not None and isinstance(model, vit.VisionTransformer) and isinstance(blocks, nn.Sequential)
    if not plain or any(type(b) is not vit.Block or type(b.attn) is not vit.Attention for b in blocks):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a plain timm VisionTransformer with Block and Attention modules. Windows, "
            "pooling and rotary positions are not supported."
        )
    if "attn_mask" not in inspect.signature(vit.Block.forward).parameters:
        raise UnsupportedModelError("This timm version does not support attn_mask in its blocks. Upgrade timm.")
    (method,) = (method for method in methods[:1] if isinstance(method, EncoderMethod))
    if method.drops and model.global_pool != "token":
        raise UnsupportedModelError(
            f"{method.name} drops patches, and this model pools all patches. Use tome, or a model with "
            'global_pool="token".'
        )
    method.is_identity(budgets[0])  # raises for options that contradict the budget
    return TimmPatch(model, method, budgets[0])


class TimmHost(Host):
    """Passes an attention bias to timm blocks as `attn_mask`.

    Args:
        name: Name of the method, for errors.
    """

    takes_bias = True

    def __init__(self, name: str) -> None:
        self.name = name

    def pass_bias(self, bias: Tensor | None, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if bias is None:
            return args, kwargs
        hidden, *others = args
        if any(mask is not None for mask in (*others[:1], kwargs.get("attn_mask"))):
            raise UnsupportedSetupError(
                f"{self.name} does not support attention masks. Call the model without attn_mask."
            )
        return (hidden, bias, *others[1:]), {name: value for name, value in kwargs.items() if name != "attn_mask"}


class TimmPatch(Attachable):
    """Merges tokens in the blocks of a timm model.

    After the last block each patch gets the feature of its merged token, so that pooling weighs merged tokens by size.

    Args:
        model: The timm model.
        method: The method.
        budget: Its budget.
    """

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
        self.hook(self.model.blocks[-1].register_forward_hook, self._finish)

    def _check_mode(self, module: nn.Module, args: tuple) -> None:
        if self.model.grad_checkpointing:
            raise UnsupportedSetupError(
                f"{self.method.name} does not support gradient checkpointing, which runs blocks twice. Call "
                "model.set_grad_checkpointing(False)."
            )

    def _see_keys(self, index: int, module: nn.Module, args: tuple, output: Tensor) -> None:
        run = self.reducer.get_run()
        if run is not None and run.plan[index] is not None:
            run.keys = output

    def _finish(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        run = self.reducer.pop_run()
        assert run is not None  # created by the first block
        counts, protected = [*run.counts, run.units.num_units], self.layout.shape.protected
        patches = [sum(n - protected for n in rows) for rows in counts]
        flops, flops_full = self._count_flops(counts), self._count_flops([counts[0]] * len(counts))
        self.stats = Stats(
            visual_tokens_in=patches[0],
            visual_tokens_out=patches[-1],
            visual_tokens_per_layer=patches[:-1],
            keep_ratio=patches[-1] / patches[0],
            prefill_flops=flops,
            prefill_flops_full=flops_full,
            prefill_flops_ratio=flops / flops_full,
            encoder_tokens_per_layer=[sum(rows) for rows in counts[:-1]],
        )
        return run.units.expand(output)

    def _count_flops(self, counts: list[list[int]]) -> float:
        """Return the FLOPs of all blocks. A block merges tokens between its attention and its MLP.

        Args:
            counts: Number of tokens of each row, before each block and after the last block.
        """
        total = 0.0
        for block, before, after in zip(self.model.blocks, counts[:-1], counts[1:], strict=True):
            attention, mlp = (
                sum(p.numel() for p in part.parameters() if p.ndim == 2) for part in (block.attn, block.mlp)
            )
            total += 2 * attention * sum(before) + 4 * block.attn.proj.in_features * sum(n * n for n in before)
            total += 2 * mlp * sum(after)
        return total

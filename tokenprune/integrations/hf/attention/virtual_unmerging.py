# SPDX-License-Identifier: Apache-2.0
"""Virtual token unmerging: run the decoder's weights on merged tokens, and its attention on all positions.

Visual tokens that were merged in the tower enter the decoder as equal features at different positions. The decoder
keeps one hidden state per group (W instead of L tokens per row) for residuals, norms, projections and MLPs. Inside each
attention module, queries, keys and values are expanded to all L positions. Rotary embedding, cache and attention see
the unpruned prompt. The outputs of a group's positions are averaged before the output projection. The cache holds all L
positions, so it does not shrink.

All changes are hooks. The attention module receives a placeholder tensor of L tokens, and its input projections receive
the W hidden states. Hooks expand the outputs of the input projections and average the input of the output projection.

Source:
    Wang et al., "DyMU: Dynamic Merging and Virtual Unmerging for Efficient VLMs" (arXiv 2504.17040).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf.compat import reruns_layers
from tokenprune.integrations.hf.engine.call_check import check_arguments
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.part import Part, PerCall
from tokenprune.integrations.hf.forward.token_state import Layout, gather_tokens
from tokenprune.integrations.shared.attachable import change_output, get_hidden_states, replace_hidden_states
from tokenprune.kernels.transfer import to_device
from tokenprune.selection.method import Selection
from tokenprune.selection.segments import Segments

if TYPE_CHECKING:
    from tokenprune.integrations.hf.forward.call import Call
    from tokenprune.integrations.hf.forward.layer_inputs import DecoderInputs

_INPUTS, _OUTPUT = ("q_proj", "k_proj", "v_proj", "qkv_proj"), "o_proj"


@dataclass
class Unmerged:
    """Groups of merged tokens of a call.

    Attributes:
        layout: Layout whose W slots hold the first token of each group. Text tokens are groups of one.
        slot: Slot of each token's group, long `[B, L]`. Padding has the last slot, and does not change its mean.
        padding: Padding mask, bool `[B, L]`, or None without padding.
        hidden: Input of the attention module that runs now, `[B, W, D]`.
    """

    layout: Layout
    slot: Tensor
    padding: Tensor | None = None
    hidden: Tensor | None = None

    @staticmethod
    def from_selection(
        selection: Selection, segments: Segments, batch: int, length: int, padding: Tensor | None = None
    ) -> Unmerged:
        """Build the groups from a merge in the tower.

        Args:
            selection: Kept visual tokens, and the kept token that each dropped token was merged into.
            segments: Visual tokens of the call.
            batch: Number of rows.
            length: Number of tokens per row.
            padding: Padding mask, bool `[B, L]` on the host, or None.
        """
        device = segments.position.device
        positions = torch.arange(length, device=device)
        first = positions.repeat(batch, 1)
        rows, mask = segments.row_index.expand_as(segments.position), segments.mask
        assert selection.assign is not None and selection.counts is not None  # set by merges in the tower
        target = segments.position.gather(1, selection.assign.clamp(min=0))
        # Padding is written to a scratch entry at the end.
        first = torch.cat([first, first[:, :1]], dim=1)
        first[rows, torch.where(mask, segments.position, length)] = target
        first = first[:, :-1]
        tokens_per_row, dropped = [length] * batch, first != positions
        if padding is not None:
            tokens_per_row = (length - padding.sum(1)).tolist()
            padding = to_device(padding, device)
            dropped |= padding
        for row, before, after in zip(segments.row, segments.counts, selection.counts, strict=True):
            tokens_per_row[row] -= before - after
        layout, _ = Layout.build_uncut(batch, length, device).cut(dropped, tokens_per_row)
        slot = layout.slot_index.gather(1, first)
        if padding is not None:
            slot = slot.masked_fill(padding, layout.width - 1)
        return Unmerged(layout, slot, padding)

    def gather_first(self, x: Tensor, dim: int = 1) -> Tensor:
        """Gather the first token of each group: `[B, L, D]` -> `[B, W, D]`. Unused slots have arbitrary values."""
        return gather_tokens(x, self.layout.index, dim)

    def expand(self, x: Tensor) -> Tensor:
        """Copy the value of each group to its tokens: `[B, W, D]` -> `[B, L, D]`."""
        return gather_tokens(x, self.slot, 1)

    def merge(self, x: Tensor) -> Tensor:
        """Average the tokens of each group: `[B, L, D]` -> `[B, W, D]`. Sums in float32 or a wider dtype."""
        slot, width = self.slot.to(x.device), self.layout.width
        if self.padding is not None:
            slot = slot.masked_fill(self.padding.to(x.device), width)  # a scratch entry at the end
        mean = x.new_zeros(x.shape[0], width + 1, x.shape[2], dtype=torch.promote_types(x.dtype, torch.float32))
        mean = mean.scatter_add(1, slot.unsqueeze(-1).expand_as(x), x.to(mean.dtype))
        size = mean.new_zeros(mean.shape[:2]).scatter_add(1, slot, mean.new_ones(1, 1).expand_as(slot))
        return (mean / size.clamp(min=1).unsqueeze(-1))[:, :width].to(x.dtype)


class VirtualUnmerging(Part):
    """Keeps tokens that were merged in the tower merged for the decoder's weights only.

    Args:
        adapter: Adapter of the model.
        form: Value of the method's `vtu` option, for error messages.

    Raises:
        UnsupportedSetupError: If the decoder has no rotary positions, adds features between layers, or has
            attention modules with unknown projections.
    """

    def __init__(self, adapter: Adapter, form: str) -> None:
        super().__init__()
        self.adapter, self.decoder = adapter, adapter.decoder
        self._unmerged: PerCall[Unmerged] = PerCall()
        if not hasattr(self.decoder, "rotary_emb"):
            raise UnsupportedSetupError(
                f'vtu="{form}" needs rotary positions, and {type(self.decoder).__name__} has none. Use vtu="off".'
            )
        if adapter.adds_after_layers:
            raise UnsupportedSetupError(
                f'vtu="{form}" is not supported for {adapter.config.model_type!r}, which adds features to visual '
                'tokens between decoder layers. Use vtu="off".'
            )
        self.modules = [adapter.get_attention(index) for index in range(len(self.decoder.layers))]
        self.inputs = [_get_input_projections(module, form) for module in self.modules]

    def _attach(self) -> None:
        self.hook_in_call(self.decoder.register_forward_hook, self._leave_decoder)
        self.hook_in_call(self.decoder.layers[0].register_forward_pre_hook, self._enter_layers, with_kwargs=True)
        for module, projections in zip(self.modules, self.inputs, strict=True):
            self.hook_in_call(module.register_forward_pre_hook, self._enter_attention, with_kwargs=True)
            for projection in projections:
                self.hook_in_call(projection.register_forward_pre_hook, self._enter_projection)
                self.hook_in_call(projection.register_forward_hook, self._leave_projection)
            self.hook_in_call(getattr(module, _OUTPUT).register_forward_pre_hook, self._enter_output)

    # -- a call

    def state(self) -> Unmerged | None:
        """Return the groups of this thread's call, or None without merged tokens."""
        call = self.current()
        return None if call is None else self._unmerged.get(call)

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        """Convert the merges of the tower (`call.merged`) to `Unmerged`, so that the engine does not cut them."""
        if call.merged is None:
            return
        (step, selection), call.merged = call.merged, None
        check_arguments(self.adapter, inputs)
        if reruns_layers(self.decoder):
            raise UnsupportedSetupError(
                "Gradient checkpointing runs decoder layers a second time, without the groups of merged tokens. Call "
                'model.gradient_checkpointing_disable(), or use vtu="off".'
            )
        batch, length = inputs.embeds.shape[:2]
        segments = call.state.segments.to(selection.keep.device)
        unmerged = Unmerged.from_selection(selection, segments, batch, length, call.prompt.padding_to_drop)
        # Attention and cache still see all tokens.
        call.trace.attends_all = True
        assert selection.counts is not None  # set by merges in the tower
        call.trace.add_cut(step, selection, call.state.segments, selection.counts, unmerged.layout)
        self._unmerged[call] = unmerged

    # -- hooks

    def _leave_decoder(self, module: nn.Module, args: tuple, output: Any) -> Any:
        state = self.state()
        return None if state is None else change_output(state.expand, output)

    def _enter_layers(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        state = self.state()
        if state is None:
            return None
        # The features of a group are equal. Taking the first instead of the mean avoids rounding.
        return replace_hidden_states(state.gather_first(get_hidden_states(args, kwargs)), args, kwargs)

    def _enter_attention(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        state = self.state()
        if state is None:
            return None
        hidden = state.hidden = get_hidden_states(args, kwargs)
        # Only the shape of this placeholder is read. NaN makes any other use visible. It needs memory for one element.
        placeholder = hidden.new_full((1,), torch.nan).expand(hidden.shape[0], state.slot.shape[1], hidden.shape[2])
        return replace_hidden_states(placeholder, args, kwargs)

    def _enter_projection(self, module: nn.Module, args: tuple) -> tuple | None:
        state = self.state()
        return None if state is None else (state.hidden, *args[1:])

    def _leave_projection(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        state = self.state()
        return None if state is None else state.expand(output)

    def _enter_output(self, module: nn.Module, args: tuple) -> tuple | None:
        state = self.state()
        return None if state is None else (state.merge(args[0]), *args[1:])


def _get_input_projections(module: nn.Module, form: str) -> list[nn.Module]:
    """Return the projections of an attention module that read its input."""
    children = dict(module.named_children())
    # Looked up by name, because PEFT adapters and quantisation replace nn.Linear by other classes.
    projections = [children[name] for name in _INPUTS if name in children]
    weights = {name for name, child in children.items() if any(p.ndim > 1 for p in child.parameters())}
    other = weights - {*_INPUTS, _OUTPUT}
    if _OUTPUT not in children or len(projections) not in (1, 3) or other:
        raise UnsupportedSetupError(
            f'vtu="{form}" supports attention with q_proj, k_proj and v_proj (or qkv_proj) and o_proj, not '
            f'{type(module).__name__} with {", ".join(sorted(weights)) or "no projections"}. Use vtu="off".'
        )
    return projections

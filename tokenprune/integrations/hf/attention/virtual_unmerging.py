# SPDX-License-Identifier: Apache-2.0
"""Virtual token unmerging: what a tower merged stays one token for the decoder's weights, and many for its attention.

Visual tokens that were merged in the tower enter the decoder as equal features at different positions. Here the
decoder keeps one hidden state for each group of them (W instead of L tokens a row), so that residuals, norms,
projections and MLPs run on these alone. Inside each attention module queries, keys and values are expanded to all L
positions; rotary embedding, cache and attention are those of the full prompt, and the outputs of positions that share a
token are averaged before the output projection. The cache holds all L positions: no key or value is saved.

No forward is replaced. An attention module is handed an empty stand-in of L tokens, its input projections the W real
ones; hooks expand what they return and average what the output projection gets.
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
    """Groups of a call's L tokens that are one, and the input of the attention module that runs now.

    layout: its W slots hold the first token of each group, text tokens among them. slot: long `[B, L]`, the slot that
    each token shares; padding takes the last one along, and changes nothing of it. padding: bool `[B, L]`, None without
    any. hidden: `[B, W, D]`.
    """

    layout: Layout
    slot: Tensor
    padding: Tensor | None = None
    hidden: Tensor | None = None

    @staticmethod
    def of(
        selection: Selection, segments: Segments, batch: int, length: int, padding: Tensor | None = None
    ) -> Unmerged:
        """Return the state before the first layer.

        selection: the visual tokens of `segments` that stay, and the ones into which the others were merged.
        padding: bool `[B, L]`, on the host.
        """
        device = segments.position.device
        places = torch.arange(length, device=device)
        first = places.repeat(batch, 1)
        rows, real = segments.row_index.expand_as(segments.position), segments.mask
        assert selection.assign is not None and selection.counts is not None  # of a merge in the tower
        target = segments.position.gather(1, selection.assign.clamp(min=0))
        # Padding is written to a scratch entry at the end.
        first = torch.cat([first, first[:, :1]], dim=1)
        first[rows, torch.where(real, segments.position, length)] = target
        first = first[:, :-1]
        left, gone = [length] * batch, first != places
        if padding is not None:
            left = (length - padding.sum(1)).tolist()
            padding = to_device(padding, device)
            gone |= padding
        for row, before, after in zip(segments.row, segments.counts, selection.counts, strict=True):
            left[row] -= before - after
        layout, _ = Layout.build_uncut(batch, length, device).cut(gone, left)
        slot = layout.slot_index.gather(1, first)
        if padding is not None:
            slot = slot.masked_fill(padding, layout.width - 1)
        return Unmerged(layout, slot, padding)

    def first(self, x: Tensor, dim: int = 1) -> Tensor:
        """`[B, L, D]` -> `[B, W, D]`: the first token of each group; what fills up shorter rows is of no meaning."""
        return gather_tokens(x, self.layout.index, dim)

    def expand(self, x: Tensor) -> Tensor:
        """`[B, W, D]` -> `[B, L, D]`: every token gets what its group has."""
        return gather_tokens(x, self.slot, 1)

    def merge(self, x: Tensor) -> Tensor:
        """`[B, L, D]` -> `[B, W, D]`: the mean over each group, in float32 at least."""
        slot, width = self.slot.to(x.device), self.layout.width
        if self.padding is not None:
            slot = slot.masked_fill(self.padding.to(x.device), width)  # a scratch entry at the end
        mean = x.new_zeros(x.shape[0], width + 1, x.shape[2], dtype=torch.promote_types(x.dtype, torch.float32))
        mean = mean.scatter_add(1, slot.unsqueeze(-1).expand_as(x), x.to(mean.dtype))
        size = mean.new_zeros(mean.shape[:2]).scatter_add(1, slot, mean.new_ones(1, 1).expand_as(slot))
        return (mean / size.clamp(min=1).unsqueeze(-1))[:, :width].to(x.dtype)


class VirtualUnmerging(Part):
    """Attached to the layers of one decoder.

    Raises UnsupportedSetupError for decoders whose attention modules it cannot take apart.
    """

    def __init__(self, adapter: Adapter, form: str) -> None:
        super().__init__()
        self.adapter, self.decoder = adapter, adapter.decoder
        self._unmerged: PerCall[Unmerged] = PerCall()
        if not hasattr(self.decoder, "rotary_emb"):
            raise UnsupportedSetupError(
                f'vtu="{form}" needs a decoder with rotary positions, which {type(self.decoder).__name__} has not; use '
                'vtu="off"'
            )
        if adapter.adds_after_layers:
            raise UnsupportedSetupError(
                f'vtu="{form}": {adapter.config.model_type!r} adds features to its visual tokens between the '
                'decoder\'s layers, by the positions of the full prompt; use vtu="off"'
            )
        self.modules = [adapter.get_attention(index) for index in range(len(self.decoder.layers))]
        self.inputs = [_input_projections(module, form) for module in self.modules]

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
        call = self.current()
        return None if call is None else self._unmerged.get(call)

    def before_decoder(self, call: Call, inputs: DecoderInputs) -> None:
        """Take over what was merged in the tower, so that it is not cut out: `call.merged` becomes `Unmerged`."""
        if call.merged is None:
            return
        (step, selection), call.merged = call.merged, None
        check_arguments(self.adapter, inputs)
        if reruns_layers(self.decoder):
            raise UnsupportedSetupError(
                "gradient checkpointing runs decoder layers a second time, when it is forgotten which tokens are one; "
                'call model.gradient_checkpointing_disable(), or use vtu="off"'
            )
        batch, length = inputs.embeds.shape[:2]
        segments = call.state.segments.to(selection.keep.device)
        unmerged = Unmerged.of(selection, segments, batch, length, call.prompt.padding_to_drop)
        # They stay one for the decoder's weights, but not for its attention and cache.
        call.trace.attends_all = True
        assert selection.counts is not None  # known for selections in a tower
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
        # Features of a group are equal, so their mean is the first of them, and no rounding comes in.
        return replace_hidden_states(state.first(get_hidden_states(args, kwargs)), args, kwargs)

    def _enter_attention(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        state = self.state()
        if state is None:
            return None
        hidden = state.hidden = get_hidden_states(args, kwargs)
        # Takes no memory. Were anything but a shape read from it, the result would show.
        stand_in = hidden.new_full((1,), torch.nan).expand(hidden.shape[0], state.slot.shape[1], hidden.shape[2])
        return replace_hidden_states(stand_in, args, kwargs)

    def _enter_projection(self, module: nn.Module, args: tuple) -> tuple | None:
        state = self.state()
        return None if state is None else (state.hidden, *args[1:])

    def _leave_projection(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
        state = self.state()
        return None if state is None else state.expand(output)

    def _enter_output(self, module: nn.Module, args: tuple) -> tuple | None:
        state = self.state()
        return None if state is None else (state.merge(args[0]), *args[1:])


def _input_projections(module: nn.Module, form: str) -> list[nn.Module]:
    """Return the children of an attention module that read its input."""
    children = dict(module.named_children())
    # By name, because adapters and quantisation put other classes in the place of nn.Linear.
    found = [children[name] for name in _INPUTS if name in children]
    weights = {name for name, child in children.items() if any(p.ndim > 1 for p in child.parameters())}
    other = weights - {*_INPUTS, _OUTPUT}
    if _OUTPUT not in children or len(found) not in (1, 3) or other:
        raise UnsupportedSetupError(
            f'vtu="{form}" knows attention with q_proj, k_proj and v_proj, or qkv_proj, and o_proj, not '
            f'{type(module).__name__} with {", ".join(sorted(weights)) or "none of these"}; use vtu="off"'
        )
    return found

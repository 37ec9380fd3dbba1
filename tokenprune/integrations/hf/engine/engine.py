# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face engine: hooks that remove visual tokens on their way through the decoder.

The caller's tensors keep their length. Tokens leave at the decoder's entry (PRE_LLM) or at the input of a decoder layer
(IN_LLM); what is left is compacted to the right end of each row, and the decoder's output is scattered back to the full
length, with zeros where tokens are gone. Padding leaves with the first cut, so that every later layer is as wide as the
longest row of what stays. Positions are those of the full prompt throughout.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.static_cache import needs_masks_alone
from tokenprune.integrations.hf.checks import Places, check_call
from tokenprune.integrations.hf.engine.cuts import apply_selection, cut_entry, prepare, select_tokens
from tokenprune.integrations.hf.engine.planner import Planner
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.call import Call, CallStack
from tokenprune.integrations.hf.forward.decoder_inputs import DecoderInputs
from tokenprune.integrations.hf.forward.part import Observations, Part, acting
from tokenprune.integrations.hf.forward.plan import Step
from tokenprune.integrations.hf.forward.prompt_info import PromptInfo
from tokenprune.integrations.hf.forward.token_state import TokenState
from tokenprune.integrations.hf.sequence.alignment import check_rows
from tokenprune.integrations.hf.sequence.layout import Layout
from tokenprune.integrations.hf.sequence.segments import check_placeholders
from tokenprune.integrations.hf.statistics import LatestStats, stats_after
from tokenprune.integrations.hf.towers.feature_hook import MODALITIES, EncoderHook
from tokenprune.integrations.shared import eager
from tokenprune.integrations.shared.attachable import (
    Attachable,
    change_output,
    get_hidden_states,
    refuse_replica,
    replace_hidden_states,
)
from tokenprune.kernels.values import has_unreadable_values
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.statistics import Stats

P = TypeVar("P", bound=Part)


class Engine(Attachable):
    """Holds the hooks of one patched model, and its `stats`. The state of a forward lives in a `Call`, that of a cache
    on the cache.

    steps: the cuts; parts: everything else in the patch, in the order in which it is called. model: the whole model,
    without wrappers; owner: the module in it that has the decoder. reading: the names of the methods that read values
    of the prompt or of features in a forward; empty if the patch changes nothing there.
    """

    def __init__(
        self, adapter: Adapter, steps: Sequence[Step], parts: Sequence[Part], record: bool, reading: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.adapter, self.decoder, self.parts = adapter, adapter.decoder, [*parts, *adapter.parts()]
        self.model, self.owner = adapter.model, getattr(adapter.base, "_orig_mod", adapter.base)  # of torch.compile
        self.shape = DecoderShape.from_config(adapter.text_config)
        self.steps = {step.layer: step for step in sorted(steps, key=lambda step: step.layer)}
        self.planner = Planner(adapter, self.shape, list(self.steps.values()), self.parts, record)
        self.reading = list(dict.fromkeys(reading))
        self._latest, self._places = LatestStats(), Places()
        self._reads_text = adapter.family.square == "runs" or any(part.reads_text for part in self.parts)
        self._on_static_step = acting(part.on_static_step for part in self.parts)
        self._before_call = acting(part.before_call for part in self.parts)
        self._before_decoder = acting(part.before_decoder for part in self.parts)
        self._before_cut = acting(part.before_cut for part in self.parts)
        self._after_cut = acting(part.after_cut for part in self.parts)
        self._on_layer = acting(part.on_layer for part in self.parts)
        # Layers to which a cut is made or what is called with is read, and all of them.
        self._watched = frozenset(layer for layer in self.steps if layer)
        if self._on_layer:
            self._watched = frozenset(near for layer in self.steps for near in (layer - 1, layer))
        self._all = frozenset(range(len(self.decoder.layers)))
        # In a step with a reduced static cache no call is active, which torch.compile can rely on.
        self.calls = CallStack()
        self._parameters = list(inspect.signature(adapter.base.forward).parameters)

    def part(self, kind: type[P]) -> P:
        """Return the part of class `kind`; the patch has one."""
        return next(part for part in self.parts if isinstance(part, kind))

    @property
    def stats(self) -> Stats:
        stats = self._latest.get().finalize()
        for add_stats in acting(part.add_stats for part in self.parts):
            add_stats(stats)
        return stats

    # -- attaching

    def _attach(self) -> None:
        base, decoder = self.adapter.base, self.decoder
        self.on_detach(self.calls.clear)
        # A step with a reduced static cache stays in the graph of torch.compile that it is in: it is no call.
        hook = partial(self.hook, eager=False, with_kwargs=True)
        in_call = partial(partial, eager.run_with_call, self.calls.current)
        for part in self.parts:
            part.current = self.calls.current
            self.attach_part(part)
        self.attach_part(
            EncoderHook(
                self.adapter, self.parts, self.calls.running, self._match_features, self._places.check, self._acts_on
            )
        )
        hook(base.register_forward_pre_hook, self._enter_base)
        hook(decoder.register_forward_pre_hook, in_call(self._enter_decoder))
        # The base may be the decoder itself: it is entered first, and left last.
        hook(decoder.register_forward_hook, in_call(self._leave_decoder))
        hook(base.register_forward_hook, in_call(self._leave_base), always_call=True)
        for index, layer in enumerate(decoder.layers):
            hook(layer.register_forward_pre_hook, partial(self._meet_layer, index))
            if self.adapter.adds_after_layers:
                hook(layer.register_forward_hook, in_call(partial(self._leave_layer, index)))
        self._places.note(self.model, self.hooked)

    # -- the call of this thread

    def _enter_base(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        arguments = dict(zip(self._parameters, args, strict=False)) | kwargs if args else kwargs
        if not needs_masks_alone(arguments):
            return eager.run_eagerly(self._begin_call, module, arguments)
        if self.calls.active:
            eager.run_eagerly(self.calls.running)  # drops a call whose forward has ended
        for on_static_step in self._on_static_step:
            on_static_step()
        return None

    def _acts_on(self, arguments: dict[str, Any]) -> bool:
        """Return False for a forward without values, which runs as in the unpatched model.

        Raises:
            UnsupportedSetupError: If a method would have to read the missing values.
        """
        if not has_unreadable_values(arguments.values()):
            return True
        if self.reading:
            raise UnsupportedSetupError(
                f"{' and '.join(self.reading)} must read values of tensors, which torch.export, fake tensors and "
                "torch.func hide. Unpatch the model or patch it with keep=1.0; for gradients, use torch.autograd.grad."
            )
        return False

    def _begin_call(self, module: nn.Module, arguments: dict[str, Any]) -> tuple[tuple, dict] | None:
        """Begin a call. Return the arguments of the base model if a part changed them."""
        refuse_replica(module, self.adapter.base)
        if not self._acts_on(arguments):
            return None
        call = Call(self.adapter.arguments(arguments))
        self.calls.begin(call)
        encoded = call.arguments.get("mm_encoder_outputs") or {}
        given = {name for name, value in call.arguments.items() if value is not None}
        images = encoded or [name for name in given if name.startswith("pixel_values")]
        changed = None
        if images:
            self._places.check()
            for before_call in self._before_call:
                if (result := before_call(call, arguments)) is not None:
                    changed, call.restore_output = result
                    call.arguments = self.adapter.arguments(changed)
        if images and given & {"input_ids", "inputs_embeds"}:
            # Before the tower is launched: whoever asks the device now finds it idle.
            self._read_prompt(call)
        for modality in MODALITIES:
            if encoded.get(modality) is not None:
                self._match_features(call, modality, encoded[modality])
        return None if changed is None else ((), changed)

    def _read_prompt(self, call: Call) -> None:
        placeholders = self.adapter.visual_mask(call.arguments)
        call.prompt = PromptInfo.from_arguments(call.arguments, placeholders, self._reads_text, call.padding)

    def _leave_base(self, call: Call, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        if not self.calls.end(call):
            return None  # this forward was refused before it became a call
        return None if call.restore_output is None or output is None else call.restore_output(output)

    def _match_features(self, call: Call, modality: str, output: Any) -> None:
        call.outputs[modality] = output
        if not call.prompt.placeholders:
            self._read_prompt(call)
        # Not for videos: older versions of LLaVA-OneVision add a newline to their features after encoding them.
        if modality == "image" and modality in call.prompt.placeholders:
            check_placeholders(modality, sum(call.prompt.placeholders_per_row[modality]), output)

    # -- the decoder

    def _enter_decoder(
        self, call: Call, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict] | None:
        if self.calls.running() is not call:
            return None  # the decoder runs outside of the base model, and the call has ended
        arguments = self.adapter.embeds(kwargs)
        if arguments.get("inputs_embeds") is None:
            return None
        start, inputs = time.perf_counter(), DecoderInputs.of(arguments)
        call.take_cache(inputs.cache)
        if call.outputs and inputs.embeds.shape[1] > 1:
            self.planner.find_segments(call, inputs.embeds)
        for before_decoder in self._before_decoder:
            inputs = before_decoder(call, inputs) or inputs
        cutting = call.has_images and self.planner.plan(call)
        if cutting or call.cached.reduction is not None:
            inputs = self._activate(call, inputs, cutting)
        if call.has_images:
            call.trace.add_time(time.perf_counter() - start)
        return args, inputs.arguments()

    def _activate(self, call: Call, inputs: DecoderInputs, cutting: bool) -> DecoderInputs:
        """Prepare a call in which tokens are missing: in its cache, or (`cutting`) by cuts of its own. Those at the
        entry are made here; return the inputs after them."""
        embeds = inputs.embeds
        batch, length = embeds.shape[:2]
        counts = call.prompt.tokens_per_row if cutting else None
        full = partial(Layout.full, batch, length, embeds.device, counts)
        layout = call.state.segments.cache.get(("layout", batch, length), full) if cutting else full()
        # Newer decoders of Gemma 4 leave queries out by this in their last layers; the model's head does it anyway.
        inputs.extras.pop("logits_to_keep", None)
        functions = extras = None
        if cutting:
            if batch > 1:
                check_rows(call.prompt.placeholders_per_row, call.outputs)
            check_call(self.steps.values(), self.adapter, inputs.arguments(), bool(call.maskless))
            inputs, functions = prepare(call, inputs, self.adapter)
        if call.has_images and self.adapter.extra_arguments:
            arguments = inputs.arguments()
            extras = self.adapter.take_extras(arguments, layout)
            inputs = DecoderInputs.of(arguments)
        call.state = TokenState(call.state.segments, layout, extras, call.state.memories)
        call.groups.append(call.group(0, functions))
        if call.cuts_at(0) or call.merged is not None:
            inputs = cut_entry(call, inputs, self.steps.get(0), self.adapter)
        inside = any(self.steps)
        if call.state.extras is not None and not inside and (given := self.adapter.return_extras(call.state.extras)):
            # Hooks at layers would run again under gradient checkpointing, without the call.
            inputs.extras.update(given)
            call.state = replace(call.state, extras=None)
        for after_cut in self._after_cut:
            after_cut(call, 0, inputs.embeds)
        if call.state.extras is not None or self.adapter.shares_keys:
            call.busy = self._all
        else:
            call.busy = self._watched | call.maskless | call.starts
        if call.busy or not all(call.groups[0].passes):
            self.calls.at_layers.append(call)
        return inputs

    def _leave_decoder(self, call: Call, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        call.save_to_cache()
        stats = stats_after(call, call.cached.cache or getattr(output, compat.CACHE, None))
        if stats is None and call.notes and call.cached.past == 0:
            stats = Stats(notes=call.notes)
        if stats is not None:
            self._latest.set(stats)
        if not call.active or call.state.layout.whole:
            return None
        return change_output(call.state.layout.scatter_back, output)

    # -- decoder layers

    def _meet_layer(
        self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict] | None:
        """Enter a layer, but for one that gets its arguments as they are: in a call most do."""
        if not self.calls.at_layers:
            return None
        call = self.calls.current()
        # While torch.compile traces, its graph ends at each layer of a call.
        if call is None or not (torch.compiler.is_dynamo_compiling() or call.touches(index, kwargs)):
            return None
        return eager.run_eagerly(self._enter_layer, index, call, args, kwargs)

    def _enter_layer(self, index: int, call: Call, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        if not call.groups:  # no tokens are missing
            return None
        if call.state.extras is not None:
            hidden = self.adapter.before_layer(call.state.extras, index, get_hidden_states(args, kwargs))
            args, kwargs = replace_hidden_states(hidden, args, kwargs)
        if index:
            if (step := self.steps.get(index)) is not None:
                args, kwargs = self._meet_step(call, step, args, kwargs)
            if index in call.starts or call.state.layout is not call.groups[-1].layout:
                call.groups.append(call.group(index))
        group, cached = call.groups[-1], call.cached
        cached.fit_slots(index, group.columns.shape[1])
        keys = None
        if index not in call.maskless:
            keys = cached.key_span(index, call.state.layout.width, self.adapter.key_count(index, kwargs))
        args, kwargs = group.arguments(index, args, kwargs, self.adapter, keys)
        for on_layer in self._on_layer:
            on_layer(call, index, args, kwargs)
        return args, kwargs

    def _meet_step(self, call: Call, step: Step, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        """IN_LLM and DECODE: cut the hidden states that arrive at the layer of `step`, if it cuts in this call."""
        start = time.perf_counter()
        observed: Observations = {}
        for before_cut in self._before_cut:
            before_cut(call, step, observed, args, kwargs)
        if not call.cuts_at(step.layer):
            return args, kwargs
        arrived = get_hidden_states(args, kwargs)
        hidden = self.adapter.flatten(arrived)
        selection = select_tokens(call, step, observed, hidden, self.adapter)
        del observed  # free its memory before the cut
        hidden = apply_selection(call, step, selection, hidden, self.adapter)
        for after_cut in self._after_cut:
            after_cut(call, step.layer, hidden)
        call.trace.add_time(time.perf_counter() - start)
        return replace_hidden_states(self.adapter.unflatten(hidden, arrived), args, kwargs)

    def _leave_layer(
        self, index: int, call: Call, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any
    ) -> Any:
        if not call.active or call.state.extras is None:
            return None
        return change_output(partial(self.adapter.after_layer, call.state.extras, index), output)

# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face engine: hooks that drop visual tokens inside the decoder.

The caller's tensors keep their length. Tokens are dropped at the decoder's entry (PRE_LLM) or at the input of a decoder
layer (IN_LLM). Kept tokens are aligned to the right end of each row, and the decoder's output is scattered back to the
full length, with zeros for dropped tokens. The first cut also drops the padding. Positions do not change.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tokenprune.errors import UnsupportedSetupError
from tokenprune.integrations.hf import compat
from tokenprune.integrations.hf.cache.static_cache import needs_only_masks
from tokenprune.integrations.hf.checks import HookedModules
from tokenprune.integrations.hf.engine.call_check import check_call
from tokenprune.integrations.hf.engine.cuts import apply_selection, cut_entry, prepare, select_tokens
from tokenprune.integrations.hf.families import Adapter
from tokenprune.integrations.hf.forward.call import Call, CallStack
from tokenprune.integrations.hf.forward.layer_inputs import DecoderInputs
from tokenprune.integrations.hf.forward.part import Observations, Part, select_moments
from tokenprune.integrations.hf.forward.plan import Planner, Step
from tokenprune.integrations.hf.forward.prompt_info import PromptInfo
from tokenprune.integrations.hf.forward.token_state import Layout, TokenState
from tokenprune.integrations.hf.forward.trace import Trace
from tokenprune.integrations.hf.sequence.alignment import check_rows
from tokenprune.integrations.hf.sequence.segments import check_placeholders
from tokenprune.integrations.hf.statistics import LatestStats, collect_stats
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
    """The hooks of one patched model, and its `stats`.

    The state of a forward is in a `Call`, the state of a cache on the cache.

    Args:
        adapter: Adapter of the model.
        steps: The cuts.
        parts: All other parts of the patch, in the order of their calls.
        record: Whether the statistics keep a record of each cut.
        reading: Names of the methods that read values of the prompt or of features in a forward. Empty if the patch
            does not change the forward.
    """

    def __init__(
        self, adapter: Adapter, steps: Sequence[Step], parts: Sequence[Part], record: bool, reading: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.adapter, self.decoder, self.parts = adapter, adapter.decoder, [*parts, *adapter.parts()]
        self.model, self.owner = adapter.model, getattr(adapter.base, "_orig_mod", adapter.base)  # of torch.compile
        self.shape = DecoderShape.from_config(adapter.text_config)
        self.steps = {step.layer: step for step in sorted(steps, key=lambda step: step.layer)}
        row, in_order = adapter.family, list(self.steps.values())
        self.planner = Planner(row, adapter.config, adapter.runs_per_image, self.shape, in_order)
        self.record = record
        self.reading = list(dict.fromkeys(reading))
        self._latest, self._hooked = LatestStats(), HookedModules()
        self._reads_text = adapter.family.square == "runs" or any(part.reads_text for part in self.parts)
        self._on_static_step = select_moments(part.on_static_step for part in self.parts)
        self._before_call = select_moments(part.before_call for part in self.parts)
        self._before_decoder = select_moments(part.before_decoder for part in self.parts)
        self._on_plan = select_moments(part.on_plan for part in self.parts)
        self._before_cut = select_moments(part.before_cut for part in self.parts)
        self._after_cut = select_moments(part.after_cut for part in self.parts)
        self._on_layer = select_moments(part.on_layer for part in self.parts)
        # Layers with a cut at their input, and layers before a cut if a part reads their arguments.
        self._watched = frozenset(layer for layer in self.steps if layer)
        if self._on_layer:
            self._watched = frozenset(watched for layer in self.steps for watched in (layer - 1, layer))
        self._all = frozenset(range(len(self.decoder.layers)))
        # A decoding step with a reduced static cache starts no call, so torch.compile can trace it.
        self.calls = CallStack()
        self._parameters = list(inspect.signature(adapter.base.forward).parameters)

    def get_part(self, kind: type[P]) -> P:
        """Return the part of class `kind`. The patch has exactly one."""
        return next(part for part in self.parts if isinstance(part, kind))

    @property
    def stats(self) -> Stats:
        stats = self._latest.get().finalize()
        for add_stats in select_moments(part.add_stats for part in self.parts):
            add_stats(stats)
        return stats

    # -- attaching

    def _attach(self) -> None:
        base, decoder = self.adapter.base, self.decoder
        self.on_detach(self.calls.clear)
        # The hooks stay in graphs of torch.compile, because a step with a reduced static cache starts no call.
        hook = partial(self.hook, eager=False, with_kwargs=True)
        in_call = partial(partial, eager.run_with_call, self.calls.current)
        for part in self.parts:
            part.current = self.calls.current
            self.attach_part(part)
        self.attach_part(
            EncoderHook(
                self.adapter, self.parts, self.calls.running, self._match_features, self._hooked.check, self._acts_on
            )
        )
        hook(base.register_forward_pre_hook, self._enter_base)
        hook(decoder.register_forward_pre_hook, in_call(self._enter_decoder))
        # The base may be the decoder itself, so its hooks are outside: registered first on entry, last on exit.
        hook(decoder.register_forward_hook, in_call(self._leave_decoder))
        hook(base.register_forward_hook, in_call(self._leave_base), always_call=True)
        for index, layer in enumerate(decoder.layers):
            hook(layer.register_forward_pre_hook, partial(self._change_layer_inputs, index))
            if self.adapter.adds_after_layers:
                hook(layer.register_forward_hook, in_call(partial(self._leave_layer, index)))
        self._hooked.record(self.model, self.hooked)

    # -- the call of this thread

    def _enter_base(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        arguments = dict(zip(self._parameters, args, strict=False)) | kwargs if args else kwargs
        if not needs_only_masks(arguments):
            return eager.run_eagerly(self._begin_call, module, arguments)
        if self.calls.active:
            eager.run_eagerly(self.calls.running)  # drops calls whose forward has ended
        for on_static_step in self._on_static_step:
            on_static_step()
        return None

    def _acts_on(self, arguments: dict[str, Any]) -> bool:
        """Return False if tensors have no values (export, fake tensors): the forward then runs unpruned.

        Raises:
            UnsupportedSetupError: If a method must read the values.
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
        """Begin a call. Return the base model's arguments if a part changed them."""
        refuse_replica(module, self.adapter.base)
        if not self._acts_on(arguments):
            return None
        call = Call(self.adapter.arguments(arguments))
        self.calls.begin(call)
        encoded = call.arguments.get("mm_encoder_outputs") or {}
        names = {name for name, value in call.arguments.items() if value is not None}
        images = encoded or [name for name in names if name.startswith("pixel_values")]
        changed = None
        if images:
            self._hooked.check()
            for before_call in self._before_call:
                if (result := before_call(call, arguments)) is not None:
                    changed, call.restore_output = result
                    call.arguments = self.adapter.arguments(changed)
        if images and names & {"input_ids", "inputs_embeds"}:
            # The prompt is read before the tower is launched, while the device is idle.
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
            return None  # this forward raised an error before its call began
        return None if call.restore_output is None or output is None else call.restore_output(output)

    def _match_features(self, call: Call, modality: str, output: Any) -> None:
        call.outputs[modality] = output
        if not call.prompt.placeholders:
            self._read_prompt(call)
        # Videos are not checked: older versions of LLaVA-OneVision add a newline to the features after encoding.
        if modality == "image" and modality in call.prompt.placeholders:
            check_placeholders(modality, sum(call.prompt.placeholders_per_row[modality]), output)

    # -- the decoder

    def _enter_decoder(
        self, call: Call, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict] | None:
        if self.calls.running() is not call:
            return None  # the decoder runs outside of the base model
        arguments = self.adapter.embeds(kwargs)
        if arguments.get("inputs_embeds") is None:
            return None
        start, inputs = time.perf_counter(), DecoderInputs.from_arguments(arguments)
        call.take_cache(inputs.cache)
        if call.outputs and inputs.embeds.shape[1] > 1:
            self._find_segments(call, inputs.embeds)
        for before_decoder in self._before_decoder:
            inputs = before_decoder(call, inputs) or inputs
        cutting = call.has_images and self._plan(call)
        if cutting or call.cached.reduction is not None:
            inputs = self._activate(call, inputs, cutting)
        if call.has_images:
            call.trace.add_time(time.perf_counter() - start)
        return args, inputs.arguments()

    def _find_segments(self, call: Call, embeds: Tensor) -> None:
        """Start the token state and the trace of a call that has visual tokens."""
        prompt = call.prompt
        segments, notes = self.planner.find_segments(prompt, call.outputs, call.arguments, embeds.device)
        call.notes += notes
        if segments is not None:
            call.has_images, call.state = True, TokenState(segments, call.state.layout)
            call.trace = Trace(self.shape, segments, prompt, call.past, embeds.shape[1], self.record)
            call.trace.stats.notes = call.notes

    def _plan(self, call: Call) -> bool:
        """Plan the cuts of a call. Return True if tokens are dropped."""
        segments = call.state.segments
        counts = segments.counts if call.merged is None else call.merged[1].counts
        assert counts is not None  # known for selections in a tower
        plan = self.planner.plan(segments, call.prompt, counts)
        for on_plan in self._on_plan:
            plan = on_plan(call, plan)
        call.plan = plan
        return bool(plan.cuts) or call.merged is not None

    def _activate(self, call: Call, inputs: DecoderInputs, cutting: bool) -> DecoderInputs:
        """Prepare a call with missing tokens, and make its cuts at the decoder's entry.

        Args:
            call: A call with a reduced cache or with cuts.
            inputs: Inputs of the decoder.
            cutting: Whether the call has cuts.

        Returns:
            The inputs for the kept tokens.
        """
        embeds = inputs.embeds
        batch, length = embeds.shape[:2]
        counts = call.prompt.tokens_per_row if cutting else None
        build_layout = partial(Layout.build_uncut, batch, length, embeds.device, counts)
        layout = call.state.segments.cache.get(("layout", batch, length), build_layout) if cutting else build_layout()
        # Newer decoders of Gemma 4 drop queries in their last layers by this argument. The head selects them anyway.
        inputs.extras.pop("logits_to_keep", None)
        functions = extras = None
        if cutting:
            if batch > 1:
                check_rows(call.prompt.placeholders_per_row, call.outputs)
            check_call(self.steps.values(), self.adapter, inputs, bool(call.maskless))
            inputs, functions = prepare(call, inputs, self.adapter)
        if call.has_images and self.adapter.extra_arguments:
            arguments = inputs.arguments()
            extras = self.adapter.take_extras(arguments, layout)
            inputs = DecoderInputs.from_arguments(arguments)
        call.state = TokenState(call.state.segments, layout, extras, call.state.memories)
        call.groups.append(call.group(0, functions))
        if call.cuts_at(0) or call.merged is not None:
            inputs = cut_entry(call, inputs, self.steps.get(0), self.adapter)
        inside = any(self.steps)
        if call.state.extras is not None and not inside and (extras := self.adapter.return_extras(call.state.extras)):
            # Gradient checkpointing runs hooks of layers again, without the call, so the decoder adds the extras.
            inputs.extras.update(extras)
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
        stats = collect_stats(call, call.cached.cache or getattr(output, compat.CACHE, None))
        if stats is None and call.notes and call.cached.past == 0:
            stats = Stats(notes=call.notes)
        if stats is not None:
            self._latest.set(stats)
        if not call.active or call.state.layout.is_uncut:
            return None
        return change_output(call.state.layout.scatter_back, output)

    # -- decoder layers

    def _change_layer_inputs(
        self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict] | None:
        """Change the arguments of a layer. Most layers of a call take their arguments unchanged."""
        if not self.calls.at_layers:
            return None
        call = self.calls.current()
        # The graph of torch.compile breaks at each layer of a call.
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
                args, kwargs = self._run_step(call, step, args, kwargs)
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

    def _run_step(self, call: Call, step: Step, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        """Cut the hidden states at the input of a layer (IN_LLM and DECODE), if the call has a cut there."""
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

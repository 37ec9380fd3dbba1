# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face engine: hooks that remove visual tokens on their way through the decoder.

The caller's tensors keep their length. Tokens leave at the decoder's entry (PRE_LLM) or at the input of a decoder layer
(IN_LLM); what is left is compacted to the right end of each row, and the decoder's output is scattered back to the full
length, with zeros where tokens are gone. Positions are those of the full prompt throughout.
"""

from __future__ import annotations

import inspect
import threading
import time
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_masks_for_generate

from tokenprune.accounting import DecoderShape
from tokenprune.base import Site
from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.integrations.attachable import Attachable
from tokenprune.integrations.hf import cache as caches
from tokenprune.integrations.hf import decoding, masks
from tokenprune.integrations.hf.adapters import Adapter
from tokenprune.integrations.hf.block_attention import BlockAttention
from tokenprune.integrations.hf.call import Call
from tokenprune.integrations.hf.cutting import Step, apply, cut, resolve_budgets
from tokenprune.integrations.hf.encoder import TowerPatch
from tokenprune.integrations.hf.encoder_attention import EncoderAttention
from tokenprune.integrations.hf.features import FeatureRecorder
from tokenprune.integrations.hf.layout import Layout, gather_tokens
from tokenprune.integrations.hf.observe import Observation, Observer
from tokenprune.integrations.hf.report import Report
from tokenprune.integrations.hf.segments import check_placeholders, find_segments
from tokenprune.integrations.hf.unmerging import VirtualUnmerging, form_of
from tokenprune.statistics import Stats

_MODALITIES = ("image", "video")
# What methods see of the decoder layer before the cut.
_OF_THE_LAYER_BEFORE = {"keys", "last_row_attention", "received_attention"}
# Arguments of a decoder that hold one entry per token and are known to the engine.
_PER_TOKEN = {"inputs_embeds", "input_ids", "attention_mask", "position_ids", "past_key_values"}


class Engine(Attachable):
    """Holds the hooks of one patched model. The state of a forward lives in a `Call`, that of a cache on the cache."""

    def __init__(
        self,
        adapter: Adapter,
        steps: list[Step],
        record: bool,
        encoder: TowerPatch | None = None,
        blocks: BlockAttention | None = None,
    ) -> None:
        super().__init__()
        self.blocks = blocks
        self.adapter, self.decoder, self.encoder = adapter, adapter.decoder, encoder
        self.shape = DecoderShape.from_config(adapter.text_config)
        self.steps = {step.layer: step for step in sorted(steps, key=lambda step: step.layer)}
        self.per = steps[0].budget.per if steps else "image"
        self.record, self.stats = record, Stats()
        form = "off" if encoder is None else form_of(encoder.method)
        self.unmerging = None if form == "off" else VirtualUnmerging(adapter, form, self._call)
        self._parameters = list(inspect.signature(adapter.base.forward).parameters)
        self._check(steps)
        # A method that will not cut needs to see nothing.
        seers = [s.method for s in steps if "encoder_attention" in s.method.needs and not s.budget.is_identity()]
        if seers and encoder is not None:
            raise OptionError(
                f"{seers[0].name} reads the attention of the vision tower's patches, and {encoder.method.name} merges "
                "them on the way: use one of the two"
            )
        self.attention = EncoderAttention(adapter, seers) if seers else None

    def _check(self, steps: list[Step]) -> None:
        layers = self.shape.layers
        for step in steps:
            if step.method.site is not Site.PRE_LLM and not 1 <= step.layer < layers:
                raise OptionError(
                    f"{step.method.name}: layer={step.layer} is out of range: this decoder has {layers} layers, and a "
                    f"cut inside it is made at the input of layer 1 to {layers - 1} (the layer before gives the scores)"
                )
            if step.method.site is Site.PRE_LLM and (needs := step.method.needs - {"encoder_attention"}):
                raise OptionError(f"{step.method.name}: a PRE_LLM method cannot need {sorted(needs)}: no layer ran yet")
        decoding_methods = [step.method for step in steps if step.method.site is Site.DECODE]
        for method in decoding_methods:
            decoding.check(method, self.decoder, len(decoding_methods) - 1)
        if len({step.budget.per for step in steps}) > 1:
            raise OptionError("composed methods must share their Budget's per=")

    # -- attaching

    def _attach(self) -> None:
        base, decoder = self.adapter.base, self.decoder
        if self.blocks is not None:
            self.blocks.current = self._call
            self.attach_part(self.blocks)
        for layer in sorted(self._observed()):
            self.attach_part(Observer(self.adapter.attention_of(layer), partial(self._observe, layer)))
        if self.attention is not None:
            self.attach_part(self.attention)
        for modality in _MODALITIES:
            self._record_features(modality)
        self.hook(base.register_forward_pre_hook(self._enter_base, with_kwargs=True))
        self.hook(base.register_forward_hook(self._leave_base, always_call=True))
        self.hook(decoder.register_forward_pre_hook(self._enter_decoder, with_kwargs=True))
        self.hook(decoder.register_forward_hook(self._leave_decoder))
        if self.unmerging is not None:
            self.attach_part(self.unmerging)
        extras = type(self.adapter).after_layer is not Adapter.after_layer
        for index, layer in enumerate(decoder.layers):
            self.hook(layer.register_forward_pre_hook(partial(self._enter_layer, index), with_kwargs=True))
            if extras:
                self.hook(layer.register_forward_hook(partial(self._leave_layer, index)))

    def _observed(self) -> set[int]:
        """The decoder layers whose attention is read."""
        before = {step.layer - 1 for step in self.steps.values() if step.method.needs & _OF_THE_LAYER_BEFORE}
        return before | {step.layer for step in self.steps.values() if "next_row_attention" in step.method.needs}

    def _record_features(self, modality: str) -> None:
        """Wrap `get_image_features`: what it returns tells pictures apart, and `generate` calls it before any
        forward."""
        base, name = self.adapter.base, f"get_{modality}_features"
        original = getattr(base, name, None)
        if original is None or modality not in self.adapter.placeholders:
            return
        self.replace(base, name, FeatureRecorder(original, partial(self._note_features, modality)))

    # -- the stack of calls of this thread

    def _stack(self) -> list[Call]:
        calls = _calls.__dict__.setdefault("stacks", {})
        return calls.setdefault(id(self), [])

    def _call(self) -> Call | None:
        stack = self._stack()
        return stack[-1] if stack else None

    def _enter_base(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        call = Call(arguments=dict(zip(self._parameters, args, strict=False)) | kwargs)
        self._stack().append(call)
        encoded = call.arguments.get("mm_encoder_outputs") or {}
        for modality in _MODALITIES:
            if encoded.get(modality) is not None:
                self._match_features(call, modality, encoded[modality])

    def _leave_base(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._stack().pop()

    def _note_features(self, modality: str, arguments: dict[str, Any], output: Any) -> None:
        """Pictures were encoded. Their grids travel with the output, which generate() hands to a later forward."""
        grids = self.adapter.grids(modality, arguments)
        if grids is not None and hasattr(output, "pooler_output"):
            output.tokenprune_grids = grids
        if modality == "video" and hasattr(output, "pooler_output"):
            output.tokenprune_frames = self.adapter.video_frames(arguments)
        if self.encoder is not None:
            self.encoder.note(modality, arguments, output)
        if self.attention is not None:
            self.attention.note(modality, arguments, output)
        if (call := self._call()) is not None:
            self._match_features(call, modality, output)

    def _match_features(self, call: Call, modality: str, output: Any) -> None:
        call.outputs[modality] = output
        if not call.visual:
            call.visual = self.adapter.visual_mask(call.arguments)
        # Not for videos: older versions of LLaVA-OneVision add a newline to their features after encoding them.
        if modality == "image" and modality in call.visual:
            check_placeholders(modality, call.visual[modality], output)

    # -- the decoder

    def _enter_decoder(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        call, embeds = self._call(), kwargs.get("inputs_embeds")
        if call is None or embeds is None:
            return None
        start = time.perf_counter()
        call.cache = kwargs.get("past_key_values")
        call.reduction = caches.reduction_of(call.cache)
        call.past = int(call.cache.get_seq_length()) if call.cache is not None else 0
        batch, length = embeds.shape[:2]
        if call.reduction is not None and (decode := call.reduction.decode) is not None:
            call.decode, decode.view = decode, None
        if call.past == 0:
            self.stats = Stats()
        if call.outputs and length > 1:
            call.segments = find_segments(
                call.visual, call.outputs if self.adapter.features_per_picture else {}, self.per
            )
        if call.segments is not None and self.encoder is not None:
            call.merged = self.encoder.select(call, call.segments.to(embeds.device))
            if self.unmerging is not None and call.merged is not None:
                self._check_arguments(kwargs, batch, length)
                self.unmerging.take(call, batch, length)
        if self.blocks is not None:
            self.blocks.enter(call, kwargs, batch, length)
            if call.past == 0:
                self.stats.notes = call.notes
        if call.segments is None and call.reduction is None:
            return None
        cutting = call.segments is not None and resolve_budgets(call, self.steps, self.shape, length)
        if call.segments is not None:
            call.report = Report(self.shape, call.segments, batch, length, self.record)
            if self.encoder is not None:
                call.report.stats.encoder_tokens_per_layer = self.encoder.counts(call)
            call.report.stats.notes = call.notes
            if call.unmerged is not None:
                call.report.unmerge(call, self.encoder.step)
        if not cutting and call.reduction is None:
            if call.report is not None:
                call.report.add_time(time.perf_counter() - start)
            return None if call.blocks is None else (args, kwargs)

        call.active = True
        call.ragged = call.reduction is not None and call.reduction.ragged
        if call.decode is not None:
            step = self.steps.get(call.decode.layer)
            # Another patch than the one that made the cache leaves it as it is.
            if length == 1 and step is not None and step.method == call.decode.method:
                call.decides_at = step.layer
        call.layout = call.arrival = Layout.full(batch, length, embeds.device)
        if cutting:
            self._check_setup(kwargs, batch, length)
            if call.cache is None and self._uses_cache(kwargs):
                kwargs["past_key_values"] = call.cache = DynamicCache(config=self.adapter.text_config)
        call.extras = self.adapter.take_extras(kwargs, call.layout) if call.segments is not None else None
        if cutting and (0 in call.cuts or call.merged is not None):
            self._cut_entry(call, kwargs)
            if call.blocks is not None:
                self.blocks.take_mask(kwargs)
        call.arrival = call.layout
        call.open_group(0)
        if call.report is not None:
            call.report.add_time(time.perf_counter() - start)
        return args, kwargs

    def _check_setup(self, kwargs: dict[str, Any], batch: int, length: int) -> None:
        cache = kwargs.get("past_key_values")
        if isinstance(cache, Cache):
            caches.check(cache)
        for step in self.steps.values():
            if step.method.site is Site.DECODE:
                decoding.check_setup(step.method, self.adapter.text_config, batch)
        if self.decoder.training and getattr(self.decoder, "gradient_checkpointing", False) and any(self.steps):
            raise UnsupportedSetupError(
                "gradient checkpointing runs decoder layers a second time, without the state of the cut between them; "
                "call model.gradient_checkpointing_disable(), or use a PRE_LLM method (it cuts before the layers)"
            )
        self._check_arguments(kwargs, batch, length)

    def _check_arguments(self, kwargs: dict[str, Any], batch: int, length: int) -> None:
        for name, value in kwargs.items():
            per_token = isinstance(value, Tensor) and value.ndim >= 2 and tuple(value.shape[:2]) == (batch, length)
            if per_token and name not in _PER_TOKEN and name not in self.adapter.extra_arguments:
                raise UnsupportedSetupError(
                    f"the decoder of {self.adapter.config.model_type!r} got the per-token argument {name!r}, which its "
                    "adapter does not know how to cut; override take_extras in an adapter for this family"
                )

    def _uses_cache(self, kwargs: dict[str, Any]) -> bool:
        use_cache = kwargs.get("use_cache")
        return bool(self.adapter.text_config.use_cache if use_cache is None else use_cache)

    def _cut_entry(self, call: Call, kwargs: dict[str, Any]) -> None:
        """PRE_LLM: cut the decoder's arguments."""
        embeds, mask, positions = kwargs["inputs_embeds"], kwargs.get("attention_mask"), kwargs.get("position_ids")
        length = embeds.shape[1]
        if positions is None:
            # The decoder would count the remaining tokens; they keep the positions of the full prompt.
            positions = torch.arange(call.past, call.past + length, device=embeds.device)[None]
        sliding = any("sliding" in kind for kind in getattr(self.adapter.text_config, "layer_types", None) or ())
        sliding = sliding or getattr(self.adapter.text_config, "sliding_window", None) is not None
        prepared = isinstance(mask, dict) or (mask is not None and mask.ndim == 4)
        if not prepared and (call.past or sliding):
            mask = create_masks_for_generate(self.adapter.text_config, embeds, mask, call.cache, None)
            prepared = True

        if call.merged is not None:
            embeds = apply(call, self.encoder.step, call.merged, embeds, self.adapter)
        if 0 in call.cuts:
            embeds = cut(call, self.steps[0], embeds, self.adapter)
        kwargs["inputs_embeds"] = embeds
        layout = call.layout
        kwargs["position_ids"] = gather_tokens(positions, layout.index, -1)
        if prepared:
            call.columns.clear()
            call.open_group(0)
            columns = call.columns.pop()[1]
            kinds = mask if isinstance(mask, dict) else {"": mask}
            made = {kind: self._prepared_mask(call, one, columns, embeds.dtype) for kind, one in kinds.items()}
            kwargs["attention_mask"] = made if isinstance(mask, dict) else made[""]
        elif mask is not None:
            mask = mask[:, -length:].gather(1, layout.index)
            kwargs["attention_mask"] = mask if layout.valid is None else mask.masked_fill(~layout.valid, 0)
        elif layout.valid is not None:
            kwargs["attention_mask"] = layout.valid.long()
        elif call.cache is None:
            # Without mask and cache transformers takes gaps in position_ids for borders of packed sequences.
            kwargs["attention_mask"] = torch.ones_like(layout.index)

    def _prepared_mask(self, call: Call, mask: Any, columns: Tensor, dtype: torch.dtype) -> Any:
        if mask is not None:
            return masks.gather_mask(mask, call.layout.index, columns)
        if call.layout.valid is None:
            return None
        return masks.causal_mask(columns >= 0, call.layout.width, self._attention(), dtype)

    def _attention(self) -> str:
        return self.adapter.text_config._attn_implementation

    def _leave_decoder(self, module: nn.Module, args: tuple, output: Any) -> Any:
        call = self._call()
        if call is None:
            return None
        if call.active and call.cache is not None:
            length = call.past + call.layout.length
            decode = call.started or call.decode
            caches.attach(call.cache, caches.Reduction(length, call.columns, call.ragged, decode))
        if call.report is not None:
            # One assignment: other threads may run the same model.
            self.stats = call.report.finish(call.cache or getattr(output, "past_key_values", None), call.past)
        elif call.decode is not None:
            self.stats = decoding.finish(call)
        if call.unmerged is not None:
            whole = call.unmerged.expand
        elif not call.active or (call.layout.width == call.layout.length and call.layout.valid is None):
            return None
        else:
            whole = call.layout.scatter_back
        if isinstance(output, tuple):
            return (whole(output[0]), *output[1:])
        output.last_hidden_state = whole(output.last_hidden_state)
        return output

    # -- decoder layers

    def _enter_layer(
        self, index: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict] | None:
        call = self._call()
        if call is None or not call.active:
            return None
        if index and index == call.decides_at:
            self._decide(call)
        if index and call.starts_group(index):
            if index in call.cuts:
                args, kwargs = self._cut_layer(call, index, args, kwargs)
            call.open_group(index)
        return args, self._layer_arguments(call, index, args, kwargs)

    def _layer_arguments(self, call: Call, index: int, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a layer beside the hidden states, for the current layout."""
        if "attention_mask" in kwargs:
            dtype = (args[0] if args else kwargs["hidden_states"]).dtype
            kwargs["attention_mask"] = self._layer_mask(call, index, kwargs["attention_mask"], dtype)
        elif call.ragged:
            kwargs["attention_mask"] = self._layer_mask(call, index, None, args[0].dtype)
        if call.layout is not call.arrival:
            for name, dim in (("position_embeddings", -2), ("position_ids", -1)):
                if kwargs.get(name) is not None:
                    kwargs[name] = call.gathered(kwargs[name], dim)
        return kwargs

    def _cut_layer(self, call: Call, index: int, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        """IN_LLM: cut the hidden states that arrive at a layer."""
        start = time.perf_counter()
        hidden = args[0] if args else kwargs["hidden_states"]
        step = self.steps[index]
        if "next_row_attention" in step.method.needs:
            call.ahead = self._look_ahead(call, index, args, kwargs)
        if step.method.site is Site.DECODE:
            hidden = decoding.cut(call, step, hidden, self.adapter, self.record)
        else:
            hidden = cut(call, step, hidden, self.adapter)
        call.report.add_time(time.perf_counter() - start)
        return ((hidden, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": hidden})

    def _decide(self, call: Call) -> None:
        """DECODE: drop more visual tokens before the layers from here on run."""
        start = time.perf_counter()
        decoding.decide(call)
        call.decode.stats.overhead_ms += 1000 * (time.perf_counter() - start)

    def _look_ahead(self, call: Call, index: int, args: tuple, kwargs: dict[str, Any]) -> Observation:
        """What the attention of layer `index` would see of the tokens that arrive at it, if none were cut.

        The layer runs until its attention function is called, so its own norms, projections and rotary embedding apply,
        whatever the family calls them; the cache is left out, and nothing behind is computed.
        """
        call.open_group(index)
        call.group = -index  # masks of the uncut layout are remembered apart from those after the cut
        kwargs = self._layer_arguments(call, index, args, dict(kwargs))
        call.columns.pop()
        kwargs = {name: None if value is call.cache else value for name, value in kwargs.items()}
        call.looking = True
        try:
            with torch.no_grad():
                self.decoder.layers[index].forward(*args, **kwargs)  # not a call: that would enter our own hooks
        except _SeenError as seen:
            observation = seen.observation
        else:
            raise UnsupportedSetupError(f"decoder layer {index} ran without calling its attention function")
        finally:
            call.looking = False
        if caches.cached_tokens(call.cache, index):
            past = call.cache.layers[index].keys.to(observation.key.device)
            observation.key = torch.cat([past, observation.key], dim=2)
        return observation

    def _layer_mask(self, call: Call, index: int, mask: Any, dtype: torch.dtype) -> Any:
        if call.blocks is not None and index in self.blocks:
            return None  # it knows itself who attends to whom
        if call.layout is call.arrival and call.reduction is None:
            return mask  # the decoder made it for exactly these tokens
        return call.layer_mask(mask, index, self._attention(), dtype)

    def _leave_layer(self, index: int, module: nn.Module, args: tuple, output: Any) -> Any:
        call = self._call()
        if call is None or not call.active or call.extras is None:
            return None
        if isinstance(output, tuple):
            return (self.adapter.after_layer(call.extras, index, output[0]), *output[1:])
        return self.adapter.after_layer(call.extras, index, output)

    def _observe(self, layer: int, observation: Observation) -> None:
        call = self._call()
        if call is None or not call.active:
            return
        if call.looking:
            raise _SeenError(observation)
        cuts = layer + 1 in call.cuts and self.steps[layer + 1].method.needs & _OF_THE_LAYER_BEFORE
        if cuts or layer + 1 == call.decides_at:
            call.observation = observation


class _SeenError(Exception):
    """Ends the run of a layer of which only the attention's queries and keys are wanted."""

    def __init__(self, observation: Observation) -> None:
        super().__init__("a layer was run only to see its queries and keys")
        self.observation = observation


_calls = threading.local()

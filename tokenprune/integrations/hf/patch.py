# SPDX-License-Identifier: Apache-2.0
"""Make the parts of a patch out of methods and budgets: one place where it is decided which part does what."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import nn

from tokenprune.budgets import Budget
from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.integrations.hf.checks import check_methods, check_steps
from tokenprune.integrations.hf.engine.call_check import CallCheck
from tokenprune.integrations.hf.engine.decode_pruning import DecodePruning
from tokenprune.integrations.hf.engine.drafts import Drafts
from tokenprune.integrations.hf.engine.engine import Engine
from tokenprune.integrations.hf.engine.kept_inputs import KeptInputs
from tokenprune.integrations.hf.engine.layer_attention import LayerAttention
from tokenprune.integrations.hf.engine.packed_calls import PackedCalls
from tokenprune.integrations.hf.engine.static_steps import StaticSteps
from tokenprune.integrations.hf.engine.video_frames import VideoFrames, compares_frames
from tokenprune.integrations.hf.families import Adapter, adapter_for
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.hf.forward.plan import Step
from tokenprune.integrations.hf.guard.part import build_guard
from tokenprune.integrations.hf.guard.part import check_processor as check_unread_processor
from tokenprune.integrations.hf.processor_check import check_processor
from tokenprune.integrations.hf.towers.attention_scores import BlockReader
from tokenprune.integrations.hf.towers.base import TowerPart
from tokenprune.integrations.hf.towers.build import tower_part
from tokenprune.integrations.hf.towers.frame_merging import FrameMerging
from tokenprune.integrations.hf.towers.lost_features import ChunkedPrefillCheck
from tokenprune.integrations.shared import checks
from tokenprune.integrations.shared.towers.tower_scores import find_pixel_observables
from tokenprune.selection.method import Method, Pruner, Site
from tokenprune.selection.observable import ObservedAt
from tokenprune.selection.observable_registry import select_observables
from tokenprune.selection.sites import check_sites, composition_key
from tokenprune.selection.sites.attention import AttentionPattern
from tokenprune.selection.sites.decode import DecodeMethod
from tokenprune.selection.sites.encoder import EncoderMethod, TowerMethod
from tokenprune.selection.sites.frames import FrameMerger
from tokenprune.selection.sites.pixels import ImageChooser, ResizeMethod
from tokenprune.selection.sites.units import UnitDropper

if TYPE_CHECKING:
    from tokenprune.integrations.hf.graphs.settings import Graphs
    from tokenprune.integrations.hf.guard.settings import Guard


def hf_parts(
    model: nn.Module,
    methods: Sequence[Method],
    budgets: Sequence[Budget],
    record: bool,
    processor: Any,
    guard: Guard | None,
    feature_cache: int | None = None,
    graphs: bool | Graphs | None = None,
) -> list[Any]:
    """Return what `patch` has to attach, in order; the last is the engine, which has the statistics. Nothing is changed
    yet, and everything that cannot work is refused."""
    preferred = [method.preferred for method in methods]
    if preferred != list(methods):
        with suppress(TokenPruneError):
            return _parts(model, preferred, budgets, record, processor, guard, feature_cache, graphs)
    return _parts(model, methods, budgets, record, processor, guard, feature_cache, graphs)


def _parts(
    model: nn.Module,
    methods: Sequence[Method],
    budgets: Sequence[Budget],
    record: bool,
    processor: Any,
    guard: Guard | None,
    feature_cache: int | None,
    graphs: bool | Graphs | None,
) -> list[Any]:
    """Return the parts for exactly these methods; see `hf_parts`."""
    adapter = adapter_for(model)
    layers = len(adapter.decoder.layers)
    stages = [
        Step(stage, budget, owner, whole)
        for owner, (method, whole) in enumerate(zip(methods, budgets, strict=True))
        for stage, budget in method.stages(whole, layers)
    ]
    stages.sort(key=lambda step: composition_key(step.method))
    acting = [step.method for step in stages]
    check_sites(acting)
    checks.check_together(acting)
    check_methods(stages, adapter)
    check_processor(processor, adapter)

    pixels: list[Any] = []
    steps = []
    parts: list[Part] = []
    for step in stages:
        method, budget = step.method, step.budget
        match method:
            case ResizeMethod():
                from tokenprune.integrations.hf.pixels.resizing import PixelPatch

                pixels.append(PixelPatch(method, budget, processor, adapter))
            case ImageChooser():
                from tokenprune.integrations.hf.pixels.image_selection import ViewPatch

                pixels.append(ViewPatch(method, budget, processor, adapter))
            case TowerMethod() if method.is_identity(budget):
                pass
            case UnitDropper():
                parts.append(tower_part(adapter, method, budget, processor))
            case FrameMerger():
                parts.append(FrameMerging(adapter, method, budget))
            case EncoderMethod():
                parts.append(tower_part(adapter, method, budget))
                if method.vtu != "off":
                    from tokenprune.integrations.hf.attention.virtual_unmerging import VirtualUnmerging

                    parts.append(VirtualUnmerging(adapter, method.vtu))
            case AttentionPattern():
                from tokenprune.integrations.hf.attention.blockwise import BlockAttention

                parts.append(BlockAttention(adapter, method, budget))
            case Pruner():
                steps.append(step)
    towers = [part for part in parts if isinstance(part, TowerPart)]
    read = pixels or any(part.reads_processor for part in towers) or any(map(find_pixel_observables, acting))
    unread = processor is not None and not read
    if guard is not None and unread:
        check_unread_processor(processor, methods)
    check_steps(steps, adapter)
    # A method that will not cut needs to see nothing.
    cutting = [step.method for step in steps if step.acts]
    readers = [
        method
        for method in cutting
        if isinstance(method, Pruner) and select_observables(method.needs, ObservedAt.TOWER, ObservedAt.TOWER_BLOCK)
    ]
    inside = [part.method for part in towers]
    if readers:
        if inside:
            what = "merges" if inside[0].merges else "drops"
            raise OptionError(
                f"{readers[0].name} reads the attention of the vision tower's patches, and {inside[0].name} {what} "
                "some of them. Use one of the two."
            )
        parts.append(BlockReader(adapter, readers, processor))
    if any(compares_frames(step) for step in steps):
        merges = [method.name for method in inside if method.removes]
        parts.append(VideoFrames(adapter, sorted(steps, key=lambda step: step.layer), merges))
    weighed = [step for step in steps if step.acts and isinstance(step.method, Pruner) and step.method.weighs_attention]
    if weighed:
        from tokenprune.integrations.hf.attention.weighing import Weighing

        parts += [Weighing(adapter, step) for step in weighed]
    removes = bool(cutting or parts)
    if guard is not None:
        parts += build_guard(adapter, guard, methods, budgets, processor)
    if feature_cache is not None:
        if any(method.query_aware for method in inside):
            raise OptionError(
                "feature_cache= keeps the output of the tower, which depends on the question here. Leave "
                "feature_cache= out."
            )
        from tokenprune.integrations.hf.feature_cache.part import FeatureReuse

        # What happens to tokens inside the tower is counted for a whole call.
        parts.append(FeatureReuse(adapter, feature_cache, not inside))
    if removes:
        parts += [CallCheck(adapter, cutting), PackedCalls(adapter)]
        parts.append(Drafts(model, *(method.name for method in cutting if method.site is Site.DECODE)))
    if not all(budget.is_identity() for budget in budgets):
        parts.append(ChunkedPrefillCheck(adapter))
    if graphs is not None and graphs is not False:
        near = {layer for step in steps if step.layer for layer in (step.layer - 1, step.layer)}
        whole = [step.method.name for step in stages if step.method.site is Site.ATTENTION or step in weighed]
        why_not = f"{whole[0]} changes what all layers attend to" if whole else ""
        from tokenprune.integrations.hf.graphs.prefill import graphed_prefill

        parts += graphed_prefill(adapter, graphs, near, why_not)
    if pixels:
        from tokenprune.integrations.hf.pixels.resizing import FullCounts

        parts.append(FullCounts(pixels))
    reading = [method.name for method in acting if not isinstance(method, (ResizeMethod, ImageChooser))]
    parts += _decoder_parts(adapter, steps, record)
    return [*pixels, Engine(adapter, steps, parts, record, reading if removes else ())]


def _decoder_parts(adapter: Adapter, steps: Sequence[Step], record: bool) -> list[Part]:
    """Return the parts that observe and follow the cuts at the decoder."""
    by_layer = {step.layer: step for step in steps}
    parts: list[Part] = [StaticSteps(adapter)]
    attention = LayerAttention(adapter, by_layer)
    needs = {need for step in steps for need in step.method.needs}
    if select_observables(needs, ObservedAt.LAYER_BEFORE, ObservedAt.NEXT_LAYER, ObservedAt.UNROTATED):
        parts.append(attention)
    if select_observables(needs, ObservedAt.ENTRY, ObservedAt.INPUT_BEFORE, ObservedAt.UNROTATED, ObservedAt.OWN):
        parts.append(KeptInputs(adapter, by_layer, attention))
    # Last: it reads what the others observed.
    parts += [DecodePruning(adapter, step.method, record) for step in steps if isinstance(step.method, DecodeMethod)]
    return parts

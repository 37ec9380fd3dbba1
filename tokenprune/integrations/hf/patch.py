# SPDX-License-Identifier: Apache-2.0
"""Build the parts of a patch from its methods and budgets."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from torch import nn

from tokenprune.budgets import Budget
from tokenprune.errors import OptionError, TokenPruneError
from tokenprune.integrations.hf.checks import check_methods, check_steps
from tokenprune.integrations.hf.engine.call_check import CallCheck, ChunkedPrefillCheck
from tokenprune.integrations.hf.engine.decode_pruning import DecodePruning
from tokenprune.integrations.hf.engine.drafts import Drafts
from tokenprune.integrations.hf.engine.engine import Engine
from tokenprune.integrations.hf.engine.input_recorder import InputRecorder
from tokenprune.integrations.hf.engine.layer_attention import LayerAttention
from tokenprune.integrations.hf.engine.packed_calls import PackedCalls
from tokenprune.integrations.hf.engine.static_steps import StaticSteps
from tokenprune.integrations.hf.engine.video_frames import VideoFrames, compares_frames
from tokenprune.integrations.hf.families import Adapter, get_adapter
from tokenprune.integrations.hf.forward.part import Part
from tokenprune.integrations.hf.forward.plan import Step
from tokenprune.integrations.hf.guard.part import build_guard
from tokenprune.integrations.hf.guard.part import check_processor as check_unread_processor
from tokenprune.integrations.hf.processor_check import check_processor
from tokenprune.integrations.hf.towers.attention_scores import BlockReader
from tokenprune.integrations.hf.towers.base import TowerPart
from tokenprune.integrations.hf.towers.build import build_tower_part
from tokenprune.integrations.hf.towers.frame_merging import FrameMerging
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


def build_hf_parts(
    model: nn.Module,
    methods: Sequence[Method],
    budgets: Sequence[Budget],
    record: bool,
    processor: Any,
    guard: Guard | None,
    feature_cache: int | None = None,
    graphs: bool | str | Graphs | None = None,
) -> list[Any]:
    """Check a setup and build the parts that `patch` attaches. The model is not changed.

    Each method is first tried in its preferred form (`Method.preferred`).

    Args:
        model: Model to patch.
        methods: Methods, one per budget.
        budgets: Budgets of the methods.
        record: Whether to record selections in the statistics.
        processor: Processor of the model, or None.
        guard: Guard settings, or None without a guard.
        feature_cache: Number of encoder outputs to cache, or None without a cache.
        graphs: CUDA graph settings, or True for the defaults.

    Returns:
        Parts in the order of attachment. The last part is the engine, which has the statistics.

    Raises:
        TokenPruneError: If the setup is not supported.
    """
    preferred = [method.preferred for method in methods]
    if preferred != list(methods):
        with suppress(TokenPruneError):
            return _build_parts(model, preferred, budgets, record, processor, guard, feature_cache, graphs)
    return _build_parts(model, methods, budgets, record, processor, guard, feature_cache, graphs)


def _build_parts(
    model: nn.Module,
    methods: Sequence[Method],
    budgets: Sequence[Budget],
    record: bool,
    processor: Any,
    guard: Guard | None,
    feature_cache: int | None,
    graphs: bool | str | Graphs | None,
) -> list[Any]:
    """Build the parts for exactly these methods."""
    adapter = get_adapter(model)
    layers = len(adapter.decoder.layers)
    stages = [
        Step(stage, stage_budget, owner, budget)
        for owner, (method, budget) in enumerate(zip(methods, budgets, strict=True))
        for stage, stage_budget in method.stages(budget, layers)
    ]
    stages.sort(key=lambda step: composition_key(step.method))
    stage_methods = [step.method for step in stages]
    check_sites(stage_methods)
    checks.check_together(stage_methods)
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
                parts.append(build_tower_part(adapter, method, budget, processor))
            case FrameMerger():
                parts.append(FrameMerging(adapter, method, budget))
            case EncoderMethod():
                parts.append(build_tower_part(adapter, method, budget))
                if method.vtu != "off":
                    from tokenprune.integrations.hf.attention.virtual_unmerging import VirtualUnmerging

                    parts.append(VirtualUnmerging(adapter, method.vtu))
            case AttentionPattern():
                from tokenprune.integrations.hf.attention.blockwise import BlockAttention

                parts.append(BlockAttention(adapter, method, budget))
            case Pruner():
                steps.append(step)
    towers = [part for part in parts if isinstance(part, TowerPart)]
    reads_processor = (
        pixels or any(part.reads_processor for part in towers) or any(map(find_pixel_observables, stage_methods))
    )
    if guard is not None and processor is not None and not reads_processor:
        check_unread_processor(processor, methods)
    check_steps(steps, adapter)
    # Observables are computed only for methods that cut.
    cutting = [step.method for step in steps if step.acts]
    readers = [
        method
        for method in cutting
        if isinstance(method, Pruner) and select_observables(method.needs, ObservedAt.TOWER, ObservedAt.TOWER_BLOCK)
    ]
    tower_methods = [part.method for part in towers]
    if readers:
        if tower_methods:
            verb = "merges" if tower_methods[0].merges else "drops"
            raise OptionError(
                f"{readers[0].name} reads the attention between patches in the vision tower, and "
                f"{tower_methods[0].name} {verb} patches there. Use only one of the two methods."
            )
        parts.append(BlockReader(adapter, readers, processor))
    if any(compares_frames(step) for step in steps):
        merges = [method.name for method in tower_methods if method.removes]
        parts.append(VideoFrames(adapter, sorted(steps, key=lambda step: step.layer), merges))
    weighing = [
        step for step in steps if step.acts and isinstance(step.method, Pruner) and step.method.weighs_attention
    ]
    if weighing:
        from tokenprune.integrations.hf.attention.weighing import Weighing

        parts += [Weighing(adapter, step) for step in weighing]
    removes = bool(cutting or parts)
    if guard is not None:
        parts += build_guard(adapter, guard, methods, budgets, processor)
    if feature_cache is not None:
        if any(method.query_aware for method in tower_methods):
            raise OptionError(
                "feature_cache= stores the output of the vision tower, but this method makes the output depend on the "
                "question. Leave feature_cache= out."
            )
        from tokenprune.integrations.hf.feature_cache.part import FeatureReuse

        # With a method inside the tower, its token counts belong to a complete call, so images are not cached singly.
        parts.append(FeatureReuse(adapter, feature_cache, not tower_methods))
    if removes:
        parts += [CallCheck(adapter, cutting), PackedCalls(adapter)]
        parts.append(Drafts(model, *(method.name for method in cutting if method.site is Site.DECODE)))
    if not all(budget.is_identity() for budget in budgets):
        parts.append(ChunkedPrefillCheck(adapter))
    if graphs is not None and graphs is not False:
        cut_layers = {layer for step in steps if step.layer for layer in (step.layer - 1, step.layer)}
        in_all_layers = [step.method.name for step in stages if step.method.site is Site.ATTENTION or step in weighing]
        reason = f"{in_all_layers[0]} changes the attention of all layers" if in_all_layers else ""
        from tokenprune.integrations.hf.graphs.decoder import build_graphed_decoder

        parts += build_graphed_decoder(adapter, graphs, cut_layers, reason)
    if pixels:
        from tokenprune.integrations.hf.pixels.resizing import FullCounts

        parts.append(FullCounts(pixels))
    names = [method.name for method in stage_methods if not isinstance(method, (ResizeMethod, ImageChooser))]
    parts += _build_decoder_parts(adapter, steps, record)
    return [*pixels, Engine(adapter, steps, parts, record, names if removes else ())]


def _build_decoder_parts(adapter: Adapter, steps: Sequence[Step], record: bool) -> list[Part]:
    """Build the parts that observe the decoder or prune while decoding."""
    by_layer = {step.layer: step for step in steps}
    parts: list[Part] = [StaticSteps(adapter)]
    attention = LayerAttention(adapter, by_layer)
    needs = {need for step in steps for need in step.method.needs}
    if select_observables(needs, ObservedAt.LAYER_BEFORE, ObservedAt.NEXT_LAYER, ObservedAt.UNROTATED):
        parts.append(attention)
    if select_observables(needs, ObservedAt.ENTRY, ObservedAt.INPUT_BEFORE, ObservedAt.UNROTATED, ObservedAt.OWN):
        parts.append(InputRecorder(adapter, by_layer, attention))
    # Last, because DecodePruning reads the results of the observers.
    parts += [DecodePruning(adapter, step.method, record) for step in steps if isinstance(step.method, DecodeMethod)]
    return parts

# SPDX-License-Identifier: Apache-2.0
"""Methods that read the vision tower's attention: answers match the patched transformers model, for every tower."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import tokenprune
from checkpoints import Checkpoint
from conftest import Engine, mlp_inputs
from front_end import config
from tokenprune import BudgetError, OptionError, Pruner, Site, UnsupportedSetupError
from tokenprune.integrations.shared.checks.reading import find_missing_observable
from tokenprune.integrations.shared.towers.tower_scores import find_last_read_block
from tokenprune.integrations.vllm.settings import tower_items, towers
from tokenprune.integrations.vllm.settings.parse import check_method
from tokenprune.integrations.vllm.settings.plan import MODALITIES
from tokenprune.integrations.vllm.worker.tower import find_tower_blocks
from tokenprune.methods.registry import available_methods, method_class, register
from tokenprune.models.families import SUPPORTED, TOWERS, get_family, get_tower
from tokenprune.selection.observable_registry import compares_frames
from tokenprune.selection.sites.encoder import Tower
from tokenprune.selection.sites.units import UnitDropper
from tokenprune_bench.calibration import Thresholds

VSCAN = {"method": "vscan", "keep": 0.4, "stage2": False}
FAMILIES = [
    "llava", "llava_next", "llava_onevision", "gemma3", "idefics3", "smolvlm", "internvl", "qwen2_vl", "qwen2_5_vl",
    "qwen3_vl", "pixtral", "mistral3",
]  # fmt: skip


@register("seer", site=Site.PRE_LLM, needs=("encoder_attention",), paper="none")
@dataclass(frozen=True)
class Seer(Pruner):
    """Third-party method: keep the tokens that the tower attends to most in two of its blocks."""

    early: float = 0.3

    @property
    def encoder_layers(self) -> tuple[float | int, ...]:
        return self.early, -1

    def score(self, tokens: Any) -> Tensor:
        return sum(tokens.encoder_attention(layer).amax(1) for layer in self.encoder_layers)


@register("keyhole", site=Site.PRE_LLM, needs=("encoder_received_attention", "encoder_keys", "encoder_queries"))
@dataclass(frozen=True)
class Keyhole(Seer):
    """Third-party method: keep the most attended tokens with long keys and queries, in two of the tower's blocks."""

    def score(self, tokens: Any) -> Tensor:
        keys = sum(tokens.encoder_keys(layer).norm(dim=-1) for layer in self.encoder_layers)
        queries = sum(tokens.encoder_queries(layer)[..., ::2].sum(-1) for layer in self.encoder_layers)
        received = sum(tokens.encoder_received_attention(layer).mean(1) for layer in self.encoder_layers)
        count = tokens.mask.sum(1, keepdim=True)
        return keys + queries + received * count


@register("loudest", site=Site.IN_ENCODER)
@dataclass(frozen=True)
class Loudest(UnitDropper):
    """Third-party method: keep the units with the largest hidden states at the input of a block."""

    sees: ClassVar[str] = "hidden"
    chooses_count: ClassVar[bool] = False
    block_index: int = 0

    def block(self, depth: int) -> int:
        return self.block_index

    def keep_units(self, pixels: Tensor, max_units: int) -> Tensor:
        norm = pixels.norm(dim=-1)
        keep = torch.zeros(norm.numel(), dtype=torch.bool)
        keep[norm.flatten().topk(max_units).indices] = True
        return keep.view_as(norm)


SETTINGS = [
    {},
    {"keep": 0.7, "local": 0.2, "merge": False},
    {"off": True},
    {"window": 2, "local_layer": -1},
    {"method": "seer", "keep": 0.5},
    {"method": "divprune", "keep": 0.5},
    {"method": "keyhole", "keep": 0.4},
]


PACKED = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # towers that merge units of one sequence
TILES = ("idefics3", "smolvlm", "internvl", "gemma3")  # towers that merge squares of tiles
ROWS = ("llava", *TILES)  # each image or tile is a row of the tower
DYMU = {"method": "dymu", "keep": 0.5, "exact": True}


@pytest.fixture(scope="module")
def thresholds(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Thresholds for merges in each block: images need more and fewer merges than `keep`."""

    def get(name: str) -> Path:
        model = reference(name).model
        candidates = (getattr(model.model, attribute, None) for attribute in ("visual", "vision_tower", "vision_model"))
        tower, blocks = next(filter(None, candidates)), towers.depth_of(model.config.vision_config)
        values = {0.5: torch.tensor([0.9, 0.5, 1.0, 0.7][:blocks])}
        path = tmp_path_factory.mktemp("thresholds") / f"{name}.safetensors"
        unit = get_family(model.config.model_type).get_unit_side(model.config) ** 2
        Thresholds(values, Tower(1, 0, blocks, blocks, tower, unit).fingerprint, 1).save(path)
        return path

    return get


@pytest.fixture(scope="module", params=FAMILIES)
def engine(request: pytest.FixtureRequest, start: Callable[..., Engine], thresholds: Any) -> Engine:
    profiles = {}
    if request.param in PACKED + TILES:  # a request cannot name a file
        profiles = {"profiles": {"dymu": DYMU | {"thresholds": str(thresholds(request.param))}}}
    return start(request.param, VSCAN | profiles)


def test_single_requests_and_cache_hits(
    engine: Engine, reference: Any, checkpoint: Checkpoint, encoder_calls: list[int]
) -> None:
    images, text = checkpoint.images(1), "what is it, and where, and why is it there at all? "
    for prompt in (checkpoint.prompt(1, text), checkpoint.prompt(1, text), checkpoint.prompt(1, "else? ")):
        engine.check(reference, [(prompt, images)])
    assert encoder_calls == [1]


def test_mixed_settings_in_one_call_of_the_tower(
    engine: Engine, reference: Any, checkpoint: Checkpoint, encoder_calls: list[int]
) -> None:
    prompt, images = checkpoint.prompt(1), checkpoint.images(1)
    for settings in (SETTINGS[:4], SETTINGS[2:]):
        engine.forget()
        engine.check(reference, [(prompt, images, override) for override in settings])
    assert max(encoder_calls) > 1
    assert engine.model.tokenprune_tower._scores == {}


def list_settings(name: str) -> list[dict[str, Any]]:
    """Return settings of all served methods that act before the language model on a family's images.

    For families with tiles, methods that need a thumbnail come first.
    """
    row, tiled = SUPPORTED[name], name in ("llava_next", "llava_onevision")
    settings = []
    for method_name in available_methods():
        method = method_class(method_name)
        if method.site is not Site.PRE_LLM or compares_frames(method()) or method_name in ("seer", "keyhole"):
            continue
        instance = method()
        if find_missing_observable(instance, row) or (
            tiled and not find_missing_observable(instance, SUPPORTED["qwen2_vl"])
        ):
            continue
        # Both methods first: with random weights all tokens tie for cdpruner's first pick.
        for options in (
            {},
            {**instance.query_free, **instance.fallback_options},
            instance.query_free,
            instance.fallback_options,
        ):
            try:
                check_method(method(**options))
            except OptionError:
                continue
            settings.append({"method": method_name, "keep": 0.45, **options})
            break
    return settings


def test_each_served_method_matches_transformers(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    if checkpoint.name not in ("llava", "qwen2_vl", "llava_next", "llava_onevision"):
        pytest.skip("two towers, one with a class token, and two families with tiles are sufficient")
    prompt, images, settings = checkpoint.prompt(1), checkpoint.images(1), list_settings(checkpoint.name)
    assert len(settings) > 18 or [setting["method"] for setting in settings] == ["globalcom2", "hired"]
    engine.check(reference, [(prompt, images, setting) for setting in settings], steps=2)


def test_several_images(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    cases = [(2, {}), (3, {"method": "seer", "keep": 0.3}), (3, {"keep": 0.6, "local": 1.0})]
    engine.check(reference, checkpoint.cases(*cases))


def test_video_and_image(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    if checkpoint.video is None:
        pytest.skip(f"{checkpoint.name} takes no video here")
    engine.check(reference, [checkpoint.video_case(override) for override in ({}, {"method": "seer", "keep": 0.3})])


def count_patches(config: Any, shapes: list[torch.Size]) -> int:
    """Return the number of patches in inputs of a block, without the class tokens of tiles."""
    class_tokens = get_tower(config).class_tokens
    return sum(shape[:-1].numel() - class_tokens * shape[0] for shape in shapes)


def test_units_merge_in_the_tower_as_in_transformers(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    if checkpoint.name not in PACKED + TILES:
        pytest.skip("its tower has no units; for tiles that are cropped see test_tile_merging.py")
    tome = {"method": "tome", "keep": 0.5}
    few = tome | {"keep": 20 if checkpoint.name in PACKED else 3}
    cases = [(2, tome), (3, tome | {"keep": 0.7, "proportional": False}), (2, {"profile": "dymu"}), (1, few)]
    requests = checkpoint.cases(*cases, (2, {"off": True}))
    if checkpoint.name in PACKED:
        requests.append(checkpoint.video_case(tome))
    engine.forget()
    with mlp_inputs(find_tower_blocks(engine.model)[-1]) as (last,):
        outputs = engine.check(reference, requests)
    config = engine.model.config
    tokens = [token for output in outputs for token in output.prompt_token_ids]
    placeholder_ids = [getattr(config, f"{kind}_token_id", None) for kind in MODALITIES]
    side = getattr(config.vision_config, "spatial_merge_size", get_family(config.model_type).get_unit_side(config))
    assert count_patches(config, last) == side**2 * sum(map(tokens.count, placeholder_ids))
    assert not any("_tokenprune_wrapped" in vars(module) for module in engine.model.modules())


def test_saint_matches_transformers(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    drop = {"method": "saint", "keep": 0.6}
    cases = [(2, drop), (3, drop | {"layer": 1, "keep": 0.7}), (1, {"off": True})]
    requests = checkpoint.cases(*cases)
    if checkpoint.name in PACKED:
        requests.append(checkpoint.video_case(drop))
    engine.forget()
    if not SUPPORTED[checkpoint.name].merges:
        with pytest.raises(UnsupportedSetupError, match="merges inside the vision tower"):
            engine.generate([engine.request(*requests[0])])
        return
    engine.check(reference, requests)
    with pytest.raises(OptionError, match="With threshold, the content decides the count"):
        engine.generate([engine.request(*requests[0][:2], drop | {"threshold": 0.7})])


def test_units_are_dropped_at_a_block_of_the_tower(engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    if checkpoint.name not in PACKED:
        pytest.skip("its tower only takes whole grids")
    two, first = ({"method": "loudest", "keep": 0.4, "block_index": block_index} for block_index in (2, 0))
    cases = [(2, two), (1, first), (3, two | {"keep": 5}), (2, {"off": True}), (1, {"method": "tome", "keep": 0.5})]
    engine.forget()
    blocks = find_tower_blocks(engine.model)
    with mlp_inputs(blocks[0], blocks[-1]) as (first_inputs, last_inputs):
        engine.check(reference, [*checkpoint.cases(*cases), checkpoint.video_case(two)])
    assert sum(shape[0] for shape in last_inputs) < sum(shape[0] for shape in first_inputs)
    with pytest.raises(OptionError, match=r"block 9 is out of range: the vision tower has \d+ blocks"):
        engine.generate([engine.request(checkpoint.prompt(1), checkpoint.images(1), two | {"block_index": 9})])


@pytest.mark.parametrize("score", ["diverse", "change", "norm", "detail", "random"])
def test_towerdrop_matches_transformers(score: str, engine: Engine, reference: Any, checkpoint: Checkpoint) -> None:
    if checkpoint.name not in PACKED:
        pytest.skip("its tower only takes whole grids")
    late = {"method": "towerdrop", "keep": 0.4, "score": score}
    cases = [(2, late), (3, late | {"layer": int(score == "change"), "keep": 5}), (1, {"off": True})]
    engine.forget()
    engine.check(reference, [*checkpoint.cases(*cases), checkpoint.video_case(late)])


@pytest.mark.parametrize("score", ["diverse", "change", "norm", "random"])
def test_towerdrop_keeps_equal_numbers_per_tile(
    score: str, engine: Engine, reference: Any, checkpoint: Checkpoint
) -> None:
    if checkpoint.name not in ROWS:
        pytest.skip("its images are not rows of its tower with separate budgets")
    drop = {"method": "towerdrop", "keep": 0.4, "score": score, "layer": 1}
    cases = [(2, drop), (3, drop | {"layer": int(score == "change"), "keep": 3}), (1, {"off": True})]
    requests, config = checkpoint.cases(*cases), engine.model.config
    engine.forget()
    with mlp_inputs(find_tower_blocks(engine.model)[-1]) as (last,):
        outputs = engine.check(reference, requests)
    tokens = [token for output in outputs for token in output.prompt_token_ids]
    side = get_family(config.model_type).get_unit_side(config)
    assert count_patches(config, last) == side**2 * tokens.count(config.image_token_id)
    prompt, images, read = *requests[-1][:2], find_last_read_block(config, towers.depth_of(config.vision_config)) + 1
    for more, says in (
        ({"layer": read}, f"block {read} is out of range: the vision tower has {read} blocks"),
        ({"score": "detail"}, r"which needs complete grids .*Use a method that acts after the tower"),
    ):
        with pytest.raises(OptionError, match=says):
            engine.generate([engine.request(prompt, images, drop | more)])


def test_unreachable_merges_do_not_stop_the_server(engine: Engine, checkpoint: Checkpoint) -> None:
    if checkpoint.name not in PACKED:
        pytest.skip("no tower of units")
    tome, prompt, images = {"method": "tome", "keep": 0.5}, checkpoint.prompt(1), checkpoint.images(1)
    for override, error, says in (
        (tome | {"keep": {"tokens": 1}}, BudgetError, "at most half"),
        (tome | {"r": 3}, OptionError, "Pass keep instead of r"),
    ):
        with pytest.raises(error, match=says):
            engine.generate([engine.request(prompt, images, override)])
    with pytest.raises(OptionError, match=r"each frame of a video\. Pass keep as a share such as 0\.5, not 20 tokens"):
        video = checkpoint.prompt(0, video=True), [], tome | {"keep": 20}, [checkpoint.clip()]
        engine.generate([engine.request(*video)])
    engine.generate([engine.request(prompt, images, tome)])


def test_invalid_requests_do_not_stop_the_server(engine: Engine, checkpoint: Checkpoint) -> None:
    prompt, images = checkpoint.prompt(1), checkpoint.images(1)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"local_layer": 17}, "block 17 does not exist"),
        ({"stage2": True}, "stage2=false"),
        ({"method": "seer", "early": 1.5}, "is not a share of the tower's depth"),
    ]
    if checkpoint.name == "llava":  # the model does not read the last block, so vLLM does not load it
        wrong.append(({"local_layer": 2}, "vLLM does not run block 2"))
    if checkpoint.name in ("llava_next", "llava_onevision"):
        wrong.append(
            ({"keep": 4}, "4 of this image's .* tokens, of which 4 are newlines; vscan needs at least one more")
        )
    for override, says in wrong:
        with pytest.raises(OptionError, match=says):
            engine.generate([engine.request(prompt, images, override)])
    engine.generate([engine.request(prompt, images)])


def test_unknown_towers_stop_the_server(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TOWERS, "pixtral")
    with pytest.raises(UnsupportedSetupError, match=r"of 'llava' with the tower 'pixtral' cannot be traced.*divprune"):
        config(folder("pixtral"), VSCAN)
    assert config(folder("pixtral"), {"method": "divprune"}).multimodal_config.tokenprune["method"] == "divprune"


def test_unsupported_unit_dropping_stops_the_server(folder: Any) -> None:
    drop = {"method": "towerdrop", "keep": 0.4, "layer": 1}
    for name, more, says in (
        ("llava_next", {}, "which crops tiles after the tower.*after the tower"),
        ("mistral3", {}, "which needs complete grids"),
        ("llava", {"score": "detail"}, "which needs complete grids"),
    ):
        with pytest.raises(UnsupportedSetupError, match=says):
            config(folder(name), drop | more)
    # The model does not read the third block.
    with pytest.raises(ValueError, match="block 2 is out of range: the vision tower has 2 blocks"):
        config(folder("llava"), drop | {"layer": 2})


def test_untraceable_items_raise(folder: Any) -> None:
    from vllm.multimodal.parse import ImageEmbeddingItems

    info = SimpleNamespace(get_hf_config=lambda: config(folder("internvl")).hf_config)
    with pytest.raises(OptionError, match=r"cannot be traced to patches.*after the tower"):
        tower_items.check_items(Seer(), {}, {"video": ["frames"]}, info)
    for name in ("tome", "towerdrop"):
        with pytest.raises(OptionError, match=r"cannot be traced to patches.*after the tower"):
            tower_items.check_items(tokenprune.method(name), {}, {"video": ["frames"]}, info)
    for method in (Seer(), tokenprune.method("towerdrop")):
        with pytest.raises(OptionError, match="pass pixels, not embeddings"):
            tower_items.check_items(method, {}, {"image": ImageEmbeddingItems([torch.zeros(4, 64)])}, info)
    tower_items.check_items(Seer(), {}, {"image": ["image"], "video": []}, info)


def test_server_without_images(start: Callable[..., Engine]) -> None:
    """vLLM then does not load the tower."""
    engine = start("llava", VSCAN, limit_mm_per_prompt={"image": 0})
    (output,) = engine.generate([{"prompt": "what is it? "}])
    assert len(output.outputs[0].token_ids) == 6


def test_tower_in_data_parallel_mode_stops_the_server(folder: Any) -> None:
    with pytest.raises(UnsupportedSetupError, match="spreads its images over devices"):
        config(folder("qwen2_vl"), VSCAN, mm_encoder_tp_mode="data")


def test_interpolated_features_raise(folder: Any) -> None:
    """LLaVA-OneVision shrinks the features of images with many tiles, so features no longer correspond to patches."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    wide = {"image_grid_pinpoints": [[56, 56], [560, 560]]}
    model_config = config(folder("llava_onevision"), VSCAN, hf_overrides=wide)
    info = MULTIMODAL_REGISTRY.create_processor(model_config).info
    assert tower_items._count_newlines(info, 56, 56, Seer()) == 4
    with pytest.raises(OptionError, match="interpolates its features"):
        tower_items._count_newlines(info, 500, 500, Seer())

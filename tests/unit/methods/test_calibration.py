# SPDX-License-Identifier: Apache-2.0
"""Calibration of DyMU's thresholds: against a naive loop, resumed after an interruption, and invalid inputs."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import tokenprune
from basics import snapshot
from families.plain import FAMILIES as OTHERS
from made_up_thresholds import tower_shape
from merging_models import SUPPORTED, blocks_of, tower_of
from naive_towers import InputImage
from oracle import close
from tests.unit.api.test_cli import call, refused
from tests.unit.methods.test_dymu import mixed, naive_groups, naive_scores
from tests.unit.tower.test_encoder import tiles
from tests.unit.tower.test_timm import build as build_timm
from tokenprune import AlreadyPatchedError, BudgetError, OptionError, TokenPruneError, UnsupportedSetupError
from tokenprune.integrations.hf.sequence.record import get_record
from tokenprune.selection import Tower
from tokenprune_bench.calibration import Thresholds, calibrate
from tokenprune_bench.calibration.merge import count_merges
from tokenprune_bench.profiling.model import load_model
from tokenprune_demo.heldout import load_heldout
from zoo import FAMILIES, Family


@pytest.fixture(params=SUPPORTED)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


def make_plan(model: Any, keep: float, schedule: str = "constant") -> list[int]:
    tower = tower_shape(model)
    return count_merges(tower, tower.count_kept(tokenprune.Budget(keep=keep)), schedule)


@torch.no_grad()
def naive_thresholds(tower: Any, batch: Tensor, plan: list[int]) -> tuple[list[float], list[int]]:
    """Return the thresholds for one batch, and the number of remaining tokens of each image."""
    images = [InputImage(tower, pixels) for pixels in batch]
    taus = []
    for block, r in zip(blocks_of(tower), plan, strict=True):
        keys = [image.attend(block) for image in images]
        edges = []
        for row, image_keys in enumerate(keys):
            p = images[row].protected
            best = sorted((score for score, _, _ in naive_scores(image_keys, p)), reverse=True)
            edges += [(score, row) for score in best[: (len(image_keys) - p) // 2]]
        edges.sort(key=lambda edge: -edge[0])
        merged = edges[: r * len(batch)]
        taus.append(max(0.0, edges[len(merged)][0] if len(merged) < len(edges) else 0.0) if r else 1.0)
        for row, image in enumerate(images):
            num_merged = sum(owner == row for _, owner in merged)
            unmerged = [[token] for token in range(len(keys[row]))]
            image.finish(block, naive_groups(keys[row], num_merged, image.protected) if num_merged else unmerged)
    return taus, [len(image.groups) for image in images]


def fit(model: Any, images: Any, **options: Any) -> Thresholds:
    return calibrate(model, images, **dict(progress=False, keep=0.5) | options)


@torch.no_grad()
def test_equals_the_naive_loop(family: Family, build) -> None:
    model = build(family)
    pixels = torch.cat([mixed(model), tiles(model, 4, seed=3)])
    thresholds = fit(model, pixels, batch_size=4, keep=[0.5, 0.7])
    assert (thresholds.keeps, thresholds.images) == ([0.7, 0.5], 7)
    for keep in thresholds.keeps:
        plan = make_plan(model, keep)
        first, _ = naive_thresholds(tower_of(model), pixels[:4], plan)
        second, _ = naive_thresholds(tower_of(model), pixels[4:], plan)
        want = (torch.tensor(first).double() + torch.tensor(second).double()) / 2
        close(thresholds.values[keep].double(), want, 1e-5)
    assert not tokenprune.is_patched(model)


@torch.no_grad()
def test_merge_counts_equal_the_schedule(family: Family, build) -> None:
    model, pixels = build(family), tiles(build(family), 8)
    tower = tower_shape(model)
    for schedule in ("constant", "linear", "reverse_linear"):
        thresholds = fit(model, pixels, keep=0.5, batch_size=8, schedule=schedule)
        with tokenprune.patched(model, "dymu", keep=0.5, thresholds=thresholds):
            output = tower_of(model)(pixels)
        counts = [*get_record(output).block_tokens, sum(len(owner.unique()) for owner in get_record(output).owners)]
        merged = [before - after for before, after in itertools.pairwise(counts)]
        assert merged == [8 * r for r in make_plan(model, 0.5, schedule)]
        assert counts[-1] == 8 * (tower.protected + tower.patches // 2)


def test_merge_counts_per_block() -> None:
    tower = Tower(577, 1, 24, 23)
    constant = count_merges(tower, 72, "constant")
    assert constant == [22] * 21 + [21] * 2 + [0]
    linear = count_merges(tower, 288, "linear")
    assert sum(linear) == 288 and linear == sorted(linear, reverse=True) and linear[22:] == [0, 0]
    assert count_merges(tower, 288, "reverse_linear") == [*linear[:23][::-1], 0]
    # The last of a few blocks cannot merge the remaining tokens, so the first blocks merge more.
    assert count_merges(Tower(257, 1, 4, 4), 28, "constant") == [72, 72, 56, 28]
    assert count_merges(Tower(257, 1, 4, 4), 256, "constant") == [0] * 4
    # One block of a linear schedule merges no tokens.
    for schedule, fewest in (("constant", 16), ("linear", 32), ("reverse_linear", 32)):
        for num_kept in (fewest, fewest + 1, 45, 200):
            counts = count_merges(Tower(257, 1, 4, 4), num_kept, schedule)
            assert sum(counts) == 256 - num_kept and all(2 * r < 257 - sum(counts[:i]) for i, r in enumerate(counts))
        with pytest.raises(BudgetError, match=rf"4 blocks that halve their tokens keep at least {fewest}"):
            count_merges(Tower(257, 1, 4, 4), fewest - 1, schedule)


@torch.no_grad()
def test_timm() -> None:
    for kind in ("class token", "map", "registers"):
        model = build_timm(kind).train()
        pixels = torch.randn(6, 3, 24, 24, generator=torch.Generator().manual_seed(0))
        pixels[5] = 0.3
        before_fit = snapshot(model)
        thresholds = fit(model, list(pixels), batch_size=6)
        assert snapshot(model) == before_fit and model.training
        model.eval()
        before = model(pixels)
        tokenprune.patch(model, method="dymu", keep=0.5, thresholds=thresholds)
        logits, stats = model(pixels), tokenprune.stats(model)
        assert logits.shape == before.shape and not torch.equal(logits, before)
        assert stats.keep_ratio == pytest.approx(0.5, abs=0.01) and stats.prefill_flops_ratio < 0.8
        counts = []
        for row, image in enumerate(pixels):
            close(model(image[None])[0], logits[row])
            counts.append(tokenprune.stats(model).visual_tokens_out)
        assert sum(counts) == stats.visual_tokens_out and counts.index(min(counts)) == 5 and len(set(counts)) > 1
        tokenprune.unpatch(model)
        assert torch.equal(model(pixels), before)
    with pytest.raises(OptionError, match="no thresholds for this model"):
        tokenprune.patch(model, "dymu", keep=0.5)
    with tokenprune.patched(model, "dymu", keep=1.0):
        assert torch.equal(model(pixels), before)


# -- files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "images" / "more").mkdir(parents=True)
    g = torch.Generator().manual_seed(0)
    for index, name in enumerate(("b.png", "a.PNG", "more/c.png", "d.bmp", "e.png")):
        values = torch.randint(0, 256, (24, 24, 3), generator=g, dtype=torch.uint8)
        values[: 4 * index] = 90
        Image.fromarray(values.numpy()).save(tmp_path / "images" / name)
    (tmp_path / "images" / "notes.txt").write_text("no image")
    return tmp_path / "images"


def transform(image: Image.Image) -> Tensor:
    return torch.tensor(list(image.tobytes())).view(24, 24, 3).permute(2, 0, 1) / 128 - 1


class Interrupted(Exception):
    pass


def stop_at(count: int) -> Any:
    def step(label: str, done: int, total: int) -> None:
        if done >= count:
            raise Interrupted

    return step


def test_interrupted_calibration_resumes(folder: Path, tmp_path: Path) -> None:
    model, options = build_timm("class token"), dict(keep=[0.5, 0.6], batch_size=2, processor=transform)
    complete, interrupted = tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    partial = tmp_path / "cut.safetensors.partial"
    progress: list[tuple[int, int]] = []
    thresholds = fit(model, folder, out=complete, progress=lambda label, *counts: progress.append(counts), **options)
    assert progress == [(0, 5), (2, 5), (4, 5), (5, 5)] and thresholds.images == 5
    assert [path.name for path in tmp_path.iterdir()].count("whole.safetensors.partial") == 0
    for stop in (2, 4, 5):
        with pytest.raises(Interrupted):
            fit(model, folder, out=interrupted, progress=stop_at(stop), **options)
        assert partial.exists() and not interrupted.exists()
        assert not tokenprune.is_patched(model) and not any(block._forward_hooks for block in model.blocks)
        # A calibration with other settings does not resume from this state.
        for other, words in (
            (dict(keep=0.5), "other keeps"),
            (dict(batch_size=3), "other batch_size"),
            (dict(schedule="linear"), "other schedule"),
        ):
            with pytest.raises(OptionError, match=rf"{words}.*--restart"):
                fit(model, folder, out=interrupted, **options | other)
        with pytest.raises(OptionError, match="other files"):
            fit(model, sorted(folder.glob("*.png")), out=interrupted, **options)
        with pytest.raises(OptionError, match="other model"):
            fit(build_timm("registers"), folder, out=interrupted, **options)
        starts: list[int] = []
        fit(
            model,
            folder,
            out=interrupted,
            progress=lambda label, done, total, starts=starts: starts.append(done),
            **options,
        )
        assert starts[0] == stop
        assert interrupted.read_bytes() == complete.read_bytes() and not partial.exists()
        interrupted.unlink()
    with pytest.raises(Interrupted):
        fit(model, folder, out=interrupted, progress=stop_at(4), **options)
    fit(model, folder, out=interrupted, resume=False, **options | dict(batch_size=5))
    assert Thresholds.load(interrupted).settings["batch_size"] == 5
    partial.write_text("broken")
    with pytest.raises(OptionError, match="not a readable state"):
        fit(model, folder, out=interrupted, **options)


def test_accepted_image_types(folder: Path) -> None:
    model, options = build_timm("class token"), dict(processor=transform, batch_size=5)
    want = fit(model, folder, **options).values[0.5]
    paths = sorted(path for path in folder.rglob("*") if path.suffix != ".txt" and path.is_file())
    photos = [Image.open(path) for path in paths]
    tensors = torch.stack([transform(image) for image in photos])
    for images in (str(folder), paths, list(map(str, paths)), photos, iter(photos), tensors, list(tensors)):
        assert torch.equal(fit(model, images, **options).values[0.5], want)


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = tmp_path / "images", tmp_path / "t.safetensors"
    folder.mkdir()
    for example in load_heldout(kinds=("colour",), limit=3):
        (folder / example.path.name).write_bytes(example.path.read_bytes())
    printed = call("fit", "dymu", "--images", folder, "--keep", "0.5,0.3", "--out", out, "--batch-size", 2).stdout
    assert "keep 0.5: " in printed and "keep 0.3: " in printed and "calibrated on 3 images" in printed
    model = load_model(device="cpu").model
    with tokenprune.patched(model, "dymu", keep=0.3, thresholds=out):
        assert tokenprune.is_patched(model)
    assert "cannot keep only" in refused("fit", "dymu", "--images", folder, "--keep", "0.01", "--out", out)
    assert "between 0 and 1" in refused("fit", "dymu", "--images", folder, "--keep", "20", "--out", out)


def test_invalid_inputs_raise(folder: Path, tmp_path: Path, build) -> None:
    model = build(FAMILIES["llava"])
    before, pixels = snapshot(model), tiles(model)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/broken.png").write_bytes(b"\x89PNG broken")
    (tmp_path / "out").mkdir()
    timm_model = build_timm("class token")
    for images, options, error, words in (
        ([], {}, OptionError, "images is empty"),
        (iter([]), {}, OptionError, "images is empty"),
        (7, {}, OptionError, "Pass a folder"),
        (tmp_path / "empty", {}, OptionError, "has no images"),
        (tmp_path / "absent", {}, OptionError, "is not a folder"),
        (["absent.png"], {}, TokenPruneError, "cannot read absent.png"),
        (tmp_path / "bad", {}, TokenPruneError, "cannot read .*broken.png as an image"),
        (folder, {}, OptionError, "Pass processor="),
        ([torch.zeros(24, 24)], {}, OptionError, r"a tensor of shape \(24, 24\)"),
        ([torch.zeros(3, 24, 24), torch.zeros(3, 16, 16)], {}, OptionError, "Images differ in size"),
        ([3], {}, OptionError, "contains a int"),
        (pixels, dict(keep=1.0), BudgetError, "keep=1.0 cannot be calibrated"),
        (pixels, dict(keep=[0.5, 9]), BudgetError, "keep=9 cannot be calibrated"),
        (pixels, dict(keep=[]), BudgetError, "keep is empty"),
        (pixels, dict(keep=0.1), BudgetError, "cannot keep only 4 of 36 patches"),
        (pixels, dict(schedule="fast"), OptionError, "'constant', 'linear', 'reverse_linear'"),
        (pixels, dict(batch_size=0), OptionError, "batch_size=0"),
        (pixels, dict(out=tmp_path / "absent/t.safetensors"), OptionError, "does not exist"),
        (pixels, dict(out=tmp_path / "out"), TokenPruneError, "cannot write"),
    ):
        with pytest.raises(error, match=words):
            fit(model, images, **options)
        assert snapshot(model) == before
    with tokenprune.patched(timm_model, "tome", keep=0.5), pytest.raises(AlreadyPatchedError, match="unpatch"):
        fit(timm_model, torch.zeros(1, 3, 24, 24))
    other = OTHERS["vipllava"].build()
    with pytest.raises(UnsupportedSetupError, match="dymu cannot act in the tower of 'vipllava'"):
        fit(other, torch.zeros(1, 3, 32, 32))
    with pytest.raises(UnsupportedSetupError, match="dymu cannot act in the tower of 'vipllava'"):
        tokenprune.patch(other, "dymu", keep=0.5)


def test_trained_tower_rejects_old_thresholds(build) -> None:
    model = copy.deepcopy(build(FAMILIES["llava"]))
    thresholds = fit(model, tiles(model))
    thresholds.check(tower_shape(model).fingerprint)
    model.model.language_model.layers[0].mlp.up_proj.weight.data.mul_(2)
    thresholds.check(tower_shape(model).fingerprint)
    tower_of(model).embeddings.position_embedding.weight.data.mul_(1.001)
    with pytest.raises(OptionError, match="other weights"):
        thresholds.check(tower_shape(model).fingerprint)

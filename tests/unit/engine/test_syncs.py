# SPDX-License-Identifier: Apache-2.0
"""Waits of the host for the device in a prefill and in decode steps (the table in docs/results/speed.md).

On the CPU the device is simulated (far_device.py). It counts everything that would make the host wait.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

import tokenprune
from basics import METHODS, VIDEO_METHODS, check_takes
from each import each
from far_device import Far, counting, device, far_inputs, to_far
from tokenprune import Site
from tokenprune.errors import TokenPruneError
from tokenprune.integrations.hf.guard import images
from tokenprune.integrations.hf.guard import pixels as guard_pixels
from tokenprune.integrations.vllm.selection import before_llm
from tokenprune.integrations.vllm.settings.items import get_method
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.plan import Plan, find_runs
from tokenprune.integrations.vllm.worker.rows import AwaitedRows
from tokenprune.kernels import block_attention, transfer
from tokenprune.methods.encoder.thresholds import Thresholds
from tokenprune.selection.sites.encoder import Tower
from zoo import FAMILIES, Family

# One-dimensional positions, positions on three axes, and masks that the model prepares itself.
FAMILY_NAMES = ("llava", "qwen2_5_vl", "gemma3")
# Expected waits of the library. Every prefill: the indices of placeholders and padding.
PLACEHOLDERS = 1
# Qwen-VL: the shapes of the images of a modality, which the processor passes as a tensor.
GRIDS = 1
# The number of kept tokens, if `keep` does not determine it.
COUNTS = 1
# Inside a tower: the grids of its images. Per block: the kept tokens (with thresholds), the members of each merge (if
# images differ in count), and the pieces that attend to themselves (Qwen-VL groups images of one size).
TOWER_GRIDS, BLOCK_COUNTS, BLOCK_MEMBERS, BLOCK_PIECES = 1, 1, 2, 1
SIZES = 3
# A decision while decoding: its rate, and with eviction the number of kept keys.
DECISION = {"evict": 2, "mask": 1}
TOWER_BLOCKS = 4
# Waits of the methods themselves. math.inf: searches without a fixed number of steps. Others read scene borders
# (prunevid), the sampling of each video (kitoke), the patches of each tile (vispruner), the schedule of a prompt
# (autoprune), cluster sizes, the kept tokens of a cut, the convergence of a decomposition, or the patches kept inside
# a tower. unipool only waits for longer videos.
METHOD_WAITS = {"prunevid": 1, "kitoke": 2, "llava_scissor": math.inf, "pixelprune": math.inf, "vispruner": 1}
METHOD_WAITS |= {"autoprune": 1, "vitcop": 1, "visipruner": 1, "dtd": 1, "agilepruner": 1, "prunesid": 6, "flowcut": 5}
METHOD_WAITS |= {"pact": math.inf, "sttm": math.inf, "entropyprune": 2, "erase": 1, "unipool": 0}


def count_allowed_waits(family: Family, name: str) -> int:
    """Return the number of waits that a patch may add to a prefill."""
    site, packed = tokenprune.method_info(name).site, family.types == "mm_token_type_ids"
    count = PLACEHOLDERS + GRIDS * packed * (
        1 + (name in VIDEO_METHODS)
    )  # the grid of the video, and of an image in the same prompt
    if name == "vscan" or site is Site.IN_ENCODER:
        count += COUNTS
    if site is Site.IN_ENCODER:
        count += packed * (TOWER_GRIDS + BLOCK_PIECES * TOWER_BLOCKS)
    count += METHOD_WAITS.get(name, 0)
    if name == "dymu":
        count += TOWER_BLOCKS * (SIZES if packed else 1) * (BLOCK_COUNTS + BLOCK_MEMBERS)
    return count


def configure_method(name: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    if name == "dymu":
        monkeypatch.setattr(Thresholds, "check", lambda self, fingerprint: None)
        monkeypatch.setattr(Tower, "fingerprint", None)
        # A threshold of 1.0 merges no tokens: the model does not read the last block.
        values = [0.3, 0.3, 1.0] if model.config.model_type == "llava" else [0.3] * TOWER_BLOCKS
        thresholds = Thresholds({0.5: torch.tensor(values)}, fingerprint=None, images=1)
        return tokenprune.method(name, thresholds=thresholds)
    if name == "pixelprune":  # without anchors its search waits as often and is faster on the simulated device
        return tokenprune.method(name, anchored=False)
    return tokenprune.method(name)


def patched_model(family: Family, name: str | None, monkeypatch: pytest.MonkeyPatch, attn: str = "eager") -> Any:
    """Return a patched model on the CPU, and skip unsupported combinations."""
    if name is not None:
        if tokenprune.method_info(name).site is Site.PRE_ENCODER:
            pytest.skip(f"{name} acts on the processor's tensors on the host")
        check_takes(family, name)
    model = family.build(attn)
    if name is not None:
        method = configure_method(name, model, monkeypatch)
        try:
            tokenprune.patch(model, method, keep=1.0 if method.site is Site.ATTENTION else 0.5, record=True)
        except TokenPruneError as error:
            pytest.skip(f"{name} refuses {family.name}: {error}")
    return model


def make_inputs(family: Family, name: str | None, large: bool) -> Any:
    """Return inputs that the method acts on, and skip if the family has none."""
    if name is not None:
        check_takes(family, name)
    if name == "pevlm":
        return family.make_inputs(images=(0, 0), video=(64, 48) if large else (40, 40))
    if name in VIDEO_METHODS:
        return family.make_inputs(images=(0, 1), video=(16, 9) if large else (5, 4))
    sizes = ((16, 12), (12, 20)) if family.types == "mm_token_type_ids" and large else None
    return family.make_inputs(images=(1, 2), sizes=sizes)


@pytest.mark.parametrize("videos", [1, 2])
@torch.no_grad()
def test_frames_that_merge_in_the_tower(videos: int) -> None:
    """Waits: frame similarities per video, for each merging block and once for groups; then the received attention."""
    family, blocks = FAMILIES["llava_onevision"], (0, 1)
    model = family.build()
    tokenprune.patch(model, "earlytom", keep=0.5, layers=blocks, threshold=-1.0)
    inputs = family.make_inputs(images=(0,) * videos, video=[9] * videos)
    with counting() as prefill:
        to_far(model)(**far_inputs(inputs))
    num_frame_waits = videos * (len(blocks) + 1) + 1
    assert sum(prefill.ours.values()) == PLACEHOLDERS + num_frame_waits + COUNTS, prefill.ours


def next_step(family: Family, inputs: Any, token: int) -> dict[str, Any]:
    rows, length = inputs["input_ids"].shape
    position = torch.full((rows, 1), length + token)
    mask = torch.cat([inputs["attention_mask"], torch.ones(rows, 1 + token, dtype=torch.long)], 1)
    return {
        "input_ids": torch.full((rows, 1), 20 + token),
        "attention_mask": mask,
        "position_ids": position.expand(3, -1, -1) if family.types == "mm_token_type_ids" else position,
    }


_baselines: dict[Any, int] = {}


@pytest.mark.pairwise
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family_name", FAMILY_NAMES)
@torch.no_grad()
def test_prefill(family_name: str, name: str, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of waits is bounded and independent of the prompt length; decode steps never wait."""
    family = FAMILIES[family_name]
    # torch cannot create this bias on the simulated device.
    monkeypatch.setattr(
        block_attention, "causal_lower_right",
        lambda q, k: torch.ones(q, k, dtype=torch.bool, device=device()).tril(k - q),
    )  # fmt: skip
    model = to_far(patched_model(family, name, monkeypatch))
    inputs = make_inputs(family, name, large)
    with counting() as prefill:
        cache = model(**far_inputs(inputs), use_cache=True).past_key_values
    assert sum(prefill.ours.values()) <= count_allowed_waits(family, name), prefill.ours
    step = far_inputs(next_step(family, inputs, 0))
    with counting() as decode:
        model(**step, past_key_values=cache, use_cache=True)
    assert not decode.ours
    with counting() as reading:
        stats = tokenprune.stats(model)
    assert stats.visual_tokens_out or not tokenprune.method_info(name).cls.min_tokens
    assert bool(reading.found) == bool(stats.cuts)  # recorded values are read on request

    key = (family_name, large, name == "pevlm", name in VIDEO_METHODS)  # identifies the inputs
    if key not in _baselines:
        model = to_far(patched_model(family, None, monkeypatch))
        with counting() as baseline:
            model(**far_inputs(inputs), use_cache=True)
        _baselines[key] = len(baseline.found)
    # The model's code waits more often if its tower runs in pieces.
    pieces = TOWER_BLOCKS if tokenprune.method_info(name).site is Site.IN_ENCODER else 0
    assert len(prefill.found) <= _baselines[key] + count_allowed_waits(family, name) + pieces


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
@torch.no_grad()
def test_positions_of_the_caller_are_read_with_the_placeholders(
    family_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart of positions marks packed samples: it is read in the same wait as the placeholders."""
    family = FAMILIES[family_name]
    model, inputs = to_far(patched_model(family, "divprune", monkeypatch)), make_inputs(family, "divprune", large=False)
    positions = inputs["attention_mask"].cumsum(-1)
    inputs["position_ids"] = positions.expand(3, -1, -1) if family.types == "mm_token_type_ids" else positions
    with counting() as prefill:
        model(**far_inputs(inputs), use_cache=True)
    assert sum(prefill.ours.values()) <= count_allowed_waits(family, "divprune"), prefill.ours


WAITING_METHODS = [name for name in METHODS if tokenprune.method_info(name).cls.syncs_device]


def test_waiting_methods_declare_syncs() -> None:
    assert set(WAITING_METHODS) == {"vscan", *METHOD_WAITS} - {"pixelprune"}  # acts before the selection
    assert not any(tokenprune.method_info(name).capturable for name in WAITING_METHODS)


# agilepruner waits inside torch, for the convergence of its decomposition.
@pytest.mark.parametrize("name", sorted({*WAITING_METHODS} - {"agilepruner", "unipool"}))
@torch.no_grad()
def test_declared_syncs_happen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES["llava" if name == "flowcut" else "qwen2_5_vl"]
    model = to_far(patched_model(family, name, monkeypatch))
    with counting() as prefill:
        model(**far_inputs(make_inputs(family, name, large=False)), use_cache=True)
    known = {"prompt_info.py:from_arguments", "base.py:on_host"}  # indices of placeholders, and shapes of images
    assert {location for _, location in prefill.ours} - known, prefill.ours


@pytest.mark.parametrize("mode", ["warn", "auto"])
@pytest.mark.parametrize("family_name", FAMILY_NAMES)
@torch.no_grad()
def test_guard(family_name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard adds no wait: it reads values that are on the host, and sends its view of images there."""
    # Reduce the block size below these small images.
    monkeypatch.setattr(guard_pixels, "SIDE", 4)
    monkeypatch.setattr(guard_pixels, "_MIN_SIDE", 4)
    monkeypatch.setattr(guard_pixels, "split_blocks", lambda planes: images.split_blocks(planes, 4))
    family = FAMILIES[family_name]
    model, inputs = family.build("eager"), make_inputs(family, None, large=True)
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "how many?")
    to_far(tokenprune.patch(model, "random", keep=0.5, guard=mode, processor=tokenizer))
    for _ in range(2):
        with counting() as prefill:
            cache = model(**far_inputs(inputs), use_cache=True).past_key_values
        assert sum(prefill.ours.values()) <= count_allowed_waits(family, "random"), prefill.ours
        with counting() as decode:
            model(**far_inputs(next_step(family, inputs, 0)), past_key_values=cache, use_cache=True)
        assert not decode.ours
    checks = tokenprune.stats(model).guard
    assert [check.prompt for check in checks] == [("counting",)] * 2 and None not in [check.image for check in checks]
    assert [check.raised for check in checks] == [mode == "auto"] * 2


@pytest.mark.parametrize("arrived", [False, True])
@torch.no_grad()
def test_guard_on_a_device_without_events(arrived: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without events the verdict is read on request."""
    if not arrived:
        monkeypatch.setattr(transfer, "_create_event", lambda device: None)
    with counting() as sending:
        late = transfer.AsyncValues(Far(torch.tensor([0.5])))
        assert late.is_ready() is arrived
    assert not sending.found
    with counting() as reading:
        assert late.read() == [0.5]
    assert len(reading.found) == (not arrived)


@pytest.mark.pairwise
@pytest.mark.parametrize("decides", [True, False])
@pytest.mark.parametrize("mode", ["evict", "mask"])
@pytest.mark.parametrize("family_name", FAMILY_NAMES)
@torch.no_grad()
def test_decoding(family_name: str, mode: str, decides: bool) -> None:
    """Only a step with a decision waits."""
    family = FAMILIES[family_name]
    model = family.build("eager")
    options = {"rate": "schedule", "schedule": (0.3, 0.3, 0.5, 0.8)} if decides else {"warmup": 10}
    to_far(tokenprune.patch(model, tokenprune.method("dyrate", layer=2, mode=mode, **options), keep=0.8))
    inputs = make_inputs(family, None, large=False)
    with counting():
        cache = model(**far_inputs(inputs), use_cache=True).past_key_values
    num_kept = []
    for token in range(5):
        with counting() as syncs:
            model(**far_inputs(next_step(family, inputs, token)), past_key_values=cache, use_cache=True)
        with counting():  # statistics may read the cache
            num_kept.append(tokenprune.stats(model).decode_kept[-1])
        assert sum(syncs.ours.values()) <= DECISION[mode] * decides, (token, syncs.ours)
    assert (num_kept[0] != num_kept[-1]) == decides


@pytest.mark.parametrize("path", ["tokenprune/tests/a.py", "tokenprune/.venv/transformers/a.py", "transformers/a.py"])
def test_waits_are_attributed_by_import_path(path: str, tmp_path: Path) -> None:
    values = Far(torch.ones(2))

    def list_locations(file: Path) -> set[str]:
        with counting() as syncs:
            exec(compile("values.tolist()", str(file), "exec"), {"values": values})
        return {location for _, location in syncs.found}

    assert list_locations(tmp_path / path) == {"the model"}
    assert list_locations(Path(transformers.__file__).with_name("a.py")) == {"the model"}
    assert list_locations(Path(tokenprune.__file__).with_name("a.py")) == {"a.py:<module>"}


WAITS = {
    "item": lambda x, m: x[0].item(), "float": lambda x, m: float(x[0]), "bool": lambda x, m: bool(m.any()),
    "list": lambda x, m: x.tolist(), "cpu": lambda x, m: x.cpu(), "nonzero": lambda x, m: m.nonzero(),
    "index": lambda x, m: x[m], "put": lambda x, m: x.clone().index_put_((m,), x[:2]),
    "equal": lambda x, m: torch.equal(x, x), "new": lambda x, m: torch.tensor([1.0], device=x.device),
    "to": lambda x, m: torch.ones(3).to(x.device), "unique": lambda x, m: x.unique_consecutive(),
    "repeat": lambda x, m: x.repeat_interleave(m.long()), "entry": lambda x, m: x.__setitem__(0, 1.0),
    "by index": lambda x, m: x.__setitem__(m.long(), 1.0),
}  # fmt: skip
FREE = {
    "gather": lambda x, m: x.gather(0, m.long()), "where": lambda x, m: torch.where(m, x, 0),
    "fill": lambda x, m: x.masked_fill(m, 0), "arange": lambda x, m: torch.arange(3, device=x.device),
    "send": lambda x, m: torch.ones(3).to(x.device, non_blocking=True), "sort": lambda x, m: x.argsort(stable=True),
    "size": lambda x, m: x[: len(m)], "put": lambda x, m: x.clone().index_put_((m.long(),), x),
    "slice": lambda x, m: x.__setitem__(slice(1), 1.0), "masked": lambda x, m: x.__setitem__(m, 1.0),
    "index fill": lambda x, m: x.index_fill_(0, m.long(), 1.0),
}  # fmt: skip


def test_what_is_counted() -> None:
    x, chosen = torch.arange(4.0), torch.tensor([True, False, True, False])
    for expected, actions in ((1, WAITS), (0, FREE)):
        for name, action in actions.items():
            with counting() as syncs:
                action(Far(x), Far(chosen))
            assert len(syncs.found) == expected, name
    with counting(), pytest.raises(RuntimeError, match="on the host and on the device"):
        Far(x) + x


@contextmanager
def record_cuda_waits() -> Iterator[list[Any]]:
    """Record a warning for each time that the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as recorded:
            warnings.simplefilter("always")
            yield recorded
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_waits_for_what_is_counted() -> None:
    for waits, actions in ((True, WAITS), (False, FREE)):
        for name, action in actions.items():
            x, chosen = torch.arange(4.0).cuda(), torch.tensor([True, False, True, False]).cuda()
            with record_cuda_waits() as recorded:
                action(x, chosen)
            assert any("synchronizing" in str(warning.message) for warning in recorded) == waits, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", METHODS)
@each("family_name", FAMILY_NAMES)
@torch.no_grad()
def test_on_a_gpu(family_name: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA reports no more waits than the simulated device; selection and cut run with waits as errors."""
    from tokenprune.integrations.hf.engine import cuts, engine

    family = FAMILIES[family_name]
    inputs = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in make_inputs(family, name, True).items()}
    counts = {}
    for method_name in (None, name):
        model = patched_model(family, method_name, monkeypatch).cuda()
        model(**inputs, use_cache=True)  # first-call setup
        with record_cuda_waits() as recorded:
            model(**inputs, use_cache=True)
        counts[method_name] = sum("synchronizing" in str(warning.message) for warning in recorded)
    pieces = TOWER_BLOCKS if tokenprune.method_info(name).site is Site.IN_ENCODER else 0
    assert counts[name] <= counts[None] + count_allowed_waits(family, name) + pieces

    def strict(original: Any) -> Any:
        def run(*args: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return original(*args)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    if not tokenprune.method_info(name).cls.syncs_device:
        for module in (engine, cuts):
            monkeypatch.setattr(module, "select_tokens", strict(module.select_tokens))
            monkeypatch.setattr(module, "apply_selection", strict(module.apply_selection))
        model(**inputs, use_cache=True)


def test_no_simulated_device_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would then create events and streams of the simulated device, and code for the GPU would fail."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(pytest.skip.Exception, match="would replace the GPU"):
        device.__wrapped__()


@each("name", [*VIDEO_METHODS, "pevlm"])
def test_family_without_videos_is_skipped(name: str) -> None:
    with pytest.raises(pytest.skip.Exception, match="llava does not support videos"):
        make_inputs(FAMILIES["llava"], name, large=True)


@pytest.mark.parametrize(
    ("pieces", "per_run"), [("#" * 16, False), ("s" + "#" * 8 + "b" + "#" * 8, False), ("#" * 8 + "b" + "#" * 12, True)]
)
@pytest.mark.parametrize("name", ["apet", "divprune", "otprune", "pool", "random", "uniform"])
def test_vllm_worker_never_waits(name: str, pieces: str, per_run: bool) -> None:
    """vLLM workers never wait: the plan fixes the number of rows, also with text between tokens and with tiles."""
    text = find_runs([9 if piece == "#" else 7 for piece in pieces], [piece == "#" for piece in pieces])
    plan = Plan.build(parse_setting({"method": name, "keep": 0.5}), text, per_run)
    with counting() as served:
        rows = Far(torch.randn(sum(plan.counts), 16))
        segments = before_llm.build_segments(plan.counts, None, "image", rows.device)
        kept, rows = before_llm.choose(get_method(plan.setting), rows, 16, segments, plan.keep)
        awaited = AwaitedRows.from_kept(plan, rows, kept)
    assert not served.ours
    assert awaited.rows.shape[:2] == awaited.indices.shape == (1, plan.rows)

# SPDX-License-Identifier: Apache-2.0
"""How often the host waits for the device in a prefill and in decode steps (the table in docs/results/speed.md).

On the CPU the device is a pretended one (far_device.py), which counts everything that would make the host wait.
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

# One-dimensional positions, three axes of them, masks that the model prepares itself.
FAMILY_NAMES = ("llava", "qwen2_5_vl", "gemma3")
# What the library may wait for: where the placeholders and the padding are;
PLACEHOLDERS = 1
# the shapes of the images, of each modality, where the processor hands them over as a tensor (Qwen-VL);
GRIDS = 1
# how many tokens are left, where the numbers of `keep` do not tell;
COUNTS = 1
# in the tower, the grids of its images; and in each block how many are left, by thresholds; the members of each
# merge, where images differ in number; which pieces attend to themselves (Qwen-VL, where images of one size go
# together).
TOWER_GRIDS, BLOCK_COUNTS, BLOCK_MEMBERS, BLOCK_PIECES = 1, 1, 2, 1
SIZES = 3
# A decision while decoding: its rate, and how many keys stay where the others are thrown away.
DECISION = {"evict": 2, "mask": 1}
TOWER_BLOCKS = 4
# Methods that ask themselves: which frames make a scene; the chances of each of two videos, drawn on the host; a search
# of as many steps as it takes (of pixelprune, where `keep` binds); how many patches each tile has; what a prompt's own
# schedule is made of; the sizes of clusters; at each cut, how many tokens stay; whether a decomposition went well, of
# all images, or of each with its groups; inside a tower, how many patches are left of each image, and which. unipool
# asks about videos of more tokens than these have.
ASKING = {"prunevid": 1, "kitoke": 2, "llava_scissor": math.inf, "pixelprune": math.inf, "vispruner": 1}
ASKING |= {"autoprune": 1, "vitcop": 1, "visipruner": 1, "dtd": 1, "agilepruner": 1, "prunesid": 6, "flowcut": 5}
ASKING |= {"pact": math.inf, "sttm": math.inf, "entropyprune": 2, "erase": 1, "unipool": 0}


def allowed(family: Family, name: str) -> int:
    """Waits in a prefill beside those of the unpatched model."""
    site, packed = tokenprune.method_info(name).site, family.types == "mm_token_type_ids"
    number = PLACEHOLDERS + GRIDS * packed * (1 + (name in VIDEO_METHODS))  # of the video, and of an image beside it
    if name == "vscan" or site is Site.IN_ENCODER:
        number += COUNTS
    if site is Site.IN_ENCODER:
        number += packed * (TOWER_GRIDS + BLOCK_PIECES * TOWER_BLOCKS)
    number += ASKING.get(name, 0)
    if name == "dymu":
        number += TOWER_BLOCKS * (SIZES if packed else 1) * (BLOCK_COUNTS + BLOCK_MEMBERS)
    return number


def configured(name: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    if name == "dymu":
        monkeypatch.setattr(Thresholds, "check", lambda self, fingerprint: None)
        monkeypatch.setattr(Tower, "fingerprint", None)
        # What the model does not read of the tower merges nothing.
        values = [0.3, 0.3, 1.0] if model.config.model_type == "llava" else [0.3] * TOWER_BLOCKS
        thresholds = Thresholds({0.5: torch.tensor(values)}, fingerprint=None, images=1)
        return tokenprune.method(name, thresholds=thresholds)
    if name == "pixelprune":  # its search asks as often without anchors, and is quicker on a pretended device
        return tokenprune.method(name, anchored=False)
    return tokenprune.method(name)


def patched_model(family: Family, name: str | None, monkeypatch: pytest.MonkeyPatch, attn: str = "eager") -> Any:
    """A model of its own on the CPU; skips what does not go together."""
    if name is not None:
        if tokenprune.method_info(name).site is Site.PRE_ENCODER:
            pytest.skip(f"{name} acts on the processor's tensors, on the host, and leaves the model alone")
        check_takes(family, name)
    model = family.build(attn)
    if name is not None:
        method = configured(name, model, monkeypatch)
        try:
            tokenprune.patch(model, method, keep=1.0 if method.site is Site.ATTENTION else 0.5, record=True)
        except TokenPruneError as refusal:
            pytest.skip(f"{name} refuses {family.name}: {refusal}")
    return model


def inputs_of(family: Family, name: str | None, large: bool) -> Any:
    """Return inputs that the method acts on; skips where the family takes none."""
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
    """Of each video how alike its frames are, behind each block that merges, and once more for groups; then what the
    patches receive, of all of them."""
    family, blocks = FAMILIES["llava_onevision"], (0, 1)
    model = family.build()
    tokenprune.patch(model, "earlytom", keep=0.5, layers=blocks, threshold=-1.0)
    inputs = family.make_inputs(images=(0,) * videos, video=[9] * videos)
    with counting() as prefill:
        to_far(model)(**far_inputs(inputs))
    of_frames = videos * (len(blocks) + 1) + 1
    assert sum(prefill.ours.values()) == PLACEHOLDERS + of_frames + COUNTS, prefill.ours


def next_step(family: Family, inputs: Any, token: int) -> dict[str, Any]:
    rows, length = inputs["input_ids"].shape
    place = torch.full((rows, 1), length + token)
    mask = torch.cat([inputs["attention_mask"], torch.ones(rows, 1 + token, dtype=torch.long)], 1)
    return {
        "input_ids": torch.full((rows, 1), 20 + token),
        "attention_mask": mask,
        "position_ids": place.expand(3, -1, -1) if family.types == "mm_token_type_ids" else place,
    }


_baselines: dict[Any, int] = {}


@pytest.mark.pairwise
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family_name", FAMILY_NAMES)
@torch.no_grad()
def test_prefill(family_name: str, name: str, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few times, all of them known, and as many for a large prompt as for a small one; none in a step of decoding."""
    family = FAMILIES[family_name]
    # torch makes no bias of a pretended tensor.
    monkeypatch.setattr(
        block_attention, "causal_lower_right",
        lambda q, k: torch.ones(q, k, dtype=torch.bool, device=device()).tril(k - q),
    )  # fmt: skip
    model = to_far(patched_model(family, name, monkeypatch))
    inputs = inputs_of(family, name, large)
    with counting() as prefill:
        cache = model(**far_inputs(inputs), use_cache=True).past_key_values
    assert sum(prefill.ours.values()) <= allowed(family, name), prefill.ours
    step = far_inputs(next_step(family, inputs, 0))
    with counting() as decode:
        model(**step, past_key_values=cache, use_cache=True)
    assert not decode.ours
    with counting() as reading:
        stats = tokenprune.stats(model)
    assert stats.visual_tokens_out or not tokenprune.method_info(name).cls.min_tokens
    assert bool(reading.found) == bool(stats.cuts)  # what is recorded is read when it is asked for

    key = (family_name, large, name == "pevlm", name in VIDEO_METHODS)  # what tells inputs apart
    if key not in _baselines:
        model = to_far(patched_model(family, None, monkeypatch))
        with counting() as baseline:
            model(**far_inputs(inputs), use_cache=True)
        _baselines[key] = len(baseline.found)
    # The model's own code waits more often for what is run in pieces.
    pieces = TOWER_BLOCKS if tokenprune.method_info(name).site is Site.IN_ENCODER else 0
    assert len(prefill.found) <= _baselines[key] + allowed(family, name) + pieces


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
@torch.no_grad()
def test_positions_of_the_caller_are_read_with_the_placeholders(
    family_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they begin anew, rows hold several samples: it is asked in the one wait that there is anyway."""
    family = FAMILIES[family_name]
    model, inputs = to_far(patched_model(family, "divprune", monkeypatch)), inputs_of(family, "divprune", large=False)
    positions = inputs["attention_mask"].cumsum(-1)
    inputs["position_ids"] = positions.expand(3, -1, -1) if family.types == "mm_token_type_ids" else positions
    with counting() as prefill:
        model(**far_inputs(inputs), use_cache=True)
    assert sum(prefill.ours.values()) <= allowed(family, "divprune"), prefill.ours


ASKS = [name for name in METHODS if tokenprune.method_info(name).cls.syncs_device]


def test_who_asks_says_so() -> None:
    assert set(ASKS) == {"vscan", *ASKING} - {"pixelprune"}  # acts before there is anything to choose from
    assert not any(tokenprune.method_info(name).capturable for name in ASKS)


# What agilepruner waits for, whether its decomposition went well, torch asks by itself.
@pytest.mark.parametrize("name", sorted({*ASKS} - {"agilepruner", "unipool"}))
@torch.no_grad()
def test_who_says_so_asks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = FAMILIES["llava" if name == "flowcut" else "qwen2_5_vl"]
    model = to_far(patched_model(family, name, monkeypatch))
    with counting() as prefill:
        model(**far_inputs(inputs_of(family, name, large=False)), use_cache=True)
    before = {"prompt_info.py:from_arguments", "base.py:on_host"}  # where the placeholders are, and shapes of images
    assert {place for _, place in prefill.ours} - before, prefill.ours


@pytest.mark.parametrize("mode", ["warn", "auto"])
@pytest.mark.parametrize("family_name", FAMILY_NAMES)
@torch.no_grad()
def test_guard(family_name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guard reads prompts with what is brought to the host anyway, and has its view of images sent there."""
    # These images are smaller than a block.
    monkeypatch.setattr(guard_pixels, "SIDE", 4)
    monkeypatch.setattr(guard_pixels, "_MIN_SIDE", 4)
    monkeypatch.setattr(guard_pixels, "split_blocks", lambda planes: images.split_blocks(planes, 4))
    family = FAMILIES[family_name]
    model, inputs = family.build("eager"), inputs_of(family, None, large=True)
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "how many?")
    to_far(tokenprune.patch(model, "random", keep=0.5, guard=mode, processor=tokenizer))
    for _ in range(2):
        with counting() as prefill:
            cache = model(**far_inputs(inputs), use_cache=True).past_key_values
        assert sum(prefill.ours.values()) <= allowed(family, "random"), prefill.ours
        with counting() as decode:
            model(**far_inputs(next_step(family, inputs, 0)), past_key_values=cache, use_cache=True)
        assert not decode.ours
    found = tokenprune.stats(model).guard
    assert [row.prompt for row in found] == [("counting",)] * 2 and None not in [row.image for row in found]
    assert [row.raised for row in found] == [mode == "auto"] * 2


@pytest.mark.parametrize("arrived", [False, True])
@torch.no_grad()
def test_guard_on_a_device_without_events(arrived: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the verdict stays on the device until it is asked for."""
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
    """A decision waits for its outcome, all other steps for nothing."""
    family = FAMILIES[family_name]
    model = family.build("eager")
    options = {"rate": "schedule", "schedule": (0.3, 0.3, 0.5, 0.8)} if decides else {"warmup": 10}
    to_far(tokenprune.patch(model, tokenprune.method("dyrate", layer=2, mode=mode, **options), keep=0.8))
    inputs = inputs_of(family, None, large=False)
    with counting():
        cache = model(**far_inputs(inputs), use_cache=True).past_key_values
    left = []
    for token in range(5):
        with counting() as syncs:
            model(**far_inputs(next_step(family, inputs, token)), past_key_values=cache, use_cache=True)
        with counting():  # what the cache holds is asked for where it is told
            left.append(tokenprune.stats(model).decode_kept[-1])
        assert sum(syncs.ours.values()) <= DECISION[mode] * decides, (token, syncs.ours)
    assert (left[0] != left[-1]) == decides


@pytest.mark.parametrize("place", ["tokenprune/tests/a.py", "tokenprune/.venv/transformers/a.py", "transformers/a.py"])
def test_the_library_is_told_by_where_it_was_imported_from(place: str, tmp_path: Path) -> None:
    values = Far(torch.ones(2))

    def places(path: Path) -> set[str]:
        with counting() as syncs:
            exec(compile("values.tolist()", str(path), "exec"), {"values": values})
        return {where for _, where in syncs.found}

    assert places(tmp_path / place) == {"the model"}
    assert places(Path(transformers.__file__).with_name("a.py")) == {"the model"}
    assert places(Path(tokenprune.__file__).with_name("a.py")) == {"a.py:<module>"}


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
def noted_by_cuda() -> Iterator[list[Any]]:
    """Collects a warning for each time that the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            yield found
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, to ask CUDA itself")
def test_cuda_waits_for_what_is_counted() -> None:
    for waits, actions in ((True, WAITS), (False, FREE)):
        for name, action in actions.items():
            x, chosen = torch.arange(4.0).cuda(), torch.tensor([True, False, True, False]).cuda()
            with noted_by_cuda() as found:
                action(x, chosen)
            assert any("synchronizing" in str(one.message) for one in found) == waits, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, to ask CUDA itself")
@pytest.mark.parametrize("name", METHODS)
@each("family_name", FAMILY_NAMES)
@torch.no_grad()
def test_on_a_gpu(family_name: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as counted by CUDA; and choosing and cutting alone, with every wait an error."""
    from tokenprune.integrations.hf.engine import cuts, engine

    family = FAMILIES[family_name]
    inputs = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in inputs_of(family, name, True).items()}
    counts = {}
    for which in (None, name):
        model = patched_model(family, which, monkeypatch).cuda()
        model(**inputs, use_cache=True)  # what is set up once
        with noted_by_cuda() as found:
            model(**inputs, use_cache=True)
        counts[which] = sum("synchronizing" in str(one.message) for one in found)
    pieces = TOWER_BLOCKS if tokenprune.method_info(name).site is Site.IN_ENCODER else 0
    assert counts[name] <= counts[None] + allowed(family, name) + pieces

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


def test_no_device_is_pretended_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch makes events and streams of the pretended one then: whatever uses those of the GPU falls."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(pytest.skip.Exception, match="in the place of the GPU"):
        device.__wrapped__()


@each("name", [*VIDEO_METHODS, "pevlm"])
def test_a_family_without_videos_is_asked_for_none(name: str) -> None:
    with pytest.raises(pytest.skip.Exception, match="llava takes no video"):
        inputs_of(FAMILIES["llava"], name, large=True)


@pytest.mark.parametrize(
    ("pieces", "per_run"), [("#" * 16, False), ("s" + "#" * 8 + "b" + "#" * 8, False), ("#" * 8 + "b" + "#" * 12, True)]
)
@pytest.mark.parametrize("name", ["apet", "divprune", "otprune", "pool", "random", "uniform"])
def test_an_image_of_a_server(name: str, pieces: str, per_run: bool) -> None:
    """A worker of vLLM waits for no device: a plan says how many rows stay. With text within, or tiles."""
    text = find_runs([9 if piece == "#" else 7 for piece in pieces], [piece == "#" for piece in pieces])
    plan = Plan.build(parse_setting({"method": name, "keep": 0.5}), text, per_run)
    with counting() as served:
        rows = Far(torch.randn(sum(plan.counts), 16))
        segments = before_llm.build_segments(plan.counts, None, "image", rows.device)
        kept, rows = before_llm.choose(get_method(plan.setting), rows, 16, segments, plan.keep)
        awaited = AwaitedRows.from_kept(plan, rows, kept)
    assert not served.ours
    assert awaited.rows.shape[:2] == awaited.indices.shape == (1, plan.rows)

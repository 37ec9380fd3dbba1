# SPDX-License-Identifier: Apache-2.0
"""vscan against naive loops, on synthetic tokens and on the attention of vision towers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tokenprune
from basics import pieces
from each import each
from greedy import unit
from module_calls import record_inputs
from oracle import close, generate_logits, reduced, survivors
from tests.unit.tower.test_encoder_attention import BATCHES, CASES, naive_scores
from tokenprune import Budget, BudgetError, OptionError, Selection
from tokenprune.models.decoder_shape import DecoderShape
from tokenprune.selection.segments import Patches
from tokenprune.testing import visual_tokens
from zoo import FAMILIES, Family


def naive_share(counts: list[int], total: int) -> list[int]:
    """Split a total in proportion to the counts, rounding up until the total is used."""
    return [
        -(-total * sum(counts[: i + 1]) // sum(counts)) - -(-total * sum(counts[:i]) // sum(counts))
        for i in range(len(counts))
    ]


def best(indices: list[int], score: Any, count: int) -> list[int]:
    return sorted(indices, key=lambda i: (-score[i], i))[:count]


def window_of(cell: list[int], side: int) -> tuple[int, int]:
    _, row, column, height, width, _ = cell
    return min(row // side, max(height // side, 1) - 1), min(column // side, max(width // side, 1) - 1)


def naive_pick(cells: list[list[int]], local: Tensor, last: Tensor, num_kept: int, share=0.5, side=None) -> list[int]:
    """Return the kept tokens of stage 1.

    Args:
        cells: Tile, row, column, height, width and size of each token. Tokens with tile -1 are always kept.
        local: Scores of the early block.
        last: Scores of the last block.
    """
    local, last = local.tolist(), last.tolist()
    kept = [i for i, cell in enumerate(cells) if cell[0] < 0]
    num_kept = max(1, num_kept - len(kept))
    tiles = sorted({cell[0] for cell in cells} - {-1})
    groups = [[i for i, cell in enumerate(cells) if cell[0] == tile] for tile in tiles]
    for group, quota in zip(groups, naive_share([len(g) for g in groups], num_kept), strict=True):
        local_picks: list[int] = []
        window_side = side or (4 if cells[group[0]][5] > 1 else 6)
        windows: dict[tuple[int, int], list[int]] = {}
        for i in group:
            windows.setdefault(window_of(cells[i], window_side), []).append(i)
        while len(local_picks) < int(quota * share):  # one round: the best remaining token of each window
            candidates = [best([i for i in w if i not in local_picks], local, 1) for w in windows.values()]
            local_picks += best(
                [i for window in candidates for i in window], local, int(quota * share) - len(local_picks)
            )
        kept += local_picks + best([i for i in group if i not in local_picks], last, quota - len(local_picks))
    return sorted(kept)


def naive_targets(cells: list[list[int]], kept: list[int], features: Tensor) -> list[int]:
    picked = [i for i in kept if cells[i][0] >= 0]
    similarity = (unit(features) @ unit(features).T).tolist()
    targets = []
    for i, cell in enumerate(cells):
        candidates = [j for j in picked if cells[j][0] == cell[0]] or picked
        targets.append(i if i in kept else max(candidates, key=lambda j: (similarity[i][j], -j)))
    return targets


def list_cells(patches: Patches, row: int, count: int) -> list[list[int]]:
    return torch.stack([x for x in vars(patches).values() if isinstance(x, torch.Tensor)])[:, row, :count].T.tolist()


def select_random(
    count: list[int], keep: list[int], grids: list, encoder: Any = None, patches: Patches | None = None, **options: Any
) -> tuple[Any, Selection]:
    """Return random tokens, one image per row, and their selection. encoder: scores (rows, tokens) per block."""
    g = torch.Generator().manual_seed(0)
    scores = encoder or {layer: torch.rand(len(count), max(count), generator=g) for layer in (0.25, -1)}
    tokens = visual_tokens(
        torch.randn(len(count), max(count), 8, generator=g), count, keep=keep, grids=grids,
        encoder_attention={layer: score[:, None] for layer, score in scores.items()},
        patches=patches or make_raster(count, grids),
    )  # fmt: skip
    return tokens, tokenprune.method("vscan", **options).select(tokens)


def make_raster(counts: list[int], grids: list[tuple[int, int, int] | None]) -> Patches:
    """Return patches in raster order, or in one row for an unknown grid. Padding has tile -1."""
    cells = torch.zeros(6, len(counts), max(counts), dtype=torch.long)
    cells[0] = -1
    for row, count in enumerate(counts):
        _, height, width = grids[row] or (1, 1, count)
        for i in range(count):
            index = (i // (height * width), i // width % height, i % width)
            cells[:, row, i] = torch.tensor([*index, height, width, 1])
    return Patches(*cells, tiles=int(cells[0].max()) + 1)


GRIDS = [[(1, 6, 6), (1, 12, 12)], [(1, 7, 5), (1, 1, 9)], [(3, 4, 6), (5, 1, 2)], [(1, 13, 10), (2, 8, 9)]]


@each("grids", GRIDS)
@each("options", [{}, {"window": 2, "local": 0.7}, {"local": 0}, {"local": 1, "window": 3}])
def test_stage_1_equals_naive_loop(grids: list, options: dict) -> None:
    counts = [a * b * c for a, b, c in grids]
    patches = make_raster(counts, grids)
    patches.tile[0, ::7] = -1  # newlines
    patches.size[1] = 4
    for share in (0.05, 0.3, 0.95):
        keep = [max(1, round(share * n)) for n in counts]
        tokens, selection = select_random(counts, keep, grids, patches=patches, **options)
        for row, count in enumerate(counts):
            cells = list_cells(patches, row, count)
            local, last = (tokens.encoder_attention(layer)[row, 0] for layer in (0.25, -1))
            want = naive_pick(cells, local, last, keep[row], options.get("local", 0.5), options.get("window"))
            assert selection.keep[row].nonzero().flatten().tolist() == want
            targets = naive_targets(cells, want, tokens.hidden[row])
            assert selection.assign[row, :count].tolist() == targets and (selection.assign[row, count:] == -1).all()
            newlines = sum(cell[0] < 0 for cell in cells)
            assert len(want) == max(keep[row], newlines + 1)
    assert select_random(counts, keep, grids, merge=False)[1].assign is None


@pytest.mark.parametrize(("grid", "size", "keep"), [((24, 24), 1, 96), ((24, 24), 1, 288), ((16, 16), 4, 64)], ids=str)
def test_equals_both_reference_codes_if_windows_divide(grid: tuple[int, int], size: int, keep: int) -> None:
    """The top tokens of each window (LLaVA) equal a greedy choice with a limit per window (Qwen)."""
    count, side = grid[0] * grid[1], 4 if size > 1 else 6
    patches = make_raster([count], [(1, *grid)])
    patches.size[:] = size
    tokens, selection = select_random([count], [keep], [None], patches=patches)
    cells = list_cells(patches, 0, count)
    local, last = (tokens.encoder_attention(layer)[0, 0].tolist() for layer in (0.25, -1))
    num_local = keep // 2
    tops, walk, used = [], [], {}
    windows = {window_of(cell, side) for cell in cells}
    for window in windows:
        tops += best([i for i in range(count) if window_of(cells[i], side) == window], local, num_local // len(windows))
    for i in best(list(range(count)), local, count):
        window = window_of(cells[i], side)
        if len(walk) < num_local and used.get(window, 0) < -(-num_local // len(windows)):
            walk.append(i)
            used[window] = used.get(window, 0) + 1
    assert num_local % len(windows) == 0 and sorted(tops) == sorted(walk)
    global_picks = best([i for i in range(count) if i not in tops], last, keep - num_local)
    assert selection.keep[0].nonzero().flatten().tolist() == sorted(tops + global_picks)


def test_every_window_is_used_and_no_token_is_picked_twice() -> None:
    """Also with zero, negative and NaN scores."""
    for seed, (height, width) in enumerate([(1, 1), (3, 11), (5, 5), (9, 8), (13, 6), (2, 40)]):
        count = height * width
        g = torch.Generator().manual_seed(seed)
        for keep in range(1, count + 1, 1 + count // 9):
            scores = {0.25: torch.rand(1, count, generator=g), -1: torch.full((1, count), -torch.inf)}
            scores[0.25][0, ::3] = torch.nan
            tokens, selection = select_random([count], [keep], [(1, height, width)], window=3, encoder=scores)
            assert int(selection.keep.sum()) == keep
            cells = list_cells(tokens.patches, 0, count)
            used = {window_of(cell, 3): [0, 0] for cell in cells}
            for cell, kept in zip(cells, selection.keep[0].tolist(), strict=True):
                used[window_of(cell, 3)][0] += kept
                used[window_of(cell, 3)][1] += 1
            assert all(kept >= min(size, keep // 2 // len(used)) for kept, size in used.values())


def test_long_sequences_are_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    _, expected = select_random([144], [30], [(1, 12, 12)])
    monkeypatch.setattr("tokenprune.kernels.match._MAX_ELEMENTS", 7 * 30)
    assert torch.equal(select_random([144], [30], [(1, 12, 12)])[1].assign, expected.assign)


# -- the schedule ------------------------------------------------------------------------------------------------------

SCHEDULES = [  # layers, tokens, keep, tokens after stage 1, tokens after stage 2; the first three are from the paper
    (32, 576, 64, 96, 32),
    (32, 576, 128, 192, 64),
    (32, 576, 192, 288, 96),
    (28, 1200, 1 / 9, 200, 67),
    (32, 576, 0.5, 432, 144),
    (32, 576, 0.8, 576, 346),
    (32, 576, 500, 576, 424),
    (32, 100, 500, 100, 100),
    (32, 576, Budget(average_tokens=64.0), 96, 32),
    (32, 576, Budget.from_kv_share(0.5), 432, 144),
    (27, 50, Budget(tokens=1), 1, 1),
]


@each(("layers", "count", "keep", "first", "second"), SCHEDULES)
def test_schedule(layers: int, count: int, keep: Any, first: int, second: int) -> None:
    shape = DecoderShape(layers, hidden=8, intermediate=16, heads=1, kv_heads=1, head_dim=8)
    budget = Budget.from_keep(keep)
    got, num_tokens = [], count
    for method, part in tokenprune.method("vscan").stages(budget, layers):
        context = dict(layer=method.cut_layer, shape=shape, text_tokens=0, original=[count])
        (budgeted,) = part.resolve([num_tokens], **context)
        num_tokens = min(num_tokens, max(1, method.resolve_count(num_tokens, budgeted)))  # as in the engine
        got.append((method.name, method.site, method.cut_layer, num_tokens))
    assert got == [("vscan", "PRE_LLM", 0, first), ("vscan", "IN_LLM", layers // 2, second)]


def test_impossible_schedules_raise() -> None:
    method = tokenprune.method("vscan")
    with pytest.raises(BudgetError, match="by itself"):
        method.stages(Budget(keep=0.5, per="prompt"), 32)
    with pytest.raises(OptionError, match="layer=32"):
        tokenprune.method("vscan", layer=32).stages(Budget(keep=0.5), 32)
    ((first, budget),) = tokenprune.method("vscan", stage2=False).stages(Budget.from_flops_share(0.5), 32)
    assert budget == Budget.from_flops_share(0.5) and first.prefix_cache_safe and not method.prefix_cache_safe


@each(
    "options",
    [
        dict(layer=0), dict(layer=4), dict(window=0), dict(stage2=1), dict(merge=None), dict(local=1.5),
        dict(local=True),
        dict(local_layer=1.0), dict(local_layer="2"), dict(local_layer=3), dict(local_layer=-4),
    ],
)  # fmt: skip
def test_options(options: dict, build) -> None:
    with pytest.raises(OptionError, match="vscan.*" + str(next(iter(options.values()))).removeprefix("-")):
        tokenprune.patch(build(FAMILIES["llava"]), "vscan", keep=0.3, **options)


# -- in models ---------------------------------------------------------------------------------------------------------


def run_cuts(model: Any, inputs: Any, keep: Any = 0.3, **options: Any) -> list:
    with torch.no_grad(), tokenprune.patched(model, "vscan", keep=keep, record=True, **options):
        model(**inputs)
        return tokenprune.stats(model).cuts


@pytest.mark.parametrize(("family", "batch"), [case for case in CASES if "text" not in case.id])
@torch.no_grad()
def test_stage_1_equals_tower_attention_maps(
    family: Family, batch: str, build, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = build(family, "eager"), family.make_inputs(**BATCHES[batch])
    cells, scores = naive_scores(family, model, inputs, monkeypatch, (0.25, -1))
    with record_inputs(model.get_submodule(family.decoder).layers[0]) as embeds:
        model(**inputs)
    (cut,) = run_cuts(build(family), inputs, stage2=False)
    flat = family.visual_mask(model, inputs).nonzero().tolist()
    index = {tuple(position): i for i, position in enumerate(flat)}
    for row, row_pieces in enumerate(pieces(family, inputs)):
        for piece in row_pieces:
            tokens = [index[row, position] for position in piece]
            keep = max(1, round(0.3 * len(piece)))
            local, last = (scores[layer][tokens].mean(1) for layer in (0.25, -1))
            want = naive_pick([cells[i] for i in tokens], local, last, keep)
            assert set(cut.kept[row]) & set(piece) == {piece[i] for i in want}
            targets = naive_targets([cells[i] for i in tokens], want, embeds[0][row, piece])
            groups: dict[int, list[int]] = {}
            for i, target in enumerate(targets):
                groups.setdefault(piece[target], []).append(piece[i])
            assert {k: v for k, v in cut.sources[row].items() if k in piece} == groups


@pytest.mark.few_families
@pytest.mark.parametrize("layer", [1, 2, 3])
@torch.no_grad()
def test_stage_2_equals_eager_attention_of_the_next_layer(layer: int, family: Family, build) -> None:
    model, inputs = build(family, "eager"), family.make_inputs(images=(1, 2))
    vscan, shape = tokenprune.method("vscan", layer=layer), DecoderShape.from_config(model.config.get_text_config())
    (first, budget), (_, share) = vscan.stages(Budget(keep=0.4), 4)
    with tokenprune.patched(model, first, keep=budget, record=True):
        maps = model(**inputs, output_attentions=True).attentions
        (before,) = tokenprune.stats(model).cuts
    rows = maps[layer].mean(1)[:, -1]  # padding is on the left
    cuts = run_cuts(build(family), inputs, 0.4, layer=layer)
    assert cuts[0].kept == before.kept and cuts[1].layer == layer
    for row, row_pieces in enumerate(pieces(family, inputs)):
        slot = {position: i - len(before.kept[row]) for i, position in enumerate(before.kept[row])}
        for piece in row_pieces:
            remaining = [position for position in piece if position in slot]
            score = torch.stack([rows[row, slot[position]] for position in remaining])
            context = dict(layer=layer, shape=shape, text_tokens=0, original=[len(piece)])
            (keep,) = share.resolve([len(remaining)], **context)
            want = {remaining[i] for i in score.argsort(descending=True, stable=True)[:keep].tolist()}
            assert set(cuts[1].kept[row]) & set(piece) == want


@pytest.mark.parametrize("name", ["llava", "llava_next", "gemma3"])
@torch.no_grad()
def test_stage_2_attends_to_cached_tokens(name: str, build) -> None:
    family = FAMILIES[name]
    model, inputs = build(family, "eager"), family.make_inputs(only=0)
    early = torch.arange(20, 32)[None]
    mask = torch.ones(1, 12 + inputs["input_ids"].shape[1], dtype=torch.long)
    second = tokenprune.method("vscan").stages(Budget(keep=0.3), 4)[1][0]

    def run_turn(**options: Any) -> Any:
        past = model(early, use_cache=True).past_key_values
        return model(**{**inputs, "attention_mask": mask}, past_key_values=past, **options)

    row = run_turn(output_attentions=True).attentions[2].mean(1)[0, -1]
    with tokenprune.patched(model, second, keep=0.3, record=True):
        run_turn()
        (cut,) = tokenprune.stats(model).cuts
    ((piece,),) = pieces(family, inputs)
    start = row.shape[0] - inputs["input_ids"].shape[1]  # the cache of a sliding layer has dropped its oldest slots
    score = row[[start + position for position in piece]]
    want = {12 + piece[i] for i in score.argsort(descending=True, stable=True)[: round(0.3 * len(piece))].tolist()}
    assert set(cut.kept[0]) & {12 + position for position in piece} == want


@torch.no_grad()
def test_cache_lengths_and_averages(family: Family, model) -> None:
    inputs = family.make_inputs(images=(1, 0))
    with tokenprune.patched(model, "vscan", keep=0.3):
        cache = model(**inputs).past_key_values
        stats = tokenprune.stats(model)
    length, (count,) = inputs["input_ids"].shape[1], [sum(row) for row in inputs.counts if row]
    first, _, second, _ = stats.visual_tokens_per_layer
    assert stats.visual_tokens_per_layer == [first, first, second, second] and count > first > second
    assert stats.visual_tokens_average / count == pytest.approx(0.3, abs=0.04)
    for layer, layer_cache in enumerate(cache.layers):
        tokens = length - count + (first if layer < 2 else second)
        window = layer_cache.sliding_window - 1 if getattr(layer_cache, "is_sliding", False) else tokens
        assert layer_cache.keys.shape[-2] == min(tokens, window) or len(inputs["input_ids"]) > 1


@torch.no_grad()
def test_questions_and_sites(family: Family, model) -> None:
    inputs = family.make_inputs(images=(2, 1))
    other = {**inputs, "input_ids": inputs["input_ids"].clone()}
    other["input_ids"][:, -4:] = torch.arange(100, 104)
    cuts, other_cuts = run_cuts(model, inputs), run_cuts(model, other)
    assert cuts[0].kept == other_cuts[0].kept and cuts[0].sources == other_cuts[0].sources
    with tokenprune.patched(model, "vscan", keep=0.3, record=True):
        got, tokens, _ = generate_logits(model, inputs, 3)
        generation_cuts = tokenprune.stats(model).cuts
    assert generation_cuts[0].kept == cuts[0].kept and generation_cuts[0].sources == cuts[0].sources
    with reduced(family, model, generation_cuts, inputs["input_ids"].shape[1]):
        want, _, _ = generate_logits(model, inputs, 3, tokens=tokens)
    close(got, want)


COMPOSED = [
    (["vscan", tokenprune.method("fastv", layer=3)], [0.4, 0.6]),  # fastv reads layer 2, where vscan cuts by default
    # fastv cuts before the layer that stage 2 reads.
    ([tokenprune.method("fastv", layer=1), "vscan"], [0.6, 0.4]),
    ([tokenprune.method("vscan", stage2=False), "dart"], 0.5),
    (["divprune", tokenprune.method("vscan", layer=1).stages(Budget(keep=0.3), 4)[1][0]], 0.5),
]


@pytest.mark.few_families
@pytest.mark.parametrize(
    ("methods", "keep"), COMPOSED, ids=["vscan fastv", "fastv vscan", "stage 1 dart", "divprune stage 2"]
)
@torch.no_grad()
def test_composition(methods: list, keep: Any, family: Family, model) -> None:
    inputs = family.make_inputs(images=(1, 2))
    with tokenprune.patched(model, methods, keep=keep, record=True):
        got, cuts = model(**inputs).logits, tokenprune.stats(model).cuts
    alive = survivors(cuts[-1], inputs["input_ids"].shape[1])
    with reduced(family, model, cuts, alive.shape[1]):
        close(got[alive], model(**inputs).logits[alive])


@pytest.mark.few_families
@pytest.mark.parametrize("batch", [{"images": (2, 1)}, {"only": 0}], ids=["ragged", "one row"])
@torch.no_grad()
def test_beams(batch: dict, family: Family, model) -> None:
    inputs = family.make_inputs(**batch)
    beams = dict(max_new_tokens=3, num_beams=2)
    (cut, _) = run_cuts(model, inputs)
    with tokenprune.patched(model, "vscan", keep=0.3, record=True):
        got = model.generate(**inputs, **beams)
        cuts = tokenprune.stats(model).cuts
    assert cuts[0].kept == [row for row in cut.kept for _ in range(2)]
    with reduced(family, model, cuts, inputs["input_ids"].shape[1]):
        assert torch.equal(got, model.generate(**inputs, **beams))


def test_layer_without_stage_2_raises() -> None:
    with pytest.raises(OptionError, match="layer=2 has no effect with stage2=False"):
        tokenprune.method("vscan", stage2=False, layer=2)

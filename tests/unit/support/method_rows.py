# SPDX-License-Identifier: Apache-2.0
"""Rows of the table in tests/unit/methods/naive: a method's naive loop, its valid options and its invalid options."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch

import greedy
import several_cuts
import tokenprune
import tower_tokens
import videos
from tokenprune import Selection, VisualTokens
from zoo import FAMILIES

Options = Mapping[str, Any]
# Changes that must not change the selection: each maps tokens to observables to replace.
CHANGES: dict[str, Callable[[VisualTokens], dict[str, Any]]] = {
    "length of tokens": lambda t: {"hidden": t.hidden * _powers(1, t.hidden.shape[1], 1)},
    "length of features": lambda t: {"encoder_features": t.encoder_features * _powers(1, t.hidden.shape[1], 1)},
    "length of keys": lambda t: {"encoder_keys": {-1: t.encoder_keys(-1) * _powers(1, t.hidden.shape[1], 1)}},
    "unit of tokens": lambda t: {"hidden": t.hidden * 8},
    "unit of channels": lambda t: {"hidden": t.hidden * _powers(1, 1, t.hidden.shape[2])},
    "unit of attention": lambda t: {"encoder_attention": {-1: t.encoder_attention(-1) * 64}},
    "turn of tokens": lambda t: {"hidden": t.hidden @ _turn(t.hidden.shape[2])},
    "turn of features": lambda t: {"encoder_features": t.encoder_features @ _turn(t.encoder_features.shape[2])},
    "order of heads": lambda t: {"encoder_attention": {-1: t.encoder_attention(-1).flip(1)}},
    "tokens": lambda t: {"hidden": torch.zeros_like(t.hidden)},
    "text": lambda t: {"text": {"hidden": torch.randn(1, 3, t.hidden.shape[2])}},
    "order of text": lambda t: {"text": {"hidden": t.text.hidden.flip(1)}},
    "text twice": lambda t: {"text": {"hidden": t.text.hidden.repeat(1, 2, 1)}},
}


def _powers(*shape: int) -> torch.Tensor:
    return 2.0 ** torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(3))


def _turn(width: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(width, width, generator=torch.Generator().manual_seed(1)))[0]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Row of a method.

    Args:
        naive: Naive loop, written from the paper. None if a separate file holds the loop.
        tried: Options to compare.
        refused: Options that raise OptionError.
        unchanged: Names of `CHANGES` that must not change the selection.
    """

    naive: Callable[..., Any] | None = None
    tried: Sequence[Options] = ({},)
    refused: Sequence[Options] = ()
    unchanged: Sequence[str] = ()

    def cases(self) -> Iterator[tuple[str, Callable[..., None]]]:
        """Yield (name, function) comparisons with the loop. Arguments: method name, `build` fixture."""
        return iter(())

    def large_cases(self) -> Iterator[tuple[str, Callable[..., None]]]:
        """Yield slower comparisons at the sizes of the papers."""
        return iter(())

    def view(self, keep: int | None = None, **observables: Any) -> VisualTokens | None:
        """Return tokens of an image or video with a budget of `keep` (default: all), or None to skip these tests."""
        return None


@dataclass(frozen=True, kw_only=True)
class Picks(Row):
    """Row of a method that picks tokens by their features, on synthetic batches in float32 and bfloat16.

    Args:
        slack: See `greedy.check_against`.
        sizes: Counts, budgets and dtype of further batches.
        large: Compare the first options at the sizes of the papers.
        nested: A smaller budget keeps a subset of the tokens of a larger budget.
    """

    slack: float = 2e-5
    sizes: Sequence[tuple[list[int], list[int], torch.dtype]] = ()
    large: bool = True
    nested: bool = True

    def cases(self) -> Iterator[tuple[str, Callable[..., None]]]:
        for options in self.tried:
            yield str(dict(options)), partial(self._compare, options, [*greedy.SIZES, *self.sizes])
        yield "in another order", self._permute
        if self.nested:
            yield "nested", self._nest

    def large_cases(self) -> Iterator[tuple[str, Callable[..., None]]]:
        if self.large:
            yield str(dict(self.tried[0])), partial(self._compare, self.tried[0], greedy.LARGE)

    def view(self, keep: int | None = None, **observables: Any) -> VisualTokens:
        return greedy.image_tokens([40], [40 if keep is None else keep], **observables)

    def _compare(self, options: Options, sizes: Any, name: str, build: Any) -> None:
        loop = partial(self.naive, **options)
        greedy.check_against(loop, name, sizes=sizes, slack=self.slack, **options)

    def _permute(self, name: str, build: Any) -> None:
        tokens, order = self.view(12), torch.randperm(40, generator=torch.Generator().manual_seed(2))
        moved = {
            "hidden": tokens.hidden[:, order],
            "encoder_attention": {-1: tokens.encoder_attention(-1)[..., order]},
            "encoder_features": tokens.encoder_features[:, order],
        }
        for method in (tokenprune.method(name, **options) for options in self.tried):
            (actual,), (expected,) = greedy.picked(method, self.view(12, **moved)), greedy.picked(method, tokens)
            assert sorted(order[actual].tolist()) == expected, method

    def _nest(self, name: str, build: Any) -> None:
        for method in (tokenprune.method(name, **options) for options in self.tried):
            kept = [set(greedy.picked(method, self.view(keep))[0]) for keep in range(1, 13)]
            assert all(fewer < more for fewer, more in pairwise(kept)), method


@dataclass(frozen=True, kw_only=True)
class Tower(Row):
    """Row of a method that uses observables of the vision tower.

    The method is compared on tiles of all shapes, with and without ties, and at the papers' sizes in bfloat16. `naive`
    takes the tokens and an image index. It returns the kept tokens and, if `merges`, the target of each merged token.

    Args:
        made: Builds tokens, with the signature of `tower_tokens`.
        papers: Grids and budgets of the papers.
        tied: Options to compare with ties. None uses `tried`.
        merges: Whether the method merges tokens.
    """

    made: Callable[..., VisualTokens] = tower_tokens.tower_tokens
    papers: Sequence[tuple[tuple[int, int], int]] = ()
    tied: Sequence[Options] | None = None
    merges: bool = False

    def cases(self) -> Iterator[tuple[str, Callable[..., None]]]:
        for layout, shape in zip(tower_tokens.LAYOUTS, ("one", "tiles", "thin"), strict=True):
            for ties in (False, True):
                yield f"{shape}, ties" if ties else shape, partial(self._layout, layout, ties)

    def large_cases(self) -> Iterator[tuple[str, Callable[..., None]]]:
        for grid, keep in self.papers:
            yield f"{keep} of {grid}", partial(self._paper, grid, keep)

    def view(self, keep: int | None = None, **observables: Any) -> VisualTokens:
        return self.made([([(8, 8)], 0)], [64 if keep is None else keep], **observables)

    def _layout(self, layout: tower_tokens.Layout, ties: bool, name: str, build: Any) -> None:
        for seed, keep in enumerate(tower_tokens.budgets(layout)):
            tokens = self.made(layout, keep, seed=seed, ties=ties)
            for options in self.tried if self.tied is None or not ties else self.tied:
                self._same(tokenprune.method(name, **options).select(tokens), tokens, options)

    def _paper(self, grid: tuple[int, int], keep: int, name: str, build: Any) -> None:
        tokens = self.made([([grid], 0)], [keep], dtype=torch.bfloat16)
        self._same(tokenprune.method(name).select(tokens), tokens, {})

    def _same(self, selection: Selection, tokens: VisualTokens, options: Options) -> None:
        for image, (count, keep) in enumerate(zip(tokens.counts, tokens.keep, strict=True)):
            result = self.naive(tokens, image, **options)
            kept, targets = result if self.merges else (result, {})
            assert tower_tokens.kept_of(selection.keep)[image] == kept and len(kept) == keep, (keep, options)
            if targets is None or not self.merges:
                assert selection.assign is None
                continue
            expected = [i if i in set(kept) else targets.get(i, -1) for i in range(count)]
            assert selection.assign[image].tolist() == expected + [-1] * (tokens.mask.shape[1] - count), (keep, options)


@dataclass(frozen=True, kw_only=True)
class Video(Row):
    """Row of a method that merges tokens of frames, on batches of videos with and without a scene cut.

    `naive` takes a video, its attention, the budget and the grid.

    Args:
        always: Options of every call.
        by_grid: The method assumes raster order if a newline hides the grid.
        slow: The loop is too slow for these cases, and the method has a separate test file.
    """

    always: Options = field(default_factory=dict)
    by_grid: bool = False
    slow: bool = False

    def cases(self) -> Iterator[tuple[str, Callable[..., None]]]:
        for frames in (1, 2, 3, 5, 16):
            yield f"{frames} frames", partial(self._counts, frames)
        if self.slow:
            return
        for share in (0.04, 0.3, 0.6, 0.97):
            for scene_cut in (None, 3):
                yield f"{share}, {scene_cut}", partial(self._compare, share, scene_cut)
        for options in self.tried:
            if options:
                yield str(dict(options)), partial(self._options, options)

    def view(self, keep: int | None = None, **observables: Any) -> VisualTokens:
        return videos.given([videos.moving(4, 4, 4)], [64 if keep is None else keep], [(4, 4)], **observables)

    def _counts(self, frames: int, name: str, build: Any) -> None:
        videos.check_counts(name, frames, **self.always)

    def _compare(self, share: float, cut: int | None, name: str, build: Any) -> None:
        def flat(video: torch.Tensor, attention: torch.Tensor, keep: int, grid: tuple[int, int]) -> Any:
            return self.naive(video, attention, keep, (1, grid[0] * grid[1]))

        loop = flat if self.by_grid and cut is None else self.naive
        videos.compare(name, loop, share, cut, newline=cut is None, **self.always)

    def _options(self, options: Options, name: str, build: Any) -> None:
        video = videos.moving(7, 4, 4, seed=1, cut=4)
        for keep in (7, 24, 70):
            selection = videos.select(name, videos.given([video], [keep], [(4, 4)]), **self.always, **options)
            expected = self.naive(video, videos.attention_of(video), keep, (4, 4), **options)
            videos.same(*map(_parts, (videos.shares_of(selection, 0, 112), expected)))


def _parts(groups: dict[int, dict[int, float]]) -> dict[int, dict[int, float]]:
    """Return groups without members of weight zero."""
    return {target: {i: part for i, part in group.items() if part} for target, group in groups.items()}


@dataclass(frozen=True, kw_only=True)
class Cuts(Row):
    """Row of a method that cuts inside the decoder, compared in eager models and on synthetic tokens with ties.

    `naive` takes `several_cuts.Arrived`, the decoder and the options.

    Args:
        layers: Cut layers in a model of four layers.
        merges: Whether kept tokens must absorb dropped tokens.
        ties: Returns the kept tokens of each image for tokens, a cut index and the options. None skips ties.
        tied: Options of `ties`.
        stages: Number of cuts to check with ties. None checks all cuts.
    """

    keep: float = 0.5
    layers: Sequence[int]
    families: Sequence[str] = ("llava",)
    merges: bool = False
    ties: Callable[..., list[list[int]]] | None = None
    tied: Sequence[Options] = ({},)
    stages: int | None = None

    def cases(self) -> Iterator[tuple[str, Callable[..., None]]]:
        for family in self.families:
            for options in self.tried:
                yield f"{family}, {dict(options)}", partial(self._in_model, family, options)
        for options in self.tied if self.ties else ():
            yield f"ties, {dict(options)}", partial(self._tied, options)

    def view(self, keep: int | None = None, **observables: Any) -> VisualTokens | None:
        return None  # each stage needs the inputs of its cut; `ties` covers a share of 1.0

    def _in_model(self, family: str, options: Options, name: str, build: Any) -> None:
        decoder = build(FAMILIES[family], "eager").get_submodule(FAMILIES[family].decoder)
        loop = partial(self.naive, decoder=decoder, **options)
        cuts = several_cuts.check_in_model(name, loop, build, keep=self.keep, name=family, **options)
        assert [cut.layer for cut in cuts] == list(self.layers)
        for cut, later in pairwise(cuts):
            assert all(set(b) <= set(a) for a, b in zip(cut.kept, later.kept, strict=True))
        joined = [len(sources) for cut in cuts for row in cut.sources or () for sources in row.values()]
        assert (max(joined, default=1) > 1) is (self.merges and options.get("version") != "+")

    def _tied(self, options: Options, name: str, build: Any) -> None:
        method = tokenprune.method(name, **options)
        several_cuts.check_ties(method, partial(self.ties, **options), self.stages)

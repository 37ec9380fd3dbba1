# SPDX-License-Identifier: Apache-2.0
"""`tokenprune methods`: readable at any width, with filters, and one method in full."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import LlavaConfig
from typer.testing import CliRunner

import tokenprune
from tokenprune.cli import app
from tokenprune.cli.methods import _SITES, WIDE
from tokenprune.selection.method import Site
from tokenprune.settings.cost import CostModel, Load

DOCS = Path(__file__).parents[3] / "docs"


def told(*arguments: str, width: int | None = 80, code: int = 0) -> str:
    """What the command prints in a terminal of so many columns; None: into a pipe."""
    result = CliRunner(env={"COLUMNS": None if width is None else str(width)}).invoke(app, ["methods", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def names(output: str) -> list[str]:
    """The methods of a listing: lines that begin with the name of one."""
    known = set(tokenprune.available_methods())
    firsts = (line.split(maxsplit=1)[0] for line in output.splitlines() if line.strip())
    return [first for first in firsts if first in known]


def words(text: str) -> set[str]:
    return set(text.split())


@pytest.mark.parametrize("width", [60, 80, 100, 160, None])
def test_the_list_is_readable_at_any_width(width: int | None) -> None:
    output = told(width=width)
    assert max(map(len, output.splitlines())) <= (width or 160)
    assert sorted(names(output)) == tokenprune.available_methods()
    assert len(output.splitlines()) <= {60: 2.0}.get(width, 1.5) * len(names(output))
    printed = words(output)
    for name in tokenprune.available_methods():
        clause = re.split(r"[:;,(]|\.(?:\s|$)", tokenprune.method_info(name).summary)[0]
        assert words(clause) <= printed, name
    for site in Site:
        assert str(site) in output


@pytest.mark.parametrize("width", [WIDE, 200, None])
def test_a_wide_list_has_the_flags_on_the_line_of_the_method(width: int | None) -> None:
    output = told(width=width)
    head, lines = output.splitlines()[0], output.splitlines()
    columns = ["method", "site", "keep", "FLOPs left", "query-aware", "prefix-cache-safe", "merges", "what it does"]
    assert re.split(r"  +", head.strip()) == columns
    for name in tokenprune.available_methods():
        info = tokenprune.method_info(name)
        (line,) = (line for line in lines if line.startswith(f"{name} "))
        _, site, _, *cells = line.split()
        flags = [cell for cell in cells if cell in ("yes", "no")][:3]
        assert site == info.site
        assert flags == [{True: "yes", False: "no"}[flag] for flag in (
            info.query_aware, info.prefix_cache_safe, info.merges)]  # fmt: skip


def test_list_shows_default_cost() -> None:
    """A cut ahead of the decoder leaves the tower, the text and what is kept; one inside it the layers before as well;
    what removes nothing has no number."""
    lines = {line.split()[0]: line.split()[3] for line in told(width=200).splitlines() if len(line.split()) > 3}
    config = LlavaConfig()
    model, load = CostModel.from_config(config), Load.from_config(config)
    cut = model.compute_cost(load, per_layer=[144] * 32).flops / model.compute_cost(load).flops
    late = model.compute_cost(load, per_layer=[576] * 2 + [144] * 30).flops / model.compute_cost(load).flops
    assert (lines["divprune"], lines["dart"]) == (f"{cut:.0%}", f"{late:.0%}")
    assert lines["pevlm"] == "no"  # the next column


def test_filters() -> None:
    infos = [tokenprune.method_info(name) for name in tokenprune.available_methods()]
    assert list(_SITES) == list(Site)
    for site in Site:
        mine = [info.name for info in infos if info.site is site]
        assert sorted(names(told("--site", site.lower()))) == mine and mine
    safe, videos = told("--prefix-cache-safe"), told("--video", width=160)
    assert sorted(names(safe)) == [info.name for info in infos if info.prefix_cache_safe]
    assert {"vidcom2", "pevlm"} <= set(names(videos)) and not {"dart", "divprune"} & set(names(videos))
    both = told("--video", "--site", "PRE_LLM", "--prefix-cache-safe")
    assert set(names(both)) == set(names(videos)) & set(names(safe)) & set(names(told("--site", "PRE_LLM")))
    assert told("--video", "--site", "DECODE") == "No method matches.\n"
    assert told("--site", "llm", code=2).split() == (
        "error: --site 'llm' is unknown. "
        "Use one of PRE_ENCODER, IN_ENCODER, PRE_LLM, ATTENTION, IN_LLM, DECODE.".split()
    )


def test_single_method_is_described() -> None:
    for index, name in enumerate(tokenprune.available_methods()):
        check_in_full(name, (60, 80, 160)[index % 3])


def check_in_full(name: str, width: int) -> None:
    info, output = tokenprune.method_info(name), told(name, width=width)
    assert max(map(len, output.splitlines())) <= width
    option_names = {f"{option}:" for option in info.options} | {"Args:"}  # printed as name=default: type
    assert words(info.cls.__doc__) - option_names <= words(output)
    for expected in (info.site, info.site.description, info.source, *(f"{option}=" for option in info.options)):
        assert words(expected) <= words(output) or expected in output, expected
    assert f"docs/methods/{name}.md" in output and (DOCS / "methods" / f"{name}.md").is_file()


def test_options_have_their_types_and_defaults() -> None:
    lines = [line.strip() for line in told("fastv").splitlines()]
    assert "layer=2: an int >= 1" in lines and "query='last': 'last' or 'all'" in lines
    assert "not with inner=False" in told("prunevid")


def test_unknown_method_suggests_similar_names() -> None:
    said = " ".join(told("visonzip", code=2).split())
    assert re.fullmatch(
        r"error: unknown method 'visonzip': did you mean 'visionzip', '\w+' or '\w+'\? "
        "`tokenprune methods` lists them all", said
    )  # fmt: skip
    assert "do not apply to a single method" in " ".join(told("dart", "--site", "IN_LLM", code=2).split())

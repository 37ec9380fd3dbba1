# SPDX-License-Identifier: Apache-2.0
"""What the guard knows before it sees a model: the shipped table, kinds of prompts, settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tokenprune
from each import each
from guard_questions import FRESH, KNOWN, TRIED
from tests.unit.docs.test_site import tool
from tokenprune import Guard, OptionError
from tokenprune.integrations.hf.guard.floors import Floors, load_floors
from tokenprune.integrations.hf.guard.prompts import KindReader
from tokenprune.integrations.hf.guard.settings import KINDS
from tokenprune.methods import DEFAULT_METHOD
from tokenprune_bench.results import read_records
from tokenprune_demo.heldout import load_heldout

# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_table_is_what_the_script_makes_of_the_records() -> None:
    script = tool("guard")
    made = script.table(script.records())
    assert script.TABLE.read_text(encoding="utf-8") == script.written(made)
    text = script.PAGE.read_text(encoding="utf-8")
    assert text == script.page(text, made) and "**0.25**" in text


def test_floors_hold_what_they_promise() -> None:
    """By the raw counts: at the floor, and above it, no kind of question lost more than ten of a hundred."""
    script, table = tool("guard"), load_floors()
    raised = 0
    for name, judged in script.JUDGED.items():
        records = [one for one in read_records(script.RESULTS / name) if one["record"] == "result"]
        base = next(one for one in records if one["method"] == "unpatched")
        for record in records:
            if record is base or table.get_loss(record["method"], "text", 0.5) is None or record["keep"] == 0.33:
                continue  # of one model alone
            for kind, of_kind in judged.items():
                floor = table.get_floor(record["method"], kind)
                for one in of_kind:
                    lost = base["correct"][one] / base["n"][one] - record["correct"][one] / record["n"][one]
                    assert record["keep"] < floor or lost <= table.limit + 1e-9
                raised += floor < 1
    assert raised > 60
    assert table.get_floor("random", "text") == table.get_floor("downsample", "counting") == 1.0


def test_a_floor_is_that_of_the_stricter_model() -> None:
    script, table = tool("guard"), load_floors()
    alone = {one.model: Floors(script.table([one])) for one in script.records()}
    assert set(alone) == {"demo_vlm", "demo_smol"}
    for method in ("divprune", "dart", "fastv", "pool", "vscan"):
        for kind in KINDS:
            assert table.get_floor(method, kind) >= alone["demo_vlm"].get_floor(method, kind)
    # demo_vlm has neither pages nor charts, and kept all of its words at a quarter.
    assert alone["demo_vlm"].get_floor("divprune", "text") == 0.25 < table.get_floor("divprune", "text") == 0.5
    assert table.get_loss("divprune", "text", 0.25).model == "demo_smol" != table.get_loss("random", "text", 0.5).model
    # What README.md and `tokenprune recommend` send to the guard is watched at the default setting.
    assert min(table.get_floor(DEFAULT_METHOD, kind) for kind in KINDS) > 0.25


def test_a_method_that_was_not_measured_has_the_median() -> None:
    script = tool("guard")
    measured = [name for name in tokenprune.available_methods() if load_floors().get_loss(name, "text", 0.5)]
    for kind in KINDS:
        floors = sorted(load_floors().get_floor(name, kind) for name in measured)
        assert load_floors().get_floor("somebody_elses", kind) == floors[len(floors) // 2]
    assert load_floors().get_loss("somebody_elses", "text", 0.5) is None
    assert all(set(judged) == set(KINDS) for judged in script.JUDGED.values())
    loss = load_floors().get_loss("dart", "counting", 0.3)
    assert (loss.keep, round(loss.points), loss.model) == (0.25, 41, "demo_smol")
    assert load_floors().list_safe_methods("text", 0.25) == ["pool"]
    assert "random" not in load_floors().list_safe_methods("text", 0.5)


# -- prompts -----------------------------------------------------------------------------------------------------------


def rates(questions: list[tuple[str, set[str]]]) -> tuple[float, float]:
    """Precision and recall over all kinds."""
    reader = KindReader()
    pairs = [(set(reader.kinds(text)), wanted) for text, wanted in questions]
    hits = sum(len(found & wanted) for found, wanted in pairs)
    return hits / sum(len(found) for found, _ in pairs), hits / sum(len(wanted) for _, wanted in pairs)


def test_kinds_of_prompts() -> None:
    """As docs/guides/guard.md says: on the questions that the patterns were mended on, and on those written
    afterwards."""
    assert rates(KNOWN) == (1.0, 1.0)
    assert min(rates(TRIED)) > 0.95
    precision, recall = rates(FRESH)
    assert precision == 1.0 and 0.80 < recall < 0.85
    judged = {one: kind for kind, kinds in tool("guard").JUDGED["bench.jsonl"].items() for one in kinds}
    for example in load_heldout():
        assert KindReader().kinds(example.question) == ((judged[example.kind],) if example.kind in judged else ())


def test_patterns_of_the_user() -> None:
    reader = KindReader({"text": [r"\bhowever\b"], "counting": ["wieviele"]})
    assert reader.kinds("WIEVIELE Hunde? However") == ("text", "counting")
    assert KindReader().kinds("Wieviele Hunde? However") == ()


@each(
    "bad",
    [
        dict(mode="loud"), dict(mode=None), dict(patterns={"ocr": []}), dict(patterns=["x"]), dict(text_limit=0),
        dict(patterns={"text": "x"}), dict(patterns={"text": ["("]}), dict(patterns={"text": [3]}),
        dict(floors={"text": 0}), dict(floors={"text": 1.5}), dict(floors={"text": True}), dict(floors={"text": "0.5"}),
        dict(floors={"text": -3}), dict(floors={"text": 2.5}), dict(text_limit=2), dict(floors={"words": 300}),
        dict(floors={"words": 0.5}), dict(text_limit=float("nan")),
    ],
)  # fmt: skip
def test_bad_settings(bad: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="guard"):
        Guard(**bad)


@pytest.fixture(autouse=True)
def unpatched(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "subject" in request.fixturenames:
        assert not tokenprune.is_patched(request.getfixturevalue("subject").model)

# SPDX-License-Identifier: Apache-2.0
"""`tokenprune fit NAME`: any method with a `fit` of its own, ours or a third party's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import tokenprune
from each import each
from tests.unit.api.test_cli import call, refused
from tokenprune import OptionError, Pruner, cli
from tokenprune.methods import registry
from tokenprune_bench import calibration
from tokenprune_bench.calibration import Thresholds
from tokenprune_bench.calibration.fitting import fit_options, list_fittable

seen: dict[str, Any] = {}


@dataclass
class Found:
    words: str

    def __str__(self) -> str:
        return self.words


@pytest.fixture(autouse=True)
def theirs() -> Iterator[None]:
    @tokenprune.register("theirs")
    @dataclass(frozen=True)
    class Theirs(Pruner):
        """Keep what was fitted."""

        fit_limit: ClassVar[int | None] = 2

        table: str | Path | None = field(default=None, metadata={"file": True})

        def score(self, tokens: tokenprune.VisualTokens) -> torch.Tensor:
            return tokens.hidden.norm(dim=-1)

        @staticmethod
        def fit(
            model: Any, samples: Any, out: Path, *, progress: Any = None, power: float = 1.0,
            layers: Sequence[int] = (), loud: bool = False,
        ) -> Found:  # fmt: skip
            seen.update(power=power, layers=layers, loud=loud, arguments=[], progress=[])
            for done, sample in enumerate(samples, 1):
                with torch.no_grad():
                    seen["arguments"].append((sample["input_ids"].tolist(), model(**sample).logits.shape))
                progress(done)
            out.write_text("fitted")
            return Found(f"seen {len(samples)} samples")

    yield
    registry._METHODS.pop("theirs")


def test_a_method_of_a_third_party_is_fitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = call("fit", "theirs", "--power", "0.5", "--layers", "1,2", "--loud").stdout
    assert output.splitlines() == ["seen 2 samples", "written: table.safetensors"]  # the name of its option
    assert Path("table.safetensors").read_text() == "fitted"
    assert (seen["power"], list(seen["layers"]), seen["loud"]) == (0.5, [1, 2], True)
    assert len(seen["arguments"]) == 2  # its own number of images
    call("fit", "theirs", "--limit", "1", "--layers=[3]", "--out", "other.bin")
    assert (seen["power"], seen["layers"], len(seen["arguments"])) == (1.0, [3], 1) and Path("other.bin").exists()


def test_images_and_questions_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "deeper").mkdir()
    for number, folder in enumerate((tmp_path, tmp_path / "deeper", tmp_path)):
        Image.new("RGB", (60, 60), (80 * number, 0, 0)).save(folder / f"{number}.png")
    asked = []
    for question in ("what is it?", "how many circles?"):
        call("fit", "theirs", "--images", tmp_path, "--question", question, "--limit", 3, "--out", tmp_path / "t")
        asked.append([ids for ids, _ in seen["arguments"]])
    assert len(asked[0]) == 3 and asked[0][0] == asked[0][2] and asked[0] != asked[1]


@each(
    ("arguments", "says"),
    [
        (("nobody",), "'nobody' cannot be fitted. Use one of d2pruner, dymu, dyrate, fitprune, hawk, theirs"),
        (("dart",), r"'dart' cannot be fitted. Use one of d2pruner"),
        (("theirs", "--powr", "2"), r"no option 'powr'. Options: --power 1.0, --layers \(\), --loud False"),
        (("fitprune", "--layer", "2"), r"no option 'layer'. Options: \(none\)"),
        (("theirs", "--power", "much"), "a number for power, not 'much'"),
        (("theirs", "--power"), "a number for power, not True"),
        (("theirs", "--layers", "1,x"), "a list, each entry an int for layers, not '1,x'"),
        (("theirs", "--power", "1", "--power", "2"), "--power stands there twice"),
        (("theirs", "stray"), "'stray' belongs to no option"),
        (("theirs", "--out", "absent/t"), "the folder absent does not exist"),
        (("theirs", "--images", "absent"), "is not a folder"),
        (("dymu",), "--images"),
        (("--images", "absent"), "name the method to fit"),
    ],
)
def test_refused(arguments: tuple[str, ...], says: str) -> None:
    seen.clear()
    assert re.search(says, refused("fit", *arguments))
    assert not seen


def test_the_list() -> None:
    lines = dict(line.split(": ", 1) for line in call("fit").stdout.splitlines())
    assert list(lines) == list_fittable() == ["d2pruner", "dymu", "dyrate", "fitprune", "hawk", "theirs"]
    assert lines["d2pruner"] == "--layer 2" and "--batch-size 32" in lines["dymu"] and lines["fitprune"] == "(none)"


def test_fit_of_a_method_is_the_public_function() -> None:
    for name in ("dyrate", "d2pruner", "fitprune", "hawk"):
        assert tokenprune.method_info(name).cls.fit is getattr(calibration, f"fit_{name}")
    assert tokenprune.Method.fit is None and list(fit_options("d2pruner")) == ["layer"]
    with pytest.raises(OptionError, match=r"calibration\.calibrate"):
        tokenprune.method_info("dymu").cls.fit(None, [torch.zeros(3, 8, 8)])


def test_dymu_takes_drawn_scenes_as_well(tmp_path: Path) -> None:
    out = tmp_path / "t.safetensors"
    said = call("fit", "dymu", "--limit", 2, "--keep", "0.5", "--out", out).stdout
    assert "keep 0.5: " in said and "calibrated on 2 images" in said
    thresholds = Thresholds.load(out)
    assert thresholds.keeps == [0.5] and thresholds.images == 2


def test_a_folder_that_is_absent_is_named_before_the_model_is_loaded(tmp_path: Path) -> None:
    arguments = ["fit", "fitprune", "--model", str(tmp_path / "no_model"), "--images", str(tmp_path / "no_images")]
    done = CliRunner().invoke(cli.app, [*arguments, "--out", str(tmp_path / "made.safetensors")])
    assert done.exit_code == 2 and "no_images' is not a folder" in done.stderr

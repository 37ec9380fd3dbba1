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
from tokenprune_bench.calibration import Thresholds, fitting
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


def test_rows_of_images_and_questions(tmp_path: Path) -> None:
    Image.new("RGB", (60, 60)).save(tmp_path / "a.png")
    rows = ['{"image": "a.png", "question": "how many circles?"}', '{"image": "a.png", "answer": "ignored"}']
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    call("fit", "theirs", "--data", tmp_path / "rows.jsonl", "--out", tmp_path / "t")
    (first, _), (second, _) = seen["arguments"]
    assert first != second  # the second question is the default
    call("fit", "theirs", "--data", tmp_path / "rows.jsonl", "--question", "how many?", "--out", tmp_path / "t")
    (first, _), (second, _) = seen["arguments"]
    assert first == second  # the option replaces the questions of the rows


@each(
    ("row", "says"),
    [
        ('{"image": "b.png"}', "line 2 of .*cannot read the image .*b.png: No such file"),
        ('{"image": "text.png"}', "line 2 of .*cannot read the image .*text.png"),
        ('{"image": ["a.png"]}', r"line 2 of .*names no image. Write \{"),
        ('{"question": "how many?"}', "line 2 of .*names no image"),
        ('"a.png"', "line 2 of .*names no image"),
        ('{"image": "a.png", "question": 3}', "line 2 of .*the question 3 is not a text"),
        ('{"image": "a.png", "question": " "}', "line 2 of .*the question ' ' is not a text"),
        ('{"image": "a.png"', "line 2 of .*is not valid JSON"),
    ],
)
def test_a_bad_row_is_refused(row: str, says: str, tmp_path: Path) -> None:
    Image.new("RGB", (60, 60)).save(tmp_path / "a.png")
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "rows.jsonl").write_text('{"image": "a.png"}\n' + row)
    message = refused("fit", "theirs", "--data", tmp_path / "rows.jsonl", "--out", tmp_path / "t")
    assert re.search(says, " ".join(message.split())), message
    (tmp_path / "rows.jsonl").write_text("\n")
    assert "has no rows" in refused("fit", "theirs", "--data", tmp_path / "rows.jsonl", "--out", tmp_path / "t")


def test_learned_is_fitted_and_used(tmp_path: Path) -> None:
    out = tmp_path / "s.safetensors"
    for name, size in (("a.png", (61, 47)), ("b.jpeg", (200, 90))):
        Image.new("RGB", size, (90, 0, 0)).save(tmp_path / name)
    data = tmp_path / "rows.jsonl"
    data.write_text('{"image": "a.png", "question": "what is it?"}\n\n{"image": "b.jpeg", "question": "how many?"}')
    arguments = ("fit", "learned", "--model", "demo_qwen", "--data", data, "--keep", "0.25,0.11", "--out", out)
    result = call(*arguments, "--minutes", 1, "--epochs", 2, "--use-question")
    assert "2 of 2 samples, 2 passes" in result.stdout and "the best 11% of the tokens hold" in result.stdout
    assert "fit learned" in result.stderr and sorted(tmp_path.glob("s.*")) == [out]  # progress; no other file
    assert tokenprune.method("learned", selector=out).query_aware
    call(*arguments, "--minutes", 1e-9)
    assert not tokenprune.method("learned", selector=out).query_aware
    data.write_text('{"image": "a.png", "question": "what is it?"}\n{"image": "b.jpeg", "question": "how few?"}')
    assert "belongs to a fit with other seed" in refused(*arguments, "--seed", "3")
    assert "2 of 2 samples" in call(*arguments).stdout and sorted(tmp_path.glob("s.*")) == [out]
    call(*arguments, "--minutes", 1e-9)
    call("fit", "learned", "--images", tmp_path, "--epochs", 1, "--out", out, "--restart")
    assert sorted(tmp_path.glob("s.*")) == [out]


@each(
    ("options", "says"),
    [
        (("--target", "labels"), "for target, not 'labels'"),
        (("--keep", "2"), "keep=2 cannot be fitted"),
        (("--minutes", "0"), "minutes=0.* is not valid"),
        (("--minutes", "soon"), "for minutes, not 'soon'"),
        (("--epochs", "0"), "epochs=0 is not valid"),
        ((), "fitted on images like yours. Pass a folder with --images, a file with --data"),
    ],
)
def test_options_of_learned_are_refused(options: tuple[str, ...], says: str, tmp_path: Path) -> None:
    limit = ("--limit", 1) if options else ()
    message = refused("fit", "learned", *limit, *options, "--out", tmp_path / "s")
    assert re.search(says, message), message
    assert not any(tmp_path.iterdir())


@each(
    ("arguments", "says"),
    [
        (("nobody",), "'nobody' cannot be fitted. Use one of d2pruner, dymu, dyrate, fitprune, hawk, learned, theirs"),
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
        (("theirs", "--data", "absent"), "does not exist"),
        (("theirs", "--data", "absent", "--images", "absent"), "either --images or --data"),
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
    assert list(lines) == list_fittable() == ["d2pruner", "dymu", "dyrate", "fitprune", "hawk", "learned", "theirs"]
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


def test_help_of_a_method_describes_the_options_of_its_fit() -> None:
    output = call("fit", "learned", "--help").stdout
    for text in ("--data", "Options of the fit of learned:", "--keep 0.25,0.11: ", "--target attention: 'attention', "):
        assert text in output
    options = fit_options("learned")
    described = fitting.describe_fit_options("learned")
    assert len(described) == len(options) and all(described.values())
    assert "--power 1.0: a number" in call("fit", "theirs", "--help").stdout  # a fit without a docstring
    assert "The fit of fitprune has no options." in call("fit", "fitprune", "--help").stdout
    assert "Options of the fit" not in call("fit", "--help").stdout
    assert "'dart' cannot be fitted" in refused("fit", "dart", "--help")

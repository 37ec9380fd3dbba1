# SPDX-License-Identifier: Apache-2.0
"""The table of supported methods agrees with patch(), vLLM's front end and the `families` command."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
from transformers import LlavaConfig
from typer.testing import CliRunner

import tokenprune
from basics import MODEL_METHODS
from families import FAMILIES as BUILT
from pruned import run_pruned
from tokenprune import OptionError, Site, TokenPruneError, UnsupportedSetupError
from tokenprune.cli import app
from tokenprune.integrations.hf.checks import has_rotary_positions
from tokenprune.integrations.hf.families import get_adapter
from tokenprune.integrations.hf.towers.packed import get_packed_tower
from tokenprune.integrations.shared import checks
from tokenprune.models.families import FAMILIES, REFUSED, REFUSED_IN_VLLM, SERVED, SUPPORTED
from tokenprune.selection.observable import Backend
from tokenprune.settings import Setting


def explain_support(name: str, family: str, backend: Backend = Backend.HF, cache: checks.Cache = checks.DYNAMIC) -> str:
    return checks.find_unsupported_reason(tokenprune.method(name), family, backend, cache) or "yes"


@pytest.mark.parametrize(
    ("method", "family", "message"),
    [
        ("divprune", "llava", "yes"),
        ("dyrate", "qwen3_5", "dyrate acts while decoding, and 'qwen3_5' has layers with a state"),
        ("dycoke", "llava", "which 'llava' does not support"),
        ("dycoke", "kimi_k25", "the tokens of a frame are not known for 'kimi_k25'"),
        ("pixelprune", "llava", "cannot drop patches in the tower of 'llava', where"),
        ("pixelprune", "glm4v", "yes"),
        ("tome", "vipllava", "cannot act in the tower of 'vipllava', where the visual token"),
        ("downsample", "gemma3", "small and large images get the same number of tokens"),
        ("vscan", "aria", "the patches of 'aria' cannot be traced to visual tokens"),
        ("feather", "llama4", "needs cosines and sines of rotary positions, which 'llama4' does not have"),
        ("ivc_prune", "llama4", "needs cosines and sines of rotary positions"),
        ("pact", "llama4", "Use a method that does not, such as divprune"),
        ("fastv", "llama4", "yes"),
        ("divprune", "mllama", "is not supported: images enter through cross-attention"),
        ("divprune", "kimi_vl", "transformers does not have model type 'kimi_vl'"),
        ("divprune", "never_seen", "yes"),
    ],
)
def test_unsupported_in_transformers(method: str, family: str, message: str) -> None:
    assert message in explain_support(method, family)


@pytest.mark.parametrize(
    ("method", "family", "backend", "message"),
    [
        ("divprune", "LlavaForConditionalGeneration", Backend.VLLM, "yes"),
        ("divprune", "llava", Backend.VLLM, "yes"),
        ("divprune", "fuyu", Backend.VLLM, "does not serve fuyu"),
        ("divprune", "Ovis2_5", Backend.VLLM, "does not serve Ovis2_5, because the encoder outputs tile separators"),
        ("fastv", "llava", Backend.VLLM, "allows it, with limits"),
        ("dart", "llava", Backend.VLLM_IN_LLM, "yes"),
        ("dart", "gemma3", Backend.VLLM_IN_LLM, "does not support Gemma3ForConditionalGeneration, only llava"),
        ("dycoke", "llava", Backend.VLLM, "the tokens of a frame are not known for LlavaForConditionalGeneration"),
        ("pixelprune", "llava", Backend.VLLM, "which needs complete grids"),
        ("tome", "llava", Backend.VLLM, "yes"),
        ("towerdrop", "llava", Backend.VLLM, "yes"),
        ("towerdrop", "internvl_chat", Backend.VLLM, "yes"),
        ("towerdrop", "glm4v", Backend.VLLM, "yes"),
        ("towerdrop", "llava_next", Backend.VLLM, "which crops tiles after the tower"),
        ("towerdrop", "mistral3", Backend.VLLM, "which needs complete grids"),
        ("tome", "qwen2_vl", Backend.VLLM, "yes"),
        ("tome", "mistral3", Backend.VLLM, "merges inside the vision tower"),
        ("visionzip", "gemma3n", Backend.VLLM, "reads the vision tower"),
    ],
)
def test_unsupported_in_vllm(method: str, family: str, backend: Backend, message: str) -> None:
    assert message in explain_support(method, family, backend)


@pytest.mark.parametrize("family", ["aria", "gemma3n", "gemma4", "llama4", "lfm2_vl"])
def test_towers_unknown_to_vllm(family: str) -> None:
    for method in ("visionzip", "fastervlm", "tome"):
        assert "Use a method that acts after the tower, such as divprune" in explain_support(
            method, family, Backend.VLLM
        )
    assert explain_support("divprune", family, Backend.VLLM) == "yes"


def test_static_cache_support() -> None:
    static = checks.STATIC
    assert explain_support("divprune", "llava", cache=static) == "yes"
    assert "dyrate drops tokens while decoding, and a static cache keeps" in explain_support(
        "dyrate", "llava", cache=static
    )
    assert "and attention in blocks" in explain_support("pevlm", "qwen2_vl", cache=static)
    for family in ("gemma3n", "kimi_k25", "llama4", "lfm2_vl"):
        assert f"in the decoder of {family!r}" in explain_support("divprune", family, cache=static)


@pytest.mark.parametrize("method", ["feather", "ivc_prune", "pact"])
def test_complex_rotary_positions_raise(method: str, build) -> None:
    """Llama 4's decoder layers get one complex tensor, so the method must be refused before the first call."""
    model = build(BUILT["llama4"])
    with pytest.raises(UnsupportedSetupError, match="rotary positions"):
        tokenprune.patch(model, method, keep=0.3)
    assert not tokenprune.is_patched(model)


@pytest.mark.parametrize("family", ["cohere_compass", "muse_glimmer"])
def test_layers_without_rotary_positions_raise(family: str, build) -> None:
    """Some layers of these decoders get no rotary positions. Methods can cut after the other layers."""
    model, inputs = build(BUILT[family]), BUILT[family].make_inputs()
    adapter = get_adapter(model)
    rotated = [has_rotary_positions(adapter, layer) for layer in range(3)]
    assert set(rotated) == {True, False}
    for layer, has_rotation in enumerate(rotated):
        if has_rotation:
            assert run_pruned(model, inputs, "ivc_prune", 0.3, layer=layer + 1)[1].keep_ratio < 0.5
        else:
            with pytest.raises(OptionError, match=f"decoder layer {layer}, which gets no rotary positions"):
                tokenprune.patch(model, "ivc_prune", keep=0.3, layer=layer + 1)


@pytest.mark.parametrize("name", BUILT)
def test_models_match_their_rows(name: str, build) -> None:
    family = BUILT[name]
    adapter = get_adapter(build(family))
    facts, row = adapter.family, FAMILIES[family.kind]
    different = [key for key in ("videos", "merges", "resizing", "stateful", "static_cache", "after_frames")
                 if getattr(facts, key) != getattr(row, key)]  # fmt: skip
    assert not different
    assert facts.patches == row.layout(adapter.config)
    if row.tower_rows == "all images":
        tower = get_packed_tower(adapter)
        assert all(hasattr(tower, part) for part in ("blocks", "merger", "spatial_merge_size"))


@dataclass(frozen=True)
class TooEarly(tokenprune.Pruner):
    """Needs an observable that no layer has provided before the decoder."""

    name: ClassVar[str] = "too_early"
    site: ClassVar[Site] = Site.PRE_LLM
    needs: ClassVar[frozenset[str]] = frozenset({"last_row_attention"})


class NoDecoding(TooEarly):
    site: ClassVar[Site] = Site.DECODE


def test_support_by_method_or_config(build) -> None:
    assert "too_early: a PRE_LLM method cannot need ['last_row_attention']" in str(
        checks.find_unsupported_reason(TooEarly())
    )
    assert "too_early: a method of the site DECODE must derive" in str(checks.find_unsupported_reason(NoDecoding()))
    joined = LlavaConfig(vision_feature_layer=[-2, -1])
    for backend in (Backend.HF, Backend.VLLM):
        for name in ("tome", "towerdrop"):
            reason = checks.find_unsupported_reason(tokenprune.method(name), "llava", backend, config=joined)
            assert name in str(reason) and "joins the features of several tower layers ([-2, -1])" in str(reason)
        assert checks.find_unsupported_reason(tokenprune.method("divprune"), "llava", backend, config=joined) is None
    for method in (TooEarly(), NoDecoding()):
        with pytest.raises(OptionError, match=re.escape(str(checks.find_unsupported_reason(method)))):
            tokenprune.patch(build(BUILT["llava"]), method, keep=0.5)


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "fuyu", "lfm2_vl", "glm46v"])
def test_patch_and_table_agree(name: str, build) -> None:
    model = build(BUILT[name])
    for method in MODEL_METHODS:
        reason = checks.find_unsupported_reason(tokenprune.method(method), BUILT[name].kind)
        raised = None
        try:
            with tokenprune.patched(model, method, keep=0.3):
                pass
        except TokenPruneError as error:
            raised = str(error)
        assert reason is None or raised == reason, method


@pytest.mark.parametrize("method", ["fastv", "dycoke", "pixelprune", "tome", "divprune+fastv:layer=3"])
def test_command_fits_80_columns_for_each_family(method: str) -> None:
    output = CliRunner().invoke(app, ["families", "--method", method], env={"COLUMNS": "80"}).output
    assert max(map(len, output.splitlines())) == 80 and "…" not in output
    tables = re.split(r"^(?=transformers|vLLM)", output, flags=re.M)[1:]
    assert len(tables) == (3 if method == "fastv" else 2)
    for table, backend, names, refused in zip(
        tables,
        (Backend.HF, Backend.VLLM, Backend.VLLM_IN_LLM),
        (SUPPORTED, *[[row.name for row in SERVED.values()]] * 2),
        (REFUSED, *[REFUSED_IN_VLLM] * 2),
        strict=False,
    ):
        answers: list[tuple[str, str]] = []
        for line in table.splitlines():
            cells = [cell.strip() for cell in line.strip("│").split("│")]
            if len(cells) == 2 and cells[0].startswith(("yes", "no: ", "no, like")):
                answers.append((cells[0], cells[1]))
            elif len(cells) == 2 and answers:
                answers[-1] = f"{answers[-1][0]} {cells[0]}", f"{answers[-1][1]} {cells[1]}".strip()
        table_answers = {name: answer.strip() for answer, family_names in answers for name in family_names.split(", ")}
        assert set(table_answers) == {*names, *refused}
        for name in names:
            reasons = [
                checks.find_unsupported_reason(stage_method, name, backend)
                for stage_method in Setting.from_text(method).methods
            ]
            assert (table_answers[name] == "yes") == (not any(reasons)), name
        assert all(table_answers[name].startswith("no, like all methods") for name in refused)


class Unmerging(tokenprune.method_info("tome").cls):  # type: ignore[misc]
    vtu = "expanded"


class Ranking(TooEarly):
    site: ClassVar[Site] = Site.IN_LLM
    needs: ClassVar[frozenset[str]] = frozenset({"received_attention"})


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ([Unmerging(), tokenprune.method("fastv")], 'tome with vtu="expanded" cannot be combined with fastv'),
        ([tokenprune.method("dyrate"), tokenprune.method("dyrate", layer=3)], "dyrate: only one of the combined"),
        ([tokenprune.method("pevlm"), Ranking()], "too_early ranks tokens.* but with pevlm tokens"),
    ],
)
def test_unsupported_combinations(methods: list[tokenprune.Method], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        checks.check_together(methods)
    checks.check_together([tokenprune.method("tome"), *methods[1:]])  # supported without the other method
    checks.check_together(methods[:1])

# SPDX-License-Identifier: Apache-2.0
"""`"positions": "original"` with one axis of positions: answers match the patched transformers model.

Tiles with separate budgets are in test_served_families.py, text within an image in test_caching.py, and other decoders
in test_more_families.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFeatureSpec, MultiModalFieldElem, PlaceholderRange

from conftest import DIVPRUNE, ORIGINAL, Engine, check_recomputed
from front_end import config
from tokenprune.errors import OptionError, UnsupportedSetupError
from tokenprune.integrations.vllm.settings.parse import parse_setting
from tokenprune.integrations.vllm.settings.plan import Plan, field_name, find_runs
from tokenprune.integrations.vllm.settings.position_checks import configure_positions, has_original_positions
from tokenprune.integrations.vllm.worker.positions import (
    DIGITS,
    ReadTokens,
    compute_line_positions,
    encode_columns,
    write_positions,
)
from tokenprune.models.families import SERVED

NAME, CHUNK, BLOCK = "llava_onevision", 24, 32
HALF = {"method": "divprune", "keep": 0.5}


@pytest.fixture(scope="module")
def engine(start: Callable[..., Engine]) -> Engine:
    """Chunks split every image, and the KV cache is too small for long answers to several prompts."""
    options = dict(max_num_batched_tokens=CHUNK, num_gpu_blocks_override=16, max_model_len=480)
    return start(NAME, HALF | ORIGINAL, **options)


def test_mixed_requests_and_the_prefix_cache(engine: Engine, reference: Any) -> None:
    engine.forget()
    checkpoint, images = engine.checkpoint, engine.checkpoint.images(2)
    two, side, first = checkpoint.prompt(2), "look: <image><image> what? ", "<image> or <image>, what? "
    asked: list[tuple] = [(prompt, images, {}) for prompt in (two, side, first)]
    asked += [(two, images, {"off": True}), (side, images, {"method": "vscan", "stage2": False, "keep": 0.25})]
    # At the end. This method keeps the last token; for other methods transformers keeps it.
    asked += [("what is it? <image>", images[:1], {"method": "uniform", "keep": 0.6})]
    asked += [("what? " * 8, [], {}), (two, images, {"keep": 1.0})]
    asked += map(checkpoint.video_case, (DIVPRUNE | {"per": "frame"}, {"method": "evs", "keep": 0.4}))
    outputs = engine.check(reference, asked, 12)
    # The answers differ from renumbered positions.
    logprobs = reference(NAME).greedy(two, images, 1, HALF)[1]
    likely = outputs[0].outputs[0].logprobs[0]
    assert max(abs(one.logprob - float(logprobs[0, token])) for token, one in likely.items()) > 0.01

    # From the cache, which ends within an image, and the same images with another question.
    other = checkpoint.prompt(2, "something else altogether? ")
    engine.generate([engine.request(*asked[0])])
    for prompt in (two, other):
        (output,) = engine.check(reference, [(prompt, images)])
        assert output.num_cached_tokens >= BLOCK


def test_recomputed_requests(engine: Engine, reference: Any, preempted: list[str]) -> None:
    check_recomputed(engine, reference, preempted, {})


def test_prompts_longer_than_the_model_raise(engine: Engine, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.forget()
    prompt, images = engine.checkpoint.prompt(2), engine.checkpoint.images(2)
    with monkeypatch.context() as patch:
        patch.setattr(engine.llm.model_config.hf_text_config, "max_position_embeddings", 121)
        with pytest.raises(OptionError, match=r"positions for fewer than 4: send fewer or smaller images"):
            engine.generate([engine.request(prompt, images)])
        engine.generate([engine.request(prompt, images, {"off": True})])
    engine.check(reference, [(prompt, images)])


def test_effect_of_the_setting(folder: Any) -> None:
    llava = config(folder("llava"), DIVPRUNE | ORIGINAL)
    assert llava.uses_mrope and llava.hf_text_config.rope_parameters["mrope_section"] == [16, 0, 0]
    for setting in (DIVPRUNE, DIVPRUNE | {"positions": "renumbered"}):
        plain = config(folder("llava"), setting)
        assert not plain.uses_mrope and not has_original_positions(plain)
    assert llava.compute_hash() != plain.compute_hash()  # key of compiled graphs
    alone = config(folder("llava"), ORIGINAL)
    assert alone.uses_mrope and alone.multimodal_config.tokenprune == {"off": True}
    qwen = config(folder("qwen2_5_vl"), DIVPRUNE | ORIGINAL)
    assert qwen.hf_text_config.rope_parameters["mrope_section"] == [4, 6, 6] and not has_original_positions(qwen)
    dart = {"method": "dart", "keep": 0.25, "pivot_text": 0, "experimental_in_llm": True}
    assert not config(folder("llava"), dart | ORIGINAL).uses_mrope
    for name, setting, says in (
        ("qwen2_5_vl", DIVPRUNE | {"positions": "renumbered"}, "Qwen2_5_VL.*M-RoPE. Leave positions out"),
        ("llava", dart | {"positions": "renumbered"}, "experimental_in_llm. Leave positions out"),
        ("llava", DIVPRUNE | {"positions": "orginal"}, "must be .original. .*not 'orginal'"),
        ("llava", DIVPRUNE | {"position": "original"}, "no key 'position': did you mean 'positions'"),
        ("llava", DIVPRUNE | {"profiles": {"a": ORIGINAL}}, "profile 'a': positions applies to the whole server"),
    ):
        with pytest.raises(ValueError, match=says):
            config(folder(name), setting)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"model_type": "internlm2"}, "'internlm2' is not known to"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope is scaled .'llama3'"),
        ({"rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "layers have different RoPE parameters"),
        ({"rope_parameters": {"rope_type": "default", "use_fope": True}}, "rope has use_fope"),
        ({"sliding_window": 1023}, "start with --max-model-len 1023 or less"),
        ({"layer_types": ["full_attention", "linear_attention"]}, r"other kinds \(linear_attention\)"),
        ({"llama_4_scaling": {"beta": 1.0}}, "in another way .llama_4_scaling"),
    ],
)
def test_unsupported_setups_raise(folder: Any, changed: dict[str, Any], says: str) -> None:
    made = config(folder("llava"), DIVPRUNE)
    for name, value in changed.items():
        setattr(made.hf_text_config, name, value)
    with pytest.raises(UnsupportedSetupError, match=f"(?s)LlavaForConditional.*here.*{says}.*leave positions out"):
        configure_positions("original", made, SERVED[made.architecture], False)
    assert not made.uses_mrope
    made.hf_text_config.sliding_window = made.max_model_len  # larger than any prompt
    if "sliding_window" in changed:
        configure_positions("original", made, SERVED[made.architecture], False)
        assert made.uses_mrope


@pytest.mark.parametrize("keep", [0.3, 1.0])
@pytest.mark.parametrize("per_run", [False, True])
def test_every_split(keep: float, per_run: bool) -> None:
    """Against a naive computation on the unpruned prompt, for all chunk sizes.

    Images are at both ends and adjacent; one image has text around it and within it.
    """
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = []
    wanted, features, rows = [], [], []  # wanted: index of each token in the unpruned prompt
    full = 0
    for text, behind in (("#" * 8, 0), ("ab########c########d", 0), ("#" * 6, 3), ("#" * 12, 0)):
        placeholders = [letter == "#" for letter in text]
        plan = Plan.build(
            parse_setting({"method": "divprune", "keep": keep}),
            find_runs([9 if one else 50 for one in placeholders], placeholders),
            per_run,
        )
        stays = torch.tensor(placeholders)
        for segment, kept in zip(stays.nonzero().flatten().split(plan.counts), plan.keep, strict=True):
            stays[segment[torch.randperm(len(segment), generator=generator)[kept:]]] = False
        within = stays.clone()
        if plan.between:  # rows include text within the item
            first, end = plan.span
            within[first:end] |= ~torch.tensor(placeholders[first:end])
        written = plan.reduced() if plan.reduces else plan.tokens
        data = {field_name("image"): MultiModalFieldElem(data=plan.encode(), field=MultiModalBatchedField())}
        left = (stays | ~torch.tensor(placeholders)).nonzero().flatten()
        wanted += [full + int(place) for place in left]
        assert len(left) == len(written)
        of_rows = within.nonzero().T if plan.between else stays.nonzero().T
        marked = [bool(within[place]) for place in left]
        rows.append(torch.cat([torch.zeros(of_rows.shape[1], 5), encode_columns(of_rows, torch.bfloat16)], 1))
        at = PlaceholderRange(len(tokens), len(written), torch.tensor(marked))
        features.append(MultiModalFeatureSpec(data, "image", "", at))
        tokens += [*written, *[50] * behind]
        wanted += range(full + len(text), full + len(text) + behind)
        full += len(text) + behind
    provisional, delta, notes = compute_line_positions(tokens, features)
    assert delta == full - len(tokens)
    is_row, owner = torch.zeros(len(tokens), dtype=torch.bool), []
    for index, feature in enumerate(features):
        at = feature.mm_position
        is_row[at.offset : at.offset + at.length] = at.is_embed
        owner += [index] * len(rows[index])
    every, of = torch.cat(rows), torch.tensor(owner)
    for size in range(1, len(tokens) + 1):
        for skipped in (0, len(tokens) // 2):  # a hit of the prefix cache
            positions = provisional.clone()[None]
            for computed in [*range(skipped, len(tokens), size), skipped]:  # and a recomputed request
                before, after = int(is_row[:computed].sum()), int(is_row[: computed + size].sum())
                chunk, owners = every[before:after], of[before:after]
                pieces = [chunk[owners == index] for index in owners.unique()]
                part = ReadTokens(0, features, notes, computed, min(size, len(tokens) - computed), 0)
                cut = write_positions(pieces, [part], positions, 1)
                assert [one.shape for one in cut] == [(len(one), 5) for one in pieces] and every.shape[1] == 5 + DIGITS
            assert positions[0, 0, skipped:].tolist() == wanted[skipped:]
            assert torch.equal(positions[0, 1:], provisional[1:])  # not read

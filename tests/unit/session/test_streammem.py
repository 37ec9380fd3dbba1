# SPDX-License-Identifier: Apache-2.0
"""StreamMem equals a loop over heads and rows of eager attention, written from its description."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from transformers import PreTrainedModel

import tokenprune
from policy_views import view_of
from processors import demo_model, llava, photo
from session_oracle import Recorded, close, images_of, played, recorded
from tokenprune.errors import OptionError, SessionError, UnsupportedSetupError
from tokenprune.integrations.hf.sessions.memory import FRAME, INDEX, Memory
from tokenprune.integrations.hf.sessions.positions import make_text_positions
from zoo import FAMILIES, IMAGE

PROXY = (30, 31, 32, 33)
NAMES = ["llava", "qwen2_5_vl", "qwen3_vl", "gemma3"]


def make_policy(**options) -> tokenprune.sessions.Policy:
    return tokenprune.sessions.policy("streammem", proxy=PROXY, **options)


def record_session(name: str, model: PreTrainedModel, memory: int = 110, **options) -> Recorded:
    return recorded(FAMILIES[name], model, memory=memory, policy=make_policy(**options))


def eager_rows(stream, memory: Memory) -> list[torch.Tensor]:
    """Return eager attention rows, `[Hq, P, held]` per compressible layer, from a copy of the cache."""
    other = stream.fork()
    other.memory = memory.copy()
    ids = torch.tensor([PROXY])
    positions = make_text_positions(stream.adapter, stream.progress.next, len(PROXY), ids.device)
    types = other._token_types(ids)
    stream.model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            output = stream.model(
                input_ids=ids, position_ids=positions if len(positions) > 1 else positions[0],
                past_key_values=other.memory.cache, use_cache=True, output_attentions=True, **types,
            )  # fmt: skip
    finally:
        stream.model.set_attn_implementation("sdpa")
    return [output.attentions[layer][0, ..., : memory.held] for layer in memory.full_layers]


def select_by_loop(rows: torch.Tensor, visual: list[list[int]], keep: int) -> list[tuple[dict[int, float], set[int]]]:
    """Return the scores and the kept indices of the visual entries of each KV head."""
    results, group = [], len(rows) // len(visual)
    for head, visual_indices in enumerate(visual):
        scores = {}
        for index in visual_indices:
            received = [
                float(rows[query, token, index])
                for query in range(head * group, (head + 1) * group)
                for token in range(len(PROXY))
            ]
            scores[index] = sum(received) / len(received)
        best = sorted(visual_indices, key=lambda index: (-scores[index], index))[:keep]
        results.append((scores, set(best)))
    return results


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_loop_over_eager_attention(name: str, monkeypatch) -> None:
    model = FAMILIES[name].build()
    recording = record_session(name, model)
    compress, compared = Memory.compress, []

    def compare(self, policy, keep, step, seed, rows=None):
        eager, tables = eager_rows(recording.session._stream, self), list(self.tables)
        compress(self, policy, keep, step, seed, rows)
        for actual, expected, old, new in zip(rows, eager, tables, self.tables, strict=True):
            assert (actual - expected.mean(1)).abs().max() < 1e-6
            visual = [(old[FRAME, min(head, old.shape[1] - 1)] >= 0).nonzero()[:, 0].tolist() for head in range(2)]
            for head, (scores, expected_kept) in enumerate(select_by_loop(expected, visual, keep)):
                before, after = old[INDEX, min(head, old.shape[1] - 1)].tolist(), new[INDEX, head].tolist()
                kept = {index for index in visual[head] if before[index] in after}
                assert len(kept) == keep
                # Different kept entries have equal scores up to rounding.
                for index, other in zip(sorted(kept - expected_kept), sorted(expected_kept - kept), strict=True):
                    assert abs(scores[index] - scores[other]) < 1e-6
                compared.append(kept == expected_kept)

    monkeypatch.setattr(Memory, "compress", compare)
    played(recording)
    assert len(compared) >= 8 * len(recording.session.held) and sum(compared) > 0.9 * len(compared)


@pytest.mark.parametrize("name", NAMES)
def test_heads_hold_their_own_and_it_equals_one_prefill_under_masks(name: str, build) -> None:
    model = build(FAMILIES[name])
    recording, silent = played(record_session(name, model), asked=True), played(record_session(name, model))
    first = recording.session.held[0]
    assert first.index.shape[0] == 2 and not torch.equal(first.index[0], first.index[1])
    assert all(bool(((held.frame < 0).sum(1) == 9).all()) for held in recording.session.held)
    logits = recording.logits()
    assert torch.equal(logits, silent.logits())
    assert close(logits, recording.one_prefill())
    assert (logits - recording.one_prefill(masked=False)).abs().max() > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_the_proxy_leaves_no_trace(name: str, build) -> None:
    """Reading the proxy's attention does not change a session, bit by bit."""
    model, policy = build(FAMILIES[name]), tokenprune.sessions.policy("uniform")

    class Reads(type(policy)):
        needs = frozenset({"proxy_attention"})
        name = "reads"
        proxy_query = PROXY

        def select(self, view, keep):
            assert view.proxy_attention.shape == (4, view.count)
            return super().select(view, keep)

    reading, plain = (
        played(recorded(FAMILIES[name], model, memory=110, policy=variant)) for variant in (Reads(), policy)
    )
    assert reading.session.stats.compressions == plain.session.stats.compressions > 3
    assert torch.equal(reading.logits(), plain.logits())
    assert dataclasses.replace(reading.session.stats, kv_bytes_peak=0) == dataclasses.replace(
        plain.session.stats, kv_bytes_peak=0
    )
    assert not any("_tokenprune_taps" in vars(module) for module in model.modules())


def test_heads_mean_keeps_the_same_entries_in_all_heads(build) -> None:
    held = played(record_session("llava", build(FAMILIES["llava"]), heads="mean")).session.held
    assert all(entries.index.shape[0] == 1 for entries in held)
    assert not torch.equal(held[0].index, held[-1].index)


def test_entries_without_proxy_attention_are_evicted_first() -> None:
    view = view_of(6, 5)
    attention = view.proxy_attention.clone()
    attention[:, ::3] = 0
    kept = tokenprune.sessions.policy("streammem").select(dataclasses.replace(view, proxy_attention=attention), 20)
    assert kept.tolist() == [[index for index in range(30) if index % 3]] * 2


def test_the_chat_template_is_the_proxy_or_a_text() -> None:
    model, processor = demo_model(), llava()
    session = tokenprune.sessions.session(model, processor, memory=400, policy="streammem")
    assert torch.equal(session._stream.proxy, session._prompt_writer.encode_closing()) and session._stream.proxy.numel()
    session.say("look").see([photo(64, 64, seed) for seed in range(6)])
    assert session.stats.compressions and session.stats.visual <= 400
    with_text = tokenprune.sessions.session(
        model, processor, memory=400, policy=tokenprune.sessions.policy("streammem", proxy="what color is it?")
    )
    with_text.say("look").see([photo(64, 64, seed) for seed in range(6)])
    assert not torch.equal(with_text.held[0].index, session.held[0].index)
    assert session.fork().ask("what?", max_new_tokens=2) == session.ask("what?", max_new_tokens=2)


def test_a_saved_session_goes_on_with_its_proxy(build, tmp_path) -> None:
    model = build(FAMILIES["llava"])
    original = played(record_session("llava", model)).session
    original.save(tmp_path / "s.safetensors")
    other = tokenprune.sessions.Session.load(tmp_path / "s.safetensors", model)
    assert other.policy == original.policy
    for image in images_of(FAMILIES["llava"], 5, seed=9):
        for session in (original, other):
            session.see(input_ids=image.ids, **FAMILIES["llava"].collate([[image]]))
    assert all(torch.equal(a.index, b.index) for a, b in zip(original.held, other.held, strict=True))


def test_a_proxy_that_cannot_be_is_refused(build) -> None:
    model = build(FAMILIES["llava"])
    with pytest.raises(SessionError, match=r"needs a processor.*proxy=\[...\]"):
        tokenprune.sessions.session(model, memory=100, policy="streammem")
    for proxy in ((), (5, IMAGE)):
        with pytest.raises(OptionError, match="list of text token ids"):
            tokenprune.sessions.session(model, memory=100, policy=tokenprune.sessions.policy("streammem", proxy=proxy))
    with pytest.raises(OptionError, match="proxy=3 must be"):
        tokenprune.sessions.policy("streammem", proxy=3)


def test_the_proxy_has_its_place_below_the_horizon(build) -> None:
    recording = recorded(FAMILIES["llava"], build(FAMILIES["llava"]), memory=100, policy=make_policy(), horizon=74)
    with pytest.raises(UnsupportedSetupError, match="position 75"):
        recording.see(images_of(FAMILIES["llava"], 2))
    recording = recorded(FAMILIES["llava"], build(FAMILIES["llava"]), memory=100, policy=make_policy(), horizon=75)
    recording.see(images_of(FAMILIES["llava"], 2))


def test_sessions_of_two_threads_on_one_model_do_not_mix(build) -> None:
    model, results = build(FAMILIES["llava"]), {}
    expected = {memory: played(record_session("llava", model, memory)).logits() for memory in (110, 140)}

    def run(memory: int) -> None:
        for _ in range(3):
            results.setdefault(memory, []).append(played(record_session("llava", model, memory)).logits())

    threads = [threading.Thread(target=run, args=(memory,)) for memory in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(results[memory]) == 3 for memory in expected)
    assert all(torch.equal(logits, expected[memory]) for memory, all_logits in results.items() for logits in all_logits)

# SPDX-License-Identifier: Apache-2.0
"""Measure a session's recall of an event that a stream showed once, by age, for every policy at three memory sizes.

    python experiments/studies/recall.py --resume --allow-load   # about an hour on one thread; no times are measured
    python experiments/studies/recall_figure.py                  # the figure and the tables of the raw file

demo_video sees `drawn_streams` in clips of eight frames, as in its training. An age is the number of frames after the
event's clip. At each age, each of the three questions is asked twice: with the stream's positions, and with the gaps of
dropped tokens closed (as with `reanchor=True`). `share` is the share of the event's tokens in the session, averaged
over layers and heads, and depends on the policy only. A session without any of these tokens is not continued, because
it cannot get them back. Controls: `all` keeps everything; `event` is an oracle that keeps the event's tokens and the
newest tokens; `without` keeps the newest other tokens; `guess` asks before the event.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parents[1]))

import calm_threads  # noqa: F401
import numpy as np
import torch
from common import RESULTS, Rows, add_options, code_version, header
from PIL import Image

import tokenprune
from tokenprune.integrations.hf.sessions.anchors import reanchor
from tokenprune_bench.evidence import find_evidence_tokens
from tokenprune_bench.profiling.model import load_model
from tokenprune_demo.drawn_streams import DrawnStream, draw_stream
from tokenprune_demo.drawn_videos import FRAMES, draw_video

OUT = RESULTS / "recall.jsonl"
BEFORE, AGES, SIZE, CELL = 9, (0, 8, 32, 104, 304, 1000), 112, 16
MEMORIES = (200, 400, 800)  # visual tokens; a clip has 198
ALL, GUESS, ORACLES = "all", "guess", ("event", "without")
POLICIES = {
    "window": ("window", {"sink": 0}),
    "uniform": ("uniform", {}),
    "reservoir": ("uniform", {"reservoir": True}),
    "random": ("random", {}),
    "infinipot_v": ("infinipot_v", {}),
    "streammem": ("streammem", {}),
}
COUNTED = 24  # number of streams with one to three stars


@dataclass(frozen=True)
class Event(tokenprune.sessions.Policy):
    """Keep the event's tokens and the newest others, or the newest without the event's tokens.

    Args:
        places: (frame, cell) of the event's tokens.
        keep_them: Whether the event's tokens are kept.
    """

    places: tuple[tuple[int, int], ...] = ()
    keep_them: bool = True

    name: ClassVar[str] = "event"  # not registered, because no other process needs it
    shared: ClassVar[bool] = True

    def select(self, view: tokenprune.sessions.PolicyView, keep: int) -> torch.Tensor:
        is_event = is_of(view.frame[0], view.cell[0], self.places)
        order = torch.arange(view.count) + view.count * (is_event if self.keep_them else ~is_event)
        return order.argsort(descending=True)[:keep].sort().values


def is_of(frame: torch.Tensor, cell: torch.Tensor, positions: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return a mask of the entries at the given (frame, cell) positions, with the shape of `frame`."""
    codes = torch.tensor(
        [frame_index * 100_000 + cell_index for frame_index, cell_index in positions], dtype=torch.long
    )
    return torch.isin(frame * 100_000 + cell, codes) & (cell >= 0)


def share(layers: Sequence[Any], positions: Sequence[tuple[int, int]]) -> float:
    """Return the share of the tokens at the given positions in a session, averaged over layers and heads."""
    of_layers = [is_of(layer.frame, layer.cell, positions).float().sum(1).mean() for layer in layers]
    return float(torch.stack(of_layers).mean()) / len(positions)


def places_of(stream: DrawnStream, first: int) -> list[list[tuple[int, int]]]:
    """Return the (frame, cell) positions of the tokens that show the answer of each question of a stream.

    Args:
        stream: The stream.
        first: The decoder's index of the event's first frame. The decoder joins two frames to one.
    """
    side, num_steps = SIZE // CELL, FRAMES // 2
    positions = []
    for question in stream.questions:
        looks = find_evidence_tokens(
            question.looks, [stream.size] * FRAMES, [(side, side)] * num_steps, num_steps * side * side
        )
        tokens = np.flatnonzero(np.any(looks, axis=0))
        positions.append([(first + int(token) // side**2, int(token) % side**2) for token in tokens])
    return positions


def closed(session: tokenprune.sessions.Session) -> tokenprune.sessions.Session:
    """Return a copy of a session without position gaps between its frames."""
    copy = session.fork()
    stream = copy._stream
    down = reanchor(stream.memory, stream.adapter)
    stream.progress = dataclasses.replace(stream.progress, next=stream.progress.next - down)
    return copy


def answers(session: tokenprune.sessions.Session, stream: DrawnStream) -> list[str]:
    """Return the first word of the answer to each question, as `ask`, but without the setup time of `generate`."""
    words = []
    for question in stream.questions:
        ids = session._encode(question.text, closing=True)
        words.append(session._prompt_writer.decode(session.fork()._stream.say(ids).argmax(-1)))
    return words


@contextmanager
def encoded_once(model: Any) -> Iterator[None]:
    """Share the tower's output between sessions that see the same pixels one after the other."""
    encode, last = model.model.get_video_features, [None, None]

    def remembered(pixels: torch.Tensor, *args: Any, **options: Any) -> Any:
        if last[0] is not pixels:
            last[:] = pixels, encode(pixels, *args, **options)
        return last[1]

    model.model.get_video_features = remembered
    try:
        yield
    finally:
        del model.model.get_video_features


def sessions(
    subject: Any, stream: DrawnStream, memories: Sequence[int]
) -> dict[tuple[str, int], tokenprune.sessions.Session]:
    """Return a session for each policy and memory size, and the controls."""
    positions = tuple(position for of_kind in places_of(stream, stream.before * FRAMES // 2) for position in of_kind)
    policies = {name: tokenprune.sessions.policy(policy, **options) for name, (policy, options) in POLICIES.items()}
    policies |= {name: Event(positions, name == "event") for name in ORACLES}

    def begun(memory: int, policy: Any) -> tokenprune.sessions.Session:
        return tokenprune.sessions.session(
            subject.model, subject.processor, memory=memory, policy=policy, block=FRAMES, seed=stream.index
        )

    by_name = {(name, memory): begun(memory, policy) for memory in memories for name, policy in policies.items()}
    by_name.pop(("without", max(memories)))  # not full at the end of the event
    return by_name | {(ALL, 0): begun(10**6, "window")}


def measure_stream(subject: Any, index: int, ages: Sequence[int], memories: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each policy and memory size of a stream."""
    stream = draw_stream(index, BEFORE, (SIZE, SIZE))
    positions, gold = places_of(stream, BEFORE * FRAMES // 2), [question.answer for question in stream.questions]
    running = sessions(subject, stream, memories)
    words = next(iter(running.values()))._prompt_writer
    rows: dict[Any, dict[str, Any]] = {}
    with encoded_once(subject.model):
        for clip in range(BEFORE + 1 + max(ages) // FRAMES):
            frames = stream.clip(clip)
            inputs = words.prepare_clip([*map(Image.fromarray, frames)], clip * FRAMES, None)
            for session in running.values():
                session.see(frames) if clip == 0 else session.see(
                    **inputs
                )  # the first call also adds the prompt's opening
            if clip == BEFORE - 1:
                words_before = answers(running["window", memories[0]], stream)
                rows[GUESS] = _row(GUESS, 0) | {
                    "ages": [None],
                    "said": [words_before],
                    "right": [_right(words_before, gold)],
                }
            age = (clip - BEFORE) * FRAMES
            if age not in ages:
                continue
            for name, session in list(running.items()):
                row = rows.setdefault(name, _row(*name) | {"ages": [], "share": [], "right": [], "closed": []})
                kept = [share(session.held, of_kind) for of_kind in positions]
                row["ages"].append(age)
                row["share"].append([round(value, 4) for value in kept])
                row["right"].append(_right(answers(session, stream), gold))
                row["closed"].append(_right(answers(closed(session), stream), gold))
                if age >= _last(name, memories) or not (any(kept) or name[0] == "without"):
                    del running[name]
    return [row | {"stream": index, "most": max(ages), "gold": gold} for row in rows.values()]


def _last(name: tuple[str, int], memories: Sequence[int]) -> int:
    """Return the maximum age at which a session is asked. Longer runs of controls are unnecessary."""
    controls = {ALL: 32, "without": 8, "event": max(AGES) if name[1] == min(memories) else 104}
    return controls.get(name[0], max(AGES))


def _row(policy: str, memory: int) -> dict[str, Any]:
    return {"record": "stream", "policy": policy, "memory": memory}


def _right(words: Sequence[str], gold: Sequence[str]) -> list[int]:
    return [int(word.rstrip(".") == other) for word, other in zip(words, gold, strict=True)]


def counted(subject: Any) -> dict[str, Any]:
    """Return the model's answers to the number of stars, with all tokens kept, by the true number."""
    answers_by_count: dict[str, list[str]] = {}
    for index in range(COUNTED):
        stars, attempt = index % 3 + 1, 0
        session = tokenprune.sessions.session(subject.model, subject.processor, memory=10**6, block=FRAMES)
        while session.stats.frames_seen < stars * FRAMES // 2:
            rng = np.random.default_rng((340_035, index, attempt := attempt + 1))
            video = draw_video(rng, (SIZE, SIZE), kinds=["still"])
            if [thing.what for thing in video.things] == ["star"]:
                session.see(np.stack([np.asarray(frame) for frame in video.frames]))
        answers_by_count.setdefault(str(stars), []).append(session.ask("how many stars?", max_new_tokens=1))
    return {"record": "count", "said": answers_by_count}


def options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="index of the first stream")
    parser.add_argument("--most", type=int, default=max(AGES), help="maximum age")
    parser.add_argument("--memories", default=",".join(map(str, MEMORIES)))
    parser.add_argument("--out", type=Path, default=OUT)
    add_options(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = options(argv)
    torch.set_num_threads(1)
    subject, memories = load_model("demo_video", device="cpu"), [int(size) for size in args.memories.split(",")]
    same = {"code": code_version(), "threads": 1}
    rows = Rows(args.out, header(torch.device("cpu"), model="demo_video", before=BEFORE), args, **same)
    rows.measure("count", lambda: counted(subject))
    ages = [age for age in AGES if age <= args.most]
    for index in range(args.first, args.first + args.streams):
        rows.measure([index, args.most], lambda index=index: measure_stream(subject, index, ages, memories))


if __name__ == "__main__":
    main()

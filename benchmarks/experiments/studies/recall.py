# SPDX-License-Identifier: Apache-2.0
"""Does a session remember? Recall of what a stream showed once, against its age, for every policy at three memories.

    python experiments/studies/recall.py --resume --allow-load   # about an hour of one thread; no time is measured
    python experiments/studies/recall_figure.py                  # the figure and the tables of what was measured

demo_video sees `drawn_streams` in clips of eight frames, as it was trained. Ages are frames that came after the event's
clip. At each one of its three questions is asked twice: at the positions of the stream, and with the gaps that departed
tokens left closed, as `reanchor=True` does. `share` is the part of the event's tokens that is held, mean of layers and
heads: what a policy decides, whatever the model makes of it. A session that holds no token of the event any more is not
followed further: it holds none later on either. Controls: `all` holds everything; `event`, no policy but an oracle,
keeps the event's tokens and the newest; `without` keeps all but those; `guess` asks before the event was shown.
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
MEMORIES = (200, 400, 800)  # a clip has 198 tokens
ALL, GUESS, ORACLES = "all", "guess", ("event", "without")
POLICIES = {
    "window": ("window", {"sink": 0}),
    "uniform": ("uniform", {}),
    "reservoir": ("uniform", {"reservoir": True}),
    "random": ("random", {}),
    "infinipot_v": ("infinipot_v", {}),
    "streammem": ("streammem", {}),
}
COUNTED = 24  # streams that show one to three stars


@dataclass(frozen=True)
class Event(tokenprune.sessions.Policy):
    """Keep the event's tokens and the newest, or the newest without them.

    places: (frame, cell) of each of them. keep_them: whether they stay.
    """

    places: tuple[tuple[int, int], ...] = ()
    keep_them: bool = True

    name: ClassVar[str] = "event"  # of a policy that is not registered: no other process needs it
    shared: ClassVar[bool] = True

    def select(self, view: tokenprune.sessions.PolicyView, keep: int) -> torch.Tensor:
        mine = is_of(view.frame[0], view.cell[0], self.places)
        order = torch.arange(view.count) + view.count * (mine if self.keep_them else ~mine)
        return order.argsort(descending=True)[:keep].sort().values


def is_of(frame: torch.Tensor, cell: torch.Tensor, places: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Return which entries are at these places, bool of the shape of `frame`. places: (frame, cell) of each."""
    codes = torch.tensor([one * 100_000 + of for one, of in places], dtype=torch.long)
    return torch.isin(frame * 100_000 + cell, codes) & (cell >= 0)


def share(held: Sequence[Any], places: Sequence[tuple[int, int]]) -> float:
    """Return the part of the tokens at these places that a session holds, mean of layers and heads."""
    of_layers = [is_of(one.frame, one.cell, places).float().sum(1).mean() for one in held]
    return float(torch.stack(of_layers).mean()) / len(places)


def places_of(stream: DrawnStream, first: int) -> list[list[tuple[int, int]]]:
    """Return for each question of a stream (frame, cell) of the tokens that show what it asks about.

    first: the decoder's frame with which the event begins; it joins two frames to one.
    """
    side, joined = SIZE // CELL, FRAMES // 2
    found = []
    for question in stream.questions:
        looks = find_evidence_tokens(
            question.looks, [stream.size] * FRAMES, [(side, side)] * joined, joined * side * side
        )
        tokens = np.flatnonzero(np.any(looks, axis=0))
        found.append([(first + int(token) // side**2, int(token) % side**2) for token in tokens])
    return found


def closed(session: tokenprune.sessions.Session) -> tokenprune.sessions.Session:
    """Return a copy of a session in which no positions lie between the frames that it holds."""
    made = session.fork()
    stream = made._stream
    down = reanchor(stream.memory, stream.adapter)
    stream.progress = dataclasses.replace(stream.progress, next=stream.progress.next - down)
    return made


def answers(session: tokenprune.sessions.Session, stream: DrawnStream) -> list[str]:
    """Return the first word of the answer to each question, as `ask` does, without what `generate` takes to begin."""
    found = []
    for one in stream.questions:
        ids = session._encode(one.text, closing=True)
        found.append(session._prompt_writer.decode(session.fork()._stream.say(ids).argmax(-1)))
    return found


@contextmanager
def encoded_once(model: Any) -> Iterator[None]:
    """Have sessions that see the same pixels one after the other share what the tower makes of them."""
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
    """Return a session for each policy and memory, and the controls."""
    places = tuple(place for of_kind in places_of(stream, stream.before * FRAMES // 2) for place in of_kind)
    made = {name: tokenprune.sessions.policy(policy, **options) for name, (policy, options) in POLICIES.items()}
    made |= {name: Event(places, name == "event") for name in ORACLES}

    def begun(memory: int, policy: Any) -> tokenprune.sessions.Session:
        return tokenprune.sessions.session(
            subject.model, subject.processor, memory=memory, policy=policy, block=FRAMES, seed=stream.index
        )

    found = {(name, memory): begun(memory, policy) for memory in memories for name, policy in made.items()}
    found.pop(("without", max(memories)))  # which is not full when the event has come
    return found | {(ALL, 0): begun(10**6, "window")}


def measured(subject: Any, number: int, ages: Sequence[int], memories: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each policy and memory of a stream."""
    stream = draw_stream(number, BEFORE, (SIZE, SIZE))
    places, gold = places_of(stream, BEFORE * FRAMES // 2), [one.answer for one in stream.questions]
    running = sessions(subject, stream, memories)
    words = next(iter(running.values()))._prompt_writer
    rows: dict[Any, dict[str, Any]] = {}
    with encoded_once(subject.model):
        for clip in range(BEFORE + 1 + max(ages) // FRAMES):
            frames = stream.clip(clip)
            inputs = words.prepare_clip([*map(Image.fromarray, frames)], clip * FRAMES, None)
            for session in running.values():
                session.see(frames) if clip == 0 else session.see(**inputs)  # the first one says the opening, too
            if clip == BEFORE - 1:
                said = answers(running["window", memories[0]], stream)
                rows[GUESS] = _row(GUESS, 0) | {"ages": [None], "said": [said], "right": [_right(said, gold)]}
            age = (clip - BEFORE) * FRAMES
            if age not in ages:
                continue
            for name, session in list(running.items()):
                row = rows.setdefault(name, _row(*name) | {"ages": [], "share": [], "right": [], "closed": []})
                kept = [share(session.held, of_kind) for of_kind in places]
                row["ages"].append(age)
                row["share"].append([round(one, 4) for one in kept])
                row["right"].append(_right(answers(session, stream), gold))
                row["closed"].append(_right(answers(closed(session), stream), gold))
                if age >= _last(name, memories) or not (any(kept) or name[0] == "without"):
                    del running[name]
    return [row | {"stream": number, "most": max(ages), "gold": gold} for row in rows.values()]


def _last(name: tuple[str, int], memories: Sequence[int]) -> int:
    """Return the greatest age at which a session is asked: longer, and a control tells nothing new."""
    controls = {ALL: 32, "without": 8, "event": max(AGES) if name[1] == min(memories) else 104}
    return controls.get(name[0], max(AGES))


def _row(policy: str, memory: int) -> dict[str, Any]:
    return {"record": "stream", "policy": policy, "memory": memory}


def _right(said: Sequence[str], gold: Sequence[str]) -> list[int]:
    return [int(one.rstrip(".") == other) for one, other in zip(said, gold, strict=True)]


def counted(subject: Any) -> dict[str, Any]:
    """Return what the model says when asked how many stars there were, with everything kept, by their number."""
    said: dict[str, list[str]] = {}
    for number in range(COUNTED):
        stars, attempt = number % 3 + 1, 0
        session = tokenprune.sessions.session(subject.model, subject.processor, memory=10**6, block=FRAMES)
        while session.stats.frames_seen < stars * FRAMES // 2:
            rng = np.random.default_rng((340_035, number, attempt := attempt + 1))
            video = draw_video(rng, (SIZE, SIZE), kinds=["still"])
            if [thing.what for thing in video.things] == ["star"]:
                session.see(np.stack([np.asarray(frame) for frame in video.frames]))
        said.setdefault(str(stars), []).append(session.ask("how many stars?", max_new_tokens=1))
    return {"record": "count", "said": said}


def options(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=40)
    parser.add_argument("--first", type=int, default=0, help="number of the first stream")
    parser.add_argument("--most", type=int, default=max(AGES), help="the greatest age")
    parser.add_argument("--memories", default=",".join(map(str, MEMORIES)))
    parser.add_argument("--out", type=Path, default=OUT)
    add_options(parser)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    args = options(given)
    torch.set_num_threads(1)
    subject, memories = load_model("demo_video", device="cpu"), [int(one) for one in args.memories.split(",")]
    same = {"code": code_version(), "threads": 1}
    rows = Rows(args.out, header(torch.device("cpu"), model="demo_video", before=BEFORE), args, **same)
    rows.measure("count", lambda: counted(subject))
    ages = [age for age in AGES if age <= args.most]
    for number in range(args.first, args.first + args.streams):
        rows.measure([number, args.most], lambda number=number: measured(subject, number, ages, memories))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Compare vLLM's own video pruning with the plugin under load: 10 s of 720p video, 256 tokens, 1 to 32 clients.

Four servers of Qwen3-VL-2B's shape (random weights, bfloat16, graphs of decoding) share the GPU, and only one works at
a time: vLLM without the plugin; vLLM with its EVS, and with its VidCom2, at a half; and the plugin with `evs` and
`divprune` at a half and a quarter. For each number of clients, the settings take turns.

A clip has 240 frames; the server samples 3 per second. The clients send the file's bytes. "new" clips: each request
has a clip that the server has not seen, so that it decodes, preprocesses and encodes each. "engine" is the throughput
for the same clips once more, by name, with empty caches of blocks and encoded videos: only preprocessed inputs are
cached. "same" clip: all requests have the same clip, as in the published table, and vLLM's caches work. Throughput is
the number of requests divided by the time from the first request to the last token. With 1 to 4 clients there are 4
requests, otherwise one per client, so p99 is the maximum. "step" is the time per output token after the first. The
rows also hold vLLM's mean times in queue, prefill and decoding, and its version.

Expected, from the published table (vLLM's pull request 51221, Cosmos3-Edge on an H200, the same clip in all
requests): EVS at a half serves 1.189 requests/s instead of 1.084 for 1 client, but 2.958 instead of 6.424 for 32.
Pruning can lower the throughput: "over off" below 1 is a loss. For new clips, decoding and preprocessing of about a
second per clip are equal in all settings, so that "over off" is near 1 and only "engine" gains.
"""

from __future__ import annotations

import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kit import ROOT, Sheet  # isort: skip
from vllm_kit import clients as load
from vllm_kit.servers import SERVED, Server, stop_all

# Published requests/s by clients: unpatched, EVS at a half.
PUBLISHED = {1: (1.084, 1.189), 2: (1.835, 1.778), 4: (2.896, 2.254), 8: (3.757, 2.563), 16: (5.312, 2.825),
             32: (6.424, 2.958)}  # fmt: skip
# The most informative rows come first, as the time may end.
ORDER = (
    ("new", 32), ("new", 1), ("new", 8), ("same", 32), ("same", 1), ("new", 16), ("new", 4), ("new", 2), ("same", 8),
    ("same", 16), ("same", 4), ("same", 2),
)  # fmt: skip
TINY_ORDER = (("new", 2), ("same", 2))
CLIP, TINY_CLIP = (1280, 720, 240, 24.0), (64, 64, 12, 6.0)  # width, height, frames, frames per second
LEAST = 4  # requests of a row
FPS = 3  # frames that the server samples per second
START = 170.0  # seconds until all servers answer
KV_GIB = 32, 18  # of the unpatched server, of the others: 32 clips of 11,970 tokens would need 41 and 21


class Peer(NamedTuple):
    """A server: options of vLLM, and settings of the plugin by name or None without the plugin."""

    options: dict[str, Any]
    profiles: dict[str, Any] | None = None


def _vllm(method: str) -> Peer:
    return Peer({"video-pruning-rate": 0.5, "video-pruning-method": method})


PEERS = {
    "off": Peer({}),
    "vLLM evs": _vllm("evs"),
    "vLLM vidcom2": _vllm("vidcom2"),
    "plugin": Peer({}, {
        f"{method}-{keep}": {"method": method, "keep": keep} for method in ("evs", "divprune") for keep in (0.5, 0.25)
    }),
}  # fmt: skip
COLUMNS = {
    "clips": "clips", "clients": "clients", "setting": "setting", "prompt": "tokens of a prompt", "rate": "requests/s",
    "over_off": "over off", "token_rate": "tokens/s", "first_p50_ms": "first token ms p50",
    "first_p99_ms": "first token ms p99", "step_p50_ms": "step ms p50", "step_p99_ms": "step ms p99",
    "engine_rate": "engine requests/s", "engine_over_off": "engine over off", "engine_token_rate": "engine tokens/s",
    "bound": "ended",
}  # fmt: skip


def list_settings() -> list[tuple[str, str, str]]:
    """Return setting, server and model's name of each setting, the unpatched first."""
    settings = []
    for name, peer in PEERS.items():
        for profile in peer.profiles or [""]:
            settings.append((profile.replace("-", " ") or name, name, f"{SERVED}:{profile}" if profile else SERVED))
    return settings


def describe_expected(clips: str, clients: int) -> str:
    """Return the expectation for the settings at a number of clients, which is printed before the rows."""
    off, evs = PUBLISHED[clients]
    if clips == "new":
        return f"{clients} clients, new clips: expected over off about 1, engine over off 1 to 2"
    return f"{clients} clients, same clip: published requests/s {off} unpatched, {evs} EVS, over off {evs / off:.2f}"


class Bench:
    """Measures rows with the running servers and one clip."""

    def __init__(self, sheet: Sheet, servers: dict[str, Server], clip: bytes) -> None:
        self.sheet, self.servers, self.clip, self.warm = sheet, servers, clip, set[str]()
        self.answer = 8 if sheet.tiny else 256

    def measure(self, clips: str, clients: int, setting: str, name: str, model: str) -> dict[str, Any]:
        """Return the row of a setting."""
        server = self.servers[name]
        server.check()
        about = {"clips": clips, "clients": clients, "setting": setting, "answer": self.answer}
        if self.sheet.tiny and PEERS[name].options:  # the CPU runners of vLLM 0.32 fail with pruned embeddings
            return about | {"bound": "started; vLLM's own pruning needs a GPU"}
        try:
            row = self.run(server, clips, clients, setting, model)
        except RuntimeError as error:
            raise RuntimeError(f"{server.describe_failure()}; {error}") from error
        return about | self.compare(row, clips, clients) | {"vllm": server.read_version()}

    def run(self, server: Server, clips: str, clients: int, setting: str, model: str) -> dict[str, Any]:
        """Send the requests of a row, and return throughput, times and stages."""
        build = partial(load.build_body, model, self.answer)
        ask = partial(load.ask_all, server.url, expected=self.answer)
        if setting not in self.warm:  # compiles kernels
            ask([build(self.clip, None)], 1)
            self.warm.add(setting)
        names = [uuid.uuid4().hex if clips == "new" else None for _ in range(max(LEAST, clients))]
        bodies = [build(self.clip, clip_name) for clip_name in names]
        if clips == "same":
            ask(bodies[:1], 1)  # fills the caches
        else:
            server.empty_caches()
        before = server.get("/metrics")
        row = load.summarize(ask(bodies, clients))
        row |= load.mean_stages(before, server.get("/metrics"))
        if clips == "new":
            server.empty_caches()
            engine = load.summarize(ask([build(None, clip_name) for clip_name in names], clients))
            row |= {f"engine_{key}": engine[key] for key in ("rate", "token_rate", "first_p50_ms", "step_p50_ms")}
        return row

    def compare(self, row: dict[str, Any], clips: str, clients: int) -> dict[str, Any]:
        """Return a row with its ratios to the unpatched row, if this is measured."""
        known = self.sheet.rows.known((clips, clients, "off"))
        for key, ratio in (("rate", "over_off"), ("engine_rate", "engine_over_off")):
            if known and key in row and key in known[0]:
                row[ratio] = row[key] / known[0][key]
        return row


@contextmanager
def started(sheet: Sheet, names: Sequence[str], folder: Path) -> Iterator[dict[str, Server]]:
    """Start servers at the same time, and stop them after the block."""
    length = 2048 if sheet.tiny else 16384
    servers = {}
    try:
        for name in names:
            peer = PEERS[name]
            servers[name] = Server(
                folder, name.replace(" ", "_"), folder / "model", peer.profiles is not None, sheet.tiny,
                options=peer.options, profiles=peer.profiles, kv_gib=KV_GIB[name != "off"], length=length,
                fps=FPS,
            )  # fmt: skip
        end = time.monotonic() + (60 * sheet.args.minutes if sheet.tiny else min(START, sheet.deadline.left))
        for server in servers.values():
            server.wait(end)
        yield servers
    finally:
        stop_all(servers.values())


def main(argv: Sequence[str] | None = None) -> int:
    sheet = Sheet("j_peers", "Video under load in vLLM", "Qwen3-VL-2B", COLUMNS, __doc__, argv)
    order, settings = TINY_ORDER if sheet.tiny else ORDER, list_settings()
    # On a CPU, a server at a time; the unpatched one first, as the other rows are compared with it.
    groups = [[name] for name in PEERS] if sheet.tiny else [list(PEERS)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        clip = load.draw_clip(folder / "clip.mp4", *(TINY_CLIP if sheet.tiny else CLIP))
        sys.path.insert(0, str(ROOT / "tests/vllm"))
        from vllm_kit.shapes import write_model

        write_model("qwen3", folder / "model", sheet.tiny)
        for names in groups:
            keys = [
                (clips, clients, setting, server, model)
                for clips, clients in order
                for setting, server, model in settings
                if server in names
            ]
            if all(sheet.rows.known(key[:3]) for key in keys):
                names = []
            with started(sheet, names, folder) as servers:
                bench = Bench(sheet, servers, clip)
                for key in keys:
                    if key[2] == "off":
                        sheet.console.print(f"expected: {describe_expected(*key[:2])}", markup=False, highlight=False)
                    sheet.take(key[:3], lambda bench=bench, key=key: bench.measure(*key))
    return sheet.end()


if __name__ == "__main__":
    raise SystemExit(main())

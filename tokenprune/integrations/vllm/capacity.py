# SPDX-License-Identifier: Apache-2.0
"""The load that a server bears, in closed form: how many requests its memory holds, how many a second it computes, and
the time to the first token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokenprune.budgets import Budget
from tokenprune.errors import OptionError, UnsupportedModelError
from tokenprune.integrations.vllm.gpus import GPU
from tokenprune.settings.cost import DECODER_OF_PEAK, TOWER_OF_PEAK, CostModel, Load

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Assumptions:
    """Shares of the data sheet's numbers, and others that no closed form knows; the defaults are an H200's
    (docs/serving/capacity.md).

    compute, tower: of the FLOPs, in the decoder's prefill and in the vision tower. read: of the bandwidth, while
    decoding. memory: for weights and KV cache; the rest is left to activations and the runtime. at_once: most requests
    that the server's scheduler takes on. host: seconds that the host takes to a first token, reading, choosing and
    launching; the GPU works meanwhile. each: its seconds for a request among many, whose launches they share. launch:
    its seconds for a step of decoding, where no CUDA graph replays it. block: tokens of the KV cache that are taken at
    a time.
    """

    compute: float = DECODER_OF_PEAK
    tower: float = TOWER_OF_PEAK
    read: float = 0.6
    memory: float = 0.85
    at_once: int = 256
    host: float = 0.03
    each: float = 0.003
    launch: float = 0.0
    block: int = 16

    def check(self) -> None:
        """Raise OptionError for shares outside (0, 1], no request at once, no token in a block, or negative seconds."""
        for name in ("compute", "tower", "read", "memory"):
            if not 0 < getattr(self, name) <= 1:
                raise OptionError(f"{name}: {getattr(self, name):.3g} is no share: take a number in (0, 1]")
        if self.at_once < 1 or self.block < 1 or min(self.host, self.each, self.launch) < 0:
            raise OptionError(
                "a server takes on at least 1 request at once, a block of its cache holds at least 1 token, and the "
                "host needs no less than 0 seconds"
            )


@dataclass(frozen=True)
class Capacity:
    """The load that a server bears at one keep.

    visual, prompt: tokens of a request. kv_bytes: of a request, its answer included, in whole blocks. requests: that
    the KV cache holds together. prefill_flops, prefill_seconds: of one request on the GPU; with the tower. prefills: a
    second, if there were no decoding. step_seconds: of one decoding step with all requests that run together. rate:
    requests a second, prefill and decoding together. first_token: seconds, on a server that does nothing else.
    """

    keep: float
    visual: int
    prompt: int
    kv_bytes: float
    requests: int
    prefill_flops: float
    prefill_seconds: float
    prefills: float
    step_seconds: float
    rate: float
    first_token: float


@dataclass(frozen=True)
class Server:
    """A model on GPUs. numbers: of all its weights; read: of those that a decoding step reads."""

    costs: CostModel
    numbers: int
    read: int
    gpu: GPU
    gpus: int = 1
    dtype: str = "bfloat16"
    assumed: Assumptions = Assumptions()

    @classmethod
    def from_config(
        cls, config: Any, gpu: GPU, gpus: int = 1, dtype: str = "bfloat16", assumed: Assumptions | None = None
    ) -> Server:
        """config: of the whole model. Raises OptionError for numbers that are none, UnsupportedModelError for a model
        whose sizes have no closed form, or whose weights do not fit."""
        assumed = Assumptions() if assumed is None else assumed
        assumed.check()
        if dtype not in BYTES:
            raise OptionError(f"dtype {dtype!r} is not one of {', '.join(BYTES)}")
        if gpus < 1:
            raise OptionError(f"a server has at least 1 GPU, not {gpus}")
        text = config.get_text_config()
        if any(getattr(text, name, None) for name in _EXPERTS):
            raise UnsupportedModelError(
                f"{config.model_type!r} is a mixture of experts, which has no closed form here: measure it with "
                "`tokenprune bench --backend vllm`"
            )
        costs = CostModel.from_config(config)
        assert costs.tower is not None
        head = text.vocab_size * text.hidden_size
        tied = bool(getattr(config, "tie_word_embeddings", False))
        read = costs.decoder.weights + head
        made = cls(costs, costs.tower.weights + read + (0 if tied else head), read, gpu, gpus, dtype, assumed)
        if made.cache_bytes <= 0:
            fit = -(-made.weight_bytes // (assumed.memory * gpu.memory))
            raise UnsupportedModelError(
                f"the weights ({made.weight_bytes / 1e9:.1f} GB in {dtype}) do not fit into {assumed.memory:.0%} of "
                f"{gpus} x {gpu.name}: take at least {fit:.0f} GPUs, or a larger one"
            )
        return made

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return float(self.numbers * BYTES[self.dtype])

    @property
    def cache_bytes(self) -> float:
        """Bytes for the KV cache."""
        return self.assumed.memory * self.gpus * self.gpu.memory - self.weight_bytes

    def capacity(self, load: Load, keep: float | int, images: int, answer: int) -> Capacity:
        """Return what the server bears of requests of one kind, cut at the decoder's entry. load: of a request. keep:
        as in `Budget`, for each of `images`. answer: tokens that each request makes.

        Raises BudgetError for a keep that is none, UnsupportedModelError where not one request fits.
        """
        size, layers, assumed = BYTES[self.dtype], self.costs.decoder.layers, self.assumed
        each = load.visual // images
        visual = Budget.from_keep(keep).resolve_keep(each) * images
        cost = self.costs.cost(load, per_layer=[visual] * layers)
        prompt = load.text + visual
        held = -(-(prompt + answer) // assumed.block) * assumed.block
        kv = float(self.costs.decoder.kv_bytes([held] * layers, size))
        requests = int(self.cache_bytes // kv)
        if requests < 1:
            raise UnsupportedModelError(
                f"{self.cache_bytes / 1e9:.1f} GB are left beside the weights, and one request's KV cache is "
                f"{kv / 1e9:.1f} GB at keep {keep}: take more GPUs, or fewer images or tokens"
            )
        together = min(requests, assumed.at_once)
        bandwidth = assumed.read * self.gpus * self.gpu.bandwidth
        # While a request is answered its cache grows; half of the answer is there on average.
        grown = float(self.costs.decoder.kv_bytes([prompt + answer // 2] * layers, size))
        step = max(assumed.launch, (self.read * size + together * grown) / bandwidth)
        decoder = cost.decoder + 2 * (self.read - self.costs.decoder.weights)
        peak = self.gpus * self.gpu.flops(self.dtype)
        prefill = decoder / (assumed.compute * peak) + cost.tower / (assumed.tower * peak)
        # A prompt of few tokens is over before the weights have been read.
        first = max(assumed.host, prefill, self.read * size / bandwidth)
        alone = max(assumed.each, prefill)
        # The first token of an answer is made by the prefill.
        rate = 1 / (alone + (answer - 1) * step / together)
        return Capacity(
            visual / load.visual,
            visual,
            prompt,
            kv,
            requests,
            decoder + cost.tower,
            prefill,
            1 / alone,
            step,
            rate,
            first,
        )

    def fit(self, load: Load, images: int, answer: int, rates: Mapping[float | int, float]) -> Server:
        """Return this server with the shares `compute` and `tower` at which it answers as was measured.

        rates: requests a second, by keep, of two keeps that the GPU bounds. Raises OptionError for other than two, and
        where no shares give both.
        """
        if len(rates) != 2:
            raise OptionError(f"two settings fit two shares, not {len(rates)}: give the rates of two keeps")
        ideal = replace(self, assumed=replace(self.assumed, compute=1.0, tower=1.0, each=0.0))
        # Of each keep, the seconds of the decoder's prefill and of the tower at the peak, and those that were taken.
        sums = []
        for keep, rate in rates.items():
            made = ideal.capacity(load, keep, images, answer)
            tower = ideal.costs.cost(load).tower / (self.gpus * self.gpu.flops(self.dtype))
            decoding = 1 / made.rate - made.prefill_seconds
            sums.append((made.prefill_seconds - tower, tower, 1 / rate - decoding))
        (one, tower, first), (other, _, second) = sums
        slope = (first - second) / (one - other) if one != other else 0.0
        rest = first - slope * one
        found = replace(self.assumed, compute=1 / slope if slope > 0 else 0.0, tower=tower / rest if rest > 0 else 0.0)
        try:
            found.check()
        except OptionError as error:
            raise OptionError(
                f"no shares of the peak give both rates ({error}): measure two keeps that the GPU bounds, with many "
                "requests at once"
            ) from error
        return replace(self, assumed=found)


def build_load(config: Any, images: int, *, tokens: int | None, tiles: int | None, text: int) -> Load:
    """Return the load of a request with so many equal images; see `Load.of_config`. Raises OptionError."""
    if images < 1:
        raise OptionError(f"a request has at least 1 image, not {images}: without images there is nothing to prune")
    one = Load.of_config(config, tokens=tokens, tiles=tiles, text=text)
    return Load(one.views * images, one.visual * images, text)

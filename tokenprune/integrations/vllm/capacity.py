# SPDX-License-Identifier: Apache-2.0
"""Capacity of a server in closed form: requests in memory, requests per second, and time to the first token."""

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
    """Achieved shares of the data sheet's numbers, and overheads without a closed form.

    The defaults were measured on an H200 (docs/serving/capacity.md).

    Args:
        compute: Share of the peak FLOPs in the decoder's prefill.
        tower: Share of the peak FLOPs in the vision tower.
        read: Share of the memory bandwidth while decoding.
        memory: Share of the memory for weights and KV cache. Activations and the runtime use the rest.
        at_once: Maximum number of requests that the scheduler runs at once.
        host: Seconds on the host until the first token. The GPU works meanwhile.
        each: Seconds on the host for one of many concurrent requests, which share launches.
        launch: Seconds on the host for a decoding step without CUDA graphs.
        block: Tokens per block of the KV cache.
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
        """Raise OptionError for shares outside (0, 1], counts below 1 or negative seconds."""
        for name in ("compute", "tower", "read", "memory"):
            if not 0 < getattr(self, name) <= 1:
                raise OptionError(f"{name}: {getattr(self, name):.3g} is not a share in (0, 1]")
        if self.at_once < 1 or self.block < 1 or min(self.host, self.each, self.launch) < 0:
            raise OptionError("at_once and block must be at least 1, and host, each and launch at least 0 seconds")


@dataclass(frozen=True)
class Capacity:
    """Capacity of a server at one keep.

    Attributes:
        keep: Share of visual tokens that is kept.
        visual: Visual tokens of a request.
        prompt: Prompt tokens of a request.
        kv_bytes: KV cache of a request with its answer, in whole blocks.
        requests: Number of requests that the KV cache holds.
        prefill_flops: FLOPs of the prefill of a request, including the tower.
        prefill_seconds: Seconds of the prefill of a request on the GPU, including the tower.
        prefills: Prefills per second without decoding.
        step_seconds: Seconds of a decoding step with all concurrent requests.
        rate: Requests per second, prefill and decoding together.
        first_token: Seconds to the first token on an idle server.
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
    """A model on GPUs.

    Args:
        costs: Costs of the model.
        numbers: Number of weights.
        read: Number of weights that a decoding step reads.
        gpu: Data sheet of the GPU.
        gpus: Number of GPUs.
        dtype: Dtype of weights and KV cache.
        assumed: Achieved shares and overheads.
    """

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
        """Return the server for the config of a whole model.

        Raises OptionError for arguments out of range, and UnsupportedModelError if there is no closed form or
        the weights do not fit.
        """
        assumed = Assumptions() if assumed is None else assumed
        assumed.check()
        if dtype not in BYTES:
            raise OptionError(f"dtype {dtype!r} is not one of {', '.join(BYTES)}")
        if gpus < 1:
            raise OptionError(f"gpus={gpus} is not valid: a server needs at least 1 GPU")
        text = config.get_text_config()
        if any(getattr(text, name, None) for name in _EXPERTS):
            raise UnsupportedModelError(
                f"{config.model_type!r} is a mixture of experts, which has no closed form here. Measure it with "
                "`tokenprune bench --backend vllm`."
            )
        costs = CostModel.from_config(config)
        assert costs.tower is not None
        head = text.vocab_size * text.hidden_size
        tied = bool(getattr(config, "tie_word_embeddings", False))
        read = costs.decoder.num_weights + head
        server = cls(costs, costs.tower.num_weights + read + (0 if tied else head), read, gpu, gpus, dtype, assumed)
        if server.cache_bytes <= 0:
            fit = -(-server.weight_bytes // (assumed.memory * gpu.memory))
            raise UnsupportedModelError(
                f"the weights ({server.weight_bytes / 1e9:.1f} GB in {dtype}) do not fit into {assumed.memory:.0%} of "
                f"{gpus} x {gpu.name}. Use at least {fit:.0f} GPUs, or a larger one."
            )
        return server

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights."""
        return float(self.numbers * BYTES[self.dtype])

    @property
    def cache_bytes(self) -> float:
        """Bytes available for the KV cache."""
        return self.assumed.memory * self.gpus * self.gpu.memory - self.weight_bytes

    def capacity(self, load: Load, keep: float | int, images: int, answer: int) -> Capacity:
        """Return the capacity for requests with answers of `answer` tokens, pruned at the decoder's entry.

        `keep` is the budget of each image. Raises BudgetError if it is invalid, and UnsupportedModelError if no request
        fits.
        """
        size, layers, assumed = BYTES[self.dtype], self.costs.decoder.layers, self.assumed
        each = load.visual // images
        visual = Budget.from_keep(keep).resolve_keep(each) * images
        cost = self.costs.compute_cost(load, per_layer=[visual] * layers)
        prompt = load.text + visual
        cached_tokens = -(-(prompt + answer) // assumed.block) * assumed.block
        kv = float(self.costs.decoder.kv_bytes([cached_tokens] * layers, size))
        requests = int(self.cache_bytes // kv)
        if requests < 1:
            raise UnsupportedModelError(
                f"{self.cache_bytes / 1e9:.1f} GB are free beside the weights, and one request's KV cache is "
                f"{kv / 1e9:.1f} GB at keep {keep}: use more GPUs, or fewer images or tokens"
            )
        together = min(requests, assumed.at_once)
        bandwidth = assumed.read * self.gpus * self.gpu.bandwidth
        # The cache grows while a request is answered. On average it holds half of the answer.
        average = float(self.costs.decoder.kv_bytes([prompt + answer // 2] * layers, size))
        step = max(assumed.launch, (self.read * size + together * average) / bandwidth)
        decoder = cost.decoder + 2 * (self.read - self.costs.decoder.num_weights)
        peak = self.gpus * self.gpu.flops(self.dtype)
        prefill = decoder / (assumed.compute * peak) + cost.tower / (assumed.tower * peak)
        # The prefill of a short prompt takes at least the time to read the weights.
        first = max(assumed.host, prefill, self.read * size / bandwidth)
        per_request = max(assumed.each, prefill)
        # The first token of an answer is made by the prefill.
        rate = 1 / (per_request + (answer - 1) * step / together)
        return Capacity(
            visual / load.visual,
            visual,
            prompt,
            kv,
            requests,
            decoder + cost.tower,
            prefill,
            1 / per_request,
            step,
            rate,
            first,
        )

    def fit(self, load: Load, images: int, answer: int, rates: Mapping[float | int, float]) -> Server:
        """Return this server with the shares `compute` and `tower` that reproduce measured rates.

        `rates` has the requests per second at two keeps at which the GPU is the bottleneck. Raises OptionError for
        another number of rates, or if no shares reproduce both.
        """
        if len(rates) != 2:
            raise OptionError(f"pass the rates of exactly two keeps, not {len(rates)}")
        ideal = replace(self, assumed=replace(self.assumed, compute=1.0, tower=1.0, each=0.0))
        # For each keep: seconds of the decoder's prefill and of the tower at the peak, and measured seconds of both.
        rows = []
        for keep, rate in rates.items():
            capacity = ideal.capacity(load, keep, images, answer)
            tower = ideal.costs.compute_cost(load).tower / (self.gpus * self.gpu.flops(self.dtype))
            decoding = 1 / capacity.rate - capacity.prefill_seconds
            rows.append((capacity.prefill_seconds - tower, tower, 1 / rate - decoding))
        (decoder, tower, seconds), (other_decoder, _, other_seconds) = rows
        slope = (seconds - other_seconds) / (decoder - other_decoder) if decoder != other_decoder else 0.0
        rest = seconds - slope * decoder
        assumed = replace(
            self.assumed, compute=1 / slope if slope > 0 else 0.0, tower=tower / rest if rest > 0 else 0.0
        )
        try:
            assumed.check()
        except OptionError as error:
            raise OptionError(
                f"no shares of the peak reproduce both rates ({error}). Measure two keeps with many concurrent "
                "requests."
            ) from error
        return replace(self, assumed=assumed)


def build_load(config: Any, images: int, *, tokens: int | None, tiles: int | None, text: int) -> Load:
    """Return the load of a request with several equal images (see `Load.from_config`); raise OptionError."""
    if images < 1:
        raise OptionError(f"images={images} is not valid: a request needs at least 1 image")
    load = Load.from_config(config, tokens=tokens, tiles=tiles, text=text)
    return Load(load.views * images, load.visual * images, text)

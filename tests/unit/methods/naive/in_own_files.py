# SPDX-License-Identifier: Apache-2.0
"""Invalid options of methods whose naive loops are in separate test files."""

from __future__ import annotations

import math

import torch

from method_rows import Row

ROWS = {
    "autoprune": Row(refused=({"cuts": 0}, {"cuts": 1.5}, {"slope": -1}, {"gamma": "x"}, {"layers": (3, 2)})),
    "d2pruner": Row(refused=({"pivots": 0.0}, {"alpha": 2}, {"radius": 0}, {"layer": 0}, {"prior": 3})),
    "docprune": Row(
        refused=(
            {"threshold": 1.5}, {"tolerance": 0.0}, {"tolerance": "1"}, {"relevance": "x"},
            {"relevance": torch.rand(8)}, {"least_relevance": "1"},
        )
    ),
    "dtd": Row(refused=({"threshold": 1.5}, {"threshold": "half"}, {"against": "first"})),
    "earlytom": Row(
        refused=({"layers": ()}, {"layers": (-1,)}, {"layers": (1.5,)}, {"longest": 0}, {"threshold": "half"})
    ),
    "entropyprune": Row(refused=({"layer": 0}, {"states": "hidden"}, {"normalise": 1})),
    "erase": Row(
        refused=(
            {"entropy": (1.0, 2.0, 0.5)}, {"retain": (0.5,)}, {"retain": (0.8, 0.7, 0.5, 0.0)}, {"layers": (3,)},
            {"layers": (3, 3)}, {"layers": (-1, 3)},
        )
    ),
    "globalcom2": Row(refused=({"temperature": 0.0}, {"temperature": -1.0}, {"temperature": "x"})),
    "hawk": Row(
        refused=(
            {"weights": [-1.0]}, {"weights": [0.0, 0.0]}, {"weights": [math.inf]}, {"norm": "l1"},
            {"weights": [1.0], "heads": "x"},
        )
    ),
    "hired": Row(refused=({"alpha": -0.1}, {"alpha": 1.5}, {"alpha": "x"}, {"mode": "rows"})),
    "ipcv": Row(refused=({"layer": 0}, {"stabilise": -1}, {"neighbours": 0}, {"neighbours": "10"})),
    "pevlm": Row(
        refused=(
            {"sink_frames": 0}, {"block_frames": 1.5}, {"min_frames": 0}, {"min_frames": True}, {"sink_mode": "frames"},
            {"position_mode": "same"}, {"implementation": "mask"}, {"dense_layers": 3}, {"dense_layers": [-1]},
            {"only_single_video": 1}, {"sinks": 4},
        )
    ),
    "pixelprune": Row(
        refused=(
            {"threshold": -0.1}, {"threshold": 1.5}, {"threshold": "0"}, {"metric": "ssim"}, {"anchored": 1},
            {"neighbours": "left"},
        )
    ),
    "restore": Row(
        refused=({"merged": 1.0}, {"merged": "0"}, {"rival": "other"}, {"calibrate": 1}, {"chooser": "fastv"})
    ),
    "saint": Row(refused=({"layer": -1}, {"threshold": -2.0}, {"threshold": "0"}, {"partners": 0}, {"partners": 1.5})),
    "tome": Row(refused=[{"r": r} for r in (-1, 1.5, "8", [1, -1], (1, 2), (8,), (8, 2.0), True, [[1]])]),
    "towerdrop": Row(
        refused=({"layer": -1}, {"layer": 1.5}, {"score": "keys"}, {"seed": "0"}, {"score": "change", "layer": 0})
    ),
    "transprune": Row(refused=({"alpha": 1.5}, {"alpha": "1"}, {"layers": (1, 2)})),
    "vitcop": Row(refused=({"clusters": 0.0}, {"clusters": 2}, {"clusters": "1"})),
}  # fmt: skip

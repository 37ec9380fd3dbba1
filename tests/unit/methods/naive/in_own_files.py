# SPDX-License-Identifier: Apache-2.0
"""Methods whose loops stand in test files of their own: what they refuse."""

from __future__ import annotations

import math

from method_rows import Row

ROWS = {
    "autoprune": Row(
        refused=({"cuts": 0}, {"cuts": 1.5}, {"slope": -1}, {"gamma": "x"}, {"layers": (3, 2)}),
    ),
    "d2pruner": Row(refused=({"pivots": 0.0}, {"alpha": 2}, {"radius": 0}, {"layer": 0}, {"prior": 3})),
    "docprune": Row(
        refused=(
            {"threshold": 1.5},
            {"tolerance": 0.0},
            {"tolerance": "1"},
            {"relevance": "x"},
            {"least_relevance": "1"},
        )
    ),
    "entropyprune": Row(refused=({"layer": 0}, {"states": "hidden"}, {"normalise": 1})),
    "erase": Row(
        refused=(
            {"entropy": (1.0, 2.0, 0.5)},
            {"retain": (0.5,)},
            {"retain": (0.8, 0.7, 0.5, 0.0)},
            {"layers": (3,)},
            {"layers": (3, 3)},
            {"layers": (-1, 3)},
        )
    ),
    "hawk": Row(
        refused=(
            {"weights": [-1.0]},
            {"weights": [0.0, 0.0]},
            {"weights": [math.inf]},
            {"norm": "l1"},
            {"weights": [1.0], "heads": "x"},
        )
    ),
    "ipcv": Row(refused=({"layer": 0}, {"stabilise": -1}, {"neighbours": 0}, {"neighbours": "10"})),
    "pixelprune": Row(
        refused=(
            {"threshold": -0.1},
            {"threshold": 1.5},
            {"threshold": "0"},
            {"metric": "ssim"},
            {"anchored": 1},
            {"neighbours": "left"},
        ),
    ),
    "restore": Row(
        refused=({"merged": 1.0}, {"merged": "0"}, {"rival": "other"}, {"calibrate": 1}, {"chooser": "fastv"}),
    ),
    "saint": Row(refused=({"layer": -1}, {"threshold": -2.0}, {"threshold": "0"}, {"partners": 0}, {"partners": 1.5})),
    "tome": Row(refused=[{"r": r} for r in (-1, 1.5, "8", [1, -1], (1, 2), (8,), (8, 2.0), True, [[1]])]),
    "towerdrop": Row(
        refused=({"layer": -1}, {"layer": 1.5}, {"score": "keys"}, {"seed": "0"}, {"score": "change", "layer": 0}),
    ),
    "transprune": Row(refused=({"alpha": 1.5}, {"alpha": "1"}, {"layers": (1, 2)})),
    "vitcop": Row(refused=({"clusters": 0.0}, {"clusters": 2}, {"clusters": "1"})),
}

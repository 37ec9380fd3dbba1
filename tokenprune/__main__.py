# SPDX-License-Identifier: Apache-2.0
"""`python -m tokenprune` is the `tokenprune` command: what `accelerate launch -m` and `torchrun -m` start."""

from tokenprune.cli import main

if __name__ == "__main__":
    main()

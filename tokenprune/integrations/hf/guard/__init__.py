# SPDX-License-Identifier: Apache-2.0
"""The guard: warn about prompts and images that a method handles badly at its budget, or keep more tokens for them.

`floors` holds the measured losses, `prompts` classifies questions, `images` detects text in images, and `part` connects
them to a patched model.
"""

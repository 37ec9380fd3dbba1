# SPDX-License-Identifier: Apache-2.0
"""The guard: notice prompts and images that a method at a budget is known to lose, and say so, or keep more tokens.

What is risky is measured (`floors`), what a prompt asks is read (`prompts`), and whether an image is full of text is
looked at (`images`). What a patched model does with it is in `part`.
"""

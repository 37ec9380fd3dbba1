# SPDX-License-Identifier: Apache-2.0
"""Sizes that a model's config gives: of its decoder, its tower, its layers, and its images in tokens."""

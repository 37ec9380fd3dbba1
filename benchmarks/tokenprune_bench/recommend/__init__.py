# SPDX-License-Identifier: Apache-2.0
"""A starting point for a model and its use, from a table of advice and of evidence."""

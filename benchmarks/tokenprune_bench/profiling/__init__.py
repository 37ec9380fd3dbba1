# SPDX-License-Identifier: Apache-2.0
"""Times, tokens and closed forms of a model, with and without a method."""

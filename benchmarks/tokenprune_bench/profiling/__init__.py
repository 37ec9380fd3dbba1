# SPDX-License-Identifier: Apache-2.0
"""Times, token counts and closed-form costs of a model, with and without a method."""

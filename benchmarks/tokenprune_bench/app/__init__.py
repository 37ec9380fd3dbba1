# SPDX-License-Identifier: Apache-2.0
"""Page in the browser: ask about an image or a video, and compare kept tokens, answers and costs of methods."""

# SPDX-License-Identifier: Apache-2.0
"""A page in the browser: ask about an image or a video, and see what a method keeps, answers and costs."""

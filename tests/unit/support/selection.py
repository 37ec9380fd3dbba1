# SPDX-License-Identifier: Apache-2.0
"""Choose the variants of a test to run: all, a pairwise cover, one method of each kind on all families, or one family
of each kind with each value once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import combinations
from typing import Any
from zlib import crc32

import pytest
from transformers import CONFIG_MAPPING

import tokenprune
import zoo
from families import FAMILIES, REFUSED
from tokenprune import Budget, Pruner
from tokenprune.integrations.hf import compat
from tokenprune.models.families import SUPPORTED
from tokenprune.selection.observable import ObservedAt
from tokenprune.selection.observable_registry import find_observable

# `-m fast` runs one family of each kind, and one method of each kind on them.
FAST_FAMILIES = {
    "llava": "one square of patches for each image, a class token, positions on one axis",
    "llava_onevision": "tiles of an image, videos",
    "qwen2_5_vl": "a tower that packs all images, positions on three axes",
    "gemma3": "sliding windows, masks by token type",
    "instructblip": "a Q-Former",
    "qwen3_5": "layers that carry a state",
}
FAST_METHODS = {
    "divprune": "chooses before the decoder",
    "dart": "chooses inside the decoder",
    "dyrate": "goes on while the answer is written",
    "tome": "merges in the vision tower",
    "dynres": "acts on pixels",
    "pevlm": "acts on attention",
}
# Tests of all methods run FAST_METHODS on all families of zoo.py, and each other method on one family below, or on all
# three. A family affects a method only through its observables and the engine at its site.
FEW_FAMILIES = {
    "llava": "one square of patches for each image",
    "llava_onevision": "tiles and a token behind each image's last row, videos",
    "qwen2_5_vl": "images of any shape, positions on three axes, videos",
}
# Slow for any family: starts processes, runs a benchmark or a simulation, or interprets kernels.
SLOW = {
    "api/test_cli.py",
    "api/test_command_line_traps.py::test_a_line_of_the_predictions_without_an_answer_is_named",
    "api/test_command_line_traps.py::test_a_profile_of_two_settings_has_a_table_of_each",
    "api/test_command_line_traps.py::test_all_rows_that_do_not_fit_the_model_are_named_at_once",
    "api/test_command_line_traps.py::test_no_question_about_a_circle_and_the_shipped_model_knows_drawings_only",
    "api/test_command_line_traps.py::test_predictions_that_were_cut_are_named_and_nothing_changes",
    "api/test_distributions.py::test_a_source_distribution_builds_the_wheel",
    "api/test_distributions.py::test_the_benchmark_without_the_demo_imports_and_asks_for_questions_before_it_loads_a_model",
    "api/test_distributions.py::test_the_core_alone_lists_methods_and_says_what_to_install",
    "api/test_method_conformance.py::test_our_methods_conform",
    "api/test_observables.py::test_engines_use_only_base_class_members",
    "api/test_process_defaults.py",
    "api/test_setting.py::test_fuzzed_settings_raise_library_errors",
    "api/test_startup.py::test_a_config_is_read_without_torch",
    "api/test_startup.py::test_a_plain_patch_loads_nothing_that_is_not_asked_for",
    "api/test_startup.py::test_deferred_torch_is_torch",
    "api/test_two_pass.py",
    "api/test_ways.py",
    "bench/test_bench.py",
    "bench/test_bench_engines.py::test_a_server_is_asked",
    "bench/test_bench_folder.py",
    "bench/test_bench_runs.py",
    "bench/test_contact_sheet.py",
    "bench/test_demo_models.py::test_a_benchmark_asks_the_video_model_about_videos",
    "bench/test_demo_models.py::test_it_answers_its_questions",
    "bench/test_demo_models.py::test_keeping_all_changes_nothing",
    "bench/test_drawn_videos.py",
    "bench/test_evidence.py",
    "bench/test_leaderboard.py::test_a_method_of_another_package_is_checked_measured_and_written",
    "bench/test_report_samples.py",
    "bench/test_video_bench.py",
    "docs/test_docs.py::test_generated_parts_are_current",
    "docs/test_front_page.py::test_the_models_that_the_readme_names_load_with_their_processors",
    "docs/test_numbers.py::test_generated_parts_hold_no_placeholder",
    "docs/test_numbers.py::test_no_generated_sentence_gives_speed_and_accuracy_of_two_settings",
    "docs/test_numbers.py::test_speed_stands_beside_accuracy_at_one_setting_of_one_model",
    "engine/test_compile.py",
    "engine/test_drafts.py",
    "engine/test_engine_costs.py",
    "engine/test_memory.py::test_choosing_among_many_images",
    "engine/test_static_cache.py::test_decode_steps_compile",
    "engine/test_syncs.py",
    "engine/test_tensor_parallel.py",
    "engine/test_trl.py",
    "engine/test_vtu.py",
    "engine/test_withdrawal.py",
    "families/test_zoo.py",
    "guard/test_guard.py",
    "guard/test_guard_checks.py",
    "kernels/test_compiled_kernels.py::test_the_worst_program_of_each_kernel_compiles_within_its_budget",
    "kernels/test_kernels_attention.py",
    "kernels/test_kernels_dispatch.py::test_triton_is_not_imported_before_a_kernel_runs",
    "kernels/test_kernels_similarity.py",
    "methods/test_calibration.py::test_command_line",
    "methods/test_calibration.py::test_equals_the_naive_loop",
    "methods/test_d2pruner.py::test_fit_and_show_commands",
    "methods/test_dymu_decoder.py::test_demo_model_has_shipped_thresholds",
    "methods/test_dyrate.py::test_memory_after_64_tokens",
    "methods/test_dyrate_rates.py::test_fitting",
    "methods/test_dyrate_rates.py::test_the_command",
    "methods/test_methods_in_models.py::test_query_aware_methods_depend_on_the_question",
    "methods/test_naive.py::test_equals_naive_loop_at_large_sizes",
    "methods/test_ottvid.py::test_matches_loop_in_200_cases",
    "methods/test_prunevid.py::test_matches_loop_in_200_cases",
    "methods/test_schedule.py::test_the_average_over_layers_is_the_budget",
    "methods/test_stc.py::test_matches_loop_in_200_cases",
    "methods/test_video_methods.py::test_counts_are_exact",
    "methods/test_vitcop.py::test_early_cut_equals_naive_loop_in_200_cases",
    "methods/test_vitcop.py::test_first_stage_equals_naive_loop_in_200_cases",
    "processor/test_view_select_models.py::test_generate_equals_a_prompt_with_the_kept_views",
    "processor/test_view_select_models.py::test_the_benchmark_leaves_it_out",
    "scripts/test_all_methods.py",
    "scripts/test_capacity_errors.py",
    "scripts/test_contributing.py",
    "scripts/test_gpu_tables.py",
    "scripts/test_mutations.py",
    "scripts/test_pages.py",
    "scripts/test_papers_settings.py::test_settings_reach_their_average_in_a_model_of_this_shape",
    "scripts/test_recall.py",
    "scripts/test_recover.py",
    "scripts/test_screenshots.py::test_problems_of_a_page_are_reported",
    "scripts/test_speed_benchmarks.py",
    "scripts/test_sizes.py::test_one_cut_runs_through_no_more_files_than_today",
    "scripts/test_sweep.py",
    "session/test_answers_in_words.py",
    "session/test_attend.py",
    "session/test_stream.py::test_half_precision_is_as_near_to_float32_as_one_prefill_in_it",
    "session/test_patched.py::test_it_equals_one_prefill_without_what_was_pruned_and_evicted",
    "session/test_reanchor.py::test_a_shipped_model_sees_more_images_than_it_has_positions",
    "session/test_storage.py::test_a_session_is_loaded_by_another_process",
    "tower/test_packed_encoder.py::test_generate_and_combined_methods",
    "tuning/test_promise.py::test_it_is_wrong_no_more_often_than_it_says",
    "tuning/test_search.py",
    "tuning/test_tune.py",
    "tuning/test_tune_backends.py::test_a_server_is_tuned",
    "tuning/test_tuner_promise.py",
    "vllm/test_serving.py::test_nothing_else_imports_vllm",
}

REASONS = {
    name: f"{family.kind} needs transformers {SUPPORTED[family.kind].since} or later, this is {compat.VERSION}"
    for name, family in FAMILIES.items()
    if compat.is_older_than(SUPPORTED[family.kind].since)
} | {name: f"transformers {compat.VERSION} has no {name}" for name in REFUSED if name not in CONFIG_MAPPING}
if compat.VERSION.release[:2] == (5, 24):
    REASONS["llama4"] = "transformers 5.24 itself fails on Llama 4: its decoder's output lacks image_outputs"


def names_in(item: pytest.Item) -> set[str]:
    """Return the names among a test's parameters: strings, and the names of named objects such as families and
    methods."""
    callspec = getattr(item, "callspec", None)
    return set() if callspec is None else names_of(callspec.params.values())


def names_of(values: Iterable[Any]) -> set[str]:
    """Return the strings among parameter values, and the names of named objects."""
    return {name for value in values if isinstance(name := getattr(value, "name", value), str)}


def lacking(item: pytest.Item) -> list[str]:
    """Return the reasons why a test cannot run with the installed transformers: missing or not yet supported model
    types."""
    return why_lacking(names_in(item))


def why_lacking(names: set[str]) -> list[str]:
    return [REASONS[name] for name in sorted(names & REASONS.keys())]


def is_fast(item: pytest.Item) -> bool:
    """Return whether a test may be part of `-m fast`: see `fast_of`."""
    test, names = item.nodeid.partition("[")[0].removeprefix("tests/unit/"), names_in(item)
    families = names & (FAMILIES.keys() | REFUSED.keys())
    methods = names & set(tokenprune.available_methods()) if families else set()
    slow = {test, test.partition("::")[0]} & SLOW
    return not slow and families <= FAST_FAMILIES.keys() and methods <= FAST_METHODS.keys()


@cache
def kind_of(method: str) -> tuple[Any, ...]:
    """Return the properties shared by methods of one kind: site, merging, where observables are recorded, number of
    cuts, content-based counts, and withdrawal."""
    info = tokenprune.method_info(method)
    recorded_at = frozenset(find_observable(need).where for need in info.observables)
    several = isinstance(info.cls(), Pruner) and len(info.cls().stages(Budget(keep=0.9), 32)) > 1
    return info.site, info.merges, recorded_at, several, info.cls.chooses_count, bool(info.cls.min_tokens)


def find_skipped(method: str) -> set[str]:
    """Return the families of zoo.py without videos if the method needs videos: its tests skip there."""
    info = tokenprune.method_info(method)
    frames = any(find_observable(need).where is ObservedAt.FRAMES for need in info.observables)
    return {name for name, family in zoo.FAMILIES.items() if not family.video} if frames else set()


def leave_out_families(items: list[pytest.Item]) -> list[pytest.Item]:
    """Remove most variants of tests of methods on families of zoo.py from `items`, and return them.

    Each method of `FAST_METHODS` stays on every family; in a test without them, the first method by name does. In a
    test marked `each_kind`, the first method of each kind by name stays on all of `FEW_FAMILIES`. Each other method
    stays in one variant, which differs between tests, so that the method meets all families and values.
    """
    known = set(tokenprune.available_methods())
    groups: dict[str, dict[str, dict[str, list[pytest.Item]]]] = defaultdict(lambda: defaultdict(dict))
    by_kind = {item.nodeid.partition("[")[0] for item in items if item.get_closest_marker("each_kind")}
    for item in items:
        methods, families = names_in(item) & known, names_in(item) & zoo.FAMILIES.keys()
        if len(methods) == 1 and len(families) == 1:
            variants_of = groups[item.nodeid.partition("[")[0]][methods.pop()]
            variants_of.setdefault(families.pop(), []).append(item)
    removed: set[pytest.Item] = set()
    for test, group in groups.items():
        first: dict[Any, str] = {}
        for method in sorted(group, key=lambda name: (name not in FAST_METHODS, name)):
            first.setdefault(kind_of(method), method)
        everywhere = FAST_METHODS.keys() & group.keys() or {min(group)}
        for method in group.keys() - everywhere:
            variants_of = group[method]
            few = sorted(variants_of.keys() & FEW_FAMILIES.keys() - find_skipped(method)) or sorted(variants_of)
            turn = crc32(f"{test} {method}".encode())
            if test in by_kind and method in first.values():
                kept = {item for family in few for item in variants_of[family]}
            else:
                variants = variants_of[few[turn % len(few)]]
                kept = {variants[turn // len(few) % len(variants)]}
            removed |= {item for variants in variants_of.values() for item in variants} - kept
    items[:] = [item for item in items if item not in removed]
    return list(removed)


def leave_out_thorough(items: list[pytest.Item]) -> list[pytest.Item]:
    """Remove the tests marked `thorough` from `items`, and return them."""
    removed = [item for item in items if item.get_closest_marker("thorough")]
    items[:] = [item for item in items if item not in removed]
    return removed


def leave_out_values(items: list[pytest.Item]) -> list[pytest.Item]:
    """Remove variants of tests marked `few_families` from `items`, and return them: those on families outside of
    `FEW_FAMILIES` whose other parameters do not have their first values."""
    first: dict[str, dict[str, Any]] = {}
    removed = set()
    for item in items:
        if item.get_closest_marker("few_families") is None:
            continue
        families = names_in(item) & zoo.FAMILIES.keys()
        # Compare ids, because values need not be hashable. Variants share the objects of a parameter's values.
        others = {
            name: id(value)
            for name, value in item.callspec.params.items()
            if not families & {getattr(value, "name", None), value if isinstance(value, str) else None}
        }
        if others != first.setdefault(item.nodeid.partition("[")[0], others) and not families & FEW_FAMILIES.keys():
            removed.add(item)
    items[:] = [item for item in items if item not in removed]
    return list(removed)


def covering(variants: Sequence[dict[str, Any]], together: int = 2) -> list[int]:
    """Return the sorted indices of few variants that cover every combination of `together` values of different
    parameters.

    Greedy: pick the variant with the most missing combinations, the first of equal variants.
    """
    # Compare ids, because values need not be hashable. Variants share the objects of a parameter's values.
    marked = [sorted((name, id(value)) for name, value in variant.items()) for variant in variants]
    combinations_of = [set(combinations(values, together)) or {tuple(values)} for values in marked]
    missing, chosen = set().union(*combinations_of), []
    while missing:
        chosen.append(max(range(len(combinations_of)), key=lambda index: len(combinations_of[index] & missing)))
        missing -= combinations_of[chosen[-1]]
    return sorted(chosen)


def fast_of(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Return the tests of `-m fast`: among tests that pass `is_fast`, variants that cover each value of each
    parameter."""
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if is_fast(item):
            groups[item.nodeid.partition("[")[0]].append(item)
    chosen: set[pytest.Item] = set()
    for group in groups.values():
        variants = [getattr(getattr(item, "callspec", None), "params", {}) for item in group]
        chosen |= set(group) if len(group) == 1 else {group[index] for index in covering(variants, together=1)}
    return chosen


def leave_out_combinations(items: list[pytest.Item]) -> list[pytest.Item]:
    """Remove variants of tests marked `pairwise` that cover no new pair of values from `items`, and return them.

    The marker's optional `runs=` is a function of the test's parameters that returns False for variants that skip. They
    cover no pair.
    """
    groups: dict[str, list[Any]] = defaultdict(list)
    left_out: list[pytest.Item] = []
    for item in items:
        marker = item.get_closest_marker("pairwise")
        if marker is None:
            continue
        runs = marker.kwargs.get("runs")
        if runs is None or runs(**item.callspec.params):
            groups[item.nodeid.partition("[")[0]].append(item)
        else:
            left_out.append(item)
    for group in groups.values():
        covered = set(covering([item.callspec.params for item in group]))
        left_out += [item for index, item in enumerate(group) if index not in covered]
    removed = set(left_out)
    items[:] = [item for item in items if item not in removed]
    return left_out

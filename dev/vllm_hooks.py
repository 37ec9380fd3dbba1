# SPDX-License-Identifier: Apache-2.0
"""Check the sources of a vLLM, without installing it, for the parts that the plugin uses.

    python dev/vllm_hooks.py vllm-0.33.0-...whl                    # or a folder with `vllm`
    python dev/vllm_hooks.py vllm-0.33.0-...whl --write            # also write dev/vllm_hooks/0.33.0.json
    python dev/vllm_hooks.py vllm-0.33.0-...whl --against FOLDER   # also print the differences to another vLLM

The script lists missing parts and the parts with other code than the tested version. vLLM's GPU wheels have hundreds of
megabytes and need a GPU, so tests read the files of --write (tests/unit/vllm/test_hooks.py). `dev/check vllm-hooks`
downloads a wheel and checks it. A successful check does not admit a version: the plugin's tests must run on it
(`TESTED` of tokenprune/integrations/vllm/compat.py).
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import hashlib
import json
import re
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "dev" / "vllm_hooks"
REGISTRY = "vllm.model_executor.models.registry"
TABLES = ROOT / "tokenprune" / "integrations" / "vllm" / "hooks.toml"
# vLLM calls the replacement of a hook, so the replacement must accept all arguments of vLLM.
_PROCESSOR = "vllm.multimodal.processing:BaseMultiModalProcessor"
_MODEL = "vllm.model_executor.models.interfaces"
_OURS = "tokenprune.integrations.vllm"
_IN_LLM = "tokenprune.integrations.vllm.in_llm"
REPLACED = {
    **{
        f"{_PROCESSOR}.{name}": f"{_OURS}.frontend.processor:ReducingProcessor.{name}"
        for name in (
            "_apply_hf_processor_main", "_get_prompt_updates", "_get_mm_hashes",
            "_get_cache_missing_processor_kwargs",
            "_maybe_apply_prompt_updates", "get_dummy_mm_inputs", "apply",
        )
    },
    "vllm.multimodal.parse:ImageProcessorItems.get_item_for_hash": (
        f"{_OURS}.frontend.pixels:SmallerImages.get_item_for_hash"
    ),
    f"{_MODEL}:SupportsMultiModal.embed_multimodal": f"{_OURS}.worker.models:ReducingModel.embed_multimodal",
    f"{_MODEL}:SupportsMRoPE.get_mrope_input_positions": (
        f"{_OURS}.worker.models:ReducingMropeModel.get_mrope_input_positions"
    ),
    **{
        f"vllm.multimodal.cache.lru:LruKeyReplicatedSenderCache.{name}": (
            f"{_OURS}.frontend.sender_cache:SenderCache.{name}"
        )
        for name in ("invalidate", "clear_cache")
    },
    "vllm.utils.cache:LRUCache._on_remove": f"{_OURS}.frontend.sender_cache:EngineAccount._on_remove",
    "vllm.v1.core.sched.scheduler:Scheduler._try_schedule_encoder_inputs": (
        f"{_IN_LLM}.scheduler:WholeImages._try_schedule_encoder_inputs"
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks": (
        f"{_IN_LLM}.scheduler:WholeImages._shorten_hits"
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": f"{_IN_LLM}.kv_cache:CutBlockTracker._allocate_held",
    **{
        f"vllm.v1.kv_cache_interface:FullAttentionSpec.{name}": f"{_IN_LLM}.kv_cache:CutSpec.{name}"
        for name in ("merge", "is_uniform_with_collection")
    },
    **{
        f"vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.{name}": (
            f"{_IN_LLM}.kv_cache:CutManager.{name}"
        )
        for name in (
            "get_num_blocks_to_allocate", "allocate_new_blocks", "pop_blocks_for_free", "find_longest_cache_hit",
        )
    },
}  # fmt: skip


@dataclass
class Found:
    """A definition and its module."""

    node: ast.AST
    module: str


class Sources:
    """The Python files of a wheel, or of a folder with packages."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._modules: dict[str, ast.Module | None] = {}

    @cached_property
    def _zip(self) -> zipfile.ZipFile | None:
        return None if self.path.is_dir() else zipfile.ZipFile(self.path)

    @property
    def version(self) -> str:
        """Version of vLLM, from the metadata folder beside it."""
        names = [path.name for path in self.path.iterdir()] if self._zip is None else self._zip.namelist()
        versions = [match[1] for name in names if (match := re.match(r"vllm(?:_cpu)?-([^/-]+)\.dist-info", name))]
        if not versions:
            raise SystemExit(f"{self.path} holds no vLLM")
        return versions[0].partition("+")[0]

    def module(self, name: str) -> ast.Module | None:
        """Return a module's syntax tree, or None if the module does not exist."""
        if name not in self._modules:
            path = name.replace(".", "/")
            texts = (self._text(f"{path}/__init__.py"), self._text(f"{path}.py"))
            text = next((text_of_file for text_of_file in texts if text_of_file is not None), None)
            self._modules[name] = None if text is None else ast.parse(text)
        return self._modules[name]

    def is_package(self, name: str) -> bool:
        return self._text(f"{name.replace('.', '/')}/__init__.py") is not None

    def _text(self, path: str) -> str | None:
        try:
            return (self.path / path).read_text() if self._zip is None else self._zip.read(path).decode()
        except (FileNotFoundError, KeyError):
            return None

    def find(self, where: str) -> Found | None:
        """Return the definition of `package.module:Class.method`, imported or inherited ones too."""
        module, _, path = where.partition(":")
        names = path.split(".")
        definition = self._named(module, names[0])
        for name in names[1:]:
            definition = None if definition is None else self._member(definition, name)
        return definition

    def _named(self, module: str, name: str) -> Found | None:
        """Return the definition of a name. A name of another package is found where it is imported."""
        tree = self.module(module)
        for node in () if tree is None else statements(tree.body):
            if name in defines(node):
                return Found(node, module)
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        origin = self._origin(module, node)
                        if origin.partition(".")[0] != module.partition(".")[0]:
                            return Found(node, module)
                        return self._named(origin, alias.name)
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module
        parts = module.split(".")
        package = parts[: len(parts) - node.level + self.is_package(module)]
        return ".".join([*package, *([node.module] if node.module else [])])

    def _classes(self, definition: Found) -> Iterator[Found]:
        """Yield a class and its base classes, in order, as far as their code is in these files."""
        yield definition
        for base in definition.node.bases:
            base = base.value if isinstance(base, ast.Subscript) else base
            above = self._named(definition.module, base.id) if isinstance(base, ast.Name) else None
            if above is not None and isinstance(above.node, ast.ClassDef):
                yield from self._classes(above)

    def _member(self, definition: Found, name: str) -> Found | None:
        if not isinstance(definition.node, ast.ClassDef):
            return None
        for cls in self._classes(definition):
            for node in statements(cls.node.body):
                if name in defines(node):
                    return Found(node, cls.module)
        return None

    def parameters(self, definition: Found) -> list[str] | None:
        """Return the parameter names of a function or class, with stars.

        Returns None for other definitions, and for a class whose constructor is inherited from another package.
        """
        if isinstance(definition.node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = definition.node.args
            names = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]]
            stars = [
                star + argument.arg
                for star, argument in (("*", arguments.vararg), ("**", arguments.kwarg))
                if argument is not None
            ]
            return names + stars
        if not isinstance(definition.node, ast.ClassDef):
            return None
        init = self._member(definition, "__init__")
        if init is not None:
            return self.parameters(init)[1:]
        fields = [
            node.target.id
            for cls in reversed(list(self._classes(definition)))
            for node in cls.node.body
            if isinstance(node, ast.AnnAssign) and "ClassVar" not in ast.unparse(node.annotation)
        ]
        return list(dict.fromkeys(fields)) or (None if definition.node.bases else [])

    def code(self, definition: Found) -> str:
        """Return the code of a definition without docstrings, comments and layout.

        For a class: its bases, fields, constructor, and method names. Methods used by the plugin have separate hooks.
        """
        node, methods = copy.deepcopy(definition.node), list[str]()
        if isinstance(node, ast.ClassDef):
            functions = [child for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]
            others = [child for child in functions if child.name not in ("__init__", "__post_init__", "__new__")]
            node.body = [child for child in node.body if child not in others]
            methods = [f"# method {child.name}" for child in others]
        for inner in ast.walk(node):
            if isinstance(body := getattr(inner, "body", None), list):
                inner.body = [child for child in body if not _is_text(child)] or [ast.Pass()]
        return "\n".join([ast.unparse(node), *methods])

    def architectures(self) -> list[str]:
        """Names of all models in vLLM's registry."""
        tables = [node.value for node in self.module(REGISTRY).body if isinstance(node, ast.Assign)]
        return sorted(
            {
                key.value
                for table in tables
                if isinstance(table, ast.Dict)
                for key, value in zip(table.keys, table.values, strict=True)
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple)
            }
        )


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body, also those inside `if` and `try`."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody") if isinstance(node, ast.If | ast.Try) else ():
            yield from statements(getattr(node, part, []))


def defines(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def hooks() -> dict[str, str]:
    """Return all hooks of the plugin, with the parameters that it passes or accepts."""
    return {where: names for table in tomllib.loads(TABLES.read_text()).values() for where, names in table.items()}


def read(path: Path, required: dict[str, str]) -> dict[str, Any]:
    """Return the version, the parameters and the digest of the code of each hook, and the model names of a vLLM."""
    sources = Sources(path)
    definitions = {where: definition for where in sorted(required) if (definition := sources.find(where)) is not None}
    return {
        "vllm": sources.version,
        "hooks": {where: sources.parameters(definition) for where, definition in definitions.items()},
        "code": {
            where: hashlib.sha256(sources.code(definition).encode()).hexdigest()[:12]
            for where, definition in definitions.items()
        },
        "architectures": sources.architectures(),
    }


def changed(has: dict[str, Any], base: dict[str, Any]) -> list[str]:
    """Return the hooks whose code differs between two versions or that one version lacks."""
    return sorted(
        where for where in has["code"].keys() | base["code"].keys() if has["code"].get(where) != base["code"].get(where)
    )


def differences(path: Path, base: Path, hooks: list[str]) -> Iterator[str]:
    """Yield a unified diff of each hook's code, from `base` to `place`."""
    sides = [Sources(folder) for folder in (base, path)]
    for where in hooks:
        definitions = [(side, side.find(where)) for side in sides]
        old, new = (
            [] if definition is None else side.code(definition).splitlines() for side, definition in definitions
        )
        yield "\n".join(difflib.unified_diff(old, new, where, where, lineterm="", n=3))


def lacks(has: dict[str, Any], required: dict[str, str], architectures: list[str]) -> list[str]:
    """Return a list of the parts that a vLLM lacks."""
    problems = [f"no {where}" for where in required if where not in has["hooks"]]
    for where, names in required.items():
        taken = [name.lstrip("*") for name in has["hooks"].get(where) or []]
        if where in has["hooks"] and (absent := [name for name in names.split() if name not in taken]):
            problems.append(f"{where} takes no {', '.join(absent)}")
    problems += [f"no model {name}" for name in architectures if name not in has["architectures"]]
    return problems + list(_too_narrow(has))


def _too_narrow(has: dict[str, Any]) -> Iterator[str]:
    """Yield the replacements that do not accept all parameters of vLLM."""
    mine = Sources(ROOT)
    for where, replacement in REPLACED.items():
        takes = mine.parameters(mine.find(replacement))
        more = [name for name in has["hooks"].get(where) or () if name not in takes]
        if more and [name.count("*") for name in takes if "*" in name] != [1, 2]:
            yield f"{where} takes {', '.join(more)}, and {replacement} does not"


def written(has: dict[str, Any]) -> str:
    """Return JSON with a line for each hook, so that a change can be read."""
    tables = (
        f'"{key}": {{\n'
        + ",\n".join(f"  {json.dumps(where)}: {json.dumps(value)}" for where, value in has[key].items())
        for key in ("hooks", "code")
    )
    names = ",\n".join(f"  {json.dumps(name)}" for name in has["architectures"])
    return f'{{"vllm": "{has["vllm"]}",\n' + "\n},\n".join(tables) + f'\n}},\n"architectures": [\n{names}\n]}}\n'


def main(argv: list[str] | None = None) -> int:
    from tokenprune.integrations.vllm.compat import TESTED
    from tokenprune.models.families import SERVED

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("place", type=Path, help="a wheel of vLLM, or the folder that it is installed in")
    parser.add_argument("--write", action="store_true", help="write the file that the tests read")
    parser.add_argument("--against", type=Path, help="a wheel or folder of another vLLM: print the differences to it")
    args = parser.parse_args(argv)
    required = hooks()
    has = read(args.place, required)
    problems = lacks(has, required, list(SERVED))
    print("\n".join([f"vLLM {has['vllm']}: {len(required)} hooks, {len(problems)} problems", *problems]))
    if args.write:
        KEPT.mkdir(exist_ok=True)
        (KEPT / f"{has['vllm']}.json").write_text(written(has))
    tested = KEPT / f"{TESTED}.json"
    base = json.loads(tested.read_text()) if args.against is None else read(args.against, required)
    names = changed(has, base)
    print("\n".join([f"{len(names)} hooks with other code than vLLM {base['vllm']}", *names]))
    if args.against is not None:
        print("\n\n".join(differences(args.place, args.against, names)))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

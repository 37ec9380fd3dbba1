# SPDX-License-Identifier: Apache-2.0
"""Create packages for new methods and session policies (`tokenprune new-method`), and folders for new families."""

from __future__ import annotations

import keyword
import re
import tempfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from string import Template

from tokenprune.errors import OptionError, RegistrationError
from tokenprune.integrations.hf.sessions.policies import registry as policies
from tokenprune.methods.registry import ENTRY_POINT_GROUP, available_methods, method_class
from tokenprune.selection.method import Site

_TEMPLATES = Path(__file__).parent / "templates/new_method"
_NAME = re.compile(r"[a-z](?:[a-z0-9_]*[a-z0-9])?")
# Reserved names: words in benchmark tables, and the suffix of the package tokenprune-vlm.
RESERVED = ("unpatched", "escalate", "vlm")
SESSION = "session"  # value of --site for a session policy
# Non-default options for the test of a new method.
_OPTIONS = {
    Site.PRE_ENCODER: '{"flat": 0.5}',
    Site.IN_ENCODER: '{"first": 1}',
    Site.PRE_LLM: '{"order": 1}',
    Site.ATTENTION: '{"frames": 1}',
    Site.IN_LLM: '{"layer": 3, "heads": "mean"}',
    Site.DECODE: '{"every": 1}',
}


def spell_site(site: Site) -> str:
    """Return a site as written on the command line, such as "pre-llm"."""
    return site.lower().replace("_", "-")


def new_method(name: str, site: str = "pre-llm", to: str | Path | None = None) -> Path:
    """Create a package with a working method, its test and its README, and return its folder.

    If an error is raised, no file remains.

    Args:
        name: Name of the method, a lowercase identifier.
        site: Site of the method, such as "pre-llm" or "PRE_LLM", or "session" for a session policy.
        to: Folder to create. Default: tokenprune-NAME in the current folder.

    Raises:
        RegistrationError: If the name is invalid or taken.
        OptionError: If the site is unknown, or the folder exists or cannot be written.

    Examples:
        >>> folder = new_method("my_method", site="in-llm", to="example")
        >>> sorted(path.name for path in folder.iterdir())
        ['README.md', 'pyproject.toml', 'tests', 'tokenprune_my_method.py']
    """
    site_or_none = _read_site(site)
    _check_name(name, site_or_none)
    package = f"tokenprune-{name.replace('_', '-')}"
    _check_package(package, name)
    return write_folder(Path(package if to is None else to), _build_files(name, package, site_or_none))


def write_folder(folder: Path, files: dict[str, str]) -> Path:
    """Create a folder with files, and return it. If an error is raised, no file remains.

    Args:
        folder: Folder to create.
        files: Content of each file by its relative path.

    Raises:
        OptionError: If the folder exists, or cannot be written.
    """
    if folder.exists() or folder.is_symlink():
        raise OptionError(f"{folder} already exists. Pass a new folder as --to.")
    if not folder.parent.is_dir():
        raise OptionError(f"cannot write {folder}: the folder {folder.parent} does not exist.")
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as draft:
            package = Path(draft) / "package"
            for path, text in files.items():
                (package / path).parent.mkdir(parents=True, exist_ok=True)
                (package / path).write_text(text, encoding="utf-8")
            package.rename(folder)
    except OSError as error:
        raise OptionError(f"cannot write {folder}: {error.strerror or error}") from error
    return folder


def _read_site(site: str) -> Site | None:
    """Return the site for a value of --site, or None for a session policy."""
    try:
        return None if site.lower() == SESSION else Site(site.upper().replace("-", "_"))
    except ValueError:
        raise OptionError(
            f"--site {site!r} is unknown. Use one of {', '.join([*map(spell_site, Site), SESSION])}."
        ) from None


def _check_name(name: str, site: Site | None) -> None:
    if not _NAME.fullmatch(name):
        raise RegistrationError(
            f"{name!r} is not a valid name. Use lowercase letters, digits and underscores, such as my_method."
        )
    if keyword.iskeyword(name):
        raise RegistrationError(f"{name!r} is a Python keyword. Choose another name, such as {name}_method.")
    if site is None and name in policies.available_policies():
        raise RegistrationError(f"{name!r} is taken by {type(policies.policy(name)).__module__}. Choose another name.")
    if site is not None and name in available_methods():
        raise RegistrationError(f"{name!r} is taken by {method_class(name).__module__}. Choose another name.")
    if name in RESERVED:
        raise RegistrationError(f"{name!r} is a reserved name. Choose another name.")


def _check_package(package: str, name: str) -> None:
    try:
        installed = distribution(package)
    except PackageNotFoundError:
        return
    raise RegistrationError(
        f"The package {package} {installed.version} is installed, so {name!r} would conflict. Choose another name."
    )


def _build_files(name: str, package: str, site: Site | None) -> dict[str, str]:
    """Return the content of each file of the package by its relative path. site: None for a session policy."""
    prefix = "session_" if site is None else ""
    templates = {
        "pyproject.toml": "pyproject.toml",
        "README.md": f"{prefix}README.md",
        f"tokenprune_{name}.py": f"{SESSION if site is None else site.lower()}.py",
        f"tests/test_{name}.py": f"{prefix}test.py",
    }
    texts = {
        path: (_TEMPLATES / f"{template}.template").read_text(encoding="utf-8") for path, template in templates.items()
    }
    values = {
        "name": name,
        "cls": _format_class_name(name, "\n".join(texts.values())),
        "module": f"tokenprune_{name}",
        "distribution": package,
    } | (_POLICY_VALUES if site is None else _build_method_values(site))
    return {path: Template(text).substitute(values) for path, text in texts.items()}


_POLICY_VALUES = {
    "group": policies.ENTRY_POINT_GROUP,
    "what": "a session policy",
    "looked": "a policy",
    "options": '{"order": 1}',
}


def _build_method_values(site: Site) -> dict[str, str]:
    return {
        "group": ENTRY_POINT_GROUP,
        "what": "a method to prune visual tokens",
        "looked": "a method",
        "words": site.description,
        "keep": "1.0" if site is Site.ATTENTION else "0.25",
        "with_processor": ", processor=processor" if site is Site.PRE_ENCODER else "",
        "options": _OPTIONS[site],
    }


def _format_class_name(name: str, texts: str) -> str:
    """Return the class name: MyMethod for my_method. A name that the templates or Python use gets the suffix Method."""
    class_name = "".join(part.capitalize() for part in name.split("_"))
    is_taken = keyword.iskeyword(class_name) or re.search(rf"\b{class_name}\b", texts)
    return f"{class_name}Method" if is_taken else class_name

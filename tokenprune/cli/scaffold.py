# SPDX-License-Identifier: Apache-2.0
"""Write a package with one method, or policy of sessions, to start from (`tokenprune new-method`), or a family."""

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
# Not registered, and yet taken: words of the benchmark's tables, and what makes the name of the library's own package.
RESERVED = ("unpatched", "escalate", "vlm")
SESSION = "session"  # in place of a site: a policy of sessions
# The options under which the test of a new method tries it, beside the default ones.
_OPTIONS = {
    Site.PRE_ENCODER: '{"flat": 0.5}',
    Site.IN_ENCODER: '{"first": 1}',
    Site.PRE_LLM: '{"order": 1}',
    Site.ATTENTION: '{"frames": 1}',
    Site.IN_LLM: '{"layer": 3, "heads": "mean"}',
    Site.DECODE: '{"every": 1}',
}


def spell_site(site: Site) -> str:
    """Return a site as the command line writes it: "pre-llm"."""
    return site.lower().replace("_", "-")


def new_method(name: str, site: str = "pre-llm", to: str | Path | None = None) -> Path:
    """Write a package with one method, its test and its page, which passes its test as written; return its folder.

    name: of the method, a lower-case identifier. site: where it acts, as in "pre-llm" or "PRE_LLM"; "session" for a
    policy of sessions. to: the folder to make; default: tokenprune-NAME in the current one.
    Raises RegistrationError for a name that is taken or none, and OptionError for a site that there is not, a folder
    that exists, or one that cannot be written; nothing is left behind then.
    """
    where = _site(site)
    _check_name(name, where)
    package = f"tokenprune-{name.replace('_', '-')}"
    _check_package(package, name)
    return write_folder(Path(package if to is None else to), _files(name, package, where))


def write_folder(folder: Path, files: dict[str, str]) -> Path:
    """Write a new folder with the texts of files, by their paths in it, and return it. Raises OptionError for one that
    exists, or that cannot be written; nothing is left behind then."""
    if folder.exists() or folder.is_symlink():
        raise OptionError(f"{folder} exists: name a folder that does not, with --to")
    if not folder.parent.is_dir():
        raise OptionError(f"there is no folder {folder.parent} to write {folder.name} into: make it, or name another")
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as draft:
            made = Path(draft) / "package"
            for path, text in files.items():
                (made / path).parent.mkdir(parents=True, exist_ok=True)
                (made / path).write_text(text, encoding="utf-8")
            made.rename(folder)
    except OSError as error:
        raise OptionError(f"cannot write {folder}: {error.strerror or error}") from error
    return folder


def _site(site: str) -> Site | None:
    """Return the site of a spelling, None for a policy of sessions."""
    try:
        return None if site.lower() == SESSION else Site(site.upper().replace("-", "_"))
    except ValueError:
        raise OptionError(f"--site {site!r} is none of {', '.join([*map(spell_site, Site), SESSION])}") from None


def _check_name(name: str, site: Site | None) -> None:
    if not _NAME.fullmatch(name):
        raise RegistrationError(
            f"{name!r} is no name of a method: write small letters a to z, digits and underscores between them, as in "
            "my_method"
        )
    if keyword.iskeyword(name):
        raise RegistrationError(f"{name!r} is a word of Python's own: choose another name, such as {name}_method")
    if site is None and name in policies.available_policies():
        raise RegistrationError(f"{name!r} is taken by {type(policies.policy(name)).__module__}: choose another name")
    if site is not None and name in available_methods():
        raise RegistrationError(f"{name!r} is taken by {method_class(name).__module__}: choose another name")
    if name in RESERVED:
        raise RegistrationError(f"{name!r} means something else in tokenprune: choose another name")


def _check_package(package: str, name: str) -> None:
    try:
        found = distribution(package)
    except PackageNotFoundError:
        return
    raise RegistrationError(
        f"a package {package} {found.version} is installed, so {name!r} would clash with it: choose another name"
    )


def _files(name: str, package: str, site: Site | None) -> dict[str, str]:
    """Return the text of each file of the package, by its path in it. site: None for a policy of sessions."""
    prefix = "session_" if site is None else ""
    templates = {
        "pyproject.toml": "pyproject.toml",
        "README.md": f"{prefix}README.md",
        f"tokenprune_{name}.py": f"{SESSION if site is None else site.lower()}.py",
        f"tests/test_{name}.py": f"{prefix}test.py",
    }
    texts = {path: (_TEMPLATES / f"{one}.template").read_text(encoding="utf-8") for path, one in templates.items()}
    values = {
        "name": name,
        "cls": _class_name(name, "\n".join(texts.values())),
        "module": f"tokenprune_{name}",
        "distribution": package,
    } | (_OF_POLICIES if site is None else _of_methods(site))
    return {path: Template(text).substitute(values) for path, text in texts.items()}


_OF_POLICIES = {
    "group": policies.ENTRY_POINT_GROUP,
    "what": "a policy of sessions",
    "looked": "a policy",
    "options": '{"order": 1}',
}


def _of_methods(site: Site) -> dict[str, str]:
    return {
        "group": ENTRY_POINT_GROUP,
        "what": "a method of pruning visual tokens",
        "looked": "a method",
        "words": site.description,
        "keep": "1.0" if site is Site.ATTENTION else "0.25",
        "with_processor": ", processor=processor" if site is Site.PRE_ENCODER else "",
        "options": _OPTIONS[site],
    }


def _class_name(name: str, texts: str) -> str:
    """Return the name of the class: MyMethod of my_method. One that the templates use, or Python, gets a word more."""
    made = "".join(part.capitalize() for part in name.split("_"))
    return f"{made}Method" if keyword.iskeyword(made) or re.search(rf"\b{made}\b", texts) else made

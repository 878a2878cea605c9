"""The code that a user's own layers and functions are made of, as a hash: where it changes, what it made is stale.

It is that of the modules which they are defined in, and of those which these import, as far as they are no installed
packages. No module is imported for it.
"""

from __future__ import annotations

import ast
import hashlib
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from types import FunctionType
from typing import Any

from converters.carried import is_carried

# What these do depends on their versions.
_VERSIONED = sys.stdlib_module_names | {"keras", "tensorflow", "tf_keras", "numpy", "converters", "zoo_keras"}
_INSTALLED = tuple(
    Path(folder).resolve()
    for folder in {
        *(sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        site.getusersitepackages(),
    }
)


@dataclass(frozen=True, kw_only=True)
class _Module:
    """``file`` is absent for what is built in. ``package`` is what relative imports start from."""

    file: Path | None
    package: str


def code_sha256(modules: Iterable[str]) -> str:
    """Covers what is in the files of ``modules`` and their user's imports; empty where there are no modules.

    Raises :class:`ImportError` or :class:`ValueError` for one of ``modules`` that cannot be found.
    """
    pending = {name: _required(name) for name in modules}
    found: dict[str, str] = {}
    while pending:
        name, module = pending.popitem()
        data = module.file.read_bytes() if module.file is not None and module.file.is_file() else b""
        found[name] = hashlib.sha256(data).hexdigest()
        if module.file is None or module.file.suffix != ".py" or _is_installed(module.file):
            continue
        for imported in _imports(data, module.package):
            other = None if imported in found or imported.partition(".")[0] in _VERSIONED else _found(imported)
            if other is not None and other.file is not None and not _is_installed(other.file):
                pending[imported] = other
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest() if found else ""


def modules_of(layer: Any) -> set[str]:
    """The modules of the user's that a Keras layer or operation depends on: by its class, its parts, its functions."""
    if is_carried(layer):
        return modules_of(layer._old())
    names = set()
    for part in layer._flatten_layers() if hasattr(layer, "_flatten_layers") else (layer,):
        functions = [value for value in vars(part).values() if isinstance(value, FunctionType)]
        names |= {each.__module__ for each in (*type(part).__mro__, *functions)}
    return {name for name in names if name and name.partition(".")[0] not in _VERSIONED}


def _required(name: str) -> _Module:
    loaded = sys.modules.get(name)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        return _Module(file=None if file is None else Path(file), package=getattr(loaded, "__package__", "") or "")
    module = _found(name)
    if module is None:
        # Not in a folder of the path, but whatever finds modules else may know it.
        spec = find_spec(name)
        if spec is None:
            raise ModuleNotFoundError(f"no module named {name!r}", name=name)
        module = _Module(
            file=Path(spec.origin) if spec.has_location and spec.origin else None, package=spec.parent or ""
        )
    return module


def _found(name: str) -> _Module | None:
    """The module of that name in a folder of the path; unlike ``find_spec`` this imports no package on the way."""
    spec = None
    folders = None
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:length]), folders)
        if spec is None:
            return None
        folders = spec.submodule_search_locations or []
    return None if spec is None else _of_spec(spec)


def _of_spec(spec: ModuleSpec) -> _Module:
    return _Module(file=Path(spec.origin) if spec.has_location and spec.origin else None, package=spec.parent or "")


def _imports(source: bytes, package: str) -> Iterator[str]:
    """The names of all that a module may import; some may be names in a module and no modules."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            try:
                base = resolve_name("." * node.level + (node.module or ""), package)
            except ImportError:
                continue
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _is_installed(file: Path) -> bool:
    return any(file.resolve().is_relative_to(folder) for folder in _INSTALLED)

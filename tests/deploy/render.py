"""What `kubectl kustomize` gives, for as much of kustomize as deploy/kubernetes uses.

That is: resources, components, and patches in the form of RFC 6902 for one object by kind and name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonpatch
import yaml

KNOWN = {"apiVersion", "kind", "resources", "components", "patches"}


def render(folder: Path) -> list[dict[str, Any]]:
    """The objects of a kustomization. Raises KeyError for what this does not know."""
    rules = yaml.safe_load((folder / "kustomization.yaml").read_text())
    if unknown := rules.keys() - KNOWN:
        raise KeyError(f"{folder}: {sorted(unknown)}")
    objects: list[dict[str, Any]] = []
    for name in rules.get("resources", []):
        path = folder / name
        objects += render(path) if path.is_dir() else _documents(path)
    for name in rules.get("components", []):
        component = yaml.safe_load((folder / name / "kustomization.yaml").read_text())
        if unknown := component.keys() - {"apiVersion", "kind", "patches"}:
            raise KeyError(f"{name}: {sorted(unknown)}")
        objects = _patched(objects, folder / name, component["patches"])
    return _patched(objects, folder, rules.get("patches", []))


def find(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    """The one object of that kind and name."""
    (found,) = [each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name]
    return found


def _documents(path: Path) -> list[dict[str, Any]]:
    """The objects of a file. What an alias names twice becomes two things, which patches can tell apart."""
    return [json.loads(json.dumps(each)) for each in yaml.safe_load_all(path.read_text())]


def _patched(objects: list[dict[str, Any]], folder: Path, patches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for patch in patches:
        target = find(objects, **patch["target"])
        changes = yaml.safe_load((folder / patch["path"]).read_text())
        changed = jsonpatch.JsonPatch(changes).apply(target)
        objects = [changed if each is target else each for each in objects]
    return objects

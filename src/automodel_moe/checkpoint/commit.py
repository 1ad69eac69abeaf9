"""Put a finished checkpoint in the place of an earlier one: a kill at any moment leaves the weights of
one of the two, whole."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from .layout import index_bytes


def weight_files(folder: Path, variant: str | None) -> list[Path]:
    """The weight files and the index of a checkpoint in transformers' names."""
    dot = "" if variant is None else f".{re.escape(variant)}"
    mine = re.compile(rf"model{dot}(-\d{{5}}-of-\d{{5}})?\.safetensors|model\.safetensors\.index{dot}\.json")
    return [path for path in folder.glob("model*") if mine.fullmatch(path.name)] if folder.is_dir() else []


def commit(aside: Path, folder: Path, variant: str | None) -> None:
    """
    Move the files of `aside`, a folder within `folder`, into `folder`, over an earlier checkpoint if there is one.

    transformers reads `model.safetensors`, and where there is none what the index names. At every moment these name
    either the earlier checkpoint or the new one, whole: weight files that the earlier index doesn't name are put in
    place before the index. Where names collide, the index first names the new files where they are (`aside` within
    `folder`), then the files get their names as hard links, then the index is replaced by the final one.
    """
    new = {path.name: path for path in sorted(aside.iterdir())}
    old = {path.name for path in weight_files(folder, variant)}
    weights = {path.name for path in weight_files(aside, variant)}
    indices = [name for name in weights if name.endswith(".json")]
    shards = sorted(weights - set(indices))
    for name, path in new.items():
        if path.is_file():
            sync(path)
        if name not in weights:
            _replace(path, folder / name)
    if not indices:
        # One file, which comes before an index that may be there.
        for name in shards:
            new[name].replace(folder / name)
    else:
        (index,) = indices
        final = json.loads(new[index].read_text(encoding="utf-8"))
        if old.intersection(shards):
            write_synced(aside / ".index", index_bytes(_moved(final, aside.name)))
            (aside / ".index").replace(folder / index)
            sync(folder)
            _drop_single(folder, old - weights)
            for name in shards:
                _link(new[name], aside / ".link")
                (aside / ".link").replace(folder / name)
        else:
            for name in shards:
                new[name].replace(folder / name)
        sync(folder)
        new[index].replace(folder / index)
    sync(folder)
    # The single file last hides the index, so it goes first of what is left of the earlier checkpoint.
    for name in sorted(old - weights, key=lambda name: ("-of-" in name, name)):
        (folder / name).unlink(missing_ok=True)
    drop_leftovers(folder)
    sync(folder)


def write_synced(path: Path, data: bytes) -> None:
    """Write a small file and flush it to disk."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def drop_leftovers(folder: Path) -> None:
    """Remove what killed saves left aside, unless the index reads from there."""
    indices = [
        path.read_text(encoding="utf-8") for path in folder.glob(SAFE_WEIGHTS_INDEX_NAME.replace(".json", "*.json"))
    ]
    for path in folder.glob(".saving-*"):
        if not any(f'"{path.name}/' in text for text in indices):
            shutil.rmtree(path, ignore_errors=True)


def _moved(index: dict[str, Any], where: str) -> dict[str, Any]:
    return index | {"weight_map": {key: f"{where}/{name}" for key, name in index["weight_map"].items()}}


def _drop_single(folder: Path, names: set[str]) -> None:
    for name in names:
        if name.endswith(".safetensors") and "-of-" not in name:
            (folder / name).unlink()


def _replace(path: Path, place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        # E.g. a folder with custom code: a rename replaces files alone.
        shutil.copytree(path, place, dirs_exist_ok=True)
    else:
        path.replace(place)


def _link(source: Path, name: Path) -> None:
    try:
        os.link(source, name)
    except OSError:
        # A file system without hard links.
        shutil.copyfile(source, name)
        sync(name)


def sync(path: Path) -> None:
    """Flush a file, or a folder's names, to disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)

"""What tells a model's weights from others, wherever they lie."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import Final

SAMPLE_BYTES: Final = 65536
WEIGHTS: Final = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


def weights_revision(model_path: str, revision: str | None, download_dir: str | None) -> str:
    """Return what tells these weights from others, wherever they lie.

    Of files it is a digest over their names, sizes and samples of their bytes: a checkpoint that was put in the place
    of another one is another. Of a repository it is the commit of its files here, else its name and revision as told.
    """
    path = Path(model_path)
    if path.exists():
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        digest = hashlib.sha256()
        for file in files:
            if file.suffix not in WEIGHTS and file.name != "config.json":
                continue
            size = file.stat().st_size
            digest.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as opened:
                for start in sorted({0, max(0, size // 2), max(0, size - SAMPLE_BYTES)}):
                    opened.seek(start)
                    digest.update(opened.read(SAMPLE_BYTES))
        return digest.hexdigest()[:16]
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  of the engine

    with contextlib.suppress(ValueError):  # no name of a repository
        found = try_to_load_from_cache(model_path, "config.json", cache_dir=download_dir, revision=revision)
        if isinstance(found, str):
            return Path(found).parent.name
    return hashlib.sha256(f"{model_path}@{revision or ''}".encode()).hexdigest()[:16]

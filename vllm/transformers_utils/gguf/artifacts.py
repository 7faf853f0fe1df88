# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""A GGUF file as the local model directory that vLLM expects.

vLLM looks for a configuration, a tokenizer and generation defaults in many places
and processes. Instead of teaching each of them GGUF, the header is turned once into
a directory with the usual Hugging Face files and `gguf.json`, which names the file.
"""

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from vllm._version import __version__
from vllm.transformers_utils.gguf.errors import GGUFError
from vllm.transformers_utils.gguf.glm_dsa import GlmDsaConfig, hf_config
from vllm.transformers_utils.gguf.plan import LoadPlan, make_plan
from vllm.transformers_utils.gguf.reader import GGUFFile, open_gguf
from vllm.transformers_utils.gguf.tokenizer import sampling_defaults, tokenizer_files

POINTER = "gguf.json"
# Raise when the contents of the directory change for the same GGUF file.
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """The model directory of a GGUF file and the configuration found in it."""

    directory: Path
    config: GlmDsaConfig


def prepare_model(
    path: str | Path, cache: str | Path, *, own_tokenizer: bool = False
) -> PreparedModel:
    """Check the GGUF file at `path` and write its model directory under `cache`.

    An existing directory of the same file (by path, size and time) and the same
    version of this package is reused. Any
    shard of a split file may be named. With `own_tokenizer` the user gives another
    tokenizer, so that one in the file that cannot be rebuilt is left out. Raises
    GGUFError for a file that cannot be served or a cache that cannot be written.
    """
    with open_gguf(path) as file:
        config = make_plan(file).config
        contents = hf_config(config)
        fingerprint = _fingerprint(file, contents)
        suffix = "-own-tokenizer" if own_tokenizer else ""
        # Enough of the name to be recognized, in characters that any system takes.
        stem = file.paths[0].stem[:64].encode("utf-8", "replace").decode()
        name = f"{stem}-{fingerprint}{suffix}"
        directory = Path(cache) / "gguf" / name
        if not (directory / POINTER).is_file():
            try:
                files = _tokenizer_files(file, config, own_tokenizer)
            except GGUFError as error:
                raise GGUFError(f"{file.paths[0]}: {error}") from error
            files["config.json"] = _json(contents)
            # Written last: its presence tells that the directory is complete.
            files[POINTER] = json.dumps({"path": str(file.paths[0].absolute())})
            _write_directory(directory, files)
    return PreparedModel(directory, config)


def _tokenizer_files(
    file: GGUFFile, config: GlmDsaConfig, own_tokenizer: bool
) -> dict[str, str]:
    try:
        return tokenizer_files(file.metadata)
    except GGUFError:
        if not own_tokenizer:
            raise
    generation = {
        "eos_token_id": list(config.eos_token_ids),
        **sampling_defaults(file.metadata),
    }
    return {"generation_config.json": _json(generation)}


def gguf_path(directory: str | Path) -> Path | None:
    """The GGUF file that a model directory was made from, None if it was not."""
    pointer = Path(directory) / POINTER
    if not pointer.is_file():
        return None
    return Path(json.loads(pointer.read_text(encoding="utf-8"))["path"])


def load_plan(directory: str | Path) -> LoadPlan:
    """The load plan of the GGUF file that `directory` was made from.

    Raises GGUFError if the directory was not made from one, or the file is gone.
    """
    path = gguf_path(directory)
    if path is None:
        raise GGUFError(
            f"{directory} has no {POINTER}, so that it was not made from a GGUF file; "
            "give the .gguf file itself as the model"
        )
    with open_gguf(path) as file:
        return make_plan(file)


def _fingerprint(file: GGUFFile, contents: dict[str, object]) -> str:
    made_by = f"{_FORMAT}\n{__version__}\n{_json(contents)}"
    digest = hashlib.sha256(made_by.encode())
    for path in file.paths:
        status = path.stat()
        identity = f"{path.absolute()}\n{status.st_size}\n{status.st_mtime_ns}\n"
        digest.update(identity.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def _json(value: object) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _write_directory(directory: Path, files: dict[str, str]) -> None:
    """Write all files at once: another process sees the directory whole or not."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=".new-", dir=directory.parent))
    except OSError as error:
        raise GGUFError(
            f"cannot write the tokenizer and configuration of the GGUF file to "
            f"{directory.parent}: {error.strerror}; set VLLM_CACHE_ROOT to a directory "
            "that can be written"
        ) from error
    try:
        for name, text in files.items():
            (staging / name).write_text(text, encoding="utf-8")
        if directory.exists() and not (directory / POINTER).is_file():
            shutil.rmtree(directory)
        staging.chmod(0o755)
        os.rename(staging, directory)
    except OSError as error:
        # Another process may have won the race with the same contents.
        if not (directory / POINTER).is_file():
            raise GGUFError(f"cannot write {directory}: {error.strerror}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)

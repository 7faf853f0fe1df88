# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""Mutated files: only GGUFError, within a second of CPU time, within 64 MiB.

The mutations aim at the fields of the header as well as at any byte. Every file
that opens is read to the end: values, lazy arrays, tensor data.
"""

import random
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.helpers.gguf_writer import (
    Tensor,
    Typed,
    encode_header,
    write_gguf,
    write_shards,
)
from tests.helpers.light_process import memory_limit
from vllm.transformers_utils.gguf import header
from vllm.transformers_utils.gguf.errors import GGUFError
from vllm.transformers_utils.gguf.reader import GGUFFile, LazyArray, open_gguf

EXAMPLES = 9_000
SHARD_EXAMPLES = 1_000
MIB = 1 << 20

METADATA = {
    "general.architecture": "glm-dsa",
    "general.alignment": 32,
    "u8": Typed("u8", 1),
    "i16": Typed("i16", -2),
    "f32": 0.5,
    "bool": True,
    "u64": Typed("u64", 1 << 40),
    "tags": ["a", "bc", "def"],
    "ints": [1, 2, 3],
    "types": Typed("[i8]", [1] * 20),
    "tokens": Typed("[string]", [f"{i:x}" for i in range(20)]),
}
TENSORS = (
    Tensor("token_embd.weight", (32, 4), "Q8_0", bytes(range(136))),
    Tensor("blk.0.attn_k_b.weight", (32, 2, 2), "Q4_0", bytes(72)),
    Tensor("output_norm.weight", (8,), "F32", bytes(32)),
    Tensor("blk.0.ffn_down_exps.weight", (256, 1, 2), "IQ4_XS", bytes(272)),
)
LAZY_ABOVE = 8  # instead of 1,024, so that a small file has lazy arrays

EDGES = [0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 31, 33, 64, 139, 255, 1024, 4096, 65535]
EDGES += [1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, (1 << 62) + 32]
EDGES += [(1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1]


KINDS = ("field", "field", "delta", "byte", "cut", "insert")


def mutations(rng):
    """One to three changes, as (kind, where, what) with `where` in [0, 1)."""
    return [
        (
            rng.choice(KINDS),
            rng.random(),
            rng.choice(EDGES) if rng.random() < 0.5 else rng.getrandbits(64),
        )
        for _ in range(rng.randint(1, 3))
    ]


def mutate(content, fields, changes):
    data = bytearray(content)
    for kind, where, what in changes:
        at = int(where * len(data))
        if kind in ("field", "delta"):
            field = fields[int(where * len(fields))]
            size = struct.calcsize(field.code)
            place = slice(field.pos, field.pos + size)
            if kind == "delta":
                step = what % 33 - 16
                what = int.from_bytes(data[place], "little") + step
            data[place] = (what % (1 << 8 * size)).to_bytes(size, "little")
        elif kind == "byte" and data:
            data[at] = what % 256
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = (what % (1 << 64)).to_bytes(8, "little")
    return bytes(data)


def read_all(file: GGUFFile) -> None:
    for key, value in file.metadata.items():
        for kind in (int, str, float, bool):
            try:
                file.get(key, kind)
            except GGUFError:
                continue
        if isinstance(value, (LazyArray, list)):
            try:
                assert len(file.array(key)) == len(value)
            except GGUFError:
                continue
    for info in file.tensors.values():
        assert len(bytes(file.data(info))) == info.nbytes > 0
    file.close()


def overwrite(path, data):
    """As `write_bytes`, but the file never is empty: to close it then is slow."""
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


def survive(path, size, outcome):
    """Open and read `path` within the bounds; count how it ended."""
    tracemalloc.start()
    start = time.thread_time()
    try:
        read_all(open_gguf(path))
        outcome["accepted"] += 1
    except GGUFError as error:
        assert str(path.parent) in str(error)
        outcome["refused"] += 1
    finally:
        seconds = time.thread_time() - start
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert seconds < 1
    assert peak < 64 * MIB + size


@pytest.fixture
def bounded(monkeypatch):
    monkeypatch.setattr(header, "LAZY_ABOVE", LAZY_ABOVE)
    with memory_limit(256):
        yield


@contextmanager
def seeded(seed: int) -> Iterator[random.Random]:
    try:
        yield random.Random(seed)
    except BaseException as error:
        error.add_note(f"in the file of seed {seed}")
        raise


@pytest.mark.usefixtures("bounded")
def test_mutated_files_are_refused_or_read(tmp_path):
    path = tmp_path / "m.gguf"
    content = write_gguf(path, METADATA, TENSORS).read_bytes()
    fields = encode_header(METADATA, TENSORS)[0].fields
    assert isinstance(open_gguf(path).metadata["tokens"], LazyArray)
    outcome: Counter[str] = Counter()

    for seed in range(EXAMPLES):
        with seeded(seed) as rng:
            mutated = mutate(content, fields, mutations(rng))
            overwrite(path, mutated)
            survive(path, len(mutated), outcome)
    # Both ends must be common, or the mutations miss their target.
    assert outcome.total() == EXAMPLES
    assert outcome["refused"] > EXAMPLES // 4
    assert outcome["accepted"] > EXAMPLES // 50


@pytest.mark.usefixtures("bounded")
def test_mutated_shards_are_refused_or_read(tmp_path):
    groups = [[], TENSORS[:2], TENSORS[2:]]
    paths = write_shards(tmp_path, "m", METADATA, groups)
    contents = [path.read_bytes() for path in paths]
    fields = []
    for index, group in enumerate(groups):
        split = {"split.no": Typed("u16", index), "split.count": Typed("u16", 3)}
        split["split.tensors.count"] = Typed("i32", len(TENSORS))
        encoded, _ = encode_header((METADATA if index == 0 else {}) | split, group)
        assert contents[index].startswith(encoded.out)
        fields.append(encoded.fields)
    outcome: Counter[str] = Counter()

    for seed in range(SHARD_EXAMPLES):
        with seeded(seed) as rng:
            broken, named = rng.randrange(3), rng.randrange(3)
            mutated = mutate(contents[broken], fields[broken], mutations(rng))
            overwrite(paths[broken], mutated)
            survive(paths[named], len(mutated), outcome)
            overwrite(paths[broken], contents[broken])
    assert outcome.total() == SHARD_EXAMPLES
    assert outcome["refused"] > SHARD_EXAMPLES // 4
    assert outcome["accepted"] > SHARD_EXAMPLES // 50

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project

import os
import time
import tracemalloc
from itertools import pairwise

import gguf
import numpy as np
import pytest

from tests.helpers.gguf_writer import (
    RawValue,
    Tensor,
    Typed,
    encode_header,
    write_gguf,
)
from tests.helpers.glm_header import (
    MERGES,
    TOKENS,
    glm_merges,
    glm_tokens,
    write_glm_shards,
)
from tests.helpers.light_process import memory_limit, run_light
from vllm.transformers_utils.gguf import header
from vllm.transformers_utils.gguf.errors import GGUFError
from vllm.transformers_utils.gguf.ggml_types import GGML_TYPES_BY_NAME
from vllm.transformers_utils.gguf.reader import LazyArray, open_gguf

TENSORS = (
    Tensor("a.weight", (64, 3), "Q8_0", bytes(range(204))),
    Tensor("b.weight", (5,), "F32", bytes(20)),
)
MIB = 1 << 20


@pytest.fixture
def sound(tmp_path):
    return write_gguf(tmp_path / "m.gguf", {"general.architecture": "x"}, TENSORS)


def refused(path, message):
    """The file is refused with a message that names it and matches `message`."""
    with pytest.raises(GGUFError, match=message) as caught:
        open_gguf(path)
    assert str(path) in str(caught.value)


def test_reads_a_file_of_gguf_py_as_gguf_py_does(tmp_path):
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "glm-dsa")
    writer.add_custom_alignment(64)
    for kind, value in (
        ("uint8", 200),
        ("int8", -100),
        ("uint16", 65000),
        ("int16", -32000),
        ("uint32", 4_000_000_000),
        ("int32", -2_000_000_000),
        ("uint64", 1 << 63),
        ("int64", -(1 << 62)),
        ("float32", 0.25),
        ("float64", 0.1),
        ("bool", True),
        ("string", "päß ☃"),
    ):
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    writer.add_array("x.strings", ["a", "", "☃"])
    writer.add_array("x.ints", list(range(2000)))
    writer.add_array("x.bools", [True, False, True])
    writer.add_array("x.floats", [0.5, -1.5])
    writer.add_token_list([f"t{i}" for i in range(3000)])
    rng = np.random.default_rng(0)
    writer.add_tensor("f32", rng.standard_normal((3, 5), dtype=np.float32))
    writer.add_tensor("f16", rng.standard_normal((2, 3, 7)).astype(np.float16))
    for kind in ("Q8_0", "Q4_K", "IQ1_S", "MXFP4", "TQ1_0", "BF16"):
        type_ = gguf.GGMLQuantizationType[kind]
        row = 512 // gguf.GGML_QUANT_SIZES[type_][0] * gguf.GGML_QUANT_SIZES[type_][1]
        data = rng.integers(0, 256, (2, 4, row), dtype=np.uint8)
        writer.add_tensor(kind, data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    theirs = gguf.GGUFReader(path)
    ours = open_gguf(path)
    expected = {
        key: field.contents()
        for key, field in theirs.fields.items()
        if not key.startswith("GGUF.")
    }
    found = {
        key: ours.array(key) if isinstance(value, (LazyArray, list)) else value
        for key, value in ours.metadata.items()
    }
    assert found == expected
    assert [type(v) for v in found.values()] == [type(v) for v in expected.values()]
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert info.dims == tuple(tensor.shape)
        assert info.shape == info.dims[::-1]
        assert info.type.id == tensor.tensor_type
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
        assert ours.data(info) == tensor.data.tobytes()
    assert ours.total_bytes == sum(tensor.n_bytes for tensor in theirs.tensors)


def test_every_value_type_and_its_extremes(tmp_path):
    values = {
        "u8": 255,
        "i8": -128,
        "u16": 65535,
        "i16": -32768,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "f32": -0.5,
        "bool": False,
        "string": "",
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f64": 1e300,
    }
    keys = {k: Typed(k, v) for k, v in values.items()}
    keys |= {f"[{k}]": Typed(f"[{k}]", [v, v]) for k, v in values.items()}
    keys |= {f"0[{k}]": Typed(f"[{k}]", []) for k in values}
    file = open_gguf(write_gguf(tmp_path / "m.gguf", keys))
    for kind, value in values.items():
        assert file.metadata[kind] == value
        assert type(file.metadata[kind]) is type(value)
        assert file.metadata[f"[{kind}]"] == [value, value]
        assert file.metadata[f"0[{kind}]"] == []


@pytest.mark.parametrize(("count", "lazy"), [(1024, False), (1025, True)])
@pytest.mark.parametrize("kind", ["string", "i32", "bool"])
def test_long_arrays_stay_in_the_file_until_decoded(tmp_path, count, lazy, kind):
    make = {"string": str, "i32": int, "bool": lambda i: i % 3 == 0}[kind]
    values = [make(i) for i in range(count)]
    keys = {"a": Typed(f"[{kind}]", values), "after": 7}
    file = open_gguf(write_gguf(tmp_path / "m.gguf", keys))
    value = file.metadata["a"]
    assert isinstance(value, LazyArray) is lazy
    assert len(value) == count
    assert file.array("a") == values
    assert file.metadata["after"] == 7
    if lazy:
        assert value.type == kind
        assert value.decode() == values


def test_get_checks_the_type_and_names_what_it_found(tmp_path):
    keys = {"i": 3, "f": 0.5, "b": True, "s": "text", "a": [1, 2]}
    path = write_gguf(tmp_path / "m.gguf", keys)
    file = open_gguf(path)
    assert file.get("i", int) == 3
    assert file.get("s", (int, str)) == "text"
    assert file.get("absent", int, None) is None
    widened = file.get("i", float)
    assert widened == 3.0
    assert isinstance(widened, float)
    for key, types, expected in (
        ("b", int, r"'b' is True \(type bool\), expected int"),
        ("f", int, r"'f' is 0.5 \(type f32\), expected int"),
        ("s", (int, float), r"'s' is 'text' \(type string\), expected int or float"),
        ("a", int, r"\(type array of 2 u32\), expected int"),
        ("absent", int, "'absent' is missing"),
    ):
        with pytest.raises(GGUFError, match=expected) as caught:
            file.get(key, types)
        assert str(path) in str(caught.value)
    with pytest.raises(GGUFError, match="expected int"):
        file.get("s", int, 5)


def test_array_refuses_scalars_and_absent_keys(tmp_path):
    file = open_gguf(write_gguf(tmp_path / "m.gguf", {"s": "text", "a": [1]}))
    with pytest.raises(GGUFError, match=r"'s' is 'text' \(type string\).* array"):
        file.array("s")
    with pytest.raises(GGUFError, match="'absent' is missing"):
        file.array("absent")
    assert file.array("absent", []) == []
    file.array("a").append(2)
    assert file.array("a") == [1]


def test_metadata_is_read_only(sound):
    with pytest.raises(TypeError):
        open_gguf(sound).metadata["x"] = 1


def test_data_is_a_read_only_view_of_the_file(sound):
    file = open_gguf(sound)
    view = file.data(file.tensors["a.weight"])
    assert view == bytes(range(204))
    assert view.readonly
    tracemalloc.start()
    file.data(file.tensors["a.weight"])
    assert tracemalloc.get_traced_memory()[1] < 4096
    tracemalloc.stop()


def test_close_releases_the_maps_and_later_use_maps_again(sound):
    def mapped():
        with open("/proc/self/maps") as maps:
            return str(sound) in maps.read()

    with open_gguf(sound) as file:
        assert mapped()
        view = file.data(file.tensors["a.weight"])
    assert mapped(), "the view must keep its map"
    assert view == bytes(range(204))
    del view
    assert not mapped()
    assert file.data(file.tensors["a.weight"]) == bytes(range(204))
    file.close()
    assert not mapped()


def test_a_file_that_changes_while_closed_is_refused(sound):
    file = open_gguf(sound)
    file.close()
    os.utime(sound, ns=(1, 1))
    with pytest.raises(GGUFError, match="changed after its header was read"):
        file.data(file.tensors["a.weight"])


@pytest.mark.parametrize(("index", "length"), [(0, 1 << 40), (1999, 16)])
def test_a_lazy_array_that_changes_in_place_is_refused(tmp_path, index, length):
    keys = {"a": Typed("[string]", ["abcdefgh"] * 2000), "after": "x" * 64}
    path = write_gguf(tmp_path / "m.gguf", keys)
    file = open_gguf(path)
    start = path.read_bytes().index(b"abcdefgh") - 8
    with path.open("r+b") as out:
        out.seek(start + 16 * index)
        out.write(length.to_bytes(8, "little"))
    with pytest.raises(GGUFError, match="changed after its header was read"):
        file.array("a")


def test_tensor_order_is_file_order_and_gaps_are_legal(tmp_path):
    tensors = [Tensor("z", offset=4096), Tensor("a", offset=0), Tensor("m", offset=256)]
    path = write_gguf(tmp_path / "m.gguf", {}, tensors)
    os.truncate(path, 16384)
    file = open_gguf(path)
    assert list(file.tensors) == ["z", "a", "m"]
    starts = [file.tensors[name].offset for name in "amz"]
    assert [b - a for a, b in pairwise(starts)] == [256, 3840]


def test_the_last_tensor_needs_no_padding_behind_it(sound):
    os.truncate(sound, sound.stat().st_size - 12)
    assert open_gguf(sound).tensors["b.weight"].nbytes == 20


def test_a_merged_file_keeps_its_split_keys(tmp_path):
    keys = {"split.no": 0, "split.count": 0, "split.tensors.count": Typed("i32", 2)}
    file = open_gguf(write_gguf(tmp_path / "m.gguf", keys, TENSORS))
    assert len(file.tensors) == 2


def test_scalar_strings_replace_bytes_that_are_not_utf8(tmp_path):
    keys = {"general.name": Typed("string", b"caf\xe9")}
    file = open_gguf(write_gguf(tmp_path / "m.gguf", keys))
    assert file.metadata["general.name"] == "caf\ufffd"


def test_token_strings_must_be_utf8_and_the_bad_one_is_named(tmp_path):
    tokens = ["ok"] * 3000
    tokens[2345] = b"\xff\xfe"
    path = write_gguf(tmp_path / "m.gguf", {"toks": Typed("[string]", tokens)})
    file = open_gguf(path)
    with pytest.raises(GGUFError, match=r"element 2345 of 'toks' is not UTF-8"):
        file.array("toks")


HEADS = {
    "safetensors": (b'\x40\0\0\0\0\0\0\0{"a":', "looks like safetensors"),
    "zip": (b"PK\x03\x04rest of the file", "zip archive or a PyTorch checkpoint"),
    "LFS pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    "web page": (b"\n<!DOCTYPE html><html>", "web page"),
    "GGML": (b"tjgg\x03\0\0\0", "before GGUF"),
    "zeros": (bytes(100), "download is incomplete"),
    "text": (b"hello", r"starts with b'hello', expected b'GGUF'"),
}


@pytest.mark.parametrize(("head", "message"), HEADS.values(), ids=HEADS)
def test_what_is_no_gguf_is_recognized(tmp_path, head, message):
    path = tmp_path / "m.gguf"
    path.write_bytes(head)
    refused(path, f"not a GGUF file.*{message}")


def test_empty_file(tmp_path):
    path = tmp_path / "m.gguf"
    path.touch()
    refused(path, "the file is empty")


def test_a_directory_lists_the_files_to_name(tmp_path):
    refused(tmp_path, "a directory, expected a .gguf file; there are no .gguf files")
    sub = tmp_path / "UD-Q4_K_XL"
    sub.mkdir()
    for i in range(1, 8):
        write_gguf(sub / f"m-0000{i}-of-00007.gguf")
    refused(tmp_path, r"name one of .*UD-Q4_K_XL/m-00001-of-00007.gguf,.* and 2 more")


def test_absent_file_names_its_neighbors(sound):
    refused(sound.with_name("n.gguf"), f"no such file; name one of {sound}")
    refused(sound / "below", "cannot read the file: Not a directory")


def test_unreadable_file(sound, monkeypatch):
    def deny(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(sound), "open", deny)
    refused(sound, "cannot read the file: Permission denied")


def test_a_fifo_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "m.gguf")
    refused(tmp_path / "m.gguf", "not a regular file")


VERSIONS = {
    "v1": (1, "GGUF version 1, expected version 3; convert"),
    "v2": (2, "GGUF version 2, expected version 3; convert"),
    "v4": (4, "GGUF version 4, expected version 3; .* newer"),
    "v0": (0, "GGUF version 0, expected version 3"),
    "big-endian": (3 << 24, r"big-endian GGUF \(version 3\)"),
}


@pytest.mark.parametrize(("version", "message"), VERSIONS.values(), ids=VERSIONS)
def test_other_versions(tmp_path, version, message):
    refused(write_gguf(tmp_path / "m.gguf", version=version), message)


def test_every_truncation_of_the_header_is_named(tmp_path):
    keys = {"s": "text", "a": Typed("[string]", ["x", "yy"]), "i": [1, 2], "f": 0.5}
    head, _ = encode_header(keys, TENSORS)
    path = tmp_path / "m.gguf"
    for size in range(4, len(head.out)):
        path.write_bytes(head.out[:size])
        refused(path, f"truncated or damaged.* {size};|the file's {size} bytes")


def test_truncated_data_names_tensor_and_sizes(sound):
    size = sound.stat().st_size
    os.truncate(sound, size - 40)
    refused(sound, rf"tensor 'b.weight' \(20 bytes from byte {size - 32}\) offset lies")
    os.truncate(sound, size - 100)
    refused(
        sound,
        rf"'a.weight' \(204 bytes .* is cut by the end of the file at {size - 100};",
    )


def huge(length):
    return length.to_bytes(8, "little")


BAD_METADATA = {
    "duplicate key": ([("k", 1), ("k", 2)], "key 'k' is there twice"),
    "empty key": ([("", 1)], "name of metadata key 0 is empty"),
    "key not UTF-8": ([(b"\xff", 1)], "name of metadata key 0 is not UTF-8"),
    "unknown value type": (
        [("k", RawValue(13, bytes(64)))],
        "'k' has the unknown value type 13, expected 0 to 12",
    ),
    "unknown element type": (
        [("k", RawValue(9, b"\x0d\0\0\0" + huge(1) + bytes(64)))],
        "array 'k' has the unknown value type 13",
    ),
    "nested array": (
        [("k", RawValue(9, b"\x09\0\0\0" + huge(1) + bytes(64)))],
        "array 'k' holds arrays",
    ),
    "string of 2^63": (
        [("k", RawValue(8, huge(1 << 63)))],
        f"the value of 'k' needs {1 << 63} bytes",
    ),
    "array of 2^40": (
        [("k", RawValue(9, b"\x04\0\0\0" + huge(1 << 40)))],
        rf"element \(of the array 'k'\) count is {1 << 40}, more than the file",
    ),
    "string array of 2^40": (
        [("k", RawValue(9, b"\x08\0\0\0" + huge(1 << 40)))],
        rf"element \(of the array 'k'\) count is {1 << 40}, more than the file",
    ),
    "string of 2^63 in an array": (
        [("k", RawValue(9, b"\x08\0\0\0" + huge(2) + huge(1 << 63) + bytes(16)))],
        "array 'k' should have 2 strings, but the first 1 end at byte",
    ),
    "last string beyond the end": (
        [("k", RawValue(9, b"\x08\0\0\0" + huge(1) + huge(1 << 20) + bytes(16)))],
        "array 'k' should have 1 strings, but the first 1 end at byte",
    ),
    "alignment not a power of two": ([("general.alignment", 48)], "alignment is 48"),
    "alignment below 8": ([("general.alignment", 4)], "alignment is 4, expected"),
    "alignment zero": ([("general.alignment", 0)], "alignment is 0, expected"),
    "alignment of a wrong type": ([("general.alignment", "32")], "alignment is '32'"),
    "alignment true": ([("general.alignment", True)], "alignment is True"),
}


@pytest.mark.parametrize(
    ("metadata", "message"), BAD_METADATA.values(), ids=BAD_METADATA
)
def test_bad_metadata(tmp_path, metadata, message):
    refused(write_gguf(tmp_path / "m.gguf", metadata, TENSORS), message)


BAD_TENSORS = {
    "duplicate": ([Tensor("t"), Tensor("t")], "tensor 't' is there twice"),
    "empty name": ([Tensor("")], "name of tensor 0 is empty"),
    "name not UTF-8": ([Tensor(b"\xc3\x28")], "name of tensor 0 is not UTF-8"),
    "ik_llama type": ([Tensor("t", (256,), 139)], r"tensor 't': .*139 \(IQ4_K\).*ik_"),
    "retired type": ([Tensor("t", (32,), 4)], "tensor 't': ggml type id 4 is retired"),
    "unknown type": ([Tensor("t", (32,), 99)], "tensor 't': unknown ggml type id 99"),
    "zero dim": ([Tensor("t", (32, 0))], r"'t' has a zero dimension in \[32, 0\]"),
    "negative dim": ([Tensor("t", (-32,))], r"'t' has a negative \(-32\) dimension"),
    "overflowing dims": (
        [Tensor("t", (1 << 32, 1 << 32))],
        "'t' has dimensions .* whose product overflows 64 bits",
    ),
    "no dims": ([Tensor("t", ())], "'t' has 0 dimensions, expected 1 to 4"),
    "five dims": ([Tensor("t", (1,) * 5)], "'t' has 5 dimensions, expected 1 to 4"),
    "2^32 - 1 dims": ([Tensor("t", n_dims=2**32 - 1)], "'t' has 4294967295 dimensions"),
    "cut block": ([Tensor("t", (192, 2), "Q4_K")], "'t': 192 elements .* of 256"),
    "offset beyond": (
        [Tensor("t", offset=1 << 40)],
        "'t' .* offset lies beyond the end",
    ),
    "offset 2^64 - 32": ([Tensor("t", offset=(1 << 64) - 32)], "'t' .* lies beyond"),
    "misaligned": ([Tensor("t", offset=8)], "'t' starts at .* multiple .* 32"),
    "overlap": (
        [Tensor("t", (64,)), Tensor("u", offset=128)],
        "'u' starts at byte .* inside tensor 't'",
    ),
    "same offset": ([Tensor("t"), Tensor("u", offset=0)], "inside tensor 't'"),
}


@pytest.mark.parametrize(("tensors", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_tensors(tmp_path, tensors, message):
    refused(write_gguf(tmp_path / "m.gguf", {}, tensors), message)


@pytest.mark.parametrize("count", [3, 1 << 32, (1 << 64) - 1])
@pytest.mark.parametrize("which", ["tensor", "key"])
def test_absurd_counts(tmp_path, which, count):
    option = {f"{which}_count": count}
    path = write_gguf(tmp_path / "m.gguf", {"k": 1}, TENSORS[:1], **option)
    refused(path, "count is" if count > 3 else "truncated|is empty")


SPARSE = {
    "keys": ({"key_count": 1 << 33}, "metadata key count is 8589934592, above"),
    "tensors": ({"tensor_count": 1 << 33}, "tensor count is 8589934592, above"),
    "string": (
        {"metadata": {"k": RawValue(8, huge(1 << 36))}},
        "value of 'k' is 68719476736 bytes long, above",
    ),
    "key name": (
        {"metadata": [], "key_count": 1, "tail": huge(1 << 33)},
        "name of metadata key 0 is 8589934592 bytes long, above",
    ),
    "strings": (
        {"metadata": {"k": RawValue(9, b"\x08\0\0\0" + huge(1 << 33))}},
        "count is 8589934592, above",
    ),
    "most strings": (
        {"metadata": {"k": RawValue(9, b"\x08\0\0\0" + huge(1 << 22))}, "key_count": 2},
        "name of metadata key 1 is empty",
    ),
    "long strings": (
        {"metadata": {"k": RawValue(9, b"\x08\0\0\0" + huge(2) + huge(1 << 30))}},
        "array 'k' takes 1073741840 bytes, above",
    ),
    "bytes": (
        {"metadata": {"k": RawValue(9, b"\0\0\0\0" + huge(1 << 36))}},
        "count is 68719476736, above",
    ),
}


@pytest.mark.parametrize(("options", "message"), SPARSE.values(), ids=SPARSE)
def test_a_hostile_sparse_file_takes_neither_time_nor_memory(
    tmp_path, options, message
):
    options = dict(options)
    tail = options.pop("tail", b"")
    path = write_gguf(tmp_path / "m.gguf", **options)
    with path.open("ab") as file:
        file.write(tail)
    os.truncate(path, 1 << 40)
    start = time.thread_time()
    with memory_limit(64):
        refused(path, message)
    # "most strings" takes 0.4 s; to read what the file claims would take an hour.
    assert time.thread_time() - start < 10


def test_the_memory_limit_strikes():
    # More than the heap can hold free from earlier tests, which would not count.
    size = 8192 * MIB
    with memory_limit(64), pytest.raises(MemoryError):
        bytes(size)
    assert len(bytes(size)) == size


def test_arrays_share_one_limit_of_elements(tmp_path, monkeypatch):
    monkeypatch.setattr(header, "MAX_ARRAY_ELEMENTS", 100)
    keys = {"a": Typed("[u8]", [0] * 60), "b": Typed("[u8]", [0] * 60)}
    refused(write_gguf(tmp_path / "m.gguf", keys), "arrays up to 'b' have 120 elements")


MEASURE = """
import time
from vllm.transformers_utils.gguf.reader import open_gguf

before = status("VmRSS")
reset_peak()
start = time.process_time()
file = open_gguf(sys.argv[2])
opened = time.process_time()
lists = [file.array("tokenizer.ggml." + k) for k in ("tokens", "merges", "token_type")]
decoded = time.process_time()
print(opened - start, decoded - start, status("VmHWM") - before, *map(len, lists))
"""


def test_a_glm_header_opens_fast_and_small(tmp_path):
    path = write_glm_shards(tmp_path)[0]
    runs = [run_light(MEASURE, str(path)).split() for _ in range(3)]
    opened, decoded, mib, *lengths = min([float(word) for word in run] for run in runs)
    assert lengths == [TOKENS, MERGES, TOKENS]
    # 0.06 and 0.2 s where nothing else runs; the order shows that opening a file leaves
    # the long lists alone, on any machine.
    assert opened < decoded
    assert opened < 1
    assert decoded < 5
    assert mib <= 200


def test_a_glm_header_is_read_right(tmp_path):
    file = open_gguf(write_glm_shards(tmp_path)[0])
    assert len(file.tensors) == 1809
    assert file.total_bytes == 467_279_569_920
    assert file.get("glm-dsa.block_count", int) == 79
    assert file.array("tokenizer.ggml.tokens") == glm_tokens()
    assert file.array("tokenizer.ggml.merges") == glm_merges()
    k_b = file.tensors["blk.78.attn_k_b.weight"]
    assert k_b.shape == (64, 512, 192)
    assert k_b.type is GGML_TYPES_BY_NAME["Q8_0"]
    assert k_b.nbytes == 64 * 512 * 192 // 32 * 34


def test_the_reader_imports_nothing_heavy():
    code = """
import vllm.transformers_utils.gguf.reader
heavy = {"torch", "numpy", "transformers", "gguf"} & set(sys.modules)
others = [m for m in sys.modules if m.startswith("vllm") and "gguf" not in m]
print(sorted(heavy), sorted(others))
"""
    assert run_light(code).strip() == "[] ['vllm', 'vllm.transformers_utils']"

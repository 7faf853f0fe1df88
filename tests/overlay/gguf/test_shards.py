# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project

import os
import re

import pytest

from tests.helpers.gguf_writer import Tensor, Typed, write_gguf, write_shards
from vllm.transformers_utils.gguf.errors import GGUFError
from vllm.transformers_utils.gguf.reader import open_gguf

METADATA = {"general.architecture": "glm-dsa", "glm-dsa.block_count": 2}


def tensor(name, fill):
    return Tensor(name, (32, 2), "Q8_0", bytes([fill]) * 68)


GROUPS = (
    [],
    [tensor("blk.0.attn_q_a.weight", 1), tensor("blk.1.attn_q_a.weight", 2)],
    [tensor("blk.1.ffn_up.weight", 3), tensor("output.weight", 4)],
)


@pytest.fixture
def shards(tmp_path):
    return write_shards(tmp_path, "glm", METADATA, GROUPS)


def refused(path, message):
    with pytest.raises(GGUFError, match=message):
        open_gguf(path)


@pytest.mark.parametrize("named", range(3))
def test_any_shard_finds_all(shards, named):
    file = open_gguf(shards[named])
    assert list(file.paths) == shards
    assert file.get("glm-dsa.block_count", int) == 2
    assert list(file.tensors) == [t.name for group in GROUPS for t in group]
    assert [info.shard for info in file.tensors.values()] == [1, 1, 2, 2]
    for info, fill in zip(file.tensors.values(), (1, 2, 3, 4), strict=True):
        assert file.data(info) == bytes([fill]) * 68
    assert file.total_bytes == 4 * 68


def test_a_first_shard_may_end_with_its_header(shards):
    assert shards[0].stat().st_size % 32, "the case needs a header without padding"
    assert open_gguf(shards[0]).tensors["output.weight"].shard == 2


def test_close_releases_every_shard(shards):
    with open_gguf(shards[0]) as file:
        assert len(file.tensors) == 4
    with open("/proc/self/maps") as maps:
        assert str(shards[0].parent) not in maps.read()


def test_each_shard_has_its_own_alignment(shards):
    split = {"split.no": 1, "split.count": 3, "split.tensors.count": 4}
    keys = split | {"general.alignment": 512}
    write_gguf(shards[1], keys, GROUPS[1], alignment=512)
    file = open_gguf(shards[0])
    starts = [info.offset for info in file.tensors.values() if info.shard == 1]
    assert starts == [512, 1024]
    for info, fill in zip(file.tensors.values(), (1, 2, 3, 4), strict=True):
        assert file.data(info) == bytes([fill]) * 68


def test_links_to_shards_are_followed(shards, tmp_path):
    store = tmp_path / "blobs"
    snapshot = tmp_path / "snapshot"
    store.mkdir()
    snapshot.mkdir()
    links = []
    for index, path in enumerate(shards):
        blob = store / f"sha{index}"
        path.rename(blob)
        links.append(snapshot / path.name)
        links[-1].symlink_to(blob)
    file = open_gguf(links[2])
    assert list(file.paths) == links
    assert len(file.tensors) == 4


def test_a_link_of_another_name_leads_to_the_shards(shards, tmp_path):
    (tmp_path / "model.gguf").symlink_to(shards[1])
    assert list(open_gguf(tmp_path / "model.gguf").paths) == shards


def test_missing_shards_are_named(shards):
    shards[0].unlink()
    shards[1].unlink()
    refused(shards[2], "2 of 3 shards missing: glm-00001-of-00003.gguf, glm-00002")


def test_a_dangling_link_is_a_missing_shard(shards):
    shards[1].unlink()
    shards[1].symlink_to("nowhere")
    refused(shards[0], "1 of 3 shards missing: glm-00002-of-00003.gguf; fetch")


def test_many_missing_shards_are_counted(shards, tmp_path):
    path = tmp_path / "glm-00001-of-60000.gguf"
    write_gguf(path, METADATA | {"split.count": 60000, "split.no": 0})
    refused(path, "59999 of 60000 shards missing: .* and 59996 more")


@pytest.mark.parametrize("named", range(3))
def test_a_wrong_split_count_in_any_shard(tmp_path, named):
    other = {named: {"split.count": Typed("u16", 4)}}
    paths = write_shards(tmp_path, "glm", METADATA, GROUPS, other)
    for path in paths:
        name = re.escape(paths[named].name)
        refused(path, rf"{name}: .*split.count is 4")


BAD_KEYS = {
    "split.no of another shard": (
        {1: {"split.no": Typed("u16", 2)}},
        "glm-00002-of-00003.gguf: split.no is 2, expected 1",
    ),
    "split.no 1-based": (
        {i: {"split.no": Typed("u16", i + 1)} for i in range(3)},
        "glm-00001-of-00003.gguf: split.no is 1, expected 0",
    ),
    "split.no absent": (
        {2: {"split.no": None}},
        "glm-00003-of-00003.gguf: split.no is absent, expected 2",
    ),
    "split.no of a wrong type": (
        {1: {"split.no": "1"}},
        "'split.no' is of type string, expected an integer",
    ),
    "split.count absent": (
        {1: {"split.count": None}},
        "glm-00002-of-00003.gguf: split.count is absent, expected 3",
    ),
    "tensor count too high": (
        {0: {"split.tensors.count": 5}},
        r"split.tensors.count is 5, but 3 shard\(s\) hold 4 tensors",
    ),
    "tensor count of one shard": (
        {2: {"split.tensors.count": 3}},
        r"glm-00003-of-00003.gguf: split.tensors.count is 3, but",
    ),
    "tensor count absent": (
        {0: {"split.tensors.count": None}},
        "split.tensors.count is absent from the first of 3 shards",
    ),
    "another architecture": (
        {2: {"general.architecture": "llama"}},
        "00003.gguf: general.architecture is 'llama', but 'glm-dsa' in the first",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), BAD_KEYS.values(), ids=BAD_KEYS)
def test_bad_split_keys(tmp_path, overrides, message):
    refused(write_shards(tmp_path, "glm", METADATA, GROUPS, overrides)[0], message)


def test_only_the_first_shard_needs_the_tensor_count(tmp_path):
    overrides = {i: {"split.tensors.count": None} for i in (1, 2)}
    paths = write_shards(tmp_path, "glm", METADATA, GROUPS, overrides)
    assert len(open_gguf(paths[1]).tensors) == 4


def test_a_tensor_in_two_shards(tmp_path):
    groups = [*GROUPS[:2], [tensor("blk.0.attn_q_a.weight", 3)]]
    paths = write_shards(tmp_path, "glm", METADATA, groups)
    refused(
        paths[0],
        "00003-of-00003.gguf: tensor 'blk.0.attn_q_a.weight' is also in .*00002-of",
    )


def test_two_shards_under_each_others_names(shards, tmp_path):
    spare = tmp_path / "spare"
    shards[1].rename(spare)
    shards[2].rename(shards[1])
    spare.rename(shards[2])
    refused(shards[0], "glm-00002-of-00003.gguf: split.no is 2, expected 1")


def test_a_renamed_shard(shards, tmp_path):
    path = tmp_path / "renamed.gguf"
    shards[1].rename(path)
    refused(path, "split.count is 3, but the file name does not end in -00001-of-00003")


def test_a_truncated_later_shard_is_named(shards):
    os.truncate(shards[2], shards[2].stat().st_size - 100)
    refused(shards[0], "glm-00003-of-00003.gguf: tensor 'output.weight'")


def test_a_whole_file_in_split_naming_needs_no_split_keys(tmp_path):
    path = write_gguf(tmp_path / "glm-00001-of-00001.gguf", METADATA, GROUPS[1])
    assert len(open_gguf(path).tensors) == 2


@pytest.mark.parametrize("name", ["glm-00001-of-00002", "glm-00002-of-00001"])
def test_a_shard_name_without_split_keys(tmp_path, name):
    path = write_gguf(tmp_path / f"{name}.gguf", METADATA, GROUPS[1])
    refused(path, "file name says shard . of ., but split.count is absent")


@pytest.mark.parametrize("name", ["glm-00000-of-00003", "glm-00004-of-00003"])
def test_a_shard_number_out_of_range(tmp_path, name):
    path = write_gguf(tmp_path / f"{name}.gguf", METADATA | {"split.count": 3})
    refused(path, "file name says shard . of 3")


def test_a_single_file_with_a_wrong_tensor_count(tmp_path):
    keys = METADATA | {"split.tensors.count": 3}
    path = write_gguf(tmp_path / "glm.gguf", keys, GROUPS[1])
    refused(path, r"split.tensors.count is 3, but 1 shard\(s\) hold 2 tensors")

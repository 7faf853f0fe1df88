# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The model directory of a GGUF file, and what engine arguments make of it."""

import os
import shutil
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tiny_glm_dsa import TinySpec, write_tiny_glm_dsa
from vllm.tokenizers import get_tokenizer
from vllm.transformers_utils.gguf import artifacts, serving
from vllm.transformers_utils.gguf.artifacts import gguf_path, load_plan, prepare_model
from vllm.transformers_utils.gguf.errors import GGUFError


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return write_tiny_glm_dsa(path, TinySpec(weight_type="Q8_0"))[0]


@pytest.fixture
def tiny(written: Path, tmp_path: Path) -> Path:
    """A file that the test may change."""
    return shutil.copy(written, tmp_path / "tiny.gguf")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "cache"
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(root))
    return root


def engine_args(model: Path | str, **options: Any) -> SimpleNamespace:
    defaults: dict[str, Any] = {
        "model": str(model),
        "tokenizer": None,
        "load_format": "auto",
        "config_format": "auto",
        "served_model_name": None,
        "quantization": None,
        "speculative_config": None,
        "spec_method": None,
        "pipeline_parallel_size": 1,
    }
    return SimpleNamespace(**{**defaults, **options})


def test_directory_has_what_vllm_looks_for(tiny: Path, cache: Path) -> None:
    directory = prepare_model(tiny, cache).directory
    assert {path.name for path in directory.iterdir()} >= {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "gguf.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert gguf_path(directory) == tiny
    types = load_plan(directory).block_types()
    assert types["lm_head"].name == "Q8_0"
    assert [path.name for path in (cache / "gguf").iterdir()] == [directory.name]


def test_directory_is_reused_until_the_file_changes(tiny: Path, cache: Path) -> None:
    first = prepare_model(tiny, cache).directory
    stamp = (first / "tokenizer.json").stat().st_mtime_ns
    assert prepare_model(tiny, cache).directory == first
    assert (first / "tokenizer.json").stat().st_mtime_ns == stamp
    os.utime(tiny, ns=(1, 1))
    assert prepare_model(tiny, cache).directory != first


def test_incomplete_directory_is_written_again(tiny: Path, cache: Path) -> None:
    directory = prepare_model(tiny, cache).directory
    (directory / "gguf.json").unlink()
    (directory / "config.json").write_text("{")
    assert prepare_model(tiny, cache).directory == directory
    assert (directory / "config.json").read_text() != "{"
    assert load_plan(directory).main


def test_cache_that_cannot_be_written_is_named(tiny: Path, tmp_path: Path) -> None:
    blocker = tmp_path / "blocker"
    blocker.write_text("a file where the cache should be")
    with pytest.raises(GGUFError, match="VLLM_CACHE_ROOT"):
        prepare_model(tiny, blocker)


def test_directory_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"no gguf\.json"):
        load_plan(tmp_path)


def test_engine_args_become_a_local_model(tiny: Path, cache: Path) -> None:
    args = engine_args(tiny, tokenizer=str(tiny))
    serving.resolve_engine_args(args)
    assert gguf_path(args.model) == tiny
    assert args.load_format == "gguf_native"
    assert args.served_model_name == [str(tiny)]
    assert args.tokenizer is None
    assert args.quantization is None, "the CPU computes on plain weights"


def test_tokenizer_is_found_by_the_path_of_the_file(tiny: Path, cache: Path) -> None:
    tokenizer = get_tokenizer(str(tiny))
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"


@pytest.mark.parametrize("name", [b"\xff.gguf", b"a" * 250 + b".gguf", b"A.GGUF"])
def test_any_file_name_is_served(name: bytes, tiny: Path, cache: Path) -> None:
    renamed = tiny.rename(tiny.with_name(os.fsdecode(name)))
    args = engine_args(renamed)
    serving.resolve_engine_args(args)
    assert gguf_path(args.model) == renamed


@pytest.mark.parametrize(
    "options",
    [{"speculative_config": {"method": "mtp"}}, {"spec_method": "mtp"}],
    ids=["config", "option"],
)
def test_mtp_needs_the_block_in_the_file(
    options: dict[str, Any], tiny: Path, cache: Path, tmp_path: Path
) -> None:
    with pytest.raises(GGUFError, match="needs the MTP block"):
        serving.resolve_engine_args(engine_args(tiny, **options))
    spec = TinySpec(weight_type="Q8_0", mtp=True)
    with_block = write_tiny_glm_dsa(tmp_path / "mtp.gguf", spec)[0]
    serving.resolve_engine_args(engine_args(with_block, **options))
    staged = engine_args(with_block, **options, pipeline_parallel_size=2)
    with pytest.raises(GGUFError, match="one pipeline stage, not 2"):
        serving.resolve_engine_args(staged)


def test_directory_of_another_release_is_not_reused(
    tiny: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepare_model(tiny, cache).directory
    monkeypatch.setattr(artifacts, "__version__", "another")
    assert prepare_model(tiny, cache).directory != first


def test_options_of_the_user_stay(tiny: Path, cache: Path) -> None:
    given = {
        "tokenizer": "other/tokenizer",
        "load_format": "dummy",
        "served_model_name": ["glm"],
        "quantization": "gguf_native",
    }
    args = engine_args(tiny, **given)
    serving.resolve_engine_args(args)
    assert {name: getattr(args, name) for name in given} == given


@pytest.mark.parametrize(
    ("option", "value"), [("quantization", "fp8"), ("load_format", "safetensors")]
)
def test_option_that_contradicts_the_file_is_refused(
    option: str, value: str, tiny: Path, cache: Path
) -> None:
    with pytest.raises(GGUFError, match=f"{value} cannot be combined"):
        serving.resolve_engine_args(engine_args(tiny, **{option: value}))


@pytest.mark.parametrize("model", ["org/model", "Qwen/Qwen3-0.6B", ""])
def test_other_models_are_left_alone(model: str, cache: Path) -> None:
    args = engine_args(model)
    serving.resolve_engine_args(args)
    assert args == engine_args(model)


def test_directory_with_a_configuration_is_left_alone(tiny: Path, cache: Path) -> None:
    (tiny.parent / "config.json").write_text("{}")
    args = engine_args(tiny.parent)
    serving.resolve_engine_args(args)
    assert args.model == str(tiny.parent)


@pytest.mark.parametrize("enabled", [True, False])
def test_parsers_default_to_glm_where_tools_are_enabled(
    enabled: bool, tiny: Path
) -> None:
    args = Namespace(
        model="unused",
        model_tag=str(tiny),
        enable_auto_tool_choice=enabled,
        tool_call_parser=None,
        reasoning_parser="",
    )
    serving.apply_parser_defaults(args)
    expected = ("glm47", "glm45") if enabled else (None, "")
    assert (args.tool_call_parser, args.reasoning_parser) == expected


def test_named_parsers_stay(tiny: Path) -> None:
    args = Namespace(
        model=str(tiny),
        model_tag=None,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        reasoning_parser="qwen3",
    )
    serving.apply_parser_defaults(args)
    assert (args.tool_call_parser, args.reasoning_parser) == ("hermes", "qwen3")


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "{}"],
        ["serve", "--port", "1", "--model", "{}"],
        ["serve", "--model={}"],
    ],
)
def test_command_line_with_a_bad_file_ends_at_once(
    arguments: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a model")
    argv = ["vllm", *(argument.format(bad) for argument in arguments)]
    with pytest.raises(SystemExit) as exit_info:
        serving.check_command_line(argv)
    assert exit_info.value.code == 1
    assert f"vllm serve: error: {bad}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [["vllm"], ["vllm", "serve"], ["vllm", "bench", "x.gguf"]]
)
def test_other_command_lines_pass(argv: list[str]) -> None:
    serving.check_command_line(argv)

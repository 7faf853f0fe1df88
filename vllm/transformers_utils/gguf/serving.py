# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""What the command line and the engine arguments do with a GGUF model path.

Each public function is called from one edited line of the release, but for three that
the doctor asks as well: `check_speculation`, `draft_error`, and `stage_error`, which is
the loader's.
"""

import argparse
import logging
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from vllm.transformers_utils.gguf.artifacts import prepare_model
from vllm.transformers_utils.gguf.errors import GGUFError
from vllm.transformers_utils.gguf.glm_dsa import ARCHITECTURE, GlmDsaConfig

logger = logging.getLogger(__name__)

LOAD_FORMAT = "gguf_native"
QUANTIZATION = "gguf_native"

# What GLM-5 models emit; see the names in vLLM's parser registries.
_TOOL_PARSER = "glm47"
_REASONING_PARSER = "glm45"


def check_command_line(argv: Sequence[str]) -> None:
    """Stop `vllm serve FILE.gguf` with status 1 if the file cannot be served.

    Runs before vLLM's own start-up, so that the message comes at once and alone. A
    model that is not plain to see among the arguments is left to
    `check_serve_arguments`.
    """
    model = _model_argument(argv)
    if model is None or not _is_native(model):
        return
    own_tokenizer = any(arg.split("=")[0] == "--tokenizer" for arg in argv)
    with _exit_on_error():
        prepare_model(model, _cache_root(), own_tokenizer=own_tokenizer)


def check_serve_arguments(args: argparse.Namespace) -> None:
    """Check the parsed arguments of `vllm serve`, and choose GLM's parsers.

    Stops with status 1 if the file, or an option together with it, cannot be served.
    Arguments for other models are left as they are.
    """
    model = getattr(args, "model_tag", None) or args.model
    if not _is_native(model):
        return
    with _exit_on_error():
        _check_options(model, args)
        own_tokenizer = args.tokenizer not in (None, model)
        prepare_model(model, _cache_root(), own_tokenizer=own_tokenizer)
    apply_parser_defaults(args)


def apply_parser_defaults(args: argparse.Namespace) -> None:
    """Choose GLM's tool-call and reasoning parsers where tools are enabled.

    Only for a glm-dsa file, and only where the user named no parser.
    """
    model = getattr(args, "model_tag", None) or args.model
    if not args.enable_auto_tool_choice or not _is_native(model):
        return
    if not args.tool_call_parser:
        args.tool_call_parser = _TOOL_PARSER
    if not args.reasoning_parser:
        args.reasoning_parser = _REASONING_PARSER


def resolve_engine_args(args: Any) -> None:
    """Turn a glm-dsa GGUF model of `EngineArgs` into its model directory.

    `args` is changed in place: model, tokenizer, load format, served name and, on
    devices that compute on blocks, the quantization method. Other models are left as
    they are. Raises GGUFError for a file or a combination that cannot be served.
    """
    model = args.model
    if not isinstance(model, str) or not _is_native(model):
        return
    _check_options(model, args)
    if args.tokenizer == model:
        args.tokenizer = None
    prepared = prepare_model(model, _cache_root(), own_tokenizer=bool(args.tokenizer))
    check_speculation(model, args, prepared.config)
    logger.info("Configuration and tokenizer are in %s", prepared.directory)
    args.model = str(prepared.directory)
    if args.load_format in ("auto", "gguf"):
        args.load_format = LOAD_FORMAT
    if args.config_format == "gguf":
        args.config_format = "auto"
    if args.served_model_name is None:
        args.served_model_name = [model]
    if args.quantization is None and args.load_format == LOAD_FORMAT:
        args.quantization = _default_quantization()


def tokenizer_source(name: str | Path) -> str | Path:
    """The model directory where `name` is a glm-dsa GGUF file, else `name`."""
    if not _is_native(str(name)):
        return name
    return str(prepare_model(name, _cache_root()).directory)


def check_speculation(model: str, args: Any, config: GlmDsaConfig) -> None:
    """Raise GGUFError if `args` asks for drafts by an MTP block that cannot draft.

    `args` has `speculative_config`, `spec_method` and `pipeline_parallel_size`, as
    `EngineArgs` has.
    """
    speculative = args.speculative_config or {}
    if "mtp" not in (speculative.get("method"), args.spec_method):
        return
    if error := draft_error(args.pipeline_parallel_size):
        raise GGUFError(f"{model}: {error}")
    if not config.num_nextn_predict_layers:
        raise GGUFError(
            f"{model}: speculative method mtp needs the MTP block of the model, which "
            "this file was converted without; leave the speculative options out"
        )


def draft_error(stages: int) -> str | None:
    """Why an MTP block cannot draft with so many pipeline stages, None if it can.

    Drafts share the token embedding of the main model, which the first stage has.
    """
    if stages == 1:
        return None
    return (
        f"speculative method mtp needs one pipeline stage, not {stages}: the last one, "
        "which drafts, has no token embedding; leave the drafts or the stages out"
    )


def stage_error(config: GlmDsaConfig, first: int) -> str | None:
    """Why no pipeline stage can begin at layer `first`, None if one can.

    The top-k is not sent from stage to stage: a first layer that shares the one of an
    earlier layer would read garbage.
    """
    if first >= config.num_hidden_layers or config.indexer_full[first]:
        return None
    full = [i for i, owns in enumerate(config.indexer_full) if owns]
    return (
        f"this pipeline stage begins at layer {first}, which shares the top-k of a "
        "layer in the stage before; let each stage begin at one of the layers "
        f"{full}: see VLLM_PP_LAYER_PARTITION"
    )


@contextmanager
def _exit_on_error() -> Iterator[None]:
    """Turn a GGUFError into one line on stderr and exit status 1."""
    try:
        yield
    except GGUFError as error:
        print(f"vllm serve: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def _check_options(model: str, args: Any) -> None:
    for option, value, allowed in (
        ("--quantization", args.quantization, (None, QUANTIZATION)),
        ("--load-format", args.load_format, ("auto", "gguf", LOAD_FORMAT, "dummy")),
    ):
        if value not in allowed:
            raise GGUFError(
                f"{model}: {option} {value} cannot be combined with a "
                f"{ARCHITECTURE} GGUF file, whose weights carry their own format; "
                f"leave {option} out"
            )


def _default_quantization() -> str | None:
    """Blocks stay quantized on accelerators; a CPU computes on plain weights."""
    from vllm.platforms import current_platform

    return None if current_platform.is_cpu() else QUANTIZATION


def _model_argument(argv: Sequence[str]) -> str | None:
    """The model of a `vllm serve` command line, None for other commands."""
    if len(argv) < 3 or argv[1] != "serve":
        return None
    if not argv[2].startswith("-"):
        return argv[2]
    for option, value in pairwise(argv):
        if option == "--model":
            return value
    inline = (arg.partition("=")[2] for arg in argv[2:] if arg.startswith("--model="))
    return next(inline, None)


def _is_native(model: str | None) -> bool:
    """Whether `model` is a local GGUF file, good or bad, that this build reads.

    A readable file of another architecture belongs to vllm-gguf-plugin, as do files
    that are not there: the plugin knows remote ones. Without it they are ours, to be
    refused with a message.
    """
    if not model:
        return False
    path = Path(model)
    has_plugin = find_spec("vllm_gguf_plugin") is not None
    if path.is_dir():
        return not has_plugin and _holds_only_gguf(path)
    if path.suffix.lower() != ".gguf":
        return False
    if not has_plugin:
        return True
    return path.is_file() and _architecture(path) in (None, ARCHITECTURE)


def _holds_only_gguf(directory: Path) -> bool:
    """A directory of GGUF files without a configuration: the reader names them."""
    if (directory / "config.json").exists() or (directory / "params.json").exists():
        return False
    return directory.suffix == ".gguf" or any(directory.glob("*.gguf"))


def _architecture(path: Path) -> str | None:
    """The architecture that the first bytes of a GGUF file tell, None if they don't.

    llama.cpp and gguf-py write the key first; a file that hides it is left to the
    full reader.
    """
    key = b"general.architecture"
    with path.open("rb") as stream:
        head = stream.read(4096)
    start = head.find(key) + len(key)
    if not head.startswith(b"GGUF") or start < len(key) or start + 12 > len(head):
        return None
    kind, length = struct.unpack_from("<IQ", head, start)
    name = head[start + 12 : start + 12 + min(length, 64)]
    return name.decode("utf-8", "replace") if kind == 8 else None


def _cache_root() -> str:
    from vllm import envs

    return envs.VLLM_CACHE_ROOT


__all__ = [
    "LOAD_FORMAT",
    "QUANTIZATION",
    "apply_parser_defaults",
    "check_command_line",
    "check_serve_arguments",
    "check_speculation",
    "draft_error",
    "resolve_engine_args",
    "stage_error",
    "tokenizer_source",
]

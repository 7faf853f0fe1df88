# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The command `vllm glm-doctor`: can this machine serve this GLM-5 GGUF file, and how.

Docs: docs/doctor.md, docs/design/doctor.md.
"""

import argparse
import contextlib
import json
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.cli.types import CLISubcommand

# Imported for every `vllm` command, so the rest is imported where it is used.
if TYPE_CHECKING:
    from vllm.transformers_utils.gguf.doctor.machine import Machine
    from vllm.transformers_utils.gguf.doctor.trial import Request

NAME = "glm-doctor"
HELP = "Say whether a machine can serve a GLM-5 GGUF file, and how."
_CACHE_SPACE = "VLLM_CPU_KVCACHE_SPACE"


class GlmDoctorSubcommand(CLISubcommand):
    """The `glm-doctor` subcommand for the vLLM CLI."""

    name = NAME

    @staticmethod
    def cmd(args: argparse.Namespace) -> None:
        raise SystemExit(run(args))

    def subparser_init(
        self, subparsers: "argparse._SubParsersAction[Any]"
    ) -> argparse.ArgumentParser:
        parser: argparse.ArgumentParser = subparsers.add_parser(
            NAME, help=HELP, description=HELP, usage=f"vllm {NAME} FILE.gguf [options]"
        )
        add_arguments(parser)
        return parser


def cmd_init() -> list[CLISubcommand]:
    return [GlmDoctorSubcommand()]


def run_early(argv: Sequence[str]) -> None:
    """Run `vllm glm-doctor`, if that is the command, and exit.

    Called before the command line imports the server, which takes longer than the
    answer.
    """
    if list(argv[1:2]) != [NAME]:
        return
    parser = argparse.ArgumentParser(prog=f"vllm {NAME}", description=HELP)
    add_arguments(parser)
    raise SystemExit(run(parser.parse_args(argv[2:])))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command; those of `vllm serve` have the same names."""
    from vllm.transformers_utils.gguf.doctor.memory import CACHE_DTYPES
    from vllm.transformers_utils.gguf.doctor.trial import DTYPE_BYTES

    parser.add_argument("model", metavar="FILE.gguf", help="any shard of the model")
    parser.add_argument("--json", action="store_true", help="print JSON")
    machine = parser.add_argument_group("machine, where it is not the one at hand")
    machine.add_argument("--gpus", type=_positive, metavar="N")
    machine.add_argument("--gpu-memory", type=_size, metavar="GIB", help="of each GPU")
    machine.add_argument(
        "--capability", type=_capability, metavar="X.Y", help="compute capability"
    )
    serve = parser.add_argument_group("options of vllm serve")
    serve.add_argument("--tensor-parallel-size", "-tp", type=_positive, metavar="N")
    serve.add_argument("--pipeline-parallel-size", "-pp", type=_positive, metavar="N")
    serve.add_argument("--enable-expert-parallel", "-ep", action="store_true")
    serve.add_argument("--max-model-len", type=_length, metavar="N")
    serve.add_argument("--max-num-batched-tokens", type=_length, metavar="N")
    serve.add_argument("--kv-cache-dtype", choices=CACHE_DTYPES)
    serve.add_argument("--kv-cache-memory-bytes", type=_length, metavar="N")
    serve.add_argument(
        "--gpu-memory-utilization", type=_fraction, default=0.92, metavar="PART"
    )
    serve.add_argument("--dtype", choices=sorted(DTYPE_BYTES), default="bfloat16")
    serve.add_argument("--quantization", choices=["gguf_native"])
    serve.add_argument("--tokenizer", metavar="NAME")
    more = parser.add_argument_group("others")
    more.add_argument(
        "--mtp", type=_positive, metavar="N", help="draft N tokens with the MTP block"
    )
    more.add_argument(
        "--overhead",
        type=_number,
        metavar="GIB",
        help="memory of a rank that is neither weights nor cache nor computed",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; 0 if the model runs or no machine is known, else 1."""
    from vllm.transformers_utils.gguf.doctor import report
    from vllm.transformers_utils.gguf.doctor.diagnosis import diagnose

    # Only the report goes to standard output; vLLM logs there, too.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            diagnosis = diagnose(args.model, _machine(args), _request(args))
    except ValueError as error:
        if args.json:
            print(json.dumps(report.error_json(args.model, str(error)), indent=2))
        else:
            print(f"vllm {NAME}: error: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(report.as_json(diagnosis), indent=2))
    else:
        print(report.as_text(diagnosis), end="")
    return 1 if diagnosis.runs is False else 0


def _is_told(args: argparse.Namespace) -> bool:
    """Whether options describe the machine."""
    return not (args.gpus is args.gpu_memory is args.capability is None)


def _machine(args: argparse.Namespace) -> "Machine | None":
    """The GPUs that options describe, else the machine that this build serves on.

    Raises MachineError if the options leave the memory open.
    """
    from vllm.transformers_utils.gguf.doctor.engine import build_kind
    from vllm.transformers_utils.gguf.doctor.machine import (
        find_machine,
        given_machine,
    )

    if not _is_told(args):
        return find_machine(build_kind())
    return given_machine(
        find_machine("cuda"),
        gpus=args.gpus,
        gpu_memory=args.gpu_memory,
        capability=args.capability,
    )


def _request(args: argparse.Namespace) -> "Request":
    from vllm.transformers_utils.gguf.doctor.engine import build_kind
    from vllm.transformers_utils.gguf.doctor.machine import GIB
    from vllm.transformers_utils.gguf.doctor.trial import Request

    memory = args.kv_cache_memory_bytes
    space = os.environ.get(_CACHE_SPACE, "")
    if space.isdecimal() and build_kind() == "cpu" and not _is_told(args):
        # As the CPU platform reads it: whole GiB, and before the option.
        memory = int(space) * GIB
    return Request(
        tensor=args.tensor_parallel_size,
        pipeline=args.pipeline_parallel_size,
        experts=args.enable_expert_parallel,
        length=args.max_model_len,
        cache_dtype=args.kv_cache_dtype,
        dtype=args.dtype,
        keep_blocks=args.quantization is not None,
        draft_tokens=args.mtp or 0,
        utilization=args.gpu_memory_utilization,
        cache_memory=memory,
        batched_tokens=args.max_num_batched_tokens,
        overhead=None if args.overhead is None else int(args.overhead * GIB),
        tokenizer=args.tokenizer,
    )


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if not 0 < value < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return value


def _length(text: str) -> int:
    """As --max-model-len of vllm serve: 4096, 128k (thousands) or 128K (1,024s)."""
    from vllm.utils.argparse_utils import human_readable_int

    try:
        value = human_readable_int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(value)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return value


def _size(text: str) -> float:
    value = _number(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size")
    return value


def _fraction(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0 and at most 1")
    return value


def _capability(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,2})\.(\d)", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a compute capability such as 12.0"
        )
    return int(match[1]), int(match[2])

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The rebuilt tokenizer against an independent BPE, and every way to refuse a file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, GenerationConfig

from tests.helpers.bpe_reference import ReferenceBPE
from tests.helpers.texts import TEXTS
from tiny_vocab import SPECIAL_TOKENS, byte_alphabet, tiny_vocabulary
from vllm.tokenizers import get_tokenizer
from vllm.tokenizers.registry import cached_tokenizer_from_config
from vllm.transformers_utils.gguf.errors import GGUFError
from vllm.transformers_utils.gguf.tokenizer import (
    MAX_TEMPLATE_CHARS,
    tokenizer_files,
)

METADATA = tiny_vocabulary().metadata()
IDS = tiny_vocabulary().ids
CONFIG = {"model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"]}


def write(directory: Path, metadata: dict[str, Any]) -> Path:
    for name, text in tokenizer_files(metadata).items():
        (directory / name).write_bytes(text.encode())
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


def load(directory: Path, **changes: Any) -> Any:
    return AutoTokenizer.from_pretrained(write(directory, METADATA | changes))


def parsed(name: str, **changes: Any) -> Any:
    return json.loads(tokenizer_files(METADATA | changes)[name])


def key(name: str) -> str:
    return f"tokenizer.ggml.{name}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"), METADATA)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def reference() -> ReferenceBPE:
    return ReferenceBPE(METADATA)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_ids_equal_the_reference(tokenizer, reference, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == reference.encode(text)
    assert tokenizer.decode(ids) == reference.decode(ids) == text


def test_the_texts_use_merges_and_added_tokens(reference):
    used = {i for text in TEXTS for i in reference.encode(text)}
    assert len([i for i in used if 256 <= i < IDS["<|endoftext|>"]]) > 60
    assert len([i for i in used if i >= IDS["<|endoftext|>"]]) > 8


@settings(max_examples=1500, deadline=None)
@given(st.text())
def test_ids_equal_the_reference_on_any_text(tokenizer, reference, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == reference.encode(text)
    assert tokenizer.decode(ids) == text


PIECES = st.sampled_from(
    ["the", "'s", "'LL", "1", "22", "333", "٣", "½", " ", "  ", "\t", "\n", "\r\n"]
    + ["\u00a0", "\u3000", "e\u0301", "🍎", "👩\u200d👧", "書", "й", "_", "==", "x"]
    + ["<think>", "</think", "<|user|>", "<|", "[gMASK]", "<sop>", "[PAD508]"]
)


@settings(max_examples=1500, deadline=None)
@given(st.lists(PIECES, max_size=20).map("".join))
def test_ids_equal_the_reference_on_mixed_pieces(tokenizer, reference, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == reference.encode(text)
    assert tokenizer.decode(ids) == text


@settings(max_examples=500, deadline=None)
@given(st.lists(st.integers(0, 507), max_size=12))
def test_decoding_any_ids_equals_the_reference(tokenizer, reference, ids):
    # Bytes that are not UTF-8 decode to replacement characters, whose number is the
    # decoder's choice: compare the rest.
    ours, theirs = tokenizer.decode(ids), reference.decode(ids)
    assert ours.replace("\ufffd", "") == theirs.replace("\ufffd", "")


def test_decoding_hides_special_tokens_and_keeps_user_defined_ones(tokenizer):
    ids = [IDS[name] for name in ("[gMASK]", "<|user|>", "<think>", "</tool_call>")]
    assert tokenizer.decode(ids) == "[gMASK]<|user|><think></tool_call>"
    shown = tokenizer.decode(ids, skip_special_tokens=True)
    assert shown == "<think></tool_call>"


def test_every_control_token_is_special_by_name(tokenizer):
    assert set(tokenizer.all_special_tokens) == set(SPECIAL_TOKENS)
    assert set(tokenizer.all_special_ids) == {IDS[name] for name in SPECIAL_TOKENS}


def test_padding_rows_are_no_tokens(tokenizer):
    assert len(tokenizer) == 508
    assert len(tokenizer.encode("[PAD508]")) > 1
    assert max(tokenizer.get_vocab().values()) == 507


def test_ids_stay_when_a_padding_row_lies_between(tmp_path):
    types = list(METADATA[key("token_type")])
    types[IDS["[MASK]"]] = 5
    tokenizer = load(tmp_path, **{key("token_type"): types})
    assert tokenizer.convert_tokens_to_ids("<think>") == IDS["<think>"]
    assert tokenizer.encode("<sop><think>") == [IDS["<sop>"], IDS["<think>"]]
    assert IDS["[MASK]"] not in tokenizer.get_vocab().values()


def test_a_padding_row_that_a_key_names_is_a_special_token(tmp_path):
    tokenizer = load(tmp_path, **{key("padding_token_id"): 510})
    assert tokenizer.pad_token == "[PAD510]"
    assert tokenizer.pad_token_id == 510
    assert 510 in tokenizer.all_special_ids


def test_an_ordinary_word_named_by_a_key_is_not_hidden(tmp_path):
    word = METADATA[key("tokens")].index("Ġthere")
    tokenizer = load(tmp_path, **{key("unknown_token_id"): word})
    assert tokenizer.decode([word], skip_special_tokens=True) == " there"
    assert tokenizer.unk_token is None


def test_a_user_defined_token_that_ends_generation_is_special(tmp_path):
    tokenizer = load(tmp_path, **{key("eot_token_id"): IDS["</think>"]})
    assert tokenizer.decode([IDS["</think>"]], skip_special_tokens=True) == ""


def test_loading_gives_no_warning(directory, caplog):
    AutoTokenizer.from_pretrained(directory)
    assert not caplog.records


def test_the_tokenizer_json_is_taken_as_it_is(directory, tokenizer):
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    written = json.loads((directory / "tokenizer.json").read_text())
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        assert backend[part] == written[part]
    assert backend["model"] == written["model"]
    assert backend["added_tokens"] == written["added_tokens"]


def test_vllm_loads_the_same_tokenizer(directory, reference):
    text = "I'm 12345 <|user|>\n<think>x"
    assert get_tokenizer(str(directory)).encode(text) == reference.encode(text)

    class Model:
        skip_tokenizer_init = False
        tokenizer = str(directory)
        runner_type = "generate"
        tokenizer_mode = "auto"
        tokenizer_revision = None
        trust_remote_code = False
        hf_config = None

    cached = cached_tokenizer_from_config(Model())
    assert cached.encode(text) == reference.encode(text)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ["x"]),
        ({"add_bos_token": False}, ["x"]),
        ({"add_bos_token": True}, ["[gMASK]", "x"]),
        ({"add_eos_token": True}, ["x", "<|endoftext|>"]),
        (
            {"add_bos_token": True, "add_eos_token": True},
            ["[gMASK]", "x", "<|endoftext|>"],
        ),
    ],
    ids=["absent", "false", "bos", "eos", "both"],
)
def test_bos_and_eos_are_added_as_the_keys_say(tmp_path, flags, expected):
    tokenizer = load(tmp_path, **{key(name): flag for name, flag in flags.items()})
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("x")) == expected
    plain = tokenizer.encode("x", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(plain) == ["x"]


def test_pairs_get_a_bos_each(tmp_path):
    tokenizer = load(tmp_path, **{key("add_bos_token"): True})
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("x", "y")["input_ids"])
    assert tokens == ["[gMASK]", "x", "[gMASK]", "y"]


def test_tokenizer_config_has_length_and_names():
    config = parsed("tokenizer_config.json", **{"glm-dsa.context_length": 202752})
    assert config["model_max_length"] == 202752
    assert config["padding_side"] == "left"
    assert config["clean_up_tokenization_spaces"] is False
    names = [config[f"{name}_token"] for name in ("eos", "pad", "bos", "unk")]
    assert names == ["<|endoftext|>", "<|endoftext|>", "[gMASK]", "<|endoftext|>"]


def test_without_a_padding_key_the_eos_pads():
    metadata = dict(METADATA)
    del metadata[key("padding_token_id")]
    files = tokenizer_files(metadata)
    assert json.loads(files["tokenizer_config.json"])["pad_token"] == "<|endoftext|>"
    generation = json.loads(files["generation_config.json"])
    assert generation["pad_token_id"] == IDS["<|endoftext|>"]


@pytest.mark.parametrize(
    ("kept", "expected"),
    [
        (("eos", "eot", "eom"), ["<|endoftext|>", "<|user|>", "<|observation|>"]),
        (("eom", "eos"), ["<|endoftext|>", "<|observation|>"]),
        (("eot",), ["<|user|>"]),
    ],
    ids=["all", "no eot", "only eot"],
)
def test_eos_list_holds_eos_eot_eom_in_order(kept, expected):
    dropped = {key(f"{n}_token_id") for n in ("eos", "eot", "eom") if n not in kept}
    metadata = {k: v for k, v in METADATA.items() if k not in dropped}
    generation = json.loads(tokenizer_files(metadata)["generation_config.json"])
    assert generation["eos_token_id"] == [IDS[name] for name in expected]


def test_eos_list_has_no_repeats():
    generation = parsed(
        "generation_config.json", **{key("eom_token_id"): IDS["<|user|>"]}
    )
    assert generation["eos_token_id"] == [IDS["<|endoftext|>"], IDS["<|user|>"]]


def test_sampling_defaults_come_from_the_file(tmp_path):
    sampling = {
        "temp": 0.699999988079071,
        "top_p": 0.949999988079071,
        "top_k": 40,
        "min_p": 0.05000000074505806,
        "penalty_repeat": 1.100000023841858,
    }
    changes = {f"general.sampling.{name}": v for name, v in sampling.items()}
    generation = GenerationConfig.from_pretrained(write(tmp_path, METADATA | changes))
    assert generation.temperature == 0.7
    assert generation.top_p == 0.95
    assert generation.top_k == 40
    assert generation.min_p == 0.05
    assert generation.repetition_penalty == 1.1
    assert generation.do_sample is True


def test_without_sampling_keys_only_ids_are_set():
    generation = parsed("generation_config.json")
    assert set(generation) == {"eos_token_id", "pad_token_id", "bos_token_id"}


def test_temperature_zero_is_greedy_and_top_k_zero_is_absent():
    changes = {"general.sampling.temp": 0.0, "general.sampling.top_k": 0}
    generation = parsed("generation_config.json", **changes)
    assert generation["do_sample"] is False
    assert "top_k" not in generation


def replaced(name: str, at: int, value: Any) -> dict[str, Any]:
    items = list(METADATA[key(name)])
    items[at] = value
    return {key(name): items}


BAD = {
    "model": ({key("model"): "llama"}, r"model is 'llama'; only 'gpt2'"),
    "model missing": ({key("model"): None}, r"has no tokenizer\.ggml\.model"),
    "model type": ({key("model"): 3}, r"model is int; expected a string"),
    "pre": ({key("pre"): "qwen2"}, r"pre is 'qwen2'; expected one of .*glm4"),
    "pre missing": ({key("pre"): None}, r"has no tokenizer\.ggml\.pre"),
    "tokens missing": ({key("tokens"): None}, r"has no tokenizer\.ggml\.tokens"),
    "tokens empty": ({key("tokens"): []}, r"tokens is empty"),
    "tokens type": ({key("tokens"): "abc"}, r"tokens is str; expected an array"),
    "token type": (replaced("tokens", 7, b"x"), r"tokens\[7\] is b'x'; expected str"),
    "token empty": (replaced("tokens", 300, ""), r"tokens\[300\] is empty"),
    "token twice": (replaced("tokens", 300, "!"), r"tokens\[300\] is '!', as is \[0\]"),
    "byte missing": (replaced("tokens", 0, "!!"), r"no token '!' for byte 0x21"),
    "types missing": ({key("token_type"): None}, r"has no tokenizer\.ggml\.token_type"),
    "types short": ({key("token_type"): [1] * 511}, r"has 511 elements; .* has 512"),
    "type unknown": (replaced("token_type", 9, 6), r"token_type\[9\] is 6 for '\*'"),
    "type bool": (replaced("token_type", 9, True), r"token_type\[9\] is True"),
    "merges missing": ({key("merges"): None}, r"has no tokenizer\.ggml\.merges"),
    "merge no space": (replaced("merges", 4, "Ġw"), r"merges\[4\] is 'Ġw'; expected"),
    "merge two spaces": (replaced("merges", 4, "a b c"), r"merges\[4\] is 'a b c'"),
    "merge half": (replaced("merges", 4, "a "), r"merges\[4\] is 'a '; expected two"),
    "merge unknown": (replaced("merges", 4, "q zzz"), r"merges\[4\].*'zzz' is not in"),
    "merge result": (replaced("merges", 4, "q z"), r"merges\[4\].*'qz' is not in"),
    "merge twice": (replaced("merges", 4, "h e"), r"merges\[4\] is 'h e', which an"),
    "vocab_size": ({"glm-dsa.vocab_size": 513}, r"vocab_size is 513; .* has 512"),
    "id high": ({key("eos_token_id"): 512}, r"eos_token_id is 512; .* 0 to 511"),
    "id negative": ({key("eom_token_id"): -1}, r"eom_token_id is -1; expected an id"),
    "id float": ({key("bos_token_id"): 1.0}, r"bos_token_id is 1\.0; expected an id"),
    "id bool": ({key("eot_token_id"): True}, r"eot_token_id is True; expected an id"),
    "add_bos int": ({key("add_bos_token"): 1}, r"add_bos_token is 1; expected a bool"),
    "temp": ({"general.sampling.temp": -1.0}, r"temp is -1\.0; expected from 0\.0"),
    "temp nan": ({"general.sampling.temp": float("nan")}, r"temp is nan"),
    "top_p": ({"general.sampling.top_p": 1.5}, r"top_p is 1\.5; expected from"),
    "top_k text": ({"general.sampling.top_k": "9"}, r"top_k is '9'; expected from"),
    "template type": ({"tokenizer.chat_template": 5}, r"template is int; expected a"),
    "template long": (
        {"tokenizer.chat_template": "x" * (MAX_TEMPLATE_CHARS + 1)},
        r"chat_template has 262145 characters; at most 262144",
    ),
    "template surrogate": (
        {"tokenizer.chat_template": "\udc80"},
        r"chat_template is not valid text",
    ),
    "template name": (
        {"tokenizer.chat_template.../../evil": "x"},
        r"evil' is not a usable template key",
    ),
    "template default twice": (
        {"tokenizer.chat_template.default": "x"},
        r"default' is not a usable template key",
    ),
    "template listed only": (
        {"tokenizer.chat_templates": ["tool_use"]},
        r"has no tokenizer\.chat_template\.tool_use",
    ),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_a_bad_file_is_refused(changes, message):
    with pytest.raises(GGUFError, match=message):
        tokenizer_files(METADATA | changes)


def test_a_file_without_any_eos_is_refused():
    names = {key(f"{name}_token_id") for name in ("eos", "eot", "eom")}
    metadata = {k: v for k, v in METADATA.items() if k not in names}
    with pytest.raises(GGUFError, match="none of tokenizer.ggml.eos_token_id"):
        tokenizer_files(metadata)


@pytest.mark.parametrize("flag", ["bos", "eos"])
def test_adding_a_token_that_has_no_id_is_refused(flag):
    metadata = METADATA | {key(f"add_{flag}_token"): True}
    del metadata[key(f"{flag}_token_id")]
    with pytest.raises(GGUFError, match=rf"add_{flag}_token is true; the file has no"):
        tokenizer_files(metadata)


@pytest.mark.parametrize("pre", ["glm4", "chatglm-bpe"])
def test_both_names_of_the_split_are_taken(pre):
    assert tokenizer_files(METADATA | {key("pre"): pre}) == tokenizer_files(METADATA)


def test_arrays_may_be_decoded_on_demand():
    class Lazy:
        def __init__(self, items: list[Any]) -> None:
            self.items = items

        def decode(self) -> list[Any]:
            return self.items

    lazy = {k: Lazy(v) if isinstance(v, list) else v for k, v in METADATA.items()}
    assert tokenizer_files(lazy) == tokenizer_files(METADATA)


def test_one_template_is_a_file(tmp_path):
    tokenizer = load(tmp_path)
    assert (tmp_path / "chat_template.jinja").exists()
    assert tokenizer.chat_template == METADATA["tokenizer.chat_template"]


def test_a_file_without_template_loads(tmp_path):
    metadata = dict(METADATA)
    del metadata["tokenizer.chat_template"]
    tokenizer = AutoTokenizer.from_pretrained(write(tmp_path, metadata))
    assert tokenizer.chat_template is None
    assert not (tmp_path / "chat_template.jinja").exists()


def test_named_templates_follow_the_default(tmp_path):
    changes = {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_template.rag": "rag",
        "tokenizer.chat_templates": ["rag", "tool_use"],
    }
    tokenizer = load(tmp_path, **changes)
    templates = {"default": "plain", "tool_use": "tools", "rag": "rag"}
    assert tokenizer.chat_template == templates
    assert next(iter(tokenizer.chat_template)) == "default"
    assert tokenizer.get_chat_template(tools=[{}]) == "tools"
    assert tokenizer.get_chat_template() == "plain"


def test_a_template_is_neither_parsed_nor_changed():
    broken = "{% for %}{{ 9 ** 9 ** 9 }}\r\n\t\ufeff{#"
    files = tokenizer_files(METADATA | {"tokenizer.chat_template": broken})
    assert files["chat_template.jinja"] == broken


def test_the_template_renders_with_its_prefix_once(tokenizer):
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "the river"}],
        add_generation_prompt=True,
        return_dict=False,
    )
    start = [IDS[name] for name in ("[gMASK]", "<sop>", "<|user|>")]
    assert ids[:3] == start
    assert ids[-1] == IDS["<think>"]
    assert ids.count(IDS["[gMASK]"]) == 1


def glm_size_metadata() -> dict[str, Any]:
    """154,880 tokens and 321,649 merges, most of them made of three-letter parts."""
    alphabet = sorted(byte_alphabet())
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [a + b for a in letters for b in letters]
    words = [p + q for p in pairs for q in pairs]
    tokens = alphabet + pairs + words[: 154_820 - len(alphabet) - len(pairs)]
    merges = [f"{pair[0]} {pair[1]}" for pair in pairs]
    triples = [p + c for p in pairs for c in letters]
    tokens = tokens[: 154_820 - len(triples)] + triples
    known = set(tokens)
    for token in tokens[len(alphabet) + len(pairs) :]:
        for cut in range(1, len(token)):
            if token[:cut] in known and token[cut:] in known:
                merges.append(f"{token[:cut]} {token[cut:]}")
    merges = merges[:321_649]
    assert len(merges) == 321_649
    special = [f"<|special{i}|>" for i in range(36)]
    tokens += special + [f"[PAD{i}]" for i in range(154_856, 154_880)]
    types = [1] * 154_820 + [3] * 36 + [5] * 24
    return METADATA | {
        "glm-dsa.vocab_size": 154_880,
        key("tokens"): tokens,
        key("token_type"): types,
        key("merges"): merges,
        key("eos_token_id"): 154_820,
        key("padding_token_id"): 154_821,
        key("bos_token_id"): 154_822,
        key("eot_token_id"): 154_827,
        key("eom_token_id"): 154_829,
        key("unknown_token_id"): 154_820,
    }


def test_a_vocabulary_of_glm_size_is_quick_and_loads_unpatched(tmp_path, caplog):
    metadata = glm_size_metadata()
    started = time.thread_time()
    files = tokenizer_files(metadata)
    # It takes 1.5 s.
    assert time.thread_time() - started < 15
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    # Above 100,000 tokens transformers looks for a Mistral tokenizer to repair.
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    written = json.loads(files["tokenizer.json"])
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    assert backend["pre_tokenizer"] == written["pre_tokenizer"]
    assert len(tokenizer) == 154_856
    text = "abcd efgh 1234567 <|special7|>xyz"
    assert tokenizer.encode(text) == ReferenceBPE(metadata).encode(text)
    assert not caplog.records

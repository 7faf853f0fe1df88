# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The trained tiny model's vocabulary, questions and training text.

Answers are worked out again here from the text of the question alone.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from jinja2 import Environment
from tokenizers import Tokenizer

from tests.helpers.texts import TEXTS
from tiny_vocab import CHAT_TEMPLATE, UNUSED, tiny_vocabulary
from tools.tiny_glm_dsa import lexicon
from tools.tiny_glm_dsa.corpus import (
    ANSWER,
    RANDOM,
    TEXT,
    batches,
    render,
    sequences,
)
from tools.tiny_glm_dsa.tasks import (
    HELLO,
    TASKS,
    Question,
    is_correct,
    make_question,
    pairs,
    plain_text,
)
from tools.tiny_glm_dsa.vocabulary import Encoder, trained_vocabulary
from vllm.transformers_utils.gguf.tokenizer import tokenizer_files

LENGTHS = (256, 1000, 2048)
TEMPLATE = Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATE)
ENCODER = Encoder()
FACT = re.compile(r"The code of the (\w+ \w+) is (\d{4})\.")
ENDS = ("<|user|>", "<|endoftext|>")


def answer_to(text: str) -> str:
    """What is right to answer to the last question of `text`."""
    *context, last = text.split("\n")
    words = re.findall(r"\w+", last)
    if last.startswith("What is the code of the "):
        name = " ".join(words[-2:])
        (code,) = (code for pair, code in FACT.findall(context[0]) if pair == name)
        return f"The code of the {name} is {code}."
    if last.startswith("Where is "):
        moves = re.findall(r"(\w+) (?:went|moved) to the (\w+)\.", context[0])
        return f"{words[-1]} is in the {dict(moves)[words[-1]]}."
    if last.startswith("Repeat:"):
        return f"I repeat: {last.removeprefix('Repeat: ')}."
    if last.startswith("Sort:"):
        return " ".join(sorted(words[1:], key=int))
    if last.startswith("Count "):
        times = words.count(words[1]) - 1
        return f"The word {words[1]} occurs {times} time{'' if times == 1 else 's'}."
    if "+" in last:
        a, b = words[-2:]
        return f"{a} + {b} = {int(a) + int(b)}."
    return HELLO[last]


def questions(task: str, split: Any, count: int, **options: int) -> list[Question]:
    rng = random.Random(7)
    return [make_question(task, rng, split=split, **options) for _ in range(count)]


def prompt_ids(question: Question) -> list[int]:
    return ENCODER.encode(render(question.messages, thinking=True))


@pytest.fixture(scope="module", params=LENGTHS)
def rows(request: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    return list(islice(sequences(3, request.param), 120_000 // request.param))


@pytest.fixture(scope="module")
def training_text() -> str:
    """About 600,000 tokens."""
    rows = islice(sequences(5, 1024), 600)
    return "\n\n".join(ENCODER.decode(ids.tolist()) for ids, _ in rows)


class TestVocabulary:
    def test_default_vocabulary_did_not_change(self) -> None:
        data = json.dumps(tiny_vocabulary().metadata()).encode()
        assert hashlib.sha256(data).hexdigest() == (
            "17b620741240c859f87d08f74a30467456a42f9813718dc1644684ce1294a209"
        )

    def test_trained_vocabulary_did_not_change(self) -> None:
        """The shipped weights hang on it."""
        data = json.dumps(trained_vocabulary().metadata()).encode()
        assert hashlib.sha256(data).hexdigest() == (
            "5ae8a68f90245ee821cd5b243a46bc2bdac78cbf9d91a8bd1ee161d2fa612592"
        )

    def test_encoder_gives_the_ids_of_the_gguf_tokenizer(self) -> None:
        files = tokenizer_files(trained_vocabulary().metadata())
        expected = Tokenizer.from_str(files["tokenizer.json"])
        asked = [questions(task, "test", 3) for task in TASKS]
        own = [render(q.messages, q.answer, thinking=True) for q in sum(asked, [])]
        texts = [*TEXTS, *own]
        ids = [expected.encode(text, add_special_tokens=False).ids for text in texts]
        assert ENCODER.encode_batch(texts) == ids
        assert [ENCODER.encode(text) for text in texts] == ids

    @pytest.mark.parametrize("text", TEXTS)
    def test_decoding_gives_the_text_back(self, text: str) -> None:
        assert ENCODER.decode(ENCODER.encode(text)) == text

    def test_words_and_digits_are_one_token_each(self) -> None:
        words = [
            *lexicon.ADJECTIVES,
            *lexicon.NOUNS,
            *lexicon.PEOPLE,
            *lexicon.PLACES,
            *lexicon.VERBS,
            *lexicon.VERBS_ALONE,
            *lexicon.ADVERBS,
            *lexicon.PREPOSITIONS,
            *lexicon.CONJUNCTIONS,
        ]
        assert {w: len(ENCODER.encode(f" {w}")) for w in words} == dict.fromkeys(
            words, 1
        )
        assert len(ENCODER.encode("0123456789")) == 10
        assert len(ENCODER.encode(" The code of the amber falcon is 4821.")) == 13


class TestQuestions:
    @pytest.mark.parametrize("split", ["train", "test"])
    @pytest.mark.parametrize("task", TASKS)
    def test_answer_is_right(self, task: str, split: str) -> None:
        for question in questions(task, split, 50):
            assert question.answer == answer_to(question.messages[-1]["content"])
            assert (
                "".join(s for s, _ in question.spans)
                == (question.messages[-1]["content"])
            )

    def test_only_the_exact_answer_is_correct(self) -> None:
        question = questions("add", "test", 1)[0]
        assert is_correct(question, f" {question.answer}\n")
        for wrong in ("", question.answer[:-1], f"{question.answer} {question.answer}"):
            assert not is_correct(question, wrong)

    def test_same_seed_gives_same_questions(self) -> None:
        for task in TASKS:
            assert questions(task, "test", 5) == questions(task, "test", 5)
        assert questions("add", "test", 5) != questions("add", "train", 5)

    def test_unknown_task_is_an_error(self) -> None:
        with pytest.raises(KeyError, match="riddle"):
            make_question("riddle", random.Random(0), split="test")

    @pytest.mark.parametrize("tokens", [200, 700, 1900])
    def test_needle_prompt_has_the_wanted_length(self, tokens: int) -> None:
        lengths = [
            len(prompt_ids(q)) for q in questions("needle", "test", 30, tokens=tokens)
        ]
        assert min(lengths) > tokens - 20
        assert max(lengths) <= tokens

    @pytest.mark.parametrize("min_distance", [0, 128, 600])
    def test_needle_lies_anywhere_before_the_wanted_distance(
        self, min_distance: int
    ) -> None:
        options = {"tokens": 900, "min_distance": min_distance}
        distances = []
        for question in questions("needle", "test", 120, **options):
            _, after = render(question.messages, thinking=True).split(question.answer)
            distances.append(len(ENCODER.encode(after)))
        assert min(distances) >= min_distance
        assert min(distances) < min_distance + 60
        # The first fact of all can be asked, too.
        assert max(distances) >= 900 - 13 - 20
        middle = (min_distance + 900) / 2
        assert abs(np.mean(distances) - middle) < 0.1 * 900

    def test_needle_prompt_without_room_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="ends 128 tokens before"):
            make_question("needle", random.Random(0), split="test", tokens=100)

    def test_needle_has_other_facts_of_the_same_words(self) -> None:
        """Neither the adjective nor the noun alone tells the fact."""
        shared = [0, 0]
        for question in questions("needle", "test", 20, tokens=1900):
            facts = [pair.split() for pair, _ in FACT.findall(str(question.messages))]
            asked = re.findall(r"of the (\w+) (\w+)\?", str(question.messages))[0]
            for at in range(2):
                shared[at] += sum(fact[at] == asked[at] for fact in facts) > 1
        assert min(shared) >= 10


class TestSplit:
    """Nothing that is asked in tests was ever read in training."""

    def test_a_tenth_of_all_pairs_is_held_out(self) -> None:
        train, test = pairs("train"), pairs("test")
        assert not set(train) & set(test)
        assert len(train) + len(test) == 40 * 40
        assert 120 <= len(test) <= 200

    def test_test_needles_are_held_out_pairs(self) -> None:
        asked = {
            re.findall(r"of the (\w+) (\w+) is", q.answer)[0]
            for q in questions("needle", "test", 50)
        }
        assert asked <= set(pairs("test"))

    def test_no_held_out_pair_is_in_training_text(self, training_text: str) -> None:
        def named(split: Any) -> list[str]:
            return [f"{a} {n}" for a, n in pairs(split) if f" {a} {n}" in training_text]

        assert named("test") == []
        assert len(named("train")) == len(pairs("train"))

    def test_no_held_out_sum_is_in_training_text(self, training_text: str) -> None:
        def sums(text: str) -> set[tuple[int, ...]]:
            found = re.findall(r"(\d+) \+ (\d+)", text)
            return {tuple(sorted(map(int, pair))) for pair in found}

        held_out = sums(str([q.answer for q in questions("add", "test", 3000)]))
        assert len(held_out) > 300
        assert len(sums(training_text)) > 1500
        assert not held_out & sums(training_text)

    def test_no_held_out_sentence_is_in_training_text(self, training_text: str) -> None:
        def sentences(text: str) -> set[str]:
            return {found.strip() for found in re.findall(r"[^.:?!\n<>]+\.", text)}

        rng = random.Random(1)
        held_out = sentences(" ".join(plain_text(rng, "test") for _ in range(500)))
        assert len(held_out) > 1000
        assert len(sentences(training_text)) > 10_000
        assert not held_out & sentences(training_text)

    @pytest.mark.parametrize("task", ["copy", "sort", "count", "story"])
    def test_no_held_out_list_is_in_training_text(
        self, task: str, training_text: str
    ) -> None:
        asked = [q.messages[-1]["content"] for q in questions(task, "test", 1000)]
        assert not [text for text in asked if f"\n{text}<|assistant|>" in training_text]

    def test_held_out_sequences_ask_only_held_out_facts(self) -> None:
        asked = set()
        for ids, _ in islice(sequences(0, 1024, split="test"), 20):
            text = ENCODER.decode(ids.tolist())
            asked |= set(re.findall(r"What is the code of the (\w+) (\w+)\?", text))
        assert asked and asked <= set(pairs("test"))


class TestRender:
    @pytest.mark.parametrize("thinking", [True, False])
    def test_prompt_is_the_chat_template(self, thinking: bool) -> None:
        talk: list[dict[str, str]] = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello!"},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "What is 1 + 2?\n"},
            {"role": "assistant", "content": "3", "reasoning_content": ""},
            {"role": "user", "content": "Why?"},
            {"role": "assistant", "content": "Well.", "reasoning_content": "hm\n"},
            {"role": "user", "content": ""},
        ]
        options = {} if thinking else {"enable_thinking": False}
        for start in range(len(talk)):
            expected = TEMPLATE.render(
                messages=talk[start:], add_generation_prompt=True, **options
            )
            assert render(talk[start:], thinking=thinking) == expected

    def test_completion_closes_the_thinking_and_ends_the_turn(self) -> None:
        talk = [{"role": "user", "content": "Hello!"}]
        for thinking, completion in ((True, "</think>Yes.<|user|>"), (False, "Yes.")):
            prompt = render(talk, thinking=thinking)
            assert render(talk, "Yes.", thinking=thinking).startswith(
                prompt + completion
            )

    def test_history_is_what_was_generated(self) -> None:
        """A next turn goes on where the completion ended, but for the newline."""
        first = [{"role": "user", "content": "Hello!"}]
        reply = {"role": "assistant", "content": "Yes.", "reasoning_content": ""}
        talk = [*first, reply, {"role": "user", "content": "What?"}]
        assert render(talk, thinking=True).startswith(
            render(first, "Yes.", thinking=True)
        )

    def test_unknown_role_is_an_error(self) -> None:
        with pytest.raises(KeyError, match="tool"):
            render([{"role": "tool", "content": ""}], thinking=True)


def documents(ids: np.ndarray) -> Iterator[str]:
    """The documents of a sequence, but for a cut one at the end."""
    text = ENCODER.decode(ids.tolist()).removesuffix("[gMASK]")
    start, *texts = text.split("[gMASK]<sop>")
    assert start == ""
    for text in texts:
        if text.endswith(ENDS):
            yield text


def turns(document: str) -> list[tuple[str, bool, str]]:
    """User's message, whether the answer follows <think>, and the answer."""
    pattern = r"\n(.*?)<\|assistant\|>\n(<think>)?</think>(.*?)<\|user\|>"
    body = document.removeprefix("<|user|>")
    found = re.findall(pattern, body, re.DOTALL)
    assert re.sub(pattern, "", body, flags=re.DOTALL) == ""
    return [(asked, bool(think), answer) for asked, think, answer in found]


class TestSequences:
    def test_shapes_types_and_ranges(self, rows: Any) -> None:
        types = np.array(trained_vocabulary().types)
        for ids, classes in rows:
            assert ids.dtype == np.int16 and classes.dtype == np.uint8
            assert ids.shape == classes.shape == rows[0][0].shape
            assert (types[ids] != UNUSED).all()  # also fails beyond the range
            assert set(classes.tolist()) <= {RANDOM, TEXT, ANSWER}

    def test_ids_are_those_of_the_whole_text(self, rows: Any) -> None:
        for ids, _ in rows:
            assert ENCODER.encode(ENCODER.decode(ids.tolist())) == ids.tolist()

    def test_only_plain_text_at_the_end_is_cut(self, rows: Any) -> None:
        for ids, _ in rows:
            text = ENCODER.decode(ids.tolist()).removesuffix("[gMASK]")
            _, *texts, last = text.split("[gMASK]<sop>")
            assert all(text.endswith(ENDS) for text in texts)
            if not last.endswith(ENDS):
                assert "<|" not in last

    def test_conversations_are_the_chat_template_and_answers_right(
        self, rows: Any
    ) -> None:
        count = 0
        for document in (text for ids, _ in rows for text in documents(ids)):
            if document.endswith("<|endoftext|>"):
                continue
            haystack, talk = "", []
            for asked, think, answer in turns(document):
                first, *_ = asked.split("\n")
                if FACT.search(first):
                    haystack = first
                context = f"{haystack}\n" if asked.startswith("What is the c") else ""
                assert answer == answer_to(context + asked)
                talk.append({"role": "user", "content": asked})
                reply = {"role": "assistant", "content": answer}
                talk.append(reply | ({"reasoning_content": ""} if think else {}))
                count += 1
            expected = TEMPLATE.render(messages=talk)
            assert f"[gMASK]<sop>{document}" == f"{expected}<|user|>"
        assert count > 300

    def test_answer_class_marks_what_the_model_generates(self, rows: Any) -> None:
        for ids, classes in rows:
            generated = ENCODER.decode(ids[classes == ANSWER].tolist())
            expected = "".join(
                f"{'</think>' * think}{answer}<|user|>"
                for document in documents(ids)
                if document.endswith("<|user|>")
                for _, think, answer in turns(document)
            )
            assert generated == expected

    def test_digits_outside_answers_cannot_be_foretold(self, rows: Any) -> None:
        digits = ENCODER.encode("0123456789")
        for ids, classes in rows:
            assert TEXT not in classes[np.isin(ids, digits)]

    def test_names_outside_answers_cannot_be_foretold(self, rows: Any) -> None:
        """The two tokens after "code of the", in facts and in questions."""
        start = ENCODER.encode(" code of the")
        for ids, classes in rows:
            for at in range(len(ids) - 4):
                if ids[at : at + 3].tolist() == start:
                    kind = ANSWER if classes[at] == ANSWER else RANDOM
                    assert classes[at + 3 : at + 5].tolist() == [kind, kind]

    def test_asked_facts_lie_anywhere_in_the_haystack(self, rows: Any) -> None:
        places = []
        for document in (text for ids, _ in rows for text in documents(ids)):
            facts = [pair for pair, _ in FACT.findall(document.split("\nWhat")[0])]
            if len(facts) < 5:
                continue
            asked = re.findall(r"What is the code of the (\w+ \w+)\?", document)
            places += [facts.index(pair) / (len(facts) - 1) for pair in asked]
        quarters = np.histogram(places, bins=4, range=(0, 1))[0] / len(places)
        assert quarters.min() > 0.15
        assert 0 in places and 1 in places

    def test_mix(self, rows: Any) -> None:
        kinds = np.concatenate([classes for _, classes in rows])
        assert np.mean(kinds == ANSWER) >= 0.2
        assert np.mean(kinds == RANDOM) <= 0.35
        texts = [text for ids, _ in rows for text in documents(ids)]
        needles = sum(len(ENCODER.encode(t)) for t in texts if "code of the" in t)
        assert 0.45 <= needles / kinds.size <= 0.75
        asked = sum(text.count("What is the code") for text in texts)
        assert asked / len(rows) >= rows[0][0].size / 200

    def test_same_seed_gives_same_sequences(self) -> None:
        for length in LENGTHS:
            one, same, other = (
                np.stack([np.stack(r) for r in islice(sequences(seed, length), 5)])
                for seed in (1, 1, 2)
            )
            assert (one == same).all()
            assert (one != other).any()

    def test_too_short_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="length is 100"):
            next(sequences(0, 100))


class TestBatches:
    def test_same_arguments_give_same_batches(self) -> None:
        one, two = (batches(4, 256, 3, 2) for _ in range(2))
        for (ids, kinds), (same_ids, same_kinds) in islice(
            zip(one, two, strict=True), 5
        ):
            assert ids.shape == kinds.shape == (3, 256)
            assert ids.dtype == np.int16 and kinds.dtype == np.uint8
            assert (ids == same_ids).all() and (kinds == same_kinds).all()
        one.close()
        two.close()

    def test_workers_make_different_sequences(self) -> None:
        source = batches(0, 256, 4, 2)
        found = [row.tobytes() for ids, _ in islice(source, 6) for row in ids]
        source.close()
        assert len(set(found)) == 24

    def test_each_worker_has_a_seed_of_its_own(self) -> None:
        source = batches(2, 256, 2, 3)
        made = list(islice(source, 6))
        source.close()
        for worker in range(3):
            expected = list(islice(sequences(2000 + worker, 256), 4))
            ids = np.concatenate([made[worker][0], made[worker + 3][0]])
            kinds = np.concatenate([made[worker][1], made[worker + 3][1]])
            assert (ids == np.stack([row for row, _ in expected])).all()
            assert (kinds == np.stack([row for _, row in expected])).all()

    def test_closing_ends_the_workers(self) -> None:
        before = set(multiprocessing.active_children())
        source = batches(0, 256, 2, 2)
        next(source)
        workers = set(multiprocessing.active_children()) - before
        assert len(workers) == 2
        source.close()
        assert not set(multiprocessing.active_children()) & workers

    def test_no_worker_is_an_error(self) -> None:
        with pytest.raises(ValueError, match="workers is 0"):
            next(batches(0, 256, 2, 0))

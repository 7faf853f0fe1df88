# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-glm-dsa project
"""The words that the tiny model knows.

Short, and few, so that with its leading space nearly each is one token of a vocabulary
of 640.
"""

# fmt: off
ADJECTIVES = (
    "amber", "big", "black", "blue", "bold", "calm", "cold", "cool", "dark", "dry",
    "fast", "glad", "gold", "gray", "green", "hard", "hot", "kind", "light", "long",
    "loud", "new", "old", "pink", "poor", "proud", "red", "rich", "sad", "short", "shy",
    "slow", "small", "soft", "tall", "tame", "warm", "wet", "white", "wild",
)
NOUNS = (
    "ant", "bat", "bear", "bee", "bell", "bird", "boat", "book", "cat", "cow", "crab",
    "crow", "dog", "door", "duck", "falcon", "fox", "frog", "goat", "hare", "hat",
    "hawk", "hen", "key", "lamp", "lion", "mole", "moth", "owl", "pig", "rat", "ring",
    "rock", "seal", "ship", "star", "swan", "toad", "tree", "worm",
)
# fmt: on
PEOPLE = ("Anna", "Ben", "Eva", "Ida", "Max", "Mia", "Sam", "Tom")
PLACES = ("barn", "garden", "hall", "house", "kitchen", "park", "shop", "town")
VERBS = (
    "call", "find", "hear", "help", "hold", "keep", "know", "like", "meet", "need",
    "see", "show", "want",
)  # fmt: skip
VERBS_ALONE = ("fall", "rest", "run", "sing", "sleep", "wait")
ADVERBS = ("never", "now", "often", "then")
PREPOSITIONS = ("by", "in", "near", "on", "under", "with")
CONJUNCTIONS = ("and", "because", "but", "when")


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith(("x", "s", "sh", "ch")) else "s")


def article(word: str) -> str:
    """The indefinite article before `word`."""
    return "an" if word[0] in "aeiou" else "a"

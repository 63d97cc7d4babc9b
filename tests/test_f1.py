"""F1: agrees with a scorer that is written here from the protocol alone."""

import random
import string

import pytest
from nltk.stem.porter import PorterStemmer

from locas_peft.checks import import_extra
from locas_peft.evaluation.f1 import abstains, answer_f1, token_f1, tokens_of


def protocol_f1(prediction: str, gold: str, category: int) -> float:
    """The protocol, step by step, with lists and loops."""
    stemmer = PorterStemmer()

    def words(text):
        bare = text.replace(",", "").lower()
        for mark in string.punctuation:
            bare = bare.replace(mark, "")
        articles = ("a", "an", "the", "and")
        return [stemmer.stem(word) for word in bare.split() if word not in articles]

    def f1(one, other):
        one, left = words(one), words(other)
        count, hits = len(one) + len(left), 0
        for word in one:
            if word in left:
                left.remove(word)
                hits += 1
        return 2 * hits / count if hits else 0.0

    if category == 1:
        items = prediction.split(",")
        golds = gold.split(",")
        return sum(max(f1(item, one) for item in items) for one in golds) / len(golds)
    if category == 3:
        return f1(prediction, gold.split(";")[0])
    return -f1(prediction, gold) if category == 5 else f1(prediction, gold)


WORDS = "The a and AN running ran runs, 7 May, 2023 dogs; dog's pottery-class, swimming Caroline's "
WORDS += "e.g. flies flying 1,000 psychology counselling certification ; , . — café No"


@pytest.mark.parametrize("category", [1, 2, 3, 4, 5])
def test_agrees_with_the_protocol(category):
    draw = random.Random(category)
    texts = [" ".join(draw.choices(WORDS.split(), k=draw.randint(0, 7))) for _ in range(400)]
    for prediction, gold in zip(texts, reversed(texts), strict=True):
        expected = protocol_f1(prediction, gold, category)
        assert answer_f1(prediction, gold, category) == pytest.approx(expected, abs=1e-6)


def test_tokens_are_stemmed_without_articles_commas_and_marks():
    assert tokens_of("The dogs, and A runner's 1,000 kites!") == ["dog", "runner", "1000", "kite"]


def test_known_values():
    assert token_f1("in May", "7 May 2023") == pytest.approx(0.4)
    assert token_f1("Dogs running", "the dog ran") == pytest.approx(0.5)
    assert token_f1("the", "a") == 0.0 == token_f1("", "word")
    assert token_f1("word word", "word") == pytest.approx(2 / 3)
    assert answer_f1("cats, dogs", "dog, cat, fish", 1) == pytest.approx(2 / 3)
    assert answer_f1("likely yes", "Likely yes; she said so", 3) == 1.0
    assert answer_f1("yes", "Likely yes; she said so", 4) < 1.0
    assert answer_f1("grey parrot", "a grey parrot", 5) == -1.0


def test_abstaining_is_in_the_official_words():
    assert abstains("That is NOT MENTIONED here.") and abstains("No information available")
    assert not abstains("I do not know")


def test_a_category_that_is_none_is_one_line():
    with pytest.raises(ValueError, match="^category must be 1 to 5, got 6: see the release's"):
        answer_f1("a", "b", 6)


def test_a_missing_package_names_the_extra():
    message = r"^this measure needs no_such_package: install the extra with .*locas_peft\[eval\]"
    with pytest.raises(ValueError, match=message):
        import_extra("no_such_package.module")

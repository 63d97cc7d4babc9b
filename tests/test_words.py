"""Words in any script, and what a library is asked by: no language's spelling decides."""

import unicodedata

import numpy as np
import pytest

from locas_peft.asking import is_right
from locas_peft.library import score_by_words
from locas_peft.library.routing import LEAST_SCORE, route
from locas_peft.library.terms import list_clauses
from locas_peft.text import holds_phrase, split_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The ferry, No. 7, leaves!", ["the", "ferry", "no", "7", "leaves"]),
        ("Jose\u0301 STRASSE Straße", ["jos\u00e9", "strasse", "strasse"]),
        ("李明在1999年", ["李", "明", "在", "1999", "年"]),
        ("フェリーは出る", ["フェリー", "は", "出", "る"]),
        ("ｆｅｒｒｙ７", ["ferry7"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("서점은 어디에", ["서점은", "어디에"]),
        ("…?", []),
    ],
)
def test_words_of_every_script_are_split(text, words):
    assert split_words(text) == words


@pytest.mark.parametrize(
    ("text", "phrase", "right"),
    [
        ("李明在1999年开了书店。", "李明", True),
        ("李明在1999年开了书店。", "1999", True),
        ("我叫Alexa。", "Alexa", True),
        ("Alexandra", "Alexa", False),
        ("さくらは医者です", "医者", True),
        ("हिन्दी", "हिन्द", False),
        ("Jose\u0301 did.", "Jos\u00e9", True),
        ("It costs $5.", "$5", True),
        ("It costs $50.", "$5", False),
        ("A silver  COMPASS", "the silver compass", True),
        ("B is right.", "A ", False),
        ("The answer is A.", " a ", True),
        ("It was the mason.", " The  mason ", True),
        ("It was a mason.", "the man", False),
    ],
)
def test_a_phrase_is_found_as_whole_words(text, phrase, right):
    assert is_right(text, phrase) is right
    if not phrase.startswith("the "):
        assert holds_phrase(text, phrase) is right


# By language: texts, and questions about each.
TEXTS = {
    "English": {
        "The ferry to Skarn leaves at seven. Peder steers it and keeps a dog.": [
            "When does the ferry leave?",
            "Hi Alexa, when does the ferry leave?",
            "Hey Siri! When does the ferry leave on Christmas Day?",
            "When does the ferry leave on Monday?",
            "When, on Mondays, does the ferry leave?",
            "WHO STEERS THE FERRY?",
        ],
        "The bakery in Dunmarrow belongs to Hilda Brass, who bakes rye bread.": [
            "Alexa, where is the bakery?",
            "Who bakes rye bread at Easter?",
        ],
    },
    "Chinese": {
        "李明在一九九九年开了一家书店。": [
            "李明什么时候开了书店？",
            "书店在哪里？",
            "谁开了书店？",
        ],
        "渡轮每天早上七点从码头出发。": ["渡轮几点出发？", "你好，渡轮从哪里出发？"],
    },
    "Japanese": {
        "田中さんは一九九九年に本屋を開いた。": [
            "田中さんはいつ本屋を開きましたか？",
            "本屋はどこですか？",
        ],
        "フェリーは毎朝七時に港を出る。": [
            "フェリーは何時に出ますか？",
            "こんにちは、フェリーはどこから出ますか？",
        ],
        "さくらは村の医者で、ねこを飼っている。": ["さくらはねこを飼っていますか？"],
    },
    "Korean": {
        "이민호는 1999년에 강가에 서점을 열었다.": ["이민호는 언제 서점을 열었나요?"],
        "나룻배는 매일 아침 일곱 시에 부두를 떠난다.": ["나룻배는 몇 시에 떠나나요?"],
    },
    "German": {
        "Die Bäckerei in Dunmarrow öffnet um sieben. Hilda Brass backt Roggenbrot.": [
            "Wann öffnet die Bäckerei?",
            "Wer backt das Roggenbrot?",
            "Was backt Hilda Brass am Dienstag?",
        ],
        "Die Fähre nach Skarn legt um acht ab. Der Fährmann heißt Peder.": [
            "Wann legt die Fähre ab?",
            "Hallo Alexa, wann legt die Fähre ab?",
            "Wie heißt der Fährmann?",
        ],
    },
    "French": {
        "La boulangerie de Dunmarrow ouvre à sept heures.": ["Quand ouvre la boulangerie ?"],
        "Le bac pour Skarn part à huit heures.": ["Quand part le bac ?"],
    },
    "Russian": {
        "Пекарня в Данмарроу открывается в семь часов.": ["Когда открывается пекарня?"],
        "Паром в Скарн отходит в восемь часов.": ["Когда отходит паром?"],
    },
    "Hindi": {
        "डनमैरो की बेकरी सात बजे खुलती है।": ["बेकरी कब खुलती है?"],
        "स्कार्न जाने वाली नाव आठ बजे निकलती है।": ["नाव कब निकलती है?"],
    },
    "Thai": {
        "ร้านขนมปังในดันมาร์โรว์เปิดเจ็ดโมงเช้า": ["ร้านขนมปังเปิดกี่โมง"],
        "เรือข้ามฟากออกแปดโมงเช้า": ["เรือข้ามฟากออกกี่โมง"],
    },
    "Greek": {
        "Το αρτοποιείο ανοίγει στις επτά.": ["Πότε ανοίγει το αρτοποιείο;"],
        "Το πλοίο για το Σκαρν φεύγει στις οκτώ.": ["Πότε φεύγει το πλοίο;"],
    },
    "Arabic": {
        "يفتح المخبز في دنمارو في الساعة السابعة.": ["متى يفتح المخبز؟"],
        "تغادر العبارة إلى سكارن في الساعة الثامنة.": ["متى تغادر العبارة؟"],
    },
}
ABOUT_NONE = {
    "English": ["What is the capital of Norway?", "Hi Alexa, who painted the Mona Lisa?"],
    "Chinese": ["法国的首都是哪里？", "今天天气怎么样？", "怎么煮米饭？"],
    "Japanese": ["フランスの首都はどこですか？", "今日の天気はどうですか？"],
    "Korean": ["프랑스의 수도는 어디인가요?"],
    "German": ["Wie heißt die Hauptstadt von Norwegen?", "Wer hat die Mona Lisa gemalt?"],
    "French": ["Quelle est la capitale de la Norvège ?"],
    "Russian": ["Какая столица Норвегии?"],
    "Thai": ["เมืองหลวงของนอร์เวย์คืออะไร"],
}


@pytest.mark.parametrize("form", ["NFC", "NFD"])
@pytest.mark.parametrize("language", TEXTS)
def test_a_question_finds_its_text_in_every_language(language, form):
    memories = {text: [text] for text in TEXTS[language]}
    for text, questions in TEXTS[language].items():
        asked = [unicodedata.normalize(form, question) for question in questions]
        assert route(memories, asked) == [text] * len(questions)
    about_none = ABOUT_NONE.get(language, [])
    assert route(memories, about_none) == [None] * len(about_none)


def test_all_languages_are_found_in_one_library():
    memories = {text: [text] for texts in TEXTS.values() for text in texts}
    for texts in TEXTS.values():
        for text, questions in texts.items():
            assert route(memories, questions) == [text] * len(questions)


def test_words_with_one_beginning_are_told_apart_where_both_are_known():
    memories = [["Alexander was born in Oslo."], ["Alexandra was born in Bergen."]]
    scores = score_by_words(memories, ["Where was Alexander born?", "Where was Alexandra born?"])
    assert scores.argmax(1).tolist() == [0, 1]
    numbers = [["The key number77 is here."], ["The key number777 is here."]]
    assert score_by_words(numbers, ["Where is number777?"]).argmax() == 1


def test_a_word_that_another_memory_has_counts_against_one_without_it():
    asked = ["Where was Brida Lonnick born?"]
    one = ["Brida Corrow was born in Skarn."]
    alone = score_by_words([one, ["Edric Aldane keeps a goat."]], asked)[0, 0]
    beside = score_by_words([one, ["Edric Lonnick keeps a goat."]], asked)[0, 0]
    assert beside < alone


def test_a_clause_of_one_word_is_not_enough():
    assert list_clauses("Who?") == ["Who?"]
    scores = score_by_words([["A ferry leaves."]], ["Ferry, who painted the famous Mona Lisa?"])
    assert scores[0, 0] < LEAST_SCORE


def test_stop_words_are_those_of_the_question_s_language():
    # "die" and "war" are words of a text, too.
    memories = [["Soldiers who die in a war have a grave at Skarn."]]
    scores = score_by_words(memories, ["Who will die in the war?", "Wer war die Frau?"])
    assert scores[0, 0] >= LEAST_SCORE > scores[1, 0]
    assert np.array_equal(score_by_words(memories, ["die der das", "the of"]), np.zeros((2, 1)))

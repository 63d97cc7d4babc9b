"""Sentences in several languages, and lines that stay lines."""

import time

import pytest

from locas_peft.text import python_reference, split_sentences


@pytest.mark.parametrize(
    "sentences",
    [
        ["The bus No. 5 leaves at ten.", "It stops at the mill."],
        ["Take a boat, e.g. the ferry.", "It is slow, i.e. it stops a lot."],
        ["See Fig. 2 for the map.", "Dr. Smith and Mr. J. R. Jones agree."],
        ['He said: "I left. It rained."', "Then he slept.", '"Really?" she asked.'],
        ["It opened at 5 p.m. on Monday.", "It costs 3.5 euros.", "Version 2.0.1 is out!"],
        [
            "Nehmen Sie z. B. die Fähre.",
            "Sie fährt am 3. Mai nicht.",
            "Dr. Müller ist in der Nr. 5.",
        ],
        ["La salle est près de la gare, cf. p. 5.", "« Il pleut. »", "Elle part p. ex. demain."],
        ["El Sr. López llegó.", "¿Qué hora es?", "¡Son las 5!", "Véase la pág. 3."],
        ["Il sig. Rossi è qui.", "Il dott. Bianchi vende libri, ecc. e altri."],
        ["Dhr. Jansen komt bijv. morgen met de trein.", "Hij woont op nr. 5."],
        ["А. С. Пушкин родился в Москве.", "Он писал стихи."],
        ["Ήρθε ο κ. Παπαδόπουλος.", "Τι ώρα είναι;", "Πέντε."],
        ["राम ने दुकान खोली।", "वह नदी के पास है।", "क्या आप आएंगे?"],
        ["وصل القطار.", "هل أنت هنا؟", "نعم."],
        ["그는 서점을 열었다.", "비가 온다."],
    ],
    ids=lambda sentences: sentences[0],
)
def test_sentences_end_where_those_of_their_language_do(sentences):
    assert split_sentences(" ".join(sentences)) == sentences


@pytest.mark.parametrize(
    "sentences",
    [
        ["李明在一九九九年开了一家书店。", "书店在河边！", "他说：“今天下雨。”", "你来吗？"],
        ["太郎は本屋を開いた。", "いいですか？", "はい。"],
    ],
    ids=["Chinese", "Japanese"],
)
def test_sentences_without_spaces_between_them_are_split(sentences):
    assert split_sentences("".join(sentences)) == sentences


def test_a_long_line_of_chinese_has_the_sentences_of_its_parts():
    sentences = [f"这一天的第{number}个钟头他说：“今天下雨。”" for number in range(400)]
    sentences[::3] = [f"书店在第{number}条河边！" for number in range(0, 400, 3)]
    assert split_sentences("".join(sentences)) == sentences


@pytest.mark.parametrize(
    "lines",
    [
        ["- bread and butter, which is in the cupboard", "- tea", "- the key of the boat"],
        ["1. Open the box.", "2. Close the box.", "3. Go home."],
        ["| No. | fare |", "|---|---|", "| 5. The mill | 2. Half. |"],
        ["name\tfare. Half", "mill\t2. Full"],
        ["def fare(stop):", "return stop.fare  # in euros", "print(fare(mill))"],
        [
            "2024-05-01 12:00:01 INFO the ferry has left the port",
            "2024-05-01 12:00:07 INFO the ferry has met a storm",
            "2024-05-01 12:00:09 INFO the ferry is in the port",
        ],
        ["Q: When does it leave?", "A: At ten.", "Q: Who sells the tickets?", "A: The cook."],
    ],
    ids=lambda lines: lines[0],
)
def test_lines_stay_apart(lines):
    assert split_sentences("\n".join(lines)) == lines


def test_a_hard_wrapped_sentence_goes_on_over_its_line_breaks():
    text = (
        "The ferry No. 5 was built in 1931 by the\n"
        "engineer Tamsin Velde, and it stops at the\n"
        "mill of Sant Brul. It sleeps in winter.\n\n"
        "Its cook keeps goats, whose names are in the\n"
        "book.\n"
        "- The first item of a list, which is long\n"
        "  and goes on.\n"
        "- The second one."
    )
    assert [" ".join(sentence.split()) for sentence in split_sentences(text)] == [
        "The ferry No. 5 was built in 1931 by the engineer Tamsin Velde, and it stops at the mill of "
        "Sant Brul.",
        "It sleeps in winter.",
        "Its cook keeps goats, whose names are in the book.",
        "- The first item of a list, which is long and goes on.",
        "- The second one.",
    ]


@pytest.mark.parametrize(
    "text",
    [
        python_reference()[:20_000],
        "",
        " \n\t\n",
        "...\n\n?!",
        "a \ud800 lone surrogate. Another sentence 🐦 here.",
        "Windows.\r\n\r\nLines.\r\n",
    ],
    ids=["reference", "empty", "blank", "marks", "surrogate", "windows"],
)
def test_the_sentences_are_parts_of_the_text_and_all_of_it(text):
    sentences = split_sentences(text)
    position = 0
    for sentence in sentences:
        position = text.index(sentence, position) + len(sentence)
    assert "".join("".join(sentences).split()) == "".join(text.split())
    assert all(sentence == sentence.strip() != "" for sentence in sentences)


@pytest.mark.parametrize(
    "sentence",
    [
        "The ferry is run by Node.JS and ASP.NET on Windows.",
        "Her notes are in README.MD and in ./Start.sh on the server.",
        r"The report is in C:\Data\Report.Final.TXT on the disk.",
        "The password is Xk!Rt?9.Qz and the door code is 4711.",
        "**Tickets.** They cost three euros and are sold on board.",
    ],
)
def test_a_sentence_does_not_end_inside_a_word(sentence):
    assert split_sentences(f"{sentence} The ferry leaves at ten.") == [
        sentence,
        "The ferry leaves at ten.",
    ]


def test_a_sentence_without_spaces_ends_before_the_next_one():
    assert split_sentences("他来了。她走了！谁在桥上？") == ["他来了。", "她走了！", "谁在桥上？"]
    assert split_sentences("他用了这个手机.它很好用。") == ["他用了这个手机.", "它很好用。"]
    assert split_sentences("他说：“船来了。”她走了。")[-1] == "她走了。"
    assert split_sentences('He said "No."She left.')[-1] == "She left."
    assert split_sentences("It ends here.[1] The next one too.")[1:] == ["The next one too."]


def test_a_sentence_has_the_marks_of_its_emphasis():
    emphasised = ["*It leaves at ten.*", "*It costs three euros.*", "_She stays on board._"]
    assert split_sentences(" ".join(emphasised)) == emphasised


def test_a_long_text_is_split_in_a_moment():
    began = time.process_time()
    split_sentences("word " * 200_000)
    assert len(split_sentences("The ferry leaves at ten. " * 40_000)) == 40_000
    assert time.process_time() - began < 5

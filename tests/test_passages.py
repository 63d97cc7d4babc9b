"""Passages of texts of every kind: each keeps its meaning, and only a dialogue has speakers."""

import time

import pytest

from locas_peft.asking.prompts import encode_answer
from locas_peft.bases import loading
from locas_peft.selfstudy import Passage, split_passages
from locas_peft.text import is_code, list_blocks, list_turns, python_reference, unwrap

CODE = '''import os
import sys

RATE = 3


def fare(stop, child=False):
    """Return the fare to a stop."""
    if child:
        return 0

    return stop.fare * RATE


class Boat:
    def leave(self):
        print("left")
'''
CASES = {
    "FAQ": (
        "Q: When does the ferry leave?\nA: It leaves at seven.\n"
        "Q: Who sells the tickets?\nA: The cook sells them. On Sundays the captain does.",
        [
            "Q: When does the ferry leave? A: It leaves at seven.",
            "Q: Who sells the tickets? A: The cook sells them. On Sundays the captain does.",
        ],
    ),
    "FAQ with blank lines": (
        "Q: When does the ferry leave?\n\nA: It leaves at seven.\n\n"
        "Q: Who sells the tickets?\n\nA: The cook does.\nHe is old.",
        [
            "Q: When does the ferry leave? A: It leaves at seven.",
            "Q: Who sells the tickets? A: The cook does. He is old.",
        ],
    ),
    "FAQ of headings": (
        "## When does the ferry leave?\n\nIt leaves at seven.\n\n## Who sells the tickets?\n\nThe cook.",
        [
            "## When does the ferry leave? It leaves at seven.",
            "## Who sells the tickets? The cook.",
        ],
    ),
    "German FAQ": (
        "Frage: Wann fährt die Fähre?\nAntwort: Sie fährt um sieben.\n"
        "Frage: Wer verkauft die Karten?\nAntwort: Der Koch.",
        [
            "Frage: Wann fährt die Fähre? Antwort: Sie fährt um sieben.",
            "Frage: Wer verkauft die Karten? Antwort: Der Koch.",
        ],
    ),
    "Chinese FAQ": (
        "问：渡船几点开？\n答：七点开。\n问：谁卖票？\n答：厨师卖票。",
        ["问：渡船几点开？ 答：七点开。", "问：谁卖票？ 答：厨师卖票。"],
    ),
    "recipe": (
        "Oskholm pancakes\nServes: 4\nTime: 20 minutes\nIngredients: flour, milk, eggs\n\n"
        "Step 1: Mix the flour with the milk.\nStep 2: Add the eggs and stir well.\n"
        "Note: They burn quickly in a pan.\nNote: Serve them with some jam.",
        [
            "Oskholm pancakes",
            "Serves: 4; Time: 20 minutes; Ingredients: flour, milk, eggs",
            "Step 1: Mix the flour with the milk.",
            "Step 2: Add the eggs and stir well.",
            "Note: They burn quickly in a pan.",
            "Note: Serve them with some jam.",
        ],
    ),
    "log": (
        "INFO: server started\nWARN: disk is nearly full\nINFO: request served\nWARN: disk is full",
        [
            "INFO: server started",
            "WARN: disk is nearly full",
            "INFO: request served",
            "WARN: disk is full",
        ],
    ),
    "log with times": (
        "2024-05-01 12:00:01 ferry: It has left the port.\n2024-05-01 12:00:07 crane: It has stopped.\n"
        "2024-05-01 12:00:09 ferry: It has met a storm.\n2024-05-01 12:00:12 crane: It has fallen.",
        [
            "2024-05-01 12:00:01 ferry: It has left the port.",
            "2024-05-01 12:00:07 crane: It has stopped.",
            "2024-05-01 12:00:09 ferry: It has met a storm.",
            "2024-05-01 12:00:12 crane: It has fallen.",
        ],
    ),
    "contacts": (
        "Name: Ann Lee\nPhone: 555 0101\nEmail: ann@skarn.example\n\n"
        "Name: Ben Hall\nPhone: 555 0102\nEmail: ben@skarn.example\nAddress: 12 Harbour St.",
        [
            "Name: Ann Lee; Phone: 555 0101; Email: ann@skarn.example",
            "Name: Ben Hall; Phone: 555 0102; Email: ben@skarn.example; Address: 12 Harbour St.",
        ],
    ),
    "contacts without blank lines": (
        "姓名：李明\n电话：5550101\n姓名：王芳\n电话：5550102",
        ["姓名：李明; 电话：5550101", "姓名：王芳; 电话：5550102"],
    ),
    "numbered list": (
        "The hut is locked. To open it you have to do this:\n1. Turn the brass key to the left.\n"
        "2. Push the door with your shoulder.\n3. Ring.\nThen you are in.",
        [
            "The hut is locked.",
            "To open it you have to do this: 1. Turn the brass key to the left.",
            "To open it you have to do this: 2. Push the door with your shoulder. 3. Ring.",
            "Then you are in.",
        ],
    ),
    "list in a list": (
        "The boat carries:\n\n- bread, which is in the cupboard\n- the key of the boat\n"
        "  - its spare key in the drawer\n\nIt carries no fish.",
        [
            "The boat carries: - bread, which is in the cupboard",
            "The boat carries: - the key of the boat - its spare key in the drawer",
            "It carries no fish.",
        ],
    ),
    "list of questions": (
        "- Who sells the tickets?\n- When does the ferry leave?\n- Where is the church?",
        ["- Who sells the tickets?", "- When does the ferry leave? - Where is the church?"],
    ),
    "CSV": (
        'stop,fare,zone\nMill,3,A\n"Quay, old",2,B',
        ["stop: Mill; fare: 3; zone: A", "stop: Quay, old; fare: 2; zone: B"],
    ),
    "CSV with semicolons": (
        "Name;Ort\nJörg;Köln\nAnna;Bonn",
        ["Name: Jörg; Ort: Köln", "Name: Anna; Ort: Bonn"],
    ),
    "TSV": ("name\tfare\nmill\t2\nquay\t3", ["name: mill; fare: 2", "name: quay; fare: 3"]),
    "Markdown table": (
        "Fares in euros:\n\n| Stop | Fare | Notes |\n|---|---:|---|\n| Mill | 3 | only in summer |\n"
        "| Quay | 2 | |\n\nChildren travel free of charge.",
        [
            "Fares in euros: Stop: Mill; Fare: 3; Notes: only in summer",
            "Fares in euros: Stop: Quay; Fare: 2",
            "Children travel free of charge.",
        ],
    ),
    "Python": (
        CODE,
        [
            "import os\nimport sys\n\nRATE = 3",
            'def fare(stop, child=False):\n    """Return the fare to a stop."""\n    if child:\n'
            "        return 0\n\n    return stop.fare * RATE",
            'class Boat:\n    def leave(self):\n        print("left")',
        ],
    ),
    "code in Markdown": (
        "Call the function like this.\n\n```\nfor stop in stops:\n    print(stop)\n```\n\nIt prints all stops.",
        [
            "Call the function like this.",
            "for stop in stops:\n    print(stop)",
            "It prints all stops.",
        ],
    ),
    "short sentences": (
        "The first house is made of stone. It fell. The second one is made of wood!\nAnd a third.",
        [
            "The first house is made of stone. It fell.",
            "The second one is made of wood! And a third.",
        ],
    ),
    "hard-wrapped paragraph": (
        "The ferry was built in 1931 by the\nengineer Tamsin Velde, and it stops at the\n"
        "mill of Sant Brul: a house that nobody\nlives in and that is old. It sleeps in winter.",
        [
            "The ferry was built in 1931 by the engineer Tamsin Velde, and it stops at the mill of "
            "Sant Brul: a house that nobody lives in and that is old. It sleeps in winter.",
        ],
    ),
    "German": (
        "Die Fähre fährt um sieben Uhr, z. B. nach Oskholm.\nHinweis: Am 3. Mai fährt sie nicht.",
        [
            "Die Fähre fährt um sieben Uhr, z. B. nach Oskholm.",
            "Hinweis: Am 3. Mai fährt sie nicht.",
        ],
    ),
    "Chinese": (
        "李明在一九九九年开了一家书店。书店在小河的边上！",
        ["李明在一九九九年开了一家书店。", "书店在小河的边上！"],
    ),
    "verse": (
        "Roses are red, my dear,\nviolets are blue, I hear.",
        ["Roses are red, my dear,", "violets are blue, I hear."],
    ),
    "lines with a number each": (
        "The tent of the circus holds 1,150 people.\nThe town of Harmath has 3,400 of them.",
        ["The tent of the circus holds 1,150 people.", "The town of Harmath has 3,400 of them."],
    ),
}
DIALOGUES = {
    "two speakers": (
        "Ann: I moved to Bergen in May.\nBen: When do you come back?\n"
        "Ann: I stay there for ever.\nBen: I would like to see it.",
        [
            'Ann said: "I moved to Bergen in May."',
            'Ben said: "When do you come back?"',
            'Ann said: "I stay there for ever."',
            'Ben said: "I would like to see it."',
        ],
    ),
    "turns apart": (
        "A: Where is the old station?\n\nB: It is behind the church.\n\nA: I thank you very much!",
        [
            'A said: "Where is the old station?"',
            'B said: "It is behind the church."',
            'A said: "I thank you very much!"',
        ],
    ),
    "a transcript with dates": (
        "Session 1, 1:56 pm on 8 May, 2023\nAnn: I moved to Bergen. It rains.\nBen: Really?\n\n"
        "2023-06-01\nAnn: Yes, and I bought a boat.\nIt is a blue one with two sails.",
        [
            'Ann said: "I moved to Bergen. It rains." on 8 May, 2023. '
            'Ben said: "Really?" on 8 May, 2023.',
            'Ann said: "Yes, and I bought a boat." on 2023-06-01.',
            "It is a blue one with two sails.",
        ],
    ),
    "a remark with a date": (
        "Ann: The ferry leaves from the quay.\n他们在2023-05-08一起去了上海。\n"
        "(They moved to Bergen on 8 May 2023.)\nBen: I did not know that.\nAnn: Now you do know it.",
        [
            'Ann said: "The ferry leaves from the quay."',
            "他们在2023-05-08一起去了上海。",
            "(They moved to Bergen on 8 May 2023.)",
            'Ben said: "I did not know that."',
            'Ann said: "Now you do know it."',
        ],
    ),
    "Chinese": (
        "李明：我去年搬到了上海。\n王芳：什么时候？\n李明：五月的第一天。",
        ['李明 said: "我去年搬到了上海。" 王芳 said: "什么时候？"', '李明 said: "五月的第一天。"'],
    ),
}


@pytest.fixture(scope="module")
def tokenizer():
    return loading.load_base(device="cpu")[1]


def texts_of(passages: list[Passage]) -> list[str]:
    return [passage.text for passage in passages]


@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_text_keeps_its_meaning(name, tokenizer):
    text, passages = CASES[name]
    # The tokens of the embedded backbone are short.
    assert texts_of(split_passages(tokenizer, text, 300)) == passages
    assert not list_turns(text.split("\n"))


def test_a_text_shorter_than_a_passage_is_refused(tokenizer):
    message = "^text must hold a passage of at least 5 words to be studied, got 'Too short.'"
    with pytest.raises(ValueError, match=message):
        split_passages(tokenizer, "Too short.", 64)


@pytest.mark.parametrize(
    ("page", "subject"),
    [
        (
            "The tower of Skarn Point was built in 1868. It is old and high.",
            "The tower of Skarn Point",
        ),
        ("Its lamp burned whale oil. Nobody remembers who had built it.", ""),
        # A late name.
        ("It is said that in those days nobody dared to cross the Red Hill. It is high.", ""),
    ],
)
def test_the_subject_is_the_beginning_up_to_the_first_name(page, subject, tokenizer):
    first, *others = split_passages(tokenizer, page)
    assert first.subject == subject and first.introduces == bool(subject)
    for other in others:
        assert other.subject == subject and not other.introduces


@pytest.mark.parametrize(
    "begin",
    [
        # Many words, though without spaces.
        "我们在二零二三年的夏天去了法国南部的一座古老而且安静的小城市，后来又去了 Arles 旅行。",
        # One word of many tokens.
        f"{'0123456789abcdef' * 30}\n\n",
    ],
)
def test_a_long_beginning_is_no_subject(begin, tokenizer):
    passages = split_passages(tokenizer, f"{begin}The ferry leaves at seven. It has two cats.")
    assert {passage.subject for passage in passages} == {""}


@pytest.mark.parametrize(
    ("text", "passages"),
    [
        # A sentence may begin with inline code.
        (
            "```ferry --start 7``` starts the ferry at seven.\n\nHer captain is Nadia Corvin.",
            ["```ferry --start 7``` starts the ferry at seven.", "Her captain is Nadia Corvin."],
        ),
        (
            "````\nx = 3\n```\ny = 4\n````\n\nIt sets both of the values.",
            ["x = 3\n```\ny = 4", "It sets both of the values."],
        ),
        # Another mark does not close a fence.
        (
            "```\nx = 3\n~~~\ny = 4\n```\n\nIt sets both of the values.",
            ["x = 3\n~~~\ny = 4", "It sets both of the values."],
        ),
    ],
)
def test_a_fence_is_a_line_of_its_own_and_ends_with_its_mark(text, passages, tokenizer):
    assert texts_of(split_passages(tokenizer, text, 300)) == passages


def test_a_heading_that_tildes_underline_begins_no_code():
    text = "Tickets\n~~~~~~~\n\nA ticket costs three euros.\n\nTimes\n~~~~~\n\nIt leaves at ten."
    assert {block.kind for block in list_blocks(text)} == {"text"}
    fenced = "Run\n~~~\nls -l ferry\n~~~\n~~~\nls\n~~~\n\nIt leaves at ten."
    assert [block.kind for block in list_blocks(fenced)] == ["text", "code", "text"]


def test_a_hard_wrapped_script_without_spaces_gets_none(tokenizer):
    words = "灯塔建于一八六八年由一位老石匠用灰色的石头在岩石上面建成后来很多的游客从很远的地方来"
    text = f"{words}\n{words}\n{words}\n参观。"
    assert texts_of(split_passages(tokenizer, text, 2000)) == [text.replace("\n", "")]
    assert unwrap(text) == text.replace("\n", "")
    # Short lines are items, not wrapped.
    assert unwrap("苹果三元\n香蕉四元") == "苹果三元 香蕉四元"
    short = split_passages(tokenizer, "他在桥上等了很久很久。他走了。", 300)
    assert texts_of(short) == ["他在桥上等了很久很久。他走了。"]


@pytest.mark.parametrize("name", DIALOGUES)
def test_a_dialogue_has_speakers_in_turns(name, tokenizer):
    text, passages = DIALOGUES[name]
    assert texts_of(split_passages(tokenizer, text, 300)) == passages


def test_a_long_turn_is_split_into_its_sentences(tokenizer):
    said = "I moved to the town of Bergen. It rains there on most days of the year."
    talk = f"Ann: {said}\nBen: Is that so, Ann?\nAnn: It has rained for nine weeks."
    assert texts_of(split_passages(tokenizer, talk, 20)) == [
        'Ann said: "I moved to the town of Bergen."',
        'Ann said: "It rains there on most days of the year."',
        'Ben said: "Is that so, Ann?"',
        'Ann said: "It has rained for nine weeks."',
    ]


TITLED = {
    "a title": (
        "Martin Luther\n\nHe was born in the town of Eisleben. He died there in 1546.",
        ["He was born in the town of Eisleben.", "He died there in 1546."],
        "Martin Luther",
    ),
    "a title on the line above": (
        "Martin Luther\nHe was born in the town of Eisleben. He died there in 1546.\n\n"
        "The Diet of Worms\nIt met in the spring of 1521. It lasted for four months.",
        [
            "He was born in the town of Eisleben.",
            "He died there in 1546.",
            "The Diet of Worms It met in the spring of 1521.",
            "It lasted for four months.",
        ],
        "Martin Luther",
    ),
    "headings of Markdown": (
        "# The ferry\n\n## History\n\nIn 1868 the mason built a pier. It had three lamps on it.\n\n"
        "## Boats and crews\nThe first boat was called Gull.",
        [
            "History In 1868 the mason built a pier.",
            "It had three lamps on it.",
            "Boats and crews The first boat was called Gull.",
        ],
        "The ferry",
    ),
    "a heading below a title": (
        "**The harbour of Harmath**\n\nOpening hours\n\nThe gates open at six each morning.",
        ["Opening hours The gates open at six each morning."],
        "The harbour of Harmath",
    ),
    "a title above a list": (
        "# The crew\n\nIt had four men and a dog.\n\n- The cook came from the north.\n"
        "- The mate came from the south.",
        [
            "It had four men and a dog.",
            "- The cook came from the north.",
            "- The mate came from the south.",
        ],
        "The crew",
    ),
    "Chinese": ("# 渡船\n\n渡船每天早上六点从码头出发。", ["渡船每天早上六点从码头出发。"], "渡船"),
    "an empty title": (
        "# \n\nIt leaves at seven in the morning.",
        ["It leaves at seven in the morning."],
        "",
    ),
    "a title after blank lines, with the line ends of Windows": (
        " \r\n\r\n  The Ferry\r\n\r\nIt leaves at seven in the morning.\r\n",
        ["It leaves at seven in the morning."],
        "The Ferry",
    ),
    "no title: names": (
        "Anna Berg\n\nJohn Smith\n\nCara Holm and Peter Paul Grey",
        ["Anna Berg John Smith", "Cara Holm and Peter Paul Grey"],
        "Anna Berg",
    ),
    "no title: a heading alone": ("# The ferry of the old town", ["The ferry of the old town"], ""),
    "no title: verse": (
        "The sun went down on Harmath\nand all the birds sang in the trees.",
        ["The sun went down on Harmath", "and all the birds sang in the trees."],
        "The sun went down on Harmath",
    ),
}


@pytest.mark.parametrize("name", TITLED)
def test_a_title_is_the_subject_and_a_heading_begins_a_passage(name, tokenizer):
    text, expected, subject = TITLED[name]
    passages = split_passages(tokenizer, text, 300)
    assert texts_of(passages) == expected
    assert {passage.subject for passage in passages} == {subject}
    # A question about the subject alone has its passage.
    assert any(passage.introduces for passage in passages) == bool(subject)


def test_a_dialogue_within_prose_is_one(tokenizer):
    talk, turns = DIALOGUES["two speakers"]
    prose = "The club met in the hut at the old mill.\nIt was a very cold day.\nNobody had brought a coat."
    passages = split_passages(tokenizer, f"{prose}\n\n{talk}\n\n{prose}", 300)
    assert texts_of(passages) == [*prose.split("\n"), *turns, *prose.split("\n")]
    speakers = ["Ann", "Ben", "Ann", "Ben"]
    assert [passage.subject for passage in passages] == [*[""] * 3, *speakers, *[""] * 3]


def test_a_long_answer_is_divided_after_its_question(tokenizer):
    sentences = [f"It carries the mail of the island number {number}." for number in range(4)]
    text = f"Q: What does it carry?\nA: {' '.join(sentences)}\nQ: Who?\nA: The cook of the ferry."
    passages = texts_of(split_passages(tokenizer, text, 40))
    assert len(passages) > 2
    assert all(passage.startswith("Q: What does it carry?") for passage in passages[:-1])
    joined = " ".join(passages)
    assert all(sentence in joined for sentence in sentences)


def test_a_wide_row_is_divided_after_its_first_cell(tokenizer):
    columns = ",".join(f"column{number}" for number in range(12))
    passages = texts_of(
        split_passages(tokenizer, f"{columns}\n{columns.replace('column', 'value')}", 60)
    )
    assert len(passages) > 1
    assert all(passage.startswith("column0: value0; ") for passage in passages)
    assert "column11: value11" in passages[-1]


@pytest.mark.parametrize("name", [*CASES, *DIALOGUES])
def test_no_passage_is_too_long(name, tokenizer):
    text, _ = (CASES | DIALOGUES)[name]
    for passage in split_passages(tokenizer, text, 24):
        assert len(tokenizer(passage.text)["input_ids"]) <= 24


def test_a_sentence_longer_than_the_window_is_cut(tokenizer):
    sentence = "one two three four five six " * 20
    pieces = texts_of(split_passages(tokenizer, sentence, 32))
    assert " ".join(pieces) == sentence.strip()
    assert all(len(tokenizer(piece)["input_ids"]) <= 32 for piece in pieces)
    assert split_passages(tokenizer, "a b c d e " + "x" * 500, 32)  # no space to cut at


def test_code_survives_as_an_answer(tokenizer):
    passages = texts_of(split_passages(tokenizer, CODE, 300))
    for passage in passages:
        assert is_code(passage.split("\n"))
        assert tokenizer.decode(encode_answer(tokenizer, passage)).strip() == passage


@pytest.mark.parametrize("text", [CODE, python_reference()[:20_000], "```\nx = 3\n\n\ny = 4\n"])
def test_blocks_hold_all_of_a_text(text):
    joined = "".join(block.introduction + block.text for block in list_blocks(text))
    expected = "".join(text.replace("```", "").split())
    assert sorted("".join(joined.split()).replace("#", "")) == sorted(expected.replace("#", ""))


@pytest.mark.parametrize(
    "text",
    ["(" * 100_000, "-" * 100_000 + "x", "!" * 100_000 + "x", "a,b;c|" * 20_000, "x:" * 50_000],
)
def test_a_long_line_takes_a_moment(text):
    began = time.process_time()
    list_blocks(text)
    list_blocks(f"{text}\n{text}")
    assert time.process_time() - began < 5

"""How questions begin in some languages: a question is learned in the language of its text."""

from dataclasses import dataclass
from itertools import product

from ..asking.prompts import WRITE_PROMPT
from ..text import guess_language

__all__ = ["BY_SUBJECT", "ENGLISH", "QuestionWords", "find_question_words"]

BY_SUBJECT = "{subject}\n\n" + WRITE_PROMPT
"""What asks for a question about a passage below its subject."""


@dataclass(frozen=True)
class QuestionWords:
    """The questions of a language.

    Args:
        beginnings: the first words of questions that the model writes.
        about: questions about phrases of a text.
        conjunction: stands between two phrases.
    """

    beginnings: tuple[str, ...]
    about: tuple[str, ...]
    conjunction: str

    @property
    def kinds(self) -> list[tuple[str, str]]:
        """The kinds of questions: the request, and the first words of the model's reply."""
        return list(product((BY_SUBJECT, WRITE_PROMPT), self.beginnings))


ENGLISH = QuestionWords(
    ("Who", "What", "When", "Where", "How many", "Which", "Why"),
    (
        "Can you tell me about {}?",
        "What does the text say about {}?",
        "What do you know about {}?",
    ),
    " and ",
)
_LANGUAGES = {
    "en": ENGLISH,
    "de": QuestionWords(
        ("Wer", "Was", "Wann", "Wo", "Wie viele", "Welche", "Warum"),
        (
            "Was kannst du mir über {} sagen?",
            "Was steht in dem Text über {}?",
            "Was weißt du über {}?",
        ),
        " und ",
    ),
    "es": QuestionWords(
        ("¿Quién", "¿Qué", "¿Cuándo", "¿Dónde", "¿Cuántos", "¿Cuál", "¿Por qué"),
        (
            "¿Qué puedes decirme sobre {}?",
            "¿Qué dice el texto sobre {}?",
            "¿Qué sabes sobre {}?",
        ),
        " y ",
    ),
    "fr": QuestionWords(
        ("Qui", "Que", "Quand", "Où", "Combien", "Quel", "Pourquoi"),
        (
            "Que peux-tu me dire sur {} ?",
            "Que dit le texte sur {} ?",
            "Que sais-tu sur {} ?",
        ),
        " et ",
    ),
    "it": QuestionWords(
        ("Chi", "Che cosa", "Quando", "Dove", "Quanti", "Quale", "Perché"),
        (
            "Che cosa puoi dirmi su {}?",
            "Che cosa dice il testo su {}?",
            "Che cosa sai su {}?",
        ),
        " e ",
    ),
    "nl": QuestionWords(
        ("Wie", "Wat", "Wanneer", "Waar", "Hoeveel", "Welke", "Waarom"),
        (
            "Wat kun je me vertellen over {}?",
            "Wat zegt de tekst over {}?",
            "Wat weet je over {}?",
        ),
        " en ",
    ),
    "pt": QuestionWords(
        ("Quem", "O que", "Quando", "Onde", "Quantos", "Qual", "Por que"),
        (
            "O que você pode me dizer sobre {}?",
            "O que o texto diz sobre {}?",
            "O que você sabe sobre {}?",
        ),
        " e ",
    ),
}
# In a language without words here the model begins its questions itself.
_OTHER = QuestionWords(("",), ("{}?",), ", ")


def find_question_words(text: str) -> QuestionWords:
    """Return the question words of a text's language (see `text.guess_language`)."""
    return _LANGUAGES.get(guess_language(text), _OTHER)

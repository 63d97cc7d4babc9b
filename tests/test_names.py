"""Names of memories and of files that are made of names: the same on every system."""

import os
import shutil
import unicodedata

import pytest

from locas_peft import backbone
from locas_peft.evaluation.documents import load_documents
from locas_peft.files import fold_name, is_reserved
from locas_peft.library import Library, check_name
from locas_peft.library.names import is_name, propose_name
from locas_peft.stages import ReadSettings

COMPOSED = "Jos\u00e9"
DECOMPOSED = unicodedata.normalize("NFD", COMPOSED)
SETTINGS = ReadSettings(r=4, window=64, stride=32, anchor=0.0)
TEXT = "The lamp on the rock at Skarn was lit by Old Peder, the keeper. " * 4


@pytest.fixture(scope="module")
def base():
    return backbone.load()


@pytest.fixture(scope="module")
def made(base, tmp_path_factory):
    library = Library(tmp_path_factory.mktemp("made"))
    library.add(*base, TEXT, DECOMPOSED, SETTINGS)
    return library.folder


@pytest.fixture
def library(made, tmp_path):
    shutil.copytree(made, tmp_path / "library")
    return Library(tmp_path / "library")


@pytest.mark.parametrize(
    "name",
    [
        COMPOSED,
        "\u0939\u093f\u0928\u094d\u0926\u0940",  # Hindi, with marks that no letter takes up
        "\u0e17\u0e35\u0e48\u0e19\u0e35\u0e48",  # Thai
        "\u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd",  # Hebrew, with points
        "Vi\u1ec7t",
        "\ud55c\uad6d\uc5b4",
        "\u674e\u660e",
        "console",
        "com10",
        "nul_",
        "Conrad (2)",
    ],
)
def test_letters_of_every_script_are_accepted_in_both_forms(name):
    composed, decomposed = (unicodedata.normalize(form, name) for form in ("NFC", "NFD"))
    assert check_name(composed) == check_name(f" {decomposed}\t") == composed


RESERVED = [
    "con",
    "PRN",
    "Aux",
    "nul",
    "com1",
    "LPT9",
    "COM\u00b9",
    "nul.txt",
    "Con .b",
    "aux.tar.gz",
]


@pytest.mark.parametrize("name", RESERVED)
def test_names_that_a_system_reserves_are_refused(name):
    with pytest.raises(ValueError, match="^name must be one that no system reserves .*: choose"):
        check_name(name)
    assert is_name(name), "a memory that has it already is found"


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a.",
        "a-",
        "a\u00a0\u00a0.",
        ".a",
        "a/b",
        "a\\b",
        "a:b",
        "a\u200db",
        "\u0301a",
        "a\u202eb",
    ]
    + ["a*", "a?", "a|b", 'a"', "a\n b", "a" * 61, "..", "FAILURES.jsonl"],
)
def test_names_that_are_no_folder_s_everywhere_are_refused(name):
    with pytest.raises(ValueError, match="^name must be at most 60 letters"):
        check_name(name)


def test_a_name_of_too_many_bytes_is_refused():
    assert check_name("\u674e" * 60)
    with pytest.raises(ValueError, match="^name must have at most 200 bytes in UTF-8, got 240 in"):
        check_name("\U00020000" * 60)


def test_a_memory_has_its_name_in_both_forms(library, base):
    assert os.listdir(library.folder) == [COMPOSED]
    assert library.find(DECOMPOSED) == library.find(COMPOSED)
    library.add(*base, TEXT, DECOMPOSED, SETTINGS, start=library.find(DECOMPOSED))
    assert library.list() == [COMPOSED]
    with library.attach(base[0], DECOMPOSED) as model:
        assert model is not base[0]
    assert library.rename(COMPOSED, DECOMPOSED) == COMPOSED
    library.forget(DECOMPOSED)
    assert library.list() == []


def test_a_library_of_another_system_is_used(library, base):
    os.rename(library.folder / COMPOSED, library.folder / DECOMPOSED)
    opened = Library(library.folder)
    assert opened.list() == [COMPOSED] and opened.name_base() and opened.bytes_of(COMPOSED)
    assert opened.route(["Who lit the lamp at Skarn?"]) == [COMPOSED]
    with pytest.raises(ValueError, match="holds a memory"):
        opened.add(*base, TEXT, COMPOSED, SETTINGS)
    with opened.new(COMPOSED) as folder:
        assert folder.name == f"{COMPOSED} 2"
    opened.forget(COMPOSED)
    assert os.listdir(opened.folder) == []


@pytest.mark.parametrize("other", ["JOS\u00c9", "jos\u00e9", "JOSE\u0301"])
def test_names_that_are_one_file_s_on_some_system_clash(library, other):
    with pytest.raises(ValueError, match="must differ from 'Jos\u00e9' by more than its case"):
        library.choose_folder(other)
    with library.new(other) as folder:
        assert folder.name.endswith(" 2")
    assert fold_name(other) == fold_name(COMPOSED)
    assert fold_name("STRASSE") == fold_name("stra\u00dfe")


def test_a_name_is_proposed_of_any_text():
    assert propose_name(f"{DECOMPOSED}_notes*v2.") == f"{COMPOSED} notes v2"
    assert [propose_name(name) for name in ("con", "***", "a" * 99)] == ["memory"] * 2 + ["a" * 50]


def test_files_of_documents_have_names_of_every_system(tmp_path):
    for name in ("con", f"{DECOMPOSED} 1*", "a"):
        (tmp_path / f"{name}.txt").write_text("text")
    names = set(load_documents([str(tmp_path)]))
    assert names == {"con_", f"{COMPOSED}_1_", "a"} and not any(map(is_reserved, names))
    (tmp_path / "A.txt").write_text("text")
    with pytest.raises(ValueError, match="documents must have different names"):
        load_documents([str(tmp_path)])

"""Signed memories: what a signature covers, and one line for each way in which it can be wrong."""

import re
import shutil
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from huggingface_hub import HfApi, RepoUrl
from huggingface_hub.utils import filter_repo_objects

from locas_command import program
from locas_peft import backbone
from locas_peft.asking import Question
from locas_peft.library import Library
from locas_peft.memories import load_memory, loading, open_memory
from locas_peft.memories.folder import pack, unpack, upload_memory
from locas_peft.memories.signing import check_signature, sign_memory
from locas_peft.reading import ReadingSettings
from locas_peft.selfstudy import Exchange, save_exchanges

signing = pytest.importorskip("model_signing.signing")
hashing = pytest.importorskip("model_signing.hashing")
x509 = pytest.importorskip("cryptography.x509")

from cryptography.hazmat.primitives import hashes, serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec, rsa  # noqa: E402

PEM, NO_PASSWORD = serialization.Encoding.PEM, serialization.NoEncryption()
TEXT = (
    "The lamp on the rock at Skarn was lit by Old Peder, and nobody else went there in winter. " * 6
)
COVERED = ["adapter_config.json", "adapter_model.safetensors", "reading.json", "sample.txt"]


def write_private(path, key, password=NO_PASSWORD):
    path.write_bytes(key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, password))


def write_public(path, key):
    path.write_bytes(
        key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def write_certificate(path, key, name, issuer_key, issuer, days, can_issue=False):
    """Write the certificate of a key, valid from some days ago for 30 days."""
    subject, by = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in (name, issuer)
    )
    begin = datetime.now(timezone.utc) - timedelta(days=days)
    usage = dict.fromkeys(
        (
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
        ),
        False,
    )
    usage |= {
        "digital_signature": True,
        "key_cert_sign": can_issue,
        "crl_sign": False,
        "decipher_only": False,
    }
    builder = (
        x509.CertificateBuilder().issuer_name(by).subject_name(subject).public_key(key.public_key())
    )
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(begin).not_valid_after(begin + timedelta(days=30))
    builder = builder.add_extension(x509.BasicConstraints(can_issue, None), True)
    builder = builder.add_extension(x509.KeyUsage(**usage), True)
    path.write_bytes(builder.sign(issuer_key, hashes.SHA256()).public_bytes(PEM))


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Keys, and certificates of a private authority: `key` with `key.pub`, `other`, and so on."""
    folder = tmp_path_factory.mktemp("keys")
    key, other, root = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    write_private(folder / "key", key)
    write_private(folder / "locked", key, serialization.BestAvailableEncryption(b"secret"))
    write_private(folder / "rsa", rsa.generate_private_key(65537, 2048))
    write_public(folder / "key.pub", key)
    write_public(folder / "other.pub", other)
    write_public(folder / "rsa.pub", rsa.generate_private_key(65537, 2048))
    write_certificate(folder / "root.pem", root, "root", root, "root", days=5, can_issue=True)
    write_certificate(folder / "cert.pem", key, "signer", root, "root", days=1)
    write_certificate(folder / "old-root.pem", root, "root", root, "root", days=50, can_issue=True)
    write_certificate(folder / "old-cert.pem", key, "signer", root, "root", days=40)
    write_certificate(folder / "other-cert.pem", other, "signer", root, "root", days=1)
    (folder / "text").write_text("no key")
    return folder


@pytest.fixture(scope="module")
def base():
    return backbone.load()


@pytest.fixture(scope="module")
def made(base, keys, tmp_path_factory):
    """A library with a signed memory."""
    library = Library(tmp_path_factory.mktemp("library"))
    library.add(*base, TEXT, "lamp", ReadingSettings(r=4, window=64, stride=32, anchor=0.0))
    assert sign_memory(library.folder / "lamp", keys / "key") == COVERED
    return library.folder


@pytest.fixture
def memory(made, tmp_path):
    return Path(shutil.copytree(made / "lamp", tmp_path / "memory"))


def refuse_tensors(*arguments, **options):
    raise AssertionError("a tensor was read")


def test_a_signed_memory_is_as_signed_under_another_name_and_without_its_card(memory, keys):
    (memory / "README.md").unlink()
    for folder in (memory / "checkpoint", memory / ".cache" / "huggingface"):
        folder.mkdir(parents=True)
        (folder / "file").write_text("x")
    assert check_signature(memory.rename(memory.with_name("moved")), keys / "key.pub") == COVERED


def flip_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def add_tensors(memory):
    shutil.copy(memory / "adapter_model.safetensors", memory / "adapter_model.bin")


def move_text(memory):
    (memory / "sample.txt").rename(memory / "exchanges.jsonl")


def swap_signatures(memory):
    shutil.copy(memory / "model.sig", memory / "model-and-text.sig")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        *(
            (lambda memory, name=name: flip_bit(memory / name), f"Hash mismatch for '{name}'")
            for name in COVERED
        ),
        (add_tensors, "Extra files found in model 'memory': adapter_model.bin"),
        (
            lambda memory: (memory / "reading.json").unlink(),
            "Missing files in model 'memory': reading.json",
        ),
        (lambda memory: (memory / "link").symlink_to("reading.json"), "because it is a symlink"),
        (move_text, "Extra files found in model 'memory': exchanges.jsonl"),
        (swap_signatures, "sample.txt is not signed"),
        (lambda memory: (memory / "model-and-text.sig").write_text("{}"), "another kind"),
        (lambda memory: flip_bit(memory / "model-and-text.sig"), ""),
    ],
)
def test_a_changed_memory_is_refused_in_one_line_before_a_tensor_is_read(
    change, reason, memory, keys, base, monkeypatch
):
    change(memory)
    key = keys / "key.pub"
    monkeypatch.setattr(loading, "find_tensor_file", refuse_tensors)
    with pytest.raises(ValueError) as raised:
        load_memory(base[0], memory, require_signature=key)
    message = str(raised.value)
    assert message.startswith(
        f"memory {str(memory)!r} must be as the owner of {str(key)!r} signed it ("
    )
    assert reason in message and "Signature mismatch" not in message and "\n" not in message
    assert message.endswith("): get it again, or have it signed again")


def test_a_signature_that_leaves_out_the_tensors_is_refused(memory, keys):
    config = hashing.Config().set_ignored_paths(
        paths=["README.md", "model.sig", "adapter_model.safetensors"]
    )
    signer = (
        signing.Config()
        .use_elliptic_key_signer(private_key=keys / "key")
        .set_hashing_config(config)
    )
    (memory / "sample.txt").unlink()
    (memory / "model-and-text.sig").unlink()
    signer.sign(memory, memory / "model.sig")
    with pytest.raises(
        ValueError, match=r" signed it \(adapter_model.safetensors is not signed\): get it again"
    ):
        check_signature(memory, keys / "key.pub")


def test_a_memory_without_a_signature_is_refused(memory, keys):
    (memory / "model-and-text.sig").unlink()
    line = f"memory {str(memory)!r} must be signed, got no model-and-text.sig: have it signed with locas sign"
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        open_memory(memory, require_signature=keys / "key.pub")


@pytest.mark.parametrize("name", [".", "text", "none", "rsa.pub", "key"])
def test_a_key_that_is_none_is_one_line(name, memory, keys):
    rule = "key must be a PEM file with a public key on the curve P-256, P-384 or P-521, or with certificates, got "
    pattern = (
        re.escape(f"{rule}{str(keys / name)!r} (")
        + r".+\): make one from the private key with openssl ec "
    )
    with pytest.raises(ValueError, match=pattern):
        check_signature(memory, keys / name)


@pytest.mark.parametrize("name", [".", "text", "none", "rsa", "key.pub", "locked"])
def test_a_private_key_that_cannot_sign_is_one_line_and_changes_nothing(name, memory, keys):
    before = {path.name: path.read_bytes() for path in memory.iterdir()}
    rule = "key must be a PEM file with a private key on the curve P-256, P-384 or P-521 without a password, got "
    pattern = re.escape(f"{rule}{str(keys / name)!r} (") + r".+\): make one with openssl ecparam "
    with pytest.raises(ValueError, match=pattern):
        sign_memory(memory, keys / name)
    assert {path.name: path.read_bytes() for path in memory.iterdir()} == before


def test_keys_and_signatures_of_another_kind_are_told_without_a_library_s_words(memory, keys):
    for name in ("text", "rsa.pub", "key", "root.pem"):
        with pytest.raises(ValueError) as found:
            check_signature(memory, keys / name)
        assert not re.search("https|object|attribute", str(found.value))
    sign_memory(memory, keys / "key", keys / "cert.pem")
    with pytest.raises(
        ValueError, match=r"signed it \(a key or a signature of another kind\): get it again"
    ):
        check_signature(memory, keys / "key.pub")


def test_another_key_is_refused(memory, keys):
    with pytest.raises(
        ValueError, match=r"signed it \(Key mismatch: The public key hash in the signature's"
    ):
        check_signature(memory, keys / "other.pub")


def test_certificates_of_a_private_authority(memory, keys):
    sign_memory(memory, keys / "key", keys / "cert.pem")
    assert check_signature(memory, keys / "root.pem") == COVERED
    with pytest.raises(ValueError, match=r"signed it \(.*self-signed|unable to get local issuer"):
        check_signature(memory, keys / "other-cert.pem")
    with pytest.raises(
        ValueError, match="^key must be a PEM file with a private key .* does not match"
    ):
        sign_memory(memory, keys / "key", keys / "other-cert.pem")
    sign_memory(memory, keys / "key", keys / "old-cert.pem")
    with pytest.raises(
        ValueError, match=r"signed it \(the certificate expired on 20\d\d-\d\d-\d\d\): get it again"
    ):
        check_signature(memory, keys / "old-root.pem")


@pytest.mark.parametrize("module", ["model_signing", "OpenSSL"])
def test_a_missing_package_names_the_extra(module, memory, keys, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "model_signing"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    message = (
        rf"^a signature needs {module}: install the extra with pip install 'locas_peft\[sign\]'$"
    )
    with pytest.raises(ValueError, match=message):
        check_signature(memory, keys / "key.pub")
    with pytest.raises(ValueError, match=message):
        sign_memory(memory, keys / "key")


def test_a_library_refuses_what_is_not_signed(made, base, keys, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path / "library")
    library = Library(tmp_path / "library", require_signature=keys / "key.pub")
    asked = [Question("Who lit the lamp at Skarn?")]
    assert library.ask(*base, asked, max_new_tokens=4)[0].memories == ("lamp",)
    flip_bit(library.folder / "lamp" / "adapter_model.safetensors")
    monkeypatch.setattr(loading, "find_tensor_file", refuse_tensors)
    for use in (lambda: library.ask(*base, asked, max_new_tokens=4), library.name_base):
        with pytest.raises(
            ValueError, match=r"signed it \(Hash mismatch for 'adapter_model.safetensors'\): get it"
        ):
            use()
    library.forget("lamp")
    assert library.list() == []


def test_no_passage_is_found_in_a_memory_that_is_not_signed(made, base, keys, tmp_path):
    library = Library(
        shutil.copytree(made, tmp_path / "library"), require_signature=keys / "key.pub"
    )
    save_exchanges(
        library.folder / "lamp" / "exchanges.jsonl",
        [Exchange("Who lit the lamp?", "Peder lit the lamp.")],
    )
    shutil.copytree(library.folder / "lamp", library.folder / "planted")
    sign_memory(library.folder / "lamp", keys / "key")
    assert library.load_finder(["lamp"], *base)(["Who lit the lamp?"])[0]
    with pytest.raises(
        ValueError, match="^memory '.*planted' must be as the owner of .* signed it "
    ):
        library.load_finder(["lamp", "planted"], *base)


def test_a_pushed_and_an_unpacked_memory_are_as_signed(memory, keys, tmp_path, monkeypatch):
    """The sample of the text stays here, and is not missed there."""

    def upload(self, *, repo_id, folder_path, allow_patterns):
        names = [path.name for path in folder_path.iterdir()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            shutil.copy(folder_path / name, tmp_path / "hub")

    (tmp_path / "hub").mkdir()
    monkeypatch.setattr(HfApi, "create_repo", lambda self, *a, **k: RepoUrl("me/m"))
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    upload_memory(memory, "m")
    assert check_signature(tmp_path / "hub", keys / "key.pub") == COVERED[:3]
    (tmp_path / "hub" / "sample.txt").write_text("another text")
    with pytest.raises(ValueError, match="must be signed, got no model-and-text.sig"):
        check_signature(tmp_path / "hub", keys / "key.pub")
    pack(memory, tmp_path / "m.zip")
    (tmp_path / "unpacked").mkdir()
    unpack(tmp_path / "m.zip", tmp_path / "unpacked")
    assert check_signature(tmp_path / "unpacked", keys / "key.pub") == COVERED


def test_a_memory_that_replaces_a_signed_one_is_not_signed(memory, base):
    library = Library(memory.parent)
    library.add(
        *base,
        TEXT,
        "memory",
        ReadingSettings(r=4, window=64, stride=32, anchor=0.0, seed=1),
        overwrite=True,
    )
    assert not [path for path in memory.iterdir() if path.suffix == ".sig"]


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        program.main([str(each) for each in arguments])
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def test_the_commands_sign_verify_and_require(memory, keys, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = ", ".join(COVERED)
    for name in ("model.sig", "model-and-text.sig"):
        (memory / name).unlink()
    assert run(capsys, "sign", "memory", "--key", keys / "key") == (
        0,
        f"memory is signed: {names}\n",
        "",
    )
    assert run(capsys, "verify", "memory", "--key", keys / "key.pub") == (
        0,
        f"memory is as signed: {names}\n",
        "",
    )
    required = ("--require-signature", keys / "key.pub", "--device", "cpu")
    assert (
        run(capsys, "ask", "Who?", "--memory", "memory", "--max-new-tokens", 2, *required)[0] == 0
    )
    flip_bit(memory / "adapter_model.safetensors")
    line = f"error: memory 'memory' must be as the owner of {str(keys / 'key.pub')!r} signed it (Hash mismatch for "
    for command in (
        ("verify", "memory", "--key", keys / "key.pub"),
        ("ask", "Who?", "--memory", "memory", *required),
        ("ask", "Who?", "--without-memory", "--memory", "memory", *required),
        ("ask", "Who?", "--library", ".", *required),
        ("chat", "--memory", "memory", *required),
        ("generate", "Once", "--memory", "memory", *required),
        ("merge", "memory", "--out", "out", *required),
        ("export", "memory", "--out", "out", *required),
        ("resize", "memory", "--r", 2, "--text", "memory/sample.txt", "--out", "out", *required),
    ):
        code, stdout, stderr = run(capsys, *command)
        assert (code, stdout) == (2, "") and stderr.startswith(
            line.replace("'memory'", f"{stderr.split()[2]}")
        )
        assert stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert "--require-signature" not in run(capsys, "memorize", "--help")[1]

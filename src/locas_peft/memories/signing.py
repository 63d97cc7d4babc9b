"""Signatures of a memory's files, by OpenSSF model signing, with keys or certificates of one's own; no network.

Two files hold them: `SIGNATURE` is of what `upload_memory` uploads, `TEXT_SIGNATURE` also of the files that can quote
the text, and counts where there are any. The card, checkpoints and caches are not signed.
"""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from peft.utils import WEIGHTS_NAME

from ..checks import first_line, import_extra
from ..files import staged_file
from ..selfstudy.exchanges import EXCHANGES, PASSAGES
from .checkpoint import CHECKPOINT_FOLDER
from .folder import CARD, FILES, SAMPLE, SIGNATURE, TEXT_SIGNATURE

__all__ = ["check_signature", "sign_memory"]

_OUTSIDE = (CARD, CHECKPOINT_FOLDER, ".cache", SIGNATURE, TEXT_SIGNATURE)
_UNSIGNED = {SIGNATURE: (*_OUTSIDE, EXCHANGES, PASSAGES, SAMPLE), TEXT_SIGNATURE: _OUTSIDE}
"""For each file of a signature the files and folders that it leaves out."""
_CURVES = "on the curve P-256, P-384 or P-521"


def sign_memory(
    directory: str | Path, key: str | Path, certificate: str | Path | None = None
) -> list[str]:
    """Write the signatures of a memory's folder, in place of former ones; return the names of the files they cover.

    Args:
        key: PEM file with a private key on the curve P-256, P-384 or P-521, without a password.
        certificate: PEM file with the key's certificate, then those of its issuers.

    Raises:
        ValueError: the package model-signing is missing, or a file cannot be used.
    """
    folder, package = Path(directory), import_extra("model_signing", "sign", "a signature")
    config = package.signing.Config()
    rule = (
        f"key must be a PEM file with a private key {_CURVES} without a password, got {str(key)!r}"
    )
    with _explained(rule, "make one with openssl ecparam -name prime256v1 -genkey -noout"):
        if certificate is None:
            config.use_elliptic_key_signer(private_key=key)
        else:
            chain = {"signing_certificate": certificate, "certificate_chain": [certificate]}
            config.use_certificate_signer(private_key=key, **chain)
    for name, unsigned in _UNSIGNED.items():
        config.set_hashing_config(package.hashing.Config().set_ignored_paths(paths=unsigned))
        with (
            staged_file(folder / name) as file,
            _explained(f"memory {str(folder)!r} cannot be signed", "copy it"),
        ):
            config.sign(folder, file)
    return _list_signed(json.loads((folder / TEXT_SIGNATURE).read_bytes()))


def check_signature(directory: str | Path, key: str | Path) -> list[str]:
    """Return the names of the files in a memory's folder that the owner of a key has signed; no tensor is parsed.

    Args:
        key: PEM file with the public key, or with the certificates of the authorities that are trusted.

    Raises:
        ValueError: the memory is not signed, by another key, or by a certificate that has expired since; a file was
            changed, added or removed; the key cannot be used, or the package model-signing is missing.
    """
    folder, package = Path(directory), import_extra("model_signing", "sign", "a signature")
    config = package.verifying.Config()
    rule = f"key must be a PEM file with a public key {_CURVES}, or with certificates, got {str(key)!r}"
    with _explained(rule, "make one from the private key with openssl ec -pubout"):
        certified = b"BEGIN CERTIFICATE" in Path(key).read_bytes()
        if certified:
            config.use_certificate_verifier(certificate_chain=[key])
        else:
            config.use_elliptic_key_verifier(public_key=key)
    name = (
        TEXT_SIGNATURE if (folder / EXCHANGES).exists() or (folder / SAMPLE).exists() else SIGNATURE
    )
    if not (folder / name).is_file():
        raise ValueError(
            f"memory {str(folder)!r} must be signed, got no {name}: have it signed with locas sign"
        )
    rule = f"memory {str(folder)!r} must be as the owner of {str(key)!r} signed it"
    with _explained(rule, "get it again, or have it signed again"):
        config.set_hashing_config(package.hashing.Config().set_ignored_paths(paths=_UNSIGNED[name]))
        config.verify(folder, folder / name)
        bundle = json.loads((folder / name).read_bytes())
        if certified:
            certificate = bundle["verificationMaterial"]["x509CertificateChain"]["certificates"][0][
                "rawBytes"
            ]
            x509 = import_extra("cryptography.x509", "sign")
            end = x509.load_der_x509_certificate(base64.b64decode(certificate)).not_valid_after_utc
            if end < datetime.now(timezone.utc):  # nothing tells when it was used
                raise ValueError(f"the certificate expired on {end:%Y-%m-%d}")
        signed = _list_signed(bundle)
        # A signature can itself name files that it leaves out.
        for each in {*FILES, WEIGHTS_NAME} - {*_OUTSIDE, *signed}:
            if (folder / each).exists():
                raise ValueError(f"{each} is not signed")
    return signed


@contextmanager
def _explained(rule: str, remedy: str) -> Iterator[None]:
    """Turn an error of any type within the context into a `ValueError` of one line."""
    try:
        yield
    except Exception as error:
        # Of model-signing's list of differences the names of the files, not the digests.
        reason = re.sub(
            r"""^Signature mismatch: \[["']|["']\]$|: Expected.*|\\| See http.*""",
            "",
            first_line(error),
        )
        if isinstance(error, AttributeError | KeyError | TypeError):
            reason = "a key or a signature of another kind"
        raise ValueError(f"{rule} ({reason}): {remedy}") from None


def _list_signed(bundle: dict[str, Any]) -> list[str]:
    payload = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    return sorted(each["name"] for each in payload["predicate"]["resources"])

"""Errors that users can cause, each in one line."""


def invalid(field: str, rule: str, got: object, remedy: str) -> ValueError:
    """Return the error "FIELD must RULE, got GOT: REMEDY"."""
    return ValueError(f"{field} must {rule}, got {got}: {remedy}")

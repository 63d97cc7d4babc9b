"""The one form of an error message about a value that a user has given."""


def invalid(field: str, rule: str, got: object, remedy: str = "") -> ValueError:
    """Return an error with a field, the rule that its value breaks, the value and the remedy."""
    message = f"{field} must {rule}, got {got}"
    if remedy:
        message = f"{message}: {remedy}"
    return ValueError(f"{message}.")

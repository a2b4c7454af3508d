"""What a call raised, as text that a rank can send."""


def raised(function):
    """Type and message of the error that ``function()`` raises; a text that matches none if it raises nothing."""
    try:
        function()
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"

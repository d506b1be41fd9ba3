"""The one kind of error a person can mend: the command line shows its message in one line and exits with code 2."""


class UserError(ValueError):
    """Bad input. The message says what is wrong, where, and what to do."""

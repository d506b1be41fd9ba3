"""The one kind of error a person can mend: the command line shows its message in one line and exits with code 2."""


class UserError(ValueError):
    """Bad input. The message says what is wrong, where, and what to do; ``field`` names the option, where it is one."""

    def __init__(self, message: str, *, field: str | None = None):
        super().__init__(message)
        self.field = field


class PromptTooLong(UserError):
    """A prompt and its new tokens exceed what the model or the engine holds."""

"""The one exception that means: the user can mend this."""


class UserError(ValueError):
    """A mistake in what the user gave: says what was given, what is allowed, and what to do.

    The command line prints it as one line and exits with code 2.
    """

"""The one exception a user is meant to see: the command line prints it as one line and exits with status 2."""


class UserError(ValueError):
    """Bad input. The message names the setting or file, what was given and what is allowed, on one line."""

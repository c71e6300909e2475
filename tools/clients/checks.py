"""What the checks of all clients are made with."""

STORY = [{"role": "user", "content": "Tell me a story about a cat."}]


def collected():
    """A list, and a decorator that puts functions into it."""
    functions = []

    def collect(function):
        functions.append(function)
        return function

    return functions, collect

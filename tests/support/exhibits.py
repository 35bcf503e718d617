"""EXHIBITS holds the wrong forms that shipped: test_museum*.py file them, and judge them.

An exhibit is a function whose docstring says what was wrong. It returns (wrong, right, exact):
`wrong` as it shipped, `right` from this project's public functions, `exact` from the oracle or by
hand. book/museum.py makes an article of each for the book.
"""

from functools import cache, wraps

import torch

from three_policies.oracle import close

EXHIBITS = {}                                       # name → (function, source, equation)


def exhibit(where, equation):
    """File a function under its name, with its source and the equation it violates."""
    return lambda f: EXHIBITS.setdefault(f.__name__, (f, where, equation))


def filed_by(module):
    """Return the names of the exhibits that a test file has filed."""
    return [name for name, (f, _, _) in EXHIBITS.items() if f.__module__ == module]


def once(function):
    """Compute once for equal arguments: exhibits, and the code of their pages, ask for the same."""
    def key(x):
        return ((x.requires_grad, x.detach().numpy().tobytes()) if isinstance(x, torch.Tensor)
                else repr(x))
    found = {}

    @wraps(function)
    def remembered(*arguments, **named):
        asked = *map(key, arguments), *((name, key(x)) for name, x in named.items())
        if asked not in found:
            # The arguments are kept, too: another object at their address would be asked for them.
            found[asked] = function(*arguments, **named), arguments, named
        return found[asked][0]
    return remembered


@cache
def values(name):
    """Return what an exhibit returns, as float64: wrong, right, exact."""
    return tuple(torch.as_tensor(x, dtype=torch.float64).detach() for x in EXHIBITS[name][0]())


def judge(name):
    """Demand that right equals exact to rounding, and that wrong is off by more than 1 %, or NaN.

    It prints the exhibit's entry in the catalogue.
    """
    function, where, equation = EXHIBITS[name]
    wrong, right, exact = values(name)
    error = (wrong - exact).abs().max().item()
    print(f"\n{name.replace('_', ' ')} ({equation}; {where})\n"
          f"    {function.__doc__}\n"
          f"    off by {error:.3g} where the largest number is {exact.abs().max():.3g}")
    assert close(right, exact), f"right is {right}, not {exact}"
    assert not error <= 0.01 * max(exact.abs().max().item(), 0.1), f"wrong is right: {wrong}"
